"""Training of a language model as pure functions: initial state and a jitted train
step.

A run is a function of its `TrainConfig`. Initial weights come from `seed`, and the
windows of step t from `fold_in(seed, t)`, which the jitted step computes on the device.
So a checkpoint needs no data-loader state, two recipes with one seed see identical
weights and batches, and a resumed run equals the uninterrupted one bit for bit.

    train_step : (state, text, key) -> (state, losses of the next `count` steps)
        one `lax.scan`, one dispatch; for pairs, also the rewards of each step

On a mesh of `models.nets.meshes` the same functions run on all its devices, of all
processes. Every device holds the whole text and reads the windows of its part of a
batch, so no window is sent.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax import monitor
from tcfp_jax.recipes import describe
from tcfp_jax.sharding import state_shardings

from ..huggingface.tensors import read
from ..nets.adapters import adapters_of, frozen, joined
from ..nets.meshes import OnMesh, check_mesh, parameter_shardings
from .accumulation import in_parts
from .batches import window_losses, windows
from .dpo import pair_loss, reference_of, reference_variables
from .flags import step_flags
from .forms import Adapters, Stored
from .learners import layouts, learner_of, program, quantized_of, reference_model
from .monitoring import Report, merged_report
from .parameters import on_host
from .settings import TrainConfig
from .state import (
    BATCHES,
    JITTER,
    ROUNDING,
    WEIGHTS,
    PairState,
    TrainState,
    jittered,
    optimizer_of,
    product_key,
    stored_state,
)

StepFunction = Callable[
    [TrainState, jax.Array, jax.Array], tuple[TrainState, jax.Array]
]


def init(
    config: TrainConfig, mesh: Mesh | None = None, start: Any = None
) -> TrainState:
    """Return the state before the first step. Parameters depend on the model and the
    seed, not on recipe or mesh.

    Stored weights are made one after another, so that no float copy of all of them
    exists. On a mesh, each device makes its own part. With `config.start` the
    parameters come from a checkpoint, and those that are stored, or frozen next to
    adapters, layer by layer.

    Args:
      config: The run.
      mesh: Devices of the run; None is one.
      start: The parameters of `config.start`, if they are not read from it: a tree of
        `start_shapes`, whose leaves may be on the host.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      ValueError: the checkpoint is of another model, or has values that are not finite.
    """
    own = program(config)
    begin = _init_function(own, mesh)
    key = jax.random.key(config.seed)
    if config.start is None:
        return begin(key)
    if start is None:
        start = read_start(config)
    weights = learner_of(own).weights
    if isinstance(config.weights, Stored):
        places = None if mesh is None else state_places(own, mesh)
        rounding = jax.random.fold_in(key, ROUNDING)
        state_of = functools.partial(_state, own, key)
        return stored_state(start, weights, rounding, state_of, places, mesh)
    if isinstance(config.weights, Adapters):
        adapters = jax.jit(lambda key: adapters_of(_floats(own, key)))(key)
        params, opt_state = frozen(
            joined(start, adapters), weights, _optimizer(own, key), own.dtype
        )
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32))
    return begin(key, read(start))


def read_start(config: TrainConfig) -> Any:
    """Return the float parameters in `config.start`, as
    `models.training.parameters.on_host`.
    """
    return on_host(Path(str(config.start)), start_shapes(config), config.size)


def start_shapes(config: TrainConfig) -> Any:
    """Return the shapes of the float parameters in `config.start`."""
    return _shapes(_floats, program(config.in_bf16))


def make_train_step(
    config: TrainConfig, count: int | None = None, mesh: Mesh | None = None
) -> StepFunction:
    """Return a jitted function that runs `count` steps (default
    `config.steps_per_call`) in one dispatch.

    Its arguments are the state (donated: do not use it again), the training text as
    integers `[tokens]`, and `batch_key(config)`. It returns the new state and the
    losses, float32 `[count]`, in nats per token; for pairs float32 `[count, 5]`, the
    losses and `models.training.dpo.REWARDS`. Configs that differ only in the seed share
    one compiled function.
    """
    return _step_function(
        program(config), config.steps_per_call if count is None else count, mesh
    )


def lowered_step(
    config: TrainConfig, mesh: Mesh | None, text: jax.Array
) -> jax.stages.Lowered:
    """Return the lowered steps of the first dispatch, before there is a state.

    The run's own call finds the compiled program.
    """
    if mesh is None:
        state = _shapes(_initialize, program(config))
    else:
        state = state_shapes(config, mesh)
    count = min(config.steps_per_call, config.steps)
    step: Any = make_train_step(config, count, mesh)
    lowered: jax.stages.Lowered = step.lower(state, text, batch_key(config))
    return lowered


def batch_key(config: TrainConfig) -> jax.Array:
    """Return the random key from which `make_train_step` derives the windows of every
    step.
    """
    return jax.random.fold_in(jax.random.key(config.seed), BATCHES)


def make_optimizer(
    config: TrainConfig, schedule: optax.Schedule | None = None
) -> optax.GradientTransformation:
    """Return the optimizer of a run, `models.training.state.optimizer_of`."""
    return _optimizer(config, jax.random.key(config.seed), schedule)


def _optimizer(
    config: TrainConfig, seed_key: jax.Array, schedule: optax.Schedule | None = None
) -> optax.GradientTransformation:
    return optimizer_of(config, learner_of(config).weights, seed_key, schedule)


def state_shapes(config: TrainConfig, mesh: Mesh | None = None) -> TrainState:
    """Return the shapes of a state with the placement of its arrays, into which a
    checkpoint is read.
    """
    own = program(config)
    shapes = _shapes(_initialize, own)
    if mesh is None:
        alone = SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda _: alone, shapes)
    else:
        places = state_places(own, mesh)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place
        ),
        shapes,
        places,
    )


@functools.lru_cache(maxsize=16)
def _shapes(function: Callable[..., Any], config: TrainConfig) -> Any:
    return jax.eval_shape(functools.partial(function, config), jax.random.key(0))


@functools.lru_cache(maxsize=16)
def state_places(config: TrainConfig, mesh: Mesh) -> Any:
    """Return the placement of every array of the state on a mesh, which follows from
    the parameters.
    """
    places = parameter_shardings(_shapes(_floats, config), mesh)
    state_of = functools.partial(_state, config, jax.random.key(0))
    return state_shardings(places, _shapes(_parameters, config), state_of)


def check_placement(config: TrainConfig, mesh: Mesh | None) -> None:
    """Raise `ValueError` if no layer takes the recipe, if it quantizes float weights in
    each product next to adapters, or if the mesh does not divide the batch, heads or an
    array of the state.
    """
    recipe = tcfp_jax.recipe(config.recipe)
    if isinstance(config.weights, Adapters) and recipe.fp4 is not None:
        raise ValueError(
            f"lora={config.weights.rank} with recipe {describe(recipe)!r}: frozen"
            " weights are kept as the recipe stores them, and it stores none; use"
            " 'tensorwise', 'nvfp4' or 'bf16'"
        )
    own = program(config)
    learner_of(own)
    learner_of(program(config.ending))
    if mesh is None:
        return
    if isinstance(config.weights, Adapters):
        raise ValueError(
            f"lora={config.weights.rank} runs on one device; leave the mesh, or train"
            " all weights"
        )
    _check_mesh(config, mesh)
    state_places(own, mesh)


def _check_mesh(config: TrainConfig, mesh: Mesh) -> None:
    shares = mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1)
    parts = config.accumulate
    if parts > 1 and config.rows % shares:
        raise ValueError(
            f"accumulate={parts} computes {config.rows} of batch={config.batch} at"
            f" once, which data times fsdp, {shares}, must divide; use"
            f" batch={-(-config.rows // shares) * shares * parts}, or fewer parts"
        )
    heads = {
        name: getattr(config.size, name)
        for name in ("heads", "kv_heads")
        if hasattr(config.size, name)
    }
    check_mesh(mesh, batch=config.rows, heads=heads)


@functools.lru_cache(maxsize=16)
def _init_function(config: TrainConfig, mesh: Mesh | None) -> Callable[..., TrainState]:
    places = None if mesh is None else state_places(config, mesh)
    initialize = functools.partial(_initialize, config, mesh=mesh)
    return OnMesh(jax.jit(initialize, out_shardings=places), mesh)


def _initialize(
    config: TrainConfig,
    seed_key: jax.Array,
    start: Any = None,
    mesh: Mesh | None = None,
) -> TrainState:
    if isinstance(config.weights, Adapters):
        params, opt_state = frozen(
            _floats(config, seed_key),
            learner_of(config).weights,
            _optimizer(config, seed_key),
            config.compute_dtype,
        )
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32))
    return _state(config, seed_key, _parameters(config, seed_key, start, mesh))


def _parameters(
    config: TrainConfig,
    seed_key: jax.Array,
    start: Any = None,
    mesh: Mesh | None = None,
) -> Any:
    """Return the first parameters, stored or float; `start` has those of a file."""

    def floats() -> Any:
        params = _floats(config, seed_key) if start is None else start
        if mesh is None:
            return params
        places = parameter_shardings(params, mesh)
        return jax.lax.with_sharding_constraint(params, places)

    if not isinstance(config.weights, Stored):
        return floats()
    rounding = jax.random.fold_in(seed_key, ROUNDING)
    return tcfp_jax.store(
        floats, learner_of(config).weights, key=rounding, gradient_dtype=jnp.bfloat16
    )


def _state(config: TrainConfig, seed_key: jax.Array, params: Any) -> Any:
    """Return the first state of these parameters, with the reference for pairs."""
    opt_state = _optimizer(config, seed_key).init(params)
    step = jnp.zeros((), jnp.int32)
    if config.preferences is None:
        return TrainState(params, opt_state, step)
    recipe = tcfp_jax.recipe(config.recipe)
    quantized = tcfp_jax.layer_state(opt_state)
    reference = reference_of(params, quantized, recipe, config.compute_dtype)
    return PairState(params, opt_state, step, reference)


def _floats(config: TrainConfig, seed_key: jax.Array) -> Any:
    """Return the initial parameters, float32."""
    tokens = jnp.zeros((1, config.sequence), jnp.int32)
    # The BF16 recipe gives the same parameters, and no weight is quantized for tracing.
    floats = config.in_bf16
    if isinstance(config.weights, Adapters):
        floats = replace(floats, weights=config.weights)
    model = learner_of(floats).model
    params = model.init(jax.random.fold_in(seed_key, WEIGHTS), tokens)["params"]
    if not config.initial_jitter:
        return params
    key = jax.random.fold_in(seed_key, JITTER)
    return jittered(params, key, config.initial_jitter)


def count_parameters(config: TrainConfig) -> int:
    """Return the number of parameters of the model as floats."""
    shapes = _shapes(_floats, program(config))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@functools.lru_cache(maxsize=16)
def _step_function(config: TrainConfig, count: int, mesh: Mesh | None) -> StepFunction:
    # The key reaches `init` through the state; `update` takes it from there, so any
    # seed serves here.
    steps = make_steps(config, make_optimizer(config), count)
    return _jitted(steps, 2, config, mesh)


def _jitted(
    steps: Callable[..., Any], results: int, config: TrainConfig, mesh: Mesh | None
) -> Any:
    """Return a program of steps that reuses the memory of the state, its first result;
    each device has the whole of the others.
    """
    options: Any = dict(donate_argnums=0, compiler_options=step_flags() or None)
    if mesh is None:
        return jax.jit(steps, **options)
    others = [NamedSharding(mesh, P())] * (results - 1)
    places = (state_places(config, mesh), *others)
    return OnMesh(jax.jit(steps, **options, out_shardings=places), mesh)


def make_steps(
    config: TrainConfig, optimizer: optax.GradientTransformation, count: int
) -> StepFunction:
    """Return the function that `make_train_step` jits, with an optimizer of your
    own.
    """
    if config.update == "auto":
        raise ValueError(
            "update='auto' is decided before steps are made; use"
            " models.training.fitting.with_update, or name 'behind' or 'backward'"
        )
    loss_of = loss_function(config)
    differentiate = tcfp_jax.value_and_grad(loss_of, has_aux=True)
    differentiate = in_parts(differentiate, config.accumulate)

    def step_inside(
        state: TrainState, text: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        params, *operands = _operands(config, state, text, key)
        step = tcfp_jax.train_step(loss_of, optimizer, clip="late", has_aux=True)
        after, metrics = step(step.state(params, state.opt_state), *operands)
        return _after(state, after.params, after.opt_state), metrics.aux

    def one_step(
        state: TrainState, text: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        (_, told), gradients = differentiate(*_operands(config, state, text, key))
        state, _ = _updated(optimizer, state, gradients)
        return state, told

    def train_step(
        state: TrainState, text: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        step = one_step
        if config.update == "backward":
            step = step_inside
            # A loop of one round would hold the state twice.
            if count == 1:
                state, told = step(state, text, key)
                return state, told[None]
        return jax.lax.scan(
            lambda carry, _: step(carry, text, key), state, length=count
        )

    return train_step


def _operands(
    config: TrainConfig, state: TrainState, text: jax.Array, key: jax.Array
) -> tuple[Any, ...]:
    """Return the arguments of `loss_function` at a step."""
    quantized = quantized_of(config, state)
    batch = windows(config, state.step, text, key)
    operands = (state.params, quantized, batch, product_key(config, state, key))
    if config.preferences is None:
        return operands
    return (*operands, reference_variables(state))


def _updated(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: Any
) -> tuple[TrainState, Any]:
    """Return the next state, and the updates of its parameters."""
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = tcfp_jax.apply_updates(state.params, updates)
    return _after(state, params, opt_state), updates


def _after(state: TrainState, params: Any, opt_state: Any) -> TrainState:
    return state._replace(params=params, opt_state=opt_state, step=state.step + 1)


def loss_function(
    config: TrainConfig,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return (the mean loss, numbers that a step tells) as a function of parameters,
    quantized weights, windows, and a `product_key`; for pairs
    `models.training.dpo.pair_loss`. The numbers are the loss itself, else.
    """
    model = learner_of(config).model
    if config.preferences is not None:
        return pair_loss(model, reference_model(config), config.preferences)

    def loss_of(
        params: Any, quantized: Any, windows: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        losses, counted = window_losses(model, params, quantized, windows, key)
        mean = losses.mean() if counted is None else losses.sum() / counted.sum()
        return mean, mean

    return loss_of


def make_monitored_step(
    config: TrainConfig, count: int | None = None, mesh: Mesh | None = None
) -> Any:
    """Return `make_train_step` with its last step observed: `(state, losses, report)`.

    The other steps do not change.
    """
    return _monitored_function(
        program(config), config.steps_per_call if count is None else count, mesh
    )


@functools.lru_cache(maxsize=16)
def _monitored_function(config: TrainConfig, count: int, mesh: Mesh | None) -> Any:
    differentiate = monitor.value_and_grad(loss_function(config), has_aux=True)
    optimizer = make_optimizer(config)
    before = make_steps(config, optimizer, count - 1)
    stores = isinstance(config.weights, Stored)
    exact = make_optimizer(
        replace(config, weights=Stored("float32")) if stores else config
    )

    def last(
        state: TrainState, text: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array, Report]:
        operands = _operands(config, state, text, key)
        ((loss, _), gradients), readings = differentiate(*operands)
        after, updates = _updated(optimizer, state, gradients)
        old, quantized, *_ = operands
        new = after.params
        if stores:
            updates = monitor.float_updates(exact, gradients, state.opt_state, old)
        else:
            old = quantized
            new = quantized_of(config, after)
        found = {}
        # Products of floats, as in BF16, read no quantized weights.
        if jax.tree.leaves(old):
            found = monitor.update_quality(old, new, updates, layouts(config))
        stale = monitor.stale_moments(state.opt_state, after.opt_state)
        return after, loss, merged_report(readings, found, stale)

    def steps(
        state: TrainState, text: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array, Report]:
        losses = jnp.zeros((0,), jnp.float32)
        if count > 1:
            state, losses = before(state, text, key)
        state, loss, report = last(state, text, key)
        return state, jnp.concatenate([losses, loss[None]]), report

    return _jitted(steps, 3, config, mesh)
