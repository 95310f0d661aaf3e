"""`train_step`: a step of training that updates each layer inside the backward pass, so
that the gradients of one matrix exist at a time instead of those of all.

An ordinary step holds the gradient of every weight before the optimizer sees the first,
two bytes per weight. Here a scan over stored layers runs with its stacks of weights and
moments in references (`jax.new_ref`). Each layer has a slot for its gradient, whose
backward rule runs AdamW on this entry and writes it back. XLA updates the stacks in
place, because the state is donated.

    step = train_step(loss_fn, adamw(3e-4, key=key))
    state = step.init(params)
    state, metrics = step(state, batch)

Stacks of stored weights that one scan runs over are updated inside; tables, heads,
norms, and layers that no scan runs over are updated behind the backward pass, once.

Left out: gradients as a result (use `value_and_grad`); accumulation over microbatches,
which needs all gradients (use larger batches and recomputation, or FSDP); other
optimizers than `adamw`, and transformations before or behind it; float masters
(`error_feedback`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.typing import ArrayLike

from pallas_kernels.checks import check_choice
from tcfp_jax.optim.adam import AdamW, AdamWState, Leaf, Tree
from tcfp_jax.optim.encoding import Keys, Moment
from tcfp_jax.optim.gradients import filled, slot_of
from tcfp_jax.optim.steps import Scalars, Stepped, WeightStep, float_step, fused_step
from tcfp_jax.optim.stored import all_finite
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.deferred import Deferred, Home
from tcfp_jax.weights.parameter import Parameter, intact
from tcfp_jax.weights.stored import Stored

Clip = Literal["late", "matrix"]


class TrainState(NamedTuple):
    """State of `train_step`.

    Attributes:
      params: the parameters.
      opt_state: the state of `adamw`. It and the parameters are those of an ordinary
        step, so each kind of step goes on where the other stopped.
      norm: float32, the global norm of the last gradients; None unless clip="late".
    """

    params: PyTree
    opt_state: AdamWState
    norm: Array | None = None


class Metrics(NamedTuple):
    """What a step of `train_step` reports.

    Attributes:
      loss: the loss before the update.
      aux: the second result of the loss function; None without `has_aux`.
      norm: the global norm of the gradients; None unless the step clips.
      skipped: for each parameter by its path, whether it kept its value because its
        gradient was not finite; bool `[layers]` for a stack that is updated inside.
        All are True if the loss is not finite.
    """

    loss: Array
    aux: PyTree
    norm: Array | None
    skipped: dict[str, Array]


def train_step(
    loss_fn: Callable[..., PyTree],
    optimizer: optax.GradientTransformation,
    *,
    clip: Clip | None = None,
    has_aux: bool = False,
) -> "TrainStep":
    """Return a step of training that updates layers inside the backward pass.

    Use it instead of `value_and_grad`, `update` and `apply_updates` if the gradients of
    all weights do not fit: it holds those of one matrix, not two bytes per weight.
    Without clipping it has the bits of the ordinary step.

    The model scans over its layers (`nn.scan`, `nnx.scan`, `jax.lax.scan`), as a
    converted model or with layers of this library. Recompute each layer
    (`nn.remat`, `jax.checkpoint`), or the values that a layer keeps are as large as in
    any other step.

    Args:
      loss_fn: `(params, *inputs)` to a scalar loss, or to (loss, aux).
      optimizer: `tcfp_jax.optim.adamw(...)`. Its `max_norm` needs `clip`, because the
        norm of all gradients is known after the last layer alone.
      clip: "late" scales by the norm of the gradients of the step before; "matrix"
        limits each matrix of a layer by its own norm.
      has_aux: whether `loss_fn` returns a pair.

    Returns:
      A function `(state, *inputs)` to (state, `Metrics`), with a method `init`. Called
      on arrays it is jitted and takes the state's buffers (do not use the old state
      again). Inside your own `jax.jit` donate the state, or both states exist.

    A loss that is not finite changes nothing. A layer with a gradient that is not
    finite keeps its weights and moments, and `Metrics.skipped` names it; other layers
    are updated. The ordinary step skips all layers then. `opt_state.skipped` counts
    both kinds of steps.

    Raises:
      TypeError: another optimizer than `adamw`, or a loss that is not a real scalar.
      ValueError: `max_norm` without `clip`, or `clip` without `max_norm`; a stack of
        layers that a scan runs over is read elsewhere, too.

    >>> from tcfp_jax.optim.adam import adamw
    >>> from tcfp_jax.optim.stored import store
    >>> from tcfp_jax.products.matmul import matmul
    >>> key = jax.random.key(0)
    >>> kernel = jax.random.normal(key, (3, 128, 128)) / 16
    >>> params = store({"kernel": kernel}, "tcfp12_single", key=key)
    >>> def loss(params, x):
    ...     @jax.checkpoint
    ...     def layer(x, kernel):
    ...         return x + matmul(x, kernel, recipe="tcfp12_single"), None
    ...     x, _ = jax.lax.scan(layer, x, params["kernel"])
    ...     return jnp.mean(x**2)
    >>> step = train_step(loss, adamw(1e-3, key=key))
    >>> state = step.init(params)
    >>> state, first = step(state, jnp.ones((16, 128)))
    >>> state, second = step(state, jnp.ones((16, 128)))
    >>> bool(second.loss < first.loss), second.skipped["kernel"].tolist()
    (True, [False, False, False])
    """
    if not isinstance(optimizer, AdamW):
        raise TypeError(
            f"train_step updates layers inside the backward pass by"
            f" tcfp_jax.optim.adamw, but got a {type(optimizer).__name__}:"
            " transformations of all gradients need all of them; pass"
            " adamw(...) alone, with its own mask= and max_norm=, or take the ordinary"
            " step (value_and_grad, update, apply_updates)"
        )
    limit = optimizer.settings.max_norm
    if clip is not None:
        check_choice("clip", clip, ("late", "matrix"))
    if limit is not None and clip is None:
        raise ValueError(
            f"adamw(max_norm={limit}) clips by the norm of all gradients, which is not"
            ' known before the first update: pass clip="late" (the norm of the step'
            ' before) or clip="matrix" (the norm of each matrix), or take the ordinary'
            " step"
        )
    if limit is None and clip is not None:
        raise ValueError(
            f"clip={clip!r}, but adamw has no max_norm; use adamw(..., max_norm=1.0)"
        )
    return TrainStep(loss_fn, optimizer, clip, has_aux)


class TrainStep:
    """The step that `train_step` returns: `(state, *inputs)` to (state, metrics)."""

    def __init__(
        self,
        loss_fn: Callable[..., PyTree],
        optimizer: AdamW,
        clip: Clip | None,
        has_aux: bool,
    ) -> None:
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.clip = clip
        self.has_aux = has_aux
        self._jitted = jax.jit(self._run, donate_argnums=0)

    def init(self, params: PyTree) -> TrainState:
        """Return the state before the first step; jit it with the parameters donated
        if memory is short.
        """
        return self.state(params, self.optimizer.init(params))

    def state(self, params: PyTree, opt_state: AdamWState) -> TrainState:
        """Return the state that goes on after an ordinary step."""
        norm = jnp.zeros((), jnp.float32) if self.clip == "late" else None
        return TrainState(params, opt_state, norm)

    def __call__(
        self, state: TrainState, *inputs: PyTree
    ) -> tuple[TrainState, Metrics]:
        """Return the state after one more step, and its metrics."""
        arrays = jax.tree.leaves((state, inputs))
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return self._run(state, *inputs)
        return self._jitted(state, *inputs)

    def _run(self, state: TrainState, *inputs: PyTree) -> tuple[TrainState, Metrics]:
        settings = self.optimizer.settings
        tree = Tree(intact(state.params), settings.moments, settings.mask)
        return _taken(self, tree, state, inputs)


# Which stacks are updated inside
# --------------------------------------------------------------------------------------


class _Shapes(Home):
    """A parameter of which a trace reads zeros; it records whether all of a stack is
    read.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.whole = jax.eval_shape(lambda: parameter)
        self.stacked = len(parameter.shape) > 2
        self.is_read_whole = False
        self._slots: dict[int, tuple[Array, Array]] = {}

    def read(self, index: Array) -> Stored:
        if index.ndim:
            self.is_read_whole = True
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._shapes(index))

    def slot(self, index: Array, zero: Array) -> Array:
        if id(index) not in self._slots:
            # It reads the index, which shows where in the program it stands.
            value = index.astype(self.whole.state.gradient_dtype)
            made = jnp.broadcast_to(value, self._shapes(index).shape)
            self._slots[id(index)] = (index, made)
        return self._slots[id(index)][1]

    def _shapes(self, index: Array) -> Stored:
        shapes = self.whole.stored
        if index.ndim or not self.stacked:
            return shapes
        return jax.tree.map(_without_layers, shapes)


