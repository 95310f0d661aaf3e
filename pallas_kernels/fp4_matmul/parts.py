"""An FP4 product over whole arrays: x of any leading axes, one part on each device, sums where they are split."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp4_matmul import unpacked
from pallas_kernels.fp4_matmul.reference import Options
from pallas_kernels.operands import Fp4, Operand
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.specs import entries, has_explicit_axes


def by_xla(options: Options, x: jax.Array, w: Operand) -> jax.Array:
    """XLA's product; on each device's part where axes are explicit, because blocks cut and merge axes."""
    if not has_explicit_axes():
        return unpacked.fp4_matmul(options, x, w)
    if options.activation == "bfloat16":
        return on_each_device(unpacked.fp4_matmul, options, x, w)

    def of_rows(options: Options, x: jax.Array, w: Operand, scale: jax.Array) -> jax.Array:
        return unpacked.fp4_matmul(options, Operand(x, scale, scaling=rows.scaling), w)

    # Rounded before devices have parts of a row, whose scale is found from all of it.
    rows = unpacked.quantize_rows(x)
    return on_each_device(of_rows, options, rows.values, w, {"scale": ("m", rows.scale)})


def on_each_device(
    multiply: Callable[..., jax.Array],
    options: Options,
    x: jax.Array,
    w: Operand,
    more: dict[str, tuple[str, jax.Array]] | None = None,
) -> jax.Array:
    """Run `multiply(options, x, w)` on the rows of x, on the part of it and of w that a device has.

    What `multiply` needs beside them is in `more`, by its names: axes as `partition` writes them, m for those of the
    rows of x, and the array. A partitioned function may close over no array.
    """
    scaling = w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    (n, k), leading = w.shape, x.shape[:-1]
    arrays = dict(more or {}) | ({} if w.outer is None else {"outer": ("u", w.outer.reshape(1))})

    def local(x: jax.Array, values: jax.Array, scale: jax.Array, *given: jax.Array, summed_over: Any) -> jax.Array:
        named = dict(zip(arrays, given, strict=True))
        outer = named.pop("outer")[0] if "outer" in named else None
        part = Operand(values, scale, scaling=scaling, outer=outer)
        multiplied = functools.partial(multiply, x=x, w=part, **named)
        asked = dataclasses.replace(options, out_sharding=None)
        if not summed_over:
            return multiplied(asked)
        whole = lax.psum(multiplied(dataclasses.replace(asked, out_dtype=jnp.dtype(jnp.float32))), summed_over)
        return whole.astype(options.out_dtype)

    summed, kept = ("k", "n") if options.contracts == "k" else ("n", "k")
    scales = "n j" if scaling.tile == "vector" else "i j"
    letters = [axes for axes, _ in arrays.values()]
    rule = ", ".join([f"m {summed}, n h, {scales}", *letters]) + f" -> m {kept}"
    blocks = {"h": BlocksOf("k", 2, k), "j": BlocksOf("k", scaling.block, k), "i": BlocksOf("n", scaling.block, n)}
    wanted = _wanted(options, x, w)
    return partitioned(local, rule, blocks, merged={"m": leading}, wanted=wanted)(
        x, w.values, w.scale, *(array for _, array in arrays.values())
    )


def _wanted(options: Options, x: jax.Array, w: Operand) -> tuple[Any, ...] | None:
    """The spec that JAX gives the product of these values, under a mesh with explicit axes."""
    if not has_explicit_axes():
        return None
    # Codes and values of w are split alike along n; k is summed, so half its length will do.
    axes = (((x.ndim - 1,), (1 if options.contracts == "k" else 0,)), ((), ()))
    like = jax.ShapeDtypeStruct(w.shape, jnp.bfloat16, sharding=jax.typeof(w.values).sharding)
    product = functools.partial(lax.dot_general, dimension_numbers=axes, out_sharding=options.out_sharding)
    made = jax.eval_shape(product, jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=jax.typeof(x).sharding), like)
    return entries(made.sharding, made.ndim)
