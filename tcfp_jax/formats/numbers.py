"""Numbers: `number(code)` describes a float, an integer or an exponent by its bits.

There are neither arrays nor casts here. Grammar of codes:

    eXmY[bZ][f|fn|fnuz|inuz]
        floats: a sign, X in 1..8 exponent bits, Y in 0..23 mantissa bits, bias Z
    eXm0[bZ]
        exponents: unsigned powers of two, 2**(code - bias), the last code is NaN
    intK, uintK
        integers of K in 2..32 bits; signed ones are symmetric, -(2**(K-1) - 1) is the
        smallest
    floatN, bfloatN
        IEEE-like: N in 9..32 for float (e5 up to 16 bits, e8 above), N in 10..32 for
        bfloat (e8)
    binary8pP
        IEEE P3109 with precision P in 1..7
    a jax, numpy or torch dtype, or its name, such as "torch.float8_e5m2fnuz"

The bias defaults to 2**(X-1) - 1, also after `fnuz`. The name of a *dtype* has the bias
of the dtype, so `float8_e4m3fnuz` is `e4m3b8fnuz`. The suffix names the codes that are
not finite numbers:

    (none)  ieee: the largest exponent holds inf (mantissa 0) and NaN
    fn      no inf; the one code with all ones is NaN
    fnuz    no inf, no -0; the code of -0 is NaN
    inuz    no -0; the code of -0 is NaN, and all ones are inf
    f       every code is a finite number (OCP's FP4 and FP6, which ml_dtypes calls
            `float4_e2m1fn` and so on)
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from tcfp_jax.formats.float_bits import Grid

GRAMMAR = (
    "eXmY[bZ][f|fn|fnuz|inuz] (X 1 to 8, Y 0 to 23), eXm0, intK and uintK (K 2 to 32),"
    " floatN (9 to 32), bfloatN (10 to 32), binary8pP (P 1 to 7), or a jax, numpy or"
    " torch dtype"
)

_DTYPE_CODES = {
    "float32": "e8m23",
    "float16": "e5m10",
    "bfloat16": "e8m7",
    "float8_e3m4": "e3m4",
    "float8_e4m3": "e4m3",
    "float8_e4m3b11fnuz": "e4m3b11fnuz",
    "float8_e4m3fn": "e4m3fn",
    "float8_e4m3fnuz": "e4m3b8fnuz",
    "float8_e5m2": "e5m2",
    "float8_e5m2fnuz": "e5m2b16fnuz",
    "float8_e8m0fnu": "e8m0",
    "float6_e2m3fn": "e2m3f",
    "float6_e3m2fn": "e3m2f",
    "float4_e2m1fn": "e2m1f",
}
# Names that only torch has.
_TORCH_DTYPES = {"float": "float32", "float4_e2m1fn_x2": "float4_e2m1fn"}
_CODE_DTYPES = {code: name for name, code in _DTYPE_CODES.items()}
for _bits in (2, 4, 8, 16, 32):
    _CODE_DTYPES[f"int{_bits}"] = f"int{_bits}"
    _CODE_DTYPES[f"uint{_bits}"] = f"uint{_bits}"


@dataclass(frozen=True)
class NumberSpec:
    """A number format, made by `number`: frozen, hashable, equal by content.

    Attributes:
      name: the canonical code, such as "e4m3fn".
      kind: "float", "int", "uint" or "exponent".
      ebits, mbits: widths of exponent and mantissa; for integers 0 and the bits without
        the sign.
      bias: the exponent's bias; 0 for integers.
      infnan: the suffix, which names the codes that are not finite: "ieee", "fn",
        "fnuz", "inuz" or "f" (integers).
    """

    name: str
    kind: Literal["float", "int", "uint", "exponent"]
    ebits: int
    mbits: int
    bias: int
    infnan: Literal["ieee", "fn", "fnuz", "inuz", "f"]

    selector_bits = 0  # only codebooks have tables to select

    @property
    def signed(self) -> bool:
        """True if it has a sign bit."""
        return self.kind in ("float", "int")

    @property
    def bits(self) -> int:
        """The number of stored bits."""
        return self.ebits + self.mbits + self.signed

    @property
    def is_integer(self) -> bool:
        """True for intK and uintK."""
        return self.kind in ("int", "uint")

    @property
    def has_nan(self) -> bool:
        """True if a code is NaN."""
        return self.infnan != "f"

    @property
    def has_inf(self) -> bool:
        """True if a code is infinite."""
        return self.kind == "float" and self.infnan in ("ieee", "inuz")

    @property
    def has_negative_zero(self) -> bool:
        """True if -0 has a code."""
        return self.kind == "float" and self.infnan in ("ieee", "fn", "f")

    @functools.cached_property
    def largest_code(self) -> int:
        """The code of the largest finite number, without the sign bit."""
        codes = 1 << (self.ebits + self.mbits)
        if self.kind == "exponent":
            return codes - 2
        if self.infnan == "ieee":
            return codes - (1 << self.mbits) - 1
        return codes - 1 - (self.infnan in ("fn", "inuz"))

    def magnitude(self, code: int) -> float:
        """Return the exact value of a code without its sign bit."""
        if self.is_integer:
            return float(code)
        if self.kind == "exponent":
            return math.ldexp(1.0, code - self.bias)
        field = code >> self.mbits
        significand = code & ((1 << self.mbits) - 1)
        if field > 0:
            significand += 1 << self.mbits
        return math.ldexp(significand, max(field, 1) - self.bias - self.mbits)

    @functools.cached_property
    def max(self) -> float:
        """The largest finite value."""
        return self.magnitude(self.largest_code)

    @property
    def min(self) -> float:
        """The smallest finite value.

        It is -max, 0 for unsigned integers, or the smallest power of two for exponents.
        """
        if self.kind == "exponent":
            return self.magnitude(0)
        return -self.max if self.signed else 0.0

    @functools.cached_property
    def maxfloat(self) -> float:
        """`max`, but for integers in fixed point, below 2.

        A shared power of two scales them: it is 127/64 for int8.
        """
        return math.ldexp(self.max, -self.fixed_point)

    @property
    def fixed_point(self) -> int:
        """The bits after the point of an integer under an exponent scale.

        OCP's MXINT8 is a number below 2.
        """
        return self.mbits - 1 if self.is_integer else 0

    @property
    def is_wide(self) -> bool:
        """True if it has the exponents of float32.

        Rounding to it only drops bits of the mantissa.
        """
        return self.kind == "float" and self.emin == -126

    @property
    def grid(self) -> Grid:
        """The values as a grid: integers in steps of one, floats in their own units."""
        if self.is_integer:
            # One binade that begins below the largest value: every step is 1.
            return Grid(self.mbits - 1, self.mbits - 1, self.max)
        return Grid(self.emin, self.mbits, self.max)

    @property
    def unit_shift(self) -> int:
        """log2 of the unit in which the smallest values are normal float32.

        It is at most 0 and serves values without a scale.
        """
        return 0 if self.is_integer else min(0, self.emin - self.mbits + 100)

    @property
    def emax(self) -> int:
        """floor(log2(maxfloat)): 8 for e4m3fn, 0 for integers."""
        return math.frexp(self.maxfloat)[1] - 1

    @property
    def emin(self) -> int:
        """log2(smallest_normal); 0 for integers."""
        if self.kind == "exponent":
            return -self.bias
        return 0 if self.is_integer else 1 - self.bias

    @property
    def eps(self) -> float:
        """The distance from 1 to the next value above, 2**-mbits.

        Integers count in fixed point.
        """
        return math.ldexp(1.0, self.is_integer - self.mbits)

    @property
    def midmax(self) -> float:
        """`maxfloat` plus half a step; values above it would not round to it."""
        half_step = self.emax - self.mbits + self.is_integer - 1
        return self.maxfloat + math.ldexp(1.0, half_step)

    @property
    def smallest_normal(self) -> float:
        """2**emin."""
        return math.ldexp(1.0, self.emin)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; integers count in fixed point."""
        if self.kind == "exponent":
            return self.smallest_normal
        return math.ldexp(1.0, self.emin - self.mbits + self.is_integer)

    @property
    def dtype(self) -> np.dtype | None:
        """The jax or ml_dtypes dtype with these values and codes, or None.

        Integers do not use its lowest code.
        """
        name = _CODE_DTYPES.get(self.name)
        return None if name is None else np.dtype(getattr(ml_dtypes, name, name))

    def number_line(self) -> tuple[float, ...]:
        """Return all finite values of a number of up to 16 bits, ascending.

        There is one zero.

        Raises:
          ValueError: it has more than 16 bits.

        >>> number("e2m1f").number_line()[7:]
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        """
        if self.bits > 16:
            raise ValueError(
                f"the number line of {self.name} has 2**{self.bits} values; ask for 16"
                " bits or fewer"
            )
        line = [self.magnitude(code) for code in range(self.largest_code + 1)]
        if self.signed:
            line = [-value for value in reversed(line[1:])] + line
        return tuple(line)


