"""The training behind `benchmarks.convergence`: a base, and forks of it.

A base is a run of `base_steps` steps, in BF16 or as a study says. A fork starts from
its weights and Adam moments. A run from scratch is a fork of a base without steps:
initial weights and moments of zero. So both protocols share this code.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import tcfp_jax
from benchmarks.variants import BASELINE, OF_BF16, STUDIES, Study, Variant
from models.nets.shapes import LlamaConfig, ModelConfig
from models.training.batches import windows
from models.training.checkpoint import RunDirectory
from models.training.forms import Update, trained_form
from models.training.intact import lock
from models.training.learners import layouts
from models.training.settings import Data, TrainConfig
from models.training.state import TrainState, jittered
from models.training.steps import (
    StepFunction,
    batch_key,
    init,
    loss_function,
    make_optimizer,
    make_steps,
)
from tcfp_jax import optim
from tcfp_jax.optim import AdamWState
from tcfp_jax.optim import encoding as narrow
from tcfp_jax.optim.slots import Clip
from tcfp_jax.paths import path_names

_OTHER = 1_000_003  # added to a seed for other batches
SAVE_SECONDS = 120.0  # between two checkpoints of a run
Tokens = Literal["bytes", "bpe"]


@dataclass(frozen=True)
class Config:
    """Settings of a run. `--resume` refuses a file of other `settings`, because its
    numbers do not compare.

    Attributes:
      model, size: Name and sizes of the model; "12x768" is a GPT on bytes of 12 layers
        of width 768.
      batch, sequence: Windows in a step, and tokens in a window.
      learning_rate, warmup_steps: Peak of the rate, and steps until it is reached.
      base_steps: Steps of the base at the peak rate before runs fork; 0 for runs from
        scratch.
      steps: Steps of a fork, linearly to a rate of zero; from scratch, as a cosine to
        zero after the warm-up.
      steps_per_call: Steps in one dispatch; it divides the steps of base and runs.
      heldout_windows: Windows of the evaluation.
      text_bytes: Largest size of the text.
      text, text_read, tokens_read: First digits of the text's digest, its approximate
        bytes, tokens of training.
      jax: Version of JAX.
      parameters: Number of parameters of the model.
      tokens: "bytes", or the ids of `models.tokens.OWN`.
      study: Name of the study whose baseline trains the bases; "" is BF16.
      bytes_per_token: Bytes of held-out text for each token.
      data: Files and folders of text; empty means the Python sources that are installed
        here.
      variants, seeds: The runs that are wanted.
      budget_seconds: No run starts that would probably end later than this.
      bases: Folder of bases; None keeps none.
      resume: JSON whose rows are kept.

    Raises:
      ValueError: a count is too small, `steps_per_call` does not divide the steps, or
        the warm-up does not end within the base or within a run from scratch.
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
    text_bytes: int = 200_000_000
    text: str = ""
    jax: str = jax.__version__
    tokens: Tokens = "bytes"
    study: str = ""
    bytes_per_token: float | None = field(default=None, compare=False)
    text_read: int = field(default=0, compare=False)
    tokens_read: int = field(default=0, compare=False)
    parameters: int = field(default=0, compare=False)
    data: tuple[str, ...] = field(default=(), compare=False)
    variants: tuple[str, ...] = field(default=(BASELINE,), compare=False)
    seeds: tuple[int, ...] = field(default=(0,), compare=False)
    budget_seconds: float = field(default=math.inf, compare=False)
    bases: str | None = field(default=None, compare=False)
    resume: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        least = dict(batch=1, steps_per_call=1, warmup_steps=0, base_steps=0, steps=1)
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least {smallest}"
                )
        for name in ("base_steps", "steps"):
            if getattr(self, name) % self.steps_per_call:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a multiple of"
                    f" steps_per_call={self.steps_per_call}, but base and forks share"
                    " one compiled program of so many steps; change one of the two"
                )
        if not self.base_steps and self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} of steps={self.steps}: the rate"
                " never falls; lower warmup_steps"
            )
        if 0 < self.base_steps < self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} with base_steps={self.base_steps}:"
                " forks fall from the peak, which the base must have reached; lower"
                " warmup_steps, or raise base_steps"
            )

    @property
    def settings(self) -> dict[str, object]:
        """Everything that the numbers of a run depend on."""
        chosen = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.compare
        }
        # As in files from before there were tokenizers and studies
        if self.tokens == "bytes":
            del chosen["tokens"]
        if not self.study:
            del chosen["study"]
        return {**chosen, "size": dataclasses.asdict(self.size)}


