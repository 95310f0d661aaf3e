"""Settings of a training run: `TrainConfig`, its rules, and good values for each named
model.

The text is a `Data`. The weights that train are `Float`, `Stored` or `Adapters`, each
with the settings that it alone has. The command line, `preset` and the folder of a run
name all settings in one row (`settings_of`, `config_of`).
"""

import datetime
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import jax

import tcfp_jax
from pallas_kernels.checks import check_choice
from tcfp_jax.recipes import Dual, Recipe, describe

from ..huggingface.configs import check_is_folder, read_shape
from ..huggingface.tokenizer import read_tokenizer
from ..nets.shapes import ComputeDtype, LlamaConfig, ModelConfig
from ..nets.sizes import model_config, model_names
from . import preferences as pairs
from .data import IDS_SUFFIX, Data
from .documents import document_files
from .finish import Finish
from .forms import Adapters, Float, Stored, Trained, Update, trained_form

Included = Literal["every", "bf16_head", "layers", "measured"]
BAD_STEPS = 20


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. `preset` returns good values for each named model.

    Attributes:
      model: A name in `models.nets.sizes.model_names()`, or a `GPTConfig` or
        `LlamaConfig`.
      recipe: Recipe of every dense layer except a Llama's head, or its name. "bf16" is
        the baseline.
      include: "every" layer takes the recipe, or only the layers that measured times
        say are faster than BF16 on this device at `batch` times `sequence` tokens
        (`convert_to_tcfp(include="measured")`). "layers" leaves tables and heads float
        where "every" would store them. "bf16_head" stores them as "every" does, and the
        head multiplies in BF16.
      remat: Values that each block of a Llama keeps for its backward pass, as in
        `LlamaConfig`; None is the model's. "auto" keeps as much as fits, and is decided
        before the first step.
      steps: Optimizer updates. The learning rate falls as a cosine over them, so they
        are part of the run.
      seed: Seed of initial weights, batches and stochastic rounding, 0 to 2**32 - 1.
      batch, sequence: Windows or pairs in a step, of all devices together, and tokens
        predicted in each window or answer.
      accumulate: Parts of a batch, which are computed one after another for less
        memory. Their gradients are averaged in float32.
      learning_rate: Peak of the rate, reached after a linear warm-up over the first
        tenth of the steps.
      final_fraction: Part of the peak at which the cosine ends.
      weight_decay, clip_norm: AdamW's decay of matrices, and the largest global norm of
        a gradient.
      dtype: Dtype of activations. "auto" is bfloat16 on accelerators and float32 on
        CPUs, which emulate BF16. The recipe decides the operands of dense layers on
        both.
      weights: Form of the weights that train.
      steps_per_call: Steps in one dispatch. Checkpoints fall on multiples of it.
      heldout_windows: Windows of `sequence` tokens, evenly spaced over the held-out
        text, of the final loss.
      data: Text of the run.
      monitor: Number of steps between two observed ones, whose metrics describe their
        numerics; 0 observes none. An observed step is part of the run, and may differ
        from a plain one in the last bit.
      start: File of float parameters of this model, as `models.train --export` writes
        it, or a folder of Hugging Face (`models.huggingface.folders`), that replaces
        random initial weights. The optimizer starts anew.
      sample: Prompt that the model continues at each checkpoint, for a reader; not part
        of the run.
      preferences: Loss of pairs of answers (`models.training.dpo`), for data that are
        pairs; None for other text.
      finish: "PRODUCTS:FRACTION", the products of the last part of the steps, as in
        `models.training.finish.Finish`; None ends as it begins. The switch falls on a
        multiple of `steps_per_call`.
      products: Recipe of the products, if it is not that of the state, as in the last
        part of a run; no setting of a run.
      initial_jitter: Relative standard deviation of a perturbation of the initial
        weights. Runs repeat bit for bit, so a value such as 1e-6 shows how far
        differences of rounding grow.

    Raises:
      ValueError: a value is out of its range, a name is unknown, the sequence is longer
        than the model's context, or the form of the weights contradicts the recipe or
        the model.
    """

    model: str | ModelConfig = "tiny"
    recipe: str | Recipe = "tcfp12"
    include: Included = "every"
    remat: str | None = None
    steps: int = 400
    seed: int = 0
    batch: int = 16
    sequence: int = 128
    accumulate: int = 1
    learning_rate: float = 3e-3
    final_fraction: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    dtype: Literal["auto"] | ComputeDtype = "auto"
    weights: Trained = Float()
    steps_per_call: int = 10
    heldout_windows: int = 256
    initial_jitter: float = 0.0
    monitor: int = 0
    start: str | None = None
    data: Data = Data()
    sample: str | None = None
    preferences: pairs.Preferences | None = None
    finish: str | None = None
    products: Recipe | None = None

    def __post_init__(self) -> None:
        model = model_config(self.model)
        if self.remat is not None and not isinstance(model, LlamaConfig):
            raise ValueError(
                f"remat={self.remat!r} with model {self.model!r}, which keeps all"
                " values; use a Llama"
            )
        tcfp_jax.recipe(self.recipe)
        _check_positive(
            self, "steps", "batch", "sequence", "steps_per_call", "heldout_windows"
        )
        # jax drops all but 32 bits
        if not isinstance(self.seed, numbers.Integral) or not 0 <= self.seed < 2**32:
            raise ValueError(
                f"seed={self.seed!r} must be an integer of 32 bits; use one of 0 to"
                f" {2**32 - 1}"
            )
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be positive and finite"
                )
        for name in ("weight_decay", "initial_jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be zero or positive, and finite"
                )
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(
                f"final_fraction={self.final_fraction} must be in 0 to 1, part of the"
                " peak learning rate"
            )
        self._check_batch()
        check_choice("dtype", self.dtype, ("auto", *get_args(ComputeDtype)))
        check_choice("include", self.include, get_args(Included))
        if self.monitor < 0 or self.monitor % self.steps_per_call:
            calls = max(1, round(self.monitor / self.steps_per_call))
            raise ValueError(
                f"monitor={self.monitor} is not a multiple of"
                f" steps_per_call={self.steps_per_call}, of which the last step is"
                f" observed; use {self.steps_per_call * calls}, or 0 for never"
            )
        if self.start is not None and self.initial_jitter:
            raise ValueError(
                f"start={self.start!r} with initial_jitter={self.initial_jitter}:"
                " parameters of a checkpoint are taken as they are; leave one of"
                " them out"
            )
        if self.monitor > self.steps:
            raise ValueError(
                f"monitor={self.monitor} of steps={self.steps}: no step would be"
                " observed; lower monitor, ask for more steps, or use 0 for never"
            )
        if isinstance(self.weights, Adapters):
            self._check_adapters(self.weights)
        if self.preferences is not None:
            pairs.check_run(self.model, self.size, self.monitor)
        if self.monitor and self.update == "backward":
            raise ValueError(
                f"monitor={self.monitor} with update='backward': an observed step needs"
                " the gradients of all weights, which would not exist; use"
                " update='behind', or leave monitor"
            )
        if isinstance(self.weights, Stored) and not isinstance(
            tcfp_jax.recipe(self.recipe).weight, Dual
        ):
            raise ValueError(
                f"weights='stored' with recipe {_named(self.recipe)!r}: the recipe has"
                " no residual, and W_hi alone has too few bits to be a parameter; use"
                " recipe 'tcfp12_single', which multiplies by W_hi, or weights='float'"
            )

        if self.finish is not None:
            Finish.parse(self.finish).switch(self.steps, self.steps_per_call)
            self._last_products(self.finish)

    def _check_batch(self) -> None:
        context = self.size.context
        if self.sequence > context:
            named = self.model if isinstance(self.model, str) else self.start
            raise ValueError(
                f"sequence={self.sequence} exceeds the context of model"
                f" {named or type(self.model).__name__}, {context}; shorten it"
            )
        _check_positive(self, "accumulate")
        if self.accumulate == 1:
            return
        if self.batch % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} does not divide batch={self.batch};"
                " choose a divisor"
            )
        if self.update == "backward":
            raise ValueError(
                f"accumulate={self.accumulate} with update='backward': layers change"
                " inside the backward pass, before the next part has a gradient; use"
                " update='behind', or a smaller batch with remat='block'"
            )
        if self.monitor:
            raise ValueError(
                f"monitor={self.monitor} with accumulate={self.accumulate}: an observed"
                " step computes the whole batch at once; leave one of them out"
            )

    def _check_adapters(self, adapters: Adapters) -> None:
        if self.start is None or not isinstance(self.size, LlamaConfig):
            raise ValueError(
                f"lora={adapters.rank} without weights to adapt; name a Llama to start"
                " from, or leave it"
            )
        if self.include == "measured":
            raise ValueError(
                f"lora={adapters.rank} with include='measured': frozen weights are"
                " quantized once and do not train; leave it"
            )

    @property
    def update(self) -> Update:
        """When weights are updated; all but stored ones behind the backward pass."""
        return self.weights.update if isinstance(self.weights, Stored) else "behind"

    def updated(self, update: Update) -> "TrainConfig":
        """Return the same run with another `update`; its weights must be stored."""
        assert isinstance(self.weights, Stored), self.weights
        return replace(self, weights=replace(self.weights, update=update))

    @property
    def compute_dtype(self) -> ComputeDtype:
        """The dtype of activations; JAX's default device decides "auto"."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"

    @property
    def size(self) -> ModelConfig:
        """Sizes of the model, with rows for every token id of the data."""
        size = model_config(self.model, self.data.vocabulary)
        if not isinstance(size, LlamaConfig):
            return size
        rank = self.weights.rank if isinstance(self.weights, Adapters) else 0
        return replace(size, remat=self.remat or size.remat, lora=rank)

    @property
    def rows(self) -> int:
        """Number of windows that are computed at once."""
        return self.batch // self.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that one optimizer step predicts; a pair has two answers."""
        rows = self.batch if self.preferences is None else 2 * self.batch
        return rows * self.sequence

    @property
    def in_bf16(self) -> "TrainConfig":
        """The same run with float32 parameters and BF16 products: the baseline."""
        return replace(
            self,
            recipe="bf16",
            include="every",
            weights=Float(),
            sample=None,
            finish=None,
            products=None,
        )

    @property
    def switch(self) -> int:
        """Number of steps before `finish`; all without one."""
        if self.finish is None:
            return self.steps
        return Finish.parse(self.finish).switch(self.steps, self.steps_per_call)

    @property
    def ending(self) -> "TrainConfig":
        """The run as it ends: its own state, and the products of `finish`."""
        if self.finish is None:
            return self
        return replace(self, finish=None, products=self._last_products(self.finish))

    def _last_products(self, finish: str) -> Recipe:
        if isinstance(self.weights, Adapters):
            raise ValueError(
                f"finish={finish!r} with lora={self.weights.rank}: frozen weights are"
                " quantized once, for the products of one recipe; leave one of them"
            )
        kept = tcfp_jax.recipe(self.recipe)
        return Finish.parse(finish).recipe(kept, isinstance(self.weights, Stored))


