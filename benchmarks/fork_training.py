"""Bases and forks: what `benchmarks.convergence` trains, and how a variant starts from a base's weights and moments.

A base is a BF16 run of `base_steps` steps, and a fork continues it. A run from scratch is a fork of a base of no steps:
initial weights and moments of zero. So both protocols are one piece of code, and every variant has both.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import tcfp_jax
from benchmarks.variants import BASELINE, Variant
from models.families import ModelConfig
from models.phases import phase_at
from models.settings import TrainConfig
from models.training import TrainState, in_stacks, jittered, layouts, make_optimizer, make_steps
from tcfp_jax.optim import AdamWState
from tcfp_jax.optim import moments as narrow
from tcfp_jax.paths import path_names
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.training import Remainder, is_stored

Task = Literal["text", "digits"]
TASKS: tuple[Task, ...] = ("text", "digits")


@dataclass(frozen=True)
class Config:
    """What a run was asked for; runs of other `settings` are not comparable, so `--resume` refuses them.

    Attributes:
      model, size: the name of a model, or "12x768", a GPT on bytes of that many layers of that width; and its sizes.
      batch, sequence: of every step.
      learning_rate, warmup_steps: the rate's peak, and its way there.
      base_steps: in BF16, at the peak, before runs fork; 0 for runs from scratch.
      steps: of a fork, linearly to a rate of zero; of a run from scratch, as a cosine to zero after the warm-up.
      steps_per_call: in one dispatch; it divides the steps of base and runs.
      heldout_windows: of the evaluation.
      digits_steps: of the task of digits.
      text_bytes: at most this much text.
      text, text_read: first digits of the digest of the text, and how many bytes there were.
      jax: version.
      parameters: of the model.
      data: files and folders of text; none is the sources of all installed packages and of Python's library.
      variants, tasks, seeds: what is wanted.
      budget_seconds: runs stop after this, and are continued by `--resume`.
      bases: the folder of bases, of runs that were stopped, and of compiled programs; None keeps nothing, and then
        what is begun is finished.
      resume: the JSON whose rows are kept.

    Raises:
      ValueError: a count below 1, `steps_per_call` does not divide the steps, or the warm-up does not end within the
        base, or within a run from scratch.
    """

    model: str
    size: ModelConfig
    batch: int = 32
    sequence: int = 1024
    learning_rate: float = 6e-4
    warmup_steps: int = 100
    base_steps: int = 1000
    steps: int = 300
    steps_per_call: int = 20
    heldout_windows: int = 768
    digits_steps: int = 400
    text_bytes: int = 200_000_000
    text: str = ""
    jax: str = jax.__version__
    text_read: int = field(default=0, compare=False)
    parameters: int = field(default=0, compare=False)
    data: tuple[str, ...] = field(default=(), compare=False)
    variants: tuple[str, ...] = field(default=(BASELINE,), compare=False)
    tasks: tuple[Task, ...] = field(default=("text",), compare=False)
    seeds: tuple[int, ...] = field(default=(0,), compare=False)
    budget_seconds: float = field(default=math.inf, compare=False)
    bases: str | None = field(default=None, compare=False)
    resume: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, least in dict(batch=1, steps_per_call=1, digits_steps=1, warmup_steps=0).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name, least in (("base_steps", 0), ("steps", 1)):
            if getattr(self, name) < least or getattr(self, name) % self.steps_per_call:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a multiple of steps_per_call={self.steps_per_call}, by which "
                    "base and forks share one compiled program; change the steps"
                )
        if not self.base_steps and self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} of steps={self.steps}: the rate never falls; lower warmup_steps"
            )
        if 0 < self.base_steps < self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} with base_steps={self.base_steps}: forks fall from the peak, which "
                "the base must have reached; lower warmup_steps, or raise base_steps"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on."""
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        return {**chosen, "size": dataclasses.asdict(self.size)}


def train_config(config: Config, variant: Variant, seed: int = 0) -> TrainConfig:
    """The run of a variant, base and fork, but for its schedule of rates.

    Raises:
      ValueError: the variant finishes with a recipe that reads another kind of stored weights, which the message
        names; its last part is less than half a dispatch or all of the run; or the model has no such ends.
    """
    total, call = config.base_steps + config.steps, config.steps_per_call
    schedule: tuple[tuple[float, str | Recipe], ...] = ()
    if variant.finish is not None:
        part, later = variant.finish
        before = call * round((1 - part) * config.steps / call)
        if not 0 < before < config.steps:
            raise ValueError(
                f"the finish of {variant.meaning or 'this variant'} never switches: {part:g} of {config.steps} steps "
                f"in calls of {call} begins at step {before}; choose another part, more steps, or fewer in a call"
            )
        schedule = (((config.base_steps + before) / total, later),)
    run = TrainConfig(
        model=config.size, recipe=variant.recipe, recipe_schedule=schedule, ends=variant.ends, weights=variant.weights,
        moments=variant.moments, seed=seed, batch=config.batch, sequence=config.sequence, steps=total,
        learning_rate=config.learning_rate, steps_per_call=call, heldout_windows=config.heldout_windows,
        corpus_bytes=config.text_bytes,
    )  # fmt: skip
    assert all(first == config.base_steps + before for first, _ in run.switches)
    return run


