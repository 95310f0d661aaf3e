"""A matmul kernel over whole arrays: matrices of any leading axes, one part on each device, sums where k is split.

Where a device's part is no multiple of the kernel's tiles, the reference multiplies it; the whole product was.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import device_kind
from pallas_kernels.matmul import reference
from pallas_kernels.partition import partitioned

# (x[m, k], halves [n, k], scale [1], bias [n] or None, dtype of the result) -> [m, n]
Multiply = Callable[[jax.Array, Sequence[jax.Array], jax.Array, jax.Array | None, Any], jax.Array]


def on_each_device(
    multiply: Multiply,
    fits: Callable[[int, int, int], bool],
    operands: tuple[jax.Array, jax.Array, jax.Array | None],
    *,
    scale: jax.Array,
    bias: jax.Array | None,
    out_dtype: Any,
    accumulation: str,
    interpreter: Literal["pure", "calls back"] = "pure",
) -> jax.Array:
    """Run `multiply` on x `[..., k]` and weights `[n, *k]`; `fits(m, k, n)` says whether the kernel takes a part.

    A kernel whose interpreter "calls back" into Python has a side effect, which a partitioned function cannot have: on
    CPUs it runs unpartitioned.
    """
    x, w, w_lo = operands
    m, k, n = reference.sizes(x, w)
    halves = [half.reshape(n, k) for half in (w, w_lo) if half is not None]
    vectors = [v.astype(jnp.float32).reshape(-1) for v in (scale, bias) if v is not None]

    def local(x: jax.Array, *rest: jax.Array, summed_over: tuple[str, ...]) -> jax.Array:
        parts, (scale, *biases) = rest[: len(halves)], rest[len(halves) :]
        added = biases[0] if biases else None
        before, dtype = (added, out_dtype) if not summed_over else (None, jnp.float32)
        if fits(x.shape[0], x.shape[1], parts[0].shape[0]):
            out = multiply(x, parts, scale, before, dtype)
        else:
            lo = parts[1] if len(parts) == 2 else None
            out = reference.matmul(
                x, parts[0], lo, scale=scale[0], bias=before, out_dtype=dtype, accumulation=accumulation,
                out_sharding=None,
            )  # fmt: skip
        if not summed_over:
            return out
        # Summed in float32 and rounded once.
        out = lax.psum(out, summed_over)
        return (out if added is None else out + added).astype(out_dtype)

    weights = ", n k" * len(halves)
    rule = f"m k{weights}, u{', n' if bias is not None else ''} -> m n"
    whole = interpreter == "calls back" and device_kind() == "cpu"
    call = functools.partial(local, summed_over=()) if whole else partitioned(local, rule)
    return call(x.reshape(m, k), *halves, *vectors).reshape(*x.shape[: x.ndim - (w.ndim - 1)], n)
