"""The ops against NumPy in float64: `quantize`, `dual_quantize`, `matmul` and the dispatch between backends."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation, choose, explain
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul.api import matmul
from pallas_kernels.quantize.api import quantize

X = jax.random.normal(jax.random.key(0), (32, 48)) * 3
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
pytestmark = pytest.mark.usefixtures("quick_compiles")


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.optimized
@pytest.mark.parametrize("dtype, largest", [(ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)])
def test_float32_rule_is_the_numpy_formula(dtype, largest):
    for x in (np.asarray(X), np.zeros((4, 4), np.float32), np.asarray(X) * np.float32(1e30)):
        multiplier = np.float32(largest / max(np.float64(np.abs(x).max()), 1e-12))
        got = jax.jit(lambda x: quantize(x, dtype, scale="float32"))(x)
        assert got.scale == np.float32(1) / multiplier
        assert same_bits(got.values, np.clip(x * multiplier, -largest, largest).astype(dtype))


@pytest.mark.parametrize("shape", [(32, 48), (2, 3, 8), (5,), (0, 4)], ids=str)
def test_transposed_copy_has_the_last_axis_first(shape):
    values, _, transposed = quantize(jnp.ones(shape), E4M3, orientation="both")
    assert same_bits(transposed, np.moveaxis(np.asarray(values), -1, 0))


@pytest.mark.optimized
def test_dual_quantize_is_the_formula_and_loses_nothing():
    error = jax.random.normal(jax.random.key(1), X.shape) * 1e-4
    q = dual_quantize(X, error=error, orientation="both")
    target = np.asarray(X + error)
    hi = np.asarray(target / q.scale, np.float32).astype(ml_dtypes.float8_e4m3fn)
    lo = (np.float64(target) / float(q.scale) - np.float64(hi)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    assert same_bits(q.hi, hi) and same_bits(q.lo, lo)
    assert same_bits(q.hi_transposed, hi.T) and same_bits(q.lo_transposed, lo.T)
    whole = (np.float64(hi) + np.float64(lo)) * float(q.scale) + np.float64(q.error)
    assert np.array_equal(whole, np.float64(target))


def test_what_a_stale_scale_clips_is_caught_by_lo():
    fresh, stale = (dual_quantize(X, amax=jnp.max(jnp.abs(X)) * jnp.float32(f)) for f in (1, 0.5))
    assert float(jnp.max(jnp.abs(stale.hi.astype(jnp.float32)))) == 448
    for q in (fresh, stale):
        left = X - (q.hi.astype(jnp.float32) + q.lo.astype(jnp.float32)) * q.scale
        assert float(jnp.linalg.norm(left)) < 10 ** (-50 / 20) * float(jnp.linalg.norm(X))  # 50 dB


@pytest.mark.optimized
def test_transformations_change_no_bit():
    bits = jax.random.bits(jax.random.key(2), X.shape)
    for call in (lambda x: dual_quantize(x, error=x * jnp.float32(1e-3)), lambda x: dual_quantize(x, bits=bits)):
        expected = call(X)
        jitted = jax.jit(call)(X)
        mapped = jax.tree.map(lambda a: a[1], jax.vmap(call)(jnp.stack([X * 2, X])))
        scanned = jax.tree.map(lambda a: a[0], jax.lax.scan(lambda c, x: (c, call(x)), 0, X[None])[1])
        remat = jax.jit(jax.checkpoint(call))(X)
        for other in (jitted, mapped, scanned, remat):
            assert all(same_bits(a, b) for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("x_dtype, w_dtype", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("form", ["single", "dual"])
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_matmul_is_within_its_bound(x_dtype, w_dtype, form, out_dtype):
    x, w = quantize(X, x_dtype), dual_quantize(X[:16], dtype=w_dtype)
    lo = w.lo if form == "dual" else None
    got = matmul(x.values, w.hi, lo, scale=x.scale * w.scale, out_dtype=out_dtype)
    a = np.float64(x.values) * float(x.scale)
    b = (np.float64(w.hi) + (0 if lo is None else np.float64(lo))) * float(w.scale)
    eps = float(jnp.finfo(out_dtype).eps)
    assert got.dtype == out_dtype
    assert np.all(np.abs(np.float64(got) - a @ b.T) <= 4 * max(eps, 2.0**-21) * (np.abs(a) @ np.abs(b.T)))


def test_matmul_contracts_every_trailing_axis():
    x, w = (quantize(X.reshape(4, 8, 48), E4M3, orientation="both").transposed for _ in range(2))
    got = matmul(x, w, scale=jnp.float32(1), out_dtype=jnp.float32)
    flat = matmul(x.reshape(48, 32), w.reshape(48, 32), scale=jnp.float32(1), out_dtype=jnp.float32)
    assert got.shape == (48, 48) and jnp.allclose(got, flat, rtol=1e-6)


def test_bad_operands_raise():
    x, w = quantize(X, E4M3).values, quantize(X, E5M2).values
    one = jnp.float32(1)
    with pytest.raises(NotImplementedError, match="no tensor core"):
        matmul(w, w, scale=one)
    with pytest.raises(ValueError, match=r"x\[32, 48\] and w\[48, 32\]"):
        matmul(x, x.T, scale=one)
    with pytest.raises(ValueError, match="both halves must match"):
        matmul(x, x, w, scale=one)
    with pytest.raises(TypeError, match="not an FP8 format"):
        matmul(X, x, scale=one)
    with pytest.raises(TypeError, match="not uint32"):
        dual_quantize(X, bits=jnp.zeros(X.shape, jnp.int32))
    with pytest.raises(ValueError, match="error has shape"):
        dual_quantize(X, error=X[:2])
    for options in (dict(scale="amax"), dict(orientation="columns"), dict(backend="cuda")):
        with pytest.raises(ValueError, match="unknown"):
            quantize(X, E4M3, **options)


def test_a_backend_that_is_not_there_says_so():
    for call in (lambda: quantize(X, E4M3, backend="mosaic"), lambda: dual_quantize(X, backend="mosaic")):
        with pytest.raises(NotImplementedError, match="has no 'mosaic' implementation"):
            call()


def test_none_takes_the_first_that_accepts():
    table = (
        Implementation("mosaic", lambda k: "mosaic", lambda k: f"k={k} is no multiple of 16" if k % 16 else None),
        Implementation("xla", lambda k: "xla"),
    )
    assert choose("op", table, None, 32).backend == "mosaic" and choose("op", table, None, 5).backend == "xla"
    with pytest.raises(NotImplementedError, match="mosaic: k=5 is no multiple of 16"):
        choose("op", table, "mosaic", 5)


def test_what_declines_runs_only_when_it_is_named():
    table = (
        Implementation("mosaic", lambda k: "mosaic", decline=lambda k: "slower here"),
        Implementation("triton", lambda k: "triton"),
        Implementation("xla", lambda k: "xla"),
    )
    assert choose("op", table, None, 1).backend == "triton"
    assert choose("op", table, "mosaic", 1).backend == "mosaic"
    assert [v.reason for v in explain(table, None, 1)] == ["slower here", None, "triton comes first"]
    assert explain(table, "xla", 1)[0].reason == "backend='xla' was asked for"
