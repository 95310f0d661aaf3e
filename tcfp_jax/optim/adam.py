"""AdamW for trees with stored weights: optax's arithmetic, moments in one byte, and one pass over each stored weight.

A stored weight of 4096 values or more is updated by `pallas_kernels.adamw` in place: gradient, `W_hi`, `W_lo` and both
moments are read once and written once, 4.03 bytes of state a weight, and no float copy is made. What the kernel does
not take (float parameters, small weights, other formats of moments, blocks of scales) goes through XLA with the same
arithmetic. A step in which any gradient is not finite changes nothing but the count of such steps.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from pallas_kernels import counter, numerics
from pallas_kernels.adamw.api import Moments, Rates
from pallas_kernels.adamw.api import adamw as fused_adamw
from pallas_kernels.operands import Operand, Tensor
from tcfp_jax.optim.moments import (
    Blocks,
    Format,
    checked_key,
    decode,
    encode,
    narrow_leaves,
    spread,
    stream,
)  # fmt: skip
from tcfp_jax.optim.stored import all_finite
from tcfp_jax.paths import path_names
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import (
    Rewritten,
    advanced,
    is_stored,
    kernel_shape,
    next_scale,
    rewrite,
    training_of,
    weight_scaling,
)  # fmt: skip

MomentsFormat = Literal["8bit", "bfloat16", "float32"]
QualityChoice = Literal["off", "on"]
_FORMATS: dict[str, tuple[Format, Format]] = {
    "8bit": ("float8_e4m3fn", "ue5m3"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float32": ("float32", "float32"),
}


class Quality(NamedTuple):
    """What became of the last update of a stored weight; float32 scalars.

    Attributes:
      moved: the share of its values that changed.
      edq: <applied, wanted> / |wanted|**2, the effective descent: 1 where rounding keeps the update in the mean, 0
        where it loses it, and 1 where nothing was wanted.
    """

    moved: jax.Array
    edq: jax.Array


class AdamWState(NamedTuple):
    """State of `adamw`.

    Attributes:
      count: steps that were taken, int32.
      skipped: steps that were left out because of a NaN or inf, int32.
      mu: first moments, a tree that mirrors the parameters; a stored weight's has the shape of its matrix. Float32 or
        bfloat16 arrays, or `Blocks`.
      nu: second moments, likewise.
      key: uint32 words of the random key; None where no moment is rounded.
      quality: `Quality` for each stored weight, in a tree that mirrors the parameters; None where it is off.
    """

    count: jax.Array
    skipped: jax.Array
    mu: Any
    nu: Any
    key: jax.Array | None
    quality: Any


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
      ValueError: an unknown `moments` or `quality`; a key that is missing, or that nothing would use; `update` without
        parameters, or with a gradient of another shape than its parameter.

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
        tree = _Tree(params, moments, mask)
        first, second = ([_zeros(leaf.forms[i], leaf.parameter) for leaf in tree.leaves] for i in (0, 1))
        nothing = Quality(jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32))
        found = tree.unflatten([nothing if leaf.is_stored else optax.MaskedNode() for leaf in tree.leaves])
        zero = jnp.zeros((), jnp.int32)
        kept = found if quality == "on" else None
        return AdamWState(zero, zero, tree.unflatten(first), tree.unflatten(second), words, kept)

    def update(grads: Any, state: AdamWState, params: Any | None = None) -> tuple[Any, AdamWState]:
        if params is None:
            raise ValueError("adamw decays and rewrites the parameters; call tx.update(grads, opt_state, params)")
        tree = _Tree(params, moments, mask)
        gradients = tree.gradients(grads)
        keep, factor = _finite(gradients, max_norm)
        count = optax.safe_increment(state.count)
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        scalars = _scalars(count, lr, b1, b2, (eps, eps_root), weight_decay, factor)
        columns = tree.parts(state.mu), tree.parts(state.nu)
        results = []
        for i, (leaf, gradient, m, v) in enumerate(zip(tree.leaves, gradients, *columns, strict=True)):
            keys = _keys(state.key, count, i, leaf.stack)
            step = _Step(leaf.forms, nesterov, leaf.decays, quality)
            run = _fused_step if leaf.is_fused else _float_step
            made, *rest = run(step, leaf.parameter, gradient, m, v, scalars, keys, keep)
            # A number that no program has computed: putting the weight in place then needs no comparison.
            results.append((Rewritten(made, np.float32(1)) if leaf.is_stored else made, *rest))
        made, first, second, found = (tree.unflatten(column) for column in zip(*results, strict=True))
        count = jnp.where(keep, count, state.count)
        skipped = state.skipped + jnp.where(keep, 0, 1).astype(jnp.int32)
        return made, AdamWState(count, skipped, first, second, state.key, found if quality == "on" else None)

    return optax.GradientTransformation(init, update)


class _Leaf(NamedTuple):
    """One parameter: the name of its path, its moments' formats, and whether it decays."""

    path: str
    parameter: Any
    forms: tuple[Format, Format]
    decays: bool

    @property
    def is_stored(self) -> bool:
        return is_stored(self.parameter)

    @property
    def stack(self) -> tuple[int, ...]:
        return self.parameter.shape[:-2] if self.is_fused else ()

    @property
    def is_fused(self) -> bool:
        """Whether the kernel updates it."""
        if not self.is_stored or self.forms != _FORMATS["8bit"]:
            return False
        is_format = self.parameter.dtype == jnp.float8_e4m3fn and weight_scaling(self.parameter) == Tensor()
        return is_format and training_of(self.parameter).remainder != "feedback"


