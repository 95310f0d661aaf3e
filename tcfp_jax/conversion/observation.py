"""`second_moments`: what the inputs of each converted product are, in one pass of a program: the sum of x xᵀ.

The program runs as it was, and every planned product hands its x to the parameter that it multiplies:

    y = observe(x w, x, probe)      forward: x w      backward: the gradient of the probe is sum over rows of x xᵀ

A probe takes the place of a stored weight, so it reaches the product as those do, through loops over layers, branches
and `jax.checkpoint`, and its gradient comes back stacked as the parameter is. Nothing else of the backward pass is
read, so XLA drops it.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tcfp_jax.conversion.evaluation import Machine, bind
from tcfp_jax.conversion.examination import Examined
from tcfp_jax.conversion.shown import Shown
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.conversion.views import factors, layout_of
from tcfp_jax.products.axes import ungrouped
from tcfp_jax.recipes import Recipe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Probe:
    """In the place of a stored weight: what takes the moments `[..., k, k]` as its gradient, and whose they are."""

    moments: jax.Array
    path: str = field(metadata=dict(static=True))


def probes_of(found: Examined) -> dict[str, jax.Array]:
    """Zeros for the second moments of every weight that can be stored, by path: float32 `[*stack, k, k]`."""

    def probe(path: str) -> jax.Array:
        layout, shape = found.weights[path].layout, found.leaves[path].shape
        k = math.prod(shape[axis] for axis in layout.inputs)
        return jnp.zeros((*(shape[axis] for axis in layout.stack), k, k), jnp.float32)

    return {path: probe(path) for path in found.weights}


def second_moments(run: Transformed, *args: Any) -> dict[str, jax.Array]:
    """The sum of x xᵀ over the rows x that each converted weight multiplies in one call, float32 `[*stack, k, k]`.

    Args:
      run: from `transform`.
      args: of it, with float parameters. Its result is differentiated, so a loop of unknown length has no moments.

    Raises:
      ValueError: no product of a weight is seen: none is converted, or it lies where probes do not reach, as inside
        `jax.shard_map` or a layer that multiplies by itself.

    >>> from tcfp_jax.conversion.transform import transform
    >>> low = transform(lambda params, x: x @ params["w"], "tensorwise", include=("linear", "small"))
    >>> second_moments(low, {"w": jnp.ones((2, 4))}, jnp.array([[1.0, 2.0]]))["w"].tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    found = run.examine(*args)
    probes = probes_of(found)
    if not probes:
        raise ValueError(f"{run.name} has no converted weight that can be stored; survey says what became of each")
    seen: set[str] = set()

    def outputs(probes: dict[str, jax.Array]) -> list[jax.Array]:
        machine = Machine(functools.partial(_observed, seen))
        made = run.run_on(machine, found, args, {path: _Probe(probe, path) for path, probe in probes.items()})
        return [value for value in made if jnp.issubdtype(value.dtype, jnp.floating)]

    made, back = jax.vjp(outputs, probes)
    (moments,) = back([jnp.zeros_like(value) for value in made])
    if missing := sorted(set(probes) - seen):
        raise ValueError(
            f"no product of {missing[0]} is seen; write the layer in Flax's own code and convert it, outside of "
            "jax.shard_map"
        )
    return moments


def _observed(seen: set[str], eqn: Any, inputs: list[Any], recipe: Recipe, **between: Any) -> Any:
    """The result of a planned product as it was, with x handed to the probe of its weight."""
    del between  # a machine with a product of its own leaves nothing between products
    (y,) = bind(eqn, inputs)
    side = next(i for i in (0, 1) if isinstance(inputs[i], Shown))
    weight = inputs[side]
    found: Any = factors(eqn.params["dimension_numbers"], [var.aval.shape for var in eqn.invars], side, weight.view)
    how, probe = weight.weight, weight.stored
    if how is None or probe is None or (how.recipe, how.layout) != (recipe, layout_of(weight.view, found.roles)):
        return y  # it reads the weight in another form than the one that is stored
    seen.add(probe.path)
    contraction = found.contraction
    x = ungrouped(lax.stop_gradient(inputs[1 - side]), found.x_groups)
    x = x.transpose(contraction.stack + contraction.rest + contraction.inputs)
    stack, k = x.shape[: len(contraction.stack)], probe.moments.shape[-1]
    return _observe(y, x.reshape(*stack, -1, k), probe.moments)


@jax.custom_vjp
def _observe(y: jax.Array, x: jax.Array, moments: jax.Array) -> jax.Array:
    """`y`, whose backward pass gives the moments of x `[..., rows, k]` as the gradient of `moments`."""
    del x, moments
    return y


def _observe_forward(y: jax.Array, x: jax.Array, moments: jax.Array) -> tuple[jax.Array, jax.Array]:
    del moments
    return y, x


def _observe_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    moments = jnp.einsum("...mi,...mj->...ij", x, x, precision=precision, preferred_element_type=jnp.float32)
    return gradient, jnp.zeros_like(x), moments


_observe.defvjp(_observe_forward, _observe_backward)