def study_of(config: Config) -> Study:
    """Return the comparison that a run is of."""
    return STUDIES[config.study] if config.study else OF_BF16


def train_config(config: Config, variant: Variant, seed: int = 0) -> TrainConfig:
    """Return the run of a variant, base and fork, except for its schedule of rates."""
    update: Update = "behind" if variant.clip == "exact" else "backward"
    return TrainConfig(
        model=config.size,
        recipe=variant.recipe,
        include=variant.include,
        products=variant.products,
        weights=trained_form(variant.weights, variant.moments, update=update),
        seed=seed,
        batch=config.batch,
        sequence=config.sequence,
        steps=config.base_steps + config.steps,
        learning_rate=config.learning_rate,
        steps_per_call=config.steps_per_call,
        heldout_windows=config.heldout_windows,
        data=Data(corpus_bytes=config.text_bytes),
    )


def whole_run(size: LlamaConfig) -> dict[str, Any]:
    """Return the settings of a Llama's run from scratch.

    It reads 20 tokens per parameter besides its table.

    >>> size = LlamaConfig(6, 640, heads=10, kv_heads=10, hidden=1792, context=1024)
    >>> whole_run(size)["steps"]
    9300
    """
    batch = 64
    tokens = 20 * size.layers * size.width * size.columns
    of_call = batch * min(Config.sequence, size.context) * Config.steps_per_call
    return {
        "batch": batch,
        "warmup_steps": 200,
        "learning_rate": 2e-3,
        "steps": round(tokens / of_call) * Config.steps_per_call,
    }


def schedule_of(config: Config) -> optax.Schedule:
    """Return the rate of base and fork: up, level, and linearly to zero.

    From scratch it goes up, and down as a cosine.
    """
    rate = config.learning_rate
    warmup = config.warmup_steps
    start = config.base_steps
    if not start:
        return optax.warmup_cosine_decay_schedule(0.0, rate, warmup, config.steps, 0.0)
    up = optax.linear_schedule(0.0, rate, warmup)
    level = optax.constant_schedule(rate)
    down = optax.linear_schedule(rate, 0.0, config.steps)
    return optax.join_schedules([up, level, down], [warmup, start])


def stepping(variant: Variant) -> Variant:
    """Return the variant that has the same steps and begins without noise."""
    return dataclasses.replace(variant, batches="same", perturbation=0.0)


@functools.cache
def steps_of(config: Config, variant: Variant) -> StepFunction:
    """Return the jitted steps of one dispatch, which all bases and seeds share."""
    run = train_config(config, variant)
    optimizer = make_optimizer(run, schedule_of(config))
    if variant.clip == "exact":
        steps = make_steps(run, optimizer, config.steps_per_call)
    else:
        steps = _steps_inside(run, optimizer, config.steps_per_call, variant.clip)
    return jax.jit(steps, donate_argnums=0)


def _steps_inside(
    run: TrainConfig,
    optimizer: optax.GradientTransformation,
    count: int,
    clip: Clip,
) -> StepFunction:
    """Return `make_steps` of updates inside the backward pass."""
    step = tcfp_jax.train_step(loss_function(run), optimizer, clip=clip, has_aux=True)

    def one_step(
        state: TrainState, text: Array, key: Array
    ) -> tuple[TrainState, Array]:
        before = optim.TrainState(state.params, state.opt_state)
        after, metrics = step(before, {}, windows(run, state.step, text, key))
        return TrainState(*after, state.step + 1), metrics.loss

    def steps(state: TrainState, text: Array, key: Array) -> tuple[TrainState, Array]:
        return jax.lax.scan(
            lambda carry, _: one_step(carry, text, key), state, length=count
        )

    return steps


