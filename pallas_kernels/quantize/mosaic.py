"""The quantizers on Hopper: the passes over tiles by Pallas Mosaic
(`hopper/passes.py`).
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper import plan
from pallas_kernels.operands import Block, Operand, Quantization, Quantized
from pallas_kernels.specs import device_count
from pallas_kernels.tiled import Operations, Output, Pass, map_tiles

_MEMORY = plan.SHARED_MEMORY - 2048  # for tiles, besides maxima and barriers


def reject(
    options: Quantization, x: jax.Array, *arrays: jax.Array | None
) -> str | None:
    """Return the reason why this kernel cannot quantize or split x, or None; `arrays`
    are those of the op.
    """
    error = arrays[0] if (is_dual := len(arrays) > 1) else None
    if x.ndim < 2 or (is_dual and x.ndim > 2):
        return (
            f"{'w' if is_dual else 'x'}{list(x.shape)} is not a matrix; use"
            ' backend="xla" or jax.vmap'
        )
    if error is not None and device_count() > 1 and device_kind() != "cpu":
        # JAX cannot partition a function with references, by which the error is
        # replaced where it lies.
        return 'an error on several devices; use backend="triton" or "xla"'
    matrices = [matrix for matrix in (x, *arrays[:-1]) if matrix is not None]
    scaling, both = options.scaling, options.orientation == "both"
    if is_dual and isinstance(scaling, Block) and scaling.tile != "square":
        return f'{scaling.tile} blocks; use squares, or backend="xla"'
    # A transpose of other values is computed where rows are, and then turned.
    results = (1 + is_dual) * (1 + both) + (
        both and not is_dual and not scaling.serves_both
    )
    columns = max(plan.COLUMNS, scaling.size if isinstance(scaling, Block) else 0)
    used = (
        plan.ROWS
        * columns
        * (sum(matrix.dtype.itemsize for matrix in matrices) + results)
    )
    if used > _MEMORY:
        return (
            f"a tile takes {used} bytes of shared memory of {_MEMORY}; use smaller"
            ' blocks or backend="triton"'
        )
    return reject_pass(matrices, columns)


def reject_pass(
    matrices: Sequence[jax.Array], columns: int = plan.COLUMNS
) -> str | None:
    """Return the reason why no pass over these matrices in tiles of so many columns can
    run here, or None.
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
    if (m := math.prod(leading)) and k and not m % plan.ROWS and not k % columns:
        return None
    return (
        f"[{m}, {k}] must be multiples of {plan.ROWS} and {columns} for"
        ' backend="mosaic"'
    )


def by_mosaic(one: Pass, *operands: jax.Array) -> list[jax.Array] | None:
    """Run a pass over a device's part, see `tiled.by_triton`."""
    if (
        reject_pass(operands[: one.count], max(plan.COLUMNS, one.tiling.rows[0]))
        is not None
    ):
        return None
    # Imported where it is used: a second that a program without this kernel need not
    # pay, and needs jax 0.11.
    from pallas_kernels.hopper import passes

    return passes.call(one, *operands)


def quantize_rows(
    options: Quantization, x: jax.Array, amax: jax.Array | None
) -> Quantized:
    """Return the quantized tensor with a scale for each row and column, see
    `api.quantize`; XLA finds the scales.
    """
    dtype, wide, both = (
        options.dtype,
        x.astype(jnp.float32),
        options.orientation == "both",
    )
    amaxes = [
        numerics.amax(wide, axis) for axis in (-1, tuple(range(x.ndim - 1)))[: 1 + both]
    ]
    scales, inverses = zip(
        *(
            numerics.scale_and_inverse(amax, dtype, options.scaling.scale)
            for amax in amaxes
        )
    )

    def body(
        do: Operations, x: jax.Array, *inverses: jax.Array
    ) -> tuple[jax.Array, ...]:
        scaled = (
            do.scaled(x.astype(jnp.float32), inverse, dtype) for inverse in inverses
        )
        return tuple(numerics.saturating_cast(values, dtype) for values in scaled)

    outputs, vectors = (
        [Output(dtype), Output(dtype, form="transposed")],
        (inverses[:1], inverses[1:]),
    )
    values = map_tiles(
        body,
        [x],
        [],
        outputs[: 1 + both],
        name="row_quantize",
        vectors=vectors,
        engine=by_mosaic,
    )
    rows, *columns = (
        Operand(*pair, scaling=options.scaling)
        for pair in zip(values, scales, strict=True)
    )
    return Quantized(rows, columns[0] if both else None)
