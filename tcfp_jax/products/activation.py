"""`activated`: an elementwise function between two products, computed where its result and gradients are quantized.

    h = silu(x W_gate) * (x W_up)        y = h W_down

    forward    gate, up  ->  h in FP8, both orientations                               h itself is not written
    backward   dh, gate, up  ->  dgate and dup in FP8, both orientations               nor are they

It returns `(h, quantized h)`. The products that follow read the second; h is there to be differentiated, and what
nobody reads is not computed. The gradients of gate and up go to their products by a `Carrier` each.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from pallas_kernels.dispatch import judge
from pallas_kernels.expression import Expression
from pallas_kernels.map_quantize.api import IMPLEMENTATIONS, Mapping, map_quantize
from pallas_kernels.operands import Quantized
from tcfp_jax.products.operands import Carrier, orientation_of
from tcfp_jax.recipes import Recipe


@dataclass(frozen=True)
class Activation:
    """What `activated` computes.

    Attributes:
      expression: of the inputs, the result.
      shape, dtype: of the result.
      recipe: of the products that read it.
      gradient: of the result's gradient and the inputs, the gradients of the inputs; None where they are floats.
      producers: the recipe of the products that made the inputs, where their gradients are quantized.
      result: whether it comes quantized.
    """

    expression: Expression
    shape: tuple[int, ...]
    dtype: Any
    recipe: Recipe
    gradient: Expression | None = None
    producers: Recipe | None = None
    result: Literal["quantized", "float"] = "quantized"
    # What the expression was made of; that says all.
    program: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, program: Any, recipe: Recipe, producers: Recipe | None = None) -> "Activation":
        """That of a closed jaxpr with one result.

        Args:
          program: elementwise.
          recipe: of the products that read its result.
          producers: of the products whose results its inputs are, all of them; None where they are something else.

        Raises:
          ValueError: it is not elementwise, forward or, with `producers`, backward.
        """
        (out,) = program.out_avals
        m, k = out.size // out.shape[-1], out.shape[-1]
        gradient = None
        if producers is not None:
            pull = lambda g, *inputs: jax.vjp(core.jaxpr_as_fun(program), *inputs)[1]([g])
            shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in (out, *program.in_avals)]
            gradient = Expression.of(jax.make_jaxpr(pull)(*shapes), m, k)
        return cls(Expression.of(program, m, k), out.shape, out.dtype, recipe, gradient, producers, program=program)

    def here(self, inputs: Any) -> "Activation | None":
        """What of it a kernel computes here, or None: where none runs, XLA fuses what it always did.

        Args:
          inputs: arrays or their shapes and dtypes.
        """
        runs = self._runs(self.expression, self.recipe, self.recipe.activation, inputs)
        result: Literal["quantized", "float"] = "quantized" if runs else "float"
        gradient, producers = self.gradient, self.producers
        if gradient is not None and producers is not None:
            out = jax.ShapeDtypeStruct(self.shape, self.dtype)
            if not self._runs(gradient, producers, producers.gradient, (out, *inputs)):
                gradient = producers = None
        if result == "float" and gradient is None:
            return None
        return dataclasses.replace(self, result=result, gradient=gradient, producers=producers)

    def _runs(self, expression: Expression, recipe: Recipe, dtype: Any, given: Any) -> bool:
        options = Mapping(jnp.dtype(dtype), recipe.scaling.along_rows, orientation_of(recipe), expression, self.shape)
        verdicts = judge(IMPLEMENTATIONS, recipe.quantize_backend, options, *given)
        return any(verdict.reason is None and verdict.backend != "xla" for verdict in verdicts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activated(
    asked: Activation, inputs: tuple[jax.Array, ...], carriers: tuple[Carrier, ...]
) -> tuple[jax.Array, Quantized | None]:
    """The result of the expression as floats, and as the products want it that read it, where it comes quantized.

    Args:
      asked: what to compute.
      inputs: of the expression.
      carriers: of the products that made the inputs, one each, where their gradients are quantized; else none.
    """
    return _forward(asked, inputs, carriers)[0]


def _forward(asked: Activation, inputs: Any, carriers: Any) -> tuple[tuple[jax.Array, Quantized | None], Any]:
    (result,) = core.jaxpr_as_fun(asked.program)(*inputs)
    return (result, None if asked.result == "float" else quantize_result(asked, inputs)), inputs


def quantize_result(asked: Activation, inputs: tuple[jax.Array, ...]) -> Quantized:
    """The result as the products want it that read it, without a gradient."""
    recipe = asked.recipe
    with jax.named_scope("quantize_x"):
        (quantized,) = map_quantize(
            asked.expression, inputs, recipe.activation, recipe.scaling.along_rows, shape=asked.shape,
            orientation=orientation_of(recipe), backend=recipe.quantize_backend,
        )  # fmt: skip
    return quantized


def _backward(asked: Activation, inputs: Any, gradients: Any) -> tuple[Any, Any]:
    dy, _ = gradients
    if asked.gradient is None or asked.producers is None:
        return tuple(jax.vjp(core.jaxpr_as_fun(asked.program), *inputs)[1]([dy])), ()
    recipe = asked.producers
    with jax.named_scope("quantize_g"):
        made = map_quantize(
            asked.gradient, (dy, *inputs), recipe.gradient, recipe.scaling.along_rows, shape=asked.shape,
            orientation=orientation_of(recipe), backend=recipe.quantize_backend,
        )  # fmt: skip
    return tuple(map(jnp.zeros_like, inputs)), tuple(map(Carrier.of, made))


activated.defvjp(_forward, _backward)
