"""`explain` records the step that runs: measured times decide, and a named backend is
shown with its reason.
"""

import functools
import json
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest

import tcfp_jax
from pallas_kernels import dispatch, tuning
from pallas_kernels.hopper import plan
from pallas_kernels.matmul import reference
from tests.helpers import parametrize, refusals

SHAPE = (8192, 4096, 16384)
TIMED = ((8192, 4096), (4096, 16384))
SMALL = ((32, 16), (16, 48))
H100 = "NVIDIA H100 80GB HBM3"
NAMED_ALONE = (
    "a CPU runs a kernel only where it is named, in its interpreter if it has one"
)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """An H200 on which the kernels were timed near one shape."""
    config = {"tile_m": 128, "tile_n": 128, "stages": 2, "cluster": 1}
    entries = [
        {
            "shape": SHAPE,
            "variant": variant,
            "backend": min(times, key=times.get),
            "milliseconds": times,
            "configs": {"mosaic": config},
        }
        for variant, times in (
            ("dual fast bfloat16", {"mosaic": 1.2, "xla": 1.4}),
            ("single fast bfloat16", {"mosaic": 0.8, "xla": 0.7}),
        )
    ]
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"NVIDIA H200": {"matmul": entries}}))
    monkeypatch.setattr(tuning, "PATH", path)
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(plan, "SMALLEST_JAX", (0, 10))
    # Kernels for a device that is not there are chosen, and the reference is traced in
    # their place.
    monkeypatch.setattr(dispatch, "_jitted", lambda run: reference.matmul)
    tuning.load.cache_clear()
    yield plan.Config(**config)
    tuning.load.cache_clear()


def calls(*arguments, **options):
    return {call.step: call for call in tcfp_jax.explain(*arguments, **options).steps}


def forward(recipe, x=TIMED[0], w=TIMED[1], **options):
    """The forward product, of a recipe with these options."""
    return calls(x, w, tcfp_jax.recipe(recipe, **options))["forward"]


def test_the_committed_measurements_can_be_read():
    tuning.load.cache_clear()
    for ops in tuning.load().values():
        for entries in ops.values():
            assert all(
                entry.backend == min(entry.milliseconds, key=entry.milliseconds.get)
                for entry in entries
            )


def test_a_cpu_runs_no_kernel_that_is_not_named():
    product = forward("tcfp12", (128, 128), (128, 128))
    assert product.chosen.backend == "xla"
    reasons = {verdict.backend: verdict.reason for verdict in product.verdicts}
    assert reasons == {"mosaic": NAMED_ALONE, "triton": NAMED_ALONE, "xla": None}


def test_the_fastest_that_was_measured_runs_with_its_config(measured):
    explanation = tcfp_jax.explain((8, 1024, 4096), (4096, 16384), "tcfp12")
    found = {call.step: call for call in explanation.steps}
    assert found["forward"].chosen == dispatch.Verdict("mosaic", None, measured)
    assert "mosaic Config(tile_m=128" in str(explanation)
    assert found["wgrad"].verdicts == ()
    # the nearest measurement is the guess
    assert forward("tcfp12", (4096, 8192), (8192, 32768)).chosen.backend == "mosaic"
    assert forward("tcfp12", (2048, 4096), (4096, 100)).chosen.backend == "xla"
    full = forward("tcfp12", forward="full")
    reason = "matmul (dual full bfloat16) was not timed on NVIDIA H200"
    assert full.verdicts[0].reason.startswith(reason)


def test_a_chip_like_one_that_was_timed_has_its_times(measured, monkeypatch):
    monkeypatch.setattr(dispatch, "device_kind", lambda: H100)
    assert tuning.timed_device(H100) == "NVIDIA H200"
    fastest = dispatch.Verdict("mosaic", None, measured)
    assert forward("tcfp12").chosen == fastest
    reason = "xla was fastest at 8192x4096x16384 on NVIDIA H200 (mosaic"
    assert forward("tensorwise").verdicts[0].reason.startswith(reason)
    assert tuning.timed_device("NVIDIA H20") == "NVIDIA H20"
    # Its own times of a variant count as soon as there is one, and estimates are of one
    # device.
    content = json.loads(tuning.PATH.read_text())
    (single,) = (
        entry
        for entry in content["NVIDIA H200"]["matmul"]
        if entry["variant"] == "single fast bfloat16"
    )
    times = {"xla": 0.9, "mosaic": 0.8}
    own = single | {"backend": "mosaic", "milliseconds": times, "configs": {}}
    tuning.PATH.write_text(json.dumps({**content, H100: {"matmul": [own]}}))
    tuning.load.cache_clear()
    assert forward("tensorwise").chosen.backend == "mosaic"
    assert forward("tcfp12").chosen == fastest
    assert tuning.timed_device(H100) == "NVIDIA H200"


def test_a_backend_that_lost_says_its_times_and_runs_when_named(measured):
    single = forward("tensorwise")
    assert single.chosen.backend == "xla"
    reason = "xla was fastest at 8192x4096x16384 (mosaic 0.8 ms, xla 0.7 ms)"
    assert single.verdicts[0].reason == reason
    assert forward("tensorwise", backend="mosaic").chosen.backend == "mosaic"


