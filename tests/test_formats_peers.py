"""Casts against other libraries, where they are exact: gfloat, and torch where it is installed."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tcfp_jax import formats
from tcfp_jax.formats import cast, datatype, number

EVERY_BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
GFLOAT = {
    "float8_e4m3fn": "format_info_ocp_e4m3", "float8_e5m2": "format_info_ocp_e5m2",
    "float6_e2m3fn": "format_info_ocp_e2m3",
    "float6_e3m2fn": "format_info_ocp_e3m2", "float4_e2m1fn": "format_info_ocp_e2m1", "float16": "format_info_binary16",
}  # fmt: skip
ROUND = {"even": "TiesToEven", "nearest": "TiesToAway", "zero": "TowardZero"}


@pytest.mark.parametrize("roundmode", ROUND)
@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat_rounds_the_same(name, roundmode):
    gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
    from gfloat import formats as infos

    line = np.array(number(name).number_line())
    x = np.concatenate([EVERY_BFLOAT16[np.isfinite(EVERY_BFLOAT16)], ((line[1:] + line[:-1]) / 2).astype(np.float32)])
    mode = getattr(gfloat.RoundMode, ROUND[roundmode])
    expected = gfloat.round_ndarray(getattr(infos, GFLOAT[name]), x.astype(np.float64), mode, sat=True)
    assert np.array_equal(np.asarray(cast(jnp.asarray(x), datatype(name), roundmode=roundmode)), expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_torch_casts_the_same(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    # torch saturates none of them; compare the native mode.
    expected = torch.from_numpy(EVERY_BFLOAT16.copy()).to(getattr(torch, name)).float().numpy()
    got = np.asarray(cast(jnp.asarray(EVERY_BFLOAT16), getattr(formats, name), saturate=False))
    inside = np.abs(EVERY_BFLOAT16) <= formats.number(name).midmax
    assert np.array_equal(got[inside], expected[inside])
