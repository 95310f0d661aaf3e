"""Gradients of a batch in parts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from models import train
from models.nets.meshes import make_mesh
from models.training.accumulation import in_parts
from models.training.examples import COUNTED, TOKENS
from models.training.settings import Stored
from models.training.steps import check_placement
from tests.helpers import drawn, parametrize, refused, slow
from tests.models.test_train import CONFIG, STORED

pytestmark = pytest.mark.usefixtures("standard_promotion")
TABLE = drawn(8, 4)


def loss(table, quantized, batch, key):
    """A mean over the tokens that count, and the number of them."""
    del quantized, key
    values = jnp.sum(table[batch[:, TOKENS, 1:]] ** 3, axis=-1)
    counted = batch[:, COUNTED, 1:] > 0
    return jnp.sum(jnp.where(counted, values, 0.0)) / counted.sum(), counted.sum()


@parametrize("parts", [1, 2, 4])
def test_parts_count_as_their_tokens_do(parts):
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 8, (8, 3, 6), np.int32)
    # Rows with all, some, and no tokens that count; of four parts, one has none
    batch[:, COUNTED] = (np.arange(6) > np.arange(8)[:, None] % 4 + 2).astype(np.int32)
    assert batch[3::4, COUNTED, 1:].sum() == 0
    differentiate = jax.value_and_grad(loss, has_aux=True)
    (value, _), gradient = differentiate(TABLE, None, batch, None)
    found = jax.jit(in_parts(differentiate, parts))(TABLE, None, batch, None)
    assert_allclose(found[0][0], value, rtol=1e-6)
    assert_allclose(found[1], gradient, rtol=1e-5, atol=1e-6)


def test_each_part_draws_its_own_bits():
    def draws(params, quantized, batch, key):
        return params * jax.random.normal(key) + 0 * batch.sum()

    run = in_parts(jax.value_and_grad(draws), 2)
    key = jax.random.key(0)
    value, _ = run(jnp.float32(1), None, jnp.ones((2, 5)), key)
    wanted = [jax.random.normal(jax.random.fold_in(key, i)) for i in range(2)]
    assert_allclose(value, np.mean(wanted), rtol=1e-6)


@slow
@parametrize("config", [CONFIG, STORED], ids=["float", "stored"])
def test_a_run_in_parts_learns_alike(config):
    losses = [train.run(replace(config, accumulate=i)).train_loss for i in (1, 2)]
    assert_allclose(losses[1][:5], losses[0][:5], rtol=0.01)
    assert losses[1][-5:].mean() < losses[1][:5].mean() - 0.5


@parametrize(
    "changes, message",
    [
        (dict(accumulate=0), "accumulate=0 must be at least 1"),
        (dict(accumulate=3), "accumulate=3 does not divide batch=4"),
        (dict(accumulate=2, monitor=5), "monitor=5 with accumulate=2"),
        (
            dict(accumulate=2, weights=Stored("8bit", "backward")),
            "accumulate=2 with update='backward': .* use update='behind', or",
        ),
    ],
)
def test_what_has_no_parts_is_refused(changes, message):
    with refused(message):
        replace(STORED, **changes)


def test_a_mesh_splits_the_rows_of_a_part():
    mesh = make_mesh({"fsdp": jax.device_count()})
    use = 2 * jax.device_count()
    with refused(f"accumulate=2 computes 2 of batch=4 .* use batch={use}, or fewer"):
        check_placement(replace(STORED, accumulate=2), mesh)
