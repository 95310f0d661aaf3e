"""NVFP4 by Pallas-Triton: the kernel of the passes of `nvfp4_kernel`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.specs import varying
from pallas_kernels.tiled import Engine
from tcfp_jax.formats.nvfp4_kernel import TILES, Job, first_values, joined
from tcfp_jax.formats.nvfp4_registers import SIDE, Place, compute

# Down the first axis the values of a tile lie apart, so a thread takes two columns to
# load words of 4 bytes.
_WARPS: dict[Place, int] = {"last": 4, "first": 2}


def _run(job: Job, own: tuple[int, ...], *operands: jax.Array) -> list[jax.Array]:
    return plgpu.on_platform(functools.partial(_call, job, own), *operands)


TRITON = Engine(_run)


def _call(
    job: Job,
    own: tuple[int, ...],
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
        first = first_values(place, refs[: len(given)], (own, job.shape))
        found = compute(
            job.options, words_ref, values, first, None if interpret else plgpu.instruct
        )
        _store(job, refs[len(given) :], joined(job.options, found))

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
    job: Job, pl: Any, shape: tuple[int, ...], grid: tuple[int, ...], block: Any
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


def _store(job: Job, refs: Any, parts: list[jax.Array]) -> None:
    """Write the results of `joined` to the blocks of a program."""
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
