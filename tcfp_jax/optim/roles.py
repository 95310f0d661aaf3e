"""Which leaves of an optimizer's state are moments, and which of those cannot be negative.

optax marks the copies of the parameter tree in a state (`optax.tree.map_params`); what each of them means, only the
name of its field says. The tables below hold the fields of optax's own states. A field that they do not hold is an
error and not a guess: a signed average in a format without a sign, or a copy of the parameters in eight bits, would
train, and badly.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from tcfp_jax.paths import path_names

Role = Literal["mu", "nu", "float32"]

# Averages of gradients and of updates.
_SIGNED = ("mu", "m", "m1", "m2", "trace", "ema", "exp_avg")
# Averages and sums of squares and magnitudes.
_NONNEGATIVE = ("nu", "v", "n", "sum_of_squares", "e_g", "e_x", "exp_avg_sq")
# Rounding changes what these are for: sums of few gradients, values that are subtracted from others of nearly their
# size, running maxima (which noise drives up), step sizes that are multiplied, and copies of the parameters.
_KEPT = (
    "acc_grads", "avg_grad", "g", "previous_gradient", "prev_updates", "nu_max", "step_sizes", "s", "grad_sum",
    "grad_sum_sq", "z", "x0", "params", "params0", "updates", "init_params", "init_particles", "cumulative_gradients",
    "subgradients", "scale", "reward", "cache", "measurement", "measurements", "grad", "found_nan", "v_row", "v_col",
    "mean_grads", "sum_sq_diff_grads", "mean_grads_ema", "variance_grads_ema", "diff_params_memory",
    "diff_updates_memory", "projector",
)  # fmt: skip
_ROLES: dict[str, Role] = {
    **dict.fromkeys(_SIGNED, "mu"), **dict.fromkeys(_NONNEGATIVE, "nu"), **dict.fromkeys(_KEPT, "float32")
}  # fmt: skip
# Adan's v is an average of differences, an estimate of Sophia's Hessian may be negative, and SM3 calls its momentum nu.
_OF_STATES: dict[tuple[str, str], Role] = {
    ("ScaleByAdanState", "v"): "mu", ("SophiaState", "nu"): "mu", ("ScaleBySM3State", "nu"): "mu"
}  # fmt: skip
# What these two names mean is a convention far beyond optax.
_COMMON = ("mu", "nu")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise a ValueError unless every field has a role."""
    for name, role in fields.items():
        if role not in get_args(Role):
            raise ValueError(f"fields={{{name!r}: {role!r}}}: the role is unknown; use one of {list(get_args(Role))}")


def roles(tx: Any, state: Any, params: Any, fields: Mapping[str, Role]) -> list[tuple[Role, int] | None]:
    """Of every leaf of `tx`'s state its role and the place of its parameter among the leaves of `params`.

    None where a leaf is no copy of a parameter: a count, a key, statistics of another shape than the parameter's.

    Args:
      tx: the transformation.
      state: what its `init` makes of `params`, as shapes.
      params: the parameters, or anything of their structure and shapes.
      fields: roles by name of field, before those of the tables.

    Raises:
      ValueError: optax cannot tell the copies in the state apart, a field is unknown, a name in `fields` is no field
        of the state, or there is no copy of the parameters at all.

    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = optax.adam(0.1)
    >>> roles(tx, jax.eval_shape(tx.init, params), params, {})
    [None, ('mu', 0), ('nu', 0)]
    """
    places = {path: i for i, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0])}
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    found: list[tuple[Role, int] | None] = [None] * len(leaves)
    seen = set()
    for index in _copies(tx, state):
        path, leaf = leaves[index]
        place, prefix = _parameter(path, places)
        if place is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        owner, field = _field(state, prefix)
        seen.add(field)
        role = _role(owner, field, fields)
        if leaf.shape == shapes[place]:
            found[index] = role, place
    _check_seen(seen, fields, bool(places))
    return found


def _copies(tx: Any, state: Any) -> list[int]:
    """The places of the leaves in copies of the parameter tree, as optax finds them."""
    treedef: Any = jax.tree.structure(state)
    found: list[_Place] = []
    numbered = treedef.unflatten([_Place(i) for i in range(treedef.num_leaves)])
    try:
        optax.tree_utils.tree_map_params(tx, found.append, numbered)
    except Exception as error:
        raise ValueError(
            "optax.tree.map_params cannot find the copies of the parameters in the state of this transformation, whose "
            f"init does not take its placeholder ({type(error).__name__}: {error}); wrap the parts of the chain that "
            "have moments alone"
        ) from error
    return [place.index for place in found if isinstance(place, _Place)]


class _Place:
    """A leaf by its place; no pytree, so that optax takes it for one."""

    def __init__(self, index: int) -> None:
        self.index = index


def _parameter(path: tuple[Any, ...], places: Mapping[tuple[Any, ...], int]) -> tuple[int | None, tuple[Any, ...]]:
    """The parameter whose path ends a path of the state, the longest one, and what comes before it."""
    for start in range(len(path) + 1):
        if path[start:] in places:
            return places[path[start:]], path[:start]
    return None, path


def _field(state: Any, prefix: tuple[Any, ...]) -> tuple[type, str]:
    """The class of a state and the name of its field that a path leads to."""
    named = [i for i, entry in enumerate(prefix) if isinstance(entry, jax.tree_util.GetAttrKey)]
    if not named:
        return type(state), "/".join(path_names(prefix))
    node = state
    for entry in prefix[: named[-1]]:
        match entry:
            case jax.tree_util.GetAttrKey(name=name):
                node = getattr(node, name)
            case jax.tree_util.DictKey(key=key) | jax.tree_util.SequenceKey(idx=key):
                node = node[key]
            case _:
                break
    return type(node), prefix[named[-1]].name


def _role(owner: type, field: str, fields: Mapping[str, Role]) -> Role:
    if field in fields:
        return fields[field]
    of_optax = owner.__module__.split(".")[0] == "optax"
    if of_optax and (owner.__name__, field) in _OF_STATES:
        return _OF_STATES[owner.__name__, field]
    if field in _ROLES and (of_optax or field in _COMMON):
        return _ROLES[field]
    raise ValueError(
        f"{owner.__name__}.{field} mirrors the parameters, but what it holds is unknown; say it with "
        f'fields={{{field!r}: "mu"}} (an average with a sign), "nu" (never negative) or "float32" (not rounded)'
    )


def _check_seen(seen: set[str], fields: Mapping[str, Role], has_parameters: bool) -> None:
    if not has_parameters:  # optax's placeholder, or all of them are masked
        return
    if not seen:
        raise ValueError(
            "this transformation keeps nothing that mirrors the parameters, so there is no moment to store in another "
            "format; use it without low_precision_moments"
        )
    unknown = sorted(set(fields) - seen)
    if unknown:
        raise ValueError(f"fields= names {unknown}, but the state has the fields {sorted(seen)}; drop or rename them")
