"""AdamW for trees with stored weights: optax's arithmetic, and moments in one byte.

`pallas_kernels.adamw` updates a stored weight of 4096 values or more in place. It reads
and writes the gradient, `W_hi`, `W_lo` and both moments once, 4.03 bytes of state per
weight, and makes no float copy. XLA updates everything else with the same arithmetic:
float parameters, small weights, rows of fewer than 128 values, other formats of
moments, scales of blocks. A step with a gradient that is not finite, or whose square is
not, changes only the count of these.

Over stored parameters it works inside `chain`, `masked`, `partition` and
`inject_hyperparams`. `MultiSteps` and `apply_if_finite` expect updates like the
parameters, so `init` raises inside of them: accumulate before it, or write
`on_stored(optax.MultiSteps(...))`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels import moments as codes
from pallas_kernels.checks import check_choice
from pallas_kernels.operands import Tensor
from tcfp_jax.optim import encoding
from tcfp_jax.optim.arguments import GRADIENTS, MOMENTS, PARAMETERS, check_made
from tcfp_jax.optim.encoding import Format, Keys, Moment, Scales
from tcfp_jax.optim.numbers import check_numbers, usable
from tcfp_jax.optim.steps import (
    Scalars,
    Stepped,
    WeightStep,
    float_step,
    fused_step,
    has_bound,
)
from tcfp_jax.optim.stored import all_finite
from tcfp_jax.optim.wrappers import check_wrappers
from tcfp_jax.paths import PyTree, named_leaves
from tcfp_jax.weights.parameter import (
    Parameter,
    intact,
    is_parameter,
    is_quantized,
    parameter_of,
)
from tcfp_jax.weights.rewritten import Rewritten

_FORMATS: dict[str, tuple[Format, Format]] = {
    "8bit": ("float8_e4m3fn", "ue5m3"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float32": ("float32", "float32"),
}


class AdamWState(NamedTuple):
    """State of `adamw`.

    Use this to read counters or moments; use `tcfp_jax.monitor` instead to find moments
    that do not move.

    Attributes:
      count: number of steps that were taken, int32.
      skipped: number of steps that were skipped because of a NaN, an inf, a gradient
        of 2**63 or more, or a number of the optimizer out of range, int32.
      mu: first moments, a tree that mirrors the parameters; a stored weight's has the
        shape of its matrix.
      nu: second moments, likewise.
      mu_scale: scales of the 8-bit first moments, in nested dicts by the names of their
        parameters.
      nu_scale: scales of the 8-bit second moments, likewise.
      key: uint32 words of the random key; None if no moment is rounded.
      quality: None; checkpoints of earlier versions have a field of this name.
    """

    # optax's name for it; tuples have a method of that name
    count: Array  # type: ignore[assignment]
    skipped: Array
    mu: PyTree
    nu: PyTree
    mu_scale: Scales
    nu_scale: Scales
    key: Array | None
    quality: None = None


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    weight_decay: ArrayLike = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    *,
    nesterov: bool = False,
    moments: Literal["8bit", "bfloat16", "float32"] = "8bit",
    max_norm: ArrayLike | None = None,
    key: Array | None = None,
) -> optax.GradientTransformation:
    """Return `optax.adamw` for stored parameters, with moments in few bytes.

    Use this to train parameters of `tcfp_jax.store`, and for float parameters whose
    moments do not fit in memory. Use `on_stored(tx)` for other optimizers of stored
    parameters, and `low_precision_moments(tx)` for their moments.

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g**2
        change = m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps)
        w = w - learning_rate (change + weight_decay w)

    The arithmetic is float32. A float parameter gets a float32 update, a stored one its
    new weight: apply both with `tcfp_jax.apply_updates`. Float embeddings and leaves
    with fewer than 4096 values or two axes keep float32 moments.

    In `optax.inject_hyperparams` pass `static_args=("key", "mask")` and
    `hyperparam_dtype=jnp.float32`. A step is skipped and counted if a number that only
    the program knows, such as a schedule's, is out of range.

    Args:
      learning_rate: a finite number, or a schedule of the count of steps that were
        taken.
      b1: decay of the first moment, at least 0 and below 1.
      b2: decay of the second moment, at least 0 and below 1.
      eps: added to the root, not negative.
      eps_root: added under the root, not negative.
      weight_decay: decoupled decay, multiplied by the learning rate, not negative.
      mask: parameters that decay: a tree of bools, or a function of the parameters that
        returns one and sees shapes instead of stored weights. None means all.
      nesterov: as in optax.
      moments: "8bit" (m in E4M3, v in "ue5m3", a scale for each 128 values) and
        "bfloat16" round stochastically; "float32" does not round.
      max_norm: limit of the gradients' global norm, above 0, to which larger ones are
        scaled. A step whose norm is not finite is skipped. The order of the sum depends
        on the mesh, so clipped steps agree between meshes only up to rounding.
      key: JAX random key, needed for "8bit" and "bfloat16". It becomes part of the
        state.

    Raises:
      ValueError: an unknown `moments`, or a number out of range. A key that is missing,
        or that would not be used. A mesh that cuts blocks of moments. `init` with
        stored parameters inside `MultiSteps` or `apply_if_finite`. `update` without
        parameters, or with gradients or a state that do not fit them.
      TypeError: `update` with the state of another optimizer.

    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = adamw(0.1, moments="float32")
    >>> gradients = {"kernel": jnp.ones((2, 2))}
    >>> updates, state = tx.update(gradients, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 4), int(state.count)
    (-0.1, 1)
    """
    check_choice("moments", moments, _FORMATS)
    setting = f"moments={moments!r}"
    words = encoding.checked_key("adamw", key, moments != "float32", setting)
    settings = Settings(
        learning_rate,
        b1,
        b2,
        eps,
        eps_root,
        weight_decay,
        mask,
        nesterov,
        moments,
        max_norm,
    )
    rate = None if callable(learning_rate) else learning_rate
    check_numbers(learning_rate=rate, **settings.numbers)

    def init(params: PyTree) -> AdamWState:
        check_wrappers(params, rewrites=True)
        tree = Tree(params, moments, mask)
        # New arrays each time, because a state may be donated
        mu, mu_scale = tree.kept([leaf.zeros(0) for leaf in tree.leaves])
        nu, nu_scale = tree.kept([leaf.zeros(1) for leaf in tree.leaves])
        own_words = None if words is None else jnp.copy(words)
        count = jnp.zeros((), jnp.int32)
        skipped = jnp.zeros((), jnp.int32)
        return AdamWState(count, skipped, mu, nu, mu_scale, nu_scale, own_words)

    def update(
        grads: PyTree, state: AdamWState, params: PyTree = None
    ) -> tuple[PyTree, AdamWState]:
        if params is None:
            raise ValueError(
                "adamw decays and rewrites the parameters; call tx.update(grads,"
                " opt_state, params)"
            )
        check_made(state, AdamWState, "adamw")
        tree = Tree(intact(params), moments, mask)
        gradients = tree.gradients(grads)
        keep, factor = _finite(gradients, max_norm)
        count = optax.safe_increment(state.count)
        scalars = settings.scalars(state.count, factor)
        keep &= settings.are_usable(scalars)
        made = []
        for i, (leaf, m, v) in enumerate(tree.with_moments(state)):
            step = settings.step_of(leaf)
            keys = leaf.keys(state.key, count, i)
            run = fused_step if leaf.is_fused else float_step
            made.append(
                run(step, leaf.parameter, gradients[i], m, v, scalars, keys, keep)
            )
        skipped = state.skipped + jnp.where(keep, 0, 1).astype(jnp.int32)
        mu, mu_scale = tree.kept([one.m for one in made])
        nu, nu_scale = tree.kept([one.v for one in made])
        count = jnp.where(keep, count, state.count)
        after = AdamWState(count, skipped, mu, nu, mu_scale, nu_scale, state.key)
        return tree.updates(made), after

    made = AdamW(init, update)
    made.settings = settings
    return made


class Settings(NamedTuple):
    """The arguments of `adamw`, for code that takes its steps one weight at a time."""

    learning_rate: optax.ScalarOrSchedule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    weight_decay: ArrayLike
    mask: PyTree | Callable[[PyTree], PyTree]
    nesterov: bool
    moments: str
    max_norm: ArrayLike | None

    @property
    def numbers(self) -> dict[str, ArrayLike | None]:
        """The numbers that are not scheduled, by the names of their rules."""
        return dict(
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            eps_root=self.eps_root,
            weight_decay=self.weight_decay,
            max_norm=self.max_norm,
        )

    def are_usable(self, scalars: Scalars) -> Array:
        """Return whether the numbers of a step are in their ranges."""
        return usable(learning_rate=scalars.learning_rate, **self.numbers)

    def step_of(self, leaf: "Leaf") -> WeightStep:
        """Return the static part of a parameter's step."""
        is_bounded = has_bound(self.b1, self.b2)
        return WeightStep(leaf.forms, self.nesterov, leaf.decays, is_bounded)

    def scalars(self, taken: Array, factor: Array) -> Scalars:
        """Return the numbers of the step that follows `taken` steps."""
        rate = self.learning_rate
        lr = rate(taken) if callable(rate) else rate
        epsilons = (self.eps, self.eps_root)
        count = optax.safe_increment(taken)
        return Scalars.of(
            count, lr, self.b1, self.b2, epsilons, self.weight_decay, factor
        )


