"""`gptq`: FP4 codes that are chosen one column after another, so that later columns make up for the errors of earlier.

    minimize tr((W - Q) H (W - Q)ᵀ)        H = sum of x xᵀ over the inputs x of a calibration
    U: upper triangular, Uᵀ U = (H + damping mean(diag H) I)⁻¹
    for j = 1 .. k:   q_j = nearest FP4 to w_j     e_j = (w_j - q_j) / U_jj     w_l <- w_l - e_j U_jl  for l > j

Blocks that share a scale run along k, so the columns keep their order, and the scale of a block is chosen when its
first column is reached: of those that come into question the one whose sum of e² over the block is the smallest. That
sum is the block's own part of what is minimized.

Source: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.inference import blocks
from tcfp_jax.inference.scale_search import best_scales
from tcfp_jax.weights.fp4_packing import check_matrix, quantize_fp4

_EXACT = lax.Precision.HIGHEST


def gptq(
    w: jax.Array, hessian: jax.Array, scaling: Fp4 = Fp4(), *, scales: blocks.Scales = "rule", damping: float = 0.01
) -> Operand:
    """An FP4 operand whose product with inputs like those of the Hessian is as near to w's as GPTQ brings it.

    Args:
      w: real floats `[..., n, k]`, contracted along k, which is even; each matrix of a stack has its own Hessian.
      hessian: float32 `[..., k, k]`, from `tcfp_jax.inference.hessians`.
      scaling: format, tile and rule.
      scales: "rule" chooses each block's scale among those of the scaling's rule (two for "four_over_six"), "search"
        among all that are useful.
      damping: part of the Hessian's mean diagonal that is added to its diagonal.

    Returns:
      An `Operand` as `quantize_fp4` makes it; with a Hessian that is a multiple of the identity, the same, or the codes
      of `search_scales`. A NaN or inf in w makes its block NaN, one in the Hessian the whole matrix.

    Raises:
      TypeError: w is not real floating point, or the scaling is no `Fp4`.
      ValueError: w has fewer than two axes, k is odd, the Hessian has another shape, damping is not positive, or an
        unknown `scales`.

    >>> from tcfp_jax.inference.scale_search import search_scales
    >>> w = jnp.array([[6.0, 5.0, 5.0, -5.0]])
    >>> gptq(w, jnp.eye(4), scales="search").values.tolist() == search_scales(w).values.tolist()
    True
    """
    w = check_matrix(w, scaling)
    wanted = (*w.shape[:-2], w.shape[-1], w.shape[-1])
    if hessian.shape != wanted:
        raise ValueError(f"hessian{list(hessian.shape)} does not fit w{list(w.shape)}; give one of {list(wanted)}")
    if not damping > 0:
        raise ValueError(f"damping={damping} must be positive: inputs that were never seen make a Hessian singular")
    if scales not in get_args(blocks.Scales):
        raise ValueError(f"scales={scales!r} is unknown; use one of {list(get_args(blocks.Scales))}")
    if w.size == 0:
        return quantize_fp4(w, scaling)
    compensate = functools.partial(_compensate, scaling=scaling, scales=scales)
    for _ in range(w.ndim - 2):
        compensate = jax.vmap(compensate, in_axes=(0, 0, None))
    return compensate(w, hessian, jnp.float32(damping))


@functools.partial(jax.jit, static_argnames=("scaling", "scales"))
def _compensate(w: jax.Array, hessian: jax.Array, damping: jax.Array, scaling: Fp4, scales: blocks.Scales) -> Operand:
    tiles = blocks.split(w, scaling)
    groups, rows, count, block = tiles.values.shape
    factor = inverse_factor(hessian.astype(jnp.float32), damping, count * block)
    amax = jnp.abs(tiles.values).max(initial=0)
    if scales == "search":
        _, outer = best_scales(tiles, jnp.diagonal(hessian), scaling)
    else:
        (outer,) = blocks.outers(amax, scaling, "rule")
    matrix = tiles.values.reshape(groups * rows, count * block)

    def step(matrix: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        at = number * block
        mine = lax.dynamic_slice_in_dim(matrix, at, block, axis=1)
        lines = lax.dynamic_slice_in_dim(factor, at, block, axis=0)
        corner = lax.dynamic_slice_in_dim(lines, at, block, axis=1)
        largest = jnp.abs(mine).reshape(groups, rows * block).max(axis=1)
        tried = blocks.candidates(largest, outer, scaling, scales)
        tried = jnp.where(largest > 0, tried, 0)
        numbers, errors = propagate(mine, corner, jnp.repeat(tried, rows, axis=1) * outer)
        # In units of each tile's values, which may lie anywhere.
        lifted = errors.reshape(len(tried), groups, rows * block) * blocks.unit_of(largest)[:, None]
        losses = jnp.square(lifted).sum(axis=2)
        best = jnp.argmin(losses, axis=0)
        of_row = jnp.repeat(best, rows)[None, :, None]
        pick = lambda of_all: jnp.take_along_axis(of_all, of_row, axis=0)[0]
        # Left of the block the lines are zero, and what is within it is not read again.
        matrix = matrix - jnp.matmul(pick(errors), lines, precision=_EXACT)
        return matrix, (pick(numbers), jnp.take_along_axis(tried, best[None], axis=0)[0])

    _, (numbers, scale) = lax.scan(step, matrix, jnp.arange(count))
    numbers = numbers.transpose(1, 0, 2).reshape(groups, rows, count, block)
    lost = tiles.lost | ~jnp.isfinite(factor).all()
    return blocks.operand(numbers, scale.T, outer, lost, (w, scaling))


def inverse_factor(hessian: jax.Array, damping: jax.Array, size: int) -> jax.Array:
    """U, upper triangular, with `Uᵀ U` the inverse of the damped Hessian; `[size, size]`, filled up by the identity.

    From the Cholesky factor of the Hessian with its columns in reverse, `H = V Vᵀ` with V upper triangular, so that
    U = V⁻¹ and no inverse of H is ever formed. The unit of H does not matter.

    >>> inverse_factor(jnp.diag(jnp.array([4.0, 4.0])), jnp.float32(0.0), 3).diagonal().tolist()
    [1.0, 1.0, 1.0]
    """
    k = len(hessian)
    hessian = hessian * blocks.unit_of(jnp.diagonal(hessian).max(initial=0))
    mean = jnp.mean(jnp.diagonal(hessian))
    never = mean == 0  # no input reached it: all columns are alike
    scaled = hessian / jnp.where(never, 1, mean) + jnp.where(never, 1, damping) * jnp.eye(k, dtype=jnp.float32)
    filled = jnp.eye(size, dtype=jnp.float32).at[:k, :k].set(scaled)
    reverse = jnp.linalg.cholesky(filled[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(reverse, jnp.eye(size, dtype=jnp.float32), lower=False)


def propagate(values: jax.Array, corner: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(E2M1 numbers, errors over U_jj) of one block of columns, for each of several factors of its rows.

    Args:
      values: float32 `[n, block]`.
      corner: U's own `[block, block]` of these columns.
      factors: scale times outer, float32 `[count, n]`.
    """

    def column(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, numbers, errors = state
        mine = lax.dynamic_index_in_dim(left, j, axis=2, keepdims=False)
        line = lax.dynamic_index_in_dim(corner, j, axis=0, keepdims=False)
        number = blocks.rounded(mine, factors)
        error = (mine - number * factors) / line[j]
        left = left - error[..., None] * line
        put = lambda whole, one: lax.dynamic_update_index_in_dim(whole, one, j, axis=2)
        return left, put(numbers, number), put(errors, error)

    start = jnp.broadcast_to(values, (len(factors), *values.shape))
    _, numbers, errors = lax.fori_loop(
        0, values.shape[1], column, (start, jnp.zeros_like(start), jnp.zeros_like(start))
    )
    return numbers, errors
