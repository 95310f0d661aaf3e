"""`nnx_float.py` without float weights.

They are stored as `W_hi + W_lo`, two bytes each.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax

VOCAB, WIDTH, HIDDEN, HEADS, CONTEXT, BATCH = 128, 64, 256, 4, 32, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=False, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.block = Block(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.block(self.embed(tokens))))


mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))


def place(state):
    fsdp = tcfp_jax.sharding.fsdp(state, mesh)
    shardings = tcfp_jax.sharding.state_shardings(fsdp, state)
    return jax.device_put(state, shardings)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def make_tx():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
    adamw = optax.adamw(schedule, weight_decay=0.1, mask=is_matrix)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return optax.MultiSteps(tx, every_k_schedule=2)


def averaged(ema, params):
    return jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit(donate_argnums=(0, 1, 2))
def train_step(model, optimizer, ema, tokens):
    loss, grads = tcfp_jax.nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    params = tcfp_jax.dequantize(nnx.state(model, nnx.Param))
    return averaged(ema, params), loss


eval_step = nnx.jit(loss_fn)


def make():
    model = Transformer(nnx.Rngs(0))
    tcfp_jax.conversion.convert_to_tcfp(
        model, "tcfp12_single", batch(0)[:, 1:], include=("linear", "small")
    )
    floats = place(nnx.state(model, nnx.Param))
    weights = tcfp_jax.conversion.find_weights(model)
    stored = tcfp_jax.store(floats, weights, key=jax.random.key(1))
    nnx.update(model, place(stored))
    optimizer = tcfp_jax.nnx.Optimizer(model, make_tx(), wrt=nnx.Param)
    return model, optimizer, jax.tree.map(jnp.copy, floats)


def batch(step):
    start = np.random.default_rng(step).integers(0, VOCAB, (BATCH, 1))
    return jax.device_put(
        jnp.asarray((start + 3 * np.arange(CONTEXT + 1)) % VOCAB),
        NamedSharding(mesh, P("fsdp")),
    )


def run(model, optimizer, ema, first, last):
    for step in range(first, last):
        ema, loss = train_step(model, optimizer, ema, batch(step))
        if step % 5 == 4:
            print(f"step {step + 1:2} loss {loss:.4f}", flush=True)
    return ema


def main():
    devices = jax.device_count()
    print(f"{devices} devices; compiling the first step takes longest", flush=True)
    model, optimizer, ema = make()
    ema = run(model, optimizer, ema, 0, 10)

    state = {
        "model": nnx.state(model, nnx.Param),
        "optimizer": nnx.state(optimizer),
        "ema": ema,
    }
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.CheckpointManager(Path(tempfile.mkdtemp()) / "run") as manager:
        manager.save(10, args=ocp.args.StandardSave(state))
        run(model, optimizer, ema, 10, 20)
        after = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
        restored = manager.restore(10, args=ocp.args.StandardRestore(abstract))
    nnx.update(model, restored["model"])
    nnx.update(optimizer, restored["optimizer"])
    ema = run(model, optimizer, restored["ema"], 10, 20)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), nnx.state(model, nnx.Param), after
    )
    print("the same bits from a checkpoint:", all(jax.tree.leaves(same)))

    of_average = nnx.clone(model)
    nnx.update(of_average, ema)
    print(
        f"held-out loss {eval_step(model, batch(999)):.4f}, of the average"
        f" {eval_step(of_average, batch(999)):.4f}"
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model.block.up)):
        name = "up" + jax.tree_util.keystr(path)
        print(name, leaf.dtype, leaf.shape, leaf.sharding.spec)


if __name__ == "__main__":
    main()
