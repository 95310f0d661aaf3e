"""NVFP4 in arrays: as codes, which products of stored weights read, and as numbers, which FP4 training multiplies.

    x ~ E2M1 code * scale of its tile * outer          16 values share an E4M3 scale, the tensor a float32 scale

`quantization.quantize` defines the rounding, as for every cast. Two other forms have its bits and less to do:
`nvfp4_xla` rounds by comparisons, and `nvfp4_kernel` does all in one pass on NVIDIA GPUs. Tests compare the three.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.counter import bits_of
from pallas_kernels.explicit import with_automatic_axes
from tcfp_jax.formats import float_bits, nvfp4_kernel, nvfp4_xla, scale_rules
from tcfp_jax.formats.catalog import CATALOG
from tcfp_jax.formats.encoding import encode
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_kernel import Place
from tcfp_jax.formats.nvfp4_registers import SIDE, Key, Options
from tcfp_jax.formats.nvfp4_xla import Blocks
from tcfp_jax.formats.quantization import quantize
from tcfp_jax.formats.rotation import rotate, rotate_arrays
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode

Rule = Literal["amax", "four_over_six", "fold_exact"]
_DATATYPES = {"vector": CATALOG["nvfp4"], "square": CATALOG["nvfp4s"]}
_MODES: dict[Rule, ScaleMode] = {"amax": "max", "four_over_six": "four_over_six", "fold_exact": "fold_exact"}
_LARGEST = 6.0  # E2M1's largest value
_E4M3, _FLOAT32 = number("e4m3fn"), number("float32")


class Nvfp4(NamedTuple):
    """Codes and scales: a value is E2M1 code * scale of its tile * outer.

    Attributes:
      codes: uint8 `[..., k / 2]`: byte j has code 2 j in its low half and code 2 j + 1 in its high half.
      scales: float8_e4m3fn `[..., ceil(k / 16)]`; of squares `[..., ceil(n / 16), ceil(k / 16)]`.
      outer: float32 `[]`, the scale of the scales.
    """

    codes: jax.Array
    scales: jax.Array
    outer: jax.Array


class Nvfp4Values(NamedTuple):
    """Numbers `values * outer`: `values` are code times scale, exact in bfloat16, and `outer` is a float32 scalar."""

    values: jax.Array
    outer: jax.Array

    def dequantize(self) -> jax.Array:
        """Return the numbers, float32."""
        return self.values.astype(jnp.float32) * self.outer


# Codes ----------------------------------------------------------------------------------------------------------------


def quantize_nvfp4(
    x: ArrayLike,
    *,
    rule: Rule = "amax",
    tile: Literal["vector", "square"] = "vector",
    amax: ArrayLike | None = None,
    signs: ArrayLike | None = None,
    key: Key | None = None,
    interpret: bool = False,
) -> Nvfp4:
    """Quantize `x` to codes and scales, rounded as `cast` to `nvfp4` rounds: one pass on NVIDIA GPUs.

    Args:
      x: `[..., k]`, real floats, k even.
      rule: how tiles find their scales, the `scalemode` of `cast` ("amax" is its "max").
      tile: 16 values along the last axis, or squares of 16 x 16, which have no kernel.
      amax: the largest magnitude of the tensor, float32 `[]`, if you know it; otherwise it is computed. Values above it
        saturate. If it is not finite, the outer scale is NaN, and so is every value.
      signs: `[16]` of 1 and -1: first rotate every 16 values along the last axis, as `formats.rotate` does, in
        float32. `amax` is then that of rotated values. Only for vectors, with a k that 16 divides.
      key: two words of `pallas_kernels.counter.keys`, for stochastic rounding with the bits of each value's index. Its
        scales cover, so nothing is clipped and the expectation is x.
      interpret: run the kernel in Pallas's interpreter, which works on CPUs.

    Returns:
      Codes, scales and the outer scale. A tile with NaN has a NaN scale and zero codes; inf becomes the largest value
      of its tile.

    Raises:
      TypeError: `x` is not real floating point, or the key is not two words.
      ValueError: an odd k, an axis that is shorter than a tile, an unknown rule or tile, an amax with several numbers,
        or signs for squares.

    >>> made = quantize_nvfp4(jnp.array([[6.0, -3.0] + [0.0] * 14]))
    >>> made.codes[0, 0].item(), made.scales.tolist(), round(float(made.outer), 6)
    (215, [[448.0]], 0.002232)
    """
    array = jnp.asarray(x)
    _check(array, rule, tile, signs, amax, key)
    run = functools.partial(_quantized, rule=rule, tile=tile, interpret=interpret)
    wide = None if amax is None else jnp.asarray(amax, jnp.float32)
    flips = None if signs is None else jnp.asarray(signs, jnp.float32)
    # Tiles are cut, which explicit axes refuse.
    return with_automatic_axes(run, lambda _: PartitionSpec(), array, wide, flips, key)


@functools.partial(jax.jit, static_argnames=("rule", "tile", "interpret"))
def _quantized(
    x: jax.Array, amax: jax.Array | None, signs: jax.Array | None, key: Key | None, *, rule: Rule, tile: str,
    interpret: bool,
) -> Nvfp4:  # fmt: skip
    by_definition = functools.partial(define, rule=rule, tile=tile)
    if tile == "square" or not nvfp4_kernel.serves(x.shape, x.dtype):
        return by_definition(x, amax, signs, key)

    def kernel(x: jax.Array, amax: jax.Array | None, signs: jax.Array | None, key: Key | None) -> Nvfp4:
        options = Options(_MODES[rule], "even" if key is None else "stochastic", signs is not None)
        words, outer = _words(x, amax, signs, key, options, "last", interpret)
        codes, scales = nvfp4_kernel.run(x, words, options, "codes", interpret=interpret)
        return Nvfp4(codes, scales, outer if amax is None else jnp.where(jnp.isfinite(amax), outer, jnp.nan))

    if interpret:
        return kernel(x, amax, signs, key)
    return lax.platform_dependent(x, amax, signs, key, cuda=kernel, default=by_definition)


def _words(
    x: jax.Array,
    amax: jax.Array | None,
    signs: jax.Array | None,
    key: Key | None,
    options: Options,
    place: Place,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the scalars that the kernel reads, and the scale of the tensor."""
    if amax is not None:
        found = float_bits.to_bits(jnp.where(jnp.isfinite(amax), amax, 0))
    elif signs is None:
        found = jnp.max(scale_rules.finite_magnitude(float_bits.to_bits(x) & jnp.int32(0x7FFFFFFF)))
    else:
        unscaled = options.words(jnp.float32(1), signs, key)
        (found,) = nvfp4_kernel.run(x, unscaled, options, "amax", place, interpret=interpret)
    outer = scale_rules.choose_outer(found, _LARGEST, _E4M3, _FLOAT32, options.rule)
    return options.words(outer, signs, key), outer


