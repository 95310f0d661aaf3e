"""One pass over matrices that writes every result in both orientations: what the Pallas-Triton quantizers share.

A quantizer is elementwise, so its cost is memory traffic. XLA makes one fusion of it that reads the input once but
stores the transposed bytes one at a time (2.2 TB/s on an H200). A Triton program holds a square tile in registers,
turns it around through shared memory and stores both orientations in 16-byte pieces (3.3 to 3.6 TB/s).

`map_tiles` runs a function of tiles over matrices of one shape `[m, k]`: compiled on CUDA, interpreted on CPUs, and
under a mesh on each device's own part (see `partition.py`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from pallas_kernels.partition import partitioned

Body = Callable[..., tuple[jax.Array, ...]]

# Every line of a tile, in either orientation, is stored in pieces of 16 bytes.
SMALLEST_SIDE = 16


@dataclass(frozen=True)
class Tile:
    """A tile of `rows` x `columns` values, held by `warps` warps of 32 threads.

    64 x 64 by 8 warps is 16 values a thread: on an H200 the best or near it for quantizers that round to nearest, among
    tiles of 32 x 64 to 256 x 64; more values a thread cost occupancy, and smaller tiles write lines of less than 64
    bytes. Stochastic rounding has more to compute: 3.5 TB/s with 8 values a thread, 3.0 with 16.
    """

    rows: int = 64
    columns: int = 64
    warps: int = 8


@dataclass(frozen=True)
class Output:
    """One result of a tile function.

    Attributes:
      transposed: a transposed copy is written beside it.
      replaces: index of the input, of the same dtype, in whose memory it may be written. Each tile is read before it
        is overwritten; without it a donated input would be copied to where the result belongs.
    """

    dtype: Any
    transposed: bool = False
    replaces: int | None = None


def fit_tile(m: int, k: int, values_per_thread: int = 16) -> Tile | None:
    """The largest tile up to 64 x 64 that divides `[m, k]`; None where a side is no multiple of 16.

    >>> fit_tile(4096, 48), fit_tile(100, 64)
    (Tile(rows=64, columns=16, warps=2), None)
    """
    sides = [next((side for side in (64, 32, SMALLEST_SIDE) if size and size % side == 0), 0) for size in (m, k)]
    if 0 in sides:
        return None
    return Tile(sides[0], sides[1], warps=max(1, sides[0] * sides[1] // (32 * values_per_thread)))


def misfit(name: str, m: int, k: int) -> str | None:
    """Why no tile divides `[m, k]`, or None; also where the device in use runs no Triton."""
    if fit_tile(m, k) is None:
        return f'{name}[{m}, {k}]: both sizes must be multiples of {SMALLEST_SIDE}; use backend="xla" or pad'
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return 'the mesh has explicit axes, under which kernels are not partitioned; use backend="xla"'
    return None


def map_tiles(
    body: Body,
    inputs: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    outputs: Sequence[Output],
    *,
    name: str,
    reference: Body,
    values_per_thread: int = 16,
) -> list[jax.Array]:
    """Run `body(*tiles, *scalars)` over every tile of `inputs`, `[m, k]` each.

    Args:
      body: returns one tile for each of `outputs`, shaped as its inputs.
      scalars: of one value each, handed to `body` as scalars.
      name: of the kernel, as profilers show it.
      reference: the same on whole matrices outside a kernel, for a device's part that no tile divides.
      values_per_thread: fewer leave registers for a longer `body`.

    Returns:
      For each output its matrix `[m, k]`, followed by its transpose `[k, m]` where that is wanted.
    """
    count = len(inputs)
    call = functools.partial(_call, body, tuple(outputs), name, count, values_per_thread)

    def local(*operands: jax.Array, summed_over: tuple[str, ...]) -> list[jax.Array]:
        if fit_tile(*operands[0].shape) is None:
            whole = reference(*operands[:count], *(scalar[0] for scalar in operands[count:]))
            pairs = zip(outputs, whole, strict=True)
            return [x for output, y in pairs for x in ([y, y.T] if output.transposed else [y])]
        return lax.platform_dependent(
            *operands, cpu=functools.partial(call, interpret=True), cuda=functools.partial(call, interpret=False)
        )

    rule = ", ".join(["i j"] * count + ["u"] * len(scalars)) + " -> "
    rule += ", ".join("i j, j i" if output.transposed else "i j" for output in outputs)
    return partitioned(local, rule)(*inputs, *(scalar.reshape(1) for scalar in scalars))


def _call(
    body: Body,
    outputs: tuple[Output, ...],
    name: str,
    count: int,
    values_per_thread: int,
    *operands: jax.Array,
    interpret: bool,
) -> list[jax.Array]:
    # Imported where it is used: half a second that a program without kernels need not pay.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    m, k = operands[0].shape
    tile = fit_tile(m, k, values_per_thread)
    assert tile is not None, "the caller checked"
    straight = pl.BlockSpec((tile.rows, tile.columns), lambda i, j: (i, j))
    turned = pl.BlockSpec((tile.columns, tile.rows), lambda i, j: (j, i))
    shapes: list[jax.ShapeDtypeStruct] = []
    specs, aliases = [], {}
    for output in outputs:
        if output.replaces is not None:
            aliases[output.replaces] = len(shapes)
        shapes.append(jax.ShapeDtypeStruct((m, k), output.dtype))
        specs.append(straight)
        if output.transposed:
            shapes.append(jax.ShapeDtypeStruct((k, m), output.dtype))
            specs.append(turned)

    def kernel(*refs: Any) -> None:
        tiles = [ref[...] for ref in refs[:count]]
        scalars = [ref[0] for ref in refs[count : len(operands)]]
        targets = iter(refs[len(operands) :])
        for output, result in zip(outputs, body(*tiles, *scalars), strict=True):
            next(targets)[...] = result
            if output.transposed:
                next(targets)[...] = result.T

    scalar_spec = pl.BlockSpec((1,), lambda i, j: (0,))
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(m // tile.rows, k // tile.columns),
        in_specs=[straight] * count + [scalar_spec] * (len(operands) - count),
        out_specs=specs,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)
