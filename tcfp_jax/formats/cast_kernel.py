"""The common casts in one pass on NVIDIA GPUs.

They have power-of-two scales for tiles, round to nearest even, and saturate.

Memory traffic decides the time of a cast. XLA compiles it to three kernels, which read
x twice and write an int32 array of its size in between. A kernel holds a block of tiles
in registers: one read of x, one of the result.

The kernel has the bits of `quantization.quantize` and `quantization.assemble`, with
fewer operations: a GPU does not flush subnormals, so a product by a power of two is a
float multiplication there. `reject` says which arrays the kernel takes. All other casts
and devices take the definition. Results are equal, so you do not choose among
`casting.IMPLEMENTATIONS`: Pallas-Triton comes first, and Pallas Mosaic if it is
missing.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from pallas_kernels.arithmetic import Portable
from pallas_kernels.hopper import engine as hopper
from pallas_kernels.hopper import plan
from pallas_kernels.partition import partitioned
from pallas_kernels.tiled import (
    Arrays,
    Axis,
    Body,
    Engine,
    Operands,
    Output,
    Pass,
    Tiling,
)
from tcfp_jax.formats import float_bits, scale_rules
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.float_bits import INFINITY, MANTISSA_BITS, SIGN
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode, ScaleSpec

# Values of a program of Pallas-Triton: 16 per thread, as in the quantizers.
_VALUES = 4096
_LEAST_VALUES = 256


@dataclass(frozen=True)
class Cast:
    """The static options of a cast."""

    datatype: DataType
    modes: Modes


def reject(options: Cast, x: Array, key: Array | None) -> str | None:
    """Return the reason why no kernel computes this cast, or None.

    The scale must be a power of two for tiles with one side, without subtiles, that run
    along the last axis and divide it. Its rule may depend only on the largest value of
    a tile. The smallest result must be a float32 and the largest have the dtype of x,
    so that no multiplication rounds.
    """
    name = options.datatype.name
    number = options.datatype.number
    scale = options.datatype.scale
    if scale is None or scale.number.kind != "exponent":
        return f"{name} has no power-of-two scales"
    if options.datatype.residual is not None:
        return f"{name} has a residual"
    if not isinstance(number, NumberSpec) or number.kind == "uint":
        return f"{name} has a codebook or a zero point"
    if options.modes.roundmode != "even" or not options.modes.saturate:
        return "a kernel rounds to nearest even and saturates"
    if options.modes.of_scale(scale) == "mse":
        return 'scalemode="mse" depends on all values of a tile'
    if (reason := _reject_tiles(scale, x.shape)) is not None:
        return f"x{list(x.shape)} in {name}: {reason}"
    is_exact = number.smallest_subnormal * scale.number.min >= 2.0**-149
    digits = {"float32": 20, "bfloat16": 7}.get(str(x.dtype), -1)
    if not is_exact or number.mbits > digits:
        return f"{x.dtype} does not hold every value of {name} times its scale"
    return None


def _reject_tiles(scale: ScaleSpec, shape: tuple[int, ...]) -> str | None:
    """Return the reason why tiles are not parts of the last axis, or None."""
    if len(scale.tiles) != 1 or scale.is_subtile or not shape:
        return "its tiles are not vectors"
    (tile,) = scale.tiles
    if not tile.size or tile.dim % len(shape) != len(shape) - 1:
        return "its tiles do not run along the last axis"
    if shape[-1] % tile.size:
        return f"tiles of {tile.size} do not divide the last axis"
    if _tiling(tile.size).fit(math.prod(shape) // tile.size, tile.size) is None:
        return "the tiles do not divide into blocks of programs"
    return None


def reject_mosaic(options: Cast, x: Array, key: Array | None) -> str | None:
    """Return the reason why Pallas Mosaic cannot compute this cast, or None."""
    if (reason := reject(options, x, key)) is not None:
        return reason
    size = _tile_size(options.datatype)
    if size < 4 or plan.ROWS % size:
        return f"tiles of {size} do not divide {plan.ROWS}"
    columns = plan.columns_of(size)
    view = jax.ShapeDtypeStruct((x.size // columns, columns), x.dtype)
    return hopper.reject([view], columns)


def cast_tiles(engine: Engine, options: Cast, x: Array) -> Array:
    """Return the cast of an array that is not rejected.

    Pallas-Triton's interpreter flushes subnormals on CPUs.
    """
    size = _tile_size(options.datatype)
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return _by_tiles(engine, options)(tiles).reshape(x.shape)


@functools.cache
def _by_tiles(engine: Engine, options: Cast) -> Callable[[Array], Array]:
    """Return the kernel on `[..., tile]`.

    Whole tiles stay on one device, and vmap adds a leading axis. (`map_tiles` would
    take the leading axes as one, and gather those that a mesh splits.)
    """
    scale = options.datatype.scale
    assert scale is not None
    body = _CastBody(options.datatype, options.modes.of_scale(scale))

    def local(tiles: Array, *, summed_over: tuple[str, ...] = ()) -> Array:
        size = tiles.shape[-1]
        rows = tiles.reshape(-1, size)
        one = Pass(body, (Output(rows.dtype),), "cast", _tiling(size), matrices=1)
        found = engine.run(one, rows)
        made = body.whole([rows]) if found is None else found
        return made[0].reshape(tiles.shape)

    @custom_vmap
    def run(tiles: Array) -> Array:
        if engine.calls_back_here():
            return local(tiles)
        axes = " ".join("abcdefghijklmnop"[: tiles.ndim - 1])
        of_parts = partitioned(local, f"{axes} t -> {axes} t", whole=("t",))
        made: Array = of_parts(tiles)
        return made

    @run.def_vmap
    def _rule(size: int, is_mapped: list[bool], tiles: Array) -> tuple[Array, bool]:
        return run(tiles), True

    return run


def _tile_size(datatype: DataType) -> int:
    """Return the values of a tile of a datatype that is not rejected."""
    assert datatype.scale is not None
    return datatype.scale.tiles[0].size


def _tiling(size: int) -> Tiling:
    """Return the blocks of tiles of a program, for tiles as rows of a matrix."""
    counts = []
    count = max(1, _VALUES // size)
    while count * size >= _LEAST_VALUES:
        counts.append(count)
        count //= 2
    return Tiling(tuple(counts), (size,))


def _by_mosaic(one: Pass, rows: Array) -> list[Array] | None:
    """Run a pass over `[tiles, size]`, with several tiles in a row of the matrix."""
    size = rows.shape[1]
    columns = plan.columns_of(size)
    if rows.size % columns:
        return None
    of_blocks = replace(one, tiling=Tiling.of_blocks(size))
    found = hopper.MOSAIC.run(of_blocks, rows.reshape(-1, columns))
    return None if found is None else [found[0].reshape(rows.shape)]


MOSAIC = Engine(_by_mosaic, calls_back=True)


@dataclass(frozen=True)
class _CastBody(Body):
    """The cast of tiles, one in each row, in arithmetic that keeps subnormals.

    |x| / s + m - m, with m = 2**23 steps of the number around x / s, rounds to those
    steps, because the digits of float32 next to m are exactly the digits of the number.
    Powers of two come as two factors, as one may leave float32.
    """

    datatype: DataType
    scalemode: ScaleMode

    @property
    def axes(self) -> tuple[Axis, ...]:
        """A scale for each row."""
        return (1,)

    @property
    def number(self) -> NumberSpec:
        """The number of the values."""
        assert isinstance(self.datatype.number, NumberSpec)
        return self.datatype.number

    def measured(self, operands: Operands) -> Array:
        """Return the values that count for the scales."""
        (x,) = operands
        value = x.astype(jnp.float32)
        magnitude = _magnitude(value)
        # Without a code for NaN, one makes the whole tile NaN, whatever its scale.
        if self.number.has_nan:
            return jnp.where(magnitude >= INFINITY, 0, value)
        return jnp.where(magnitude == INFINITY, 0, value)

    def values(self, do: Portable, operands: Operands, maxima: Arrays) -> Arrays:
        """Return the cast of rows, see `Body`."""
        (x,) = operands
        number = self.number
        value = x.astype(jnp.float32)
        magnitude = _magnitude(value)
        amax = lax.bitcast_convert_type(maxima[0], jnp.int32)
        exponent = self._exponent(amax)
        half = exponent >> 1
        down = float_bits.power_of_two(-half)
        down_again = float_bits.power_of_two(half - exponent)
        up = float_bits.power_of_two(half)
        up_again = float_bits.power_of_two(exponent - half)
        if not number.has_nan:
            up = jnp.where(amax > INFINITY, jnp.float32(jnp.nan), up)
        largest = number.grid.largest
        scaled = jnp.clip(value * down * down_again, -largest, largest)
        rounded = self._rounded(scaled)
        sign = lax.bitcast_convert_type(scaled, jnp.int32) & jnp.int32(SIGN)
        if not number.has_negative_zero:
            sign = jnp.where(rounded == 0, 0, sign)
        signed = lax.bitcast_convert_type(rounded | sign, jnp.float32)
        result = signed * up * up_again
        # The sign of a NaN may have changed on the way; the definition writes one NaN.
        result = jnp.where(magnitude > INFINITY, jnp.float32(jnp.nan), result)
        return (result.astype(x.dtype),)

    def whole(self, operands: Operands) -> Arrays:
        """Return the cast of all tiles by XLA."""
        bits = jnp.max(_magnitude(self.measured(operands)), axis=1, keepdims=True)
        amax = lax.bitcast_convert_type(bits, jnp.float32)
        return self.values(Portable(), operands, (amax,))

    def _exponent(self, amax: Array) -> Array:
        """Return the exponents of scales, from the bits of largest magnitudes."""
        scale = self.datatype.scale
        assert scale is not None
        exponent, _ = scale_rules.choose_exponent(
            amax, self.number, scale.number, self.scalemode
        )
        if self.number.is_integer:
            # Integers count in ones here, while an exponent scale counts them in steps
            # of 2**-(mbits - 1).
            return exponent - (self.number.mbits - 1)
        return exponent

    def _rounded(self, scaled: Array) -> Array:
        """Return the bits of the nearest magnitudes of the number."""
        grid = self.number.grid
        bits = lax.bitcast_convert_type(scaled, jnp.int32)
        binade = jnp.maximum(bits & INFINITY, (grid.emin + 127) << MANTISSA_BITS)
        above = (MANTISSA_BITS - grid.mbits) << MANTISSA_BITS
        steps = lax.bitcast_convert_type(binade + above, jnp.float32)
        rounded = (jnp.abs(scaled) + steps) - steps
        return lax.bitcast_convert_type(rounded, jnp.int32)


def _magnitude(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(~SIGN)
