"""Passes of `tiled.py` by Pallas Mosaic on Hopper, which this file does not import.

`passes.py` has the kernel. It is imported when a pass runs: that takes a second which a
program without this kernel need not pay, and needs jax 0.11.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.hopper import plan
from pallas_kernels.tiled import Engine, Pass


def reject(
    matrices: Sequence[Array | jax.ShapeDtypeStruct], columns: int = plan.COLUMNS
) -> str | None:
    """Return the reason why no pass over these matrices can run here, or None.

    Args:
      matrices: the inputs of the pass.
      columns: columns of a tile.
    """
    if (reason := plan.reject(jnp.bfloat16)) is not None:
        return reason
    dtypes = [str(matrix.dtype) for matrix in matrices if matrix.dtype != jnp.uint32]
    if not {*dtypes} <= {"bfloat16", "float32"}:
        return (
            f'{" and ".join(dtypes)} must be bfloat16 or float32; use backend="triton"'
            ' or "xla"'
        )
    *leading, k = matrices[0].shape
    m = math.prod(leading)
    if m and k and m % plan.ROWS == 0 and k % columns == 0:
        return None
    return (
        f"[{m}, {k}] must be multiples of {plan.ROWS} and {columns} for"
        ' backend="mosaic"'
    )


def _run(one: Pass, *operands: Array) -> list[Array] | None:
    columns = plan.columns_of(one.tiling.rows[0])
    if reject(operands[: one.matrices], columns) is not None:
        return None
    from pallas_kernels.hopper import passes

    return passes.call(one, *operands)


MOSAIC = Engine(_run, calls_back=True)
