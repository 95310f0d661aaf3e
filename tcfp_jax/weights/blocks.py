"""Tensors with more than one scale, as pytrees: `BlockArray`, `ResidualBlockArray`, `RowArray`.

As a weight each holds what the forward product reads (`[n, k]`, contracted along k) beside what dgrad reads (`[k, n]`,
contracted along n). Square blocks are the same numbers both ways; vectors and rows are two quantizations.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.blocks import Tile, spread


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockArray:
    """One FP8 tensor with a scale for every block: `x ~ values * scales`, block by block.

    Attributes:
      values: FP8 `[..., k]`.
      scales: float8_e8m0fnu, `[..., ceil(k / block)]` for vectors; of squares the axis before is divided, too.
      transposed, transposed_scales: `values` with its last axis first and the scales of that, where products need
        them, else None; for vectors quantized anew, along the other axes.
      block: 32, 64 or 128.
      tile: "vector" or "square".
    """

    values: jax.Array
    scales: jax.Array
    transposed: jax.Array | None = None
    transposed_scales: jax.Array | None = None
    block: int = field(default=128, metadata=dict(static=True))
    tile: Tile = field(default="vector", metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it stands for."""
        return self.values.shape

    def scale_of_values(self) -> jax.Array:
        """The scale of every value, float32."""
        return spread(numerics.decode_e8m0(self.scales), self.shape, self.block, self.tile)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Values * scales, in float32 and then `dtype`.

        >>> import tcfp_jax
        >>> tcfp_jax.quantize(jnp.array([1.0, -3.0]), block=32).dequantize().tolist()
        [1.0, -3.0]
        """
        # As in QArray: without the barrier XLA on the GPU would cancel the cast against the one that made the values.
        return (lax.optimization_barrier(self.values).astype(jnp.float32) * self.scale_of_values()).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualBlockArray:
    """A weight as two FP8 tensors with a scale for every block: `W ~ hi * scales + lo * residual_scales`.

    Attributes:
      hi, lo: FP8 `[..., k, n]`.
      scales, residual_scales: float8_e8m0fnu, one for each block; equal, but for blocks whose `lo` is all zeros, which
        have code 0.
      hi_transposed, lo_transposed: `[..., n, k]` copies of squares, where products need them, else None.
      block, tile: as in `BlockArray`.
    """

    hi: jax.Array
    lo: jax.Array
    scales: jax.Array
    residual_scales: jax.Array
    hi_transposed: jax.Array | None = None
    lo_transposed: jax.Array | None = None
    block: int = field(default=128, metadata=dict(static=True))
    tile: Tile = field(default="square", metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it stands for."""
        return self.hi.shape

    def scale_of_values(self) -> jax.Array:
        """The scale of every value, float32."""
        return spread(numerics.decode_e8m0(self.scales), self.shape, self.block, self.tile)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """(hi + lo) * scales, in float32 (where the sum is exact) and then `dtype`.

        >>> import tcfp_jax
        >>> float(tcfp_jax.split(jnp.full((1, 1), 0.3), block=32).dequantize()[0, 0])
        0.2998046875
        """
        total = self.hi.astype(jnp.float32) + self.lo.astype(jnp.float32)
        return (total * self.scale_of_values()).astype(dtype)

    def drop_residual(self) -> BlockArray:
        """`hi` alone."""
        turned_scales = None if self.hi_transposed is None else jnp.swapaxes(self.scales, -1, -2)
        return BlockArray(self.hi, self.scales, self.hi_transposed, turned_scales, self.block, self.tile)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowArray:
    """One FP8 tensor with a float32 scale for every row: `x ~ values * scales[..., None]`.

    Attributes:
      values: FP8 `[..., k]`.
      scales: `[...]`.
      transposed, transposed_scales: FP8 `[k, ...]`, quantized anew with the scales `[k]`, where products need them.
    """

    values: jax.Array
    scales: jax.Array
    transposed: jax.Array | None = None
    transposed_scales: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor it stands for."""
        return self.values.shape

    def scale_of_values(self) -> jax.Array:
        """The scale of every value, float32."""
        return self.scales[..., None]

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Values * scales, in float32 and then `dtype`."""
        return (lax.optimization_barrier(self.values).astype(jnp.float32) * self.scale_of_values()).astype(dtype)
