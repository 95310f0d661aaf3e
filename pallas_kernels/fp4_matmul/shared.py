"""Rows of x that the blocks of a cluster round for each other, while their first codes arrive: W4A8 in one kernel.

A kernel before, which rounds them, takes 2 to 3 us; that every block rounds all rows for itself costs more than that
where rows are more than four (`rounded.py`). Here each of the blocks of a cluster rounds its share, and copies all of
them step by step from where they were written. Clusters write the same bytes to the same place, so that none waits for
another: a block only reads what its own cluster has written before it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.fp4_matmul import decode_fp8, owned, rounded

# How far from the first byte of a unit thread $1 of a block writes its four values: word 16 q + i of a step at 4 i + q.
_PLACE = """{.reg .b32 t;
and.b32 $0, $1, 15;
mul.lo.u32 $0, $0, 16;
and.b32 t, $1, 64;
mad.lo.u32 $0, t, 4, $0;
bfe.u32 t, $1, 4, 2;
mad.lo.u32 $0, t, 4, $0;
}"""
_WRITE_ROUNDED = rounded.WRITE_ROUNDED.replace("st.shared", "st.global")
# Units of four values that a thread keeps between the two times that it needs them: 56 have spilled.
_UNITS = 32
_WRITE_SCALE = "st.global.b32 [$0], $1;"
# Copies read by another path than threads write: https://docs.nvidia.com/cuda/parallel-thread-execution/#proxies.
_ARRIVE = "fence.proxy.async; barrier.cluster.arrive.release.aligned;"
_WAIT = "barrier.cluster.wait.acquire.aligned; fence.proxy.async;"


def serves(rows: int, k: int, members: int, warpgroups: int) -> bool:
    """Whether each of so many blocks has rows, which are units, and its threads have room for their values."""
    turns = -(-k // (2 * decode_fp8.STEP * warpgroups))
    return rows % members == 0 and rounded.serves(k) and rows // members * turns <= _UNITS


def buffers(rows: int, k: int) -> list[jax.ShapeDtypeStruct]:
    """Where the rows are written, as `decode_fp8.permuted` has them, and their scales."""
    return [jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((rows,), jnp.float32)]


def round_rows(x: Any, values: Any, scales: Any, largest: Any, meet: Callable[[], None]) -> None:
    """Write this block's share of the rows and their scales: the work of the warpgroups that compute.

    Args:
      x: in global memory, bfloat16 `[m, k]`.
      values, scales: `buffers` there, whose rows from m on are its last one again.
      largest: in shared memory, uint32 `[rows of this block, warps]`.
      meet: where a warpgroup waits for the others of its block.
    """
    (m, k), (share, warps), size = x.shape, largest.shape, decode_fp8.STEP
    first, steps = lax.axis_index("member") * share, rounded.share_of(k // size, warps // rounded.WARPS)
    found = []
    for i in range(share):
        units = [x.at[jnp.minimum(first + i, m - 1), pl.ds(step * size, 2 * size)] for step in steps]
        found.append([plgpu.load(unit, layout=rounded.FOURS, optimized=False) for unit in units])
        rounded.write_largest(i, largest, found[-1])
    meet()
    for i in range(share):
        to = [values.at[first + i, pl.ds(step * size, 2 * size)] for step in steps]
        kinds = [*[plgpu.RefType()] * (2 + len(to)), *[rounded.FOURS] * len(to)]
        write = plgpu.inline_mgpu(arg_types=kinds)(functools.partial(_write, i, len(to)))
        write(largest, scales.at[pl.ds(first + i, 1)], *to, *found[i])


def arrive() -> None:
    """Let the other blocks of the cluster read what this thread has written; every thread does."""
    plgpu.inline_mgpu()(lambda context: owned.effect([], _ARRIVE))()


def wait() -> None:
    """Wait until every thread of the cluster has arrived; every thread does."""
    plgpu.inline_mgpu()(lambda context: owned.effect([], _WAIT))()


def _write(row: int, turns: int, context: Any, largest: Any, scale_at: Any, *operands: Any) -> None:
    multiplier, scale = rounded.scale_of(row, owned.address(largest), rounded.warps_of(largest))
    (place,) = owned.words(1, [mgpu.utils.thread_idx()], _PLACE)
    for unit, fours in zip(operands[:turns], operands[turns:], strict=True):
        owned.effect([_address(unit, place), *rounded.pairs_of(fours), multiplier], _WRITE_ROUNDED)
    owned.effect([_address(scale_at, owned.constant(0)), scale], _WRITE_SCALE)


def _address(reference: Any, offset: Any) -> Any:
    """In global memory, so many bytes behind the first."""
    i64 = ir.IntegerType.get_signless(64)
    first = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(reference))
    return llvm.add(first, llvm.zext(i64, offset), overflow_flags=llvm.IntegerOverflowFlags.none)
