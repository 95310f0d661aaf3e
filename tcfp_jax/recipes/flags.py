"""An error for flags of PyTorch TCFP in calls that take a recipe instead."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tcfp_jax.recipes.definition import Recipe

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_FLAGS = inspect.signature(Recipe.from_flags).parameters


def refuses_flags(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Return the function; if it gets flags, a TypeError names `Recipe.from_flags`.

    Use this for functions with an argument `recipe`. The signature does not change, so
    type checkers refuse flags, as they refuse any unknown name.
    """

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        given = ", ".join(
            f"{name}={value!r}" for name, value in kwargs.items() if name in _FLAGS
        )
        if given:
            raise TypeError(
                f"{given}: flags of PyTorch TCFP make a recipe here; write"
                f" recipe=tcfp_jax.Recipe.from_flags({given})"
            )
        return function(*args, **kwargs)

    return checked
