"""AdamW for trees with stored weights: optax's arithmetic, moments in one byte, and one pass over each stored weight.

A stored weight of 4096 values or more is updated by `pallas_kernels.adamw` in place: gradient, `W_hi`, `W_lo` and both
moments are read once and written once, 4.03 bytes of state a weight, and no float copy is made. What the kernel does
not take (float parameters, small weights, rows of less than 128 values, other formats of moments, blocks of scales)
goes through XLA with the same arithmetic. A step in which any gradient is not finite changes nothing but the count of
such steps.

Over stored parameters it stands in `chain`, `masked`, `partition` and `inject_hyperparams`, but not in `MultiSteps` and
`apply_if_finite`, which expect updates of the parameters' own structure: add gradients up before it, or take
`on_stored(optax.MultiSteps(...))`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from pallas_kernels import moments as codes
from pallas_kernels.operands import Tensor
from tcfp_jax.optim.encoding import Format, check_moment, zeros
from tcfp_jax.optim.moments import by_name, checked_key, found, kept, narrow_leaves, own, spread, stream
from tcfp_jax.optim.steps import Quality, QualityChoice, Scalars, Step, float_step, fused_step, scalars_of
from tcfp_jax.optim.stored import all_finite
from tcfp_jax.paths import path_names, put
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import Rewritten, is_stored, kernel_shape, training_of, weight_scaling

MomentsFormat = Literal["8bit", "bfloat16", "float32"]
_FORMATS: dict[str, tuple[Format, Format]] = {
    "8bit": ("float8_e4m3fn", "ue5m3"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float32": ("float32", "float32"),
}
# Of a rewritten weight. A number that no program computes: to put the weight in place then needs no comparison.
_APPLIES: Any = np.float32(1)


class AdamWState(NamedTuple):
    """State of `adamw`.

    Attributes:
      count: steps that were taken, int32.
      skipped: steps that were left out because of a NaN or inf, int32.
      mu: first moments, a tree that mirrors the parameters; a stored weight's has the shape of its matrix.
      nu: second moments, likewise.
      mu_scale: scales of those in eight bits, in nested dicts by the names of their parameters.
      nu_scale: likewise.
      key: uint32 words of the random key; None where no moment is rounded.
      quality: `Quality` for each stored weight, in nested dicts by name; None where it is off.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name, of which tuples have a method
    skipped: jax.Array
    mu: Any
    nu: Any
    mu_scale: dict[str, Any]
    nu_scale: dict[str, Any]
    key: jax.Array | None
    quality: dict[str, Any] | None


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    weight_decay: ArrayLike = 1e-4,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    nesterov: bool = False,
    moments: MomentsFormat = "8bit",
    max_norm: ArrayLike | None = None,
    key: jax.Array | None = None,
    quality: QualityChoice = "off",
) -> optax.GradientTransformation:
    """`optax.adamw` for parameters of which some are stored (`tcfp_jax.store`), with moments in few bytes.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g**2
        w = w - learning_rate (m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps) + weight_decay w)

    in float32. Float parameters get a float32 update, stored ones the new weight: put both in place by
    `tcfp_jax.apply_updates`. Moments of leaves with fewer than 4096 values or two axes, and of embeddings, are float32.

    In `optax.inject_hyperparams` say `static_args=("key", "mask")` and `hyperparam_dtype=jnp.float32`.

    Args:
      learning_rate: a number, or a schedule of the steps that were taken.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root.
      eps_root: added under the root.
      weight_decay: decoupled, times the learning rate.
      mask: what decays: a tree of bools, or a function of the parameters, which sees shapes in the place of stored
        ones, that returns one. None: everything.
      nesterov: as in optax.
      moments: "8bit" (m in E4M3, v in "ue5m3", a scale for each 128 values), "bfloat16", both rounded stochastically,
        or "float32".
      max_norm: gradients whose global norm is larger are scaled to it; a step whose norm is not finite is left out. The
        order of the sum depends on the mesh, so clipped steps agree between meshes up to rounding only.
      key: JAX random key of what is rounded here, for "8bit" and "bfloat16". It is part of the state from then on.
      quality: "on" keeps a `Quality` of each stored weight's last update in the state, for the price of computing the
        update a second time.

    Raises:
      ValueError: an unknown `moments` or `quality`; a key that is missing, or that nothing would use; `init` with
        parameters on a mesh that cuts blocks of 8-bit moments; `update` without parameters, or with a gradient of
        another shape than its parameter.

    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = adamw(0.1, moments="float32")
    >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 4), int(state.count)
    (-0.1, 1)
    """
    _check_choice("moments", moments, MomentsFormat)
    _check_choice("quality", quality, QualityChoice)
    words = checked_key("adamw", key, moments != "float32", f"moments={moments!r}")

    def init(params: Any) -> AdamWState:
        tree = _Tree(params, moments, mask, quality)
        first, second = ([_zeros(leaf.path, leaf.forms[i], leaf.parameter) for leaf in tree.leaves] for i in (0, 1))
        zero = lambda dtype: jnp.zeros((), dtype)  # every array is one of its own, as a state may be donated
        nothing = lambda leaf: Quality(zero(jnp.float32), zero(jnp.float32)) if leaf.is_stored else None
        qualities = [nothing(leaf) if quality == "on" else None for leaf in tree.leaves]
        return tree.state((zero(jnp.int32), zero(jnp.int32)), first, second, own(words), qualities)

    def update(grads: Any, state: AdamWState, params: Any | None = None) -> tuple[Any, AdamWState]:
        if params is None:
            raise ValueError("adamw decays and rewrites the parameters; call tx.update(grads, opt_state, params)")
        tree = _Tree(params, moments, mask, quality)
        gradients = tree.gradients(grads)
        keep, factor = _finite(gradients, max_norm)
        count = optax.safe_increment(state.count)
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        scalars = scalars_of(count, lr, b1, b2, (eps, eps_root), weight_decay, factor)
        made, first, second, qualities = tree.stepped(gradients, state, scalars, (count, keep), nesterov)
        skipped = state.skipped + jnp.where(keep, 0, 1).astype(jnp.int32)
        counts = jnp.where(keep, count, state.count), skipped
        return tree.treedef.unflatten(made), tree.state(counts, first, second, state.key, qualities)

    return optax.GradientTransformation(init, update)


