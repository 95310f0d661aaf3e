"""`include="measured"`: a layer is converted where measured times say that it pays; the
report and `explain` say why.

The times are made up, for CPUs: of a product 1 ns for each of its m k n in BF16 and
half of that in FP8, and of each value that is quantized 36 ns. A square layer then
breaks even at a side of 48 and many rows.
"""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tcfp_jax
from models.nets import families
from models.nets.shapes import GPTConfig
from models.training.settings import TrainConfig
from models.training.steps import make_optimizer
from pallas_kernels import tuning
from pallas_kernels.tuning import Key
from tcfp_jax import paths
from tcfp_jax.conversion import convert_to_tcfp, find_weights, survey
from tcfp_jax.nnx import Optimizer
from tests.helpers import mesh_of, refused, slow

DEVICE = jax.devices()[0].device_kind
ROWS = (4096, 1024)
SIDES = (16, 32, 64, 128)
PRODUCTS = {
    ("dot_general", "bfloat16"): 1.0,
    ("dot_general", "float32"): 1.0,
    ("matmul", "single fast bfloat16"): 0.5,
    ("matmul", "single full bfloat16"): 0.5,
    ("matmul", "single full float32"): 0.5,
}
QUANTIZERS = {("quantize", "both bfloat16"): 36.0, ("quantize", "both float32"): 36.0}


def entry(shape, variant, nanoseconds):
    milliseconds = {"xla": math.prod(shape) * nanoseconds * 1e-6}
    return dict(
        shape=shape,
        variant=variant,
        backend="xla",
        milliseconds=milliseconds,
        configs={},
    )


def table():
    ops = {}
    for (op, variant), each in PRODUCTS.items():
        for m, k, n in itertools.product(ROWS, SIDES, SIDES):
            shape = (k, m, n) if variant.endswith("float32") else (m, k, n)
            ops.setdefault(op, []).append(entry(shape, variant, each))
    for (op, variant), each in QUANTIZERS.items():
        for shape in itertools.product((*ROWS, *SIDES), SIDES):
            ops.setdefault(op, []).append(entry(shape, variant, each))
    return ops


@pytest.fixture
def times(monkeypatch, tmp_path):
    """Function that writes the measured times of this device."""

    def write(ops):
        (tmp_path / "tuned.json").write_text(json.dumps({DEVICE: ops}))
        tuning.load.cache_clear()

    monkeypatch.setattr(tuning, "PATH", tmp_path / "tuned.json")
    write(table())
    yield write
    tuning.load.cache_clear()


