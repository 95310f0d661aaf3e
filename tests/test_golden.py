"""Bits of every quantizer and every recipe's step, as they were before the house was rebuilt..

`GOLDEN_WRITE=1 pytest tests/test_golden.py` writes `tests/data/golden.json`.
"""

import hashlib
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize.api import quantize

PATH = Path(__file__).parent / "data" / "golden.json"
RNG = np.random.default_rng(7)
X = (RNG.standard_normal((128, 256)) * np.exp(RNG.standard_normal((128, 256)))).astype(np.float32)
W = (RNG.standard_normal((256, 128)) * 0.06).astype(np.float32)
G = (RNG.standard_normal((128, 128)) * 1e-3).astype(np.float32)
E = (RNG.standard_normal((256, 128)) * 1e-5).astype(np.float32)
BITS = RNG.integers(0, 2**32, (256, 128), dtype=np.uint32)
NAMES = (
    "bf16", "tcfp12", "tcfp12_fast", "tensorwise", "rowwise", "blockwise", "tcfp12_blockwise", "mxfp8",
    "residual_activation",
)  # fmt: skip


def digest(value):
    array = np.asarray(value)
    kind = "" if array.dtype.itemsize == 1 else str(array.dtype)
    return hashlib.sha256(kind.encode() + str(array.shape).encode() + array.tobytes()).hexdigest()[:16]


def of(q, **more):
    found = dict(values=q.rows.values, scale=q.rows.scale, turned=q.columns.values)
    return found | more


def quantizers():
    """(name, arrays by name) of every quantizer, on both backends that run here."""
    for backend in ("xla", "triton"):
        for dtype in ("float8_e4m3fn", "float8_e5m2"):
            for scale in ("pow2", "float32"):
                q = quantize(X, dtype, Tensor(scale), orientation="both", backend=backend)
                yield f"tensor {backend} {dtype} {scale}", of(q)
            for block in (32, 64, 128):
                for tile in ("vector", "square"):
                    q = quantize(X, dtype, Block(block, tile), orientation="both", backend=backend)
                    yield f"block {backend} {dtype} {block} {tile}", of(q, turned_scale=q.columns.scale)
        for name, options in dict(
            plain={}, error=dict(error=E), bits=dict(bits=BITS), amax=dict(amax=jnp.float32(0.1)),
            bfloat16=dict(error=E.astype(jnp.bfloat16)),
        ).items():  # fmt: skip
            for block in (None, 32, 64, 128):
                if block is not None and name == "amax":
                    continue
                q = dual_quantize(
                    W, Block(block) if block else Tensor(), orientation="both", backend=backend, **options
                )
                r, c = q.rows, q.columns
                found = dict(hi=r.hi, lo=r.lo, scale=r.scale, hi_turned=c.hi, lo_turned=c.lo)
                found |= {} if q.error is None else dict(error=q.error)
                if block:
                    assert np.array_equal(c.scale.T, r.scale) and np.array_equal(c.lo_scale.T, r.lo_scale)
                    found["lo_scale"] = r.lo_scale
                yield f"{'block ' if block else ''}dual {backend} {name}{f' {block}' if block else ''}", found
    for scale in ("pow2", "float32"):
        q = quantize(X, "float8_e4m3fn", Row(scale), orientation="both")
        yield f"row {scale}", of(q, turned_scale=q.columns.scale)


RECIPES = {
    **{name: tcfp_jax.recipe(name) for name in NAMES},
    "tcfp12 fp8 wgrad": tcfp_jax.recipe("tcfp12", wgrad="full"),
    "tcfp12 delayed": tcfp_jax.recipe("tcfp12", amax="delayed"),
    "tcfp12 stochastic": tcfp_jax.recipe("tcfp12", remainder="stochastic"),
    "tcfp12 one copy": tcfp_jax.recipe("tcfp12_fast", copies="one"),
    "tensorwise feedback": tcfp_jax.recipe("tensorwise", remainder="feedback", scale="float32"),
    "weights only": tcfp_jax.Recipe.from_flags(use_tensor_cores=False),
    "blockwise 32": tcfp_jax.recipe("blockwise", block=32),
    "tcfp12 nonzero": tcfp_jax.recipe("tcfp12_blockwise", residual_blocks="nonzero"),
}


def step(recipe, dtype):
    x, g = jnp.asarray(X, dtype), jnp.asarray(G, dtype)
    key = jax.random.key(3) if recipe == RECIPES["tcfp12 stochastic"] else None
    y, vjp = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe, key=key), x, jnp.asarray(W))
    return dict(zip(("y", "dx", "dw"), (y, *vjp(g))))


def trained(recipe):
    """The product by weights that the optimizer quantized, after three updates, and their values."""
    if recipe == RECIPES["bf16"]:
        return {}
    key = jax.random.key(5) if recipe == RECIPES["tcfp12 stochastic"] else None
    tx = optax.chain(optax.sgd(0.3), tcfp_jax.error_feedback(recipe, key=key))
    params = {"kernel": jnp.asarray(W)}
    state = tx.init(params)

    def one(params, state, _):
        y, vjp = jax.vjp(
            lambda p: tcfp_jax.matmul(X, p["kernel"], recipe=recipe, quantized=tcfp_jax.layer_state(state)["kernel"]),
            params,
        )
        updates, state = tx.update(vjp(G)[0], state, params)
        return optax.apply_updates(params, updates), state, y

    for i in range(3):
        params, state, y = jax.jit(one)(params, state, i)
    weight = tcfp_jax.layer_state(state)["kernel"]
    return dict(y=y, w=params["kernel"], weight=weight.dequantize())


def measured():
    found = {name: {k: digest(v) for k, v in arrays.items()} for name, arrays in quantizers()}
    for name, recipe in RECIPES.items():
        for dtype in ("float32", "bfloat16"):
            found[f"step {name} {dtype}"] = {
                k: digest(v) for k, v in jax.jit(step, static_argnums=(0, 1))(recipe, dtype).items()
            }
        found[f"trained {name}"] = {k: digest(v) for k, v in trained(recipe).items()}
    return found


pytestmark = pytest.mark.optimized


@pytest.mark.skipif("GOLDEN_WRITE" not in os.environ, reason="writes the golden file only where GOLDEN_WRITE is set")
def test_write():
    PATH.write_text(json.dumps(measured(), indent=1, sort_keys=True) + "\n")


def test_bits_are_those_of_the_first_edition():
    golden, found = json.loads(PATH.read_text()), measured()
    assert set(golden) == set(found)
    wrong = {name: (golden[name], found[name]) for name in golden if golden[name] != found[name]}
    assert not wrong, wrong