class _Leaf(NamedTuple):
    """One parameter: the names of its path, its moments' formats, and whether it decays."""

    names: list[str]
    parameter: Any
    forms: tuple[Format, Format]
    decays: bool

    @property
    def path(self) -> str:
        return "/".join(self.names)

    @property
    def is_stored(self) -> bool:
        return is_stored(self.parameter)

    @property
    def stack(self) -> tuple[int, ...]:
        return self.parameter.shape[:-2] if self.is_fused else ()

    @property
    def is_fused(self) -> bool:
        """Whether the kernel updates it."""
        if not self.is_stored or self.forms != _FORMATS["8bit"] or self.parameter.shape[-1] < codes.BLOCK:
            return False
        is_format = self.parameter.dtype == jnp.float8_e4m3fn and weight_scaling(self.parameter) == Tensor()
        return is_format and training_of(self.parameter).remainder != "feedback"


class _Tree:
    """The leaves of a tree of parameters, and the way back to trees."""

    def __init__(self, params: Any, moments: str, mask: Any, quality: QualityChoice) -> None:
        self.params, self.quality = params, quality
        self.treedef: Any
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
        sizes = lambda leaf: leaf.shape if is_stored(leaf) else jnp.shape(leaf)
        narrow = narrow_leaves(params, is_leaf=is_stored, sizes=sizes)
        decays = [True] * len(paths) if mask is None else _decays(mask, params)
        forms = (_FORMATS["float32"], _FORMATS[moments])
        for _, leaf in paths:
            if is_stored(leaf):
                training_of(leaf)  # raises where it is a copy of a parameter and not the parameter itself
        self.leaves = [
            _Leaf(path_names(path), leaf, forms[small], bool(decay))
            for (path, leaf), small, decay in zip(paths, narrow, decays, strict=True)
        ]

    def state(self, counts: Any, first: list[Any], second: list[Any], key: Any, qualities: list[Any]) -> AdamWState:
        """The state of these moments, one for each parameter."""
        mu, mu_scale = self._kept(first)
        nu, nu_scale = self._kept(second)
        named: dict[str, Any] = {}
        for leaf, quality in zip(self.leaves, qualities, strict=True):
            if quality is not None:
                put(named, leaf.names, quality)
        count, skipped = counts
        of_weights = by_name(named, self.params) if self.quality == "on" else None
        return AdamWState(count, skipped, mu, nu, mu_scale, nu_scale, key, of_weights)

    def _kept(self, moments: list[Any]) -> tuple[Any, dict[str, Any]]:
        scales: dict[str, Any] = {}
        pairs = zip(self.leaves, moments, strict=True)
        tree = self.treedef.unflatten([kept(moment, leaf.names, scales) for leaf, moment in pairs])
        return tree, by_name(scales, self.params)

    def stepped(
        self, gradients: list[jax.Array], state: AdamWState, scalars: Scalars, step: tuple[Any, Any], nesterov: bool
    ) -> Any:
        """(updates, first moments, second moments, qualities) of step (number, whether it is taken)."""
        results = []
        parts = zip(self.leaves, gradients, *self.moments(state), strict=True)
        for i, (leaf, gradient, m, v) in enumerate(parts):
            keys = _keys(state.key, step[0], i, leaf.stack)
            run = fused_step if leaf.is_fused else float_step
            how = Step(leaf.forms, nesterov, leaf.decays, self.quality)
            made, *rest = run(how, leaf.parameter, gradient, m, v, scalars, keys, step[1])
            results.append((Rewritten(made, _APPLIES) if leaf.is_stored else made, *rest))
        return ([result[i] for result in results] for i in range(4))

    def moments(self, state: AdamWState) -> list[list[Any]]:
        """First and second moments of each parameter."""
        columns = []
        for i, tree, scales in ((0, state.mu, state.mu_scale), (1, state.nu, state.nu_scale)):
            pairs = zip(self.leaves, self.treedef.flatten_up_to(tree), strict=True)
            columns.append([found(leaf.forms[i], values, leaf.names, scales) for leaf, values in pairs])
        return columns

    def gradients(self, grads: Any) -> list[jax.Array]:
        """The gradient of each parameter; of a stored one as the matrix that it is."""
        return [_gradient(leaf, g) for leaf, g in zip(self.leaves, self.treedef.flatten_up_to(grads), strict=True)]


