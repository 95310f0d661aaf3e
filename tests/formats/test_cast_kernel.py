"""The one-pass cast has the bits of the definition: in Pallas's interpreter here, on a
GPU with `-m gpu`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import plan
from pallas_kernels.triton_passes import TRITON
from tcfp_jax import formats
from tcfp_jax.formats import CATALOG, cast, cast_kernel, datatype
from tcfp_jax.formats.cast_kernel import Cast, _CastBody, cast_tiles
from tcfp_jax.formats.rounding import Modes
from tests.formats_oracles import same
from tests.helpers import parametrize, slow_except

SERVED = (
    "mxfp8e4",
    "mxfp8e5",
    "mxfp6e3",
    "mxfp6e2",
    "mxfp4e2",
    "mxint8",
    "mxint4",
    "bfp16",
    "e1m6b1_e32",
)
BFLOAT16 = jnp.dtype("bfloat16")
LONG = {
    name
    for name, made in CATALOG.items()
    if made.scale and any(tile.size > 64 for tile in made.scale.tiles)
}


def awkward(exponents, dtype):
    """Rows of many magnitudes, with zeros, NaN, infinities and the largest values."""
    random = np.random.default_rng(0)
    normal = random.standard_normal((128, 64))
    with np.errstate(over="ignore"):
        x = np.ldexp(normal, random.integers(*exponents, (128, 1))).astype(np.float32)
    x[0] = 0.0
    x[1] = -0.0
    x[2, 3] = np.nan
    x[3, 5] = np.inf
    x[4, 0] = -np.inf
    x[5, ::3] = 0.0
    x[6, 0] = np.finfo(np.float32).max
    x[7] = 2.0**127
    return jnp.asarray(x).astype(dtype)


@slow_except("mxint4", "e1m6b1_e32")
@parametrize("name", SERVED[::2])
def test_blocks_are_the_definition(name):
    i = SERVED.index(name)
    x = awkward((-60, 60), ("float32", "bfloat16")[i % 4 // 2])
    made = getattr(formats, name)
    scalemode = ("max", "ceil", "midmax")[i % 3]
    options = Cast(made, Modes(scalemode=scalemode))
    expected = cast(x, made, scalemode=scalemode)
    assert cast_kernel.reject(options, x, None) is None
    tiles = x.reshape(-1, made.scale.tiles[0].size)
    (got,) = jax.jit(_CastBody(made, scalemode).whole)([tiles])
    assert same(got.reshape(x.shape), expected)
    if plan.reject(x.dtype) is None:  # Mosaic's interpreter needs a new jax
        assert same(cast_tiles(cast_kernel.MOSAIC, options, x), expected)


def test_the_kernel_runs_blocks_and_maps():
    x = awkward((-60, 60), "bfloat16")
    made = formats.mxfp8e4
    expected = cast(x, made)
    call = partial(cast_tiles, TRITON, Cast(made, Modes()))
    assert same(call(x), expected)
    mapped = jax.vmap(call, in_axes=1, out_axes=1)
    assert same(mapped(x.reshape(8, 16, 64)), expected.reshape(8, 16, 64))


def reason(shape, dtype, made, modes):
    x = jax.ShapeDtypeStruct(shape, dtype)
    return cast_kernel.reject(Cast(made, modes), x, None)


@parametrize(
    "change",
    [
        {"dtype": jnp.dtype("float16")},
        {"shape": (8, 60)},
        {"shape": (1, 32)},
        {"shape": ()},
        {"modes": Modes("stochastic")},
        {"modes": Modes("zero")},
        {"modes": Modes(saturate=False)},
        *({"made": CATALOG[name]} for name in ("nvfp4", "mx6", "tcfp12", "e4m3fn")),
        *({"made": CATALOG[name]} for name in ("icb44fi4_e32", "mxfp4s", "int8_e")),
        {"made": datatype("e4m3fn", "e8m0_t32d0")},
        {"made": datatype("e5m10", "e8m0_t32")},
        {"made": datatype("e2m9f", "e8m0_t32")},
        {"made": datatype("e2m1f", "e8m0_t0")},
    ],
)
def test_no_kernel_takes_other_casts(change):
    usual = dict(shape=(8, 64), dtype=BFLOAT16, made=formats.mxfp8e4, modes=Modes())
    assert reason(**usual) is None
    assert reason(**usual | change)


NAMES = sorted({made: name for name, made in CATALOG.items()}.values())


@pytest.mark.gpu
@parametrize(
    "name, dtype",
    [(name, "bfloat16") for name in NAMES]
    + [(name, "float32") for name in (*SERVED, "nvfp4")],
)
def test_a_gpu_casts_as_a_cpu(name, dtype):
    """Every datatype of the catalog, with subnormals, NaN and infinities."""
    made = CATALOG[name]
    cpu = jax.devices("cpu")[0]
    x = awkward((-149, 127), dtype)
    if name in LONG:
        x = x.reshape(64, 128)
    with jax.default_device(cpu):
        expected = cast(jax.device_put(x, cpu), made)
    assert same(cast(x, made), expected)
