"""`shared`: one jitted function for all calls that agree, so that equal layers are traced and lowered once.

Without it a program with twelve equal layers holds the arithmetic of its quantizers thirty-six times; JAX traces,
differentiates and lowers each of them anew. `jax.jit` inside of a program is a function of that program, which XLA puts
in the place of its calls before it optimizes anything.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from pallas_kernels import dispatch, tuning


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(options, *arguments)`, traced once for options and arguments that agree.

    `options` is hashable; the arguments are pytrees of arrays, of which shapes, dtypes, shardings and varying axes
    count. While calls are recorded nothing is shared, so that every call is seen.

    >>> double = shared(lambda factor, x: factor * x)
    >>> float(double(2, jax.numpy.float32(3)))
    6.0
    """

    @functools.wraps(function)
    def on_device(options: Hashable, around: Hashable, *arguments: Any) -> Any:
        return function(options, *arguments)

    traced = jax.jit(on_device, static_argnums=(0, 1))

    @functools.wraps(function)
    def call(options: Hashable, *arguments: Any) -> Any:
        if dispatch.is_recording():
            return function(options, *arguments)
        return traced(options, surroundings(), *arguments)

    return call


def surroundings() -> Hashable:
    """What the choice of an implementation reads beside its arguments, and JAX does not know of."""
    return dispatch.device_kind(), dispatch.compute_capability(), dispatch.device_cores(0), tuning.load()
