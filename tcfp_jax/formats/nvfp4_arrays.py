"""NVFP4 in arrays: as codes, which products of stored weights read, and as numbers,
which FP4 training multiplies.

    x ~ E2M1 code * scale of its tile * outer

16 values share an E4M3 scale, and the tensor has a float32 scale.

`quantization.quantize` defines the rounding, as for every cast, and makes the codes: a
weight is packed once. Numbers are made in every step. `observe` has the same bits in
XLA, and divides nothing if it rounds to nearest. `nvfp4_kernel` makes them in one pass
on NVIDIA GPUs.
"""

import functools
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.checks import check_choice
from pallas_kernels.counter import bits_of
from pallas_kernels.derivatives import OF_CODES, not_differentiated
from pallas_kernels.dispatch import Backend, Implementation, dispatch, lacks_fp8, shared
from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.hopper import plan
from pallas_kernels.tiled import Engine
from tcfp_jax.formats import float_bits, scale_rules
from tcfp_jax.formats.catalog import CATALOG
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.encoding import encode
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_kernel import Job, Shape, reject, run
from tcfp_jax.formats.nvfp4_registers import LARGEST, SIDE, KeyWords, Kind, words_of
from tcfp_jax.formats.nvfp4_triton import TRITON
from tcfp_jax.formats.quantization import quantize
from tcfp_jax.formats.rotation import checked_signs, rotate, rotate_arrays
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode

ScaleRule = Literal["amax", "four_over_six", "fold_exact"]
_DATATYPES = {"vector": CATALOG["nvfp4"], "square": CATALOG["nvfp4s"]}
_Maybe: TypeAlias = Array | None
_E2M1 = number("e2m1f")
_E4M3 = number("e4m3fn")


class Nvfp4(NamedTuple):
    """Codes and scales: a value is E2M1 code * scale of its tile * outer.

    Attributes:
      codes: uint8 `[..., k / 2]`: byte j has code 2 j in its low half and code 2 j + 1
        in its high half.
      scales: float8_e4m3fn `[..., ceil(k / 16)]`; for squares
        `[..., ceil(n / 16), ceil(k / 16)]`.
      outer: float32 `[]`, the scale of the scales.
    """

    codes: Array
    scales: Array
    outer: Array


class Nvfp4Values(NamedTuple):
    """Numbers `values * outer`: `values` are code times scale, exact in bfloat16, and
    `outer` is a float32 scalar.
    """

    values: Array
    outer: Array

    def dequantize(self) -> Array:
        """Return the numbers, float32."""
        return self.values.astype(jnp.float32) * self.outer


# Codes
# --------------------------------------------------------------------------------------


