"""Random bits from a counter: uniform, independent of neighbours and steps, and a
function of key and index alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import counter
from tests.helpers import mesh_of

COUNT = 1 << 15
draw = jax.jit(
    lambda *words: counter.bits_of((256, COUNT // 256), *counter.keys(*words))
)


def bits(*words):
    """COUNT x 32 zeros and ones, of a program that is compiled once for each number of
    words.
    """
    drawn = np.asarray(draw(*(jnp.uint32(word) for word in words))).reshape(-1)
    return (drawn[:, None] >> np.arange(32, dtype=np.uint32)) & 1


def correlation(a, b):
    """Of every bit of a with every bit of b; 1 / sqrt(COUNT) is its standard error for
    independent ones.
    """
    return (2 * np.float32(a) - 1).T @ (2 * np.float32(b) - 1) / len(a)


def test_every_bit_is_a_fair_coin_apart_from_all_others():
    drawn = bits(1, 2, 3)
    largest = 5 / np.sqrt(COUNT)  # of about a thousand numbers
    assert np.max(np.abs(2 * drawn.mean(0) - 1)) < largest
    assert np.max(np.abs(correlation(drawn, drawn) - np.eye(32))) < largest
    # the next column
    assert np.max(np.abs(correlation(drawn[1:], drawn[:-1]))) < largest
    # the next rows
    assert np.max(np.abs(correlation(drawn[256:], drawn[:-256]))) < largest


@pytest.mark.parametrize("other", [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)], ids=str)
def test_another_seed_step_or_leaf_draws_other_bits(other):
    assert np.max(np.abs(correlation(bits(1, 2, 3), bits(*other)))) < 5 / np.sqrt(COUNT)


def test_bits_are_those_of_the_definition():
    """By NumPy's integers, which wrap around alike."""
    k0, k1 = (np.uint32(k) for k in counter.keys(7))
    with np.errstate(over="ignore"):
        x = np.arange(6, dtype=np.uint32) ^ k0
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15)) ^ k1) * np.uint32(0x846CA68B)
    expected = (x ^ (x >> np.uint32(16))).reshape(2, 3)
    assert np.array_equal(counter.bits_of((2, 3), *counter.keys(7)), expected)


def test_a_part_of_an_array_draws_what_the_whole_draws_there():
    mesh = mesh_of(2, 4)
    spread = NamedSharding(mesh, P("a", "b"))
    make = lambda: counter.bits_of((4, 4, 16), *counter.keys(5))
    split = jax.jit(make, out_shardings=spread)
    assert np.array_equal(split(), make())
    assert "all-" not in split.lower().compile().as_text()


@pytest.mark.parametrize("word", [1.0, jnp.float32(2), np.ones(2, bool)], ids=str)
def test_words_are_integers(word):
    with pytest.raises(TypeError, match=r"astype\(jnp.uint32\)"):
        counter.keys(1, word)


def test_words_of_any_width_and_of_a_stack():
    large = counter.keys(-1, 2**40 + 3)
    assert [int(k) for k in large] == [int(k) for k in counter.keys(2**32 - 1, 3)]
    stack = counter.keys(jnp.uint32(4), jnp.arange(3))
    assert [k.shape for k in stack] == [(3,), (3,)]
    assert int(stack[0][2]) == int(counter.keys(4, 2)[0]) != int(stack[1][2])
