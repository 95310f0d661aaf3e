"""Bases and forks: what `benchmarks.forks` trains, from one BF16 run's weights and moments to the end of a fork."""

import dataclasses
import functools
import hashlib
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tcfp_jax
from benchmarks.convergence import RERUN_JITTER
from benchmarks.eco import eco
from models.checkpoint import RunDirectory
from models.gpt import GPTConfig
from models.settings import Moments, TrainConfig, Weights
from models.training import B1, B2, TrainState, batch_key, init, jittered, lower_evaluation, make_optimizer, make_steps
from tcfp_jax.optim import AdamWState
from tcfp_jax.optim import moments as narrow
from tcfp_jax.paths import path_names
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.weights.training import Remainder, is_stored

BASELINE, RERUN = "bf16", "bf16_rerun"


@dataclass(frozen=True)
class Variant:
    """How a fork trains: `weights` and `moments` as in `models.train`, the rest as `tcfp_jax.store` takes it.

    The remainder "eco" is "stochastic", and what it leaves goes into the first moment. `ends` are those of
    `TrainConfig`, and `finish` is the recipe of the last dispatch, `steps_per_call` steps, and of the evaluation.
    """

    recipe: Recipe
    weights: Weights = "float"
    moments: Moments = "float32"
    remainder: Literal["stochastic", "feedback", "eco"] = "stochastic"
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    ends: tuple[int, int, str] | None = None
    finish: Recipe | None = None

    @property
    def finishing(self) -> "Variant":
        """How its last steps train."""
        return self if self.finish is None else dataclasses.replace(self, recipe=self.finish, finish=None)


def _stored(
    moments: Moments = "8bit", *, remainder: Any = "stochastic", gradient_dtype: Any = "float32", **overrides: Any
) -> Variant:
    return Variant(recipe("tcfp12_single", **overrides), "stored", moments, remainder, gradient_dtype)


VARIANTS = {
    BASELINE: Variant(recipe("bf16")),
    RERUN: Variant(recipe("bf16")),
    "tensorwise": Variant(recipe("tensorwise")),
    "tensorwise_e4m3": Variant(recipe("tensorwise", gradient="float8_e4m3fn")),
    "tcfp12_fast": Variant(recipe("tcfp12_fast")),
    "stored": _stored(),
    "stored_e5m2": _stored(gradient="float8_e5m2"),
    "stored_bfloat16_moments": _stored("bfloat16"),
    "stored_float32_moments": _stored("float32"),
    "stored_dual_forward": _stored(forward_weight="hi+lo"),
    "stored_feedback": _stored(remainder="feedback"),
    "stored_eco": _stored("float32", remainder="eco"),
    "stored_bfloat16_gradients": _stored(gradient_dtype="bfloat16"),
    "stored_blocks": _stored(block=128),
}
# NVFP4 operands in all products, emulated; the first two are controls, which must be worse than the third.
FP4 = {
    "nvfp4_nearest": Variant(recipe("nvfp4_training", gradient_rounding="nearest")),
    "nvfp4_stochastic_activations": Variant(recipe("nvfp4_training", activation_rounding="stochastic")),
    "nvfp4_training": Variant(recipe("nvfp4_training")),
    "nvfp4_training_four_over_six": Variant(recipe("nvfp4_training_four_over_six")),
    "nvfp4_training_fold_exact": Variant(recipe("nvfp4_training_fold_exact")),
    "quartet2": Variant(recipe("quartet2")),
    "quartet2_bf16_finish": Variant(recipe("quartet2"), finish=recipe("quartet2", forward_operands="bf16")),
    "quartet2_last_block_bf16": Variant(recipe("quartet2"), ends=(0, 1, "bf16")),
}
VARIANTS |= FP4


