"""One pass over matrices that writes each result in both orientations.

Quantizers and casts are such passes. A quantizer is elementwise, so its cost is memory
traffic. XLA makes one fusion of it that reads the input once but stores the transposed
bytes one at a time (2.2 TB/s on an H200). A kernel holds a tile, turns it around
through shared memory and stores both orientations in 16-byte pieces (3.3 to 3.6 TB/s).

`map_tiles` runs a `Body` over matrices of one shape `[m, k]` by an engine: compiled on
CUDA, interpreted on CPUs, and under a mesh on each device's own part (see
`partition.py`). The engines are `triton_passes.TRITON` and `hopper.engine.MOSAIC`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

import jax
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.arithmetic import Portable
from pallas_kernels.dispatch import device_kind
from pallas_kernels.partition import BlocksOf, Letters, partitioned
from pallas_kernels.specs import has_explicit_axes

T = TypeVar("T")
Arrays: TypeAlias = tuple[Array, ...]
Operands: TypeAlias = Sequence[Array]
Form = Literal["tile", "transposed", "rows", "columns", "one"]
# The values of a tile that share a maximum: all, or those of a column (0) or row (1).
Axis: TypeAlias = int | None

# Every line of a tile, in either orientation, is stored in pieces of 16 bytes.
_SMALLEST_SIDE = 16
# Letters of the axes of a result for `partition`: i and j count rows and columns of
# values, p and q of tiles.
_LETTERS: dict[Form, str] = {
    "tile": "i j",
    "transposed": "j i",
    "rows": "i q",
    "columns": "j p",
    "one": "p q",
}


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
        """Return (rows, columns, warps of 32 threads) of a tile, or None.

        A matrix `[m, k]` has none if no tile divides it.

        >>> Tiling().fit(4096, 48), Tiling().fit(100, 64)
        ((64, 16, 2), None)
        """
        rows = _largest_divisor(m, self.rows)
        columns = _largest_divisor(k, self.columns)
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


def _largest_divisor(size: int, sides: tuple[int, ...]) -> int:
    """Return the first of the sides that divides `size`, or 0."""
    for side in sides:
        if size and size % side == 0:
            return side
    return 0


WIDE = Tiling(columns=(256, 128, 64, 32, 16), values_per_thread=32)


@dataclass(frozen=True)
class Output:
    """One result of a pass.

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
      zero_with: index of a result of form "tile", for form "one": the number of a tile
        becomes 0 if all values of that result in the tile are zero.
    """

    dtype: DTypeLike
    transposed: bool = False
    replaces: int | None = None
    form: Form = "tile"
    zero_with: int | None = None

    @property
    def is_matrix(self) -> bool:
        """True if it has a value for each value of the inputs."""
        return self.form in ("tile", "transposed")

    @property
    def forms(self) -> tuple[Form, ...]:
        """Forms of the arrays that are written: its own, then that of the transpose."""
        return (self.form, "transposed") if self.transposed else (self.form,)


def shape_of(form: Form, m: int, k: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of a result for matrices `[m, k]` in tiles `[rows, columns]`."""
    shapes: dict[Form, tuple[int, int]] = {
        "tile": (m, k),
        "transposed": (k, m),
        "rows": (m, k // columns),
        "columns": (k, m // rows),
        "one": (m // rows, k // columns),
    }
    return shapes[form]


class Body:
    """The computation of a tile, in two functions.

    Operands of both are tiles, vectors of rows `[rows, 1]`, vectors of columns
    `[1, columns]` and scalars. An engine calls `measured` if there are `axes`, finds
    the largest magnitudes of its array, and calls `values` with them. Either may be
    called for a few rows of a tile at a time.
    """

    @property
    def axes(self) -> tuple[Axis, ...]:
        """For each maximum the values that share it."""
        return ()

    def measured(self, operands: Operands) -> Array:
        """Return the float32 array whose largest magnitudes `values` needs."""
        raise NotImplementedError

    def values(self, do: Portable, operands: Operands, maxima: Arrays) -> Arrays:
        """Return a value for each output, in its form.

        Args:
          do: the operations in which engines differ.
          operands: as above.
          maxima: for each of `axes` the largest magnitudes, as arrays that broadcast to
            the tile. A NaN is the largest.
        """
        raise NotImplementedError

    def whole(self, operands: Operands) -> Arrays:
        """Return the results for whole matrices, in the shapes that are written.

        It runs without a kernel, for matrices that no tile divides.
        """
        return self.values(Portable(), operands, ())


class Sorted(NamedTuple, Generic[T]):
    """The operands of a pass by kind."""

    matrices: Sequence[T]
    rows: Sequence[T]
    columns: Sequence[T]
    scalars: Sequence[T]

    def shaped(self: "Sorted[jax.Array]") -> Operands:
        """Return them as a body takes them."""
        rows = [x[:, None] for x in self.rows]
        columns = [x[None, :] for x in self.columns]
        return [*self.matrices, *rows, *columns, *(x[0] for x in self.scalars)]


@dataclass(frozen=True)
class Pass:
    """The static arguments of `map_tiles`, and the numbers of its operands by kind."""

    body: Body
    outputs: tuple[Output, ...]
    name: str
    tiling: Tiling
    matrices: int
    rows: int = 0
    columns: int = 0

    def sort(self, operands: Sequence[T]) -> Sorted[T]:
        """Return the operands by kind; scalars come last."""
        first = self.matrices + self.rows
        last = first + self.columns
        return Sorted(
            operands[: self.matrices],
            operands[self.matrices : first],
            operands[first:last],
            operands[last:],
        )


@dataclass(frozen=True)
class Engine:
    """One way to run a `Pass` by a kernel.

    Attributes:
      run: takes a pass and a device's part of its operands, and returns the results, or
        None if its kernel cannot take the part.
      calls_back: whether its interpreter calls back into Python, which a partitioned
        function cannot do.
    """

    run: Callable[..., list[Array] | None]
    calls_back: bool = False

    def calls_back_here(self) -> bool:
        """Return whether it would call back into Python where it now runs."""
        return self.calls_back and device_kind() == "cpu" and not has_explicit_axes()


def map_tiles(
    body: Body,
    inputs: Sequence[Array],
    outputs: Sequence[Output],
    *,
    name: str,
    engine: Engine | None,
    scalars: Sequence[Array] = (),
    tiling: Tiling = Tiling(),
    rows: Sequence[Array] = (),
    columns: Sequence[Array] = (),
) -> list[Array]:
    """Run a body over every tile of matrices `[*m, k]`, m several axes.

    Args:
      body: computes one tile.
      inputs: matrices of one shape.
      outputs: the results.
      name: name of the kernel in profiles.
      engine: runs the pass. Without one, or where it cannot take a device's part,
        `body.whole` runs, and tiles only say what must not be cut.
      scalars: arrays of one value each.
      tiling: cut of the matrices.
      rows: vectors `[*m]` with a value for each row.
      columns: vectors `[k]`.

    Returns:
      For each output its matrix `[*m, k]`, followed by its transpose `[k, *m]` if it is
        wanted.
    """
    one = Pass(body, tuple(outputs), name, tiling, len(inputs), len(rows), len(columns))

    def local(*operands: Array, summed_over: tuple[str, ...] = ()) -> list[Array]:
        found = None if engine is None else engine.run(one, *operands)
        return _whole(one, *operands) if found is None else found

    rule = _rule(one, len(scalars))
    *leading, k = inputs[0].shape
    merged = {"i": tuple(leading)}
    if engine is not None and engine.calls_back_here():
        run = Letters.read(rule, merged).over_arrays(local)
    else:
        blocks = {}
        if len(tiling.rows) == 1:
            blocks["p"] = BlocksOf("i", tiling.rows[0], math.prod(leading))
        if len(tiling.columns) == 1:
            blocks["q"] = BlocksOf("j", tiling.columns[0], k)
        run = partitioned(local, rule, blocks, merged=merged)
    numbers = [scalar.reshape(1) for scalar in scalars]
    return [*run(*inputs, *rows, *columns, *numbers)]


def _rule(one: Pass, scalars: int) -> str:
    """Return the letters of the axes of all operands and results for `partition`."""
    operands = ["i j"] * one.matrices + ["i"] * one.rows + ["j"] * one.columns
    operands += ["u"] * scalars
    results = [_LETTERS[form] for output in one.outputs for form in output.forms]
    return f"{', '.join(operands)} -> {', '.join(results)}"


def _whole(one: Pass, *operands: Array) -> list[Array]:
    """Return the results without a kernel."""
    results = []
    found = one.body.whole(one.sort(operands).shaped())
    for output, x in zip(one.outputs, found, strict=True):
        results.append(x.T if output.form == "transposed" else x)
        if output.transposed:
            results.append(x.T)
    return results
