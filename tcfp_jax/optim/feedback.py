"""`error_feedback`: quantized weights and their rounding errors as optax state.

Layers read it, the optimizer writes it. `error_feedback` stands last in an
`optax.chain`, sees the final update, and quantizes the weights that the update will
produce, once per step:

    target  = (params + updates) + error
    stored  = Q(target)                  two FP8 tensors and a scale per weight
    error   = target - dequantize(stored)

The mean of the stored weights converges to the weight like 1/t (Seide et al. 2014;
Karimireddy et al. 2019). The updates never change. `layer_state` hands the stored
weights to the layers.

Left out: the float parameters stay, four bytes per weight. Use `tcfp_jax.store` with
`tcfp_jax.optim.adamw` or `on_stored` to train without them. Moments stay as the
optimizer makes them: use `low_precision_moments` for smaller ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.operands import Contracts
from tcfp_jax.formats.casting import check_key
from tcfp_jax.optim.arguments import check_made
from tcfp_jax.optim.feedback_step import Entry, WeightStep
from tcfp_jax.paths import PyTree, entries, find, named_leaves, put
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.placement import check_blocks

_ERROR_DTYPES = ("float32", "bfloat16", "float8_e5m2")
_Key: TypeAlias = Array | None


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`.

    Use this to inspect errors; use `layer_state` instead to hand the weights to layers.

    Attributes:
      weights: a `Stored` for every weight, in nested dicts by parameter name: the
        collection that layers read. Each holds a sample of its parameter. A checkpoint
        without samples does not fit, and orbax says so: restore it with
        `partial_restore=True` into a state whose `sample`s are None. It is then read
        without a comparison, and the next update fills the samples in.
      errors: rounding errors in float32 or bfloat16. The tree mirrors the parameters,
        with `optax.MaskedNode()` for parameters without an error. None if errors are
        FP8.
      amax: float32 scalars for recipes with a delayed amax; the tree mirrors the
        parameters, too.
      key: raw key data (uint32) for stochastic rounding, otherwise None.
      scaled_errors: FP8 errors, in units of the stored scale, otherwise None. They have
        a field of their own because checkpoints know arrays by name: Orbax refuses FP8
        errors for a state with float errors, and would cast them.
    """

    weights: dict[str, PyTree]
    errors: PyTree
    amax: PyTree
    key: Array | None
    scaled_errors: PyTree = None


def error_feedback(
    recipe: Recipe | str | Mapping[str, Weight],
    *,
    key: Array | None = None,
    error_dtype: DTypeLike = "float32",
    mask: PyTree | Callable[[PyTree], PyTree] = None,
) -> optax.GradientTransformation:
    """Keep quantized weights of the layers, and their rounding errors, as state.

    Use this to train float parameters with layers or converted models in FP8. Use
    `tcfp_jax.store` instead if the float parameters do not fit in memory.

    Place it last in `optax.chain`: it reads the final update and passes it on
    unchanged. A transformation after it, or a wrapper that makes another update of its
    own, leaves the layers with weights that are not their parameters. The next product
    then raises, or is NaN in a compiled program (`tcfp_jax.weights.freshness`).

    An optimizer that sees a part of the parameters (`optax.partition`, `optax.masked`,
    `nnx.Optimizer(wrt=...)`) holds the weights of that part; layers quantize the others
    on the fly. Frozen weights need a chain of their own:

        weights = find_weights(model)
        train = optax.chain(optax.adamw(3e-4), error_feedback(weights))
        frozen = optax.chain(optax.set_to_zero(), error_feedback(weights))
        tx = optax.partition({"train": train, "frozen": frozen}, labels)

    Args:
      recipe: recipe of the layers. With `remainder="dropped"` weights are still
        quantized here, once per step, but no error exists. With "bf16" it does nothing.
        Or the mapping that `tcfp_jax.conversion.find_weights` returns: the recipe of
        each weight and the axes that it contracts, by path, also of kernels of more
        than two axes.
      key: JAX random key, for `remainder="stochastic"` only. It becomes part of the
        state.
      error_dtype: dtype of errors of "feedback": float32 (4 bytes per weight), bfloat16
        (2) or float8_e5m2 (1).
      mask: leaves that are weights: a tree of bools, or a function of the parameters
        that returns one. None means every leaf named `kernel` with two axes or more.
        Axes before the last two are a stack of layers with a scale each.

    Raises:
      ValueError: a stochastic remainder without a key, or a key that would not be used.
        An unknown `error_dtype`, or one although no error is kept. Parameters without
        any weight of the mask or the mapping, or stored ones. Both a mapping and
        `mask=`. `update` without params. `init` with parameters on a mesh that cuts a
        block of a weight.

    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = optax.chain(optax.sgd(0.1), error_feedback("tcfp12"))
    >>> float(layer_state(tx.init(params))["kernel"].dequantize()[0, 0])
    1.0
    """
    chosen: Recipe | Mapping[str, Weight] = (
        recipe if isinstance(recipe, Mapping) else named_recipe(recipe)
    )
    if isinstance(chosen, Mapping) and mask is not None:
        raise ValueError(
            "the mapping says which leaves are weights, and mask= is given too; drop"
            " one of them"
        )
    if isinstance(chosen, Mapping):
        recipes = [weight.recipe for weight in chosen.values()]
    else:
        recipes = [chosen]
    error_type = _checked(recipes, key, error_dtype)
    scaled = error_type == jnp.float8_e5m2
    key_data = key
    implementation = None
    if key is not None and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        # Raw data survives checkpoints and `jnp.where`.
        key_data = jax.random.key_data(key)
        implementation = str(jax.random.key_impl(key))

    def init(params: PyTree) -> ErrorFeedbackState:
        weights = _Weights(params, chosen, mask)
        key_of, following = _keys(key_data, implementation)
        made = []
        for i, w, recipe, contracts in weights.leaves:
            turned = recipe.copies == "both"
            if recipe.scaling.packed:
                turned = contracts == "first"
            name = "/".join(weights.names[i])
            check_blocks(name, w, recipe.scaling, turned=turned)
            step = WeightStep(recipe, error_type, contracts)
            made.append(step.first(w, key_of(i)))
        return weights.state(made, following, scaled=scaled)

    def update(
        updates: PyTree, state: ErrorFeedbackState, params: PyTree = None
    ) -> tuple[PyTree, ErrorFeedbackState]:
        if params is None:
            raise ValueError(
                "error_feedback quantizes params + updates; call tx.update(grads,"
                " opt_state, params)"
            )
        check_made(state, ErrorFeedbackState, "error_feedback")
        # The weights that the caller is about to have: layers of the next step read the
        # result.
        weights = _Weights(optax.apply_updates(params, updates), chosen, mask)
        key_of, following = _keys(state.key, implementation)
        kept = state.scaled_errors if scaled else state.errors
        if kept is None:
            raise ValueError(
                f"this state has no errors in {error_type.name}, which error_dtype"
                " names; update it with the error_dtype that made it, or begin with"
                " errors of zero: tx.init(params)"
            )
        errors = weights.treedef.flatten_up_to(kept)
        amax = weights.treedef.flatten_up_to(state.amax)
        made = []
        for i, w, recipe, contracts in weights.leaves:
            step = WeightStep(recipe, error_type, contracts)
            stored = find(state.weights, weights.names[i])
            before = step.reads(stored, errors[i], amax[i])
            made.append(step.next(w, key_of(i), before))
        return updates, weights.state(made, following, scaled=scaled)

    return optax.GradientTransformation(init, update)


