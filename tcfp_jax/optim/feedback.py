"""Optax state that belongs to weights: their quantized form, the rounding errors,
delayed amax, the rounding key.

Layers read it, the optimizer writes it. `error_feedback` stands last in an
`optax.chain`, sees the final update, and quantizes the weights that the update will
produce, once per step:

    target  = (params + updates) + error
    stored  = Q(target)                  two FP8 tensors and a scale per weight
    error   = target - dequantize(stored)

The mean of the stored weights converges to the weight like 1/t (Seide et al. 2014;
Karimireddy et al. 2019). The updates never change. `layer_state` hands the stored
weights to the layers.
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
from tcfp_jax.formats.casting import check_key
from tcfp_jax.paths import PyTree, entries, find, named_leaves, put
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.placement import check_blocks
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.sampling import sample_of
from tcfp_jax.weights.stored import Stored

_AMAX_DECAY = 0.999
_ERROR_DTYPES = ("float32", "bfloat16", "float8_e5m2")
_Key = jax.Array | None


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`.

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

    weights: dict[str, Any]
    errors: PyTree
    amax: PyTree
    key: jax.Array | None
    scaled_errors: PyTree = None


def error_feedback(
    recipe: Recipe | str | Mapping[str, Weight],
    *,
    key: jax.Array | None = None,
    error_dtype: DTypeLike = "float32",
    mask: PyTree | Callable[[PyTree], PyTree] = None,
) -> optax.GradientTransformation:
    """Keep the quantized weights of the layers, and their rounding errors, as optimizer
    state.

    Place it last in `optax.chain`: it reads the final update and passes it on
    unchanged. A transformation after it, or a wrapper that makes another update of its
    own, leaves the layers with weights that are not their parameters: the next product
    raises, or is NaN in a compiled program (`tcfp_jax.weights.freshness`).

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
      error_dtype: dtype of errors of "feedback": float32 (4 bytes a weight), bfloat16
        (2) or float8_e5m2 (1).
      mask: leaves that are weights: a tree of bools, or a function of the parameters
        that returns one. None means every leaf named `kernel` with two axes or more.
        Axes before the last two are a stack of layers with a scale each.

    Raises:
      ValueError: a stochastic remainder without a key, or a key that would not be used;
        an unknown `error_dtype`, or one although no error is kept; parameters without
        any weight of the mask or the mapping; a mapping and `mask=`; `update` without
        params; `init` with parameters on a mesh that cuts a block of a weight.

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
    recipes = (
        [weight.recipe for weight in chosen.values()]
        if isinstance(chosen, Mapping)
        else [chosen]
    )
    error_type = _checked(recipes, key, error_dtype)
    key_data, implementation = key, None
    if key is not None and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        # Raw data survives checkpoints and `jnp.where`.
        key_data, implementation = (
            jax.random.key_data(key),
            str(jax.random.key_impl(key)),
        )

    def init(params: PyTree) -> ErrorFeedbackState:
        weights = _Weights(params, chosen, mask)
        key_of, following = _keys(key_data, implementation)
        made = []
        for i, w, r, contracts in weights.leaves:
            turned = (
                contracts == "first"
                if isinstance(r.scaling, Fp4)
                else r.copies == "both"
            )
            check_blocks("/".join(weights.names[i]), w, r.scaling, turned=turned)
            made.append(_Step(r, error_type, contracts).first(w, key_of(i)))
        return weights.state(made, following, scaled=error_type == jnp.float8_e5m2)

    def update(
        updates: PyTree, state: ErrorFeedbackState, params: PyTree = None
    ) -> tuple[PyTree, ErrorFeedbackState]:
        if params is None:
            raise ValueError(
                "error_feedback quantizes params + updates; call tx.update(grads,"
                " opt_state, params)"
            )
        # The weights that the caller is about to have: layers of the next step read the
        # result.
        weights = _Weights(optax.apply_updates(params, updates), chosen, mask)
        key_of, following = _keys(state.key, implementation)
        kept = state.scaled_errors if error_type == jnp.float8_e5m2 else state.errors
        if kept is None:
            raise ValueError(
                f"this state has no errors in {error_type.name}, which error_dtype"
                " names; update it with the error_dtype that made it, or begin with"
                " errors of zero: tx.init(params)"
            )
        errors, amax = (
            weights.treedef.flatten_up_to(tree) for tree in (kept, state.amax)
        )
        made = []
        for i, w, r, contracts in weights.leaves:
            step = _Step(r, error_type, contracts)
            before = step.reads(
                find(state.weights, weights.names[i]), errors[i], amax[i]
            )
            made.append(step.next(w, key_of(i), before))
        return updates, weights.state(
            made, following, scaled=error_type == jnp.float8_e5m2
        )

    return optax.GradientTransformation(init, update)


