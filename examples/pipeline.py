"""A small Llama without float weights over two stages of a pipeline, from the checkout.

    python -m examples.pipeline

It runs on virtual CPU devices: two stages, each with a batch split over two devices.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from models.nets.llama import Llama
from models.nets.pipeline import STAGE, Pipeline
from models.nets.shapes import LlamaConfig
from tcfp_jax import optim


def main():
    jax.config.update("jax_num_cpu_devices", 4)
    data = 2 if len(jax.devices()) >= 4 else 1
    mesh = jax.make_mesh(
        (2, data), (STAGE, "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    config = LlamaConfig(
        layers=4, width=64, heads=4, kv_heads=2, hidden=128, context=32
    )
    model = Pipeline(config, tcfp_jax.recipe("tcfp12_single"), mesh, microbatches=4)
    tx = optim.adamw(3e-3, moments="8bit", key=jax.random.key(2))

    def parameters(key):
        def floats():
            tokens = jnp.zeros((1, 8), jnp.int32)
            return Llama(config, model.dtype).init(key, tokens)["params"]

        return tcfp_jax.store(floats, model.weights, key=key)

    def state_of(params):
        return params, tx.init(params)

    key = jax.random.key(0)
    shardings = model.shardings(jax.eval_shape(parameters, key), state_of)
    init = jax.jit(lambda key: state_of(parameters(key)), out_shardings=shardings)
    state = init(key)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state, windows):
        params, opt_state = state

        def loss(params):
            variables = {"params": params}
            return model.apply(variables, windows[:, :-1], windows[:, 1:]).mean()

        value, gradients = tcfp_jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (tcfp_jax.apply_updates(params, updates), opt_state), value

    text = jnp.asarray(list(__doc__.encode()))
    print(
        f"{len(jax.devices())} devices; the first step is compiled, which takes most of"
        " the time",
        flush=True,
    )
    for i in range(20):
        step_key = jax.random.fold_in(key, i)
        offsets = jax.random.randint(step_key, (8,), 0, len(text) - 33)
        windows = text[offsets[:, None] + jnp.arange(33)]
        windows = jax.device_put(windows, NamedSharding(mesh, P("data")))
        state, value = step(state, windows)
        print(f"step {i}: {float(value):.3f} nats a byte", flush=True)
    kernel = state[0]["layers"]["query"]["kernel"].rows.values
    for shard in kernel.addressable_shards:
        print(
            f"{shard.device} has {shard.data.shape} of the {kernel.dtype} values"
            f" {kernel.shape} of all queries"
        )


if __name__ == "__main__":
    main()
