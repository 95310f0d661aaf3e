"""Blocks and whole training steps of a converted model, compiled, as candidates.

Other libraries' FP8 is among the candidates of blocks (`benchmarks.peer_models`). With
remat="auto" of a Llama, a step keeps as many values for its backward pass as fit.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

import tcfp_jax
from benchmarks import timing
from benchmarks.peer_models import PEERS, Blocks, blocks_of, make_peer
from benchmarks.train_step import Candidate, both_passes
from benchmarks.variants import BASELINE, EMULATED
from models.nets.families import EXACT, TABLES, learner, plain_model
from models.nets.shapes import GPTConfig, LlamaConfig, ModelConfig, MoeConfig
from models.training.fitting import fit, is_open
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.recipes import Recipe
from tcfp_jax.remat import device_budget
from tcfp_jax.weights.stored import bytes_of

Part = Literal["block", "step"]
# Where the optimizer updates stored weights: behind the backward pass, or in it.
Update = Literal["behind", "backward"]
STORED = "stored"
# A candidate by its name, or by a recipe with fields of its own.
Named = str | Recipe
RECIPE_OF: dict[Named, str] = {STORED: "tcfp12_single"}


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run: sizes of each part, and repetitions."""

    block: LlamaConfig
    step: ModelConfig
    block_tokens: tuple[int, int]
    step_tokens: tuple[int, int]
    recipes: dict[Part, tuple[str, ...]]
    parts: tuple[Part, ...] = ("block", "step")
    include: tuple[Any, ...] = ("linear",)  # argument of `convert_to_tcfp`
    update: Update = "behind"  # the backward pass of stored weights, or in it


# Blocks
# --------------------------------------------------------------------------------------


def make_block(config: Config, name: str) -> Candidate:
    """Return the forward and backward pass of blocks, compiled."""
    sizes = *config.block_tokens, config.block.width
    model = Blocks(config.block)

    def draw(key: Array) -> tuple[Any, Array, Array]:
        x_key, g_key, key = jax.random.split(key, 3)
        x = jax.random.normal(x_key, sizes).astype(jnp.bfloat16)
        g = jax.random.normal(g_key, sizes).astype(jnp.bfloat16)
        return model.init(key, x)["params"], x, g

    if name in PEERS:
        return make_peer(blocks_of(name, config.block), draw)
    converted: Any = model
    feedback: Any = None
    if name != BASELINE:
        x = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
        converted = convert_to_tcfp(model, name, x, include=config.include)
        feedback = tcfp_jax.error_feedback(find_weights(converted))

    @jax.jit
    def prepare(key: Array) -> Any:
        params, x, g = draw(key)
        state = {}
        if feedback is not None:
            state = {"tcfp": tcfp_jax.layer_state(feedback.init(params))}
        return params, state, x, g

    key = jax.random.key(0)
    given = jax.eval_shape(prepare, key)
    compiled, seconds = timing.compile_timed(jax.jit(both_passes(converted)), *given)
    args = prepare(key)
    return Candidate(compiled, args, compiled, seconds, partial(compiled, *args))


# Whole steps
# --------------------------------------------------------------------------------------


def make_training(
    config: Config, name: Named, rate: float | optax.Schedule = 1e-4
) -> timing.Training:
    """Return a whole training step before it is compiled; `rate` is AdamW's."""
    batch, positions = config.step_tokens
    size = config.step
    model = plain_model(size, "bfloat16")
    converted: Any = model
    weights: Any = None
    # XLA multiplies every row by every expert, so the baseline of experts is the
    # recipe, whose products are grouped.
    if name != BASELINE or isinstance(size, MoeConfig):
        converted, weights = converted_step(config, name)
    optimizer = _optimizer(name, weights, rate)
    rngs = {"tcfp": jax.random.key(0)} if name in EMULATED else None

    def loss_of(params: Any, tokens: Array, *quantized: Any) -> Array:
        variables = {"params": params}
        if quantized:
            (variables["tcfp"],) = quantized
        losses: Array = converted.apply(
            variables, tokens[:, :-1], tokens[:, 1:], rngs=rngs
        )
        return losses.mean()

    @tcfp_jax.value_and_grad
    def gradients(params: Any, opt_state: Any, tokens: Array) -> Array:
        quantized = () if weights is None else (tcfp_jax.layer_state(opt_state),)
        return loss_of(params, tokens, *quantized)

    def draw(key: Array) -> tuple[Any, Array]:
        def floats() -> Any:
            return model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

        if name == STORED:
            params: Any = tcfp_jax.store(
                floats, weights or {}, key=key, gradient_dtype=jnp.bfloat16
            )
        else:
            params = floats()
        return params, jax.random.randint(
            key, (batch, positions + 1), 0, size.vocabulary
        )

    behind = timing.training_of(gradients, optimizer, draw)
    if name != STORED or config.update == "behind":
        return behind
    inside = tcfp_jax.train_step(loss_of, optimizer, clip="late")

    def init(key: Array) -> tuple[Any, Array]:
        (params, opt_state), tokens = behind.init(key)
        return inside.state(params, opt_state), tokens

    def step(state: Any, tokens: Array) -> tuple[Any, Array]:
        state, metrics = inside(state, tokens)
        return state, metrics.loss

    return timing.Training(init, step, gradients, inside.init)


