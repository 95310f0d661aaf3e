"""`fp4_matmul` of a weight that is unpacked once.

This pays for many rows of x, and for the gradient of x. BF16 activations are multiplied
by the weight in BF16. If codes times scales are E4M3 numbers (the rule "fold_exact"),
E4M3 activations are multiplied on FP8 tensor cores. Then `unpack` writes the E4M3
weight in the orientation that the product reads.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.fp4_matmul import reference, triton
from pallas_kernels.fp4_matmul.devices import on_each_device
from pallas_kernels.fp4_matmul.reference import E4M3_FACTOR, Fp4Options, scaling_of
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Operand, Row
from pallas_kernels.quantize.api import quantize
from pallas_kernels.specs import has_explicit_axes

# Both unpack a weight to E4M3.
UNPACK_IMPLEMENTATIONS = (
    triton.UNPACK,
    Implementation("xla", reference.unpack),
)


def fp4_matmul(options: Fp4Options, x: Array | Operand, w: Operand) -> Array:
    """Return the product, see `api.fp4_matmul`.

    Under a mesh with explicit axes each device multiplies its part, because blocks cut
    axes. The numbers of codes are exact in bfloat16.
    """
    if isinstance(x, Operand):
        float32 = jnp.dtype(jnp.float32)
        wide = replace(options, activation="bfloat16", out_dtype=float32)
        out = fp4_matmul(wide, reference.decode(x), w)
        return (out if x.outer is None else out * x.outer).astype(options.out_dtype)
    if not has_explicit_axes():
        return multiply(options, x, w)
    if options.activation == "bfloat16":
        return on_each_device(multiply, options, x, w)
    # A row's scale is found from all of it, so rows are rounded before devices have
    # parts of them.
    return on_each_device(multiply, options, quantize_rows(x), w)


def multiply(options: Fp4Options, x: Array | Operand, w: Operand) -> Array:
    """Return the product on one device; the rows of x may be rounded already.

    The format library's "fold_exact" scales begin at 2**-3, where the smallest number
    times `E4M3_FACTOR` is still an E4M3 number. Smaller scales that someone else found
    make values round.
    """
    folds = scaling_of(w).rule == "fold_exact"
    if options.activation == "bfloat16" or not folds:
        return reference.fp4_matmul(options, x, w)
    rows = x if isinstance(x, Operand) else quantize_rows(x)
    outer = jnp.float32(1) if w.outer is None else w.outer
    # FP8 tensor cores of Hopper read both operands along the summed axis.
    values = unpack(w, turned=options.contracts == "n")
    scale = jnp.full(values.shape[0], 1 / E4M3_FACTOR) * outer
    return matmul(
        rows,
        Operand(values, scale, scaling=Row("float32")),
        out_dtype=options.out_dtype,
        out_sharding=options.out_sharding,
    )


def quantize_rows(x: Array) -> Operand:
    """Return `reference.quantize_rows(x)`, by a kernel if one was timed as faster."""
    if not x.size:
        return reference.quantize_rows(x)
    return quantize(x, reference.ROWS.dtype, reference.ROWS.scaling).rows


def unpack(
    w: Operand,
    *,
    turned: bool = False,
    backend: Backend | None = None,
) -> Array:
    """Return a weight times `E4M3_FACTOR` in E4M3: `[n, k]`, or turned `[k, n]`.

    The signs of NaN are the device's own.
    """
    return dispatch("unpack_fp4", UNPACK_IMPLEMENTATIONS, backend, turned, w)
