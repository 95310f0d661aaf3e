"""Parameters that are stored as `W_hi + W_lo`: make them, train them, and take them
back to floats.

    # Two bytes per weight, no float copy.
    params = store(params, "tcfp12_single", key=key)
    # Gradients are floats of the kernels' shapes.
    loss, grads = value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)  # tx: optim.adamw
    # Rounded into W_hi and W_lo.
    params = apply_updates(params, updates)

Left out:

* Weights in four bits are too coarse to be parameters. Freeze them and train adapters,
  or keep float parameters with recipe("nvfp4").
* Weights of one FP8 tensor: keep float parameters and `tcfp_jax.error_feedback`.
* Norms, biases and other small parameters stay float.
"""

import warnings
from collections.abc import Callable, Mapping
from itertools import starmap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.typing import ArrayLike, DTypeLike

from tcfp_jax.formats.casting import check_key
from tcfp_jax.optim.arguments import (
    AVERAGED,
    GRADIENTS,
    PARAMETERS,
    TO_STORE,
    UPDATED,
    UPDATES,
    check_made,
    is_whole,
)
from tcfp_jax.optim.numbers import check_numbers
from tcfp_jax.optim.wrappers import check_wrappers
from tcfp_jax.paths import PyTree, named_leaves
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layerwise import is_on_host, on_device
from tcfp_jax.weights.layout import Layout, Weight, Weights
from tcfp_jax.weights.parameter import is_parameter, is_quantized, parameter_of
from tcfp_jax.weights.placement import check_blocks
from tcfp_jax.weights.rewritten import Rewritten
from tcfp_jax.weights.rounding import make_parameter, rewrite
from tcfp_jax.weights.training import Remainder

_MATRIX = Layout((0,), (1,))


def store(
    params: PyTree | Callable[[], PyTree],
    recipe: Recipe | str | Mapping[str, Weight],
    *,
    key: Array | None = None,
    remainder: Remainder = "stochastic",
    gradient_dtype: DTypeLike | None = None,
    shardings: PyTree | None = None,
) -> PyTree:
    """Return the tree with its kernels stored as `W_hi + W_lo`, two bytes per weight.

    Use this to train without float copies of the weights: a third of the memory, at
    the speed of plain FP8. Norms, biases and other parameters do not change. Pass a
    function that makes the parameters if they do not fit in memory: inside `jit`, its
    kernels are made one after another, and at most one of them is float at a time.

        def make(key):
            return store(lambda: model.init(key, x)["params"], recipe, key=key)

        params = jax.jit(make)(key)

    Outside `jit` a stack of layers on the host, such as a NumPy array or
    `np.memmap`, moves to the device layer by layer: no float stack exists there.

    Args:
      params: parameters, also in Flax's boxes or an `nnx.State`; or a function without
        arguments that returns them. A leaf may be an object with `shape`, `dtype` and
        `leaf[layer]` that reads a layer from a file.
      recipe: recipe of the layers, with a residual, such as "tcfp12_single". It stores
        every leaf named `kernel` with two axes or more; axes before the last two are a
        stack of layers with a scale each. Or the mapping that
        `tcfp_jax.conversion.find_weights` returns for a model: it stores those weights;
        tables whose rows are looked up are among them with `include="embed"`, and stay
        float without.
      key: JAX random key for stochastic rounding; the weights hold its seeds from then
        on.
      remainder: treatment of the rounding error. "stochastic" rounds to one of the two
        neighbours so that the mean is right. "feedback" keeps the error for the next
        step in a third FP8 tensor: three bytes per weight, and no random bits. The
        error is rounded to E3M4, which loses updates far below a 64th of the grid's
        step. "dropped" loses updates below half a step of the grid.
      gradient_dtype: dtype of the gradients of stored weights, floats of 16 bits or
        more; None for the parameters' own.
      shardings: shardings of the result, as `tcfp_jax.sharding.state_shardings`
        returns them, if all parameters are on the host; None leaves them to JAX.

    A weight of the mapping whose floats other code reads stays float. One warning names
    these weights and the code.

    Raises:
      TypeError: a kernel or its gradient is not real floating point, or the gradient
        has fewer than 16 bits.
      ValueError: a recipe without a residual. No kernel among the parameters, or
        parameters that are stored already. A key that is missing, or that would not be
        used. Kernels on a mesh that cuts a block of a scale.

    >>> params = {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}
    >>> stored = store(params, "tcfp12_single", key=jax.random.key(0))
    >>> stored["kernel"].nbytes, dequantize(stored)["kernel"].dtype
    (36, dtype('float32'))
    """
    check_key(key)
    tree = params
    program = None
    if callable(params) and jax.tree_util.all_leaves([params]):
        program = _Program(params)
        tree = program.shapes
    found, treedef = named_leaves(tree, is_quantized)
    if any(is_quantized(leaf) for _, leaf in found):
        raise ValueError(
            "parameters are stored already; store(dequantize(params), ...) stores them"
            " anew"
        )
    chosen = _chosen(found, recipe)
    names_of_all = sorted("/".join(names) for names, _ in found)
    floats = _floats_of(names_of_all, recipe)
    if not chosen:
        TO_STORE.check_tree(tree)
        why = _nothing_to_store(names_of_all, recipe)
        if floats:
            repair = "keep float parameters and error_feedback"
            why = f"no weight to store: {floats}\n{repair}"
        raise ValueError(why)
    if floats:
        warnings.warn(floats, stacklevel=2)
    places = [None] * len(found)
    if shardings is not None:
        places = treedef.flatten_up_to(shardings)
    leaves: list[PyTree] = []
    for place, (names, leaf) in enumerate(found):
        made = leaf if program is None else program.leaf(place, after=leaves[-1:])
        if place in chosen:
            weight = chosen[place]
            if weight.recipe.scaling.in_blocks and not is_on_host(made):
                matrix = weight.layout.stacked(made.ndim).matrix(made)
                turned = weight.recipe.copies == "both"
                check_blocks(
                    "/".join(names), matrix, weight.recipe.scaling, turned=turned
                )
            own = None if key is None else jax.random.fold_in(key, place)
            made = make_parameter(
                made,
                weight,
                key=own,
                remainder=remainder,
                gradient_dtype=gradient_dtype,
                shardings=places[place],
            )
        else:
            made = on_device(made, places[place])
        leaves.append(made)
    return jax.tree.unflatten(treedef, leaves)