def define(
    x: jax.Array, amax: jax.Array | None, signs: jax.Array | None, key: Key | None, *, rule: Rule, tile: str = "vector"
) -> Nvfp4:
    """Return the result of `quantize_nvfp4` as the format library's cast computes it."""
    if signs is not None:
        x = rotate(x.astype(jnp.float32), SIDE, signs=signs)
    datatype = _DATATYPES[tile]
    modes = Modes("even" if key is None else "stochastic", _MODES[rule])
    random = None if key is None else bits_of(x.shape, *key)
    given = None if amax is None else float_bits.to_bits(jnp.where(jnp.isfinite(amax), amax, 0))
    parts = quantize(float_bits.to_bits(x), datatype, modes, random, given)
    layout = datatype.layout(x.shape)
    assert datatype.scale is not None and parts.scale is not None and parts.outer is not None
    # The codes of a NaN tile mean nothing; the codes of a zero tile are only signs.
    kept = jnp.where(jnp.isnan(parts.scale), 0, jnp.where(parts.scale * parts.outer < float_bits.TINY, 8, 15))
    codes = layout.join(encode(parts.value, datatype.number) & kept.astype(jnp.uint32))  # type: ignore[arg-type]
    scales = encode(parts.scale, datatype.scale.number).astype(jnp.uint8)
    split = [size for axis, size in enumerate(layout.split_shape) if axis not in layout.tile_axes]
    pairs = codes.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return Nvfp4(
        (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8),
        lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).reshape(split),
        parts.outer if amax is None else jnp.where(jnp.isfinite(amax), parts.outer, jnp.nan),
    )