@dataclass(frozen=True)
class Config:
    """What a run was asked for; forks of other `settings` are not comparable, so `--resume` refuses them.

    Attributes:
      model: layers, width, heads, context and attention.
      batch, sequence: of every step.
      learning_rate, warmup_steps, base_steps, fork_steps: the rate's peak, and its way there and to zero.
      steps_per_call: in one dispatch; it divides the steps of base and fork.
      heldout_windows: of the evaluation.
      rerun_jitter: relative deviation of the perturbation of `bf16_rerun`.
      text_bytes: at most this much text.
      text, text_read: first digits of the digest of the text, and how many bytes there were.
      jax: version.
      forks, seeds: what is wanted.
      budget_seconds: no fork starts that may end later than this, counted from the first base.
      bases: the folder of bases and of compiled programs; None keeps nothing.
      resume: the JSON whose forks are kept.

    Raises:
      ValueError: `steps_per_call` does not divide the steps.
    """

    model: GPTConfig
    batch: int = 32
    sequence: int = 1024
    learning_rate: float = 6e-4
    warmup_steps: int = 100
    base_steps: int = 1000
    fork_steps: int = 300
    steps_per_call: int = 100
    heldout_windows: int = 768
    rerun_jitter: float = RERUN_JITTER
    text_bytes: int = 200_000_000
    text: str = ""
    jax: str = jax.__version__
    text_read: int = field(default=0, compare=False)
    forks: tuple[str, ...] = field(default=tuple(VARIANTS), compare=False)
    seeds: tuple[int, ...] = field(default=(0,), compare=False)
    budget_seconds: float = field(default=math.inf, compare=False)
    bases: str | None = field(default=None, compare=False)
    resume: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("base_steps", "fork_steps"):
            if getattr(self, name) < 1 or getattr(self, name) % self.steps_per_call:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a multiple of steps_per_call={self.steps_per_call}, by which "
                    "base and forks share one compiled program; change the steps"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """What the numbers of a fork depend on."""
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        return {**chosen, "model": dataclasses.asdict(self.model)}


@dataclass(frozen=True)
class Base:
    """A trained base: its seed, the digest of its losses, and its state."""

    seed: int
    name: str
    state: TrainState


def train_config(config: Config, variant: Variant, seed: int = 0) -> TrainConfig:
    """The run of a variant, base and fork, but for the schedule."""
    return TrainConfig(
        model=config.model, recipe=variant.recipe, weights=variant.weights, moments=variant.moments, seed=seed,
        batch=config.batch, sequence=config.sequence, steps=config.base_steps + config.fork_steps,
        learning_rate=config.learning_rate, steps_per_call=config.steps_per_call,
        heldout_windows=config.heldout_windows, corpus_bytes=config.text_bytes, ends=variant.ends,
    )  # fmt: skip


def schedule_of(config: Config) -> optax.Schedule:
    """The rate of base and fork: up, level, and linearly down to zero."""
    rate, start = config.learning_rate, config.base_steps
    up, down = (
        optax.linear_schedule(0.0, rate, config.warmup_steps),
        optax.linear_schedule(rate, 0.0, config.fork_steps),
    )
    return optax.join_schedules([up, optax.constant_schedule(rate), down], [config.warmup_steps, start])


@functools.cache
def _optimizer(config: Config, variant: Variant) -> optax.GradientTransformation:
    run, schedule = train_config(config, variant), schedule_of(config)
    optimizer = make_optimizer(run, schedule)
    if variant.remainder != "eco":
        return optimizer
    return eco(optimizer, schedule, peak=run.learning_rate, b1=B1, b2=B2, weight_decay=run.weight_decay)


@functools.cache
def _steps(config: Config, variant: Variant) -> Any:
    """The jitted steps of one dispatch, for every base and seed."""
    steps = make_steps(train_config(config, variant), _optimizer(config, variant), config.steps_per_call)
    return jax.jit(steps, donate_argnums=0)


@functools.cache
def start_fork(config: Config, name: str) -> Any:
    """The jitted function of a base's state and a key that gives the state in which a fork starts."""
    # The optimizer is made before the trace: it holds a key, and outlives the trace.
    variant, optimizer = VARIANTS[name], _optimizer(config, VARIANTS[name])

    @jax.jit
    def start(base: TrainState, key: jax.Array) -> tuple[TrainState, Any]:
        params = jittered(base.params, key, config.rerun_jitter) if name == RERUN else base.params
        state = _with_floats(base, params, variant) if variant.weights == "float" else _with_stored(base, variant, key)
        # Copies: jit hands on what it does not change, and the steps of a fork would donate arrays of the base.
        return jax.tree.map(jnp.copy, state), _noise(params, state.params)

    def _with_stored(base: TrainState, variant: Variant, key: jax.Array) -> TrainState:
        remainder: Remainder = "stochastic" if variant.remainder == "eco" else variant.remainder
        params = tcfp_jax.store(
            base.params, variant.recipe, key=key if remainder == "stochastic" else None,
            remainder=remainder, gradient_dtype=variant.gradient_dtype,
        )  # fmt: skip
        opt_state: Any = optimizer.init(params)
        return TrainState(params, continued(opt_state, base.opt_state, jax.random.fold_in(key, 1)), base.step)

    return start