def dequantize(params: PyTree) -> PyTree:
    """Return the tree with float parameters instead of stored ones, as Flax made them.

    Use this for export, and for code that reads float parameters. A jitted program
    computes only the floats that it reads.

    Raises:
      TypeError: a stored weight was not made by `store`, so the shape of its kernel is
        unknown.

    >>> params = {"kernel": jnp.full((2, 2), 0.5)}
    >>> stored = store(params, "tcfp12_single", key=jax.random.key(0))
    >>> dequantize(stored)["kernel"].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def floats(leaf: PyTree) -> PyTree:
        if is_parameter(leaf):
            return leaf.kernel()
        if is_quantized(leaf):
            raise TypeError(
                f"a {leaf.describe()} was not made by tcfp_jax.store: it has no"
                " optimizer and does not know the shape of its kernel; take its float"
                " matrix [..., k, n] with weight.dequantize(), or train adapters"
                " next to it (LoRA, see docs/fp4.md)"
            )
        return leaf

    return jax.tree.map(floats, params, is_leaf=is_quantized)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Add updates to parameters, and round stored weights into `W_hi + W_lo`.

    Use this instead of `optax.apply_updates` for trees with stored weights. A weight
    whose update is zero everywhere keeps its bits, and its random state does not
    advance. A NaN or inf makes the weight NaN; `on_stored` and `tcfp_jax.optim.adamw`
    skip such steps.

    Args:
      params: the parameters.
      updates: the same tree with a float array for each stored weight, or the updates
        of `tcfp_jax.optim.adamw`.

    Raises:
      ValueError: the update of a stored weight has another shape, or the trees differ.

    >>> params = {"kernel": jnp.full((2, 2), 0.5)}
    >>> params = store(params, "tcfp12_single", key=jax.random.key(0))
    >>> updates = {"kernel": jnp.full((2, 2), 0.25)}
    >>> dequantize(apply_updates(params, updates))["kernel"].tolist()
    [[0.75, 0.75], [0.75, 0.75]]
    """
    pairs = UPDATES.pairs(params, updates)
    treedef = jax.tree.structure(params, is_leaf=is_whole)
    return jax.tree.unflatten(treedef, starmap(_updated, pairs))


class OnStoredState(NamedTuple):
    """State of `on_stored`.

    Attributes:
      inner: state of the transformation.
      skipped: number of steps that were skipped because a gradient had a NaN or inf,
        int32.
    """

    inner: PyTree
    skipped: Array


