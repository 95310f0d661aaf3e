"""Optax state that belongs to weights: their quantized form, what rounding left, delayed amax, the rounding key.

Layers read, the optimizer writes. `error_feedback` stands last in an `optax.chain`, sees the final update, and
quantizes the weights that the update will produce, once per step:

    target  = (params + updates) + error
    stored  = Q(target)                  two FP8 tensors and a scale per weight
    error   = target - dequantize(stored)

so that the mean of what layers multiply by converges to the weight like 1/t (textbook error feedback: Seide et al.
2014; Karimireddy et al. 2019). It never changes the updates. `layer_state` hands the stored weights to the layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.operands import Contracts, Fp4, Tensor
from tcfp_jax.paths import entries, find, path_names, put
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.delayed import next_amax
from tcfp_jax.weights.freshness import sample_of
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parts import check_blocks
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored

ERROR_DTYPES = ("float32", "bfloat16", "float8_e5m2")


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`.

    Attributes:
      weights: a `Stored` for every weight, in nested dicts by parameter name: the collection that layers read. Each
        has a sample of its parameter. A checkpoint from before there were samples does not fit a state that has them,
        and orbax says so; it is restored with `partial_restore=True` into a state whose `sample`s are None, which is
        read without a comparison and has samples after the next update.
      errors: what rounding left, in `error_dtype`, FP8 errors in units of the stored scale. The tree mirrors the
        parameters, with `optax.MaskedNode()` where nothing is kept.
      amax: float32 scalars, only with a delayed amax; mirrors the parameters, too.
      key: raw key data (uint32), only with stochastic rounding.
    """

    weights: dict[str, Any]
    errors: Any
    amax: Any
    key: jax.Array | None


def error_feedback(
    recipe: Recipe | str | Mapping[str, Weight],
    *,
    key: jax.Array | None = None,
    error_dtype: DTypeLike = "float32",
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """Keep the quantized weights of the layers, and what rounding left over, as optimizer state.

    Place it last in `optax.chain`: it reads the final update and passes it on unchanged. A transformation after it, or
    a wrapper that makes another update of its own, leaves the layers with weights that are not their parameters: the
    next product raises, or is NaN in a compiled program (`tcfp_jax.weights.freshness`).

    An optimizer that sees a part of the parameters (`optax.partition`, `optax.masked`, `nnx.Optimizer(wrt=...)`) holds
    the weights of that part; layers quantize the others on the fly. What is frozen stays stored by a place of its own:

        weights = find_weights(model)
        train = optax.chain(optax.adamw(3e-4), error_feedback(weights))
        frozen = optax.chain(optax.set_to_zero(), error_feedback(weights))
        tx = optax.partition({"train": train, "frozen": frozen}, labels)

    Args:
      recipe: how the layers multiply; the same recipe that they have. With `remainder="dropped"` the weights
        are still quantized here, once per step, but no error buffer exists. With "bf16" it does nothing.
        Or what `tcfp_jax.conversion.find_weights` found in a model: by path, each weight's recipe and which of its
        axes are contracted; kernels of more than two axes are then stored as the matrices that they are.
      key: JAX random key, for `remainder="stochastic"` only. It is part of the state from then on.
      error_dtype: of the error buffers: float32 (4 bytes a weight), bfloat16 (2) or float8_e5m2 (1). Only of recipes
        with `remainder="feedback"`, which have such.
      mask: which leaves are weights: a tree of bools or a function from params to one. None takes every
        leaf named `kernel` with two axes or more. Axes before the last two are a stack of layers with a scale each.

    Raises:
      ValueError: a stochastic residual without a key, or a key that nothing would use; an `error_dtype` not above, or
        another than float32 where no error is kept; parameters in which no leaf is a weight, or none of the mapping's;
        a mapping and `mask=`; `update` without params; `init` with parameters on a mesh that cuts a block of a weight.

    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = optax.chain(optax.sgd(0.1), error_feedback("tcfp12"))
    >>> float(layer_state(tx.init(params))["kernel"].dequantize()[0, 0])
    1.0
    """
    chosen: Recipe | Mapping[str, Weight] = recipe if isinstance(recipe, Mapping) else named_recipe(recipe)
    if isinstance(chosen, Mapping) and mask is not None:
        raise ValueError("the mapping says which leaves are weights, and mask= is given too; drop one of them")
    recipes = [weight.recipe for weight in chosen.values()] if isinstance(chosen, Mapping) else [chosen]
    error_type = _error_dtype(error_dtype, recipes)
    _check_key(recipes, key)
    key_data, implementation = (None, None) if key is None else _key_data(key)

    def init(params: Any) -> ErrorFeedbackState:
        weights = _Weights(params, chosen, mask)
        key_of, following = _keys(key_data, implementation)
        for i, w, r, axis in weights.leaves:
            turned = axis == "first" if isinstance(r.scaling, Fp4) else r.copies == "both"
            check_blocks("/".join(weights.names[i]), w, r.scaling, turned=turned)
        entries = [_first(_Step(r, error_type, axis), w, key_of(i)) for i, w, r, axis in weights.leaves]
        return weights.state(entries, following)

    def update(updates: Any, state: ErrorFeedbackState, params: Any | None = None) -> tuple[Any, ErrorFeedbackState]:
        if params is None:
            raise ValueError("error_feedback quantizes params + updates; call tx.update(grads, opt_state, params)")
        # The weights that the caller is about to have: layers of the next step read what is quantized here.
        weights = _Weights(optax.apply_updates(params, updates), chosen, mask)
        key_of, following = _keys(state.key, implementation)
        errors, amax = (weights.treedef.flatten_up_to(tree) for tree in (state.errors, state.amax))
        entries = []
        for i, w, r, axis in weights.leaves:
            step = _Step(r, error_type, axis)
            before = step.reads(find(state.weights, weights.names[i]), errors[i], amax[i])
            entries.append(_next(step, w, key_of(i), before))
        return updates, weights.state(entries, following)

    return optax.GradientTransformation(init, update)


def layer_state(opt_state: Any) -> dict[str, Any]:
    """The quantized weights in an optimizer's state, as the `tcfp` collection that layers read.

    Finds every `error_feedback` in it, under `chain`, `masked`, `partition`, `MultiSteps` and the like.

    Returns:
      Nested dict by parameter name; `{}` where nothing is quantized. Use it as
      `model.apply({"params": params, "tcfp": layer_state(opt_state)}, x)`.

    Raises:
      ValueError: two `error_feedback` transformations hold the same weight.
    """
    collection: dict[str, Any] = {}
    for state in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, ErrorFeedbackState)):
        if isinstance(state, ErrorFeedbackState):
            for path, weight in entries(state.weights).items():
                names = path.split("/")
                if find(collection, names) is not None:
                    raise ValueError(f"two error_feedback transformations hold {path}; mask it out of one of them")
                put(collection, names, weight)
    return collection