def layer_state(opt_state: PyTree) -> dict[str, PyTree]:
    """Return the quantized weights in a state, as the `tcfp` collection of layers.

    Use this in the loss, with `error_feedback` and layers or converted Linen models;
    `tcfp_jax.linen.TrainState` and `tcfp_jax.nnx.Optimizer` do it for you. It finds
    every `error_feedback`, also under `chain`, `masked`, `partition` or `MultiSteps`.

    Returns:
      Nested dict by parameter name, `{}` if nothing is quantized. Use it as
      `model.apply({"params": params, "tcfp": layer_state(opt_state)}, x)`.

    Raises:
      ValueError: two `error_feedback` transformations hold the same weight.
    """
    collection: dict[str, PyTree] = {}
    for state in jax.tree.leaves(opt_state, is_leaf=_is_feedback):
        held = entries(state.weights) if _is_feedback(state) else {}
        for path, weight in held.items():
            names = path.split("/")
            if find(collection, names) is not None:
                raise ValueError(
                    f"two error_feedback transformations hold {path}; mask it out"
                    " of one of them"
                )
            put(collection, names, weight)
    return collection


def _is_feedback(node: object) -> bool:
    return isinstance(node, ErrorFeedbackState)


# The place of a weight among the leaves, its matrix, recipe and contracted axis
_Leaf: TypeAlias = tuple[int, Array, Recipe, Contracts]


