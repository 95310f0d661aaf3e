"""Hessians of a calibration, and models that multiply by chosen codes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import random
from numpy.testing import assert_allclose

from pallas_kernels.fp4_matmul.reference import quantize_rows
from pallas_kernels.operands import Fp4
from tcfp_jax import matmul, recipe
from tcfp_jax.conversion.convert import convert_to_tcfp, find_weights
from tcfp_jax.conversion.transform import transform
from tcfp_jax.formats import exact_share
from tcfp_jax.inference import (
    choose_codes,
    hessians,
    quantize_params,
    restored,
)
from tcfp_jax.linen import TCFPDense
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.stored import Stored
from tests.fp4_choices import (
    INCLUDE,
    H,
    W,
    X,
    compensated,
    nearest,
    quick,
)
from tests.helpers import normal, refused


def test_hessians_of_a_converted_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.DenseGeneral((4, 8), name="heads")(x)
            return nn.DenseGeneral(8, axis=(-2, -1), name="out")(x)

    x = normal(0, (2, 4, 16))
    model = convert_to_tcfp(Model(), "tensorwise", x, include=INCLUDE)
    params = Model().init(random.key(1), x)["params"]
    found = hessians(model, params, [x, (2 * x,)])
    heads = Model().apply({"params": params}, x, capture_intermediates=True)[1][
        "intermediates"
    ]["heads"]["__call__"][0]
    rows = x.reshape(-1, 16)
    inner = (heads - params["heads"]["bias"]).reshape(-1, 32)
    assert set(found) == {"heads/kernel", "out/kernel"}
    assert_allclose(found["heads/kernel"], 5 * rows.T @ rows, rtol=1e-5, atol=1e-4)
    # biases are zeros
    assert_allclose(found["out/kernel"], 5 * inner.T @ inner, rtol=1e-5, atol=1e-4)


def test_hessians_of_loops_branches_and_experts():
    def call(params, x, wide):
        step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        x, _ = jax.lax.scan(step, x, params["layers"])
        x = jax.lax.cond(wide, lambda x: x @ params["branch"].T, lambda x: x, x)
        return jnp.einsum("emk,ekn->emn", jnp.stack([x, -2 * x]), params["own"])

    key = random.key(0)
    shapes = {"layers": (3, 8, 8), "branch": (8, 8), "own": (2, 8, 4)}
    params = {name: random.normal(key, shape) / 3 for name, shape in shapes.items()}
    low = transform(call, "tensorwise", include=INCLUDE)
    x = normal(1, (5, 8))
    found = hessians(low, params, [(x, jnp.array(True))])
    for layer in range(3):
        assert_allclose(found["layers"][layer], x.T @ x, rtol=1e-5, atol=1e-5)
        x = jnp.tanh(x @ params["layers"][layer])
    assert_allclose(found["branch"], x.T @ x, rtol=1e-5, atol=1e-5)
    x = x @ params["branch"].T
    assert_allclose(
        found["own"], jnp.stack([x.T @ x, 4 * x.T @ x]), rtol=1e-5, atol=1e-5
    )


def test_a_layer_that_multiplies_by_itself_is_named():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="seen")(
                TCFPDense(8, recipe="tensorwise", name="own")(x)
            )

    x = jnp.ones((2, 8))
    model = convert_to_tcfp(Own(), "tensorwise", x, include=INCLUDE)
    params = Own().init(random.key(0), x)["params"]
    with refused("no product of own/kernel is seen; write the layer in Flax's own"):
        hessians(model, params, [x])
    with refused("batches is empty"):
        hessians(model, params, [])


def test_a_model_multiplies_by_the_codes_that_were_chosen():
    """Linen's kernel `[k, n]`, and one that is read transposed."""

    def call(params, x):
        return (x @ params["first"]) @ params["second"].T

    key = random.key(0)
    params = {
        "first": random.normal(key, (16, 8)),
        "second": random.normal(key, (4, 8)),
    }
    x = normal(1, (32, 16)) * (1 / jnp.arange(1.0, 17.0))
    low = transform(call, "nvfp4", include=INCLUDE)
    weights = find_weights(low, params, x)
    moments = hessians(low, params, [x])
    served = quantize_params(params, weights)
    chosen = choose_codes(
        served,
        params,
        weights,
        lambda path, w: compensated(w, moments[path], scales="search"),
    )
    first = (
        compensated(params["first"].T, moments["first"], scales="search").dequantize().T
    )
    second = compensated(
        params["second"], moments["second"], scales="search"
    ).dequantize()
    shapes = jax.eval_shape(lambda: params)
    run = quick(lambda x, stored: low(shapes, x, stored=stored))
    made = run(x, chosen["tcfp"])
    assert_allclose(made, (x @ first).astype(x.dtype) @ second.T, rtol=0.02, atol=0.05)

    def wrong(stored):
        return float(
            np.square(np.asarray(run(x, stored["tcfp"])) - call(params, x)).sum()
        )

    assert wrong(chosen) < 0.8 * wrong(served)
    with refused(r"first is stored with .* use one format"):
        choose_codes(served, params, weights, lambda path, w: nearest(w, Fp4("mxfp4")))
    with refused("no stored weight is FP4"):
        choose_codes({"params": {}, "tcfp": {}}, params, weights, quantize_fp4)


