"""NVFP4 as codes: arrays hold the cast, for every rule, rounding and tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import counter
from pallas_kernels.fp4 import E2M1
from tcfp_jax import formats
from tcfp_jax.formats import quantize_nvfp4
from tcfp_jax.formats.float_bits import from_bits, to_bits
from tcfp_jax.formats.quantization import assemble, quantize
from tcfp_jax.formats.rounding import Modes
from tests.formats.test_nvfp4_numbers import SIGNS, awkward
from tests.formats_oracles import QUICK, same
from tests.helpers import parametrize, refused, slow_except

KEY = counter.keys(7)
# The rule, the tile, the shape, and other options.
CASES = {
    "amax": ("amax", "vector", (64, 64), {}),
    "short tiles": ("four_over_six", "vector", (64, 50), {}),
    "squares": ("four_over_six", "square", (40, 68), {}),
    "an amax": ("four_over_six", "vector", (64, 64), {"amax": 3.0}),
    "random bits": ("fold_exact", "vector", (64, 64), {"key": KEY}),
    "rotated": ("amax", "vector", (64, 64), {"signs": SIGNS, "key": KEY}),
}


def cast(x, rule, tile, amax=None, signs=None, key=None):
    """The values of the definition, which packs nothing."""
    if signs is not None:
        x = formats.rotate(x, 16, signs=signs)
    top = None if amax is None else to_bits(jnp.float32(amax))
    random = None if key is None else counter.bits_of(x.shape, *key)
    datatype = formats.nvfp4 if tile == "vector" else formats.nvfp4s
    scalemode = "max" if rule == "amax" else rule
    modes = Modes("even" if key is None else "stochastic", scalemode)
    parts = quantize(to_bits(x), datatype, modes, random, top)
    return from_bits(assemble(parts, datatype, x.shape))


@slow_except("squares", "rotated")
@parametrize("name", CASES)
def test_arrays_hold_the_cast(name):
    rule, tile, shape, options = CASES[name]

    def both(x):
        made = quantize_nvfp4(x, rule=rule, tile=tile, **options)
        return made, cast(x, rule, tile, **options)

    made, expected = jax.jit(both, compiler_options=QUICK)(awkward("float32", shape))
    rows, columns = shape
    scales = np.asarray(made.scales).astype(np.float32)
    assert scales.shape == (
        -(-rows // 16) if tile == "square" else rows,
        -(-columns // 16),
    )
    if tile == "square":
        scales = scales.repeat(16, 0)[:rows]
    scales = scales.repeat(16, 1)[:, :columns]
    codes = np.asarray(made.codes)
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(shape)]
    assert same(values * (scales * np.asarray(made.outer)), expected)
    assert not values[np.isnan(scales)].any()


def test_an_amax_that_is_not_finite_is_loud():
    x = awkward("float32")
    drawn = jax.jit(functools.partial(quantize_nvfp4, key=KEY), compiler_options=QUICK)
    assert jnp.isnan(drawn(x, amax=jnp.inf).outer)


def test_random_bits_are_of_the_key():
    x = awkward("float32")
    drawn = jax.jit(quantize_nvfp4, compiler_options=QUICK)
    first, second = (drawn(x, key=counter.keys(seed)).codes for seed in (1, 2))
    assert (first != second).mean() > 0.05


REFUSED = [
    ({"x": jnp.zeros((2, 32), jnp.int32)}, TypeError, "real floats"),
    ({"x": jnp.zeros((2, 31))}, ValueError, "pairs"),
    ({"rule": "max"}, ValueError, "rule='max' is unknown"),
    ({"tile": "row"}, ValueError, "tile='row'"),
    ({"tile": "square", "signs": SIGNS}, ValueError, "drop signs="),
    ({"x": jnp.zeros((2, 24)), "signs": SIGNS}, ValueError, "drop signs="),
    ({"x": jnp.zeros((16, 6))}, ValueError, "smaller than one tile of 16"),
    ({"x": jnp.zeros(16), "tile": "square"}, ValueError, "smaller than one tile of 16"),
    ({"amax": jnp.ones(2)}, ValueError, r"amax has shape \[2\]"),
    ({"amax": -1.0}, ValueError, "amax=-1.0 is negative"),
    ({"key": jax.random.key(0)}, TypeError, "not two words"),
]


@parametrize(("change", "error", "why"), REFUSED)
def test_bad_input_raises(change, error, why):
    with refused(why, error):
        quantize_nvfp4(**({"x": jnp.zeros((16, 32))} | change))
