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

Inside are updated stacks of stored weights that one scan runs over, and stored matrices
that no loop or branch reads, such as a table or a head. Everything else is updated
behind the backward pass: norms, biases, small weights, and matrices that all layers of
a scan share.

Left out: gradients as a result (use `value_and_grad`); accumulation over microbatches,
which needs all gradients (use larger batches and recomputation, or FSDP); other
optimizers than `adamw`, and transformations before or behind it; float masters
(`error_feedback`).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from pallas_kernels.checks import check_choice
from pallas_kernels.derivatives import not_differentiated
from tcfp_jax.optim.adam import AdamW, AdamWState, Leaf, Tree
from tcfp_jax.optim.arguments import check_made
from tcfp_jax.optim.encoding import Keys, Moment, decode
from tcfp_jax.optim.gradients import arithmetic_named, filled, slot_of
from tcfp_jax.optim.scanned import ORDINARY, arrays_of, updated_inside
from tcfp_jax.optim.slots import Clip, Facts, Held, Own, Stack, Update, Updated
from tcfp_jax.optim.steps import Stepped
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.deferred import Deferred
from tcfp_jax.weights.parameter import Parameter, intact

# The part of a limit that goes by the numbers of values. Without it a gradient that is
# zero for long would come back below Adam's eps, and stay there.
_BY_SIZE = 0.01
_IN_A_BRANCH = (
    "a branch of lax.cond or lax.switch reads a stored weight that is updated inside"
    " the backward pass, but JAX reads no reference there: compute the product in front"
    " of the branch and choose between results by jnp.where, or take the ordinary step"
    " (value_and_grad, update, apply_updates)"
)
_NO_GRADIENT = (
    "a gradient through train_step is asked for, but it is a whole step of training and"
    " has none: differentiate its loss function by tcfp_jax.value_and_grad"
)


class TrainState(NamedTuple):
    """State of `train_step`.

    Attributes:
      params: the parameters.
      opt_state: the state of `adamw`. It and the parameters fit the ordinary
        step as well, so either step continues where the other stopped.
    """

    params: PyTree
    opt_state: AdamWState


