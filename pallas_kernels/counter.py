"""Random bits from a counter: the same on every backend, mesh and tile size.

They are a hash of two key words and an index.

The bits of an element depend only on the key and on its *global* index. Kernels make
them in registers, no array of a weight's size is drawn or stored, and a run that is
split over other devices draws the same bits. The hash is lowbias32 (Wellons 2018: two
multiplications) with a key word before each multiplication. It is for rounding, not
cryptography.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_kernels.specs import Shape

_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: a start with as many ones as zeros


def keys(*words: ArrayLike) -> tuple[Array, Array]:
    """Return two key words, uint32, mixed from integers of any width.

    Such integers are seed words, a step, the number of a leaf, an entry of a stack.
    Words are taken modulo 2**32. Scalars give scalars; arrays of words broadcast, for
    the entries of a stack.

    Raises:
      TypeError: a word is not an integer.

    >>> first, again, other = keys(1, 2), keys(1, 2), keys(1, 3)
    >>> bool(first[0] == again[0]), bool(first[0] == other[0])
    (True, False)
    """
    mixed = [_word(word) for word in words]
    return _mix(_GOLDEN, mixed), _mix(_GOLDEN ^ 0xFFFFFFFF, mixed)


def random_bits(index: Array, k0: Array, k1: Array) -> Array:
    """Return 32 random bits for every index, uint32, under the key words of `keys`.

    >>> bits = random_bits(jnp.arange(2, dtype=jnp.uint32), *keys(1))
    >>> [hex(word) for word in bits.tolist()]
    ['0xf5f8ffc6', '0x6ea95a62']
    """
    return finish(begin(index ^ k0), k1)


def begin(x: Array) -> Array:
    """Return the part of the hash before the first multiplication.

    It is linear over "exclusive or", and maps an index below 2**16 to itself. So a
    kernel computes it once for a row, and adds the columns later.
    """
    return x ^ (x >> 16)


def finish(x: Array, k1: Array) -> Array:
    """Return the rest of the hash."""
    x = x * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ k1) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def indices(shape: Shape, fastest: int = -1) -> Array:
    """Return the index of every element, uint32, modulo 2**32.

    The order is row-major, or as if the axis `fastest` were last.

    >>> indices((2, 3)).tolist(), indices((2, 3), fastest=0).tolist()
    ([[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]])
    """
    total = jnp.zeros(shape, jnp.uint32)
    order = list(range(len(shape)))
    if order:
        order.append(order.pop(fastest))
    stride = 1
    # A sum over axes without a reshape, so that a partitioner gives each device its own
    # part.
    for axis in reversed(order):
        place = lax.broadcasted_iota(jnp.uint32, shape, axis)
        total += place * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return total


def bits_of(shape: Shape, k0: Array, k1: Array, fastest: int = -1) -> Array:
    """Return random bits for every element of an array, by its global index.

    >>> bits_of((2, 3), *keys(1)).shape
    (2, 3)
    """
    return random_bits(indices(shape, fastest), k0, k1)


def _word(word: ArrayLike) -> Array:
    if isinstance(word, int):
        return jnp.uint32(word % 2**32)
    array = jnp.asarray(word)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"a key word has dtype {array.dtype}, not an integer type; use"
            " word.astype(jnp.uint32)"
        )
    return array.astype(jnp.uint32)


def _mix(start: int, words: list[Array]) -> Array:
    x = jnp.uint32(start)
    for word in words:
        x = (x ^ word) * jnp.uint32(0x85EBCA6B)
        x = x ^ (x >> 13)
        x = x * jnp.uint32(0xC2B2AE35)
        x = x ^ (x >> 16)
    return x
