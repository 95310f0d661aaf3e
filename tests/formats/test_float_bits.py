"""Quotients and shifts of float32 bits, compared with float64 over the whole range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax.formats.float_bits import divide, divide_to_odd, scale_down

TINY, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def pairs():
    """Return magnitudes of the whole range, and pairs whose quotients lie at both ends of it."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(1 << 23, 255 << 23, (2, 20_000)).astype(np.int32).view(np.float32)
    near = rng.uniform(0.5, 2, 4_000).astype(np.float32)
    ends = np.float32([2.0**-63, 2.0**63])[:, None] * near
    x = np.concatenate([x, *ends, near * np.float32(2.0**-60)])
    return x, np.concatenate([y, np.float32(2.0**63) / near[::-1], np.float32(2.0**-65) * near[::-1], near * 2**66])


@pytest.mark.parametrize("odd", [False, True], ids=["nearest", "odd"])
def test_quotients_are_rounded_once_and_are_zero_below_the_range(odd):
    x, y = (values.astype(np.float32) for values in pairs())
    exact = x.astype(np.float64) / y  # right to 53 bits, twice the digits of float32 and more
    bits = [jnp.asarray(values.view(np.int32)) for values in (x, y)]
    got = np.asarray(divide_to_odd(*bits, 23) if odd else divide(*bits))
    wanted = np.minimum(exact, LARGEST).astype(np.float32)
    if odd:
        truncated = np.where(wanted > exact, np.nextafter(wanted, np.float32(0)), wanted)
        inexact = truncated.astype(np.float64) != exact
        wanted = (truncated.view(np.int32) | (inexact & (exact < LARGEST))).view(np.float32)
    wanted = np.where(exact < TINY, np.float32(0), wanted)
    assert (wanted == 0).any() and (wanted == LARGEST).any()
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("exponent", [-149, -127, -126, -1, 0, 1, 126, 127])
def test_a_power_of_two_is_divided_by_exactly_or_to_an_end_of_the_range(exponent):
    """Compare bits, because a CPU compares subnormals as zero."""
    powers = np.ldexp(np.float64(1), np.arange(-149, 128)).astype(np.float32)
    exact = np.ldexp(powers.astype(np.float64), -exponent)
    got = jax.jit(scale_down)(jnp.asarray(powers.view(np.int32)), jnp.int32(exponent))
    wanted = np.where(exact < TINY, 0, np.minimum(exact, LARGEST)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), wanted.view(np.int32))
