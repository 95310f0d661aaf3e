"""Moments of an optimizer in one or two bytes between its steps: decode, update in float32, encode.

    "float8_e4m3fn"   m: E4M3 and one E8M0 scale for each 128 values
    "ue5m3"           v: five bits of exponent, three of mantissa, no sign, and one offset for each 128 values
    "bfloat16"        either
    "float32"         either; nothing is rounded

Everything narrower than float32 is rounded stochastically: with nearest rounding an average with a decay near 1 moves
by less than half a step, and stays where it is for ever. The random bits of a value are a hash of (key, step, leaf,
global index), so a state has the same bits on every mesh. Formats and codes are those of `pallas_kernels.moments`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import optax
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import counter
from tcfp_jax.optim.encoding import Blocks, Format, check_moment, decode, encode
from tcfp_jax.optim.roles import Role, check_fields, roles
from tcfp_jax.optim.stored import dequantize
from tcfp_jax.paths import find, path_names, put

FORMATS: dict[str, tuple[Format, ...]] = {
    "mu": ("float32", "bfloat16", "float8_e4m3fn"),
    "nu": ("float32", "bfloat16", "ue5m3"),
}
SMALLEST = 4096  # values of a leaf that is stored in less than float32


class LowPrecisionState(NamedTuple):
    """State of `low_precision_moments`.

    Attributes:
      count: steps so far, int32.
      key: uint32 words of the random key; None where nothing is rounded.
      inner: the state of the transformation, with arrays of narrow values or bfloat16 in the place of moments.
      scales: of those in eight bits, in nested dicts by the names of their places in `inner`.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name, of which tuples have a method
    key: jax.Array | None
    inner: Any
    scales: dict[str, Any]


