"""`quantize` and `split`: tensors as FP8 operands; `quantize_weight`: a weight as its recipe stores it.

The arithmetic is that of `pallas_kernels`; this module adds defaults, and what a recipe asks for.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import Block, Contracts, Fp4, Operand, Quantized, Scale, Scaling, Tensor, Tile
from pallas_kernels.quantize.api import quantize as quantize_values
from pallas_kernels.specs import entries_of
from tcfp_jax.recipes import Copies, Dual, Recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.stored import Stored


def quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: Scale = "pow2",
    block: int | None = None,
    axis: int = -1,
    tile: Tile = "vector",
) -> Operand:
    """`x` as FP8 values and one scale, or one for each block: `values = saturate(round(x / scale))`.

    Args:
      x: real floats of any shape; arithmetic is float32.
      dtype: `float8_e4m3fn` (31.5 dB on Gaussian data) or `float8_e5m2` (25.5 dB, wider range).
      scale: "pow2", the smallest power of two that fits max |x|, or "float32", max |x| / largest.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of x shares one.
      axis: along which the vectors of a block run. The result has it last: it stands for `moveaxis(x, axis, -1)`.
      tile: "vector", or "square" blocks of a matrix, which are the same for its transpose.

    Returns:
      An `Operand` with `values`, `scale` and `dequantize()`.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: `scale`, `block` or `tile` is unknown, `axis` is out of range; or blocks with `scale="float32"`, or
        `axis` or `tile` without blocks.

    >>> quantize(jnp.array([1.0, -3.0])).dequantize().tolist()
    [1.0, -3.0]
    >>> quantize(jnp.ones((4, 100)), block=32).scale.shape
    (4, 4)
    """
    x = jnp.asarray(x)
    scaling: Scaling = Tensor(scale)
    if block is None:
        if axis != -1 or tile != "vector":
            raise ValueError(f"axis={axis} and tile={tile!r} describe blocks, but block=None; pass block=32, 64 or 128")
    else:
        if scale != "pow2":
            raise ValueError(
                f'scale={scale!r} with block={block}: the scales of blocks are powers of two; use scale="pow2"'
            )
        scaling = Block(block, tile)
        x = _with_axis_last(x, axis, tile)
    return quantize_values(x, dtype, scaling).rows


def _with_axis_last(x: jax.Array, axis: int, tile: str) -> jax.Array:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} is out of range for x{list(x.shape)}; use -{x.ndim} to {x.ndim - 1}")
    if tile == "square" and axis != -1:
        raise ValueError(f'axis={axis} with tile="square": squares have no direction; leave axis=-1')
    return jnp.moveaxis(x, axis, -1)


def split(
    w: ArrayLike,
    *,
    error: ArrayLike | None = None,
    key: jax.Array | None = None,
    amax: ArrayLike | None = None,
    block: int | None = None,
    tile: Tile = "square",
) -> Operand:
    """`w + error` as two E4M3 tensors with one scale: `hi = round(w/s)`, `lo = round(w/s - hi)`; 64 dB on N(0, 1).

    Args:
      w: real floats of any shape; arithmetic is float32.
      error: what earlier roundings left, shape of `w`.
      key: JAX random key; rounds `lo` stochastically, so that E[hi + lo] s = w + error, reproducibly.
      amax: scale by this instead of max |w + error|; what clips in `hi` is caught by `lo`.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of w shares one.
      tile: of blocks: "square" (of a matrix), or "vector" along the last axis.

    Returns:
      An `Operand` with `hi`, `lo`, `scale`, `nbytes` and `dequantize()`.

    Raises:
      TypeError: `w` or `error` is not real floating point.
      ValueError: the shape of `error` is not that of `w`, `block` or `tile` is unknown, `amax` with blocks, or `tile`
        without.

    >>> w = jnp.array([1.0, 0.3])
    >>> q = split(w)
    >>> (w - q.dequantize()).tolist() == (w - split(w, error=jnp.zeros(2)).dequantize()).tolist()
    True
    """
    w = jnp.asarray(w)
    if block is None and tile != "square":
        raise ValueError(f"tile={tile!r} describes blocks, but block=None; pass block=32, 64 or 128")
    bits = None if key is None else jax.random.bits(key, w.shape, jnp.uint32)
    error = None if error is None else jnp.asarray(error)
    amax = None if amax is None else jnp.asarray(amax, jnp.float32)
    scaling: Scaling = Tensor() if block is None else Block(block, tile)
    return dual_quantize(w, scaling, error=error, bits=bits, amax=amax).rows


def quantize_weight(
    w: jax.Array,
    recipe: Recipe,
    *,
    error: jax.Array | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    copies: Copies = "both",
    contracts: Contracts = "first",
) -> tuple[Stored, jax.Array | None]:
    """(the weight `[k, n]` as the recipe stores it, the error left over in the dtype of the one that came in, or None).

    Args:
      error: what earlier roundings left, shape of `w`.
      key: random key of a recipe that rounds stochastically.
      amax: scale by this instead of max |w + error|.
      copies: "both" orientations, or "one", `[k, n]`; codes of FP4 are there once, `[n, k]`.
      contracts: the axis of `w` that the forward product contracts; "last" for the `[n, k]` of a transposed layout,
        whose layer multiplies by `Stored.swap()` of the result. FP4 packs along that axis.

    Raises:
      ValueError: a stochastic residual without a key, or a recipe that does not quantize weights.
    """
    form = recipe.stored
    if form is None:
        raise ValueError('this recipe keeps weights in BF16; there is nothing to quantize, use recipe("tcfp12")')
    orientation: Any = "both" if copies == "both" else "rows"
    options: Any = dict(amax=amax, orientation=orientation, backend=recipe.quantize_backend)
    if isinstance(form, Dual):
        bits = None
        if form.remainder == "stochastic":
            if key is None:
                raise ValueError('remainder="stochastic" needs key=jax.random.key(seed) for its random bits')
            bits = jax.random.bits(key, w.shape, jnp.uint32)
        parts = dual_quantize(w, recipe.scaling, dtype=form.dtype, error=error, bits=bits, **options)
        return _stored(parts), parts.error
    target = w.astype(jnp.float32)
    if error is not None:
        target = target + error.astype(jnp.float32)
    if isinstance(recipe.scaling, Fp4):
        if amax is not None:
            raise ValueError(f"amax= scales a whole tensor, but scaling={recipe.scaling} has blocks; drop one of them")
        stored = _packed(target, recipe.scaling, contracts)
    else:
        stored = _stored(quantize_values(target, form.dtype, recipe.scaling, **options))
    if error is None:
        return stored, None
    return stored, numerics.residual(target, stored.dequantize()).astype(error.dtype)


def _stored(parts: Quantized) -> Stored:
    """Rows of `[k, n]` are contracted along n, as dgrad does; columns are what the forward product reads."""
    return Stored(parts.columns, parts.rows)


def _packed(w: jax.Array, scaling: Fp4, contracts: Contracts) -> Stored:
    """The codes `[n, k]` of a matrix, which both products read; an odd k gets a row of zeros."""
    n, k = entries_of(w) if contracts == "last" else entries_of(w)[::-1]
    rows, columns = w.shape if contracts == "last" else w.shape[::-1]
    mesh = jax.typeof(w).sharding.mesh
    # A device has whole blocks or all of an axis.
    n = n if rows % (_parts(mesh, n) * (scaling.block if scaling.tile == "square" else 1)) == 0 else None
    k = k if columns % (_parts(mesh, k) * scaling.block) == 0 else None

    def pack(w: jax.Array) -> Operand:
        w = w if contracts == "last" else w.T
        return quantize_fp4(jnp.pad(w, ((0, 0), (0, w.shape[-1] % 2))), scaling)

    # Blocks merge and cut axes, which XLA does and types do not.
    operand = with_automatic_axes(pack, lambda leaf: PartitionSpec(*(n, k)[: leaf.ndim]), w)
    odd = columns % 2
    return Stored(operand, None, padding=odd) if contracts == "first" else Stored(None, operand, padding=odd)


def _parts(mesh: Any, entry: Any) -> int:
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(mesh.shape[name] for name in names)
