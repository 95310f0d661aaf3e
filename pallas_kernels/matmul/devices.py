"""A product on whole arrays from one on matrices.

Each device multiplies its part, and sums are added where k is split.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax

from pallas_kernels.dispatch import device_kind
from pallas_kernels.operands import Block, MatmulOptions, Operand, dimensions, sizes
from pallas_kernels.partition import BlocksOf, Letters, partitioned
from pallas_kernels.specs import Entry, Sharding, entries, has_explicit_axes
from pallas_kernels.wire import Scatter, reduced

# (options, x[m, k], w[n, k], bias [n] or None) -> [m, n]
Multiply = Callable[[MatmulOptions, Operand, Operand, Array | None], Array]


def on_each_device(
    multiply: Multiply,
    options: MatmulOptions,
    x: Operand,
    w: Operand,
    bias: Array | None,
    *,
    interpreter: Literal["pure", "calls back"] = "pure",
) -> Array:
    """Return `multiply` of x `[..., k]` and w `[n, *k]`, run on each device's part.

    Parts are matrices. A part need not fit a kernel as the whole product did, so
    `multiply` falls back to the reference for such parts.

    A kernel whose interpreter "calls back" into Python has a side effect, which a
    partitioned function cannot have. On CPUs with automatic axes it runs unpartitioned.
    """
    _, k, n = sizes(x, w)
    contracted = w.shape[1:]
    leading = x.shape[: x.values.ndim - len(contracted)]
    in_blocks = w.scaling.in_blocks
    if not in_blocks:  # a partitioned function has no scalars
        x = replace(x, scale=x.scale.reshape(1))
        w = replace(w, scale=w.scale.reshape(1))
    operands = (x, w, None if bias is None else bias.astype(jnp.float32))
    arrays, tree = jax.tree.flatten(operands)

    def settled(operand: Operand) -> Operand:
        if not in_blocks:
            operand = replace(operand, scale=operand.scale[0])
        return operand.settled()

    def local(
        *arrays: Array,
        summed_over: tuple[str, ...],
        scattered: Sequence[Scatter] = (),
    ) -> Array:
        x, w, bias = jax.tree.unflatten(tree, arrays)
        x = settled(x)
        w = settled(w)
        own = replace(options, out_sharding=None)
        if not summed_over and not scattered:
            return multiply(own, x, w, bias)
        if options.wire is not None:
            own = replace(own, out_dtype=jnp.dtype(jnp.float32))
        # Without a wire, partial sums are added in the result's own dtype, as XLA adds
        # its own: XLA then joins the sums of q, k and v before it sends them. With a
        # wire the sum is rounded once, after it was added.
        out = reduced(multiply(own, x, w, None), scattered, summed_over, options.wire)
        return (out if bias is None else out + bias).astype(options.out_dtype)

    letters = [*_letters(x, "m"), *_letters(w, "n")]
    if bias is not None:
        letters.append("n")
    rule = f"{', '.join(letters)} -> m n"
    merged = {"m": leading, "k": contracted}
    may_split = device_kind() != "cpu" or has_explicit_axes()
    if interpreter == "calls back" and not may_split:
        alone = partial(local, summed_over=())
        return Letters.read(rule, merged).over_arrays(alone)(*arrays)
    blocks = {}
    if isinstance(w.scaling, Block):
        blocks["j"] = BlocksOf("k", w.scaling.size, k)
        blocks["i"] = BlocksOf("n", w.scaling.size, n)
    run = partitioned(
        local,
        rule,
        blocks,
        # A bias is added to whole columns, so a sum with a bias is not handed out in
        # parts.
        scattered=bias is None,
        merged=merged,
        wanted=result_spec(x.values, w.values, dimensions(x, w), options.out_sharding),
    )
    return run(*arrays)


def result_spec(
    x: Array | ShapeDtypeStruct,
    w: Array | ShapeDtypeStruct,
    axes: lax.DotDimensionNumbers,
    out_sharding: Sharding,
) -> tuple[Entry, ...] | None:
    """Return the spec that JAX gives to a product under a mesh with explicit axes.

    Without explicit axes it is None.

    Raises:
      jax.errors.ShardingTypeError: JAX's own, for operands whose product needs an
        `out_sharding`.
    """
    if not has_explicit_axes():
        return None
    product = partial(
        lax.dot_general,
        dimension_numbers=axes,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )
    made = jax.eval_shape(product, x, w)
    return entries(made.sharding, made.ndim)


def _letters(operand: Operand, rows: str) -> list[str]:
    """Return the letters for `partition` of the operand's arrays in order.

    j counts blocks of k, and i blocks of n.
    """
    scale = "u"
    if operand.scaling.in_blocks:
        scale = "i j" if operand.scaling.squares else f"{rows} j"
    values = f"{rows} k" if operand.contracts == "last" else f"k {rows}"
    letters = [values, scale]
    if operand.lo is not None:
        letters.append(values)
    if operand.lo_scale is not None:
        letters.append(scale)
    return letters
