"""AdamW for trees with stored weights: optax's arithmetic, moments in one byte, one
pass over each stored weight.

`pallas_kernels.adamw` updates a stored weight of 4096 values or more in place: it reads
and writes the gradient, `W_hi`, `W_lo` and both moments once, 4.03 bytes of state a
weight, and makes no float copy. XLA updates everything else with the same arithmetic:
float parameters, small weights, rows of fewer than 128 values, other formats of
moments, scales of blocks. A step with a gradient that is not finite, or whose square is
not, changes only the count of these.

Over stored parameters it works inside `chain`, `masked`, `partition` and
`inject_hyperparams`. `MultiSteps` and `apply_if_finite` expect updates like the
parameters: accumulate before it, or use `on_stored(optax.MultiSteps(...))`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from pallas_kernels import moments as codes
from pallas_kernels.operands import Tensor
from tcfp_jax.optim import encoding
from tcfp_jax.optim.encoding import Format, Keys, Moment
from tcfp_jax.optim.steps import Quality, Scalars, Step
from tcfp_jax.optim.stored import all_finite
from tcfp_jax.paths import PyTree, named_leaves, put
from tcfp_jax.weights.parameter import (
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

    Attributes:
      count: number of steps that were taken, int32.
      skipped: number of steps that were skipped because of a NaN, an inf or a gradient
        of 2**63 or more, int32.
      mu: first moments, a tree that mirrors the parameters; a stored weight's has the
        shape of its matrix.
      nu: second moments, likewise.
      mu_scale: scales of the 8-bit first moments, in nested dicts by the names of their
        parameters.
      nu_scale: scales of the 8-bit second moments, likewise.
      key: uint32 words of the random key; None if no moment is rounded.
      quality: `Quality` of each stored weight, in nested dicts by name; None if it is
        off.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it; tuples have a method of that name
    skipped: jax.Array
    mu: PyTree
    nu: PyTree
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
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    *,
    nesterov: bool = False,
    moments: Literal["8bit", "bfloat16", "float32"] = "8bit",
    max_norm: ArrayLike | None = None,
    key: jax.Array | None = None,
    quality: Literal["off", "on"] = "off",
) -> optax.GradientTransformation:
    """Return `optax.adamw` for parameters that may be stored (`tcfp_jax.store`), with
    moments in few bytes.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g**2
        w = w - learning_rate (m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps) + weight_decay w)

    The arithmetic is float32. A float parameter gets a float32 update, a stored one its
    new weight: apply both with `tcfp_jax.apply_updates`. Float embeddings and leaves
    with fewer than 4096 values or two axes keep float32 moments.

    In `optax.inject_hyperparams` pass `static_args=("key", "mask")` and
    `hyperparam_dtype=jnp.float32`.

    Args:
      learning_rate: a number, or a schedule of the count of steps that were taken.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root.
      eps_root: added under the root.
      weight_decay: decoupled decay, multiplied by the learning rate.
      mask: parameters that decay: a tree of bools, or a function of the parameters that
        returns one and sees shapes instead of stored weights. None means all.
      nesterov: as in optax.
      moments: "8bit" (m in E4M3, v in "ue5m3", a scale for each 128 values) and
        "bfloat16" round stochastically; "float32" does not round.
      max_norm: limit of the gradients' global norm, to which larger ones are scaled. A
        step whose norm is not finite is skipped. The order of the sum depends on the
        mesh, so clipped steps agree between meshes only up to rounding.
      key: JAX random key, needed for "8bit" and "bfloat16". It becomes part of the
        state.
      quality: "on" keeps a `Quality` of each stored weight's last update in the state;
        it computes the update twice.

    Raises:
      ValueError: an unknown `moments` or `quality`; a key that is missing, or that
        would not be used; a mesh that cuts blocks of moments; `update` without
        parameters, or with a gradient of another shape than its parameter.

    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = adamw(0.1, moments="float32")
    >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 4), int(state.count)
    (-0.1, 1)
    """
    for name, value, known in (
        ("moments", moments, [*_FORMATS]),
        ("quality", quality, ["off", "on"]),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; use one of {known}")
    words = encoding.checked_key(
        "adamw", key, moments != "float32", f"moments={moments!r}"
    )

    def init(params: PyTree) -> AdamWState:
        tree = _Tree(params, moments, mask, quality == "on")
        first, second = ([leaf.zeros(i) for leaf in tree.leaves] for i in (0, 1))
        # A new array each time, because a state may be donated
        zero = lambda dtype: jnp.zeros((), dtype)
        nothing = lambda: Quality(zero(jnp.float32), zero(jnp.float32))
        qualities = [
            nothing() if tree.quality and leaf.is_stored else None
            for leaf in tree.leaves
        ]
        own_words = None if words is None else jnp.copy(words)
        return tree.state(
            (zero(jnp.int32), zero(jnp.int32)), first, second, own_words, qualities
        )

    def update(
        grads: PyTree, state: AdamWState, params: PyTree = None
    ) -> tuple[PyTree, AdamWState]:
        if params is None:
            raise ValueError(
                "adamw decays and rewrites the parameters; call tx.update(grads,"
                " opt_state, params)"
            )
        if not isinstance(state, AdamWState):
            raise TypeError(
                f"the state is a {type(state).__name__}, not adamw's; pass the one that"
                " this tx.init made"
            )
        tree = _Tree(intact(params), moments, mask, quality == "on")
        gradients = list(
            map(_Leaf.gradient, tree.leaves, tree.treedef.flatten_up_to(grads))
        )
        keep, factor = _finite(gradients, max_norm)
        count = optax.safe_increment(state.count)
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        scalars = Scalars.of(count, lr, b1, b2, (eps, eps_root), weight_decay, factor)
        made, first, second, qualities = tree.stepped(
            gradients, state, scalars, (count, keep), nesterov
        )
        skipped = state.skipped + jnp.where(keep, 0, 1).astype(jnp.int32)
        counts = jnp.where(keep, count, state.count), skipped
        return tree.treedef.unflatten(made), tree.state(
            counts, first, second, state.key, qualities
        )

    return optax.GradientTransformation(init, update)


class _Leaf(NamedTuple):
    """One parameter: the names of its path, its moments' formats, and whether it
    decays.
    """

    names: list[str]
    parameter: Any  # jax.Array | Parameter
    forms: tuple[Format, Format]
    decays: bool

    @property
    def is_stored(self) -> bool:
        return is_parameter(self.parameter)

    @property
    def is_fused(self) -> bool:
        """True if the kernel updates it."""
        if (
            not self.is_stored
            or self.forms != _FORMATS["8bit"]
            or self.parameter.shape[-1] < codes.BLOCK
        ):
            return False
        state = self.parameter.state
        is_format = (
            self.parameter.dtype == jnp.float8_e4m3fn
            and state.weight.recipe.scaling == Tensor()
        )
        return is_format and state.remainder != "feedback"

    def zeros(self, i: int) -> Moment:
        """Return zeros for the i-th moment, sharded as the parameter is."""
        like = self.parameter.rows.values if self.is_stored else self.parameter
        encoding.check_moment("/".join(self.names), self.forms[i], like)
        return encoding.zeros(self.forms[i], like)

    def keys(
        self, words: jax.Array | None, count: jax.Array, place: int
    ) -> Keys | None:
        """Return the keys of the counter hash in one step; a fused parameter has keys
        for each entry of its stack.
        """
        stack = self.parameter.shape[:-2] if self.is_fused else ()
        entries = jnp.arange(int(np.prod(stack)), dtype=jnp.uint32).reshape(stack)
        return encoding.stream(words, count, place, entries)

    def gradient(self, g: Any) -> jax.Array:
        """Return the gradient in the parameter's shape, for a stored parameter as a
        matrix.
        """
        path = "/".join(self.names)
        if is_quantized(g):
            raise ValueError(
                f"the gradient of {path} is a stored weight, not floats; take it with"
                " tcfp_jax.value_and_grad"
            )
        shape = _float_shape(self.parameter)
        if jnp.shape(g) != shape:
            raise ValueError(
                f"the gradient of {path} is {list(jnp.shape(g))}, but the parameter is"
                f" {list(shape)}; pass the gradients of these very parameters"
            )
        return self.parameter.layout.matrix(g) if self.is_stored else g


class _Tree:
    """The leaves of a tree of parameters, and the way back to trees."""

    def __init__(
        self, params: PyTree, moments: str, mask: PyTree, quality: bool
    ) -> None:
        self.params, self.quality = params, quality
        found, self.treedef = named_leaves(params, is_quantized)
        for names, leaf in found:
            if is_quantized(leaf):
                # Raises for a copy of a parameter that is not the parameter itself
                rows = parameter_of(leaf).stored.backward
                if rows is not None and isinstance(rows.values, optax.MaskedNode):
                    raise ValueError(
                        "a mask or labels choose among the arrays of the stored weight"
                        f" {'/'.join(names)}; map over tcfp_jax.dequantize(params), or"
                        " write on_stored(optax.multi_transform(...))"
                    )
        narrow = encoding.narrow_leaves(
            params, is_leaf=is_quantized, sizes=_matrix_shape
        )
        decays = [True] * len(found) if mask is None else _decays(mask, params)
        forms = (_FORMATS["float32"], _FORMATS[moments])
        self.leaves = [
            _Leaf(names, leaf, forms[small], bool(decay))
            for (names, leaf), small, decay in zip(found, narrow, decays, strict=True)
        ]

    def state(
        self,
        counts: tuple[jax.Array, jax.Array],
        first: list[Moment],
        second: list[Moment],
        key: jax.Array | None,
        qualities: list[Quality | None],
    ) -> AdamWState:
        """Return the state with these moments, one for each parameter."""
        mu, mu_scale = self._kept(first)
        nu, nu_scale = self._kept(second)
        named: dict[str, Any] = {}
        for leaf, quality in zip(self.leaves, qualities, strict=True):
            if quality is not None:
                put(named, leaf.names, quality)
        of_weights = encoding.by_name(named, self.params) if self.quality else None
        return AdamWState(*counts, mu, nu, mu_scale, nu_scale, key, of_weights)

    def _kept(self, moments: list[Moment]) -> tuple[PyTree, dict[str, Any]]:
        scales: dict[str, Any] = {}
        pairs = zip(self.leaves, moments, strict=True)
        tree = self.treedef.unflatten(
            [encoding.kept(moment, leaf.names, scales) for leaf, moment in pairs]
        )
        return tree, encoding.by_name(scales, self.params)

    def stepped(
        self,
        gradients: list[jax.Array],
        state: AdamWState,
        scalars: Scalars,
        step: tuple[jax.Array, jax.Array],
        nesterov: bool,
    ) -> tuple[list[Any], list[Moment], list[Moment], list[Quality | None]]:
        """Return updates, first and second moments, and qualities; `step` is its number
        and whether it is taken.
        """
        mu, nu = (self.treedef.flatten_up_to(tree) for tree in (state.mu, state.nu))
        updates, first, second, qualities = [], [], [], []
        for i, (leaf, gradient) in enumerate(zip(self.leaves, gradients, strict=True)):
            for form, moment in zip(leaf.forms, (mu[i], nu[i]), strict=True):
                if moment.dtype != ("uint8" if form == "ue5m3" else form):
                    raise ValueError(
                        f"a moment of {'/'.join(leaf.names)} is {moment.dtype} in the"
                        f" state, and {form} in this optimizer; make it with the"
                        " moments= of the state, or a new state by tx.init"
                    )
            m = encoding.found(leaf.forms[0], mu[i], leaf.names, state.mu_scale)
            v = encoding.found(leaf.forms[1], nu[i], leaf.names, state.nu_scale)
            how = Step(leaf.forms, nesterov, leaf.decays, self.quality, leaf.is_fused)
            keys = leaf.keys(state.key, step[0], i)
            made, m, v, quality = how.run(
                leaf.parameter, gradient, m, v, scalars, keys, step[1]
            )
            updates.append(Rewritten.of(made) if leaf.is_stored else made)
            first.append(m)
            second.append(v)
            qualities.append(quality)
        return updates, first, second, qualities


def _decays(mask: PyTree | Callable[[PyTree], PyTree], params: PyTree) -> list[Any]:
    if callable(mask):
        mask = mask(jax.tree.map(_seen, params, is_leaf=is_quantized))
    return encoding.spread(mask, params, is_leaf=is_quantized)


def _seen(leaf: Any) -> Any:
    """Return a parameter as a mask sees it: a stored one has the kernel's shape."""
    if not is_parameter(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.kernel_shape, leaf.state.dtype)


def _matrix_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.shape if is_parameter(leaf) else jnp.shape(leaf)


def _float_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.kernel_shape if is_parameter(leaf) else jnp.shape(leaf)


def _finite(
    gradients: list[jax.Array], max_norm: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """Return whether the step is taken, and the factor that clips the gradients."""
    one = jnp.ones((), jnp.float32)
    if max_norm is None or not gradients:
        return all_finite(gradients), one
    norm = jnp.sqrt(
        sum(
            (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients),
            start=jnp.zeros(()),
        )
    )
    limit = jnp.asarray(max_norm, jnp.float32)
    return jnp.isfinite(norm), jnp.where(norm > limit, limit / norm, one)
