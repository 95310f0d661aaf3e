"""Stochastic rounding for every draw: count how many round up, which the mean of random draws cannot show."""

import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax.formats import codebook, datatype, pack, unpack
from tcfp_jax.formats.codebooks import search
from tcfp_jax.formats.float_bits import Grid, round_bits, round_to_grid


@pytest.mark.parametrize("mbits", [7, 19, 22])
@pytest.mark.parametrize("part", [0, 1, 0.5, -1])
def test_as_many_draws_go_up_as_the_rest_says(mbits, part):
    """Exact values never change; of all draws of the dropped bits, `rest` round up."""
    drop = 23 - mbits
    rest = int(part * 2**drop) if part == 0.5 else part % 2**drop
    draws = jnp.arange(2**drop, dtype=jnp.uint32) << (32 - drop)
    lower = 0x3F800000
    got = np.asarray(round_bits(jnp.full(draws.shape, lower + rest, jnp.int32), mbits, "stochastic", draws))
    assert set(got) <= {lower, lower + 2**drop}
    assert np.count_nonzero(got > lower) == rest


@pytest.mark.parametrize("value", [0.0, 0.125, 0.5, 1.0, 1.25, 2.75, 3.0, 5.5])
def test_the_draw_below_the_fraction_is_the_last_that_goes_up(value):
    step = 0.5 if value < 2 else 1.0 if value < 4 else 2.0
    lower = np.floor(value / step) * step
    count = int((value - lower) / step * 2**24)
    draws = jnp.array([0, max(count - 1, 0), count, 2**24 - 1], jnp.uint32) << 8
    got = round_to_grid(jnp.full(4, value, jnp.float32), Grid(0, 1, 6.0), "stochastic", draws)
    up = np.array([count > 0, count > 0, False, False])
    np.testing.assert_array_equal(got, lower + up * step)


def test_entries_of_a_codebook_stay_whatever_is_drawn():
    book = codebook([-1.0, -0.25, 0.5, 1.0])
    draws = jnp.array([[0], [2**31], [2**32 - 1]], jnp.uint32)
    index, _ = search(jnp.array(book.tables[0], jnp.float32), book, (), "stochastic", draws)
    np.testing.assert_array_equal(index, np.broadcast_to(np.arange(4), (3, 4)))


def test_of_tables_that_fit_equally_well_the_first_is_taken():
    book = codebook([[-1.0, 0.0, 0.5, 1.0], [-1.0, -0.5, 0.0, 1.0]])
    x = jnp.array([0.25, 0.0, -1.0, 1.0] * 2)  # 0.5 of the first table is as far from 0.25 as 0 of the second
    packed = pack(x, datatype(book, "e8m0_t8"))
    assert int(packed.selectors[0]) == 0
    np.testing.assert_array_equal(unpack(packed), [0.5, 0.0, -1.0, 1.0] * 2)
