"""`keep_changes`: weights with merged adapters, rounded so that the change survives.

A frozen weight lies on the grid of its format. Adapters move it by less than half a
step, so rounding `W + C` to nearest gives W back. Here the change is stretched first:

    rounded = Q(W + s C)       with the scales of Q(W + C)
    s: the number for which <rounded - Q(W), C> = <C, C>

The values round to the next number whose change is the largest part of a step, as many
as make up for the rest. If W lies between the numbers of the grid, s is near 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import numerics
from pallas_kernels.fp4 import pack
from pallas_kernels.operands import Operand
from tcfp_jax.formats.encoding import encode
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_arrays import nearest

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
    made = {}
    for name, by_rule in quantize(weights).items():
        made[name] = _kept(by_rule, weights[name].astype(jnp.float32), changes[name])
    return made


def _kept(by_rule: Operand | Array, w: Array, change: Array) -> Operand | Array:
    """Return a weight with the change stretched, and the scales of the rule."""
    frozen = w - change
    wanted = _values(by_rule, _numbers(by_rule, frozen)) + change

    def numbers(exponent: Array) -> Array:
        return _numbers(by_rule, frozen + jnp.exp2(exponent) * change)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        missing = wanted - _values(by_rule, numbers(middle))
        # A NaN is in its own block alone
        missing = jnp.where(jnp.isfinite(missing), missing, 0)
        is_short = jnp.vdot(missing, change) > 0
        return jnp.where(is_short, middle, low), jnp.where(is_short, high, middle)

    bounds = (jnp.float32(_LEAST), jnp.float32(_MOST))
    _, exponent = lax.fori_loop(0, _STEPS, halve, bounds)
    found = numbers(exponent)
    if not isinstance(by_rule, Operand):
        return found
    if by_rule.scaling.packed:
        found = pack(encode(found, number("e2m1f")).astype(jnp.uint8))
    return dataclasses.replace(by_rule, values=found.astype(by_rule.values.dtype))


def _numbers(like: Operand | Array, x: Array) -> Array:
    """Return the nearest numbers of the format to x, in units of the scales."""
    if not isinstance(like, Operand):
        return lax.reduce_precision(x, 8, 7)
    scale = like.scale_of_values()
    if not like.scaling.packed:
        return numerics.round_to(x / scale, like.dtype)
    found = jnp.copysign(nearest(jnp.abs(x), scale), x)
    return jnp.where(scale > 0, found, 0)


def _values(like: Operand | Array, numbers: Array) -> Array:
    if not isinstance(like, Operand):
        return numbers
    return numbers * like.scale_of_values()
