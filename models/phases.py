"""Recipes by schedule and by depth: which recipe a step has, which a block has, and states that go from one to another.

    TrainConfig(recipe="tcfp12_fast", recipe_schedule=((0.85, "bf16"),))     the last 15 % of the steps in BF16
    TrainConfig(recipe="tcfp12_fast", ends=(1, 1, "bf16"))                    the first and the last block in BF16

Each part of a run is a config of its own, whose programs are those of a run with that recipe alone: a switch compiles
its steps, plain and observed. Float parameters and their moments go on as they are, and the quantized weights beside
them are made anew, by a program of its own, unless both recipes store the same. Stored weights are what they are: from
the recipe that comes later they take the products, and keep how they are stored.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from models.meshes import OnMesh
from models.settings import TrainConfig
from models.training import TrainState, make_optimizer, program, state_places
from tcfp_jax.recipes import recipe as named_recipe

# What of a recipe says how a weight lies beside float parameters.
_STORED_BESIDE = ("weight", "scaling", "copies", "amax")
# What the state of a run consists of, beside its recipe.
_OF_STATE = ("model", "ends", "weights", "moments", "error_dtype", "vocabulary")


def phase_at(config: TrainConfig, step: int) -> TrainConfig:
    """The config of the part of a run that takes this step, counted from 0.

    >>> config = TrainConfig(steps=200, recipe="tcfp12", recipe_schedule=((0.85, "bf16"),))
    >>> [phase_at(config, step).recipe for step in (0, 169, 170)], phase_at(config, 170).recipe_schedule
    (['tcfp12', 'tcfp12', 'bf16'], ())
    """
    chosen = config.recipe
    for first, later in config.switches:
        chosen = later if step >= first else chosen
    return dataclasses.replace(config, recipe=chosen, recipe_schedule=())


def switched(before: TrainConfig, after: TrainConfig, state: TrainState, mesh: Mesh | None = None) -> TrainState:
    """The state of one part of a run as the next part has it. The old state is donated.

    Raises:
      ValueError: the two do not differ in the recipe alone; the message says in which field, and both values.
    """
    for name in _OF_STATE:
        if getattr(before, name) != getattr(after, name):
            raise ValueError(
                f"{name}={getattr(before, name)!r} before and {getattr(after, name)!r} after: a state goes from one "
                "recipe to another, and not from one of these to another; make both equal"
            )
    if before.weights == "stored" or not _stores_anew(before, after):
        return state
    return _switch_function(program(after), mesh)(state)


def _stores_anew(before: TrainConfig, after: TrainConfig) -> bool:
    old, new = named_recipe(before.recipe), named_recipe(after.recipe)
    return any(getattr(old, name) != getattr(new, name) for name in _STORED_BESIDE)


@functools.lru_cache(maxsize=16)
def _switch_function(config: TrainConfig, mesh: Mesh | None) -> Any:
    optimizer = make_optimizer(config)

    def switch(state: TrainState) -> TrainState:
        # The last state of the chain is that of the quantized weights.
        fresh: Any = optimizer.init(state.params)
        return TrainState(state.params, (*state.opt_state[:-1], fresh[-1]), state.step)

    if mesh is None:
        return jax.jit(switch, donate_argnums=0)
    return OnMesh(jax.jit(switch, donate_argnums=0, out_shardings=state_places(config, mesh)), mesh)
