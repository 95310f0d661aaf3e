"""`Stack`: a parameter and its moments in references while a step runs, and the rule
that updates an entry as soon as its gradient is there.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.specs import sharding_of
from tcfp_jax.optim.adam import Leaf
from tcfp_jax.optim.encoding import Keys, Moment
from tcfp_jax.optim.steps import (
    Scalars,
    Stepped,
    WeightStep,
    entry_step,
    float_step,
    fused_step,
)
from tcfp_jax.optim.stored import all_finite
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.deferred import Home, Slots
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored

Clip = Literal["late", "matrix"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Held:
    """Arrays that the update of a stack reads and writes; references during a step.

    Attributes:
      parameter: the stack.
      m: its first moments.
      v: its second moments.
      squares: float32 `[layers]`, the sums of squares of the gradients.
      skipped: bool `[layers]`, whether an entry kept its value.
    """

    parameter: Parameter
    m: Moment
    v: Moment
    squares: Array
    skipped: Array

    @staticmethod
    def of(parameter: Parameter, m: Moment, v: Moment) -> "Held":
        """Return the arrays before a step.

        Raises:
          ValueError: explicit axes of a mesh shard the parameter.
        """
        sharding = sharding_of(parameter.rows.values)
        if sharding is not None and any(sharding.spec):
            raise ValueError(
                f"explicit axes shard a stored weight {list(parameter.shape)} by"
                f" {sharding.spec}, and JAX reads no entry of a sharded reference:"
                " make the mesh with axis_types=(AxisType.Auto, ...), or take the"
                " ordinary step (value_and_grad, update, apply_updates)"
            )
        layers = parameter.shape[:-2][:1]
        squares = jnp.zeros(layers, jnp.float32)
        return Held(parameter, m, v, squares, jnp.ones(layers, jnp.bool_))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Facts:
    """Values that all updates of a step share.

    Attributes:
      scalars: the numbers of AdamW.
      sound: whether the loss is finite and the numbers are in range; a reference that
        is written before the backward pass.
    """

    scalars: Scalars
    sound: jax.Ref


class Updated(NamedTuple):
    """A parameter, or an entry of a stack, after a step.

    Attributes:
      step: its values and moments.
      squares: the sum of squares of its gradient, if the step clips.
      skipped: whether it kept its value.
    """

    step: Stepped
    squares: Array
    skipped: Array


class Own(NamedTuple):
    """Values for the update of one parameter; `[layers]` for a stack.

    Attributes:
      keys: keys of its random bits.
      limit: float32, the largest norm of its gradient; None if the step does not clip.
    """

    keys: Keys | None
    limit: Array | None


@dataclass(frozen=True)
class Update:
    """How one parameter, or an entry of a stack, is updated.

    Attributes:
      step: its formats.
      is_fused: whether the kernel updates it.
    """

    step: WeightStep
    is_fused: bool

    @property
    def steps_in_place(self) -> bool:
        """True if an entry takes its step in place."""
        # A step without a bound reads the values before it writes them.
        return self.is_fused and self.step.is_bounded

    def run(
        self,
        w: Array | Parameter,
        g: Array,
        m: Moment,
        v: Moment,
        facts: Facts,
        own: Own,
        entry: Array | None = None,
    ) -> Updated:
        """Return the parameter after the step, see `entry_step` of an entry."""
        squares = jnp.zeros((), jnp.float32)
        scalars = facts.scalars
        keep = facts.sound[...]
        if own.limit is None:
            keep = keep & all_finite([g])
        else:
            squares = jnp.sum(jnp.square(g.astype(jnp.float32)))
            keep = keep & jnp.isfinite(squares)
            factor = clip_factor(jnp.sqrt(squares), own.limit)
            scalars = scalars._replace(factor=factor)
        run: Callable[..., Stepped] = fused_step if self.is_fused else float_step
        if entry is not None:
            run = functools.partial(entry_step, entry=entry)
        done = run(self.step, w, g, m, v, scalars, own.keys, keep)
        return Updated(done, squares, ~keep)


def _check_outside_shard_map(name: str) -> None:
    """Raise `TypeError` inside `jax.shard_map`, which takes no references."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise TypeError(
            f"jax.shard_map reads the stored weight {name}, which train_step updates"
            " inside the backward pass: read its values outside"
            " (tcfp_jax.dequantize), or take the ordinary step (value_and_grad,"
            " update, apply_updates)"
        )


def clip_factor(norm: Array, limit: Array) -> Array:
    """Return the factor that scales a gradient of this norm to the limit."""
    return jnp.where(norm > limit, limit / norm, jnp.float32(1))