class _Entry(NamedTuple):
    weight: Stored
    error: jax.Array | None
    amax: jax.Array | None


class _Weights:
    """The leaves of a parameter tree that are weights, by position, as matrices; and the way back to trees."""

    def __init__(self, params: Any, recipe: Recipe | Mapping[str, Weight], mask: Any) -> None:
        self.treedef: Any
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(params)
        self.names = [path_names(path) for path, _ in paths]
        self.leaves: list[tuple[int, jax.Array, Recipe, Contracts]] = []
        if isinstance(recipe, Mapping):
            self.leaves = _mapped(params, paths, recipe)
        elif recipe.mode is not TCFPMode.BF16:
            chosen = _chosen(params, paths, self.treedef, mask)
            self.leaves = [(i, leaf, recipe, "first") for i, (_, leaf) in enumerate(paths) if chosen[i]]

    def state(self, entries: list[_Entry], key_data: jax.Array | None) -> ErrorFeedbackState:
        stored: dict[str, Any] = {}
        errors, amax = ([optax.MaskedNode()] * len(self.names) for _ in range(2))
        # Weights by name, because a Stored in the place of a parameter would be taken for one (`nnx.Optimizer` splits
        # what is in a parameter's box); errors in the parameters' own tree, whose shardings they share.
        for (i, *_), entry in zip(self.leaves, entries, strict=True):
            put(stored, self.names[i], entry.weight)
            for column, value in ((errors, entry.error), (amax, entry.amax)):
                if value is not None:
                    column[i] = value
        return ErrorFeedbackState(stored, self.treedef.unflatten(errors), self.treedef.unflatten(amax), key_data)


