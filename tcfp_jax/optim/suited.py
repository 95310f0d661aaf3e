"""`suited` adapts an optax transformation to the parameters of a model: stored ones, or
float ones with error feedback.

`tcfp_jax.nnx.Optimizer` and `tcfp_jax.linen.TrainState` call it, so a training script
names optax's transformations.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import optax
from jax import lax

from tcfp_jax.optim.adam import AdamWState
from tcfp_jax.optim.feedback import ErrorFeedbackState, error_feedback
from tcfp_jax.optim.stored import OnStoredState, dequantize, on_stored
from tcfp_jax.paths import PyTree, leaves
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parameter import is_quantized

_Transformation: TypeAlias = optax.GradientTransformationExtraArgs
_State: TypeAlias = tuple[PyTree, ErrorFeedbackState]
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def suited(
    tx: optax.GradientTransformation | optax.MultiSteps,
    params: PyTree,
    weights: Callable[[], Mapping[str, Weight]],
) -> _Transformation:
    """Return the transformation for these parameters.

    It goes through `on_stored` if they are stored, otherwise it gets error feedback.
    One that trains stored weights itself (`tcfp_jax.optim.adamw`, but not inside
    `optax.MultiSteps`), keeps `error_feedback` already, or trains no kernel does not
    change. `weights` returns the mapping of `find_weights`; it is called for float
    parameters only. Equal arguments give the same transformation, so two train states
    of one `tx` have one structure.

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.optim.stored import store
    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> params = store(params, "tcfp12_single", key=jax.random.key(0))
    >>> type(suited(optax.sgd(0.1), params, dict).init(params)).__name__
    'OnStoredState'
    """
    tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    stored = _has(params, is_quantized)
    # The state tells which transformations the chain has. All of them take floats, and
    # not all take stored weights.
    state = jax.eval_shape(lambda params: tx.init(dequantize(params)), params)
    if stored:
        if _rewrites(state) and not _has(state, _takes_floats):
            _check_init(tx, params, state)
            return tx
        return _on_stored(tx)
    if _has(state, lambda node: isinstance(node, ErrorFeedbackState)):
        return tx
    kernels = weights()
    trained = set(leaves(params))
    if trained and not trained & set(kernels):
        return tx  # biases or adapters alone have nothing to feed back to
    return _fed_back(tx, tuple(kernels.items()))


def _rewrites(state: object) -> bool:
    """Return whether a state is of a chain that trains stored weights itself."""
    return _has(state, lambda node: isinstance(node, (AdamWState, OnStoredState)))


def _takes_floats(node: object) -> bool:
    """Return whether a state is of a transformation whose updates must be like the
    parameters, and that has a chain inside which trains stored weights itself.
    """
    kinds = (optax.MultiStepsState, optax.ApplyIfFiniteState)
    return isinstance(node, kinds) and _rewrites(tuple(node))


def _check_init(tx: _Transformation, params: PyTree, state: PyTree) -> None:
    """Raise a ValueError if a part of the chain promotes dtypes of stored weights."""
    try:
        jax.eval_shape(tx.init, params)
    except jax.dtypes.TypePromotionError as error:
        if _has(state, lambda node: isinstance(node, _INJECTED)):
            raise ValueError(
                "optax.inject_hyperparams gives its numbers the dtype of the first"
                " parameter, which is FP8 here; write optax.inject_hyperparams(adamw,"
                ' static_args=("key", "mask"), hyperparam_dtype=jnp.float32)(...)'
            ) from error
        raise ValueError(
            "a transformation next to tcfp_jax.optim.adamw does arithmetic on stored"
            " weights, as optax.contrib.reduce_on_plateau does; write"
            " on_stored(optax.chain(optax.adamw(...), ...)), or change the learning"
            f" rate by optax.inject_hyperparams ({error})"
        ) from error


def _has(tree: PyTree, is_wanted: Callable[[object], bool]) -> bool:
    return any(map(is_wanted, jax.tree.leaves(tree, is_leaf=is_wanted)))


_on_stored = functools.lru_cache(maxsize=16)(on_stored)


@functools.lru_cache(maxsize=16)
def _fed_back(
    tx: _Transformation, weights: tuple[tuple[str, Weight], ...]
) -> _Transformation:
    """Return `tx` followed by error feedback.

    The feedback does not change while `optax.MultiSteps` collects gradients.
    """
    feedback = error_feedback(dict(weights))

    def init(params: PyTree) -> _State:
        return tx.init(params), feedback.init(params)

    def update(
        updates: PyTree, state: _State, params: PyTree = None, **extra: PyTree
    ) -> tuple[PyTree, _State]:
        updates, inner = tx.update(updates, state[0], params, **extra)

        def step() -> ErrorFeedbackState:
            return feedback.update(updates, state[1], params)[1]

        if not isinstance(inner, optax.MultiStepsState):
            return updates, (inner, step())
        return updates, (inner, lax.cond(inner.mini_step == 0, step, lambda: state[1]))

    return optax.GradientTransformationExtraArgs(init, update)
