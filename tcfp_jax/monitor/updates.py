"""`update_quality` and `stale_moments`: find updates that rounding loses, and moments
that do not move.

A learning rate far below the grid of a weight moves few of its values in a step, and
none with rounding that drops remainders. Nothing else in a run shows it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from tcfp_jax.optim.adam import AdamWState
from tcfp_jax.optim.encoding import Blocks, Scales, decode, found
from tcfp_jax.optim.moments import LowPrecisionState
from tcfp_jax.optim.stored import dequantize
from tcfp_jax.paths import PyTree, leaves, named_leaves
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parameter import Parameter, is_parameter, is_quantized
from tcfp_jax.weights.stored import Stored


class Quality(NamedTuple):
    """Effect of an update of a stored weight; float32 scalars.

    Use this to see whether a learning rate is too small for the grid: `edq` is then far
    from 1.

    Attributes:
      moved: share of its values that changed.
      edq: effective descent, `<applied, wanted> / |wanted|**2`: 1 if rounding keeps the
        update in the mean, 0 if it loses the update or if the update is zero.
    """

    moved: Array
    edq: Array


def update_quality(
    before: PyTree,
    after: PyTree,
    updates: PyTree,
    weights: Mapping[str, Weight] | None = None,
) -> dict[str, Quality]:
    """Return the effect of the updates on each stored weight, by path.

    Use this in a step now and then, to see whether updates are smaller than the grid
    of the weights. `float_updates` has the updates of `tcfp_jax.optim.adamw`.

    Args:
      before: the parameters; with `error_feedback`, `layer_state` of the optimizer's
        state.
      after: the same after the step.
      updates: float updates of the parameters.
      weights: result of `find_weights`, for `layer_state` of kernels that are not
        `[..., k, n]`.

    Raises:
      ValueError: nothing is stored, or a stored weight has no float update, or one of
        another shape.

    >>> from tcfp_jax.optim.stored import apply_updates, store
    >>> params = {"kernel": jnp.full((2, 2), 0.5)}
    >>> params = store(params, "tcfp12_single", key=jax.random.key(0))
    >>> updates = {"kernel": jnp.full((2, 2), 0.25)}
    >>> after = apply_updates(params, updates)
    >>> found = update_quality(params, after, updates)["kernel"]
    >>> float(found.moved), float(found.edq)
    (1.0, 1.0)
    """
    new = leaves(after, is_quantized)
    wanted = leaves(updates)
    qualities = {}
    for path, weight in leaves(before, is_quantized).items():
        if not is_quantized(weight):
            continue
        if path not in new or path not in wanted:
            raise ValueError(
                f"there is no float update of {path!r}: pass the parameters before and"
                " after a step, and the updates of an optax transformation;"
                " tcfp_jax.optim.adamw writes weights, and monitor.float_updates has"
                " its updates"
            )
        change = _matrix(path, weight, wanted[path], weights or {})
        applied = _values(new[path]).dequantize() - _values(weight).dequantize()
        moved = jnp.mean((applied != 0).astype(jnp.float32))
        energy = jnp.sum(change * change)
        kept = jnp.sum(applied * change)
        qualities[path] = Quality(moved, kept / jnp.where(energy == 0, 1.0, energy))
    if not qualities:
        raise ValueError(
            "before holds no stored weight; pass stored parameters, or layer_state of"
            " the optimizer's state"
        )
    return qualities


def _matrix(
    path: str,
    weight: Parameter | Stored,
    update: Array,
    weights: Mapping[str, Weight],
) -> Array:
    """Return a float update in the shape of the stored matrix."""
    layout = Layout((0,), (1,))
    if isinstance(weight, Parameter):
        layout = weight.state.weight.layout
    elif path in weights:
        layout = weights[path].layout
    change = layout.stacked(update.ndim).matrix(update).astype(jnp.float32)
    if change.shape != weight.shape:
        raise ValueError(
            f"the update of {path!r} is {list(update.shape)}, but it is stored as"
            f" {list(weight.shape)}; pass weights=find_weights(model, *inputs)"
        )
    return change


def _values(weight: Parameter | Stored) -> Stored:
    return weight.read() if isinstance(weight, Parameter) else weight


def float_updates(
    tx: optax.GradientTransformation, gradients: PyTree, state: PyTree, params: PyTree
) -> PyTree:
    """Return the float updates that `tcfp_jax.optim.adamw` rounds into stored weights.

    Use this for `update_quality` with `adamw`, whose own updates are new weights. It
    computes the step once more, in float32.

    Args:
      tx: the same transformation with `moments="float32"` and without a key.
      gradients: gradients of the step.
      state: the state before the step, of the transformation with narrow moments.
      params: the stored parameters before the step.

    >>> from tcfp_jax.optim import adamw, store
    >>> params = {"kernel": jnp.full((2, 2), 0.5)}
    >>> params = store(params, "tcfp12_single", key=jax.random.key(0))
    >>> state = adamw(0.1, key=jax.random.key(1)).init(params)
    >>> exact = adamw(0.1, moments="float32")
    >>> found = float_updates(exact, {"kernel": jnp.ones((2, 2))}, state, params)
    >>> round(float(found["kernel"][0, 0]), 4)
    -0.1
    """

    def like(parameter: PyTree, moment: Array) -> Array:
        if not isinstance(parameter, Parameter):
            return moment
        return parameter.layout.kernel(moment, parameter.kernel_shape)

    def of_floats(node: PyTree) -> PyTree:
        if not isinstance(node, AdamWState):
            return node
        mu = jax.tree.map(like, params, node.mu, is_leaf=is_parameter)
        nu = jax.tree.map(like, params, node.nu, is_leaf=is_parameter)
        return node._replace(mu=mu, nu=nu, mu_scale={}, nu_scale={}, key=None)

    state = jax.tree.map(of_floats, _in_floats(state), is_leaf=_is_adamw)
    return tx.update(gradients, state, dequantize(params))[0]


def stale_moments(before: PyTree, after: PyTree) -> dict[str, Array]:
    """Return the share of each parameter's second moments that a step did not change.

    Use this to find frozen moments: their share is 1 in every step. With stochastic
    rounding most moments stay in a single step, because a step changes v by a
    thousandth and its grid is wider. The shares are float32, by path.

    Args:
      before: the state of `tcfp_jax.optim.adamw` or any optimizer with a field `nu`,
        also in `low_precision_moments`.
      after: the same after the step.

    Raises:
      ValueError: the state has no second moments.

    >>> import optax
    >>> params = {"kernel": jnp.ones(4)}
    >>> tx = optax.adam(0.1)
    >>> before = tx.init(params)
    >>> _, after = tx.update({"kernel": jnp.asarray([1.0, 0.0, 0.0, 0.0])}, before)
    >>> float(stale_moments(before, after)["kernel"])
    0.75
    """
    shares: dict[str, Array] = {}
    for old, new in zip(_adams(before), _adams(after), strict=True):
        first = leaves(old)
        for path, v in leaves(new).items():
            if jnp.ndim(v):
                shares[path] = jnp.mean((first[path] == v).astype(jnp.float32))
    if not shares:
        raise ValueError(
            "the optimizer's state has no second moments, a field `nu`; use an"
            " optimizer of Adam's kind"
        )
    return shares


def _adams(state: PyTree) -> list[PyTree]:
    """Return the second moments in a state of optimizers of Adam's kind, in floats."""

    def is_adam(node: object) -> bool:
        return hasattr(node, "nu") and hasattr(node, "mu")

    nodes = jax.tree.leaves(_in_floats(state), is_leaf=is_adam)
    return [node.nu for node in nodes if is_adam(node)]


def _is_adamw(node: object) -> bool:
    return isinstance(node, AdamWState)


def _in_floats(state: PyTree) -> PyTree:
    """Return the state with float moments instead of codes.

    A code may stay while its scale moves.
    """

    def is_narrow(node: object) -> bool:
        return isinstance(node, LowPrecisionState | AdamWState)

    def wide(node: PyTree) -> PyTree:
        if isinstance(node, LowPrecisionState):
            return _decoded(node.inner, node.scales)
        if isinstance(node, AdamWState):
            mu = _decoded(node.mu, node.mu_scale)
            return node._replace(mu=mu, nu=_decoded(node.nu, node.nu_scale))
        return node

    return jax.tree.map(wide, state, is_leaf=is_narrow)


def _decoded(moments: PyTree, scales: Scales) -> PyTree:
    """Return moments in float32; other arrays stay as they are."""
    given, treedef = named_leaves(moments)
    floats = []
    for names, leaf in given:
        moment = found(leaf, names, scales)
        if isinstance(moment, Blocks) or moment.dtype == jnp.bfloat16:
            leaf = decode(moment)
        floats.append(leaf)
    return treedef.unflatten(floats)
