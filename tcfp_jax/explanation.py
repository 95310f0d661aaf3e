"""`explain`: backend, tile sizes and time of each operation of a layer on this device,
and why others do not run.

`explain` traces the real training step: `tcfp_jax.matmul`, its backward pass and the
optimizer's update. `pallas_kernels.dispatch` records each call, `pallas_kernels.tuning`
has the times, and `include="measured"` reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Call, Verdict, recording
from pallas_kernels.tuning import estimate, is_timed, timed_device
from tcfp_jax.optim.feedback import error_feedback, layer_state
from tcfp_jax.paths import PyTree
from tcfp_jax.products.matmul import matmul
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe


@dataclass(frozen=True)
class Explanation:
    """The operations of a layer's training step, in order; `str` makes a table of them.

    Attributes:
      device: kind of the device.
      steps: a `Call` for each operation, with `step`, `op`, `operands`, `verdicts` and
        `chosen`.
      bf16: the same for the layer in BF16, `recipe("bf16")`.
      times, bf16_times: milliseconds of each operation, interpolated between
        measurements on `timed_on` (`pallas_kernels.tuning.estimate`); None if no
        measurement is near.
      emulated: note on the operands of FP4 training, whose quantizers are not listed,
        so it has no speed; or "".
      timed_on: device of the measurements: this one, or one with the same
        multiprocessors; "" without times.
    """

    device: str
    steps: tuple[Call, ...]
    bf16: tuple[Call, ...] = ()
    times: tuple[float | None, ...] = ()
    bf16_times: tuple[float | None, ...] = ()
    emulated: str = ""
    timed_on: str = ""

    @property
    def speed_over_bf16(self) -> float | None:
        """BF16's time over this one; None if an operation was not timed."""
        if (
            self.emulated
            or not self.times
            or not self.bf16_times
            or None in (*self.times, *self.bf16_times)
        ):
            return None
        return self.bf16_milliseconds / self.milliseconds

    @property
    def milliseconds(self) -> float:
        """Sum over all operations that were timed."""
        return sum(filter(None, self.times))

    @property
    def bf16_milliseconds(self) -> float:
        """Sum over all operations of BF16 that were timed."""
        return sum(filter(None, self.bf16_times))

    @property
    def summary(self) -> str:
        """The comparison with BF16 in words; "" on a device without times."""
        if not self.times:
            return ""
        calls, times = (*self.steps, *self.bf16), (*self.times, *self.bf16_times)
        missing = next(
            (call for call, time in zip(calls, times, strict=True) if time is None),
            None,
        )
        if missing is not None:
            key = missing.key
            operation = (
                missing.op
                if key is None
                else f"{key.op} ({key.variant}) near {'x'.join(map(str, key.shape))}"
            )
            return f"{operation} was not timed on {self.timed_on}"
        if self.emulated:
            return f"the quantizers of FP4 training were not timed on {self.timed_on}"
        in_words = f"{self.milliseconds:.3g} ms against {self.bf16_milliseconds:.3g}"
        return (
            f"{self.speed_over_bf16:.2f} of BF16's speed ({in_words}) on"
            f" {self.timed_on}"
        )

    def __str__(self) -> str:
        """Return a table: the device, the emulation, each operation with its backends,
        and the sum.
        """
        times = self.times or (None,) * len(self.steps)
        lines = [
            line
            for call, time in zip(self.steps, times, strict=True)
            for line in _lines(call, time)
        ]
        first = [
            f"on {self.device}",
            *([f"emulated    {self.emulated}"] if self.emulated else []),
        ]
        return "\n".join(
            [*first, *lines, *([f"in all      {self.summary}"] if self.summary else [])]
        )


def _runs(call: Call) -> Verdict:
    return call.chosen or (
        Verdict("xla", None)
        if not call.verdicts
        else Verdict("xla", "nothing can run it")
    )


def _lines(call: Call, time: float | None) -> list[str]:
    runs = _runs(call)
    notes = ("" if runs.config is None else f" {runs.config}") + (
        "" if time is None else f", {time:.3g} ms"
    )
    lines = [
        f"{call.step:12}{call.operands:70}"
        f" {runs.backend if runs.reason is None else runs.reason}{notes}"
    ]
    return lines + [
        f"{'':12}not {v.backend}: {v.reason}"
        for v in call.verdicts
        if v.reason is not None
    ]