def exact_share(scales: jax.Array) -> jax.Array:
    """Return the share of tiles whose products code * scale / 2**e are all E4M3 numbers.

        2**e brings the largest scale into the binade of 32, so that six times any scale is at most 448

    FP8 tensor cores multiply such tiles without rounding. Every tile of the rule "fold_exact" is one. Zeros count as
    such tiles, NaN does not.

    Args:
      scales: float8_e4m3fn of any shape, not empty.

    Returns:
      float32 `[]`, from 0 to 1.

    >>> float(exact_share(jnp.array([384.0, 1.25, 1.125, 0.015625], jnp.float8_e4m3fn)))
    0.5
    """
    values = scales.astype(jnp.float32)
    largest = float_bits.to_bits(jnp.max(jnp.where(values > 0, values, 0)))
    exponent, _ = float_bits.normalize(largest)
    scaled = values * float_bits.power_of_two(5 - exponent)
    grid = _E4M3.grid
    exact = jnp.ones(values.shape, bool)
    # The other codes are these times powers of two, and only the smallest products can fall between E4M3's steps.
    for code in (0.5, 1.5):
        exact &= float_bits.round_to_grid(scaled * code, grid, "even", None) == scaled * code
    return jnp.mean(exact.astype(jnp.float32))


def _check(
    x: jax.Array, rule: str, tile: str, signs: ArrayLike | None, amax: ArrayLike | None, key: Key | None
) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype}, and NVFP4 holds real floats; convert it first, such as x.astype(float32)")
    for name, value, known in (("rule", rule, _MODES), ("tile", tile, _DATATYPES)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; use one of {list(known)}")
    if x.ndim == 0 or x.shape[-1] % 2 or x.size == 0:
        raise ValueError(
            f"x{list(x.shape)} has no pairs of values along its last axis, two of which share a byte; pad it"
        )
    if signs is not None and (tile != "vector" or x.shape[-1] % SIDE):
        raise ValueError(
            f"signs rotate every 16 values of a vector, not x{list(x.shape)} in tiles {tile!r}; drop signs="
        )
    side = x.shape[-2:] if tile == "square" else x.shape[-1:]
    if len(side) < (2 if tile == "square" else 1) or min(side) < SIDE:
        raise ValueError(f"x{list(x.shape)} is smaller than one tile of {SIDE} ({tile!r}); pad it with zeros")
    if amax is not None and jnp.ndim(amax):
        raise ValueError(f"amax has shape {list(jnp.shape(amax))}, but the tensor has one, []; pass a scalar")
    if key is not None and not (isinstance(key, tuple) and len(key) == 2):
        raise TypeError(
            f"key is a {type(key).__name__}, not two words; make them with pallas_kernels.counter.keys(seed)"
        )


# Numbers --------------------------------------------------------------------------------------------------------------


def along(
    x: jax.Array, axis: int, key: Key | None = None, signs: jax.Array | None = None, *, interpret: bool = False
) -> Nvfp4Values:
    """Quantize `x` to numbers in blocks of 16 along its first or last axis, with scales amax / 6.

    A NaN or inf makes its block NaN, while a cast saturates inf: a gradient that overflows must be seen.

    Args:
      x: bfloat16 or float32.
      axis: the first or the last.
      key: two words of `pallas_kernels.counter.keys`, for stochastic rounding with scales that cover; without it values
        are rounded to nearest even.
      signs: `[16]` of 1 and -1: first rotate every 16 values along the axis, which must be the first.
      interpret: run the kernel in Pallas's interpreter.

    Returns:
      `Nvfp4Values` of the shape of x, with the axis filled with zeros up to whole blocks.

    >>> jax.eval_shape(lambda: along(jnp.ones((2, 20)), -1)).values.shape
    (2, 32)
    """
    x, place = _filled(x, axis)
    kernel = functools.partial(_by_kernel, place=place, interpret=interpret)
    if interpret:
        return kernel(x, key, signs)
    by_xla = lambda x, key, signs: _values(nvfp4_xla.quantize(x, *_in_blocks(x, signs, place), key), x.shape)
    if not nvfp4_kernel.serves(x.shape, x.dtype, place):
        return by_xla(x, key, signs)
    return lax.platform_dependent(x, key, signs, cuda=kernel, default=by_xla)


@functools.partial(jax.jit, static_argnames=("place", "interpret"))  # so that equal calls share one kernel
def _by_kernel(x: jax.Array, key: Key | None, signs: jax.Array | None, *, place: Place, interpret: bool) -> Nvfp4Values:
    options = Options("max", "even" if key is None else "stochastic", signs is not None)
    words, outer = _words(x, None, signs, key, options, place, interpret)
    (values,) = nvfp4_kernel.run(x, words, options, "bfloat16", place, interpret=interpret)
    return Nvfp4Values(values, outer)


def squares(w: jax.Array) -> Nvfp4Values:
    """Quantize a matrix to numbers in squares of 16 x 16, to nearest, so that its transpose has the same numbers.

    Its axes are filled with zeros up to whole squares.

    >>> jax.eval_shape(lambda: squares(jnp.ones((20, 3)))).values.shape
    (32, 16)
    """
    padded, axes, blocks = _in_squares(w)
    return _values(nvfp4_xla.quantize(padded, axes, blocks), padded.shape)


class Observed(NamedTuple):
    """Each value before and after `along` or `squares`; arrays of the shape of `found`.

    Attributes:
      exact: the values before they are rounded, and after they are rotated; float32.
      found: the numbers.
      largest: the largest magnitude that the scale of a value's block holds, in units of `found.outer`; float32.
    """

    exact: jax.Array
    found: Nvfp4Values
    largest: jax.Array


def observe(x: jax.Array, axis: int | None, key: Key | None = None, signs: jax.Array | None = None) -> Observed:
    """Return what `along` does to each value, or `squares` if the axis is None; XLA computes it.

    >>> seen = jax.jit(lambda x: observe(x, -1))(jnp.array([[6.2, *[1.0] * 15]]))
    >>> float(seen.exact[0, 0]), float(seen.found.dequantize()[0, 0]), float(seen.largest[0, 1] * seen.found.outer)
    (6.199999809265137, 6.199999809265137, 6.199999809265137)
    """
    axes: tuple[int, ...]
    if axis is None:
        x, axes, blocks = _in_squares(x)
    else:
        x, place = _filled(x, axis)
        axes, blocks = _in_blocks(x, signs, place)
    coded = nvfp4_xla.quantize(x, axes, blocks, key)
    largest = jnp.broadcast_to(coded.scale * _LARGEST, coded.x.shape).reshape(x.shape)
    return Observed(coded.x.reshape(x.shape), _values(coded, x.shape), largest)


def _values(coded: nvfp4_xla.Coded, shape: tuple[int, ...]) -> Nvfp4Values:
    values = (jnp.copysign(coded.units, coded.x) * coded.scale).astype(jnp.bfloat16)
    return Nvfp4Values(values.reshape(shape), coded.outer.reshape(()))


def _filled(x: jax.Array, axis: int) -> tuple[jax.Array, Place]:
    """Return x filled with zeros up to whole blocks, and the place of their axis."""
    short = -x.shape[axis] % SIDE
    if short:
        x = jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)])
    return x, "first" if axis % x.ndim == 0 else "last"