def layer_state(opt_state: PyTree) -> dict[str, Any]:
    """Return the quantized weights in an optimizer's state, as the `tcfp` collection
    that layers read.

    It finds every `error_feedback`, also under `chain`, `masked`, `partition` or
    `MultiSteps`.

    Returns:
      Nested dict by parameter name, `{}` if nothing is quantized. Use it as
      `model.apply({"params": params, "tcfp": layer_state(opt_state)}, x)`.

    Raises:
      ValueError: two `error_feedback` transformations hold the same weight.
    """
    collection: dict[str, Any] = {}
    for state in jax.tree.leaves(
        opt_state, is_leaf=lambda node: isinstance(node, ErrorFeedbackState)
    ):
        if isinstance(state, ErrorFeedbackState):
            for path, weight in entries(state.weights).items():
                names = path.split("/")
                if find(collection, names) is not None:
                    raise ValueError(
                        f"two error_feedback transformations hold {path}; mask it out"
                        " of one of them"
                    )
                put(collection, names, weight)
    return collection


class _Entry(NamedTuple):
    weight: Stored
    error: jax.Array | None
    amax: jax.Array | None


class _Weights:
    """The leaves of a parameter tree that are weights, as matrices, and the way back to
    trees.

    Attributes:
      names: the names along the path of every leaf.
      leaves: place, matrix, recipe and contracted axis of every leaf that is a weight.
    """

    def __init__(
        self, params: PyTree, recipe: Recipe | Mapping[str, Weight], mask: PyTree
    ) -> None:
        found, self.treedef = named_leaves(params)
        self.names, leaves = [names for names, _ in found], [leaf for _, leaf in found]
        self.leaves: list[tuple[int, jax.Array, Recipe, Contracts]] = []
        if isinstance(recipe, Mapping):
            self.leaves = self._mapped(params, leaves, recipe)
        elif recipe.mode is not TCFPMode.BF16:
            chosen = self._masked(params, leaves, mask)
            self.leaves = [
                (i, leaf, recipe, "first") for i, leaf in enumerate(leaves) if chosen[i]
            ]

    def _masked(
        self, params: PyTree, leaves: list[jax.Array], mask: PyTree
    ) -> list[bool]:
        if mask is None:
            pairs = zip(self.names, leaves, strict=True)
            chosen = [
                names[-1:] == ["kernel"] and jnp.ndim(leaf) >= 2
                for names, leaf in pairs
            ]
        else:
            chosen = [
                bool(keep)
                for keep in self.treedef.flatten_up_to(
                    mask(params) if callable(mask) else mask
                )
            ]
        for keep, names, leaf in zip(chosen, self.names, leaves, strict=True):
            if keep and jnp.ndim(leaf) < 2:
                raise ValueError(
                    f"mask selects {'/'.join(names)} of shape {jnp.shape(leaf)}, but a"
                    " weight has two axes or more; unselect it"
                )
        if not any(chosen):
            raise ValueError(
                "found no weight: no leaf named 'kernel' has two axes; pass"
                " find_weights(model), or mask="
            )
        return chosen

    def _mapped(
        self, params: PyTree, leaves: list[jax.Array], weights: Mapping[str, Weight]
    ) -> list[tuple[int, jax.Array, Recipe, Contracts]]:
        paths = ["/".join(names) for names in self.names]
        # by `optax.masked` or `partition`
        is_hidden = lambda node: isinstance(node, optax.MaskedNode)
        hidden = any(map(is_hidden, jax.tree.leaves(params, is_leaf=is_hidden)))
        if weights and not set(weights) & set(paths) and not hidden:
            raise ValueError(
                f"none of the {len(weights)} weights is among the {len(paths)}"
                f" parameters: {min(weights)} is not,"
                f" {min(paths, default='no parameter at all')} is; pass the parameters"
                " of the model that find_weights saw. If this optimizer trains others"
                " (LoRA), leave error_feedback out: frozen weights are quantized on"
                " the fly, or once by"
                " layer_state(error_feedback(weights).init(params))"
            )
        found: list[tuple[int, jax.Array, Recipe, Contracts]] = []
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            weight = weights.get(path)
            if weight is not None and weight.recipe.mode is not TCFPMode.BF16:
                contracts: Contracts = "last" if weight.layout.transposed else "first"
                found.append((i, weight.layout.matrix(leaf), weight.recipe, contracts))
        return found

    def state(
        self, made: list[_Entry], key_data: jax.Array | None, *, scaled: bool
    ) -> ErrorFeedbackState:
        """Return the state with these entries, one for each weight."""
        stored: dict[str, Any] = {}
        errors, amax = ([optax.MaskedNode()] * len(self.names) for _ in range(2))
        # Weights go by name: `nnx.Optimizer` would take a Stored in a parameter's box
        # for the parameter. Errors go into the parameters' own tree, whose shardings
        # they share.
        for (i, *_), entry in zip(self.leaves, made, strict=True):
            put(stored, self.names[i], entry.weight)
            for column, value in ((errors, entry.error), (amax, entry.amax)):
                if value is not None:
                    column[i] = value
        kept = self.treedef.unflatten(errors)
        after = (self.treedef.unflatten(amax), key_data)
        return ErrorFeedbackState(
            stored, None if scaled else kept, *after, kept if scaled else None
        )


