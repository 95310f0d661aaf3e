"""`fp4_matmul` of a weight that is unpacked once, for many rows of x: XLA's product, in BF16 or on FP8 tensor cores."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul import reference, unpacking
from pallas_kernels.fp4_matmul.reference import Options
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Fp4, Operand, Row, Scaling
from pallas_kernels.quantize.api import quantize


def fp4_matmul(options: Options, x: jax.Array | Operand, w: Operand) -> jax.Array:
    """The product; where codes times scales are E4M3 numbers and x is E4M3 as well, on FP8 tensor cores.

    The rows of x may be rounded already.
    """
    if folds(w.scaling) and options.activation == "float8_e4m3fn":
        return in_fp8(options, x if isinstance(x, Operand) else quantize_rows(x), w)
    return reference.fp4_matmul(options, x, w)


def quantize_rows(x: jax.Array) -> Operand:
    """`reference.quantize_rows`, by a kernel where that was measured to be faster."""
    return quantize(x, reference.ROWS.dtype, reference.ROWS.scaling).rows if x.size else reference.quantize_rows(x)


def folds(scaling: Scaling) -> bool:
    """Whether codes times scales are E4M3 numbers."""
    return isinstance(scaling, Fp4) and scaling.rule == "fold_exact"


def in_fp8(options: Options, x: Operand, w: Operand) -> jax.Array:
    """The product on FP8 tensor cores: x in E4M3, a weight whose codes times scales are such numbers, unpacked once.

    2**-3 brings the largest of them, 6 * 384, into E4M3's range. The format library's scales of "fold_exact" begin at
    2**-3, where the smallest number still is E4M3's; of codes that were made otherwise, smaller ones round.
    """
    outer = jnp.float32(1) if w.outer is None else w.outer
    # FP8 tensor cores of Hopper read both operands along what is summed.
    values = unpacking.unpack(w, turned=options.contracts == "n")
    of_w = Operand(values, jnp.full(values.shape[0], 8.0) * outer, scaling=Row("float32"))
    return matmul(x, of_w, out_dtype=options.out_dtype, out_sharding=options.out_sharding)
