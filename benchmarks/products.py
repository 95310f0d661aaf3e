"""The products that benchmarks time: their operands, their values in float32, and the check that comes before a time.

This is the only file of the benchmarks that calls the products of `pallas_kernels`. What quantizers share is below.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.shapes import GemmShape, dot_bf16
from benchmarks.timing import threaded
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_matmul import mosaic as block_mosaic
from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_quantize.api import block_quantize
from pallas_kernels.blocks import Blocked, ResidualBlocks, Tile
from pallas_kernels.dispatch import Backend
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import SUM_BOUND, Accumulation, matmul
from pallas_kernels.quantize.api import quantize
from tcfp_jax.products.operands import Operand, product, quantize_operand, weight_operand
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.blocks import BlockArray, ResidualBlockArray
from tcfp_jax.weights.quantization import quantize_weight

E4M3 = jnp.float8_e4m3fn
# Of a BF16 product, per unit of |x| @ |w|: its sums are float32. FP8 products have bounds of their own, `SUM_BOUND`.
BF16_SUM_BOUND = 2.0**-16
Arrays = tuple[jax.Array, ...]
Config = Any  # tile sizes of a Mosaic kernel


@dataclass(frozen=True)
class Form:
    """How the operands of a product are scaled, and how it adds.

    Attributes:
      halves: 2 for a residual weight, 1 for a single one.
      accumulation: of the sum; products of blocks are always "full".
      block, tile: size and form of the weight's blocks; None is one scale a tensor. Those of x are vectors.
      out_dtype: of the result.
      residual_blocks: the blocks of the residual that are multiplied.
    """

    halves: int
    accumulation: Accumulation = "full"
    block: int | None = None
    tile: Tile = "square"
    out_dtype: str = "bfloat16"
    residual_blocks: ResidualBlocks = "all"

    @property
    def op(self) -> str:
        """How `tuned.json` names the op."""
        return "matmul" if self.block is None else "block_matmul"

    @property
    def variant(self) -> str:
        """How `tuned.json` names the variant."""
        if self.block is None:
            return mosaic.variant(self.halves == 2, self.accumulation, self.out_dtype)
        return block_mosaic.variant(self.halves, **self._block_options())

    def bound(self, backend: Backend) -> float:
        """The product's own: largest error of a sum per unit of |x| @ |w|."""
        return SUM_BOUND[backend, self.accumulation]

    def candidates(self, shape: GemmShape) -> list[Config]:
        """The tile sizes that the Mosaic kernel has for a shape, best guess first."""
        sizes = (shape.m, shape.k, shape.n, self.halves)
        if self.block is None:
            return list(mosaic.candidates(*sizes, self.accumulation))
        return list(block_mosaic.candidates(*sizes, self.block, self.residual_blocks))

    def quantize(self, x: jax.Array, w: jax.Array, backend: Backend | None = None) -> Arrays:
        """The arrays of x `[m, k]` and W `[n, k]` as `multiply` takes them."""
        return _quantize(x, w, self, backend)

    def multiply(self, *arrays: jax.Array, backend: Backend | None, config: Config = None) -> jax.Array:
        """The product by a backend, or by the Mosaic kernel with these tile sizes."""
        if self.block is None:
            x, w, *lo, scale = arrays
            options: Any = dict(scale=scale, accumulation=self.accumulation, out_dtype=jnp.dtype(self.out_dtype))
            if config is None:
                return matmul(x, w, *lo, backend=backend, **options)
            return mosaic.matmul(x, w, lo[0] if lo else None, bias=None, out_sharding=None, config=config, **options)
        x_q, w_q, *w_lo = (Blocked(*arrays[i : i + 2]) for i in range(0, len(arrays), 2))
        residual = w_lo[0] if w_lo else None
        if config is None:
            return block_matmul(x_q, w_q, residual, backend=backend, **self._block_options())
        return block_mosaic.block_matmul(x_q, w_q, residual, config=config, **self._block_options())

    def values(self, arrays: Arrays) -> Arrays:
        """The float32 values of x and of each half of W that the arrays stand for."""
        if self.block is None:
            x, *halves, scale = (value.astype(jnp.float32) for value in arrays)
            return (x, *(half * scale for half in halves))
        x, of_x, w, of_w, *lo = arrays
        hi = BlockArray(w, of_w, block=self.block, tile=self.tile).dequantize()
        parts = [BlockArray(x, of_x, block=self.block).dequantize(), hi]
        if lo:
            both = ResidualBlockArray(w, lo[0], of_w, lo[1], block=self.block, tile=self.tile).dequantize()
            parts.append(both - hi)
        return tuple(parts)

    def agree(self, arrays: Arrays, backend: Backend, got: jax.Array, expected: jax.Array) -> bool:
        """Whether a result is within its own bound and XLA's of XLA's result."""
        wide = dataclasses.replace(self, accumulation="full", out_dtype="float32", residual_blocks="all")
        magnitude = wide.multiply(*map(_magnitude, arrays), backend="xla")
        result, xla = (value.astype(jnp.float32) for value in (got, expected))
        # Each result is rounded to its dtype once more, XLA's sum of two products twice.
        rounding = 3 * float(jnp.finfo(got.dtype).eps) / 2
        bound = (self.bound(backend) + self.bound("xla")) * magnitude + rounding * abs(xla)
        return bool(np.asarray(jnp.all(jnp.abs(result - xla) <= bound)))

    def _block_options(self) -> dict[str, Any]:
        return dict(
            block=self.block, tile=self.tile, out_dtype=jnp.dtype(self.out_dtype), residual_blocks=self.residual_blocks
        )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _quantize(x: jax.Array, w: jax.Array, form: Form, backend: Backend | None) -> Arrays:
    if form.block is None:
        x_q, w_q = quantize(x, E4M3, backend=backend), dual_quantize(w, backend=backend)
        # Powers of two, exact in bfloat16, which lets cuBLASLt apply them.
        return (x_q.values, *(w_q.hi, w_q.lo)[: form.halves], (x_q.scale * w_q.scale).astype(jnp.bfloat16))
    of_x = block_quantize(x, E4M3, block=form.block, backend=backend)
    of_w = block_dual_quantize(w, block=form.block, tile=form.tile, backend=backend)
    arrays = (of_x.values, of_x.scales, of_w.hi, of_w.scales, of_w.lo, of_w.residual_scales)
    return arrays[: 2 + 2 * form.halves]


