"""Training of a `GPT` on bytes as pure functions: initial state, a jitted train step, held-out evaluation.

Everything that a run does is a function of its `TrainConfig`: initial weights come from `seed`, and the windows of step
t from `fold_in(seed, t)`, computed on the device inside the jitted step. So a checkpoint needs no data-loader state,
two recipes with one seed see identical initial weights and batches, and a resumed run is the uninterrupted one bit for
bit.

    train_step : (state, text, key) -> (state, losses of the next `count` steps)        one `lax.scan`, one dispatch
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tcfp_jax
from models.gpt import GPT, ComputeDtype, GPTConfig, model_config
from tcfp_jax.recipes import Recipe

ErrorDtype = Literal["float32", "bfloat16", "float8_e5m2"]

# Streams drawn from the seed. The numbers are arbitrary and fixed: changing one changes every run.
_WEIGHTS, _BATCHES, _ROUNDING, _JITTER = range(4)


@dataclass(frozen=True)
class TrainConfig:
    """One training run, whole. `preset` has good values for each named model.

    Attributes:
      model: a name in `models.gpt.MODELS`, or a `GPTConfig`.
      recipe: of every dense layer; a `tcfp_jax.Recipe` or the name of one. "bf16" is the baseline.
      steps: optimizer updates in all; the learning rate falls as a cosine over them, so they are part of the run.
      seed: of initial weights, batches and stochastic rounding.
      batch, sequence: windows per step, and bytes predicted in each.
      learning_rate: the peak, reached after a linear warm-up over the first tenth of the steps.
      final_fraction: of the peak, where the cosine ends.
      weight_decay, clip_norm: AdamW's decay of matrices, and the largest global norm of a gradient.
      dtype: of activations; "auto" is bfloat16 on accelerators and float32 on CPUs, whose BF16 arithmetic is emulated.
        The operands of dense layers are what the recipe says on both.
      error_dtype: of the error-feedback buffers.
      steps_per_call: steps in one dispatch; checkpoints fall on multiples of it.
      heldout_windows: windows of `sequence` bytes, evenly spaced over the held-out text, that the final loss averages.
      corpus_bytes: at most this much text, see `models.text.load_corpus`.
      initial_jitter: relative standard deviation of a perturbation of the initial weights. Runs are bit-for-bit
        repeatable, so a value such as 1e-6 is how to see how far rounding-level differences grow.

    Raises:
      ValueError: a value out of its range, an unknown name, or a sequence beyond the model's context.
    """

    model: str | GPTConfig = "tiny"
    recipe: str | Recipe = "tcfp12"
    steps: int = 400
    seed: int = 0
    batch: int = 16
    sequence: int = 128
    learning_rate: float = 3e-3
    final_fraction: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    dtype: Literal["auto"] | ComputeDtype = "auto"
    error_dtype: ErrorDtype = "float32"
    steps_per_call: int = 10
    heldout_windows: int = 256
    corpus_bytes: int = 16 * 2**20
    initial_jitter: float = 0.0

    def __post_init__(self) -> None:
        context = model_config(self.model).context
        tcfp_jax.recipe(self.recipe)
        for name in ("steps", "batch", "sequence", "steps_per_call", "heldout_windows", "corpus_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        for name in ("weight_decay", "initial_jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be zero or positive, and finite")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(
                f"final_fraction={self.final_fraction} must be in 0 to 1, a part of the peak learning rate"
            )
        if self.sequence > context:
            raise ValueError(
                f"sequence={self.sequence} exceeds the context of model {self.model!r}, {context}; shorten it"
            )
        for name, allowed in (("dtype", ("auto", *get_args(ComputeDtype))), ("error_dtype", get_args(ErrorDtype))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {list(allowed)}")

    @property
    def compute_dtype(self) -> ComputeDtype:
        """`dtype` with "auto" decided by JAX's default device."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"

    @property
    def bytes_per_step(self) -> int:
        """Predicted bytes in one optimizer step."""
        return self.batch * self.sequence


