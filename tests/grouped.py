"""Grouped products of small integers, exact in every accumulator, against a loop over
the groups in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.operands import Block, Operand, Tensor
from tests import helpers

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16


def integers(dtype, shape, scaling=Tensor(), stack=(), halves=1, seed=0):
    """An operand of integers up to 3 in magnitude with scales that are powers of two,
    or a bfloat16 array.
    """
    rng = np.random.default_rng((seed, *shape))
    draw = lambda: jnp.asarray(rng.integers(-3, 4, (*stack, *shape)), dtype)
    if dtype == BF16:
        return draw()
    scale = jnp.asarray(
        2.0 ** rng.integers(-2, 3, scaling.scale_shape((*stack, *shape))), jnp.float32
    )
    scale = (
        jnp.asarray(2.0 ** rng.integers(-2, 3, stack), jnp.float32)
        if isinstance(scaling, Tensor)
        else scale
    )
    scale = numerics.encode_e8m0(scale) if isinstance(scaling, Block) else scale
    return Operand(draw(), scale, draw() if halves == 2 else None, scaling=scaling)


def float64_of(x):
    """The values of an operand or of a bfloat16 array."""
    return (
        helpers.float64_of(x) if isinstance(x, Operand) else np.asarray(x, np.float64)
    )


def by_groups(x, w, sizes):
    """Rows of groups: `[m, n]` in float64."""
    x, w, ends = float64_of(x), float64_of(w), np.cumsum(sizes)
    out = np.zeros((len(x), w.shape[1]))
    for one, size, end in zip(w, sizes, ends, strict=True):
        out[end - size : end] = x[end - size : end] @ one.T
    return out


def within_groups(x, g, sizes):
    """Sums over the rows of each group: `[e, k, n]` in float64."""
    x, g, ends = float64_of(x), float64_of(g), np.cumsum(sizes)
    return np.stack(
        [
            x[:, end - size : end] @ g[:, end - size : end].T
            for end, size in zip(ends, sizes, strict=True)
        ]
    )


def sizes_of(m, groups, skew, seed=0):
    """Sizes of groups that add up to m, the more alike the larger `skew` is."""
    sizes = np.floor(
        np.random.default_rng(seed).dirichlet(np.full(groups, skew)) * m
    ).astype(np.int32)
    sizes[0] += m - sizes.sum()
    return jax.numpy.asarray(sizes)