class _Step(NamedTuple):
    """How one weight is quantized in one step.

    A model has hundreds of weights and a few shapes: weights of one shape, dtype,
    sharding and recipe share a traced and lowered function. XLA inlines the calls, so
    the bits do not change.
    """

    recipe: Recipe
    error_dtype: jnp.dtype
    contracts: Contracts = "first"

    @functools.partial(jax.jit, static_argnums=0)
    def first(self, w: jax.Array, key: jax.Array | None) -> _Entry:
        error = (
            jnp.zeros_like(w, self._handed_dtype()) if self.recipe.feedback else None
        )
        amax = (
            numerics.amax(w, axis=(-2, -1)) if self.recipe.amax == "delayed" else None
        )
        return self._quantize(w, key, error, amax, amax)

    @functools.partial(jax.jit, static_argnums=0)
    def next(
        self, w: jax.Array, key: jax.Array | None, before: tuple[Any, Any, Any]
    ) -> _Entry:
        stored, kept, carried = before
        error = kept.astype(self._handed_dtype()) if self.recipe.feedback else None
        if error is not None and self.error_dtype == jnp.float8_e5m2:
            error = error * _units(stored)
        if self.recipe.amax == "fresh":
            # max |w| serves instead of max |w + error|: an error is at most half an ulp
            # of lo, and lo catches the part that exceeds the range of hi. XLA fuses max
            # |w| into the computation of w; the other reads errors again.
            known = (
                error is not None
                and self.recipe.mode is TCFPMode.TCFP12
                and self.recipe.scaling == Tensor()
            )
            amax = numerics.amax(w, axis=(-2, -1)) if known else None
            return self._quantize(w, key, error, amax, None)
        target = (
            w.astype(jnp.float32)
            if error is None
            else w.astype(jnp.float32) + error.astype(jnp.float32)
        )
        return self._quantize(
            w,
            key,
            error,
            carried,
            _next_amax(carried, numerics.amax(target, axis=(-2, -1))),
        )

    def reads(self, stored: Any, kept: Any, carried: Any) -> tuple[Any, Any, Any]:
        """Return the state that `next` reads, with None for the rest, which the program
        then does not take along.
        """
        feedback = self.recipe.feedback
        scaled = feedback and self.error_dtype == jnp.float8_e5m2
        delayed = self.recipe.amax == "delayed"
        return (
            stored if scaled else None,
            kept if feedback else None,
            carried if delayed else None,
        )

    def _quantize(
        self,
        w: jax.Array,
        key: jax.Array | None,
        error: jax.Array | None,
        amax: jax.Array | None,
        amax_after: jax.Array | None,
    ) -> _Entry:
        how: Any = dict(copies=self.recipe.copies, contracts=self.contracts)
        one: Any = lambda w, error, amax, key: quantize_weight(
            w, self.recipe, error=error, key=key, amax=amax, **how
        )
        stack = w.shape[:-2]
        if key is not None and stack:
            key = jax.random.split(key, stack)
        # Each layer of a stack (nn.scan) has its own scale: an outlier in one layer
        # costs the others nothing.
        for _ in stack:
            one = jax.vmap(one)
        with jax.named_scope("quantize_w"):
            weight, left = one(w, error, amax, key)
        weight = dataclasses.replace(weight, sample=sample_of(w))
        return _Entry(
            weight,
            None if left is None else self._write_error(left, weight),
            amax_after,
        )

    def _handed_dtype(self) -> DTypeLike:
        """Return the dtype in which quantizers take and return errors; FP8 needs a
        scale, so it is float32 there.
        """
        return jnp.float32 if self.error_dtype == jnp.float8_e5m2 else self.error_dtype

    def _write_error(self, error: jax.Array, stored: Stored) -> jax.Array:
        if self.recipe.amax == "delayed":
            error = error.astype(jnp.float32)
            # A value that a stale scale clipped leaves more than a rounding error. The
            # next scale fits again, and feeding the excess back would overshoot by as
            # much. NaN compares false and stays.
            most = numerics.largest_rounding_error(
                stored.dtype, halves=2 if stored.has_residual else 1
            )
            limit = most * stored.scale_of_values()
            error = jnp.where(jnp.abs(error) > limit, jnp.zeros_like(error), error)
        if self.error_dtype == jnp.float8_e5m2:
            return numerics.saturating_cast(error / _units(stored), self.error_dtype)
        return error.astype(self.error_dtype)


