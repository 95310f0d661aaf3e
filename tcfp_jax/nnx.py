"""Flax NNX: layers with low precision, and the optimizer and gradients of models.

The layers are `nnx.Linear`, `LayerNorm` and `Embed` with other products. For any other
layer, convert the model: `tcfp_jax.conversion.convert_to_tcfp`. `Optimizer` and
`value_and_grad` have the interfaces of Flax's own, also if the parameters are stored
weights (`tcfp_jax.store`).
"""

import functools
from collections.abc import Callable

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tcfp_jax.conversion.convert import find_weights, hand_out
from tcfp_jax.layers.nnx import (
    Fp4Dense,
    TCFPEmbed,
    TCFPLayerNorm,
    TCFPLinear,
    is_variable,
)
from tcfp_jax.optim.feedback import layer_state
from tcfp_jax.optim.gradients import arithmetic_named, with_slots
from tcfp_jax.optim.stored import apply_updates
from tcfp_jax.optim.suited import suited
from tcfp_jax.paths import PyTree, entries
from tcfp_jax.sharding import shardings_of, state_shardings

__all__ = [
    "Fp4Dense",
    "Optimizer",
    "TCFPEmbed",
    "TCFPLayerNorm",
    "TCFPLinear",
    "value_and_grad",
]


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` of a converted model, or of one with layers of this module.

    Use this instead of Flax's own for such models: it hands the quantized weights of
    the optimizer to the model.

    If parameters are stored, it trains them, and `tx` sees them as floats
    (`tcfp_jax.optim.on_stored`) unless it has `tcfp_jax.optim.adamw`. If all are float,
    `error_feedback` of the model's weights follows `tx`, unless `tx` has one, and the
    model multiplies by the quantized weights that every update writes. Parameters that
    change in any other way do not fit these; evaluate averages of them in a copy
    without: `tcfp_jax.conversion.detach(nnx.clone(model))`.

    The state is made by a compiled program. It is sharded like the parameters.

    Args:
      model: the model. Store its parameters first, if at all: `nnx.update(model,
        tcfp_jax.store(nnx.state(model, nnx.Param), find_weights(model), key=key))`.
      tx: any optax transformation. If the recipe rounds stochastically, end it with
        `error_feedback(weights, key=key)`.
      wrt: the variables to train, as in `nnx.Optimizer`.

    Raises:
      ValueError: the model was not converted, or its quantized weights are none of its
        parameters; an error of `error_feedback`; parameters on a mesh that cuts their
        stored form, see `tcfp_jax.sharding.fsdp`.

    >>> from tcfp_jax.optim.feedback import error_feedback
    >>> model = TCFPLinear(4, 4, rngs=nnx.Rngs(0))
    >>> tx = optax.chain(optax.sgd(0.1), error_feedback("tcfp12"))
    >>> optimizer = Optimizer(model, tx)
    >>> def loss(model):
    ...     return model(jax.numpy.ones((2, 4))).sum()
    >>> value, gradients = value_and_grad(loss)(model)
    >>> updates = optimizer.update(model, gradients)
    >>> round(float(updates["bias"][0]), 3)
    -0.2
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: optax.GradientTransformation | optax.MultiSteps,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
    ) -> None:
        params = nnx.state(model, wrt)
        trained = suited(tx, params, lambda: find_weights(model))
        lie = shardings_of(params)
        if lie is not None:
            lie = state_shardings(lie, params, trained.init)
        super().__init__(
            model,
            trained._replace(init=jax.jit(trained.init, out_shardings=lie)),
            wrt=wrt,
        )
        # Next to counters of the transformation, which every device holds
        if lie is not None:
            whole = NamedSharding(jax.tree.leaves(lie)[0].mesh, PartitionSpec())
            self.step[...] = jax.device_put(self.step[...], whole)
        held = entries(layer_state(self.opt_state))
        # Called for nothing, too: it notes that the optimizer is there
        if not hand_out(model, held) and held:
            raise ValueError(
                f"the quantized weights of the optimizer, such as {min(held)}, are none"
                f" of {type(model).__name__}'s; give error_feedback the weights of this"
                " model: find_weights(model)"
            )

    def update(self, model: nnx.Module, grads: PyTree, /, **extra: PyTree) -> PyTree:
        """Update the model and this state by gradients, and return the updates.

        Use this after each backward pass, instead of `optax.apply_updates`, which does
        not know stored weights.

        Take the gradients from `value_and_grad`. Other arguments go to the
        transformation, as in `nnx.Optimizer`.
        """
        gradients = _values(nnx.state(grads, self.wrt))
        before = _values(self.opt_state)
        params = _values(nnx.state(model, self.wrt))
        updates, state = self.tx.update(gradients, before, params, **_values(extra))
        nnx.update(model, apply_updates(params, updates))
        nnx.update(self.opt_state, nnx.state(state))
        self.step[...] += 1
        return updates


def value_and_grad(
    f: Callable[..., PyTree], *, argnums: int | nnx.DiffState = 0, has_aux: bool = False
) -> Callable[..., PyTree]:
    """Return `nnx.value_and_grad` of a function of a model with stored parameters.

    Use this if parameters are stored (`tcfp_jax.store`), of which Flax's own raises;
    for float parameters both are the same. The gradients of stored parameters are
    floats of their kernels' shapes.

    Args:
      f: a function of models and arrays with a scalar result. It may change other
        variables, such as counters.
      argnums: the place of the model to differentiate, or an `nnx.DiffState` that
        filters its variables, too.
      has_aux: whether `f` returns a pair whose second part is not differentiated.

    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> def loss(model, x):
    ...     return model(x).sum()
    >>> value, gradients = value_and_grad(loss)(model, jax.numpy.ones((3, 2)))
    >>> gradients["kernel"][...].tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    if isinstance(argnums, nnx.DiffState):
        place = argnums.argnum
        wrt = argnums.filter
    else:
        place = argnums
        wrt = nnx.Param

    @functools.wraps(f)
    def with_gradients(*args: PyTree, **kwargs: PyTree) -> PyTree:
        variables = nnx.state(args[place], wrt)
        _, (slots,), given = with_slots(0, [_values(variables)])

        def of_slots(slots: PyTree, *args: PyTree) -> PyTree:
            model = args[place]
            before = _values(nnx.state(model, wrt))
            nnx.update(model, given([slots])[0])
            with arithmetic_named():
                result = f(*args, **kwargs)
            nnx.update(model, before)  # the slots stay in here
            return result

        result, gradients = nnx.value_and_grad(of_slots, has_aux=has_aux)(slots, *args)
        return result, jax.tree.map(
            lambda variable, gradient: variable.replace(gradient),
            variables,
            gradients,
            is_leaf=is_variable,
        )

    return with_gradients


def _values(tree: PyTree) -> PyTree:
    """Return the tree with the values of variables instead of the variables."""
    return jax.tree.map(
        lambda leaf: leaf.get_raw_value() if is_variable(leaf) else leaf,
        tree,
        is_leaf=is_variable,
    )
