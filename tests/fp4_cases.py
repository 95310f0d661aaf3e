"""FP4 weights and their values in float64: one source of cases for CPUs and GPUs."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul import reference
from pallas_kernels.operands import Fp4, Operand

SCALINGS = [Fp4(), Fp4(tile="square"), Fp4("mxfp4")]
FOLDS = Fp4(rule="fold_exact")
# (n, k, tile) of weights that Triton unpacks
UNPACKED = [(256, 64, "vector"), (48, 192, "vector"), (128, 128, "square")]


def of_every_scale(scaling, k=512, rows=256):
    """A weight with one scale byte in each row, in turn, and its codes `[rows, k]`.

    Each code stands at each place of a word.
    """
    column = np.arange(k)
    codes = np.tile(((column + column // 16) % 16).astype(np.uint8), (rows, 1))
    scale = np.repeat(np.arange(rows).astype(np.uint8), k // scaling.block)
    scale = scale.reshape(rows, -1).view(scaling.scale_dtype)
    outer = jnp.float32(1) if scaling.has_outer else None
    packed = fp4.pack(jnp.asarray(codes))
    return Operand(packed, jnp.asarray(scale), scaling=scaling, outer=outer), codes


def of_scales_in_turn(n, k, tile="vector"):
    """A fold-exact weight of random codes with every scale byte in turn, also NaN."""
    scaling = Fp4(tile=tile, rule="fold_exact")
    codes = np.random.default_rng(0).integers(0, 256, (n, k // 2), np.uint8)
    shape = scaling.scale_shape((n, k))
    scale = np.arange(math.prod(shape)).astype(np.uint8).reshape(shape)
    scale = jnp.asarray(scale.view(scaling.scale_dtype))
    return Operand(jnp.asarray(codes), scale, scaling=scaling)


def assert_unpacked(got, w, turned):
    """Assert that `got` is w in E4M3; the signs of NaN are free."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = reference.unpack(turned, jax.tree.map(np.asarray, w))
    got = np.asarray(got).view(np.uint8)
    expected = np.asarray(expected).view(np.uint8)
    broken = expected & 127 == 127
    np.testing.assert_array_equal(got[~broken], expected[~broken])
    assert (got[broken] & 127 == 127).all()
    assert broken.any() == (w.scale.size > 127)


def values_of(w):
    """Return the values of codes `[n, k]` in float64, by NumPy alone."""
    codes = np.asarray(w.values)
    codes = np.stack([codes & 15, codes >> 4], -1).reshape(w.shape)
    n, k = w.shape
    block = w.scaling.block
    scale = np.float64(w.scale.astype(jnp.float32)).repeat(block, -1)[:, :k]
    if w.scaling.tile == "square":
        scale = scale.repeat(block, 0)[:n]
    return fp4.E2M1[codes] * scale * (1.0 if w.outer is None else float(w.outer))


def rounded(x, activation="bfloat16"):
    """Activations in float64 as a product multiplies them."""
    if activation == "bfloat16":
        return np.float64(jnp.asarray(x).astype(jnp.bfloat16))
    x = np.float32(x)
    multiplier = np.float32(448) / np.abs(x).max(-1, keepdims=True)
    values = (x * multiplier).astype(ml_dtypes.float8_e4m3fn)
    return np.float64(values) * np.float64(np.float32(1) / multiplier)


def assert_product(got, x, w, error):
    """Assert that `got` is `x @ w.T` up to an error relative to the sum of sizes."""
    size = np.abs(x) @ np.abs(w.T)
    assert (np.abs(np.asarray(got, np.float64) - x @ w.T) <= error * size).all()


def lost(got, expected):
    """The norm of an error relative to that of the expected values."""
    got = np.asarray(got, np.float64)
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)
