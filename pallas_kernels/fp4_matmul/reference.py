"""The definition of a product with an FP4 weight: exact in BF16, added in float32.

    contracts "k"   out[..., n] = outer * sum_k x[..., k] (E2M1[code[n, k]] scale[n, k])
    contracts "n"   out[..., k] = outer * sum_n g[..., n] (E2M1[code[n, k]] scale[n, k])

The product in brackets is a bfloat16 number (`pallas_kernels.fp4`). So is x, which is
rounded to bfloat16, or to E4M3 with a scale for each row. Tensor cores multiply
bfloat16 exactly and add in float32.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import fp4
from pallas_kernels.operands import Fp4, Operand, Quantization, Row
from pallas_kernels.quantize.reference import quantize
from pallas_kernels.specs import Sharding
from pallas_kernels.tuning import Key

ActivationFormat = Literal["bfloat16", "float8_e4m3fn", "float4_e2m1fn"]
# X in W4A8: E4M3 with a float32 scale for each row, max |x| / 448.
ROWS = Quantization(jnp.dtype(jnp.float8_e4m3fn), Row("float32"))
# Codes times scales are stored in E4M3 times this factor, which brings the largest one,
# 6 * 448, into its range.
E4M3_FACTOR = 2.0**-3
# A word of one value and a word of two, by the bits of a value.
_WORDS = {8: (jnp.uint8, jnp.uint16), 16: (jnp.uint16, jnp.uint32)}


@dataclass(frozen=True)
class Fp4Options:
    """Static options of a product with an FP4 weight.

    Attributes:
      out_dtype: dtype of the result; the sum is scaled in float32 and rounded to it.
      activation: format to which x is rounded.
      contracts: axis of the weight `[n, k]` that is summed over.
      out_sharding: sharding of the result under a mesh with explicit axes, as in
        `lax.dot_general`.
    """

    out_dtype: np.dtype
    activation: ActivationFormat = "bfloat16"
    contracts: Literal["k", "n"] = "k"
    out_sharding: Sharding = None


def decode(w: Operand, dtype: DTypeLike = jnp.bfloat16, factor: float = 1.0) -> Array:
    """Return `E2M1[code] * scale * factor` of every value, `[n, k]`, without `outer`.

    The values are exact in bfloat16.
    """
    n, k = w.shape
    scale = _scale_of_bytes(w)
    bits = 8 * jnp.dtype(dtype).itemsize
    word, pair = _WORDS[bits]

    def value(codes: Array) -> Array:
        rounded = (fp4.numbers(codes) * (scale * factor)).astype(dtype)
        return lax.bitcast_convert_type(rounded, word).astype(pair)

    # A byte's two values are written as one word: XLA would write values that lie side
    # by side apart.
    pairs = value(w.values & 15) | value(w.values >> 4) << bits
    return lax.bitcast_convert_type(pairs, dtype).reshape(n, k)


def _scale_of_bytes(w: Operand) -> Array:
    """Return the scale of every byte of codes, which its two codes share.

    It is float32 `[n, k / 2]`.
    """
    scaling = scaling_of(w)
    n, k = w.shape
    if k % scaling.block:
        return scaling.spread(w.scale, (n, k))[:, ::2]
    scale = scaling.in_float32(w.scale)
    if scaling.tile == "square":
        scale = jnp.repeat(scale, scaling.block, axis=0)[:n]
    wide = (*scale.shape, scaling.block // 2)
    return jnp.broadcast_to(scale[:, :, None], wide).reshape(n, -1)


def unpack(turned: bool, w: Operand) -> Array:
    """Return a weight times `E4M3_FACTOR` in E4M3: `[n, k]`, or turned `[k, n]`."""
    values = decode(w, jnp.float8_e4m3fn, E4M3_FACTOR)
    return values.T if turned else values


def scaling_of(w: Operand) -> Fp4:
    """Return the scaling of an FP4 operand."""
    assert isinstance(w.scaling, Fp4), "api checked it"
    return w.scaling


def scale_bytes(w: Operand) -> Array:
    """Return the bytes of every row's scales, uint8 `[n, k / block]`, for kernels.

    The scale of a square is repeated for each of its rows, which costs 0.5 bits a
    value.
    """
    scaling = scaling_of(w)
    scales = lax.bitcast_convert_type(w.scale, jnp.uint8)
    if scaling.tile == "vector":
        return scales
    return jnp.repeat(scales, scaling.block, axis=0)[: w.shape[0]]


def e4m3_table() -> np.ndarray:
    """Return E2M1's magnitudes times every scale byte times `E4M3_FACTOR`, in E4M3.

    The table is uint32 `[512]`. A scale byte has 8 bytes, two words. They are rounded
    to nearest even, as `decode` rounds them; scales of the rule "fold_exact" make only
    subnormal numbers round.
    """
    e4m3 = jnp.dtype(jnp.float8_e4m3fn)
    scale = np.arange(256, dtype=np.uint8).view(e4m3).astype(np.float32)
    exact = np.multiply.outer(scale * np.float32(E4M3_FACTOR), fp4.E2M1[:8])
    rows = exact.astype(e4m3)
    return rows.view(np.uint32).reshape(-1)


def quantize_rows(x: Array) -> Operand:
    """Return x in E4M3 with a scale for each row, as `ROWS` says."""
    return quantize(ROWS, x, None).rows


def dimensions(options: Fp4Options, ndim: int) -> lax.DotDimensionNumbers:
    """Return the axes of a product with x of `ndim` axes, as for `lax.dot_general`."""
    of_w = 1 if options.contracts == "k" else 0
    return ((ndim - 1,), (of_w,)), ((), ())


def fp4_matmul(options: Fp4Options, x: Array | Operand, w: Operand) -> Array:
    """Return the product, see `api.fp4_matmul`; rows of x may be rounded already."""
    if options.activation == "bfloat16":
        assert not isinstance(x, Operand), "only E4M3 rows are rounded before"
        out = _in_bf16(options, x.astype(jnp.bfloat16), w)
    else:
        rows = x if isinstance(x, Operand) else quantize_rows(x)
        # The barrier keeps XLA on a GPU from deleting the cast to float8 and back.
        values = lax.optimization_barrier(rows.values).astype(jnp.bfloat16)
        out = _in_bf16(options, values, w) * rows.scale[..., None]
    return out.astype(options.out_dtype)


def _in_bf16(options: Fp4Options, x: Array, w: Operand) -> Array:
    """Return the product with x in bfloat16, added in float32."""
    multiply = partial(
        lax.dot_general,
        dimension_numbers=dimensions(options, x.ndim),
        out_sharding=options.out_sharding,
    )

    def in_float32(x: Array, w: Array) -> Array:
        wide = (array.astype(jnp.float32) for array in (x, w))
        return multiply(*wide, precision=lax.Precision.HIGHEST)

    def on_tensor_cores(x: Array, w: Array) -> Array:
        return multiply(x, w, preferred_element_type=jnp.float32)

    if x.size == 0 or w.values.size == 0:
        out = in_float32(x, decode(w))
    else:
        out = lax.platform_dependent(
            x, decode(w), cuda=on_tensor_cores, default=in_float32
        )
    return out if w.outer is None else out * w.outer


def key(options: Fp4Options, x: Array | Operand, w: Operand) -> Key:
    """Return the name of a product in `tuned.json`."""
    n, k = w.shape
    scaling = scaling_of(w)
    rows = math.prod(x.shape[:-1])
    how = f"{scaling.format} {scaling.tile} {options.activation} {options.contracts}"
    return Key("fp4_matmul", f"{how} {jnp.dtype(options.out_dtype)}", (rows, k, n))
