"""The block-scaled cases of `benchmarks.tune`: products of the recipes that have blocks, and their quantizers."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_matmul import mosaic
from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_quantize.api import block_quantize

from benchmarks.shapes import H200_SHAPES, MIDDLE, GemmShape, random_operands
from pallas_kernels.blocks import BLOCKS, Blocked, Tile
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.quantize.api import Orientation

# Blocks of 64 and 32 are timed at the middle shape alone; which backend wins there does not depend on the size.
Forms = Iterator[tuple[GemmShape, int, Tile, int, Any]]


def product_forms() -> Forms:
    """(shape, block, tile, halves, dtype of the output) of the products of an MLP of each width, both passes."""
    for mlp in H200_SHAPES:
        m, d, d_ff = mlp.m, mlp.k, mlp.n
        for block in BLOCKS[::-1] if mlp == MIDDLE else (128,):
            for shape, halves in itertools.product((GemmShape(m, d, d_ff), GemmShape(m, d_ff, d)), (1, 2)):
                yield shape, block, "square", halves, jnp.bfloat16
            for shape in (GemmShape(d, m, d_ff), GemmShape(d_ff, m, d)):
                yield shape, block, "vector", 1, jnp.float32
    for shape in (MIDDLE, GemmShape(MIDDLE.m, MIDDLE.n, MIDDLE.k)):
        yield shape, 32, "vector", 1, jnp.bfloat16


def draw_operands(shape: GemmShape, block: int, tile: Tile, halves: int) -> tuple[jax.Array, ...]:
    """(x, its scales, then values and scales of each half of the weight)."""
    x, w = random_operands(shape)
    x_q = block_quantize(x, jnp.float8_e4m3fn, block=block, backend="xla")
    w_q = block_dual_quantize(w, block=block, tile=tile, backend="xla")
    return (x_q.values, x_q.scales, w_q.hi, w_q.scales, w_q.lo, w_q.residual_scales)[: 2 + 2 * halves]


def multiply(*operands: jax.Array, block: int, tile: Tile, out_dtype: Any, backend: Any, config: Any = None) -> Any:
    """The product by a backend, or by the Mosaic kernel with a config."""
    x, w, *lo = (Blocked(*operands[i : i + 2]) for i in range(0, len(operands), 2))
    options: Any = dict(block=block, tile=tile, out_dtype=jnp.dtype(out_dtype))
    if config is None:
        return block_matmul(x, w, lo[0] if lo else None, backend=backend, **options)
    return mosaic.block_matmul(x, w, lo[0] if lo else None, config=config, **options)


def products() -> Iterator[tuple[str, tuple[int, ...], str, Any, Any, Any]]:
    """The arguments of a `tune.Case` for every product."""
    for shape, block, tile, halves, out_dtype in product_forms():
        call = functools.partial(multiply, block=block, tile=tile, out_dtype=out_dtype)
        candidates: list[tuple[Any, Any, Any]] = [("xla", jax.jit(functools.partial(call, backend="xla")), None)]
        for guess in mosaic.candidates(shape.m, shape.k, shape.n, halves, block)[:4]:
            for inner in ("m", "n"):
                config = dataclasses.replace(guess, inner=inner)
                run = jax.jit(functools.partial(call, backend="mosaic", config=config))
                candidates.append(("mosaic", run, config))
        variant = mosaic.variant(halves, block=block, tile=tile, out_dtype=out_dtype)
        draw = functools.partial(draw_operands, shape, block, tile, halves)
        agree = functools.partial(_same_sums, block, tile)
        yield "block_matmul", (shape.m, shape.k, shape.n), variant, draw, candidates, agree


def _same_sums(block: int, tile: Tile, operands: Any, backend: Any, got: Any, expected: Any) -> bool:
    """Whether two products are within their bounds of each other."""
    signless = [
        lax.bitcast_convert_type(lax.bitcast_convert_type(v, jnp.uint8) & 0x7F, v.dtype) if i % 2 == 0 else v
        for i, v in enumerate(operands)
    ]
    magnitude = multiply(*signless, block=block, tile=tile, out_dtype=jnp.float32, backend="xla")
    wide = [v.astype(jnp.float32) for v in (got, expected)]
    rounding = 3 * float(jnp.finfo(got.dtype).eps) / 2
    bound = 2 * SUM_BOUND["mosaic", "full"] * magnitude + rounding * abs(wide[1])
    return bool(np.asarray(jnp.all(jnp.abs(wide[0] - wide[1]) <= bound)))


def quantizers() -> Iterator[tuple[str, tuple[int, int], str, tuple[Any, ...], Any]]:
    """(op, shape, variant, dtypes of the arguments, call) of every quantizer; a second argument is an error."""
    for mlp in H200_SHAPES:
        blocks = BLOCKS if mlp == MIDDLE else (128,)
        orientations: tuple[Orientation, ...] = ("rows", "both")
        for shape, block, orientation in itertools.product(((mlp.m, mlp.k), (mlp.m, mlp.n)), blocks, orientations):
            call = functools.partial(block_quantize, dtype=jnp.float8_e4m3fn, block=block, orientation=orientation)
            yield "block_quantize", shape, f"{orientation} vector {block} bfloat16", (jnp.bfloat16,), call
        for shape, block in itertools.product(((mlp.k, mlp.n), (mlp.n, mlp.k)), blocks):
            single = functools.partial(
                block_quantize, dtype=jnp.float8_e4m3fn, block=block, tile="square", orientation="both"
            )
            yield "block_quantize", shape, f"both square {block} float32", (jnp.float32,), single
            dual = functools.partial(block_dual_quantize, block=block, orientation="both")
            yield "block_dual_quantize", shape, f"both {block} nearest no error", (jnp.float32,), dual
            for dtype in (jnp.float32, jnp.bfloat16):
                variant = f"both {block} nearest error {jnp.dtype(dtype)}"
                yield "block_dual_quantize", shape, variant, (jnp.float32, dtype), dual