def start_fork(
    config: Config, variant: Variant, base: TrainState, key: Array
) -> TrainState:
    """Return a base's weights and moments, stored as the variant stores them.

    A base that is not BF16's is stored so already.
    """
    return starting(config, dataclasses.replace(variant, batches="same"))(base, key)


@functools.cache
def starting(config: Config, variant: Variant) -> Any:
    """Return `start_fork` of a variant, jitted: `(base, key) -> state`."""
    run = train_config(config, variant)
    # The optimizer is made before the trace: it holds a key, and outlives the trace.
    optimizer = make_optimizer(run, schedule_of(config))

    def converted(base: TrainState, key: Array) -> TrainState:
        if variant.weights == "float":
            # The last state of the chain is that of the quantized weights.
            fresh: Any = optimizer.init(base.params)
            chain = (*base.opt_state[:-1], fresh[-1])
            return TrainState(base.params, chain, base.step)
        stored = tcfp_jax.store(
            base.params,
            layouts(run) or variant.recipe,
            key=key if variant.remainder == "stochastic" else None,
            remainder=variant.remainder,
            gradient_dtype=variant.gradient_dtype,
        )
        opt_state: Any = optimizer.init(stored)
        continued = _continued(opt_state, base.opt_state, jax.random.fold_in(key, 1))
        return TrainState(stored, continued, base.step)

    @jax.jit
    def start(base: TrainState, key: Array) -> TrainState:
        state: Any = base
        if variant.perturbation:
            moved = jittered(base.params, key, variant.perturbation)
            state = base._replace(params=moved)
        if study_of(config).baseline == BASELINE:
            state = converted(state, key)
        # Copies: jit hands on what it does not change, and the steps of a fork would
        # donate arrays of the base.
        return jax.tree.map(jnp.copy, state)

    return start


def _continued(state: AdamWState, before: Any, key: Array) -> AdamWState:
    """Return a fresh `AdamWState` with the count and moments of a state of optax's.

    Moments are rounded.
    The key replaces the state's own, so that each base draws bits of its own.
    """
    if state.key is not None:
        bits = jax.random.key_data(key).astype(jnp.uint32)
        state = state._replace(key=bits.reshape(-1))
    adam = optax.tree_utils.tree_get(before, "ScaleByAdamState")

    def rounded(fresh: Any, moments: Any, which: int) -> tuple[Any, dict[str, Any]]:
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(fresh)
        scales: dict[str, Any] = {}
        leaves = []
        for i, ((path, leaf), moment) in enumerate(
            zip(paths, jax.tree.leaves(moments), strict=True)
        ):
            form: Any = "ue5m3" if leaf.dtype == jnp.uint8 else leaf.dtype.name
            # Steps count from 1, so that none of them draws the bits of step 0.
            code = narrow.encode(
                form, moment.reshape(leaf.shape), narrow.stream(state.key, 0, which, i)
            )
            leaves.append(narrow.kept(code, path_names(path), scales))
        return treedef.unflatten(leaves), scales

    mu, mu_scale = rounded(state.mu, adam.mu, 0)
    nu, nu_scale = rounded(state.nu, adam.nu, 1)
    return state._replace(
        count=adam.count, mu=mu, mu_scale=mu_scale, nu=nu, nu_scale=nu_scale
    )