def _named(recipe: str | Recipe) -> str:
    """Return the name of a recipe for messages."""
    return recipe if isinstance(recipe, str) else describe(recipe)


def short_name(recipe: str | Recipe) -> str:
    """Return the nearest name of a recipe, for folders and legends.

    >>> short_name(tcfp_jax.recipe("nvfp4", rule="fold_exact"))
    'nvfp4'
    """
    return _named(recipe).partition(" with ")[0]


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return all settings in one row, with the names of the command line.

    >>> settings_of(TrainConfig(weights=Stored()))["moments"]
    '8bit'
    """
    fields = {**vars(config), **vars(config.data)}
    fields["data"] = fields.pop("paths")
    del fields["products"]
    fields |= dict(weights="float", moments="float32", error_dtype="float32", lora=0)
    fields["update"] = "behind"
    preferences = fields.pop("preferences")
    fields |= dict.fromkeys(pairs.NAMES) if preferences is None else vars(preferences)
    match config.weights:
        case Float(error_dtype):
            fields["error_dtype"] = error_dtype
        case Stored(moments, update):
            fields |= dict(weights="stored", moments=moments, update=update)
        case Adapters(rank):
            fields["lora"] = rank
    return fields


def config_of(settings: Mapping[str, Any]) -> TrainConfig:
    """Return the run of settings in one row, the inverse of `settings_of`.

    Raises:
      ValueError: as `TrainConfig` and `trained_form`.
    """
    fields = dict(settings)

    def taken(*names: str) -> dict[str, Any]:
        return {name: fields.pop(name) for name in names if name in fields}

    weights = trained_form(
        **taken("weights", "moments", "error_dtype", "lora", "update")
    )
    preferences = pairs.preferences_of(taken(*pairs.NAMES))
    paths = fields.pop("data", ())
    data = Data(paths, **taken("vocabulary", "tokenizer", "corpus_bytes", "date"))
    return TrainConfig(**fields, weights=weights, data=data, preferences=preferences)


_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    # BF16's own best of 3e-4, 5e-4, 1e-3, 2e-3 and 4e-3 over 1000 steps that end at a
    # tenth of it.
    "small": dict(steps=1000, batch=32, sequence=256, learning_rate=2e-3),
    "gpt2": dict(steps=2000, batch=16, sequence=1024, learning_rate=6e-4),
    "llama-tiny": dict(steps=300),
    "llama-124m": dict(steps=2000, batch=16, sequence=1024, learning_rate=6e-4),
    "llama-1b": dict(steps=2000, batch=4, sequence=4096, learning_rate=3e-4),
    "llama-8b": dict(steps=2000, batch=2, sequence=4096, learning_rate=3e-4),
    "moe-tiny": dict(steps=300),
    "moe-109m": dict(steps=2000, batch=16, sequence=1024, learning_rate=6e-4),
    "olmoe-1b-7b": dict(steps=2000, batch=4, sequence=4096, learning_rate=4e-4),
    "qwen3-30b-a3b": dict(steps=2000, batch=2, sequence=4096, learning_rate=3e-4),
}


# A model that exists is changed little; a longer sequence or a larger batch is a matter
# of memory.
FINE_TUNING: dict[str, Any] = dict(
    steps=200, batch=4, learning_rate=1e-5, final_fraction=0.1, weight_decay=0.0
)


def _of_folder(folder: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that fine-tunes the model in a folder of Hugging
    Face.
    """
    shape = read_shape(folder)
    # A CPU does not tell how much memory there is.
    shape = replace(shape, remat="none" if jax.default_backend() == "cpu" else "auto")
    fields = dict(FINE_TUNING, model=shape, start=str(folder))
    fields["sequence"] = min(shape.context, 1024)
    if overrides.get("lora"):  # matrices that begin at zero need larger steps
        fields |= dict(recipe="tensorwise", learning_rate=2e-4)
    if pairs.are_pairs(overrides.get("data", ())):  # TRL's rate of DPO is 1e-6
        fields["learning_rate"] /= 10
    tokenizer = folder / "tokenizer.json"
    data = overrides.get("data", ())
    holds_ids = any(path.endswith(IDS_SUFFIX) for path in data)
    if tokenizer.is_file() and not holds_ids:
        fields["tokenizer"] = str(tokenizer)
    elif "tokenizer" not in overrides and document_files(data):
        raise FileNotFoundError(
            f"{tokenizer} is missing, and {data[0]} holds documents for a tokenizer;"
            " copy all files of the model, or name another tokenizer"
        )
    return fields


