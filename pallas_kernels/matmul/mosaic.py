"""`matmul` and `skip_matmul` on Hopper: operands as `hopper/kernel.py` reads them.

With a scale for every block, a sum over one block of k is scaled by the scales of x and
w where it is promoted, in float32 registers (DeepSeek-V3, 2024). Both halves of a
weight share a scale, so they share the sum. Blocks of 64 and 32 promote two and four
times as often as blocks of 128.

An operand with `lo_scale` is one of `skip_matmul`: a step whose tile of W_lo, `tile_n`
rows by one block of k, is all zero neither loads nor multiplies that tile. Each device
finds these steps from the scales of its own part.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.hopper import plan
from pallas_kernels.hopper.plan import Config, Plan, Problem
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.devices import on_each_device
from pallas_kernels.operands import ZERO_BLOCK, MatmulOptions, Operand


def _reject(
    options: MatmulOptions, x: Operand, w: Operand, bias: Array | None
) -> str | None:
    """Return the reason why this kernel cannot multiply these operands, or None."""
    return plan.reject(options.out_dtype, Problem.of(x, w), options.accumulation)


def configure(
    options: MatmulOptions,
    x: Operand,
    w: Operand,
    bias: Array | None,
) -> Config | None:
    """Return the tile sizes that were measured near this shape, else a guess."""
    key = reference.key(options, x, w, bias)
    return plan.choose(key, Problem.of(x, w), options.accumulation)


def _matmul(
    options: MatmulOptions,
    x: Operand,
    w: Operand,
    bias: Array | None,
    *,
    config: Config | None = None,
) -> Array:
    """Return the product, see `api.matmul`.

    `config` overrides the tile sizes of parts that it fits.
    """
    multiply = partial(_multiply, config)
    return on_each_device(multiply, options, x, w, bias, interpreter="calls back")


def _multiply(
    config: Config | None,
    options: MatmulOptions,
    x: Operand,
    w: Operand,
    bias: Array | None,
) -> Array:
    """Return the product of matrices on one device."""
    problem = Problem.of(x, w)
    if config is None or plan.misfit(config, problem) is not None:
        config = configure(options, x, w, bias)
    if config is None:
        return reference.product(options, x, w, bias)
    # Imported where it is used: a second that a program without this kernel need
    # not pay, and needs jax 0.11.
    from pallas_kernels.hopper import kernel

    scaling: Literal["tensor", "square", "vector"] = "tensor"
    lists: list[Array] = []
    if w.scaling.in_blocks:
        # blocks of k first
        of_x = numerics.decode_e8m0(x.scale).T
        of_w = numerics.decode_e8m0(w.scale).T
        scaling = "square" if problem.by_squares(config.tile_n) else "vector"
        if scaling == "vector" and w.scaling.squares:
            of_w = jnp.repeat(of_w, config.tile_k, axis=1)
        if w.lo_scale is not None:
            count, order = _list_work(w.lo_scale, w.shape[0] // config.tile_n)
            lists = [count, order]
            if scaling == "square":
                squares = of_w.shape[1] // order.shape[0]  # of a tile
                order = jnp.repeat(order.T, squares, axis=1)
                of_w = jnp.take_along_axis(of_w, order, axis=0)
        scales = [jnp.ones(1), of_x, of_w]
    else:
        scales = [reference.product_scale(x, w).astype(jnp.float32).reshape(1)]
    planned = Plan(
        config,
        problem.halves,
        promote=options.accumulation == "full",
        has_bias=bias is not None,
        blocks=plan.blocks(config),
        scaling=scaling,
        skips=problem.skips,
    )
    operands = [x.values, w.values, w.lo, *scales, bias, *lists]
    given = [array for array in operands if array is not None]
    return kernel.call(planned, options.out_dtype, *given)


KERNEL = Implementation("mosaic", _matmul, _reject, configure=configure, timed=True)


def _list_work(residual_scales: Array, n_tiles: int) -> tuple[Array, Array]:
    """Return the work of every tile of n, int32.

    It is the number of steps that need the residual, `[n_tiles]`, and the blocks of k,
    `[n_tiles, k / block]`, with those steps first, in ascending order within both
    groups. `residual_scales` are `[n or n / block, k / block]`.

    >>> codes = jnp.array([[0, 127, 0, 127], [0, 0, 0, 0]], jnp.uint8)
    >>> scales = jax.lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu)
    >>> _list_work(scales, 2)[1].tolist()
    [[1, 3, 0, 2], [0, 1, 2, 3]]
    """
    codes = jax.lax.bitcast_convert_type(residual_scales, jnp.uint8)
    steps = codes.shape[-1]
    needed = jnp.any((codes != ZERO_BLOCK).reshape(n_tiles, -1, steps), axis=1)
    count = jnp.sum(needed, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(needed, axis=1, dtype=jnp.int32)
    block = jnp.arange(steps, dtype=jnp.int32)
    place = jnp.where(needed, before - 1, count[:, None] + block - before)
    # Invert a permutation by comparing all with all: one fusion. A sort would be a
    # kernel that takes longer.
    at_place = jnp.where(place[:, :, None] == block, block[:, None], 0)
    return count, jnp.sum(at_place, axis=1, dtype=jnp.int32)
