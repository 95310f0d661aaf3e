"""Quantized tensors as pytrees: `QArray` (one FP8 tensor) and `ResidualArray` (two that share a scale).

`quantize` and `split` make them and those of `blocks.py`, `.dequantize()` gives float32 back, `quantize_weight` makes
what a recipe asks for.
The arithmetic is that of `pallas_kernels`; this module adds names, pytrees and the orientations of a weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_quantize.api import block_quantize
from pallas_kernels.blocks import BLOCKS, Tile
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.quantize.api import Orientation, Scale
from pallas_kernels.quantize.api import quantize as quantize_values
from pallas_kernels.row_quantize.api import row_quantize
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.weights.blocks import BlockArray, ResidualBlockArray, RowArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QArray:
    """One FP8 tensor: `x ~ values * scale`.

    Attributes:
      values: FP8, the shape of x.
      scale: float32, one per tensor; for a stack of weights the leading axes of `values`.
      transposed: `values` with its last two axes swapped, where products need it, else None.
    """

    values: jax.Array
    scale: jax.Array
    transposed: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it stands for."""
        return self.values.shape

    def scale_of_values(self) -> jax.Array:
        """The scale, shaped to multiply `values`."""
        return _expand(self.scale, self.values)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Values * scale, in float32 and then `dtype`.

        >>> float(quantize(jnp.float32(0.3)).dequantize())
        0.3125
        """
        # Without the barrier XLA on the GPU would cancel the cast against the one in `quantize`, in the same jit.
        return (lax.optimization_barrier(self.values).astype(jnp.float32) * self.scale_of_values()).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualArray:
    """A weight as two FP8 tensors with one scale: `W ~ (hi + lo) * scale`.

    Attributes:
      hi, lo: FP8 `[..., k, n]`.
      scale: float32, one per weight; for a stack of weights the leading axes of `hi`.
      hi_transposed, lo_transposed: `[..., n, k]` copies, where products need them, else None.
    """

    hi: jax.Array
    lo: jax.Array
    scale: jax.Array
    hi_transposed: jax.Array | None = None
    lo_transposed: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it stands for."""
        return self.hi.shape

    def scale_of_values(self) -> jax.Array:
        """The scale, shaped to multiply `hi` and `lo`."""
        return _expand(self.scale, self.hi)

    def drop_residual(self) -> QArray:
        """`hi` alone."""
        return QArray(self.hi, self.scale, self.hi_transposed)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """(hi + lo) * scale, in float32 (where the sum is exact) and then `dtype`.

        >>> float(split(jnp.float32(0.3)).dequantize())
        0.2998046875
        """
        # No barrier: hi and lo were rounded before they were cast, so cancelling the cast changes nothing.
        total = self.hi.astype(jnp.float32) + self.lo.astype(jnp.float32)
        return (total * self.scale_of_values()).astype(dtype)


Quantized = QArray | ResidualArray | BlockArray | ResidualBlockArray | RowArray
WithResidual = ResidualArray | ResidualBlockArray


