"""`skip_matmul` for Hopper: the kernel of `matmul` with a pipeline of its own.

A step whose tile of W_lo, `tile_n` rows by one block of k, is all zero neither loads nor multiplies it. Which ones
those are follows from the residual's scales, on each device from those of its own part.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.plan import Config, Plan, block_misfit, blocks, choose, reject_here
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.mosaic_blocks import block_of, kernel_scales
from pallas_kernels.matmul.parts import on_each_device
from pallas_kernels.operands import ZERO_BLOCK, Operand, Product, sizes
from pallas_kernels.tuning import Key

# (stages, store_buffers, cluster). Totals and accumulator fill the registers, and what ptxas makes of the rest turns on
# such constants: it keeps these within 80 bytes of stack, others take 250.
BUFFERS = {
    128: ((2, 1, 2), (3, 1, 2), (2, 4, 1)),
    64: ((5, 2, 1), (4, 2, 2), (6, 1, 1)),
    32: ((10, 2, 2), (7, 2, 2), (8, 2, 1)),
}
_HALVES = 2


def candidates(m: int, k: int, n: int, block: Any) -> list[Config]:
    """Configs that this shape divides into, the best guess first."""
    make: Any = functools.partial(Config, tile_n=128, tile_k=block, pipeline="ring", chunks=2)
    guesses = [
        make(tile_m=256, stages=stages, store_buffers=stores, cluster=cluster)
        for stages, stores, cluster in BUFFERS[block]
    ]
    # Lower tiles have registers for anything; where W_lo is absent, its buffers are too, so it takes more of them.
    guesses += [make(tile_m=128, stages=4, store_buffers=1, cluster=cluster) for cluster in (2, 1)]
    guesses += [make(tile_m=128, stages=3, cluster=cluster) for cluster in (2, 1)]
    return [config for config in guesses if block_misfit(config, m, k, n, _HALVES) is None]


def reject(options: Product, x: Operand, w: Operand, bias: None) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = reject_here(options.out_dtype)
    if reason is not None:
        return reason
    block: Any = block_of(w).size
    if not candidates(*sizes(x, w), block):
        smallest = Config(128, 128, tile_k=block, stages=2, cluster=1)
        return f'{block_misfit(smallest, *sizes(x, w), _HALVES)} for backend="mosaic"; use backend="xla" or pad'
    return None


def configure(options: Product, x: Operand, w: Operand, bias: None) -> Config | None:
    """The tile sizes of this product: those that were measured near its shape, else the best guess that fits."""
    return _choose(key(options, x, w, bias), w)


def key(options: Product, x: Operand, w: Operand, bias: None) -> Key:
    """How `tuned.json` names a product; its times are those of a residual of which half of the blocks are zeros."""
    named = reference.key(options, x, w, bias)
    return named._replace(variant=named.variant.replace("dual ", "dual nonzero "))


def _choose(named: Key, w: Operand) -> Config | None:
    m, k, n = named.shape
    guesses = candidates(m, k, n, block_of(w).size)
    return choose(named, guesses, lambda config: block_misfit(config, m, k, n, _HALVES))


def skip_matmul(options: Product, x: Operand, w: Operand, bias: None, *, config: Config | None = None) -> jax.Array:
    """The product, see `api.skip_matmul`; `config` overrides the tuned or guessed tile sizes where a part fits it."""

    def chosen_for(shape: tuple[int, int, int]) -> Config | None:
        if config is not None and block_misfit(config, *shape, _HALVES) is None:
            return config
        return _choose(key(options, x, w, bias)._replace(shape=shape), w)

    def multiply(options: Product, x: Operand, w: Operand, bias: Any) -> jax.Array:
        chosen = chosen_for(sizes(x, w))
        assert chosen is not None, "the product was asked whether it fits"
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.hopper import kernel
        from pallas_kernels.skip_matmul.pipeline import SkippingSteps

        assert w.lo is not None and w.lo_scale is not None, "api.skip_matmul asks for both"
        scaling, of_x, of_w = kernel_scales(chosen, x, w)
        count, order = list_work(w.lo_scale, w.shape[0] // chosen.tile_n)
        if scaling == "square":
            squares = of_w.shape[1] // order.shape[0]
            of_w = jnp.take_along_axis(of_w, jnp.repeat(order.T, squares, axis=1), axis=0)
        plan = Plan(chosen, _HALVES, True, False, blocks(chosen), scaling)
        operands = (x.values, w.values, w.lo, jnp.ones(1), of_x, of_w, count, order)
        return kernel.call(plan, options.out_dtype, *operands, steps=SkippingSteps)

    return on_each_device(
        multiply, lambda *shape: chosen_for(shape) is not None, options, x, w, bias, interpreter="calls back"
    )


def list_work(residual_scales: jax.Array, n_tiles: int) -> tuple[jax.Array, jax.Array]:
    """The steps of every tile of n by what they need: int32 (how many need the residual, blocks of k with those first).

    Args:
      residual_scales: of W_lo, `[n or n / block, k / block]`.

    Returns:
      `[n_tiles]` and `[n_tiles, k / block]`, the latter in ascending order within both groups.

    >>> codes = jnp.array([[0, 127, 0, 127], [0, 0, 0, 0]], jnp.uint8)
    >>> list_work(jax.lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu), 2)[1].tolist()
    [[1, 3, 0, 2], [0, 1, 2, 3]]
    """
    codes = jax.lax.bitcast_convert_type(residual_scales, jnp.uint8)
    steps = codes.shape[-1]
    needed = jnp.any((codes != ZERO_BLOCK).reshape(n_tiles, -1, steps), axis=1)
    count = jnp.sum(needed, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(needed, axis=1, dtype=jnp.int32)
    block = jnp.arange(steps, dtype=jnp.int32)
    place = jnp.where(needed, before - 1, count[:, None] + block - before)
    # The inverse of a permutation by comparing all with all: one fusion, where a sort is a kernel that takes longer.
    at_place = place[:, :, None] == block
    return count, jnp.sum(jnp.where(at_place, block[:, None], 0), axis=1, dtype=jnp.int32)
