"""`map_quantize` in Pallas-Triton: inputs are read where their results are quantized, in both orientations.

Bytes a value of SwiGLU in bfloat16, forward (2 in, 1 out) and backward (3 in, 2 out), both orientations:

    blocks          6 and 10       one pass; XLA's activation and a quantizer take 10 and 18
    rows, tensor   10 and 16       the first pass writes maxima alone; 10 and 18

Where the scale is one for all, a program of the second pass has nothing to find: it multiplies, rounds and turns.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import numerics, tuning
from pallas_kernels.dispatch import has_explicit_axes
from pallas_kernels.expression import Expression, Form, Rounding
from pallas_kernels.map_quantize import reference
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Quantization, Quantized, Row
from pallas_kernels.partition import device_count
from pallas_kernels.quantize import reference as quantize_reference
from pallas_kernels.quantize import triton_blocks, triton_rows
from pallas_kernels.tiled import FLAT, Body, Output, Tiling, blocks_of, map_tiles, misfit

# Values of a tile a thread, where a tile is a block of one input or of several, which take more registers. Measured on
# an H200, blocks of 128 of 8192 x 14336: gelu 0.33 and 0.27 ms with 32 and 64, SwiGLU 0.30 and 0.40.
_ONE_INPUT, _SEVERAL_INPUTS = 64, 32


def reject(options: Any, *inputs: jax.Array) -> str | None:
    """Why this kernel cannot run, or None."""
    expression = options.expression
    if "matrix" not in expression.forms:
        return "no input has the results' shape"
    side = options.scaling.size if isinstance(options.scaling, Block) else None
    return misfit("x", expression.m, expression.k, side)


def decline(options: Any, *inputs: jax.Array) -> str | None:
    """Why this kernel is not the first choice, or None."""
    return tuning.decline("triton", reference.key(options, *inputs))


def map_quantize(options: Any, *inputs: jax.Array) -> tuple[Quantized, ...]:
    """See `api.map_quantize`."""
    if isinstance(options.scaling, Block):
        return _in_blocks(options, inputs)
    return _in_rows(options, inputs) if isinstance(options.scaling, Row) else _in_one(options, inputs)


def by_reference(options: Any, *inputs: jax.Array) -> tuple[Quantized, ...]:
    """The definition, which merges axes: with explicit ones the expression is computed on each device's part."""
    if not has_explicit_axes():
        return reference.map_quantize(options, *inputs)
    outputs = [Output(dtype) for dtype in options.expression.dtypes]
    results = _mapped(
        options, inputs, lambda rounding, *results: results, outputs,
        tiling=dataclasses.replace(FLAT, runs="reference"),
    )  # fmt: skip
    asked = Quantization(options.dtype, options.scaling, options.orientation)
    run = triton_blocks.by_reference if isinstance(options.scaling, Block) else quantize_reference.quantize
    return tuple(run(asked, result, None) for result in results)


