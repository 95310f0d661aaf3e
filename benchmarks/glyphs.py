"""Images that no file holds: digits of seven strokes, turned, stretched, shaken and cluttered, `[32, 32]` in 8 bits.

An image is a function of its random key, rendered in one program for all who read it, so that every run of a seed sees
the same bits. Classes are the digits; each image draws a rotation, two sizes, a shear and a place, moves the ends of
its strokes, is white on black or black on white, and has two strokes that belong to nothing, and noise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

SIZE, CLASSES = 32, 10
CLUTTER = 2
NOISE = 0.1  # of pixels in [0, 1], standard deviation
# Ends of the seven strokes of a digit, in a box from -1 to 1: top, middle and bottom, then left and right halves.
STROKES = np.array(
    [
        [(-0.6, -1), (0.6, -1)], [(-0.6, 0), (0.6, 0)], [(-0.6, 1), (0.6, 1)],
        [(-0.6, -1), (-0.6, 0)], [(-0.6, 0), (-0.6, 1)], [(0.6, -1), (0.6, 0)], [(0.6, 0), (0.6, 1)],
    ],
    np.float32,
)  # fmt: skip
# Which of them each digit has.
DIGITS = np.array(
    [[c == "1" for c in digit] for digit in (
        "1011111", "0000011", "1110110", "1110011", "0101011", "1111001", "1111101", "1000011", "1111111", "1111011",
    )]
)  # fmt: skip


def render(key: jax.Array, label: jax.Array) -> jax.Array:
    """One image of a digit, uint8 `[32, 32]`."""
    # Two draws for all: they are most of what a CPU compiles.
    moves, noise = jnp.split(
        jax.random.normal(key, (STROKES.size + 2 * CLUTTER + SIZE * SIZE,)), [STROKES.size + 2 * CLUTTER]
    )
    turn, wide, high, shear, right, down, width, soft, black, *places = jax.random.uniform(
        jax.random.fold_in(key, 1), (9 + 2 * CLUTTER,)
    )
    angle = (turn - 0.5) * (jnp.pi / 4)
    rotation = (jnp.cos(angle), -jnp.sin(angle)), (jnp.sin(angle), jnp.cos(angle))
    stretch = (0.45 + 0.35 * wide, 0.6 * (shear - 0.5)), (0.0, 0.45 + 0.35 * high)
    place = 0.3 * jnp.stack([right - 0.5, down - 0.5])
    # Written out: products of two by two are no work for tensor cores, whose rounding would move pixels.
    turned = lambda ends, m: jnp.stack([ends[..., 0] * m[i][0] + ends[..., 1] * m[i][1] for i in (0, 1)], -1)
    ends = jnp.asarray(STROKES) + 0.06 * moves[: STROKES.size].reshape(STROKES.shape)
    ends = turned(turned(ends, stretch), rotation) + place
    begin = 2 * jnp.stack(places).reshape(CLUTTER, 1, 2) - 1
    clutter = jnp.concatenate([begin, begin + 0.2 * moves[STROKES.size :].reshape(begin.shape)], 1)
    ends = jnp.concatenate([ends, clutter])
    drawn = jnp.concatenate([jnp.asarray(DIGITS)[label], jnp.ones(CLUTTER, bool)])
    distance = jnp.min(jnp.where(drawn[:, None, None], _distances(ends), jnp.inf), axis=0)
    ink = jax.nn.sigmoid((0.06 + 0.08 * width - distance) / (0.02 + 0.04 * soft))
    shown = 0.25 + 0.5 * jnp.where(black < 0.5, ink, 1 - ink) + NOISE * noise.reshape(ink.shape)
    return jnp.round(255 * jnp.clip(shown, 0, 1)).astype(jnp.uint8)


def _distances(ends: jax.Array) -> jax.Array:
    """From every pixel to strokes given by their ends `[strokes, 2, 2]`: `[strokes, 32, 32]`."""
    along = (jnp.arange(SIZE, dtype=jnp.float32) + 0.5) * (2 / SIZE) - 1
    x, y = along[None, None, :], along[None, :, None]
    x0, y0, x1, y1 = (ends[:, i, axis, None, None] for i in (0, 1) for axis in (0, 1))
    dx, dy = x1 - x0, y1 - y0
    part = jnp.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy + 1e-6), 0, 1)
    return jnp.sqrt(jnp.square(x - x0 - part * dx) + jnp.square(y - y0 - part * dy) + 1e-12)


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_images(key: jax.Array, batches: int, batch: int) -> tuple[jax.Array, jax.Array]:
    """(images uint8 `[batches, batch, 32, 32]`, labels int32 `[batches, batch]`).

    >>> images, labels = draw_images(jax.random.key(0), 2, 3)
    >>> images.shape, images.dtype, labels.shape
    ((2, 3, 32, 32), dtype('uint8'), (2, 3))
    """

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        labels = jax.random.randint(jax.random.fold_in(key, 0), (batch,), 0, CLASSES)
        return jax.vmap(render)(jax.random.split(jax.random.fold_in(key, 1), batch), labels), labels

    return jax.lax.map(one, jax.random.split(key, batches))