class _Weights:
    """The leaves of a parameter tree that are weights, and the way back to trees.

    Attributes:
      names: the names along the path of every leaf.
      leaves: place, matrix, recipe and contracted axis of every leaf that is a weight.
    """

    def __init__(
        self, params: PyTree, recipe: Recipe | Mapping[str, Weight], mask: PyTree
    ) -> None:
        found, self.treedef = named_leaves(params)
        self.names = [names for names, _ in found]
        leaves = [leaf for _, leaf in found]
        self.leaves: list[_Leaf] = []
        if isinstance(recipe, Mapping):
            self.leaves = self._mapped(params, leaves, recipe)
        elif recipe.mode is not TCFPMode.BF16:
            chosen = self._masked(params, leaves, mask)
            for i, leaf in enumerate(leaves):
                if chosen[i]:
                    self.leaves.append((i, leaf, recipe, "first"))

    def _masked(self, params: PyTree, leaves: list[Array], mask: PyTree) -> list[bool]:
        if mask is None:
            pairs = zip(self.names, leaves, strict=True)
            chosen = [
                names[-1:] == ["kernel"] and jnp.ndim(leaf) >= 2
                for names, leaf in pairs
            ]
        else:
            tree = mask(params) if callable(mask) else mask
            chosen = list(map(bool, self.treedef.flatten_up_to(tree)))
        for keep, names, leaf in zip(chosen, self.names, leaves, strict=True):
            if keep and jnp.ndim(leaf) < 2:
                raise ValueError(
                    f"mask selects {'/'.join(names)} of shape {jnp.shape(leaf)}, but a"
                    " weight has two axes or more; unselect it"
                )
        if not any(chosen):
            _check_floats(params)
            raise ValueError(
                "found no weight: no leaf named 'kernel' has two axes; pass"
                " find_weights(model), or mask="
            )
        return chosen

    def _mapped(
        self, params: PyTree, leaves: list[Array], weights: Mapping[str, Weight]
    ) -> list[_Leaf]:
        paths = ["/".join(names) for names in self.names]
        # by `optax.masked` or `partition`
        hidden = any(map(_is_hidden, jax.tree.leaves(params, is_leaf=_is_hidden)))
        if weights and not set(weights) & set(paths) and not hidden:
            _check_floats(params)
            raise ValueError(
                f"none of the {len(weights)} weights is among the {len(paths)}"
                f" parameters: {min(weights)} is not,"
                f" {min(paths, default='no parameter at all')} is; pass the parameters"
                " of the model that find_weights saw. If this optimizer trains others"
                " (LoRA), leave error_feedback out: frozen weights are quantized on"
                " the fly, or once by"
                " layer_state(error_feedback(weights).init(params))"
            )
        found: list[_Leaf] = []
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            weight = weights.get(path)
            if weight is not None and weight.recipe.mode is not TCFPMode.BF16:
                contracts: Contracts = "last" if weight.layout.transposed else "first"
                found.append((i, weight.layout.matrix(leaf), weight.recipe, contracts))
        return found

    def state(
        self, made: list[Entry], key_data: Array | None, *, scaled: bool
    ) -> ErrorFeedbackState:
        """Return the state with these entries, one for each weight."""
        stored: dict[str, PyTree] = {}
        errors: list[object] = [optax.MaskedNode()] * len(self.names)
        amax = list(errors)
        # Weights go by name: `nnx.Optimizer` would take a Stored in a parameter's box
        # for the parameter. Errors go into the parameters' own tree, whose shardings
        # they share.
        for (i, *_), entry in zip(self.leaves, made, strict=True):
            put(stored, self.names[i], entry.weight)
            if entry.error is not None:
                errors[i] = entry.error
            if entry.amax is not None:
                amax[i] = entry.amax
        kept = self.treedef.unflatten(errors)
        return ErrorFeedbackState(
            weights=stored,
            errors=None if scaled else kept,
            amax=self.treedef.unflatten(amax),
            key=key_data,
            scaled_errors=kept if scaled else None,
        )


def _check_floats(params: PyTree) -> None:
    """Raise a ValueError if parameters are stored weights."""
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        raise ValueError(
            "the parameters are stored weights, and error_feedback keeps quantized"
            " copies of float ones; train them with tcfp_jax.optim.adamw, or with"
            " tcfp_jax.optim.on_stored(tx)"
        )


def _is_hidden(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def _checked(
    recipes: Sequence[Recipe], key: Array | None, dtype: DTypeLike
) -> jnp.dtype:
    """Return the dtype of errors.

    It and the key must fit the remainders of the recipes.
    """
    stochastic = any(r.stochastic for r in recipes)
    found = {getattr(r.stored, "remainder", "none") for r in recipes}
    remainders = ", ".join(map(repr, sorted(found)))
    check_key(key)
    if stochastic and key is None:
        raise ValueError(
            'remainder="stochastic" needs error_feedback(recipe,'
            " key=jax.random.key(seed))"
        )
    if not stochastic and key is not None:
        raise ValueError(
            f"remainder={remainders} uses no random bits, but key= is given; drop"
            " the key"
        )
    resolved = jnp.dtype(dtype)
    if resolved.name not in _ERROR_DTYPES:
        raise ValueError(
            f"error_dtype={resolved.name} is not supported; use one of"
            f" {list(_ERROR_DTYPES)}"
        )
    if resolved.name != "float32" and recipes and not any(r.feedback for r in recipes):
        raise ValueError(
            f"error_dtype={resolved.name} with remainder={remainders}: no error is"
            ' kept; leave error_dtype, or use a recipe with remainder="feedback"'
        )
    return resolved


def _keys(
    key_data: _Key, implementation: str | None
) -> tuple[Callable[[int], _Key], _Key]:
    """Return (the key of each leaf's place in this step, the next step's raw key)."""
    if key_data is None:
        return lambda i: None, None
    # One half of the split is this step's key, the other the next step's. A leaf's bits
    # depend on its place alone.
    following, use = jax.random.split(
        jax.random.wrap_key_data(key_data, impl=implementation)
    )
    return lambda i: jax.random.fold_in(use, i), jax.random.key_data(following)