def _units(stored: Stored) -> jax.Array:
    """Return the scale of each value of an error, which is never zero."""
    scale = stored.scale_of_values()
    return (
        jnp.where(scale == 0, jnp.float32(1), scale)
        if isinstance(stored.scaling, Fp4)
        else scale
    )


def _next_amax(carried: jax.Array, seen: jax.Array) -> jax.Array:
    """Return the delayed amax of the next step (PDDS): it rises at once and falls
    slowly; NaN and inf stay visible.

    Quantization by the amax of earlier steps needs one pass over W. It is safe, because
    `W_lo` reaches twice as far as `W_hi`: a weight may double between two steps without
    loss. A plain moving average takes hundreds of steps to follow a growing weight, and
    clips all the while.
    """
    return jnp.maximum(seen, _AMAX_DECAY * carried + (1 - _AMAX_DECAY) * seen)


def _checked(
    recipes: Sequence[Recipe], key: jax.Array | None, dtype: DTypeLike
) -> jnp.dtype:
    """Return the dtype of errors; it and the key must fit the remainders of the
    recipes.
    """
    stochastic = any(r.stochastic for r in recipes)
    remainders = ", ".join(
        map(repr, sorted({r.stored.remainder if r.stored else "none" for r in recipes}))
    )
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
    """Return a function from a leaf's place to its random key in this step, and the raw
    data of the next step's key.
    """
    if key_data is None:
        return lambda i: None, None
    # One half of the split is this step's key, the other the next step's. A leaf's bits
    # depend on its place alone.
    following, use = jax.random.split(
        jax.random.wrap_key_data(key_data, impl=implementation)
    )
    return lambda i: jax.random.fold_in(use, i), jax.random.key_data(following)