def as_quantized(value: Any) -> Quantized | None:
    """`value` if it is a quantized tensor, or one from the mapping of its fields, which `nnx.Optimizer` makes of it.

    None where it is neither.

    >>> q = split(jnp.ones(2))
    >>> as_quantized({"hi": q.hi, "lo": q.lo, "scale": q.scale}).dequantize().tolist()
    [1.0, 1.0]
    """
    if isinstance(value, Quantized):
        return value
    kind = _kind(value) if isinstance(value, Mapping) else None
    if kind is None:
        return None
    options: dict[str, Any] = {}
    if kind in (BlockArray, ResidualBlockArray):  # a mapping of arrays keeps neither; shapes say both
        values, scales = value["hi" if kind is ResidualBlockArray else "values"], value["scales"]
        sizes = [block for block in BLOCKS if -(-values.shape[-1] // block) == scales.shape[-1]]
        square = values.ndim > 1 and scales.shape[-2] != values.shape[-2]
        options = dict(block=max(sizes), tile="square" if square else "vector")
    return kind(**dict(value), **options)


def _kind(value: Mapping[str, Any]) -> Any:
    """The type that has the fields of a mapping, or None."""
    names = set(value)
    if "scale" in names and names <= {field.name for field in fields(QArray)}:
        return QArray
    if "scale" in names and names <= {field.name for field in fields(ResidualArray)}:
        return ResidualArray
    if "residual_scales" in names:
        return ResidualBlockArray
    if {"values", "scales"} <= names:
        return RowArray if value["scales"].ndim < value["values"].ndim else BlockArray
    return None


def _expand(scale: jax.Array, like: jax.Array) -> jax.Array:
    return scale.reshape(scale.shape + (1,) * (like.ndim - scale.ndim))


def quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: Scale = "pow2",
    block: int | None = None,
    axis: int = -1,
    tile: Tile = "vector",
) -> QArray | BlockArray:
    """`x` as FP8 values and one scale, or one for each block: `values = saturate(round(x / scale))`.

    Args:
      x: real floats of any shape; arithmetic is float32.
      dtype: `float8_e4m3fn` (31.5 dB on Gaussian data) or `float8_e5m2` (25.5 dB, wider range).
      scale: "pow2", the smallest power of two that fits max |x|, or "float32", max |x| / largest.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of x shares one.
      axis: along which the vectors of a block run. The result has it last: it stands for `moveaxis(x, axis, -1)`.
      tile: "vector", or "square" blocks of a matrix, which are the same for its transpose.

    Raises:
      TypeError: `x` is not real floating point, or `dtype` is not FP8.
      ValueError: `scale`, `block` or `tile` is unknown, `axis` is out of range; or blocks with `scale="float32"`, or
        `axis` or `tile` without blocks.

    >>> quantize(jnp.array([1.0, -3.0])).dequantize().tolist()
    [1.0, -3.0]
    >>> quantize(jnp.ones((4, 100)), block=32).scales.shape
    (4, 4)
    """
    x = jnp.asarray(x)
    if block is None:
        if axis != -1 or tile != "vector":
            raise ValueError(f"axis={axis} and tile={tile!r} describe blocks, but block=None; pass block=32, 64 or 128")
        values, factor, _ = quantize_values(x, dtype, scale=scale)
        return QArray(values, factor)
    if scale != "pow2":
        raise ValueError(
            f'scale={scale!r} with block={block}: the scales of blocks are powers of two; use scale="pow2"'
        )
    parts = block_quantize(_with_axis_last(x, axis, tile), dtype, block=block, tile=tile)
    return BlockArray(parts.values, parts.scales, block=block, tile=tile)


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
) -> ResidualArray | ResidualBlockArray:
    """`w + error` as two E4M3 tensors with one scale: `hi = round(w/s)`, `lo = round(w/s - hi)`; 64 dB on N(0, 1).

    Args:
      w: real floats of any shape; arithmetic is float32.
      error: what earlier roundings left, shape of `w`.
      key: JAX random key; rounds `lo` stochastically, so that E[hi + lo] s = w + error, reproducibly.
      amax: scale by this instead of max |w + error|; what clips in `hi` is caught by `lo`.
      block: 32, 64 or 128 values share an E8M0 scale; None: all of w shares one.
      tile: of blocks: "square" (of a matrix), or "vector" along the last axis.

    Raises:
      TypeError: `w` or `error` is not real floating point.
      ValueError: the shape of `error` is not that of `w`, `block` or `tile` is unknown, or `amax` with blocks.

    >>> w = jnp.array([1.0, 0.3])
    >>> q = split(w)
    >>> (w - q.dequantize()).tolist() == (w - split(w, error=jnp.zeros(2)).dequantize()).tolist()
    True
    """
    w = jnp.asarray(w)
    bits = None if key is None else jax.random.bits(key, w.shape, jnp.uint32)
    error = None if error is None else jnp.asarray(error)
    if block is not None:
        if amax is not None:
            raise ValueError(f"amax= scales a whole tensor, but block={block} has a scale for each block; drop one")
        in_blocks = block_dual_quantize(w, block=block, tile=tile, error=error, bits=bits)
        return ResidualBlockArray(*in_blocks[:4], block=block, tile=tile)
    parts = dual_quantize(w, error=error, bits=bits, amax=None if amax is None else jnp.asarray(amax, jnp.float32))
    return ResidualArray(parts.hi, parts.lo, parts.scale)


def quantize_weight(
    w: jax.Array,
    recipe: Recipe,
    *,
    error: jax.Array | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    orientation: Orientation = "both",
) -> tuple[Quantized, jax.Array | None]:
    """(the weight `[k, n]` as the recipe stores it, the error left over in the dtype of the one that came in, or None).

    Raises:
      ValueError: a stochastic residual without a key, or a recipe that does not quantize weights.
    """
    if recipe.mode is TCFPMode.BF16:
        raise ValueError('this recipe keeps weights in BF16; there is nothing to quantize, use recipe("tcfp12")')
    if recipe.mode is TCFPMode.FP8:
        return _quantize_single(w, recipe, error=error, amax=amax, orientation=orientation)
    bits = None
    if recipe.residual == "stochastic":
        if key is None:
            raise ValueError('residual="stochastic" needs key=jax.random.key(seed) for its random bits')
        bits = jax.random.bits(key, w.shape, jnp.uint32)
    options: Any = dict(
        dtype=recipe.weight_dtype, error=error, bits=bits, orientation=orientation, backend=recipe.quantize_backend
    )
    if recipe.block is None:
        parts = dual_quantize(w, amax=amax, **options)
        return ResidualArray(parts.hi, parts.lo, parts.scale, parts.hi_transposed, parts.lo_transposed), parts.error
    blocks = block_dual_quantize(w, block=recipe.block, tile=recipe.weight_tile, **options)
    stored = ResidualBlockArray(
        blocks.hi, blocks.lo, blocks.scales, blocks.residual_scales, blocks.hi_transposed, blocks.lo_transposed,
        block=recipe.block, tile=recipe.weight_tile,
    )  # fmt: skip
    return stored, blocks.error


def _quantize_single(
    w: jax.Array, recipe: Recipe, *, error: jax.Array | None, amax: jax.Array | None, orientation: Orientation
) -> tuple[QArray | BlockArray | RowArray, jax.Array | None]:
    target = w.astype(jnp.float32)
    if error is not None:
        target = target + error.astype(jnp.float32)
    stored: QArray | BlockArray | RowArray
    options: Any = dict(orientation=orientation, backend=recipe.quantize_backend)
    if recipe.granularity == "row":
        stored = RowArray(*row_quantize(target, recipe.weight_dtype, scale=recipe.scale, **options))
    elif recipe.block is not None:
        blocks = block_quantize(target, recipe.weight_dtype, block=recipe.block, tile=recipe.weight_tile, **options)
        stored = BlockArray(*blocks, block=recipe.block, tile=recipe.weight_tile)
    else:
        parts = quantize_values(target, recipe.weight_dtype, scale=recipe.scale, amax=amax, **options)
        stored = QArray(parts.values, parts.scale, parts.transposed)
    return stored, None if error is None else numerics.residual(target, stored.dequantize()).astype(error.dtype)