def number(code: "str | DTypeLike | NumberSpec") -> NumberSpec:
    """Return the number that a code describes; the module's docstring has the grammar.

    Use this to look at a format: its range, its step, all its values. `datatype` takes
    the code itself.

    Args:
      code: a code such as "e4m3fn", a jax, numpy or torch dtype or its name, or a
        NumberSpec, which is returned.

    Raises:
      ValueError: the code is outside the grammar, or describes a number that float32
        does not contain.

    Source: TensorCast (AMD); IEEE P3109; OCP Microscaling Formats 1.0; ml_dtypes.

    >>> number("e4m3fn").max, number("int8").maxfloat
    (448.0, 1.984375)
    >>> number("float8_e4m3fnuz").bias
    8
    """
    if isinstance(code, NumberSpec):
        return code
    name = str(code).lower()
    if name.startswith("torch."):  # a torch.dtype prints so, and torch is not needed
        name = name.removeprefix("torch.")
        name = _TORCH_DTYPES.get(name, name)
    elif not isinstance(code, str):
        name = _dtype_name(code)
    return _parse(_DTYPE_CODES.get(name, name), name)


def _dtype_name(dtype: "DTypeLike") -> str:
    # np.dtype(None) is float64, and np.dtype of an array is that of its values, such as
    # those of a codebook.
    is_array = hasattr(dtype, "shape") and not isinstance(dtype, type | np.dtype)
    try:
        if dtype is None or is_array:
            raise TypeError
        return np.dtype(dtype).name
    except TypeError as error:
        raise ValueError(
            f"a {type(dtype).__name__} is not a number code; use {GRAMMAR}"
        ) from error


