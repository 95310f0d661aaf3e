"""Parameters as `W_hi + W_lo` alone: made, updated by any optax transformation, and given back as floats.

    params = store(params, recipe, key=key)                  kernels become stored weights
    tx = on_stored(optax.lion(1e-4))                         or tcfp_jax.optim.adamw, which writes them itself
    loss, grads = value_and_grad(loss_fn)(params, batch)     float gradients, see `tcfp_jax.optim.gradients`
    updates, opt_state = tx.update(grads, opt_state, params)
    params = apply_updates(params, updates)

The tree of parameters holds the stored weights themselves, so that jit, donation, shardings and checkpoints work as on
any tree. Two bytes a weight are all that outlives a step; what an update is smaller than is rounded stochastically, so
that the mean of the weight follows it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.scaling import Block
from tcfp_jax.optim.creation import Program
from tcfp_jax.paths import path_names
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parts import check_blocks
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import (
    Remainder,
    Rewritten,
    is_stored,
    kernel_of,
    kernel_shape,
    rewrite,
    train,
    training_of,
)  # fmt: skip

_MATRIX = Layout((0,), (1,))


def store(
    params: Any,
    recipe: Recipe | str | Mapping[str, Weight],
    *,
    key: jax.Array | None = None,
    remainder: Remainder = "stochastic",
    gradient_dtype: DTypeLike | None = None,
) -> Any:
    """The tree with its kernels stored as `W_hi + W_lo`, two bytes a weight, of which no float copy is left.

    Norms, biases, embeddings and whatever else is no kernel stay what they are. Of a function that makes the parameters
    the kernels are made one after another, so that in a `jit` no more than one of them is ever float (of parameters
    that are there already, XLA makes those of equal shapes in one kernel):

        params = jax.jit(lambda key: store(lambda: model.init(key, x)["params"], recipe, key=key))(key)

    Args:
      params: parameters, also in Flax's boxes, or an `nnx.State` of them; or a function without arguments that returns
        such, as random keys and arrays around it say.
      recipe: how layers multiply, a recipe with a residual such as "tcfp12_single": every leaf named `kernel` with two
        axes or more is stored, axes before the last two as a stack of layers with a scale each. Or what
        `tcfp_jax.conversion.find_weights` found in a model: those weights, but for tables whose rows are looked up.
      key: JAX random key of stochastic rounding; the weights hold its seeds from then on.
      remainder: what becomes of what rounding leaves: "stochastic", each weight goes to one of its two neighbours so
        that the mean is right; "feedback", a third FP8 tensor keeps it for the next step, three bytes a weight and no
        random bits, but E3M4 rounds it in turn, so that updates below a 64th of a step of the grid are lost in part
        and much smaller ones wholly; "dropped", updates below half a step of the grid are lost.
      gradient_dtype: of the gradients of stored weights, floats of 16 bits or more; None for the parameters' own.

    Raises:
      TypeError: a kernel or its gradient would not be real floats, or the gradient of fewer bits than 16.
      ValueError: a recipe without a residual; no kernel among the parameters; parameters that are stored already; a key
        that is missing, or that nothing would use; kernels on a mesh that cuts a block of a scale.

    >>> stored = store({"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}, "tcfp12_single", key=jax.random.key(0))
    >>> stored["kernel"].nbytes, dequantize(stored)["kernel"].dtype
    (36, dtype('float32'))
    """
    makes = callable(params) and jax.tree_util.all_leaves([params])
    program = Program(params) if makes else None
    found = params if program is None else program.shapes
    paths, treedef = jax.tree_util.tree_flatten_with_path(found, is_leaf=is_stored)
    if any(is_stored(leaf) for _, leaf in paths):
        raise ValueError("parameters are stored already; store(dequantize(params), ...) stores them anew")
    chosen = _chosen(paths, recipe)
    if not chosen:
        raise ValueError(_nothing_to_store(sorted("/".join(path_names(path)) for path, _ in paths), recipe))
    leaves: list[Any] = []
    for place, (path, leaf) in enumerate(paths):
        made = leaf if program is None else program.leaf(place, after=leaves[-1:])
        if place in chosen:
            own = None if key is None else jax.random.fold_in(key, place)
            _check_parts("/".join(path_names(path)), made, chosen[place])
            made = train(made, chosen[place], key=own, remainder=remainder, gradient_dtype=gradient_dtype)
        leaves.append(made)
    return jax.tree.unflatten(treedef, leaves)


def dequantize(params: Any) -> Any:
    """The tree with float parameters in the place of stored ones, as Flax made them: for export, and for optax.

    In a jitted program only what is read of them is computed.

    Raises:
      TypeError: a stored weight that `store` did not make, which does not know the shape of its kernel.

    >>> stored = store({"kernel": jnp.full((2, 2), 0.5)}, "tcfp12_single", key=jax.random.key(0))
    >>> dequantize(stored)["kernel"].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def floats(leaf: Any) -> Any:
        if not is_stored(leaf):
            return leaf
        if leaf.training is None:
            raise TypeError(
                f"a {leaf.describe()} was not made by tcfp_jax.store: it has no optimizer and does not know the shape "
                "of its kernel; take its float matrix [..., k, n] with weight.dequantize(), or train adapters beside "
                "it (LoRA, see docs/fp4.md)"
            )
        return kernel_of(leaf)

    return jax.tree.map(floats, params, is_leaf=is_stored)


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates` for trees with stored weights: `W + update`, rounded into `W_hi + W_lo`.

    An update that is zero everywhere changes nothing of a weight, not even how it would be rounded. A NaN or inf makes
    the weight NaN; `on_stored` and `tcfp_jax.optim.adamw` leave such steps out.

    Args:
      params: the parameters.
      updates: of the same tree, with a float array for each stored weight, or what `tcfp_jax.optim.adamw` returned.

    Raises:
      ValueError: the update of a stored weight has another shape, or the trees differ.

    >>> params = store({"kernel": jnp.full((2, 2), 0.5)}, "tcfp12_single", key=jax.random.key(0))
    >>> dequantize(apply_updates(params, {"kernel": jnp.full((2, 2), 0.25)}))["kernel"].tolist()
    [[0.75, 0.75], [0.75, 0.75]]
    """
    empty = lambda node: node is None or is_stored(node)
    treedef: Any
    paths, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=empty)
    pairs = zip(paths, treedef.flatten_up_to(updates), strict=True)
    return treedef.unflatten([_updated("/".join(path_names(path)), leaf, update) for (path, leaf), update in pairs])


class OnStoredState(NamedTuple):
    """State of `on_stored`.

    Attributes:
      inner: that of the transformation.
      skipped: how many steps were left out because of a NaN or inf in a gradient, int32.
    """

    inner: Any
    skipped: jax.Array


def on_stored(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Any optax transformation, for parameters that are stored: it sees their floats and makes float updates.

    Its states are its own, in float32 for the most part: eight bytes a weight of AdamW's, beside the two of the weight
    (`tcfp_jax.optim.adamw` and `low_precision_moments` have smaller ones). One that keeps a copy of the parameters
    keeps a float copy. Call `init` in a `jit`, so that the floats that it is shown are not made.

    A step with a NaN or inf in any gradient changes no state, has updates of zero, and is counted; it is never accepted
    after some number of them.

    Raises:
      ValueError: `update` without params.

    >>> params = store({"kernel": jnp.full((2, 2), 0.5)}, "tcfp12_single", key=jax.random.key(0))
    >>> tx = on_stored(optax.sgd(0.25))
    >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> dequantize(apply_updates(params, updates))["kernel"].tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> OnStoredState:
        return OnStoredState(inner.init(dequantize(params)), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: OnStoredState, params: Any | None = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("on_stored shows the parameters to the optimizer; call tx.update(grads, state, params)")
        floats = dequantize(params)
        step = lambda: inner.update(updates, state.inner, floats, **extra)
        shapes, after_step = jax.eval_shape(step)
        # A first step may widen a state, as float32 gradients do the moments that optax makes of bfloat16 parameters.
        same = jax.tree.map(lambda old, new: jnp.asarray(old, new.dtype), state.inner, after_step)
        nothing = lambda: (jax.tree.map(jnp.zeros_like, shapes), same)
        finite = all_finite(updates)
        made, after = lax.cond(finite, step, nothing)
        return made, OnStoredState(after, state.skipped + jnp.where(finite, 0, 1))

    return optax.GradientTransformationExtraArgs(init, update)


def all_finite(tree: Any) -> jax.Array:
    """Whether no array of a tree has a NaN or inf.

    >>> bool(all_finite({"a": jnp.ones(2)})), bool(all_finite({"a": jnp.array([1.0, jnp.inf])}))
    (True, False)
    """
    found = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(found)) if found else jnp.bool_(True)


def _chosen(paths: list[Any], recipe: Recipe | str | Mapping[str, Weight]) -> dict[int, Weight]:
    """The places of leaves that are stored, and how."""
    chosen: dict[int, Weight] = {}
    mapping = recipe if isinstance(recipe, Mapping) else None
    plain = None if isinstance(recipe, Mapping) else Weight(named_recipe(recipe), _MATRIX)
    for place, (path, leaf) in enumerate(paths):
        names = path_names(path)
        if plain is not None:
            if names[-1:] == ["kernel"] and jnp.ndim(leaf) >= 2:
                chosen[place] = plain
        elif mapping is not None:
            weight = mapping.get("/".join(names))
            if weight is not None and weight.float_reads == "none" and weight.recipe.mode is not TCFPMode.BF16:
                chosen[place] = weight
    return chosen


def _nothing_to_store(names: list[str], recipe: Recipe | str | Mapping[str, Weight]) -> str:
    """What to say where no parameter of these names is stored."""
    if not isinstance(recipe, Mapping):
        return (
            f"no weight to store among {names[:4]}: no leaf named 'kernel' with two axes; pass find_weights(model, "
            "*inputs) of the model that these are the parameters of"
        )
    if not recipe:
        return (
            'the weights given are none: the model was converted by a recipe that stores none, such as "bf16" or one '
            'of FP4 training, or not at all; convert it by recipe("tcfp12_single")'
        )
    named = [name for name in names if name in recipe]
    if not named:
        return (
            f"no weight to store among {names[:4]}: the weights given are {sorted(recipe)[:4]}; pass the parameters of "
            "the model that find_weights was asked about"
        )
    return (
        f"no weight to store: {named[0]} is named, but code other than converted products reads its floats (rows that "
        "are looked up, a norm of the weight), so it stays float; keep float parameters and error_feedback"
    )


def _check_parts(path: str, kernel: jax.Array, weight: Weight) -> None:
    """Raise where it is known that a mesh cuts blocks of the matrix that a kernel is."""
    if isinstance(weight.recipe.scaling, Block):
        matrix = weight.layout.stacked(kernel.ndim).matrix(kernel)
        check_blocks(path, matrix, weight.recipe.scaling, turned=weight.recipe.copies == "both")


def _updated(path: str, leaf: Any, update: Any) -> Any:
    if not is_stored(leaf):
        return optax.apply_updates(leaf, update)
    if isinstance(update, Rewritten):
        return update.onto(leaf)
    if update is None:
        return leaf
    _check_update(path, leaf, update)
    layout = training_of(leaf).weight.layout.stacked(update.ndim)
    change = layout.matrix(update).astype(jnp.float32)
    return lax.cond(jnp.any(change != 0), lambda: rewrite(leaf, leaf.dequantize() + change), lambda: leaf)


def _check_update(path: str, leaf: Stored, update: Any) -> None:
    if isinstance(update, Stored):
        raise ValueError(
            f"the update of {path} is a stored weight, which optimizers do not return; take gradients with "
            "tcfp_jax.value_and_grad, and give tcfp_jax.optim.on_stored(tx) in the place of tx"
        )
    if tuple(update.shape) != kernel_shape(leaf):
        raise ValueError(
            f"the update of {path} is {list(update.shape)}, but the parameter is {list(kernel_shape(leaf))}; pass the "
            "updates of these very parameters"
        )
