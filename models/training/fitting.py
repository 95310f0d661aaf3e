"""Choices by the bytes of compiled steps: with remat="auto" a run keeps as many values
for its backward pass as fit, and with update="auto" it has the ordinary step if that
fits.
"""

from collections.abc import Callable
from dataclasses import replace

import jax

from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.remat import Fit, device_budget, save_what_fits

from ..nets.families import copies_of
from ..nets.shapes import LlamaConfig, ModelConfig, remat_levels
from .forms import Update
from .processes import gather
from .settings import TrainConfig


def is_open(size: ModelConfig) -> bool:
    """Return whether a model leaves the values that it keeps to `fit`."""
    return isinstance(size, LlamaConfig) and size.remat == "auto"


def fit(
    how: Recipe, lower: Callable[[str], jax.stages.Lowered], budget: int | None
) -> Fit[str]:
    """Return the value of `LlamaConfig.remat` that keeps as much as fits, with the
    compiled step.

    The levels of a recipe whose weight gradients read FP8 have gate and up in FP8.
    Otherwise all levels have the same gradients.

    Args:
      how: Recipe of the layers.
      lower: Function of the value that returns the lowered step.
      budget: Bytes of a device that a step may need; None is
        `tcfp_jax.remat.device_budget()`, of all processes.

    Raises:
      ValueError: not even remat="block" fits, or a device reports no memory and
        `budget` is None.
    """
    if budget is None:
        try:
            budget = _budget_of_all()
        except NotImplementedError as error:
            raise ValueError(
                f'remat="auto" without a budget: {error} (--memory GB), or choose the'
                ' values, such as remat="block"'
            ) from error
    return save_what_fits(lower, remat_levels(copies_of(how)), budget)


def _budget_of_all() -> int:
    """Return the least budget of all processes, because they must choose alike."""
    return min(map(int, gather(str(device_budget()))))


def fitted(
    config: TrainConfig,
    lower: Callable[[TrainConfig], jax.stages.Lowered],
    budget: int | None = None,
) -> tuple[TrainConfig, str | None]:
    """Return the run with the values to keep instead of "auto", and a line that
    describes them or None.

    Args:
      config: The run.
      lower: Function of a run that returns its lowered train step.
      budget: As in `fit`.

    Raises:
      ValueError: as `fit`.
    """
    if not is_open(config.size):
        return config, None
    found = fit(
        recipe(config.recipe), lambda remat: lower(replace(config, remat=remat)), budget
    )
    kept = "the input" if found.level == "block" else found.level
    line = (
        f"remat: keeps {kept} of every block; the step needs {found.needed / 1e9:.3g}"
        f" of {found.budget / 1e9:.3g} GB"
    )
    return replace(config, remat=found.level), line


def with_update(
    config: TrainConfig,
    lower: Callable[[TrainConfig], jax.stages.Lowered],
    budget: int | None = None,
) -> tuple[TrainConfig, str]:
    """Return a run with "behind" or "backward" instead of update="auto", and a line
    that says why.

    It is the ordinary step if that fits the device, with the fewest values that
    remat="auto" may keep. Only the ordinary step clips by the norm of all gradients.

    Args:
      config: The run.
      lower: Function of a run that returns its lowered train step.
      budget: As in `fit`. A device that reports no memory gets the ordinary step.

    Raises:
      ValueError: neither step fits.
    """
    if config.accumulate > 1:
        return config.updated("behind"), "update: behind (of several parts of a batch)"
    if config.monitor:
        why = "steps that --monitor observes need the gradients of all weights"
        return config.updated("behind"), f"update: behind ({why})"
    if budget is None:
        try:
            budget = _budget_of_all()
        except NotImplementedError as error:
            return config.updated("behind"), f"update: behind ({error}; --memory GB)"
    least = replace(config, remat="block") if is_open(config.size) else config
    # The one that needs least comes first.
    updates: tuple[Update, ...] = ("backward", "behind")
    found = save_what_fits(lambda one: lower(least.updated(one)), updates, budget)
    why = f"the step needs {found.needed / 1e9:.3g} of {budget / 1e9:.3g} GB"
    if found.level == "backward":
        ordinary = dict(found.tried)["behind"]
        needs = "more than its compiler got"
        if ordinary is not None:
            needs = f"{ordinary / 1e9:.3g} GB"
        why += f", behind the backward pass {needs}"
    return config.updated(found.level), f"update: {found.level} ({why})"
