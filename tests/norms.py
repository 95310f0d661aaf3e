"""Norms as people write them, and NumPy's gradients of them in float64 with what float32 sums may miss."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-5


def rms_norm(x, gain):
    """As Llama has it: normalized values are rounded before the gain."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPSILON)).astype(x.dtype) * gain


def layer_norm(x, gain, bias):
    """As Flax has it: statistics without their axis."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1)
    inverse = jax.lax.rsqrt(jnp.var(wide, axis=-1) + EPSILON)
    y = (wide - mean[:, None]) * (inverse[:, None] * gain.astype(jnp.float32))
    return (y + bias.astype(jnp.float32)).astype(x.dtype)


@dataclass(frozen=True)
class GemmaNorm:
    """RMSNorm with a gain of 1 + scale, and a dtype of its own."""

    epsilon: float
    dtype: str

    def __call__(self, x, scale):
        y = x.astype(jnp.float32)
        y = y / jnp.sqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) / x.shape[-1] + self.epsilon)
        return (y * (1 + scale.astype(jnp.float32))).astype(self.dtype)


def plain_rms_norm(x):
    """Without a gain."""
    wide = x.astype(jnp.float32)
    return (wide / jnp.sqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + EPSILON)).astype(x.dtype)


# name: (function, how many vectors)
NORMS = {
    "rms": (rms_norm, 1),
    "layer": (layer_norm, 2),
    "gemma": (GemmaNorm(EPSILON, "bfloat16"), 1),
    "plain": (plain_rms_norm, 0),
}


def draw(name, shape, dtype, seed=0):
    """(x, vectors, dy, carried) of one of NORMS; rows of different sizes and means."""
    rng = np.random.default_rng(seed)
    count = NORMS[name][1]
    rows = np.exp(rng.standard_normal((*shape[:-1], 1)))
    x = (rng.standard_normal(shape) + 0.5) * rows
    dy, carried = (
        rng.standard_normal((2, *shape)) * [[[1.0]], [[3.0]]] if len(shape) == 2 else rng.normal(size=(2, *shape))
    )
    vectors = tuple(jnp.asarray(rng.standard_normal(shape[-1]) + 1, dtype) for _ in range(count))
    return (jnp.asarray(x, dtype), vectors, jnp.asarray(dy, dtype), jnp.asarray(carried, dtype))


def expected(name, x, vectors, dy, carried):
    """[(gradient, largest error)] of x and each vector, in float64.

    However float32 adds n numbers, it misses their sum by at most n 2**-24 of the sum of magnitudes. The gradient of x
    is made of such sums over a row, one inside the other, and of a few products; each result is rounded once more.
    """
    k = x.shape[-1]
    dtypes = [a.dtype for a in (x, *vectors)]
    x, dy, carried, *vectors = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, dy, carried, *vectors))
    gain = 1.0 if name == "plain" else vectors[0] + (name == "gemma")
    mean = lambda a: np.mean(a, axis=-1, keepdims=True)
    center = name == "layer"
    centered = x - mean(x) * center
    inverse = 1 / np.sqrt(mean(centered**2) + EPSILON)
    normal, largest = centered * inverse, (np.abs(x) + mean(np.abs(x)) * center) * inverse
    inner = dy * gain
    dx = inverse * (inner - mean(inner) * center - normal * mean(inner * normal)) + carried
    of_dx = inverse * (np.abs(inner) + mean(np.abs(inner)) * center + largest * mean(np.abs(inner) * largest))
    results = [(dx, 4 * (k + 16) * (of_dx + np.abs(carried)))]
    for terms, sizes in ((dy * normal, np.abs(dy) * largest), (dy, np.abs(dy)))[: len(vectors)]:
        results.append((terms.sum(0), (len(x) + 4 * (k + 16)) * sizes.sum(0)))
    return [
        (value, 2.0**-24 * size + (np.abs(value) + 2.0**-24 * size) * float(jnp.finfo(dtype).eps) / 2)
        for (value, size), dtype in zip(results, dtypes, strict=True)
    ]


def agree(got, wanted):
    """Whether `(dx, dvectors)` is as close to what `expected` returned as it says."""
    found = [np.asarray(a, np.float64).reshape(value.shape) for a, (value, _) in zip(jax.tree.leaves(got), wanted)]
    assert len(jax.tree.leaves(got)) == len(wanted)
    return all(np.all(np.abs(a - value) <= bound) for a, (value, bound) in zip(found, wanted, strict=True))
