"""`matmul` in Pallas-Triton: the portable kernel, which a CPU can interpret on any
supported jax.

Each program computes one output tile: it walks k in steps, adds x W_hiᵀ and x W_loᵀ to
one float32 accumulator, and scales, adds the bias and rounds at the end. With a scale
for every block a step is one block of k, and its sum is scaled before it is added:
`total += (x W_hiᵀ + x W_loᵀ) s_x s_w`.

Triton lowers an FP8 product to F16 `mma.sync` (Pallas has no path to Hopper's FP8
`wgmma`), so sums are float32 for either `accumulation`, and a Hopper GPU runs it four
times slower than cuBLASLt. Use it by name on GPUs and for arguments that nothing else
serves; it is never the first choice.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.devices import on_each_device
from pallas_kernels.operands import Block, Operand, Product, Scaling, sizes
from pallas_kernels.specs import varying

_SMALLEST_SIDE = 16  # sides of tiles in Triton's tensor-core products


def _fit(m: int, k: int, n: int, scaling: Scaling) -> tuple[int, int, int] | None:
    """Return the largest tiles of m, n and k up to 128 that divide the shape, one block
    wide along k, or None.
    """
    if isinstance(scaling, Block):
        size = scaling.size
        if k % size or not k or (scaling.tile == "square" and n % size):
            return None
        # A square's scale is one number for a tile of n, which must not cross squares.
        k, n = size, size if scaling.tile == "square" else n
    sides = [
        next((s for s in (128, 64, 32, 16) if size and size % s == 0), 0)
        for size in (m, n, k)
    ]
    return (
        None
        if 0 in sides
        else (sides[0], sides[1], k if isinstance(scaling, Block) else sides[2])
    )


def reject(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None
) -> str | None:
    """Return the reason why this kernel cannot multiply these operands, or None."""
    if x.values.dtype != w.values.dtype:
        return (
            f"Triton multiplies one format, not {x.values.dtype} x {w.values.dtype};"
            ' use backend="xla"'
        )
    m, k, n = sizes(x, w)
    if _fit(m, k, n, w.scaling) is None:
        blocks = (
            f", whole blocks with {w.scaling}" if isinstance(w.scaling, Block) else ""
        )
        return (
            f"m={m}, k={k} and n={n} must be multiples of {_SMALLEST_SIDE}{blocks}; use"
            ' backend="xla" or pad'
        )
    return None


def decline(*args: object) -> str:
    """Return the reason why this kernel is never the first choice."""
    return "F16 mma.sync is slower than the FP8 products of cuBLASLt"


def matmul(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None
) -> jax.Array:
    """Return the product, see `api.matmul`."""
    return on_each_device(_multiply, options, x, w, bias)


def _multiply(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None
) -> jax.Array:
    if _fit(*sizes(x, w), w.scaling) is None:
        return reference.product(options, x, w, bias)
    scaling = w.scaling
    if isinstance(scaling, Block):
        of_x, of_w = (numerics.decode_e8m0(operand.scale) for operand in (x, w))
        # A column of scales for every tile of n: one number a step.
        scales = [of_x, of_w[:, None, :] if scaling.tile == "square" else of_w]
    else:
        scales = [reference.product_scale(x, w).astype(jnp.float32).reshape(1)]
    halves = [half for half in (w.values, w.lo) if half is not None]
    call = functools.partial(_call, scaling, len(halves), options.out_dtype)
    operands = [x.values, *halves, *scales, *([] if bias is None else [bias])]
    return plgpu.on_platform(call, *operands)


def _call(
    scaling: Scaling,
    halves: int,
    out_dtype: DTypeLike,
    *operands: jax.Array,
    interpret: bool,
) -> jax.Array:
    from jax.experimental import pallas as pl

    (m, k), (n, _) = operands[0].shape, operands[1].shape
    sides = _fit(m, k, n, scaling)
    assert sides is not None, "the caller checked"
    tile_m, tile_n, tile_k = sides
    in_blocks = isinstance(scaling, Block)
    squares = isinstance(scaling, Block) and scaling.tile == "square"
    nt = (((1,), (1,)), ((), ()))

    def kernel(x_ref: Any, *refs: Any) -> None:
        w_refs, scale_refs, out_ref = (
            refs[:halves],
            refs[halves : halves + 1 + in_blocks],
            refs[-1],
        )
        bias_refs = refs[halves + 1 + in_blocks : -1]

        def step(i: Any, total: jax.Array) -> jax.Array:
            columns = pl.ds(i * tile_k, tile_k)
            x = x_ref[:, columns]
            part = jnp.zeros((tile_m, tile_n), jnp.float32) if in_blocks else total
            for w_ref in w_refs:
                part = part + lax.dot_general(
                    x, w_ref[:, columns], nt, preferred_element_type=jnp.float32
                )
            if not in_blocks:
                return part
            of_x, of_w = scale_refs
            of_tile = of_w[0, 0, i] if squares else of_w[:, i][None, :]
            return total + part * (of_x[:, i][:, None] * of_tile)

        total = lax.fori_loop(
            0, k // tile_k, step, jnp.zeros((tile_m, tile_n), jnp.float32)
        )
        if not in_blocks:
            total = total * scale_refs[0][0]
        for bias_ref in bias_refs:
            total = total + bias_ref[...][None, :]
        out_ref[...] = total.astype(out_dtype)

    panel = pl.BlockSpec((tile_n, k), lambda i, j: (j, 0))
    specs = [pl.BlockSpec((tile_m, k), lambda i, j: (i, 0)), *[panel] * halves]
    steps = k // tile_k
    if in_blocks:
        specs.append(pl.BlockSpec((tile_m, steps), lambda i, j: (i, 0)))
        square = pl.BlockSpec((1, 1, steps), lambda i, j: (j * tile_n // tile_k, 0, 0))
        specs.append(
            square if squares else pl.BlockSpec((tile_n, steps), lambda i, j: (j, 0))
        )
    else:
        specs.append(pl.BlockSpec((1,), lambda i, j: (0,)))
    if len(operands) > len(specs):
        specs.append(pl.BlockSpec((tile_n,), lambda i, j: (j,)))
    return plgpu.pallas_call(
        kernel,
        out_shape=varying(jax.ShapeDtypeStruct((m, n), out_dtype), *operands),
        grid=(m // tile_m, n // tile_n),
        in_specs=specs,
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if tile_m * tile_n >= 128 * 128 else 4, num_stages=3
        ),
        interpret=interpret,
        name=(
            f"matmul_fp8_{'dual' if halves == 2 else 'single'}{'_blocks' if in_blocks else ''}"
        ),
    )(*operands)
