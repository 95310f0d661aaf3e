"""`keep_changes`: weights with merged adapters, rounded so that the change survives.

A frozen weight lies on the grid of its format. Adapters move it by less than half a
step, so rounding `W + C` to nearest gives W back. Here the change is stretched first:

    rounded = Q(W + s C)
    s: the number for which <rounded - Q(W), C> = <C, C>

The values round to the next number whose change is the largest part of a step, as many
as make up for the rest. If W lies between the numbers of the grid, s is near 1.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.operands import Operand

Weights: TypeAlias = Mapping[str, Array]
Rounded: TypeAlias = Mapping[str, Operand | Array]
_LEAST, _MOST = -1.0, 15.0  # log2 of s
_STEPS = 16  # halve the distance of the two to 2**-12


def to_bfloat16(weights: Weights) -> dict[str, Array]:
    """Return bfloat16 numbers in float32, for `keep_changes`."""
    return {name: lax.reduce_precision(w, 8, 7) for name, w in weights.items()}


@functools.partial(jax.jit, static_argnums=0)
def keep_changes(
    quantize: Callable[[Weights], Rounded], weights: Weights, changes: Weights
) -> Rounded:
    """Quantize weights so that their small changes survive.

    Use this for frozen weights with merged adapters. Each change has its own s, and
    keeps its length along itself.

    Args:
      quantize: makes operands, or rounded arrays, of the weights, such as
        `functools.partial(quantize_together, scaling=scaling)`; it is hashed.
      weights: real floats by name, the frozen weights plus their changes.
      changes: the changes, in the shapes of the weights.

    >>> frozen = jnp.ones((64, 64))
    >>> change = jnp.linspace(0.0, 1e-3, 4096).reshape(64, 64)
    >>> def kept(rounded):
    ...     return jnp.vdot(rounded["w"] - frozen, change) / jnp.vdot(change, change)
    >>> weights = {"w": frozen + change}
    >>> round(float(kept(to_bfloat16(weights))), 1)
    0.0
    >>> round(float(kept(keep_changes(to_bfloat16, weights, {"w": change}))), 1)
    1.0
    """
    frozen = {
        name: w.astype(jnp.float32) - changes[name] for name, w in weights.items()
    }

    def of(exponents: Weights) -> Rounded:
        stretched = {}
        for name, w in frozen.items():
            stretched[name] = w + jnp.exp2(exponents[name]) * changes[name]
        return quantize(stretched)

    wanted = {
        name: _values(one) + changes[name] for name, one in quantize(frozen).items()
    }

    def halve(_: int, bounds: tuple[Weights, Weights]) -> tuple[Weights, Weights]:
        low, high = bounds
        middle = {name: (low[name] + high[name]) / 2 for name in low}
        short = {}
        for name, one in of(middle).items():
            missing = wanted[name] - _values(one)
            short[name] = jnp.vdot(missing, changes[name]) > 0
        lower = {n: jnp.where(short[n], middle[n], low[n]) for n in low}
        upper = {n: jnp.where(short[n], high[n], middle[n]) for n in low}
        return lower, upper

    low = dict.fromkeys(weights, jnp.float32(_LEAST))
    high = dict.fromkeys(weights, jnp.float32(_MOST))
    low, high = lax.fori_loop(0, _STEPS, halve, (low, high))
    return of(high)


def _values(one: Operand | Array) -> Array:
    return one.dequantize() if isinstance(one, Operand) else one
