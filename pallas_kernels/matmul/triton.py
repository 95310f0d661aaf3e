"""`matmul` in Pallas-Triton: the portable kernel, which any CPU can interpret.

Each program computes one output tile: it walks k in steps, adds x W_hiᵀ and x W_loᵀ to
one float32 accumulator, and scales, adds the bias and rounds at the end. With a scale
for every block a step is one block of k, and its sum is scaled before it is added:
`total += (x W_hiᵀ + x W_loᵀ) s_x s_w`.

Triton lowers an FP8 product to F16 `mma.sync` (Pallas has no path to Hopper's FP8
`wgmma`), so sums are float32 for either `accumulation`, and a Hopper GPU runs it four
times slower than cuBLASLt. Use it by name on GPUs and for arguments that nothing else
serves; it is never the first choice.
"""

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.dispatch import Implementation
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.devices import on_each_device
from pallas_kernels.operands import Block, MatmulOptions, Operand, Scaling, sizes
from pallas_kernels.specs import varying

Ref: TypeAlias = Any  # reference to memory
_SMALLEST_SIDE = 16  # sides of tiles in Triton's tensor-core products


def _fit(m: int, k: int, n: int, scaling: Scaling) -> tuple[int, int, int] | None:
    """Return the largest tiles of m, n and k up to 128 that divide the shape, or None.

    A tile is one block wide along k.
    """
    tile_k = _largest_side(k)
    if isinstance(scaling, Block):
        tile_k = scaling.size
        if k == 0 or k % tile_k:
            return None
        if scaling.squares:
            if n % tile_k:
                return None
            # A square's scale is one number for a tile of n, which must not cross
            # squares.
            n = tile_k
    sides = (_largest_side(m), _largest_side(n), tile_k)
    return None if 0 in sides else sides


def _largest_side(size: int) -> int:
    """Return the largest side of a tile that divides a size, or 0."""
    for side in (128, 64, 32, _SMALLEST_SIDE):
        if size and size % side == 0:
            return side
    return 0


def _reject(
    options: MatmulOptions, x: Operand, w: Operand, bias: Array | None
) -> str | None:
    """Return the reason why this kernel cannot multiply these operands, or None."""
    if x.values.dtype != w.values.dtype:
        return (
            f"Triton multiplies one format, not {x.values.dtype} x {w.values.dtype};"
            ' use backend="xla"'
        )
    m, k, n = sizes(x, w)
    if _fit(m, k, n, w.scaling) is None:
        blocks = f", whole blocks with {w.scaling}" if w.scaling.in_blocks else ""
        return (
            f"m={m}, k={k} and n={n} must be multiples of {_SMALLEST_SIDE}{blocks}; use"
            ' backend="xla" or pad'
        )
    return None


def _decline(*args: object) -> str:
    return "F16 mma.sync is slower than the FP8 products of cuBLASLt"


def _matmul(
    options: MatmulOptions, x: Operand, w: Operand, bias: Array | None
) -> Array:
    """Return the product, see `api.matmul`."""
    return on_each_device(_multiply, options, x, w, bias)


KERNEL = Implementation("triton", _matmul, _reject, _decline)


def _multiply(
    options: MatmulOptions, x: Operand, w: Operand, bias: Array | None
) -> Array:
    if _fit(*sizes(x, w), w.scaling) is None:
        return reference.product(options, x, w, bias)
    if w.scaling.in_blocks:
        of_x = numerics.decode_e8m0(x.scale)
        of_w = numerics.decode_e8m0(w.scale)
        if w.scaling.squares:
            # A column of scales for every tile of n: one number a step.
            of_w = of_w[:, None, :]
        scales = [of_x, of_w]
    else:
        scales = [reference.product_scale(x, w).astype(jnp.float32).reshape(1)]
    halves = 1 if w.lo is None else 2
    call = partial(_call, w.scaling, halves, options.out_dtype)
    operands = [x.values, w.values, w.lo, *scales, bias]
    return plgpu.on_platform(call, *[a for a in operands if a is not None])


def _call(
    scaling: Scaling,
    halves: int,
    out_dtype: DTypeLike,
    *operands: Array,
    interpret: bool,
) -> Array:
    from jax.experimental import pallas as pl

    m, k = operands[0].shape
    n = operands[1].shape[0]
    sides = _fit(m, k, n, scaling)
    assert sides is not None, "the caller checked"
    tile_m, tile_n, tile_k = sides
    steps = k // tile_k
    w_panel = pl.BlockSpec((tile_n, k), lambda i, j: (j, 0))
    specs = [pl.BlockSpec((tile_m, k), lambda i, j: (i, 0)), *[w_panel] * halves]
    if not scaling.in_blocks:
        specs.append(pl.BlockSpec((1,), lambda i, j: (0,)))
    else:
        specs.append(pl.BlockSpec((tile_m, steps), lambda i, j: (i, 0)))
        of_w = pl.BlockSpec((tile_n, steps), lambda i, j: (j, 0))
        if scaling.squares:
            of_w = pl.BlockSpec(
                (1, 1, steps), lambda i, j: (j * tile_n // tile_k, 0, 0)
            )
        specs.append(of_w)
    if len(operands) > len(specs):
        specs.append(pl.BlockSpec((tile_n,), lambda i, j: (j,)))
    form = "dual" if halves == 2 else "single"
    return plgpu.pallas_call(
        partial(_kernel, scaling, halves, tile_k),
        out_shape=varying(jax.ShapeDtypeStruct((m, n), out_dtype), *operands),
        grid=(m // tile_m, n // tile_n),
        in_specs=specs,
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if tile_m * tile_n >= 128 * 128 else 4, num_stages=3
        ),
        interpret=interpret,
        name=f"matmul_fp8_{form}{'_blocks' if scaling.in_blocks else ''}",
    )(*operands)


def _kernel(scaling: Scaling, halves: int, tile_k: int, x: Ref, *refs: Ref) -> None:
    """Compute one output tile."""
    from jax.experimental import pallas as pl

    in_blocks = scaling.in_blocks
    w = refs[:halves]
    *rest, out = refs[halves:]
    scales = rest[: 1 + in_blocks]
    bias = rest[1 + in_blocks :]

    def multiply(step: Array, total: Array) -> Array:
        """Add the products of a step with all halves of w."""
        columns = pl.ds(step * tile_k, tile_k)
        x_tile = x[:, columns]
        for half in w:
            total = total + lax.dot_general(
                x_tile,
                half[:, columns],
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
        return total

    def multiply_block(step: Array, total: Array) -> Array:
        part = multiply(step, jnp.zeros(out.shape, jnp.float32))
        of_x, of_w = scales
        if scaling.squares:
            of_tile = of_w[0, 0, step]
        else:
            of_tile = of_w[:, step][None, :]
        return total + part * (of_x[:, step][:, None] * of_tile)

    steps = x.shape[1] // tile_k
    add = multiply_block if in_blocks else multiply
    total = lax.fori_loop(0, steps, add, jnp.zeros(out.shape, jnp.float32))
    if not in_blocks:
        total = total * scales[0][0]
    for ref in bias:
        total = total + ref[...][None, :]
    out[...] = total.astype(out.dtype)
