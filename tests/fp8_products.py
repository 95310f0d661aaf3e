"""Cases of FP8 products, for the interpreter and for GPUs, with their exact values."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.helpers import float64_of

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
# Of sums in float32, per unit of |x| @ |w|.
ROUNDING = 2.0**-19


class Case(NamedTuple):
    """Operands, and in float64 their product and its sum of magnitudes."""

    x: Operand
    w: Operand
    exact: np.ndarray
    magnitude: np.ndarray

    @staticmethod
    def of(x, w):
        a = float64_of(x)
        b = float64_of(w)
        return Case(x, w, a @ b.T, np.abs(a) @ np.abs(b).T)


@functools.cache
def drawn(scaling, halves=2, shape=(256, 256, 128), x_dtype=E4M3, w_dtype=E4M3):
    """A product of m, k, n of normal values, in rows of very different sizes."""
    m, k, n = shape
    rng = np.random.default_rng(0)

    def draw(rows):
        values = rng.standard_normal((rows, k)) * np.exp(
            2 * rng.standard_normal((rows, 1))
        )
        return values.astype(np.float32)

    @jax.jit
    def quantized(x, w):
        x = quantize(x, x_dtype, scaling.along_rows).rows
        if halves == 2:
            return x, dual_quantize(w, scaling, dtype=w_dtype).rows
        return x, quantize(w, w_dtype, scaling).rows

    return Case.of(*quantized(draw(m), draw(n)))


def ones(shape, dtype=E4M3, scaling=Tensor()):
    """An operand of ones, whose scales are 1."""
    scale_dtype = SCALE_DTYPE if isinstance(scaling, Block) else jnp.float32
    scale = jnp.ones(scaling.scale_shape(shape), scale_dtype)
    return Operand(jnp.ones(shape, dtype), scale, scaling=scaling)


def within(got, exact, magnitude, bound=ROUNDING):
    """Whether a result is as near to the exact one as its sum of magnitudes allows."""
    return np.all(np.abs(np.asarray(got, np.float64) - exact) <= bound * magnitude)