def last_phase(config: Config, variant: Variant, seed: int = 0) -> TrainConfig:
    """How a variant ends, and is evaluated."""
    run = train_config(config, variant, seed)
    return phase_at(run, run.steps - 1)


def schedule_of(config: Config) -> optax.Schedule:
    """The rate of base and fork: up, level, and linearly down to zero; from scratch up, and down as a cosine."""
    rate, warmup, start = config.learning_rate, config.warmup_steps, config.base_steps
    if not start:
        return optax.warmup_cosine_decay_schedule(0.0, rate, warmup, config.steps, 0.0)
    up, down = optax.linear_schedule(0.0, rate, warmup), optax.linear_schedule(rate, 0.0, config.steps)
    return optax.join_schedules([up, optax.constant_schedule(rate), down], [warmup, start])


@functools.cache
def _optimizer(config: Config, phase: TrainConfig, remainder: str) -> optax.GradientTransformation:
    schedule = schedule_of(config)
    return make_optimizer(phase, schedule)


@functools.cache
def steps_of(config: Config, phase: TrainConfig, remainder: str) -> Any:
    """The jitted steps of one dispatch, for every base and seed."""
    steps = make_steps(phase, _optimizer(config, phase, remainder), config.steps_per_call)
    return jax.jit(steps, donate_argnums=0)


def start_fork(config: Config, variant: Variant) -> Any:
    """The jitted function of a base's state and a key that gives the state in which a variant starts, and its noise.

    The noise is of each stored kernel, by path: squares of what storing lost, over those of the kernel. Variants that
    differ in how they go on have one function.
    """
    return _start(config, dataclasses.replace(variant, finish=None, batches="same"))


@functools.cache
def _start(config: Config, variant: Variant) -> Any:
    run = train_config(config, variant)
    # The optimizer is made before the trace: it holds a key, and outlives the trace.
    optimizer = _optimizer(config, run, variant.remainder)

    @jax.jit
    def start(base: TrainState, key: jax.Array) -> tuple[TrainState, Any]:
        base = in_stacks(run, base)
        params = jittered(base.params, key, variant.perturbation) if variant.perturbation else base.params
        state = _with_floats(base, params) if variant.weights == "float" else _with_stored(base, params, key)
        # Copies: jit hands on what it does not change, and the steps of a fork would donate arrays of the base.
        return jax.tree.map(jnp.copy, state), _noise(params, state.params)

    def _with_floats(base: TrainState, params: Any) -> TrainState:
        # The last state of the chain is that of the quantized weights.
        fresh: Any = optimizer.init(params)
        return TrainState(params, (*base.opt_state[:-1], fresh[-1]), base.step)

    def _with_stored(base: TrainState, params: Any, key: jax.Array) -> TrainState:
        remainder: Remainder = variant.remainder
        stored = tcfp_jax.store(
            params, layouts(run) or variant.recipe, key=key if remainder == "stochastic" else None,
            remainder=remainder, gradient_dtype=variant.gradient_dtype,
        )  # fmt: skip
        opt_state: Any = optimizer.init(stored)
        return TrainState(stored, continued(opt_state, base.opt_state, jax.random.fold_in(key, 1)), base.step)

    return start


def continued(state: AdamWState, before: Any, key: jax.Array) -> AdamWState:
    """A fresh state of `tcfp_jax.optim.adamw` with the count and moments of a state of optax's, rounded as it rounds.

    The key is in the place of the state's own, if that has one: each base has bits of its own.
    """
    if state.key is not None:
        state = state._replace(key=jax.random.key_data(key).astype(jnp.uint32).reshape(-1))
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)
    (adam,) = filter(is_adam, jax.tree.leaves(before, is_leaf=is_adam))

    def rounded(fresh: Any, moments: Any, which: int) -> tuple[Any, dict[str, Any]]:
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(fresh)
        scales: dict[str, Any] = {}
        leaves = []
        for i, ((path, leaf), moment) in enumerate(zip(paths, jax.tree.leaves(moments), strict=True)):
            form: Any = "ue5m3" if leaf.dtype == jnp.uint8 else leaf.dtype.name
            # Steps count from 1, so that none of them draws the bits of step 0.
            code = narrow.encode(form, moment.reshape(leaf.shape), narrow.stream(state.key, 0, which, i))
            leaves.append(narrow.kept(code, path_names(path), scales))
        return treedef.unflatten(leaves), scales

    (mu, mu_scale), (nu, nu_scale) = rounded(state.mu, adam.mu, 0), rounded(state.nu, adam.nu, 1)
    return state._replace(count=adam.count, mu=mu, mu_scale=mu_scale, nu=nu, nu_scale=nu_scale)


def _noise(params: Any, stored: Any) -> Any:
    """Squares of what storing lost of each kernel, over those of the kernel; by path."""
    before, after = (jax.tree_util.tree_leaves_with_path(t) for t in (params, tcfp_jax.dequantize(stored)))
    kinds = jax.tree.leaves(stored, is_leaf=is_stored)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): jnp.sum(jnp.square(a - b)) / jnp.sum(jnp.square(a))
        for (path, a), (_, b), kind in zip(before, after, kinds, strict=True)
        if is_stored(kind)
    }