def incremental_update(new: PyTree, old: PyTree, step_size: ArrayLike) -> PyTree:
    """Return `step_size * new + (1 - step_size) * old`, as `optax.incremental_update`,
    of trees with stored weights.

    Use it for averages of parameters (EMA). Stored weights are averaged as floats and
    rounded as `old` rounds; with `remainder="stochastic"` the mean follows steps far
    below the grid. `step_size` is from 0 to 1, and 1 copies other leaves bit for bit.
    Leaves that are not floats, such as counts, are taken from `new`. For an exact
    average keep floats instead:
    `optax.incremental_update(dequantize(params), average, step_size)`.

    Raises:
      ValueError: `step_size` is out of range, or the trees differ.

    >>> def of(x):
    ...     params = {"kernel": jnp.full((2, 2), x)}
    ...     return store(params, "tcfp12_single", remainder="dropped")
    >>> old, new = of(1.0), of(2.0)
    >>> dequantize(incremental_update(new, old, 0.5))["kernel"].tolist()
    [[1.5, 1.5], [1.5, 1.5]]
    """
    check_numbers(step_size=step_size)
    share = jnp.asarray(step_size, jnp.float32)
    averages: list[PyTree] = []
    for path, leaf, wanted in AVERAGED.pairs(old, dequantize(new)):
        if leaf is None:
            averages.append(None)
            continue
        AVERAGED.check_floats(path, wanted)
        if is_quantized(leaf):
            change = wanted.astype(jnp.float32) - dequantize(leaf).astype(jnp.float32)
            averages.append(_updated(path, leaf, share * change))
        else:
            averages.append(_average(jnp.asarray(wanted), jnp.asarray(leaf), share))
    return jax.tree.unflatten(jax.tree.structure(old, is_leaf=is_whole), averages)


def _average(new: Array, old: Array, share: Array) -> Array:
    """Return the average of a leaf that is not stored, in its own dtype.

    A share of 1 or 0, and two equal values, are copied: `0 * inf` is NaN.
    """
    mean = new
    if jnp.issubdtype(old.dtype, jnp.inexact):
        narrow = jnp.finfo(old.dtype).bits < 32
        wide = jnp.float32 if narrow else old.dtype
        part = share.astype(wide)
        mean = part * new.astype(wide) + (1 - part) * old.astype(wide)
        mean = jnp.where(new == old, old, mean.astype(old.dtype))
    mean = jnp.where(share == 0, old, mean.astype(old.dtype))
    return jnp.where(share == 1, new.astype(old.dtype), mean)


