"""NVFP4 in one pass on NVIDIA GPUs: x is read once; codes two a byte and scales, or numbers, are written once.

A Pallas-Triton program takes 128 tiles, a thread one or two of them, and exchanges nothing with its neighbours. For
tiles along the last axis a thread loads 32 bytes of bfloat16 and stores 8 bytes of codes and one byte of the scale, or
32 bytes of numbers. For tiles down the first axis of a matrix, neighbours hold neighbouring columns. `nvfp4_registers`
has the arithmetic. A pass of the same kind finds the largest magnitude of a rotated tensor: each program stores one.

Under a mesh each device quantizes its own part, and knows where that begins: the random bits of a value depend on it.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.partition import partitioned
from pallas_kernels.specs import device_count, varying
from tcfp_jax.formats.nvfp4_registers import SIDE, Options, Place, Scalars, compute

TILES = 128
# Down the first axis the values of a tile lie apart, so a thread takes two columns to load words of 4 bytes.
_WARPS: dict[Place, int] = {"last": 4, "first": 2}


_Shape = tuple[int, ...]


class _Job(NamedTuple):
    """A pass over an array; `shape` counts its tiles, without the axis of their values."""

    options: Options
    shape: _Shape
    interpret: bool


def serves(shape: tuple[int, ...], dtype: DTypeLike, place: Place = "last") -> bool:
    """Return True if the kernel takes arrays of this shape and dtype: whole tiles, in groups of 128."""
    if math.prod(shape) == 0 or dtype not in (jnp.float32, jnp.bfloat16) or plgpu.missing():
        return False
    if place == "first":
        return len(shape) == 2 and shape[0] % SIDE == 0 and shape[1] % TILES == 0
    return bool(shape) and shape[-1] % SIDE == 0 and math.prod(shape) % (SIDE * TILES) == 0


def run(x: jax.Array, words: jax.Array, options: Options, *, interpret: bool = False) -> list[jax.Array]:
    """Return the output of `options` for an array that `serves` accepts; `options.words` makes `words`."""
    if options.place == "last":
        tiles = x.reshape(*x.shape[:-1], x.shape[-1] // SIDE, SIDE)
        shape = tiles.shape[:-1]
    else:
        tiles = x.reshape(x.shape[0] // SIDE, SIDE, x.shape[1])
        shape = tiles.shape[::2]
    axes = "abcdefghijklmnop"[: len(shape)]
    starts = [lax.iota(jnp.uint32, size) for size in shape] if device_count() > 1 else []
    side = " ".join(axes)
    of_values = f"{side} t" if options.place == "last" else "a t b"
    inputs = ["u", of_values, *(axes if starts else "")]
    outputs = {"codes": [f"{side} s", side], "amax": ["r"], "bfloat16": [of_values]}[options.output]
    local = functools.partial(_local, _Job(options, shape, interpret))
    whole = ("t", "s") if options.output == "codes" else ("t",)
    spec = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    first, *others = partitioned(local, spec, whole=whole)(words, tiles, *starts)
    return [
        first.reshape({"codes": (*x.shape[:-1], x.shape[-1] // 2), "amax": (), "bfloat16": x.shape}[options.output]),
        *others,
    ]


def _local(
    job: _Job, words: jax.Array, tiles: jax.Array, *places: jax.Array, summed_over: tuple[str, ...]
) -> list[jax.Array]:
    """Return the results for the part of a device."""
    own = tiles.shape[:-1] if job.options.place == "last" else tiles.shape[::2]
    starts = jnp.stack([place[0] for place in places]) if places and own != job.shape else None
    fits = (math.prod(own) if job.options.place == "last" else own[-1]) % TILES == 0
    found = (_call if fits else _by_arrays)(job, own, words, tiles, starts)
    if job.options.output == "amax":
        top = jnp.max(found[0]).reshape(1)
        return [lax.pmax(top, summed_over) if summed_over else top]
    if job.options.output == "codes":
        return [part.reshape(*own, *part.shape[1:]) for part in found]
    return [found[0].reshape(tiles.shape)]


def _by_arrays(job: _Job, own: _Shape, words: jax.Array, tiles: jax.Array, starts: jax.Array | None) -> list[jax.Array]:
    """Return the same without a kernel, for a part that is not made of whole groups."""
    scalars = Scalars.of(job.options, lambda at: words[at])
    whole = tiles.reshape(-1, SIDE) if job.options.place == "last" else jnp.moveaxis(tiles, 1, 2)
    values = [whole[..., i].astype(jnp.float32) for i in range(SIDE)]
    places = lax.iota(jnp.uint32, values[0].size).reshape(values[0].shape)
    random = scalars.random(_first(places, starts, (own, job.shape)))
    found = compute(job.options, scalars, values, random)
    if job.options.output != "bfloat16":
        return found
    return [jnp.concatenate(found, axis=1) if job.options.place == "last" else jnp.stack(found, axis=1)]


def _first(tile: jax.Array, starts: jax.Array | None, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """Return the index in the whole array of the first value of each tile, modulo 2**32, from its index in a part."""
    if starts is None:
        return tile * jnp.uint32(SIDE)
    own, whole = shapes
    found, stride = jnp.zeros_like(tile), 1
    for axis in range(len(own) - 1, -1, -1):
        found += (starts[axis] + tile % jnp.uint32(own[axis])) * jnp.uint32(stride % 2**32)
        tile, stride = tile // jnp.uint32(own[axis]), stride * whole[axis]
    return found * jnp.uint32(SIDE)


def _call(job: _Job, own: _Shape, words: jax.Array, tiles: jax.Array, starts: jax.Array | None) -> list[jax.Array]:
    from jax.experimental import pallas as pl

    along = job.options.place == "last"
    x = tiles.reshape(-1, SIDE) if along else tiles.reshape(-1, own[1])
    given = [] if starts is None else [starts]

    def kernel(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        scalars = Scalars.of(job.options, lambda at: words_ref[at], by_instructions=not job.interpret)
        if along:
            # Two loads of 16 bytes: with one load, two threads would share a tile.
            halves = [x_ref[:, start : start + 8] for start in (0, 8)]
            values = [part.reshape(TILES) for half in halves for part in lax.split(half, (1,) * 8, axis=1)]
            place = pl.program_id(0) * TILES
        else:
            values = [x_ref[at, :] for at in range(SIDE)]
            place = pl.program_id(0) * own[1] + pl.program_id(1) * TILES
        place = (place + lax.broadcasted_iota(jnp.int32, (TILES,), 0)).astype(jnp.uint32)
        random = scalars.random(_first(place, refs[0] if given else None, (own, job.shape)))
        found = compute(job.options, scalars, [value.astype(jnp.float32) for value in values], random)
        _store(job, refs[len(given) :], found)

    grid = (len(x) // TILES,) if along else (own[0], own[1] // TILES)
    block = pl.BlockSpec((TILES, SIDE) if along else (SIDE, TILES), lambda i, j=0: (i, j))
    whole = lambda size: pl.BlockSpec((size,), lambda *_: (0,))
    out_shape, out_specs = _results(job, pl, x.shape, grid, block)
    return plgpu.pallas_call(
        kernel,
        out_shape=varying(out_shape, words, x, *given),
        grid=grid,
        in_specs=[whole(words.size), block, *(whole(g.size) for g in given)],
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS[job.options.place], num_stages=1),
        interpret=job.interpret,
        name="quantize_nvfp4",
    )(words, x, *given)


def _results(job: _Job, pl: Any, shape: tuple[int, ...], grid: tuple[int, ...], block: Any) -> tuple[Any, Any]:
    """Return the shapes and blocks of the results."""
    if job.options.output == "bfloat16":
        return [jax.ShapeDtypeStruct(shape, job.options.output)], [block]
    if job.options.output == "amax":
        one = pl.BlockSpec((1,) * len(grid), lambda *at: at)
        return [jax.ShapeDtypeStruct(grid, jnp.int32)], [one]
    codes = jax.ShapeDtypeStruct((shape[0], SIDE // 2), jnp.uint8)
    scales = jax.ShapeDtypeStruct((shape[0],), jnp.float8_e4m3fn)
    return [codes, scales], [pl.BlockSpec((TILES, SIDE // 2), block.index_map), pl.BlockSpec((TILES,), lambda i: (i,))]


def _store(job: _Job, refs: Any, parts: list[jax.Array]) -> None:
    """Write the results of `compute` to the blocks of a program."""
    if job.options.output == "amax":
        refs[0][...] = jnp.max(parts[0]).reshape(refs[0].shape)
    elif job.options.output == "codes":
        for ref, part in zip(refs, parts, strict=True):
            ref[...] = part
    elif job.options.place == "last":
        for at, part in zip((0, 8), parts, strict=True):
            refs[0][:, at : at + 8] = part
    else:
        for at, part in enumerate(parts):
            refs[0][at, :] = part
