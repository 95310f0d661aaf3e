"""A matmul kernel over whole arrays: matrices of any leading axes, one part on each device, sums where k is split.

Where a device's part is not a multiple of the kernel's tiles, the reference multiplies it; the whole product was.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import device_kind
from pallas_kernels.matmul import reference
from pallas_kernels.operands import Block, Operand, Product, sizes
from pallas_kernels.partition import BlocksOf, Scatter, over_arrays, partitioned
from pallas_kernels.specs import entries, has_explicit_axes
from pallas_kernels.wire import reduced

# (options, x[m, k], w[n, k], bias [n] or None) -> [m, n]
Multiply = Callable[[Product, Operand, Operand, jax.Array | None], jax.Array]


def on_each_device(
    multiply: Multiply,
    fits: Callable[[int, int, int], bool],
    options: Product,
    x: Operand,
    w: Operand,
    bias: jax.Array | None,
    *,
    interpreter: Literal["pure", "calls back"] = "pure",
) -> jax.Array:
    """Run `multiply` on x `[..., k]` and w `[n, *k]`; `fits(m, k, n)` says whether the kernel takes a device's part.

    A kernel whose interpreter "calls back" into Python has a side effect, which a partitioned function cannot have: on
    CPUs it runs unpartitioned where axes are automatic.
    """
    _, k, n = sizes(x, w)
    leading, contracted = x.shape[: x.values.ndim - (w.values.ndim - 1)], w.shape[1:]
    operands = (_with_axis(x), _with_axis(w), None if bias is None else bias.astype(jnp.float32))
    tree = jax.tree.structure(operands)

    def local(*arrays: jax.Array, summed_over: tuple[str, ...], scattered: Sequence[Scatter] = ()) -> jax.Array:
        x, w, bias = jax.tree.unflatten(tree, arrays)
        x, w = (_as_scalar(operand).settled() for operand in (x, w))
        parts = bool(summed_over or scattered)
        asked = dataclasses.replace(options, out_sharding=None)
        if parts and options.wire is not None:
            asked = dataclasses.replace(asked, out_dtype=jnp.dtype(jnp.float32))
        before = None if parts else bias
        run = multiply if fits(*sizes(x, w)) else reference.matmul
        out = run(asked, x, w, before)
        if not parts:
            return out
        # In the result's own dtype, as XLA adds its own partial products: those of q, k and v become one before they
        # are sent. With a wire of its own the sum is rounded once, behind it.
        out = reduced(out, scattered, summed_over, options.wire)
        return (out if bias is None else out + bias).astype(options.out_dtype)

    letters = (_letters(operands[0], "m"), _letters(operands[1], "n"), None if bias is None else "n")
    rule = ", ".join(jax.tree.leaves(letters)) + " -> m n"
    blocks = {}
    if isinstance(w.scaling, Block):
        blocks = {"j": BlocksOf("k", w.scaling.size, k), "i": BlocksOf("n", w.scaling.size, n)}
    arrays, merged = jax.tree.leaves(operands), {"m": leading, "k": contracted}
    if interpreter == "calls back" and device_kind() == "cpu" and not has_explicit_axes():
        return over_arrays(functools.partial(local, summed_over=()), rule, merged)(*arrays)
    # A bias is added to whole columns.
    wanted = _wanted(options, x, w)
    return partitioned(local, rule, blocks, scattered=bias is None, merged=merged, wanted=wanted)(*arrays)


def by_reference(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> jax.Array:
    """The definition: on each device's part where its sums travel as asked, or where explicit axes have blocks.

    Blocks cut and merge axes, which JAX does not do with explicit ones.
    """
    if options.wire is None and not (has_explicit_axes() and isinstance(w.scaling, Block)):
        return reference.matmul(options, x, w, bias)
    return on_each_device(reference.matmul, lambda m, k, n: True, options, x, w, bias)


def _wanted(options: Product, x: Operand, w: Operand) -> tuple[Any, ...] | None:
    """The spec that JAX gives a product of these values, under a mesh with explicit axes.

    Raises:
      jax.errors.ShardingTypeError: JAX's own, of operands whose result it would have to be told.
    """
    if not has_explicit_axes():
        return None
    product = functools.partial(
        lax.dot_general, dimension_numbers=reference.dimensions(x, w), preferred_element_type=jnp.float32,
        out_sharding=options.out_sharding,
    )  # fmt: skip
    made = jax.eval_shape(product, x.values, w.values)
    return entries(made.sharding, made.ndim)


def _with_axis(operand: Operand) -> Operand:
    """The operand with a scalar scale as one value, since a partitioned function has no scalars."""
    if isinstance(operand.scaling, Block):
        return operand
    return dataclasses.replace(operand, scale=operand.scale.reshape(1))


def _as_scalar(operand: Operand) -> Operand:
    if isinstance(operand.scaling, Block):
        return operand
    return dataclasses.replace(operand, scale=operand.scale[0])


def _letters(operand: Operand, rows: str) -> Any:
    """The operand with letters for `partition` in the place of its arrays; j counts blocks of k, and i those of n."""
    scale = "u"
    if isinstance(operand.scaling, Block):
        scale = f"{'i' if operand.scaling.tile == 'square' else rows} j"
    values = f"{rows} k" if operand.contracts == "last" else f"k {rows}"
    lo, lo_scale = (
        None if half is None else letters for half, letters in ((operand.lo, values), (operand.lo_scale, scale))
    )
    return Operand(values, scale, lo, lo_scale, operand.scaling, operand.contracts)  # type: ignore[arg-type]
