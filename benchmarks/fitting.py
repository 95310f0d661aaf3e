"""Values that a benchmark's steps keep for their backward pass: with remat="auto" of a
Llama, as many as fit.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

import tcfp_jax
from benchmarks.timing import Training
from models.training.fitting import fit, is_open
from tcfp_jax.remat import device_budget

BASELINE, STORED = "bf16", "stored"
RECIPE_OF = {STORED: "tcfp12_single"}
Config = TypeVar("Config", bound=Any)  # with the size of a model as `step`
Make = Callable[[Config, str], Training]


def settled(
    config: Config, name: str, make_training: Make, budget: int | None = None
) -> tuple[Config, tuple[Any, float] | None]:
    """Return the settings of a candidate with the values that fit instead of
    remat="auto", and its compiled step.

    Next to the step are the seconds of compiling it. If the settings say what to keep,
    nothing is compiled.

    Args:
      config: The settings.
      name: The candidate.
      make_training: Function of settings and a candidate that returns its step.
      budget: Bytes that a step may need; None is `tcfp_jax.remat.device_budget()`.
    """
    if not is_open(config.step):
        return config, None
    keeping = lambda remat: dataclasses.replace(
        config, step=dataclasses.replace(config.step, remat=remat)
    )
    how = tcfp_jax.recipe(RECIPE_OF.get(name, name))
    started: dict[str, float] = {}

    def lower(remat: str) -> Any:
        started[remat] = time.perf_counter()
        return make_training(keeping(remat), name).lower()

    found = fit(how, lower, budget)
    # A level is compiled before the next one is lowered.
    ends = [*started.values(), time.perf_counter()][1:]
    seconds = dict(zip(started, ends, strict=True))[found.level] - started[found.level]
    return keeping(found.level), (found.compiled, seconds)


def next_to_each_other(
    config: Config, names: Sequence[str], make_training: Make
) -> dict[str, Config]:
    """Return the settings of each candidate, with room for the states of all and for
    two sets of gradients.
    """
    if not is_open(config.step):
        return dict.fromkeys(names, config)
    count = lambda tree: sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
    states = {
        name: count(
            jax.eval_shape(make_training(config, name).init, jax.random.key(0))[0]
        )
        for name in names
    }
    # BF16's state is parameters and two moments, so two sets of gradients are smaller.
    free = device_budget() - sum(states.values()) - states[BASELINE]
    return {
        name: settled(config, name, make_training, free + states[name])[0]
        for name in names
    }
