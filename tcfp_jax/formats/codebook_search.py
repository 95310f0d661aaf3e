"""The entry of a table nearest to each value, and the table of several that fits a tile best."""

import jax
import jax.numpy as jnp
import numpy as np

from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.float_bits import RoundMode


def nearest_index(
    value: jax.Array, book: CodebookSpec, table: int | jax.Array, mode: RoundMode, bits: jax.Array | None
) -> jax.Array:
    """Index of the entry that `value` rounds to; what lies beyond the ends rounds to them.

    Args:
      value: float32, already divided by its scale.
      table: the index of the table, or one index for all values.
      mode: "even" sends ties to the even index, "nearest" away from zero.
      bits: uniform uint32 of the shape of `value`, for "stochastic" only.

    >>> from tcfp_jax.formats.codebooks import codebook
    >>> book = codebook([-1.0, 0.0, 0.5, 1.0])
    >>> nearest_index(jnp.array([-9.0, 0.2, 0.75], jnp.float32), book, 0, "even", None).tolist()
    [0, 1, 2]
    """
    levels = _tables(book)[table]
    target = jnp.clip(value, levels[0], levels[-1])
    # One comparison after the other: with an axis of levels, XLA would compute the target once for each.
    lower = jnp.zeros_like(target, jnp.int32)
    for i in range(1, levels.shape[0] - 1):
        lower = lower + (target >= levels[i]).astype(jnp.int32)
    below, above = target - levels[lower], levels[lower + 1] - target
    if mode == "zero":
        up = (target < 0) & (below > 0)
        up = up | (above == 0)
    elif mode == "stochastic":
        assert bits is not None
        uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
        up = uniform * (below + above) < below
    else:
        tie = (lower & 1) == 1 if mode == "even" else target > 0
        up = (below > above) | ((below == above) & tie)
    return lower + up.astype(jnp.int32)


def look_up(index: jax.Array, book: CodebookSpec, selector: jax.Array | None) -> jax.Array:
    """float32 entries, of the first table or of those selected."""
    tables = _tables(book)
    if selector is None:
        return tables[0][index]
    return tables.reshape(-1)[index + selector * tables.shape[1]]


def search(
    value: jax.Array, book: CodebookSpec, axes: tuple[int, ...], mode: RoundMode, bits: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """(indices, the index of each tile's table, or None where there is only one table).

    A tile gets the table with the least squared error, and the first of equals. Errors are summed over `axes` as
    integers, so that the choice is the same in any order of summation.
    """
    if not book.selector_bits:
        return nearest_index(value, book, 0, mode, bits), None
    count = int(np.prod([value.shape[axis] for axis in axes]))
    # Errors of one table's values are at most 2 maxfloat; a sum of `count` squares must stay below 2**31.
    steps = jnp.float32(np.float32(int((2**31 / count) ** 0.5 / 2.01) / book.maxfloat))
    clipped = jnp.clip(value, -book.maxfloat, book.maxfloat)

    def fit(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = nearest_index(value, book, table, mode, bits)
        error = jnp.round((_tables(book)[table][index] - clipped) * steps).astype(jnp.int32)
        return index, jnp.sum(error * error, axis=axes, keepdims=True)

    def better(table: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        index, error = fit(table)
        less = error < best[1]
        return jnp.where(less, index, best[0]), jnp.minimum(error, best[1]), jnp.where(less, table, best[2])

    index, error = fit(jnp.int32(0))
    start = (index, error, jnp.zeros_like(error))
    index, _, selector = jax.lax.fori_loop(1, len(book.tables), better, start)
    return index, selector


def _tables(book: CodebookSpec) -> jax.Array:
    return jnp.asarray(np.array(book.tables, np.float32))
