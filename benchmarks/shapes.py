"""Shapes that benchmarks measure, the random operands of a product, and a small
Llama.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class GemmShape:
    """`x[m, k] @ w[n, k].T`.

    >>> str(GemmShape(8, 16, 32)), GemmShape.parse("8x16x32").n
    ('8x16x32', 32)
    """

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def operations(self) -> int:
        """Number of multiplications and additions of one product."""
        return 2 * self.m * self.k * self.n

    @classmethod
    def parse(cls, text: str) -> "GemmShape":
        """Return the shape in "MxKxN".

        Raises:
          ValueError: `text` is not three positive sizes.
        """
        sizes = text.split("x")
        if len(sizes) != 3 or not all(
            size.isdigit() and int(size) > 0 for size in sizes
        ):
            raise ValueError(
                f"shape {text!r} is not MxKxN with three positive sizes, such as"
                " 8192x4096x16384"
            )
        return cls(*map(int, sizes))


def parse_shapes(text: str | None) -> tuple[GemmShape, ...]:
    """Return the shapes in "MxKxN,MxKxN"; none without a text."""
    return tuple(map(GemmShape.parse, text.split(","))) if text else ()


# Even the first, with 16 + 8 MiB in and 64 MiB out, exceeds the 50 MiB L2 of an H200.
H200_SHAPES = (
    GemmShape(8192, 1024, 4096),
    GemmShape(8192, 4096, 16384),
    GemmShape(16384, 8192, 28672),
)
# Shape of all benchmarks that measure one shape.
MIDDLE = H200_SHAPES[1]
CPU_SHAPES = (GemmShape(512, 1024, 1024),)
SMOKE_SHAPES = (GemmShape(64, 128, 96),)


def random_operands(shape: GemmShape, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return Gaussian activations `[m, k]`, bfloat16, and weights `[n, k]` of deviation
    0.02, float32.

    They are never zero: zeros switch few transistors, and a GPU that draws less power
    clocks higher.
    """
    x_key, w_key = jax.random.split(jax.random.key(seed))
    # Drawn in float32, because bfloat16's own generator has 128 values and a mean that
    # is not zero.
    x = jax.random.normal(x_key, (shape.m, shape.k), jnp.float32).astype(jnp.bfloat16)
    w = jax.random.normal(w_key, (shape.n, shape.k), jnp.float32) * 0.02
    return x, w


def dot_bf16(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return BF16 `x[m, k] @ w[n, k].T`, accumulated in float32: the baseline of every
    product.
    """
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
    )


def quick(size: Any) -> Any:
    """Return a Llama of one block whose kernels have one shape, for smoke runs: XLA
    compiles it in half the time.
    """
    return dataclasses.replace(
        size, layers=1, kv_heads=size.heads, hidden=size.width, loop="unrolled"
    )
