"""The nouns of the library: an `Operand` of a product, options, and their checks.

An operand is FP8 values, contracted along their last axis, with their scale and an
optional residual: a second FP8 tensor that shares the scale,
`x ~ (values + lo) * scale`. Its `Scaling` says which values share a scale. With `Fp4`
the values are E2M1 codes, two a byte, and the scales may have a scale themselves,
`outer`.

Each error of a check names the broken rule, the given value, and the repair.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.checks import check_choice
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
)
from pallas_kernels.specs import Shape, Sharding, entries_of, moved
from pallas_kernels.wire import Wire

__all__ = [
    "BLOCK_SIZES",
    "SCALE_DTYPE",
    "ZERO_BLOCK",
    "Accumulation",
    "Block",
    "Contracts",
    "Fp4",
    "MatmulOptions",
    "Operand",
    "Orientation",
    "Quantization",
    "Quantized",
    "Row",
    "Scale",
    "Scaling",
    "Tensor",
    "Tile",
    "check_operands",
    "check_quantizer",
    "check_real",
    "dimensions",
    "sizes",
]

Orientation = Literal["rows", "both"]
Accumulation = Literal["fast", "full"]
# The axis of a matrix of values that products contract.
Contracts = Literal["last", "first"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operand:
    """FP8 values with scales and perhaps a residual: `x ~ (values + lo) * scale`.

    Attributes:
      values: FP8 `[..., c]`; products contract c (or, in a weight gradient, all axes
        but the first). With `Fp4` uint8 `[..., c / 2]`, two codes a byte.
      scale: float32 `[]` (`Tensor`; the leading axes of a stack), float32 `[...]`
        (`Row`), or float8_e8m0fnu, one for each block (`Block`); with `Fp4`
        float8_e4m3fn or float8_e8m0fnu, one for each block.
      lo: FP8, the shape of `values`, or None.
      lo_scale: scales of the residual in blocks: `scale`, but code 0 for every block
        whose residual is all zeros.
      scaling: rule that says which values share a scale.
      contracts: "first" if `values` and `lo` are `[c, n]` and stand for their
        transpose, which each product makes itself (`turn_late`). Scales and `shape`
        already belong to the transpose.
      outer: second scale of NVFP4, which multiplies all others, float32 `[]` or the
        leading axes of a stack.
    """

    values: Array
    scale: Array
    lo: Array | None = None
    lo_scale: Array | None = None
    scaling: Scaling = field(default=Tensor(), metadata=dict(static=True))
    contracts: Contracts = field(default="last", metadata=dict(static=True))
    outer: Array | None = None

    @property
    def hi(self) -> Array:
        """The values, by the name that they have next to a residual."""
        return self.values

    @property
    def residual(self) -> Array:
        """The second half, `lo`, of an operand that must have one."""
        if self.lo is None:
            raise ValueError("the operand has no residual; make it by dual_quantize")
        return self.lo

    @property
    def shape(self) -> Shape:
        """Shape of the tensor for which the operand stands."""
        shape = self.values.shape
        if self.scaling.packed:
            return (*shape[:-1], 2 * shape[-1])
        return shape if self.contracts == "last" else shape[::-1]

    @property
    def dtype(self) -> jnp.dtype:
        """Format of the values."""
        packed = self.scaling.packed
        return jnp.dtype(jnp.float4_e2m1fn if packed else self.values.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        leaves = jax.tree.leaves(self)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def scale_of_values(self) -> Array:
        """Return the scales in float32, shaped to multiply the values."""
        scale = self.scaling.spread(self.scale, self.shape)
        return scale if self.outer is None else scale * self.outer[..., None, None]

    def drop_residual(self) -> "Operand":
        """Return the same values without `lo`."""
        return replace(self, lo=None, lo_scale=None)

    def turn(self) -> "Operand":
        """Return the transposed matrix, with the last two axes swapped.

        Raises:
          NotImplementedError: the scales are rows or vectors, which the transpose does
            not have.
        """
        lo_scale = None if self.lo_scale is None else self.scaling.turn(self.lo_scale)
        return Operand(
            jnp.swapaxes(self.values, -1, -2),
            self.scaling.turn(self.scale),
            None if self.lo is None else jnp.swapaxes(self.lo, -1, -2),
            lo_scale,
            self.scaling,
        )

    def turn_late(self) -> "Operand":
        """Return `turn()` of a matrix whose values a product transposes later.

        Use it for a matrix that devices hold in parts. Its transpose and itself are
        then gathered in the same layout, and XLA gathers it once for both products.
        """
        turned = self.turn()
        return replace(turned, values=self.values, lo=self.lo, contracts="first")

    def settled(self) -> "Operand":
        """Return the same operand with its values contracted along their last axis."""
        if self.contracts == "last":
            return self
        lo = None if self.lo is None else self.lo.T
        return Operand(self.values.T, self.scale, lo, self.lo_scale, self.scaling)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Return `(values + lo) * scale` in float32, cast to `dtype`.

        The sum is exact, and a result beyond the range of `dtype` is the largest. With
        `Fp4` it is `number * (scale * outer)`, in the order of the format library.

        >>> ones = jnp.ones(2, jnp.float8_e4m3fn)
        >>> Operand(ones, jnp.float32(0.5)).dequantize().tolist()
        [0.5, 0.5]
        """
        if self.contracts == "first":
            return self.settled().dequantize(dtype)
        if self.scaling.packed:
            total = numbers(unpack(self.values))
        elif self.lo is None:
            # Without the barrier XLA on a GPU would cancel the cast against the one
            # that made the values, in one jit.
            total = lax.optimization_barrier(self.values).astype(jnp.float32)
        else:
            # No barrier: both halves were rounded before they were cast, so cancelling
            # the cast changes nothing.
            total = self.values.astype(jnp.float32) + self.lo.astype(jnp.float32)
        scale = self.scale_of_values()
        if scale.shape == total.shape:
            scale = moved(scale, entries_of(total))
        return numerics.dequantized(total, scale, dtype)


