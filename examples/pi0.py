"""Training of all weights of pi-0, with and without float weights, from the checkout.

    python -m examples.pi0 --step stored

The shapes are those of pi-0 (https://github.com/Physical-Intelligence/openpi): SigLIP
So400m/14 reads three cameras, Gemma-2B their image tokens and the prompt, and an action
expert of 300M the robot's state and 50 noisy actions. Both read the keys and values of
both in each layer. Weights are random, and so are the data, of which actions depend on
the state and the prompt.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, find_weights

BF16 = jnp.bfloat16
DECAY = 0.99  # of the average of weights
State = tuple[
    optax.Params, optax.OptState, optax.Params
]  # weights, moments, average of weights


@dataclass(frozen=True)
class Config:
    """Sizes of pi-0; a stack of layers has those of its width and its hidden layer."""

    vision: tuple[int, int] = (1152, 4304)
    vision_layers: int = 27
    vision_heads: int = 16
    language: tuple[int, int] = (2048, 16_384)
    action: tuple[int, int] = (1024, 4096)
    layers: int = 18
    heads: int = 8  # of queries; keys and values have one
    head_dim: int = 256
    vocabulary: int = 257_152
    cameras: int = 3
    pixels: int = 224
    patch: int = 14
    prompt: int = 48
    horizon: int = 50
    action_dim: int = 32


TINY = Config(
    vision=(128, 256),
    vision_layers=2,
    vision_heads=4,
    language=(128, 256),
    action=(128, 128),
    layers=2,
    heads=2,
    head_dim=128,
    vocabulary=256,
    cameras=2,
    pixels=28,
    prompt=8,
    horizon=4,
    action_dim=16,
)


def dense(features: int, name: str, use_bias: bool = False) -> nn.Dense:
    return nn.Dense(features, use_bias=use_bias, dtype=BF16, name=name)


class VisionBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, _):
        width, hidden = self.config.vision
        attention = nn.MultiHeadDotProductAttention(
            self.config.vision_heads, dtype=BF16, name="attention"
        )
        x = x + attention(nn.LayerNorm(dtype=BF16)(x))
        y = dense(hidden, "up", use_bias=True)(nn.LayerNorm(dtype=BF16)(x))
        return x + dense(width, "down", use_bias=True)(nn.gelu(y)), None


def rotated(x: Array) -> Array:
    """Rotary positions of [batch, token, head, channel]."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None]
    sin = jnp.sin(angles)
    cos = jnp.cos(angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class JointBlock(nn.Module):
    """A layer of Gemma-2B and one of the action expert with one attention."""

    config: Config

    @nn.compact
    def __call__(self, streams, mask):
        config = self.config
        named = list(zip(("language", "action"), streams, strict=True))
        parts = []
        for name, x in named:
            y = nn.RMSNorm(dtype=BF16, name=f"{name}_before_attention")(x)
            q = dense(config.heads * config.head_dim, f"{name}_q")(y)
            k = dense(config.head_dim, f"{name}_k")(y)
            v = dense(config.head_dim, f"{name}_v")(y)
            parts.append((q, k, v))
        q, k, v = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        q, k, v = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in (q, k, v))
        mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, mask=mask)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        split = streams[0].shape[1]
        out = []
        for (name, x), values in zip(named, jnp.split(mixed, [split], 1), strict=True):
            width, hidden = getattr(config, name)
            x = x + dense(width, f"{name}_out")(values)
            y = nn.RMSNorm(dtype=BF16, name=f"{name}_before_mlp")(x)
            gate = nn.gelu(dense(hidden, f"{name}_gate")(y))
            y = gate * dense(hidden, f"{name}_up")(y)
            out.append(x + dense(width, f"{name}_down")(y))
        return tuple(out), None


