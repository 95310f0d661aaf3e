"""Float32 arithmetic and casts at the ends of their ranges, and stochastic rounding for
every draw.

Quotients and shifts of float32 bits are compared with float64. The ends show a clip in
the wrong place, and counts of all draws show an error that the mean of random draws
hides.
"""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal

from tcfp_jax.formats import CATALOG, cast, codebook, datatype, pack, unpack
from tcfp_jax.formats.codebooks import search
from tcfp_jax.formats.float_bits import (
    Grid,
    divide,
    divide_to_odd,
    round_bits,
    round_to_grid,
    scale_down,
)
from tests.helpers import parametrize

TINY = np.finfo(np.float32).tiny
LARGEST = np.finfo(np.float32).max


def pairs():
    """Return magnitudes of the whole range, and pairs whose quotients lie at both ends
    of it.
    """
    rng = np.random.default_rng(0)
    bits = rng.integers(1 << 23, 255 << 23, (2, 20_000)).astype(np.int32)
    near = rng.uniform(0.5, 2, 4_000).astype(np.float32)
    x, y = bits.view(np.float32)
    x = np.concatenate([x, near * 2.0**-63, near * 2.0**63, near * 2.0**-60])
    ends = [2.0**63 / near[::-1], 2.0**-65 * near[::-1], near * 2.0**66]
    return x.astype(np.float32), np.concatenate([y, *ends]).astype(np.float32)


def assert_same_bits(got, wanted):
    """Compare bits, because a CPU compares subnormals as zero."""
    assert_array_equal(np.asarray(got).view(np.int32), wanted.view(np.int32))


@parametrize("odd", [False, True], ids=["nearest", "odd"])
def test_quotients_are_rounded_once_and_are_zero_below_the_range(odd):
    x, y = pairs()
    # Right to 53 bits, twice the digits of float32 and more
    exact = x.astype(np.float64) / y
    bits = [jnp.asarray(values.view(np.int32)) for values in (x, y)]
    got = divide_to_odd(*bits, 23) if odd else divide(*bits)
    wanted = np.minimum(exact, LARGEST).astype(np.float32)
    if odd:
        below = np.nextafter(wanted, np.float32(0))
        truncated = np.where(wanted > exact, below, wanted)
        inexact = (truncated != exact) & (exact < LARGEST)
        wanted = (truncated.view(np.int32) | inexact).view(np.float32)
    wanted = np.where(exact < TINY, np.float32(0), wanted)
    assert (wanted == 0).any()
    assert (wanted == LARGEST).any()
    assert_same_bits(got, wanted)


@parametrize("exponent", [-149, -127, -126, -1, 0, 1, 126, 127])
def test_powers_of_two_divide_exactly_or_to_an_end(exponent):
    powers = np.ldexp(1.0, np.arange(-149, 128))
    exact = np.ldexp(powers, -exponent)
    bits = jnp.asarray(powers.astype(np.float32).view(np.int32))
    got = jax.jit(scale_down)(bits, jnp.int32(exponent))
    wanted = np.where(exact < TINY, 0, np.minimum(exact, LARGEST)).astype(np.float32)
    assert_same_bits(got, wanted)


@parametrize("mbits", [7, 19, 22])
@parametrize("part", [0, 1, 0.5, -1])
def test_as_many_draws_go_up_as_the_rest_says(mbits, part):
    """Exact values never change; of all draws of the dropped bits, `rest` round up."""
    drop = 23 - mbits
    rest = int(part * 2**drop) if part == 0.5 else part % 2**drop
    draws = jnp.arange(2**drop, dtype=jnp.uint32) << (32 - drop)
    lower = 0x3F800000
    magnitudes = jnp.full(draws.shape, lower + rest, jnp.int32)
    got = np.asarray(round_bits(magnitudes, mbits, "stochastic", draws))
    assert set(got) <= {lower, lower + 2**drop}
    assert np.count_nonzero(got > lower) == rest


@parametrize(
    "value, step",
    [(0.0, 0.5), (0.125, 0.5), (0.5, 0.5), (1.0, 0.5), (1.25, 0.5)]
    + [(2.75, 1.0), (3.0, 1.0), (5.5, 2.0)],
)
def test_the_draw_below_the_fraction_is_the_last_that_goes_up(value, step):
    lower = np.floor(value / step) * step
    count = int((value - lower) / step * 2**24)
    draws = jnp.array([0, max(count - 1, 0), count, 2**24 - 1], jnp.uint32) << 8
    values = jnp.full(4, value, jnp.float32)
    got = round_to_grid(values, Grid(0, 1, 6.0), "stochastic", draws)
    up = np.array([count > 0, count > 0, False, False])
    assert_array_equal(got, lower + up * step)


def test_entries_of_a_codebook_stay_whatever_is_drawn():
    book = codebook([-1.0, -0.25, 0.5, 1.0])
    draws = jnp.array([[0], [2**31], [2**32 - 1]], jnp.uint32)
    index, _ = search(jnp.float32(book.tables[0]), book, (), "stochastic", draws)
    assert_array_equal(index, np.broadcast_to(np.arange(4), (3, 4)))


def test_of_tables_that_fit_equally_well_the_first_is_taken():
    book = codebook([[-1.0, 0.0, 0.5, 1.0], [-1.0, -0.5, 0.0, 1.0]])
    # 0.5 of the first table is as far from 0.25 as 0 of the second
    x = jnp.array([0.25, 0.0, -1.0, 1.0] * 2)
    packed = pack(x, datatype(book, "e8m0_t8"))
    assert int(packed.selectors[0]) == 0
    assert_array_equal(unpack(packed), [0.5, 0.0, -1.0, 1.0] * 2)


def test_subtiles_below_the_smallest_scale_have_an_offset():
    """The tile's scale ends at 2**-3; half of it, by the offset, has steps of
    2**-10.
    """
    made = datatype("int8", "e3m0_t16s2o1")
    x = jnp.full(16, 2.0**-10)
    assert (cast(x, made) == x).all()
    assert (unpack(pack(x, made)) == x).all()


@parametrize(
    "roundmode, beyond", [("zero", 64.0), ("even", np.nan), ("nearest", np.nan)]
)
def test_exponents_toward_zero_overflow_from_infinity_alone(roundmode, beyond):
    x = jnp.array([64.0, 100.0 if roundmode == "zero" else 64.0, 512.0, np.inf])
    number = datatype("e4m0")
    assert number.number.max == 2.0**7
    got = cast(x, number, roundmode=roundmode, saturate=False)
    assert_array_equal(got, [64.0, 64.0, 2.0 * beyond, np.nan])
    saturated = cast(x, number, roundmode=roundmode)
    assert_array_equal(saturated[2:], [128.0, 128.0])


@parametrize("name", ["int8_F", "nf4", "uint8_FF"])
def test_a_tile_of_the_smallest_floats_has_a_scale(name):
    """Their quotient by the largest value is subnormal, and a scale of zero would round
    them to zero.
    """
    x = jnp.full(64, 2.0**-125)
    got = cast(x, CATALOG[name])
    assert (got > 0).all()
    assert (unpack(pack(x, CATALOG[name])) == got).all()
