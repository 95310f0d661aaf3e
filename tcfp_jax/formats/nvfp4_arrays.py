"""NVFP4 in arrays: as codes, which products of stored weights read, and as numbers,
which FP4 training multiplies.

    x ~ E2M1 code * scale of its tile * outer

16 values share an E4M3 scale, and the tensor has a float32 scale.

`quantization.quantize` defines the rounding, as for every cast. `nvfp4_kernel` has the
same bits, and does all in one pass on NVIDIA GPUs. `observe` has them, too: it makes
numbers in XLA, and divides nothing if it rounds to nearest.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.checks import check_choice
from pallas_kernels.counter import bits_of
from pallas_kernels.dispatch import Backend, Implementation, dispatch, lacks_fp8, shared
from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.hopper import plan
from pallas_kernels.tiled import Engine
from tcfp_jax.formats import float_bits, scale_rules
from tcfp_jax.formats.catalog import CATALOG
from tcfp_jax.formats.encoding import encode
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_kernel import Job, reject, run
from tcfp_jax.formats.nvfp4_registers import SIDE, Key, Options, Place
from tcfp_jax.formats.nvfp4_triton import TRITON
from tcfp_jax.formats.quantization import quantize
from tcfp_jax.formats.rotation import checked_signs, rotate, rotate_arrays
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode

ScaleRule = Literal["amax", "four_over_six", "fold_exact"]
_DATATYPES = {"vector": CATALOG["nvfp4"], "square": CATALOG["nvfp4s"]}
_MODES: dict[ScaleRule, ScaleMode] = {
    "amax": "max",
    "four_over_six": "four_over_six",
    "fold_exact": "fold_exact",
}
_Maybe = jax.Array | None
_LARGEST = 6.0  # E2M1's largest value
_E2M1, _E4M3, _FLOAT32 = number("e2m1f"), number("e4m3fn"), number("float32")


class Nvfp4(NamedTuple):
    """Codes and scales: a value is E2M1 code * scale of its tile * outer.

    Attributes:
      codes: uint8 `[..., k / 2]`: byte j has code 2 j in its low half and code 2 j + 1
        in its high half.
      scales: float8_e4m3fn `[..., ceil(k / 16)]`; of squares
        `[..., ceil(n / 16), ceil(k / 16)]`.
      outer: float32 `[]`, the scale of the scales.
    """

    codes: jax.Array
    scales: jax.Array
    outer: jax.Array


class Nvfp4Values(NamedTuple):
    """Numbers `values * outer`: `values` are code times scale, exact in bfloat16, and
    `outer` is a float32 scalar.
    """

    values: jax.Array
    outer: jax.Array

    def dequantize(self) -> jax.Array:
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
    key: Key | None = None,
    backend: Backend | None = None,
) -> Nvfp4:
    """Quantize `x` to codes and scales, rounded as `cast` to `nvfp4` rounds: one pass
    on NVIDIA GPUs.

    Args:
      x: `[..., k]`, real floats, k even.
      rule: how tiles find their scales, the `scalemode` of `cast` ("amax" is its
        "max").
      tile: 16 values along the last axis, or squares of 16 x 16, which have no kernel.
      amax: the largest magnitude of the tensor, float32 `[]`, if you know it; otherwise
        it is computed. Values above it saturate. If it is not finite, the outer scale
        is NaN, and so is every value.
      signs: `[16]` of 1 and -1: first rotate every 16 values along the last axis, as
        `formats.rotate` does, in float32. `amax` is then that of rotated values. Only
        for vectors, with a k that 16 divides.
      key: two words of `pallas_kernels.counter.keys`, for stochastic rounding with the
        bits of each value's index. Its scales cover, so nothing is clipped and the
        expectation is x.
      backend: None for the fastest one, or a name.

    Returns:
      Codes, scales and the outer scale. A tile with NaN has a NaN scale and zero codes;
        inf becomes its tile's largest.

    Raises:
      TypeError: `x` is not real floating point, or the key is not two words.
      ValueError: an odd k, an axis that is shorter than a tile, an unknown rule or
        tile, an amax that is not one magnitude, or signs that are not 16 of 1 and -1,
        or for squares.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> made = quantize_nvfp4(jnp.array([[6.0, -3.0] + [0.0] * 14]))
    >>> made.codes[0, 0].item(), made.scales.tolist(), round(float(made.outer), 6)
    (215, [[448.0]], 0.002232)
    """
    array = jnp.asarray(x)
    _check(array, rule, tile, signs, amax, key)
    wide = None if amax is None else jnp.asarray(amax, jnp.float32)
    flips = None if signs is None else checked_signs(signs, SIDE)
    place: Place = "squares" if tile == "square" else "last"
    options = Options(
        _MODES[rule],
        "even" if key is None else "stochastic",
        flips is not None,
        place=place,
    )
    # Tiles are cut, which explicit axes refuse.
    call = functools.partial(_dispatched, (options, backend))
    return with_automatic_axes(call, lambda _: PartitionSpec(), array, wide, flips, key)


def _by_mosaic(job: Job, *operands: Any) -> list[jax.Array]:
    # Imported where it is used: a second that a program without this kernel need not
    # pay, and needs jax 0.11.
    from tcfp_jax.formats import nvfp4_mosaic

    return nvfp4_mosaic.call(job, *operands)


_MOSAIC = Engine(_by_mosaic, calls_back=True)


def _by_kernel(
    engine: Engine,
    options: Options,
    x: jax.Array,
    amax: _Maybe,
    signs: _Maybe,
    key: Key | None,
) -> Nvfp4 | Nvfp4Values:
    """Return the result by a kernel."""
    if amax is not None:
        found = float_bits.to_bits(jnp.where(jnp.isfinite(amax), amax, 0))
    elif signs is None:
        found = jnp.max(
            scale_rules.finite_magnitude(float_bits.to_bits(x) & jnp.int32(0x7FFFFFFF))
        )
    else:
        unscaled = options.words(jnp.float32(1), signs, key)
        (found,) = run(x, unscaled, options._replace(output="amax"), engine)
    outer = scale_rules.choose_outer(found, _LARGEST, _E4M3, _FLOAT32, options.rule)
    first, *scales = run(x, options.words(outer, signs, key), options, engine)
    outer = outer if amax is None else jnp.where(jnp.isfinite(amax), outer, jnp.nan)
    return Nvfp4(first, scales[0], outer) if scales else Nvfp4Values(first, outer)


def _by_xla(
    options: Options, x: jax.Array, amax: _Maybe, signs: _Maybe, key: Key | None
) -> Nvfp4 | Nvfp4Values:
    """Return the result as the format library's cast computes it."""
    if options.output == "bfloat16":
        return observe(
            x, {"last": -1, "first": 0, "squares": None}[options.place], key, signs
        ).found
    if signs is not None:
        x = rotate(x.astype(jnp.float32), SIDE, signs=signs)
    datatype = _DATATYPES["square" if options.place == "squares" else "vector"]
    modes = Modes(options.rounding, options.rule)
    random = None if key is None else bits_of(x.shape, *key)
    given = (
        None
        if amax is None
        else float_bits.to_bits(jnp.where(jnp.isfinite(amax), amax, 0))
    )
    parts = quantize(float_bits.to_bits(x), datatype, modes, random, given)
    layout = datatype.layout(x.shape)
    assert (
        datatype.scale is not None
        and parts.scale is not None
        and parts.outer is not None
    )
    # The codes of a NaN tile mean nothing; the codes of a zero tile are only signs.
    kept = jnp.where(
        jnp.isnan(parts.scale),
        0,
        jnp.where(parts.scale * parts.outer < float_bits.TINY, 8, 15),
    )
    codes = layout.join(encode(parts.value, datatype.number) & kept.astype(jnp.uint32))  # type: ignore[arg-type]
    scales = encode(parts.scale, datatype.scale.number).astype(jnp.uint8)
    split = [
        size
        for axis, size in enumerate(layout.split_shape)
        if axis not in layout.tile_axes
    ]
    pairs = codes.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return Nvfp4(
        (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8),
        lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).reshape(split),
        (
            parts.outer
            if amax is None
            else jnp.where(jnp.isfinite(amax), parts.outer, jnp.nan)
        ),
    )