def quantize_nvfp4(
    x: ArrayLike,
    *,
    rule: ScaleRule = "amax",
    tile: Literal["vector", "square"] = "vector",
    amax: ArrayLike | None = None,
    signs: ArrayLike | None = None,
    key: KeyWords | None = None,
) -> Nvfp4:
    """Quantize `x` to codes and scales, rounded as `cast` to `nvfp4` rounds.

    Use this to store an array in 4.5 bits per value that products and files read. Use
    `cast` for the values alone, and `pack` for other datatypes.

    Args:
      x: `[..., k]`, real floats, k even.
      rule: how tiles find their scales, the `scalemode` of `cast` ("amax" is its
        "max").
      tile: 16 values along the last axis, or squares of 16 x 16.
      amax: the largest magnitude of the tensor, float32 `[]`, if you know it; otherwise
        it is computed. Values above it saturate. If it is not finite, the outer scale
        is NaN, and so is every value.
      signs: `[16]` of 1 and -1: first rotate every 16 values along the last axis, as
        `formats.rotate` does, in float32. `amax` is then the largest rotated magnitude.
        Only for vectors, with a k that 16 divides.
      key: two words of `pallas_kernels.counter.keys`, for stochastic rounding with the
        bits of each value's index. Its scales cover, so nothing is clipped and the
        expectation is x.

    Returns:
      Codes, scales and the outer scale. A tile with NaN has a NaN scale and zero codes;
        inf becomes its tile's largest.

    Raises:
      TypeError: `x` is not real floating point, the key is not two words, or a gradient
        is asked for.
      ValueError: an odd k, an axis that is shorter than a tile, or an unknown rule or
        tile. An amax that is not one magnitude. Signs that are not 16 of 1 and -1, or
        signs for squares.

    >>> made = quantize_nvfp4(jnp.array([[6.0, -3.0] + [0.0] * 14]))
    >>> made.codes[0, 0].item(), made.scales.tolist(), round(float(made.outer), 6)
    (215, [[448.0]], 0.002232)
    """
    array = jnp.asarray(x)
    check_choice("rule", rule, get_args(ScaleRule))
    check_choice("tile", tile, _DATATYPES)
    _check(array, tile, signs, amax, key)
    flips = None if signs is None else checked_signs(signs, SIDE)
    wide = None if amax is None else jnp.asarray(amax, jnp.float32)
    scalemode: ScaleMode = "max" if rule == "amax" else rule
    modes = Modes("even" if key is None else "stochastic", scalemode)
    call = functools.partial(_encoded, _DATATYPES[tile], modes)
    array, wide = not_differentiated(OF_CODES, (array, wide))
    # Tiles are cut, which explicit axes refuse.
    return with_automatic_axes(call, lambda _: PartitionSpec(), array, flips, wide, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encoded(
    datatype: DataType,
    modes: Modes,
    x: Array,
    signs: _Maybe,
    amax: _Maybe,
    key: KeyWords | None,
) -> Nvfp4:
    """Return the parts of `quantization.quantize` in codes."""
    if signs is not None:
        x = rotate(x.astype(jnp.float32), SIDE, signs=signs)
    random = None if key is None else bits_of(x.shape, *key)
    top = None
    if amax is not None:
        top = float_bits.to_bits(jnp.where(jnp.isfinite(amax), amax, 0))
    parts = quantize(float_bits.to_bits(x), datatype, modes, random, top)
    outer = parts.outer
    assert parts.scale is not None and outer is not None
    # The codes of a NaN tile mean nothing; the codes of a zero tile are only signs.
    is_zero = parts.scale * outer < float_bits.TINY
    kept = jnp.where(jnp.isnan(parts.scale), 0, jnp.where(is_zero, 8, 15))
    layout = datatype.layout(x.shape)
    codes = layout.join(encode(parts.value, _E2M1) & kept)
    pairs = codes.reshape(*x.shape[:-1], -1, 2)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8)
    scales = encode(parts.scale, _E4M3).astype(jnp.uint8)
    scales = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    if amax is not None:
        outer = jnp.where(jnp.isfinite(amax), outer, jnp.nan)
    return Nvfp4(packed, lax.squeeze(scales, layout.tile_axes), outer)


