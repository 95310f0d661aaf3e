"""`matmul`: the product of an FP8 operand with an FP8 weight of one or two halves.

`skip_matmul` skips zero blocks, and `add_product` adds to a sum.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.checks import check_choice
from pallas_kernels.dispatch import Backend, Implementation, dispatch, note
from pallas_kernels.matmul import cudnn, mosaic, reference, triton
from pallas_kernels.operands import (
    Accumulation,
    Block,
    MatmulOptions,
    Operand,
    Row,
    Tensor,
    check_operands,
    sizes,
)
from pallas_kernels.specs import Sharding, entries, moved
from pallas_kernels.tuning import Key
from pallas_kernels.wire import Wire, check_wire

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float

# c of |out - exact| <= c * scale * sum_k |x| |w + w_lo|, before the output is rounded,
# on tensor cores. Their accumulator keeps about 14 bits of each addend and truncates.
# "fast" sums all of k there, "full" 128 of it at a time, or 256 in the Mosaic kernel's
# products with one half. With two halves the kernel adds both in one accumulator, which
# truncates more of the small one. Triton adds in float32. The worst that was measured
# on an H200 for k from 512 to 16384: 2**-11.7, 2**-13.7, 2**-10.3 and 2**-12 for the
# first four.
SUM_BOUND: dict[tuple[Backend, Accumulation], float] = {
    ("xla", "fast"): 2.0**-11,
    ("xla", "full"): 2.0**-13,
    ("mosaic", "fast"): 2.0**-10,
    ("mosaic", "full"): 2.0**-11,
    ("triton", "fast"): 2.0**-13,
    ("triton", "full"): 2.0**-13,
}

_XLA = Implementation("xla", reference.matmul, key=reference.key)
IMPLEMENTATIONS = {
    Tensor: (mosaic.KERNEL, triton.KERNEL, _XLA),
    Block: (mosaic.KERNEL, triton.KERNEL, cudnn.KERNEL, _XLA),
}


def matmul(
    x: Operand,
    w: Operand,
    bias: "Float[jax.Array, ' n'] | None" = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    accumulation: Accumulation | None = None,
    out_sharding: Sharding = None,
    wire: Wire | None = None,
    backend: Backend | None = None,
) -> "Float[jax.Array, '*rows n']":
    """Return `x @ w.T + bias` of dequantized operands.

    Use it for quantized operands; `tcfp_jax.matmul` quantizes arrays and has a
    gradient. Both operands are contracted along their last axes:
    `out[..., n] = sum_k x[..., k] s_x * (w[n, k] + w_lo[n, k]) s_w + bias[n]`, where
    each s is the scale of its value: one for the tensor, the row, or the block. A
    weight of more than two axes, `[n, *c]`, is contracted over all but its first, with
    the same trailing axes of `x`; weight gradients have this form.

    Args:
      x: `[..., k]`, without a residual. Blocks of x are vectors.
      w: `[n, k]`; its residual, if it has one, shares its scales.
      bias: real floats `[n]`; XLA adds it in `out_dtype`, the kernels before they round
        to it.
      out_dtype: a real float; sums are scaled in float32 and then rounded to it.
      accumulation: "fast" adds in the tensor core's own accumulator (about 14 bits of
        each addend survive), "full" promotes to float32 during the sum; `SUM_BOUND` has
        the error of each. None is "full" for blocks, which are promoted where they are
        scaled, and "fast" for all others. Without FP8 tensor cores both are exact
        float32.
      out_sharding: sharding of the result under an explicit mesh, as in
        `lax.dot_general`.
      wire: dtype in which devices that split k add their partial sums, see
        `pallas_kernels.wire`; None is `out_dtype`.
      backend: None for the fastest one, or a name.

    Returns:
      `[..., n]` in `out_dtype`. Sizes that are not multiples of 16 work; cuBLASLt then
      pads a copy of the operands. With one scale a tensor the product of both scales
      must be a normal number, 2**-126 or more, or the result is 0: max |x| max |w| must
      be at least 2**-108. Rows and blocks are scaled one after the other and have no
      such limit.

    Raises:
      TypeError: an operand is not FP8, its halves differ in format, or scales of blocks
        are not E8M0.
      ValueError: contracted sizes differ, scales do not fit their values, bias is not
        `[n]`, blocks with fast accumulation, or an unknown `accumulation`, `wire` or
        `backend`.
      NotImplementedError: E5M2 x E5M2, which no tensor core multiplies; scalings that
        no product combines; or a named backend that cannot run this product.

    >>> one = Operand(jnp.ones((2, 16), jnp.float8_e4m3fn), jnp.float32(0.5))
    >>> matmul(one, one).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """
    if not isinstance(w.scaling, Tensor):
        w = w.settled()
    check_operands(x, w)
    if wire is not None:
        check_wire(wire)
    blocks = w.scaling.in_blocks
    accumulation = accumulation or ("full" if blocks else "fast")
    if accumulation not in ("fast", "full"):
        check_choice("accumulation", accumulation, ("fast", "full"))
    if blocks and accumulation == "fast":
        raise ValueError(
            f'accumulation="fast" with {w.scaling}: a product is promoted to float32'
            ' where its blocks are scaled; use accumulation="full"'
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(
            f"bias has shape {list(bias.shape)}, but w{list(w.shape)} has"
            f" n={w.shape[0]} outputs"
        )
    options = MatmulOptions(jnp.dtype(out_dtype), accumulation, out_sharding, wire)
    if isinstance(w.scaling, Row):
        return _by_rows(options, x, w, bias, backend)
    if w.lo_scale is not None:
        # The scales of a residual only say which of its blocks are zero; `skip_matmul`
        # reads them.
        w = replace(w, lo_scale=None)
    return dispatch(
        "matmul", IMPLEMENTATIONS[type(w.scaling)], backend, options, x, w, bias
    )


def skip_matmul(
    x: Operand,
    w: Operand,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: Sharding = None,
    backend: Backend | None = None,
) -> Array:
    """Return `x @ w.T` without blocks of k whose residual is all zero in an n-tile.

    The kernel neither loads nor multiplies them. The result differs from `matmul` only
    in the order of sums. Use it for weights that FP8 holds mostly exactly.

    Args:
      x: `[..., k]` in vectors.
      w: `[n, k]` in blocks, with `lo` and `lo_scale`, whose code 0 marks a block of
        zeros (see `dual_quantize`).
      out_dtype: a real float; sums are float32.
      out_sharding: sharding of the result under an explicit mesh, as in
        `lax.dot_general`.

    Returns:
      `[..., n]` in `out_dtype`.

    Raises:
      TypeError, ValueError: as `matmul`; or a weight without blocks or without the
        scales of a residual.
      NotImplementedError: the named backend cannot run it.

    >>> from pallas_kernels.quantize.api import dual_quantize, quantize
    >>> w = dual_quantize(jnp.ones((32, 64)), Block(32)).rows
    >>> x = quantize(jnp.ones((32, 64)), jnp.float8_e4m3fn, Block(32, "vector")).rows
    >>> float(skip_matmul(x, w)[0, 0])
    64.0
    """
    check_operands(x, w)
    if not w.scaling.in_blocks or w.lo is None or w.lo_scale is None:
        raise ValueError(
            f"w has the scaling {w.scaling} and {'a' if w.lo is not None else 'no'}"
            " residual: only a residual in blocks has blocks to leave out; use matmul,"
            " or dual_quantize(w, Block(128))"
        )
    options = MatmulOptions(jnp.dtype(out_dtype), "full", out_sharding)
    # Zeros add nothing, so the definition is the one of `matmul`.
    return dispatch("skip_matmul", (mosaic.KERNEL, _XLA), backend, options, x, w, None)


def add_product(
    total: Array,
    x: Operand,
    w: Operand,
    accumulation: Accumulation,
    backend: Backend | None = None,
) -> Array:
    """Return `total + x @ w.T`, float32 `[..., n]`.

    Use it to sum weight gradients over chunks of tokens. With one scale per tensor XLA
    makes one GEMM of it, which adds in place. On an H100 it takes 1.5 ms for
    `[2048, 4096] x [4096, 128256]`, where a product and a sum take 2.5 ms.

    `accumulation` and `backend` are as in `matmul`.

    >>> one = Operand(jnp.ones((2, 16), jnp.float8_e4m3fn), jnp.float32(0.5))
    >>> add_product(jnp.ones((2, 2)), one, one, "fast").tolist()
    [[5.0, 5.0], [5.0, 5.0]]
    """
    options = MatmulOptions(jnp.dtype(jnp.float32), accumulation)
    if (
        backend not in (None, "xla")
        or not isinstance(w.scaling, Tensor)
        or w.lo is not None
    ):
        return total + matmul(
            x, w, out_dtype=jnp.float32, accumulation=accumulation, backend=backend
        )
    check_operands(x, w)
    note(reference.key(options, x, w, None), x, w)
    return reference.add_product(options, x, w, total)


def _by_rows(
    options: MatmulOptions,
    x: Operand,
    w: Operand,
    bias: Array | None,
    backend: Backend | None,
) -> Array:
    """Return the product of unscaled values, scaled afterwards."""
    # Powers of two scale a rounded bfloat16 exactly, so the product may be written as
    # such; others round once.
    has_powers = x.scaling.scale == w.scaling.scale == "pow2"
    is_exact = has_powers and options.out_dtype == jnp.bfloat16
    unscaled_options = replace(
        options, out_dtype=jnp.dtype(jnp.bfloat16 if is_exact else jnp.float32)
    )
    # A constant, which `reference` can tell from a scale
    one: Any = np.ones((), jnp.bfloat16)
    unscaled = dispatch(
        "matmul",
        IMPLEMENTATIONS[Tensor],
        backend,
        unscaled_options,
        Operand(x.values, one),
        Operand(w.values, one),
        None,
    )
    m, _, n = sizes(x, w)
    variant = f"{unscaled.dtype} {jnp.dtype(options.out_dtype)}"
    note(Key("row_scale", variant, (m, n)), unscaled)
    of_x = x.scale
    of_w = w.scale
    if options.out_sharding is not None:
        # Scales must lie where the rows and columns of the result do, not where they
        # were found.
        spec = entries(options.out_sharding, unscaled.ndim)
        of_x = moved(of_x, spec[:-1])
        of_w = moved(of_w, spec[-1:])
    out = scale_rows(unscaled, of_x, of_w, options.out_dtype)
    return out if bias is None else out + bias.astype(options.out_dtype)


def scale_rows(
    unscaled: Array,
    of_x: Array,
    of_w: Array,
    out_dtype: DTypeLike,
) -> Array:
    """Scale the product `[..., n]` of the values of operands with a scale per row."""
    wide = unscaled.astype(jnp.float32)
    return numerics.scaled_by_both(wide, of_x[..., None], of_w).astype(out_dtype)
