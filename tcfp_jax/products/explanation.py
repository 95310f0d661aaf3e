"""`explain`: which backend and tile sizes each product of a layer takes on this device, and why not another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.block_dual_quantize import api as block_dual_quantize
from pallas_kernels.block_matmul import api as block_matmul
from pallas_kernels.block_quantize import api as block_quantize
from pallas_kernels.blocks import SCALE_DTYPE, Blocked, Tile, scales_shape
from pallas_kernels.dispatch import Verdict
from pallas_kernels.dual_quantize import api as dual_quantize
from pallas_kernels.matmul import api as matmul
from pallas_kernels.quantize import api as quantize
from pallas_kernels.row_quantize import api as row_quantize
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.recipes import recipe as named_recipe


@dataclass(frozen=True)
class Step:
    """One operation of a layer: its operands in words, and what was found of every backend that has it.

    `verdicts` is empty for what XLA does without an op of this project, such as a BF16 product.
    """

    name: str
    operands: str
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        """The verdict of the backend that runs, or None."""
        return next((verdict for verdict in self.verdicts if verdict.reason is None), None)

    def __str__(self) -> str:
        """A line for what runs, and one for each backend that does not."""
        runs = self.chosen or Verdict("xla", None)
        config = "" if runs.config is None else f" {runs.config}"
        lines = [f"{self.name:12}{self.operands:59} {runs.backend}{config}"]
        lines += [f"{'':12}not {v.backend}: {v.reason}" for v in self.verdicts if v.reason is not None]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The steps of a layer's forward and backward pass, in order; `str` of it is a table."""

    device: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """The device, then every step."""
        return "\n".join([f"on {self.device}", *map(str, self.steps)])


def explain(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    recipe: Recipe | str,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    w_dtype: DTypeLike = jnp.float32,
) -> Explanation:
    """What `tcfp_jax.matmul` of x `[..., k]` and w `[k, n]` runs on the device in use, forward and backward.

    Nothing is computed. Shapes are those of one device; a backend that the recipe names and that cannot run shows its
    reason instead of raising.

    Args:
      dtype: of x and of the output's gradient.
      w_dtype: of the parameter, which its gradient has too.

    Raises:
      ValueError: the shapes are not `[..., k]` and `[k, n]`, or the recipe is unknown.

    >>> print(explain((8, 32), (32, 64), "bf16"))  # doctest: +ELLIPSIS
    on ...
    forward     bfloat16[8, 32] x bfloat16[32, 64]                          xla
    dgrad       bfloat16[8, 64] x bfloat16[64, 32]                          xla
    wgrad       bfloat16[32, 8] x bfloat16[8, 64]                           xla
    """
    recipe = named_recipe(recipe)
    if len(x_shape) < 1 or len(w_shape) != 2 or x_shape[-1] != w_shape[0]:
        raise ValueError(f"x{list(x_shape)} @ w{list(w_shape)}: the shapes must be [..., k] and [k, n]")
    x, w = jax.ShapeDtypeStruct(tuple(x_shape), dtype), jax.ShapeDtypeStruct(tuple(w_shape), w_dtype)
    g = jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[1]), x.dtype)
    steps = [*_quantizing(recipe, x, w, g), *_products(recipe, x, w, g)]
    return Explanation(dispatch.device_kind(), tuple(steps))


def _quantizing(recipe: Recipe, x: Any, w: Any, g: Any) -> list[Step]:
    steps = []
    copies = "both" if recipe.weight_copies == "both" else "rows"
    backend = recipe.quantize_backend
    if recipe.mode is TCFPMode.TCFP12:
        options: dict[str, Any] = dict(
            error=jax.ShapeDtypeStruct(w.shape, jnp.float32) if recipe.error_feedback else None,
            bits=jax.ShapeDtypeStruct(w.shape, jnp.uint32) if recipe.residual == "stochastic" else None,
            orientation=copies,
        )
        table = dual_quantize.IMPLEMENTATIONS
        if recipe.granularity == "block":
            options |= dict(block=recipe.block, tile=recipe.weight_tile)
            table = block_dual_quantize.IMPLEMENTATIONS
        steps.append(_step("split w", _text(w), table, backend, w, options))
    elif recipe.mode is TCFPMode.FP8:
        steps.append(_quantize_step("quantize w", recipe, w, dict(orientation=copies), tile=recipe.weight_tile))
    if recipe.activation_dtype != "bfloat16":
        options = dict(orientation="both" if recipe.wgrad == "fp8" else "rows")
        if recipe.forward_activation == "dual":
            steps.append(_step("split x", _text(x), dual_quantize.IMPLEMENTATIONS, backend, x,
                               options | dict(error=None, bits=None)))  # fmt: skip
        else:
            steps.append(_quantize_step("quantize x", recipe, x, options))
        steps.append(_quantize_step("quantize g", recipe, g, options))
    return steps


