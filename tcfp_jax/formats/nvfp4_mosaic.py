"""NVFP4's numbers on Hopper: the kernel of `nvfp4_kernel` in Pallas Mosaic.

The threads of a warpgroup have a block of 16 values each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper.registers import Ref, Registers
from pallas_kernels.specs import varying
from tcfp_jax.formats.nvfp4_kernel import BLOCKS, Job, Shape, first_values
from tcfp_jax.formats.nvfp4_registers import SIDE, numbers

_REGISTERS = Registers((BLOCKS,), each=1)


def call(
    job: Job, own: Shape, words: Array, blocks: Array, *starts: Array
) -> list[Array]:
    """Return the numbers of a part of `own` blocks, see `nvfp4_kernel.Job`."""
    x = blocks.reshape(-1, blocks.shape[-1])
    kernel = plgpu.kernel(
        functools.partial(_kernel, job, own),
        out_type=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
        grid=(x.size // SIDE // BLOCKS,),
        grid_names=("program",),
        interpret=plgpu.InterpretGPUParams() if device_kind() == "cpu" else None,
        kernel_name="quantize_nvfp4",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return varying(kernel(*varying([words, x, *starts], words, x)), words, x)


def _kernel(job: Job, own: Shape, words: Ref, x: Ref, *refs: Ref) -> None:
    """Compute the numbers of 128 blocks."""
    *starts, to = refs
    program = lax.axis_index("program")
    instruct = None
    lanes = lax.broadcasted_iota(jnp.uint32, (BLOCKS,), 0)
    if device_kind() != "cpu":
        instruct = _REGISTERS.instruct
        lanes = plgpu.layout_cast(lanes, _REGISTERS.layout)
    rows, columns = job.sides
    across = x.shape[1] // columns
    at = (
        pl.ds(lax.div(program, across) * rows, rows),
        pl.ds(lax.rem(program, across) * columns, columns),
    )
    if job.along:
        values = _REGISTERS.read_lines(x.at[at])
    else:
        values = [_REGISTERS.load(x.at[at].at[i]) for i in range(SIDE)]
    block = (program * BLOCKS).astype(jnp.uint32) + lanes
    first = first_values(job, own, block, *starts)
    found = numbers(job.kind, words, values, first, instruct)
    if job.along:
        _REGISTERS.write_lines(found, to.at[at])
    else:
        _REGISTERS.store(found, [to.at[at].at[i] for i in range(SIDE)])