class AdamW(optax.GradientTransformation):
    """optax's pair of functions, with the settings that `adamw` made them of."""

    settings: Settings


class Leaf(NamedTuple):
    """One parameter.

    Attributes:
      names: the names of its path.
      parameter: a float array, or a stored parameter.
      forms: the formats of its first and its second moment.
      decays: whether its weights decay.
    """

    names: list[str]
    parameter: Array | Parameter
    forms: tuple[Format, Format]
    decays: bool

    @property
    def is_fused(self) -> bool:
        """True if the kernel updates it."""
        stored = self.parameter
        if not isinstance(stored, Parameter) or self.forms != _FORMATS["8bit"]:
            return False
        return (
            stored.shape[-1] >= codes.BLOCK
            and stored.dtype == jnp.float8_e4m3fn
            and stored.state.weight.recipe.scaling == Tensor()
            and stored.state.remainder != "feedback"
        )

    def zeros(self, i: int) -> Moment:
        """Return zeros for the i-th moment, sharded as the parameter is."""
        like = self.parameter
        if isinstance(like, Parameter):
            like = like.rows.values
        encoding.check_moment("/".join(self.names), self.forms[i], like)
        return encoding.zeros(self.forms[i], like)

    def keys(self, words: Array | None, count: Array, place: int) -> Keys | None:
        """Return the keys of the counter hash in one step.

        A fused parameter has keys for each entry of its stack.
        """
        stack = self.parameter.shape[:-2] if self.is_fused else ()
        numbers = jnp.arange(int(np.prod(stack)), dtype=jnp.uint32)
        return encoding.stream(words, count, place, numbers.reshape(stack))

    def gradient(self, g: PyTree) -> Array:
        """Return the gradient in the parameter's shape, or as a stored matrix."""
        path = "/".join(self.names)
        GRADIENTS.check_floats(path, g)
        own = self.parameter
        shape = own.kernel_shape if isinstance(own, Parameter) else jnp.shape(own)
        if jnp.shape(g) != shape:
            raise ValueError(
                f"the gradient of {path} is {list(jnp.shape(g))}, but the parameter is"
                f" {list(shape)}; pass the gradients of these very parameters"
            )
        return own.layout.matrix(g) if isinstance(own, Parameter) else g