class _Tree:
    """The leaves of a tree of parameters, and the way back to trees."""

    def __init__(self, params: Any, moments: str, mask: Any) -> None:
        self.treedef: Any
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
        sizes = lambda leaf: leaf.shape if is_stored(leaf) else jnp.shape(leaf)
        narrow = narrow_leaves(params, is_leaf=is_stored, sizes=sizes)
        decays = [True] * len(paths) if mask is None else _decays(mask, params)
        forms = (_FORMATS["float32"], _FORMATS[moments])
        self.leaves = [
            _Leaf("/".join(path_names(path)), leaf, forms[small], bool(decay))
            for (path, leaf), small, decay in zip(paths, narrow, decays, strict=True)
        ]

    def parts(self, tree: Any) -> list[Any]:
        """What a tree of this structure has for each parameter."""
        return self.treedef.flatten_up_to(tree)

    def unflatten(self, parts: Any) -> Any:
        """The tree of these parts."""
        return self.treedef.unflatten(parts)

    def gradients(self, grads: Any) -> list[jax.Array]:
        """The gradient of each parameter; of a stored one as the matrix that it is."""
        return [_gradient(leaf, g) for leaf, g in zip(self.leaves, self.parts(grads), strict=True)]


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


def _zeros(form: Format, parameter: Any) -> Any:
    """A moment of zeros; it is sharded as the parameter is."""
    like = parameter.backward.values if is_stored(parameter) else parameter
    word = jnp.zeros((), jnp.uint32)
    return encode(form, jnp.zeros_like(like, dtype=jnp.float32), (word, word))


class _Scalars(NamedTuple):
    """The numbers of a step, float32 scalars; `rest` is 1 - b, and `bias` 1 - b**t (`next_bias1` of the next step)."""

    b1: jax.Array
    rest1: jax.Array
    b2: jax.Array
    rest2: jax.Array
    bias1: jax.Array
    next_bias1: jax.Array
    bias2: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    learning_rate: jax.Array
    weight_decay: jax.Array
    factor: jax.Array


def _scalars(
    count: jax.Array, lr: Any, b1: Any, b2: Any, epsilons: tuple[Any, Any], weight_decay: Any, factor: jax.Array
) -> _Scalars:
    bias = lambda b, t: 1 - jnp.power(jnp.asarray(b, jnp.float32), t)
    following = optax.safe_increment(count)
    # Differences are taken before they are rounded to float32, where a caller gives Python's numbers, as optax does.
    values = (b1, 1 - b1, b2, 1 - b2, bias(b1, count), bias(b1, following), bias(b2, count), *epsilons, lr)
    return _Scalars(*(jnp.asarray(value, jnp.float32) for value in (*values, weight_decay, factor)))


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


class _Step(NamedTuple):
    """What is static of a step of one parameter; hashable, so that parameters of one shape share a traced function."""

    forms: tuple[Format, Format]
    nesterov: bool
    decays: bool
    quality: QualityChoice


def _wanted(step: _Step, w: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, s: _Scalars) -> tuple[Any, Any, Any]:
    """(update, m, v) in float32: `optax.adamw`, operation by operation."""
    g = g.astype(jnp.float32) * s.factor
    m = s.rest1 * g + s.b1 * m
    v = s.rest2 * (g * g) + s.b2 * v
    corrected = s.b1 * (m / s.next_bias1) + s.rest1 * (g / s.bias1) if step.nesterov else m / s.bias1
    change = corrected / (jnp.sqrt(v / s.bias2 + s.eps_root) + s.eps)
    if step.decays:
        change = change + s.weight_decay * w.astype(jnp.float32)
    return -s.learning_rate * change, m, v


