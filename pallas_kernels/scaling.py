"""`Scaling`: the rule that says which values of a tensor share a scale.

    Tensor    one float32 scale for all values
    Row       one float32 scale for every line along the last axis
    Block     one E8M0 scale for every vector of b values along the last axis, or for
              every square of b x b (OCP MX, 2023)
    Fp4       weights of four bits, E2M1 codes (`pallas_kernels.fp4`), with one scale
              for every 16 or 32

Scales are powers of two unless "float32" is asked for. With squares and whole tensors a
quantized matrix and its transpose are the same numbers, so one quantization of a weight
serves the forward product and the input gradient. Rows and vectors adapt to single
lines, and are found anew for each contraction axis: use them if single channels are
much larger than the rest. All have the same methods, so callers need not ask which one
they hold: `scale_dtype`, `in_blocks`, `squares` and `packed` say what matters.
"""

import math
import numbers
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NoReturn, Self, get_args

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.checks import check_choice
from pallas_kernels.specs import Shape, sharding_of

Scale = Literal["pow2", "float32"]
Tile = Literal["vector", "square"]
BLOCK_SIZES = (32, 64, 128)
SCALE_DTYPE = jnp.float8_e8m0fnu
# A remat policy that keeps this name keeps four bytes of each tensor with one scale.
# The backward pass then looks for no maximum again, and asks no other device for one.
AMAX_NAME = "tcfp_amax"
# E8M0's smallest scale, 2**-127, marks a block whose residual is all zeros.
ZERO_BLOCK = 0


