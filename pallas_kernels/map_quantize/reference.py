"""The definition of `map_quantize`: the expression, and `quantize` of its results."""

from typing import Any

import jax

from pallas_kernels.expression import Form
from pallas_kernels.operands import Quantized
from pallas_kernels.quantize import reference


def map_quantize(options: Any, *inputs: jax.Array) -> tuple[Quantized, ...]:
    """See `api.map_quantize`."""
    results = options.expression(*matrices(options, inputs))
    return tuple(reference.quantize(options, result.reshape(options.shape), None) for result in results)


def matrices(options: Any, inputs: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The inputs as `[m, k]`, `[m, 1]`, `[1, k]` and single values."""
    expression = options.expression
    shapes: dict[Form, tuple[int, ...]] = {
        "matrix": (expression.m, expression.k), "rows": (expression.m, 1), "columns": (1, expression.k), "one": (),
    }  # fmt: skip
    return [x.reshape(shapes[form]) for x, form in zip(inputs, expression.forms, strict=True)]
