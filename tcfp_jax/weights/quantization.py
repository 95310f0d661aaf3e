"""`quantize` and `split`, arrays as FP8 operands, and `quantize_weight`, a weight as
its recipe stores it.

The arithmetic is that of `pallas_kernels`, with defaults.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics
from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import (
    Block,
    Contracts,
    Fp4,
    Operand,
    Orientation,
    Scale,
    Scaling,
    Tensor,
    Tile,
    check_real,
)
from pallas_kernels.quantize.api import dual_quantize
from pallas_kernels.quantize.api import quantize as quantize_values
from pallas_kernels.specs import entries_of, shards
from tcfp_jax.recipes import Copies, Dual, Recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.stored import Stored

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float


def quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: Scale = "pow2",
    block: int | None = None,
    axis: int = -1,
    tile: Tile = "vector",
) -> Operand:
    """Return `x` as FP8 values with one scale, or one for each block:
    `values = saturate(round(x / scale))`.

    Use this for an operand or a constant weight; use `split` for twice the bits, and
    `formats.cast` for other formats.

    Args:
      x: real floats of any shape; arithmetic is float32.
      dtype: `float8_e4m3fn` (31.5 dB on Gaussian data) or `float8_e5m2` (25.5 dB, wider
        range).
      scale: "pow2", the smallest power of two that fits max |x|, or "float32", max |x|
        / largest.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of x shares one.
      axis: the axis along which vectors of a block run. It is the last of the result,
        `moveaxis(x, axis, -1)`.
      tile: "vector", or "square" blocks of a matrix, which are the same for its
        transpose.

    Returns:
      An `Operand` with `values`, `scale` and `dequantize()`.

    Raises:
      TypeError: `x` is not real floating point, `dtype` is not FP8, or a gradient is
        asked for: use `formats.cast` or `fake_quantize`.
      ValueError: `scale`, `block` or `tile` is unknown, `axis` is out of range; or
        blocks with `scale="float32"`, or `axis` or `tile` without blocks.

    >>> quantize(jnp.array([1.0, -3.0])).dequantize().tolist()
    [1.0, -3.0]
    >>> quantize(jnp.ones((4, 100)), block=32).scale.shape
    (4, 4)
    """
    x = jnp.asarray(x)
    scaling: Scaling = Tensor(scale)
    if block is None:
        if axis != -1 or tile != "vector":
            raise ValueError(
                f"axis={axis} and tile={tile!r} describe blocks, but block=None; pass"
                " block=32, 64 or 128"
            )
    else:
        if scale != "pow2":
            raise ValueError(
                f"scale={scale!r} with block={block}: the scales of blocks are powers"
                ' of two; use scale="pow2"'
            )
        scaling = Block(block, tile)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"axis={axis} is out of range for x{list(x.shape)}; use -{x.ndim} to"
                f" {x.ndim - 1}"
            )
        if tile == "square" and axis != -1:
            raise ValueError(
                f'axis={axis} with tile="square": squares have no direction; leave'
                " axis=-1"
            )
        x = jnp.moveaxis(x, axis, -1)
    return quantize_values(x, dtype, scaling).rows


def split(
    w: ArrayLike,
    *,
    error: ArrayLike | None = None,
    key: Array | None = None,
    amax: ArrayLike | None = None,
    block: int | None = None,
    tile: Tile = "square",
) -> Operand:
    """Return `w + error` as two E4M3 tensors with one scale: `hi = round(w/s)`,
    `lo = round(w/s - hi)`.

    Use this for a weight that BF16 would be needed for; use `quantize` if one FP8
    tensor is exact enough.

    The pair holds Gaussian values with 64 dB, better than BF16's 56 in as many bits.

    Args:
      w: real floats of any shape; arithmetic is float32.
      error: the rounding error of earlier steps, of the shape of `w`.
      key: JAX random key; rounds `lo` stochastically, so that E[hi + lo] s = w + error,
        reproducibly.
      amax: the magnitude to scale by instead of max |w + error|; `lo` catches values
        that clip in `hi`.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of w shares one.
      tile: "square" blocks of a matrix, or "vector" blocks along the last axis.

    Returns:
      An `Operand` with `hi`, `lo`, `scale`, `nbytes` and `dequantize()`.

    Raises:
      TypeError: `w` or `error` is not real floating point, or a gradient is asked for.
      ValueError: `error` and `w` differ in shape, `block` or `tile` is unknown, `amax`
        with blocks, or `tile` without.

    >>> w = jnp.array([1.0, 0.3])
    >>> q = split(w)
    >>> again = split(w, error=jnp.zeros(2))
    >>> q.dequantize().tolist() == again.dequantize().tolist()
    True
    """
    w = jnp.asarray(w)
    if block is None and tile != "square":
        raise ValueError(
            f"tile={tile!r} describes blocks, but block=None; pass block=32, 64 or 128"
        )
    bits = None if key is None else jax.random.bits(key, w.shape, jnp.uint32)
    error = None if error is None else jnp.asarray(error)
    amax = None if amax is None else jnp.asarray(amax, jnp.float32)
    scaling: Scaling = Tensor() if block is None else Block(block, tile)
    return dual_quantize(w, scaling, error=error, bits=bits, amax=amax).rows


def quantize_weight(
    w: "Float[jax.Array, '*stack k n']",
    recipe: Recipe,
    *,
    error: "Float[jax.Array, '*stack k n'] | None" = None,
    key: Array | None = None,
    amax: Array | None = None,
    copies: Copies = "both",
    contracts: Contracts = "first",
) -> "tuple[Stored, Float[jax.Array, '*stack k n'] | None]":
    """Return (the weight `[*stack, k, n]` as the recipe stores it, the new error in the
    dtype of `error`, or None).

    Each matrix of a stack has its own scale: an outlier in one layer costs the others
    nothing.

    Use this to store one weight as a recipe says; use `tcfp_jax.store` instead for a
    tree of parameters.

    Args:
      w: the weight, real floats.
      recipe: how to store it; a stochastic residual needs a `key`.
      error: the rounding error of earlier steps, of the shape of `w`.
      key: random key.
      amax: the magnitude `[*stack]` to scale by instead of max |w + error|.
      copies: "both" orientations, or "one", `[k, n]`. FP4 codes exist once, `[n, k]`.
      contracts: the axis of `w` that the forward product contracts. Use "last" for the
        `[n, k]` of a transposed layout, whose layer multiplies by `Stored.swap()` of
        the result. FP4 packs along that axis.
    """
    check_real("w", w)
    quantize: Callable[..., tuple[Stored, Array | None]] = functools.partial(
        _quantized_matrix, recipe, copies == "both", contracts
    )
    stack = w.shape[:-2]
    if key is not None and stack:
        key = jax.random.split(key, stack)
    for _ in stack:
        quantize = jax.vmap(quantize)
    return quantize(w, error, key, amax)


def _quantized_matrix(
    recipe: Recipe,
    both: bool,
    contracts: Contracts,
    w: Array,
    error: Array | None,
    key: Array | None,
    amax: Array | None,
) -> tuple[Stored, Array | None]:
    form = recipe.stored
    if form is None:
        raise ValueError(
            "this recipe keeps weights in BF16; there is nothing to quantize, use"
            ' recipe("tcfp12")'
        )
    orientation: Orientation = "both" if both else "rows"
    options: Any = dict(
        amax=amax, orientation=orientation, backend=recipe.quantize_backend
    )
    if isinstance(form, Dual):
        bits = None
        if form.remainder == "stochastic":
            if key is None:
                raise ValueError(
                    'remainder="stochastic" needs key=jax.random.key(seed) for its'
                    " random bits"
                )
            bits = jax.random.bits(key, w.shape, jnp.uint32)
        parts = dual_quantize(
            w, recipe.scaling, dtype=form.dtype, error=error, bits=bits, **options
        )
        # Dgrad contracts rows of `[k, n]` along n, and the forward product reads
        # columns.
        return Stored(parts.columns, parts.rows), parts.error
    target = w.astype(jnp.float32)
    if error is not None:
        target = target + error.astype(jnp.float32)
    if isinstance(recipe.scaling, Fp4):
        if amax is not None:
            raise ValueError(
                f"amax= scales a whole tensor, but scaling={recipe.scaling} has blocks;"
                " drop one of them"
            )
        stored = _packed(target, recipe.scaling, contracts)
    else:
        one = quantize_values(target, form.dtype, recipe.scaling, **options)
        stored = Stored(one.columns, one.rows)
    if error is None:
        return stored, None
    return stored, numerics.residual(target, stored.dequantize()).astype(error.dtype)


def _packed(w: Array, scaling: Fp4, contracts: Contracts) -> Stored:
    """Return the codes `[n, k]` of a matrix, which serve both products; an odd k gets a
    row of zeros.
    """
    n, k = entries_of(w)
    rows, columns = w.shape
    if contracts == "first":
        n, k = k, n
        rows, columns = columns, rows
    mesh = jax.typeof(w).sharding.mesh
    # A device holds whole blocks, or all of an axis.
    side = scaling.block if scaling.squares else 1
    if rows % (shards(mesh, n) * side):
        n = None
    if columns % (shards(mesh, k) * scaling.block):
        k = None

    def pack(w: Array) -> Operand:
        w = w if contracts == "last" else w.T
        return quantize_fp4(jnp.pad(w, ((0, 0), (0, w.shape[-1] % 2))), scaling)

    # Blocks merge and cut axes, which explicit types refuse; XLA does it with automatic
    # ones.
    operand = with_automatic_axes(
        pack, lambda leaf: PartitionSpec(*(n, k)[: leaf.ndim]), w
    )
    odd = columns % 2
    if contracts == "first":
        return Stored(operand, None, padding=odd)
    return Stored(None, operand, padding=odd)
