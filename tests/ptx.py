"""Inline PTX as a GPU would run it, in NumPy, for all threads of a warpgroup at once.

It knows the part of the PTX ISA that these kernels use. Registers are uint32 arrays
with a value for each thread, and shared memory is bytes.
"""

import re

import ml_dtypes
import numpy as np

WARP = 32


def run(text, count, operands, memory=None):
    """The `count` results `$0`, `$1`, ... of a text whose further `$` are operands."""
    body = text.strip()
    if body.startswith("{"):
        body = body[1:-1]
    body = re.sub(r"\.reg [^;]*;", "", body)
    shape = np.broadcast_shapes(*map(np.shape, operands))
    registers = {"%laneid": _u32(np.arange(shape[0] if shape else 1) % WARP)}
    for i, operand in enumerate(operands, start=count):
        registers[f"${i}"] = np.broadcast_to(_u32(operand), shape)
    for line in body.split(";"):
        line, where = _predicate(line.strip(), registers)
        if not line:
            continue
        name, _, rest = line.partition(" ")
        if name.startswith("ld.shared"):
            _load(name, rest, registers, memory)
        elif name.startswith("st.shared"):
            _store(name, rest, registers, memory, np.broadcast_to(where, shape))
        else:
            target, *sources = (word.strip("{} ") for word in rest.split(","))
            values = [_value(source, registers) for source in sources]
            registers[target] = np.broadcast_to(_INSTRUCTIONS[name](*values), shape)
    return [registers[f"${i}"] for i in range(count)]


def _predicate(line, registers):
    """A line without its predicate, and in which threads it is run."""
    if not line.startswith("@"):
        return line, True
    name, _, line = line.partition(" ")
    return line, registers[name[1:]] != 0


def _value(source, registers):
    """The value of a register or of a constant; a float is 0f and its bits."""
    if source in registers:
        return registers[source]
    return _u32(int(source[2:], 16) if source.startswith("0f") else int(source, 0))


def _u32(value):
    return np.asarray(value).astype(np.uint32)


def _prmt(a, b, selector):
    """Bytes of the eight of a and b, which four bits of the selector choose each.

    With the highest bit set, the byte's sign is repeated.
    """
    whole = _wide(b) << np.uint64(32) | _wide(a)
    out = np.zeros_like(_u32(a + b + selector))
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        place = _wide(nibble) % np.uint64(8) * np.uint64(8)
        byte = (whole >> place).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
        out |= np.where(nibble & 8, sign, byte) << np.uint32(8 * i)
    return out


def _lop3(a, b, c, table):
    out = np.zeros_like(_u32(a ^ b ^ c))
    for i in range(8):
        if int(np.max(table)) >> i & 1:
            of_a = a if i & 4 else ~a
            of_b = b if i & 2 else ~b
            of_c = c if i & 1 else ~c
            out |= of_a & of_b & of_c
    return out


def _wide(value):
    return value.astype(np.uint64)


def _product(a, b):
    return (_wide(a) * _wide(b)).astype(np.uint32)


def _bf16x2(a, b):
    out = np.uint32(0)
    for i in range(2):
        with np.errstate(over="ignore", invalid="ignore"):
            product = (_half(a, i) * _half(b, i)).astype(ml_dtypes.bfloat16)
        out = out | _u32(product.view(np.uint16)) << np.uint32(16 * i)
    return out


def _half(a, i):
    bits = np.atleast_1d(a >> np.uint32(16 * i)).astype(np.uint16)
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def _larger_halves(a, b):
    out = np.uint32(0)
    for i in range(2):
        shift = np.uint32(16 * i)
        halves = [x >> shift & np.uint32(0xFFFF) for x in (a, b)]
        out = out | np.maximum(*halves) << shift
    return out


def _of_warp(a, members):
    """The largest of every warp."""
    assert members == 0xFFFFFFFF
    assert a.shape[0] % WARP == 0
    return np.repeat(a.reshape(-1, WARP).max(axis=1), WARP)


def _float(a):
    return np.array(a, np.uint32).view(np.float32)


def _flushed(a):
    return np.where(np.abs(a) < 2.0**-126, np.copysign(np.float32(0), a), a)


def _in_float(operation, flush=False):
    """Convert float32, rounded to nearest."""

    def run(*operands):
        ready = _flushed if flush else np.asarray
        with np.errstate(all="ignore"):
            values = [ready(_float(a)) for a in operands]
            out = ready(np.asarray(operation(*values), np.float32))
        return out.view(np.uint32)

    return run


def _e4m3x2(high, low):
    """Convert two float32 to E4M3; values beyond the range become the largest."""

    def cast(a):
        wide = np.clip(_float(a), -448, 448)
        return _u32(wide.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))

    return cast(high) << np.uint32(8) | cast(low)


_INSTRUCTIONS = {
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "shr.u32": np.right_shift,
    "add.u32": np.add,
    "mul.lo.u32": _product,
    "mad.lo.u32": lambda a, b, c: _product(a, b) + c,
    "mul.rn.bf16x2": _bf16x2,
    "shl.b32": np.left_shift,
    "bfe.u32": lambda a, at, size: a >> at & (np.uint32(1) << size) - np.uint32(1),
    "mov.b32": lambda low, high=0: low | _u32(high) << np.uint32(16),
    "mov.u32": lambda a: a,
    "max.u32": np.maximum,
    "max.u16x2": _larger_halves,
    "redux.sync.max.u32": _of_warp,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ge.u32": lambda a, b: a >= b,
    "setp.le.f32": lambda a, b: _float(a) <= _float(b),
    "selp.f32": lambda a, b, which: np.where(which, a, b),
    "div.rn.f32": _in_float(np.divide),
    "rcp.rn.f32": _in_float(np.reciprocal),
    "mul.rn.ftz.f32": _in_float(np.multiply, flush=True),
    "mul.rn.f32": _in_float(np.multiply),
    "fma.rn.f32": _in_float(lambda a, b, c: a * b + c),
    "selp.b32": lambda a, b, which: np.where(which, a, b),
    "cvt.rn.satfinite.e4m3x2.f32": _e4m3x2,
}


def _store(name, rest, registers, memory, where):
    """Words at the address in brackets, a register and perhaps bytes to add."""
    pattern = r"\[(\S+?)(?: \+ (\d+))?\], (.*)$"
    address, more, sources = re.match(pattern, rest, re.DOTALL).groups()
    sources = [source.strip() for source in sources.strip("{} ").split(",")]
    at = np.broadcast_to(registers[address] + np.uint32(more or 0), where.shape)
    assert len(sources) == _words(name)
    assert not (at % (4 * len(sources))).any()
    for i, source in enumerate(sources):
        words = np.broadcast_to(registers[source], where.shape)
        memory.view(np.uint32)[at[where] // 4 + i] = words[where]


def _words(name):
    """Return the number of words that an instruction moves."""
    return {"b32": 1, "v2.b32": 2, "v4.b32": 4, "v4.f32": 4}[name.split("shared.")[1]]


def _load(name, rest, registers, memory):
    """Words of memory at the address in brackets: a register, perhaps bytes to add."""
    pattern = r"(.*), \[(\S+?)(?: \+ (\d+))?\]$"
    targets, address, more = re.match(pattern, rest, re.DOTALL).groups()
    targets = [target.strip() for target in targets.strip("{} ").split(",")]
    assert len(targets) == _words(name)
    first = registers[address] + np.uint32(more or 0)
    assert not (first % (4 * len(targets))).any(), (
        "a load of n bytes is at a multiple of n"
    )
    for i, target in enumerate(targets):
        registers[target] = memory.view(np.uint32)[first // 4 + i]
