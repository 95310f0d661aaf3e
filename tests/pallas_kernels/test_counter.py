"""Random bits from a counter: uniform, independent, a function of key and index."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import counter
from tests.helpers import mesh_of, parametrize, refused

COUNT = 1 << 15
LARGEST = 5 / np.sqrt(COUNT)  # of about a thousand correlations


@jax.jit
def draw(*words):
    return counter.bits_of((256, COUNT // 256), *counter.keys(*words))


def bits(*words):
    """COUNT x 32 bits as numbers 1 and -1."""
    words = [jnp.uint32(word) for word in words]
    drawn = np.asarray(draw(*words)).reshape(-1, 1)
    ones = (drawn >> np.arange(32, dtype=np.uint32)) & 1
    return 2 * np.float32(ones) - 1


def correlation(a, b):
    """The largest one of a bit of a with a bit of b.

    1 / sqrt(COUNT) is its standard error for independent ones.
    """
    return np.max(np.abs(a.T @ b / len(a)))


def test_every_bit_is_a_fair_coin_apart_from_all_others():
    drawn = bits(1, 2, 3)
    assert np.max(np.abs(drawn.mean(0))) < LARGEST
    others = drawn.T @ drawn / len(drawn) - np.eye(32)
    assert np.max(np.abs(others)) < LARGEST
    for distance in (1, 256):  # the next column, the next rows
        assert correlation(drawn[distance:], drawn[:-distance]) < LARGEST


@parametrize("other", [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)], ids=str)
def test_another_seed_step_or_leaf_draws_other_bits(other):
    assert correlation(bits(1, 2, 3), bits(*other)) < LARGEST


def test_bits_are_those_of_the_definition():
    """By NumPy's integers, which wrap around alike."""
    k0, k1 = map(np.uint32, counter.keys(7))
    with np.errstate(over="ignore"):
        x = np.arange(6, dtype=np.uint32) ^ k0
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15)) ^ k1) * np.uint32(0x846CA68B)
    expected = (x ^ (x >> np.uint32(16))).reshape(2, 3)
    assert np.array_equal(counter.bits_of((2, 3), *counter.keys(7)), expected)


def test_a_part_of_an_array_draws_the_bits_of_the_whole():
    def make():
        return counter.bits_of((4, 4, 16), *counter.keys(5))

    spread = NamedSharding(mesh_of(2, 4), P("a", "b"))
    split = jax.jit(make, out_shardings=spread)
    assert np.array_equal(split(), make())
    assert "all-" not in split.lower().compile().as_text()


@parametrize("word", [1.0, jnp.float32(2), np.ones(2, bool)], ids=str)
def test_words_are_integers(word):
    with refused(r"astype\(jnp.uint32\)", TypeError):
        counter.keys(1, word)


def test_words_of_any_width_and_of_a_stack():
    assert counter.keys(-1, 2**40 + 3) == counter.keys(2**32 - 1, 3)
    first, second = counter.keys(jnp.uint32(4), jnp.arange(3))
    assert first.shape == second.shape == (3,)
    assert (first[2], second[2]) == counter.keys(4, 2)
    assert first[2] != second[2]
