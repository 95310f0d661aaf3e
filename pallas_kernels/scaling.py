"""`Scaling`: which values of a tensor share a scale.

    Tensor    all values share one float32 scale
    Row       every line along the last axis has a float32 scale
    Block     every vector of b values along the last axis, or every square of b x b, has an E8M0 scale (OCP MX, 2023)

Scales are powers of two unless "float32" is asked for. Squares and whole tensors make a quantized matrix and its
transpose the same numbers, so one quantization of a weight serves the forward product and the input gradient; rows and
vectors adapt to single lines and are made anew for each contraction axis. All three have the same methods, so that no
caller asks which one it holds.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import numerics

Scale = Literal["pow2", "float32"]
Tile = Literal["vector", "square"]
BLOCK_SIZES = (32, 64, 128)
SCALE_DTYPE = jnp.float8_e8m0fnu
# E8M0's smallest scale, 2**-127: it says that all of a block's residual is zero.
ZERO_BLOCK = 0


def _check_scale(scale: str) -> None:
    if scale not in ("pow2", "float32"):
        raise ValueError(f'scale={scale!r} is unknown; use "pow2" or "float32"')


@dataclass(frozen=True)
class Tensor:
    """All values of a tensor share one float32 scale, whose shape is that of a stack's leading axes.

    Attributes:
      scale: "pow2", the smallest power of two that fits max |x|, or "float32", max |x| / largest (the rule of nanochat
        and torchao).

    Raises:
      ValueError: an unknown `scale`.
    """

    scale: Scale = "pow2"

    # Whether one quantization of a matrix serves its transpose, too.
    serves_both = True

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    @property
    def along_rows(self) -> "Tensor":
        """The scaling of an activation or gradient beside a weight that is scaled so."""
        return self

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a stack of matrices.

        >>> Tensor().scale_shape((3, 48, 100))
        (3,)
        """
        return shape[:-2]

    def find(self, x: jax.Array, dtype: Any, amax: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(scale, multiplier that replaces the division of x by it) of float32 x; NaN where max |x| is not finite."""
        return numerics.scale_and_inverse(numerics.amax(x) if amax is None else amax, dtype, self.scale)

    def spread(self, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The scale, shaped to multiply values of this shape."""
        return scale.reshape(scale.shape + (1,) * (len(shape) - scale.ndim))

    def turn(self, scale: jax.Array) -> jax.Array:
        """The scale of the transposed matrix."""
        return scale


@dataclass(frozen=True)
class Row:
    """Every line along the last axis has a float32 scale of its own (torchao's "rowwise").

    Attributes:
      scale: as in `Tensor`.

    Raises:
      ValueError: an unknown `scale`.
    """

    scale: Scale = "pow2"

    serves_both = False

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    @property
    def along_rows(self) -> "Row":
        """The scaling of an activation or gradient beside a weight that is scaled so."""
        return self

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor.

        >>> Row().scale_shape((3, 48, 100))
        (3, 48)
        """
        return shape[:-1]

    def find(self, x: jax.Array, dtype: Any, amax: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(scales of the rows of float32 x, multipliers that replace the division of x by them)."""
        assert amax is None, "check_quantizer refuses an amax of rows"
        scale, inverse = numerics.scale_and_inverse(numerics.amax(x, axis=-1), dtype, self.scale)
        return scale, inverse[..., None]

    def spread(self, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The scales, shaped to multiply values of this shape."""
        return scale[..., None]

    def turn(self, scale: jax.Array) -> jax.Array:
        """Raise: the rows of the transposed matrix are other rows."""
        raise NotImplementedError("the rows of a transposed matrix have other scales; quantize the transpose")


@dataclass(frozen=True)
class Block:
    """Every block of values has an E8M0 scale; the last block of an axis may be short.

    Attributes:
      size: 32, 64 or 128 values, the side of a block.
      tile: "vector", `size` values along the last axis, or "square", `size` x `size` of a matrix.

    Raises:
      ValueError: another size or an unknown tile.
    """

    size: int = 128
    tile: Tile = "square"

    scale = "pow2"

    def __post_init__(self) -> None:
        if self.size not in BLOCK_SIZES:
            raise ValueError(f"block={self.size} is not supported; use one of {list(BLOCK_SIZES)}")
        if self.tile not in ("vector", "square"):
            raise ValueError(f'tile={self.tile!r} is unknown; use "vector" or "square"')

    @property
    def serves_both(self) -> bool:
        """Whether one quantization of a matrix serves its transpose, too."""
        return self.tile == "square"

    @property
    def along_rows(self) -> "Block":
        """The scaling of an activation or gradient beside a weight that is scaled so: vectors of the same size."""
        return Block(self.size, "vector")

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor.

        >>> Block(32, "vector").scale_shape((48, 100)), Block(32, "square").scale_shape((48, 100))
        ((48, 4), (2, 4))
        """
        *leading, last = shape
        if self.tile == "square":
            leading[-1] = -(-leading[-1] // self.size)
        return (*leading, -(-last // self.size))

    def amax(self, x: jax.Array) -> jax.Array:
        """Max |x| of every block, float32; NaN or inf where a block holds one."""
        *leading, last = x.shape
        sides = [(0, -last % self.size)]
        if self.tile == "square":
            sides.insert(0, (0, -leading[-1] % self.size))
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - len(sides)) + sides)
        *leading, last = padded.shape
        if self.tile == "vector":
            return numerics.amax(padded.reshape(*leading, last // self.size, self.size), axis=-1)
        *leading, rows = leading
        shape = (*leading, rows // self.size, self.size, last // self.size, self.size)
        return numerics.amax(padded.reshape(shape), axis=(-3, -1))

    def find(self, x: jax.Array, dtype: Any, amax: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(E8M0 scales of the blocks of float32 x, multipliers that replace the division of x by them)."""
        assert amax is None, "check_quantizer refuses an amax of blocks"
        scale, inverse = numerics.e8m0_scale_and_inverse(self.amax(x), dtype)
        return scale, self._repeat(inverse, x.shape)

    def spread(self, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The scale of every value of a tensor of this shape, float32."""
        return self._repeat(numerics.decode_e8m0(scale), shape)

    def _repeat(self, of_blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        wide = jnp.repeat(of_blocks, self.size, axis=-1)[..., : shape[-1]]
        return wide if self.tile == "vector" else jnp.repeat(wide, self.size, axis=-2)[..., : shape[-2], :]

    def turn(self, scale: jax.Array) -> jax.Array:
        """The scales of the transposed matrix, of squares.

        Raises:
          NotImplementedError: vectors, which run along other axes there.
        """
        if self.tile == "vector":
            raise NotImplementedError("the vectors of a transposed matrix have other scales; quantize the transpose")
        return jnp.swapaxes(scale, -1, -2)


Scaling = Tensor | Row | Block
