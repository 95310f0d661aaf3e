"""NVFP4 in one pass on NVIDIA GPUs: x is read once; codes two a byte and scales, or
numbers, are written once.

A program takes 128 tiles, a thread one or two of them, and exchanges nothing with its
neighbours. For tiles along the last axis a thread loads 32 bytes of bfloat16 and stores
8 bytes of codes and one byte of the scale, or 32 bytes of numbers. Down the first axis,
neighbours hold neighbouring columns. `nvfp4_registers` has the arithmetic. A pass of
the same kind finds the largest magnitude of a rotated tensor.

Under a mesh each device quantizes its own part, and knows where that begins: the random
bits of a value depend on it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.dispatch import device_kind
from pallas_kernels.partition import partitioned
from pallas_kernels.specs import device_count, varying
from tcfp_jax.formats.nvfp4_registers import SIDE, Options, Place, compute

TILES = 128
# Down the first axis the values of a tile lie apart, so a thread takes two columns to
# load words of 4 bytes.
_WARPS: dict[Place, int] = {"last": 4, "first": 2}


_Shape = tuple[int, ...]
Engine = Callable[..., list[jax.Array]]


class _Job(NamedTuple):
    """A pass over an array by an engine; `shape` counts its tiles, without the axis of
    their values.
    """

    options: Options
    shape: _Shape
    engine: Engine


def reject(options: Options, x: jax.Array, *arrays: object) -> str | None:
    """Return the reason why the kernel cannot take x, which must have whole tiles, in
    groups of 128, or None.
    """
    if options.place == "squares":
        return 'squares have no kernel; use backend="xla"'
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f'x is {x.dtype}, not bfloat16 or float32; use backend="xla"'
    count = x.shape[-1] if options.place == "first" else x.size // SIDE
    if (
        x.size
        and not x.shape[-1 if options.place == "last" else 0] % SIDE
        and not count % TILES
    ):
        return None
    return (
        f"x{list(x.shape)} has not whole tiles of {SIDE} in groups of {TILES}; use"
        ' backend="xla" or pad'
    )


# Return the results for a part of `own` tiles, from words, tiles and places, if it has
# any.
by_triton: Engine = lambda job, own, *operands: plgpu.on_platform(
    functools.partial(_call, job, own), *operands
)


def run(
    x: jax.Array, words: jax.Array, options: Options, engine: Engine
) -> list[jax.Array]:
    """Return the output of `options` for an array that is not rejected; `options.words`
    makes `words`.
    """
    if options.place == "last":
        tiles = x.reshape(*x.shape[:-1], x.shape[-1] // SIDE, SIDE)
        shape = tiles.shape[:-1]
    else:
        tiles = x.reshape(x.shape[0] // SIDE, SIDE, x.shape[1])
        shape = tiles.shape[::2]
    axes = "abcdefghijklmnop"[: len(shape)]
    starts = (
        [lax.iota(jnp.uint32, size) for size in shape] if device_count() > 1 else []
    )
    side = " ".join(axes)
    of_values = f"{side} t" if options.place == "last" else "a t b"
    inputs = ["u", of_values, *(axes if starts else "")]
    outputs = {"codes": [f"{side} s", side], "amax": ["r"], "bfloat16": [of_values]}[
        options.output
    ]
    local = functools.partial(_local, _Job(options, shape, engine))
    whole = ("t", "s") if options.output == "codes" else ("t",)
    spec = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    # Mosaic's interpreter calls back into Python, which a partitioned function cannot
    # do.
    alone = engine is not by_triton and device_kind() == "cpu"
    first, *others = (local if alone else partitioned(local, spec, whole=whole))(
        words, tiles, *starts
    )
    return [
        first.reshape(
            {
                "codes": (*x.shape[:-1], x.shape[-1] // 2),
                "amax": (),
                "bfloat16": x.shape,
            }[options.output]
        ),
        *others,
    ]


def _local(
    job: _Job,
    words: jax.Array,
    tiles: jax.Array,
    *places: jax.Array,
    summed_over: tuple[str, ...] = (),
) -> list[jax.Array]:
    """Return the results for the part of a device."""
    own = tiles.shape[:-1] if job.options.place == "last" else tiles.shape[::2]
    given = (
        [jnp.stack([place[0] for place in places])]
        if places and own != job.shape
        else []
    )
    fits = (math.prod(own) if job.options.place == "last" else own[-1]) % TILES == 0
    found = (job.engine if fits else _by_arrays)(job, own, words, tiles, *given)
    if job.options.output == "amax":
        top = jnp.max(found[0]).reshape(1)
        return [lax.pmax(top, summed_over) if summed_over else top]
    if job.options.output == "codes":
        return [part.reshape(*own, *part.shape[1:]) for part in found]
    return [found[0].reshape(tiles.shape)]


def _by_arrays(
    job: _Job, own: _Shape, words: jax.Array, tiles: jax.Array, *given: jax.Array
) -> list[jax.Array]:
    """Return the same without a kernel, for a part that is not made of whole groups."""
    whole = (
        tiles.reshape(-1, SIDE)
        if job.options.place == "last"
        else jnp.moveaxis(tiles, 1, 2)
    )
    values = [whole[..., i] for i in range(SIDE)]
    places = lax.iota(jnp.uint32, values[0].size).reshape(values[0].shape)
    found = _joined(
        job.options,
        compute(job.options, words, values, _first(places, given, (own, job.shape))),
    )
    if job.options.output != "bfloat16":
        return found
    return [
        (
            jnp.concatenate(found, axis=1)
            if job.options.place == "last"
            else jnp.stack(found, axis=1)
        )
    ]


def _joined(options: Options, found: list[jax.Array]) -> list[jax.Array]:
    """Return the results of `compute` as they are stored: bytes `[tiles, 8]` and E4M3;
    two `[tiles, 8]` of numbers.
    """
    if options.output == "codes":
        parts = [
            (word >> place) & 255 for word in found[:2] for place in (0, 8, 16, 24)
        ]
        return [
            _side_by_side([part.astype(jnp.uint8) for part in parts]),
            found[2].astype(jnp.float8_e4m3fn),
        ]
    along = options.output == "bfloat16" and options.place == "last"
    return [_side_by_side(found[at : at + 8]) for at in (0, 8)] if along else found


def _side_by_side(parts: list[jax.Array]) -> jax.Array:
    """Return `[..., n]` from n = 2**j arrays `[...]`, by joins of pairs, which Triton
    can compile.
    """
    shape = (*parts[0].shape, len(parts))
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack([parts[i], parts[i + half]], axis=-1) for i in range(half)]
    return parts[0].reshape(shape)


def _first(
    tile: jax.Array, given: Sequence[Any], shapes: tuple[_Shape, _Shape]
) -> jax.Array:
    """Return the index in the whole array of the first value of each tile, modulo
    2**32, from its index in a part.
    """
    if not given:
        return tile * jnp.uint32(SIDE)
    (starts,), (own, whole) = given, shapes
    found, stride = jnp.zeros_like(tile), 1
    for axis in range(len(own) - 1, -1, -1):
        found += (starts[axis] + tile % jnp.uint32(own[axis])) * jnp.uint32(
            stride % 2**32
        )
        tile, stride = tile // jnp.uint32(own[axis]), stride * whole[axis]
    return found * jnp.uint32(SIDE)


def _call(
    job: _Job,
    own: _Shape,
    words: jax.Array,
    x: jax.Array,
    *given: jax.Array,
    interpret: bool,
) -> list[jax.Array]:
    from jax.experimental import pallas as pl

    along = job.options.place == "last"
    x = x.reshape(-1, SIDE if along else own[1])

    def kernel(words_ref: Any, x_ref: Any, *refs: Any) -> None:
        if along:
            # Two loads of 16 bytes: with one load, two threads would share a tile.
            halves = [x_ref[:, start : start + 8] for start in (0, 8)]
            values = [
                part.reshape(TILES)
                for half in halves
                for part in lax.split(half, (1,) * 8, axis=1)
            ]
            place = pl.program_id(0) * TILES
        else:
            values = [x_ref[at, :] for at in range(SIDE)]
            place = pl.program_id(0) * own[1] + pl.program_id(1) * TILES
        place = (place + lax.broadcasted_iota(jnp.int32, (TILES,), 0)).astype(
            jnp.uint32
        )
        first = _first(place, refs[: len(given)], (own, job.shape))
        found = compute(
            job.options, words_ref, values, first, None if interpret else plgpu.instruct
        )
        _store(job, refs[len(given) :], _joined(job.options, found))

    grid = (len(x) // TILES,) if along else (own[0], own[1] // TILES)
    block = pl.BlockSpec(
        (TILES, SIDE) if along else (SIDE, TILES), lambda i, j=0: (i, j)
    )
    whole = lambda size: pl.BlockSpec((size,), lambda *_: (0,))
    out_shape, out_specs = _results(job, pl, x.shape, grid, block)
    return plgpu.pallas_call(
        kernel,
        out_shape=varying(out_shape, words, x, *given),
        grid=grid,
        in_specs=[whole(words.size), block, *(whole(g.size) for g in given)],
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(
            num_warps=_WARPS[job.options.place], num_stages=1
        ),
        interpret=interpret,
        name="quantize_nvfp4",
    )(words, x, *given)


def _results(
    job: _Job, pl: Any, shape: tuple[int, ...], grid: tuple[int, ...], block: Any
) -> tuple[Any, Any]:
    """Return the shapes and blocks of the results."""
    if job.options.output == "bfloat16":
        return [jax.ShapeDtypeStruct(shape, job.options.output)], [block]
    if job.options.output == "amax":
        one = pl.BlockSpec((1,) * len(grid), lambda *at: at)
        return [jax.ShapeDtypeStruct(grid, jnp.int32)], [one]
    made = [
        jax.ShapeDtypeStruct((shape[0], SIDE // 2), jnp.uint8),
        jax.ShapeDtypeStruct(shape[:1], jnp.float8_e4m3fn),
    ]
    return made, [
        pl.BlockSpec((TILES, SIDE // 2), block.index_map),
        pl.BlockSpec((TILES,), lambda i: (i,)),
    ]


def _store(job: _Job, refs: Any, parts: list[jax.Array]) -> None:
    """Write the results of `_joined` to the blocks of a program."""
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
