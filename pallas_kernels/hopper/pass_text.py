"""Passes over matrices that write FP8 in both orientations: their instructions on a Hopper GPU, in PTX.

A warpgroup takes a tile of 128 x 64 in two turns. A thread computes 4 rows of 4 neighbouring columns, twice, 32 columns
apart: it stores a word of each row, turns the bytes by `prmt`, and stores a word of each column. (`ldmatrix` turns
values of 16 bits alone.)

Rows of shared memory have 128 bytes, or 64, whose pieces of 16 are permuted by the row: the swizzle of the copies (PTX
ISA, "Shared Memory Matrix Layout"). Neighbouring threads store their columns in different orders, so that the 32 words
of a warp lie in 32 banks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

ROWS, COLUMNS = 128, 64  # of a tile
TURNS = 2
_KINDS = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}


class Found(NamedTuple):
    """PTX for two values of each matrix, the `.b16` registers with their codes, and the `.f32` of a replaced matrix."""

    lines: list[str]
    codes: list[str]
    left: Sequence[str] = ()


# (the two `.f32` registers of each matrix, those of the scalars, the FP8 format) -> results
Program = Callable[[Sequence[tuple[str, str]], Sequence[str], str], Found]


@dataclass(frozen=True)
class Pass:
    """A function of matrices, value by value, with results in FP8.

    Attributes:
      name: name of the kernel in profiles.
      dtypes: names of the dtypes of the matrices, bfloat16 or float32.
      dtype: name of the FP8 format.
      turned: for each FP8 result, whether its transpose is written as well.
      program: returns the instructions for two values of each matrix.
      by_numbers: the same function of arrays and scalars, for the interpreter.
      replaced: index of the matrix that the last result replaces, in its dtype, or None.
    """

    name: str
    dtypes: tuple[str, ...]
    dtype: str
    turned: tuple[bool, ...]
    program: Program
    by_numbers: Callable[..., Sequence[jax.Array]]
    replaced: int | None = None

    @property
    def results(self) -> list[bool]:
        """Whether each matrix of codes is a transpose."""
        return [turns for turned in self.turned for turns in (False, True)[: 1 + turned]]

    def misfit(self, m: int, k: int) -> str | None:
        """Return the reason why no tile divides `[m, k]`, or None."""
        if m and k and m % ROWS == 0 and k % COLUMNS == 0:
            return None
        return f'[{m}, {k}] must be multiples of {ROWS} and {COLUMNS} for backend="mosaic"'


def text(one: Pass, turn: int, scalars: int) -> str:
    """Return the instructions of one turn: operands are the addresses of tiles, the thread and the scalars."""
    return "{" + ";\n".join(_lines(one, turn, scalars)) + ";}"


def _lines(one: Pass, turn: int, scalars: int) -> list[str]:
    count = len(one.dtypes)
    places = count + len(one.results)
    thread, factors = f"${places}", [f"${places + 1 + i}" for i in range(scalars)]
    lines = [
        ".reg .b32 column, group, odd, pair, a, t, u, q<4>, l<4>, o<12>",
        f".reg .b32 w<{8 * len(one.turned)}>, b<{places}>",
        f".reg .f32 v<{4 * count}>, s<2>",
        ".reg .b16 h<12>",
        ".reg .pred p<2>",
        # A warp has 4 groups of 4 rows and 8 groups of 4 columns, and the same 32 columns further.
        f"and.b32 column, {thread}, 7",
        f"bfe.u32 t, {thread}, 3, 2",
        f"shr.u32 group, {thread}, 5",
        "mad.lo.u32 group, group, 4, t",
        f"add.u32 group, group, {16 * turn}",
        "and.b32 odd, group, 1",
        "shr.u32 pair, group, 1",
    ]
    for i, dtype in enumerate(one.dtypes):
        lines += _place_of_values(f"b{i}", f"${i}", dtype)
    for i, turns in enumerate(one.results, count):
        lines += (_place_of_columns if turns else _place_of_codes)(f"b{i}", f"${i}")
    for row in range(4):
        for half in (0, 1):
            lines += _quad(one, factors, row, half)
    target = count
    for code, turns in enumerate(one.turned):
        target += 1
        if turns:
            lines += [line for half in (0, 1) for line in _turned(code, half, f"b{target}")]
            target += 1
    return lines


def _sum(target: str, address: str, *terms: tuple[str, int]) -> list[str]:
    """Return target = address + the sum of registers times constants; `t` is the permuted piece, times 16."""
    return [f"mad.lo.u32 {target}, t, 16, {address}"] + [f"mad.lo.u32 {target}, {x}, {by}, {target}" for x, by in terms]


def _place_of_values(target: str, address: str, dtype: str) -> list[str]:
    """Return the place of the first four values of row 0 of a group: tiles of 8 rows of 128 bytes."""
    if dtype == "float32":
        piece = ["shl.b32 t, odd, 2", "xor.b32 t, t, column"]
        return piece + _sum(target, address, ("pair", 2048), ("odd", 512))
    piece = ["shl.b32 t, odd, 2", "shr.u32 u, column, 1", "xor.b32 t, t, u", "and.b32 u, column, 1"]
    return piece + _sum(target, address, ("pair", 1024), ("odd", 512), ("u", 8))


def _place_of_codes(target: str, address: str) -> list[str]:
    """Return the place of the first four codes of row 0 of a group: tiles of 8 rows of 64 bytes."""
    piece = ["shr.u32 t, column, 2", "shl.b32 u, odd, 1", "xor.b32 t, t, u", "and.b32 u, column, 3"]
    return piece + _sum(target, address, ("pair", 512), ("odd", 256), ("u", 4))


def _place_of_columns(target: str, address: str) -> list[str]:
    """Return the place of a group of 4 rows in the first column that a thread stores: rows of 128 bytes."""
    piece = ["shr.u32 t, group, 2", "and.b32 u, column, 1", "mad.lo.u32 u, u, 4, 0", "xor.b32 t, t, u"]
    piece.append("and.b32 u, group, 3")
    lines = piece + _sum(target, address, ("column", 4 * 128), ("u", 4))
    # Neighbours begin with other columns.
    return [*lines, "shr.u32 u, column, 1", "mul.lo.u32 u, u, 0x90", f"xor.b32 {target}, {target}, u"]


def _quad(one: Pass, factors: list[str], row: int, half: int) -> list[str]:
    """Return the lines that compute four values of a row, and store their codes."""
    count = len(one.dtypes)
    lines = [line for i, dtype in enumerate(one.dtypes) for line in _load(i, dtype, row, half)]
    for j in (0, 2):
        pairs = [(f"v{4 * i + j}", f"v{4 * i + j + 1}") for i in range(count)]
        found = one.program(pairs, factors, one.dtype)
        # The program's registers are used again for the next pair.
        lines += [*found.lines, *(f"mov.b16 h{4 + 2 * i + j // 2}, {code}" for i, code in enumerate(found.codes))]
        lines += [f"mov.b32 l{j + i}, {rest}" for i, rest in enumerate(found.left)]
    place = count
    for code, turned in enumerate(one.turned):
        word, shift = f"w{8 * code + 2 * row + half}", row >> 1 << 4 | half << 5
        lines += [f"mov.b32 {word}, {{h{4 + 2 * code}, h{5 + 2 * code}}}", f"xor.b32 a, b{place}, {shift}"]
        lines.append(f"st.shared.b32 [a + {64 * row}], {word}")
        place += 1 + turned
    if one.replaced is not None:
        lines += _store(one.replaced, one.dtypes[one.replaced], row, half)
    return lines


def _load(i: int, dtype: str, row: int, half: int) -> list[str]:
    """Return the lines that load four values of matrix i as float32."""
    values = [f"v{4 * i + j}" for j in range(4)]
    if dtype == "float32":
        load = f"ld.shared.v4.f32 {{{', '.join(values)}}}, [a + {128 * row + 1024 * half}]"
        return [f"xor.b32 a, b{i}, {row << 4}", load]
    lines = [f"xor.b32 a, b{i}, {row << 4 | half << 6}", f"ld.shared.v2.b32 {{q0, q1}}, [a + {128 * row}]"]
    for j in (0, 1):
        lines += [f"shl.b32 t, q{j}, 16", f"mov.b32 {values[2 * j]}, t"]
        lines += [f"and.b32 t, q{j}, 0xFFFF0000", f"mov.b32 {values[2 * j + 1]}, t"]
    return lines


def _store(i: int, dtype: str, row: int, half: int) -> list[str]:
    """Return the lines that store four values, float32 in l0 to l3, where matrix i had them."""
    if dtype == "float32":
        store = f"st.shared.v4.b32 [a + {128 * row + 1024 * half}], {{l0, l1, l2, l3}}"
        return [f"xor.b32 a, b{i}, {row << 4}", store]
    lines = [f"mov.b32 s{j}, l{2 * k + 1 - j}" for k in (0, 1) for j in (0, 1)]
    lines = [*lines[:2], "cvt.rn.bf16x2.f32 q0, s0, s1", *lines[2:], "cvt.rn.bf16x2.f32 q1, s0, s1"]
    return [*lines, f"xor.b32 a, b{i}, {row << 4 | half << 6}", f"st.shared.v2.b32 [a + {128 * row}], {{q0, q1}}"]


def _turned(code: int, half: int, target: str) -> list[str]:
    """Return the lines that turn 4 rows of 4 bytes, and store the words of the columns."""
    rows, lines = [f"w{8 * code + 2 * row + half}" for row in range(4)], []
    for i, (one, other) in enumerate((rows[:2], rows[2:])):
        # Bytes 0 and 1 of two rows in turn, and bytes 2 and 3.
        lines += [f"prmt.b32 q{2 * i + j}, {one}, {other}, {pick}" for j, pick in enumerate(("0x5140", "0x7362"))]
    for i in (0, 1):
        lines += [f"prmt.b32 o{2 * i + j}, q{i}, q{2 + i}, {pick}" for j, pick in enumerate(("0x5410", "0x7632"))]
    first = 0
    for bit in (0, 1):
        lines += [f"and.b32 t, column, {2 << bit}", f"setp.ne.u32 p{bit}, t, 0"]
        lines += [f"selp.b32 o{first + 4 + i}, o{first + (i ^ 1 << bit)}, o{first + i}, p{bit}" for i in range(4)]
        first += 4
    for i in range(4):
        lines += [f"xor.b32 a, {target}, {0x90 * i}", f"st.shared.b32 [a + {4096 * half}], o{first + i}"]
    return lines


# Programs ---------------------------------------------------------------------------------------------------------


def quantized(values: Sequence[tuple[str, str]], scalars: Sequence[str], dtype: str) -> Found:
    """Return PTX of x times the inverse of its scale in FP8."""
    lines = []
    for x in values[0]:
        # Times zero plus itself makes inf NaN, which a saturating conversion would make a number.
        lines += [f"mul.rn.ftz.f32 {x}, {x}, {scalars[0]}", f"fma.rn.f32 {x}, {x}, 0f00000000, {x}"]
    low, high = values[0]
    return Found([*lines, f"cvt.rn.satfinite.{_KINDS[dtype]}.f32 h0, {high}, {low}"], ["h0"])


def split(values: Sequence[tuple[str, str]], scalars: Sequence[str], dtype: str) -> Found:
    """Return PTX of hi and lo of a weight, of the inverse and the scale, and of the error that is left."""
    lines, (low, high), kind = [], values[0], _KINDS[dtype]
    for i, x in enumerate((low, high)):
        if len(values) > 1:
            lines.append(f"add.rn.f32 {x}, {x}, {values[1][i]}")
        # Subnormals become zeros; times zero plus itself makes inf NaN.
        lines += [f"mul.rn.ftz.f32 {x}, {x}, {scalars[2]}", f"mul.rn.f32 {x}, {x}, {scalars[0]}"]
        lines += [f"fma.rn.f32 {x}, {x}, 0f00000000, {x}"]
    halves = ["mov.b32 {h2, h3}, t", "cvt.f32.f16 s0, h2", "cvt.f32.f16 s1, h3"]
    back = lambda code: [f"cvt.rn.f16x2.{kind} t, {code}", *halves]
    rest = [f"sub.rn.f32 {low}, {low}, s0", f"sub.rn.f32 {high}, {high}, s1"]
    lines += [f"cvt.rn.satfinite.{kind}.f32 h0, {high}, {low}", *back("h0"), *rest]
    lines += [f"cvt.rn.satfinite.{kind}.f32 h1, {high}, {low}"]
    if len(values) == 1:
        return Found(lines, ["h0", "h1"])
    lines += [*back("h1"), *rest, *(f"mul.rn.f32 {x}, {x}, {scalars[1]}" for x in (low, high))]
    return Found(lines, ["h0", "h1"], [low, high])
