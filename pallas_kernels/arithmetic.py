"""Elementary float32 operations of kernels: portable ones, and single instructions.

A kernel's arithmetic is written once, over one of these classes. `Portable` is for XLA
and for interpreters; `Instructions` is for compiled kernels, of which an engine gives
the function that runs PTX. Both have the same results. No compiler contracts, replaces
or drops an instruction.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics

# Runs PTX on float32 values, elementwise: `$0` is the result and `$1` the first value.
Instruct: TypeAlias = Callable[..., Array]


class Portable:
    """Operations in `jax.numpy`."""

    def scaled(self, x: Array, inverse: Array, dtype: DTypeLike) -> Array:
        """Return x times `inverse`, to be rounded to `dtype`.

        Subnormals of x count as zeros.
        """
        return numerics.flush_subnormal(x) * inverse

    def divide(self, a: ArrayLike, b: ArrayLike) -> Array:
        """Return a / b, correctly rounded; see `numerics.divide` for its limits."""
        return numerics.divide(a, b)

    def floor(self, x: Array) -> Array:
        """Return the largest integers up to x."""
        return jnp.floor(x)


class Instructions(Portable):
    """The same operations by instructions of a GPU.

    Args:
      run: runs PTX on float32 values, elementwise.
    """

    def __init__(self, run: Instruct) -> None:
        self.run = run

    def scaled(self, x: Array, inverse: Array, dtype: DTypeLike) -> Array:
        """Return x times `inverse`; `ftz` reads subnormals as zeros of their sign."""
        return self.run("mul.rn.ftz.f32 $0, $1, $2;", x, inverse)

    def divide(self, a: ArrayLike, b: ArrayLike) -> Array:
        """Return a / b, correctly rounded, without limits."""
        return self.run("div.rn.f32 $0, $1, $2;", a, b)

    def floor(self, x: Array) -> Array:
        """Return the largest integers up to x."""
        return self.run("cvt.rmi.f32.f32 $0, $1;", x)