def _with_floats(base: TrainState, params: Any, variant: Variant) -> TrainState:
    # The last state of the chain is that of the quantized weights.
    opt_state = (*base.opt_state[:-1], tcfp_jax.error_feedback(variant.recipe).init(params))
    return TrainState(params, opt_state, base.step)


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


def compile_forks(config: Config, names: Sequence[str], text_bytes: int, heldout_bytes: int) -> None:
    """Compile the programs of base and forks, several at once; what calls them later finds them compiled.

    What does not compile is left to the call that needs it, which raises.
    """
    base = jax.eval_shape(lambda: init(train_config(config, VARIANTS[BASELINE])))
    text, key = jax.ShapeDtypeStruct((text_bytes,), jnp.uint8), jax.random.key(0)
    one_at_a_time = threading.Lock()  # Python traces in one thread anyway; XLA compiles in several

    def compile_one(name: str) -> None:
        variant = VARIANTS[name]
        with one_at_a_time:
            run, start = train_config(config, variant.finishing), start_fork(config, name)
            state, _ = jax.eval_shape(start, base, key)
            lowered = [start.lower(base, key)]
            if name != RERUN:  # it has the baseline's
                for way in dict.fromkeys((variant, variant.finishing)):
                    lowered.append(_steps(config, way).lower(state, text, batch_key(run)))
                lowered.append(lower_evaluation(run, state, heldout_bytes))
        for program in lowered:
            program.compile()

    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        for name, work in [(name, pool.submit(compile_one, name)) for name in names]:
            if work.exception() is not None:
                print(f"{name} does not compile: {work.exception()}", flush=True)


def train_base(config: Config, seed: int, text: jax.Array, digest: str) -> Base:
    """The base of a seed: from its folder, or trained, and kept there."""
    variant, started = VARIANTS[BASELINE], time.perf_counter()
    run = train_config(config, variant, seed)
    train = lambda state: advance(config, variant, seed, state, text, config.base_steps)[:2]
    losses: list[float] = []
    if config.bases is None:
        state, losses = train(init(run))
    else:
        folder = f"base-{seed}-{config.warmup_steps}-{config.base_steps}-{config.fork_steps}"
        with RunDirectory(Path(config.bases) / folder, run, digest, resume="allowed") as directory:
            state, losses = directory.restore(init(run))
            if losses:
                # Restored arrays are bound to their device, for which programs would be compiled anew.
                state = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
            else:
                state, losses = train(state)
                directory.append(1, np.asarray(losses))
                directory.save(state, config.base_steps)
    name = hashlib.sha256(np.asarray(losses, np.float64).tobytes()).hexdigest()[:12]
    print(
        f"base {name}, seed {seed}: training loss {last_tenth(losses):.4f}, {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return Base(seed, name, state)


def last_tenth(losses: list[float]) -> float:
    """The mean loss of the last tenth of the steps."""
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def advance(
    config: Config, variant: Variant, seed: int, state: TrainState, text: jax.Array, steps: int
) -> tuple[TrainState, list[float], float]:
    """(state, losses, milliseconds of a step); the host waits once, at the end."""
    first, last, key = (
        _steps(config, variant),
        _steps(config, variant.finishing),
        batch_key(train_config(config, variant, seed)),
    )
    started, found, calls = time.perf_counter(), [], steps // config.steps_per_call
    for call in range(calls):
        state, losses = (first if call < calls - 1 else last)(state, text, key)
        found.append(losses)
    values = np.concatenate([np.asarray(part, np.float64) for part in found])
    return state, values.tolist(), (time.perf_counter() - started) * 1e3 / steps
