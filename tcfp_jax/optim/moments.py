"""`low_precision_moments`: keep the moments of any optax transformation in one or two
bytes between its steps.

optax marks the copies of the parameter tree in a state (`optax.tree.map_params`), but
only the name of a field tells their meaning. The tables below name the fields of
optax's own states. An unknown field is an error, not a guess: a signed average in a
format without a sign, or a copy of the parameters in eight bits, would train, and
badly.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from tcfp_jax.optim import encoding
from tcfp_jax.optim.encoding import Format
from tcfp_jax.optim.stored import dequantize
from tcfp_jax.paths import PyTree, named_leaves, path_names

Role = Literal["mu", "nu", "float32"]

_FORMATS: dict[str, tuple[Format, ...]] = {
    "mu": ("float32", "bfloat16", "float8_e4m3fn"),
    "nu": ("float32", "bfloat16", "ue5m3"),
}
_NEEDS = {
    "mu": (
        "an average of gradients needs a sign, a scale for each block, and the mantissa"
        " of E4M3"
    ),
    "nu": (
        "an average of squares spans twice the binades of gradients, more than an 8-bit"
        " float has, and a code for zero would divide by zero"
    ),
}
# Averages of gradients and of updates.
_SIGNED = ("mu", "m", "m1", "m2", "trace", "ema", "exp_avg")
# Averages and sums of squares and magnitudes.
_NONNEGATIVE = ("nu", "v", "n", "sum_of_squares", "e_g", "e_x", "exp_avg_sq")
# Rounding defeats the purpose of these: sums of few gradients, values that are
# subtracted from others of nearly their size, running maxima (which noise drives up),
# step sizes that are multiplied, and copies of the parameters.
_KEPT = (
    "acc_grads",
    "avg_grad",
    "g",
    "previous_gradient",
    "prev_updates",
    "nu_max",
    "step_sizes",
    "s",
    "grad_sum",
    "grad_sum_sq",
    "z",
    "x0",
    "params",
    "params0",
    "updates",
    "init_params",
    "init_particles",
    "cumulative_gradients",
    "subgradients",
    "scale",
    "reward",
    "cache",
    "measurement",
    "measurements",
    "grad",
    "found_nan",
    "v_row",
    "v_col",
    "mean_grads",
    "sum_sq_diff_grads",
    "mean_grads_ema",
    "variance_grads_ema",
    "diff_params_memory",
    "diff_updates_memory",
    "projector",
)
_ROLES: dict[str, Role] = {
    **dict.fromkeys(_SIGNED, "mu"),
    **dict.fromkeys(_NONNEGATIVE, "nu"),
    **dict.fromkeys(_KEPT, "float32"),
}
# Adan's v is an average of differences, an estimate of Sophia's Hessian may be
# negative, and SM3 calls its momentum nu.
_OF_STATES: dict[tuple[str, str], Role] = {
    ("ScaleByAdanState", "v"): "mu",
    ("SophiaState", "nu"): "mu",
    ("ScaleBySM3State", "nu"): "mu",
}
# These two names mean the same far beyond optax.
_COMMON = ("mu", "nu")


class LowPrecisionState(NamedTuple):
    """State of `low_precision_moments`.

    Attributes:
      count: number of steps so far, int32.
      key: uint32 words of the random key; None if nothing is rounded.
      inner: state of the transformation, with narrow values instead of float32 moments.
      scales: scales of the 8-bit moments, in nested dicts by the names of their places
        in `inner`.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it; tuples have a method of that name
    key: jax.Array | None
    inner: PyTree
    scales: dict[str, Any]


