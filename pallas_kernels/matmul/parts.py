"""A matmul kernel over whole arrays: matrices of any leading axes, one part on each device, sums where k is split.

Where a device's part is not a multiple of the kernel's tiles, the reference multiplies it; the whole product was.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import device_kind
from pallas_kernels.matmul import reference
from pallas_kernels.operands import Block, Operand, Product, sizes
from pallas_kernels.partition import BlocksOf, Scatter, partitioned

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
    CPUs it runs unpartitioned.
    """
    m, k, n = sizes(x, w)
    leading = x.shape[: x.values.ndim - (w.values.ndim - 1)]
    operands = (_matrix(x, m, k), _matrix(w, n, k), None if bias is None else bias.astype(jnp.float32))
    tree = jax.tree.structure(operands)

    def local(*arrays: jax.Array, summed_over: tuple[str, ...], scattered: Sequence[Scatter] = ()) -> jax.Array:
        x, w, bias = jax.tree.unflatten(tree, arrays)
        x, w = (_as_scalar(operand).settled() for operand in (x, w))
        parts = bool(summed_over or scattered)
        asked = dataclasses.replace(options, out_dtype=jnp.dtype(jnp.float32)) if scattered else options
        before = None if parts else bias
        run = multiply if fits(*sizes(x, w)) else reference.matmul
        out = run(asked, x, w, before)
        if not parts:
            return out
        # What is handed out, a weight's gradient, is summed in float32 and rounded once. A result that stays whole is
        # summed in its own dtype, as XLA sums its own products: then it adds those of q, k and v before it sends them.
        for axes, dimension in scattered:
            out = lax.psum_scatter(out, axes, scatter_dimension=dimension, tiled=True)
        out = lax.psum(out, summed_over) if summed_over else out
        return (out if bias is None else out + bias).astype(options.out_dtype)

    letters = (_letters(operands[0], "m"), _letters(operands[1], "n"), None if bias is None else "n")
    rule = ", ".join(jax.tree.leaves(letters)) + " -> m n"
    blocks = {}
    if isinstance(w.scaling, Block):
        blocks = {"j": BlocksOf("k", w.scaling.size, k), "i": BlocksOf("n", w.scaling.size, n)}
    whole = interpreter == "calls back" and device_kind() == "cpu"
    arrays = jax.tree.leaves(operands)
    # A bias is added to whole columns.
    sums: Literal["everywhere", "scattered"] = "everywhere" if bias is not None else "scattered"
    out = local(*arrays, summed_over=()) if whole else partitioned(local, rule, blocks, sums=sums)(*arrays)
    return out.reshape(*leading, n)


def _matrix(operand: Operand, rows: int, k: int) -> Operand:
    """The operand as a matrix, with a scalar scale as one value, since a partitioned function has no scalars."""
    shape = (rows, k) if operand.contracts == "last" else (k, rows)
    flat: Any = lambda half: None if half is None else half.reshape(shape)
    scale = operand.scale
    if not isinstance(operand.scaling, Block):
        scale = scale.reshape(1)
    elif operand.scaling.tile == "vector":
        scale = scale.reshape(rows, -1)
    return dataclasses.replace(operand, values=flat(operand.values), lo=flat(operand.lo), scale=scale)


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
