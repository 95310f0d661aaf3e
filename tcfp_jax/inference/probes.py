"""`second_moments` of the inputs of each converted product, in one pass of a program.

The program runs unchanged, and every planned product shows its inputs to the parameter that it multiplies:

    y = observe(x w, x, probe)      forward: x w      backward: the gradient of the probe is sum over rows of x xᵀ

A probe stands where a stored weight would be. It reaches the product as stored weights do, through loops over layers,
branches and `jax.checkpoint`, and its gradient comes back stacked as the parameter is. Nothing else of the backward
pass is read, so XLA drops the rest.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.specs import ungrouped
from tcfp_jax.conversion.evaluate import Machine, bare
from tcfp_jax.conversion.shown import Shown
from tcfp_jax.conversion.trace import bind
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.conversion.views import Equation, Factors, factors, layout_of
from tcfp_jax.recipes import Recipe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Probe:
    """Zeros instead of a stored weight, whose gradient carries the moments."""

    zeros: jax.Array
    path: str = field(metadata=dict(static=True))


def second_moments(run: Transformed, *args: Any) -> dict[str, jax.Array]:
    """Return the sum of x xᵀ over the rows x that each converted weight multiplies in a call, `[*stack, k, k]`.

    Use it to calibrate (`tcfp_jax.inference.hessians`). The sums are float32.

    Args:
      run: from `transform`.
      args: arguments of it, with float parameters. Its result is differentiated, so a loop of unknown length has no
        moments.

    Raises:
      ValueError: no product of a weight is seen: none is converted, or it lies where probes do not reach, such as
        inside `jax.shard_map` or a layer that multiplies by itself.

    >>> from tcfp_jax.conversion.transform import transform
    >>> low = transform(lambda params, x: x @ params["w"], "tensorwise", include=("linear", "small"))
    >>> second_moments(low, {"w": jnp.ones((2, 4))}, jnp.array([[1.0, 2.0]]))["w"].tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    found = run.examine(*args)

    def zeros(path: str) -> jax.Array:
        layout, shape = found.weights[path].layout, found.leaves[path].shape
        k = math.prod(shape[axis] for axis in layout.inputs)
        return jnp.zeros((*(shape[axis] for axis in layout.stack), k, k), jnp.float32)

    def outputs(probes: dict[str, jax.Array]) -> list[jax.Array]:
        seen: set[str] = set()
        machine = Machine(functools.partial(_observed, seen))
        made = run.run_on(machine, found, args, {path: _Probe(probe, path) for path, probe in probes.items()})
        if missing := sorted(set(probes) - seen):
            raise ValueError(
                f"no product of {missing[0]} is seen; write the layer in Flax's own code and convert it, outside of "
                "jax.shard_map"
            )
        return [value for value in made if jnp.issubdtype(value.dtype, jnp.floating)]

    if not found.weights:
        raise ValueError(f"{run.name} has no converted weight that can be stored; survey(model) says why")
    made, back = jax.vjp(outputs, {path: zeros(path) for path in found.weights})
    return back([jnp.zeros_like(value) for value in made])[0]


def _observed(
    seen: set[str], eqn: Equation, inputs: list[Any], recipe: Recipe, drawn: jax.Array | None = None
) -> jax.Array:
    """Return the result of a planned product, and show its rows of x to the probe of its weight."""
    del drawn  # nothing is rounded here
    (y,) = bind(eqn, bare(inputs, eqn.invars))
    side = 0 if isinstance(inputs[0], Shown) else 1
    weight = inputs[side]
    found = factors(eqn.params["dimension_numbers"], [var.aval.shape for var in eqn.invars], side, weight.view)
    assert isinstance(found, Factors), "the census plans no other product"
    how, probe = weight.weight, weight.stored
    if how is None or probe is None or (how.recipe, how.layout) != (recipe, layout_of(weight.view, found.roles)):
        return y  # it reads the weight in another form than the stored one
    seen.add(probe.path)
    contraction = found.contraction
    x = ungrouped(lax.stop_gradient(inputs[1 - side]), found.x_groups)
    x = x.transpose(contraction.stack + contraction.rest + contraction.inputs)
    k = math.prod(x.shape[x.ndim - len(contraction.inputs) :])
    return _observe(y, x.reshape(*x.shape[: len(contraction.stack)], -1, k), probe.zeros)


@jax.custom_vjp
def _observe(y: jax.Array, x: jax.Array, moments: jax.Array) -> jax.Array:
    """Return y. Its backward pass gives the moments of x `[..., rows, k]` as the gradient of `moments`."""
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