class MLP(nn.Module):
    """Layers of 128 x 64, which pays, 64 x 16, which does not, and a head."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, name="wide", use_bias=False)(x))
        return nn.Dense(512, name="head", use_bias=False)(
            nn.Dense(16, name="narrow", use_bias=False)(x)
        )


def shape(*sizes, **options):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, **options)


def reasons(report):
    return {
        record.weight_path: record.reason
        for record in (*report.converted, *report.skipped)
    }


def test_an_estimate_is_exact_at_measured_shapes(times):
    rates = {64: 2.0, 256: 1.0}  # nanoseconds for each m k n
    times(
        {"matmul": [entry((side, 32, 32), "v", each) for side, each in rates.items()]}
    )
    found = {
        m: tuning.estimate(DEVICE, Key("matmul", "v", (m, 32, 32)), "xla")
        for m in (48, 64, 100, 128, 200, 256, 400)
    }
    assert found[64] == 64 * 1024 * 2e-6
    assert found[256] == 256 * 1024 * 1e-6
    # between them, the mean of logarithms
    np.testing.assert_allclose(found[128], 128 * 1024 * math.sqrt(2) * 1e-6)
    assert list(found.values()) == sorted(found.values())
    for m, time in found.items():
        assert 0.999 <= time / (m * 1024e-6) <= 2.001
    for key, backend in (
        # three octaves beyond the largest
        (Key("matmul", "v", (64 * 32, 32, 32)), "xla"),
        (Key("matmul", "another", (64, 32, 32)), "xla"),
        (Key("quantize", "v", (64, 32)), "xla"),
        (Key("matmul", "v", (64, 32, 32)), "mosaic"),
        (Key("matmul", "v", (0, 32, 32)), "xla"),
    ):
        assert tuning.estimate(DEVICE, key, backend) is None


def test_a_pass_takes_as_long_over_the_transpose(times):
    times({"quantize": [entry((64, 1024), "v", 1.0)]})
    assert tuning.estimate(
        DEVICE, Key("quantize", "v", (1024, 64)), "xla"
    ) == pytest.approx(64 * 1024 * 1e-6)


def test_what_was_timed_without_a_backend_says_nothing_of_it(times):
    raced = entry((64, 64, 64), "v", 1.0) | dict(
        milliseconds={"xla": 2.0, "mosaic": 1.0}, backend="mosaic"
    )
    times({"matmul": [raced, entry((8, 8, 8), "v", 1.0)]})
    assert tuning.decline(DEVICE, Key("matmul", "v", (8, 8, 8)), "mosaic") is None
    assert "not timed" in tuning.decline(
        DEVICE, Key("matmul", "v", (8, 8, 8)), "triton"
    )


def test_a_layer_is_converted_if_it_pays_and_the_report_says_why(times):
    x = shape(4096, 128)
    report = survey(convert_to_tcfp(MLP(), "tensorwise", x))
    assert [record.weight_path for record in report.converted] == ["wide/kernel"]
    found = reasons(report)
    bf16 = 3 * 4096 * 128 * 64
    fp8 = 1.5 * 4096 * 128 * 64 + 36 * (4096 * (128 + 64) + 128 * 64)
    speed = (
        f"{bf16 / fp8:.2f} of BF16's speed ({fp8 * 1e-6:.3g} ms against"
        f" {bf16 * 1e-6:.3g}) on cpu at 4096x128x64"
    )
    assert found["wide/kernel"] == speed
    assert f"tensorwise ({speed})" in str(report)
    assert found["narrow/kernel"].startswith("0.6")
    assert "of BF16's speed" in found["narrow/kernel"]
    assert found["head/kernel"].startswith("output head")
    explained = str(tcfp_jax.explain((4096, 128), (128, 64), "tensorwise"))
    assert f"in all      {speed.removesuffix(' at 4096x128x64')}" in explained
    assert f"xla, {0.5 * 4096 * 128 * 64 * 1e-6:.3g} ms" in explained


def test_rules_come_first(times):
    rules = {"wide": None, "narrow": "tcfp12"}
    report = survey(
        convert_to_tcfp(
            MLP(), "tensorwise", shape(4096, 128), rules=rules, include="measured"
        )
    )
    assert [(r.weight_path, r.reason) for r in report.converted] == [
        ("narrow/kernel", "rule 'narrow'")
    ]
    assert reasons(report)["wide/kernel"] == "rule 'wide'"
    both = survey(
        convert_to_tcfp(
            MLP(), "tensorwise", shape(4096, 128), include=("linear", "small")
        )
    )
    assert [record.weight_path for record in both.converted] == [
        "wide/kernel",
        "narrow/kernel",
    ]


def test_a_model_in_which_nothing_pays_runs_as_it_is(times):
    plain = nn.Dense(16, use_bias=False)
    x = jnp.ones((4096, 32))
    model = convert_to_tcfp(plain, "tensorwise", x, include=("measured", "head"))
    assert "of BF16's speed" in survey(model).skipped[0].reason
    assert find_weights(model) == {}
    params = plain.init(jax.random.key(0), x)["params"]
    tx = optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback(find_weights(model)))
    state = {"tcfp": tcfp_jax.layer_state(tx.init(params))}
    got, expected = (
        m.apply({"params": params, **s}, x) for m, s in ((model, state), (plain, {}))
    )
    np.testing.assert_array_equal(got, expected)
    low = tcfp_jax.transform(
        lambda p, x: x @ p["kernel"], "tensorwise", include=("measured", "head")
    )
    np.testing.assert_array_equal(low(params, x), expected)


def test_an_nnx_model_in_which_nothing_pays_runs_as_it_is(times):
    plain = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    x = jnp.ones((4096, 32))
    expected = plain(x)
    model = convert_to_tcfp(plain, "tensorwise", x, include=("measured", "head"))
    Optimizer(model, optax.sgd(0.1))
    assert (model(x) == expected).all()


def test_calls_with_other_rows_choose_as_the_sample_did(times):
    model = convert_to_tcfp(MLP(), "tensorwise", shape(4096, 128))
    few = survey(model, shape(2, 128))  # no time of such a product is known
    assert reasons(few) == reasons(survey(model))
    low = tcfp_jax.transform(
        lambda w, x: x @ w, "tensorwise", include=("measured", "head")
    )
    judged = [
        low.examine(shape(128, 64), shape(rows, 128)).report for rows in (4096, 2)
    ]
    assert [len(report.converted) for report in judged] == [1, 0]
    assert judged[1].skipped[0].reason.startswith("too small to win")


def test_what_was_not_timed_goes_by_size_and_says_so(times):
    ops = table()
    ops["matmul"] = [e for e in ops["matmul"] if e["variant"] != "single full float32"]
    times(ops)
    with refused(r"(?s)too small to win: a side of 64, below 1024.*wide/kernel"):
        convert_to_tcfp(MLP(), "tensorwise", shape(4096, 128))
    report = survey(
        convert_to_tcfp(
            MLP(), "tensorwise", shape(4096, 128), include=("measured", "small")
        )
    )
    why = (
        "matmul (single full float32) near 128x4096x64 was not timed on cpu: its size"
        " decided"
    )
    assert len(report.converted) == 2
    assert report.converted[0].reason == why
    assert why.split(":")[0] in str(
        tcfp_jax.explain((4096, 128), (128, 64), "tensorwise")
    )
    # cuBLASLt pads sizes that are not multiples of 16, which takes longer than any
    # measured product.
    assert "padded" in tcfp_jax.explain((4096, 120), (120, 64), "tensorwise").summary
    ops.pop("dot_general")  # BF16's own
    times(ops)
    with refused("too small to win: a side of 64, below 1024"):
        convert_to_tcfp(MLP(), "tensorwise", shape(4096, 128))


def test_a_device_that_was_not_timed_goes_by_size(times):
    times({})
    model = nn.Sequential([nn.Dense(1024), nn.Dense(256), nn.Dense(3)])
    x = shape(64, 1024)
    reports = [
        survey(convert_to_tcfp(model, "tensorwise", x, **asked))
        for asked in ({}, dict(include="measured"), dict(include="linear"))
    ]
    # The repair that a report names differs: it is the whole of `include`.
    assert len({str(report).split(";")[0] for report in reports}) == 1
    assert len(reports[0].converted) == 1
    explanation = tcfp_jax.explain((64, 32), (32, 32), "tensorwise")
    assert explanation.summary == ""
    assert explanation.speed_over_bf16 is None
    assert "in all" not in str(explanation)


def test_measured_needs_the_rows_of_a_step():
    with refused(
        'include="measured" weighs products at the rows that sample inputs give them'
    ):
        convert_to_tcfp(MLP(), "tensorwise", include=("measured",))
    assert "kernel" in str(
        survey(convert_to_tcfp(nn.Dense(2048), "tensorwise"), shape(4, 2048))
    )


def test_rows_are_those_of_one_device(times):
    mesh = mesh_of(2)
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    whole = survey(convert_to_tcfp(MLP(), "tensorwise", shape(2048, 128)))
    parts = survey(
        convert_to_tcfp(MLP(), "tensorwise", shape(4096, 128, sharding=split))
    )
    assert parts.converted[0].reason == whole.converted[0].reason
    assert "at 2048x128x64" in parts.converted[0].reason


@slow
def test_models_convert_what_pays_in_a_step_of_theirs(times):
    size = GPTConfig(layers=1, width=64, heads=2, context=64)
    recipe = tcfp_jax.recipe("tensorwise")
    model, weights = families.learner(size, recipe, "bfloat16", (64, 64))
    assert sorted(weights) == [
        f"block_0/{name}/kernel" for name in ("mlp_in", "mlp_out", "projection", "qkv")
    ]
    assert reasons(survey(model))["embedding/embedding"] == "rule '^embedding'"
    narrow = dataclasses.replace(size, width=32)
    assert (
        families.learner(narrow, recipe, "bfloat16", (64, 64)).weights.keys()
        < weights.keys()
    )
    config = TrainConfig(size, recipe, include="measured", batch=64, sequence=64)
    plain = families.learner(size, tcfp_jax.recipe("bf16"), "bfloat16").model
    params = plain.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    assert set(paths.entries(make_optimizer(config).init(params)[-1].weights)) == set(
        weights
    )
    assert config.in_bf16.include == "every"
    with refused("include='all' is unknown; use one of"):
        TrainConfig(include="all")
