"""`matmul` on Hopper: the tile sizes of a product, and its operands as the kernel in `hopper/kernel.py` reads them.

With a scale for every block, a sum over one block of k is scaled by the scales of x and w where it is promoted, in
float32 registers (DeepSeek-V3, 2024). Both halves of a weight share a scale, so they share the sum. Blocks of 64 and 32
promote two and four times as often as blocks of 128.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.hopper import plan
from pallas_kernels.hopper.plan import Config, Plan, Problem
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.devices import on_each_device
from pallas_kernels.operands import Block, Operand, Product, sizes


def problem_of(x: Operand, w: Operand) -> Problem:
    """Return the sizes of a product as the kernel sees them."""
    block = w.scaling if isinstance(w.scaling, Block) else None
    return Problem(*sizes(x, w), 1 if w.lo is None else 2, block)


def reject(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> str | None:
    """Return the reason why this kernel cannot multiply these operands here, or None."""
    problem = problem_of(x, w)
    return plan.reject(options.out_dtype, problem, plan.candidates(problem, options.accumulation))


def configure(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> Config | None:
    """Return the tile sizes that were measured near this shape, else the best guess that fits."""
    problem = problem_of(x, w)
    guesses = plan.candidates(problem, options.accumulation)
    return plan.choose(reference.key(options, x, w, bias), guesses, problem)


def matmul(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None, *, config: Config | None = None
) -> jax.Array:
    """Return the product, see `api.matmul`; `config` overrides the tile sizes of parts that it fits."""

    def multiply(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> jax.Array:
        fits = config is not None and plan.misfit(config, problem_of(x, w)) is None
        chosen = config if fits else configure(options, x, w, bias)
        if chosen is None:
            return reference.product(options, x, w, bias)
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.hopper import kernel

        halves, full = 1 if w.lo is None else 2, options.accumulation == "full"
        scaling: Literal["tensor", "square", "vector"] = "tensor"
        if isinstance(w.scaling, Block):
            scaling, *of_blocks = kernel_scales(chosen, x, w, w.scaling)
            scales = [jnp.ones(1), *of_blocks]
        else:
            scales = [reference.product_scale(x, w).astype(jnp.float32).reshape(1)]
        planned = Plan(chosen, halves, full, bias is not None, plan.blocks(chosen), scaling)
        rest = [array for array in (w.lo, *scales, bias) if array is not None]
        return kernel.call(planned, options.out_dtype, x.values, w.values, *rest)

    return on_each_device(multiply, options, x, w, bias, interpreter="calls back")


def kernel_scales(
    config: Config, x: Operand, w: Operand, block: Block
) -> tuple[Literal["square", "vector"], jax.Array, jax.Array]:
    """Return (scaling of the plan, scales of x, scales of w), float32 with blocks of k first."""
    of_x, of_w = (numerics.decode_e8m0(operand.scale).T for operand in (x, w))
    if plan.scaled_by_squares(block, config.tile_n):
        return "square", of_x, of_w
    return "vector", of_x, jnp.repeat(of_w, config.tile_k, axis=1) if block.tile == "square" else of_w
