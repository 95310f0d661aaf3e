"""Passes of `tiled.py` by Pallas-Triton: a program holds a tile in its registers."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.arithmetic import Portable
from pallas_kernels.specs import varying
from pallas_kernels.tiled import (
    Arrays,
    Axis,
    Engine,
    Form,
    Output,
    Pass,
    Sorted,
    shape_of,
)


def _run(one: Pass, *operands: Array) -> list[Array] | None:
    """Run a pass over a device's part, compiled on CUDA and interpreted on CPUs.

    Return None if no tile divides the part or Pallas-Triton cannot address it.
    """
    shape = operands[0].shape
    results = [ShapeDtypeStruct(shape, output.dtype) for output in one.outputs]
    if one.tiling.fit(*shape) is None:
        return None
    if plgpu.unreachable(*operands[: one.matrices], *results):
        return None
    return plgpu.on_platform(partial(_call, one), *operands)


TRITON = Engine(_run)


class _Operations(Portable):
    """The operations of a tile; Triton compiles them from `jax.numpy`."""

    def scaled(self, x: Array, inverse: Array, dtype: DTypeLike) -> Array:
        return numerics.scaled_for_rounding(x, inverse, dtype)


def _call(one: Pass, *operands: Array, interpret: bool) -> list[Array]:
    # Imported where it is used: half a second that a program without kernels need not
    # pay.
    from jax.experimental import pallas as pl

    m, k = operands[0].shape
    tile = one.tiling.fit(m, k)
    assert tile is not None, "the caller checked"
    rows, columns, warps = tile

    def spec(form: Form) -> pl.BlockSpec:
        block = shape_of(form, rows, columns, rows, columns)
        if form in ("transposed", "columns"):
            return pl.BlockSpec(block, lambda i, j: (j, i))
        return pl.BlockSpec(block, lambda i, j: (i, j))

    shapes: list[ShapeDtypeStruct] = []
    specs = []
    aliases = {}
    for output in one.outputs:
        if output.replaces is not None:
            aliases[output.replaces] = len(shapes)
        for form in output.forms:
            shape = shape_of(form, m, k, rows, columns)
            shapes.append(ShapeDtypeStruct(shape, output.dtype))
            specs.append(spec(form))
    specs_in = [spec("tile")] * one.matrices
    specs_in += [pl.BlockSpec((rows,), lambda i, j: (i,))] * one.rows
    specs_in += [pl.BlockSpec((columns,), lambda i, j: (j,))] * one.columns
    scalar = pl.BlockSpec((1,), lambda i, j: (0,))
    specs_in += [scalar] * (len(operands) - len(specs_in))
    run = plgpu.pallas_call(
        partial(_kernel, one, len(operands)),
        out_shape=varying(shapes, *operands),
        grid=(m // rows, k // columns),
        in_specs=specs_in,
        out_specs=specs,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=one.name,
    )
    # A result in place has the type of its input.
    results: list[Array] = run(*varying(operands, *operands))
    return results


def _kernel(one: Pass, count: int, *refs: jax.Ref) -> None:
    """Compute one tile from `count` operands."""
    given = one.sort(refs[:count])
    operands = Sorted(
        [ref[...] for ref in given.matrices],
        [ref[...] for ref in given.rows],
        [ref[...] for ref in given.columns],
        given.scalars,
    ).shaped()
    maxima: Arrays = ()
    if one.body.axes:
        measured = one.body.measured(operands)
        maxima = tuple(_largest(measured, axis) for axis in one.body.axes)
    results = one.body.values(_Operations(), operands, maxima)
    targets = iter(refs[count:])
    for output, x in zip(one.outputs, results, strict=True):
        target = next(targets)
        if output.form == "transposed":
            target[...] = x.T
        else:
            target[...] = _number(output, x, results).reshape(target.shape)
        if output.transposed:
            next(targets)[...] = x.T


def _number(output: Output, x: Array, results: Arrays) -> Array:
    """Return a result, zero if it is a number whose `zero_with` is zero in the tile."""
    if output.zero_with is None:
        return x
    # NaN is not zero: the comparison is false.
    top = _largest(results[output.zero_with].astype(jnp.float32), None)
    return jnp.where(top == 0, 0, x.astype(jnp.int32)).astype(output.dtype)


def _largest(x: Array, axis: Axis) -> Array:
    """Return the largest magnitudes of a tile, as an array that broadcasts to it."""
    if axis is None:
        of_rows = numerics.amax_by_bits(x, 1, keepdims=True)
        return numerics.amax_by_bits(of_rows, 0, keepdims=True)
    return numerics.amax_by_bits(x, axis, keepdims=True)
