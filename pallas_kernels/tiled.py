"""One pass over matrices that writes each result in both orientations, for the
quantizers.

A quantizer is elementwise, so its cost is memory traffic. XLA makes one fusion of it
that reads the input once but stores the transposed bytes one at a time (2.2 TB/s on an
H200). A Triton program holds a square tile in registers, turns it around through shared
memory and stores both orientations in 16-byte pieces (3.3 to 3.6 TB/s).

`map_tiles` runs a function of tiles over matrices of one shape `[m, k]`: compiled on
CUDA, interpreted on CPUs, and under a mesh on each device's own part (see
`partition.py`). The engine is Pallas-Triton, or the one that it is given.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.dispatch import device_kind
from pallas_kernels.partition import BlocksOf, Letters, partitioned
from pallas_kernels.specs import has_explicit_axes, varying

Body = Callable[..., tuple[jax.Array, ...]]
Engine = Callable[..., list[jax.Array] | None]

# Every line of a tile, in either orientation, is stored in pieces of 16 bytes.
_SMALLEST_SIDE = 16


@dataclass(frozen=True)
class Tiling:
    """Cut of matrices into tiles, by the largest of these sides that divide them.

    A single side fixes the tiles, for blocks that share a scale: under a mesh every
    device then has whole tiles.

    64 x 64 by 8 warps is 16 values a thread. On an H200 (8192 x 14336, where a copy by
    XLA moves 3.35 TB/s) a quantizer of one tensor in both orientations moves 3.60 TB/s
    with it, and 3.85 with 64 x 256 by 16 warps. Stochastic rounding moves 3.5 TB/s with
    8 values a thread and 3.0 with 16.

    Attributes:
      rows, columns: sides, the largest first.
      values_per_thread: values of a tile over the threads that hold it.
    """

    rows: tuple[int, ...] = (64, 32, 16)
    columns: tuple[int, ...] = (64, 32, 16)
    values_per_thread: int = 16

    @staticmethod
    def of_blocks(size: int, values_per_thread: int = 16) -> "Tiling":
        """Return tiles that are square blocks."""
        return Tiling((size,), (size,), values_per_thread)

    def fit(self, m: int, k: int) -> tuple[int, int, int] | None:
        """Return (rows, columns, warps of 32 threads) of a tile of a matrix `[m, k]`,
        or None if no tile divides it.

        >>> Tiling().fit(4096, 48), Tiling().fit(100, 64)
        ((64, 16, 2), None)
        """
        pairs = ((m, self.rows), (k, self.columns))
        rows, columns = (
            next((side for side in sides if size and size % side == 0), 0)
            for size, sides in pairs
        )
        if not rows or not columns:
            return None
        return rows, columns, max(1, rows * columns // (32 * self.values_per_thread))

    def misfit(self, name: str, m: int, k: int) -> str | None:
        """Return the reason why no tile divides `[m, k]`, or None."""
        if self.fit(m, k) is not None:
            return None
        multiple = _SMALLEST_SIDE if len(self.rows) > 1 else f"block={self.rows[0]}"
        return (
            f"{name}[{m}, {k}]: both sizes must be multiples of {multiple}; use"
            ' backend="xla" or pad'
        )


WIDE = Tiling(columns=(256, 128, 64, 32, 16), values_per_thread=32)


@dataclass(frozen=True)
class Output:
    """One result of a tile function.

    Attributes:
      dtype: dtype of the result.
      transposed: whether a transposed copy is written as well; for "tile" only.
      replaces: index of an input of the same dtype in whose memory the result may be
        written. Each tile is read before it is overwritten. Without it XLA would copy a
        donated input to where the result belongs.
      form: shape of the result. "tile" has a value for each value of the inputs, and
        "transposed" is its transpose; "rows" has one for each row of a tile,
        `[m, k / columns]`; "columns" one for each column, `[k, m / rows]`; "one" has
        one for each tile.
    """

    dtype: DTypeLike
    transposed: bool = False
    replaces: int | None = None
    form: Literal["tile", "transposed", "rows", "columns", "one"] = "tile"

    @property
    def rule(self) -> str:
        """Letters of its axes for `partition`: i and j count rows and columns of
        values, p and q of tiles.
        """
        axes = {
            "tile": "i j",
            "transposed": "j i",
            "rows": "i q",
            "columns": "j p",
            "one": "p q",
        }[self.form]
        return f"{axes}, j i" if self.transposed else axes


class Operations:
    """The operations of a body in which engines differ; these are Triton's."""

    scaled = staticmethod(numerics.scaled_for_rounding)

    def floor(self, x: jax.Array) -> jax.Array:
        """Return the largest integers up to x."""
        return jnp.floor(x)

    def largest(
        self, x: jax.Array, axes: Sequence[int | None] = (None,)
    ) -> list[jax.Array]:
        """Return the largest magnitudes of a tile (None), its columns (0) or rows (1)
        as arrays that broadcast to it.

        A NaN is the largest. All results may depend on those that a body asks for
        first, and on second ones only results of form "one".
        """
        top: Callable[..., jax.Array] = functools.partial(
            numerics.amax_by_bits, keepdims=True
        )
        return [top(top(x, 1), 0) if axis is None else top(x, axis) for axis in axes]


