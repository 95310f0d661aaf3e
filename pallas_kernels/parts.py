"""Which part of each array a device computes: an op's letters, and their mesh axes.

A rule has a letter for each axis of the operands and results of an op, as in an einsum:

    "m k, n k, u -> m n"

This is a product: m and n may be split, k may be split and is then summed, and u is a
scalar. `Letters.parts` chooses the mesh axes that split each letter. Each device gets
parts whose axes agree. An operand is gathered only if two operands split different axes
over the same mesh axis.

Axes of an array may be merged: one letter of a matrix, such as the rows of `[m, k]`,
then stands for several axes of the array, such as `[batch, length]`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels.specs import Axes, Entry, first_long, names, shards
from pallas_kernels.wire import Scatter

Side: TypeAlias = list[str]
Spec: TypeAlias = tuple[Entry, ...]
T = TypeVar("T")


class BlocksOf(NamedTuple):
    """The axis whose blocks a letter counts.

    Attributes:
      letter: letter of the axis.
      size: values of a block.
      length: length of the axis.
    """

    letter: str
    size: int
    length: int


@dataclass(frozen=True)
class _Parts:
    """The parts of the arrays of an op that devices compute.

    Attributes:
      inputs, outputs: spec of each operand and result.
      summed_over: mesh axes over which each device adds its partial sums.
      scattered: axes of the one result along which sums are handed out; None if the op
        cannot do that.
    """

    inputs: list[Spec]
    outputs: list[Spec]
    summed_over: Axes
    scattered: Sequence[Scatter] | None = None

    def bind(self, local: Callable[..., T]) -> Callable[..., T]:
        """Return `local` as a function of a device's operands alone."""
        local = partial(local, summed_over=self.summed_over)
        if self.scattered is None:
            return local
        return partial(local, scattered=self.scattered)

    def with_shapes(self, mesh: Mesh | AbstractMesh, shape: Sequence[int]) -> "_Parts":
        """Return the same parts with a shape of the result in each `Scatter`.

        `shape` is the device's part of the result in the end. Each sum that is handed
        out divides it.
        """
        if not self.scattered:
            return self
        shape = list(shape)
        for handed in self.scattered:
            shape[handed.dimension] *= shards(mesh, handed.axes)
        shaped = []
        for handed in self.scattered:
            shaped.append(handed._replace(shape=tuple(shape)))
            shape[handed.dimension] //= shards(mesh, handed.axes)
        return replace(self, scattered=shaped)