class Tree:
    """The leaves of a tree of parameters, and the way back to trees."""

    def __init__(self, params: PyTree, moments: str, mask: PyTree) -> None:
        self.params = params
        found, self.treedef = named_leaves(params, is_quantized)
        for names, leaf in found:
            if is_quantized(leaf):
                _check_whole("/".join(names), leaf)
            else:
                PARAMETERS.check_floats("/".join(names), leaf)
        narrow = encoding.narrow_leaves(params)
        if callable(mask):
            mask = mask(jax.tree.map(_seen, params, is_leaf=is_quantized))
        decays = encoding.spread(mask, params)
        forms = (_FORMATS["float32"], _FORMATS[moments])
        self.leaves = [
            Leaf(names, leaf, forms[small], decay)
            for (names, leaf), small, decay in zip(found, narrow, decays, strict=True)
        ]

    def gradients(self, grads: PyTree) -> list[Array]:
        """Return the gradient of each parameter, for a stored one as a matrix."""
        given = GRADIENTS.leaves(self.treedef, grads)
        return list(map(Leaf.gradient, self.leaves, given))

    def with_moments(self, state: AdamWState) -> list[tuple[Leaf, Moment, Moment]]:
        """Return each parameter with its moments."""
        mu = MOMENTS.leaves(self.treedef, state.mu)
        nu = MOMENTS.leaves(self.treedef, state.nu)
        found = []
        for leaf, m, v in zip(self.leaves, mu, nu, strict=True):
            for form, moment in zip(leaf.forms, (m, v), strict=True):
                if moment.dtype != ("uint8" if form == "ue5m3" else form):
                    raise ValueError(
                        f"a moment of {'/'.join(leaf.names)} is {moment.dtype} in the"
                        f" state, and {form} in this optimizer; make it with the"
                        " moments= of the state, or a new state by tx.init"
                    )
                if moment.shape != jnp.shape(leaf.parameter):
                    raise ValueError(
                        f"a moment of {'/'.join(leaf.names)} is {list(moment.shape)} in"
                        f" the state, not {list(jnp.shape(leaf.parameter))}; pass the"
                        " state that tx.init(params) made for these parameters"
                    )
            first = encoding.found(m, leaf.names, state.mu_scale)
            second = encoding.found(v, leaf.names, state.nu_scale)
            found.append((leaf, first, second))
        return found

    def updates(self, made: list[Stepped]) -> PyTree:
        """Return the tree of updates; that of a stored weight is the new weight."""
        updates: list[Array | Rewritten] = []
        for update, _, _ in made:
            if isinstance(update, Parameter):
                updates.append(Rewritten.of(update))
            else:
                updates.append(update)
        return self.treedef.unflatten(updates)

    def kept(self, moments: list[Moment]) -> tuple[PyTree, Scales]:
        """Return the arrays of a state for these moments, and the scales of blocks."""
        scales: Scales = {}
        kept = []
        for leaf, moment in zip(self.leaves, moments, strict=True):
            kept.append(encoding.kept(moment, leaf.names, scales))
        return self.treedef.unflatten(kept), encoding.by_name(scales, self.params)