def _numbers(shape: tuple[int, ...]) -> Array:
    """Return the numbers of the entries: int32 `[layers]`, or 0 of what is no stack."""
    return jnp.arange(shape[0], dtype=jnp.int32) if shape else jnp.int32(0)


def _without_layers(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _updated_inside(
    tree: Tree, loss_fn: Callable[..., PyTree], inputs: tuple[PyTree, ...]
) -> list[int]:
    """Return the numbers of the parameters that are updated inside: stacks that one
    scan runs over, and matrices that one place outside of loops reads.

    Raises:
      ValueError: a scan runs over a stack, and something else reads it, too.
    """
    homes: dict[int, _Shapes] = {}
    for number, leaf in enumerate(tree.leaves):
        own = leaf.parameter
        if isinstance(own, Parameter) and leaf.is_fused and own.shape[:-2] != (1,):
            homes[number] = _Shapes(own)

    def loss_of(numbers: dict[int, Array]) -> PyTree:
        leaves = [leaf.parameter for leaf in tree.leaves]
        for number, index in numbers.items():
            zero = jnp.zeros(index.shape)
            leaves[number] = Deferred(index, zero, homes[number])
        return loss_fn(tree.treedef.unflatten(leaves), *inputs)

    numbers = {}
    for number, home in homes.items():
        numbers[number] = _numbers(home.whole.shape[:-2][:1])
    program = jax.make_jaxpr(loss_of)(numbers)
    uses = {var: _Uses() for var in program.jaxpr.invars}
    _find_uses(program.jaxpr, uses)
    found = []
    for (number, home), use in zip(homes.items(), uses.values(), strict=True):
        if not home.stacked and use.others == (_SLOT,):
            found.append(number)
        if not use.scans:
            continue
        if use.scans > 1 or use.others or home.is_read_whole:
            raise ValueError(_read_elsewhere(tree.leaves[number], use, home))
        found.append(number)
    return found


_SLOT = "convert_element_type"  # the equation that `_Shapes.slot` leaves


@dataclass
class _Uses:
    """How often scans run over an array, and which other equations read it."""

    scans: int = 0
    others: tuple[str, ...] = ()


def _find_uses(jaxpr: core.Jaxpr, uses: dict[core.Var, _Uses]) -> None:
    for eqn in jaxpr.eqns:
        body = _body(eqn)
        for place, var in enumerate(eqn.invars):
            if isinstance(var, core.Literal) or var not in uses:
                continue
            use = uses[var]
            name = eqn.primitive.name
            if body is None:
                use.others += (name,)
                continue
            inner = body.invars[place]
            if name != "scan":
                _find_uses(body, {inner: use})
            elif inner.aval.ndim < var.aval.ndim:
                use.scans += 1
            else:
                use.others += ("the carry or the constants of a scan",)
    for var in jaxpr.outvars:
        if not isinstance(var, core.Literal) and var in uses:
            uses[var].others += ("the result",)


def _body(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Return the program that an equation runs on its own operands, or None."""
    for value in eqn.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if isinstance(jaxpr, core.Jaxpr) and len(jaxpr.invars) == len(eqn.invars):
            return jaxpr
    return None


def _read_elsewhere(leaf: Leaf, use: _Uses, home: _Shapes) -> str:
    readers = list(use.others)
    if home.is_read_whole:
        readers.append("code that reads the whole stack")
    if use.scans > 1:
        readers.append(f"{use.scans} scans")
    return (
        f"a scan runs over the stored stack {'/'.join(leaf.names)}"
        f" {list(leaf.parameter.shape)}, whose layers are updated inside the backward"
        f" pass, but it is also read by {', '.join(readers)}: the update would come"
        " before the last gradient; read it in one scan alone, or take the ordinary"
        " step (value_and_grad, update, apply_updates)"
    )


# The step
# --------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Held:
    """What the update of a stack reads and writes; references while a step runs.

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
    def of(parameter: Parameter, m: Moment, v: Moment) -> "_Held":
        layers = parameter.shape[:-2][:1]
        return _Held(parameter, m, v, jnp.zeros(layers), jnp.ones(layers, jnp.bool_))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Facts:
    """What updates of a step know.

    Attributes:
      scalars: the numbers of AdamW.
      sound: whether the loss is finite; a reference that is written before the backward
        pass.
    """

    scalars: Scalars
    sound: Array


@dataclass(frozen=True)
class _Update:
    """How one parameter, or an entry of a stack, is updated.

    Attributes:
      step: its formats.
      is_fused: whether the kernel updates it.
      clip: how gradients are clipped.
      max_norm: the limit of a norm, or None.
    """

    step: WeightStep
    is_fused: bool
    clip: Clip | None
    max_norm: ArrayLike | None

    def run(
        self,
        w: Array | Parameter,
        g: Array,
        m: Moment,
        v: Moment,
        facts: _Facts,
        keys: Keys | None,
    ) -> tuple[Stepped, Array, Array]:
        """Return (the step, the sum of squares of the gradient, whether it was
        skipped).
        """
        squares = jnp.zeros(())
        scalars = facts.scalars
        keep = facts.sound[...]
        if self.clip is None:
            keep = keep & all_finite([g])
        else:
            squares = jnp.sum(jnp.square(g.astype(jnp.float32)))
            keep = keep & jnp.isfinite(squares)
        if self.clip == "matrix":
            factor = _factor(jnp.sqrt(squares), self.max_norm)
            scalars = scalars._replace(factor=factor)
        run = fused_step if self.is_fused else float_step
        done = run(self.step, w, g, m, v, scalars, keys, keep)
        return done, squares, ~keep


def _factor(norm: Array, max_norm: ArrayLike | None) -> Array:
    """Return the factor that scales gradients of this norm to the limit."""
    limit = jnp.asarray(max_norm, jnp.float32)
    return jnp.where(norm > limit, limit / norm, jnp.float32(1))


class _Stack(Home):
    """A stack in references while a step runs."""

    def __init__(
        self,
        leaf: Leaf,
        held: _Held,
        facts: _Facts,
        update: _Update,
        keys: Keys,
    ) -> None:
        self.name = "/".join(leaf.names)
        self.whole = jax.eval_shape(lambda: held.parameter)
        self.stacked = held.skipped.ndim > 0
        self.updates = 0
        self._update = update
        self._refs = jax.tree.map(jax.new_ref, held)
        self._facts = facts
        self._keys = keys
        self._slots: dict[int, tuple[Array, Array]] = {}

    def read(self, index: Array) -> Stored:
        if index.ndim:
            raise ValueError(f"{self.name} is read as a whole inside its step")
        at = self._at(index)
        values = jax.tree.map(lambda ref: ref[at], self._refs.parameter.stored)
        return jax.tree.map(_row_major, values) if self.stacked else values

    def _at(self, index: Array) -> Array | EllipsisType:
        """Return the index into references; a parameter that is no stack has one."""
        return index if self.stacked else ...

    def slot(self, index: Array, zero: Array) -> Array:
        # One slot for all uses in a layer, so that JAX adds their gradients.
        if id(index) not in self._slots:
            made = _slot(self, self._refs, self._facts, self._keys, index, zero)
            self._slots[id(index)] = (index, made)
        return self._slots[id(index)][1]

    def zeros(self) -> Array:
        """Return the zeros of a slot."""
        shape = self.whole.shape[1:] if self.stacked else self.whole.shape
        return jnp.zeros(shape, self.whole.state.gradient_dtype)

    def update(
        self, refs: _Held, facts: _Facts, keys: Keys, index: Array, g: Array
    ) -> None:
        """Update an entry by its gradient."""
        self.updates += 1
        at = self._at(index)
        old = jax.tree.map(lambda ref: ref[at], refs)
        own_keys = jax.tree.map(lambda words: words[at], keys)
        done, squares, skipped = self._update.run(
            old.parameter, g, old.m, old.v, facts, own_keys
        )
        new = _Held(done.update, done.m, done.v, squares, skipped)

        def write(ref: Array, value: Array) -> None:
            ref[at] = value

        if not self.stacked:
            # What follows begins when this is written, so that its gradient is gone.
            new, facts.sound[...] = lax.optimization_barrier((new, facts.sound[...]))
        jax.tree.map(write, refs, new)

    def frozen(self) -> _Held:
        """Return the stack after the step.

        Raises:
          ValueError: the trace of the backward pass updates an entry never, or twice.
        """
        self._slots.clear()
        held = jax.tree.map(jax.freeze, self._refs)
        if self.updates != 1:
            raise ValueError(
                f"a layer of {self.name} has {self.updates} gradients in the backward"
                " pass, and is updated by one: use a weight once in a layer, or in one"
                " rematerialized part of it; a weight without a gradient belongs into"
                " the arguments of the loss, not into the parameters"
            )
        return held


# A rule that JAX runs as soon as the gradient of an entry is complete.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _slot(
    stack: _Stack, refs: _Held, facts: _Facts, keys: Keys, index: Array, zero: Array
) -> Array:
    """Return zeros whose gradient updates an entry of a stack."""
    return stack.zeros()


def _slot_forward(
    stack: _Stack, refs: _Held, facts: _Facts, keys: Keys, index: Array, zero: Array
) -> tuple[Array, PyTree]:
    return stack.zeros(), (refs, facts, keys, index)


def _slot_backward(stack: _Stack, kept: PyTree, g: Array) -> tuple[PyTree, ...]:
    refs, facts, keys, index = kept
    stack.update(refs, facts, keys, index, g)
    return None, None, None, None, jnp.zeros(())


_slot.defvjp(_slot_forward, _slot_backward)


def _row_major(x: Array) -> Array:
    # Otherwise XLA turns whole stacks of W_hi for the forward products in front of the
    # loop: a byte per weight.
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _taken(
    step: TrainStep, tree: Tree, state: TrainState, inputs: tuple[PyTree, ...]
) -> tuple[TrainState, Metrics]:
    """Return the state after a step, and its metrics."""
    settings = step.optimizer.settings
    old = state.opt_state
    count = optax.safe_increment(old.count)
    factor = jnp.ones((), jnp.float32)
    if step.clip == "late":
        factor = _factor(state.norm, settings.max_norm)
    sound = jax.new_ref(jnp.bool_(True))
    facts = _Facts(settings.scalars(old.count, factor), sound)
    inside = _updated_inside(tree, step.loss_fn, inputs)

    # Everything by the number of a leaf.
    slots: list[PyTree] = []
    stacks: dict[int, _Stack] = {}
    updates: list[_Update] = []
    rest: dict[int, tuple[Moment, Moment]] = {}
    for number, (leaf, m, v) in enumerate(tree.with_moments(old)):
        how = WeightStep(leaf.forms, settings.nesterov, leaf.decays)
        update = _Update(how, leaf.is_fused, step.clip, settings.max_norm)
        keys = leaf.keys(old.key, count, number)
        updates.append(update)
        if number in inside:
            held = _Held.of(leaf.parameter, m, v)
            stacks[number] = _Stack(leaf, held, facts, update, keys)
            slots.append(jnp.zeros(held.skipped.shape))
        else:
            rest[number] = (m, v)
            slots.append(slot_of(leaf.parameter))

    def loss_of(slots: list[PyTree]) -> PyTree:
        leaves = []
        for number, (leaf, slot) in enumerate(zip(tree.leaves, slots, strict=True)):
            if number in stacks:
                leaves.append(Deferred(_numbers(slot.shape), slot, stacks[number]))
            else:
                leaves.append(filled(leaf.parameter, slot))
        return step.loss_fn(tree.treedef.unflatten(leaves), *inputs)

    loss, gradients, aux = _differentiated(loss_of, slots, sound, step.has_aux)

    made: list[Stepped] = []
    squares = jnp.zeros(())
    skipped: dict[str, Array] = {}
    for number, leaf in enumerate(tree.leaves):
        if number in stacks:
            after = stacks[number].frozen()
            done = Stepped(after.parameter, after.m, after.v)
            own = jnp.sum(after.squares)
            missed = after.skipped
        else:
            keys = leaf.keys(old.key, count, number)
            done, own, missed = updates[number].run(
                leaf.parameter,
                leaf.gradient(gradients[number]),
                *rest[number],
                facts,
                keys,
            )
        made.append(done)
        squares = squares + own
        skipped["/".join(leaf.names)] = missed

    finite = jax.freeze(sound)
    any_skipped = jnp.any(jnp.stack([jnp.any(missed) for missed in skipped.values()]))
    mu, mu_scale = tree.kept([one.m for one in made])
    nu, nu_scale = tree.kept([one.v for one in made])
    opt_state = AdamWState(
        jnp.where(finite, count, old.count),
        old.skipped + any_skipped.astype(jnp.int32),
        mu,
        nu,
        mu_scale,
        nu_scale,
        old.key,
    )
    norm = None if step.clip is None else jnp.sqrt(squares)
    kept_norm = None
    if step.clip == "late":
        kept_norm = jnp.where(finite & jnp.isfinite(norm), norm, state.norm)
    params = []
    for leaf, one in zip(tree.leaves, made, strict=True):
        whole = isinstance(one.update, Parameter)
        params.append(
            one.update if whole else optax.apply_updates(leaf.parameter, one.update)
        )
    after = TrainState(tree.treedef.unflatten(params), opt_state, kept_norm)
    return after, Metrics(loss, aux, norm, skipped)


def _differentiated(
    loss_of: Callable[..., PyTree], slots: list[PyTree], sound: Array, has_aux: bool
) -> tuple[Array, list[PyTree], PyTree]:
    """Return (the loss, gradients, aux); write whether the loss is finite before the
    backward pass.
    """
    loss, pull, *aux = jax.vjp(loss_of, slots, has_aux=has_aux)
    if jnp.shape(loss) or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"the loss is {loss.dtype}{list(jnp.shape(loss))}, not a real scalar;"
            " return its mean"
        )
    sound[...] = jnp.isfinite(loss)
    (gradients,) = pull(jnp.ones_like(loss))
    return loss, gradients, aux[0] if aux else None
