"""The products of `benchmarks.gemm` whose operands have more than one scale, and the three of a residual activation."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_quantize.api import block_quantize
from tcfp_jax.weights.blocks import BlockArray, ResidualBlockArray

from benchmarks.shapes import GemmShape, random_operands
from pallas_kernels.blocks import BLOCKS, Blocked, Tile
from pallas_kernels.dispatch import Backend
from tcfp_jax.products.operands import Operand, product, quantize_operand, weight_operand
from tcfp_jax.recipes import Recipe, recipe
from tcfp_jax.weights.quantization import quantize_weight


class Scaled(NamedTuple):
    """A product, its arguments, and the float32 values that they stand for (x `[m, k]`, then weights `[n, k]`).

    `gemms` counts the FP8 products it is made of; `halves` the weights that `values` returns.
    """

    kind: str
    backend: Backend
    gemms: int
    function: Callable[..., jax.Array]
    args: tuple[Any, ...]
    values: Callable[[], tuple[jax.Array, ...]]


def block_products(shape: GemmShape, backends: tuple[Backend, ...], seed: int) -> Iterator[Scaled]:
    """Every block size, x in vectors and W in squares; OCP MX too, both in vectors of 32."""
    x, w = random_operands(shape, seed)
    forms: list[tuple[str, int, Tile, int]] = [(f"block {b}", b, "square", n) for b in BLOCKS[::-1] for n in (1, 2)]
    for name, block, tile, halves in [*forms, ("mx", 32, "vector", 1)]:
        x_q = jax.jit(functools.partial(block_quantize, dtype=jnp.float8_e4m3fn, block=block))(x)
        w_q = jax.jit(functools.partial(block_dual_quantize, block=block, tile=tile))(w)
        args = (x_q.values, x_q.scales, w_q.hi, w_q.scales, *((w_q.lo, w_q.residual_scales) if halves == 2 else ()))
        values = functools.partial(_block_values, args, block, tile)
        for backend in backends:
            call = jax.jit(functools.partial(_block_product, block=block, tile=tile, backend=backend))
            yield Scaled(f"{name} {'dual' if halves == 2 else 'single'}", backend, halves, call, args, values)


def _block_product(x: Any, of_x: Any, w: Any, of_w: Any, *lo: Any, block: int, tile: Tile, backend: Any) -> jax.Array:
    residual = Blocked(*lo) if lo else None
    return block_matmul(Blocked(x, of_x), Blocked(w, of_w), residual, block=block, tile=tile, backend=backend)


def _block_values(args: tuple[Any, ...], block: int, tile: Tile) -> tuple[jax.Array, ...]:
    x, of_x, w, of_w, *lo = args
    options: Any = dict(block=block, tile=tile)
    hi = BlockArray(w, of_w, **options).dequantize()
    wide = [hi] if not lo else [hi, ResidualBlockArray(w, lo[0], of_w, lo[1], **options).dequantize() - hi]
    return (BlockArray(x, of_x, block=block).dequantize(), *wide)


def other_products(shape: GemmShape, backends: tuple[Backend, ...], seed: int) -> Iterator[Scaled]:
    """A scale for every row of x and W; and x = hi + lo times W = hi + lo without lo * lo."""
    x, w = random_operands(shape, seed)
    for name, kind, gemms in (("rowwise", "row single", 1), ("residual_activation", "x = hi + lo, dual", 3)):
        for backend in backends:
            chosen = recipe(name, backend=backend, quantize_backend="xla", wgrad="bf16", forward_accumulation="fast")
            x_q, w_q = _quantized_operands(x, w, chosen)
            call = functools.partial(product, recipe=chosen, accumulation="fast", out_dtype=jnp.bfloat16)
            values = functools.partial(_operand_values, x_q, w_q)
            yield Scaled(kind, backend, gemms, jax.jit(call), (x_q, w_q), values)


@functools.partial(jax.jit, static_argnums=2)
def _quantized_operands(x: jax.Array, w: jax.Array, chosen: Recipe) -> tuple[Operand, Operand]:
    stored, _ = quantize_weight(w.T, chosen)
    x_q = quantize_operand(x, "float8_e4m3fn", chosen, form=chosen.forward_activation)
    return x_q.rows, weight_operand(stored, "dual", "k")


def _operand_values(x: Operand, w: Operand) -> tuple[jax.Array, ...]:
    def wide(operand: Operand, values: jax.Array) -> jax.Array:
        scale = operand.scale[:, None] if operand.scale.ndim else operand.scale
        return values.astype(jnp.float32) * scale

    both = wide(x, x.values) if x.lo is None else wide(x, x.values) + wide(x, x.lo)
    return (both, wide(w, w.values)) if w.lo is None else (both, wide(w, w.values), wide(w, w.lo))
