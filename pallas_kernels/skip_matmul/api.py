"""`skip_matmul`: `matmul` of a residual weight in blocks without the blocks of the residual that are all zeros."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.matmul import reference
from pallas_kernels.operands import Block, Operand, Product, check_operands
from pallas_kernels.skip_matmul import mosaic
from pallas_kernels.specs import Sharding

IMPLEMENTATIONS = (
    Implementation("mosaic", mosaic.skip_matmul, mosaic.reject, configure=mosaic.configure, timed=True),
    # Zeros add nothing, so the definition is the one of `matmul`.
    Implementation("xla", reference.matmul, key=mosaic.key),
)


def skip_matmul(
    x: Operand,
    w: Operand,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: Sharding = None,
    backend: Backend | None = None,
) -> jax.Array:
    """Return `x @ w.T` without the blocks of k in which all of an n-tile's residual is zero.

    The kernel neither loads nor multiplies them. The result differs from `matmul` only in the order of sums. Use it
    for weights that FP8 holds mostly exactly.

    Args:
      x: `[..., k]` in vectors.
      w: `[n, k]` in blocks, with `lo` and `lo_scale`, whose code 0 marks a block of zeros (see `dual_quantize`).
      out_dtype: a real float; sums are float32.
      out_sharding: sharding of the result under an explicit mesh, as in `lax.dot_general`.

    Returns:
      `[..., n]` in `out_dtype`.

    Raises:
      TypeError, ValueError: as `matmul`; or a weight without blocks or without the scales of a residual.
      NotImplementedError: the named backend cannot run it.

    >>> from pallas_kernels.quantize.api import dual_quantize
    >>> from pallas_kernels.quantize.api import quantize
    >>> w = dual_quantize(jnp.ones((32, 64)), Block(32)).rows
    >>> x = quantize(jnp.ones((32, 64)), jnp.float8_e4m3fn, Block(32, "vector")).rows
    >>> float(skip_matmul(x, w)[0, 0])
    64.0
    """
    check_operands(x, w)
    if not isinstance(w.scaling, Block) or w.lo is None or w.lo_scale is None:
        raise ValueError(
            f"w has the scaling {w.scaling} and {'a' if w.lo is not None else 'no'} residual: only a residual in "
            "blocks has blocks to leave out; use matmul, or dual_quantize(w, Block(128))"
        )
    options = Product(jnp.dtype(out_dtype), "full", out_sharding)
    return dispatch("skip_matmul", IMPLEMENTATIONS, backend, options, x, w, None)
