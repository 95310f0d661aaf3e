"""Formulas of quantizers in NumPy, and values on which they are compared."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.operands import BLOCK_SIZES, Block, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.helpers import parametrize

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ONCE = (Tensor("pow2"), Tensor("float32"))
ROWS = (Row("pow2"), Row("float32"))
SQUARES = tuple(Block(size, "square") for size in BLOCK_SIZES)
VECTOR = Block(32, "vector")
BLOCKS = (*SQUARES, *(Block(size, "vector") for size in BLOCK_SIZES))


# Jitted, because the dozens of operations of the references would be compiled one by
# one.
STATIC = ("dtype", "scaling", "orientation", "backend")
quantized = jax.jit(quantize, static_argnames=STATIC)
split = jax.jit(dual_quantize, static_argnames=STATIC)


def optimized(*cases):
    return [pytest.param(*case, marks=pytest.mark.optimized) for case in cases]


def scalings(*which):
    return parametrize("scaling", which, ids=str)


def hard_values(shape, seed=0):
    """Values of very different sizes, a block of zeros, negative zeros, ties and
    subnormals.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(6 * rng.standard_normal(shape))
    x = x.astype(np.float32)
    x[..., :32, :32] = 0
    x[..., 0, :6] = [-0.0, 1e-40, 2.0**-9, 1.0625, -1.1875, 0.0]
    return x


def parts(scaling, shape):
    """(the index of a scale, the values that share it) of every scale of a matrix."""
    if isinstance(scaling, Tensor):
        return [((), np.s_[:, :])]
    if isinstance(scaling, Row):
        return [((i,), np.s_[i : i + 1, :]) for i in range(shape[0])]
    size = scaling.size
    rows = size if scaling.tile == "square" else 1
    count = -(-shape[0] // rows), -(-shape[1] // size)
    return [
        ((i, j), np.s_[i * rows : (i + 1) * rows, j * size : (j + 1) * size])
        for i, j in np.ndindex(*count)
    ]


def formula(scaling, x, largest):
    """(scale, factor of x) of values that share a scale, by NumPy in float64."""
    amax = np.max(np.abs(x).astype(np.float64))
    if scaling.scale == "float32":
        multiplier = np.float32(largest / max(amax, 1e-12))
        return np.float32(1) / multiplier, multiplier
    scale = 1.0
    if amax >= 2.0**-126:
        scale = 2.0 ** np.clip(np.ceil(np.log2(amax / largest)), -126, 127)
    return np.float32(scale), np.float32(1 / scale)


def flushed(x):
    """Return x with zeros of the same sign instead of subnormals."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)


def narrow(dtype):
    return ml_dtypes.finfo(dtype).dtype


def one_nan(tree):
    """E5M2 has three codes of NaN: NumPy's of all."""

    def of_leaf(leaf):
        is_nan = np.isnan(np.float32(leaf))
        return np.where(is_nan, leaf.dtype.type(np.nan), leaf)

    return jax.tree.map(of_leaf, tree)


def by_both(call, *arguments, **options):
    """Results of a call by the kernel and by the reference."""
    run = functools.partial(call, *arguments, **options)
    return run(backend="triton"), run(backend="xla")