@dataclass(frozen=True)
class Letters:
    """How an op splits: a letter for each axis of its operands and results.

    Attributes:
      inputs, outputs: letters of each operand and result.
      merged: sizes of the neighbouring axes of an array for which one letter of a
        matrix stands.
      blocks: letters that count blocks.
      whole: letters that no mesh axis may split.
      scattered: whether partial sums may be handed out in parts.
    """

    inputs: list[Side]
    outputs: list[Side]
    merged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    blocks: Mapping[str, BlocksOf] = field(default_factory=dict)
    whole: Axes = ()
    scattered: bool = False

    @classmethod
    def read(
        cls,
        rule: str,
        merged: Mapping[str, tuple[int, ...]] | None = None,
    ) -> "Letters":
        """Read a rule such as "m k, n k -> m n".

        >>> Letters.read("m k, n k -> m n").inputs
        [['m', 'k'], ['n', 'k']]
        """
        operands, results = rule.split("->")
        inputs = [side.split() for side in operands.split(",")]
        outputs = [side.split() for side in results.split(",")]
        return cls(inputs, outputs, merged or {})

    @property
    def named(self) -> set[str]:
        """All letters of operands and results."""
        return self.kept.union(*self.inputs)

    @property
    def kept(self) -> set[str]:
        """The letters of results; all others are summed."""
        return set().union(*self.outputs)

    # Arrays as matrices
    # ----------------------------------------------------------------------------------

    def axes_of(self, letter: str) -> Side:
        """Return a letter for each axis of the array for which a matrix's one stands.

        >>> Letters([], [], {"m": (2, 3)}).axes_of("m")
        ['m.0', 'm.1']
        """
        if letter not in self.merged:
            return [letter]
        return [f"{letter}.{i}" for i in range(len(self.merged[letter]))]

    def in_axes(self, side: Sequence[str]) -> Side:
        """Return the letters of an array's axes instead of those of its matrix."""
        axes: Side = []
        for letter in side:
            axes += self.axes_of(letter)
        return axes

    def of_arrays(self) -> "Letters":
        """Return the same rule with a letter for each axis of the arrays."""
        blocks = {}
        whole = self.in_axes(self.whole)
        for letter, of in self.blocks.items():
            first = of.letter
            sizes = self.merged.get(of.letter)
            if sizes:
                first = f"{of.letter}.{first_long(sizes)}"
            blocks[letter] = of._replace(letter=first)
            # Blocks run over merged axes, and only the first of these can be split
            # without cutting a block.
            inner = self.axes_of(of.letter)[1:]
            whole += [axis for axis in inner if axis != first]
        return replace(
            self,
            inputs=[self.in_axes(side) for side in self.inputs],
            outputs=[self.in_axes(side) for side in self.outputs],
            merged={},
            blocks=blocks,
            whole=tuple(whole),
        )

    def flatten(self, side: Side, x: Array) -> Array:
        """Return an array, or a part of one, as its matrix."""
        sizes = iter(x.shape)
        shape = []
        for letter in side:
            axes = [next(sizes) for _ in self.axes_of(letter)]
            shape.append(math.prod(axes))
        return x.reshape(shape)

    def unflatten(self, side: Side, matrix: Array) -> Array:
        """Return the array of a matrix."""
        shape: list[int] = []
        for letter, size in zip(side, matrix.shape, strict=True):
            shape += self.merged.get(letter, (size,))
        return matrix.reshape(shape)

    def over_arrays(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function of matrices as a function of their arrays."""

        def call(*operands: Array) -> T:
            matrices = map(self.flatten, self.inputs, operands)
            leaves, tree = jax.tree.flatten(function(*matrices))
            arrays = map(self.unflatten, self.outputs, leaves)
            return jax.tree.unflatten(tree, arrays)

        return call

    # The choice of mesh axes
    # ----------------------------------------------------------------------------------

    def parts(
        self,
        mesh: Mesh | AbstractMesh,
        inputs: Sequence[Spec],
        outputs: Sequence[Spec],
        shape: Sequence[int],
    ) -> _Parts:
        """Choose the parts of operands and results that devices compute.

        Args:
          mesh: the mesh.
          inputs, outputs: specs that the operands have, and that the readers of the
            results want.
          shape: shape of the one result, if sums of it can be handed out.
        """
        # Results come first: their readers have asked for a sharding, and operands can
        # follow it.
        sides = [*map(self._without_counts, (*self.outputs, *self.inputs))]
        split = [tuple(map(names, spec)) for spec in (*outputs, *inputs)]
        chosen: dict[str, Axes] = {}
        if self.scattered:
            # Partial sums come before all: a split that both operands share costs
            # nothing, and undoing it gathers both.
            count = len(self.outputs)
            chosen = _partial_sums(sides[count:], split[count:], self.kept)
        chosen = _choose_axes(sides, split, chosen)
        for letter in self.whole:
            chosen.pop(letter, None)
        self._split_between_blocks(mesh, chosen)
        # The result of a device is partial over these axes; `local` adds it up, since
        # only it knows how (psum or pmax).
        summed = self._summed(chosen)
        specs_in = [_spec(side, chosen) for side in self.inputs]
        specs_out = [_spec(side, chosen) for side in self.outputs]
        if not self.scattered:
            return _Parts(specs_in, specs_out, summed)
        handed = _scatters(mesh, specs_out[0], outputs[0], shape, summed)
        # A result that is handed out is split by the axes of its sum, which split no
        # letter of it.
        of_result = list(specs_out[0])
        left = set(summed)
        for scatter in handed:
            of_result[scatter.dimension] = scatter.axes
            left -= set(scatter.axes)
        over = tuple(axis for axis in summed if axis in left)
        return _Parts(specs_in, [tuple(of_result)], over, handed)

    def _without_counts(self, side: Side) -> Side:
        """Return the axis of the blocks instead of each letter that counts them.

        A result may have no other axis that says how it is split.
        """
        side = list(side)
        for place, letter in enumerate(side):
            if letter in self.blocks:
                side[place] = self.blocks[letter].letter
        return side

    def _split_between_blocks(
        self,
        mesh: Mesh | AbstractMesh,
        chosen: dict[str, Axes],
    ) -> None:
        """Remove splits inside a block from the choice.

        Two devices that share a block would find two scales for it, so an axis is split
        between whole blocks or not at all, and the axis that counts the blocks is split
        alike.
        """
        for of in self.blocks.values():
            count = shards(mesh, chosen.get(of.letter, ()))
            if of.length % (count * of.size):
                chosen[of.letter] = ()
        # Applied last: a byte packs two FP4 values, so a shard can hold whole bytes
        # without holding a whole scale block.
        for letter, of in self.blocks.items():
            chosen[letter] = chosen.get(of.letter, ())

    def _summed(self, chosen: Mapping[str, Axes]) -> Axes:
        """Return the mesh axes that split a letter which some result lacks.

        Each device holds a part of the sum over that letter.
        """
        every: set[str] = set(chosen) - set(self.blocks)
        for side in self.outputs:
            every &= {*side, *self._without_counts(side)}
        summed: Axes = ()
        for letter, axes in chosen.items():
            if letter not in self.blocks and letter not in every:
                summed += axes
        return summed


def _spec(side: Side, chosen: Mapping[str, Axes]) -> Spec:
    return tuple(chosen.get(letter) or None for letter in side)


def _partial_sums(
    sides: Sequence[Side],
    split: Sequence[Sequence[Axes]],
    kept: set[str],
) -> dict[str, Axes]:
    """Return the mesh axes of each summed letter on which its operands agree."""
    found: dict[str, set[Axes]] = {}
    for side, axes in zip(sides, split, strict=True):
        for letter, entry in zip(side, axes, strict=True):
            # "u" marks scalars, one value for all: they are neither split nor summed.
            if letter not in kept and letter != "u":
                found.setdefault(letter, set()).add(entry)
    agreed = {}
    for letter, (one, *others) in found.items():
        if one and not others:
            agreed[letter] = one
    return agreed


def _choose_axes(
    sides: Sequence[Side],
    split: Sequence[Sequence[Axes]],
    first: Mapping[str, Axes],
) -> dict[str, Axes]:
    """Return the mesh axes of each letter, of which each serves one letter.

    The first side that splits a letter decides.
    """
    chosen = dict(first)
    used = set().union(*first.values())
    for side, axes in zip(sides, split, strict=True):
        for letter, entry in zip(side, axes, strict=True):
            # A mesh axis that splits two letters would give each device a diagonal
            # block of the result alone.
            if entry and letter not in chosen and used.isdisjoint(entry):
                chosen[letter] = entry
                used.update(entry)
    return chosen


def _scatters(
    mesh: Mesh | AbstractMesh,
    spec: Spec,
    wanted: Spec,
    shape: Sequence[int],
    summed: Axes,
) -> list[Scatter]:
    """Return the axes of the one result that are wanted in parts of a sum."""
    handed = []
    for dimension, size in enumerate(shape):
        axes = names(wanted[dimension])
        # An axis that operands split is not the sum's to hand out.
        of_sum = axes and set(axes) <= set(summed) and not spec[dimension]
        # A reduce-scatter hands out equal parts.
        if of_sum and size % shards(mesh, axes) == 0:
            handed.append(Scatter(axes, dimension))
    return handed