_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    # BF16's own best of 3e-4, 5e-4, 1e-3, 2e-3 and 4e-3 over 1000 steps that end at a tenth of it (LOG.md).
    "small": dict(steps=1000, batch=32, sequence=256, learning_rate=2e-3),
    "gpt2": dict(steps=2000, batch=16, sequence=1024, learning_rate=6e-4),
}


def preset(model: str = "tiny", **overrides: Any) -> TrainConfig:
    """The run that `python -m models.train --model MODEL` does, with fields replaced.

    >>> preset("small", recipe="bf16").steps
    1000
    """
    model_config(model)
    return TrainConfig(**{"model": model, **_PRESETS.get(model, {}), **overrides})


class TrainState(NamedTuple):
    """What a checkpoint holds: float32 parameters, the optimizer's state with the quantized weights, the next step."""

    params: Any
    opt_state: Any
    step: jax.Array


StepFunction = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, jax.Array]]


def init(config: TrainConfig) -> TrainState:
    """The state before the first step. Parameters depend on the model and the seed alone, not on the recipe."""
    return _init_function(_program(config))(jax.random.key(config.seed))


def make_train_step(config: TrainConfig, count: int | None = None) -> StepFunction:
    """A jitted function that runs `count` steps (default `config.steps_per_call`) in one dispatch.

    Its arguments are the state (donated: do not use it again), the training text as uint8 `[bytes]`, and
    `batch_key(config)`; it returns the new state and the losses, float32 `[count]`, in nats per byte. Configs that
    differ in the seed alone share one compiled function.
    """
    return _step_function(_program(config), config.steps_per_call if count is None else count)


def batch_key(config: TrainConfig) -> jax.Array:
    """The random key from which `make_train_step` derives the windows of every step."""
    return jax.random.fold_in(jax.random.key(config.seed), _BATCHES)


def evaluate(
    config: TrainConfig, state: TrainState, heldout: jax.Array, products: Literal["trained", "bf16"] = "trained"
) -> float:
    """Mean loss in nats per byte over `config.heldout_windows` evenly spaced windows of `heldout`, uint8 `[bytes]`.

    With `products="trained"` layers multiply as in training, with the same quantized weights; "bf16" multiplies the
    float32 parameters in BF16, which tells what training has learned from what FP8 products cost afterwards. Per-byte
    losses are float32, and summed in float32 within a window and in float64 over windows.

    Raises:
      ValueError: the text is shorter than one window.
    """
    check_text("held-out", heldout, config)
    last = len(heldout) - config.sequence - 1
    offsets = np.linspace(0, last, config.heldout_windows).astype(np.int32)
    padding = -len(offsets) % config.batch
    offsets = np.concatenate([offsets, np.zeros(padding, np.int32)]).reshape(-1, config.batch)
    quantized = tcfp_jax.layer_state(state.opt_state) if products == "trained" else {}
    program = _program(config if products == "trained" else replace(config, recipe="bf16"))
    losses = _evaluate_function(program)(state.params, quantized, jnp.asarray(heldout), jnp.asarray(offsets))
    return float(np.asarray(losses, np.float64).reshape(-1)[: config.heldout_windows].mean())


