"""`diagnose`: its lines for each layer, and the origin of its predictions."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax.conversion.diagnosis import MEASURED, _predict, diagnose
from tcfp_jax.recipes import NAMES
from tcfp_jax.recipes import recipe as named_recipe
from tests.helpers import nnx_model, parametrize, refused, variables_of

X = jnp.zeros((4, 32))
ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((4, 8), name="heads")(x)
        x = nn.DenseGeneral(32, axis=(-2, -1), name="out")(x)
        return (
            nn.Dense(64, name="makes_the_output")(x)
            * self.param("extra", nn.initializers.normal(), (8, 8)).sum()
        )


def test_diagnose_says_what_would_happen(capsys):
    params = variables_of(Model(), X)["params"]
    found = diagnose(Model(), X, recipe="tcfp12_fast", params=params)
    with refused(r'pass variables\["params"\]'):
        diagnose(Model(), X, recipe="tcfp12_fast", params={"params": params})
    text = capsys.readouterr().out
    assert str(found) in text
    assert "total, eligible" in text
    lines = {line.path: line for line in found.lines}
    assert set(lines) == {"heads/kernel", "out/kernel", "makes_the_output/kernel"}
    assert "too small" in lines["out/kernel"].reason
    assert 60 < lines["heads/kernel"].snr_db < 68
    assert "output head" in lines["makes_the_output/kernel"].reason
    out = lines["out/kernel"]
    sizes = (
        out.parameters,
        out.bytes_bf16,
        out.bytes_fp32,
        out.bytes_stored,
        out.bytes_with_error,
    )
    # Two halves in two orientations, each of which has its scale, and a sample of 16
    # values.
    assert sizes == (1024, 2048, 4096, 4 * 1024 + 2 * 4 + 64, 8 * 1024 + 2 * 4 + 64)


@parametrize(
    ("recipe", "words"),
    [
        (
            "tensorwise",
            "from .* operations a product .*, the smallest that was measured",
        ),
        ("tcfp12", "at none of the sizes that were measured"),
        ("mxfp8", "was not measured against BF16"),
    ],
)
def test_sizes_and_recipes_that_were_not_measured_have_no_speed(recipe, words, capsys):
    assert re.search(
        rf"{recipe} (is faster than BF16 on an NVIDIA H100 )?{words}",
        str(diagnose(Model(), X, recipe=recipe)),
    )


def test_a_weight_of_several_products_is_counted_once():
    def tied(params, x):
        return jax.nn.relu(x @ params["a"]) @ params["a"].T @ params["b"] @ params["b"]

    found = diagnose(
        tied, {"a": jnp.ones((32, 2048)), "b": jnp.ones((32, 32))}, jnp.ones((8, 32))
    )
    assert [line.path for line in found.lines] == ["a", "a", "b", "b"]
    total = next(
        line for line in str(found).splitlines() if line.startswith("total, all")
    )
    wanted = [found.lines[0], found.lines[2]]
    sums = [
        sum(getattr(line, name) for line in wanted)
        for name in ("parameters", "bytes_bf16", "bytes_fp32")
    ]
    assert total.split()[7:10] == [f"{number:,}" for number in sums]
    assert "4 products of 2 weights" in total


def test_fp4_has_the_noise_and_the_e4m3_share_of_its_blocks(capsys):
    """Blocks lie along k of the kernel's own matrix, here of an odd k."""
    layer = nn.DenseGeneral((4, 8), use_bias=False)
    x = jnp.zeros((2, 33))
    kernel = np.random.default_rng(0).standard_normal((33, 4, 8)).astype(np.float32)
    folded = named_recipe("nvfp4", rule="fold_exact")

    def line(recipe, kernel=kernel):
        return diagnose(layer, x, recipe=recipe, params={"kernel": kernel}).lines[0]

    assert line(folded).exact == 1
    assert "(E4M3 holds 100.0% of its blocks)" in capsys.readouterr().out
    plain = line("nvfp4")
    assert 0.2 < plain.exact < 0.5
    assert 20 < plain.snr_db < 21
    assert 20 < line(folded).snr_db < 21.5
    # Blocks lie along k, so a small output does not share a scale with a large one.
    uneven = kernel * np.where(np.arange(32) % 2, 1, 1e-2).reshape(4, 8)
    assert 20 < line("nvfp4", uneven).snr_db < 21
    # FP4 training stores nothing, and an emulation has neither BF16's speed nor its
    # noise.
    trained = line("nvfp4_training")
    assert (trained.snr_db, trained.speed_up, trained.exact) == (None, None, None)


def test_diagnose_leaves_an_nnx_model_as_it_was(capsys):
    model = nnx_model(lambda rngs: flax_nnx.Linear(32, 8, rngs=rngs))
    found = diagnose(model, X, recipe="tensorwise")
    assert type(model) is flax_nnx.Linear
    assert found.lines[0].snr_db > 25
    # the smallest shape that was measured
    assert found.lines[0].speed_up == _predict(named_recipe("tensorwise"), 1.0)
    with refused("sample inputs"):
        diagnose(model)


def test_predictions_are_what_was_measured():
    """The file in the wheel holds exactly what `benchmarks.train_step` measured of
    named recipes.
    """
    results = json.loads(
        (ROOT / "benchmarks/results/nvidia-h100-80gb-hbm3/train_step.json").read_text()
    )
    expected = {}
    for row in results["rows"]:
        if row["part"] == "mlp" and row["recipe"] in set(NAMES) - {"bf16"}:
            point = {"shape": [int(size) for size in row["shape"].split("x")]}
            expected.setdefault(row["recipe"], []).append(
                point | {"speed_over_bf16": round(row["speed_over_bf16"], 4)}
            )
    assert {"tensorwise", "tcfp12", "tcfp12_fast"} <= set(expected)
    assert json.loads(MEASURED.read_text()) == {results["header"]["device"]: expected}
    for name, points in expected.items():
        for point in points:
            predicted = _predict(named_recipe(name), 2 * math.prod(point["shape"]))
            assert predicted == pytest.approx(point["speed_over_bf16"])


def test_what_was_not_measured_is_not_predicted():
    assert _predict(named_recipe("mxfp8"), 1e12) is None
    assert _predict(named_recipe("tensorwise"), 0) is None
    assert _predict(named_recipe("bf16"), 1e12) == 1
