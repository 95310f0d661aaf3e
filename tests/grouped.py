"""Cases of grouped products, for the interpreter, for GPUs and for the compiler.

Values are small integers, exact in every accumulator. The oracle is a loop over the
groups in float64.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.operands import Block, Operand, Row, Scaling, Tensor
from tests import helpers

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
BF16 = jnp.bfloat16


@dataclass(frozen=True)
class Form:
    """Dtypes of x and w, the scaling of w, and its halves; BF16 has no scaling."""

    x: type
    w: type
    scaling: Scaling | None = Tensor()
    halves: int = 1

    @property
    def of_rows(self):
        """Scaling of x."""
        return None if self.scaling is None else self.scaling.along_rows

    def by_groups(self, m, k, n, groups):
        """Operands of `grouped_matmul`."""
        w = integers(self.w, (n, k), self.scaling, (groups,), self.halves, seed=1)
        return integers(self.x, (m, k), self.of_rows), w

    def within_groups(self, m, k, n):
        """Operands of `grouped_weight_gradient`, columns of x and of the gradient."""
        g = integers(self.x, (n, m), self.of_rows, seed=1)
        return integers(self.w, (k, m), self.of_rows), g


FORMS = {
    "bf16": Form(BF16, BF16, None),
    "tensor": Form(E4M3, E4M3),
    "mixed": Form(E5M2, E4M3),
    "residual": Form(E4M3, E4M3, halves=2),
    "rows": Form(E4M3, E5M2, Row()),
    "squares": Form(E4M3, E4M3, Block(128)),
    "small squares": Form(E5M2, E4M3, Block(64), halves=2),
    "vectors": Form(E4M3, E5M2, Block(128, "vector")),
    "small vectors": Form(E4M3, E4M3, Block(64, "vector")),
}


def edges(m):
    """Sizes of six groups of m rows: empty ones, ends of tiles, sums below m."""
    return {
        "skewed": [m // 2 + 3, 0, m // 4 - 10, 1, 0, m // 4 + 6],
        "one group": [0, 0, m, 0, 0, 0],
        "sum below m": [m // 2 + 1, 0, 7, m // 4, 8, 0],
        "nothing": [0] * 6,
        "single rows": [1] * 6,
        "tiles": [m // 8, m // 4, 0, m // 8, 3 * m // 8, m // 8],
        "ladder": [63, 65, 31, 2, 95, 0],
    }


def wrong_sizes(m):
    """Sizes that add up to more than m, or are negative."""
    return [[m, 1, 0, 0, 0, 0], [30, -1, 2, 0, 0, 0], [m, m - 56, -150, 0, 0, 0]]


def integers(dtype, shape, scaling=Tensor(), stack=(), halves=1, seed=0):
    """An operand of integers up to 3 in magnitude, or a bfloat16 array of them.

    Its scales are powers of two.
    """
    rng = np.random.default_rng((seed, *shape))

    def draw():
        return jnp.asarray(rng.integers(-3, 4, (*stack, *shape)), dtype)

    values = draw()
    if dtype == BF16:
        return values
    of_scale = stack
    if not isinstance(scaling, Tensor):
        of_scale = scaling.scale_shape((*stack, *shape))
    scale = jnp.asarray(2.0 ** rng.integers(-2, 3, of_scale), jnp.float32)
    if isinstance(scaling, Block):
        scale = numerics.encode_e8m0(scale)
    return Operand(values, scale, draw() if halves == 2 else None, scaling=scaling)


def float64_of(x):
    """The values of an operand or of a bfloat16 array."""
    if isinstance(x, Operand):
        return helpers.float64_of(x)
    return np.asarray(x, np.float64)


def by_groups(x, w, sizes):
    """Rows of groups: `[m, n]` in float64."""
    x = float64_of(x)
    w = float64_of(w)
    out = np.zeros((len(x), w.shape[1]))
    end = 0
    for one, size in zip(w, sizes, strict=True):
        rows = slice(end, end + size)
        out[rows] = x[rows] @ one.T
        end += size
    return out


def within_groups(x, g, sizes):
    """Sums over the rows of each group: `[e, k, n]` in float64."""
    x = float64_of(x)
    g = float64_of(g)
    out = []
    end = 0
    for size in sizes:
        rows = slice(end, end + size)
        out.append(x[:, rows] @ g[:, rows].T)
        end += size
    return np.stack(out)


def sizes_of(m, groups, skew, seed=0):
    """Sizes of groups that add up to m, the more alike the larger `skew` is."""
    shares = np.random.default_rng(seed).dirichlet(np.full(groups, skew))
    sizes = np.floor(shares * m).astype(np.int32)
    sizes[0] += m - sizes.sum()
    return jnp.asarray(sizes)