# Bases and runs
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The start of runs: seed, name, and state.

    The name is a digest of its losses, or "seed-0" without steps.
    """

    seed: int
    name: str
    state: TrainState


def train_base(
    config: Config,
    seed: int,
    text: Array,
    digest: str,
    variant: Variant,
    deadline: float = math.inf,
) -> Base:
    """Return the base of a seed, from its folder, or trained and kept there.

    Without base steps it is the initial state.

    Raises:
      TimeoutError: the deadline has passed; the folder holds a checkpoint.
      ValueError: the folder holds a base of another model or text.
    """
    run = train_config(config, variant, seed)
    state = init(run)
    if not config.base_steps:
        return Base(seed, f"seed-{seed}", state)
    name = f"base-{seed}-{config.warmup_steps}-{config.base_steps}"
    of_base = dataclasses.replace(run, steps=config.base_steps)
    with folder_of(config, of_base, digest, name) as folder:
        state, losses, _ = advance(
            config, variant, seed, state, text, config.base_steps, folder, deadline
        )
    name = hashlib.sha256(np.asarray(losses, np.float64).tobytes()).hexdigest()[:12]
    print(
        f"base {name}, seed {seed}: training loss {last_tenth(losses):.4f}", flush=True
    )
    return Base(seed, name, state)


def folder_of(
    config: Config, run: TrainConfig, digest: str, name: str
) -> contextlib.AbstractContextManager[RunDirectory | None]:
    """Return the folder of a base or of a run as a context; None if none is kept.

    Raises:
      ValueError: it holds a run of another model or text.
    """
    if config.bases is None:
        return contextlib.nullcontext()
    return RunDirectory(
        Path(config.bases) / name, run, digest, resume="allowed", option="--bases"
    )


@contextlib.contextmanager
def claimed(config: Config, name: str) -> Iterator[bool]:
    """Yield whether this process alone may do the runs of this name.

    Processes of one machine share them so.
    """
    if config.bases is None:
        yield True
        return
    folder = Path(config.bases) / f"claim-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(folder)
    except ValueError:
        yield False
        return
    with held:
        yield True


def curve_of(losses: list[float]) -> tuple[float, ...]:
    """Return the means of a hundred equal parts of losses, or of as many as there are.

    >>> curve_of([4.0, 2.0, 1.0])
    (4.0, 2.0, 1.0)
    """
    parts = np.array_split(losses, min(100, len(losses)))
    return tuple(float(np.mean(part)) for part in parts)


def last_tenth(losses: list[float]) -> float:
    """Return the mean loss of the last tenth of the steps."""
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def advance(
    config: Config,
    variant: Variant,
    seed: int,
    state: TrainState,
    text: Array,
    steps: int,
    folder: RunDirectory | None = None,
    deadline: float = math.inf,
) -> tuple[TrainState, list[float], float]:
    """Train from the last checkpoint in a folder.

    Return (state, losses, milliseconds of a step).

    Raises:
      TimeoutError: `time.perf_counter()` passed the deadline; the folder holds a
        checkpoint.
    """
    run = train_config(config, variant, seed + _OTHER * (variant.batches == "other"))
    step = steps_of(config, stepping(variant))
    key = batch_key(run)
    losses: list[float] = []
    seconds = []
    if folder is not None and folder.holds_state:
        state, losses = folder.restore(state)
        # Restored arrays are bound to their device, for which programs would be
        # compiled anew.
        state = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
    saved = time.perf_counter()
    for _ in range(len(losses), steps, config.steps_per_call):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, values = step(state, text, key)
        found = np.asarray(values, np.float64)
        seconds.append(time.perf_counter() - started)
        if folder is not None:
            folder.append(len(losses) + 1, found)
        losses += found.tolist()
        now = time.perf_counter()
        if folder is not None and (
            now - saved > SAVE_SECONDS or now > deadline or len(losses) == steps
        ):
            folder.save(state, len(losses))
            saved = time.perf_counter()
        if now > deadline and len(losses) < steps:
            raise TimeoutError(f"{len(losses)} of {steps} steps")
    # The first call compiles.
    of_call = float(np.mean(seconds[1:] or seconds or [math.nan]))
    return state, losses, of_call * 1e3 / config.steps_per_call