@functools.partial(jax.jit, static_argnums=0)
def _float_step(
    step: _Step, w: Any, g: jax.Array, m: Any, v: Any, s: _Scalars, keys: Any, keep: jax.Array
) -> tuple[Any, Any, Any, Any]:
    """(update or new weight, m, v, quality) of one parameter, by XLA; `keep` is whether the step is taken."""
    values = w.dequantize() if is_stored(w) else w
    old = [decode(form, moment) for form, moment in zip(step.forms, (m, v), strict=True)]
    change, *new = _wanted(step, values, g, *old, s)
    chosen = []
    for i, (form, before, after) in enumerate(zip(step.forms, (m, v), new, strict=True)):
        after = encode(form, after, None if keys is None else counter.keys(*keys, i))
        chosen.append(_either(keep, after, before))
    change = jnp.where(keep, change, jnp.zeros_like(change))
    if not is_stored(w):
        return change, *chosen, optax.MaskedNode()
    written = _either(keep, rewrite(w, values + change), w)
    found = _quality(w, written, change) if step.quality == "on" else optax.MaskedNode()
    return written, *chosen, found


@functools.partial(jax.jit, static_argnums=0)
def _fused_step(
    step: _Step, w: Stored, g: jax.Array, m: Blocks, v: Blocks, s: _Scalars, keys: Any, keep: jax.Array
) -> tuple[Any, Any, Any, Any]:
    """(new weight, m, v, quality) of one stored weight in one pass over it; `keep` is whether the step is taken."""
    training, old = training_of(w), w.backward
    assert old is not None and old.lo is not None, "a stored parameter has two halves and its own orientation"
    scale = jnp.where(keep, next_scale(old.scale, training.amax), old.scale)
    rates, shared = _rates(step, s, old.scale, scale, keep)
    both = w.forward is not None
    one: Any = functools.partial(
        fused_adamw,
        momentum="nesterov" if step.nesterov else "classic",
        orientation="both" if both else "rows",
        remainder="stochastic" if training.remainder == "stochastic" else "nearest",
    )
    for _ in w.stack:
        one = jax.vmap(one, in_axes=(0, 0, 0, 0, shared, 0))
    done = one(g, old.values, old.lo, Moments(m.values, m.scale, v.values, v.scale), rates, jnp.stack(keys, axis=-1))
    rows = Operand(done.hi, scale, done.lo)
    columns = None
    if w.forward is not None:
        columns = Operand(done.columns, scale, None if w.forward.lo is None else jnp.swapaxes(done.lo, -1, -2))
    training = dataclasses.replace(
        training,
        amax=jnp.where(keep, done.amax, training.amax),
        rounding=_either(keep, advanced(training.rounding), training.rounding),
    )
    written = dataclasses.replace(w, forward=columns, backward=rows, training=training)
    moments = Blocks(done.moments.m, done.moments.m_scale), Blocks(done.moments.v, done.moments.v_scale)
    found: Any = optax.MaskedNode()
    if step.quality == "on":
        before = [decode(form, moment) for form, moment in zip(step.forms, (m, v), strict=True)]
        wanted, *_ = _wanted(step, w.dequantize(), g, *before, s)
        found = _quality(w, written, jnp.where(keep, wanted, jnp.zeros_like(wanted)))
    return written, *moments, found


def _rates(step: _Step, s: _Scalars, scale: jax.Array, new_scale: jax.Array, keep: jax.Array) -> tuple[Rates, Any]:
    """The kernel's numbers, and which of them each entry of a stack has for itself."""
    one = jnp.ones((), jnp.float32)
    # Scales are powers of two, so multiplying by the inverse rounds nothing.
    lr = s.learning_rate * numerics.reciprocal_pow2(new_scale)
    rate, rate_g = lr / s.bias1, jnp.zeros_like(lr)
    if step.nesterov:
        rate, rate_g = lr * s.b1 / s.next_bias1, lr * s.rest1 / s.bias1
    decay = 1 - s.learning_rate * s.weight_decay if step.decays else one
    rates = Rates(
        b1=s.b1, b2=s.b2, rate=rate, rate_g=rate_g, correction=1 / s.bias2, eps=s.eps, eps_root=s.eps_root,
        decay=decay, gradient_scale=s.factor, scale=scale, new_scale=new_scale, keep=keep,
    )  # fmt: skip
    own = {"rate", "rate_g", "scale", "new_scale"}
    return rates, Rates(**{name: 0 if name in own else None for name in Rates._fields})


def _either(keep: jax.Array, after: Any, before: Any) -> Any:
    """`after` where the step is taken, bit for bit `before` where it is not."""
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), after, before)


def _quality(before: Stored, after: Stored, wanted: jax.Array) -> Quality:
    applied = after.dequantize() - before.dequantize()
    moved = jnp.mean((applied != 0).astype(jnp.float32))
    energy = jnp.sum(wanted * wanted)
    along = jnp.sum(applied * wanted)
    return Quality(moved, jnp.where(energy == 0, 1.0, along / jnp.where(energy == 0, 1.0, energy)))


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is unknown; use one of {list(get_args(choices))}")
