"""`diagnose`: a table of the effect of a recipe on each layer of a model.

It is made before anything is converted, and without a GPU.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx as flax_nnx
from jax import Array

from pallas_kernels.operands import Fp4, Tensor
from tcfp_jax import paths
from tcfp_jax.conversion import linen_models, nnx_models
from tcfp_jax.conversion.factors import GROUPED
from tcfp_jax.conversion.policy import WORTHWHILE, Include, Policy, Record, policy
from tcfp_jax.conversion.transform import transform
from tcfp_jax.formats import exact_share
from tcfp_jax.optim.feedback import error_feedback
from tcfp_jax.paths import Function, PyTree
from tcfp_jax.products.matmul import floats_read
from tcfp_jax.recipes import Recipe, describe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.small_blocks import skipped_share, without_small_blocks

# Speed over jitted BF16 of an MLP's whole forward and backward pass, by device, recipe
# and shape [m, k, n]: part "mlp" of `python -m benchmarks.train_step`, written by
# `python -m benchmarks.report`. The times of `pallas_kernels.tuning`, which `explain`
# adds up, are those of single kernels; these are of whole steps. Only `_predict` reads
# them.
MEASURED = Path(__file__).with_name("measured.json")
_DEVICE, _CARD = "NVIDIA H100 80GB HBM3", "NVIDIA H100"
_BYTES = ("bytes_bf16", "bytes_fp32", "bytes_stored", "bytes_with_error")
_SAMPLE = 1 << 20  # values of a kernel that its signal-to-noise ratio is taken from
_ROWS = 128  # at least as many of its rows, if blocks or rows have scales


@dataclass(frozen=True)
class Line:
    """One product of a parameter, a line of a `Diagnosis`.

    Use this to compare one layer between recipes.

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
      skipped: share of the blocks of `W_lo` that products skip, for recipes with
        `residual_blocks="nonzero"`: zeros, and blocks up to `sparse_threshold`, without
        which `snr_db` is.
    """

    path: str
    equation: str
    shape: tuple[int, ...]
    eligible: bool
    reason: str
    parameters: int
    bytes_bf16: int
    bytes_fp32: int
    bytes_stored: int = 0
    bytes_with_error: int = 0
    snr_db: float | None = None
    speed_up: float | None = None
    extrapolated: bool = False
    exact: float | None = None
    skipped: float | None = None

    def __str__(self) -> str:
        """One line of the table."""
        path = self.path or "(root)"
        numbers = "".join(f" {getattr(self, column):>13,}" for column in _BYTES)
        snr = "-" if self.snr_db is None else f"{self.snr_db:.1f}"
        speed = "-" if self.speed_up is None else f"{self.speed_up:.2f}"
        if self.speed_up is not None and self.extrapolated:
            speed += "*"
        text = f"{path:36} {list(self.shape)!s:20} {self.parameters:>12,}{numbers}"
        text += f" {snr:>6} {speed:>6}"
        text += "  yes" if self.eligible else f"  no: {self.reason}"
        if self.exact is not None:
            text += f" (E4M3 holds {self.exact:.1%} of its blocks)"
        if self.skipped is not None:
            text += f" (products skip {self.skipped:.1%} of W_lo's blocks)"
        return text


@dataclass(frozen=True)
class Diagnosis:
    """A line for each product. Print it to see a table with totals.

    Use this to choose a recipe, or the layers to convert, by its `lines`.
    The totals count a weight of several products once.
    """

    recipe: Recipe
    lines: tuple[Line, ...]
    break_even: float | None

    def __str__(self) -> str:
        """A header, one line per product, totals, and the break-even."""
        head = f"{'parameter':36} {'kernel':20} {'parameters':>12} {'BF16':>13}"
        head += f" {'FP32':>13} {'stored':>13} {'+ error':>13} {'SNR dB':>6}"
        eligible = [line for line in self.lines if line.eligible]
        lines = [
            f"{head} {'speed':>6}  eligible",
            *map(str, self.lines),
            _total("all", self.lines),
            _total("eligible", eligible),
        ]
        if any(line.extrapolated for line in self.lines):
            lines.append(
                "* smaller than the smallest product that was measured: that one's"
                " speed, and rather less"
            )
        lines.append(_measured_speed(self.recipe, self.break_even))
        return "\n".join(lines)


def _total(name: str, lines: Sequence[Line]) -> str:
    """Return the row of sums over the weights of some products."""
    sums = dict.fromkeys(("parameters", *_BYTES), 0)
    paths_of_weights = {line.path for line in lines}
    for path in paths_of_weights:
        products = [line for line in lines if line.path == path]
        # A weight is kept in its stored form if any of its products reads that form.
        for column in sums:
            sums[column] += max(getattr(line, column) for line in products)
    parameters, *numbers = sums.values()
    label = f"total, {name}: {len(lines)} products of {len(paths_of_weights)} weights"
    columns = "".join(f" {number:>13,}" for number in numbers)
    return f"{label:57} {parameters:>12,}{columns}"


def diagnose(
    model: nn.Module | flax_nnx.Module | Function,
    *inputs: PyTree,
    recipe: Recipe | str = "tcfp12_fast",
    params: PyTree = None,
    options: dict[str, PyTree] | None = None,
) -> Diagnosis:
    """Print and return the effect of `recipe` on every layer.

    Use this before a conversion, to see which layers a recipe would convert, their
    bytes, signal-to-noise ratio and speed. Use `tcfp_jax.explain` for the kernels of
    one layer, and `survey` after a conversion. It converts nothing, and traces the
    model without running it.

    Speed is interpolated in the number of operations between shapes that were measured
    on an H100 (`measured.json`); beyond them, the nearest one counts.

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

    >>> x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    >>> found = diagnose(nn.Dense(4096), x)  # doctest: +ELLIPSIS
    parameter ...
    >>> found.lines[0].eligible, round(found.lines[0].speed_up, 1)
    (True, 1.0)
    """
    if not inputs and not options:
        raise ValueError(
            "diagnose needs sample inputs: diagnose(model, *inputs, recipe=...)"
        )
    everything: tuple[Include, ...] = ("linear", "small", "head")
    named = named_recipe(recipe)
    chosen = policy(named, None, everything)
    options = options or {}
    if isinstance(model, flax_nnx.Module):
        found = nnx_models.examine(model, chosen, inputs, options)
        params = flax_nnx.as_pure(flax_nnx.state(model, flax_nnx.Param))
    elif isinstance(model, nn.Module):
        plain = linen_models.plain(model)
        found, _ = linen_models.examine(plain, chosen, inputs, options)
    else:
        low = transform(model, named, include=everything)
        found = low.examine(*inputs, **options)
        params = inputs[0] if params is None else params
    values = {} if params is None else paths.leaves(params)
    kernels = {}
    for path, leaf in values.items():
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            kernels[path] = leaf
    records = found.report.records
    for record in records:
        if f"params/{record.weight_path}" in kernels:
            raise ValueError(
                f"params have params/{record.weight_path}, as variables do; pass"
                ' variables["params"]'
            )
    usual = policy(named, include="measured")
    lines = [
        _line(record, usual, kernels.get(record.weight_path)) for record in records
    ]
    faster = [size for size, speed in _points(named) if speed >= WORTHWHILE]
    diagnosis = Diagnosis(named, tuple(lines), faster[0] if faster else None)
    print(diagnosis)
    return diagnosis


def _measured_speed(recipe: Recipe, at: float | None) -> str:
    """Return from which size a recipe was measured to be faster than BF16, in words."""
    points = _points(recipe)
    if not points:
        return f"{describe(recipe)} was not measured against BF16 on an {_CARD}"
    faster = f"{describe(recipe)} is faster than BF16 on an {_CARD}"
    if at is None:
        return f"{faster} at none of the sizes that were measured"
    note = ", the smallest that was measured" if at == points[0][0] else ""
    return f"{faster} from {at:.1e} operations a product (2 m k n){note}"


def _predict(recipe: Recipe, operations: float) -> float | None:
    """Return the speed over BF16 of products of this many operations.

    None: the recipe was not measured.

    >>> round(_predict(named_recipe("tensorwise"), 2 * 8192 * 4096 * 16384), 1)
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
    """Return the measured operations of products and their speed over BF16, by size.

    There are none for a recipe that was not measured.
    """
    by_recipe = json.loads(MEASURED.read_text(encoding="utf-8"))[_DEVICE]
    rows = by_recipe.get(describe(recipe), [])
    return sorted(
        (2.0 * math.prod(row["shape"]), row["speed_over_bf16"]) for row in rows
    )


