"""NVFP4's numbers by Pallas-Triton: the kernel of `nvfp4_kernel`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.specs import varying
from pallas_kernels.tiled import Engine
from tcfp_jax.formats.nvfp4_kernel import BLOCKS, Job, Shape, first_values
from tcfp_jax.formats.nvfp4_registers import SIDE, Arrays, numbers

# A thread loads and stores 16 bytes at once.
_HALVES = (slice(0, 8), slice(8, 16))


def _run(job: Job, own: Shape, *operands: Array) -> list[Array]:
    return plgpu.on_platform(functools.partial(_call, job, own), *operands)


TRITON = Engine(_run)


def _call(
    job: Job,
    own: Shape,
    words: Array,
    blocks: Array,
    *starts: Array,
    interpret: bool,
) -> list[Array]:
    from jax.experimental import pallas as pl

    x = blocks.reshape(-1, blocks.shape[-1])
    rows, columns = job.sides
    across = x.shape[1] // columns

    def kernel(words: Any, *refs: Any) -> None:
        *starts, x, to = refs
        program = pl.program_id(0) * across + pl.program_id(1)
        block = program * BLOCKS + lax.broadcasted_iota(jnp.int32, (BLOCKS,), 0)
        first = first_values(job, own, block.astype(jnp.uint32), *starts)
        values = _read_rows(x) if job.along else [x[i, :] for i in range(SIDE)]
        instruct = None if interpret else plgpu.instruct
        found = numbers(job.kind, words, values, first, instruct)
        if job.along:
            for half in _HALVES:
                to[:, half] = _side_by_side(found[half])
        else:
            for i, part in enumerate(found):
                to[i, :] = part

    part = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
    out_shape = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)]
    whole = [pl.BlockSpec((a.size,), lambda *_: (0,)) for a in (words, *starts)]
    return plgpu.pallas_call(
        kernel,
        out_shape=varying(out_shape, words, x, *starts),
        grid=(len(x) // rows, across),
        in_specs=[*whole, part],
        out_specs=[part],
        # Down the first axis the values of a block lie apart, so a thread takes two
        # columns to load words of 4 bytes.
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if job.along else 2, num_stages=1
        ),
        interpret=interpret,
        name="quantize_nvfp4",
    )(words, *starts, x)


def _read_rows(x: Any) -> Arrays:
    """Return the columns of a reference to `[blocks, 16]`."""
    values = []
    # Two loads of 16 bytes: with one load, two threads would share a block.
    for half in _HALVES:
        columns = lax.split(x[:, half], (1,) * 8, axis=1)
        values += [column.reshape(BLOCKS) for column in columns]
    return values


def _side_by_side(parts: Arrays) -> Array:
    """Return `[blocks, 8]` from 8 arrays.

    Triton can compile joins of pairs.
    """
    while len(parts) > 1:
        half = len(parts) // 2
        pairs = zip(parts[:half], parts[half:], strict=True)
        parts = [jnp.stack(pair, axis=-1) for pair in pairs]
    return parts[0].reshape(BLOCKS, 8)
