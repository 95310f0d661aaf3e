"""NVFP4 on Hopper: the kernel of `nvfp4_kernel` in Pallas Mosaic, for a warpgroup whose
threads have a tile each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.registers import Ref, Registers
from pallas_kernels.specs import varying
from tcfp_jax.formats.nvfp4_kernel import TILES, Job, first_values
from tcfp_jax.formats.nvfp4_registers import SIDE, compute

_REGISTERS = Registers((TILES,), each=1)


def call(
    job: Job,
    own: tuple[int, ...],
    words: jax.Array,
    tiles: jax.Array,
    *given: jax.Array,
) -> list[jax.Array]:
    """Return the results for a part of `own` tiles, see `nvfp4_kernel.Job`."""
    x = tiles.reshape(-1, SIDE if job.options.place == "last" else own[1])
    count, shape = x.size // SIDE, jax.ShapeDtypeStruct
    kernel = plgpu.kernel(
        functools.partial(_kernel, job, own),
        out_type={
            "codes": [
                shape((count, SIDE // 2), jnp.uint8),
                shape((count,), jnp.float8_e4m3fn),
            ],
            "amax": [shape((count,), jnp.int32)],
            "bfloat16": [shape(x.shape, jnp.bfloat16)],
        }[job.options.output],
        grid=(count // TILES,),
        grid_names=("block",),
        interpret=plgpu.InterpretGPUParams() if device_kind() == "cpu" else None,
        kernel_name="quantize_nvfp4",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return varying(kernel(*varying([words, x, *given], words, x)), words, x)


def _kernel(job: Job, own: tuple[int, ...], words: Ref, x: Ref, *refs: Ref) -> None:
    """Compute a block of 128 tiles."""
    block, output, along = (
        lax.axis_index("block"),
        job.options.output,
        job.options.place == "last",
    )
    instruct, lanes = None, lax.broadcasted_iota(jnp.uint32, (TILES,), 0)
    if device_kind() != "cpu":
        instruct, lanes = (
            _REGISTERS.instruct,
            plgpu.layout_cast(lanes, _REGISTERS.layout),
        )
    sides = (TILES, SIDE) if along else (SIDE, TILES)
    place = (
        lax.div(block, x.shape[1] // sides[1]),
        lax.rem(block, x.shape[1] // sides[1]),
    )
    here, at = (
        pl.ds(block * TILES, TILES),
        tuple(pl.ds(i * n, n) for i, n in zip(place, sides, strict=True)),
    )
    lines = lambda ref: [ref.at[at].at[i] for i in range(SIDE)]
    values = (
        _REGISTERS.read_lines(x.at[at])
        if along
        else list(map(_REGISTERS.load, lines(x)))
    )
    tile, count = (
        (block * TILES).astype(jnp.uint32) + lanes,
        2 if output == "codes" else 1,
    )
    first, to = first_values(tile, refs[:-count], (own, job.shape)), refs[-count]
    found = compute(job.options, words, values, first, instruct)
    if output == "codes":
        _REGISTERS.write_lines(found[:2], to.at[here])
    if output == "bfloat16":
        _REGISTERS.write_lines(found, to.at[at]) if along else _REGISTERS.store(
            found, lines(to)
        )
    else:
        _REGISTERS.store(found[-1:], [refs[-1].at[here]])