def explain(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    recipe: Recipe | str,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    w_dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
) -> Explanation:
    """Return the operations of a training step of `matmul` of x `[..., k]` and w
    `[k, n]` on the device in use.

    Use it to see which kernels run, and whether a layer is worth converting. The step
    is traced and nothing is computed. Shapes are those of one device. If a named
    backend cannot run, its reason is shown and nothing raises.

    On a device that was timed (`python -m benchmarks.gemm --tune --cases grid`) every
    operation has its time, and their sum is compared with BF16's three products. The
    sum counts the quantization of the weight, once a step. It ignores that layers share
    a quantized activation and that BF16 casts a float32 weight, so it errs to BF16's
    advantage.

    Args:
      x_shape: shape of x.
      w_shape: shape of w.
      recipe: a recipe or its name.
      dtype: dtype of x and of the output's gradient.
      w_dtype: dtype of the parameter and of its gradient.
      optimizer: the transformation that updates the parameter, such as
        `optax.chain(optax.adamw(3e-4), error_feedback(recipe,
        error_dtype="bfloat16"))`; None means `error_feedback(recipe)`. A weight that
        its state does not hold is quantized in the forward pass.

    Raises:
      ValueError: the shapes are not `[..., k]` and `[k, n]`, or the recipe is unknown.

    >>> print(explain((8, 32), (32, 64), "bf16"))  # doctest: +ELLIPSIS
    on ...
    forward     bfloat16[8, 32] x bfloat16[32, 64]                                     xla
    dgrad       bfloat16[8, 64] x bfloat16[32, 64]                                     xla
    wgrad       bfloat16[8, 32] x bfloat16[8, 64]                                      xla
    """
    recipe = named_recipe(recipe)
    if not all(isinstance(shape, Sequence) for shape in (x_shape, w_shape)):
        raise ValueError(
            f"x_shape={x_shape!r} and w_shape={w_shape!r} must be shapes, such as"
            " (8192, 4096) or x.shape"
        )
    if len(x_shape) < 1 or len(w_shape) != 2 or x_shape[-1] != w_shape[0]:
        raise ValueError(
            f"x{list(x_shape)} @ w{list(w_shape)}: the shapes must be [..., k] and"
            " [k, n]"
        )
    x = jax.ShapeDtypeStruct(tuple(x_shape), dtype)
    g = jax.ShapeDtypeStruct((*x.shape[:-1], w_shape[1]), dtype)
    params = {"kernel": jax.ShapeDtypeStruct(tuple(w_shape), w_dtype)}
    if optimizer is None:
        optimizer = error_feedback(
            recipe, key=jax.random.key(0) if recipe.stochastic else None
        )
    steps = _traced(recipe, optimizer, params, x, g)
    emulated = _emulated(recipe)
    device = dispatch.device_kind()
    if not is_timed(device):
        return Explanation(device, steps, emulated=emulated)
    bf16 = _traced(named_recipe("bf16"), optax.identity(), params, x, g)
    times, bf16_times = (tuple(map(_time, calls)) for calls in (steps, bf16))
    return Explanation(
        device, steps, bf16, times, bf16_times, emulated, timed_device(device)
    )


def _emulated(recipe: Recipe) -> str:
    """Return a note on the operands of FP4 training; "" for other recipes."""
    if recipe.fp4 is None:
        return ""
    which = (
        "operands"
        if recipe.fp4.forward_operands == "fp4"
        else "operands of dgrad and wgrad"
    )
    return (
        f"{which} are NVFP4 values, which BF16 holds exactly and multiplies: no FP4"
        " tensor core runs"
    )


def _time(call: Call) -> float | None:
    if call.key is None or _runs(call).reason:
        return None
    return estimate(dispatch.device_kind(), call.key, _runs(call).backend)


def _traced(
    recipe: Recipe,
    tx: optax.GradientTransformation,
    params: PyTree,
    x: jax.ShapeDtypeStruct,
    g: jax.ShapeDtypeStruct,
) -> tuple[Call, ...]:
    """Return the calls that a training step dispatches."""
    state = jax.eval_shape(tx.init, params)

    def training_step(
        params: PyTree, state: PyTree, x: jax.Array, g: jax.Array
    ) -> PyTree:
        stored = layer_state(state).get("kernel")
        drawn = recipe.stochastic or recipe.draws
        key = jax.random.key(0) if stored is None and drawn else None
        multiply = lambda x, params: matmul(
            x, params["kernel"], recipe=recipe, quantized=stored, key=key
        )
        _, vjp = jax.vjp(multiply, x, params)
        dx, gradients = vjp(g)
        return dx, tx.update(gradients, state, params)

    with recording() as calls:
        jax.eval_shape(training_step, params, state, x, g)
    return tuple(calls)