def _reject_mosaic(options: Options, x: jax.Array, *arrays: object) -> str | None:
    return plan.reject(jnp.bfloat16) or reject(options, x)


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
def _dispatched(chosen: tuple[Options, Backend | None], *arrays: Any) -> Any:
    options, backend = chosen
    return dispatch("quantize_nvfp4", IMPLEMENTATIONS, backend, options, *arrays)


def _check(
    x: jax.Array,
    rule: str,
    tile: str,
    signs: ArrayLike | None,
    amax: ArrayLike | None,
    key: object,
) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x is {x.dtype}, and NVFP4 holds real floats; convert it first, such as"
            " x.astype(float32)"
        )
    check_choice("rule", rule, _MODES)
    check_choice("tile", tile, _DATATYPES)
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
    side = shape[-2:] if tile == "square" else shape[-1:]
    if len(side) < (2 if tile == "square" else 1) or min(side) < SIDE:
        raise ValueError(
            f"x{shape} is smaller than one tile of {SIDE} ({tile!r}); pad it with zeros"
        )
    if amax is not None:
        top = jnp.asarray(amax)
        if top.shape or jnp.issubdtype(top.dtype, jnp.complexfloating):
            has = f"shape {list(top.shape)} and dtype {top.dtype}"
            raise ValueError(
                f"amax has {has}, but the tensor has one real magnitude, []; pass a"
                " scalar"
            )
        if not isinstance(top, jax.core.Tracer) and float(top) < 0:
            raise ValueError(
                f"amax={float(top)} is negative, and a magnitude is not; pass"
                " jnp.max(jnp.abs(x))"
            )
    if key is not None and not (isinstance(key, tuple) and len(key) == 2):
        raise TypeError(
            f"key is a {type(key).__name__}, not two words; make them by"
            " pallas_kernels.counter.keys(seed)"
        )


