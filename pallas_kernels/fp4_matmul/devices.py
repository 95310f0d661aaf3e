"""A product with an FP4 weight on whole arrays, from one on the parts of a device.

Each device multiplies its own part, and sums if the contracted axis is split.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax

from pallas_kernels.fp4_matmul.reference import Fp4Options, dimensions, scaling_of
from pallas_kernels.matmul.devices import result_spec
from pallas_kernels.operands import Operand
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.specs import Entry, Shape


def on_each_device(
    multiply: Callable[..., Array],
    options: Fp4Options,
    x: Array | Operand,
    w: Operand,
    *table: Array,
) -> Array:
    """Run `multiply(options, x, w, *table)`, each device on its part of x and w.

    X is `[..., k]`, and its parts are matrices. Its rows may be rounded already. A
    partitioned function cannot close over arrays, so a table is an argument.
    """
    # A partitioned function has no scalars.
    outer = None if w.outer is None else w.outer.reshape(1)
    operands = (x, replace(w, outer=outer), table)
    tree = jax.tree.structure(operands)

    def local(*arrays: Array, summed_over: tuple[str, ...]) -> Array:
        x, w, table = jax.tree.unflatten(tree, arrays)
        if w.outer is not None:
            w = replace(w, outer=w.outer[0])
        own = replace(options, out_sharding=None)
        if not summed_over:
            return multiply(own, x, w, *table)
        own = replace(own, out_dtype=jnp.dtype(jnp.float32))
        sums = lax.psum(multiply(own, x, w, *table), summed_over)
        return sums.astype(options.out_dtype)

    of_weight, blocks = letters_of(w)
    summed, kept = ("k", "n") if options.contracts == "k" else ("n", "k")
    letters = [f"m {summed}"]
    if isinstance(x, Operand):
        letters.append("m")
    letters += of_weight
    if w.outer is not None:
        letters.append("u")
    letters += ["t"] * len(table)
    run = partitioned(
        local,
        f"{', '.join(letters)} -> m {kept}",
        blocks,
        merged={"m": x.shape[:-1]},
        wanted=_wanted(options, x, w),
    )
    return run(*jax.tree.leaves(operands))


def _wanted(
    options: Fp4Options,
    x: Array | Operand,
    w: Operand,
) -> tuple[Entry, ...] | None:
    """Return the spec of the result under explicit axes, as of a product in BF16."""
    of_x = _in_bf16(x.shape, x.values if isinstance(x, Operand) else x)
    of_w = _in_bf16(w.shape, w.values)
    return result_spec(
        of_x, of_w, dimensions(options, len(x.shape)), options.out_sharding
    )


def _in_bf16(shape: Shape, array: Array) -> ShapeDtypeStruct:
    sharding = jax.typeof(array).sharding
    return ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)


def letters_of(w: Operand) -> tuple[list[str], dict[str, BlocksOf]]:
    """Return the letters of a weight's codes and scales, and those that count blocks.

    h counts bytes, j blocks of k, and i blocks of n.
    """
    scaling = scaling_of(w)
    n, k = w.shape
    of_scales = "n j" if scaling.tile == "vector" else "i j"
    blocks = {
        "h": BlocksOf("k", 2, k),
        "j": BlocksOf("k", scaling.block, k),
        "i": BlocksOf("n", scaling.block, n),
    }
    return ["n h", of_scales], blocks
