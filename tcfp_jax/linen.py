"""Flax Linen: layers with low precision, and the train state of models that have such
layers.

The layers are `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum`, `nn.LayerNorm` and `nn.Embed`
with other products.
"""

from collections.abc import Callable

import optax
from flax.training import train_state

from tcfp_jax.conversion.convert import find_weights

from tcfp_jax.layers.linen import (  # isort: skip
    COLLECTION,
    RNG,
    Fp4Dense,
    TCFPDense,
    TCFPDenseGeneral,
    TCFPEinsum,
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
    "TCFPDenseGeneral",
    "TCFPEinsum",
    "TCFPEmbed",
    "TCFPLayerNorm",
    "TrainState",
]


class TrainState(train_state.TrainState):
    """Flax's `TrainState` of a converted model, whose parameters are stored, or float
    with error feedback.

    Stored parameters (`tcfp_jax.store`) are trained by any optax transformation, which
    sees them as floats (`tcfp_jax.optim.on_stored`) unless it has
    `tcfp_jax.optim.adamw`. Behind float ones follows `error_feedback` of the model's
    weights, unless `tx` has one. Take gradients by `tcfp_jax.value_and_grad` of stored
    parameters; pass `state.quantized` instead of the state to a loss of float ones.

    >>> import jax
    >>> from tcfp_jax.optim.feedback import error_feedback
    >>> model, x = TCFPDense(4), jax.numpy.ones((2, 4))
    >>> tx = optax.chain(optax.sgd(0.1), error_feedback("tcfp12"))
    >>> state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx)
    >>> loss = lambda params, state, x: state.apply_fn({"params": params}, x).sum()
    >>> state = state.apply_gradients(grads=jax.grad(loss)(state.params, state.quantized, x))
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
        """Return a new state, as Flax's; `apply_fn` is the `apply` of the converted
        model.

        Raises:
          ValueError: the parameters are float, `tx` has no `error_feedback`, and
            `apply_fn` is of no converted model.
        """
        trained = suited(
            tx, params, lambda: find_weights(getattr(apply_fn, "__self__", apply_fn))
        )
        return super().create(apply_fn=apply_fn, params=params, tx=trained, **kwargs)

    @property
    def quantized(self) -> "TrainState":
        """The state for a loss: its `apply_fn` multiplies by the optimizer's quantized
        weights of `params`.
        """
        stored = layer_state(self.opt_state)
        apply = lambda variables, *args, **kwargs: self.apply_fn(
            {COLLECTION: stored, **variables}, *args, **kwargs
        )
        return self.replace(apply_fn=apply)

    def apply_gradients(self, *, grads: PyTree, **kwargs: PyTree) -> "TrainState":
        """Return the state after a step, as Flax's; stored parameters are rounded as
        `tcfp_jax.apply_updates` does.
        """
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = apply_updates(self.params, updates)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )
