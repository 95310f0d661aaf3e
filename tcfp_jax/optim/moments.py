"""`low_precision_moments`: keep the moments of any optax transformation in one or two
bytes between its steps.

optax marks the copies of the parameter tree in a state (`optax.tree.map_params`), but
only the name of a field tells their meaning. `mu` is an average of gradients and `nu`
one of squares, in optax and far beyond it. Every other field stays float32 until you
name its role: a signed average in a format without a sign, or a copy of the parameters
in eight bits, would train, and badly.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from tcfp_jax.optim import encoding
from tcfp_jax.optim.arguments import check_made
from tcfp_jax.optim.encoding import Format, Scales
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
_KNOWN: dict[str, Role] = {"mu": "mu", "nu": "nu"}


class LowPrecisionState(NamedTuple):
    """State of `low_precision_moments`.

    Use this to inspect the narrow moments; `tcfp_jax.monitor.stale_moments` reads them
    as floats.

    Attributes:
      count: number of steps so far, int32.
      key: uint32 words of the random key; None if nothing is rounded.
      inner: state of the transformation, with narrow values instead of float32 moments.
      scales: scales of the 8-bit moments, in nested dicts by the names of their places
        in `inner`.
    """

    # optax's name for it; tuples have a method of that name
    count: Array  # type: ignore[assignment]
    key: Array | None
    inner: PyTree
    scales: Scales


class _Place(NamedTuple):
    """A leaf of a state that is a copy of a parameter.

    Attributes:
      field: name of the state's field.
      parameter: place of the parameter among the leaves of the parameters.
      is_whole: whether it has the parameter's shape.
    """

    field: str
    parameter: int
    is_whole: bool


def low_precision_moments(
    tx: optax.GradientTransformation,
    *,
    mu: DTypeLike = "float8_e4m3fn",
    nu: DTypeLike = "ue5m3",
    key: Array | None = None,
    mask: PyTree | Callable[[PyTree], PyTree] = None,
    fields: Mapping[str, Role] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Store the moments of `tx` in narrow formats between its steps.

    Use this for any optax transformation whose moments do not fit in memory. For AdamW
    use `tcfp_jax.optim.adamw`, which is faster. A step decodes, runs `tx.update` in
    float32, and encodes. Fields `mu` and `nu` are found inside `chain`, `masked`,
    `partition`, `MultiSteps` and `inject_hyperparams`, too. Name other moments by
    `fields`: `{"trace": "mu"}` for `optax.sgd(momentum=...)`, `{"v": "nu"}` for
    `optax.adafactor`, and `{"nu": "mu"}` where `nu` has a sign, as in `optax.sm3`.

    Write `on_stored(low_precision_moments(tx))`, for stored parameters and for others:
    it skips a step whose gradients or their squares are not finite. Without it, or in
    `optax.apply_if_finite`, such a moment makes its whole block NaN.

    These stay float32: fields that nothing names, leaves with fewer than 4096 values or
    two axes, embeddings (a name of the path has "embed"), and moments of another shape
    than their parameter, such as factored ones.

    Args:
      tx: any optax transformation.
      mu: format of averages of gradients: "float8_e4m3fn", "bfloat16" or "float32".
      nu: format of averages of squares: "ue5m3", "bfloat16" or "float32". A negative
        value makes its block NaN.
      key: JAX random key, needed if anything is rounded. It becomes part of the state.
      mask: parameters that may have narrow moments: a tree of bools, or a function of
        the parameters (or of the updates, if `update` gets no parameters) that returns
        one.
      fields: "mu", "nu" or "float32" by name of field, besides `mu` and `nu`.

    Raises:
      ValueError: a format that cannot hold these moments. No key, or one that would not
        be used. A name that is no field, or a transformation without moments. `init`
        with parameters on a mesh that cuts a block of a moment, or with stored
        parameters outside of `on_stored`.

    >>> params = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}
    >>> tx = low_precision_moments(optax.adamw(1e-3), key=jax.random.key(0))
    >>> state = tx.init(params)
    >>> state.inner[0].mu["kernel"].dtype, state.inner[0].mu["bias"].dtype
    (dtype(float8_e4m3fn), dtype('float32'))
    >>> state.scales["0"]["nu"]["kernel"].shape
    (64, 1)
    """
    roles = {**_KNOWN, **(fields or {})}
    for name, role in roles.items():
        if role not in get_args(Role):
            raise ValueError(
                f"fields={{{name!r}: {role!r}}}: the role is unknown; use one of"
                f" {list(get_args(Role))}"
            )
    formats: dict[Role, Format] = {
        "mu": _format_of("mu", mu),
        "nu": _format_of("nu", nu),
        "float32": "float32",
    }
    rounds = formats["mu"] != "float32" or formats["nu"] != "float32"
    setting = f"mu={formats['mu']!r}, nu={formats['nu']!r}"
    words = encoding.checked_key("low_precision_moments", key, rounds, setting)
    inner_tx = optax.with_extra_args_support(
        optax.GradientTransformation(tx.init, tx.update)
    )

    def plan(params: PyTree) -> list[Format]:
        """Return the format of every leaf of the state."""
        # Floats instead of stored weights, as `on_stored` shows them
        params = jax.eval_shape(dequantize, params)
        state = jax.eval_shape(inner_tx.init, params)
        allowed = encoding.narrow_leaves(params, mask)
        places = _places(inner_tx, state, params)
        if jax.tree.leaves(params):  # optax's placeholder has none
            _check_fields(places, roles, fields or {})
        chosen: list[Format] = ["float32"] * len(jax.tree.leaves(state))
        for index, place in places.items():
            if place.is_whole and allowed[place.parameter]:
                chosen[index] = formats[roles.get(place.field, "float32")]
        return chosen

    def encoded(
        state: PyTree,
        chosen: list[Format],
        count: Array,
        key: Array | None,
        params: PyTree,
    ) -> LowPrecisionState:
        scales: Scales = {}
        leaves, treedef = named_leaves(state)
        moments = []
        for i, (form, (names, leaf)) in enumerate(zip(chosen, leaves, strict=True)):
            moment = encoding.encode(form, leaf, encoding.stream(key, count, i))
            moments.append(encoding.kept(moment, names, scales))
        inner = treedef.unflatten(moments)
        return LowPrecisionState(count, key, inner, encoding.by_name(scales, params))

    def init(params: PyTree) -> LowPrecisionState:
        chosen = plan(params)
        first = inner_tx.init(params)
        _check_moments(chosen, first)
        # Without the barrier XLA rounds the zeros at compile time, which takes seconds.
        first = lax.optimization_barrier(first)
        own_words = None if words is None else jnp.copy(words)
        return encoded(first, chosen, jnp.zeros((), jnp.int32), own_words, params)

    def update(
        updates: PyTree,
        state: LowPrecisionState,
        params: PyTree = None,
        **extra: object,
    ) -> tuple[PyTree, LowPrecisionState]:
        check_made(state, LowPrecisionState, "low_precision_moments")
        like = updates if params is None else params
        chosen = plan(like)
        leaves, treedef = named_leaves(state.inner)
        moments = []
        for form, (names, leaf) in zip(chosen, leaves, strict=True):
            if form != "float32":
                leaf = encoding.decode(encoding.found(leaf, names, state.scales))
            moments.append(leaf)
        wide = treedef.unflatten(moments)
        updates, inner = inner_tx.update(updates, wide, params, **extra)
        count = optax.safe_increment(state.count)
        return updates, encoded(inner, chosen, count, state.key, like)

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


