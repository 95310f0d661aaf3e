"""Training of a language model as pure functions: initial state, a jitted train step,
held-out evaluation.

A run is a function of its `TrainConfig`. Initial weights come from `seed`, and the
windows of step t from `fold_in(seed, t)`, which the jitted step computes on the device.
So a checkpoint needs no data-loader state, two recipes with one seed see identical
weights and batches, and a resumed run equals the uninterrupted one bit for bit.

    train_step : (state, text, key) -> (state, losses of the next `count` steps)        one `lax.scan`, one dispatch

On a mesh of `models.nets.meshes` the same functions run on all its devices, of all
processes. Every device holds the whole text and reads the windows of its part of a
batch, so no window is sent.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from models.huggingface.folders import read_folder
from models.nets.adapters import adapting, frozen, is_adapter, merged
from models.nets.families import Learner, learner
from models.nets.llama import LlamaConfig
from models.nets.meshes import OnMesh, parameter_shardings
from models.training.batches import (
    check_text,
    heldout_offsets,
    heldout_windows,
    window_losses,
    windows,
    windows_at,
)
from models.training.settings import TrainConfig
from models.training.starting import read_parameters
from tcfp_jax import optim
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parameter import is_quantized

# Streams drawn from the seed. The numbers are arbitrary and fixed: changing one changes
# every run.
_WEIGHTS, _BATCHES, _ROUNDING, _JITTER, _MOMENTS, _PRODUCTS = range(6)


class TrainState(NamedTuple):
    """Everything that a checkpoint holds: parameters, the optimizer's state, and the
    next step.

    Parameters are float32 or stored. Next to float parameters, the optimizer's state
    holds the quantized weights.
    """

    params: Any
    opt_state: Any
    step: jax.Array


B1, B2 = 0.9, 0.95  # decay of AdamW's moments
StepFunction = Callable[
    [TrainState, jax.Array, jax.Array], tuple[TrainState, jax.Array]
]


def init(config: TrainConfig, mesh: Mesh | None = None) -> TrainState:
    """Return the state before the first step. Parameters depend on the model and the
    seed, not on recipe or mesh.

    Stored weights are made one after another, so that no float copy of all of them
    exists. On a mesh, each device makes its own part. With `config.start` the
    parameters come from a checkpoint.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      ValueError: the checkpoint is of another model.
    """
    own, key = program(config), jax.random.key(config.seed)
    if config.start is None:
        return _init_function(own, mesh)(key)
    return _init_function(own, mesh)(key, read_start(config))


def read_start(config: TrainConfig) -> Any:
    """Return the float parameters in `config.start`, a file or a folder of Hugging
    Face.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      ValueError: the checkpoint is of another model.
    """
    shapes = _shapes(_floats, program(replace(config, lora=0)))
    path, size = Path(str(config.start)), config.size
    if path.is_dir() and isinstance(size, LlamaConfig):
        return read_folder(path, shapes, size)
    return read_parameters(path, shapes)


def make_train_step(
    config: TrainConfig, count: int | None = None, mesh: Mesh | None = None
) -> StepFunction:
    """Return a jitted function that runs `count` steps (default
    `config.steps_per_call`) in one dispatch.

    Its arguments are the state (donated: do not use it again), the training text as
    integers `[tokens]`, and `batch_key(config)`. It returns the new state and the
    losses, float32 `[count]`, in nats per token. Configs that differ only in the seed
    share one compiled function.
    """
    return _step_function(
        program(config), config.steps_per_call if count is None else count, mesh
    )


def batch_key(config: TrainConfig) -> jax.Array:
    """Return the random key from which `make_train_step` derives the windows of every
    step.
    """
    return jax.random.fold_in(jax.random.key(config.seed), _BATCHES)


def evaluate(
    config: TrainConfig,
    state: TrainState,
    heldout: jax.Array,
    products: Literal["trained", "bf16"] = "trained",
    mesh: Mesh | None = None,
) -> float:
    """Return the mean loss in nats per token over `config.heldout_windows` evenly
    spaced windows of `heldout`.

    With `products="trained"` layers multiply as in training, with the same quantized
    weights. "bf16" multiplies float32 parameters in BF16, which leaves out the error of
    FP8 products. Losses are float32; they are summed in float32 within a window and in
    float64 over windows.

    Raises:
      ValueError: the text is shorter than one window.
    """
    check_text("held-out", heldout, config)
    offsets = heldout_offsets(config, heldout)
    params, quantized = state.params, tcfp_jax.layer_state(state.opt_state)
    if products == "bf16":
        # A separate program dequantizes, so that all kinds of weights share one program
        # of the evaluation.
        config, params, quantized = (
            config.in_bf16,
            float_parameters(params, quantized),
            {},
        )
    found = _evaluate_function(program(config), mesh)(
        params, quantized, jnp.asarray(heldout), offsets
    )
    losses, counted = (
        np.asarray(found, np.float64)
        .reshape(-1, 2)[: heldout_windows(config, heldout)]
        .T
    )
    return float(losses.sum() / counted.sum() if heldout.ndim > 1 else losses.mean())


def float_parameters(params: Any, quantized: Any = None) -> Any:
    """Return float32 parameters in Flax's own tree, for export and for BF16 products.

    Adapters are merged with the `quantized` weights of `layer_state`.
    """
    if any(is_adapter(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)):
        return _merged(params, quantized)
    stored = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    return _dequantize(params) if stored else params


_dequantize, _merged = jax.jit(tcfp_jax.dequantize), jax.jit(merged)


def make_optimizer(
    config: TrainConfig,
    schedule: optax.Schedule | None = None,
) -> optax.GradientTransformation:
    """Return clipped AdamW: one for stored weights, or a chain whose last state holds
    the quantized weights.

    Without a `schedule`, the rate warms up over a tenth of the steps and falls as a
    cosine over the others.
    """
    return _optimizer(config, jax.random.key(config.seed), schedule)


def _optimizer(
    config: TrainConfig,
    seed_key: jax.Array,
    schedule: optax.Schedule | None = None,
) -> optax.GradientTransformation:
    if schedule is None:
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=config.learning_rate,
            warmup_steps=max(1, config.steps // 10),
            decay_steps=max(2, config.steps),
            end_value=config.learning_rate * config.final_fraction,
        )
    adamw: Any = dict(
        learning_rate=schedule,
        b1=B1,
        b2=B2,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
    )
    if config.weights == "stored":
        moments_key = (
            None
            if config.moments == "float32"
            else jax.random.fold_in(seed_key, _MOMENTS)
        )
        return optim.adamw(
            **adamw,
            moments=config.moments,
            max_norm=config.clip_norm,
            key=moments_key,
        )
    if config.lora:
        return adapting(
            optax.chain(
                optax.clip_by_global_norm(config.clip_norm), optax.adamw(**adamw)
            )
        )
    recipe = tcfp_jax.recipe(config.recipe)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(**adamw),
        tcfp_jax.error_feedback(
            _learner(config).weights,
            key=jax.random.fold_in(seed_key, _ROUNDING) if recipe.stochastic else None,
            error_dtype=config.error_dtype if recipe.feedback else "float32",
        ),
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(
        lambda leaf: is_quantized(leaf) or leaf.ndim >= 2, params, is_leaf=is_quantized
    )


def program(config: TrainConfig) -> TrainConfig:
    """Return the config that the compiled functions depend on, so that runs with other
    data share them.
    """
    return replace(
        config,
        model=config.size,
        recipe=tcfp_jax.recipe(config.recipe),
        dtype=config.compute_dtype,
        seed=0,
        heldout_windows=1,
        corpus_bytes=1,
        steps_per_call=1,
        data=(),
        vocabulary=None,
        tokenizer=None,
        monitor=0,
        start="" if config.lora else None,
        remat=None,
        sample=None,
    )


def _learner(config: TrainConfig) -> Learner:
    tokens = (config.batch, config.sequence) if config.include == "measured" else None
    tables = "float" if config.include == "layers" else config.weights
    return learner(
        config.size,
        tcfp_jax.recipe(config.recipe),
        config.compute_dtype,
        tokens,
        tables,
    )


def state_shapes(config: TrainConfig, mesh: Mesh | None = None) -> TrainState:
    """Return the shapes of a state with the placement of its arrays, into which a
    checkpoint is read.
    """
    own = program(config)
    shapes = _shapes(_initialize, own)
    alone = SingleDeviceSharding(jax.devices()[0])
    places = (
        jax.tree.map(lambda _: alone, shapes)
        if mesh is None
        else state_places(own, mesh)
    )
    shaped = lambda leaf, place: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place
    )
    return jax.tree.map(shaped, shapes, places)


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
    """Raise `ValueError` if no layer takes the recipe, or if the mesh does not divide
    an array of the state.
    """
    own = program(config)
    _learner(own)
    if mesh is not None and config.lora:
        raise ValueError(
            f"lora={config.lora} runs on one device; leave the mesh, or train all"
            " weights"
        )
    if mesh is not None:
        state_places(own, mesh)


@functools.lru_cache(maxsize=16)
def _init_function(config: TrainConfig, mesh: Mesh | None) -> Callable[..., TrainState]:
    places = None if mesh is None else state_places(config, mesh)
    return OnMesh(
        jax.jit(
            functools.partial(_initialize, config, mesh=mesh), out_shardings=places
        ),
        mesh,
    )


def _initialize(
    config: TrainConfig,
    seed_key: jax.Array,
    start: Any = None,
    mesh: Mesh | None = None,
) -> TrainState:
    if config.lora:
        params, opt_state = frozen(
            _floats(config, seed_key),
            start,
            _learner(config).weights,
            _optimizer(config, seed_key),
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

    if config.weights != "stored":
        return floats()
    rounding = jax.random.fold_in(seed_key, _ROUNDING)
    return tcfp_jax.store(
        floats, _learner(config).weights, key=rounding, gradient_dtype=jnp.bfloat16
    )


def _state(config: TrainConfig, seed_key: jax.Array, params: Any) -> TrainState:
    """Return the first state of these parameters."""
    opt_state = _optimizer(config, seed_key).init(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def _floats(config: TrainConfig, seed_key: jax.Array) -> Any:
    """Return the initial parameters, float32."""
    tokens = jnp.zeros((1, config.sequence), jnp.int32)
    # The BF16 recipe gives the same parameters, and no weight is quantized for tracing.
    model = _learner(replace(config.in_bf16, lora=config.lora)).model
    params = model.init(jax.random.fold_in(seed_key, _WEIGHTS), tokens)["params"]
    if not config.initial_jitter:
        return params
    return jittered(
        params, jax.random.fold_in(seed_key, _JITTER), config.initial_jitter
    )


def count_parameters(config: TrainConfig) -> int:
    """Return the number of parameters of the model as floats."""
    return sum(
        math.prod(leaf.shape)
        for leaf in jax.tree.leaves(_shapes(_floats, program(config)))
    )


def jittered(params: Any, key: jax.Array, size: float) -> Any:
    """Return float parameters times `1 + size * normal`, to see how far differences of
    rounding grow.
    """
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.tree.unflatten(treedef, list(jax.random.split(key, len(leaves))))
    return jax.tree.map(
        lambda leaf, k: (
            leaf * (1 + size * jax.random.normal(k, leaf.shape, leaf.dtype))
        ),
        params,
        keys,
    )


@functools.lru_cache(maxsize=16)
def _step_function(config: TrainConfig, count: int, mesh: Mesh | None) -> StepFunction:
    # The key reaches `init` through the state; `update` takes it from there, so any
    # seed serves here.
    steps = make_steps(config, make_optimizer(config), count)
    if mesh is None:
        return jax.jit(steps, donate_argnums=0)
    places = state_places(config, mesh), NamedSharding(mesh, P())
    return OnMesh(jax.jit(steps, donate_argnums=0, out_shardings=places), mesh)


def make_steps(
    config: TrainConfig, optimizer: optax.GradientTransformation, count: int
) -> StepFunction:
    """Return the function that `make_train_step` jits, with an optimizer of your
    own.
    """
    loss_of = loss_function(config)

    def one_step(
        state: TrainState, text: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        batch = windows(config, state.step, text, key)
        quantized = tcfp_jax.layer_state(state.opt_state)
        bits = product_key(config, state, key)
        loss, gradients = tcfp_jax.value_and_grad(loss_of)(
            state.params, quantized, batch, bits
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return (
            TrainState(
                tcfp_jax.apply_updates(state.params, updates), opt_state, state.step + 1
            ),
            loss,
        )

    def train_step(
        state: TrainState, text: jax.Array, key: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        return jax.lax.scan(
            lambda carry, _: one_step(carry, text, key), state, length=count
        )

    return train_step


def loss_function(config: TrainConfig) -> Callable[..., jax.Array]:
    """Return the mean loss as a function of parameters, quantized weights, windows, and
    a `product_key`.
    """
    model = _learner(config).model

    def loss_of(
        params: Any, quantized: Any, windows: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        losses, counted = window_losses(model, params, quantized, windows, key)
        return losses.mean() if counted is None else losses.sum() / counted.sum()

    return loss_of


def product_key(
    config: TrainConfig, state: TrainState, key: jax.Array
) -> jax.Array | None:
    """Return the key of the random bits in the products of the next step; None if the
    recipe draws none.
    """
    if not tcfp_jax.recipe(config.recipe).draws:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, state.step), _PRODUCTS)


def model_of(config: TrainConfig) -> nn.Module:
    """Return the model that a run trains; configs of one program share it."""
    return _learner(program(config)).model


def layouts(config: TrainConfig) -> Mapping[str, Weight] | None:
    """Return the contracted axes of each weight by path; None if all kernels are
    `[..., k, n]`.
    """
    weights = _learner(config).weights
    return weights if isinstance(weights, Mapping) else None


@functools.lru_cache(maxsize=16)
def _evaluate_function(config: TrainConfig, mesh: Mesh | None) -> Any:
    model = _learner(config).model

    def losses(
        params: Any, quantized: Any, text: jax.Array, offsets: jax.Array
    ) -> jax.Array:
        def of_batch(offsets: jax.Array) -> jax.Array:
            losses, counted = window_losses(
                model, params, quantized, windows_at(text, offsets, config)
            )
            if counted is None:
                return jnp.stack([losses.mean(axis=-1), jnp.ones(len(losses))], axis=-1)
            return jnp.stack(
                [losses.sum(axis=-1), counted.sum(axis=-1, dtype=jnp.float32)], axis=-1
            )

        return jax.lax.map(of_batch, offsets)

    return OnMesh(
        jax.jit(
            losses, out_shardings=None if mesh is None else NamedSharding(mesh, P())
        ),
        mesh,
    )
