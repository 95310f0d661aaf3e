"""`quantize_computed`: a function of a matrix, value by value, in FP8.

One pass writes both orientations:

    values[i, j] = round(compute(x[i, j], rows[i], columns[j]))

The function divides by a scale that is known before the pass, and by a bound of its
values it has nothing to clip. So its floats are never written. XLA makes one fusion of
it, too, but stores the transposed bytes one at a time.

The exponential of a kernel may differ from XLA's in the last bits, and so may then the
rounding of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.arithmetic import Portable
from pallas_kernels.dispatch import Backend, Implementation, dispatch, lacks_fp8
from pallas_kernels.hopper import engine as hopper
from pallas_kernels.tiled import (
    Arrays,
    Body,
    Engine,
    Operands,
    Output,
    Tiling,
    map_tiles,
)
from pallas_kernels.triton_passes import TRITON

# Fewer values a thread than a plain quantizer, because each of them has several numbers
# at a time.
_TILING = Tiling(columns=(128, 64, 32, 16))


@dataclass(frozen=True)
class _Computed(Body):
    """The static options, which are the body of the pass.

    Functions that are equal must compare equal, so that their kernel is traced once.
    """

    compute: Callable[..., Arrays]
    dtype: DTypeLike
    results: int

    def values(self, do: Portable, operands: Operands, maxima: Arrays) -> Arrays:
        """Return the values of a tile, see `Body`."""
        return tuple(wide.astype(self.dtype) for wide in self.compute(*operands))


def _by_kernel(
    engine: Engine,
    options: _Computed,
    x: Array,
    rows: Arrays,
    columns: Arrays,
) -> list[Array]:
    if options.results == 2:
        outputs = [Output(options.dtype), Output(options.dtype, form="transposed")]
    else:
        outputs = [Output(options.dtype, transposed=True)]
    return map_tiles(
        options,
        [x],
        outputs,
        name="quantize_computed",
        engine=engine,
        tiling=_TILING,
        rows=rows,
        columns=columns,
    )


def _by_xla(options: _Computed, x: Array, rows: Arrays, columns: Arrays) -> list[Array]:
    of_rows = [vector[:, None] for vector in rows]
    of_columns = [vector[None, :] for vector in columns]
    values = options.whole([x, *of_rows, *of_columns])
    return [values[0], values[-1].T]


def _reject_triton(
    options: _Computed,
    x: Array,
    rows: Arrays,
    columns: Arrays,
) -> str | None:
    return _TILING.misfit("x", *x.shape)


def _reject_mosaic(
    options: _Computed,
    x: Array,
    rows: Arrays,
    columns: Arrays,
) -> str | None:
    return hopper.reject([x])


# No shape needs to be timed: for 8192 x 128256 logits on an H100 XLA takes 2.4 times as
# long.
IMPLEMENTATIONS = (
    Implementation("triton", partial(_by_kernel, TRITON), _reject_triton, lacks_fp8),
    Implementation("mosaic", partial(_by_kernel, hopper.MOSAIC), _reject_mosaic),
    Implementation("xla", _by_xla),
)


def quantize_computed(
    compute: Callable[..., Arrays],
    x: Array,
    dtype: DTypeLike,
    *,
    rows: Arrays = (),
    columns: Arrays = (),
    results: int = 1,
    backend: Backend | None = None,
) -> tuple[Array, Array]:
    """Return FP8 values `[m, k]` and `[k, m]` of `compute(x, *rows, *columns)`.

    Use it instead of `quantize` if the values are computed anyway and their scale is
    known before: the float values are then never written to memory.

    Args:
      compute: elementwise function of x `[m, k]`, of rows as `[m, 1]` and of columns as
        `[1, k]`. It returns one float32 array, or two, of which the second is
        transposed. No magnitude exceeds the largest of `dtype`.
      x: real floats `[m, k]`.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      rows, columns: vectors `[m]` and `[k]`.
      results: the number of arrays that `compute` returns.
      backend: None for the fastest one, or a name.

    >>> x = jnp.array([[0.5, 2.0]])
    >>> values, turned = quantize_computed(lambda x: (jnp.exp2(x),), x, jnp.float8_e5m2)
    >>> values.tolist(), turned.shape
    ([[1.5, 4.0]], (2, 1))
    """
    options = _Computed(compute, jnp.dtype(dtype), results)
    arrays = (x, tuple(rows), tuple(columns))
    values, turned = dispatch(
        "quantize_computed", IMPLEMENTATIONS, backend, options, *arrays
    )
    return values, turned
