"""`quantize_computed`: a function of a matrix, value by value, in FP8 and in both
orientations by one pass.

    values[i, j] = round(compute(x[i, j], rows[i], columns[j]))

The function divides by a scale that is known before the pass, and by a bound of its
values it has nothing to clip. So its floats are never written. XLA makes one fusion of
it, too, but stores the transposed bytes one at a time.

The exponential of a kernel may differ from XLA's in the last bits, and so may then the
rounding of a value.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Backend, Implementation, dispatch, lacks_fp8
from pallas_kernels.quantize import mosaic
from pallas_kernels.tiled import (
    Engine,
    Operations,
    Output,
    Tiling,
    by_triton,
    map_tiles,
)

Vectors = tuple[jax.Array, ...]
# Fewer values a thread than a plain quantizer, because each of them has several numbers
# at a time.
_TILING = Tiling(columns=(128, 64, 32, 16))


@dataclass(frozen=True)
class Computed:
    """The static options. Functions that are equal must compare equal, so that their
    kernel is traced once.
    """

    compute: Callable[..., tuple[jax.Array, ...]]
    dtype: DTypeLike
    results: int

    def tile(self, do: Operations, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Return the values of a tile."""
        return tuple(wide.astype(self.dtype) for wide in self.compute(*operands))


def _reject(
    options: Computed, x: jax.Array, rows: Vectors, columns: Vectors
) -> str | None:
    return _TILING.misfit("x", *x.shape)


def _kernel(
    options: Computed,
    x: jax.Array,
    rows: Vectors,
    columns: Vectors,
    engine: Engine = by_triton,
) -> list[jax.Array]:
    outputs = [Output(options.dtype, transposed=True)]
    if options.results == 2:
        outputs = [Output(options.dtype), Output(options.dtype, form="transposed")]
    run = functools.partial(
        map_tiles,
        name="quantize_computed",
        tiling=_TILING,
        vectors=(rows, columns),
        engine=engine,
    )
    return run(options.tile, [x], [], outputs)


def _reference(
    options: Computed, x: jax.Array, rows: Vectors, columns: Vectors
) -> list[jax.Array]:
    values = options.tile(
        Operations(), x, *(v[:, None] for v in rows), *(v[None] for v in columns)
    )
    return [values[0], values[-1].T]


# No shape needs to be timed: for 8192 x 128256 logits on an H100 XLA takes 2.4 times as
# long.
_KERNEL = Implementation("triton", _kernel, _reject, lambda *_: lacks_fp8())
_BY_MOSAIC = functools.partial(_kernel, engine=mosaic.by_mosaic)
_MOSAIC = Implementation(
    "mosaic", _BY_MOSAIC, lambda options, x, *_: mosaic.reject_pass([x])
)
IMPLEMENTATIONS = (_KERNEL, _MOSAIC, Implementation("xla", _reference))


def quantize_computed(
    compute: Callable[..., tuple[jax.Array, ...]],
    x: jax.Array,
    dtype: DTypeLike,
    *,
    rows: Vectors = (),
    columns: Vectors = (),
    results: int = 1,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return FP8 values `[m, k]` and `[k, m]` of `compute(x, *rows, *columns)`.

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
    options = Computed(compute, jnp.dtype(dtype), results)
    arrays = (x, tuple(rows), tuple(columns))
    values, turned = dispatch(
        "quantize_computed", IMPLEMENTATIONS, backend, options, *arrays
    )
    return values, turned
