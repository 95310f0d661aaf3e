"""Rotary positions: rotations of queries and keys.

Sources: Su et al. 2021, "RoFormer"; Grattafiori et al. 2024, "The Llama 3 Herd of
Models" (longer wavelengths).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Stretch(NamedTuple):
    """Longer wavelengths; the fields are those of `LlamaConfig` with `rope_`."""

    factor: float
    original: int | None
    low: float
    high: float


def rotations(
    positions: int | jax.Array,
    size: int,
    theta: float,
    stretch: Stretch | None = None,
) -> jax.Array:
    """Return cosines and sines, float32 `[2, ..., positions, size / 2]`.

    They are those of `position * theta**(-2 i / size)`.

    Args:
      positions: Their number, or integers `[..., positions]`.
      size: Values of a head.
      theta: Base of the wavelengths.
      stretch: Makes wavelengths longer; None leaves them.

    >>> found = rotations(2, 4, 100.0)[0, 1]
    >>> bool(jnp.allclose(found, jnp.cos(jnp.array([1.0, 0.1]))))
    True
    """
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if stretch is not None and stretch.factor != 1:
        frequencies = _stretched(frequencies, stretch)
    placed = jnp.arange(positions) if isinstance(positions, int) else positions
    angles = placed.astype(jnp.float32)[..., None] * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _stretched(frequencies: jax.Array, stretch: Stretch) -> jax.Array:
    slow = frequencies / stretch.factor
    if stretch.original is None:
        return slow
    # within the original context
    turns = stretch.original * frequencies / (2 * math.pi)
    kept = jnp.clip((turns - stretch.low) / (stretch.high - stretch.low), 0, 1)
    return (1 - kept) * slow + kept * frequencies


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Turn the pairs `(x[i], x[i + d/2])` by the angles of their positions.

    x is `[..., positions, heads, d]`. The pairs match Llama's checkpoints in
    Transformers. The sum is float32, and the result has the dtype of x.
    """
    cos, sin = rotation[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def document_places(documents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (positions that start again at each document, tokens that a token sees).

    A token sees its own document alone.

    Args:
      documents: Number of the document of each token, `[batch, positions]`.

    Returns:
      Integers `[batch, positions]`, and bools `[batch, 1, positions, positions]`.
    """
    order = jnp.arange(documents.shape[-1])
    first = jnp.ones_like(documents[:, :1], bool)
    changes = documents[:, 1:] != documents[:, :-1]
    begins = jnp.concatenate([first, changes], axis=1)
    placed = order - jax.lax.cummax(jnp.where(begins, order, 0), axis=1)
    mask = (documents[:, :, None] == documents[:, None, :])[:, None]
    return placed, mask