def test_a_named_backend_that_cannot_run_shows_why(measured):
    recipe = tcfp_jax.recipe("tcfp12", backend="mosaic")
    explanation = tcfp_jax.explain((100, 4096), TIMED[1], recipe)
    (product,) = (call for call in explanation.steps if call.step == "forward")
    assert product.chosen is None
    assert "m=100 must be a multiple of 128" in str(explanation)


PRODUCTS = ["forward", "dgrad", "wgrad"]
ONCE = ["quantize x", "forward", "quantize g", "dgrad", "wgrad", "quantize w"]


@parametrize(
    "recipe, names",
    [
        ("bf16", PRODUCTS),
        ("tcfp12", ONCE),
        ("tensorwise", ONCE),
        ("tcfp12_blockwise", ONCE),
        (
            "rowwise",
            [
                "quantize x",
                "forward",
                "forward",
                "quantize g",
                "dgrad",
                "dgrad",
                "wgrad",
                "wgrad",
                "quantize w",
            ],
        ),
    ],
)
def test_every_step_of_a_layer_is_there(recipe, names):
    explanation = tcfp_jax.explain(*SMALL, recipe, dtype=jnp.float32)
    assert [call.step for call in explanation.steps] == names
    assert str(explanation).startswith(f"on {dispatch.device_kind()}\n")


@parametrize("error_dtype", ["float32", "bfloat16"])
def test_the_optimizers_choices_are_part_of_the_step(error_dtype, monkeypatch):
    feedback = tcfp_jax.error_feedback("tcfp12", error_dtype=error_dtype)
    tx = optax.chain(optax.sgd(1e-3), feedback)
    find = functools.partial(calls, (32, 64), (64, 32), optimizer=tx)
    found = find("tcfp12")["quantize w"]
    assert found.operands == f"float32[64, 32] x {error_dtype}[64, 32]"
    # a device without times
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA L4")
    found = find(tcfp_jax.recipe("tcfp12", backend="xla"))["quantize w"]
    reasons = {verdict.backend: verdict.reason for verdict in found.verdicts}
    assert f"error {error_dtype}) was not timed" in reasons["triton"]
    fresh = tcfp_jax.explain((32, 64), (64, 32), "tcfp12", optimizer=optax.sgd(0.1))
    assert fresh.steps[0].step == "quantize w"  # in the forward pass, without an error


@parametrize(
    "recipe, words",
    [
        (
            "nvfp4_training",
            "emulated    operands are NVFP4 values, which BF16 holds exactly",
        ),
        (
            tcfp_jax.recipe("nvfp4_training", forward_operands="bf16"),
            "operands of dgrad and wgrad are NVFP4",
        ),
    ],
)
def test_fp4_training_says_what_it_emulates(recipe, words):
    explanation = tcfp_jax.explain(*SMALL, recipe)
    assert words in str(explanation)
    assert "no FP4 tensor core runs" in str(explanation)
    products = [call for call in explanation.steps if call.op != "quantize_values"]
    assert [call.step for call in products] == PRODUCTS
    assert len(explanation.steps) > len(products)
    assert all(call.operands.startswith("bfloat16") for call in products)


def test_products_of_packed_fp4_emulate_nothing():
    assert "emulated" not in str(tcfp_jax.explain(*SMALL, "nvfp4"))


def test_nothing_is_said_of_the_speed_of_fp4_training():
    """Its quantizers are not among the operations that are timed, so that the products'
    times are not the layer's.
    """
    found = tcfp_jax.explain(*SMALL, "nvfp4_training")
    times = (1.0,) * len(found.steps)
    timed = replace(found, bf16=found.steps, times=times, bf16_times=times)
    assert timed.speed_over_bf16 is None
    words = "in all      the quantizers of FP4 training were not timed"
    assert words in str(timed)
    assert replace(timed, emulated="").speed_over_bf16 == 1


def test_a_cpu_says_the_truth_about_the_fp4_kernel():
    """Its codes are decoded in PTX, which no interpreter runs: named, it rejects."""
    shapes = ((128, 256), (256, 64))
    assert forward("nvfp4", *shapes).verdicts[0].reason == NAMED_ALONE
    named = forward("nvfp4", *shapes, backend="mosaic")
    assert named.chosen is None
    reason = named.verdicts[0].reason
    assert "PTX" in reason or "older than 0.11" in reason


def test_a_timed_device_that_this_machine_lacks():
    found = tcfp_jax.explain(*TIMED, "tensorwise", device="NVIDIA H200")
    assert found.device == found.timed_on == "NVIDIA H200"
    assert found.speed_over_bf16 > 1
    assert {call.step: call for call in found.steps}["quantize g"].chosen
    assert tcfp_jax.explain(*TIMED, "tensorwise").device == dispatch.device_kind()


def explain(x=(8, 32), w=(32, 64), **options):
    tcfp_jax.explain(x, w, "tcfp12", **options)


test_mistakes = refusals(
    {
        ValueError: {
            r"x\[8, 32\] @ w\[16, 64\]": lambda: explain(w=(16, 64)),
            "must be shapes": lambda: explain(w=64),
            "device='NVIDIA L4' was not timed; use one of .*'NVIDIA H200'": lambda: (
                explain(device="NVIDIA L4")
            ),
        },
    }
)
