"""The common casts in one pass on NVIDIA GPUs: tiles with power-of-two scales, rounded
to nearest even, saturating.

Memory traffic decides the time of a cast. XLA compiles it to three kernels, which read
x twice and write an int32 array of its size in between. A Pallas-Triton program holds a
block of tiles in registers: one read of x, one of the result.

The kernel has the bits of `quantization.quantize` and `quantization.assemble`, with
fewer operations: a GPU does not flush subnormals, so a product by a power of two is a
float multiplication there. `serves` says which arrays the kernel takes. All other casts
and devices take the definition. You never choose, because the results are equal. Where
JAX has no Pallas-Triton, Hopper GPUs run the same body by the passes of Pallas Mosaic.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.hopper import plan
from pallas_kernels.partition import partitioned
from pallas_kernels.specs import varying
from pallas_kernels.tiled import Operations, Output, Pass, Tiling
from tcfp_jax.formats import float_bits, scale_rules
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.float_bits import INFINITY, MANTISSA_BITS, SIGN
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode

# 16 values per thread, as in the quantizers of `pallas_kernels.tiled`.
VALUES = 4096
WARPS = 8
_LEAST_VALUES = 256


def serves(
    shape: tuple[int, ...], dtype: jnp.dtype, datatype: DataType, modes: Modes
) -> bool:
    """Return True if the kernel computes this cast on an NVIDIA GPU.

    The scale must be a power of two for tiles with one side, without subtiles, that run
    along the last axis and divide it. Its rule may depend only on the largest value of
    a tile. The smallest result must be a float32 and the largest a `dtype`, so that no
    multiplication rounds.
    """
    number, scale = datatype.number, datatype.scale
    if (
        scale is None
        or datatype.residual is not None
        or not isinstance(number, NumberSpec)
    ):
        return False
    if (
        scale.number.kind != "exponent"
        or len(scale.tiles) != 1
        or scale.is_subtile
        or number.kind == "uint"
    ):
        return False
    if (
        modes.of_scale(scale) == "mse"
        or modes.roundmode != "even"
        or not modes.saturate
        or number.mbits > 20
    ):
        return False
    (tile,) = scale.tiles
    if (
        not shape
        or tile.dim % len(shape) != len(shape) - 1
        or not tile.size
        or shape[-1] % tile.size
    ):
        return False
    exact = number.smallest_subnormal * scale.number.min >= 2.0**-149
    fits = dtype == jnp.float32 or (dtype == jnp.bfloat16 and number.mbits <= 7)
    return exact and fits and _block(shape, tile.size) is not None


def cast_tiles(
    x: jax.Array, datatype: DataType, scalemode: ScaleMode, *, interpret: bool = False
) -> jax.Array:
    """Cast an array that `serves` accepts; Pallas's interpreter (`interpret`) flushes
    subnormals on CPUs.
    """
    scale = datatype.scale
    assert scale is not None
    size = scale.tiles[0].size
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return _by_tiles(datatype, scalemode, interpret)(tiles).reshape(x.shape)


@functools.cache
def _by_tiles(
    datatype: DataType, scalemode: ScaleMode, interpret: bool
) -> Callable[[jax.Array], jax.Array]:
    """Return the kernel on `[..., tile]`: whole tiles stay on one device, and vmap adds
    a leading axis.
    """

    def local(tiles: jax.Array, *, summed_over: tuple[str, ...]) -> jax.Array:
        rows = tiles.reshape(-1, tiles.shape[-1])
        if plgpu.missing():
            return _by_mosaic(rows, datatype, scalemode).reshape(tiles.shape)
        # no block divides the part of a device
        if _block(tiles.shape, tiles.shape[-1]) is None:
            return _cast_block(rows, datatype, scalemode).reshape(tiles.shape)
        return _call(rows, datatype, scalemode, interpret).reshape(tiles.shape)

    @custom_vmap
    def run(tiles: jax.Array) -> jax.Array:
        axes = " ".join("abcdefghijklmnop"[: tiles.ndim - 1])
        return partitioned(local, f"{axes} t -> {axes} t", whole=("t",))(tiles)

    @run.def_vmap
    def _rule(
        size: int, is_mapped: list[bool], tiles: jax.Array
    ) -> tuple[jax.Array, bool]:
        return run(tiles), True

    return run


def _block(shape: tuple[int, ...], size: int) -> int | None:
    """Return the tiles of a program: the largest power of two, up to 4096 values, that
    divides their count, or None.
    """
    count = functools.reduce(lambda a, b: a * b, shape, 1) // size
    tiles = max(1, VALUES // size)
    while tiles and count % tiles:
        tiles //= 2
    return tiles if count and tiles * size >= _LEAST_VALUES else None


def _call(
    rows: jax.Array, datatype: DataType, scalemode: ScaleMode, interpret: bool
) -> jax.Array:
    from jax.experimental import pallas as pl

    count, size = rows.shape
    tiles = _block(rows.shape, size)
    assert tiles is not None, "the caller checked"

    def kernel(x: Any, out: Any) -> None:
        out[...] = _cast_block(x[...], datatype, scalemode)

    spec = pl.BlockSpec((tiles, size), lambda i: (i, 0))
    return plgpu.pallas_call(
        kernel,
        out_shape=varying(jax.ShapeDtypeStruct(rows.shape, rows.dtype), rows),
        grid=(count // tiles,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plgpu.CompilerParams(
            num_warps=max(1, WARPS * tiles * size // VALUES), num_stages=1
        ),
        interpret=interpret,
        name="cast",
    )(rows)


def _by_mosaic(rows: jax.Array, datatype: DataType, scalemode: ScaleMode) -> jax.Array:
    """Cast `[tiles, size]` by the passes of Pallas Mosaic, or by XLA if none fits."""
    size = rows.shape[1]
    columns = max(plan.COLUMNS, size)
    if size < 4 or plan.ROWS % size or rows.size % (plan.ROWS * columns):
        return _cast_block(rows, datatype, scalemode)
    from pallas_kernels.hopper import passes

    body = lambda do, x: (_cast_block(x, datatype, scalemode, do),)
    one = Pass(body, (Output(rows.dtype),), "cast", Tiling.of_blocks(size), 1, (0, 0))
    return passes.call(one, rows.reshape(-1, columns))[0].reshape(rows.shape)


def _cast_block(
    x: jax.Array,
    datatype: DataType,
    scalemode: ScaleMode,
    do: Operations = Operations(),
) -> jax.Array:
    """Cast `[tiles, size]`, with one scale per row, in arithmetic that keeps
    subnormals.

    |x| / s + m - m, with m = 2**23 steps of the number around x / s, rounds to those steps, because the digits of
    float32 next to m are exactly the digits of the number. Powers of two come as two factors, as one may leave float32.
    """
    number, scale = datatype.number, datatype.scale
    assert scale is not None and isinstance(number, NumberSpec)
    value = x.astype(jnp.float32)
    magnitude = lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(~SIGN)
    # Without a code for NaN, one makes the whole tile NaN, whatever its scale.
    is_left_out = magnitude >= INFINITY if number.has_nan else magnitude == INFINITY
    amax = lax.bitcast_convert_type(
        do.largest(jnp.where(is_left_out, 0, value), (1,))[0], jnp.int32
    )
    exponent, _ = scale_rules.choose_exponent(amax, number, scale.number, scalemode)
    grid = number.grid
    # Integers count in ones here, while an exponent scale counts them in steps of
    # 2**-(mbits - 1).
    exponent = exponent - (number.mbits - 1) if number.is_integer else exponent
    half = exponent >> 1
    down, down_again = (
        float_bits.power_of_two(-half),
        float_bits.power_of_two(half - exponent),
    )
    up, up_again = (
        float_bits.power_of_two(half),
        float_bits.power_of_two(exponent - half),
    )
    if not number.has_nan:
        up = jnp.where(amax > INFINITY, jnp.float32(jnp.nan), up)
    scaled = jnp.clip(value * down * down_again, -grid.largest, grid.largest)
    bits = lax.bitcast_convert_type(scaled, jnp.int32)
    binade = jnp.maximum(bits & INFINITY, (grid.emin + 127) << MANTISSA_BITS)
    steps = lax.bitcast_convert_type(
        binade + ((MANTISSA_BITS - grid.mbits) << MANTISSA_BITS), jnp.float32
    )
    rounded = lax.bitcast_convert_type((jnp.abs(scaled) + steps) - steps, jnp.int32)
    sign = bits & jnp.int32(SIGN)
    if not number.has_negative_zero:
        sign = jnp.where(rounded == 0, 0, sign)
    result = lax.bitcast_convert_type(rounded | sign, jnp.float32) * up * up_again
    # The sign of a NaN may have changed on the way; the definition writes one NaN.
    return jnp.where(magnitude > INFINITY, jnp.float32(jnp.nan), result).astype(x.dtype)
