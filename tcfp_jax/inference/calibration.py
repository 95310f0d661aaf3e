"""`hessians`: sums over the inputs of every weight, in one pass over calibration data.

The program runs unchanged, and every planned product shows its inputs to the parameter
that it multiplies:

    y = observe(x w, x, probe)      forward: x w
                                    backward: the probe's gradient is the sum of x xᵀ

A probe stands in place of a stored weight. It reaches the product as stored weights do,
through loops over layers, branches and `jax.checkpoint`, and its gradient comes back
stacked like the parameter. XLA drops the rest of the pass.
"""

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from pallas_kernels.specs import ungrouped
from tcfp_jax.conversion import linen_models
from tcfp_jax.conversion.evaluate import Machine, bind
from tcfp_jax.conversion.factors import GROUPED, Factors, factors_of
from tcfp_jax.conversion.shown import Shown, bare
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.conversion.views import Equation
from tcfp_jax.layers.linen import switched_off
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe


def hessians(
    model: Transformed | nn.Module, params: PyTree, batches: Iterable[object]
) -> dict[str, Array]:
    """Return the sum of x xᵀ over the inputs x of every converted weight, by path.

    Use this before `gptq`, which reads the float32 `[*stack, k, k]`, or
    `search_scales`, which reads its diagonal. The float model computes the
    inputs, whatever the recipe.

    Args:
      model: from `transform`, or a Linen model of `convert_to_tcfp`. For an NNX model,
        transform the function `lambda state, x: nnx.merge(graph, state)(x)`.
      params: its float parameters.
      batches: arguments of the model after its parameters: an array, or a tuple. Each
        shape is compiled once.

    Raises:
      TypeError: the model is neither.
      ValueError: there is no batch, nothing is converted, or the products of a weight
        cannot be seen.

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.conversion.transform import transform
    >>> def model(params, x):
    ...     return x @ params["w"]
    >>> low = transform(model, "tensorwise", include=("linear", "small"))
    >>> batches = [jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0]])]
    >>> hessians(low, {"w": jnp.ones((2, 4))}, batches)["w"].tolist()
    [[2.0, 2.0], [2.0, 4.0]]
    """
    run = _function_of(model)
    moments = jax.jit(functools.partial(_second_moments, run))
    total: dict[str, Array] | None = None
    for batch in batches:
        args = batch if isinstance(batch, tuple) else (batch,)
        found = moments(params, *args)
        total = found if total is None else _added(total, found)
    if total is None:
        raise ValueError("batches is empty; a calibration needs at least one")
    return total


@functools.partial(jax.jit, donate_argnums=0)
def _added(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(operator.add, a, b)


def _function_of(model: Transformed | nn.Module) -> Transformed:
    if isinstance(model, Transformed):
        return model
    conversion = linen_models.conversion_of(model)
    if not isinstance(model, nn.Module) or conversion is None:
        raise TypeError(
            f"the model is a {type(model).__name__}, which is neither from transform"
            " nor a converted Linen model; pass transform(lambda params, x: ...,"
            " recipe)"
        )
    plain = linen_models.plain(model)

    def call(params: PyTree, *args: object) -> PyTree:
        with switched_off(conversion.policy.off, conversion.policy.is_off):
            return plain.apply({"params": params}, *args)

    return Transformed(call, conversion.policy, 0, name=type(plain).__name__)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Probe:
    """Zeros instead of a stored weight, whose gradient carries the moments."""

    zeros: Array
    path: str = field(metadata=dict(static=True))


def _second_moments(run: Transformed, *args: PyTree) -> dict[str, Array]:
    """Return the sums of one batch; `args` are the parameters and the inputs.

    The result of `run` is differentiated, so a loop of unknown length has no moments.
    Probes do not reach the inside of `jax.shard_map` nor a layer that multiplies by
    itself.
    """
    found = run.examine(*args)

    def zeros(path: str) -> Array:
        layout = found.weights[path].layout
        shape = found.leaves[path].shape
        k = math.prod(shape[axis] for axis in layout.inputs)
        stack = [shape[axis] for axis in layout.stack]
        return jnp.zeros((*stack, k, k), jnp.float32)

    def outputs(probes: dict[str, Array]) -> list[Array]:
        seen: set[str] = set()
        machine = Machine(functools.partial(_observed, seen))
        shown = {path: _Probe(probe, path) for path, probe in probes.items()}
        made = run.run_on(machine, found, args, shown)
        missing = sorted(probes.keys() - seen)
        if missing:
            raise ValueError(
                f"no product of {missing[0]} is seen; write the layer in Flax's own"
                " code and convert it, outside of jax.shard_map"
            )
        return [value for value in made if jnp.issubdtype(value.dtype, jnp.floating)]

    if not found.weights:
        raise ValueError(
            f"{run.name} has no converted weight that can be stored; survey(model)"
            " says why"
        )
    made, back = jax.vjp(outputs, {path: zeros(path) for path in found.weights})
    return back([jnp.zeros_like(value) for value in made])[0]


def _observed(
    seen: set[str], eqn: Equation, inputs: list[Any], recipe: Recipe, **_: Array
) -> Array:
    """Return a planned product, and show its rows of x to the probe of its weight."""
    (y,) = bind(eqn, bare(inputs, eqn.invars))
    side = 0 if isinstance(inputs[0], Shown) else 1
    weight = inputs[side]
    found = factors_of(eqn, side, weight.view)
    assert isinstance(found, Factors), "the census plans no other product"
    how = weight.weight
    probe = weight.stored
    if how is None or probe is None:
        return y
    if (how.recipe, how.layout) != (recipe, found.layout):
        return y  # it reads the weight in another form than the stored one
    seen.add(probe.path)
    contraction = found.contraction
    x = lax.stop_gradient(inputs[1 - side])
    if eqn.primitive.name == GROUPED:  # each weight has moments of its own rows
        sizes = inputs[2][:, None]
        ends = jnp.cumsum(inputs[2])[:, None]
        row = jnp.arange(x.shape[0])
        is_own = (ends - sizes <= row) & (row < ends)
        x = jnp.where(is_own[..., None], x, 0)
    if found.x_groups:
        x = ungrouped(x, found.x_groups)
    x = x.transpose(contraction.stack + contraction.rest + contraction.inputs)
    stack = x.shape[: len(contraction.stack)]
    k = math.prod(x.shape[x.ndim - len(contraction.inputs) :])
    return _observe(y, x.reshape(*stack, -1, k), probe.zeros)


@jax.custom_vjp
def _observe(y: Array, x: Array, moments: Array) -> Array:
    """Return y; the gradient of `moments` are the moments of x `[..., rows, k]`."""
    return y


def _observe_backward(x: Array, gradient: Array) -> tuple[Array, Array, Array]:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    moments = jnp.einsum(
        "...mi,...mj->...ij",
        x,
        x,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return gradient, jnp.zeros_like(x), moments


_observe.defvjp(lambda y, x, moments: (y, x), _observe_backward)
