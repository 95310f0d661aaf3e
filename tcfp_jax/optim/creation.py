"""Making parameters leaf by leaf: the part of an initializer that one leaf needs, behind what was made before it.

XLA puts equal arithmetic into one kernel, and the initial values of thirty equal layers are that: all of them exist in
float32 before the first is stored. So each leaf has a program of its own, cut out of the initializer's, whose inputs
pass through a barrier with the weight that was stored last.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval


class Program:
    """The traced program of a function without arguments.

    Attributes:
      shapes: the tree that the function returns, as shapes.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        closed, self.shapes = jax.make_jaxpr(function, return_shape=True)()
        self._jaxpr, self._inputs = closed.jaxpr, closed.consts

    def leaf(self, place: int, *, after: Any) -> jax.Array:
        """The leaf at a place of the flattened tree, and nothing of the others; it is begun when `after` is there."""
        wanted = [other == place for other in range(len(self._jaxpr.outvars))]
        part, _ = partial_eval.dce_jaxpr(self._jaxpr, wanted)
        inputs, _ = lax.optimization_barrier((self._inputs, after))
        return jaxpr_as_fun(ClosedJaxpr(part, inputs))()[0]
