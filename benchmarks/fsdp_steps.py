"""Training steps on several GPUs that split batch and weights, as candidates."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import llama_steps, timing, train_step
from benchmarks.llama_steps import STORED, Update
from benchmarks.products import GemmShape
from benchmarks.train_step import Kept
from benchmarks.variants import BASELINE
from models.nets.meshes import BATCH, parameter_shardings
from models.nets.shapes import LlamaConfig, MoeConfig
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.sharding import state_shardings

Part = Literal["mlp", "llama", "olmoe"]
PARTS: tuple[Part, ...] = get_args(Part)
AXIS = "fsdp"
NARROW = " wire=bfloat16"
INSIDE = " update=backward"  # of models
RECIPES = (
    BASELINE,
    "tensorwise",
    "tensorwise" + NARROW,
    "tcfp12_fast",
    "tcfp12_fast" + NARROW,
    STORED,
    STORED + INSIDE,
)


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Settings of a run.

    Attributes:
      mlp: Tokens, d and d_ff of one device.
      llama, olmoe: Sizes of the models.
      llama_tokens: Sequences and positions of one device.
      float_remat: Values that blocks keep if weights are float; None as in `llama`.
      alone: Candidates that run on one device, too.
      devices: Numbers of devices; 1 is the comparison.
      resume: JSON whose rows are kept.
    """

    mlp: GemmShape
    llama: LlamaConfig
    olmoe: MoeConfig
    llama_tokens: tuple[int, int]
    recipes: tuple[str, ...]
    alone: tuple[str, ...]
    parts: tuple[Part, ...] = PARTS
    devices: tuple[int, ...] = (1, 2)
    float_remat: str | None = None
    resume: str | None = None

    @property
    def settings(self) -> dict[str, object]:
        """Everything that rows of one file share."""
        shared = dataclasses.asdict(self)
        for name in ("recipes", "alone", "parts", "float_remat", "resume"):
            del shared[name]
        return shared


def make_training(
    part: Part, name: str, config: Config, devices: int
) -> timing.Training:
    """Return the step of a candidate, with as many tokens on every device."""
    if part == "mlp":
        shape = dataclasses.replace(config.mlp, m=devices * config.mlp.m)
        return train_step.make_training(shape, *_mlp_of(name))
    sequences, positions = config.llama_tokens
    tokens = devices * sequences, positions
    size = size_of(part, name, config)
    update: Update = "backward" if name.endswith(INSIDE) else "behind"
    few = llama_steps.Config(
        size, size, tokens, tokens, {}, include=("linear", "small"), update=update
    )
    is_narrow = name.endswith(NARROW)
    named = _narrow(name) if is_narrow else name.removesuffix(INSIDE)
    return llama_steps.make_training(few, named)


def size_of(part: Part, name: str, config: Config) -> LlamaConfig:
    """Return the size of a model, and the values that its blocks keep."""
    size = config.llama if part == "llama" else config.olmoe
    if config.float_remat is None or name.startswith(STORED):
        return size
    return dataclasses.replace(size, remat=config.float_remat)


def _mlp_of(name: str) -> tuple[Recipe, Kept]:
    """Return recipe and state of a candidate of the MLP."""
    if name == STORED:
        kept = Kept("stored", moments="8bit", gradient_dtype="bfloat16")
        return recipe("tcfp12_single"), kept
    return _narrow(name) if name.endswith(NARROW) else recipe(name), Kept()


def _narrow(name: str) -> Recipe:
    """Return the recipe of a candidate whose gradients travel in bfloat16."""
    return recipe(name.removesuffix(NARROW), wire="bfloat16")


def placed(mesh: Mesh, floats: Any, state_of: Callable[[Any], Any], given: Any) -> Any:
    """Return the shardings of `Training.init`: `(state, *inputs)`.

    `floats` are BF16's parameters.
    """
    state, *inputs = given
    params = state[0]
    at = functools.partial(NamedSharding, mesh)
    if "embedding" in floats:
        split = parameter_shardings(floats, mesh)
    else:
        split = jax.tree.map(lambda _: at(P(AXIS)), floats)
    places = state_shardings(split, params, state_of)
    return places, *(at(BATCH) for _ in inputs)
