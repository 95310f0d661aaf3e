"""States and results are the same with `jax_enable_x64`, also of Python's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from pallas_kernels.operands import Fp4
from tcfp_jax import formats, monitor
from tcfp_jax.inference import gptq, quantize_params, search_scales
from tcfp_jax.optim import adamw, low_precision_moments, on_stored
from tests.helpers import parametrize, same_bits, slow_except

pytestmark = pytest.mark.usefixtures("standard_promotion")
RNG = np.random.default_rng(0)
W, X, H = (
    RNG.standard_normal(shape).astype(np.float32)
    for shape in ((64, 128), (8, 64), (128, 128))
)


def key():  # made anew in each mode
    return jax.random.key(3)


def stored(recipe="tcfp12_single", **options):
    made = dict(key=key()) if options.get("remainder") != "feedback" else {}
    return tcfp_jax.store({"kernel": jnp.asarray(W)}, recipe, **made, **options)


def trained(params, tx):
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update({"kernel": jnp.asarray(W)}, state, params)
        params = tcfp_jax.apply_updates(params, updates)
    return params, state


def fed_back(recipe, **options):
    params = {"kernel": jnp.asarray(W)}
    tx = tcfp_jax.error_feedback(recipe, **options)
    return tx.update(params, tx.init(params), params)


def multiplied(recipe, **options):
    def product(w, x):
        return jnp.sum(jnp.sin(tcfp_jax.matmul(x, w, recipe=recipe, **options)))

    return jax.value_and_grad(product, (0, 1))(jnp.asarray(W), jnp.asarray(X))


def read():
    def loss(params, x):
        return jnp.sum(tcfp_jax.matmul(x, params["kernel"], recipe="tcfp12"))

    return monitor.value_and_grad(loss)({"kernel": jnp.asarray(W)}, jnp.asarray(X))


CASES = {
    "store": stored,
    "store in blocks": lambda: stored("tcfp12_blockwise"),
    "store with feedback": lambda: trained(
        stored(remainder="feedback"), on_stored(optax.sgd(0.1))
    ),
    "adamw": lambda: trained(stored(), adamw(1e-2, key=key(), max_norm=1.0)),
    "low_precision_moments": lambda: low_precision_moments(
        optax.adam(0.1), key=key()
    ).init({"w": jnp.asarray(W)}),
    "error_feedback": lambda: fed_back("tcfp12", error_dtype="float8_e5m2"),
    "error_feedback of stale scales": lambda: fed_back(
        tcfp_jax.recipe("tcfp12", amax="delayed")
    ),
    "error_feedback of FP4": lambda: fed_back("nvfp4"),
    "tensorwise": lambda: multiplied("tensorwise"),
    "mxfp8": lambda: multiplied("mxfp8"),
    "nvfp4": lambda: multiplied("nvfp4"),
    "nvfp4_training": lambda: multiplied("nvfp4_training", key=key()),
    "readings": read,
    "serving": lambda: quantize_params({"kernel": jnp.asarray(W)}, "nvfp4"),
    "search_scales": lambda: search_scales(jnp.asarray(W), Fp4("mxfp4")),
    "gptq": lambda: gptq(jnp.asarray(W), jnp.asarray(H @ H.T)),
    "quantize_tcfp12": lambda: tcfp_jax.quantize_tcfp12(jnp.asarray(W), scale="sigma"),
    "cast": lambda: formats.cast(
        jnp.asarray(W), formats.nvfp4, roundmode="stochastic", key=key()
    ),
    "pack": lambda: formats.pack(jnp.asarray(W), formats.mxfp4e2),
    "sparse": lambda: formats.sparse(jnp.asarray(W), 4, 2),
}


@slow_except("adamw", "error_feedback of stale scales", "nvfp4", "gptq", "cast", "pack")
@parametrize("name", CASES)
def test_nothing_becomes_wider(name):
    narrow = jax.jit(CASES[name])()
    with jax.enable_x64(True):
        # A function of its own, or the first trace would serve
        wide = jax.jit(lambda: CASES[name]())()
    assert jax.tree.map(lambda x: x.dtype, wide) == jax.tree.map(
        lambda x: x.dtype, narrow
    )
    assert same_bits(wide, narrow)