def test_chosen_codes_keep_the_rule_that_they_follow():
    """The FP8 product of "fold_exact" reads the rule of the codes, not the recipe's."""
    params = {"w": jnp.swapaxes(W, 0, 1)}
    folds = Fp4(rule="fold_exact")
    layout = Layout((0,), (1,))
    served = {"tcfp": {"w": Stored(nearest(W), None)}}
    of_rule = functools.partial(recipe, "nvfp4", forward="full")

    def chosen(rule, choose):
        weights = {"w": Weight(of_rule(rule=rule), layout)}
        return choose_codes(served, params, weights, choose)["tcfp"]["w"]

    words = (
        r"w is stored with Fp4.*rule='fold_exact'.* chosen with rule='amax'; choose"
        r" them with rule='fold_exact'"
    )
    with refused(words):
        chosen("fold_exact", lambda path, w: compensated(w, H))
    with refused("are of that rule"):
        chosen(
            "fold_exact",
            lambda path, w: dataclasses.replace(nearest(w, Fp4()), scaling=folds),
        )
    x = X[:8]
    assert chosen("fold_exact", lambda path, w: nearest(w, folds)).scaling == folds
    # x in E4M3 by rows
    rounded = np.asarray(quick(lambda x: quantize_rows(x).dequantize())(x), np.float64)
    for used in (folds, Fp4(rule="four_over_six")):
        made = chosen("amax", lambda path, w, used=used: nearest(w, used))
        assert made.scaling == used
        assert (exact_share(made.forward.scale) == 1) == (used == folds)
        y = quick(lambda x, made: matmul(x, made, recipe=of_rule(rule="amax")))(x, made)
        wanted = rounded @ np.asarray(made.dequantize(), np.float64)
        assert_allclose(y, wanted, atol=1e-5 * abs(wanted).max())


def test_a_restored_checkpoint_gets_no_rule_that_it_breaks():
    made = nearest(W, Fp4())
    layout = Layout((0,), (1,))
    plain = {
        "tcfp": {
            "w": {
                "forward": {
                    "values": made.values,
                    "scale": made.scale,
                    "outer": made.outer,
                }
            }
        }
    }
    assert (
        restored(plain, {"w": Weight(recipe("nvfp4"), layout)})["tcfp"]["w"].scaling
        == Fp4()
    )
    with refused(r"w has .*only .* of that rule.*recipe that .* were quantized by"):
        restored(plain, {"w": Weight(recipe("nvfp4", rule="fold_exact"), layout)})