class _Step(NamedTuple):
    """How one weight is quantized in one step; hashable, so that weights of one shape share a traced function."""

    recipe: Recipe
    error_dtype: Any
    contracts: Contracts = "first"

    def first(self, w: jax.Array, key: jax.Array | None) -> _Entry:
        error = jnp.zeros(w.shape, self._handed_dtype()) if self.recipe.feedback else None
        amax = _stacked_amax(w) if self.recipe.amax == "delayed" else None
        return self._quantize(w, key, error, amax, amax)

    def next(self, w: jax.Array, key: jax.Array | None, stored: Any, kept: Any, carried: Any) -> _Entry:
        error = self._read_error(kept, stored) if self.recipe.feedback else None
        if self.recipe.amax == "fresh":
            # An error is at most half an ulp of lo, and what it lifts beyond the range of hi is caught by lo: max |w|
            # will do, and finding it can be part of computing w, where max |w + error| reads the errors once more.
            known = error is not None and self.recipe.mode is TCFPMode.TCFP12 and self.recipe.scaling == Tensor()
            amax = _stacked_amax(w) if known else None
            return self._quantize(w, key, error, amax, None)
        target = w.astype(jnp.float32) if error is None else w.astype(jnp.float32) + error.astype(jnp.float32)
        return self._quantize(w, key, error, carried, next_amax(carried, _stacked_amax(target)))

    def reads(self, stored: Any, kept: Any, carried: Any) -> tuple[Any, Any, Any]:
        """Of what an earlier step left, what `next` reads; None for the rest, which no program then takes along."""
        feedback = self.recipe.feedback
        scaled = feedback and self.error_dtype == jnp.float8_e5m2
        delayed = self.recipe.amax == "delayed"
        return stored if scaled else None, kept if feedback else None, carried if delayed else None

    def _quantize(self, w: Any, key: jax.Array | None, error: Any, amax: Any, amax_after: Any) -> _Entry:
        def one(w: jax.Array, error: Any, amax: Any, key: Any) -> tuple[Stored, Any]:
            return quantize_weight(
                w, self.recipe, error=error, key=key, amax=amax, copies=self.recipe.copies, contracts=self.contracts
            )

        stack = w.shape[:-2]
        if key is not None and stack:
            key = jax.random.split(key, stack)
        # A stack of layers (nn.scan) has a scale for each: an outlier in one layer costs the others nothing.
        for _ in stack:
            one = jax.vmap(one)
        with jax.named_scope("quantize_w"):
            weight, left = one(w, error, amax, key)
        weight = dataclasses.replace(weight, sample=sample_of(w))
        return _Entry(weight, None if left is None else self._write_error(left, weight), amax_after)

    def _handed_dtype(self) -> Any:
        """The dtype in which quantizers take and return errors: the kept one, but for FP8, which needs a scale."""
        return jnp.float32 if self.error_dtype == jnp.float8_e5m2 else self.error_dtype

    def _write_error(self, error: jax.Array, stored: Stored) -> jax.Array:
        if self.recipe.amax == "delayed":
            error = error.astype(jnp.float32)
            # What a stale scale clipped is not a rounding error: the next scale fits again, and feeding it back would
            # overshoot by as much. NaN compares false and stays.
            most = numerics.largest_rounding_error(stored.dtype, halves=2 if stored.has_residual else 1)
            limit = most * stored.scale_of_values()
            error = jnp.where(jnp.abs(error) > limit, jnp.zeros_like(error), error)
        if self.error_dtype == jnp.float8_e5m2:
            return numerics.saturating_cast(error / _units(stored), self.error_dtype)
        return error.astype(self.error_dtype)

    def _read_error(self, kept: jax.Array, stored: Stored) -> jax.Array:
        error = kept.astype(self._handed_dtype())
        return error * _units(stored) if self.error_dtype == jnp.float8_e5m2 else error


def _units(stored: Stored) -> jax.Array:
    """The scale of each value of an error; of packed codes none is zero."""
    scale = stored.scale_of_values()
    if not isinstance(stored.scaling, Fp4):
        return scale
    return jnp.where(scale == 0, jnp.float32(1), scale)


# One traced and lowered function for all weights of a shape, dtype, sharding and recipe: a model has hundreds of
# weights and a few shapes. XLA inlines the calls, so the bits are those of code written out.
@functools.partial(jax.jit, static_argnums=0)
def _first(step: _Step, w: jax.Array, key: jax.Array | None) -> _Entry:
    return step.first(w, key)


