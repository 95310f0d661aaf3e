"""`explain`: backend, tile sizes and time of each operation of a layer, and why others
do not run.

`explain` traces the real training step: `tcfp_jax.matmul`, its backward pass and the
optimizer's update. `pallas_kernels.dispatch` records each call, `pallas_kernels.tuning`
has the times, and `include="measured"` reads them.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Call, Verdict, recording
from pallas_kernels.tuning import estimate, is_timed, load, timed_device
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
        times = (*self.times, *self.bf16_times)
        if self.emulated or not self.times or not self.bf16_times or None in times:
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
        calls = (*self.steps, *self.bf16)
        times = (*self.times, *self.bf16_times)
        for call, time in zip(calls, times, strict=True):
            if time is None:
                return f"{_named(call)} was not timed on {self.timed_on}"
        if self.emulated:
            return f"the quantizers of FP4 training were not timed on {self.timed_on}"
        in_words = f"{self.milliseconds:.3g} ms against {self.bf16_milliseconds:.3g}"
        return (
            f"{self.speed_over_bf16:.2f} of BF16's speed ({in_words}) on"
            f" {self.timed_on}"
        )

    def __str__(self) -> str:
        """Return a table of the operations with their backends, and the sum."""
        lines = [f"on {self.device}"]
        if self.emulated:
            lines.append(f"emulated    {self.emulated}")
        times = self.times or (None,) * len(self.steps)
        for call, time in zip(self.steps, times, strict=True):
            lines += _lines(call, time)
        if self.summary:
            lines.append(f"in all      {self.summary}")
        return "\n".join(lines)


def _named(call: Call) -> str:
    """Return the name of an operation in `tuned.json`, in words."""
    if call.key is None:
        return call.op
    shape = "x".join(map(str, call.key.shape))
    return f"{call.key.op} ({call.key.variant}) near {shape}"


def _runs(call: Call) -> Verdict:
    if call.chosen is not None:
        return call.chosen
    return Verdict("xla", "nothing can run it" if call.verdicts else None)


def _lines(call: Call, time: float | None) -> list[str]:
    runs = _runs(call)
    line = f"{call.step:12}{call.operands:70} {runs.reason or runs.backend}"
    if runs.config is not None:
        line += f" {runs.config}"
    if time is not None:
        line += f", {time:.3g} ms"
    lines = [line]
    for verdict in call.verdicts:
        if verdict.reason is not None:
            lines.append(f"{'':12}not {verdict.backend}: {verdict.reason}")
    return lines


def explain(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    recipe: Recipe | str,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    w_dtype: DTypeLike = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
    device: str | None = None,
) -> Explanation:
    """Return the operations of a training step of `matmul` of x `[..., k]` and w
    `[k, n]`, with the backend of each.

    Use this to see which kernels run, and whether a layer is worth converting. The step
    is traced and nothing is computed. Shapes are those of one device. If a named
    backend cannot run, its reason is shown and nothing raises. For a whole model use
    `tcfp_jax.conversion.diagnose`.

    On a device that was timed (`python -m benchmarks.tune --cases grid`) every
    operation has its time, and their sum is compared with BF16's three products. The
    sum counts the quantization of the weight, once per step. It ignores that layers
    share a quantized activation and that BF16 casts a float32 weight, so it errs to
    BF16's advantage.

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
      device: kind of a GPU that was timed, such as "NVIDIA H200", which this machine
        need not have; None means the device in use.

    Raises:
      ValueError: the shapes are not `[..., k]` and `[k, n]`, the recipe is unknown, or
        the device was not timed.

    >>> found = explain((8192, 4096), (4096, 4096), "tensorwise", device="NVIDIA H200")
    >>> found.device, [call.step for call in found.steps][:2]
    ('NVIDIA H200', ['quantize x', 'forward'])
    >>> print(explain((8, 32), (32, 64), "bf16"))  # doctest: +ELLIPSIS
    on ...
    forward     bfloat16[8, 32] x bfloat16[32, 64] ... xla
    dgrad       bfloat16[8, 64] x bfloat16[32, 64] ... xla
    wgrad       bfloat16[8, 32] x bfloat16[8, 64] ... xla
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
        key = jax.random.key(0) if recipe.stochastic else None
        optimizer = error_feedback(recipe, key=key)
    emulated = _emulated(recipe)
    with _on(device):
        kind = dispatch.device_kind()
        steps = _traced(recipe, optimizer, params, x, g)
        if not is_timed(kind):
            return Explanation(kind, steps, emulated=emulated)
        bf16 = _traced(named_recipe("bf16"), optax.identity(), params, x, g)
        return Explanation(
            kind,
            steps,
            bf16,
            tuple(map(_time, steps)),
            tuple(map(_time, bf16)),
            emulated,
            timed_device(kind),
        )


@contextlib.contextmanager
def _on(device: str | None) -> Iterator[None]:
    """Let programs be traced for another device; None is the one in use."""
    if device is None:
        yield
        return
    if not is_timed(device):
        raise ValueError(
            f"device={device!r} was not timed; use one of {sorted(load())}, or None for"
            " the device in use"
        )
    described = AbstractDevice(device_kind=device, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        # of a JAX without the fast kernels: the table has it as a reason
        warnings.simplefilter("ignore")
        yield


def _emulated(recipe: Recipe) -> str:
    """Return a note on the operands of FP4 training; "" for other recipes."""
    if recipe.fp4 is None:
        return ""
    which = "operands"
    if recipe.fp4.forward_operands != "fp4":
        which = "operands of dgrad and wgrad"
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

    def training_step(params: PyTree, state: PyTree, x: Array, g: Array) -> PyTree:
        stored = layer_state(state).get("kernel")
        drawn = recipe.stochastic or recipe.draws
        key = jax.random.key(0) if stored is None and drawn else None

        def multiply(x: Array, params: PyTree) -> Array:
            w = params["kernel"]
            return matmul(x, w, recipe=recipe, quantized=stored, key=key)

        _, vjp = jax.vjp(multiply, x, params)
        dx, gradients = vjp(g)
        return dx, tx.update(gradients, state, params)

    with recording() as calls:
        jax.eval_shape(training_step, params, state, x, g)
    return tuple(calls)
