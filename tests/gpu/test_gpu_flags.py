"""The flags of XLA that `models.train` sets change no bit of a run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from models.nets.sizes import LLAMAS
from models.training import flags, steps
from models.training.settings import Stored, TrainConfig
from tests.helpers import parametrize, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("standard_promotion")]
# cuDNN's attention repeats no gradient bit for bit.
SIZE = replace(
    LLAMAS["llama-tiny"],
    layers=4,
    width=512,
    hidden=1024,
    context=512,
    attention="products",
    remat="block",
)


def after_three_steps(config, options, monkeypatch):
    """The losses and the state of a run whose steps are compiled with `options`."""
    monkeypatch.setattr(steps, "step_flags", lambda: options)
    steps._step_function.cache_clear()
    text = jax.random.randint(jax.random.key(0), (1 << 16,), 0, 250)
    step = steps.make_train_step(config, 1)
    state = steps.init(config)
    losses = []
    for _ in range(3):
        state, loss = step(state, text, steps.batch_key(config))
        losses.append(loss)
    return jnp.stack(losses), jax.tree.leaves(state)


@parametrize("update", ["behind", "backward"])
def test_flags_of_loops_keep_every_bit(update, monkeypatch):
    config = TrainConfig(
        model=SIZE,
        recipe="tcfp12_single",
        weights=Stored("8bit", update),
        steps=100,
        batch=4,
        sequence=512,
    )
    plain = after_three_steps(config, {}, monkeypatch)
    both = after_three_steps(config, flags.step_flags(), monkeypatch)
    assert flags.step_flags()
    assert same_bits(both, plain)
