"""What one training run is: `TrainConfig`, its rules, and good values for each named model."""

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax

import tcfp_jax
from models import ComputeDtype
from models.data import check_names
from models.families import ModelConfig, model_config
from tcfp_jax.recipes import Dual, Recipe, describe

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
      recipe_schedule: pairs of a part of the steps and the recipe that layers take from there on, such as
        `((0.85, "bf16"),)`. Stored weights stay as `recipe` stores them, and take the products of the later one.
      ends: two numbers and a recipe, such as `(0, 2, "bf16")`: so many of the first and of the last blocks take that,
        from the first step to the last; None treats all blocks alike.
      include: "every" layer takes the recipe, or those that measured times say to be faster than BF16 on this device,
        of `batch` times `sequence` tokens (`convert_to_tcfp(include="measured")`).
      steps: optimizer updates in all; the learning rate falls as a cosine over them, so they are part of the run.
      seed: of initial weights, batches and stochastic rounding, 0 to 2**32 - 1.
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
      monitor: every so many steps, at most all, one is observed, and what it says of its numerics is in the metrics; 0
        is never. The step is part of the run, and may differ from a plain one in the last bit.
      start: a file of float parameters of this model, as `models.train --export` writes it, to start from in the place
        of random ones, whatever recipe and weights trained them. The optimizer starts anew.
      initial_jitter: relative standard deviation of a perturbation of the initial weights. Runs are bit-for-bit
        repeatable, so a value such as 1e-6 is how to see how far rounding-level differences grow.

    Raises:
      ValueError: a value out of its range, an unknown name, a sequence beyond the model's context, ids of tokens
        without a vocabulary or the reverse, or what contradicts the kind of weights.
    """

    model: str | ModelConfig = "tiny"
    recipe: str | Recipe = "tcfp12"
    recipe_schedule: tuple[tuple[float, str | Recipe], ...] = ()
    ends: tuple[int, int, str | Recipe] | None = None
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
    monitor: int = 0
    start: str | None = None
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
        if not isinstance(self.seed, numbers.Integral) or not 0 <= self.seed < 2**32:  # jax drops all but 32 bits
            raise ValueError(f"seed={self.seed!r} must be an integer of 32 bits; use one of 0 to {2**32 - 1}")
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
        if self.monitor < 0 or self.monitor % self.steps_per_call:
            nearest = self.steps_per_call * max(1, round(self.monitor / self.steps_per_call))
            raise ValueError(
                f"monitor={self.monitor} is not a multiple of steps_per_call={self.steps_per_call}, of which the last "
                f"step is observed; use {nearest}, or 0 for never"
            )
        if self.start is not None and self.initial_jitter:
            raise ValueError(
                f"start={self.start!r} with initial_jitter={self.initial_jitter}: parameters of a checkpoint are taken "
                "as they are; leave one of them out"
            )
        _check_weights(self)
        _check_phases(self)

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
    def switches(self) -> list[tuple[int, str | Recipe]]:
        """The first step of each later recipe, counted from 0, a multiple of `steps_per_call`, and that recipe.

        >>> TrainConfig(steps=100, recipe_schedule=((0.5, "tensorwise"), (0.9, "bf16"))).switches
        [(50, 'tensorwise'), (90, 'bf16')]
        """
        call = self.steps_per_call
        products = (lambda later: products_over(self.recipe, later)) if self.weights == "stored" else (lambda r: r)
        return [(call * round(part * self.steps / call), products(later)) for part, later in self.recipe_schedule]

    @property
    def in_bf16(self) -> "TrainConfig":
        """The same run with float32 parameters and BF16 products: the baseline."""
        return replace(
            self, recipe="bf16", recipe_schedule=(), ends=None, include="every", weights="float", moments="float32",
            error_dtype="float32",
        )  # fmt: skip


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
            f"weights='stored' with recipe {_named(config.recipe)!r}: it has no residual, and W_hi alone has too few "
            "bits to be a parameter; use recipe 'tcfp12_single', which multiplies by W_hi alone, or weights='float'"
        )
    if config.error_dtype != "float32":
        raise ValueError(
            f"error_dtype={config.error_dtype!r} with weights='stored': they are rounded stochastically and have no "
            "error buffers; leave error_dtype, or use weights='float'"
        )


def products_over(storage: str | Recipe, products: str | Recipe) -> Recipe:
    """The recipe of weights that are stored by one recipe and multiplied as another one does.

    Raises:
      ValueError: the products of the second cannot read what the first stores; the message says which field differs.

    >>> products_over("tcfp12_single", "bf16").forward, products_over("tcfp12_single", "bf16").weight.forward
    ('bf16', 'hi+lo')
    """
    kept, asked = tcfp_jax.recipe(storage), tcfp_jax.recipe(products)
    assert isinstance(kept.weight, Dual), "checked: stored weights have two halves"
    if asked.fp4 is not None:
        raise ValueError(
            f"stored weights with weight='Dual' cannot go to recipe {_named(products)!r}, whose products round float "
            "weights to four bits (fp4); choose a recipe that stores alike, or 'bf16'"
        )
    if asked.stored is None:
        whole = replace(kept.weight, forward="hi+lo", dgrad="hi+lo")
        return replace(kept, weight=whole, forward="bf16", dgrad="bf16", wgrad="bf16")
    pairs = {
        "weight": (type(kept.weight).__name__, type(asked.weight).__name__),
        "weight.dtype": (kept.weight.dtype, asked.stored.dtype),
        "scaling": (kept.scaling, asked.scaling),
    }
    for name, (mine, theirs) in pairs.items():
        if mine != theirs:
            raise ValueError(
                f"stored weights with {name}={mine!r} cannot go to recipe {_named(products)!r}, which has "
                f"{name}={theirs!r}: they are parameters, and are not rounded anew; choose a recipe that stores alike, "
                "or 'bf16'"
            )
    assert isinstance(asked.weight, Dual), "compared"
    weight = replace(kept.weight, forward=asked.weight.forward, dgrad=asked.weight.dgrad)
    return replace(asked, weight=weight, copies=kept.copies, amax=kept.amax)


def _check_phases(config: TrainConfig) -> None:
    """Raise `ValueError` where no step is observed, a schedule never switches, or blocks have no such ends."""
    if config.monitor > config.steps:
        raise ValueError(
            f"monitor={config.monitor} of steps={config.steps}: no step would be observed; lower monitor, ask for more "
            "steps, or use 0 for never"
        )
    before, before_products, last = config.recipe, tcfp_jax.recipe(config.recipe), 0
    parts = [0.0, *(part for part, _ in config.recipe_schedule)]
    schedule = "recipe_schedule " + " ".join(f"{part:g}={_named(later)}" for part, later in config.recipe_schedule)
    if parts != sorted(set(parts)):
        raise ValueError(
            f"{schedule}: its parts of the run must rise from above 0; write them in order, such as 0.5=tensorwise "
            "0.9=bf16, or give the first part's recipe by recipe"
        )
    for (part, later), (first, products) in zip(config.recipe_schedule, config.switches, strict=True):
        if tcfp_jax.recipe(products) == before_products:
            raise ValueError(
                f"{schedule} never switches at {part}: the recipe is {_named(before)!r} before it, too; give another "
                "recipe, or leave it out"
            )
        if not last < first < config.steps:
            raise ValueError(
                f"{schedule} never switches at {part}: of {config.steps} steps in calls of {config.steps_per_call} "
                f"that is step {first}; choose a part between 0 and 1, or more steps"
            )
        before, before_products, last = later, tcfp_jax.recipe(products), first
    if config.ends is not None:
        _check_ends(config, *config.ends)


def _check_ends(config: TrainConfig, first: int, last: int, recipe: str | Recipe) -> None:
    ends, weight = f"ends {first},{last}={_named(recipe)}", tcfp_jax.recipe(recipe).weight
    if min(first, last) < 0 or not 0 < first + last < config.size.layers:
        raise ValueError(
            f"{ends} of {config.size.layers} blocks leaves none between, or has none; choose 1 to "
            f"{config.size.layers - 1} in all, or give all blocks that recipe"
        )
    if config.include != "every":
        raise ValueError(f"{ends} with include={config.include!r}: measured times choose; leave one out")
    if config.weights == "stored" and not isinstance(weight, Dual | None):
        raise ValueError(
            f"stored weights with weight='Dual' cannot have {ends}, which has weight={type(weight).__name__!r}: it has "
            "no residual, without which a parameter has too few bits; choose a recipe that has one, or 'bf16', whose "
            "weights are float32"
        )


def _named(recipe: str | Recipe) -> str:
    """What a recipe is called, for messages."""
    return recipe if isinstance(recipe, str) else describe(recipe)


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

    Raises:
      ValueError: what `TrainConfig` raises, or a field that would do nothing: an `error_dtype` where no recipe of the
        run keeps errors, or ends with the recipe of all blocks.

    >>> preset("small", recipe="bf16").steps
    1000
    >>> preset(weights="stored").recipe, preset(weights="stored").moments
    ('tcfp12_single', '8bit')
    """
    model_config(model)
    stored = dict(recipe="tcfp12_single", moments="8bit") if overrides.get("weights") == "stored" else {}
    whole = dict(corpus_bytes=2**63 - 1) if overrides.get("data") else {}
    config = TrainConfig(**{"model": model, **_PRESETS.get(model, {}), **stored, **whole, **overrides})
    _check_effects(config)
    return config


def _check_effects(config: TrainConfig) -> None:
    """Raise `ValueError` where a field of a whole run does nothing; in a part of one it may."""
    of_ends = () if config.ends is None else config.ends[2:]
    named = [config.recipe, *(later for _, later in config.recipe_schedule), *of_ends]
    if config.error_dtype != "float32" and not any(tcfp_jax.recipe(each).feedback for each in named):
        raise ValueError(
            f"error_dtype={config.error_dtype!r} with recipe {', '.join(repr(_named(each)) for each in named)}: no "
            "error of a weight is kept; leave error_dtype, or use a recipe with remainder='feedback', such as 'tcfp12'"
        )
    if of_ends and not config.recipe_schedule and tcfp_jax.recipe(of_ends[0]) == tcfp_jax.recipe(config.recipe):
        raise ValueError(
            f"ends with recipe {_named(of_ends[0])!r}, which all blocks have; give the ends another one, such as "
            "'bf16', or leave them out"
        )
