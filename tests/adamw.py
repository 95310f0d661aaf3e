"""Cases of the AdamW step, for its definition, its kernels, and GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import counter, moments
from pallas_kernels.adamw.api import Moments, Rates, adamw, adamw_entry
from pallas_kernels.moments import E4M3

SHAPE = (32, 256)
SCALE = 2.0**-9
KEY = jnp.asarray(np.array([3, 4], np.uint32))
OPTIONS = [{}, dict(momentum="nesterov", orientation="both"), dict(remainder="nearest")]


@functools.cache
def data(shape=SHAPE, seed=0):
    """(g, hi, lo, moments) as after some steps, of rows of very different sizes.

    One row of moments is zero.
    """
    rng = np.random.default_rng(seed)
    rows = 2.0 ** -(np.arange(shape[0]) % 13)[:, None] * 1e-2
    w = np.clip(rng.standard_normal(shape) * 100, -448, 448)
    g = rng.standard_normal(shape) * rows
    m = rng.standard_normal(shape) * rows
    v = np.square(rng.standard_normal(shape) * rows)
    g[:, 3] = 0
    m[1] = 0
    v[1] = 0
    hi = w.astype(E4M3)
    lo = (w - hi.astype(np.float64)).astype(E4M3)
    bits = counter.bits_of(shape, *counter.keys(seed))
    state = encode(np.float32(m), np.float32(v), bits)
    return jnp.asarray(g, jnp.float32), jnp.asarray(hi), jnp.asarray(lo), state


@jax.jit
def encode(m, v, bits):
    """The moments of float32 values."""
    return Moments(*moments.encode_m(m, bits), *moments.encode_v(v, bits))


def rates(
    *,
    lr=0.01,
    t=7,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    eps_root=0.0,
    decay=0.1,
    nesterov=False,
    keep=True,
    **more,
):
    """Return the numbers of a step, as an optimizer computes them."""
    new_scale = more.get("new_scale", SCALE)
    numbers = dict(
        b1=b1,
        b2=b2,
        rate=lr / (1 - b1**t) / new_scale,
        rate_g=0.0,
        correction=1 / (1 - b2**t),
        eps=eps,
        eps_root=eps_root,
        decay=1 - lr * decay,
        gradient_scale=1.0,
        scale=SCALE,
        new_scale=new_scale,
    )
    if nesterov:
        numbers["rate"] = lr * b1 / (1 - b1 ** (t + 1)) / new_scale
        numbers["rate_g"] = lr * (1 - b1) / (1 - b1**t) / new_scale
    numbers = jax.tree.map(jnp.float32, numbers | more)
    return Rates(**numbers, keep=jnp.bool_(keep))


def weight(hi, lo):
    """The values of a weight in units of its scale, in float64."""
    return np.asarray(hi, np.float64) + np.asarray(lo, np.float64)


def entries(*stack, shape=SHAPE, layers=3):
    """Arguments of `step_entry` and of `step_alone`: stacks of different matrices."""
    count = layers * int(np.prod(stack))
    matrices = [data(shape, seed) for seed in range(count)]

    def stacked(*arrays):
        return jnp.stack(arrays).reshape(layers, *stack, *arrays[0].shape)

    g, hi, lo, state = jax.tree.map(stacked, *matrices)
    many = jax.tree.map(lambda x: jnp.full(stack, x), rates())
    keys = jnp.arange(2 * int(np.prod(stack)), dtype=jnp.uint32).reshape(*stack, 2)
    return g[1], (hi, lo, state), many, keys


def step_entry(g, old, given, keys, entry, **options):
    """(the stacks after the step of one entry, its columns and amax)."""
    places = jax.tree.map(jax.new_ref, old)
    found = adamw_entry(entry, g, *places, given, keys, **options)
    return jax.tree.map(jax.freeze, places), found


def step_alone(g, old, given, keys, entry, **options):
    """The same by a step of the entry alone."""
    one = functools.partial(adamw, **options)
    for _ in g.shape[:-2]:
        one = jax.vmap(one)
    own = jax.tree.map(lambda x: x[entry], old)
    new = one(g, *own, given, keys)
    after = (new.hi, new.lo, new.moments)
    whole = jax.tree.map(lambda x, y: x.at[entry].set(y), old, after)
    return whole, (new.columns, new.amax)
