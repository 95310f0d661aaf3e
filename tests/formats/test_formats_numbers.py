"""Numbers and codebooks, compared with ml_dtypes for every dtype and every code."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tcfp_jax.formats import codebook, number
from tests.formats_oracles import FLOATS, table
from tests.helpers import parametrize, refused

every_float = parametrize("name", FLOATS)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def every_code(name):
    bits = number(name).bits
    codes = np.arange(2**bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return codes.view(dtype_of(name)).astype(np.float64)


@every_float
def test_derived_values_are_those_of_finfo(name):
    spec = number(name)
    dtype = dtype_of(name)
    info = ml_dtypes.finfo(dtype)
    for attribute in ("bits", "max", "eps", "smallest_normal", "smallest_subnormal"):
        mine = float(getattr(spec, attribute))
        assert mine == float(getattr(info, attribute)), attribute
    is_float = spec.kind == "float"
    assert spec.emin == (info.minexp if is_float else -127)
    assert spec.min == (float(info.min) if is_float else 2.0**-127)
    assert number(dtype) == number(spec.name) == number(spec) == spec
    assert spec.dtype == dtype
    assert hash(spec) == hash(number(spec.name))


@every_float
def test_number_line_is_every_code(name):
    spec = number(name)
    values = every_code(name)
    assert np.array_equal(np.unique(values[np.isfinite(values)]), spec.number_line())
    magnitudes = [spec.magnitude(code) for code in range(spec.largest_code + 1)]
    assert np.array_equal(values[: len(magnitudes)], magnitudes)
    positive = len(values) // (2 if spec.signed else 1)
    assert not np.isfinite(values[len(magnitudes) : positive]).any()
    assert np.isinf(values).any() == spec.has_inf
    assert np.isnan(values).any() == spec.has_nan
    assert spec.has_negative_zero == bool(np.any((values == 0) & np.signbit(values)))


class TorchDtype:
    """A stand-in for torch.dtype, which prints as its name."""

    def __str__(self):
        return "torch.float8_e4m3fnuz"


def test_a_dtype_of_torch():
    assert number(TorchDtype()) == number("float8_e4m3fnuz")
    with refused(r"'float64'.*too wide"):
        number("torch.float64")


SAME = """
    torch.float8_e5m2fnuz e5m2b16fnuz
    torch.float8_e4m3fnuz e4m3b8fnuz
    torch.float8_e4m3fn e4m3fn
    torch.float8_e5m2 e5m2
    torch.float8_e8m0fnu e8m0
    torch.float4_e2m1fn_x2 e2m1f
    torch.float32 e8m23
    torch.float e8m23
    torch.float16 e5m10
    torch.bfloat16 e8m7
    float8_e5m2fnuz e5m2b16fnuz
    float32 e8m23
    bfloat16 e8m7
    float12 e5m6
    float24 e8m15
    bfloat24 e8m15
    binary8p1 e7m0inuz
    binary8p3 e5m2b16inuz
    binary8p4 e4m3b8inuz
    binary8p7 e1m6b1inuz
