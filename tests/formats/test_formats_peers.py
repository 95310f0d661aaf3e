"""Casts compared with other libraries where these are exact: gfloat, and torch if it is
installed.
"""

import inspect
import sys

import ml_dtypes
import numpy as np
import pytest

from tcfp_jax import formats
from tcfp_jax.formats import cast, datatype, number
from tests.formats_oracles import EVERY_BFLOAT16, awkward_inputs, quick, same
from tests.helpers import parametrize, refused

WIDE = EVERY_BFLOAT16.astype(np.float32)
FINITE = WIDE[np.isfinite(WIDE)]
GFLOAT = {
    "float8_e4m3fn": "format_info_ocp_e4m3",
    "float8_e5m2": "format_info_ocp_e5m2",
    "float6_e2m3fn": "format_info_ocp_e2m3",
    "float6_e3m2fn": "format_info_ocp_e3m2",
    "float4_e2m1fn": "format_info_ocp_e2m1",
    "float16": "format_info_binary16",
}
ROUND = {"even": "TiesToEven", "nearest": "TiesToAway", "zero": "TowardZero"}
MX = ("mxfp8e5", "mxfp8e4", "mxfp6e3", "mxfp6e2", "mxfp4e2")
# Float32's log2 of the value just below 8 is 3 itself.
BELOW_EIGHT = np.nextafter(np.float32(8), np.float32(0))


@pytest.fixture(scope="module")
def gfloat():
    pytest.importorskip("gfloat.formats", reason="gfloat is not installed")
    return sys.modules["gfloat"]


def with_midpoints(spec):
    """All finite bfloat16, and the values halfway between those of a number."""
    line = np.array(spec.number_line())
    return np.concatenate([FINITE, ((line[1:] + line[:-1]) / 2).astype(np.float32)])


