"""The ends of the range of numbers and scales: only here does a clip in the wrong place show."""

import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax.formats import CATALOG, cast, datatype, pack, unpack


def test_subtiles_below_the_smallest_scale_still_have_their_offset():
    """The tile's scale ends at 2**-3; half of it, by the offset, has steps of 2**-10."""
    made, x = datatype("int8", "e3m0_t16s2o1"), jnp.full(16, 2.0**-10)
    assert (cast(x, made) == x).all() and (unpack(pack(x, made)) == x).all()


@pytest.mark.parametrize(("roundmode", "beyond"), [("zero", 64.0), ("even", np.nan), ("nearest", np.nan)])
def test_exponents_toward_zero_overflow_from_infinity_alone(roundmode, beyond):
    x = jnp.array([64.0, 100.0 if roundmode == "zero" else 64.0, 512.0, np.inf])
    number = datatype("e4m0")
    assert number.number.max == 2.0**7
    got = cast(x, number, roundmode=roundmode, saturate=False)
    np.testing.assert_array_equal(got, [64.0, 64.0, 2.0 * beyond, np.nan])
    np.testing.assert_array_equal(cast(x, number, roundmode=roundmode)[2:], [128.0, 128.0])


@pytest.mark.parametrize("name", ["int8_F", "nf4", "uint8_FF"])
def test_a_tile_of_the_smallest_floats_has_a_scale(name):
    """Their quotient by the largest value is subnormal, and a scale of zero would round them to zero."""
    x = jnp.full(64, 2.0**-125)
    got = cast(x, CATALOG[name])
    assert (got > 0).all() and (unpack(pack(x, CATALOG[name])) == got).all()