"""
DTYPES = [(np.float32, "e8m23"), (ml_dtypes.bfloat16, "e8m7")]


@parametrize("code, same", [*table(SAME), *DTYPES])
def test_codes_of_one_number(code, same):
    assert number(code) == number(same)
    assert number(code).name == same


@parametrize(
    "code, values",
    [
        ("e4m3fnuz", dict(bias=7)),
        ("float8_e4m3fnuz", dict(bias=8)),
        ("e5m2fnuz", dict(bias=15)),
        ("e2m1fnuz", dict(max=6)),
        ("e2m1fn", dict(max=4)),
        ("e2m1", dict(max=3)),
        ("binary8p3", dict(max=49152)),
        ("binary8p4", dict(max=224)),
        ("int8", dict(bits=8, max=127, min=-127, emax=0, eps=2**-6, dtype=np.int8)),
        ("int8", dict(maxfloat=127 / 64, midmax=127.5 / 64)),
        ("uint12", dict(dtype=None)),
        ("e1m6b1fnuz", dict(maxfloat=127 / 64)),
        ("e8m0", dict(kind="exponent", signed=False, bits=8, emin=-127, emax=127)),
        ("e5m0", dict(max=2.0**15)),
        ("e5m0fn", dict(kind="float")),
        ("e4m3fn", dict(midmax=464)),
        ("e2m1f", dict(midmax=7)),
    ],
)
def test_values_of_numbers(code, values):
    assert {name: getattr(number(code), name) for name in values} == values


def test_number_lines_of_integers():
    assert number("uint4").number_line() == tuple(range(16))
    assert number("int3").number_line() == tuple(range(-3, 4))


def test_midmax_is_where_rounding_leaves_the_range():
    for code in ("e4m3fn", "e4m3", "e2m1f", "e5m2", "e3m4b4inuz"):
        spec = number(code)
        line = spec.number_line()
        assert spec.midmax - spec.max == (spec.max - line[-2]) / 2 or spec.mbits == 0


BAD = """
    bfloat8    no mantissa
    float8     no mantissa
    bfloat9    no mantissa
    int1       2 to 32
    uint33     2 to 32
    e1m6       no normal
    e9m2       outside
    e4m24      outside
    e0m3       outside
    e8m3fn     float32
    e4m3b200   float32
    e1m0       2 bits
    binary8p8  not a number
    mxfp4      not a number
    float64    too wide
    e4m3fnu    not a number
"""
NO_CODES = [(code, "not a number") for code in ("", None, object())]


@parametrize("code, why", [*table(BAD), *NO_CODES])
def test_codes_that_describe_nothing_raise(code, why):
    with refused(why):
        number(code)
    if why in ("not a number", "2 to 32", "outside", "no mantissa"):
        with refused("eXmY"):
            number(code)


def test_number_line_of_many_bits_raises():
    with refused("16 bits"):
        number("float32").number_line()


def test_codebooks():
    nf4 = codebook("nf4")
    assert (nf4.bits, nf4.selector_bits, nf4.min, nf4.max) == (4, 0, -1, 1)
    assert nf4.tables[0][7] == 0
    own = codebook([[-2.0, 0.0, 1.0, 3.0], [-1.0, 0.0, 0.5, 1.0]], name="own")
    assert (own.bits, own.selector_bits, own.maxfloat, own.name) == (2, 1, 3.0, "own")
    assert own.eps == 0.5 / 3
    assert own.number_line() == (-2, -1, 0, 0.5, 1, 3)
    tables = np.array(own.tables, np.float32)
    double = tables.astype(np.float64)
    for arrays in (tables, jnp.asarray(tables), list(tables), double, tables.tolist()):
        assert codebook(arrays, name="own") == own
    one = codebook(tables[1])
    assert one == codebook(list(tables[1])) == codebook(tables[1].tolist())
    shifted = codebook("icb44fi_e3m2fnuz").tables
    assert len(shifted) == 32
    assert {len(table) for table in shifted} == {16}
    assert set(np.ravel(shifted)) <= set(number("e3m2fnuz").number_line())
    # The pattern of e2m1 itself, and of int4, at some shift.
    doubled = tuple(16 / 4 * v for v in (0.5, 1, 1.5, 2, 3, 4, 6))
    assert doubled in [table[9:] for table in shifted]


@parametrize(
    "tables",
    [
        "nf3",
        "icb44x_e4m3fn",
        "icb44f_float16",
        [1.0, 0.0],
        [0.1, 0.2],
        [0.0, 1.0, 2.0],
        [[0.0, 1.0], [1.0]],
        [0.0] * 2,
        np.zeros((2, 2, 2)),
        np.zeros(()),
        np.array([]),
        np.array([0.0, np.nan]),
        np.array([1j, 2]),
        None,
    ],
)
def test_bad_codebooks_raise(tables):
    with pytest.raises(ValueError):
        codebook(tables)
