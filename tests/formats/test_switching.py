"""The table of docs/migrate.md: calls of microxcaling and TensorCast, and ours with the
same values by gfloat.
"""

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax import formats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrate.md").read_text()
X = (
    np.random.default_rng(0).standard_normal((64, 96))
    * 2.0 ** np.arange(-32, 32)[:, None]
).astype(np.float32)
# Rows of the table by our call: gfloat's format of a value, its rounding, and the axis
# of blocks of 32.
ROWS = {
    'cast(x, "mxfp8e4")': ("mxfp8_e4m3", "TiesToEven", -1),
    'cast(x, "mxfp8e5")': ("mxfp8_e5m2", "TiesToEven", -1),
    'cast(x, "mxfp6e3")': ("mxfp6_e3m2", "TiesToEven", -1),
    'cast(x, "mxfp6e2")': ("mxfp6_e2m3", "TiesToEven", -1),
    'cast(x, "mxfp4e2", roundmode="nearest")': ("mxfp4_e2m1", "TiesToAway", -1),
    'cast(x, "mxfp4e2", roundmode="zero")': ("mxfp4_e2m1", "TowardZero", -1),
    'cast(x, "mxfp4e2", axis=0)': ("mxfp4_e2m1", "TiesToEven", 0),
    'cast(x, "e4m3fn")': ("ocp_e4m3", "TiesToEven", None),
}


def test_the_table_and_its_tests_have_the_same_rows():
    assert set(re.findall(r"`(cast\(.*?\))` \|$", PAGE, re.MULTILINE)) == set(ROWS)


@pytest.mark.parametrize("call", ROWS)
def test_rows_of_the_table(call):
    gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
    from gfloat import formats as infos

    name, rounding, axis = ROWS[call]
    info, mode = (
        getattr(infos, f"format_info_{name}"),
        getattr(gfloat.RoundMode, rounding),
    )
    ours = np.asarray(eval(call, {"cast": formats.cast, "x": jnp.asarray(X)}))
    if axis is None:
        expected = gfloat.round_ndarray(info, X.astype(np.float64), mode, sat=True)
    else:
        block = lambda values: gfloat.quantize_block(
            info, values.astype(np.float64), gfloat.compute_scale_amax, mode
        )
        tiles = np.moveaxis(X, axis, -1)
        rows = np.stack([block(values) for values in tiles.reshape(-1, 32)])
        expected = np.moveaxis(rows.reshape(tiles.shape), -1, axis)
    assert np.array_equal(ours, expected)


def test_names_and_axes():
    x = jnp.asarray(X)
    assert np.array_equal(formats.cast(x, "nvfp4"), formats.cast(x, formats.nvfp4))
    assert np.array_equal(
        formats.unpack(formats.pack(x, "mxfp4e2")), formats.cast(x, "mxfp4e2")
    )
    cube = x.reshape(64, 4, 24)
    assert np.array_equal(
        formats.cast(cube, "mxfp8", axis=-3),
        jnp.moveaxis(formats.cast(jnp.moveaxis(cube, 0, -1), "mxfp8"), -1, 0),
    )
    with pytest.raises(
        ValueError, match=r"no datatype 'mxfp4e3'; did you mean one of .*'mxfp4e2'"
    ):
        formats.cast(x, "mxfp4e3")
    with pytest.raises(ValueError, match=r"axis=2 is not an axis"):
        formats.cast(x, "mxfp4e2", axis=2)
    with pytest.raises(
        ValueError, match=r"scalemode='floor' is unknown; .* is \"max\""
    ):
        formats.cast(x, "mxfp4e2", scalemode="floor")


def test_formats_need_no_flax_and_no_optax():
    script = (
        "import sys\n"
        "sys.modules.update(flax=None, optax=None)\n"  # importing one of them raises
        "import jax.numpy as jnp\n"
        "from tcfp_jax import formats\n"
        "x = jnp.ones((2, 32))\n"
        "assert (formats.unpack(formats.pack(x, 'mxfp4e2')) == formats.cast(x,"
        " 'mxfp4e2')).all()\n"
        "formats.quantize_nvfp4(x)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