def _quantize_step(name: str, recipe: Recipe, x: Any, options: dict[str, Any], *, tile: Tile = "vector") -> Step:
    table = {"tensor": quantize, "row": row_quantize, "block": block_quantize}[recipe.granularity].IMPLEMENTATIONS
    if recipe.granularity == "block":
        options = options | dict(block=recipe.block, tile=tile)
    return _step(name, _text(x), table, recipe.quantize_backend, x, options)


def _products(recipe: Recipe, x: Any, w: Any, g: Any) -> list[Step]:
    k, n = w.shape
    m = x.size // max(1, k)
    rows = (
        ("forward", (m, k, n), recipe.activation_dtype, recipe.weight_dtype, recipe.forward_weight, x.dtype,
         recipe.forward_accumulation),
        ("dgrad", (m, n, k), recipe.gradient_dtype, recipe.weight_dtype, recipe.dgrad_weight, x.dtype,
         recipe.dgrad_accumulation),
        ("wgrad", (k, m, n), recipe.activation_dtype, recipe.gradient_dtype, "single", w.dtype,
         recipe.wgrad_accumulation),
    )  # fmt: skip
    steps = []
    for name, (height, inner, width), left, right, form, out_dtype, accumulation in rows:
        if left == "bfloat16" or (name == "wgrad" and recipe.wgrad == "bf16"):
            steps.append(Step(name, f"bfloat16[{height}, {inner}] x bfloat16[{inner}, {width}]", ()))
            continue
        a, b = jax.ShapeDtypeStruct((height, inner), left), jax.ShapeDtypeStruct((width, inner), right)
        lo = b if form == "dual" else None
        text = f"{left}[{height}, {inner}] x {'2 ' if lo is not None else ''}{right}[{inner}, {width}]"
        if recipe.granularity == "block":
            steps.append(_block_step(name, text, recipe, a, b, lo, out_dtype))
            continue
        # As in products.py: what is scaled or added afterwards is written in float32.
        three = name == "forward" and recipe.forward_activation == "dual"
        exact = recipe.granularity == "tensor" or (recipe.scale == "pow2" and out_dtype == jnp.bfloat16)
        written = jnp.dtype(out_dtype if exact and not three else jnp.float32)
        options = dict(w_lo=lo, out_dtype=written, accumulation=accumulation)
        steps.append(_step(name, text, matmul.IMPLEMENTATIONS, recipe.backend, (a, b), options))
        if three:
            text = f"{left}[{height}, {inner}] (x_lo) x {right}[{inner}, {width}]"
            steps.append(_step(name, text, matmul.IMPLEMENTATIONS, recipe.backend, (a, b), options | dict(w_lo=None)))
    return steps


def _block_step(name: str, text: str, recipe: Recipe, a: Any, b: Any, lo: Any, out_dtype: Any) -> Step:
    assert recipe.block is not None, "a Recipe with blocks has a size"
    tile: Tile = "vector" if name == "wgrad" else recipe.weight_tile

    def blocked(values: Any, tile: Tile) -> Blocked:
        scales: Any = jax.ShapeDtypeStruct(scales_shape(values.shape, recipe.block or 0, tile), SCALE_DTYPE)
        return Blocked(values, scales)

    arguments = (blocked(a, "vector"), blocked(b, tile), None if lo is None else blocked(lo, tile))
    residual_blocks = "all" if lo is None else recipe.residual_blocks
    options = dict(block=recipe.block, tile=tile, residual_blocks=residual_blocks, out_dtype=jnp.dtype(out_dtype))
    return _step(name, f"{text} in blocks of {recipe.block}", block_matmul.IMPLEMENTATIONS, recipe.backend, arguments,
                 options)  # fmt: skip


def _text(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _step(name: str, operands: str, table: Any, backend: Any, arguments: Any, options: dict[str, Any]) -> Step:
    arguments = arguments if type(arguments) is tuple else (arguments,)
    return Step(name, operands, dispatch.explain(table, backend, *arguments, **options))