@functools.cache
def _parse(code: str, given: str) -> NumberSpec:
    """Return the number of a code; `given` is its name in error messages."""
    for pattern, read in _FORMS.items():
        found = re.fullmatch(pattern, code)
        if found:
            return read(found, given)
    raise ValueError(f"{given!r} is not a number code; use {GRAMMAR}")


def _read_float(found: re.Match[str], given: str) -> NumberSpec:
    ebits, mbits, bias, suffix = found.groups()
    return _float(
        int(ebits),
        int(mbits),
        None if bias is None else int(bias),
        suffix or "ieee",
        given,
    )


def _read_integer(found: re.Match[str], given: str) -> NumberSpec:
    bits = int(found[2])
    if not 2 <= bits <= 32:
        raise ValueError(
            f"{given!r}: integers have 2 to 32 bits, not {bits}; use {GRAMMAR}"
        )
    if found[1]:
        return NumberSpec(f"uint{bits}", "uint", 0, bits, 0, "f")
    return NumberSpec(f"int{bits}", "int", 0, bits - 1, 0, "f")


def _read_ieee(found: re.Match[str], given: str) -> NumberSpec:
    bits = int(found[2])
    if not (10 if found[1] else 9) <= bits <= 32:
        raise ValueError(
            f"{given!r}: {found[1]}float{bits} leaves no mantissa or is too wide;"
            f" use {GRAMMAR}"
        )
    ebits = 8 if found[1] or bits > 16 else 5
    return _float(ebits, bits - 1 - ebits, None, "ieee", given)


def _read_p3109(found: re.Match[str], given: str) -> NumberSpec:
    precision = int(found[1])
    bias = 63 if precision == 1 else 1 << (7 - precision)
    return _float(8 - precision, precision - 1, bias, "inuz", given)


_FORMS: dict[str, Callable[[re.Match[str], str], NumberSpec]] = {
    r"e([0-9]{1,3})m([0-9]{1,3})(?:b([0-9]{1,3}))?(f|fn|fnuz|inuz)?": _read_float,
    r"(u?)int([0-9]{1,3})": _read_integer,
    r"(b?)float([0-9]{1,3})": _read_ieee,
    r"binary8p([1-7])": _read_p3109,
}


def _float(
    ebits: int, mbits: int, bias: int | None, infnan: str, given: str
) -> NumberSpec:
    if not (1 <= ebits <= 8 and mbits <= 23):
        raise ValueError(
            f"{given!r}: e{ebits}m{mbits} is outside X 1 to 8, Y 0 to 23; use {GRAMMAR}"
        )
    default = (1 << (ebits - 1)) - 1
    bias = default if bias is None else bias
    kind = "exponent" if mbits == 0 and infnan == "ieee" else "float"
    suffix = "" if infnan == "ieee" else infnan
    own_bias = "" if bias == default else f"b{bias}"
    name = f"e{ebits}m{mbits}{own_bias}{suffix}"
    spec = NumberSpec(name, kind, ebits, mbits, bias, infnan)  # type: ignore[arg-type]
    if kind == "exponent":
        if ebits < 2 or spec.largest_code - bias > 127 or bias > 127:
            raise ValueError(
                f"{given!r}: exponents need 2 bits or more and a range within 2**-127"
                " to 2**127"
            )
        return spec
    if spec.largest_code < 1 << mbits:
        raise ValueError(
            f"{given!r}: {infnan} leaves no normal number; add exponent bits, or use"
            " fnuz or f"
        )
    if spec.emin < -126 or spec.emax > 127:
        raise ValueError(
            f"{given!r} reaches from 2**{spec.emin} to 2**{spec.emax}, float32 only"
            " from 2**-126 to 2**127; change the bias or use fewer exponent bits"
        )
    return spec