@dataclass(frozen=True)
class Pass:
    """The static arguments of `map_tiles`, and the numbers of its matrices and of its
    vectors of rows and columns.
    """

    body: Body
    outputs: tuple[Output, ...]
    name: str
    tiling: Tiling
    count: int
    vectors: tuple[int, int]


def by_triton(one: Pass, *operands: jax.Array) -> list[jax.Array] | None:
    """Run a pass over a device's part by Pallas-Triton; return None if no tile divides
    it or it is too large.
    """
    results = [
        jax.ShapeDtypeStruct(operands[0].shape, output.dtype) for output in one.outputs
    ]
    if one.tiling.fit(*operands[0].shape) is None or plgpu.unreachable(
        *operands[: one.count], *results
    ):
        return None
    return plgpu.on_platform(functools.partial(_call, one), *operands)


def map_tiles(
    body: Body,
    inputs: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    outputs: Sequence[Output],
    *,
    name: str,
    reference: Body | None = None,
    tiling: Tiling = Tiling(),
    vectors: tuple[Sequence[jax.Array], Sequence[jax.Array]] = ((), ()),
    engine: Engine | None = by_triton,
) -> list[jax.Array]:
    """Run `body(operations, *tiles, *rows, *columns, *scalars)` over every tile of
    matrices `[*m, k]`, m several axes.

    Args:
      body: computes one tile by `Operations`; it returns a value for each of `outputs`,
        in its form.
      inputs: matrices of one shape.
      scalars: arrays of one value each, which `body` gets as scalars.
      outputs: the results.
      name: name of the kernel in profiles.
      reference: the same computation on whole matrices, without a kernel, with results
        in the shapes that are written; None for the body. It runs on devices whose part
        no tile divides.
      engine: runs a `Pass` over a device's part, or returns None. Without one, tiles
        only say what must not be cut.
      tiling: cut of the matrices.
      vectors: rows `[*m]` with a value for each row, and columns `[k]`; `body` gets
        `[rows, 1]` and `[1, columns]`.

    Returns:
      For each output its matrix `[*m, k]`, followed by its transpose `[k, *m]` if it is
        wanted.
    """
    rows, columns = vectors
    one = Pass(
        body, tuple(outputs), name, tiling, len(inputs), (len(rows), len(columns))
    )

    def local(
        *operands: jax.Array, summed_over: tuple[str, ...] = ()
    ) -> list[jax.Array]:
        if engine is not None and (results := engine(one, *operands)) is not None:
            return results
        whole = reference or functools.partial(body, Operations())
        found = whole(
            *operands[: one.count], *_shaped(operands[one.count :], one.vectors)
        )
        pairs = zip(outputs, found, strict=True)
        return [
            x
            for output, y in pairs
            for x in (
                [y, y.T]
                if output.transposed
                else [y.T]
                if output.form == "transposed"
                else [y]
            )
        ]

    letters = (
        ["i j"] * one.count
        + ["i"] * len(rows)
        + ["j"] * len(columns)
        + ["u"] * len(scalars)
    )
    rule = ", ".join(letters) + " -> " + ", ".join(output.rule for output in outputs)
    *leading, k = inputs[0].shape
    m = math.prod(leading)
    sides = (("p", "i", m, tiling.rows), ("q", "j", k, tiling.columns))
    blocks = {
        count: BlocksOf(axis, fixed[0], size)
        for count, axis, size, fixed in sides
        if len(fixed) == 1
    }
    run: Callable[..., list[jax.Array]] = partitioned(
        local, rule, blocks, merged={"i": tuple(leading)}
    )
    if (
        engine not in (None, by_triton)
        and device_kind() == "cpu"
        and not has_explicit_axes()
    ):
        # Mosaic's interpreter calls back into Python, which a partitioned function
        # cannot do.
        run = Letters.read(rule, {"i": tuple(leading)}).over_arrays(local)
    return run(*inputs, *rows, *columns, *(scalar.reshape(1) for scalar in scalars))