# Numbers
# --------------------------------------------------------------------------------------


def quantize_values(
    x: jax.Array,
    axis: int | None,
    key: Key | None = None,
    signs: _Maybe = None,
    *,
    backend: Backend | None = None,
) -> Nvfp4Values:
    """Quantize `x` to numbers in blocks of 16 along an axis, or a matrix in squares of
    16 x 16, with scales amax / 6.

    A NaN or inf makes its block NaN, while a cast saturates inf: a gradient that
    overflows must be seen.

    Args:
      x: bfloat16 or float32.
      axis: the first or the last, or None for squares: the transpose of a matrix then
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
    place: Place = "squares" if axis is None else "last" if axes[0] else "first"
    options = Options(
        "max",
        "even" if key is None else "stochastic",
        signs is not None,
        "bfloat16",
        place,
    )
    return _dispatched((options, backend), x, None, signs, key)


class _Observed(NamedTuple):
    """Each value before and after `quantize_values`; arrays of the shape of `found`.

    Attributes:
      exact: the values before they are rounded, and after they are rotated; float32.
      found: the numbers.
      largest: the largest magnitude that the scale of a value's block holds, in units
        of `found.outer`; float32.
    """

    exact: jax.Array
    found: Nvfp4Values
    largest: jax.Array


def observe(
    x: jax.Array, axis: int | None, key: Key | None = None, signs: _Maybe = None
) -> _Observed:
    """Return what `quantize_values` does to each value; XLA computes it."""
    assert axis is not None or key is None, "the random bits of squares are not defined"
    x, axes = _filled(x, axis)
    shape, inner = x.shape, tuple(place + n + 1 for n, place in enumerate(axes))
    blocks = functools.partial(_in_blocks, axes=axes, signs=signs)
    # Blocks are made twice, because a pass over x that makes them costs less than one
    # over the result.
    bits = [
        lax.bitcast_convert_type(jnp.abs(part.astype(jnp.float32)), jnp.int32)
        for part in blocks(x)
    ]
    top = lambda part: jnp.max(part, axis=inner, keepdims=True)
    largest_of = lambda parts: functools.reduce(jnp.maximum, map(top, parts))
    amax = largest_of([scale_rules.finite_magnitude(part) for part in bits])
    lost = largest_of(bits) >= float_bits.INFINITY
    # Without a barrier XLA finds the maximum of x in a pass of its own, and writes the
    # rotated array to memory.
    amax, lost, x = lax.optimization_barrier((amax, lost, x))
    exact = jnp.concatenate(blocks(x), axis=inner[0]).astype(jnp.float32)
    # Subnormals are zero, as casts read them: by integers, because XLA writes the
    # operands of `where` to memory.
    magnitude = lax.bitcast_convert_type(jnp.abs(exact), jnp.int32)
    magnitude &= -jnp.minimum(magnitude >> float_bits.MANTISSA_BITS, 1)
    outer = scale_rules.choose_outer(jnp.max(amax), _LARGEST, _E4M3, _FLOAT32, "max")
    (scale,) = scale_rules.tile_scales(
        amax, outer, _LARGEST, _E4M3, "max", key is not None
    )
    product = scale * outer
    if key is None:
        # A divisor above every value rounds all of them to zero.
        divisor = jnp.where(product < float_bits.TINY, jnp.float32(2.0**120), product)
        units = nearest(lax.bitcast_convert_type(magnitude, jnp.float32), divisor)
    else:
        divisor = lax.bitcast_convert_type(product, jnp.int32)
        quotient = float_bits.divide_to_odd(
            magnitude, divisor, float_bits.MANTISSA_BITS
        )
        random = bits_of(exact.shape, *key, fastest=inner[0])
        units = jnp.minimum(
            float_bits.round_to_grid(quotient, _E2M1.grid, "stochastic", random),
            _LARGEST,
        )
    scale = jnp.where(lost, jnp.float32(jnp.nan), scale)
    values = (jnp.copysign(units, exact) * scale).astype(jnp.bfloat16)
    largest = jnp.broadcast_to(scale * _LARGEST, exact.shape)
    found = Nvfp4Values(values.reshape(shape), outer.reshape(()))
    return _Observed(exact.reshape(shape), found, largest.reshape(shape))


def nearest(m: jax.Array, f: jax.Array) -> jax.Array:
    """Return the E2M1 number nearest to m / f, ties to even, at most 6, by comparisons
    instead of a long division.

    A difference of two floats within a factor of two of each other is exact, and every
    other difference has the right sign. So each comparison is right for the real
    numbers.
    """
    one, two, four = m - f, m - 2 * f, m - 4 * f
    step = lambda up, size: jnp.where(up, jnp.float32(size), 0)
    units = (
        step(m > 0.25 * f, 0.5)
        + step(one >= -0.25 * f, 0.5)
        + step(one > 0.25 * f, 0.5)
    )
    units += step(two >= -0.25 * f, 0.5) + step(two > 0.5 * f, 1)
    return units + step(four >= -0.5 * f, 1) + step(four > f, 2)


def _filled(x: jax.Array, axis: int | None) -> tuple[jax.Array, tuple[int, ...]]:
    """Return x filled with zeros up to whole blocks, and the axes of a block."""
    axes = tuple(range(x.ndim)) if axis is None else (axis % x.ndim,)
    short = [(0, -size % SIDE if i in axes else 0) for i, size in enumerate(x.shape)]
    return (jnp.pad(x, short) if any(fill for _, fill in short) else x), axes


def _in_blocks(
    x: jax.Array, axes: tuple[int, ...], signs: jax.Array | None
) -> list[jax.Array]:
    """Return x with two axes, `[blocks, 16]`, instead of each axis of a block: whole,
    or rotated and row by row.
    """
    shape = [
        part
        for i, size in enumerate(x.shape)
        for part in ((size // SIDE, SIDE) if i in axes else (size,))
    ]
    whole = x.reshape(shape)
    if signs is None:
        return [whole]
    assert axes == (0,), "the rows of a block are rotated, not its columns"
    # Row by row: XLA would write the rotated array to memory before it finds its
    # maxima.
    rows = [
        lax.slice_in_dim(whole, i, i + 1, axis=1).astype(jnp.float32)
        for i in range(SIDE)
    ]
    return rotate_arrays(rows, list(signs))
