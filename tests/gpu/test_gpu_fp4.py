"""The decode kernel of FP4 weights on a GPU: every scale byte times every code, all shapes, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.weights.fp4 import quantize_fp4

pytestmark = [
    pytest.mark.gpu,
    # Weights are quantized by such a kernel.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
SCALINGS = [Fp4(), Fp4(tile="square"), Fp4("mxfp4")]


@functools.cache
def operands(scaling, n, k):
    w = jax.random.normal(jax.random.key(0), (n, k))
    return jax.jit(quantize_fp4, static_argnums=1)(w, scaling), jax.random.normal(jax.random.key(1), (64, k))


def exact(q):
    """Codes times scales, float64: what products add."""
    numbers = np.asarray(fp4.numbers(fp4.unpack(q.values)), np.float64)
    return numbers * np.asarray(q.scaling.spread(q.scale, q.shape), np.float64)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_every_scale_times_every_code_goes_through_the_kernel(form):
    scaling = Fp4(form)
    block, k = scaling.block, 16 * scaling.block
    # Each of 256 rows has one scale byte and all codes; x picks out one value after another.
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, k // 16))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], k // block, axis=1)
    scale = jax.lax.bitcast_convert_type(jnp.asarray(scales), scaling.scale_dtype)
    outer = jnp.float32(1) if scaling.has_outer else None
    w = Operand(fp4.pack(jnp.asarray(codes)), scale, scaling=scaling, outer=outer)
    for first in (0, block + 16, k - 16):  # 16 values that stand at other places of a step
        x = jnp.zeros((16, k), jnp.bfloat16).at[jnp.arange(16), first + jnp.arange(16)].set(1)
        y = np.asarray(fp4_matmul(x, w, out_dtype=jnp.float32, backend="mosaic"))
        numbers = np.asarray(scale[:, 0].astype(jnp.float32), np.float64)
        # 6 * 2**126 is beyond bfloat16, and what is infinite is NaN times an x of zero.
        broken = ~(6 * np.abs(numbers) < 2.0**128)
        assert not np.isfinite(y[:, broken]).all(axis=0).any()
        # Below its normal numbers a tensor core may flush.
        expected = np.multiply.outer(fp4.E2M1.astype(np.float64), numbers[~broken])
        normal = (np.abs(expected) < 2.0**127) & ((np.abs(expected) >= 2.0**-120) | (expected == 0))
        np.testing.assert_array_equal(y[:, ~broken][normal], expected[normal])


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 512), (256, 2048), (384, 1536), (1024, 14336)])
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64])
def test_products_are_those_of_float64(scaling, n, k, m):
    q, x = operands(scaling, n, k)
    x = x[:m].astype(jnp.bfloat16)
    got = np.asarray(fp4_matmul(x, q, out_dtype=jnp.float32, backend="mosaic"), np.float64)
    outer = 1.0 if q.outer is None else float(q.outer)
    wide, w = np.asarray(x, np.float64), exact(q)
    expected, size = outer * (wide @ w.T), outer * (np.abs(wide) @ np.abs(w.T))
    # Tensor cores add 16 products at a time with a bit or two less than float32, k / 16 times.
    assert (np.abs(got - expected) <= size * 2.0**-20).all()


def test_one_row_has_the_same_bits_whatever_else_is_multiplied():
    q, x = operands(Fp4(), 1024, 14336)
    x = x.astype(jnp.bfloat16)
    all_rows = fp4_matmul(x, q, out_dtype=jnp.float32, backend="mosaic")
    for m in (1, 8, 16, 33):
        np.testing.assert_array_equal(fp4_matmul(x[:m], q, out_dtype=jnp.float32, backend="mosaic"), all_rows[:m])


@pytest.mark.parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_many_rows_are_multiplied_by_an_unpacked_weight(activation):
    scaling = Fp4(rule="fold_exact")
    q, x = operands(scaling, 1024, 512)
    x = jnp.tile(x, (16, 1)).astype(jnp.bfloat16)
    got = np.asarray(fp4_matmul(x, q, activation=activation, out_dtype=jnp.float32), np.float64)
    expected = np.asarray(x, np.float64) @ (float(q.outer) * exact(q)).T
    lost = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert lost < (1e-5 if activation == "bfloat16" else 10 ** (-28 / 20)), -20 * np.log10(lost)


@pytest.mark.parametrize(
    ("change", "message"),
    [(dict(m=65), "m=65, k=512, n=64 must be at most 64"), (dict(n=48), "n=48"), (dict(k=272), "k=272"),
     (dict(contracts="n"), "contracts='n'"), (dict(activation="float8_e4m3fn"), "multiplies bfloat16")],
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_named(change, message):
    sizes = dict(m=8, n=64, k=512) | {name: value for name, value in change.items() if name in "mnk"}
    options = {name: value for name, value in change.items() if name not in "mnk"}
    q = quantize_fp4(jnp.ones((sizes["n"], sizes["k"])))
    x = jnp.ones((sizes["m"], sizes["n" if options.get("contracts") == "n" else "k"]))
    with pytest.raises(NotImplementedError, match=message):
        fp4_matmul(x, q, backend="mosaic", **options)
    assert fp4_matmul(x, q, **options).shape[0] == sizes["m"]