def _count(size: int, tile: Tile, shape: Shape) -> Shape:
    """Return the number of blocks along each axis."""
    *leading, last = shape
    if tile == "square":
        leading[-1] = -(-leading[-1] // size)
    return (*leading, -(-last // size))


def _repeat(of_blocks: Array, size: int, tile: Tile, shape: Shape) -> Array:
    """Return one number for each value of a tensor, from one for each block."""
    repeat = partial(jnp.repeat, repeats=size, out_sharding=sharding_of(of_blocks))
    wide = _first(repeat(of_blocks, axis=-1), shape[-1], -1)
    if tile == "vector":
        return wide
    return _first(repeat(wide, axis=-2), shape[-2], -2)


def _first(x: Array, count: int, axis: int) -> Array:
    """Return the first values along an axis, at most all of them.

    `jax.export` may leave their number open.
    """
    if isinstance(count, int):
        return lax.slice_in_dim(x, 0, min(count, x.shape[axis]), axis=axis)
    # A slice would have a length that JAX cannot compare with `count`; negative padding
    # has this one.
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (0, count - x.shape[axis], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


@dataclass(frozen=True)
class _Float32:
    """Float32 scales, of one kind for a weight and for x that it multiplies."""

    scale: Scale = "pow2"

    scale_dtype = jnp.float32
    in_blocks = False  # blocks of values have scales in E8M0
    squares = False  # a block is a square of a matrix
    packed = False  # values are codes, two a byte

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, get_args(Scale))

    @cached_property
    def along_rows(self) -> Self:
        """Scaling of the activation or gradient that such a weight multiplies."""
        return self

    def reads(self, other: "Scaling") -> bool:
        """Return whether products that ask for this scaling read values of another."""
        return self == other


@dataclass(frozen=True)
class Tensor(_Float32):
    """One float32 scale for all values of a tensor, or for each matrix of a stack.

    Use this unless single channels are much larger than the rest: it is the fastest
    scaling, and one quantization of a matrix also serves its transpose.

    Attributes:
      scale: "pow2", the smallest power of two that covers max |x|, or "float32", max
        |x| / largest (the rule of nanochat and torchao).

    Raises:
      ValueError: an unknown `scale`.
    """

    serves_both = True  # one quantization of a matrix also serves its transpose

    def scale_shape(self, shape: Shape) -> Shape:
        """Return the shape of the scales of a stack of matrices.

        >>> Tensor().scale_shape((3, 48, 100))
        (3,)
        """
        return shape[:-2]

    def find(
        self,
        x: Array,
        dtype: DTypeLike,
        amax: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return (scale, its inverse as a multiplier) of float32 x.

        Both are NaN if max |x| is not finite.
        """
        if amax is None:
            amax = checkpoint_name(numerics.amax(x), AMAX_NAME)
        return numerics.scale_and_inverse(amax, dtype, self.scale)

    def spread(self, scale: Array, shape: Shape) -> Array:
        """Return the scale, shaped to multiply values of this shape."""
        return scale.reshape(scale.shape + (1,) * (len(shape) - scale.ndim))

    def turn(self, scale: Array) -> Array:
        """Return the scale of the transposed matrix."""
        return scale


@dataclass(frozen=True)
class Row(_Float32):
    """One float32 scale for every line along the last axis (torchao's "rowwise").

    Use this instead of `Tensor` if single tokens or channels are much larger than the
    rest. A matrix is then quantized once for each orientation.

    Attributes:
      scale: as in `Tensor`.

    Raises:
      ValueError: an unknown `scale`.
    """

    serves_both = False

    def scale_shape(self, shape: Shape) -> Shape:
        """Return the shape of the scales of a tensor.

        >>> Row().scale_shape((3, 48, 100))
        (3, 48)
        """
        return shape[:-1]

    def find(
        self,
        x: Array,
        dtype: DTypeLike,
        amax: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return (scales of float32 x's rows, their inverses, shaped to multiply x)."""
        assert amax is None, "check_quantizer refuses an amax of rows"
        scale, inverse = numerics.find_scale(x, dtype, self.scale, -1)
        return scale, inverse[..., None]

    def spread(self, scale: Array, shape: Shape) -> Array:
        """Return the scales, shaped to multiply values of this shape."""
        return scale[..., None]

    def turn(self, scale: Array) -> Array:
        """Raise, because the rows of the transposed matrix are other rows."""
        raise NotImplementedError(
            "the rows of a transposed matrix have other scales; quantize the transpose"
        )


@dataclass(frozen=True)
class Block:
    """One E8M0 scale for every block of values; the last block of an axis may be short.

    Use this if parts of a matrix differ much in size, or to skip residuals that are
    zero (`skip_matmul`). Products of blocks are slower than those of `Tensor`.

    Attributes:
      size: side of a block, 32, 64 or 128 values.
      tile: "vector", `size` values along the last axis, or "square", `size` x `size` of
        a matrix.

    Raises:
      ValueError: another size or an unknown tile.
    """

    size: int = 128
    tile: Tile = "square"

    scale = "pow2"
    scale_dtype = SCALE_DTYPE
    in_blocks = True
    packed = False

    def __post_init__(self) -> None:
        # 32.0 equals 32, but no shape holds it
        is_whole = isinstance(self.size, numbers.Integral)
        if not is_whole or self.size not in BLOCK_SIZES:
            raise ValueError(
                f"block={self.size!r} is not supported; use one of {list(BLOCK_SIZES)}"
            )
        check_choice("tile", self.tile, get_args(Tile))

    @property
    def block(self) -> int:
        """Number of values along the last axis that share a scale."""
        return self.size

    @property
    def squares(self) -> bool:
        """True if a block is a square of a matrix."""
        return self.tile == "square"

    @property
    def serves_both(self) -> bool:
        """True if one quantization of a matrix also serves its transpose."""
        return self.squares

    def reads(self, other: "Scaling") -> bool:
        """Return whether products that ask for this scaling read values of another."""
        return self == other

    @cached_property
    def along_rows(self) -> "Block":
        """Scaling of the activation or gradient that such a weight multiplies.

        It has vectors of the same size.
        """
        return Block(self.size, "vector")

    def scale_shape(self, shape: Shape) -> Shape:
        """Return the shape of the scales of a tensor.

        >>> Block(32, "vector").scale_shape((48, 100))
        (48, 4)
        >>> Block(32, "square").scale_shape((48, 100))
        (2, 4)
        """
        return _count(self.size, self.tile, shape)

    def amax(self, x: Array) -> Array:
        """Return max |x| of every block, float32; NaN or inf if the block has one."""
        counts = self.scale_shape(x.shape)
        # An axis of blocks as `scale_shape` counts them, so that sizes that
        # `jax.export` leaves open agree.
        sides = [(0, 0)] * x.ndim
        for axis in (-1,) if self.tile == "vector" else (-2, -1):
            sides[axis] = (0, counts[axis] * self.size - x.shape[axis])
        padded = jnp.pad(x, sides)
        if self.tile == "vector":
            return numerics.amax(padded.reshape(*counts, self.size), axis=-1)
        shape = (*counts[:-1], self.size, counts[-1], self.size)
        return numerics.amax(padded.reshape(shape), axis=(-3, -1))

    def find(
        self,
        x: Array,
        dtype: DTypeLike,
        amax: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return (E8M0 scales of float32 x's blocks, their inverses, spread over x)."""
        assert amax is None, "check_quantizer refuses an amax of blocks"
        scale, inverse = numerics.scale_and_inverse(self.amax(x), dtype, "pow2")
        spread = _repeat(inverse, self.size, self.tile, x.shape)
        return numerics.encode_e8m0(scale), spread

    def spread(self, scale: Array, shape: Shape) -> Array:
        """Return the scale of every value of a tensor of this shape, float32."""
        return _repeat(numerics.decode_e8m0(scale), self.size, self.tile, shape)

    def turn(self, scale: Array) -> Array:
        """Return the scales of the transposed matrix.

        Raises:
          NotImplementedError: the blocks are vectors, which run along the other axis
            there.
        """
        if self.tile == "vector":
            raise NotImplementedError(
                "the vectors of a transposed matrix have other scales; quantize the"
                " transpose"
            )
        return jnp.swapaxes(scale, -1, -2)


Fp4Format = Literal["nvfp4", "mxfp4"]
# Block size, dtype of the blocks' scales, and rules of each FP4 format.
_FP4: dict[str, tuple[int, DTypeLike, tuple[str, ...]]] = {
    "nvfp4": (
        16,
        jnp.float8_e4m3fn,
        ("amax", "four_over_six", "fold_exact", "one_level"),
    ),
    "mxfp4": (32, jnp.float8_e8m0fnu, ("amax",)),
}


@dataclass(frozen=True)
class Fp4:
    """E2M1 codes in blocks with one scale each, for weights.

    Use this to serve a model in 4.25 to 4.5 bits per value. Nothing trains faster by
    it on Hopper GPUs.

    Attributes:
      format: "nvfp4", blocks of 16 with E4M3 scales and a float32 scale of the matrix,
        or "mxfp4", blocks of 32 with E8M0 scales.
      tile: "vector" along the contraction, or "square" of 16 x 16 (32 x 32) of a
        matrix, whose transpose has the same blocks.
      rule: choice of a block's scale. For MXFP4 it is "amax", the rule of OCP. For
        NVFP4 "amax" is max |x| / 6, and "four_over_six" the better of max |x| / 6 and
        max |x| / 4. "fold_exact" is the better scale of mantissa 1, 1.25 or 1.5, whose
        products with codes are E4M3 numbers. "one_level" is max |x| / 6 in E4M3 with an
        `outer` of one.

    Raises:
      ValueError: an unknown format or tile, or a rule that the format does not have.

    >>> Fp4().block, Fp4("mxfp4").block
    (16, 32)
    >>> Fp4().bits((4096, 4096)), Fp4(tile="square").bits((4096, 4096))
    (4.5, 4.03125)
    """

    format: Fp4Format = "nvfp4"
    tile: Tile = "vector"
    rule: Literal["amax", "four_over_six", "fold_exact", "one_level"] = "amax"

    # One quantization serves all products of such weights, which are BF16 products.
    serves_both = True
    in_blocks = False  # of FP8 values
    packed = True

    def __post_init__(self) -> None:
        check_choice("format", self.format, _FP4)
        check_choice("tile", self.tile, get_args(Tile))
        rules = _FP4[self.format][2]
        if self.rule not in rules:
            raise ValueError(
                f"rule={self.rule!r} is not a rule of {self.format}; use one of"
                f" {list(rules)}"
            )

    @property
    def squares(self) -> bool:
        """True if a block is a square of a matrix."""
        return self.tile == "square"

    @property
    def block(self) -> int:
        """Number of values along the last axis that share a scale."""
        return _FP4[self.format][0]

    @property
    def scale(self) -> Scale:
        """Kind of scales, as in the other scalings."""
        return "pow2" if self.format == "mxfp4" else "float32"

    @property
    def scale_dtype(self) -> DTypeLike:
        """Dtype of a block's scale."""
        return _FP4[self.format][1]

    @property
    def has_outer(self) -> bool:
        """True if the scales have a scale themselves."""
        return self.format == "nvfp4"

    def reads(self, other: "Scaling") -> bool:
        """Return whether products that ask for this scaling read codes of another.

        They do not care about the rule that found the scales.
        """
        own = (self.format, self.tile)
        return isinstance(other, Fp4) and own == (other.format, other.tile)

    @cached_property
    def along_rows(self) -> Row:
        """Scaling of an 8-bit activation that such a weight multiplies."""
        return Row("float32")

    def scale_shape(self, shape: Shape) -> Shape:
        """Return the shape of the blocks' scales of a tensor.

        >>> Fp4().scale_shape((48, 100)), Fp4(tile="square").scale_shape((48, 100))
        ((48, 7), (3, 7))
        """
        return _count(self.block, self.tile, shape)

    def bits(self, shape: Shape) -> float:
        """Return the bits per value of a matrix of this shape, without `outer`."""
        return 4.0 + 8.0 * math.prod(self.scale_shape(shape)) / math.prod(shape)

    def spread(self, scale: Array, shape: Shape) -> Array:
        """Return the block scale of every value of a tensor, without `outer`."""
        return _repeat(self.in_float32(scale), self.block, self.tile, shape)

    def in_float32(self, scale: Array) -> Array:
        """Return the blocks' scales as numbers, without `outer`."""
        if self.format == "mxfp4":
            return numerics.decode_e8m0(scale)
        return scale.astype(jnp.float32)

    def find(self, x: Array, dtype: DTypeLike, amax: Array | None = None) -> NoReturn:
        """Raise, because the format library finds these scales."""
        raise NotImplementedError(
            f"{self} is found by the format library; use tcfp_jax.products.pack_fp4"
        )

    def turn(self, scale: Array) -> NoReturn:
        """Raise, because a byte holds neighbours along the last axis."""
        raise NotImplementedError(
            f"{self}: bytes hold two codes of a row; dequantize, or pack the transposed"
            " matrix"
        )


Scaling = Tensor | Row | Block | Fp4
