"""Rules of an optimizer's numbers.

`check_numbers` raises for a number that is known when the optimizer is made.
`usable` is for numbers that a program computes, as a schedule or
`optax.inject_hyperparams` does: a step with a bad one is skipped and counted.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

_Known: TypeAlias = Array | np.ndarray  # one number, or whether it holds


class _Rule(NamedTuple):
    """A condition of a float32 number, and its words."""

    words: str
    holds: Callable[[_Known], _Known]


def _is_finite(x: _Known) -> _Known:
    return (x > -np.inf) & (x < np.inf)


def _is_decay(x: _Known) -> _Known:
    return (x >= 0) & (x < 1)


def _is_size(x: _Known) -> _Known:
    return (x >= 0) & (x < np.inf)


def _is_limit(x: _Known) -> _Known:
    return x > 0


def _is_share(x: _Known) -> _Known:
    return (x >= 0) & (x <= 1)


_DECAY = _Rule("0 or more and, in float32, below 1", _is_decay)
_SIZE = _Rule("0 or more and, in float32, finite", _is_size)
_RULES = {
    "learning_rate": _Rule("finite in float32", _is_finite),
    "b1": _DECAY,
    "b2": _DECAY,
    "eps": _SIZE,
    "eps_root": _SIZE,
    "weight_decay": _SIZE,
    "max_norm": _Rule("above 0; None does not clip", _is_limit),
    "step_size": _Rule("from 0 to 1", _is_share),
}


def check_numbers(**numbers: ArrayLike | None) -> None:
    """Raise a ValueError for a number that breaks the rule of its name.

    None and traced numbers pass.

    >>> check_numbers(b1=0.9, max_norm=None)
    >>> check_numbers(max_norm=-1.0)
    Traceback (most recent call last):
    ValueError: max_norm=-1.0 must be above 0; None does not clip
    """
    for name, value in numbers.items():
        if value is None or isinstance(value, jax.core.Tracer):
            continue
        words, holds = _RULES[name]
        with np.errstate(over="ignore"):
            number = np.asarray(value, np.float32)
        if number.shape:
            raise ValueError(
                f"{name} has shape {list(number.shape)}, but it is one number; pass a"
                " scalar"
            )
        if not holds(number):
            raise ValueError(f"{name}={value} must be {words}")


def usable(**numbers: ArrayLike | None) -> Array:
    """Return whether all numbers follow their rules, which are known at the step.

    Numbers of Python were checked when the optimizer was made.

    >>> bool(usable(b1=0.9, learning_rate=jnp.float32(jnp.nan)))
    False
    """
    keep = jnp.bool_(True)
    for name, value in numbers.items():
        if isinstance(value, Array):
            keep &= _RULES[name].holds(value.astype(jnp.float32))
    return keep