def low_precision_moments(
    tx: Any,
    *,
    mu: DTypeLike = "float8_e4m3fn",
    nu: DTypeLike = "ue5m3",
    key: jax.Array | None = None,
    mask: Any | Callable[[Any], Any] | None = None,
    fields: Mapping[str, Role] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`tx` whose moments are stored in narrow formats between its steps.

    A step is decode, `tx.update` in float32, encode; what `tx` computes does not change. Which leaves of its state are
    moments, and which of them cannot be negative, is known of optax's transformations, also inside of `chain`,
    `masked`, `partition`, `MultiSteps` and `inject_hyperparams`; what is not known is an error.

    For stored parameters write `on_stored(low_precision_moments(tx))`, which leaves steps out whose gradients are not
    finite. Alone, or in `optax.apply_if_finite`, a NaN in a moment makes its whole block NaN.

    Float32 stay: leaves of less than 4096 values, leaves of parameters with fewer than two axes, those of embeddings
    (a name of the path holds "embed"), gradients that `MultiSteps` accumulates, copies of the parameters, and
    whatever has another shape than its parameter, such as factored moments.

    Args:
      tx: any optax transformation.
      mu: format of averages of gradients: "float8_e4m3fn", "bfloat16" or "float32".
      nu: format of averages of squares: "ue5m3", "bfloat16" or "float32". A negative value makes its block NaN.
      key: JAX random key, wherever anything is rounded. It is part of the state from then on.
      mask: which parameters may have narrow moments: a tree of bools, or a function of the parameters (or the updates,
        where `update` gets no parameters) that returns one.
      fields: "mu", "nu" or "float32" for fields of states by name, where optax does not know them or you know better.

    Raises:
      ValueError: a format that cannot hold these moments; no key, or one that nothing would use; an unknown field; a
        transformation without moments; `init` with parameters on a mesh that cuts a block of a moment.

    >>> params = {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}
    >>> tx = low_precision_moments(optax.adamw(1e-3), key=jax.random.key(0))
    >>> state = tx.init(params)
    >>> adam = state.inner[0]
    >>> adam.mu["kernel"].dtype, adam.nu["kernel"].dtype, adam.mu["bias"].dtype, state.scales["0"]["nu"]["kernel"].shape
    (dtype(float8_e4m3fn), dtype('uint8'), dtype('float32'), (64, 1))
    """
    formats: dict[str, Format] = {"mu": format_of("mu", mu), "nu": format_of("nu", nu), "float32": "float32"}
    rounds = {"mu", "nu"} != {role for role in ("mu", "nu") if formats[role] == "float32"}
    words = checked_key("low_precision_moments", key, rounds, f"mu={formats['mu']!r}, nu={formats['nu']!r}")
    fields = dict(fields or {})
    check_fields(fields)
    inner_tx = optax.with_extra_args_support(optax.GradientTransformation(tx.init, tx.update))

    def plan(like: Any) -> list[Format]:
        like = jax.eval_shape(dequantize, like)  # floats in the place of stored weights, as `on_stored` shows them
        state = jax.eval_shape(inner_tx.init, like)
        allowed = narrow_leaves(like, mask)
        places = roles(inner_tx, state, like, fields)
        return ["float32" if of is None or not allowed[of[1]] else formats[of[0]] for of in places]

    def encoded(state: Any, chosen: list[Format], count: jax.Array, key: jax.Array | None, like: Any) -> Any:
        scales: dict[str, Any] = {}
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(state)
        pairs = enumerate(zip(chosen, paths, strict=True))
        moments = [(path, encode(form, leaf, stream(key, count, i))) for i, (form, (path, leaf)) in pairs]
        inner = treedef.unflatten([kept(moment, path_names(path), scales) for path, moment in moments])
        return LowPrecisionState(count, key, inner, by_name(scales, like))

    def init(params: Any) -> LowPrecisionState:
        chosen, first = plan(params), _first(inner_tx, params)
        for form, (path, leaf) in zip(chosen, jax.tree_util.tree_flatten_with_path(first)[0], strict=True):
            check_moment("/".join(path_names(path)), form, leaf)
        return encoded(first, chosen, jnp.zeros((), jnp.int32), own(words), params)

    def update(updates: Any, state: LowPrecisionState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        like = updates if params is None else params
        chosen = plan(like)
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(state.inner)
        pairs = zip(chosen, paths, strict=True)
        moments = [(form, found(form, leaf, path_names(path), state.scales)) for form, (path, leaf) in pairs]
        inner = treedef.unflatten([decode(form, moment) for form, moment in moments])
        updates, inner = inner_tx.update(updates, inner, params, **extra)
        return updates, encoded(inner, chosen, optax.safe_increment(state.count), state.key, like)

    return optax.GradientTransformationExtraArgs(init, update)


def kept(moment: Any, names: list[str], scales: dict[str, Any]) -> jax.Array:
    """What a state keeps of a moment in its place, an array of its shape; scales of blocks are put into `scales`.

    Two arrays in the place of one would not do: what holds parameters in boxes (`nnx.Optimizer`) takes them apart.
    """
    if not isinstance(moment, Blocks):
        return moment
    put(scales, names or ["parameter"], moment.scale)
    return moment.values


def by_name(entries: dict[str, Any], params: Any) -> Any:
    """Nested dicts of a state, or one number where there are no parameters.

    `optax.tree.map_params` makes a state of no parameters and looks at the places of its leaves in another one: dicts
    that are empty in the one and full in the other would be two structures, and a leaf stands for any.
    """
    return entries if jax.tree.leaves(params) else jnp.zeros((), jnp.int32)


def found(form: Format, values: jax.Array, names: list[str], scales: Mapping[str, Any]) -> Any:
    """The opposite of `kept`: the moment of this format."""
    eight_bits = form in ("float8_e4m3fn", "ue5m3")
    return Blocks(values, find(scales, names or ["parameter"])) if eight_bits else values


def format_of(role: str, dtype: DTypeLike) -> Format:
    """The name of a format that moments of this role can have.

    Raises:
      ValueError: they cannot; the message says why, and what to use.

    >>> format_of("mu", jnp.bfloat16)
    'bfloat16'
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    for known in FORMATS[role]:
        if name == known:
            return known
    best = FORMATS[role][-1]
    raise ValueError(f"{role}={name!r}: {_objection(role, name)}; use one of {list(FORMATS[role])}, {best!r} first")


def narrow_leaves(
    params: Any, mask: Any = None, *, is_leaf: Callable[[Any], bool] | None = None, sizes: Any = jnp.shape
) -> list[bool]:
    """Of every parameter whether its moments may be narrow, by path and global shape alone.

    Args:
      params: a tree of parameters.
      mask: which of them may: a tree of bools, or a function of the tree that returns one.
      is_leaf: what else is a parameter.
      sizes: the shape of a parameter.

    >>> narrow_leaves({"embed": jnp.ones((64, 64)), "kernel": jnp.ones((64, 64)), "scale": jnp.ones(4096)})
    [False, True, False]
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
    allowed = spread(mask, params, is_leaf=is_leaf) if mask is not None else [True] * len(paths)
    shapes = [sizes(leaf) for _, leaf in paths]
    embeds = ["embed" in "/".join(path_names(path)).lower() for path, _ in paths]
    return [
        bool(may) and len(shape) >= 2 and math.prod(shape) >= SMALLEST and not embed
        for may, shape, embed in zip(allowed, shapes, embeds, strict=True)
    ]


def spread(mask: Any, params: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """A mask, or what a function makes of the parameters, as one value for each of them.

    Raises:
      ValueError: the mask is no prefix of the tree of parameters.
    """
    tree = mask(params) if callable(mask) else mask
    try:
        filled = jax.tree.map(lambda keep, part: [keep] * len(jax.tree.leaves(part, is_leaf=is_leaf)), tree, params)
    except ValueError as error:
        raise ValueError(
            f"mask must be a tree of bools for the parameters, or for whole branches of them, or a function that "
            f"returns one, but its structure is another: {error}"
        ) from error
    return [keep for part in jax.tree.leaves(filled, is_leaf=lambda node: isinstance(node, list)) for keep in part]


def checked_key(name: str, key: Any, rounds: bool, what: str) -> jax.Array | None:
    """The words of a random key, uint32 `[words]`, or None where nothing is rounded.

    Raises:
      ValueError: no key although something is rounded, or a key that nothing would use.
    """
    if key is None:
        if rounds:
            raise ValueError(
                f"{what} rounds moments stochastically and needs random bits; use {name}(..., key=jax.random.key(seed))"
            )
        return None
    if not rounds:
        raise ValueError(f"{what} rounds nothing, but key= is given, which nothing would use; drop the key")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return key.astype(jnp.uint32).reshape(-1)


def own(words: jax.Array | None) -> jax.Array | None:
    """A copy for one state, which may be donated."""
    return None if words is None else jnp.array(words, copy=True)


def stream(key: jax.Array | None, *words: Any) -> tuple[jax.Array, jax.Array] | None:
    """The key of the counter hash for these integers, such as a step and a leaf; None without a key."""
    return None if key is None else counter.keys(*(key[i] for i in range(key.shape[0])), *words)


def _first(tx: optax.GradientTransformation, params: Any) -> Any:
    """The first state of a transformation, behind a barrier: XLA would round its zeros while it compiles."""
    return lax.optimization_barrier(tx.init(params))


def _objection(role: str, name: str) -> str:
    """The rule that a format breaks."""
    signs = "have a sign" if role == "mu" else "span the squares of what gradients span, and must not become zero"
    if name == "ue5m3":
        return f"it has no sign, and these moments {signs}"
    try:
        kind = jnp.dtype(name)
        info: Any = ml_dtypes.finfo(kind)
    except (TypeError, ValueError):
        if name.startswith(("int", "uint")):
            return "integers have no exponent, so small moments of a block become zero"
        return "the format is unknown"
    mantissa, smallest = int(info.nmant), float(info.smallest_subnormal)
    binades = math.log2(float(info.max)) - math.log2(smallest)
    if mantissa == 0:
        return "it has no mantissa, so no sign and steps of a factor of two"
    if kind.itemsize > 4:
        return "moments are computed in float32, and wider ones would hold nothing more"
    if kind.itemsize == 2:
        return f"it has no scale, and its {binades:.0f} binades are too few without one"
    if role == "nu":
        return f"its {binades:.0f} binades are too few, and it has a code for zero: these moments {signs}"
    if mantissa < 3:
        return f"its {mantissa} bits of mantissa are too few: its steps are twice E4M3's, whose scale moves"
    if not float(info.smallest_subnormal) < float(info.smallest_normal):
        return "it has no subnormals, so what is small in a block becomes zero or a whole step"
    return (
        f"its {binades:.0f} binades in a block are too few" if binades < 16 else "its zero and NaN are coded otherwise"
    )
