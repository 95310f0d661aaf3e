"""`suited` adapts an optax transformation to the parameters of a model: stored ones, or
float ones with error feedback.

`tcfp_jax.nnx.Optimizer` and `tcfp_jax.linen.TrainState` call it, so a training script
names optax's transformations.
"""

from collections.abc import Callable, Mapping

import jax
import optax
from jax import lax

from tcfp_jax.optim.adam import AdamWState
from tcfp_jax.optim.feedback import ErrorFeedbackState, error_feedback
from tcfp_jax.optim.stored import OnStoredState, dequantize, on_stored
from tcfp_jax.paths import PyTree, leaves
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.training import is_stored

_OF_STORED = (AdamWState, OnStoredState)


def suited(
    tx: optax.GradientTransformation | optax.MultiSteps,
    params: PyTree,
    weights: Callable[[], Mapping[str, Weight]],
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation for these parameters: through `on_stored` if they are
    stored, or with error feedback.

    One that trains stored weights itself (`tcfp_jax.optim.adamw`), keeps
    `error_feedback` already, or trains no kernel does not change. `weights` returns the
    mapping of `find_weights`; it is called for float parameters only.

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.optim.stored import store
    >>> params = store({"kernel": jnp.ones((2, 2))}, "tcfp12_single", key=jax.random.key(0))
    >>> type(suited(optax.sgd(0.1), params, dict).init(params)).__name__
    'OnStoredState'
    """
    tx = optax.with_extra_args_support(
        optax.GradientTransformationExtraArgs(tx.init, tx.update)
    )
    stored = any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored)))
    # The state tells which transformations the chain has. All of them take floats, and
    # not all take stored weights.
    state = jax.eval_shape(lambda params: tx.init(dequantize(params)), params)
    wanted = _OF_STORED if stored else ErrorFeedbackState
    is_wanted = lambda node: isinstance(node, wanted)
    if any(map(is_wanted, jax.tree.leaves(state, is_leaf=is_wanted))):
        return tx
    if stored:
        return on_stored(tx)
    # Biases or adapters alone have nothing to feed back to.
    kernels, trained = weights(), set(leaves(params))
    return _fed_back(tx, kernels) if trained & set(kernels) or not trained else tx


def _fed_back(
    tx: optax.GradientTransformationExtraArgs, weights: Mapping[str, Weight]
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with error feedback behind it, which rests while `optax.MultiSteps`
    collects gradients.
    """
    feedback = error_feedback(weights)

    def init(params: PyTree) -> tuple[PyTree, ErrorFeedbackState]:
        return tx.init(params), feedback.init(params)

    def update(
        updates: PyTree,
        state: tuple[PyTree, ErrorFeedbackState],
        params: PyTree = None,
        **extra: PyTree,
    ) -> tuple[PyTree, tuple[PyTree, ErrorFeedbackState]]:
        updates, inner = tx.update(updates, state[0], params, **extra)
        step = lambda: feedback.update(updates, state[1], params)[1]
        collects = isinstance(inner, optax.MultiStepsState)
        after = (
            lax.cond(inner.mini_step == 0, step, lambda: state[1])
            if collects
            else step()
        )
        return updates, (inner, after)

    return optax.GradientTransformationExtraArgs(init, update)
