"""Numbers and codebooks, compared with ml_dtypes for every dtype and every code."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tcfp_jax.formats import codebook, number

FLOATS = [name for name in dir(ml_dtypes) if name.startswith(("float", "bfloat"))] + [
    "float16"
]
every_float = pytest.mark.parametrize("name", FLOATS)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def every_code(name):
    bits = number(name).bits
    codes = np.arange(2**bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return codes.view(dtype_of(name)).astype(np.float64)


@every_float
def test_derived_values_are_those_of_finfo(name):
    spec, info = number(name), ml_dtypes.finfo(dtype_of(name))
    for attribute in ("bits", "max", "eps", "smallest_normal", "smallest_subnormal"):
        assert float(getattr(spec, attribute)) == float(getattr(info, attribute)), (
            attribute
        )
    assert spec.emin == (info.minexp if spec.kind == "float" else -127)
    assert spec.min == (float(info.min) if spec.kind == "float" else 2.0**-127)
    assert (
        spec.dtype == dtype_of(name)
        and number(dtype_of(name)) == number(spec.name) == number(spec) == spec
    )
    assert hash(spec) == hash(number(spec.name))


@every_float
def test_number_line_is_every_code(name):
    spec, values = number(name), every_code(name)
    assert np.array_equal(np.unique(values[np.isfinite(values)]), spec.number_line())
    magnitudes = values[: len(values) // (2 if spec.signed else 1)]
    finite = range(spec.largest_code + 1)
    assert np.array_equal(
        magnitudes[: len(finite)], [spec.magnitude(code) for code in finite]
    )
    assert (
        np.isinf(values).any() == spec.has_inf
        and np.isnan(values).any() == spec.has_nan
    )
    assert spec.has_negative_zero == bool(np.any((values == 0) & np.signbit(values)))


def test_codes():
    assert number("e4m3fnuz").bias == 7 and number("float8_e4m3fnuz").bias == 8
    assert number("e5m2fnuz").bias == 15 and number("float8_e5m2fnuz") == number(
        "e5m2b16fnuz"
    )
    assert (
        number("e2m1fnuz").max == 6
        and number("e2m1fn").max == 4
        and number("e2m1").max == 3
    )
    assert number("float32") == number("e8m23") == number(np.float32)
    assert number("bfloat16") == number("e8m7") == number(ml_dtypes.bfloat16)
    assert number("float12") == number("e5m6") and number("float24") == number(
        "e8m15"
    ) == number("bfloat24")
    names = [number(f"binary8p{p}").name for p in (1, 3, 4, 7)]
    assert names == ["e7m0inuz", "e5m2b16inuz", "e4m3b8inuz", "e1m6b1inuz"]
    assert number("binary8p3").max == 49152 and number("binary8p4").max == 224


def test_integers_and_exponents():
    spec = number("int8")
    assert (spec.bits, spec.max, spec.min, spec.emax, spec.eps) == (
        8,
        127,
        -127,
        0,
        2**-6,
    )
    assert (
        spec.maxfloat == 127 / 64
        and spec.midmax == 127.5 / 64
        and spec.dtype == np.int8
    )
    assert number("uint4").number_line() == tuple(range(16))
    assert number("int3").number_line() == tuple(range(-3, 4))
    assert number("uint12").dtype is None and number("e1m6b1fnuz").maxfloat == 127 / 64
    spec = number("e8m0")
    assert (spec.kind, spec.signed, spec.bits, spec.emin, spec.emax) == (
        "exponent",
        False,
        8,
        -127,
        127,
    )
    assert number("e5m0").max == 2.0**15 and number("e5m0fn").kind == "float"


def test_midmax_is_where_rounding_leaves_the_range():
    for code in ("e4m3fn", "e4m3", "e2m1f", "e5m2", "e3m4b4inuz"):
        spec = number(code)
        line = spec.number_line()
        assert spec.midmax - spec.max == (spec.max - line[-2]) / 2 or spec.mbits == 0
    assert number("e4m3fn").midmax == 464 and number("e2m1f").midmax == 7


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("bfloat8", "no mantissa"),
        ("float8", "no mantissa"),
        ("bfloat9", "no mantissa"),
        ("int1", "2 to 32"),
        ("uint33", "2 to 32"),
        ("e1m6", "no normal"),
        ("e9m2", "outside"),
        ("e4m24", "outside"),
        ("e0m3", "outside"),
        ("e8m3fn", "float32"),
        ("e4m3b200", "float32"),
        ("e1m0", "2 bits"),
        ("binary8p8", "not a number"),
        ("mxfp4", "not a number"),
        ("", "not a number"),
        ("float64", "too wide"),
        (None, "not a number"),
        (object(), "not a number"),
        ("e4m3fnu", "not a number"),
    ],
)
def test_codes_that_describe_nothing_raise(code, why):
    with pytest.raises(ValueError, match=why):
        number(code)
    if why in ("not a number", "2 to 32", "outside", "no mantissa"):
        with pytest.raises(ValueError, match="eXmY"):
            number(code)


def test_number_line_of_many_bits_raises():
    with pytest.raises(ValueError, match="16 bits"):
        number("float32").number_line()


def test_codebooks():
    nf4 = codebook("nf4")
    assert (
        nf4.bits == 4
        and nf4.selector_bits == 0
        and nf4.tables[0][7] == 0
        and nf4.max == 1 == -nf4.min
    )
    own = codebook([[-2.0, 0.0, 1.0, 3.0], [-1.0, 0.0, 0.5, 1.0]], name="own")
    assert (own.bits, own.selector_bits, own.maxfloat, own.name) == (2, 1, 3.0, "own")
    tables = np.array(own.tables, np.float32)
    for arrays in (
        tables,
        jnp.asarray(tables),
        list(tables),
        tables.astype(np.float64),
        tables.tolist(),
    ):
        assert codebook(arrays, name="own") == own
    assert (
        codebook(tables[1]) == codebook(list(tables[1])) == codebook(tables[1].tolist())
    )
    shifted = codebook("icb44fi_e3m2fnuz")
    line = set(number("e3m2fnuz").number_line())
    assert (
        all(set(table) <= line and len(table) == 16 for table in shifted.tables)
        and len(shifted.tables) == 32
    )
    # The pattern of e2m1 itself, and of int4, at some shift.
    doubled = tuple(16 / 4 * v for v in (0.5, 1, 1.5, 2, 3, 4, 6))
    assert any(table[9:] == doubled for table in shifted.tables)


@pytest.mark.parametrize(
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
