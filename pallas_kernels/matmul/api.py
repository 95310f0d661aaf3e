"""`matmul`: the product of an FP8 tensor with one or two FP8 weights, accumulated in float32."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.matmul import mosaic, reference, triton

Accumulation = Literal["fast", "full"]

# c of |out - exact| <= c * scale * sum_k |x| |w + w_lo|, before the output is rounded, on tensor cores. Their
# accumulator keeps about 14 bits of each addend and truncates: "fast" sums all of k there, "full" 128 of it at a time,
# or 256 in the Mosaic kernel's products with one half. With two it adds both in one accumulator, which cuts more off
# the small one. Triton adds in float32. Measured on an H200 for k from 512 to 16384 (LOG.md): the worst were 2**-11.7,
# 2**-13.7, 2**-10.3 and 2**-12.
SUM_BOUND: dict[tuple[Backend, Accumulation], float] = {
    ("xla", "fast"): 2.0**-11, ("xla", "full"): 2.0**-13,
    ("mosaic", "fast"): 2.0**-10, ("mosaic", "full"): 2.0**-11,
    ("triton", "fast"): 2.0**-13, ("triton", "full"): 2.0**-13,
}  # fmt: skip

IMPLEMENTATIONS = (
    Implementation("mosaic", mosaic.matmul, mosaic.reject, mosaic.decline, mosaic.configure),
    Implementation("triton", triton.matmul, triton.reject, triton.decline),
    Implementation("xla", reference.matmul),
)


def matmul(
    x: jax.Array,
    w: jax.Array,
    w_lo: jax.Array | None = None,
    *,
    scale: jax.Array,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    accumulation: Accumulation = "fast",
    out_sharding: Any = None,
    backend: Backend | None = None,
) -> jax.Array:
    """`x @ (w + w_lo).T * scale + bias`, both operands contracted along their last axes.

    `out[..., n] = scale * sum_k x[..., k] * (w[n, k] + w_lo[n, k]) + bias[n]`. A weight of more than two axes,
    `[n, *m]`, is contracted over all but its first, with the same trailing axes of `x`: the form of a weight gradient.

    Args:
      x: FP8 `[..., k]`.
      w, w_lo: FP8 `[n, k]`, one format; `w_lo` shares the scale of `w`.
      scale: scalar, the product of the operands' scales, float32. A power of two may come as bfloat16, which says that
        it is exact there: cuBLASLt then applies it, where a float32 scale costs a pass over a bfloat16 output.
      bias: real floats `[n]`; XLA adds it in `out_dtype`, the kernels before they round to it.
      out_dtype: a real float; the sum is scaled in float32 and then rounded to it.
      accumulation: "fast" adds in the tensor core's own accumulator (about 14 bits of each addend survive), "full"
        promotes to float32 during the sum; `SUM_BOUND` says what each is worth. Both are exact float32 where there
        are no FP8 tensor cores.
      out_sharding: sharding of the result under an explicit mesh, as in `lax.dot_general`.

    Returns:
      `[..., n]` in `out_dtype`. Sizes that are not multiples of 16 work; cuBLASLt then pads a copy of the operands.

    Raises:
      TypeError: an operand is not FP8, or the two halves of the weight differ in format.
      ValueError: contracted sizes differ, bias is not `[n]`, or `accumulation` or `backend` is unknown.
      NotImplementedError: E5M2 x E5M2, which no tensor core multiplies; or what the named backend cannot run.

    >>> one = jnp.ones((2, 16), jnp.float8_e4m3fn)
    >>> matmul(one, one, scale=jnp.float32(0.5)).tolist()
    [[8.0, 8.0], [8.0, 8.0]]
    """
    _check_operands(x, w, w_lo)
    if accumulation not in ("fast", "full"):
        raise ValueError(f'accumulation={accumulation!r} is unknown; use "fast" or "full"')
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}, but w{list(w.shape)} has n={w.shape[0]} outputs")
    options = dict(
        scale=scale, bias=bias, out_dtype=jnp.dtype(out_dtype), accumulation=accumulation, out_sharding=out_sharding
    )
    return dispatch("matmul", IMPLEMENTATIONS, backend, x, w, w_lo, **options)


def _check_operands(x: jax.Array, w: jax.Array, w_lo: jax.Array | None) -> None:
    contracted = w.ndim - 1
    if contracted < 1 or x.ndim < contracted or x.shape[x.ndim - contracted :] != w.shape[1:]:
        raise ValueError(
            f"x{list(x.shape)} and w{list(w.shape)} must agree in the axes after w's first; transpose or reshape one"
        )
    if w_lo is not None and (w_lo.shape != w.shape or w_lo.dtype != w.dtype):
        raise ValueError(
            f"w_lo is {w_lo.dtype}{list(w_lo.shape)}, but w is {w.dtype}{list(w.shape)}; both halves must match"
        )
    e5m2 = jnp.dtype(jnp.float8_e5m2)
    if numerics.float8_dtype(x.dtype) == e5m2 and numerics.float8_dtype(w.dtype) == e5m2:
        raise NotImplementedError(
            "float8_e5m2 x float8_e5m2: no tensor core multiplies it; make one operand float8_e4m3fn"
        )
