"""Casts compared with other libraries where these are exact: gfloat, and torch if it is
installed.
"""

import functools
import inspect
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tcfp_jax import formats
from tcfp_jax.formats import cast, datatype, number
from tests.formats_oracles import EVERY_BFLOAT16, awkward_inputs, quick, same

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


@pytest.fixture(scope="module")
def gfloat():
    pytest.importorskip("gfloat.formats", reason="gfloat is not installed")
    return sys.modules["gfloat"]


@pytest.mark.parametrize("roundmode", ROUND)
@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat_rounds_the_same(gfloat, name, roundmode):
    line = np.array(number(name).number_line())
    x = np.concatenate([FINITE, ((line[1:] + line[:-1]) / 2).astype(np.float32)])
    mode = getattr(gfloat.RoundMode, ROUND[roundmode])
    expected = gfloat.round_ndarray(
        getattr(gfloat.formats, GFLOAT[name]), x.astype(np.float64), mode, sat=True
    )
    assert np.array_equal(
        np.asarray(quick(jnp.asarray(x), datatype(name), roundmode=roundmode)), expected
    )


@pytest.mark.parametrize("roundmode", ROUND)
@pytest.mark.parametrize("precision", range(1, 8))
def test_gfloat_rounds_to_p3109_the_same(gfloat, precision, roundmode):
    """They agree, except with one bit of precision: a later draft moved its bias, and
    its ties go to the even code.
    """
    info = getattr(gfloat.formats, "format_info_p3109", None)
    if info is None or "k" not in inspect.signature(info).parameters:
        pytest.skip("this gfloat has an older draft of P3109")
    ours, theirs = number(f"binary8p{precision}"), info(8, precision)
    assert ours.bias == (63 if precision == 1 else theirs.bias)
    line = np.array(ours.number_line())
    x = np.concatenate([FINITE, ((line[1:] + line[:-1]) / 2).astype(np.float32)])
    if precision == 1:  # values of both, without ties
        away = (np.abs(np.frexp(x)[0]) != 0.75) if roundmode != "zero" else True
        x = x[(np.abs(x) < theirs.max) & (np.abs(x) >= ours.smallest_subnormal) & away]
    mode = getattr(gfloat.RoundMode, ROUND[roundmode])
    expected = gfloat.round_ndarray(theirs, x.astype(np.float64), mode, sat=True)
    assert np.array_equal(
        np.asarray(quick(jnp.asarray(x), datatype(ours.name), roundmode=roundmode)),
        expected,
    )


@pytest.mark.parametrize(
    "name", ["mxfp8e5", "mxfp8e4", "mxfp6e3", "mxfp6e2", "mxfp4e2"]
)
def test_gfloat_quantizes_blocks_the_same(gfloat, name):
    """They agree, except for gfloat's log2 in floats, NaN, and E8M0 below its smallest
    value.
    """
    made = getattr(formats, name)
    code = made.number.name.removesuffix("fn").removesuffix("f")
    info = getattr(gfloat.formats, f"format_info_mxfp{made.number.bits}_{code}")
    quantize = lambda block: gfloat.quantize_block(
        info, block.astype(np.float64), gfloat.compute_scale_amax
    )
    random = np.random.default_rng(0)
    x = (
        random.standard_normal((12, 32)) * 2.0 ** random.integers(-60, 60, (12, 1))
    ).astype(np.float32)
    x[0] = 0
    assert np.array_equal(
        np.stack([quantize(block) for block in x]), cast(jnp.asarray(x), made)
    )
    edge = np.full((1, 32), np.nextafter(np.float64(8), 0))
    assert (
        quantize(edge[0])[0] == 8
        and float(cast(jnp.full((1, 32), np.nextafter(np.float32(8), 0)), made)[0, 0])
        < 8
    )
    assert gfloat.round_float(gfloat.formats.format_info_ocp_e8m0, 0.0) == 0
    assert (
        gfloat.round_float(gfloat.formats.format_info_ocp_e8m0, 1.25 * 2.0**-127)
        == 2.0**-127
    )
    x[1, 0] = np.nan
    ours = np.asarray(cast(jnp.asarray(x), made))[1]
    if made.number.has_nan:
        assert np.isnan(quantize(x[1])).all() and np.isnan(ours).sum() == 1
    else:
        assert np.isnan(ours).all()
        with pytest.raises(ValueError, match="No NaN"):
            quantize(x[1])


NO_TORCH = "torch is not installed; the GPU machine has it"


@pytest.mark.parametrize(
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
    ours = np.asarray(cast(jnp.asarray(x), datatype(name), saturate=False))
    if name == "float8_e4m3fn":  # some versions of torch saturate, others have NaN
        beyond = np.abs(x) > 464
        assert (
            np.all(np.isnan(theirs[beyond]) | (np.abs(theirs[beyond]) == 448))
            and np.isnan(ours[beyond]).all()
        )
        theirs, ours, x = theirs[~beyond], ours[~beyond], x[~beyond]
    # Drops the sign, 2**-127 for zero, and rounds up between its two smallest values
    if name == "float8_e8m0fnu":
        between = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
        assert np.all(theirs[between] == 2.0**-126) and np.all(
            ours[between] == 2.0**-127
        )
        assert np.isnan(ours[x <= 0]).all() and np.all(theirs[x == 0] == 2.0**-127)
        negative = np.isfinite(x) & (x < 0)
        turned = torch.from_numpy(-x[negative]).to(torch.float8_e8m0fnu).float().numpy()
        assert same(theirs[negative], turned)
        keep = (x > 0) & ~between
        theirs, ours = theirs[keep], ours[keep]
    assert same(ours, theirs)


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


@pytest.mark.parametrize(
    "name", ["mxfp8e5", "mxfp8e4", "mxfp6e3", "mxfp6e2", "mxfp4e2"]
)
def test_microxcalings_operations_give_the_same(name):
    """Its operations in eager torch agree, except for its log2 in float32 and its
    treatment of inf.
    """
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    made = getattr(formats, name)
    number = made.number
    eager = functools.partial(
        cast_mx,
        ebits=number.ebits,
        mbits=number.mbits,
        emax=number.emax,
        largest=number.max,
    )
    # Values of bfloat16 above its subnormals, never -0.
    random = np.random.default_rng(0)
    x = random.standard_normal((4096, 32)) * 2.0 ** random.integers(-60, 60, (4096, 1))
    x = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32) + 0
    x[0] = 0
    assert same(
        eager(torch.from_numpy(x)).numpy(),
        cast(jnp.asarray(x), made, roundmode="nearest"),
    )
    # Just below a power of two float32's log2 is the power itself, and the scale is
    # twice ours.
    edge = np.full((1, 32), np.nextafter(np.float32(8), np.float32(0)), np.float32)
    assert np.all(eager(torch.from_numpy(edge)).numpy() == 8) and np.all(
        cast(jnp.asarray(edge), made) < 8
    )
    infinite = np.ones((1, 32), np.float32)
    infinite[0, 0] = np.inf
    assert np.isnan(eager(torch.from_numpy(infinite)).numpy()).all()
    assert np.isfinite(cast(jnp.asarray(infinite), made)).all()