def _line(record: Record, usual: Policy, kernel: Array | None) -> Line:
    product = record.product
    recipe = record.recipe
    size = math.prod(product.shape)
    line = Line(
        product.path,
        product.equation,
        product.shape,
        eligible=False,
        reason=record.reason,
        parameters=size,
        bytes_bf16=2 * size,
        bytes_fp32=4 * size,
    )
    if recipe is None:
        return line
    choice = usual.choose(product)
    stored, error = _state_bytes(record, recipe)
    speed = None
    rounded = _Rounded()
    if kernel is not None and recipe.fp4 is None:
        rounded = _rounded(kernel, record, recipe)
    operations = 2.0 * product.rows * product.k * product.n
    if product.primitive != GROUPED:
        speed = _predict(recipe, operations)
    points = _points(recipe)
    return dataclasses.replace(
        line,
        eligible=choice.recipe is not None,
        reason=choice.reason,
        bytes_stored=stored,
        bytes_with_error=stored + error,
        snr_db=rounded.snr_db,
        speed_up=speed,
        extrapolated=bool(points) and operations < points[0][0],
        exact=rounded.exact,
        skipped=rounded.skipped,
    )


def _state_bytes(record: Record, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of a weight and its error in the state of `error_feedback`."""
    layout = record.product.layout
    if layout is None or recipe.stored is None:
        return 0, 0
    key = jax.random.key(0) if recipe.stochastic else None
    tx = error_feedback({"kernel": Weight(recipe, layout)}, key=key)
    kernel = jax.ShapeDtypeStruct(record.product.shape, jnp.float32)
    state = jax.eval_shape(tx.init, {"kernel": kernel})
    return _bytes_of(state.weights), _bytes_of(state.errors)


def _bytes_of(tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


class _Rounded(NamedTuple):
    """The numbers of a `Line` that come from a kernel's values."""

    snr_db: float | None = None
    exact: float | None = None
    skipped: float | None = None


def _rounded(kernel: Array, record: Record, recipe: Recipe) -> _Rounded:
    """Return the signal over rounding noise of a kernel, and its shares of blocks.

    They are taken from a part of the kernel: its first values if these share one
    scale, otherwise whole rows of the first matrix `[n, k]`, which hold whole blocks.
    """
    w = jnp.asarray(kernel)
    layout = record.product.layout
    is_one = isinstance(recipe.scaling, Tensor) and recipe.storage == "float"
    if not is_one and layout is not None:
        for axis in layout.stack:
            w = jax.lax.slice_in_dim(w, 0, 1, axis=axis)
        matrix = layout.matrix(w).reshape(layout.matrix_shape(w.shape)[-2:])
        w = matrix if layout.transposed else matrix.T
        rows = _SAMPLE // max(1, w.shape[-1])
        w = w[: max(_ROWS, rows)]
    else:
        w = w.reshape(-1)[:_SAMPLE][None]
    found = _powers(w, recipe=recipe)
    signal = float(found.pop("signal"))
    noise = float(found.pop("noise"))
    snr = 10 * math.log10(signal / noise) if signal and noise else math.inf
    return _Rounded(snr, **{name: float(share) for name, share in found.items()})


@functools.partial(jax.jit, static_argnames="recipe")
def _powers(w: Array, *, recipe: Recipe) -> dict[str, Array]:
    """Return the powers of signal and noise of `[n, k]`.

    NVFP4 has "exact", the share of exact blocks in E4M3, too, and a residual with
    blocks to skip has "skipped".
    """
    w = w.astype(jnp.float32)
    shares = {}
    form = recipe.stored
    if form is None:
        read = floats_read(recipe, w.T)
        assert read is not None, "there is a weight"
        # Round by arithmetic: XLA on a GPU deletes a cast to bfloat16 and back.
        rounded = jax.lax.reduce_precision(read.T, exponent_bits=8, mantissa_bits=7)
    elif isinstance(recipe.scaling, Fp4):
        codes = quantize_weight(w, recipe, contracts="last")[0].for_dgrad()
        # packed codes of an odd k have a zero at their end
        rounded = codes.dequantize()[:, : w.shape[1]]
        if recipe.scaling.format == "nvfp4":
            shares["exact"] = exact_share(codes.scale)
    else:
        if recipe.stochastic:
            recipe = named_recipe(recipe, remainder="dropped")
        stored = quantize_weight(w.T, recipe)[0]
        rounded = stored.dequantize().T
        if form.blocks == "nonzero":
            operand = without_small_blocks(
                stored.for_forward().settled(), form.sparse_threshold
            )
            rounded = operand.dequantize()
            shares["skipped"] = skipped_share(operand)
    error = w - rounded
    return shares | {"signal": jnp.sum(w * w), "noise": jnp.sum(error * error)}
