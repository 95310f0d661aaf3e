"""What each converted product reads, in one pass of a program: `second_moments` of its inputs, or all `operands`.

The program runs as it was, and every planned product hands what it reads to the parameter that it multiplies:

    y = observe(x w, x, probe)      forward: x w      backward: the gradient of the probe is sum over rows of x xᵀ
    y = hand_over(x w, x, probe)                      the gradients of its two arrays are x, and the gradient of y

A probe takes the place of a stored weight, so it reaches the product as those do, through loops over layers, branches
and `jax.checkpoint`, and its gradient comes back stacked as the parameter is. Of the backward pass `second_moments`
reads nothing else, so XLA drops the rest.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.specs import ungrouped
from tcfp_jax.conversion.evaluation import Machine, bind
from tcfp_jax.conversion.examination import Examined
from tcfp_jax.conversion.shown import Shown
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.conversion.views import Factors, factors, layout_of
from tcfp_jax.recipes import Recipe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Probe:
    """In the place of a stored weight: zeros whose gradient is what a product hands over, and whose weight it is."""

    zeros: Any
    path: str = field(metadata=dict(static=True))


class Operands(NamedTuple):
    """What a weight met: its inputs x `[*stack, rows, k]`, and the gradients of its results `[*stack, rows, n]`.

    Float32; `stack` are the axes of a loop over layers, as the parameter has them.
    """

    x: jax.Array
    g: jax.Array


# Of a product's factors, its result, its rows of x and the zeros of its probe: the result again.
_Hand = Callable[[Factors, jax.Array, jax.Array, Any], jax.Array]


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
    hand: _Hand = lambda factors, y, x, zeros: _observe(y, x, zeros)
    made, back = jax.vjp(_observing(run, found, args, hand), probes_of(found))
    return back([jnp.zeros_like(value) for value in made])[0]


def operands(run: Transformed, *args: Any) -> dict[str, Operands]:
    """What each converted weight of a loss meets in one call of it and in its backward pass, by path.

    Args:
      run: from `transform`; its result is one scalar, which is differentiated.
      args: of it, with float parameters.

    Raises:
      ValueError: the result is no scalar, a weight is multiplied more than once, or no product of it is seen, see
        `second_moments`.

    >>> from tcfp_jax.conversion.transform import transform
    >>> loss = lambda params, x: jnp.sum((x @ params["w"]) ** 2)
    >>> low = transform(loss, "tensorwise", include=("linear", "small"))
    >>> [found.tolist() for found in operands(low, {"w": jnp.ones((2, 2))}, jnp.array([[1.0, 2.0]]))["w"]]
    [[[1.0, 2.0]], [[6.0, 6.0]]]
    """
    found = run.examine(*args)
    zeros: dict[str, Operands] = {}
    for product in (record.product for record in found.report.converted if record.weight_path in found.weights):
        if product.path in zeros:
            raise ValueError(f"{product.path} is multiplied more than once in {run.name}; observe a loss without that")
        shape, layout = found.leaves[product.path].shape, found.weights[product.path].layout
        stack = tuple(shape[axis] for axis in layout.stack)
        empty = lambda n: jnp.zeros((*stack, product.rows, n), jnp.float32)
        zeros[product.path] = Operands(empty(product.k), empty(product.n))
    made, back = jax.vjp(_observing(run, found, args, _hand_over), zeros)
    if [value.shape for value in made] != [()]:
        raise ValueError(f"{run.name} has results of shapes {[list(v.shape) for v in made]}, and a loss is one scalar")
    return back([jnp.ones_like(value) for value in made])[0]


def _observing(run: Transformed, found: Examined, args: Any, hand: _Hand) -> Callable[..., list[jax.Array]]:
    """The function of probes that gives the float results, after which every probe was handed something."""

    def outputs(probes: dict[str, Any]) -> list[jax.Array]:
        if not probes:
            raise ValueError(f"{run.name} has no converted weight that can be stored; survey says what became of each")
        seen: set[str] = set()
        machine = Machine(functools.partial(_observed, seen, hand))
        made = run.run_on(machine, found, args, {path: _Probe(zeros, path) for path, zeros in probes.items()})
        if missing := sorted(set(probes) - seen):
            raise ValueError(
                f"no product of {missing[0]} is seen; write the layer in Flax's own code and convert it, outside of "
                "jax.shard_map"
            )
        return [value for value in made if jnp.issubdtype(value.dtype, jnp.floating)]

    return outputs


def _observed(seen: set[str], hand: _Hand, eqn: Any, inputs: list[Any], recipe: Recipe, **between: Any) -> Any:
    """The result of a planned product as it was, with what it reads handed to the probe of its weight."""
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
    k = math.prod(x.shape[x.ndim - len(contraction.inputs) :])
    return hand(found, y, x.reshape(*x.shape[: len(contraction.stack)], -1, k), probe.zeros)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _hand_over(found: Factors, y: jax.Array, x: jax.Array, zeros: Operands) -> jax.Array:
    """`y`, whose backward pass gives x, and the gradient of y in rows, as the gradients of zeros."""
    del found, x, zeros
    return y


def _hand_over_forward(found: Factors, y: jax.Array, x: jax.Array, zeros: Operands) -> tuple[jax.Array, jax.Array]:
    del found, zeros
    return y, x


def _hand_over_backward(found: Factors, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, Operands]:
    order, g = found.contraction.order, ungrouped(gradient, found.out_groups)
    if order is not None:
        g = g.transpose([order.index(place) for place in range(g.ndim)])
    given = Operands(x.astype(jnp.float32), g.reshape(*x.shape[:-1], -1).astype(jnp.float32))
    return gradient, jnp.zeros_like(x), given


_hand_over.defvjp(_hand_over_forward, _hand_over_backward)


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
