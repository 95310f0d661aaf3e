"""The definition of `map_quantize`: the expression, and `quantize` of its results."""

from typing import Any

import jax

from pallas_kernels.dispatch import Key
from pallas_kernels.expression import Form
from pallas_kernels.operands import Block, Quantized
from pallas_kernels.quantize import reference


def map_quantize(options: Any, *inputs: jax.Array) -> tuple[Quantized, ...]:
    """See `api.map_quantize`."""
    results = options.expression(*matrices(options, inputs))
    return tuple(reference.quantize(options, result.reshape(options.shape), None) for result in results)


def key(options: Any, *inputs: jax.Array) -> Key:
    """How `tuned.json` names it: what decides its speed is how many tensors it reads and writes."""
    expression, scaling = options.expression, options.scaling
    size = f" {scaling.size}" if isinstance(scaling, Block) else ""
    tensors = f"{expression.forms.count('matrix')} to {len(expression.dtypes)}"
    variant = f"{options.orientation} {type(scaling).__name__.lower()}{size} {tensors}"
    return Key("map_quantize", variant, (expression.m, expression.k))


def matrices(options: Any, inputs: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The inputs as `[m, k]`, `[m, 1]`, `[1, k]` and single values."""
    expression = options.expression
    shapes: dict[Form, tuple[int, ...]] = {
        "matrix": (expression.m, expression.k), "rows": (expression.m, 1), "columns": (1, expression.k), "one": (),
    }  # fmt: skip
    return [x.reshape(shapes[form]) for x, form in zip(inputs, expression.forms, strict=True)]