def _shaped(operands: Sequence[jax.Array], vectors: tuple[int, int]) -> list[jax.Array]:
    """Return vectors of rows as `[m, 1]`, of columns as `[1, k]`, and scalars."""
    first, last = vectors[0], sum(vectors)
    of_rows, of_columns = (
        (x[:, None] for x in operands[:first]),
        (x[None, :] for x in operands[first:last]),
    )
    return [*of_rows, *of_columns, *(x[0] for x in operands[last:])]


def _call(one: Pass, *operands: jax.Array, interpret: bool) -> list[jax.Array]:
    # Imported where it is used: half a second that a program without kernels need not
    # pay.
    from jax.experimental import pallas as pl

    count, vectors = one.count, one.vectors
    m, k = operands[0].shape
    tile = one.tiling.fit(m, k)
    assert tile is not None, "the caller checked"
    rows, columns, warps = tile
    # (shape, block, whether the grid's first axis runs along the second axis of the
    # matrix)
    forms = {
        "tile": ((m, k), (rows, columns), False),
        "rows": ((m, k // columns), (rows, 1), False),
        "columns": ((k, m // rows), (columns, 1), True),
        "one": ((m // rows, k // columns), (1, 1), False),
        "transposed": ((k, m), (columns, rows), True),
    }
    shapes: list[jax.ShapeDtypeStruct] = []
    specs, aliases = [], {}
    for output in one.outputs:
        if output.replaces is not None:
            aliases[output.replaces] = len(shapes)
        for form in (output.form, "transposed")[: 1 + output.transposed]:
            shape, block, turned = forms[form]
            shapes.append(jax.ShapeDtypeStruct(shape, output.dtype))
            specs.append(
                pl.BlockSpec(
                    block, (lambda i, j: (j, i)) if turned else (lambda i, j: (i, j))
                )
            )

    def kernel(*refs: Any) -> None:
        tiles = [ref[...] for ref in refs[:count]]
        rest = _shaped([ref[...] for ref in refs[count:last]], vectors) + [
            ref[0] for ref in refs[last : len(operands)]
        ]
        targets = iter(refs[len(operands) :])
        for output, result in zip(
            one.outputs, one.body(Operations(), *tiles, *rest), strict=True
        ):
            target = next(targets)
            target[...] = (
                result.T
                if output.form == "transposed"
                else result.reshape(target.shape)
            )
            if output.transposed:
                next(targets)[...] = result.T

    last = count + sum(vectors)
    of_rows, of_columns = (
        pl.BlockSpec((rows,), lambda i, j: (i,)),
        pl.BlockSpec((columns,), lambda i, j: (j,)),
    )
    specs_in = [pl.BlockSpec((rows, columns), lambda i, j: (i, j))] * count
    specs_in += [of_rows] * vectors[0] + [of_columns] * vectors[1]
    specs_in += [pl.BlockSpec((1,), lambda i, j: (0,))] * (len(operands) - last)
    return plgpu.pallas_call(
        kernel,
        out_shape=varying(shapes, *operands),
        grid=(m // rows, k // columns),
        in_specs=specs_in,
        out_specs=specs,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=one.name,
    )(*varying(operands, *operands))  # a result in place has the type of its input
