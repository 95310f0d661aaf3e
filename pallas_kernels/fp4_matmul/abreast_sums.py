"""Sums of warpgroups that multiply different steps of k for the same outputs, added through shared memory, in PTX.

Threads of the same place hold the same sums, so that each writes and reads words of its own, beside its neighbours'.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.fp4_matmul import owned

# A sum of thread $2 of a warpgroup lies behind $0, or $1: words of its threads, and those of the next sum.
WRITE = "{{.reg .b32 t; and.b32 t, $2, 127; mad.lo.u32 t, t, 4, $0; st.shared.b32 [t + {offset}], $1;}}"
READ = "{{.reg .b32 t; and.b32 t, $2, 127; mad.lo.u32 t, t, 4, $1; ld.shared.b32 $0, [t + {offset}];}}"
BYTES = 4 * 128


def write(sums_smem: Any, sums: jax.Array) -> None:
    """Write sums as `wgmma` leaves them to float32 `[values]` of shared memory."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(_write)(sums_smem, sums)


def add(sums: jax.Array, others: list[Any]) -> jax.Array:
    """Sums plus those that lie in shared memory, one after the other."""
    made = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, plgpu.Layout.WGMMA)
    kinds = (plgpu.Layout.WGMMA, *[plgpu.RefType()] * len(others))
    return plgpu.inline_mgpu(arg_types=kinds, return_type=made)(_add)(sums, *others)


def _write(context: Any, sums_smem: Any, sums: Any) -> None:
    address, thread, i32 = owned.address(sums_smem), mgpu.utils.thread_idx(), ir.IntegerType.get_signless(32)
    for at, (register, i) in enumerate(_places(sums)):
        word = arith.bitcast(i32, vector.extract(register, [], [i]))
        owned.effect([address, word, thread], WRITE.format(offset=BYTES * at))


def _add(context: Any, sums: Any, *others: Any) -> Any:
    addresses, thread, f32 = [owned.address(other) for other in others], mgpu.utils.thread_idx(), ir.F32Type.get()
    registers, count = sums.registers.copy(), 0
    for place, register in np.ndenumerate(sums.registers):
        for i in range(_size(register)):
            value = vector.extract(register, [], [i])
            for address in addresses:
                text = READ.format(offset=BYTES * count)
                (word,) = owned.words(1, [address, thread], text, effects=True)
                value = arith.addf(value, arith.bitcast(f32, word))
            registers[place] = vector.insert(value, registers[place], [], [i])
            count += 1
    return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)


def _places(sums: Any) -> Iterator[tuple[Any, int]]:
    """Every sum of a thread: its register, and where in it."""
    for register in sums.registers.reshape(-1):
        yield from ((register, i) for i in range(_size(register)))


def _size(register: Any) -> int:
    return int(ir.VectorType(register.type).shape[0])
