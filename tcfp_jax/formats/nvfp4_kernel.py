"""NVFP4 in one pass on NVIDIA GPUs: x is read once, codes two a byte and scales are written once.

A Pallas-Triton program takes 128 tiles, a thread one of them: it loads 32 bytes of bfloat16, stores 8 bytes of codes
and one of the scale, and has nothing to exchange with its neighbours. `nvfp4_tiles` is what it computes. The largest
magnitude of a rotated tensor is found by a pass of the same kind, which stores one for every tile.

Under a mesh each device quantizes its own part. Random bits depend on the index in the whole array: a device that holds
a part of it is told where its part begins.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.partition import device_count, partitioned
from tcfp_jax.formats.nvfp4_tiles import (
    SIDE,
    Device,
    Options,
    Portable,
    Scalars,
    quantized,
)
from tcfp_jax.formats.rotation import rotate_arrays

TILES = 128
WARPS = 4
Output = Literal["codes", "amax"]


def serves(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether the kernel takes arrays of this shape and dtype: whole tiles along the last axis, 128 in all or more.

    >>> serves((128, 64), jnp.bfloat16), serves((128, 60), jnp.bfloat16)
    (True, False)
    """
    whole = bool(shape) and shape[-1] % SIDE == 0 and math.prod(shape) % (SIDE * TILES) == 0
    return whole and math.prod(shape) > 0 and dtype in (jnp.float32, jnp.bfloat16)