def _gradient(leaf: _Leaf, g: Any) -> jax.Array:
    if isinstance(g, Stored):
        raise ValueError(
            f"the gradient of {leaf.path} is a stored weight, not floats; take it with tcfp_jax.value_and_grad"
        )
    shape = kernel_shape(leaf.parameter) if leaf.is_stored else jnp.shape(leaf.parameter)
    if jnp.shape(g) != shape:
        raise ValueError(
            f"the gradient of {leaf.path} is {list(jnp.shape(g))}, but the parameter is {list(shape)}; pass the "
            "gradients of these very parameters"
        )
    return training_of(leaf.parameter).weight.layout.stacked(g.ndim).matrix(g) if leaf.is_stored else g


def _decays(mask: Any, params: Any) -> list[Any]:
    if callable(mask):
        seen = lambda leaf: jax.ShapeDtypeStruct(kernel_shape(leaf), training_of(leaf).dtype)
        mask = mask(jax.tree.map(lambda leaf: seen(leaf) if is_stored(leaf) else leaf, params, is_leaf=is_stored))
    return spread(mask, params, is_leaf=is_stored)


def _zeros(path: str, form: Format, parameter: Any) -> Any:
    """A moment of zeros; it is sharded as the parameter is."""
    like = parameter.backward.values if is_stored(parameter) else parameter
    check_moment(path, form, like)
    return zeros(form, like)


def _finite(gradients: list[jax.Array], max_norm: Any) -> tuple[jax.Array, jax.Array]:
    """(whether the step is taken, the factor of the gradients)."""
    one = jnp.ones((), jnp.float32)
    if max_norm is None or not gradients:
        return all_finite(gradients), one
    norm = jnp.sqrt(sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients), start=jnp.zeros(())))
    limit = jnp.asarray(max_norm, jnp.float32)
    return jnp.isfinite(norm), jnp.where(norm > limit, limit / norm, one)


def _keys(words: jax.Array | None, count: jax.Array, place: int, stack: tuple[int, ...]) -> Any:
    """The keys of the counter hash of one parameter in one step; of a fused one for each entry of its stack."""
    if words is None:
        return None
    entries = jnp.arange(int(np.prod(stack)), dtype=jnp.uint32).reshape(stack)
    return stream(words, count, place, entries)


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is unknown; use one of {list(get_args(choices))}")
