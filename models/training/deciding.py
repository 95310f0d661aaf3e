"""The choice of a run with update="auto", made once: before its folder is written; and
the lines that a run prints before its first step.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ..nets.meshes import everywhere
from .described import holds_run, read_config
from .fitting import with_update
from .flags import described
from .progress import shown
from .settings import TrainConfig
from .steps import lowered_step

CLIPPING = (
    "update inside the backward pass: each matrix is clipped to its part of the limit,"
    " not by the norm of all gradients"
)


def decided(
    config: TrainConfig,
    text: np.ndarray,
    out: Path | None,
    mesh: Mesh | None,
    memory: int | None,
    telling: bool,
) -> TrainConfig:
    """Return a run with a choice instead of update="auto".

    A run that its folder `out` holds keeps its choice. Otherwise `with_update` chooses,
    and a process that is `telling` prints why.
    """
    if config.update != "auto":
        return config
    if out is not None and holds_run(out):
        return config.updated(read_config(out).update)
    with shown(lambda: "choosing the update", telling):
        there = everywhere(text, mesh)

        def lower(one: TrainConfig) -> jax.stages.Lowered:
            return lowered_step(one, mesh, there)

        chosen, line = with_update(config, lower, memory)
        if config.finish is not None and chosen.update == "behind":
            # The last products may need more memory.
            last, line = with_update(config.ending, lower, memory)
            chosen = config.updated(last.update)
    if telling:
        print(line, flush=True)
    return chosen


def before_steps(config: TrainConfig, remat: str | None) -> Iterator[str]:
    """Yield the lines that a run prints before its first step; `remat` is one."""
    yield from filter(None, (remat, described()))
    if config.update == "backward":
        yield CLIPPING
    if config.finish is not None:
        yield f"finish: {config.finish}, from step {config.switch + 1} on"