def quantize_tiles(
    x: jax.Array, words: jax.Array, options: Options, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(codes uint8 `[..., k / 2]`, scales `[..., k / 16]`) of an array that `serves` accepts.

    Args:
      x: `[..., k]`, float32 or bfloat16.
      words: of `nvfp4_tiles.words`.
      interpret: run in Pallas's interpreter, on CPUs.
    """
    codes, scales = _run(x, words, options, "codes", interpret)
    return codes.reshape(*x.shape[:-1], x.shape[-1] // 2), scales


def rotated_amax(x: jax.Array, words: jax.Array, options: Options, *, interpret: bool = False) -> jax.Array:
    """The largest finite magnitude of x after its rotation, float32 `[]`."""
    (found,) = _run(x, words, options, "amax", interpret)
    return lax.bitcast_convert_type(jnp.max(found), jnp.float32)


def _run(x: jax.Array, words: jax.Array, options: Options, output: Output, interpret: bool) -> Any:
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // SIDE, SIDE)
    *shape, _ = tiles.shape
    axes = "abcdefghijklmnop"[: len(shape)]
    places = [lax.iota(jnp.uint32, size) for size in shape] if device_count() > 1 else []
    side = " ".join(axes)
    inputs = ["u", f"{side} t", *(axes if places else "")]
    outputs = [f"{side} s", side] if output == "codes" else [side]
    local = functools.partial(_local, tuple(shape), options, output, interpret)
    whole = ("t", "s") if output == "codes" else ("t",)
    return partitioned(local, f"{', '.join(inputs)} -> {', '.join(outputs)}", whole=whole)(words, tiles, *places)


def _local(
    shape: tuple[int, ...], options: Options, output: Output, interpret: bool, words: jax.Array, tiles: jax.Array,
    *places: jax.Array, summed_over: tuple[str, ...],
) -> list[jax.Array]:  # fmt: skip
    """The results of a device's part of an array whose tiles have this shape."""
    own = tiles.shape[:-1]
    starts = jnp.stack([place[0] for place in places]) if places and own != shape else None
    rows = tiles.reshape(-1, SIDE)
    if rows.shape[0] % TILES:
        found = _by_arrays(rows, words, starts, (own, shape), options, output)
    else:
        found = _call(rows, words, starts, (own, shape), options, output, interpret)
    return [part.reshape(*own, *part.shape[1:]) for part in found]


def _by_arrays(
    rows: jax.Array, words: jax.Array, starts: jax.Array | None, shapes: Any, options: Options, output: Output
) -> list[jax.Array]:
    """The same without a kernel, for a part that its programs do not divide."""
    scalars = Scalars.of(options, Portable(), lambda at: words[at])
    x = [rows[:, i].astype(jnp.float32) for i in range(SIDE)]
    place = lax.iota(jnp.uint32, rows.shape[0])
    return _compute(options, Portable(), scalars, x, _first(place, starts, shapes), output)


def _compute(
    options: Options, do: Portable, scalars: Scalars, x: list[jax.Array], first: jax.Array, output: Output
) -> list[jax.Array]:
    """The results for tiles in 16 arrays: bytes `[tiles, 8]` and scales, or their largest magnitudes."""
    if options.rotation == "hadamard":
        x = rotate_arrays(x, scalars.signs)
    if output == "amax":
        return [lax.bitcast_convert_type(do.largest_finite([jnp.abs(value) for value in x]), jnp.int32)]
    parts, factor = quantized(options, do, scalars, x, first)
    parts = [part.astype(jnp.uint8) for part in parts]
    # Neighbours are put together last: byte 4 a + 2 b + c lies at [a, b, c].
    pairs = [jnp.stack([parts[i], parts[i + 4]], axis=-1) for i in range(4)]
    fours = [jnp.stack([pairs[i], pairs[i + 2]], axis=-1) for i in range(2)]
    return [jnp.stack(fours, axis=-1).reshape(-1, 8), factor.astype(jnp.float8_e4m3fn)]


def _first(tile: jax.Array, starts: jax.Array | None, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """The index in the whole array of the first value of each tile, modulo 2**32, from the tile's index in a part."""
    if starts is None:
        return tile * jnp.uint32(SIDE)
    own, whole = shapes
    index, stride = jnp.zeros_like(tile), 1
    for axis in range(len(own) - 1, -1, -1):
        index += (starts[axis] + tile % jnp.uint32(own[axis])) * jnp.uint32(stride % 2**32)
        tile, stride = tile // jnp.uint32(own[axis]), stride * whole[axis]
    return index * jnp.uint32(SIDE)


def _call(
    rows: jax.Array, words: jax.Array, starts: jax.Array | None, shapes: Any, options: Options, output: Output,
    interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    count = rows.shape[0]
    given = [] if starts is None else [starts]

    def kernel(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        arithmetic = Portable() if interpret else Device()
        scalars = Scalars.of(options, arithmetic, lambda at: words_ref[at])
        # Two loads of 16 bytes: in one, two threads would share a tile.
        halves = [x_ref[:, start : start + 8] for start in (0, 8)]
        x = [
            part.reshape(TILES).astype(jnp.float32)
            for half in halves
            for part in lax.split(half, (1,) * 8, axis=1)
        ]  # fmt: skip
        place = (pl.program_id(0) * TILES + lax.broadcasted_iota(jnp.int32, (TILES,), 0)).astype(jnp.uint32)
        first = _first(place, refs[0] if given else None, shapes)
        results = refs[len(given) :]
        for ref, part in zip(results, _compute(options, arithmetic, scalars, x, first, output), strict=True):
            ref[...] = part

    tiles = pl.BlockSpec((TILES,), lambda i: (i,))
    if output == "amax":
        out_shape, out_specs = [jax.ShapeDtypeStruct((count,), jnp.int32)], [tiles]
    else:
        codes = jax.ShapeDtypeStruct((count, SIDE // 2), jnp.uint8)
        out_shape = [codes, jax.ShapeDtypeStruct((count,), jnp.float8_e4m3fn)]
        out_specs = [pl.BlockSpec((TILES, SIDE // 2), lambda i: (i, 0)), tiles]
    whole = lambda size: pl.BlockSpec((size,), lambda i: (0,))
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(count // TILES,),
        in_specs=[
            whole(words.size), pl.BlockSpec((TILES, SIDE), lambda i: (i, 0)), *(whole(g.size) for g in given)
        ],
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="quantize_nvfp4",
    )(words, rows, *given)  # fmt: skip
