"""`skip_matmul` for Hopper: the kernel of `matmul` with a pipeline of its own.

A step whose tile of W_lo, `tile_n` rows by one block of k, is all zero neither loads nor multiplies that tile. Each
device finds these steps from the residual's scales of its own part.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import plan
from pallas_kernels.hopper.plan import Config, Plan, Problem
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.devices import on_each_device
from pallas_kernels.matmul.mosaic import kernel_scales, problem_of
from pallas_kernels.operands import ZERO_BLOCK, Block, Operand, Product
from pallas_kernels.tuning import Key

# (stages, store_buffers, cluster). Totals and accumulator fill the registers, and the rest depends on how ptxas treats
# these constants: it keeps these within 80 bytes of stack, others take 250.
BUFFERS = {
    128: ((2, 1, 2), (3, 1, 2), (2, 4, 1)),
    64: ((5, 2, 1), (4, 2, 2), (6, 1, 1)),
    32: ((10, 2, 2), (7, 2, 2), (8, 2, 1)),
}


def candidates(problem: Problem) -> list[Config]:
    """Return the configs that fit a product, the best guess first."""
    assert problem.block is not None, "api.skip_matmul asks for blocks"
    size: Any = problem.block.size
    make = functools.partial(Config, tile_n=128, tile_k=size, pipeline="ring", chunks=2)
    guesses = [
        make(tile_m=256, stages=stages, store_buffers=stores, cluster=cluster)
        for stages, stores, cluster in BUFFERS[size]
    ]
    # Lower tiles have registers for anything. A step without W_lo leaves its buffer empty, so more stages pay.
    guesses += [make(tile_m=128, stages=4, store_buffers=1, cluster=cluster) for cluster in (2, 1)]
    guesses += [make(tile_m=128, stages=3, cluster=cluster) for cluster in (2, 1)]
    return [config for config in guesses if plan.misfit(config, problem) is None]


def reject(options: Product, x: Operand, w: Operand, bias: None) -> str | None:
    """Return the reason why this kernel cannot multiply these operands here, or None."""
    problem = problem_of(x, w)
    return plan.reject(options.out_dtype, problem, candidates(problem))


def configure(options: Product, x: Operand, w: Operand, bias: None) -> Config | None:
    """Return the tile sizes that were measured near this shape, else the best guess that fits."""
    problem = problem_of(x, w)
    return plan.choose(key(options, x, w, bias), candidates(problem), problem)


def key(options: Product, x: Operand, w: Operand, bias: None) -> Key:
    """Return the name of a product in `tuned.json`, whose times are for a residual with half of its blocks zero."""
    named = reference.key(options, x, w, bias)
    return named._replace(variant=named.variant.replace("dual ", "dual nonzero "))


def skip_matmul(options: Product, x: Operand, w: Operand, bias: None, *, config: Config | None = None) -> jax.Array:
    """Return the product, see `api.skip_matmul`; `config` overrides the tile sizes of parts that it fits."""

    def multiply(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> jax.Array:
        fits = config is not None and plan.misfit(config, problem_of(x, w)) is None
        chosen = config if fits else configure(options, x, w, None)
        if chosen is None:
            return reference.product(options, x, w, bias)
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.hopper import kernel
        from pallas_kernels.skip_matmul.pipeline import SkippingSteps

        assert isinstance(w.scaling, Block) and w.lo is not None and w.lo_scale is not None, "api.skip_matmul checked"
        scaling, of_x, of_w = kernel_scales(chosen, x, w, w.scaling)
        count, order = list_work(w.lo_scale, w.shape[0] // chosen.tile_n)
        if scaling == "square":
            squares = of_w.shape[1] // order.shape[0]
            of_w = jnp.take_along_axis(of_w, jnp.repeat(order.T, squares, axis=1), axis=0)
        planned = Plan(chosen, 2, True, False, plan.blocks(chosen), scaling)
        operands = (x.values, w.values, w.lo, jnp.ones(1), of_x, of_w, count, order)
        return kernel.call(planned, options.out_dtype, *operands, steps=SkippingSteps)

    return on_each_device(multiply, options, x, w, bias, interpreter="calls back")


def list_work(residual_scales: jax.Array, n_tiles: int) -> tuple[jax.Array, jax.Array]:
    """Return the work of every tile of n, int32: (number of steps that need the residual, blocks of k, those first).

    Args:
      residual_scales: scales of W_lo, `[n or n / block, k / block]`.

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
    # Invert a permutation by comparing all with all: one fusion. A sort would be a kernel that takes longer.
    at_place = place[:, :, None] == block
    return count, jnp.sum(jnp.where(at_place, block[:, None], 0), axis=1, dtype=jnp.int32)