def _in_one(options: Any, inputs: tuple[jax.Array, ...]) -> tuple[Quantized, ...]:
    expression, dtype, both = options.expression, options.dtype, options.orientation == "both"
    count = len(expression.dtypes)

    def largest(rounding: Rounding, *results: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(numerics.amax_by_bits(x) for x in results)

    def cast(rounding: Rounding, *results: jax.Array) -> tuple[jax.Array, ...]:
        # Nothing to clip: the scale covers the largest of these same values, and is NaN where that is not finite.
        return tuple(
            triton_rows.multiplied(x, inverse, rounding == "arithmetic").astype(dtype)
            for x, inverse in zip(results[:count], results[count:], strict=True)
        )

    tops = _mapped(options, inputs, largest, [Output(jnp.float32, form="one")] * count, tiling=_of_maxima(expression))
    scales, inverses = zip(*(options.scaling.find(top, dtype, numerics.amax(top)) for top in tops), strict=True)
    results = iter(_mapped(options, inputs, cast, [Output(dtype, both)] * count, scalars=inverses))
    return tuple(_quantized(options, next(results), s, next(results) if both else None, s) for s in scales)


def _in_rows(options: Any, inputs: tuple[jax.Array, ...]) -> tuple[Quantized, ...]:
    expression, dtype, both = options.expression, options.dtype, options.orientation == "both"
    count = len(expression.dtypes)
    forms: tuple[Form, ...] = ("rows", "columns") if both else ("rows",)

    def largest(rounding: Rounding, *results: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(numerics.amax_by_bits(x, 1 - axis) for x in results for axis in range(len(forms)))

    def cast(rounding: Rounding, *results: jax.Array) -> tuple[jax.Array, ...]:
        inverses, interpret = results[count:], rounding == "arithmetic"
        return tuple(
            triton_rows.multiplied(x, inverses[i * len(forms) + axis], interpret).astype(dtype)
            for i, x in enumerate(results[:count])
            for axis in range(len(forms))
        )

    shown = [Output(jnp.float32, form="rows first" if form == "rows" else "columns first") for form in forms]
    tops = _mapped(options, inputs, largest, shown * count, tiling=_of_maxima(expression))
    scaled = [numerics.scale_and_inverse(numerics.amax(top, 0), dtype, options.scaling.scale) for top in tops]
    outputs = [Output(dtype), *([Output(dtype, form="transposed")] if both else [])] * count
    lines = [(form, inverse) for (_, inverse), form in zip(scaled, forms * count, strict=True)]
    values = iter(_mapped(options, inputs, cast, outputs, lines=lines))
    found = iter(scale for scale, _ in scaled)
    quantized = []
    for _ in range(count):
        rows = next(values), next(found)
        quantized.append(_quantized(options, *rows, *((next(values), next(found)) if both else (None, None))))
    return tuple(quantized)


def _in_blocks(options: Any, inputs: tuple[jax.Array, ...]) -> tuple[Quantized, ...]:
    both, side = options.orientation == "both", options.scaling.size
    count = len(options.expression.dtypes)

    def body(rounding: Rounding, *results: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(part for x in results for part in triton_blocks.of_tile(options, x))

    outputs = triton_blocks.outputs_of(options) * count
    per_thread = _ONE_INPUT if options.expression.forms.count("matrix") == 1 else _SEVERAL_INPUTS
    results = _mapped(options, inputs, body, outputs, tiling=blocks_of(side, per_thread))
    per = len(results) // count
    quantized = []
    for i in range(count):
        mine = results[i * per : (i + 1) * per]
        scales = [lax.bitcast_convert_type(r, SCALE_DTYPE) for r in mine if r.dtype == jnp.uint8]
        values = [r for r in mine if r.dtype != jnp.uint8]
        columns = (values[1], scales[1]) if both else (None, None)
        quantized.append(_quantized(options, values[0], scales[0], *columns))
    return tuple(quantized)


def _mapped(
    options: Any,
    inputs: tuple[jax.Array, ...],
    body: Body,
    outputs: Sequence[Output],
    *,
    lines: Sequence[tuple[Form, jax.Array]] = (),
    scalars: Sequence[jax.Array] = (),
    tiling: Tiling = FLAT,
) -> list[jax.Array]:
    """What `body(rounding, *results of the expression, *tiles of lines, *scalars)` returns of every tile."""
    expression = options.expression
    forms = [form for form in expression.forms if form != "one"]
    count = len(forms)
    # Single values come behind the tiles, and go back to where the expression has them.
    ones = [i for i, form in enumerate(expression.forms) if form == "one"]
    tiled = [i for i, form in enumerate(expression.forms) if form != "one"]
    flat: dict[Form, tuple[int, ...]] = {
        "matrix": options.shape, "rows": options.shape[:-1], "columns": (expression.k,), "one": (),
    }  # fmt: skip
    arrays = [x.reshape(flat[form]) for x, form in zip(inputs, expression.forms, strict=True)]

    def on_tile(rounding: Rounding, *tiles: jax.Array) -> tuple[jax.Array, ...]:
        own, of_lines, rest = tiles[:count], tiles[count : count + len(lines)], tiles[count + len(lines) :]
        given = dict(zip([*tiled, *ones], [*own, *rest[: len(ones)]], strict=True))
        results = expression(*(given[i] for i in range(len(arrays))), rounding=rounding)
        shape = own[forms.index("matrix")].shape
        return body(rounding, *(jnp.broadcast_to(x, shape) for x in results), *of_lines, *rest[len(ones) :])

    interpreted = functools.partial(on_tile, "arithmetic")
    return map_tiles(
        interpreted,
        [*(arrays[i] for i in tiled), *(x for _, x in lines)],
        [*(arrays[i] for i in ones), *scalars],
        outputs,
        name="map_quantize",
        # Of whole matrices the same: where maxima of tiles are written, every device holds whole tiles.
        reference=interpreted,
        forms=(*forms, *(form for form, _ in lines)),
        compiled=functools.partial(on_tile, "storage"),
        tiling=tiling,
    )


def _of_maxima(expression: Expression) -> Tiling:
    """How maxima are found: in the largest tiles of which every device of a mesh has whole ones, if there are any."""

    def side(size: int, sides: tuple[int, ...]) -> tuple[int, ...]:
        return next((side,) for devices in (device_count(), 1) for side in sides if size % (side * devices) == 0)

    return dataclasses.replace(FLAT, rows=side(expression.m, FLAT.rows), columns=side(expression.k, FLAT.columns))


def _quantized(
    options: Any, values: jax.Array, scale: jax.Array, turned: jax.Array | None, of_columns: jax.Array | None
) -> Quantized:
    *leading, k = options.shape
    per_row = scale.reshape(options.scaling.scale_shape(options.shape)) if scale.ndim else scale
    rows = Operand(values.reshape(options.shape), per_row, scaling=options.scaling)
    if turned is None or of_columns is None:
        return Quantized(rows)
    return Quantized(rows, Operand(turned.reshape(k, *leading), of_columns, scaling=options.scaling))