def rows_of_binades(rows):
    """Normal values with a binade of its own for each row, and a row of zeros."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, 32))
    x = x * 2.0 ** random.integers(-60, 60, (rows, 1))
    x[0] = 0
    return x.astype(np.float32)


def assert_gfloat_agrees(gfloat, info, x, code, roundmode):
    mode = getattr(gfloat.RoundMode, ROUND[roundmode])
    expected = gfloat.round_ndarray(info, x.astype(np.float64), mode, sat=True)
    ours = quick(x, datatype(code), roundmode=roundmode)
    assert np.array_equal(ours, expected)


@parametrize("roundmode", ROUND)
@parametrize("name", GFLOAT)
def test_gfloat_rounds_the_same(gfloat, name, roundmode):
    info = getattr(gfloat.formats, GFLOAT[name])
    assert_gfloat_agrees(gfloat, info, with_midpoints(number(name)), name, roundmode)


@parametrize("roundmode", ROUND)
@parametrize("precision", range(1, 8))
def test_gfloat_rounds_to_p3109_the_same(gfloat, precision, roundmode):
    """They agree, except with one bit of precision: a later draft moved its bias, and
    its ties go to the even code.
    """
    info = getattr(gfloat.formats, "format_info_p3109", None)
    if info is None or "k" not in inspect.signature(info).parameters:
        pytest.skip("this gfloat has an older draft of P3109")
    ours = number(f"binary8p{precision}")
    theirs = info(8, precision)
    assert ours.bias == (63 if precision == 1 else theirs.bias)
    x = with_midpoints(ours)
    if precision == 1:  # values of both, without ties
        x = x[(np.abs(x) < theirs.max) & (np.abs(x) >= ours.smallest_subnormal)]
        if roundmode != "zero":
            x = x[np.abs(np.frexp(x)[0]) != 0.75]
    assert_gfloat_agrees(gfloat, theirs, x, ours.name, roundmode)


@parametrize("name", MX)
def test_gfloat_quantizes_blocks_the_same(gfloat, name):
    """They agree, except for gfloat's log2 in floats, NaN, and E8M0 below its smallest
    value.
    """
    made = getattr(formats, name)
    code = made.number.name.removesuffix("fn").removesuffix("f")
    info = getattr(gfloat.formats, f"format_info_mxfp{made.number.bits}_{code}")

    def quantize(block):
        block = block.astype(np.float64)
        return gfloat.quantize_block(info, block, gfloat.compute_scale_amax)

    x = rows_of_binades(12)
    assert np.array_equal([quantize(block) for block in x], cast(x, made))
    assert quantize(np.full(32, np.nextafter(8.0, 0)))[0] == 8
    assert float(cast(np.full((1, 32), BELOW_EIGHT), made)[0, 0]) < 8
    e8m0 = gfloat.formats.format_info_ocp_e8m0
    assert gfloat.round_float(e8m0, 0.0) == 0
    assert gfloat.round_float(e8m0, 1.25 * 2.0**-127) == 2.0**-127
    x[1, 0] = np.nan
    ours = np.asarray(cast(x, made))[1]
    if made.number.has_nan:
        assert np.isnan(quantize(x[1])).all()
        assert np.isnan(ours).sum() == 1
    else:
        assert np.isnan(ours).all()
        with refused("No NaN"):
            quantize(x[1])


NO_TORCH = "torch is not installed; the GPU machine has it"


@parametrize(
    "name",
    [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_torch_casts_the_same(name):
    """Torch's conversions on the CPU have the same bits, except for the cases of
    docs/formats.md, named here.
    """
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    x = awkward_inputs(name)
    theirs = torch.from_numpy(x.copy()).to(getattr(torch, name)).float().numpy()
    ours = np.asarray(cast(x, datatype(name), saturate=False))
    keep = np.ones_like(x, bool)
    if name == "float8_e4m3fn":  # some versions of torch saturate, others have NaN
        keep = np.abs(x) <= 464
        beyond = theirs[~keep]
        assert np.all(np.isnan(beyond) | (np.abs(beyond) == 448))
        assert np.isnan(ours[~keep]).all()
    # Drops the sign, 2**-127 for zero, and rounds up between its two smallest values
    if name == "float8_e8m0fnu":
        between = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
        assert np.all(theirs[between] == 2.0**-126)
        assert np.all(ours[between] == 2.0**-127)
        assert np.isnan(ours[x <= 0]).all()
        assert np.all(theirs[x == 0] == 2.0**-127)
        negative = np.isfinite(x) & (x < 0)
        turned = torch.from_numpy(-x[negative]).to(torch.float8_e8m0fnu).float().numpy()
        assert same(theirs[negative], turned)
        keep = (x > 0) & ~between
    assert same(ours[keep], theirs[keep])


def cast_mx(x, *, ebits, mbits, emax, largest, block=32):
    """Run the operations of Microsoft's microxcaling in their order (`_quantize_mx`,
    `custom_cuda=False`).
    """
    import torch

    tiles = x.view(*x.shape[:-1], x.shape[-1] // block, block)
    shared = torch.max(torch.abs(tiles), dim=-1, keepdim=True).values
    shared = (
        torch.floor(torch.log2(shared + 2.0**-126 * (shared == 0).type(x.dtype))) - emax
    )
    shared[shared > 127] = float("nan")
    shared[shared < -127] = -127
    scaled = tiles / (2**shared)
    values = cast_values(torch, scaled, ebits=ebits, mbits=mbits, largest=largest)
    return (values * (2**shared)).view(x.shape)


def cast_values(torch, x, *, ebits, mbits, largest):
    private = torch.floor(torch.log2(torch.abs(x) + (x == 0).type(x.dtype)))
    private = private.clip(min=2 - 2 ** (ebits - 1))
    out = x / (2**private) * (2**mbits)
    out = torch.sign(out) * torch.floor(torch.abs(out) + 0.5)
    out = out / (2**mbits) * (2**private)
    out = torch.clamp(out, min=-largest, max=largest)
    for special in (float("inf"), -float("inf"), float("nan")):
        out[x == special] = special
    return out


@parametrize("name", MX)
def test_microxcalings_operations_give_the_same(name):
    """Its operations in eager torch agree, except for its log2 in float32 and its
    treatment of inf.
    """
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    made = getattr(formats, name)
    number = made.number

    def eager(x):
        return cast_mx(
            torch.from_numpy(x),
            ebits=number.ebits,
            mbits=number.mbits,
            emax=number.emax,
            largest=number.max,
        ).numpy()

    # Values of bfloat16 above its subnormals, never -0.
    x = rows_of_binades(4096).astype(ml_dtypes.bfloat16).astype(np.float32) + 0
    assert same(eager(x), cast(x, made, roundmode="nearest"))
    # Just below a power of two the scale is twice ours.
    edge = np.full((1, 32), BELOW_EIGHT)
    assert np.all(eager(edge) == 8)
    assert np.all(cast(edge, made) < 8)
    infinite = np.ones((1, 32), np.float32)
    infinite[0, 0] = np.inf
    assert np.isnan(eager(infinite)).all()
    assert np.isfinite(cast(infinite, made)).all()