def _check_moments(formats: list[Format], state: PyTree) -> None:
    """Raise a ValueError unless the formats fit the leaves of a first state."""
    found = named_leaves(state)[0]
    if len(found) != len(formats):
        raise ValueError(
            "low_precision_moments needs float parameters, and some of these are stored"
            " weights; write tcfp_jax.optim.on_stored(low_precision_moments(...))"
        )
    for form, (names, leaf) in zip(formats, found, strict=True):
        encoding.check_moment("/".join(names), form, leaf)


def _check_fields(
    places: Mapping[int, _Place],
    roles: Mapping[str, Role],
    named: Mapping[str, Role],
) -> None:
    """Raise unless the state has a moment, and every field that the user named."""
    there = {place.field for place in places.values()}
    unknown = sorted(set(named) - there)
    if unknown:
        raise ValueError(
            f"fields= names {unknown}, but the state has the fields {sorted(there)};"
            " drop or rename them"
        )
    if there and not there & set(roles):
        field = min(there)
        raise ValueError(
            f"no field is named mu or nu among {sorted(there)}, so there is no moment"
            f' to store in another format; say fields={{{field!r}: "mu"}} (an average'
            ' with a sign), "nu" (never negative) or "float32" (not rounded)'
        )
    if not there:
        raise ValueError(
            "this transformation keeps nothing that mirrors the parameters, so there is"
            " no moment to store in another format; use it without"
            " low_precision_moments"
        )


def _places(
    tx: optax.GradientTransformation, state: PyTree, params: PyTree
) -> dict[int, _Place]:
    """Return the float leaves of `tx`'s state that are copies of a parameter.

    The keys are places among the leaves of the state. A count or a key is not a copy.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    parameters = {path: i for i, (path, _) in enumerate(paths)}
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    places = {}
    for index in _copies(tx, state):
        path, leaf = leaves[index]
        # The longest end of the path that is a parameter's; the rest leads to the
        # field.
        ends = [start for start in range(len(path) + 1) if path[start:] in parameters]
        if ends and jnp.issubdtype(leaf.dtype, jnp.floating):
            parameter = parameters[path[ends[0] :]]
            is_whole = leaf.shape == shapes[parameter]
            places[index] = _Place(_field(path[: ends[0]]), parameter, is_whole)
    return places


def _copies(tx: optax.GradientTransformation, state: PyTree) -> list[int]:
    """Return the places of the leaves that optax finds in copies of the parameters."""
    # no pytrees, so optax takes them for leaves
    marks = [object() for _ in jax.tree.leaves(state)]
    found: list[object] = []
    marked = jax.tree.unflatten(jax.tree.structure(state), marks)
    try:
        optax.tree_utils.tree_map_params(tx, found.append, marked)
    except Exception as error:
        raise ValueError(
            "optax.tree.map_params cannot find the copies of the parameters in the"
            " state of this transformation, whose init does not take its placeholder"
            f" ({type(error).__name__}: {error}); wrap the parts of the chain that have"
            " moments alone"
        ) from error
    places = {id(mark): i for i, mark in enumerate(marks)}
    return [places[id(mark)] for mark in found if id(mark) in places]


def _field(prefix: tuple[object, ...]) -> str:
    """Return the name of the state's field that a path leads to."""
    for entry in reversed(prefix):
        if isinstance(entry, jax.tree_util.GetAttrKey):
            return entry.name
    return "/".join(path_names(prefix))