def _check(
    x: Array,
    tile: str,
    signs: ArrayLike | None,
    amax: ArrayLike | None,
    key: object,
) -> None:
    """Raise the errors of `quantize_nvfp4`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x is {x.dtype}, and NVFP4 holds real floats; convert it first, such as"
            " x.astype(float32)"
        )
    shape = list(x.shape)
    if x.ndim == 0 or x.shape[-1] % 2 or x.size == 0:
        raise ValueError(
            f"x{shape} has no pairs of values along its last axis, two of which share a"
            " byte; pad it"
        )
    if signs is not None and (tile != "vector" or x.shape[-1] % SIDE):
        raise ValueError(
            f"signs rotate every 16 values of a vector, not x{shape} in tiles {tile!r};"
            " drop signs="
        )
    sides = 2 if tile == "square" else 1
    if x.ndim < sides or min(shape[-sides:]) < SIDE:
        raise ValueError(
            f"x{shape} is smaller than one tile of {SIDE} ({tile!r}); pad it with zeros"
        )
    if amax is not None:
        _check_amax(jnp.asarray(amax))
    if key is not None and not (isinstance(key, tuple) and len(key) == 2):
        raise TypeError(
            f"key is a {type(key).__name__}, not two words; make them by"
            " pallas_kernels.counter.keys(seed)"
        )


def _check_amax(amax: Array) -> None:
    """Raise a ValueError if this is not one magnitude; a traced sign is not checked."""
    if amax.shape or jnp.issubdtype(amax.dtype, jnp.complexfloating):
        has = f"shape {list(amax.shape)} and dtype {amax.dtype}"
        raise ValueError(
            f"amax has {has}, but the tensor has one real magnitude, []; pass a scalar"
        )
    if not isinstance(amax, jax.core.Tracer) and float(amax) < 0:
        raise ValueError(
            f"amax={float(amax)} is negative, and a magnitude is not; pass"
            " jnp.max(jnp.abs(x))"
        )


# Numbers
# --------------------------------------------------------------------------------------


def quantize_values(
    x: Array,
    axis: int | None,
    key: KeyWords | None = None,
    signs: _Maybe = None,
    *,
    backend: Backend | None = None,
) -> Nvfp4Values:
    """Quantize `x` to numbers in blocks of 16, with scales amax / 6.

    Blocks run along an axis, or are squares of 16 x 16. A NaN or inf makes its block
    NaN, while a cast saturates inf: a gradient that overflows must be seen.

    Args:
      x: bfloat16 or float32.
      axis: the first or the last, or None for squares of a matrix: its transpose then
        has the same numbers.
      key: two words of `pallas_kernels.counter.keys`, for stochastic rounding with
        scales that cover; without it values are rounded to nearest even. Squares take
        none.
      signs: `[16]` of 1 and -1: first rotate every 16 values along the axis, which must
        be the first.
      backend: None for the fastest one, or a name.

    Returns:
      `Nvfp4Values` of the shape of x, with each axis of a block filled with zeros up to
        whole blocks.

    >>> x = jnp.ones((2, 20))
    >>> [quantize_values(x, axis).values.shape for axis in (-1, 0, None)]
    [(2, 32), (16, 20), (16, 32)]
    """
    x, axes = _filled(x, axis)
    if axis is not None:
        axis = -1 if axes == (x.ndim - 1,) else axes[0]
    kind = Kind(axis, key is not None, signs is not None)
    return _dispatched((kind, backend), x, signs, key)


def _by_mosaic(job: Job, own: Shape, *operands: Array) -> list[Array]:
    # Imported where it is used: a second that a program without this kernel need not
    # pay, and needs jax 0.11.
    from tcfp_jax.formats import nvfp4_mosaic

    return nvfp4_mosaic.call(job, own, *operands)


_MOSAIC = Engine(_by_mosaic, calls_back=True)


def _by_kernel(
    engine: Engine,
    kind: Kind,
    x: Array,
    signs: _Maybe,
    key: KeyWords | None,
) -> Nvfp4Values:
    # The maximum of rotated values is a pass of its own, which writes nothing.
    parts = [x] if signs is None else _in_blocks(x, (0,), signs)
    outer = _outer([scale_rules.finite_magnitude(_magnitudes(part)) for part in parts])
    return Nvfp4Values(run(x, words_of(outer, signs, key), kind, engine), outer)


def _by_xla(kind: Kind, x: Array, signs: _Maybe, key: KeyWords | None) -> Nvfp4Values:
    return observe(x, kind.axis, key, signs).found


def _reject_mosaic(kind: Kind, x: Array, *arrays: object) -> str | None:
    return plan.reject(jnp.bfloat16) or reject(kind, x)


def _decline_triton(*call: object) -> str | None:
    return lacks_fp8()


IMPLEMENTATIONS = (
    Implementation(
        "triton", functools.partial(_by_kernel, TRITON), reject, _decline_triton
    ),
    Implementation("mosaic", functools.partial(_by_kernel, _MOSAIC), _reject_mosaic),
    Implementation("xla", _by_xla),
)


@shared
def _dispatched(
    chosen: tuple[Kind, Backend | None], *arrays: Array | KeyWords | None
) -> Nvfp4Values:
    kind, backend = chosen
    made: Nvfp4Values = dispatch(
        "quantize_values", IMPLEMENTATIONS, backend, kind, *arrays
    )
    return made


class _Observed(NamedTuple):
    """Each value before and after `quantize_values`; arrays of the shape of `found`.

    Attributes:
      exact: the values before they are rounded, and after they are rotated; float32.
      found: the numbers.
      largest: the largest magnitude that the scale of a value's block holds, in units
        of `found.outer`; float32.
    """

    exact: Array
    found: Nvfp4Values
    largest: Array


def observe(
    x: Array,
    axis: int | None,
    key: KeyWords | None = None,
    signs: _Maybe = None,
) -> _Observed:
    """Return what `quantize_values` does to each value; XLA computes it."""
    assert axis is not None or key is None, "the random bits of squares are not defined"
    x, axes = _filled(x, axis)
    inner = tuple(place + i + 1 for i, place in enumerate(axes))
    # Blocks are made twice, because a pass over x that makes them costs less than one
    # over the result.
    parts = [_magnitudes(part) for part in _in_blocks(x, axes, signs)]
    amax = _largest([scale_rules.finite_magnitude(part) for part in parts], inner)
    lost = _largest(parts, inner) >= float_bits.INFINITY
    # Without a barrier XLA finds the maximum of x in a pass of its own, and writes the
    # rotated array to memory.
    amax, lost, x = lax.optimization_barrier((amax, lost, x))
    exact = jnp.concatenate(_in_blocks(x, axes, signs), axis=inner[0])
    exact = exact.astype(jnp.float32)
    # Subnormals are zero, as casts read them: by integers, because XLA writes the
    # operands of `where` to memory.
    magnitude = _magnitudes(exact)
    magnitude &= -jnp.minimum(magnitude >> float_bits.MANTISSA_BITS, 1)
    outer = _outer([amax])
    (scale,) = scale_rules.tile_scales(
        amax, outer, LARGEST, _E4M3, "max", covers=key is not None
    )
    product = scale * outer
    if key is None:
        # A divisor above every value rounds all of them to zero.
        divisor = jnp.where(product < float_bits.TINY, 2.0**120, product)
        units = nearest(float_bits.from_bits(magnitude), divisor)
    else:
        random = bits_of(exact.shape, *key, fastest=inner[0])
        units = _stochastic(magnitude, product, random)
    scale = jnp.where(lost, jnp.nan, scale)
    values = (jnp.copysign(units, exact) * scale).astype(jnp.bfloat16)
    largest = jnp.broadcast_to(scale * LARGEST, exact.shape)
    found = Nvfp4Values(values.reshape(x.shape), outer)
    return _Observed(exact.reshape(x.shape), found, largest.reshape(x.shape))


def nearest(m: Array, f: Array) -> Array:
    """Return the E2M1 number nearest to m / f, ties to even, at most 6.

    Comparisons replace a long division. A difference of two floats within a factor of
    two of each other is exact, and every other difference has the right sign. So each
    comparison is right for the real numbers.
    """
    one = m - f
    two = m - 2 * f
    four = m - 4 * f
    steps = [  # >= if a tie goes up to the even code
        (m > 0.25 * f, 0.5),  # 0.0 to 0.5
        (one >= -0.25 * f, 0.5),  # 0.5 to 1.0
        (one > 0.25 * f, 0.5),  # 1.0 to 1.5
        (two >= -0.25 * f, 0.5),  # 1.5 to 2.0
        (two > 0.5 * f, 1.0),  # 2.0 to 3.0
        (four >= -0.5 * f, 1.0),  # 3.0 to 4.0
        (four > f, 2.0),  # 4.0 to 6.0
    ]
    units = jnp.zeros_like(one)
    for above, size in steps:
        units += jnp.where(above, size, 0.0)
    return units


def _stochastic(magnitude: Array, divisor: Array, random: Array) -> Array:
    """Return the E2M1 numbers next to magnitude / divisor that random bits choose."""
    digits = float_bits.MANTISSA_BITS
    quotient = float_bits.divide_to_odd(magnitude, float_bits.to_bits(divisor), digits)
    units = float_bits.round_to_grid(quotient, _E2M1.grid, "stochastic", random)
    return jnp.minimum(units, LARGEST)


def _magnitudes(x: Array) -> Array:
    """Return the bits of magnitudes in float32."""
    return float_bits.to_bits(jnp.abs(x.astype(jnp.float32)))


def _largest(parts: list[Array], axes: tuple[int, ...]) -> Array:
    tops = [jnp.max(part, axis=axes, keepdims=True) for part in parts]
    return functools.reduce(jnp.maximum, tops)


def _outer(parts: list[Array]) -> Array:
    """Return the scale of a tensor from the bits of magnitudes, none infinite."""
    tops = functools.reduce(jnp.maximum, parts)
    # jnp.max compares the sizes of axes with 0, and `jax.export` may not know them
    amax = lax.reduce_max(tops, axes=range(tops.ndim))
    return scale_rules.choose_outer(amax, LARGEST, _E4M3, number("float32"), "max")


def _filled(x: Array, axis: int | None) -> tuple[Array, tuple[int, ...]]:
    """Return x filled with zeros up to whole blocks, and the axes of a block."""
    axes = tuple(range(x.ndim)) if axis is None else (axis % x.ndim,)
    fill = [0] * x.ndim
    for place in axes:
        fill[place] = -x.shape[place] % SIDE
    if any(fill):
        x = jnp.pad(x, [(0, size) for size in fill])
    return x, axes


def _in_blocks(x: Array, axes: tuple[int, ...], signs: _Maybe) -> list[Array]:
    """Return x with two axes, `[blocks, 16]`, instead of each axis of a block.

    It is whole, or rotated and row by row.
    """
    shape: list[int] = []
    for axis, size in enumerate(x.shape):
        shape += [size // SIDE, SIDE] if axis in axes else [size]
    whole = x.reshape(shape)
    if signs is None:
        return [whole]
    assert axes == (0,), "the rows of a block are rotated, not its columns"
    # Row by row: XLA would write the rotated array to memory before it finds its
    # maxima.
    rows = []
    for i in range(SIDE):
        row = lax.slice_in_dim(whole, i, i + 1, axis=1)
        rows.append(row.astype(jnp.float32))
    return rotate_arrays(rows, list(signs))