def _in_blocks(x: jax.Array, signs: jax.Array | None, place: Place) -> tuple[tuple[int], Blocks]:
    """Return the axes of a block, and a function that splits an array of this shape into blocks and rotates them."""
    shape, first = x.shape, place == "first"
    assert signs is None or first, "the rows of a block are rotated, not its columns"

    def blocks(x: jax.Array) -> list[jax.Array]:
        whole = x.reshape((-1, SIDE, *shape[1:]) if first else (*shape[:-1], -1, SIDE))
        if signs is None:
            return [whole]
        # Row by row: XLA would write the rotated array to memory before it finds its maxima.
        rows = [lax.slice_in_dim(whole, i, i + 1, axis=1).astype(jnp.float32) for i in range(SIDE)]
        return rotate_arrays(rows, list(signs))

    return (1 if first else x.ndim,), blocks


def _in_squares(w: jax.Array) -> tuple[jax.Array, tuple[int, int], Blocks]:
    """Return the matrix filled with zeros up to whole squares, and `_in_blocks` for squares."""
    padded = jnp.pad(w, [(0, -size % SIDE) for size in w.shape])
    rows, columns = padded.shape
    return padded, (1, 3), lambda w: [w.reshape(rows // SIDE, SIDE, columns // SIDE, SIDE)]