class Quantized(NamedTuple):
    """Result of every quantizer.

    Attributes:
      rows: the tensor `[..., k]`, contracted along k.
      columns: `[k, ...]`, contracted along all other axes, or None if only rows were
        asked for.
      error: rest of the rounding if an error came in, in the dtype of that error.
    """

    rows: Operand
    columns: Operand | None = None
    error: Array | None = None


@dataclass(frozen=True)
class Quantization:
    """Static options of `quantize` and `dual_quantize`.

    Attributes:
      dtype: float8_e4m3fn or float8_e5m2; a NumPy dtype after `check_quantizer`.
      scaling: rule that says which values share a scale.
      orientation: "rows", or "both" to get `columns` as well.
    """

    dtype: DTypeLike
    scaling: Scaling
    orientation: Orientation = "rows"


@dataclass(frozen=True)
class MatmulOptions:
    """Static options of `matmul` and `skip_matmul`.

    Attributes:
      out_dtype: dtype of the result; the sum is scaled in float32 and then rounded to
        it.
      accumulation: "fast" adds in the tensor core's own accumulator, "full" promotes to
        float32 during the sum.
      out_sharding: sharding of the result under a mesh with explicit axes, as in
        `lax.dot_general`.
      wire: dtype in which devices add partial sums, see `pallas_kernels.wire`.
    """

    out_dtype: DTypeLike = jnp.bfloat16
    accumulation: Accumulation = "fast"
    out_sharding: Sharding = None
    wire: Wire | None = None


def sizes(x: Operand, w: Operand) -> tuple[int, int, int]:
    """Return (m, k, n) of the product, as one of matrices."""
    shape = w.shape
    k = math.prod(shape[1:])
    return math.prod(x.shape) // k if k else 0, k, shape[0]


def dimensions(x: Operand, w: Operand) -> lax.DotDimensionNumbers:
    """Return the axes of a product as `lax.dot_general` names them."""
    contracted = w.values.ndim - 1
    of_x = tuple(range(x.values.ndim - contracted, x.values.ndim))
    # XLA gathers w in its own layout, and transposes it afterwards if it is contracted
    # along its first axis.
    of_w = tuple(range(1, w.values.ndim)) if w.contracts == "last" else (0,)
    return (of_x, of_w), ((), ())


def check_real(name: str, x: object) -> None:
    """Raise a TypeError unless `x` is an array of real floating-point numbers."""
    if not hasattr(x, "dtype"):
        raise TypeError(
            f"{name} is a {type(x).__name__}, not an array; use jnp.asarray({name})"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {x.dtype}, but only real floats are multiplied or"
            f" rounded in FP8 and FP4; use {name}.astype(jnp.float32)"
        )