def on_stored(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Let any optax transformation train stored parameters by their floats.

    Use this for optimizers other than `tcfp_jax.optim.adamw`. Its state stays as large
    as optax makes it: AdamW's float32 moments take eight bytes per weight, next to the
    two of the weight. Use `tcfp_jax.optim.adamw` or `low_precision_moments` for smaller
    ones. A transformation that keeps a copy of the parameters keeps a float copy. Call
    `init` inside `jit`, so that the floats it is shown are never made.

    A step with a NaN, an inf or a magnitude of 2**63 in any gradient changes no state,
    returns updates of zero, and is counted. No number of such steps in a row is ever
    accepted.

    Raises:
      ValueError: `update` without params; `init` inside `optax.MultiSteps` with stored
        parameters, where it belongs outside.

    >>> params = {"kernel": jnp.full((2, 2), 0.5)}
    >>> params = store(params, "tcfp12_single", key=jax.random.key(0))
    >>> tx = on_stored(optax.sgd(0.25))
    >>> grads = {"kernel": jnp.ones((2, 2))}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> dequantize(apply_updates(params, updates))["kernel"].tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> OnStoredState:
        check_wrappers(params, rewrites=False)
        PARAMETERS.check_tree(params)
        return OnStoredState(inner.init(dequantize(params)), jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: OnStoredState, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, OnStoredState]:
        if params is None:
            raise ValueError(
                "on_stored shows the parameters to the optimizer; call tx.update(grads,"
                " state, params)"
            )
        check_made(state, OnStoredState, "on_stored")
        for path, _, gradient in GRADIENTS.pairs(params, updates):
            if gradient is not None:
                GRADIENTS.check_floats(path, gradient)
        floats = dequantize(params)

        def step() -> tuple[PyTree, PyTree]:
            return inner.update(updates, state.inner, floats, **extra)

        shapes, after_step = jax.eval_shape(step)
        # A first step may widen a state: float32 gradients widen the moments that optax
        # makes of bfloat16 parameters.
        same = jax.tree.map(
            lambda old, new: jnp.asarray(old, new.dtype), state.inner, after_step
        )

        def skip() -> tuple[PyTree, PyTree]:
            return jax.tree.map(jnp.zeros_like, shapes), same

        finite = all_finite(updates)
        made, after = lax.cond(finite, step, skip)
        return made, OnStoredState(after, state.skipped + jnp.where(finite, 0, 1))

    return optax.GradientTransformationExtraArgs(init, update)


def all_finite(tree: PyTree) -> Array:
    """Return whether every value of every array of a tree is finite, and its square
    too: smaller than 2**63.

    Optimizers square gradients. The square of a larger one is inf in float32: optax's
    second moment keeps it for ever, and in eight bits it would make a whole block NaN.
    """
    found = []
    for leaf in jax.tree.leaves(tree):
        limit = jnp.asarray(2.0**63).astype(leaf.dtype)
        found.append(jnp.all(jnp.abs(leaf) < limit))
    return jnp.all(jnp.stack(found)) if found else jnp.bool_(True)


class _Program:
    """The traced program of a function that makes parameters, cut into a part for each
    leaf; `shapes` is its result.

    XLA fuses equal arithmetic into one kernel. The initial values of thirty equal
    layers are equal arithmetic, so all of them would exist in float32 before the first
    is stored. Here each leaf has its own part of the program, whose inputs pass through
    a barrier together with the weight that was stored last.
    """

    def __init__(self, function: Callable[[], PyTree]) -> None:
        closed, self.shapes = jax.make_jaxpr(function, return_shape=True)()
        self._jaxpr = closed.jaxpr
        self._inputs = closed.consts

    def leaf(self, place: int, *, after: list[PyTree]) -> Array:
        """Return the leaf at a place of the flattened tree; its computation begins when
        `after` is there.
        """
        wanted = [other == place for other in range(len(self._jaxpr.outvars))]
        part, _ = partial_eval.dce_jaxpr(self._jaxpr, wanted)
        inputs, _ = lax.optimization_barrier((self._inputs, after))
        return jaxpr_as_fun(ClosedJaxpr(part, inputs))()[0]


def _chosen(
    found: list[tuple[list[str], PyTree]], recipe: Recipe | str | Mapping[str, Weight]
) -> dict[int, Weight]:
    """Return the weights to store, by place among the leaves."""
    chosen: dict[int, Weight] = {}
    if not isinstance(recipe, Mapping):
        weight = Weight(named_recipe(recipe), _MATRIX)
        for place, (names, leaf) in enumerate(found):
            if names[-1:] == ["kernel"] and len(getattr(leaf, "shape", ())) >= 2:
                chosen[place] = weight
        return chosen
    for place, (names, _) in enumerate(found):
        named = recipe.get("/".join(names))
        if named is None or named.float_reads != "none":
            continue
        if named.recipe.mode is not TCFPMode.BF16:
            chosen[place] = named
    return chosen


def _floats_of(names: list[str], weights: object) -> str:
    """Return which parameters stay float, in the words of a report; "" if none do."""
    if not isinstance(weights, Weights):
        return ""
    lines = [
        f"\n  {name} {weights.floats[name]}" for name in names if name in weights.floats
    ]
    if not lines:
        return ""
    return f"{len(lines)} parameters of converted products stay float:{''.join(lines)}"


def _nothing_to_store(
    names: list[str], recipe: Recipe | str | Mapping[str, Weight]
) -> str:
    """Return the message for parameters of these names, none of which would be
    stored.
    """
    if not isinstance(recipe, Mapping):
        return (
            f"no weight to store among {names[:4]}: no leaf named 'kernel' with two"
            " axes; pass find_weights(model, *inputs) of the model that these are the"
            " parameters of"
        )
    if not recipe:
        return (
            "the mapping of weights is empty: the model was converted by a recipe that"
            ' stores none, such as "bf16" or one of FP4 training, or not at all;'
            ' convert it by recipe("tcfp12_single")'
        )
    named = [name for name in names if name in recipe]
    if not named:
        return (
            f"no weight to store among {names[:4]}: the mapping names"
            f" {sorted(recipe)[:4]}; pass the parameters of the model that find_weights"
            " was asked about"
        )
    return (
        f"no weight to store: {named[0]} is named, but code other than converted"
        " products reads its floats (a norm of the weight, or lookups of rows without"
        ' include="embed"), so it stays float; keep float parameters and'
        " error_feedback"
    )


def _updated(path: str, leaf: PyTree, update: PyTree) -> PyTree:
    if leaf is None:
        return None
    if not is_quantized(leaf):
        UPDATED.check_floats(path, leaf)
        UPDATES.check_floats(path, update)
        return optax.apply_updates(leaf, update)
    if isinstance(update, Rewritten):
        return update.onto(leaf)
    if update is None:
        return leaf
    UPDATES.check_floats(path, update)
    parameter = parameter_of(leaf)
    if tuple(update.shape) != parameter.kernel_shape:
        raise ValueError(
            f"the update of {path} is {list(update.shape)}, but the parameter is"
            f" {list(parameter.kernel_shape)}; pass the updates of these very"
            " parameters"
        )
    change = parameter.layout.matrix(update).astype(jnp.float32)
    parameter = parameter.intact()
    return lax.cond(
        jnp.any(change != 0),
        lambda: rewrite(parameter, parameter.stored.dequantize() + change),
        lambda: parameter,
    )
