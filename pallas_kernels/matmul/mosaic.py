"""`matmul` and `skip_matmul` on Hopper: the operands of a product as the kernel in
`hopper/kernel.py` reads them.

With a scale for every block, a sum over one block of k is scaled by the scales of x and
w where it is promoted, in float32 registers (DeepSeek-V3, 2024). Both halves of a
weight share a scale, so they share the sum. Blocks of 64 and 32 promote two and four
times as often as blocks of 128.

An operand with `lo_scale` is one of `skip_matmul`: a step whose tile of W_lo, `tile_n`
rows by one block of k, is all zero neither loads nor multiplies that tile. Each device
finds these steps from the scales of its own part.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.hopper import plan
from pallas_kernels.hopper.plan import Config, Plan, Problem
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.devices import on_each_device
from pallas_kernels.operands import ZERO_BLOCK, Block, Operand, Product


def reject(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None
) -> str | None:
    """Return the reason why this kernel cannot multiply these operands here, or
    None.
    """
    return plan.reject(options.out_dtype, Problem.of(x, w), options.accumulation)


def configure(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None
) -> Config | None:
    """Return the tile sizes that were measured near this shape, else the best guess
    that fits.
    """
    return plan.choose(
        reference.key(options, x, w, bias), Problem.of(x, w), options.accumulation
    )


def matmul(
    options: Product,
    x: Operand,
    w: Operand,
    bias: jax.Array | None,
    *,
    config: Config | None = None,
) -> jax.Array:
    """Return the product, see `api.matmul`; `config` overrides the tile sizes of parts
    that it fits.
    """

    def multiply(
        options: Product, x: Operand, w: Operand, bias: jax.Array | None
    ) -> jax.Array:
        problem = Problem.of(x, w)
        fits = config is not None and plan.misfit(config, problem) is None
        chosen = config if fits else configure(options, x, w, bias)
        if chosen is None:
            return reference.product(options, x, w, bias)
        # Imported where it is used: a second that a program without this kernel need
        # not pay, and needs jax 0.11.
        from pallas_kernels.hopper import kernel

        scaling: Literal["tensor", "square", "vector"] = "tensor"
        lists: tuple[jax.Array, ...] = ()
        if isinstance(w.scaling, Block):
            # blocks of k first
            of_x, of_w = (numerics.decode_e8m0(operand.scale).T for operand in (x, w))
            scaling = "square" if problem.by_squares(chosen.tile_n) else "vector"
            if scaling == "vector" and w.scaling.tile == "square":
                of_w = jnp.repeat(of_w, chosen.tile_k, axis=1)
            if w.lo_scale is not None:
                lists = _list_work(w.lo_scale, w.shape[0] // chosen.tile_n)
                if scaling == "square":
                    order = jnp.repeat(
                        lists[1].T, of_w.shape[1] // lists[1].shape[0], axis=1
                    )
                    of_w = jnp.take_along_axis(of_w, order, axis=0)
            scales = [jnp.ones(1), of_x, of_w]
        else:
            scales = [reference.product_scale(x, w).astype(jnp.float32).reshape(1)]
        full = options.accumulation == "full"
        planned = Plan(
            chosen,
            problem.halves,
            full,
            bias is not None,
            plan.blocks(chosen),
            scaling,
            problem.skips,
        )
        rest = [array for array in (w.lo, *scales, bias, *lists) if array is not None]
        return kernel.call(planned, options.out_dtype, x.values, w.values, *rest)

    return on_each_device(multiply, options, x, w, bias, interpreter="calls back")


def _list_work(residual_scales: jax.Array, n_tiles: int) -> tuple[jax.Array, jax.Array]:
    """Return the work of every tile of n, int32: (number of steps that need the
    residual, blocks of k, those first).

    `residual_scales` are `[n or n / block, k / block]`. The results are `[n_tiles]` and
    `[n_tiles, k / block]`, the latter in ascending order within both groups.

    >>> codes = jnp.array([[0, 127, 0, 127], [0, 0, 0, 0]], jnp.uint8)
    >>> _list_work(jax.lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu), 2)[1].tolist()
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
    at_place = place[:, :, None] == block
    return count, jnp.sum(
        jnp.where(at_place, block[:, None], 0), axis=1, dtype=jnp.int32
    )