def _magnitude(value: jax.Array) -> jax.Array:
    """|value|, of FP8 by its bits; scales are not negative."""
    if value.dtype not in (E4M3, jnp.float8_e5m2):
        return value
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.uint8) & 0x7F, value.dtype)


@dataclass(frozen=True)
class Product:
    """A product that can be checked and timed.

    Attributes:
      kind, accumulation, backend: what rows call it.
      function, args: a jitted function and its arguments.
      values: the float32 values of x `[m, k]` and of the parts of W `[n, k]` that the arguments stand for.
      gemms: how many FP8 or BF16 products it is made of.
      bound: of its sums, per unit of |x| @ |w|.
      config: tile sizes, where they were chosen by hand.
    """

    kind: str
    accumulation: Accumulation
    backend: Backend
    function: Callable[..., jax.Array]
    args: tuple[Any, ...]
    values: Callable[[], Arrays]
    gemms: int
    bound: float
    config: Config = None

    @property
    def name(self) -> str:
        """Different for all products of a run."""
        return f"{self.kind} {self.accumulation} {self.backend} {self.config or ''}"


def bf16_product(x: jax.Array, w: jax.Array) -> Product:
    """The baseline: bfloat16 x and W."""
    half = w.astype(jnp.bfloat16)
    values = lambda: (x.astype(jnp.float32), half.astype(jnp.float32))
    return Product("bf16", "full", "xla", jax.jit(dot_bf16), (x, half), values, 1, BF16_SUM_BOUND)


def fp8_product(kind: str, form: Form, arrays: Arrays, backend: Backend, config: Config = None) -> Product:
    """A product of arrays that `form.quantize` made."""
    function = jax.jit(functools.partial(form.multiply, backend=backend, config=config))
    values = functools.partial(form.values, arrays)
    bound = form.bound(backend)
    return Product(kind, form.accumulation, backend, function, arrays, values, form.halves, bound, config)


