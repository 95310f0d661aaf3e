"""`quantize_fp4`: a matrix as an FP4 operand.

The format library rounds, and this module lays out codes and scales.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.operands import Fp4, Operand, check_real
from tcfp_jax.formats.datatypes import DataType, datatype
from tcfp_jax.formats.nvfp4_arrays import ScaleRule, quantize_nvfp4
from tcfp_jax.formats.packing import pack


def _datatype_of(scaling: Fp4) -> DataType:
    size = f"t{scaling.block}"
    tile = size if scaling.tile == "vector" else f"{size}_{size}"
    if scaling.format == "mxfp4":
        return datatype("e2m1f", f"e8m0_{tile}")
    if scaling.rule == "one_level":
        return datatype("e2m1f", f"e4m3fn_{tile}")
    return datatype("e2m1f", f"e4m3fn_{tile}_float32")


def quantize_fp4(w: Array, scaling: Fp4 = Fp4()) -> Operand:
    """Quantize a matrix, contracted along its last axis, to E2M1 codes in blocks.

    Use this for an operand of `pallas_kernels`; use `tcfp_jax.products.pack_fp4`
    instead for a weight of a model.

    Args:
      w: real floats `[..., n, k]`; each matrix of a stack has its own `outer`. k is
        even; a last block may be short.
      scaling: format, tile and rule.

    Returns:
      An `Operand` whose `values` are uint8 `[..., n, k / 2]`. A NaN or inf makes its
        block NaN.

    Raises:
      TypeError: w is not real floating point, or the scaling is not an `Fp4`.
      ValueError: w has fewer than two axes, or k is odd.

    >>> w = jnp.array([[6.0, -3.0, 0.5, 0.0], [6.0, 1.0, 0.0, 2.0]])
    >>> packed = quantize_fp4(w)
    >>> packed.shape, packed.values.dtype
    ((2, 4), dtype('uint8'))
    >>> bool(jnp.allclose(packed.dequantize(), w))
    True
    """
    w = check_matrix(w, scaling)
    packed = functools.partial(_matrix, scaling)
    for _ in range(w.ndim - 2):
        packed = jax.vmap(packed)
    return packed(w)


def check_matrix(w: Array, scaling: Fp4) -> Array:
    """Return `w` as an array if it is a matrix, or a stack, that packs into bytes."""
    w = jnp.asarray(w)
    check_real("w", w)
    if not isinstance(scaling, Fp4):
        raise TypeError(
            f'scaling={scaling!r} is not FP4; use Fp4("nvfp4") or Fp4("mxfp4") of'
            " pallas_kernels.operands"
        )
    if w.ndim < 2:
        raise ValueError(
            f"w{list(w.shape)} is not a matrix [n, k]; give it two axes, of which"
            " products contract k"
        )
    if w.shape[-1] % 2:
        raise ValueError(
            f"k={w.shape[-1]} of w{list(w.shape)} is odd, but a byte holds two codes;"
            " pad k with zeros"
        )
    return w


def _matrix(scaling: Fp4, w: Array) -> Operand:
    if w.size == 0:
        return _empty(scaling, w)
    padded = _padded(scaling, w)
    rule = scaling.rule
    in_vectors = scaling.format == "nvfp4" and scaling.tile == "vector"
    if in_vectors and rule != "one_level":
        return _in_vectors(scaling, rule, padded, w.shape[1])
    return _packed(scaling, padded, w.shape)


def _empty(scaling: Fp4, w: Array) -> Operand:
    n, k = w.shape
    codes = jnp.zeros((n, k // 2), jnp.uint8)
    scale = jnp.zeros(scaling.scale_shape((n, k)), scaling.scale_dtype)
    outer = jnp.ones((), jnp.float32) if scaling.has_outer else None
    return Operand(codes, scale, scaling=scaling, outer=outer)


def _padded(scaling: Fp4, w: Array) -> Array:
    """Return w with axes of a tile's length at least, and NaN for infinities.

    Zeros do not change a block's largest value. Casts saturate infinities, which must
    be seen in a weight.
    """
    n, k = w.shape
    rows = max(0, scaling.block - n) if scaling.tile == "square" else 0
    columns = max(0, scaling.block - k)
    finite = jnp.where(jnp.isfinite(w), w, jnp.nan)
    return jnp.pad(finite, [(0, rows), (0, columns)])


def _in_vectors(scaling: Fp4, rule: ScaleRule, padded: Array, k: int) -> Operand:
    """Return NVFP4 codes in vectors, whose scales have a scale of the whole matrix."""
    found = quantize_nvfp4(padded, rule=rule)
    codes = found.codes[:, : k // 2]
    outer = _above_zero(found.outer)
    return Operand(codes, found.scales, scaling=scaling, outer=outer)


def _packed(scaling: Fp4, padded: Array, shape: tuple[int, ...]) -> Operand:
    """Return the codes and scales of `formats.pack`."""
    n, k = shape
    options: dict[str, Any] = {}
    if scaling.rule not in ("amax", "one_level"):
        options["scalemode"] = scaling.rule
    packed = pack(padded, _datatype_of(scaling), **options)
    assert packed.scales is not None, "FP4 has scales"
    scales = packed.scales.reshape(scaling.scale_shape((n, k)))
    outer = None
    if packed.outer is not None:
        of_bytes = packed.outer.reshape(4)
        outer = _above_zero(lax.bitcast_convert_type(of_bytes, jnp.float32))
    elif scaling.has_outer:
        outer = jnp.ones((), jnp.float32)
    values = packed.values.reshape(padded.shape[0], padded.shape[1] // 2)
    return Operand(
        values[:n, : k // 2],
        lax.bitcast_convert_type(scales, scaling.scale_dtype),
        scaling=scaling,
        outer=outer,
    )


def _above_zero(outer: Array) -> Array:
    """Return the scale of the scales, or 1 for a weight of zeros.

    Files hold its reciprocal.
    """
    return jnp.where(outer == 0, jnp.float32(1), outer)