def _check_whole(path: str, leaf: PyTree) -> None:
    """Raise unless a quantized weight is a parameter with all its arrays."""
    rows = parameter_of(leaf).stored.backward
    if rows is not None and isinstance(rows.values, optax.MaskedNode):
        raise ValueError(
            f"a mask or labels choose among the arrays of the stored weight {path}; map"
            " over tcfp_jax.dequantize(params), or write"
            " on_stored(optax.multi_transform(...))"
        )


def _seen(leaf: PyTree) -> PyTree:
    """Return a parameter as a mask sees it: a stored one has the kernel's shape."""
    if not is_parameter(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.kernel_shape, leaf.state.dtype)


def _finite(gradients: list[Array], max_norm: ArrayLike | None) -> tuple[Array, Array]:
    """Return whether the step is taken, and the factor that clips the gradients."""
    one = jnp.ones((), jnp.float32)
    if max_norm is None or not gradients:
        return all_finite(gradients), one
    squares = jnp.zeros(())
    for g in gradients:
        squares = squares + jnp.sum(jnp.square(g.astype(jnp.float32)))
    norm = jnp.sqrt(squares)
    limit = jnp.asarray(max_norm, jnp.float32)
    return jnp.isfinite(norm), jnp.where(norm > limit, limit / norm, one)
