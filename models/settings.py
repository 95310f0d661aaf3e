"""What one training run is: `TrainConfig`, its rules, and good values for each named model."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax

import tcfp_jax
from models import ComputeDtype
from models.data import check_names
from models.families import ModelConfig, model_config
from tcfp_jax.recipes import Dual, Recipe

ErrorDtype = Literal["float32", "bfloat16", "float8_e5m2"]
Weights = Literal["float", "stored"]
Included = Literal["every", "measured"]
Moments = Literal["8bit", "bfloat16", "float32"]


@dataclass(frozen=True)
class TrainConfig:
    """One training run, whole. `preset` has good values for each named model.

    Attributes:
      model: a name in `models.families.model_names()`, or a `GPTConfig` or `LlamaConfig`.
      recipe: of every dense layer but a Llama's head; a `tcfp_jax.Recipe` or the name of one. "bf16" is the baseline.
      include: "every" layer takes the recipe, or those that measured times say to be faster than BF16 on this device,
        of `batch` times `sequence` tokens (`convert_to_tcfp(include="measured")`).
      steps: optimizer updates in all; the learning rate falls as a cosine over them, so they are part of the run.
      seed: of initial weights, batches and stochastic rounding.
      batch, sequence: windows per step, of all devices together, and tokens predicted in each.
      learning_rate: the peak, reached after a linear warm-up over the first tenth of the steps.
      final_fraction: of the peak, where the cosine ends.
      weight_decay, clip_norm: AdamW's decay of matrices, and the largest global norm of a gradient.
      dtype: of activations; "auto" is bfloat16 on accelerators and float32 on CPUs, whose BF16 arithmetic is emulated.
        The operands of dense layers are what the recipe says on both.
      error_dtype: of the error-feedback buffers.
      weights: "float" keeps float32 parameters beside what the recipe stores of them; "stored" has `W_hi + W_lo` as the
        only copy of each kernel, rounded stochastically (`tcfp_jax.store`).
      moments: of AdamW, for stored weights: in "8bit", "bfloat16" or "float32".
      steps_per_call: steps in one dispatch; checkpoints fall on multiples of it.
      heldout_windows: windows of `sequence` tokens, evenly spaced over the held-out text, that the final loss averages.
      corpus_bytes: at most this much text, see `models.text.load_corpus`; of ids, bytes of their file.
      data: files and folders of text, read as bytes, or one `.npy` of ids of tokens (`models.data.load_data`); none is
        the source of Python's standard library.
      vocabulary: of ids of tokens, how many there are; the model gets rows for them where it has fewer.
      initial_jitter: relative standard deviation of a perturbation of the initial weights. Runs are bit-for-bit
        repeatable, so a value such as 1e-6 is how to see how far rounding-level differences grow.

    Raises:
      ValueError: a value out of its range, an unknown name, a sequence beyond the model's context, ids of tokens
        without a vocabulary or the reverse, or what contradicts the kind of weights.
    """

    model: str | ModelConfig = "tiny"
    recipe: str | Recipe = "tcfp12"
    include: Included = "every"
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
    weights: Weights = "float"
    moments: Moments = "float32"
    steps_per_call: int = 10
    heldout_windows: int = 256
    corpus_bytes: int = 16 * 2**20
    initial_jitter: float = 0.0
    data: tuple[str, ...] = ()
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        check_names(self.data, self.vocabulary)
        if not isinstance(self.data, tuple):
            raise ValueError(f"data={self.data!r} is no tuple; write data={tuple(self.data)}")
        context = self.size.context
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
        choices = dict(include=Included, error_dtype=ErrorDtype, weights=Weights, moments=Moments)
        for name, allowed in {
            "dtype": ("auto", *get_args(ComputeDtype)),
            **{n: get_args(c) for n, c in choices.items()},
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {list(allowed)}")
        _check_weights(self)

    @property
    def compute_dtype(self) -> ComputeDtype:
        """`dtype` with "auto" decided by JAX's default device."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"

    @property
    def size(self) -> ModelConfig:
        """The size of the model, with rows for every id of the data."""
        return model_config(self.model, self.vocabulary)

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens in one optimizer step."""
        return self.batch * self.sequence

    @property
    def in_bf16(self) -> "TrainConfig":
        """The same run with float32 parameters and BF16 products: the baseline."""
        return replace(self, recipe="bf16", include="every", weights="float", moments="float32", error_dtype="float32")


def _check_weights(config: TrainConfig) -> None:
    """Raise `ValueError` where a config asks for what its kind of weights does not have."""
    if config.weights == "float":
        if config.moments != "float32":
            raise ValueError(
                f"moments={config.moments!r} with weights='float': narrow moments are those of the optimizer of stored "
                "weights; use weights='stored' or moments='float32'"
            )
        return
    if not isinstance(tcfp_jax.recipe(config.recipe).weight, Dual):
        raise ValueError(
            f"weights='stored' with recipe {config.recipe!r}: it has no residual, and W_hi alone has too few bits to "
            "be a parameter; use recipe 'tcfp12_single', which multiplies by W_hi alone, or weights='float'"
        )
    if config.error_dtype != "float32":
        raise ValueError(
            f"error_dtype={config.error_dtype!r} with weights='stored': they are rounded stochastically and have no "
            "error buffers; leave error_dtype, or use weights='float'"
        )


_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    # BF16's own best of 3e-4, 5e-4, 1e-3, 2e-3 and 4e-3 over 1000 steps that end at a tenth of it (LOG.md).
    "small": dict(steps=1000, batch=32, sequence=256, learning_rate=2e-3),
    "gpt2": dict(steps=2000, batch=16, sequence=1024, learning_rate=6e-4),
    "llama-tiny": dict(steps=300),
    "llama-124m": dict(steps=2000, batch=16, sequence=1024, learning_rate=6e-4),
    "llama-1b": dict(steps=2000, batch=4, sequence=4096, learning_rate=3e-4),
    "llama-8b": dict(steps=2000, batch=2, sequence=4096, learning_rate=3e-4),
}


def preset(model: str = "tiny", **overrides: Any) -> TrainConfig:
    """The run that `python -m models.train --model MODEL` does, with fields replaced.

    Stored weights have the recipe that stores and multiplies least, and moments in eight bits. `data` is read whole.

    >>> preset("small", recipe="bf16").steps
    1000
    >>> preset(weights="stored").recipe, preset(weights="stored").moments
    ('tcfp12_single', '8bit')
    """
    model_config(model)
    stored = dict(recipe="tcfp12_single", moments="8bit") if overrides.get("weights") == "stored" else {}
    whole = dict(corpus_bytes=2**63 - 1) if overrides.get("data") else {}
    return TrainConfig(**{"model": model, **_PRESETS.get(model, {}), **stored, **whole, **overrides})