def recipe_product(kind: str, x: jax.Array, w: jax.Array, recipe: Recipe, gemms: int, backend: Backend) -> Product:
    """The forward product of a recipe, with fast accumulation."""
    x_q, w_q = _quantize_for(x, w, recipe)
    call = functools.partial(product, recipe=recipe, accumulation="fast", out_dtype=jnp.bfloat16)
    # What three products of two residual operands leave out, x_lo w_lo, is below 2**-8 of both.
    bound = SUM_BOUND[backend, "fast"] + (2.0**-8 if gemms == 3 else 0)
    values = functools.partial(_operand_values, x_q, w_q)
    return Product(kind, "fast", backend, jax.jit(call), (x_q, w_q), values, gemms, bound)


@functools.partial(jax.jit, static_argnums=2)
def _quantize_for(x: jax.Array, w: jax.Array, chosen: Recipe) -> tuple[Operand, Operand]:
    stored, _ = quantize_weight(w.T, chosen)
    x_q = quantize_operand(x, "float8_e4m3fn", chosen, form=chosen.forward_activation)
    return x_q.rows, weight_operand(stored, "dual", "k")


def _operand_values(x: Operand, w: Operand) -> Arrays:
    def wide(operand: Operand, values: jax.Array) -> jax.Array:
        scale = operand.scale[:, None] if operand.scale.ndim else operand.scale
        return values.astype(jnp.float32) * scale

    both = wide(x, x.values) if x.lo is None else wide(x, x.values) + wide(x, x.lo)
    return (both, wide(w, w.values)) if w.lo is None else (both, wide(w, w.values), wide(w, w.lo))


def possible(found: list[Product]) -> list[Product]:
    """Those products if the backend has them, else none, and why."""
    try:
        for candidate in found:
            jax.eval_shape(candidate.function, *candidate.args)
    except NotImplementedError as reason:
        print(f"{found[0].kind}: {reason}")
        return []
    return found


def check_product(candidate: Product, checked_rows: int = 64, seed: int = 0) -> float:
    """Largest error over its bound, on randomly chosen rows and columns, against float64.

    Raises:
      ArithmeticError: it is above 1, or not a number.
    """
    out = candidate.function(*candidate.args)
    random = np.random.default_rng(seed)
    rows, columns = (jnp.asarray(random.choice(size, min(size, checked_rows), replace=False)) for size in out.shape)
    wide_x, *wide_w = candidate.values()
    x = np.asarray(wide_x[rows]).astype(np.float64)
    halves = [np.asarray(half[columns]).astype(np.float64) for half in wide_w]
    parts = [x @ half.T for half in halves]
    exact = sum(parts)
    magnitude = np.abs(x) @ np.abs(sum(halves)).T
    # An output is rounded once, in a dual product of XLA's each half and their sum.
    rounding = float(jnp.finfo(out.dtype).eps)
    bound = candidate.bound * magnitude + rounding * sum(np.abs(part) for part in parts)
    got = np.asarray(out[rows[:, None], columns[None, :]]).astype(np.float64)
    with np.errstate(divide="ignore"):
        used = float(np.max(np.abs(got - exact) / bound))
    if not used <= 1:
        raise ArithmeticError(
            f"{candidate.name}: the error is {used} of its bound; the product is wrong, so it is not timed"
        )
    return used


# Quantizers -----------------------------------------------------------------------------------------------------------


def donating(split: Callable[..., Any], w: jax.Array, error: jax.Array) -> tuple[Any, tuple[()]]:
    """`split(w, error)` as a step that writes the new error in place of the old one, and its arguments."""

    def step(error: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
        parts = split(w, error)
        return parts.error, parts._replace(error=None)

    return threaded(step, error, w), ()


def draw(shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """Gaussian values of deviation 1, then of an error's 0.001; unsigned integers are random bits."""
    keys = jax.random.split(jax.random.key(0), len(dtypes))
    return tuple(
        jax.random.bits(key, shape)
        if dtype == jnp.uint32
        else (jax.random.normal(key, shape) * (1e-3 if i else 1.0)).astype(dtype)
        for i, (key, dtype) in enumerate(zip(keys, dtypes, strict=True))
    )


def same_bits(got: Any, expected: Any) -> bool:
    """Whether two trees of arrays are equal bit for bit, compared on the device: fetching them would take longer."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        as_bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        bits_a, bits_b = (jax.lax.bitcast_convert_type(v, as_bits) for v in (a, b))
        if not np.asarray(jnp.array_equal(bits_a, bits_b)):
            return False
    return True