def _check_documents(given: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a setting is given that the data do not read."""
    holds = bool(document_files(given.get("data", ())))
    if holds and given.get("corpus_bytes") is not None:
        raise ValueError(
            f"corpus_bytes={given['corpus_bytes']} with documents, which are read"
            " whole; leave it, and give a file of fewer lines"
        )
    if not holds and given.get("date") is not None:
        raise ValueError(
            f"date={given['date']!r} is for chat templates, and the data have no"
            " documents; leave it, or give documents such as chats.jsonl"
        )


def preset(model: str = "tiny", **overrides: Any) -> TrainConfig:
    """Return the run of `python -m models.train --model MODEL`, with settings replaced.

    Without a recipe weights are stored, with moments in 8 bits and the recipe that
    stores and multiplies least. Next to a recipe alone they are float32. `data` is read
    whole. A model may be a folder of Hugging Face, whose weights and tokenizer are
    taken.

    Raises:
      FileNotFoundError: the model is neither a size nor a folder of a model.
      ValueError: as `config_of`; `error_dtype` is given for a recipe that keeps no
        errors; or a setting of pairs of answers or of documents is given for other
        data, or `corpus_bytes` for documents.

    >>> preset("small", recipe="bf16").steps
    1000
    >>> preset().weights, preset().recipe
    (Stored(moments='8bit', update='behind'), 'tcfp12_single')
    >>> preset(recipe="tensorwise").weights
    Float(error_dtype='float32')
    """
    if model in model_names():
        given = {"model": model, **_PRESETS.get(model, {})}
    else:
        check_is_folder(model)
        given = _of_folder(Path(model), overrides)
    given |= overrides
    if given.get("lora") == 0:  # as if it were not given
        del given["lora"]
    if not {"weights", "recipe", "error_dtype", "lora"} & given.keys():
        given["weights"] = "stored"
    defaults: dict[str, Any] = pairs.settings_for(given)
    if given.get("weights") == "stored":
        defaults |= dict(recipe="tcfp12_single", moments="8bit")
        # A CPU does not tell how much memory there is.
        if jax.default_backend() != "cpu":
            defaults["update"] = "auto"
    if given.get("data"):
        defaults["corpus_bytes"] = 2**63 - 1
    _check_documents(given)
    tokenizer = given.get("tokenizer")
    if tokenizer is not None:
        found = read_tokenizer(Path(tokenizer))
        if given.get("vocabulary") is None:
            given["vocabulary"] = found.size
        if found.tells_the_date and document_files(given.get("data", ())):
            defaults["date"] = datetime.date.today().isoformat()
    config = config_of({**defaults, **given})
    error_dtype = given.get("error_dtype", "float32")
    if error_dtype != "float32" and not tcfp_jax.recipe(config.recipe).feedback:
        raise ValueError(
            f"error_dtype={error_dtype!r} with recipe {_named(config.recipe)!r}:"
            " no error of a weight is kept; leave error_dtype, or use a recipe with"
            " remainder='feedback', such as 'tcfp12'"
        )
    return config
