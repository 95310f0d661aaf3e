"""Codebooks, numbers that are looked up in tables.

There are NF4, linear4, your own tables, and TensorCast's implicit codebooks. A codebook
has one or several tables of 2**index_bits values. If there are several, each tile (or
subtile) selects the table that fits it best, and stores its index.

`nf4` holds QLoRA's quantiles of a normal distribution. `linear4` holds the integers -8
to 7, for the residual of TCFP-12: int4 does not use -8, and a scale maps the largest
magnitude to 7 in both.
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcfp_jax.formats.float_bits import RoundMode, is_smaller, sum_squares, uniform
from tcfp_jax.formats.numbers import NumberSpec, number

CODEBOOK_GRAMMAR = (
    "nf4, linear4, or icbIMf_NUMBER, icbIMi_NUMBER, icbIMfi_NUMBER (I = 4 index bits, M"
    " bits of shifts)"
)

_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class CodebookSpec:
    """A number whose codes index a table, made by `codebook`: frozen and hashable.

    Attributes:
      name: the name of the codebook.
      tables: ascending float32 values, all of one length, a power of two.
      maxfloat: the value that a scale maps the largest magnitude of a tile to.
    """

    name: str
    tables: tuple[tuple[float, ...], ...]
    maxfloat: float

    kind = "codebook"
    is_integer = False
    fixed_point = 0
    has_nan = False
    has_inf = False
    has_negative_zero = False
    signed = True

    @property
    def bits(self) -> int:
        """The bits of an index."""
        return (len(self.tables[0]) - 1).bit_length()

    @property
    def selector_bits(self) -> int:
        """The bits that select a table for a tile or subtile; 0 if there is one."""
        return (len(self.tables) - 1).bit_length()

    @property
    def max(self) -> float:
        """The largest value of any table."""
        return max(table[-1] for table in self.tables)

    @property
    def min(self) -> float:
        """The smallest value of any table."""
        return min(table[0] for table in self.tables)

    @property
    def emax(self) -> int:
        """floor(log2(maxfloat))."""
        return math.frexp(self.maxfloat)[1] - 1

    @property
    def midmax(self) -> float:
        """`maxfloat`, because everything above rounds to it."""
        return self.maxfloat

    @property
    def eps(self) -> float:
        """The smallest distance between two values of a table, over `maxfloat`."""
        steps = np.diff(self.tables)
        return float(steps[steps > 0].min()) / self.maxfloat

    def levels(self) -> Array:
        """Return the tables as float32 `[tables, values]`."""
        return jnp.asarray(np.array(self.tables, np.float32))

    def number_line(self) -> tuple[float, ...]:
        """Return all values of all tables, ascending, each once."""
        return tuple(np.unique(self.tables).tolist())


def codebook(
    tables: str | Sequence[float] | Sequence[Sequence[float]] | np.ndarray,
    name: str | None = None,
) -> CodebookSpec:
    """Return the codebook with this code, or make one of these tables.

    Use this for values that no float or integer has, such as quantiles of your own
    weights; `datatype` takes the result as its number. Use `number` for formats that
    hardware computes with.

    Args:
      tables: "nf4", "linear4", an implicit code such as "icb44fi_e4m3fn", the values of
        one table, or several tables; also as arrays, `[values]` or `[tables, values]`.
      name: the name of your own codebook.

    Raises:
      ValueError: an unknown code, or tables that do not hold 2**k ascending, finite
        float32 values each.

    Source: Dettmers et al. 2023, "QLoRA", appendix E (NF4); TensorCast (implicit
    codebooks).

    >>> codebook([-1.0, 0.0, 0.5, 1.0]).bits, codebook("nf4").bits
    (2, 4)
    >>> codebook("icb44fi_e2m3fnuz").selector_bits
    4
    """
    if isinstance(tables, str):
        return _by_code(tables.lower())
    if not isinstance(name, str | None):
        raise ValueError(
            f"name= is a {type(name).__name__}; give text, such as name='mine'"
        )
    values = _values(tables)
    size = values.shape[1]
    if not 2 <= size <= 256 or size & (size - 1):
        raise ValueError(
            f"tables hold {size} values each; use a power of two from 2 to 256"
        )
    for table in values:
        if not np.all(table[:-1] <= table[1:]):
            raise ValueError(
                f"table {table.tolist()} does not ascend, or has a NaN; sort it"
            )
        if not np.array_equal(table.astype(np.float32), table):
            raise ValueError(
                f"table {table.tolist()} is not finite and exact in float32; pass"
                " np.float32(table)"
            )
    largest = float(np.abs(values).max())
    if not 2.0**-60 <= largest <= 2.0**60:
        raise ValueError(
            f"the largest magnitude {largest} of the tables is not within 2**-60 to"
            " 2**60; rescale them"
        )
    return CodebookSpec(name or "codebook", tuple(map(tuple, values.tolist())), largest)


def _values(tables: object) -> np.ndarray:
    """Return tables as float64 `[tables, values]`."""
    try:
        array = np.asarray(tables)
        if array.dtype.kind in "cSU" or array.ndim not in (1, 2):
            raise TypeError
        return np.atleast_2d(array.astype(np.float64))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"tables= is a {type(tables).__name__} that does not hold the real numbers"
            " of one table or several of one length; give [values] or [tables, values],"
            f" or a code: {CODEBOOK_GRAMMAR}"
        ) from error


@functools.cache
def _by_code(code: str) -> CodebookSpec:
    if code == "nf4":
        return CodebookSpec("nf4", (tuple(np.array(_NF4, np.float32).tolist()),), 1.0)
    if code == "linear4":
        return CodebookSpec("linear4", (tuple(map(float, range(-8, 8))),), 7.0)
    found = re.fullmatch(r"icb4([0-9])(f|i|fi)_(\w+)", code)
    if not found:
        raise ValueError(f"{code!r} is not a codebook; use {CODEBOOK_GRAMMAR}")
    shift_bits, letters, compute_code = found.groups()
    compute = number(compute_code)
    if compute.kind != "float" or not 5 <= compute.bits <= 8:
        raise ValueError(
            f"{code!r}: {compute.name} is not a float of 5 to 8 bits, in whose steps"
            " patterns shift"
        )
    patterns = {"f": number("e2m1fnuz"), "i": number("e1m2b1fnuz")}
    tables: list[tuple[float, ...]] = []
    for letter in letters:
        tables += _shifted(patterns[letter], compute, 1 << int(shift_bits))
    return CodebookSpec(code, tuple(tables), compute.max)


def _shifted(
    pattern: NumberSpec, compute: NumberSpec, shifts: int
) -> list[tuple[float, ...]]:
    """Return tables of a 4-bit number's values, moved down the line of `compute`.

    The positive values move code by code. Tables are mirrored, with 0 in the middle
    twice, so that they have 16 entries.
    """
    # Codes of `compute` for the pattern's values at the top binade. Every table keeps
    # their distances from the top.
    positive = [value for value in pattern.number_line() if value > 0]
    widened = [_code_of(value, pattern, compute) for value in positive]
    down = widened[-1] - compute.largest_code
    codes = [code - down for code in widened]
    tables = []
    for shift in range(min(shifts, codes[0])):
        moved = [compute.magnitude(code - shift) for code in codes]
        mirrored = [-value for value in reversed(moved)]
        tables.append((*mirrored, 0.0, 0.0, *moved))
    return tables


def _code_of(value: float, pattern: NumberSpec, compute: NumberSpec) -> int:
    mantissa, exponent = math.frexp(math.ldexp(value, compute.emax - pattern.emax))
    field = exponent - compute.emin
    return (field << compute.mbits) + int((2 * mantissa - 1) * (1 << compute.mbits))


def _nearest_index(
    value: Array,
    levels: Array,
    mode: RoundMode,
    bits: Array | None,
) -> Array:
    """Return the index of the level that `value` rounds to.

    Values beyond the ends round to the ends.
    """
    target = jnp.clip(value, levels[0], levels[-1])
    # One comparison at a time: with an axis of levels, XLA would compute the target
    # once for each level.
    lower = jnp.zeros_like(target, jnp.int32)
    for i in range(1, levels.shape[0] - 1):
        lower = lower + (target >= levels[i]).astype(jnp.int32)
    below = target - levels[lower]
    above = levels[lower + 1] - target
    if mode == "zero":
        up = ((target < 0) & (below > 0)) | (above == 0)
    elif mode == "stochastic":
        up = uniform(bits) * (below + above) < below
    else:
        tie = (lower & 1) == 1 if mode == "even" else target > 0
        up = (below > above) | ((below == above) & tie)
    return lower + up.astype(jnp.int32)


class _Fit(NamedTuple):
    """Values rounded to a table: codes, the sum of squared errors, the table."""

    codes: Array
    error: tuple[Array, Array]
    table: Array


def search(
    value: Array,
    book: CodebookSpec,
    axes: tuple[int, ...],
    mode: RoundMode,
    bits: Array | None,
) -> tuple[Array, Array | None]:
    """Return (indices of the entries that values round to, the table of each tile).

    Values are float32, divided by their scale; those beyond the ends round to the ends.
    "even" sends ties to the even index. A tile gets the index of the table with the
    least squared error, the first one among equals, or None if there is one table.
    Errors are summed over `axes`, the axes of a tile, as integers, so the choice does
    not depend on the order of the sum.
    """
    levels = book.levels()
    if not book.selector_bits:
        return _nearest_index(value, levels[0], mode, bits), None
    count = math.prod(value.shape[axis] for axis in axes)
    # Errors are at most 2 maxfloat. A sum of up to 256 squares stays below 2**31; more
    # are added in two parts.
    limit = int((2**31 / (count if count <= 256 else 1)) ** 0.5 / 1.005)
    steps = limit // 2 / book.maxfloat
    clipped = jnp.clip(value, -book.maxfloat, book.maxfloat)

    def fit(table: Array) -> _Fit:
        index = _nearest_index(value, levels[table], mode, bits)
        error = jnp.round((levels[table][index] - clipped) * steps)
        squares = sum_squares(error.astype(jnp.int32), axes, limit)
        return _Fit(index, squares, jnp.full_like(squares[0], table))

    def better(table: Array, best: _Fit) -> _Fit:
        other = fit(table)
        less = is_smaller(other.error, best.error)
        return jax.tree.map(functools.partial(jnp.where, less), other, best)

    best = jax.lax.fori_loop(1, len(book.tables), better, fit(jnp.int32(0)))
    return best.codes, best.table
