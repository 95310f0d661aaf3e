"""Where a program reads a parameter: the function and the line that its author wrote.

A report names them, so that a reader finds the code: "read by `jnp.sum` in loss.py:12".
"""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
from jax import lax, nn

from tcfp_jax.conversion.views import Equation

_CONVERSION = str(Path(__file__).parent)  # a trace begins in this folder
_JAX = str(Path(jax.__file__).parent)
# Frames of these packages are not the author's.
_FRAMEWORKS = (
    _JAX,
    str(Path(flax.__file__).parent),
    str(Path(optax.__file__).parent),
    str(Path(__file__).parents[1]),
)
_PYTHON = sysconfig.get_path("stdlib")
_THIRD_PARTY = ("site-packages", "dist-packages")
# The modules whose functions JAX and optax define in these folders.
_MODULES = {
    "jax/_src/numpy/linalg": ("jnp.linalg", jnp.linalg),
    "jax/_src/numpy/": ("jnp", jnp),
    "jax/_src/lax/": ("lax", lax),
    "jax/_src/nn/": ("jax.nn", nn),
    "/optax/": ("optax", optax),
}


class Reader(NamedTuple):
    """An equation that reads parameters.

    Attributes:
      paths: paths of the parameters.
      eqn: the equation.
      call: the call of a function of JAX that the equation is in, or the equation.
    """

    paths: frozenset[str]
    eqn: Equation
    call: Equation

    def __str__(self) -> str:
        """The name of the function, and its place."""
        return f"`{_name_of(self.call)}`{self.place}"

    @property
    def place(self) -> str:
        """The author's file and line, such as " in loss.py:12"; "" if unknown."""
        frames = _frames_of(self.call)
        for wanted in (_is_authors, _is_not_jax):
            for frame in frames:
                if wanted(frame.file):
                    return f" in {Path(frame.file).name}:{frame.line}"
        return ""


def is_of_jax(jaxpr: object) -> bool:
    """Return whether a body is a function of JAX itself, such as `jnp.linalg.norm`.

    JAX keeps traces of these: the lines in such a body are those of its first caller.
    """
    return _JAX in _definition(jaxpr)


class _Frame(NamedTuple):
    """A call of a function: the function's file and name, and the line."""

    file: str
    function: str
    line: int


def _frames_of(eqn: Equation) -> list[_Frame]:
    """Return the frames of the traced function at an equation, innermost first."""
    traceback = eqn.source_info.traceback
    frames: list[_Frame] = []
    for frame in [] if traceback is None else traceback.frames:
        if frame.file_name.startswith(_CONVERSION):
            break
        frames.append(_Frame(frame.file_name, frame.function_name, frame.line_num))
    return frames


def _is_authors(file: str) -> bool:
    return not file.startswith(_FRAMEWORKS) and _is_not_jax(file)


def _is_not_jax(file: str) -> bool:
    """Return whether a file belongs neither to JAX nor to Python."""
    is_python = file.startswith(_PYTHON)
    if is_python and not any(folder in file for folder in _THIRD_PARTY):
        return False
    return not file.startswith(_JAX)


def _name_of(eqn: Equation) -> str:
    """Return the name of the function that an author called, else of the primitive.

    It is the outermost public function of JAX or optax below the author's frame.
    """
    names = []
    for frame in _frames_of(eqn):
        if _is_authors(frame.file):
            break
        names.append(_public(frame.function, frame.file))
    found = list(filter(None, names))
    if found:
        return found[-1]
    for value in eqn.params.values():
        name, _, file = _definition(getattr(value, "jaxpr", value)).partition(" at ")
        if name:
            return _public(name, file) or name
    return eqn.primitive.name


def _public(name: str, file: str) -> str:
    """Return a function's name as users write it; "" if it is not one of theirs."""
    for folder, (prefix, module) in _MODULES.items():
        if folder in file and hasattr(module, name) and not name.startswith("_"):
            return f"{prefix}.{name}"
    return ""


def _definition(jaxpr: object) -> str:
    """Return the name, the file and the line of the function that a jaxpr is of."""
    return getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