def layers_of(block: type[nn.Module], length: int) -> Callable[..., nn.Module]:
    """Return the block repeated by a scan; the backward pass recomputes each layer."""
    return nn.scan(
        nn.remat(block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=length,
    )


def waves(at: Array, width: int) -> Array:
    """Sines and cosines of a time from 0 to 1."""
    periods = 4e-3 * 1e3 ** jnp.linspace(0, 1, width // 2)
    angles = 2 * jnp.pi * at[:, None] / periods
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Pi0(nn.Module):
    """Velocities [batch, horizon, action_dim] of noisy actions."""

    config: Config

    @nn.compact
    def __call__(self, images, prompt, state, noisy, at):
        config = self.config
        prefix = jnp.concatenate([self.see(images), self.read(prompt)], axis=1)
        suffix = self.act(state, noisy, at)
        # The prefix reads itself, the state also the prefix, and actions read all.
        group = np.repeat([0, 1, 2], [prefix.shape[1], 1, config.horizon])
        mask = jnp.asarray(group[:, None] >= group)[None, None]
        joint = layers_of(JointBlock, config.layers)(config, name="joint")
        (_, out), _ = joint((prefix, suffix), mask)
        out = nn.RMSNorm(dtype=BF16, name="action_norm")(out)[:, 1:]
        return dense(config.action_dim, "action_out", use_bias=True)(out)

    def see(self, images):
        """Image tokens of all cameras, [batch, tokens, width of the language]."""
        config = self.config
        width = config.vision[0]
        size = (config.patch, config.patch)
        batch = images.shape[0]
        patches = nn.Conv(width, size, size, "VALID", dtype=BF16, name="patches")
        x = patches(images.reshape(-1, *images.shape[2:])).reshape(
            batch * config.cameras, -1, width
        )
        normal = nn.initializers.normal(width**-0.5)
        x = x + self.param("positions", normal, x.shape[1:]).astype(BF16)
        vision = layers_of(VisionBlock, config.vision_layers)(config, name="vision")
        x = nn.LayerNorm(dtype=BF16, name="vision_norm")(vision(x, None)[0])
        x = dense(config.language[0], "vision_out", use_bias=True)(x)
        return x.reshape(batch, -1, config.language[0])

    def read(self, prompt):
        config = self.config
        width = config.language[0]
        normal = nn.initializers.normal(0.01)
        table = nn.Embed(
            config.vocabulary, width, dtype=BF16, embedding_init=normal, name="tokens"
        )
        return table(prompt) * width**0.5

    def act(self, state, noisy, at):
        """The state's token and those of the noisy actions, which know the time."""
        width = self.config.action[0]
        first = dense(width, "state_in", use_bias=True)(state)[:, None]
        x = dense(width, "action_in", use_bias=True)(noisy)
        when = jnp.broadcast_to(waves(at, width).astype(BF16)[:, None], x.shape)
        x = jnp.concatenate([x, when], axis=-1)
        x = nn.swish(dense(width, "time_in", use_bias=True)(x))
        x = dense(width, "time_out", use_bias=True)(x)
        return jnp.concatenate([first, x], axis=1)


def random_batch(config: Config, size: int, key: Array) -> tuple[tuple, Array]:
    """Return (inputs of the model, velocities), drawn as pi-0 draws times and noise."""
    keys = jax.random.split(key, 5)
    image = (size, config.cameras, config.pixels, config.pixels, 3)
    images = jax.random.uniform(keys[0], image, BF16, -1, 1)
    prompt = jax.random.randint(keys[1], (size, config.prompt), 0, config.vocabulary)
    state = jax.random.normal(keys[2], (size, config.action_dim))
    pull = jnp.sign(prompt[:, :1] - config.vocabulary / 2)
    actions = (state + pull)[:, None] * jnp.linspace(0.5, 1, config.horizon)[:, None]
    noise = jax.random.normal(keys[3], actions.shape)
    # Beta(1.5, 1), from 0.001 to 1
    at = jax.random.uniform(keys[4], (size,)) ** (1 / 1.5) * 0.999 + 0.001
    share = at[:, None, None]
    noisy = share * noise + (1 - share) * actions
    return (images, prompt, state, noisy, at), noise - actions


def loss_of(model: nn.Module, params: optax.Params, inputs, velocities) -> Array:
    found = jnp.asarray(model.apply({"params": params}, *inputs), jnp.float32)
    return jnp.mean((found - velocities) ** 2)


def first_state(params, tx) -> State:
    return params, tx.init(params), jax.tree.map(jnp.copy, params)


def float_training(config: Config, rate: float):
    """Return (init, step) of BF16 products with float32 weights and moments."""
    model = Pi0(config)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=1e-10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def init(key):
        inputs, _ = random_batch(config, 1, key)
        return first_state(model.init(key, *inputs)["params"], tx)

    def step(state, *batch):
        params, opt_state, average = state
        differentiate = jax.value_and_grad(partial(loss_of, model))
        loss, gradients = differentiate(params, *batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 1 - DECAY)
        return (params, opt_state, average), loss

    return init, step


def stored_training(config: Config, rate: float, inside: bool):
    """Return (init, step) of weights stored as `W_hi + W_lo` with 8-bit moments.

    `inside` updates each layer inside the backward pass.
    """
    sample, _ = jax.eval_shape(partial(random_batch, config, 1), jax.random.key(0))
    model = convert_to_tcfp(
        Pi0(config), "tcfp12_single", *sample, include=("linear", "small", "embed")
    )
    loss_fn = partial(loss_of, model)
    adamw = partial(tcfp_jax.optim.adamw, rate, b2=0.95, weight_decay=1e-10)
    tx = adamw(max_norm=1.0, key=jax.random.key(1))
    train = tcfp_jax.train_step(loss_fn, tx, clip="late")

    def init(key):
        inputs, _ = random_batch(config, 1, key)
        floats = lambda: model.init(key, *inputs)["params"]
        weights = find_weights(model)
        stored = tcfp_jax.store(floats, weights, key=key, gradient_dtype=BF16)
        return first_state(stored, tx)

    def step(state, *batch):
        params, opt_state, average = state
        if inside:
            after, metrics = train(train.state(params, opt_state), *batch)
            params, opt_state, loss = after.params, after.opt_state, metrics.loss
        else:
            loss, gradients = tcfp_jax.value_and_grad(loss_fn)(params, *batch)
            updates, opt_state = tx.update(gradients, opt_state, params)
            params = tcfp_jax.apply_updates(params, updates)
        average = tcfp_jax.optim.incremental_update(params, average, 1 - DECAY)
        return (params, opt_state, average), loss

    return init, step


WAYS: dict[str, Callable] = {
    "float": float_training,
    "stored": partial(stored_training, inside=False),
    "late": partial(stored_training, inside=True),
}


def shapes_of(config: Config, init, size: int):
    """Return the shapes of the arguments of a step."""
    key = jax.random.key(0)
    batch = jax.eval_shape(partial(random_batch, config, size), key)
    return jax.eval_shape(init, key), *batch


def sizes_of(state: State) -> dict[str, int]:
    floats = jax.tree.leaves(jax.eval_shape(tcfp_jax.dequantize, state[0]))
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return {"parameters": sum(leaf.size for leaf in floats), "state_bytes": stored}


def measure(config: Config, way: str, size: int, steps: int, rate: float) -> dict:
    """Train for `steps`; print and return sizes, losses and examples per second."""
    init, step = WAYS[way](config, rate)
    shapes = shapes_of(config, init, size)
    step = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    step_bytes = tcfp_jax.remat.step_bytes(step)
    result = sizes_of(shapes[0]) | {"step_bytes": step_bytes}
    print("\n".join(f"{name} {value:,}" for name, value in result.items()), flush=True)
    draw = jax.jit(partial(random_batch, config, size))
    state = jax.jit(init)(jax.random.key(0))
    losses = []
    seconds = []
    for i in range(steps):
        batch = jax.block_until_ready(draw(jax.random.key(i + 1)))
        began = time.perf_counter()
        state, loss = step(state, *batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
        print(f"step {i + 1} loss {losses[-1]:.4f}", flush=True)
    rate_of_examples = size / float(np.median(seconds))
    print(f"examples/s {rate_of_examples:.1f}")
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    return result | {
        "device": device.device_kind,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "examples_per_second": rate_of_examples,
        "losses": losses,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--step", choices=WAYS, default="stored", help="how to train")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--batch", type=int, default=8, help="examples per step")
    parser.add_argument("--steps", type=int, default=20, help="steps to train")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    options = parser.parse_args(arguments)
    if options.batch < 1:
        parser.error(f"--batch {options.batch} must be at least 1")
    config = TINY if options.tiny else Config()
    result = measure(config, options.step, options.batch, options.steps, options.rate)
    if result["peak_bytes"] is not None:
        print(f"peak of the device {result['peak_bytes'] / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