class Metrics(NamedTuple):
    """Metrics of one step of `train_step`.

    Use this to log a run, and to find the parameters whose step was skipped.

    Attributes:
      loss: the loss before the update.
      aux: the second result of the loss function; None without `has_aux`.
      norm: the global norm of the gradients; None unless the step clips.
      skipped: for each parameter by its path, whether it kept its value because its
        gradient was not finite; bool `[layers]` for a stack that is updated inside.
        All are True if the loss is not finite, or a number of the optimizer is out of
        range.
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
    all weights do not fit: it holds the gradient of one matrix, not all of them. It
    takes moments in 8 bits and recipes with one scale per weight. With others, and for
    stacks that no scan runs over, it holds all gradients as the ordinary step does. It
    warns if no scan runs over a stack, or if these are more than a quarter of the
    stacks' values.
    Without clipping it gives the results of the ordinary step, with the same random
    bits; XLA may add a few sums in another order or precision.

    The model scans over its layers (`nn.scan`, `nnx.scan`, `jax.lax.scan`), as a
    converted model or with layers of this library. Recompute each layer
    (`nn.remat`, `jax.checkpoint`), or the values that a layer keeps are as large as in
    any other step. A weight without a gradient, as behind `stop_gradient`, takes its
    step with a gradient of zeros.

    Args:
      loss_fn: `(params, *inputs)` to a scalar loss, or to (loss, aux).
      optimizer: `tcfp_jax.optim.adamw(...)`. Its `max_norm` needs `clip`, because the
        norm of all gradients is known only after the last layer.
      clip: "late" limits the norm of each gradient to its part of `max_norm`: the
        gradient of one matrix of a layer, of all experts of a layer together, or of any
        other parameter as a whole. The part of a gradient with n values is `max_norm
        sqrt(0.99 sum v / sum of all v + 0.01 n / sum of all n)`. Here v are the second
        moments, the mean squares of earlier gradients. The norm of all gradients is
        then at most `max_norm`. A part without second moments may have all of
        `max_norm`, as in the first step. "matrix" limits each gradient to `max_norm`
        itself, which rarely clips.
      has_aux: whether `loss_fn` returns a pair.

    Returns:
      A function `(state, *inputs)` to (state, `Metrics`), with a method `init`. Called
      on arrays it is jitted and takes the state's buffers (do not use the old state
      again). Inside your own `jax.jit` donate the state. Otherwise the old state stays
      next to the new one, four more bytes per weight with moments in 8 bits. JAX does
      not tell whether it is donated, so nothing warns.

    A loss that is not finite changes nothing, nor does a number of the optimizer that
    is out of range. A layer with a gradient that is not finite keeps its weights and
    moments, and `Metrics.skipped` names it; other layers are updated. The ordinary step
    skips all layers then. `opt_state.skipped` counts both kinds of steps.

    Raises:
      TypeError: another optimizer than `adamw`, a loss that is not a real scalar or
        asks for gradients of stored weights, arithmetic on their arrays, a parameter of
        integers, or a gradient through the step.
      ValueError: `max_norm` without `clip`, or `clip` without `max_norm`; a stack of
        layers that a scan runs over is read elsewhere, too, or a layer inside
        a branch.

    Warns:
      UserWarning: no scan runs over a stored stack, the step holds the gradients of
        more than a quarter of the values in stacks, stored or float, or no weight is
        stored.

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
            " transformations of all gradients need all of them. So do accumulation"
            " over microbatches (use a larger batch with more recomputation, or FSDP)"
            " and error_feedback, which keeps float weights. Pass adamw(...) alone,"
            " with its own mask= and max_norm=, or take the ordinary step"
            " (value_and_grad, update, apply_updates)"
        )
    limit = optimizer.settings.max_norm
    if clip is not None:
        check_choice("clip", clip, ("late", "matrix"))
    if limit is not None and clip is None:
        raise ValueError(
            f"adamw(max_norm={limit}) clips by the norm of all gradients, which is not"
            ' known before the first update: pass clip="late" (each matrix has its part'
            ' of max_norm) or clip="matrix" (each has max_norm), or take the ordinary'
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
        self.loss_fn = arithmetic_named(ORDINARY)(loss_fn)
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
        return TrainState(params, opt_state)

    def __call__(
        self, state: TrainState, *inputs: PyTree
    ) -> tuple[TrainState, Metrics]:
        """Return the state after one more step, and its metrics."""
        arrays = jax.tree.leaves((state, inputs))
        if not any(map(_is_traced, arrays)):
            return self._jitted(state, *inputs)
        state, inputs = jax.tree.map(_without_gradient, (state, inputs))
        return self._run(state, *inputs)

    def _run(self, state: TrainState, *inputs: PyTree) -> tuple[TrainState, Metrics]:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"the state is a {type(state).__name__}, not that of train_step; make"
                " it by step.init(params), or by step.state(params, opt_state) after"
                " ordinary steps"
            )
        check_made(state.opt_state, AdamWState, "adamw")
        settings = self.optimizer.settings
        tree = Tree(intact(state.params), settings.moments, settings.mask)
        run = _Run(self, tree, state)
        run.begin(inputs)
        loss, gradients, aux = run.differentiate(inputs)
        made = run.finish(gradients)
        after, norm = run.state(made)
        skipped = {}
        for leaf, one in zip(tree.leaves, made, strict=True):
            skipped["/".join(leaf.names)] = one.skipped
        return after, Metrics(loss, aux, norm, skipped)


def _check_floats(leaf: Leaf) -> None:
    """Raise `TypeError` unless a parameter has a gradient."""
    own = leaf.parameter
    if isinstance(own, Parameter) or jnp.issubdtype(own.dtype, jnp.inexact):
        return
    raise TypeError(
        f"the parameter {'/'.join(leaf.names)} is {own.dtype}{list(own.shape)}, which"
        " has no gradient; pass it to the loss with the inputs"
    )


def _is_traced(leaf: PyTree) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _without_gradient(leaf: PyTree) -> PyTree:
    return not_differentiated(_NO_GRADIENT, leaf) if _is_traced(leaf) else leaf


def _pair_of(found: PyTree) -> tuple[PyTree, PyTree]:
    """Return the result of a loss function as (loss, aux); raise `TypeError` unless it
    is a pair.
    """
    if isinstance(found, tuple | list) and len(found) == 2:
        loss, aux = found
        return loss, aux
    given = f"a {type(found).__name__}"
    if isinstance(found, Array):
        given = f"{found.dtype}{list(found.shape)}"
    elif isinstance(found, tuple | list):
        given = f"{given} of {len(found)}"
    raise TypeError(
        f"with has_aux=True the loss function returns (loss, aux), but it returned"
        f" {given}; return a pair, or leave has_aux=True out"
    )


def _checked_loss(loss: PyTree) -> Array:
    """Return the loss as an array; raise `TypeError` unless it is a real scalar."""
    is_number = isinstance(loss, Array | np.generic | float)
    if is_number and not jnp.shape(loss):
        value = jnp.asarray(loss)
        if jnp.issubdtype(value.dtype, jnp.floating):
            return value
    parts = jax.tree.leaves(loss)
    found = [f"{jnp.result_type(part)}{list(jnp.shape(part))}" for part in parts]
    given = ", ".join(found) or type(loss).__name__
    raise TypeError(
        f"the loss is {given}, not a real scalar; return its mean, or the"
        " weighted sum of several losses; has_aux=True is for (loss, aux)"
    )


class _Run:
    """One step, in stages; lists and dicts of parameters go by their number.

    Attributes:
      of: the step that a user has made.
      tree: the parameters.
      old: the state before the step.
      updates: how each parameter is updated.
      own: the keys and the limit of each update, from `begin` on.
      stacks: the parameters that are updated inside.
      slots: the arrays with respect to which the loss is differentiated.
    """

    def __init__(self, of: TrainStep, tree: Tree, state: TrainState) -> None:
        settings = of.optimizer.settings
        self.of = of
        self.tree = tree
        self.old = state
        self.count = optax.safe_increment(state.opt_state.count)
        factor = jnp.ones((), jnp.float32)
        scalars = settings.scalars(state.opt_state.count, factor)
        self.facts = Facts(scalars, jax.new_ref(jnp.bool_(True)))
        self.moments: list[tuple[Moment, Moment]] = []
        self.updates: list[Update] = []
        for leaf, m, v in tree.with_moments(state.opt_state):
            _check_floats(leaf)
            step = settings.step_of(leaf)
            self.moments.append((m, v))
            self.updates.append(Update(step, leaf.is_fused))
        self.own: list[Own] = []
        self.stacks: dict[int, Stack] = {}
        self.slots: list[PyTree] = [slot_of(leaf.parameter) for leaf in tree.leaves]

    def begin(self, inputs: tuple[PyTree, ...]) -> None:
        """Move the parameters that are updated inside into references."""
        held = {}
        for number in updated_inside(self.tree, self.of.loss_fn, inputs):
            parameter = self.tree.leaves[number].parameter
            assert isinstance(parameter, Parameter), "updated_inside returns no others"
            held[number] = Held.of(parameter, *self.moments[number])
        layers = []
        for number in range(len(self.tree.leaves)):
            layers.append(held[number].skipped.shape if number in held else ())
        limits = self._limits(layers)
        for number, leaf in enumerate(self.tree.leaves):
            own = Own(self._keys(number), limits[number])
            self.own.append(own)
            if number in held:
                self.stacks[number] = Stack(
                    leaf, held[number], self.facts, self.updates[number], own
                )
                self.slots[number] = jnp.zeros(layers[number], jnp.float32)

    def _keys(self, number: int) -> Keys | None:
        words = self.old.opt_state.key
        return self.tree.leaves[number].keys(words, self.count, number)

    def _limits(self, layers: list[tuple[int, ...]]) -> Sequence[Array | None]:
        """Return the largest norm of each gradient; a stack has one per layer."""
        if self.of.clip is None:
            return [None] * len(layers)
        limit = jnp.asarray(self.of.optimizer.settings.max_norm, jnp.float32)
        if self.of.clip == "matrix":
            return [jnp.broadcast_to(limit, shape) for shape in layers]
        energies = []
        sizes = []
        for (_, v), shape in zip(self.moments, layers, strict=True):
            values = decode(v)
            energies.append(jnp.sum(values, axis=range(len(shape), values.ndim)))
            sizes.append(math.prod(values.shape[len(shape) :]))
        total = sum(map(jnp.sum, energies), jnp.zeros((), jnp.float32))
        count = sum(x.size * n for x, n in zip(energies, sizes, strict=True))
        limits = []
        for energy, size in zip(energies, sizes, strict=True):
            share = (1 - _BY_SIZE) * energy / total + _BY_SIZE * size / count
            # Before its first gradient nothing is known of a parameter.
            limits.append(limit * jnp.sqrt(jnp.where(energy > 0, share, 1)))
        return limits

    def differentiate(
        self, inputs: tuple[PyTree, ...]
    ) -> tuple[Array, list[PyTree], PyTree]:
        """Return (the loss, gradients, aux); this updates the stacks."""

        def loss_of(slots: list[PyTree]) -> tuple[Array, PyTree]:
            leaves = []
            for number, slot in enumerate(slots):
                stack = self.stacks.get(number)
                if stack is None:
                    leaves.append(filled(self.tree.leaves[number].parameter, slot))
                else:
                    leaves.append(Deferred(*arrays_of(slot), stack))
            found = self.of.loss_fn(self.tree.treedef.unflatten(leaves), *inputs)
            loss, aux = _pair_of(found) if self.of.has_aux else (found, None)
            return _checked_loss(loss), aux

        try:
            loss, pull, aux = jax.vjp(loss_of, self.slots, has_aux=True)
        except NotImplementedError as error:
            if "State effect" not in str(error):
                raise
            raise ValueError(_IN_A_BRANCH) from error
        usable = self.of.optimizer.settings.are_usable(self.facts.scalars)
        # Known before the first update.
        self.facts.sound[...] = jnp.isfinite(loss) & usable
        (gradients,) = pull(jnp.ones_like(loss))
        return loss, gradients, aux

    def finish(self, gradients: list[PyTree]) -> list[Updated]:
        """Return each parameter after the step."""
        made = []
        for number, leaf in enumerate(self.tree.leaves):
            stack = self.stacks.get(number)
            own = self.own[number]
            if stack is None:
                g = leaf.gradient(gradients[number])
            elif stack.updates:
                after = stack.frozen()
                done = Stepped(after.parameter, after.m, after.v)
                made.append(Updated(done, jnp.sum(after.squares), after.skipped))
                continue
            else:  # its gradient is stopped, or nothing reads an entry
                g = leaf.gradient(slot_of(leaf.parameter))
                own = own._replace(limit=None)  # zeros are not clipped
            m, v = self.moments[number]
            made.append(
                self.updates[number].run(leaf.parameter, g, m, v, self.facts, own)
            )
        return made

    def state(self, made: list[Updated]) -> tuple[TrainState, Array | None]:
        """Return (the state after the step, the norm of the gradients)."""
        old = self.old.opt_state
        finite = jax.freeze(self.facts.sound)
        skipped = ~finite
        for one in made:
            skipped |= jnp.any(one.skipped)
        mu, mu_scale = self.tree.kept([one.step.m for one in made])
        nu, nu_scale = self.tree.kept([one.step.v for one in made])
        opt_state = AdamWState(
            jnp.where(finite, self.count, old.count),
            old.skipped + skipped.astype(jnp.int32),
            mu,
            nu,
            mu_scale,
            nu_scale,
            old.key,
        )
        squares = sum((one.squares for one in made), jnp.zeros((), jnp.float32))
        norm = jnp.sqrt(squares)
        params = []
        for leaf, one in zip(self.tree.leaves, made, strict=True):
            new = one.step.update
            if not isinstance(new, Parameter):
                new = optax.apply_updates(leaf.parameter, new)
            params.append(new)
        after = TrainState(self.tree.treedef.unflatten(params), opt_state)
        return after, None if self.of.clip is None else norm
