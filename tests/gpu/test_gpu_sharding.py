"""Training steps on two GPUs, batch and weights split over both, against the same steps
on one.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.linen import TCFPDense
from tcfp_jax.sharding import state_shardings
from tests.helpers import mesh_of

pytestmark = pytest.mark.gpu
WIDTH, TOKENS = 512, 1024
SPECS = {"layers_0": {"kernel": P("fsdp")}, "layers_2": {"kernel": P("fsdp")}}


def train(recipe, weights, devices):
    """Gradients of the first of two steps, and the state behind them."""
    dense = functools.partial(
        TCFPDense, recipe=recipe, use_bias=False, dtype=jnp.bfloat16
    )
    model = nn.Sequential([dense(2 * WIDTH), nn.relu, dense(WIDTH)])
    if weights == "stored":
        tx = tcfp_jax.optim.adamw(1e-3, moments="8bit", key=jax.random.key(0))
    else:
        tx = optax.chain(optax.adamw(1e-3), tcfp_jax.error_feedback(recipe))
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH)).astype(jnp.bfloat16)

    @tcfp_jax.value_and_grad
    def gradients(params, opt_state, x):
        y = model.apply({"params": params, "tcfp": tcfp_jax.layer_state(opt_state)}, x)
        return jnp.mean(
            jnp.square(y.astype(jnp.float32) - x[:, ::-1].astype(jnp.float32))
        )

    def parameters(key):
        params = model.init(key, x)["params"]
        return (
            tcfp_jax.store(params, recipe, key=key) if weights == "stored" else params
        )

    def state_of(params):
        return params, tx.init(params)

    def step(state, x):
        loss, dparams = gradients(*state, x)
        updates, opt_state = tx.update(dparams, state[1], state[0])
        return (tcfp_jax.apply_updates(state[0], updates), opt_state), (loss, dparams)

    mesh = mesh_of(devices, names=("fsdp",))
    at = jax.tree.map(
        functools.partial(NamedSharding, mesh),
        SPECS,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    with jax.set_mesh(mesh):
        key = jax.random.key(2)
        shardings = state_shardings(at, jax.eval_shape(parameters, key), state_of)
        init = jax.jit(lambda key: state_of(parameters(key)), out_shardings=shardings)
        state = init(key)
        x = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        step = jax.jit(step, out_shardings=(shardings, None), donate_argnums=0)
        first = bytes_of(state)
        state, (loss, dparams) = step(state, x)
        state, (last, _) = step(state, x)
    assert float(last) < float(loss)
    return first, jax.device_get((loss, dparams)), state


def bytes_of(tree):
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ).tobytes()
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("weights", ["float", "stored"])
@pytest.mark.parametrize("name", ["tensorwise", "tcfp12_fast", "blockwise", "rowwise"])
def test_two_gpus_train_as_one_does(name, weights):
    if weights == "stored" and name != "tensorwise":
        pytest.skip(
            "one recipe stands for stored weights: the others' products are those of"
            " float ones"
        )
    recipe = tcfp_jax.recipe("tcfp12_single" if weights == "stored" else name)
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic
        on_two = train(recipe, weights, 2)
        on_one = train(recipe, weights, 1)
    # What is quantized at the start has the same bits.
    assert on_two[0] == on_one[0]
    for got, expected in zip(
        *(jax.tree.leaves(found[1]) for found in (on_two, on_one)), strict=True
    ):
        # Only sums over tokens differ, in the order of float32 additions; a value of dy
        # may then round otherwise.
        lost = np.linalg.norm(np.float32(got) - np.float32(expected)) / np.linalg.norm(
            np.float32(expected)
        )
        assert lost < 10 ** (-40 / 20), f"{-20 * math.log10(lost):.1f} dB"
    # Nothing of a matrix's size is whole on a device.
    for leaf in jax.tree.leaves(on_two[2]):
        if leaf.size >= WIDTH * WIDTH:
            assert leaf.addressable_shards[0].data.size == leaf.size // 2
