"""NVFP4 in one pass on NVIDIA GPUs: x is read once; codes two a byte and scales, or
numbers, are written once.

Two engines run it, `nvfp4_triton` and `nvfp4_mosaic`. A program takes 128 tiles, a
thread one or two of them, and exchanges nothing with its neighbours. For tiles along
the last axis a thread loads 32 bytes of bfloat16 and stores 8 bytes of codes and one
byte of the scale, or 32 bytes of numbers. Down the first axis, neighbours hold
neighbouring columns. `nvfp4_registers` has the arithmetic. A pass of the same kind
finds the largest magnitude of a rotated tensor.

Under a mesh each device quantizes its own part, and knows where that begins: the random
bits of a value depend on it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.partition import partitioned
from pallas_kernels.specs import device_count
from pallas_kernels.tiled import Engine
from tcfp_jax.formats.nvfp4_registers import SIDE, Options, compute

TILES = 128
_Shape = tuple[int, ...]


class Job(NamedTuple):
    """A pass over an array.

    Attributes:
      options: the kind of pass.
      shape: numbers of tiles, without the axis of their values.
      engine: its `run` takes the job, the `shape` of a device's part, `Options.words`,
        tiles, and where the part begins if it is not the whole.
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
    local = functools.partial(_local, Job(options, shape, engine))
    whole = ("t", "s") if options.output == "codes" else ("t",)
    spec = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    if engine.calls_back_here():
        first, *others = local(words, tiles, *starts)
    else:
        first, *others = partitioned(local, spec, whole=whole)(words, tiles, *starts)
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
    job: Job,
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
    run_part = job.engine.run if fits else _by_arrays
    found = run_part(job, own, words, tiles, *given)
    assert found is not None, "the part fits"
    if job.options.output == "amax":
        top = jnp.max(found[0]).reshape(1)
        return [lax.pmax(top, summed_over) if summed_over else top]
    if job.options.output == "codes":
        return [part.reshape(*own, *part.shape[1:]) for part in found]
    return [found[0].reshape(tiles.shape)]


def _by_arrays(
    job: Job, own: _Shape, words: jax.Array, tiles: jax.Array, *given: jax.Array
) -> list[jax.Array]:
    """Return the same without a kernel, for a part that is not made of whole groups."""
    whole = (
        tiles.reshape(-1, SIDE)
        if job.options.place == "last"
        else jnp.moveaxis(tiles, 1, 2)
    )
    values = [whole[..., i] for i in range(SIDE)]
    places = lax.iota(jnp.uint32, values[0].size).reshape(values[0].shape)
    found = joined(
        job.options,
        compute(
            job.options, words, values, first_values(places, given, (own, job.shape))
        ),
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


def joined(options: Options, found: list[jax.Array]) -> list[jax.Array]:
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


def first_values(
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
