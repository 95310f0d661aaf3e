"""`linen_float.py` without float weights.

They are stored as `W_hi + W_lo`, two bytes each.
"""

import os
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax

VOCAB, WIDTH, HIDDEN, HEADS, CONTEXT, BATCH = 128, 64, 256, 4, 32, 16


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)
        x = x + attention(nn.RMSNorm()(x), mask=nn.make_causal_mask(tokens))
        down = nn.Dense(WIDTH, use_bias=False)
        up = nn.Dense(HIDDEN, use_bias=False)
        x = x + down(nn.gelu(up(nn.RMSNorm()(x))))
        return nn.Dense(VOCAB, use_bias=False)(nn.RMSNorm()(x))


mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))


def fsdp(params):
    return tcfp_jax.sharding.state_shardings(
        tcfp_jax.sharding.fsdp(params, mesh), params, make_state
    )


class TrainState(tcfp_jax.linen.TrainState):
    ema: dict


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def make_tx():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
    adamw = optax.adamw(schedule, weight_decay=0.1, mask=is_matrix)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return optax.MultiSteps(tx, every_k_schedule=2)


def averaged(ema, params):
    return jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)


def loss_fn(params, state, tokens):
    logits = state.apply_fn({"params": params}, tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@partial(jax.jit, donate_argnums=0)
def train_step(state, tokens):
    loss, grads = tcfp_jax.value_and_grad(loss_fn)(state.params, state, tokens)
    state = state.apply_gradients(grads=grads)
    ema = averaged(state.ema, tcfp_jax.dequantize(state.params))
    return state.replace(ema=ema), loss


eval_step = jax.jit(loss_fn)


def batch(step):
    start = np.random.default_rng(step).integers(0, VOCAB, (BATCH, 1))
    return jax.device_put(
        jnp.asarray((start + 3 * np.arange(CONTEXT + 1)) % VOCAB),
        NamedSharding(mesh, P("fsdp")),
    )


tx = make_tx()
tokens = jnp.zeros((1, CONTEXT), jnp.int32)
model = tcfp_jax.conversion.convert_to_tcfp(
    Transformer(), "tcfp12_single", tokens, include=("linear", "small")
)


def make_params(key):
    params = model.init(key, tokens)["params"]
    return tcfp_jax.store(params, tcfp_jax.conversion.find_weights(model), key=key)


def make_state(params):
    ema = tcfp_jax.dequantize(params)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx, ema=ema)


def main():
    devices = jax.device_count()
    print(f"{devices} devices; compiling the first step takes longest", flush=True)
    key = jax.random.key(0)
    shardings = fsdp(jax.eval_shape(make_params, key))
    init = jax.jit(lambda key: make_state(make_params(key)), out_shardings=shardings)
    state = init(key)
    for step in range(20):
        state, loss = train_step(state, batch(step))
        if step % 5 == 4:
            print(f"step {step + 1:2} loss {loss:.4f}", flush=True)
    of_average = eval_step(state.ema, state, batch(999))
    print(
        f"held-out loss {eval_step(state.params, state, batch(999)):.4f}, of the"
        f" average {of_average:.4f}"
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params["Dense_1"]):
        name = "up" + jax.tree_util.keystr(path)
        print(name, leaf.dtype, leaf.shape, leaf.sharding.spec)


if __name__ == "__main__":
    main()