def check_quantizer(
    name: str,
    x: Array,
    options: Quantization,
    amax: Array | None,
) -> Quantization:
    """Return the options of a quantizer with a NumPy dtype, or raise if x does not fit.

    Raises:
      TypeError: `x` is not real floating point, or the dtype is not FP8.
      ValueError: x has no such rows or blocks, `amax` comes with several scales, or the
        orientation is unknown.
    """
    check_real(name, x)
    if options.orientation not in ("rows", "both"):
        check_choice("orientation", options.orientation, ("rows", "both"))
    scaling = options.scaling
    if not isinstance(scaling, Tensor):
        if amax is not None:
            raise ValueError(
                f"amax= scales a whole tensor, but scaling={scaling} has several"
                " scales; drop one of them"
            )
        if x.ndim == 0:
            raise ValueError(
                f"{name} is a scalar, which has no rows or blocks; use scaling=Tensor()"
            )
        if scaling.squares and x.ndim != 2:
            raise ValueError(
                f"{name}{list(x.shape)} has no square blocks, which are cut from a"
                ' matrix; use jax.vmap over a stack, or tile="vector"'
            )
    dtype = jnp.dtype(options.dtype)
    if dtype not in numerics.FLOAT8_DTYPES:
        numerics.float8_dtype(dtype)
    return replace(options, dtype=dtype)


def check_operands(x: Operand, w: Operand) -> None:
    """Raise unless tensor cores have the product of x and w.

    Raises:
      TypeError: an operand is not FP8, or scales of blocks are not E8M0.
      ValueError: the contracted sizes differ, or an operand's halves or scales do not
        fit its values.
      NotImplementedError: E5M2 x E5M2, two scalings that no product combines, or an x
        with a residual.
    """
    a = x.values.shape
    b = w.values.shape if w.contracts == "last" else w.values.shape[::-1]
    contracted = len(b) - 1
    if contracted < 1 or len(a) < contracted or a[len(a) - contracted :] != b[1:]:
        raise ValueError(
            f"x{list(a)} and w{list(b)} must agree in the axes after w's first;"
            " transpose or reshape one of them"
        )
    for name, operand in (("x", x), ("w", w)):
        values = operand.values
        lo = operand.lo
        if values.dtype not in numerics.FLOAT8_DTYPES:
            numerics.float8_dtype(values.dtype)
        if lo is not None and (lo.shape != values.shape or lo.dtype != values.dtype):
            raise ValueError(
                f"{name}.lo is {lo.dtype}{list(lo.shape)}, but {name} is"
                f" {values.dtype}{list(values.shape)}; both halves must match"
            )
    if x.lo is not None:
        raise NotImplementedError(
            "x has a residual, which takes a product of its own; multiply x_hi and x_lo"
            " apart"
        )
    if x.values.dtype == w.values.dtype == jnp.dtype(jnp.float8_e5m2):
        raise NotImplementedError(
            "float8_e5m2 x float8_e5m2: no tensor core multiplies it; make one operand"
            " float8_e4m3fn"
        )
    if x.scaling != w.scaling.along_rows:
        raise NotImplementedError(
            f"x has the scaling {x.scaling} and w {w.scaling}: no product combines"
            f" them; quantize x with scaling={w.scaling.along_rows}"
        )
    if w.scaling.in_blocks:
        for name, operand in (("x", x), ("w", w)):
            _check_block_scales(name, operand, contracted)


def _check_block_scales(name: str, operand: Operand, contracted: int) -> None:
    # Blocks run along all contracted axes as one.
    shape = operand.values.shape
    kept = len(shape) - contracted
    expected = operand.scaling.scale_shape((*shape[:kept], math.prod(shape[kept:])))
    for scale in (operand.scale, operand.lo_scale):
        if scale is not None and scale.dtype != SCALE_DTYPE:
            raise TypeError(
                f"the scales of {name} have dtype {scale.dtype}, not float8_e8m0fnu;"
                " use quantize"
            )
        if scale is not None and scale.shape != expected:
            raise ValueError(
                f"{name}{list(shape)} with {operand.scaling} has scales"
                f" {list(expected)}, but these are {list(scale.shape)}; quantize it"
                " with this scaling"
            )