def make_step(config: Config, name: str) -> Candidate:
    """Return a whole training step, compiled, which donates its state."""
    training = make_training(config, name)
    threaded, seconds = training.compile()

    def outputs() -> dict[str, Any]:
        loss, dparams = jax.jit(training.gradients)(*threaded.state, *threaded.inputs)
        return {"loss": loss, "dparams": dparams}

    return Candidate(threaded, (), threaded.compiled, seconds, outputs)


def converted_step(config: Config, name: Named) -> tuple[Any, Any]:
    """Return (the model of the whole step, its weights)."""
    recipe = tcfp_jax.recipe(RECIPE_OF.get(name, name))
    include = config.include
    rules: Any = {}
    if "head" in include:  # no layer of its shape was measured
        rules = {"^(embedding|head)/": recipe}
    elif "measured" in include:
        if name != STORED and name not in EMULATED:
            return learner(config.step, recipe, "bfloat16", config.step_tokens)
        include = ("linear", "small")
    if name in EMULATED:  # which gains nowhere
        include = ("linear", "small")
    if isinstance(config.step, GPTConfig):
        return learner(config.step, recipe, "bfloat16")
    if name == STORED:
        include = (*include, *TABLES)
    shape = jax.ShapeDtypeStruct(config.step_tokens, jnp.int32)
    plain = plain_model(config.step, "bfloat16")
    model = convert_to_tcfp(plain, recipe, shape, include=include, rules=EXACT | rules)
    return model, find_weights(model) or None


def _optimizer(
    name: Named, weights: Any, rate: float | optax.Schedule
) -> optax.GradientTransformation:
    """Return clipping and AdamW, as a user writes them for each kind of weights."""
    if name == STORED:
        key = jax.random.key(0)
        return tcfp_jax.optim.adamw(rate, moments="8bit", max_norm=1.0, key=key)
    parts = [optax.clip_by_global_norm(1.0), optax.adamw(rate)]
    if weights is not None:
        parts.append(tcfp_jax.error_feedback(weights))
    return optax.chain(*parts)


def quick(size: Any, **sizes: int) -> Any:
    """Return a Llama of one block whose kernels have one shape, for smoke runs.

    XLA compiles it in half the time.
    """
    size = replace(size, **sizes)
    return replace(
        size, layers=1, kv_heads=size.heads, hidden=size.width, loop="unrolled"
    )


# Values that a step keeps
# --------------------------------------------------------------------------------------


def settled(
    config: Config,
    name: str,
    rate: float | optax.Schedule = 1e-4,
    budget: int | None = None,
) -> tuple[Config, tuple[Any, float] | None]:
    """Return the settings with the values that fit, and the compiled step.

    Next to the step are the seconds of compiling it. If the settings say which values
    to keep, nothing is compiled.

    Args:
      config: The settings.
      name: The candidate.
      rate: The rate of AdamW.
      budget: Bytes that a step may need; None is `tcfp_jax.remat.device_budget()`.
    """
    if not is_open(config.step):
        return config, None
    started: dict[str, float] = {}

    def lower(remat: str) -> Any:
        started[remat] = time.perf_counter()
        return make_training(_keeping(config, remat), name, rate).lower()

    found = fit(tcfp_jax.recipe(RECIPE_OF.get(name, name)), lower, budget)
    # A level is compiled before the next one is lowered.
    later = [at for at in started.values() if at > started[found.level]]
    end = min(later, default=time.perf_counter())
    seconds = end - started[found.level]
    return _keeping(config, found.level), (found.compiled, seconds)


def _keeping(config: Config, remat: str) -> Config:
    step: Any = config.step
    return replace(config, step=replace(step, remat=remat))


def next_to_each_other(config: Config, names: Sequence[str]) -> dict[str, Config]:
    """Return the settings of each candidate, with room for the states of all.

    There is also room for two sets of gradients.
    """
    if not is_open(config.step):
        return dict.fromkeys(names, config)
    states = {name: _bytes_of_state(config, name) for name in names}
    # BF16's state is parameters and two moments, so two sets of gradients are smaller.
    free = device_budget() - sum(states.values()) - states[BASELINE]
    return {
        name: settled(config, name, budget=free + states[name])[0] for name in names
    }


def _bytes_of_state(config: Config, name: str) -> int:
    init = make_training(config, name).init
    return bytes_of(jax.eval_shape(init, jax.random.key(0))[0])