@functools.partial(jax.jit, static_argnums=0)
def _next(step: _Step, w: jax.Array, key: jax.Array | None, before: tuple[Any, Any, Any]) -> _Entry:
    return step.next(w, key, *before)


def _chosen(params: Any, paths: list[Any], treedef: Any, mask: Any) -> list[bool]:
    if mask is None:
        chosen = [path_names(path)[-1:] == ["kernel"] and jnp.ndim(leaf) >= 2 for path, leaf in paths]
    else:
        chosen = [bool(keep) for keep in treedef.flatten_up_to(mask(params) if callable(mask) else mask)]
    for keep, (path, leaf) in zip(chosen, paths, strict=True):
        if keep and jnp.ndim(leaf) < 2:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"mask selects {name} of shape {jnp.shape(leaf)}; a weight has two axes or more, unselect it"
            )
    if not any(chosen):
        raise ValueError("error_feedback found no weight: no leaf named 'kernel' with two axes; pass mask=")
    return chosen


def _masked(params: Any) -> bool:
    """Whether `optax.masked` or `partition` hides some of the parameters."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    return any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked)))


def _mapped(params: Any, paths: list[Any], weights: Mapping[str, Weight]) -> list[Any]:
    """What `_Weights.leaves` holds of every leaf that the mapping names; weights that are not here are not held."""
    found = {"/".join(path_names(path)): (i, leaf) for i, (path, leaf) in enumerate(paths)}
    if weights and not set(weights) & set(found) and not _masked(params):
        raise ValueError(
            f"none of the {len(weights)} weights is among the {len(found)} parameters: {min(weights)} is not, "
            f"{min(found, default='no parameter at all')} is; pass the parameters of the model that find_weights saw. "
            "Where this optimizer trains others (LoRA), leave error_feedback out: frozen weights are quantized on the "
            "fly, or once by layer_state(error_feedback(weights).init(params))"
        )
    here = {path: weight for path, weight in weights.items() if path in found}
    kept = [(*found[path], weight) for path, weight in here.items() if weight.recipe.mode is not TCFPMode.BF16]
    axis: Any = lambda layout: "last" if layout.transposed else "first"
    found_here = [(i, weight.layout.matrix(leaf), weight.recipe, axis(weight.layout)) for i, leaf, weight in kept]
    return sorted(found_here, key=lambda entry: entry[0])


def _check_key(recipes: Sequence[Recipe], key: jax.Array | None) -> None:
    stochastic = any(r.stochastic for r in recipes)
    if stochastic and key is None:
        raise ValueError('remainder="stochastic" needs error_feedback(recipe, key=jax.random.key(seed))')
    if not stochastic and key is not None:
        raise ValueError(f"remainder={_remainders(recipes)} uses no random bits, but key= is given; drop the key")


def _remainders(recipes: Sequence[Recipe]) -> str:
    return ", ".join(map(repr, sorted({r.stored.remainder if r.stored else "none" for r in recipes})))


def _stacked_amax(w: jax.Array) -> jax.Array:
    return numerics.amax(w, axis=(-2, -1))


def _error_dtype(dtype: DTypeLike, recipes: Sequence[Recipe]) -> Any:
    resolved = jnp.dtype(dtype)
    if resolved.name not in ERROR_DTYPES:
        raise ValueError(f"error_dtype={resolved.name} is not supported; use one of {list(ERROR_DTYPES)}")
    if resolved.name != "float32" and recipes and not any(r.feedback for r in recipes):
        raise ValueError(
            f"error_dtype={resolved.name} with remainder={_remainders(recipes)}: no error is kept; leave error_dtype, "
            'or use a recipe with remainder="feedback"'
        )
    return resolved


def _key_data(key: jax.Array) -> tuple[jax.Array, str | None]:
    """Raw data and implementation of a new-style or old-style key: raw data survives checkpoints and `jnp.where`."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key), str(jax.random.key_impl(key))
    return key, None


def _keys(
    key_data: jax.Array | None, implementation: str | None
) -> tuple[Callable[[int], jax.Array | None], jax.Array | None]:
    """(the random key of leaf i in this step, raw data of the following step's key)."""
    if key_data is None:
        return lambda i: None, None
    # One half of the split is this step's, the other the next step's key; a leaf's bits depend on its place alone.
    following, use = jax.random.split(jax.random.wrap_key_data(key_data, impl=implementation))
    return lambda i: jax.random.fold_in(use, i), jax.random.key_data(following)
