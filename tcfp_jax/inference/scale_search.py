"""`search_scales`: the FP4 codes and scales of a matrix with the smallest squared error, without any data.

    for every scale of the scales that comes into question, for every block:
        scale = argmin over every useful scale of  sum_j h_j (w_j - scale outer e2m1(w_j / (scale outer)))^2
    the scale of the scales is that whose blocks' errors have the smallest sum
    and it is then multiplied by  sum_j h_j w_j^2 / sum_j h_j w_j q_j  over the whole matrix, q what was found

h is 1, or the diagonal of the Hessian of a calibration (`tcfp_jax.inference.hessians`): how large the inputs of each
column are. What is searched has all that the rules of `Fp4` choose, so before the last line the error is never above
that of a rule.

Why the last line: the best q is orthogonal to its error, so it is shorter than w, by 0.7 % of a Gaussian, and every
output is too small by as much. That costs more than noise which has no direction. It is the correction of Banner et
al. 2019, "Post training 4-bit quantization of convolutional networks", by one number for a matrix, which is free here.
The squared error e |w|^2 becomes e / (1 - e) |w|^2, 0.03 dB. The file stays an ordinary one. MXFP4 and the rule
"one_level" have no scale of the scales, and stay shrunk.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.inference import blocks
from tcfp_jax.weights.fp4_packing import check_matrix

# Of the mean of the diagonal: inputs that a calibration never saw are not worth nothing.
FLOOR = 0.01
_Best = tuple[jax.Array, jax.Array, jax.Array]  # (error, scales, scale of the scales)


def search_scales(w: jax.Array, scaling: Fp4 = Fp4(), *, importance: jax.Array | None = None) -> Operand:
    """An FP4 operand whose scales leave the smallest squared error of all that the format has, and do not shrink it.

    Args:
      w: real floats `[..., n, k]`, contracted along k, which is even; each matrix of a stack is searched on its own.
      scaling: format and tile. The rule "fold_exact" searches the scales that it allows, and "one_level" has no scale
        of the scales; the others search all.
      importance: of the columns, `[..., k]`, such as the diagonal of a Hessian; None: all the same.

    Returns:
      An `Operand` as `quantize_fp4` makes it. A NaN or inf makes its block NaN.

    Raises:
      TypeError: w is not real floating point, or the scaling is no `Fp4`.
      ValueError: w has fewer than two axes, k is odd, or the importance has another shape.

    >>> w = jnp.array([[6.0, 5.0, 5.0, -5.0]])
    >>> search_scales(w).dequantize().round(2).tolist()
    [[6.429999828338623, 4.829999923706055, 4.829999923706055, -4.829999923706055]]
    """
    w = check_matrix(w, scaling)
    if importance is not None and importance.shape != (*w.shape[:-2], w.shape[-1]):
        raise ValueError(
            f"importance{list(importance.shape)} does not fit w{list(w.shape)}; give one number for each column, "
            f"{[*w.shape[:-2], w.shape[-1]]}"
        )
    weights = jnp.ones((*w.shape[:-2], w.shape[-1]), jnp.float32) if importance is None else importance
    search = functools.partial(_search, scaling=scaling)
    for _ in range(w.ndim - 2):
        search = jax.vmap(search)
    return search(w, weights)


@functools.partial(jax.jit, static_argnames="scaling")
def _search(w: jax.Array, importance: jax.Array, scaling: Fp4) -> Operand:
    tiles = blocks.split(w, scaling)
    scale, outer = best_scales(tiles, importance, scaling)
    factor = (scale * outer)[:, None, :, None]
    numbers = blocks.rounded(tiles.values, factor)
    if scaling.has_outer and scaling.rule != "one_level":
        outer = outer * _lengthened(tiles.values, numbers * factor, _spread(importance, tiles.values.shape))
    return blocks.operand(numbers, scale, outer, tiles.lost, (w, scaling))


def _lengthened(values: jax.Array, found: jax.Array, weights: jax.Array) -> jax.Array:
    """What found values are multiplied by, so that their product with the values is that of these themselves."""
    unit = blocks.unit_of(jnp.abs(values).max(initial=0))
    wanted, made = (jnp.sum(values * unit * (other * unit) * weights) for other in (values, found))
    return jnp.where(made > 0, wanted / jnp.where(made > 0, made, 1), 1)


def _spread(importance: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The importance of each column of tiles of this shape, `[blocks along k, block]`, none of them nothing.

    Its unit does not matter.
    """
    weights = importance.astype(jnp.float32)
    amax = weights.max(initial=0)
    weights = jnp.where(amax == 0, 1, weights * blocks.unit_of(amax))  # of a calibration that saw nothing
    weights = jnp.pad(weights + FLOOR * weights.mean(), (0, math.prod(shape[2:]) - len(weights)))
    return weights.reshape(shape[2:])


def best_scales(tiles: blocks.Blocks, importance: jax.Array, scaling: Fp4) -> tuple[jax.Array, jax.Array]:
    """(scales of the tiles, scale of the scales) with the smallest error, float32.

    Args:
      tiles: of a matrix, from `split`.
      importance: of its columns, `[k]`.
      scaling: format and rule.
    """
    values = tiles.values
    amax = jnp.abs(values).max(axis=(1, 3))
    weights, unit = _spread(importance, values.shape), blocks.unit_of(amax)
    # Each tile is searched in units of its own values; errors of all tiles are added in one unit.
    shared = jnp.square(blocks.unit_of(amax.max(initial=0)) / unit)

    def of_scale(scale: jax.Array, outer: jax.Array) -> jax.Array:
        factor = (scale * outer)[:, None, :, None]
        error = (values - blocks.rounded(values, factor) * factor) * unit[:, None, :, None]
        return jnp.sum(jnp.square(error) * weights, axis=(1, 3))

    def better(best: tuple[jax.Array, jax.Array], scale: jax.Array, outer: jax.Array) -> tuple[jax.Array, jax.Array]:
        error = of_scale(scale, outer)
        return jnp.minimum(best[0], error), jnp.where(error < best[0], scale, best[1])

    def of_outer(best: _Best, outer: jax.Array) -> tuple[_Best, None]:
        tried = blocks.candidates(amax, outer, scaling, "search")
        first = jnp.full_like(amax, jnp.inf), tried[0]
        error, scale = jax.lax.scan(lambda found, one: (better(found, one, outer), None), first, tried)[0]
        total = jnp.sum(error * shared)
        take = total < best[0]
        return (jnp.minimum(total, best[0]), jnp.where(take, scale, best[1]), jnp.where(take, outer, best[2])), None

    tried = blocks.outers(jnp.max(amax, initial=0), scaling, "search")
    start = jnp.asarray(jnp.inf, jnp.float32), jnp.zeros_like(amax), tried[0]
    _, scale, outer = jax.lax.scan(of_outer, start, tried)[0]
    return jnp.where(amax > 0, scale, 0), outer
