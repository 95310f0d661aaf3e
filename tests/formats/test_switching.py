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
from tests.helpers import parametrize, refused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrate.md").read_text()
BINADES = 2.0 ** np.arange(-32, 32)[:, None]
X = np.random.default_rng(0).standard_normal((64, 96)) * BINADES
X = X.astype(np.float32)
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


@parametrize("call", ROWS)
def test_rows_of_the_table(call):
    gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
    from gfloat import formats as infos

    name, rounding, axis = ROWS[call]
    info = getattr(infos, f"format_info_{name}")
    mode = getattr(gfloat.RoundMode, rounding)
    ours = np.asarray(eval(call, {"cast": formats.cast, "x": jnp.asarray(X)}))
    exact = X.astype(np.float64)
    if axis is None:
        assert np.array_equal(ours, gfloat.round_ndarray(info, exact, mode, sat=True))
        return
    tiles = np.moveaxis(exact, axis, -1)
    rows = [
        gfloat.quantize_block(info, block, gfloat.compute_scale_amax, mode)
        for block in tiles.reshape(-1, 32)
    ]
    expected = np.reshape(rows, tiles.shape)
    assert np.array_equal(ours, np.moveaxis(expected, -1, axis))


def test_names_and_axes():
    x = jnp.asarray(X)
    small = formats.cast(x, "mxfp4e2")
    assert np.array_equal(formats.cast(x, "nvfp4"), formats.cast(x, formats.nvfp4))
    assert np.array_equal(formats.unpack(formats.pack(x, "mxfp4e2")), small)
    cube = x.reshape(64, 4, 24)
    moved = formats.cast(jnp.moveaxis(cube, 0, -1), "mxfp8")
    first = formats.cast(cube, "mxfp8", axis=-3)
    assert np.array_equal(first, jnp.moveaxis(moved, -1, 0))


@parametrize(
    "datatype, options, match",
    [
        ("mxfp4e3", {}, r"no datatype 'mxfp4e3'; did you mean one of .*'mxfp4e2'"),
        ("mxfp4e2", dict(axis=2), "axis=2 is not an axis"),
        ("mxfp4e2", dict(scalemode="floor"), r"'floor' is unknown; .* is \"max\""),
    ],
)
def test_errors_name_the_repair(datatype, options, match):
    with refused(match):
        formats.cast(X, datatype, **options)


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
