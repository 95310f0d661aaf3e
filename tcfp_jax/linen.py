"""Flax Linen: layers with low precision, and the train state of models.

The layers are `nn.Dense`, `nn.LayerNorm` and `nn.Embed` with other products. For any
other layer, convert the model: `tcfp_jax.conversion.convert_to_tcfp`.
"""

from collections.abc import Callable

import optax
from flax.training import train_state

from tcfp_jax.conversion.convert import find_weights
from tcfp_jax.layers.linen import (
    COLLECTION,
    RNG,
    Fp4Dense,
    TCFPDense,
    TCFPEmbed,
    TCFPLayerNorm,
)
from tcfp_jax.optim.feedback import layer_state
from tcfp_jax.optim.stored import apply_updates
from tcfp_jax.optim.suited import suited
from tcfp_jax.paths import PyTree

__all__ = [
    "COLLECTION",
    "RNG",
    "Fp4Dense",
    "TCFPDense",
    "TCFPEmbed",
    "TCFPLayerNorm",
    "TrainState",
]


class TrainState(train_state.TrainState):
    """Flax's `TrainState` of a model whose parameters are stored or float.

    Use this instead of Flax's own for a converted model, or one with layers of this
    module: it adds `error_feedback` and rounds stored parameters. Use
    `tcfp_jax.value_and_grad` and `tcfp_jax.apply_updates` in a loop without a state.

    Stored parameters (`tcfp_jax.store`) are trained by any optax transformation, which
    sees them as floats (`tcfp_jax.optim.on_stored`) unless it has
    `tcfp_jax.optim.adamw`. Float ones get `error_feedback` of the model's weights after
    `tx`, unless `tx` has one. Take gradients by `tcfp_jax.value_and_grad` of stored
    parameters; pass `state.quantized` instead of the state to a loss of float ones.

    >>> import jax
    >>> from tcfp_jax.optim.feedback import error_feedback
    >>> model = TCFPDense(4)
    >>> x = jax.numpy.ones((2, 4))
    >>> params = model.init(jax.random.key(0), x)["params"]
    >>> tx = optax.chain(optax.sgd(0.1), error_feedback("tcfp12"))
    >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    >>> def loss(params, state):
    ...     return state.apply_fn({"params": params}, x).sum()
    >>> grads = jax.grad(loss)(state.params, state.quantized)
    >>> state = state.apply_gradients(grads=grads)
    >>> round(float(state.params["bias"][0]), 3)
    -0.2
    """

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., PyTree],
        params: PyTree,
        tx: optax.GradientTransformation,
        **kwargs: PyTree,
    ) -> "TrainState":
        """Return a new state, as Flax's; `apply_fn` is the converted model's `apply`.

        Use this as Flax's own; use `tcfp_jax.store` on the parameters first if they
        should be stored.

        Raises:
          ValueError: the parameters are float, `tx` has no `error_feedback`, and
            `apply_fn` is of no converted model.
        """
        model = getattr(apply_fn, "__self__", apply_fn)
        trained = suited(tx, params, lambda: find_weights(model))
        return super().create(apply_fn=apply_fn, params=params, tx=trained, **kwargs)

    @property
    def quantized(self) -> "TrainState":
        """The state for a loss: `apply_fn` reads the optimizer's quantized weights.

        Use this in the loss of float parameters; use the state itself for stored ones.
        """
        stored = layer_state(self.opt_state)

        def apply(variables: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
            return self.apply_fn({COLLECTION: stored, **variables}, *args, **kwargs)

        return self.replace(apply_fn=apply)

    def apply_gradients(self, *, grads: PyTree, **kwargs: PyTree) -> "TrainState":
        """Return the state after a step, as Flax's; stored parameters are rounded.

        Use this as Flax's own, with gradients of `tcfp_jax.value_and_grad` for stored
        parameters.
        """
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = apply_updates(self.params, updates)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )
