"""Positions of tokens: rotations of queries and keys, and the tokens that a layer sees.

Sources: Su et al. 2021, "RoFormer"; Grattafiori et al. 2024, "The Llama 3 Herd of
Models" (longer wavelengths).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from models.nets.shapes import LlamaConfig


def rotations(
    positions: int | jax.Array,
    size: int,
    theta: float,
    stretch: LlamaConfig | None = None,
) -> jax.Array:
    """Return cosines and sines of `position * theta**(-2 i / size)`, float32
    `[2, ..., positions, size / 2]`.

    Args:
      positions: Their number, or integers `[..., positions]`.
      size: Values of a head.
      theta: Base of the wavelengths.
      stretch: Config whose `rope_factor` and `rope_original` make wavelengths longer;
        None leaves them.

    >>> bool(jnp.allclose(rotations(2, 4, 100.0)[0, 1], jnp.cos(jnp.array([1.0, 0.1]))))
    True
    """
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if stretch is not None and stretch.rope_factor != 1:
        frequencies = _stretched(frequencies, stretch)
    placed = jnp.arange(positions) if isinstance(positions, int) else positions
    angles = placed.astype(jnp.float32)[..., None] * frequencies
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def _stretched(frequencies: jax.Array, config: LlamaConfig) -> jax.Array:
    slow = frequencies / config.rope_factor
    if config.rope_original is None:
        return slow
    # within the original context
    turns = config.rope_original * frequencies / (2 * math.pi)
    kept = jnp.clip(
        (turns - config.rope_low) / (config.rope_high - config.rope_low), 0, 1
    )
    return (1 - kept) * slow + kept * frequencies


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Turn the pairs `(x[i], x[i + d/2])` by the angles of their positions;
    `[..., positions, heads, d]`.

    The pairs match Llama's checkpoints in Transformers. The sum is float32, the result
    has the dtype of x.
    """
    cos, sin = rotation[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def places(
    config: LlamaConfig, positions: int, documents: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Return the arguments of `models.nets.llama.Block` next to x: rotations, a mask if one
    is needed, kinds of layers.

    Positions start again at each document, and a token sees its own document alone. If
    layers have a window, rotations and masks have a leading axis: all positions, or the
    window. Kinds `[layers]` are indices of it.

    Args:
      config: Size of the model.
      positions: Length of the sequences.
      documents: Number of the document of each token, `[batch, positions]`; None is a
        single one.
    """
    placed: int | jax.Array = positions
    mask = None
    if documents is not None:
        order = jnp.arange(positions)
        begins = jnp.concatenate(
            [
                jnp.ones_like(documents[:, :1], bool),
                documents[:, 1:] != documents[:, :-1],
            ],
            axis=1,
        )
        placed = order - jax.lax.cummax(jnp.where(begins, order, 0), axis=1)
        mask = (documents[:, :, None] == documents[:, None, :])[:, None]
    rotation = rotations(placed, config.head_size, config.rope_theta, config)
    if config.window is None:
        return (rotation,) if mask is None else (rotation, mask)
    theta, stretch = (
        (config.rope_theta, config)
        if config.local_theta is None
        else (config.local_theta, None)
    )
    local = rotations(placed, config.head_size, theta, stretch)
    near = jnp.arange(positions)[:, None] - jnp.arange(positions) < config.window
    mask = jnp.ones((1, 1, positions, positions), bool) if mask is None else mask
    kinds = jnp.asarray(
        np.arange(1, config.layers + 1) % config.global_every != 0, jnp.int32
    )
    return jnp.stack([rotation, local]), jnp.stack([mask, mask & near]), kinds
