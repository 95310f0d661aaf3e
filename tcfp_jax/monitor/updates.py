"""`update_quality` and `stale_moments`: find updates that rounding loses, and moments
that do not move.

A learning rate far below the grid of a weight moves few of its values in a step, and
none with rounding that drops remainders. Nothing else in a run shows it.
`tcfp_jax.optim.adamw(quality="on")` keeps the same numbers in its state.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tcfp_jax.optim.encoding import Format, decode, found
from tcfp_jax.optim.moments import LowPrecisionState
from tcfp_jax.optim.steps import Quality
from tcfp_jax.paths import PyTree, leaves, path_names
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parameter import Parameter, is_quantized
from tcfp_jax.weights.stored import Stored


def update_quality(
    before: PyTree,
    after: PyTree,
    updates: PyTree,
    weights: Mapping[str, Weight] | None = None,
) -> dict[str, Quality]:
    """Return the effect of the updates on each stored weight, by path: the share that
    moved and the effective descent.

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
    >>> params = store({"kernel": jnp.full((2, 2), 0.5)}, "tcfp12_single", key=jax.random.key(0))
    >>> updates = {"kernel": jnp.full((2, 2), 0.25)}
    >>> found = update_quality(params, apply_updates(params, updates), updates)["kernel"]
    >>> float(found.moved), float(found.edq)
    (1.0, 1.0)
    """
    old, new, wanted = (
        leaves(before, is_quantized),
        leaves(after, is_quantized),
        leaves(updates),
    )
    qualities = {}
    if not any(map(is_quantized, old.values())):
        raise ValueError(
            "before holds no stored weight; pass stored parameters, or layer_state of"
            " the optimizer's state"
        )
    for path, weight in old.items():
        if not is_quantized(weight):
            continue
        if path not in new or path not in wanted:
            raise ValueError(
                f"there is no float update of {path!r}: pass the parameters before and"
                " after a step, and the updates of an optax transformation;"
                ' tcfp_jax.optim.adamw writes weights and has quality="on" for these'
                " numbers"
            )
        made_of = (
            weight.state.weight
            if isinstance(weight, Parameter)
            else (weights or {}).get(path)
        )
        layout = Layout((0,), (1,)) if made_of is None else made_of.layout
        change = (
            layout.stacked(wanted[path].ndim).matrix(wanted[path]).astype(jnp.float32)
        )
        if change.shape != weight.shape:
            raise ValueError(
                f"the update of {path!r} is {list(wanted[path].shape)}, but it is"
                f" stored as {list(weight.shape)}; pass weights=find_weights(model,"
                " *inputs)"
            )
        qualities[path] = Quality.of(_values(weight), _values(new[path]), change)
    return qualities


def _values(weight: Parameter | Stored) -> Stored:
    return weight.read() if isinstance(weight, Parameter) else weight


def stale_moments(before: PyTree, after: PyTree) -> dict[str, jax.Array]:
    """Return the share of each parameter's second moments that a step did not change,
    by path, float32.

    With stochastic rounding most of them stay in a single step: a step changes v by a
    thousandth, and its grid is wider. A share of 1 in every step shows a frozen moment.

    Args:
      before: the state of `tcfp_jax.optim.adamw` or any optimizer with a field `nu`,
        also in `low_precision_moments`.
      after: the same after the step.

    Raises:
      ValueError: the state has no second moments.

    >>> import optax
    >>> params, tx = {"kernel": jnp.ones(4)}, optax.adam(0.1)
    >>> _, state = tx.update({"kernel": jnp.asarray([1.0, 0.0, 0.0, 0.0])}, tx.init(params))
    >>> float(stale_moments(tx.init(params), state)["kernel"])
    0.75
    """
    is_adam = lambda node: hasattr(node, "nu") and hasattr(node, "mu")
    states = [
        filter(is_adam, jax.tree.leaves(_in_floats(state), is_leaf=is_adam))
        for state in (before, after)
    ]
    shares: dict[str, jax.Array] = {}
    for old, new in zip(*states, strict=True):
        first, second = _moments(old), _moments(new)
        shares |= {
            path: jnp.mean((first[path] == v).astype(jnp.float32))
            for path, v in second.items()
        }
    if not shares:
        raise ValueError(
            "the optimizer's state has no second moments, a field `nu`; use an"
            " optimizer of Adam's kind"
        )
    return shares


def _moments(state: Any) -> dict[str, jax.Array]:
    """Return second moments by path, decoded with their scales for
    `tcfp_jax.optim.adamw`.
    """
    scales = getattr(state, "nu_scale", {})

    def value(path: str, v: jax.Array) -> jax.Array:
        form: Format = "ue5m3" if v.dtype == jnp.uint8 else "float32"
        return (
            decode(form, found(form, v, path.split("/") if path else [], scales))
            if scales
            else v
        )

    return {path: value(path, v) for path, v in leaves(state.nu).items() if jnp.ndim(v)}


def _in_floats(state: PyTree) -> PyTree:
    """Return the state with float moments instead of `LowPrecisionState`: a code may
    stay while its scale moves.
    """
    is_narrow = lambda node: isinstance(node, LowPrecisionState)
    forms: dict[Any, Format] = {
        jnp.dtype(jnp.uint8): "ue5m3",
        jnp.dtype(jnp.float8_e4m3fn): "float8_e4m3fn",
    }

    def value(scales: dict[str, Any], path: Any, leaf: Any) -> Any:
        form = forms.get(leaf.dtype)
        return (
            leaf
            if form is None
            else decode(form, found(form, leaf, path_names(path), scales))
        )

    of = lambda node: jax.tree_util.tree_map_with_path(
        functools.partial(value, node.scales), node.inner
    )
    return jax.tree.map(
        lambda node: of(node) if is_narrow(node) else node, state, is_leaf=is_narrow
    )
