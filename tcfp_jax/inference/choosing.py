"""FP4 codes chosen by their error: `search_scales` without data, `gptq` with inputs.

`search_scales` leaves the smallest squared error:

    for every scale of the scales that is tried, for every block:
        scale = the useful scale s with the smallest
                sum_j h_j (w_j - s outer e2m1(w_j / (s outer)))^2
    outer = the one whose blocks' errors have the smallest sum, multiplied by
            sum_j h_j w_j^2 / sum_j h_j w_j q_j over the matrix, q being the result

h is 1 or the diagonal of the Hessian of a calibration: how large the inputs of each
column are. The search contains all choices of the rules of `Fp4`, so before the last
line its error is never above theirs. The last line is there because the best q is
orthogonal to its error and so shorter than w, by 0.7 % for a Gaussian. Every output
would be too small by as much, which costs more than noise without a direction. It is
the correction of Banner et al. 2019, "Post training 4-bit quantization of convolutional
networks", by one number for a matrix. The squared error e |w|^2 becomes
e / (1 - e) |w|^2, 0.03 dB. MXFP4 and the rule "one_level" have no scale of the scales
and stay shrunk.

`gptq` chooses one column after another, so that later columns make up for the errors of
earlier ones:

    minimize tr((W - Q) H (W - Q)ᵀ)    H = sum of x xᵀ over the inputs of a calibration
    U: upper triangular, Uᵀ U = (H + damping mean(diag H) I)⁻¹
    for j = 1 .. k:
        q_j = nearest FP4 to w_j
        e_j = (w_j - q_j) / U_jj
        w_l <- w_l - e_j U_jl  for l > j

Blocks that share a scale run along k, so the columns keep their order. The scale of a
block is chosen when its first column is reached: the candidate with the smallest sum of
e² over the block, which is the block's part of the minimized sum. Source: Frantar et
al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers".
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.checks import check_choice
from pallas_kernels.fp4 import pack
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.formats.encoding import encode
from tcfp_jax.formats.float_bits import MANTISSA_BITS, TINY, power_of_two, to_bits
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_arrays import nearest
from tcfp_jax.formats.scale_rules import CLIPPED_FROM, LEAST_FOLDED, round_scale
from tcfp_jax.weights.fp4_packing import check_matrix, quantize_fp4

# Importance that every column has at least, in parts of the mean: a calibration may not
# have seen all inputs.
_FLOOR = 0.01
_LARGEST = 6.0  # E2M1 number
# A search tries the scales within amax / (12 outer) ... amax / (3 outer). A larger one
# maps a block to 0, 0.5, 1, 1.5, 2 and 3 at most; half of it has the same values and
# more. A smaller one cuts the largest value to less than half.
_SMALLEST_PART = 12.0
_LARGEST_PART = 3.0
_E4M3 = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
# Mantissas 1, 1.25 and 1.5: times any E2M1 number, over 2**3, they are E4M3 numbers.
_MANTISSAS = 2 * np.frexp(_E4M3)[0]
_FOLDS = (_E4M3 >= LEAST_FOLDED) & np.isin(_MANTISSAS, (1.0, 1.25, 1.5))
_POWERS = np.ldexp(np.float32(1), np.arange(-126, 126)).astype(np.float32)
_EXACT = lax.Precision.HIGHEST
_Pair = tuple[Array, Array]  # errors and scales of blocks
_Best = tuple[Array, Array, Array]  # (error, scales, scale of the scales)


def search_scales(
    w: Array, scaling: Fp4 = Fp4(), *, importance: Array | None = None
) -> Operand:
    """Return the FP4 operand whose scales leave the smallest squared error.

    The matrix is not shrunk. Use this if packing may take longer than by a rule, and
    you have no inputs for `gptq`.

    Args:
      w: real floats `[..., n, k]`, contracted along k, which is even; each matrix of a
        stack is searched on its own.
      scaling: format and tile. The rule "fold_exact" limits the scales that are
        searched, and "one_level" leaves out the outer scale; other rules search all
        scales.
      importance: weights of the columns, `[..., k]`, such as the diagonal of a Hessian;
        None weighs them alike.

    Returns:
      An `Operand` as `quantize_fp4` makes it. A NaN or inf makes its block NaN.

    Raises:
      TypeError: w is not real floating point, or the scaling is not an `Fp4`.
      ValueError: w has fewer than two axes, k is odd, or the importance has another
        shape.

    >>> w = jnp.array([[6.0, 5.0, 5.0, -5.0]])
    >>> search_scales(w).dequantize().round(2).tolist()
    [[6.429999828338623, 4.829999923706055, 4.829999923706055, -4.829999923706055]]
    """
    w = check_matrix(w, scaling)
    if importance is not None and importance.shape != (*w.shape[:-2], w.shape[-1]):
        raise ValueError(
            f"importance{list(importance.shape)} does not fit w{list(w.shape)}; give"
            f" one number for each column, {[*w.shape[:-2], w.shape[-1]]}"
        )
    if importance is None:
        importance = jnp.ones((*w.shape[:-2], w.shape[-1]), jnp.float32)
    search = functools.partial(_search, scaling=scaling)
    for _ in range(w.ndim - 2):
        search = jax.vmap(search)
    return search(w, importance)


def gptq(
    w: Array,
    hessian: Array,
    scaling: Fp4 = Fp4(),
    *,
    scales: Literal["rule", "search"] = "rule",
    damping: float = 0.01,
) -> Operand:
    """Return the FP4 operand that GPTQ finds.

    Its product with the Hessian's inputs stays near the product of `w`. Use this if you
    have inputs of the model for `hessians`; `search_scales` needs none.

    Args:
      w: real floats `[..., n, k]`, contracted along k, which is even; each matrix of a
        stack has its own Hessian.
      hessian: float32 `[..., k, k]`, from `tcfp_jax.inference.hessians`.
      scaling: format, tile and rule.
      scales: "rule" chooses each block's scale among the candidates of the scaling's
        rule, "search" among all useful.
      damping: part of the Hessian's mean diagonal that is added to its diagonal.

    Returns:
      An `Operand` as `quantize_fp4` makes it; if the Hessian is a multiple of the
      identity, the same, or the codes of `search_scales`. A NaN or inf in w makes its
      block NaN, one in the Hessian the whole matrix.

    Raises:
      TypeError: w is not real floating point, or the scaling is not an `Fp4`.
      ValueError: w has fewer than two axes, k is odd, the Hessian has another shape, or
        an option is out of range.

    >>> w = jnp.array([[6.0, 5.0, 5.0, -5.0]])
    >>> found = gptq(w, jnp.eye(4), scales="search")
    >>> found.values.tolist() == search_scales(w).values.tolist()
    True
    """
    w = check_matrix(w, scaling)
    wanted = (*w.shape[:-2], w.shape[-1], w.shape[-1])
    if hessian.shape != wanted:
        raise ValueError(
            f"hessian{list(hessian.shape)} does not fit w{list(w.shape)}; give one of"
            f" {list(wanted)}"
        )
    if not damping > 0:
        raise ValueError(
            f"damping={damping} must be positive: inputs that were never seen make a"
            " Hessian singular"
        )
    check_choice("scales", scales, ("rule", "search"))
    if w.size == 0:
        return quantize_fp4(w, scaling)
    compensate = functools.partial(
        _compensate, scaling=scaling, search=scales == "search"
    )
    for _ in range(w.ndim - 2):
        compensate = jax.vmap(compensate, in_axes=(0, 0, None))
    return compensate(w, hessian, jnp.float32(damping))


# The search
# --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="scaling")
def _search(w: Array, importance: Array, scaling: Fp4) -> Operand:
    values, lost = _split(w, scaling)
    scale, outer = _best_scales(values, importance, scaling)
    factor = (scale * outer)[:, None, :, None]
    numbers = _rounded(values, factor)
    if scaling.has_outer and scaling.rule != "one_level":
        weights = _spread(importance, values.shape)
        outer = outer * _lengthening(values, numbers * factor, weights)
    return _operand(numbers, scale, outer, lost, (w, scaling))


def _lengthening(w: Array, q: Array, weights: Array) -> Array:
    """Return the factor f that rescales q so that `<w, f q> = <w, w>`."""
    unit = _unit_of(jnp.abs(w).max(initial=0))
    wanted = jnp.sum(w * unit * (w * unit) * weights)
    made = jnp.sum(w * unit * (q * unit) * weights)
    return jnp.where(made > 0, wanted / jnp.where(made > 0, made, 1), 1)


def _spread(importance: Array, shape: tuple[int, ...]) -> Array:
    """Return the importance of each column of tiles of this shape.

    It is `[blocks along k, block]`, positive, in any unit.
    """
    weights = importance.astype(jnp.float32)
    amax = weights.max(initial=0)
    # a calibration without inputs weighs all alike
    weights = jnp.where(amax == 0, 1, weights * _unit_of(amax))
    weights = weights + _FLOOR * weights.mean()
    missing = math.prod(shape[2:]) - len(weights)
    return jnp.pad(weights, (0, missing)).reshape(shape[2:])


def _best_scales(values: Array, importance: Array, scaling: Fp4) -> tuple[Array, Array]:
    """Return (scales of the blocks, their `outer`) with the smallest error."""
    amax = jnp.abs(values).max(axis=(1, 3))
    weights = _spread(importance, values.shape)
    unit = _unit_of(amax)
    # Each tile is searched in units of its own values; errors of all tiles are added in
    # one unit.
    shared = jnp.square(_unit_of(amax.max(initial=0)) / unit)

    def of_scale(scale: Array, outer: Array) -> Array:
        factor = (scale * outer)[:, None, :, None]
        error = (values - _rounded(values, factor) * factor) * unit[:, None, :, None]
        return jnp.sum(jnp.square(error) * weights, axis=(1, 3))

    def of_outer(best: _Best, outer: Array) -> tuple[_Best, None]:
        def better(found: _Pair, scale: Array) -> tuple[_Pair, None]:
            least, chosen = found
            error = of_scale(scale, outer)
            chosen = jnp.where(error < least, scale, chosen)
            return (jnp.minimum(least, error), chosen), None

        tried = _candidates(amax, outer, scaling, search=True)
        first = (jnp.full_like(amax, jnp.inf), tried[0])
        (error, scale), _ = jax.lax.scan(better, first, tried)
        total = jnp.sum(error * shared)
        least, best_scale, best_outer = best
        take = total < least
        found = (
            jnp.minimum(total, least),
            jnp.where(take, scale, best_scale),
            jnp.where(take, outer, best_outer),
        )
        return found, None

    tried = _outers(jnp.max(amax, initial=0), scaling, search=True)
    start = (jnp.asarray(jnp.inf, jnp.float32), jnp.zeros_like(amax), tried[0])
    (_, scale, outer), _ = jax.lax.scan(of_outer, start, tried)
    return jnp.where(amax > 0, scale, 0), outer


# GPTQ
# --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("scaling", "search"))
def _compensate(
    w: Array, hessian: Array, damping: Array, scaling: Fp4, search: bool
) -> Operand:
    values, lost = _split(w, scaling)
    groups, rows, count, block = values.shape
    factor = _inverse_factor(hessian.astype(jnp.float32), damping, count * block)
    if search:
        _, outer = _best_scales(values, jnp.diagonal(hessian), scaling)
    else:
        (outer,) = _outers(jnp.abs(values).max(initial=0), scaling, search=False)
    matrix = values.reshape(groups * rows, count * block)

    def step(matrix: Array, number: Array) -> tuple[Array, _Pair]:
        """Choose the codes and scales of a block of columns; correct later ones."""
        at = number * block
        mine = lax.dynamic_slice_in_dim(matrix, at, block, axis=1)
        lines = lax.dynamic_slice_in_dim(factor, at, block, axis=0)
        corner = lax.dynamic_slice_in_dim(lines, at, block, axis=1)
        largest = jnp.abs(mine).reshape(groups, rows * block).max(axis=1)
        tried = _candidates(largest, outer, scaling, search=search)
        tried = jnp.where(largest > 0, tried, 0)
        factors = jnp.repeat(tried, rows, axis=1) * outer
        numbers, errors = _propagate(mine, corner, factors)
        # Tiles may lie anywhere in float32's range, so each one's errors are in units
        # of its own values.
        of_tiles = errors.reshape(len(tried), groups, rows * block)
        losses = jnp.square(of_tiles * _unit_of(largest)[:, None]).sum(axis=2)
        best = jnp.argmin(losses, axis=0)
        scale = jnp.take_along_axis(tried, best[None], axis=0)[0]
        of_row = jnp.repeat(best, rows)[None, :, None]
        numbers = jnp.take_along_axis(numbers, of_row, axis=0)[0]
        errors = jnp.take_along_axis(errors, of_row, axis=0)[0]
        # The lines are zero to the left of the block, and the block itself is not read
        # again.
        matrix = matrix - jnp.matmul(errors, lines, precision=_EXACT)
        return matrix, (numbers, scale)

    _, (numbers, scale) = lax.scan(step, matrix, jnp.arange(count))
    numbers = numbers.transpose(1, 0, 2).reshape(groups, rows, count, block)
    lost = lost | ~jnp.isfinite(factor).all()
    return _operand(numbers, scale.T, outer, lost, (w, scaling))


def _inverse_factor(hessian: Array, damping: Array, size: int) -> Array:
    """Return the upper triangular U with `Uᵀ U` the inverse of the damped Hessian.

    The identity fills it up to `size`. The Cholesky factor of the Hessian with its
    columns in reverse gives `H = V Vᵀ` with V upper triangular, so that U = V⁻¹ and no
    inverse of H is ever formed. The unit of H does not matter.
    """
    k = len(hessian)
    hessian = hessian * _unit_of(jnp.diagonal(hessian).max(initial=0))
    mean = jnp.mean(jnp.diagonal(hessian))
    never = mean == 0  # no input reached it: all columns are alike
    added = jnp.where(never, 1, damping) * jnp.eye(k, dtype=jnp.float32)
    scaled = hessian / jnp.where(never, 1, mean) + added
    filled = jnp.eye(size, dtype=jnp.float32).at[:k, :k].set(scaled)
    reverse = jnp.linalg.cholesky(filled[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(
        reverse, jnp.eye(size, dtype=jnp.float32), lower=False
    )


def _propagate(values: Array, corner: Array, factors: Array) -> tuple[Array, Array]:
    """Return (E2M1 numbers, errors over U_jj) of a block of columns, for each factor.

    The columns are `[n, block]` and the factors `[count, n]`. `corner` is the part
    `[block, block]` of U for these columns.
    """

    def put(whole: Array, one: Array, j: Array) -> Array:
        return lax.dynamic_update_index_in_dim(whole, one, j, axis=2)

    def column(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        left, numbers, errors = state
        mine = lax.dynamic_index_in_dim(left, j, axis=2, keepdims=False)
        line = lax.dynamic_index_in_dim(corner, j, axis=0, keepdims=False)
        number = _rounded(mine, factors)
        error = (mine - number * factors) / line[j]
        left = left - error[..., None] * line
        return left, put(numbers, number, j), put(errors, error, j)

    start = jnp.broadcast_to(values, (len(factors), *values.shape))
    zeros = jnp.zeros_like(start)
    _, numbers, errors = lax.fori_loop(
        0, values.shape[1], column, (start, zeros, zeros)
    )
    return numbers, errors


# Blocks
# --------------------------------------------------------------------------------------


def _split(w: Array, scaling: Fp4) -> tuple[Array, Array]:
    """Split a matrix `[n, k]` into tiles that share a scale; tell which are lost.

    Lost tiles hold NaN or inf. The tiles are `[tiles along n, rows of a tile, blocks
    along k, block]`, with zeros for padding, NaN and inf.
    """
    block = scaling.block
    rows = block if scaling.tile == "square" else 1
    n, k = w.shape
    padded = jnp.pad(w.astype(jnp.float32), ((0, -n % rows), (0, -k % block)))
    groups = padded.shape[0] // rows
    count = padded.shape[1] // block
    tiles = padded.reshape(groups, rows, count, block)
    finite = jnp.isfinite(tiles)
    return jnp.where(finite, tiles, 0), ~finite.all(axis=(1, 3))


def _rounded(values: Array, factor: Array) -> Array:
    """Return the E2M1 numbers of values under a factor that broadcasts.

    The factor is scale times outer; 0 gives 0.
    """
    numbers = jnp.copysign(nearest(jnp.abs(values), factor), values)
    return jnp.where(factor > 0, numbers, 0)


def _unit_of(amax: Array) -> Array:
    """Return the power of two that brings a largest magnitude to 1 to 2.

    It brings it to 4 if its own inverse is subnormal. Squares of values times it lie in
    float32's range, however large or small the values are.
    """
    exponent = (to_bits(amax) >> MANTISSA_BITS) - 127
    return power_of_two(-jnp.clip(exponent, -126, 126))


def _table(scaling: Fp4) -> np.ndarray:
    """Return all scales that blocks may have, in ascending order."""
    if scaling.format == "mxfp4":
        return _POWERS
    return _E4M3[_FOLDS] if scaling.rule == "fold_exact" else _E4M3


def _outers(amax: Array, scaling: Fp4, *, search: bool) -> Array:
    """Return the scales of the scales to try, float32 `[count]`; 1 without any.

    A rule has one. A search has `amax / (6 m)` for each m of E4M3's largest binade,
    which includes all rules' scales.
    """
    if scaling.format == "mxfp4" or scaling.rule == "one_level":
        return jnp.ones(1, jnp.float32)
    most = _table(scaling)
    largest = most[most >= 256.0]
    if not search:
        largest = largest[-1:] if scaling.rule == "amax" else largest[:1]
    divided = amax / (_LARGEST * jnp.asarray(largest))
    return jnp.where(amax > 0, jnp.maximum(divided, TINY), 1)


def _candidates(amax: Array, outer: Array, scaling: Fp4, *, search: bool) -> Array:
    """Return the scales to try for blocks with these `amax`, `[count, ...]`."""
    allowed = _table(scaling)
    values = jnp.asarray(allowed)

    def wanted(part: float) -> Array:
        return amax / (part * outer)

    def at(index: Array) -> Array:
        return values[jnp.clip(index, 0, len(values) - 1)]

    def from_first(first: Array, count: int) -> Array:
        return at(first + jnp.arange(count).reshape(-1, *[1] * amax.ndim))

    if search:
        octaves = math.log2(_SMALLEST_PART / _LARGEST_PART)
        count = round(octaves * np.count_nonzero((allowed >= 1) & (allowed < 2))) + 1
        first = jnp.searchsorted(values, wanted(_SMALLEST_PART))
        return from_first(first, count)
    # OCP's rule: the largest power of two that is not above amax / 4
    if scaling.format == "mxfp4":
        return at(jnp.searchsorted(values, wanted(4.0), side="right") - 1)[None]
    if scaling.rule == "fold_exact":
        first = jnp.searchsorted(values, wanted(CLIPPED_FROM))
        return from_first(first, 3)
    parts = (_LARGEST, 4.0) if scaling.rule == "four_over_six" else (_LARGEST,)
    return jnp.stack([round_scale(wanted(part), number("e4m3fn")) for part in parts])


def _operand(
    numbers: Array,
    scale: Array,
    outer: Array,
    lost: Array,
    like: tuple[Array, Fp4],
) -> Operand:
    """Return the operand of E2M1 numbers in the tiles of `_split`, and their scales.

    `like` is the matrix and its scaling.
    """
    w, scaling = like
    n, k = w.shape
    groups, rows, blocks, block = numbers.shape
    wide = numbers.reshape(groups * rows, blocks * block)[:n, :k]
    codes = pack(encode(wide, number("e2m1f")).astype(jnp.uint8))
    scale = jnp.where(lost, jnp.nan, scale)
    if scaling.format == "mxfp4":
        byte = (to_bits(scale) >> MANTISSA_BITS).astype(jnp.uint8)
        scale = lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu)
        return Operand(codes, scale, scaling=scaling)
    # Each scale is an E4M3 number already, so the cast rounds nothing.
    scale = scale.astype(jnp.float8_e4m3fn)
    return Operand(codes, scale, scaling=scaling, outer=outer)
