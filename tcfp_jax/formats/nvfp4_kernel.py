"""The numbers of NVFP4 in one pass on NVIDIA GPUs: x is read once, numbers are written
once.

Two engines run it, `nvfp4_triton` and `nvfp4_mosaic`. A program takes 128 blocks of 16
values, a thread one or two of them, and exchanges nothing with its neighbours. For
blocks along the last axis a thread loads and stores 32 bytes of bfloat16. Down the
first axis, neighbours hold neighbouring columns. `nvfp4_registers` has the arithmetic.

Under a mesh each device quantizes its own part, and knows where that begins: the random
bits of a value depend on it.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.partition import partitioned
from pallas_kernels.specs import Shape
from pallas_kernels.tiled import Engine
from tcfp_jax.formats.nvfp4_registers import SIDE, Kind, numbers

BLOCKS = 128  # for each program


class Job(NamedTuple):
    """A pass over an array.

    Attributes:
      kind: the kind of quantization.
      shape: numbers of blocks, without the axis of their values.
      engine: its `run` takes the job, the `shape` of a device's part, `words_of`,
        blocks, and where the part begins if it is not the whole.
    """

    kind: Kind
    shape: Shape
    engine: Engine

    @property
    def along(self) -> bool:
        """True if blocks run along the last axis, `[..., 16]`.

        Otherwise they run down a matrix, `[blocks, 16, columns]`.
        """
        return self.kind.axis == -1

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of a program, in a matrix of blocks in rows or columns."""
        return (BLOCKS, SIDE) if self.along else (SIDE, BLOCKS)


def reject(kind: Kind, x: Array, *arrays: object) -> str | None:
    """Return the reason why the kernel cannot take x, or None.

    It takes whole blocks, in groups of 128.
    """
    shape = list(x.shape)
    if kind.axis is None:
        return 'squares have no kernel; use backend="xla"'
    if kind.axis != -1 and x.ndim != 2:
        return f'x{shape} has blocks within an axis; use backend="xla"'
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f'x is {x.dtype}, not bfloat16 or float32; use backend="xla"'
    count = x.size // SIDE if kind.axis == -1 else x.shape[1]
    if x.size == 0 or x.shape[kind.axis] % SIDE or count % BLOCKS:
        return (
            f"x{shape} has not whole tiles of {SIDE} in groups of {BLOCKS}; use"
            ' backend="xla" or pad'
        )
    return None


def run(x: Array, words: Array, kind: Kind, engine: Engine) -> Array:
    """Return the numbers of an array that is not rejected; `words_of` makes `words`."""
    if kind.axis == -1:
        blocks = x.reshape(*x.shape[:-1], -1, SIDE)
    else:
        blocks = x.reshape(-1, SIDE, x.shape[1])
    shape = _count(kind, blocks)
    job = Job(kind, shape, engine)
    local: Callable[..., Array] = functools.partial(_local, job)
    if not engine.calls_back_here():
        axes = "abcdefghijklmnop"[: len(shape)]
        of_blocks = " ".join([*axes, "t"]) if job.along else "a t b"
        inputs = ", ".join(["u", of_blocks, *axes])
        local = partitioned(local, f"{inputs} -> {of_blocks}", whole=("t",))
    places = [lax.iota(jnp.uint32, size) for size in shape]
    return local(words, blocks, *places).reshape(x.shape)


def _count(kind: Kind, blocks: Array) -> Shape:
    """Return the shape of blocks without the axis of their values."""
    return blocks.shape[:-1] if kind.axis == -1 else blocks.shape[::2]


def _local(
    job: Job,
    words: Array,
    blocks: Array,
    *places: Array,
    summed_over: tuple[str, ...] = (),
) -> Array:
    """Return the numbers of the part of a device."""
    own = _count(job.kind, blocks)
    starts = []
    if own != job.shape:
        starts = [jnp.stack([place[0] for place in places])]
    count = math.prod(own) if job.along else own[-1]
    if count % BLOCKS:
        return _by_arrays(job, own, words, blocks, *starts)
    found = job.engine.run(job, own, words, blocks, *starts)
    assert found is not None, "the part fits"
    return found[0].reshape(blocks.shape)


def _by_arrays(
    job: Job,
    own: Shape,
    words: Array,
    blocks: Array,
    *starts: Array,
) -> Array:
    """Return the same without a kernel, for a part that is not made of whole groups."""
    axis = -1 if job.along else 1
    values = list(jnp.moveaxis(blocks, axis, 0))
    places = lax.iota(jnp.uint32, math.prod(own)).reshape(own)
    first = first_values(job, own, places, *starts)
    return jnp.stack(numbers(job.kind, words, values, first), axis)


def first_values(
    job: Job, own: Shape, block: Array, starts: Array | None = None
) -> Array:
    """Return the index in the whole array of the first value of blocks, modulo 2**32.

    `block` is the index of a block in the part of a device, which has `own` blocks and
    begins at `starts`.
    """
    if starts is None:
        return block * jnp.uint32(SIDE)
    found = jnp.zeros_like(block)
    stride = SIDE
    for axis in range(len(own) - 1, -1, -1):
        size = jnp.uint32(own[axis])
        found += (starts[axis] + block % size) * jnp.uint32(stride % 2**32)
        block = block // size
        stride *= job.shape[axis]
    return found
