"""Inline PTX as a GPU would run it, for all threads of a warpgroup at once, in NumPy: what decode kernels are made of.

Of the PTX ISA only what those texts use. Registers are uint32 arrays, a value a thread; shared memory is bytes.
"""

import re

import ml_dtypes
import numpy as np


def run(text, count, operands, memory=None):
    """The `count` results `$0`, `$1`, ... of a text whose further `$` are operands."""
    body = re.sub(r"\.reg [^;]*;", "", text.strip()[1:-1] if text.strip().startswith("{.reg") else text)
    shape = np.broadcast_shapes(*(np.shape(operand) for operand in operands))
    registers = {f"${count + i}": np.broadcast_to(_u32(operand), shape) for i, operand in enumerate(operands)}
    for line in filter(None, (line.strip() for line in body.split(";"))):
        name, _, rest = line.partition(" ")
        if name.startswith("ld.shared"):
            _load(name, rest, registers, memory)
            continue
        target, *sources = (word.strip() for word in rest.split(","))
        values = [registers[source] if source in registers else _u32(int(source, 0)) for source in sources]
        registers[target] = np.broadcast_to(_INSTRUCTIONS[name](*values), shape)
    return [registers[f"${i}"] for i in range(count)]


def _u32(value):
    return np.asarray(value).astype(np.uint32)


def _prmt(a, b, selector):
    """Bytes of the eight of a and b; with bit 3 of its four bits set, a selector repeats the byte's sign."""
    whole = _wide(b) << np.uint64(32) | _wide(a)
    out = np.zeros_like(_u32(a + b + selector))
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (whole >> (_wide(nibble) % np.uint64(8) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
        out |= np.where(nibble & 8, sign, byte) << np.uint32(8 * i)
    return out


def _lop3(a, b, c, table):
    out = np.zeros_like(_u32(a ^ b ^ c))
    for i in range(8):
        if int(np.max(table)) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _wide(value):
    return value.astype(np.uint64)


def _product(a, b):
    return (_wide(a) * _wide(b)).astype(np.uint32)


def _bf16x2(a, b):
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = ((_half(a, i) * _half(b, i)).astype(ml_dtypes.bfloat16).view(np.uint16) for i in range(2))
    return _u32(low) | _u32(high) << np.uint32(16)


def _half(a, i):
    bits = np.atleast_1d(a >> np.uint32(16 * i)).astype(np.uint16)
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


_INSTRUCTIONS = {
    "and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor, "lop3.b32": _lop3,
    "prmt.b32": _prmt, "shr.u32": np.right_shift, "add.u32": np.add, "mul.lo.u32": _product,
    "mad.lo.u32": lambda a, b, c: _product(a, b) + c, "mul.rn.bf16x2": _bf16x2,
}  # fmt: skip


def _load(name, rest, registers, memory):
    """Words of memory at the address in brackets, a register and perhaps bytes to add."""
    targets, address, more = re.match(r"(.*), \[(\S+?)(?: \+ (\d+))?\]$", rest, re.DOTALL).groups()
    targets = [target.strip() for target in targets.strip("{} ").split(",")]
    assert len(targets) == {"b32": 1, "v2.b32": 2, "v4.b32": 4}[name.removeprefix("ld.shared.")]
    first = registers[address] + np.uint32(more or 0)
    assert not (first % (4 * len(targets))).any(), "a load of n bytes is at a multiple of n"
    for i, target in enumerate(targets):
        registers[target] = memory.view(np.uint32)[first // 4 + i]
