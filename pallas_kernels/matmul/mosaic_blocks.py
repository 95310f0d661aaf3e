"""`matmul` with a scale for every block on Hopper: which shapes the kernel takes, with which tiles.

The kernel is that of `hopper/kernel.py` with full accumulation: a sum over one block of k is scaled by the scales of x
and w where it is promoted, in float32 registers (DeepSeek-V3, 2024). Both halves of a weight share a scale, so they
share the sum. Blocks of 64 and 32 promote two and four times as often as those of 128.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.hopper.plan import (
    Config,
    Plan,
    block_candidates,
    block_misfit,
    blocks,
    choose,
    reject_here,
    scaled_by_squares,
)
from pallas_kernels.matmul.parts import on_each_device
from pallas_kernels.matmul.reference import key
from pallas_kernels.operands import Block, Operand, Product, sizes
from pallas_kernels.tuning import Key

Shape = tuple[int, int, int]


def reject(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = reject_here(options.out_dtype)
    if reason is not None:
        return reason
    (m, k, n), halves, block = sizes(x, w), halves_of(w), block_of(w)
    if not block_candidates(m, k, n, halves, block):
        size: Any = block.size
        smallest = Config(128, 128, tile_k=size, stages=2, cluster=1)
        return f'{block_misfit(smallest, m, k, n, halves)} for backend="mosaic"; use backend="xla" or pad'
    return None


def configure(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> Config | None:
    """The tile sizes of this product: those that were measured near its shape, else the best guess that fits."""
    return _choose(key(options, x, w, bias), w)


def block_of(w: Operand) -> Block:
    """The scaling of a weight in blocks."""
    assert isinstance(w.scaling, Block), "api's table has this kernel for blocks alone"
    return w.scaling


def halves_of(w: Operand) -> int:
    """1, or 2 for a weight with a residual."""
    return 1 if w.lo is None else 2


def _choose(named: Key, w: Operand) -> Config | None:
    m, k, n = named.shape
    guesses = block_candidates(m, k, n, halves_of(w), block_of(w))
    return choose(named, guesses, lambda config: block_misfit(config, m, k, n, halves_of(w)))


def matmul(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None, *, config: Config | None = None
) -> jax.Array:
    """The product, see `api.matmul`; `config` overrides the tuned or guessed tile sizes where a part fits it."""

    def chosen_for(shape: Shape) -> Config | None:
        if config is not None and block_misfit(config, *shape, halves_of(w)) is None:
            return config
        return _choose(key(options, x, w, bias)._replace(shape=shape), w)

    def multiply(options: Product, x: Operand, w: Operand, bias: Any) -> jax.Array:
        chosen = chosen_for(sizes(x, w))
        assert chosen is not None, "the product was asked whether it fits"
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.hopper import kernel

        scaling, of_x, of_w = kernel_scales(chosen, x, w)
        plan = Plan(chosen, halves_of(w), True, bias is not None, blocks(chosen), scaling)
        operands = (x.values, w.values, w.lo, jnp.ones(1), of_x, of_w, bias)
        return kernel.call(plan, options.out_dtype, *(array for array in operands if array is not None))

    return on_each_device(
        multiply, lambda *shape: chosen_for(shape) is not None, options, x, w, bias, interpreter="calls back"
    )


def kernel_scales(config: Config, x: Operand, w: Operand) -> tuple[Any, jax.Array, jax.Array]:
    """(how the kernel scales, scales of x, scales of w), float32 with blocks of k first."""
    tile = block_of(w).tile
    of_x, of_w = (numerics.decode_e8m0(operand.scale).T for operand in (x, w))
    if scaled_by_squares(block_of(w), config.tile_n):
        return "square", of_x, of_w
    return "vector", of_x, jnp.repeat(of_w, config.tile_k, axis=1) if tile == "square" else of_w