class Stack(Home):
    """A stack in references while a step runs."""

    def __init__(
        self,
        leaf: Leaf,
        held: Held,
        facts: Facts,
        update: Update,
        own: Own,
    ) -> None:
        self.name = "/".join(leaf.names)
        self.whole = jax.eval_shape(lambda: held.parameter)
        self.stacked = held.skipped.ndim > 0
        self.updates = 0
        self._update = update
        self._refs = jax.tree.map(jax.new_ref, held)
        self._facts = facts
        self._own = own
        self._slots = Slots()

    def read(self, index: Array) -> Stored:
        """Return the values of an entry."""
        if index.ndim:
            raise ValueError(f"{self.name} is read as a whole inside its step")
        at = self._at(index)
        values = jax.tree.map(lambda ref: ref[at], self._refs.parameter.stored)
        return jax.tree.map(_row_major, values) if self.stacked else values

    def _at(self, index: Array) -> Array | EllipsisType:
        """Return the index into references; all of it if this is not a stack."""
        return index if self.stacked else ...

    def slot(self, index: Array, zero: Array) -> Array:
        """Return the zeros that take the gradient of an entry."""

        def make() -> Array:
            return _slot(self, self._refs, self._facts, self._own, index, zero)

        _check_outside_shard_map(self.name)
        return self._slots.find(index, zero, make)

    def zeros(self) -> Array:
        """Return the zeros of a slot."""
        shape = self.whole.shape[1:] if self.stacked else self.whole.shape
        return jnp.zeros(shape, self.whole.state.gradient_dtype)

    def update(
        self, refs: Held, facts: Facts, own: Own, index: Array, g: Array
    ) -> None:
        """Update an entry by its gradient."""
        self.updates += 1
        at = self._at(index)
        entry = index if self.stacked and self._update.steps_in_place else None
        old = jax.tree.map(lambda ref: ref[at], refs)
        if entry is not None:
            old = _with_places(old, refs)
        own = jax.tree.map(lambda x: x[at], own)
        done = self._update.run(old.parameter, g, old.m, old.v, facts, own, entry)
        after = done.step
        assert isinstance(after.update, Parameter), "the step of a parameter"
        new = Held(after.update, after.m, after.v, done.squares, done.skipped)

        def write(ref: jax.Ref, value: jax.Ref | Array) -> None:
            if value is not ref:
                ref[at] = value

        if not self.stacked:
            # Later work begins after this is written, so that its gradient is gone.
            new, facts.sound[...] = lax.optimization_barrier((new, facts.sound[...]))
        jax.tree.map(write, refs, new)

    def frozen(self) -> Held:
        """Return the stack after the step.

        Raises:
          ValueError: the trace of the backward pass updates an entry twice.
        """
        self._slots = Slots()
        held = jax.tree.map(jax.freeze, self._refs)
        if self.updates > 1:
            raise ValueError(
                f"{self.name} gets {self.updates} gradients in the backward pass, and"
                " is updated by one; read it in one place of a layer, or take the"
                " ordinary step (value_and_grad, update, apply_updates)"
            )
        return held


def _with_places(old: Held, refs: Held) -> Held:
    """Return the values of an entry, with the codes and moments in references."""
    rows = refs.parameter.rows
    own = old.parameter
    placed = replace(own.rows, values=rows.values, lo=rows.lo)
    stored = replace(own.stored, backward=placed)
    return replace(old, parameter=replace(own, stored=stored), m=refs.m, v=refs.v)


# A rule that JAX runs as soon as the gradient of an entry is complete.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _slot(
    stack: Stack, refs: Held, facts: Facts, own: Own, index: Array, zero: Array
) -> Array:
    """Return zeros whose gradient updates an entry of a stack."""
    return stack.zeros()


def _slot_forward(
    stack: Stack, refs: Held, facts: Facts, own: Own, index: Array, zero: Array
) -> tuple[Array, PyTree]:
    return stack.zeros(), (refs, facts, own, index)


def _slot_backward(stack: Stack, kept: PyTree, g: Array) -> tuple[PyTree, ...]:
    refs, facts, own, index = kept
    try:
        stack.update(refs, facts, own, index, g)
    except Exception as error:  # JAX raises no narrower class for it
        if "an unbatched array reference" not in str(error):
            raise
        raise ValueError(
            f"a loop over {stack.name} runs inside jax.vmap, where JAX writes no"
            " reference: run the loop with the whole batch, because products take any"
            " leading axes, or take the ordinary step (value_and_grad, update,"
            " apply_updates)"
        ) from error
    return None, None, None, None, jnp.zeros((), jnp.float32)


_slot.defvjp(_slot_forward, _slot_backward)


def _row_major(x: Array) -> Array:
    # Otherwise XLA turns whole stacks of W_hi for the forward products in front of the
    # loop: a byte per weight.
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
