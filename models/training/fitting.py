"""Choice of the values that a run keeps for its backward pass: with remat="auto", as
many as fit.
"""

from collections.abc import Callable
from dataclasses import replace

import jax

from models.nets.families import copies_of
from models.nets.shapes import LlamaConfig, ModelConfig, remat_levels
from models.training.processes import gather
from models.training.settings import TrainConfig
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.remat import Fit, device_budget, save_what_fits


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
            budget = device_budget()
        except NotImplementedError as error:
            raise ValueError(
                f'remat="auto" without a budget: {error} (--memory GB), or choose the'
                ' values, such as remat="block"'
            ) from error
        budget = min(map(int, gather(str(budget))))  # all processes must choose alike
    return save_what_fits(lower, remat_levels(copies_of(how)), budget)


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
