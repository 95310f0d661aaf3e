"""Training steps on two GPUs, batch and weights split over both, against one GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.linen import TCFPDense
from tcfp_jax.sharding import state_shardings
from tests.helpers import mesh_of, normal, parametrize

pytestmark = pytest.mark.gpu
WIDTH, TOKENS = 512, 1024
LAYERS = ("layers_0", "layers_2")


def train(recipe, weights, devices):
    """Bytes of the first state, gradients of the first of two steps, the last state."""
    dense = partial(TCFPDense, recipe=recipe, use_bias=False, dtype=jnp.bfloat16)
    model = nn.Sequential([dense(2 * WIDTH), nn.relu, dense(WIDTH)])
    if weights == "stored":
        tx = tcfp_jax.optim.adamw(1e-3, moments="8bit", key=random.key(0))
    else:
        tx = optax.chain(optax.adamw(1e-3), tcfp_jax.error_feedback(recipe))
    x = normal(1, (TOKENS, WIDTH)).astype(jnp.bfloat16)

    @tcfp_jax.value_and_grad
    def gradients(params, opt_state, x):
        variables = {"params": params, "tcfp": tcfp_jax.layer_state(opt_state)}
        y = model.apply(variables, x).astype(jnp.float32)
        return jnp.mean(jnp.square(y - x[:, ::-1].astype(jnp.float32)))

    def parameters(key):
        params = model.init(key, x)["params"]
        if weights == "stored":
            return tcfp_jax.store(params, recipe, key=key)
        return params

    def state_of(params):
        return params, tx.init(params)

    def step(state, x):
        params, opt_state = state
        loss, dparams = gradients(params, opt_state, x)
        updates, opt_state = tx.update(dparams, opt_state, params)
        return (tcfp_jax.apply_updates(params, updates), opt_state), (loss, dparams)

    mesh = mesh_of(devices, names=("fsdp",))
    spread = NamedSharding(mesh, P("fsdp"))
    at = {layer: {"kernel": spread} for layer in LAYERS}
    with jax.set_mesh(mesh):
        key = random.key(2)
        shardings = state_shardings(at, jax.eval_shape(parameters, key), state_of)
        init = jax.jit(lambda key: state_of(parameters(key)), out_shardings=shardings)
        state = init(key)
        x = jax.device_put(x, spread)
        step = jax.jit(step, out_shardings=(shardings, None), donate_argnums=0)
        first = [*map(bytes_of, jax.tree.leaves(state))]
        state, (loss, dparams) = step(state, x)
        state, (last, _) = step(state, x)
    assert float(last) < float(loss)
    return first, jax.tree.leaves(jax.device_get((loss, dparams))), state


def bytes_of(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = random.key_data(leaf)
    return np.asarray(leaf).tobytes()


@parametrize(
    "name, weights",
    [
        ("tensorwise", "float"),
        ("tcfp12_fast", "float"),
        ("blockwise", "float"),
        ("rowwise", "float"),
        # The products of stored weights are those of float ones.
        ("tcfp12_single", "stored"),
    ],
)
def test_two_gpus_train_as_one(name, weights):
    recipe = tcfp_jax.recipe(name)
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic
        first, on_two, last = train(recipe, weights, 2)
        first_on_one, on_one, _ = train(recipe, weights, 1)
    # The quantized weights of the start have the same bits.
    assert first == first_on_one
    for got, expected in zip(on_two, on_one, strict=True):
        # Only sums over tokens differ, in the order of float32 additions; a value of dy
        # may then round otherwise.
        expected = np.float32(expected)
        error = np.linalg.norm(np.float32(got) - expected)
        assert error < 10 ** (-40 / 20) * np.linalg.norm(expected)
    # Nothing of a matrix's size is whole on a device.
    for leaf in jax.tree.leaves(last):
        if leaf.size >= WIDTH * WIDTH:
            assert leaf.addressable_shards[0].data.size == leaf.size // 2
