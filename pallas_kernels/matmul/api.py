"""`matmul`: the product of an FP8 operand with an FP8 weight of one or two halves, accumulated in float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.checks import check_operands
from pallas_kernels.dispatch import Backend, Implementation, dispatch, note
from pallas_kernels.matmul import mosaic, mosaic_blocks, parts, reference, triton
from pallas_kernels.operands import Accumulation, Block, Operand, Product, Row, Tensor, sizes
from pallas_kernels.specs import entries
from pallas_kernels.tuning import Key
from pallas_kernels.wire import Wire, check_wire

# c of |out - exact| <= c * scale * sum_k |x| |w + w_lo|, before the output is rounded, on tensor cores. Their
# accumulator keeps about 14 bits of each addend and truncates: "fast" sums all of k there, "full" 128 of it at a time,
# or 256 in the Mosaic kernel's products with one half. With two it adds both in one accumulator, which cuts more off
# the small one. Triton adds in float32. Measured on an H200 for k from 512 to 16384 (LOG.md): the worst were 2**-11.7,
# 2**-13.7, 2**-10.3 and 2**-12.
SUM_BOUND: dict[tuple[Backend, Accumulation], float] = {
    ("xla", "fast"): 2.0**-11, ("xla", "full"): 2.0**-13,
    ("mosaic", "fast"): 2.0**-10, ("mosaic", "full"): 2.0**-11,
    ("triton", "fast"): 2.0**-13, ("triton", "full"): 2.0**-13,
}  # fmt: skip

_TRITON = Implementation("triton", triton.matmul, triton.reject, triton.decline)
IMPLEMENTATIONS = {
    Tensor: (
        Implementation("mosaic", mosaic.matmul, mosaic.reject, configure=mosaic.configure, timed=True),
        _TRITON,
        Implementation("xla", parts.by_reference, key=reference.key),
    ),
    Block: (
        Implementation(
            "mosaic", mosaic_blocks.matmul, mosaic_blocks.reject, configure=mosaic_blocks.configure, timed=True
        ),
        _TRITON,
        Implementation("xla", parts.by_reference, key=reference.key),
    ),
}


def matmul(
    x: Operand,
    w: Operand,
    bias: jax.Array | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    accumulation: Accumulation | None = None,
    out_sharding: Any = None,
    wire: Wire | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """`x @ w.T + bias` of dequantized operands, both contracted along their last axes.

    `out[..., n] = sum_k x[..., k] s_x * (w[n, k] + w_lo[n, k]) s_w + bias[n]`, each s that of its value: one for the
    tensor, one for the row, or one for the block. A weight of more than two axes, `[n, *c]`, is contracted over all but
    its first, with the same trailing axes of `x`: the form of a weight gradient.

    Args:
      x: `[..., k]`, without a residual. Blocks of x are vectors.
      w: `[n, k]`; its residual, if it has one, shares its scales.
      bias: real floats `[n]`; XLA adds it in `out_dtype`, the kernels before they round to it.
      out_dtype: a real float; sums are scaled in float32 and then rounded to it.
      accumulation: "fast" adds in the tensor core's own accumulator (about 14 bits of each addend survive), "full"
        promotes to float32 during the sum; `SUM_BOUND` says what each is worth. None is "full" for blocks, which are
        promoted where they are scaled, and "fast" for all others. Both are exact float32 where there are no FP8 tensor
        cores.
      out_sharding: sharding of the result under an explicit mesh, as in `lax.dot_general`.
      wire: how devices that split k add their partial sums, see `pallas_kernels.wire`; None is `out_dtype`.

    Returns:
      `[..., n]` in `out_dtype`. Sizes that are not multiples of 16 work; cuBLASLt then pads a copy of the operands.

    Raises:
      TypeError: an operand is not FP8, its halves differ in format, or scales of blocks are not E8M0.
      ValueError: contracted sizes differ, scales do not fit their values, bias is not `[n]`, fast accumulation of
        blocks, or `accumulation` or `backend` is unknown.
      NotImplementedError: E5M2 x E5M2, which no tensor core multiplies; scalings that no product combines; or what the
        named backend cannot run.

    >>> one = Operand(jnp.ones((2, 16), jnp.float8_e4m3fn), jnp.float32(0.5))
    >>> matmul(one, one).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """
    x, w = check_operands(x, w if isinstance(w.scaling, Tensor) else w.settled())
    check_wire(wire)
    options = dataclasses.replace(_options(w, bias, out_dtype, accumulation, out_sharding), wire=wire)
    if isinstance(w.scaling, Row):
        return _by_rows(options, x, w, bias, backend)
    if w.lo_scale is not None:
        # The scales of a residual only say which of its blocks are zero; `skip_matmul` reads them.
        w = dataclasses.replace(w, lo_scale=None)
    return dispatch("matmul", IMPLEMENTATIONS[type(w.scaling)], backend, options, x, w, bias)


def _by_rows(options: Product, x: Operand, w: Operand, bias: jax.Array | None, backend: Backend | None) -> jax.Array:
    """The product of unscaled values, scaled afterwards."""
    # Powers of two scale a rounded bfloat16 exactly, so the product may be written as such; others round once.
    exact = x.scaling.scale == w.scaling.scale == "pow2" and options.out_dtype == jnp.bfloat16
    unscaled_options = dataclasses.replace(options, out_dtype=jnp.dtype(jnp.bfloat16 if exact else jnp.float32))
    a, b = (Operand(o.values, np.ones((), jnp.bfloat16)) for o in (x, w))  # type: ignore[arg-type]
    unscaled = dispatch("matmul", IMPLEMENTATIONS[Tensor], backend, unscaled_options, a, b, None)
    m, _, n = sizes(x, w)
    note(Key("row_scale", f"{unscaled.dtype} {jnp.dtype(options.out_dtype)}", (m, n)), unscaled)
    of_x, of_w = x.scale, w.scale
    if options.out_sharding is not None:
        # Scales lie where the rows and columns of the result do, which need not be where they were found.
        spec = entries(options.out_sharding, unscaled.ndim)
        of_x, of_w = (jax.sharding.reshard(s, PartitionSpec(*p)) for s, p in ((of_x, spec[:-1]), (of_w, spec[-1:])))
    out = reference.scale_rows(unscaled, of_x, of_w, options.out_dtype)
    return out if bias is None else out + bias.astype(options.out_dtype)


def _options(w: Operand, bias: jax.Array | None, out_dtype: DTypeLike, accumulation: Any, out_sharding: Any) -> Product:
    blocks = isinstance(w.scaling, Block)
    if accumulation is None:
        accumulation = "full" if blocks else "fast"
    if accumulation not in ("fast", "full"):
        raise ValueError(f'accumulation={accumulation!r} is unknown; use "fast" or "full"')
    if blocks and accumulation == "fast":
        raise ValueError(
            f'accumulation="fast" with {w.scaling}: a product is promoted to float32 where its blocks are scaled; use '
            'accumulation="full"'
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}, but w{list(w.shape)} has n={w.shape[0]} outputs")
    return Product(jnp.dtype(out_dtype), accumulation, out_sharding)
