"""Small programs of which a report is asked, in each way a weight is read."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax


def normal(seed, *shape):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values / shape[0] ** 0.5, jnp.float32)


X = normal(0, 4, 32)
STEPS = normal(9, 4, 3, 32)
P = dict(
    w=normal(1, 32, 32), v=normal(2, 32, 32), o=normal(3, 32, 8), start=normal(4, 4, 32)
)
P["stack"] = normal(5, 2, 32, 32)


def dense(p, x):
    return jax.nn.gelu(x @ p["w"]) @ p["o"]


def with_penalty(p, x):
    return jnp.mean(dense(p, x)) + 1e-4 * jnp.sum(jnp.abs(p["w"]))


def with_norm(p, x):
    return dense(p, x), jnp.linalg.norm(p["w"])


def with_decayed_copy(p, x):
    def step(w, _):
        return 0.9 * w, None

    last, _ = lax.scan(step, p["w"], length=2)
    return dense(p, x), last


def with_a_choice(p, x):
    kept = lax.cond(x[0, 0] > 0, lambda: p["w"], lambda: p["v"])
    return dense(p, x), kept + 1


def with_orthogonality(p, x):
    return dense(p, x), jnp.sum(p["w"].T @ p["w"])


def with_gram_matrix(p, x):
    return dense(p, x), p["w"].T @ p["w"]


def rounds(p, xs, start):
    def step(h, x):
        h = jnp.tanh(x @ p["v"] + h @ p["w"])
        return h, None

    h, _ = lax.scan(step, start, jnp.moveaxis(xs, 1, 0))
    return h @ p["o"]


def unrolled(p, xs, start):
    h = start
    for x in jnp.moveaxis(xs, 1, 0):
        h = jnp.tanh(x @ p["v"] + h @ p["w"])
    return h @ p["o"]


def scan_from_zeros(p, xs):
    return rounds(p, xs, jnp.zeros((4, 32)))


def unrolled_from_zeros(p, xs):
    return unrolled(p, xs, jnp.zeros((4, 32)))


def unrolled_from_ones(p, xs):
    return unrolled(p, xs, jnp.ones((4, 32)))


def unrolled_from_a_parameter(p, xs):
    return unrolled(p, xs, p["start"])


def scan_from_a_parameter(p, xs):
    return rounds(p, xs, p["start"])


def halves(p, x):
    return dense(p, x), x[:, :16] @ p["v"][:16]


def tied(p, x):
    return dense(p, x), p["w"][jnp.argmax(x, axis=-1)]


def queries(p, x):
    return dense(p, x) + jnp.mean(jax.nn.relu(p["start"] @ p["v"]))


def positions(p, x):
    return dense(p, x + jnp.linspace(0, 1, 32) @ p["v"])


def mixing(p, x):
    mixed = p["v"] @ jnp.eye(32)[::-1]
    return dense(p, x), x @ mixed


def scaled(p, x):
    return dense(p, x) + jnp.sum(x @ (0.5 * p["v"]))


def activated(p, x):
    return dense(p, x) + jnp.sum(x @ jnp.tanh(p["v"]))


def layers(p, x):
    return dense(p, x) + jnp.sum(x @ p["stack"][0] @ p["stack"][1])


def state_alone(p, x):
    return dense(p, x), jnp.ones((4, 32)) @ p["v"]


def nested(p, xs):
    def inner(h, _):
        return jnp.tanh(h @ p["w"]), None

    def outer(h, x):
        h, _ = lax.scan(inner, h, None, length=2)
        return h + x @ p["v"], h

    h, _ = lax.scan(outer, jnp.zeros((4, 32)), jnp.moveaxis(xs, 1, 0))
    return h @ p["o"]


def while_from_zeros(p, x):
    def goes_on(carry):
        return carry[0] < 3

    def step(carry):
        return carry[0] + 1, jnp.tanh(carry[1] @ p["w"] + x)

    return lax.while_loop(goes_on, step, (0, jnp.zeros((4, 32))))


def gated(p, xs):
    h = c = jnp.zeros((4, 32))
    for x in jnp.moveaxis(xs, 1, 0):
        gate = jax.nn.sigmoid(x @ p["v"] + h @ p["w"])
        c = gate * c + gate
        h = gate * jnp.tanh(c)
    return h @ p["o"]


def memory(p, x):
    keys = jnp.linspace(0, 1, 160).reshape(5, 32) @ p["v"]
    return jax.nn.softmax((x @ p["w"]) @ keys.T)


@jax.custom_vjp
def own_product(x, w):
    return x @ w


def forward(x, w):
    return x @ w, (x, w)


def backward(kept, g):
    x, w = kept
    return g @ w.T, x.T @ g


own_product.defvjp(forward, backward)


def own_derivative(p, x):
    return dense(p, own_product(x, p["v"]))


def penalties(p, x):
    squares = [jnp.sum(w**2) for w in jax.tree.leaves(p)]
    return jnp.sum(dense(p, x)) + sum(squares)


def logged_in_a_scan(p, x):
    def step(h, w):
        return jnp.tanh(h @ w), jnp.sum(w)

    return lax.scan(step, x, p["stack"])


def averaged(p, x):
    return dense(p, x), 0.9 * p["w"]


def branches(p, x):
    return lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: x @ p["v"])


class NnxCell(nnx.Module):
    """A net that keeps its activation between calls."""

    def __init__(self, rngs):
        self.i = nnx.Linear(32, 16, rngs=rngs)
        self.h = nnx.Linear(16, 16, rngs=rngs)
        self.state = nnx.Variable(jnp.full((4, 16), 0.5))

    def __call__(self, x):
        self.state[...] = jnp.tanh(self.i(x) + self.h(self.state[...]))
        return self.state[...]


class LinenCell(nn.Module):
    @nn.compact
    def __call__(self, x):
        state = self.variable("memory", "state", lambda: jnp.full((4, 16), 0.5))
        inner = nn.Dense(16, use_bias=False, name="i")(x)
        outer = nn.Dense(16, use_bias=False, name="h")(state.value)
        state.value = jnp.tanh(inner + outer)
        return state.value


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x, update_stats=True):
        x = nn.Dense(16, name="first")(x)
        norm = nn.SpectralNorm(nn.Dense(16, name="normed"))
        return norm(x, update_stats=update_stats)