def low_precision_moments(
    tx: optax.GradientTransformation,
    *,
    mu: DTypeLike = "float8_e4m3fn",
    nu: DTypeLike = "ue5m3",
    key: jax.Array | None = None,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    fields: Mapping[str, Role] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Store the moments of `tx` in narrow formats between its steps.

    Use it for any optax transformation whose moments do not fit in memory; for AdamW,
    `tcfp_jax.optim.adamw` is faster. A step decodes, runs `tx.update` in float32, and
    encodes. The fields of optax's own states are known, also inside `chain`, `masked`,
    `partition`, `MultiSteps` and `inject_hyperparams`. An unknown field is an error.

    Write `on_stored(low_precision_moments(tx))`, for stored parameters and for others:
    it skips a step whose gradients or their squares are not finite. Without it, or in
    `optax.apply_if_finite`, such a moment makes its whole block NaN.

    These stay float32: leaves with fewer than 4096 values or two axes, embeddings (a
    name of the path has "embed"), gradients that `MultiSteps` accumulates, copies of
    parameters, and other shapes, such as factored moments.

    Args:
      tx: any optax transformation.
      mu: format of averages of gradients: "float8_e4m3fn", "bfloat16" or "float32".
      nu: format of averages of squares: "ue5m3", "bfloat16" or "float32". A negative
        value makes its block NaN.
      key: JAX random key, needed if anything is rounded. It becomes part of the state.
      mask: parameters that may have narrow moments: a tree of bools, or a function of
        the parameters (or of the updates, if `update` gets no parameters) that returns
        one.
      fields: "mu", "nu" or "float32" by name of field, for fields that optax does not
        define or that you know better.

    Raises:
      ValueError: a format that cannot hold these moments; no key, or one that would not
        be used; an unknown field; a transformation without moments; `init` with
        parameters on a mesh that cuts a block of a moment.

    >>> params = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}
    >>> tx = low_precision_moments(optax.adamw(1e-3), key=jax.random.key(0))
    >>> state = tx.init(params)
    >>> adam = state.inner[0]
    >>> adam.mu["kernel"].dtype, adam.nu["kernel"].dtype, adam.mu["bias"].dtype, state.scales["0"]["nu"]["kernel"].shape
    (dtype(float8_e4m3fn), dtype('uint8'), dtype('float32'), (64, 1))
    """
    formats: dict[str, Format] = {
        "mu": _format_of("mu", mu),
        "nu": _format_of("nu", nu),
        "float32": "float32",
    }
    rounds = formats["mu"] != "float32" or formats["nu"] != "float32"
    words = encoding.checked_key(
        "low_precision_moments",
        key,
        rounds,
        f"mu={formats['mu']!r}, nu={formats['nu']!r}",
    )
    roles_by_field = dict(fields or {})
    for name, role in roles_by_field.items():
        if role not in get_args(Role):
            raise ValueError(
                f"fields={{{name!r}: {role!r}}}: the role is unknown; use one of"
                f" {list(get_args(Role))}"
            )
    inner_tx = optax.with_extra_args_support(
        optax.GradientTransformation(tx.init, tx.update)
    )

    def plan(like: PyTree) -> list[Format]:
        # Floats instead of stored weights, as `on_stored` shows them
        like = jax.eval_shape(dequantize, like)
        state = jax.eval_shape(inner_tx.init, like)
        allowed = encoding.narrow_leaves(like, mask)
        places = _roles(inner_tx, state, like, roles_by_field)
        return [
            "float32" if of is None or not allowed[of[1]] else formats[of[0]]
            for of in places
        ]

    def encoded(
        state: PyTree,
        chosen: list[Format],
        count: jax.Array,
        key: jax.Array | None,
        like: PyTree,
    ) -> LowPrecisionState:
        scales: dict[str, Any] = {}
        leaves, treedef = named_leaves(state)
        moments = []
        for i, (form, (names, leaf)) in enumerate(zip(chosen, leaves, strict=True)):
            moment = encoding.encode(form, leaf, encoding.stream(key, count, i))
            moments.append(encoding.kept(moment, names, scales))
        return LowPrecisionState(
            count, key, treedef.unflatten(moments), encoding.by_name(scales, like)
        )

    def init(params: PyTree) -> LowPrecisionState:
        chosen = plan(params)
        first = inner_tx.init(params)
        for form, (names, leaf) in zip(chosen, named_leaves(first)[0], strict=True):
            encoding.check_moment("/".join(names), form, leaf)
        # Without the barrier XLA rounds the zeros at compile time, which takes seconds.
        first = lax.optimization_barrier(first)
        return encoded(
            first,
            chosen,
            jnp.zeros((), jnp.int32),
            None if words is None else jnp.copy(words),
            params,
        )

    def update(
        updates: PyTree, state: LowPrecisionState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, LowPrecisionState]:
        like = updates if params is None else params
        chosen = plan(like)
        leaves, treedef = named_leaves(state.inner)
        pairs = zip(chosen, leaves, strict=True)
        held = [
            (form, encoding.found(form, leaf, names, state.scales))
            for form, (names, leaf) in pairs
        ]
        moments = [encoding.decode(form, moment) for form, moment in held]
        updates, inner = inner_tx.update(
            updates, treedef.unflatten(moments), params, **extra
        )
        return updates, encoded(
            inner, chosen, optax.safe_increment(state.count), state.key, like
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _format_of(role: str, dtype: DTypeLike) -> Format:
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    for known in _FORMATS[role]:
        if name == known:
            return known
    raise ValueError(
        f"{role}={name!r} cannot hold these moments: {_NEEDS[role]}; use one of"
        f" {list(_FORMATS[role])}"
    )


def _roles(
    tx: optax.GradientTransformation,
    state: PyTree,
    params: PyTree,
    fields: Mapping[str, Role],
) -> list[tuple[Role, int] | None]:
    """Return, for every leaf of `tx`'s state, its role and the place of its parameter
    among the leaves of `params`.

    None stands for a leaf that is not a copy of a parameter: a count, a key, or
    statistics of another shape.
    """
    places = {
        path: i
        for i, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0])
    }
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    roles: list[tuple[Role, int] | None] = [None] * len(leaves)
    seen = set()
    for index in _copies(tx, state):
        path, leaf = leaves[index]
        # The longest end of the path that is a parameter's; the rest leads to the
        # field.
        start = next(
            (start for start in range(len(path) + 1) if path[start:] in places), None
        )
        if start is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        place = places[path[start:]]
        owner, field = _field(state, path[:start])
        seen.add(field)
        role = _role(owner, field, fields)
        if leaf.shape == shapes[place]:
            roles[index] = role, place
    if not places:  # optax's placeholder, or all parameters are masked
        return roles
    if not seen:
        raise ValueError(
            "this transformation keeps nothing that mirrors the parameters, so there is"
            " no moment to store in another format; use it without"
            " low_precision_moments"
        )
    unknown = sorted(set(fields) - seen)
    if unknown:
        raise ValueError(
            f"fields= names {unknown}, but the state has the fields {sorted(seen)};"
            " drop or rename them"
        )
    return roles


def _copies(tx: optax.GradientTransformation, state: PyTree) -> list[int]:
    """Return the places of the leaves that are in copies of the parameter tree, as
    optax finds them.
    """
    treedef: Any = jax.tree.structure(state)
    found: list[object] = []
    # no pytrees, so optax takes them for leaves
    marks = [object() for _ in range(treedef.num_leaves)]
    try:
        optax.tree_utils.tree_map_params(tx, found.append, treedef.unflatten(marks))
    except Exception as error:
        raise ValueError(
            "optax.tree.map_params cannot find the copies of the parameters in the"
            " state of this transformation, whose init does not take its placeholder"
            f" ({type(error).__name__}: {error}); wrap the parts of the chain that have"
            " moments alone"
        ) from error
    places = {id(mark): i for i, mark in enumerate(marks)}
    return [places[id(mark)] for mark in found if id(mark) in places]


def _field(state: PyTree, prefix: tuple[object, ...]) -> tuple[type, str]:
    """Return the class of a state and the name of its field that a path leads to."""
    named = [
        (i, entry.name)
        for i, entry in enumerate(prefix)
        if isinstance(entry, jax.tree_util.GetAttrKey)
    ]
    if not named:
        return type(state), "/".join(path_names(prefix))
    last, field = named[-1]
    node = state
    for entry in prefix[:last]:
        match entry:
            case jax.tree_util.GetAttrKey(name=name):
                node = getattr(node, name)
            case jax.tree_util.DictKey(key=key) | jax.tree_util.SequenceKey(idx=key):
                node = node[key]
            case _:
                break
    return type(node), field


def _role(owner: type, field: str, fields: Mapping[str, Role]) -> Role:
    if field in fields:
        return fields[field]
    of_optax = owner.__module__.split(".")[0] == "optax"
    if of_optax and (owner.__name__, field) in _OF_STATES:
        return _OF_STATES[owner.__name__, field]
    if field in _ROLES and (of_optax or field in _COMMON):
        return _ROLES[field]
    raise ValueError(
        f"{owner.__name__}.{field} mirrors the parameters, but its meaning is unknown;"
        " say it with "
        f'fields={{{field!r}: "mu"}} (an average with a sign), "nu" (never negative) or'
        ' "float32" (not rounded)'
    )
