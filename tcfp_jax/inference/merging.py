"""`quantize_merged`: weights with merged adapters, rounded so that the adapters' change
stays.

A frozen weight lies on the grid of its format. Adapters move it by less than half a
step, so rounding to nearest gives the frozen weight back. Here the columns of W + A B
are rounded one after another, and each makes up for the errors of earlier ones in the
directions A that the adapters read:

    minimize over q_j, ..., q_k:  |Aᵀ (q - w)|² + 0.1 |q - w|²
    P_j = (0.1 I + sum of A_l A_lᵀ over l >= j)⁻¹
    c = 0
    for j = 1 .. k:
        q_j = nearest(w_j - A_jᵀ P_j c)
        c = c + (q_j - w_j) A_j

`<q - w, A B>` is `<Aᵀ (q - w), B>`, so the change keeps its length, and its products
with the inputs that adapters read. This is GPTQ with the Hessian A Aᵀ + 0.1 I, in r
operations per weight instead of k. It needs no data.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import numerics
from pallas_kernels.fp4 import pack
from pallas_kernels.operands import Fp4, Operand, Scaling
from pallas_kernels.quantize.api import quantize
from tcfp_jax.formats.encoding import encode
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_arrays import nearest
from tcfp_jax.weights.fp4_packing import quantize_fp4

# Weight of errors outside of the directions, relative to those inside. The loss of a
# small model is flat from 0.03 to 0.3.
_OUTSIDE = 0.1


def quantize_merged(w: Array, directions: Array, scaling: Scaling) -> Operand:
    """Quantize weights so that their products with some directions stay exact.

    Use this for frozen weights with merged adapters, as `quantize` of
    `quantize_together`. The scales are those of the scaling's rule.

    Args:
      w: real floats `[..., n, k]`, contracted along k.
      directions: `[..., k, r]`, such as the first matrices of adapters; r is much
        smaller than k.
      scaling: `Fp4(...)` in vectors, or an FP8 scaling of `pallas_kernels.operands`.

    Raises:
      TypeError, ValueError: as `quantize_fp4`, or `quantize` of `pallas_kernels`.

    >>> w = jnp.full((1, 64), 6.0).at[0, 1:].set(1.1)
    >>> ones = jnp.ones((64, 1))
    >>> made = quantize_merged(w, ones, Fp4("nvfp4"))
    >>> round(float((made.dequantize() @ ones)[0, 0]), 1), round(float(w.sum()), 1)
    (75.5, 75.3)
    """
    one = functools.partial(_quantized, scaling)
    for _ in range(w.ndim - 2):
        one = jax.vmap(one)
    return jax.jit(one)(w, directions)


def round_merged(w: Array, directions: Array) -> Array:
    """Round weights to bfloat16 numbers, as `quantize_merged`; the result is float32.

    >>> round_merged(jnp.full((1, 2), 1.001), jnp.ones((2, 1))).tolist()
    [[1.0, 1.0]]
    """

    def one(w: Array, directions: Array) -> Array:
        return _compensated(w, directions, jnp.ones_like(w), _to_bfloat16)

    for _ in range(w.ndim - 2):
        one = jax.vmap(one)
    return jax.jit(one)(w, directions)


def _quantized(scaling: Scaling, w: Array, directions: Array) -> Operand:
    w = w.astype(jnp.float32)
    if not isinstance(scaling, Fp4):
        by_rule = quantize(w, jnp.float8_e4m3fn, scaling).rows
        numbers = _compensated(w, directions, by_rule.scale_of_values(), _to_e4m3)
        return dataclasses.replace(by_rule, values=numbers.astype(by_rule.dtype))
    by_rule = quantize_fp4(w, scaling)
    numbers = _compensated(w, directions, by_rule.scale_of_values(), _to_e2m1)
    codes = encode(numbers, number("e2m1f")).astype(jnp.uint8)
    return dataclasses.replace(by_rule, values=pack(codes))


def _to_e2m1(x: Array, scale: Array) -> Array:
    return jnp.copysign(nearest(jnp.abs(x), scale), x)


def _to_e4m3(x: Array, scale: Array) -> Array:
    return numerics.round_to(x / scale, jnp.float8_e4m3fn)


def _to_bfloat16(x: Array, scale: Array) -> Array:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _compensated(
    w: Array,
    directions: Array,
    scale: Array,
    nearest_to: Callable[[Array, Array], Array],
) -> Array:
    """Return the numbers of a matrix `[n, k]` in units of its scales."""
    a = directions.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(jnp.square(a)) * a.shape[1])
    a = a / jnp.where(size > 0, size, 1)

    def column(left: Array, one: tuple[Array, ...]) -> tuple[Array, Array]:
        mine, own_scale, direction, gain = one
        number = nearest_to(mine - left @ gain, own_scale)
        error = number * own_scale - mine
        # A NaN is in its own block alone
        error = jnp.where(jnp.isfinite(error), error, 0)
        return left + error[:, None] * direction, number

    scale = jnp.broadcast_to(scale, w.shape)
    start = jnp.zeros((w.shape[0], a.shape[1]))
    columns = (w.T, scale.T, a, _gains(a))
    _, numbers = lax.scan(column, start, columns)
    return numbers.T


def _gains(a: Array) -> Array:
    """Return P_j A_j of each column j, `[k, r]`.

    P_j follows from P_(j + 1) by the formula of Sherman and Morrison.
    """

    def step(inverse: Array, one: Array) -> tuple[Array, Array]:
        turned = inverse @ one
        gain = turned / (1 + one @ turned)
        return inverse - gain[:, None] * turned, gain

    start = jnp.eye(a.shape[1]) / _OUTSIDE
    _, gains = lax.scan(step, start, a, reverse=True)
    return gains