def check_text(name: str, text: Any, config: TrainConfig) -> None:
    """Raise `ValueError` where `text` does not hold one window."""
    if len(text) <= config.sequence:
        raise ValueError(
            f"the {name} text has {len(text)} bytes, but one window needs {config.sequence + 1}; raise corpus_bytes "
            f"(now {config.corpus_bytes}) or shorten the sequence"
        )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipped AdamW with a warm-up and cosine schedule, and the quantized weights of the recipe last in the chain."""
    return _optimizer(config, jax.random.key(config.seed))


def _optimizer(config: TrainConfig, seed_key: jax.Array) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=config.learning_rate, warmup_steps=max(1, config.steps // 10),
        decay_steps=max(2, config.steps), end_value=config.learning_rate * config.final_fraction,
    )  # fmt: skip
    stochastic = tcfp_jax.recipe(config.recipe).stochastic
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=_is_matrix),
        tcfp_jax.error_feedback(
            config.recipe,
            key=jax.random.fold_in(seed_key, _ROUNDING) if stochastic else None,
            error_dtype=config.error_dtype,
        ),
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _program(config: TrainConfig) -> TrainConfig:
    """The config with names resolved and without what is data to the compiled functions, so that runs share them."""
    return replace(
        config, model=model_config(config.model), recipe=tcfp_jax.recipe(config.recipe), dtype=config.compute_dtype,
        seed=0, heldout_windows=1, corpus_bytes=1, steps_per_call=1,
    )  # fmt: skip


def _model(config: TrainConfig) -> GPT:
    return GPT(model_config(config.model), recipe=config.recipe, dtype=config.compute_dtype)


@functools.lru_cache(maxsize=16)
def _init_function(config: TrainConfig) -> Callable[[jax.Array], TrainState]:
    @jax.jit
    def initialize(seed_key: jax.Array) -> TrainState:
        tokens = jnp.zeros((1, config.sequence), jnp.int32)
        # Initialized with the BF16 recipe: the parameters are the same, and no weight is quantized for tracing.
        model = _model(replace(config, recipe="bf16"))
        params = model.init(jax.random.fold_in(seed_key, _WEIGHTS), tokens)["params"]
        if config.initial_jitter:
            params = _jitter(params, jax.random.fold_in(seed_key, _JITTER), config.initial_jitter)
        opt_state = _optimizer(config, seed_key).init(params)
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32))

    return initialize


def _jitter(params: Any, key: jax.Array, size: float) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.tree.unflatten(treedef, list(jax.random.split(key, len(leaves))))
    return jax.tree.map(lambda leaf, k: leaf * (1 + size * jax.random.normal(k, leaf.shape, leaf.dtype)), params, keys)


@functools.lru_cache(maxsize=16)
def _step_function(config: TrainConfig, count: int) -> StepFunction:
    # The key reaches `init` through the state; `update` takes it from there, so any seed serves here.
    model, optimizer = _model(config), _optimizer(config, jax.random.key(0))

    def loss_of(params: Any, quantized: Any, windows: jax.Array) -> jax.Array:
        return _window_losses(model, params, quantized, windows).mean()

    def one_step(state: TrainState, text: jax.Array, key: jax.Array) -> tuple[TrainState, jax.Array]:
        step_key = jax.random.fold_in(key, state.step)
        offsets = jax.random.randint(step_key, (config.batch,), 0, text.shape[0] - config.sequence)
        quantized = tcfp_jax.layer_state(state.opt_state)
        loss, gradients = jax.value_and_grad(loss_of)(state.params, quantized, _windows(text, offsets, config))
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), loss

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, text: jax.Array, key: jax.Array) -> tuple[TrainState, jax.Array]:
        return jax.lax.scan(lambda carry, _: one_step(carry, text, key), state, length=count)

    return train_step


@functools.lru_cache(maxsize=16)
def _evaluate_function(config: TrainConfig) -> Callable[[Any, Any, jax.Array, jax.Array], jax.Array]:
    model = _model(config)

    @jax.jit
    def losses(params: Any, quantized: Any, text: jax.Array, offsets: jax.Array) -> jax.Array:
        def of_batch(offsets: jax.Array) -> jax.Array:
            return _window_losses(model, params, quantized, _windows(text, offsets, config)).mean(axis=-1)

        return jax.lax.map(of_batch, offsets)

    return losses


def _windows(text: jax.Array, offsets: jax.Array, config: TrainConfig) -> jax.Array:
    """int32 `[batch, sequence + 1]`: inputs are all but the last byte of a window, targets all but the first."""
    return text[offsets[:, None] + jnp.arange(config.sequence + 1)].astype(jnp.int32)


def _window_losses(model: GPT, params: Any, quantized: Any, windows: jax.Array) -> jax.Array:
    """Cross-entropy of every predicted byte, float32 `[batch, sequence]`."""
    logits: Any = model.apply({"params": params, "tcfp": quantized}, windows[:, :-1])
    # A masked sum instead of take_along_axis: its gradient is no scatter, so it is deterministic on GPUs and fuses.
    is_target = jnp.arange(logits.shape[-1]) == windows[:, 1:, None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
