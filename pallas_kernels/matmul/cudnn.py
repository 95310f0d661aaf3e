"""`matmul` of MXFP8 blocks by cuDNN, on tensor cores that read the scales of blocks.

`jax.nn.scaled_matmul` asks XLA for cuDNN's kernel, and XLA puts the scales into the
order that Blackwell's tensor cores read. It has never run on a GPU: tests compile it
for a B200, and compare its numbers on a CPU. So it runs only if it is named, or was
timed as the fastest.
"""

import jax
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, lacks_block_scales
from pallas_kernels.operands import Block, MatmulOptions, Operand, sizes
from pallas_kernels.specs import has_explicit_axes

_BLOCKS = Block(32, "vector")


def reject_place(k: int, block: int) -> str | None:
    """Return why no product along k in such blocks runs here, or None."""
    reason = lacks_block_scales()
    if reason is not None:
        return reason
    if has_explicit_axes():
        return 'explicit mesh axes for backend="cudnn"; use backend="xla"'
    if k % block or not k:
        return (
            f"k={k} is not a multiple of the block of {block} for"
            ' backend="cudnn"; use backend="xla" or pad'
        )
    return None


def multiply(
    x: Array, w: Array, x_scale: Array, w_scale: Array, out_dtype: DTypeLike
) -> Array:
    """Return the product of values `[m, k]` and `[n, k]` times the scales of blocks."""
    out = jax.nn.scaled_matmul(
        x[None], w[None], x_scale[None], w_scale[None], preferred_element_type=out_dtype
    )
    return out[0]


def _reject(
    options: MatmulOptions, x: Operand, w: Operand, bias: Array | None
) -> str | None:
    if w.scaling != _BLOCKS or w.lo is not None:
        return (
            f"a weight with {w.scaling} and {1 if w.lo is None else 2} halves for"
            f' backend="cudnn", which multiplies one half with {_BLOCKS}; use'
            ' backend="xla"'
        )
    if w.contracts != "last" or options.wire is not None:
        return (
            f"w{list(w.shape)}, which contracts its {w.contracts} axis, and"
            f' wire={options.wire} for backend="cudnn", which contracts last axes and'
            ' adds no partial sums; use backend="xla"'
        )
    return reject_place(w.shape[-1], _BLOCKS.size)


def _matmul(
    options: MatmulOptions, x: Operand, w: Operand, bias: Array | None
) -> Array:
    m, k, n = sizes(x, w)
    values = (x.values.reshape(m, k), w.values.reshape(n, k))
    scales = (x.scale.reshape(m, -1), w.scale.reshape(n, -1))
    out = multiply(*values, *scales, options.out_dtype)
    contracted = w.values.ndim - 1
    out = out.reshape(*x.shape[:-contracted], n)
    return out if bias is None else out + bias.astype(options.out_dtype)


KERNEL = Implementation("cudnn", _matmul, _reject, timed=True)
