"""`diagnose`, and inference weights."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax.adapters import kernel_of
from tcfp_jax.conversion import convert_to_tcfp, find_weights, register_adapter
from tcfp_jax.diagnosis import MEASURED, SHAPES, diagnose
from tcfp_jax.inference import quantize_params
from tcfp_jax.linen import TCFPDense

X = jax.random.normal(jax.random.key(0), (4, 32))
ROOT = Path(__file__).parents[1]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((4, 8), name="heads")(x)
        x = nn.DenseGeneral(32, axis=(-2, -1), name="out")(x)
        return nn.Dense(8, name="lm_head")(x) @ self.param("extra", nn.initializers.normal(), (8, 8))


def test_diagnose_says_what_would_happen(capsys):
    params = Model().init(jax.random.key(1), X)["params"]
    found = diagnose(Model(), X, recipe="tcfp12_fast", params=params)
    text = capsys.readouterr().out
    assert str(found) in text and "product that no adapter sees" in text and "total, eligible" in text
    lines = {line.path: line for line in found.lines}
    assert set(lines) == {"heads", "out", "lm_head"} and "too small" in lines["out"].reason
    assert "output head" in lines["lm_head"].reason and 60 < lines["heads"].snr_db < 68
    out = lines["out"]
    sizes = (out.parameters, out.bytes_bf16, out.bytes_fp32, out.bytes_stored, out.bytes_with_error)
    assert sizes == (1024, 2048, 4096, 4 * 1024 + 4, 8 * 1024 + 4)


def test_diagnose_leaves_an_nnx_model_as_it_was(capsys):
    model = flax_nnx.Linear(32, 8, precision=None, rngs=flax_nnx.Rngs(0))
    found = diagnose(model, X, recipe="tensorwise")
    assert type(model) is flax_nnx.Linear and found.lines[0].snr_db > 25
    assert found.lines[0].speed_up == MEASURED["tensorwise"][0]  # that of the smallest shape measured
    with pytest.raises(ValueError, match="sample inputs"):
        diagnose(model)


def test_predictions_are_what_was_measured():
    rows = json.loads((ROOT / "benchmarks/results/nvidia-h200/train_step.json").read_text())["rows"]
    found = {(r["recipe"], r["shape"]): r["speed_over_bf16"] for r in rows if r["part"] == "mlp"}
    for recipe, speeds in MEASURED.items():
        for shape, speed in zip(SHAPES, speeds, strict=True):
            key = (recipe, "x".join(map(str, shape)))
            if key in found:
                assert abs(found[key] - speed) < 0.1, f"measured {found[key]:.2f}: update diagnosis.MEASURED"


@pytest.mark.parametrize("recipe", ["tcfp12", "tensorwise"])
@pytest.mark.parametrize("storage", ["recipe", "packed"])
def test_inference_weights_replace_the_float_kernels(recipe, storage, tmp_path):
    import orbax.checkpoint

    params = jax.jit(Model().init)(jax.random.key(1), X)["params"]
    model = convert_to_tcfp(Model(), recipe, X, include=("linear", "small"))
    served = quantize_params(params, find_weights(model), storage=storage)
    assert "kernel" not in served["params"]["heads"] and "kernel" in served["params"]["lm_head"]
    apply = jax.jit(model.apply)
    expected, y = apply({"params": params}, X), apply(served, X)
    tolerance = 1e-6 if storage == "recipe" else 0.05 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "served", served)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), served)
        loaded = checkpointer.restore(tmp_path / "served", shapes)
    assert jnp.array_equal(apply(loaded, X), y)


class Transposed(nn.Module):
    param_dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.normal(), (8, x.shape[-1])).T


def test_an_adapter_needs_kernel_of_for_inference_weights():
    params = Transposed().init(jax.random.key(1), X)["params"]
    init = nn.initializers.normal()
    reads = {
        "float": lambda layer, x: layer.param("kernel", init, (8, x.shape[-1])),
        "either": lambda layer, x: kernel_of(layer, "kernel", init, (8, x.shape[-1])),
    }
    for name, read in reads.items():
        register_adapter(Transposed, lambda layer, multiply, x: multiply("...k,nk->...n", x, read(layer, x)))
        model = convert_to_tcfp(Transposed(), "tcfp12", X, include=("linear", "small"))
        served = quantize_params(params, find_weights(model))
        if name == "float":
            with pytest.raises(NotImplementedError, match="kernel_of"):
                model.apply(served, X)
        else:
            assert jnp.array_equal(model.apply(served, X), model.apply({"params": params}, X))


def test_inference_weights_of_bad_input():
    params = {"kernel": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="storage"):
        quantize_params(params, "tcfp12", storage="hi")
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize_params(params, "bf16")
    params["bias"] = jnp.zeros(4)
    served = quantize_params(params, "tcfp12")
    layer = TCFPDense(4)
    assert jnp.array_equal(layer.apply(served, X[:, :4]), layer.apply({"params": params}, X[:, :4]))
