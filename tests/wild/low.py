"""A subject that the library converts, and its training in float32 and converted."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx

import tcfp_jax
from tcfp_jax import paths
from tcfp_jax.conversion import convert_to_tcfp, find_weights, survey
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.inference import quantize_params
from tcfp_jax.nnx import Optimizer
from tcfp_jax.optim import on_stored
from tests.wild.made import Made, Subject, loss_of, pure

RECIPE = "tcfp12_fast"
ALL = ("linear", "small", "head")
STEPS = 25


@dataclass(frozen=True)
class Low:
    """A converted subject.

    Attributes:
      call: `call(params, stored, *inputs)` with options last, as in `pure`; stored is
        `layer_state`, or {}.
      report: Report of the library.
      find: Function that returns the argument of `error_feedback`; it may trace the
        model once more.
      model: The converted function, module or model.
    """

    call: Callable[..., Any]
    report: Any
    find: Callable[[], Any]
    model: Any

    @functools.cached_property
    def weights(self) -> Any:
        """Argument of `error_feedback`."""
        return self.find()


def convert(subject: Subject, made: Made) -> Low:
    """Convert a subject as its users would; an NNX model changes in place."""
    if subject.kind == "function":
        low = tcfp_jax.transform(made.model, RECIPE, include=ALL)
        arguments = (low, made.params, *made.inputs)

        def of_function(params: Any, stored: Any, *inputs: Any) -> Any:
            return made.select(
                low(params, *inputs[:-1], **({"stored": stored} if stored else {}))
            )

        return Low(
            of_function, survey(*arguments), lambda: find_weights(*arguments), low
        )
    model = convert_to_tcfp(
        made.model, RECIPE, *made.inputs, include=ALL, options=dict(made.options)
    )
    if subject.kind == "nnx":
        call, *_ = pure(
            Made(model, made.inputs, options=made.options, select=made.select), "nnx"
        )

        def of_nnx(params, stored, *inputs):
            return call(params, *inputs)

        return Low(of_nnx, survey(model), lambda: find_weights(model), model)

    def of_linen(params: Any, stored: Any, *inputs: Any) -> Any:
        *given, options = inputs
        variables = {
            "params": params,
            **made.rest,
            **({"tcfp": stored} if stored else {}),
        }
        return made.select(
            model.apply(variables, *given, **made.apply_options, **options)
        )

    return Low(of_linen, survey(model), lambda: find_weights(model), model)


_FLOAT: dict[str, list[float]] = {}


def train_float(subject: Subject, made: Made) -> list[float]:
    """Return the losses of `STEPS` steps of the unchanged model, which several tests
    compare with.
    """
    if str(subject) not in _FLOAT:
        fn, params, inputs = pure(made, subject.kind)

        def call(params, state):
            return fn(params, *inputs)

        _FLOAT[str(subject)] = _train(subject, call, params, optax.adamw(subject.rate))
    return _FLOAT[str(subject)]


def train_low(subject: Subject, made: Made, low: Low) -> list[float]:
    """Return the losses of `STEPS` steps with weights that the optimizer quantizes,
    with error feedback.
    """
    optimizer = optax.chain(
        optax.adamw(subject.rate), tcfp_jax.error_feedback(low.weights)
    )
    if subject.kind == "nnx":
        return _train_nnx(subject, made, low.model, optimizer)
    inputs = (*made.inputs, dict(made.options))

    def call(params, state):
        return low.call(params, tcfp_jax.layer_state(state), *inputs)

    return _train(subject, call, made.params, optimizer)


def train_stored(subject: Subject, made: Made, low: Low) -> list[float]:
    """Return the losses of `STEPS` steps with weights that have no float copy."""
    params = made.params
    inputs = (*made.inputs, dict(made.options))
    if subject.kind == "nnx":
        _, params, _ = nnx.split(low.model, nnx.Param, ...)
    params = jax.jit(
        lambda params: tcfp_jax.store(params, low.weights, key=jax.random.key(5))
    )(params)
    optimizer = on_stored(optax.adamw(subject.rate))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params):
            return loss_of(low.call(params, {}, *inputs), subject.target)

        value, gradients = tcfp_jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return tcfp_jax.apply_updates(params, updates), state, value

    state = jax.jit(optimizer.init)(params)
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def serve(made: Made, low: Low) -> tuple[Any, dict[str, Any], set[str]]:
    """Return (parameters with shapes instead of stored weights, stored weights, paths
    that have both).
    """
    served = quantize_params(made.params, low.weights)
    floats = set(paths.leaves(served["params"]))
    stored = set(paths.entries(served["tcfp"]))

    def left(path: Any, leaf: Any) -> Any:
        name = paths.join(*paths.path_names(path))
        return leaf if name in floats else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    # Linen accepts missing parameters, but a function's parameters must keep their
    # structure.
    is_linen = not isinstance(low.model, Transformed)
    params = (
        served["params"]
        if is_linen
        else jax.tree_util.tree_map_with_path(left, made.params)
    )
    return params, served["tcfp"], floats & stored


def step_of(
    subject: Subject, call: Callable[..., Any], optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Return a jitted step `(params, state) -> (params, state, loss)`;
    `call(params, state)` is the output.
    """

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, gradients = jax.value_and_grad(
            lambda params: loss_of(call(params, state), subject.target)
        )(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def _train(
    subject: Subject, call: Any, params: Any, optimizer: optax.GradientTransformation
) -> list[float]:
    step = step_of(subject, call, optimizer)
    state = jax.jit(optimizer.init)(params)
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def nnx_step(subject: Subject, made: Made) -> Callable[..., Any]:
    """Return a step of an NNX model and its optimizer, which changes both in place and
    returns the loss.
    """

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer) -> Any:
        def loss(model: Any) -> Any:
            return loss_of(
                made.select(model(*made.inputs, **made.options)), subject.target
            )

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    return step


def _train_nnx(
    subject: Subject,
    made: Made,
    model: Any,
    transformation: optax.GradientTransformation,
) -> list[float]:
    optimizer = Optimizer(model, transformation)
    step = nnx_step(subject, made)
    return [float(step(model, optimizer)) for _ in range(STEPS)]
