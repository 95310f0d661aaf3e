"""`diagnose`: a table of the effect of a recipe on each layer of a model, before
anything is converted.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx as flax_nnx

from pallas_kernels.operands import Fp4
from tcfp_jax import paths
from tcfp_jax.conversion import linen_models, nnx_models
from tcfp_jax.conversion.factors import GROUPED
from tcfp_jax.conversion.policy import WORTHWHILE, Policy, Record, policy
from tcfp_jax.conversion.transform import transform
from tcfp_jax.formats import exact_share
from tcfp_jax.optim.feedback import error_feedback
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe, describe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import quantize_weight

# Speed over jitted BF16 of an MLP's forward and backward pass, by device, recipe and
# shape [m, k, n]: part "mlp" of `python -m benchmarks.train_step`, written by
# `python -m benchmarks.report`.
MEASURED = Path(__file__).with_name("measured.json")
_DEVICE, _CARD = "NVIDIA H100 80GB HBM3", "NVIDIA H100"
_SAMPLE = 1 << 20  # values of a kernel that its signal-to-noise ratio is taken from


@dataclass(frozen=True)
class Line:
    """One product of a parameter.

    Attributes:
      path, equation, shape: the parameter and its product.
      eligible: whether `convert_to_tcfp` with this recipe converts the product by
        default.
      reason: why it does not.
      parameters: number of values of the whole kernel, all layers of a stack.
      bytes_bf16, bytes_fp32, bytes_stored, bytes_with_error: bytes of the kernel in
        BF16, in float32, as `error_feedback` stores it for the layers, and stored with
        its float32 error buffer. The float master is extra.
      snr_db: signal-to-noise ratio of the quantized weight; None without parameters,
        and for FP4 training.
      speed_up: predicted speed of its forward and backward products over BF16; None if
        nothing was measured.
      extrapolated: whether the product is smaller than the smallest that was measured.
      exact: share of the blocks of an NVFP4 weight that FP8 tensor cores multiply
        without rounding, because their scales are in range and have few digits
        (`tcfp_jax.formats.exact_share`). The rule "fold_exact" makes it 1.
    """

    path: str
    equation: str
    shape: tuple[int, ...]
    eligible: bool
    reason: str
    parameters: int
    bytes_bf16: int
    bytes_fp32: int
    bytes_stored: int
    bytes_with_error: int
    snr_db: float | None
    speed_up: float | None
    extrapolated: bool = False
    exact: float | None = None

    def __str__(self) -> str:
        """One line of the table."""
        numbers = (
            self.bytes_bf16,
            self.bytes_fp32,
            self.bytes_stored,
            self.bytes_with_error,
        )
        text = (
            f"{self.path or '(root)':36} {list(self.shape)!s:20} {self.parameters:>12,}"
        )
        text += "".join(f" {number:>13,}" for number in numbers)
        text += f" {'-' if self.snr_db is None else format(self.snr_db, '.1f'):>6}"
        text += f" {'-' if self.speed_up is None else format(self.speed_up, '.2f') + '*' * self.extrapolated:>6}"
        notes = (
            ""
            if self.exact is None
            else f" (E4M3 holds {self.exact:.1%} of its blocks)"
        )
        return f"{text}  {'yes' if self.eligible else f'no: {self.reason}'}{notes}"


@dataclass(frozen=True)
class Diagnosis:
    """A line for each product. Print it to see a table with totals, which count a
    weight of several products once.
    """

    recipe: Recipe
    lines: tuple[Line, ...]
    break_even: float | None

    def __str__(self) -> str:
        """A header, one line per product, totals, and the break-even."""
        head = (
            f"{'parameter':36} {'kernel':20} {'parameters':>12} {'BF16':>13}"
            f" {'FP32':>13}"
        )
        head += f" {'stored':>13} {'+ error':>13}"
        lines = [f"{head} {'SNR dB':>6} {'speed':>6}  eligible", *map(str, self.lines)]
        columns = (
            "parameters",
            "bytes_bf16",
            "bytes_fp32",
            "bytes_stored",
            "bytes_with_error",
        )
        for name, chosen in (
            ("all", self.lines),
            ("eligible", [line for line in self.lines if line.eligible]),
        ):
            # A weight is kept in its stored form if any of its products reads that
            # form.
            weights = {
                line.path: [other for other in chosen if other.path == line.path]
                for line in chosen
            }
            sums = [
                sum(
                    max(getattr(each, column) for each in of) for of in weights.values()
                )
                for column in columns
            ]
            label = f"total, {name}: {len(chosen)} products of {len(weights)} weights"
            lines.append(
                f"{label:57} {sums[0]:>12,}"
                + "".join(f" {number:>13,}" for number in sums[1:])
            )
        if any(line.extrapolated for line in self.lines):
            lines.append(
                "* smaller than the smallest product that was measured: that one's"
                " speed, and rather less"
            )
        lines.append(_measured_speed(self.recipe, self.break_even))
        return "\n".join(lines)


def diagnose(
    model: nn.Module | flax_nnx.Module | Callable[..., PyTree],
    *inputs: PyTree,
    recipe: Recipe | str = "tcfp12_fast",
    params: PyTree = None,
    options: dict[str, PyTree] | None = None,
) -> Diagnosis:
    """Print and return the effect of `recipe` on every layer: eligibility, bytes,
    signal-to-noise ratio and speed.

    Use it before a conversion. It converts nothing, and traces the model without
    running it. Speed is interpolated in the number of operations between measured
    shapes on an H100 (`measured.json`); beyond them, the nearest one counts.

    Args:
      model: a Linen or NNX model, or a function of parameters and inputs, which are
        then the inputs.
      inputs: sample arguments, arrays or `jax.ShapeDtypeStruct`; the prediction is for
        their size.
      recipe: a `Recipe` or the name of one.
      params: parameters of a Linen model, for the signal-to-noise ratio; an NNX model
        has its own.
      options: keyword arguments for the call with `inputs`.

    Returns:
      The `Diagnosis` that was printed.

    Raises:
      TypeError: neither a Flax module nor a function.
      ValueError: no inputs, or an unknown recipe.

    >>> found = diagnose(nn.Dense(4096), jax.ShapeDtypeStruct((8192, 1024), jnp.float32))  # doctest: +ELLIPSIS
    parameter ...
    >>> found.lines[0].eligible, round(found.lines[0].speed_up, 1)
    (True, 1.0)
    """
    if not inputs and not options:
        raise ValueError(
            "diagnose needs sample inputs: diagnose(model, *inputs, recipe=...)"
        )
    chosen = policy(recipe, None, ("linear", "small", "head"))
    if isinstance(model, flax_nnx.Module):
        found = nnx_models.examine(model, chosen, inputs, options or {})
        params = flax_nnx.as_pure(flax_nnx.state(model, flax_nnx.Param))
    elif isinstance(model, nn.Module):
        found, _ = linen_models.examine(
            linen_models.plain(model), chosen, inputs, options or {}
        )
    else:
        found = transform(model, recipe, include=("linear", "small", "head")).examine(
            *inputs, **(options or {})
        )
        params = inputs[0] if params is None else params
    values = {} if params is None else paths.leaves(params)
    kernels = {
        path: leaf
        for path, leaf in values.items()
        if not isinstance(leaf, jax.ShapeDtypeStruct)
    }
    usual = policy(recipe, include="measured")
    records, named = (
        (*found.report.converted, *found.report.skipped),
        named_recipe(recipe),
    )
    if wrapped := {f"params/{record.weight_path}" for record in records} & set(kernels):
        raise ValueError(
            f'params have {min(wrapped)}, as variables do; pass variables["params"]'
        )
    lines = tuple(
        _line(record, usual, kernels.get(record.weight_path)) for record in records
    )
    diagnosis = Diagnosis(
        named,
        lines,
        next((size for size, speed in _points(named) if speed >= WORTHWHILE), None),
    )
    print(diagnosis)
    return diagnosis


def _measured_speed(recipe: Recipe, at: float | None) -> str:
    """Return the size from which a recipe was measured to be faster than BF16, in
    words.
    """
    points = _points(recipe)
    if not points:
        return f"{describe(recipe)} was not measured against BF16 on an {_CARD}"
    if at is None:
        return (
            f"{describe(recipe)} is faster than BF16 on an {_CARD} at none of the sizes"
            " that were measured"
        )
    note = ", the smallest that was measured" if at == points[0][0] else ""
    return (
        f"{describe(recipe)} is faster than BF16 on an {_CARD} from {at:.1e} operations"
        f" a product (2 m k n){note}"
    )


def predict(recipe: Recipe, operations: float) -> float | None:
    """Return the speed over BF16 of products of this many operations; None for a recipe
    that was not measured.

    >>> round(predict(named_recipe("tensorwise"), 2 * 8192 * 4096 * 16384), 1)
    1.7
    """
    points = _points(recipe)
    if operations > 0 and recipe.weight is None:
        return 1.0
    if not points or operations <= 0:
        return None
    sizes, speeds = zip(*points)
    return float(np.interp(math.log(operations), np.log(sizes), speeds))


@functools.cache
def _points(recipe: Recipe) -> list[tuple[float, float]]:
    """Return the measured operations of a product and its speed over BF16, by size;
    none for other recipes.
    """
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))[_DEVICE].get(
        describe(recipe), []
    )
    return sorted(
        (2.0 * math.prod(row["shape"]), row["speed_over_bf16"]) for row in rows
    )


def _line(record: Record, usual: Policy, kernel: jax.Array | None) -> Line:
    product, recipe, size = (
        record.product,
        record.recipe,
        math.prod(record.product.shape),
    )
    of = (product.path, product.equation, product.shape)
    if recipe is None:
        return Line(
            *of, False, record.reason, size, 2 * size, 4 * size, 0, 0, None, None
        )
    choice, (stored, error) = usual.choose(product), _state_bytes(record, recipe)
    operations, points = 2.0 * product.rows * product.k * product.n, _points(recipe)
    snr, exact = (
        (None, None)
        if kernel is None or recipe.fp4 is not None
        else _rounded(kernel, record, recipe)
    )
    return Line(
        *of,
        choice.recipe is not None,
        choice.reason,
        size,
        2 * size,
        4 * size,
        stored,
        stored + error,
        snr,
        None if product.primitive == GROUPED else predict(recipe, operations),
        bool(points) and operations < points[0][0],
        exact,
    )


def _state_bytes(record: Record, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of the stored weight and of its error buffer, as
    `error_feedback` would make them.
    """
    shape, layout = record.product.shape, record.product.layout
    if layout is None or recipe.stored is None:
        return 0, 0
    tx = error_feedback(
        {"kernel": Weight(recipe, layout)},
        key=jax.random.key(0) if recipe.stochastic else None,
    )
    state = jax.eval_shape(
        tx.init, {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
    )
    weight, error = (
        sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
        for tree in (state.weights, state.errors)
    )
    return weight, error


def _rounded(
    kernel: jax.Array, record: Record, recipe: Recipe
) -> tuple[float, float | None]:
    """Return the signal over rounding noise in dB of a part of a kernel, and
    `Line.exact` of it.

    The part is the first values, as one tensor; for FP4 whole rows of the first matrix
    `[n, k]`, where blocks lie.
    """
    w, layout = jnp.asarray(kernel), record.product.layout
    if isinstance(recipe.scaling, Fp4) and layout is not None:
        first = w[
            tuple(
                slice(0, 1) if axis in layout.stack else slice(None)
                for axis in range(w.ndim)
            )
        ]
        matrix = layout.matrix(first).reshape(layout.matrix_shape(first.shape)[-2:])
        w = matrix if layout.transposed else matrix.T
        w = w[: max(recipe.scaling.block, _SAMPLE // max(1, w.shape[-1]))]
    else:
        w = w.reshape(-1)[:_SAMPLE][None]
    powers, exact = _powers(w, recipe=recipe)
    signal, noise = map(float, powers)
    snr = 10 * math.log10(signal / noise) if noise and signal else math.inf
    return snr, None if exact is None else float(exact)


@functools.partial(jax.jit, static_argnames="recipe")
def _powers(
    w: jax.Array, *, recipe: Recipe
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
    """Return the powers of signal and noise, and for NVFP4 the share of blocks that are
    exact in E4M3.
    """
    w, exact = w.astype(jnp.float32), None
    if recipe.stored is None:
        # Round by arithmetic: XLA on a GPU deletes a cast to bfloat16 and back.
        error = w - jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
    elif isinstance(recipe.scaling, Fp4):
        codes = quantize_weight(w, recipe, contracts="last")[0].for_dgrad()
        # packed codes of an odd k have a zero at their end
        error = w - codes.dequantize()[:, : w.shape[1]]
        exact = exact_share(codes.scale) if recipe.scaling.format == "nvfp4" else None
    else:
        nearest = (
            named_recipe(recipe, remainder="dropped") if recipe.stochastic else recipe
        )
        error = w - quantize_weight(w, nearest)[0].dequantize()
    return (jnp.sum(w * w), jnp.sum(error * error)), exact
