"""`map_quantize`: what an elementwise expression makes of tensors, quantized: no tensor is written in between."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.expression import Expression
from pallas_kernels.map_quantize import reference, triton
from pallas_kernels.operands import Orientation, Quantization, Quantized, Scaling, Tensor


@dataclass(frozen=True)
class Mapping(Quantization):
    """What `map_quantize` is asked for.

    Attributes:
      expression: what makes the tensors that are quantized.
      shape: of them.
    """

    expression: Any = None
    shape: tuple[int, ...] = ()


IMPLEMENTATIONS = (
    Implementation("triton", triton.map_quantize, triton.reject, triton.decline),
    Implementation("xla", triton.by_reference, key=reference.key),
)


def map_quantize(
    expression: Expression,
    inputs: Sequence[jax.Array],
    dtype: DTypeLike,
    scaling: Scaling = Tensor(),
    *,
    shape: tuple[int, ...],
    orientation: Orientation = "rows",
    backend: Backend | None = None,
) -> tuple[Quantized, ...]:
    """`quantize` of every result of `expression(*inputs)`, whose arithmetic is that of `Expression`.

    One pass over the inputs where every block has a scale of its own. Scales of rows and of a whole tensor need a
    maximum that is known after a first one, in which nothing else is written.

    Args:
      expression: elementwise over matrices `[m, k]`.
      inputs: its arrays, as it was traced for them.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      scaling: `Tensor()`, `Row()` or vectors, `Block(size, "vector")`.
      shape: of the results, `[..., k]`.
      orientation: as in `quantize`.

    Raises:
      TypeError: `dtype` is not FP8.
      ValueError: the inputs or the shape are not the expression's, or squares.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> import jax.numpy as jnp
    >>> double = Expression.of(jax.make_jaxpr(lambda x: x * 2)(jnp.ones((2, 3))), 2, 3)
    >>> (made,) = map_quantize(double, [jnp.ones((2, 3))], jnp.float8_e4m3fn, shape=(2, 3))
    >>> made.rows.dequantize()[0].tolist()
    [2.0, 2.0, 2.0]
    """
    rows, k = math.prod(shape[:-1]), shape[-1]
    given = tuple(x.size for x in inputs)
    wanted = {"matrix": rows * k, "rows": rows, "columns": k, "one": 1}
    expected = tuple(wanted[form] for form in expression.forms)
    if (rows, k) != (expression.m, expression.k) or given != expected:
        raise ValueError(
            f"results {list(shape)} of inputs with {list(given)} values, but the expression is over "
            f"[{expression.m}, {expression.k}] and takes {list(expected)}; trace it for these inputs"
        )
    if getattr(scaling, "tile", "vector") == "square":
        raise ValueError(f"scaling={scaling}: activations and gradients have vectors; use scaling.along_rows")
    options = Mapping(numerics.float8_dtype(dtype), scaling, orientation, expression, tuple(shape))
    return dispatch("map_quantize", IMPLEMENTATIONS, backend, options, *inputs)
