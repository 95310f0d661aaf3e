"""Rows on a GPU: the kernels that quantize them are the reference bit for bit, at
shapes of models and at odd ones.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.operands import Row
from pallas_kernels.quantize.api import quantize
from tests.helpers import same_bits

pytestmark = pytest.mark.gpu
bits_as = jax.lax.bitcast_convert_type
ODD = (1001, 300)


def hard_values(shape, dtype):
    """Rows of very different sizes; zeros, subnormals, and a NaN and an inf in lines of
    their own.
    """
    x = jax.random.normal(jax.random.key(0), shape)
    x *= jnp.exp(4 * jax.random.normal(jax.random.key(1), (shape[0], 1)))
    x = x.at[5].set(0).at[:, 33].set(0)
    x = x.at[7].set(1e-39).at[8].set(2e-37).at[8, 1::2].set(1e-39)
    return x.at[9, 1].set(jnp.nan).at[20, 290].set(-jnp.inf).astype(dtype)


@jax.jit
def agree(a, b):
    """Whether both are the same bits; E5M2 has several codes of NaN, any of which will
    do.
    """

    def same(a, b):
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        is_same = bits_as(a, bits) == bits_as(b, bits)
        return jnp.all(is_same | (jnp.isnan(a) & jnp.isnan(b)))

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(same, a, b))))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("scale", ["pow2", "float32"])
@pytest.mark.parametrize("orientation", ["rows", "both"])
@pytest.mark.parametrize(
    "shape, x_dtype",
    [
        ((8192, 4096), "bfloat16"),
        ((8192, 14336), "bfloat16"),
        ((4096, 14336), "float32"),
        (ODD, "bfloat16"),
        (ODD, "float32"),
        (ODD, "float16"),
        ((64, 40000), "bfloat16"),
    ],
    ids=str,
)
def test_quantizing_is_the_same_on_every_backend(
    shape, x_dtype, orientation, scale, dtype
):
    x = hard_values(shape, x_dtype)
    call = jax.jit(
        functools.partial(
            quantize, dtype=dtype, scaling=Row(scale), orientation=orientation
        ),
        static_argnames="backend",
    )
    expected = call(x, backend="xla")
    assert agree(call(x, backend="triton"), expected)
    if shape[0] % 128 == 0:
        assert agree(call(x, backend="mosaic"), expected)
    if shape == ODD:
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            on_cpu = call(jax.device_put(x, cpu), backend="xla")
            assert agree(on_cpu, jax.device_put(expected, cpu))


@pytest.mark.parametrize("make", [lambda call: call, jax.vmap])
def test_under_vmap_and_with_leading_axes(make):
    x = hard_values((4 * 256, 512), "bfloat16").reshape(4, 256, 512)
    of_rows = functools.partial(
        quantize, dtype=jnp.float8_e4m3fn, scaling=Row(), orientation="both"
    )
    expected = jax.jit(make(functools.partial(of_rows, backend="xla")))(x)
    for backend in ("triton", "mosaic"):
        got = jax.jit(make(functools.partial(of_rows, backend=backend)))(x)
        assert same_bits(got, expected)
