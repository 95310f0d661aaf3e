"""`skip_matmul`: `matmul` of a residual weight in blocks, which leaves out the residual's blocks that are all zeros."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.checks import check_operands
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.matmul import parts
from pallas_kernels.operands import Block, Operand, Product
from pallas_kernels.skip_matmul import mosaic

IMPLEMENTATIONS = (
    Implementation("mosaic", mosaic.skip_matmul, mosaic.reject, configure=mosaic.configure, timed=True),
    # Zeros add nothing: the definition is that of `matmul`.
    Implementation("xla", parts.by_reference, key=mosaic.key),
)


def skip_matmul(
    x: Operand,
    w: Operand,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: Any = None,
    backend: Backend | None = None,
) -> jax.Array:
    """`x @ w.T`, where a kernel neither loads nor multiplies a block of k where all of an n-tile's residual is zero.

    The result is that of `matmul` but for the order of sums. Worth it for weights of which FP8 holds much exactly.

    Args:
      x: `[..., k]` in vectors.
      w: `[n, k]` in blocks, with `lo` and `lo_scale`, whose code 0 marks a block of zeros (see `dual_quantize`).
      out_dtype: a real float; sums are float32.
      out_sharding: of the result under an explicit mesh, as in `lax.dot_general`.

    Returns:
      `[..., n]` in `out_dtype`.

    Raises:
      TypeError, ValueError: those of `matmul`; a weight without blocks or without the scales of a residual.
      NotImplementedError: what the named backend cannot run.

    >>> from pallas_kernels.dual_quantize.api import dual_quantize
    >>> from pallas_kernels.quantize.api import quantize
    >>> w = dual_quantize(jnp.ones((32, 64)), Block(32)).rows
    >>> x = quantize(jnp.ones((32, 64)), jnp.float8_e4m3fn, Block(32, "vector")).rows
    >>> float(skip_matmul(x, w)[0, 0])
    64.0
    """
    x, w = check_operands(x, w)
    if not isinstance(w.scaling, Block) or w.lo is None or w.lo_scale is None:
        raise ValueError(
            f"w has the scaling {w.scaling} and {'a' if w.lo is not None else 'no'} residual: only a residual in "
            "blocks has blocks to leave out; use matmul, or dual_quantize(w, Block(128))"
        )
    options = Product(jnp.dtype(out_dtype), "full", out_sharding)
    return dispatch("skip_matmul", IMPLEMENTATIONS, backend, options, x, w, None)
