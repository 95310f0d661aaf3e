"""The packed TCFP-12 format, 12.5 bits per value: E4M3, a 4-bit residual, two scales.

    x ~ (value + level[code] * residual_scale) * scale

A block of `block` values on the last axis shares two scales. `value = round(x / scale)`
in E4M3, and the residual `x / scale - value` is rounded to one of 16 levels times a
power of two. There are two tables of levels: "linear", the
integers -8 to 7, and "nf4", the quantiles of a normal distribution (QLoRA), which are
denser around zero. Both hold an exact zero, so a residual of zero comes back as zero.
At block 32 that is 8 + 4 + 2 * 8 / 32 = 12.5 bits per value, also in memory: a byte
packs two codes.

The scale of the residual is the power of two that covers the block's largest residual,
or half of it if that has the smaller squared error: E4M3's residuals shrink with |x|. A
stochastic one takes the covering scale: clipping is biased.

The format library defines the datatype, `tcfp_jax.formats.tcfp12`, and rounds. This
module adds the needs of weights in training: blocks of any even size, scales by RMS,
and subnormal float32 read as zero. A NaN or inf makes its whole block NaN. The fields
of its array type are read directly by products and checkpoints. For finite `x` without
subnormals, and below 1.75 * 2**127 where the two clip their scales differently,
`quantize_tcfp12(x).dequantize()` is `formats.cast(x, formats.tcfp12)` bit for bit.

`formats.pack(x, formats.tcfp12)` stores the same codes as bytes without axes. Here each
array keeps the leading axes of `x`, which a mesh may split, and dtypes that products
read.

Source of the NF4 table: Dettmers et al. 2023, "QLoRA", appendix E. Scales: OCP
Microscaling Formats 1.0, 2023.
"""

import functools
import math
import numbers
from dataclasses import dataclass, field
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics
from pallas_kernels.checks import check_choice
from pallas_kernels.derivatives import OF_CODES, not_differentiated
from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import check_real
from pallas_kernels.specs import Shape, entries_of
from tcfp_jax.formats.casting import check_key
from tcfp_jax.formats.codebooks import codebook
from tcfp_jax.formats.datatypes import datatype
from tcfp_jax.formats.float_bits import to_bits
from tcfp_jax.formats.quantization import quantize
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.paths import serialize_with_flax
from tcfp_jax.weights.stored import bytes_of

Residual = Literal["linear", "nf4"]
BlockScale = Literal["amax", "sigma"]

