"""The nouns of the library: an `Operand` of a product, and what quantizers and products are asked for.

An operand is FP8 values, contracted along their last axis, with their scale and, where there is one, a residual: a
second FP8 tensor that shares the scale, `x ~ (values + lo) * scale`. Its `Scaling` says which values share a scale.
With `Fp4` the values are E2M1 codes, two a byte, and the scales may have a scale, `outer`.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.fp4 import numbers, unpack
from pallas_kernels.scaling import (
    BLOCK_SIZES,
    SCALE_DTYPE,
    ZERO_BLOCK,
    Block,
    Fp4,
    Row,
    Scale,
    Scaling,
    Tensor,
    Tile,
)  # fmt: skip
from pallas_kernels.wire import Wire

__all__ = [
    "BLOCK_SIZES", "SCALE_DTYPE", "ZERO_BLOCK", "Accumulation", "Block", "Contracts", "Fp4", "Operand", "Orientation",
    "Product", "Quantization", "Quantized", "Row", "Scale", "Scaling", "Tensor", "Tile", "sizes",
]  # fmt: skip

Orientation = Literal["rows", "both"]
Accumulation = Literal["fast", "full"]
# Which axis of a matrix of values products contract.
Contracts = Literal["last", "first"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operand:
    """FP8 values with their scales, and perhaps a residual: `x ~ (values + lo) * scale`.

    Attributes:
      values: FP8 `[..., c]`; products contract c (or, of a weight gradient, all axes but the first). With `Fp4` uint8
        `[..., c / 2]`, two codes a byte.
      scale: float32 `[]` (`Tensor`; the leading axes of a stack), float32 `[...]` (`Row`), or float8_e8m0fnu, one for
        each block (`Block`); with `Fp4` float8_e4m3fn or float8_e8m0fnu, one for each block.
      lo: FP8, the shape of `values`, or None.
      lo_scale: of blocks with a residual: `scale`, but code 0 for every block whose residual is all zeros.
      scaling: which values share a scale.
      contracts: "first" where `values` and `lo` are `[c, n]` and stand for their transpose, which a product makes where
        it multiplies (`turn_late`). Scales and `shape` are those of the transpose.
      outer: of NVFP4, float32 `[]` or the leading axes of a stack: what all scales are multiplied by.
    """

    values: jax.Array
    scale: jax.Array
    lo: jax.Array | None = None
    lo_scale: jax.Array | None = None
    scaling: Scaling = field(default=Tensor(), metadata=dict(static=True))
    contracts: Contracts = field(default="last", metadata=dict(static=True))
    outer: jax.Array | None = None

    @property
    def hi(self) -> jax.Array:
        """The values, as the larger half of a split weight is called."""
        return self.values

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that it stands for."""
        if isinstance(self.scaling, Fp4):
            return (*self.values.shape[:-1], 2 * self.values.shape[-1])
        return self.values.shape if self.contracts == "last" else self.values.shape[::-1]

    @property
    def dtype(self) -> jnp.dtype:
        """The format of the values."""
        return jnp.dtype(jnp.float4_e2m1fn if isinstance(self.scaling, Fp4) else self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def scale_of_values(self) -> jax.Array:
        """The scales in float32, shaped to multiply the values."""
        scale = self.scaling.spread(self.scale, self.shape)
        return scale if self.outer is None else scale * self.outer[..., None, None]

    def drop_residual(self) -> "Operand":
        """The same values without `lo`."""
        return replace(self, lo=None, lo_scale=None)

    def turn(self) -> "Operand":
        """The transposed matrix, whose last two axes are swapped.

        Raises:
          NotImplementedError: rows or vectors, which the transpose does not have.
        """
        swap: Any = lambda x: None if x is None else jnp.swapaxes(x, -1, -2)
        lo_scale = None if self.lo_scale is None else self.scaling.turn(self.lo_scale)
        return Operand(swap(self.values), self.scaling.turn(self.scale), swap(self.lo), lo_scale, self.scaling)

    def turn_late(self) -> "Operand":
        """`turn`, of a matrix whose values each product transposes itself, after devices have brought them together.

        A matrix that devices hold in parts is then gathered as it lies, by a product that reads it so and by one that
        reads its transpose, and XLA gathers it once for both.
        """
        turned = self.turn()
        return Operand(self.values, turned.scale, self.lo, turned.lo_scale, self.scaling, "first")

    def settled(self) -> "Operand":
        """The same with its values contracted along their last axis."""
        if self.contracts == "last":
            return self
        lo = None if self.lo is None else self.lo.T
        return Operand(self.values.T, self.scale, lo, self.lo_scale, self.scaling)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """(values + lo) * scale, in float32, where the sum is exact, and then `dtype`.

        With `Fp4` it is `number * (scale * outer)`, as the format library has it.

        >>> Operand(jnp.ones(2, jnp.float8_e4m3fn), jnp.float32(0.5)).dequantize().tolist()
        [0.5, 0.5]
        """
        if self.contracts == "first":
            return self.settled().dequantize(dtype)
        if isinstance(self.scaling, Fp4):
            return (numbers(unpack(self.values)) * self.scale_of_values()).astype(dtype)
        if self.lo is None:
            # Without the barrier XLA on a GPU would cancel the cast against the one that made the values, in one jit.
            total = lax.optimization_barrier(self.values).astype(jnp.float32)
        else:
            # No barrier: both halves were rounded before they were cast, so cancelling the cast changes nothing.
            total = self.values.astype(jnp.float32) + self.lo.astype(jnp.float32)
        return (total * self.scale_of_values()).astype(dtype)


class Quantized(NamedTuple):
    """What every quantizer returns.

    Attributes:
      rows: the tensor `[..., k]`, contracted along k.
      columns: `[k, ...]`, contracted along all other axes; None where only rows were asked for.
      error: what was left over, where an error came in; in its dtype.
    """

    rows: Operand
    columns: Operand | None = None
    error: jax.Array | None = None


@dataclass(frozen=True)
class Quantization:
    """What a quantizer is asked for: the static options of `quantize` and `dual_quantize`.

    Attributes:
      dtype: float8_e4m3fn or float8_e5m2, as a NumPy dtype.
      scaling: which values share a scale.
      orientation: "rows", or "both" for `columns` beside them.
    """

    dtype: Any
    scaling: Scaling
    orientation: Orientation = "rows"


@dataclass(frozen=True)
class Product:
    """What a product is asked for: the static options of `matmul`.

    Attributes:
      out_dtype: of the result; the sum is scaled in float32 and then rounded to it.
      accumulation: "fast" adds in the tensor core's own accumulator, "full" promotes to float32 during the sum.
      out_sharding: of the result under a mesh with explicit axes, as in `lax.dot_general`.
      wire: how devices add partial sums, see `pallas_kernels.wire`.
    """

    out_dtype: Any = jnp.bfloat16
    accumulation: Accumulation = "fast"
    out_sharding: Any = None
    wire: Wire | None = None


def sizes(x: Operand, w: Operand) -> tuple[int, int, int]:
    """(m, k, n) of the product as one of matrices."""
    k = math.prod(w.shape[1:])
    return math.prod(x.shape) // k if k else 0, k, w.shape[0]
