"""`fp4_matmul` of two NVFP4 operands by cuDNN, on tensor cores of four bits.

As in `matmul.cudnn`, it compiles for a B200 and has never run on one.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp4_matmul.reference import Fp4Options, scaling_of
from pallas_kernels.matmul.cudnn import multiply, reject_place
from pallas_kernels.operands import Operand


def _reject(options: Fp4Options, x: Array | Operand, w: Operand) -> str | None:
    scalings = [scaling_of(w)]
    if isinstance(x, Operand):
        scalings.append(scaling_of(x))
    else:
        return (
            f'activation={options.activation!r} for backend="cudnn", which multiplies'
            ' two operands of codes; use activation="float4_e2m1fn" or backend="xla"'
        )
    for scaling in scalings:
        if scaling.format != "nvfp4" or scaling.tile != "vector":
            return (
                f'an operand with {scaling} for backend="cudnn", which multiplies'
                ' vectors of NVFP4; use backend="xla"'
            )
    if options.contracts != "k":
        return (
            f'contracts={options.contracts!r} for backend="cudnn", which multiplies'
            ' along "k"; use backend="xla"'
        )
    return reject_place(w.shape[1], scaling_of(w).block)


def _fp4_matmul(options: Fp4Options, x: Operand, w: Operand) -> Array:
    out = multiply(_numbers(x), _numbers(w), x.scale, w.scale, jnp.float32)
    for operand in (x, w):
        if operand.outer is not None:
            out *= operand.outer
    return out.astype(options.out_dtype)


def _numbers(operand: Operand) -> Array:
    """Return codes `[rows, k / 2]` as E2M1 numbers `[rows, k]` of four bits."""
    pairs = lax.bitcast_convert_type(operand.values, jnp.float4_e2m1fn)
    return pairs.reshape(operand.shape)


KERNEL = Implementation("cudnn", _fp4_matmul, _reject, timed=True)
