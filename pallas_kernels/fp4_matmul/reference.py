"""The definition of a product with an FP4 weight: operands that are exact in BF16, added in float32.

    contracts "k"    out[..., n] = outer * sum_k x[..., k] * (E2M1[code[n, k]] * scale[n, k])
    contracts "n"    out[..., k] = outer * sum_n g[..., n] * (E2M1[code[n, k]] * scale[n, k])

The product in brackets is a bfloat16 number (`pallas_kernels.fp4`), and so is x, rounded to bfloat16 or to E4M3 with a
scale for each row. On tensor cores products of bfloat16 are exact and their sums float32.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp4, numerics
from pallas_kernels.operands import Fp4, Operand, Quantization, Row
from pallas_kernels.quantize.reference import quantize
from pallas_kernels.tuning import Key

Activation = Literal["bfloat16", "float8_e4m3fn"]
Contracts = Literal["k", "n"]


@dataclass(frozen=True)
class Options:
    """What a product with an FP4 weight is asked for.

    Attributes:
      out_dtype: of the result; the sum is scaled in float32 and rounded to it.
      activation: what x is rounded to.
      contracts: which axis of the weight `[n, k]` is summed over.
      out_sharding: of the result under a mesh with explicit axes, as in `lax.dot_general`.
    """

    out_dtype: Any
    activation: Activation = "bfloat16"
    contracts: Contracts = "k"
    out_sharding: Any = None


def decode(w: Operand, dtype: Any = jnp.bfloat16, factor: float = 1.0) -> jax.Array:
    """`E2M1[code] * scale * factor` of every value, `[n, k]`: exact in bfloat16; `outer` is not in it."""
    n, k = w.shape
    scaling = w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    # The two codes of a byte share their scale. Both become one word: values side by side would be written apart.
    scale = scaling.spread(w.scale, (n, k))[:, ::2] if k % scaling.block else _of_bytes(scaling, w.scale, n)
    word, whole = {1: (jnp.uint8, jnp.uint16), 2: (jnp.uint16, jnp.uint32)}[jnp.dtype(dtype).itemsize]

    def bits(codes: jax.Array) -> jax.Array:
        value = (fp4.numbers(codes) * (scale * factor)).astype(dtype)
        return lax.bitcast_convert_type(value, word).astype(whole)

    pairs = bits(w.values & 15) | bits(w.values >> 4) << (8 * jnp.dtype(dtype).itemsize)
    return lax.bitcast_convert_type(pairs, dtype).reshape(n, k)


def _of_bytes(scaling: Fp4, scale: jax.Array, n: int) -> jax.Array:
    """The scale of every byte of n rows of whole blocks, float32."""
    wide = numerics.decode_e8m0(scale) if scaling.format == "mxfp4" else scale.astype(jnp.float32)
    if scaling.tile == "square":
        wide = jnp.repeat(wide, scaling.block, axis=0)[:n]
    return jnp.broadcast_to(wide[:, :, None], (*wide.shape, scaling.block // 2)).reshape(n, -1)


def scale_bytes(w: Operand) -> jax.Array:
    """The bytes of the scales of every row, uint8 `[n, k / block]`."""
    scales, scaling = lax.bitcast_convert_type(w.scale, jnp.uint8), w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    if scaling.tile == "square":
        # A square's scale is read by every row of it: kernels want it once a row, 0.5 bits a value more.
        scales = jnp.repeat(scales, scaling.block, axis=0)[: w.shape[0]]
    return scales


# Of x in W4A8: E4M3 with a float32 scale for each row, max |x| / 448.
ROWS = Quantization(jnp.dtype(jnp.float8_e4m3fn), Row("float32"))


def quantize_rows(x: jax.Array) -> Operand:
    """X in E4M3, as `ROWS` says."""
    return quantize(ROWS, x, None).rows


def round_activation(x: jax.Array | Operand, activation: Activation) -> tuple[jax.Array, jax.Array | None]:
    """(x in bfloat16, the float32 scale of each row or None): x itself rounded, or the E4M3 values of its rows."""
    if activation == "bfloat16":
        assert not isinstance(x, Operand), "only E4M3 rows are rounded before"
        return x.astype(jnp.bfloat16), None
    rows = x if isinstance(x, Operand) else quantize_rows(x)
    # The barrier keeps XLA on a GPU from deleting the cast to float8 and back.
    return lax.optimization_barrier(rows.values).astype(jnp.bfloat16), rows.scale


def fp4_matmul(options: Options, x: jax.Array | Operand, w: Operand) -> jax.Array:
    """The product, see `api.fp4_matmul`, of x or of its rounded rows."""
    values, scale = round_activation(x, options.activation)
    axes = (((values.ndim - 1,), (1 if options.contracts == "k" else 0,)), ((), ()))

    def in_float32(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
        return lax.dot_general(x, w, axes, precision=lax.Precision.HIGHEST, out_sharding=options.out_sharding)

    def on_tensor_cores(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = jnp.float32
        return lax.dot_general(x, w, axes, preferred_element_type=wide, out_sharding=options.out_sharding)

    if values.size == 0 or w.values.size == 0:
        out = in_float32(values, decode(w))
    else:
        out = lax.platform_dependent(values, decode(w), cuda=on_tensor_cores, default=in_float32)
    return scale_sum(out, scale, w.outer).astype(options.out_dtype)


def scale_sum(out: jax.Array, of_rows: jax.Array | None, outer: jax.Array | None) -> jax.Array:
    """A float32 sum times the scales that are common to all of it."""
    out = out if outer is None else out * outer
    return out if of_rows is None else out * of_rows[..., None]


def key(options: Options, x: jax.Array, w: Operand) -> Key:
    """How `tuned.json` names a product with an FP4 weight."""
    n, k = w.shape
    rows = x.size // max(1, x.shape[-1])
    assert isinstance(w.scaling, Fp4), "api checked it"
    how = f"{w.scaling.format} {w.scaling.tile} {options.activation} {options.contracts}"
    return Key("fp4_matmul", f"{how} {jnp.dtype(options.out_dtype)}", (rows, k, n))
