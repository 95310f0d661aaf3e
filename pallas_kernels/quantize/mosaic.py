"""The quantizers on Hopper, by the passes of Pallas Mosaic (`hopper/engine.py`)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation, device_kind
from pallas_kernels.hopper import engine, plan
from pallas_kernels.operands import Block, Operand, Quantization, Quantized
from pallas_kernels.quantize import dual_tiles, tiles
from pallas_kernels.specs import device_count
from pallas_kernels.tiled import Output, map_tiles

_MEMORY = plan.SHARED_MEMORY - 2048  # for tiles, besides maxima and barriers


def _reject(options: Quantization, x: Array, amax: Array | None) -> str | None:
    """Return the reason why this kernel cannot quantize x, or None."""
    if x.ndim < 2:
        return f'x{list(x.shape)} is not a matrix; use backend="xla" or jax.vmap'
    both = options.orientation == "both"
    # A transpose of other values is computed where rows are, and then turned.
    has_other_values = both and not options.scaling.serves_both
    return _misfit(options, [x], 1 + both + has_other_values)


def _reject_dual(
    options: Quantization,
    w: Array,
    error: Array | None,
    bits: Array | None,
    amax: Array | None,
) -> str | None:
    """Return the reason why this kernel cannot split w, or None."""
    if w.ndim != 2:
        return f'w{list(w.shape)} is not a matrix; use backend="xla" or jax.vmap'
    if error is not None and device_count() > 1 and device_kind() != "cpu":
        # JAX cannot partition a function with references, by which the error is
        # replaced where it lies.
        return 'an error on several devices; use backend="triton" or "xla"'
    scaling = options.scaling
    if isinstance(scaling, Block) and not scaling.squares:
        return f'{scaling.tile} blocks; use squares, or backend="xla"'
    matrices = [matrix for matrix in (w, error, bits) if matrix is not None]
    return _misfit(options, matrices, 4 if options.orientation == "both" else 2)


def _misfit(
    options: Quantization,
    matrices: Sequence[Array],
    results: int,
) -> str | None:
    """Return the reason why no pass takes these matrices, or None.

    Args:
      results: tiles of FP8 values in shared memory, transposes included.
    """
    scaling = options.scaling
    columns = plan.columns_of(scaling.size if isinstance(scaling, Block) else 0)
    bytes_of_values = sum(matrix.dtype.itemsize for matrix in matrices) + results
    used = plan.ROWS * columns * bytes_of_values
    if used > _MEMORY:
        return (
            f"a tile takes {used} bytes of shared memory of {_MEMORY}; use smaller"
            ' blocks or backend="triton"'
        )
    return engine.reject(matrices, columns)


def _quantize_rows(options: Quantization, x: Array, amax: Array | None) -> Quantized:
    """Return the quantized tensor with a scale for each row and column.

    See `api.quantize`. XLA finds the scales.
    """
    wide = x.astype(jnp.float32)
    outputs = [Output(options.dtype)]
    kind = options.scaling.scale
    of_rows, inverse = numerics.find_scale(wide, options.dtype, kind, -1)
    if options.orientation == "rows":
        of_columns = None
        column_inverses = []
    else:
        others = tuple(range(x.ndim - 1))
        of_columns, column_inverse = numerics.find_scale(
            wide, options.dtype, kind, others
        )
        column_inverses = [column_inverse]
        outputs.append(Output(options.dtype, form="transposed"))
    values, *turned = map_tiles(
        tiles.Scaled(options.dtype),
        [x],
        outputs,
        name="row_quantize",
        engine=engine.MOSAIC,
        rows=[inverse],
        columns=column_inverses,
    )
    rows = Operand(values, of_rows, scaling=options.scaling)
    if of_columns is None:
        return Quantized(rows)
    return Quantized(rows, Operand(turned[0], of_columns, scaling=options.scaling))


def _kernel(
    run: Callable[..., Quantized], reject: Callable[..., Any]
) -> Implementation:
    return Implementation("mosaic", run, reject, timed=True, replaces="triton")


TILES = _kernel(partial(tiles.quantize, engine.MOSAIC), _reject)
ROWS = _kernel(_quantize_rows, _reject)
DUAL = _kernel(partial(dual_tiles.dual_quantize, engine.MOSAIC), _reject_dual)
