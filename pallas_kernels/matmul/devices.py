"""A product on whole arrays from one on matrices: each device multiplies its part, and
sums where k is split.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import device_kind
from pallas_kernels.operands import Block, Operand, Product, dimensions, sizes
from pallas_kernels.partition import BlocksOf, Letters, partitioned
from pallas_kernels.specs import Entry, Sharding, entries, has_explicit_axes
from pallas_kernels.wire import Scatter, reduced

# (options, x[m, k], w[n, k], bias [n] or None) -> [m, n]
Multiply = Callable[[Product, Operand, Operand, jax.Array | None], jax.Array]


def on_each_device(
    multiply: Multiply,
    options: Product,
    x: Operand,
    w: Operand,
    bias: jax.Array | None,
    *,
    interpreter: Literal["pure", "calls back"] = "pure",
) -> jax.Array:
    """Return `multiply` of x `[..., k]` and w `[n, *k]`, run on each device's part as
    matrices.

    A part need not fit a kernel as the whole product did, so `multiply` falls back to
    the reference for such parts.

    A kernel whose interpreter "calls back" into Python has a side effect, which a
    partitioned function cannot have. On CPUs with automatic axes it runs unpartitioned.
    """
    _, k, n = sizes(x, w)
    leading, contracted = x.shape[: x.values.ndim - (w.values.ndim - 1)], w.shape[1:]
    in_blocks = isinstance(w.scaling, Block)
    if not in_blocks:  # a partitioned function has no scalars
        x, w = (replace(operand, scale=operand.scale.reshape(1)) for operand in (x, w))
    operands = (x, w, None if bias is None else bias.astype(jnp.float32))
    tree = jax.tree.structure(operands)

    def local(
        *arrays: jax.Array,
        summed_over: tuple[str, ...],
        scattered: Sequence[Scatter] = (),
    ) -> jax.Array:
        x, w, bias = jax.tree.unflatten(tree, arrays)
        x, w = (
            o.settled() if in_blocks else replace(o, scale=o.scale[0]).settled()
            for o in (x, w)
        )
        own = replace(options, out_sharding=None)
        if not (summed_over or scattered):
            return multiply(own, x, w, bias)
        if options.wire is not None:
            own = replace(own, out_dtype=jnp.dtype(jnp.float32))
        # Without a wire, partial sums are added in the result's own dtype, as XLA adds
        # its own: XLA then joins the sums of q, k and v before it sends them. With a
        # wire the sum is rounded once, after it was added.
        out = reduced(multiply(own, x, w, None), scattered, summed_over, options.wire)
        return (out if bias is None else out + bias).astype(options.out_dtype)

    rule = (
        ", ".join(
            [*_letters(x, "m"), *_letters(w, "n"), *([] if bias is None else ["n"])]
        )
        + " -> m n"
    )
    blocks = {}
    if isinstance(w.scaling, Block):
        blocks = {
            "j": BlocksOf("k", w.scaling.size, k),
            "i": BlocksOf("n", w.scaling.size, n),
        }
    arrays, merged = jax.tree.leaves(operands), {"m": leading, "k": contracted}
    if (
        interpreter == "calls back"
        and device_kind() == "cpu"
        and not has_explicit_axes()
    ):
        return Letters.read(rule, merged).over_arrays(
            functools.partial(local, summed_over=())
        )(*arrays)
    # A bias is added to whole columns, so a sum with a bias is not handed out in parts.
    wanted = result_spec(x.values, w.values, dimensions(x, w), options.out_sharding)
    return partitioned(
        local, rule, blocks, scattered=bias is None, merged=merged, wanted=wanted
    )(*arrays)


def result_spec(
    x: Any, w: Any, axes: lax.DotDimensionNumbers, out_sharding: Sharding
) -> tuple[Entry, ...] | None:
    """Return the spec that JAX gives to a product of arrays or shapes under a mesh with
    explicit axes, otherwise None.

    Raises:
      jax.errors.ShardingTypeError: JAX's own, for operands whose product needs an
        `out_sharding`.
    """
    if not has_explicit_axes():
        return None
    options: dict[str, Any] = dict(
        preferred_element_type=jnp.float32, out_sharding=out_sharding
    )
    made = jax.eval_shape(
        functools.partial(lax.dot_general, dimension_numbers=axes, **options), x, w
    )
    return entries(made.sharding, made.ndim)


def _letters(operand: Operand, rows: str) -> list[str]:
    """Return the letters for `partition` of the operand's arrays in order; j counts
    blocks of k, and i blocks of n.
    """
    scale = "u"
    if isinstance(operand.scaling, Block):
        scale = f"{'i' if operand.scaling.tile == 'square' else rows} j"
    values = f"{rows} k" if operand.contracts == "last" else f"k {rows}"
    halves = ((operand.lo, values), (operand.lo_scale, scale))
    return [values, scale, *(letters for half, letters in halves if half is not None)]
