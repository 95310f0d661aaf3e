"""Runs that update layers inside the backward pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.nets.meshes import everywhere, make_mesh, parse_mesh
from models.nets.shapes import LlamaConfig
from models.training.settings import Stored, TrainConfig, config_of, settings_of
from models.training.steps import batch_key, init, make_train_step
from tests.helpers import same_bits

SIZE = LlamaConfig(
    layers=2,
    width=128,
    heads=4,
    kv_heads=4,
    hidden=128,
    context=32,
    remat="block",
    head="untied",
)
# XLA's attention and optax's schedules promote dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")
# Nothing is clipped, so both kinds of steps have the same bits.
RUN = TrainConfig(
    model=SIZE,
    recipe="tcfp12_single",
    weights=Stored("8bit"),
    steps=4,
    batch=2,
    sequence=16,
    clip_norm=1e9,
)
INSIDE = replace(RUN, weights=Stored("8bit", "backward"))
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, 250, 4096), jnp.int32)


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_has_the_bits_of_an_ordinary_one(count):
    found = []
    for config in (RUN, INSIDE):
        state = init(config)
        losses = []
        for _ in range(2 // count):
            step = make_train_step(config, count)
            state, some = step(state, TEXT, batch_key(config))
            losses += some.tolist()
        found.append((state, losses))
    assert found[0][1] == found[1][1]
    assert same_bits(found[0][0], found[1][0])


@pytest.mark.slow
def test_a_mesh_has_the_losses_of_one_device():
    config = replace(INSIDE, batch=8, model=replace(SIZE, width=256, hidden=256))
    found = []
    for mesh in (None, make_mesh(parse_mesh("data=4,fsdp=2"))):
        step = make_train_step(config, 2, mesh)
        text = everywhere(TEXT, mesh)
        _, losses = step(init(config, mesh), text, batch_key(config))
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_settings_of_a_run_come_back():
    assert settings_of(INSIDE)["update"] == "backward"
    assert config_of(settings_of(INSIDE)) == INSIDE


def test_float_weights_are_not_updated_inside():
    with pytest.raises(ValueError, match="update='backward' with weights='float'"):
        config_of({"update": "backward"})
    with pytest.raises(ValueError, match="update"):
        Stored(update="inside")


def test_each_kind_of_run_goes_on_with_the_others_state():
    state, _ = make_train_step(RUN, 1)(init(RUN), TEXT, batch_key(RUN))
    shapes = jax.tree.structure(init(INSIDE))
    assert jax.tree.structure(state) == shapes
