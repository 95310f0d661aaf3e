"""Rows of a stored table: only looked-up rows are dequantized, and their gradients are
added in float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.operands import Operand, Tensor
from pallas_kernels.specs import Sharding
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored, constant

# `(array, indices)` to the entries of the array at the indices; linear in the array.
Gather = Callable[[Array, Array], Array]


def lookup(
    table: Stored | Parameter, ids: Array, *, out_sharding: Sharding = None
) -> Array:
    """Return rows of a stored table: `jnp.take(table.dequantize(), ids, axis=0)`,
    without the float table.

    Use it for an embedding in a model that you write with stored weights; a converted
    model looks up by itself (`include="embed"`). The cost is proportional to the rows
    that are looked up.

        rows = (W_hi[ids] + W_lo[ids]) * scale

    Args:
      table: a stored weight `[rows, n]` with one scale. A parameter made by
        `tcfp_jax.store` has a gradient under `tcfp_jax.value_and_grad`: float32 sums
        over equal ids, rounded to the gradient's dtype once.
      ids: integers `[...]`. Negative ids count from the end, and rows of ids out of
        range are NaN.
      out_sharding: sharding of the rows under a mesh with explicit axes, which JAX asks
        for.

    Returns:
      `[..., n]` in the dtype of the float parameter; float32 for a table that is not a
        parameter.

    Raises:
      TypeError: `table` is not a stored weight, or the ids are not integers.
      ValueError: the table is a stack, or has scales of rows or blocks.

    >>> from tcfp_jax.optim.stored import store
    >>> table = {"kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    >>> params = store(table, "tcfp12_single", key=jax.random.key(0))
    >>> lookup(params["kernel"], jnp.array([1, -2])).tolist()
    [[3.0, 4.0], [1.0, 2.0]]
    """
    if not isinstance(table, Stored | Parameter):
        raise TypeError(
            f"table is a {type(table).__name__}, not a stored weight; use"
            " jnp.take(table, ids, axis=0)"
        )
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"ids have dtype {ids.dtype}; a lookup takes integers, use"
            " ids.astype(jnp.int32)"
        )
    if ids.dtype.itemsize < 4:
        # JAX compares ids with the number of rows in the dtype of the ids.
        ids = ids.astype(jnp.int32)
    values, slot, dtype = _opened(table)
    if len(table.shape) != 2 or not isinstance(values.scaling, Tensor):
        raise ValueError(
            f"the table is {list(table.shape)} with {values.scaling}, but rows are"
            " looked up in a matrix [rows, n] with one scale; look up in one entry of"
            " a stack, or take floats with dequantize()"
        )

    def take(matrix: Array, ids: Array) -> Array:
        rows = matrix.at[ids]
        return rows.get(mode="fill", fill_value=0x7F, out_sharding=out_sharding)

    return gathered(constant(values).for_dgrad(), take, ids, dtype, slot)


def _opened(
    table: Stored | Parameter,
) -> tuple[Stored, Array | None, DTypeLike]:
    """Return (the values, the zeros that take the gradient, the dtype of the rows)."""
    if isinstance(table, Parameter):
        return table.read(), table.slot, table.state.dtype
    return table, None, jnp.float32


def gathered(
    table: Operand,
    gather: Gather,
    indices: Array,
    dtype: DTypeLike,
    slot: Array | None,
) -> Array:
    """Return entries of dequantized codes with one scale; the gradient goes to `slot`,
    of which nothing is read.

    The gather sees bytes: out of range it has to give 0x7F, which is NaN in both FP8
    formats, or 0.
    """

    def take(codes: Array) -> Array:
        return lax.bitcast_convert_type(
            gather(lax.bitcast_convert_type(codes, jnp.uint8), indices), codes.dtype
        )

    lo = None if table.lo is None else take(table.lo)
    taken = dataclasses.replace(table, values=take(table.values), lo=lo)
    rows = taken.dequantize(dtype)
    if slot is None:
        return rows
    return _with_gradient(gather, jax.typeof(slot), rows, slot, indices)


def with_gradient(values: Array, slot: Array) -> Array:
    """Return values whose gradient goes to a slot of their shape, of which nothing is
    read.
    """
    return _with_gradient(
        lambda slot, indices: slot,
        jax.typeof(slot),
        values,
        slot,
        jnp.zeros((), jnp.int32),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_gradient(
    gather: Gather, kind: Any, rows: Array, slot: Array, indices: Array
) -> Array:
    """Return rows, whose gradient goes to the slot, of type `kind`."""
    return rows


def _backward(gather: Gather, kind: Any, indices: Array, g: Array) -> Any:
    # A frequent token has thousands of gradients; a sum in bfloat16 would stop growing
    # after 256 of them.
    wide = jax.linear_transpose(
        lambda slot: gather(slot, indices), kind.update(dtype=jnp.dtype(jnp.float32))
    )
    (total,) = wide(g.astype(jnp.float32))
    return None, total.astype(kind.dtype), None


_with_gradient.defvjp(
    lambda gather, kind, rows, slot, indices: (rows, indices), _backward
)