_VALUE_DTYPE = jnp.float8_e4m3fn
_SIGMA = 3.0
_LARGEST_BLOCK = 1024  # keeps sums of squares in steps of 1/256 below 2**31
_FIXED_POINT = 256.0
_BOOKS = {"linear": codebook("linear4"), "nf4": codebook("nf4")}
LEVELS: dict[str, np.ndarray] = {
    name: np.array(book.tables[0], np.float32) for name, book in _BOOKS.items()
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedTCFP12:
    """A tensor in the packed format; made by `quantize_tcfp12`.

    Attributes:
      values: float8_e4m3fn `[..., blocks, block]`; a short last block is padded with
        zeros.
      codes: uint8 `[..., blocks, block / 2]`, two residual codes per byte, the even
        position in the low half.
      scale, residual_scale: float8_e8m0fnu `[..., blocks]`; the latter is code 0 if a
        block's residual is zero.
      length: size of the last axis of the unpacked tensor.
      residual: "linear" or "nf4".
    """

    values: Array
    codes: Array
    scale: Array
    residual_scale: Array
    length: int = field(metadata=dict(static=True))
    residual: Residual = field(metadata=dict(static=True))

    @property
    def shape(self) -> Shape:
        """Shape of the unpacked tensor."""
        return (*self.values.shape[:-2], self.length)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return bytes_of(self)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Return `(value + level * residual_scale) * scale`, in float32 and `dtype`.

        Use this when a product needs the tensor: no kernel reads the packed arrays.

        Raises:
          ValueError: an array does not fit the format, as in a damaged file.
        """
        _check_parts(self)
        leading = PartitionSpec(*entries_of(self.values)[:-2])
        unpacked = functools.partial(_unpacked, dtype=dtype)
        return with_automatic_axes(unpacked, lambda _: leading, self)


def _unpacked(packed: PackedTCFP12, dtype: DTypeLike) -> Array:
    *outer, blocks, block = packed.values.shape
    codes = jnp.stack([packed.codes & 15, packed.codes >> 4], axis=-1).astype(jnp.int32)
    levels = jnp.asarray(LEVELS[packed.residual])[codes.reshape(packed.values.shape)]
    residual = levels * numerics.decode_e8m0(packed.residual_scale)[..., None]
    # The values were rounded before they were cast (`round_to`), so XLA changes nothing
    # if it cancels this cast.
    total = packed.values.astype(jnp.float32) + residual
    total = total * numerics.decode_e8m0(packed.scale)[..., None]
    flat = total.reshape(*outer, blocks * block)
    return flat[..., : packed.length].astype(dtype)


serialize_with_flax(PackedTCFP12)


def quantize_tcfp12(
    x: ArrayLike,
    block: int = 32,
    *,
    residual: Residual = "linear",
    scale: BlockScale = "amax",
    sigma: float = _SIGMA,
    key: Array | None = None,
) -> PackedTCFP12:
    """Return `x` in the packed TCFP-12 format; the module's docstring has the formula.

    Use this to store weights in 12.5 bits per value, for example to serve them.
    Products read them as floats: use `quantize` or `split` for FP8 operands.

    Args:
      x: real floats `[..., length]`; a short last block is padded, and arithmetic is
        float32.
      block: the number of values that share two scales, even and up to 1024; a value
        takes 12 + 16 / block bits.
      residual: "linear" or "nf4", the table of levels.
      scale: "amax" scales a block by its max |x|. "sigma" scales it by min(max |x|,
        sigma * RMS): E4M3's range then serves the bulk of the block, and larger values
        are left to the residual or clipped.
      sigma: the positive factor of the RMS for `scale="sigma"`.
      key: JAX random key; rounds the residual stochastically, so that E[dequantized] =
        x.

    Returns:
      `PackedTCFP12`. A NaN or inf makes its block NaN, and no other.

    Raises:
      TypeError: `x` is not real floating point.
      ValueError: `x` is a scalar, or `block` is odd or not in [2, 1024]. `sigma` is not
        positive and finite, or is given without `scale="sigma"`. `residual` or `scale`
        is unknown. A key is given with `scale="sigma"`, which clips.

    >>> packed = quantize_tcfp12(jnp.linspace(-1.0, 1.0, 64))
    >>> packed.nbytes * 8 / 64
    12.5
    """
    array = jnp.asarray(x)
    _check(array, block, residual, scale, sigma, key)
    array = not_differentiated(OF_CODES, array)
    # Blocks cut the last axis, so the result has it whole under explicit axes.
    leading = entries_of(array)[:-1]
    packed = functools.partial(_packed, block, residual, scale, sigma)
    return with_automatic_axes(
        packed, lambda leaf: PartitionSpec(*leading[: leaf.ndim]), array, key
    )


def _packed(
    block: int,
    residual: Residual,
    scale: BlockScale,
    sigma: float,
    x: Array,
    key: Array | None,
) -> PackedTCFP12:
    count = -(-x.shape[-1] // block)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * block - x.shape[-1])]
    padded = jnp.pad(x.astype(jnp.float32), padding)
    blocks = padded.reshape(*x.shape[:-1], count, block)
    bound = _bound(blocks, scale, sigma)
    factor = numerics.pow2_cover(bound, numerics.largest(_VALUE_DTYPE))
    inverse = numerics.reciprocal_pow2(factor)[..., None]
    scaled = numerics.flush_subnormal(blocks) * inverse
    random = None
    # The numbers of `jax.random.uniform` in the 24 highest bits, so a key keeps its
    # results
    if key is not None:
        uniform = jax.random.uniform(key, blocks.shape, jnp.float32)
        random = (uniform * 2.0**24).astype(jnp.uint32) << 8
    values, codes, residual_scale = _round(scaled, residual, random)
    pairs = codes.reshape(*codes.shape[:-1], block // 2, 2).astype(jnp.uint8)
    return PackedTCFP12(
        values=values.astype(_VALUE_DTYPE),
        codes=pairs[..., 0] | (pairs[..., 1] << 4),
        scale=numerics.encode_e8m0(factor),
        residual_scale=residual_scale,
        length=x.shape[-1],
        residual=residual,
    )


def dequantize_tcfp12(packed: PackedTCFP12, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the unpacked tensor, in `dtype`.

    Use this on the result of `quantize_tcfp12`; it is `packed.dequantize(dtype)`.

    Raises:
      TypeError: `packed` is not a `PackedTCFP12`.
      ValueError: an array does not fit the format, as in a damaged file.

    >>> x = jnp.array([1.0, -0.5, 0.25])
    >>> dequantize_tcfp12(quantize_tcfp12(x)).tolist()
    [1.0, -0.5, 0.25]
    """
    if not isinstance(packed, PackedTCFP12):
        raise TypeError(
            f"packed is a {type(packed).__name__}; make a PackedTCFP12 with"
            " tcfp_jax.quantize_tcfp12 first"
        )
    return packed.dequantize(dtype)


def fake_quantize(
    x: ArrayLike,
    block: int = 32,
    *,
    residual: Residual = "linear",
    scale: BlockScale = "amax",
    sigma: float = _SIGMA,
    key: Array | None = None,
) -> Array:
    """Return `x` rounded to the packed TCFP-12 format, in its own dtype.

    The gradient passes straight through, and arguments and errors are the same as for
    `quantize_tcfp12`. Use this to simulate the format in training, on any device; use a
    recipe for products that are faster, too.

    >>> float(jax.grad(lambda x: fake_quantize(x[None])[0])(0.3))
    1.0
    """
    x = jnp.asarray(x)

    def rounded(x: Array, key: Array | None) -> Array:
        packed = quantize_tcfp12(
            x, block, residual=residual, scale=scale, sigma=sigma, key=key
        )
        return packed.dequantize(x.dtype)

    same = PartitionSpec(*entries_of(x))
    fixed = lax.stop_gradient(x)
    # x - stop_gradient(x) is 0 with gradient 1, so the value stays exactly the
    # dequantized one.
    return with_automatic_axes(rounded, lambda _: same, fixed, key) + (x - fixed)


def _check_parts(packed: PackedTCFP12) -> None:
    """Raise a ValueError unless arrays, length and residual fit one packed tensor."""
    shape = getattr(packed.values, "shape", ())
    if not isinstance(shape, tuple) or len(shape) < 2 or shape[-1] % 2:
        raise ValueError(
            f"values of the packed tensor have shape {shape}, not [..., blocks, block]"
            " of an even block"
        )
    wanted = {
        "values": (_VALUE_DTYPE, shape),
        "codes": (jnp.uint8, (*shape[:-1], shape[-1] // 2)),
        "scale": (jnp.float8_e8m0fnu, shape[:-1]),
        "residual_scale": (jnp.float8_e8m0fnu, shape[:-1]),
    }
    for name, (dtype, expected) in wanted.items():
        part = getattr(packed, name)
        found = (getattr(part, "dtype", None), getattr(part, "shape", None))
        if found != (dtype, expected):
            raise ValueError(
                f"{name} of the packed tensor is {found[0]}{found[1]}, and with values"
                f" of shape {shape} it is {jnp.dtype(dtype)}{expected}; restore it into"
                " what quantize_tcfp12 made"
            )
    *_, blocks, block = shape
    length = packed.length
    if not isinstance(length, numbers.Integral) or -(-length // block) != blocks:
        raise ValueError(
            f"length={length!r} does not end in the last of {blocks} blocks of {block}"
            " values"
        )
    check_choice("residual", packed.residual, LEVELS)


def _bound(blocks: Array, scale: BlockScale, sigma: float) -> Array:
    """Return the magnitude of each block that E4M3's largest value must reach."""
    amax = numerics.amax(blocks, axis=-1)
    if scale == "amax":
        return amax
    # The unit is a power of two near amax, because squares of large and small numbers
    # leave float32's range.
    unit = numerics.pow2_cover(amax, 4.0)
    # In steps of 1/256 the sum of squares is an integer, which is exact on every
    # backend.
    scaled = blocks * numerics.reciprocal_pow2(unit)[..., None]
    steps = lax.round(scaled * _FIXED_POINT, lax.RoundingMethod.TO_NEAREST_EVEN)
    steps = jnp.where(jnp.isfinite(steps), steps, 0)
    squares = jnp.sum(jnp.square(steps.astype(jnp.int32)), axis=-1)
    mean_square = squares.astype(jnp.float32) / blocks.shape[-1]
    root_mean_square = unit * jnp.sqrt(mean_square) / _FIXED_POINT
    bound = jnp.minimum(amax, jnp.float32(sigma) * root_mean_square)
    return jnp.where(jnp.isfinite(amax), bound, amax)


@functools.partial(jax.jit, static_argnames="residual")
def _round(
    scaled: Array, residual: Residual, random: Array | None
) -> tuple[Array, Array, Array]:
    """Return (values of E4M3, codes of the residual, its E8M0 scales) of scaled blocks.

    Values are float32 and codes int32.
    """
    finite = jnp.isfinite(scaled)
    # The format library saturates an inf, which must stay visible.
    scaled = jnp.where(finite, scaled, jnp.nan)
    modes = Modes() if random is None else Modes(roundmode="stochastic")
    # `formats.tcfp12` for values that are scaled already, with one block of any size in
    # each row.
    rest = datatype(_BOOKS[residual], "e8m0_t0_mse")
    format = datatype(_VALUE_DTYPE, residual=rest)
    parts = quantize(to_bits(scaled), format, modes, random)
    left = parts.residual
    assert left is not None and left.exponent is not None
    lost = ~jnp.all(finite, axis=-1)
    codes = jnp.where(lost[..., None], 0, left.value.reshape(scaled.shape))
    scales = jnp.where(lost, 255, left.exponent.reshape(lost.shape) + 127)
    e8m0 = lax.bitcast_convert_type(scales.astype(jnp.uint8), jnp.float8_e8m0fnu)
    return parts.value, codes, e8m0


def _check(
    x: Array,
    block: int,
    residual: str,
    scale: str,
    sigma: float,
    key: Array | None,
) -> None:
    check_real("x", x)
    if x.ndim == 0:
        raise ValueError(
            "x is a scalar, but blocks run along the last axis; use x[None]"
        )
    if (
        not isinstance(block, numbers.Integral)
        or not 2 <= block <= _LARGEST_BLOCK
        or block % 2
    ):
        raise ValueError(
            f"block={block!r} must be even (two codes share a byte) and from 2 to"
            f" {_LARGEST_BLOCK}; use 32"
        )
    check_choice("residual", residual, get_args(Residual))
    check_choice("scale", scale, get_args(BlockScale))
    if not isinstance(sigma, numbers.Real) or not 0 < sigma < math.inf:
        raise ValueError(f"sigma={sigma!r} must be positive and finite; use 3.0")
    if sigma != _SIGMA and scale != "sigma":
        raise ValueError(
            f"sigma={sigma} with scale={scale!r}, which does not read it; use"
            ' scale="sigma", or leave sigma'
        )
    check_key(key)
    if key is not None and scale == "sigma":
        raise ValueError(
            'key= rounds without bias, but scale="sigma" clips, which is biased; use'
            ' scale="amax" or no key'
        )
