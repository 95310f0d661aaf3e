"""`explain`: which backend and tile sizes each operation of a layer takes on this device, and why not another.

Nothing is imitated: the training step itself is traced, with `tcfp_jax.matmul`, its backward pass and the optimizer's
update, and `pallas_kernels.dispatch` records what it is asked on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Call, Verdict, device_kind, recording
from tcfp_jax.optim.feedback import error_feedback, layer_state
from tcfp_jax.products.layer import matmul
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe

# Part of the key of every cache of traced functions: a function traced before would hide its calls from the record.


@dataclass(frozen=True)
class Explanation:
    """The operations of a layer's training step, in order; `str` of it is a table.

    Attributes:
      device: the kind of device that it is for.
      steps: a `Call` each, with `step`, `op`, `operands`, `verdicts` and `chosen`.
    """

    device: str
    steps: tuple[Call, ...]

    def __str__(self) -> str:
        """The device, then for every operation a line for what runs and one for each backend that does not."""
        return "\n".join([f"on {self.device}", *(line for call in self.steps for line in _lines(call))])


def _lines(call: Call) -> list[str]:
    runs = call.chosen or (Verdict("xla", None) if not call.verdicts else Verdict("xla", "nothing can run it"))
    config = "" if runs.config is None else f" {runs.config}"
    lines = [f"{call.step:12}{call.operands:70} {runs.backend if runs.reason is None else runs.reason}{config}"]
    return lines + [f"{'':12}not {v.backend}: {v.reason}" for v in call.verdicts if v.reason is not None]


def explain(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    recipe: Recipe | str,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    w_dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
) -> Explanation:
    """What a training step of `tcfp_jax.matmul` of x `[..., k]` and w `[k, n]` runs on the device in use.

    The step is traced and nothing is computed. Shapes are those of one device; a backend that the recipe names and that
    cannot run shows its reason instead of raising.

    Args:
      dtype: of x and of the output's gradient.
      w_dtype: of the parameter, which its gradient has too.
      optimizer: what updates the parameter, such as
        `optax.chain(optax.adamw(3e-4), error_feedback(recipe, error_dtype="bfloat16"))`; None is
        `error_feedback(recipe)`. A weight that it does not hold quantized is quantized in the forward pass.

    Raises:
      ValueError: the shapes are not `[..., k]` and `[k, n]`, or the recipe is unknown.

    >>> print(explain((8, 32), (32, 64), "bf16"))  # doctest: +ELLIPSIS
    on ...
    forward     bfloat16[8, 32] x bfloat16[32, 64]                                     xla
    dgrad       bfloat16[8, 64] x bfloat16[32, 64]                                     xla
    wgrad       bfloat16[8, 32] x bfloat16[8, 64]                                      xla
    """
    recipe = named_recipe(recipe)
    if len(x_shape) < 1 or len(w_shape) != 2 or x_shape[-1] != w_shape[0]:
        raise ValueError(f"x{list(x_shape)} @ w{list(w_shape)}: the shapes must be [..., k] and [k, n]")
    x = jax.ShapeDtypeStruct(tuple(x_shape), dtype)
    g = jax.ShapeDtypeStruct((*x.shape[:-1], w_shape[1]), dtype)
    params = {"kernel": jax.ShapeDtypeStruct(tuple(w_shape), w_dtype)}
    if optimizer is None:
        optimizer = error_feedback(recipe, key=jax.random.key(0) if recipe.stochastic else None)
    tx = optimizer
    state = jax.eval_shape(tx.init, params)

    def training_step(params: Any, state: Any, x: Any, g: Any) -> Any:
        stored = layer_state(state).get("kernel")
        key = jax.random.key(0) if stored is None and recipe.stochastic else None
        multiply = lambda x, params: matmul(x, params["kernel"], recipe=recipe, quantized=stored, key=key)
        _, vjp = jax.vjp(multiply, x, params)
        dx, gradients = vjp(g)
        return dx, tx.update(gradients, state, params)

    with recording() as calls:
        jax.eval_shape(training_step, params, state, x, g)
    return Explanation(device_kind(), tuple(calls))
