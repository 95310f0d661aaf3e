"""One weight as the arrays of a compressed-tensors file, and back.

A weight `X.weight` `[n, k]` (out, in) becomes

    Fp4("nvfp4")  X.weight_packed        uint8 [n, k/2]
                  X.weight_scale         E4M3 [n, k/16]
                  X.weight_global_scale  float32 [1]
    Fp4("mxfp4")  X.weight_packed        uint8 [n, k/2]
                  X.weight_scale         uint8 [n, k/32], the exponents of E8M0
    FP8           X.weight               E4M3 [n, k]
                  X.weight_scale         float32 [1] (`Tensor`), [n, 1] (`Row`), or one
                                         for each square (`Block`)

Byte j of a row holds the codes 2j (low half) and 2j + 1. The global scale is a divisor,
`value = code * scale / global`, whereas `Operand.outer` is a multiplier.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.operands import (
    SCALE_DTYPE,
    Block,
    Fp4,
    Operand,
    Row,
    Scaling,
    Tensor,
)
from tcfp_jax.inference.folders import Json
from tcfp_jax.inference.safetensors import (
    COPY,
    FLOAT8,
    MXFP4,
    NVFP4,
    Arrays,
    Held,
)
from tcfp_jax.inference.shared_scales import check_rule
from tcfp_jax.weights.stored import Stored

# A weight with larger values is suspect: this is the largest float16.
_LARGEST_WEIGHT = float(np.finfo(np.float16).max)
_LARGEST_CODE = 6.0
_E4M3_NAN = 0x7F
_E8M0_NAN = 0xFF
_SIZES = np.uint8(0x77)  # the bits of a byte of two codes without their signs
_TINY = np.finfo(np.float32).tiny
_HUGE = np.finfo(np.float32).max


def matrix_of(name: str, weight: Operand | Stored) -> Operand:
    """Return the matrix `[n, k]` that a file holds for a weight.

    Raises:
      TypeError: compressed-tensors does not have its format.
      ValueError: its name, its axes or its blocks do not fit a file.
    """
    operand = weight.for_forward("hi") if isinstance(weight, Stored) else weight
    operand = operand.settled()
    scaling = operand.scaling
    if not scaling.packed:
        operand = operand.drop_residual()
    if not name.endswith(".weight"):
        raise ValueError(
            f"{name} is quantized, but does not end in .weight, as torch names weights;"
            " add it"
        )
    if operand.values.ndim != 2:
        raise ValueError(
            f"{name} is a stack {list(operand.shape)}; give each matrix [n, k] its own"
            " name"
        )
    dtype = operand.values.dtype
    if not scaling.packed and dtype != jnp.float8_e4m3fn:
        raise TypeError(
            f"{name} is {dtype}, which engines do not multiply; store weights in"
            " float8_e4m3fn"
        )
    if scaling.in_blocks and not scaling.squares:
        raise TypeError(
            f"{name} has {scaling}, which compressed-tensors has no FP8 format for; use"
            ' tile="square"'
        )
    # The code of zero that fills the last byte of an odd k does not count as a value.
    k = operand.shape[-1] - (weight.padding if isinstance(weight, Stored) else 0)
    if isinstance(scaling, Fp4) and k % scaling.block:
        raise ValueError(
            f"{name} has k={k}, and {scaling.format}'s blocks of {scaling.block} must"
            " divide it in a file; keep this weight float, and its module in `ignore`"
        )
    check_rule(name, operand, "choose its codes by that rule")
    return operand


def scheme_of(weight: Operand, activations: str) -> Json:
    """Return a weight's config group, without its targets."""
    scaling = weight.scaling
    number = dict(num_bits=8, type="float", symmetric=True)
    inputs = None
    if not scaling.packed and activations == "float8":
        inputs = number | dict(dynamic=True, strategy="token")
    described = number | dict(
        dynamic=False,
        group_size=None,
        block_structure=None,
        actorder=None,
        scale_dtype=None,
        zp_dtype=None,
    )
    form = FLOAT8
    if isinstance(scaling, Fp4):
        is_nvfp4 = scaling.format == "nvfp4"
        form = NVFP4 if is_nvfp4 else MXFP4
        dtype = "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8"
        described |= dict(
            num_bits=4,
            strategy="tensor_group" if is_nvfp4 else "group",
            group_size=scaling.block,
            scale_dtype=dtype,
            zp_dtype=dtype,
        )
    elif isinstance(scaling, Block):
        sides = [scaling.size, scaling.size]
        described |= dict(strategy="block", block_structure=sides)
    else:
        described["strategy"] = "tensor" if isinstance(scaling, Tensor) else "channel"
    return dict(
        format=form,
        weights=described,
        input_activations=inputs,
        output_activations=None,
    )


def arrays_of(name: str, weight: Operand) -> Arrays:
    """Return the arrays of a weight in a file, by name."""
    scaling = weight.scaling
    scale = np.asarray(weight.scale)
    values = np.asarray(weight.values)
    if not isinstance(scaling, Fp4):
        numbers = np.asarray(scale, np.float32)  # exact, also for E8M0
        if not scaling.in_blocks:
            numbers = numbers.reshape((1,) if isinstance(scaling, Tensor) else (-1, 1))
        if not np.isfinite(numbers).all():
            raise ValueError(
                f"{name} has a scale that is not finite; quantize finite weights"
            )
        return {f"{name}.weight": values, f"{name}.weight_scale": numbers}
    if scaling.tile == "square":
        scale = np.repeat(scale, scaling.block, axis=0)[: values.shape[0]]
    _check_bytes(name, scale, values)
    arrays = {f"{name}.weight_packed": values, f"{name}.weight_scale": scale}
    if scaling.format == "mxfp4":
        return arrays | {f"{name}.weight_scale": scale.view(np.uint8)}
    outer = np.float32(1 if weight.outer is None else weight.outer)
    divisor = _divisor_of(name, outer).reshape(1)
    return arrays | {f"{name}.weight_global_scale": divisor}


def take_weight(name: str, arrays: Held, divides: bool, rule: Any) -> Operand:
    """Take the arrays of the weight "X.weight" out of a file's, and return it.

    Args:
      name: the weight.
      arrays: the arrays of the file, by name.
      divides: whether a global scale is a divisor.
      rule: the rule of NVFP4's scales that the file notes.

    Raises:
      ValueError: an array is missing, or does not fit the others.
    """
    zeros = f"{name}_zero_point"
    if zeros in arrays and np.any(arrays.pop(zeros).astype(np.float32)):
        raise ValueError(
            f"{name} has zero points, and no format here has them; quantize it with"
            " symmetric=True"
        )
    scale = arrays.pop(f"{name}_scale")
    if f"{name}_packed" in arrays:
        return _fp4(name, arrays, scale, divides, rule)
    if name not in arrays:
        raise ValueError(
            f"{name}_scale is there, but neither {name} nor {name}_packed; {COPY}"
        )
    return _float8(name, arrays.pop(name), scale)


def check_global_scales(
    scales: Mapping[str, tuple[np.ndarray, float]], repair: str
) -> None:
    """Raise a ValueError if most NVFP4 weights seem to have an inverted global scale.

    A quantizer that fills the range of E4M3 has a largest block scale s near 448 and a
    global scale of 448 * 6 / max |w|. A reader of the inverse finds values up to
    7.2e6 / max |w|. A weight is suspect if `6 * s * outer` exceeds the largest float16.
    A file is inverted if more than half of the weights whose global scale is not 1 are
    suspect. That never holds if half of the weights fit float16. It always holds if the
    largest values of most weights are below 110 (below 36 for "four_over_six" and
    "fold_exact", which have s from 256 on).

    Args:
      scales: block scales and `outer` as read, by name.
      repair: the end of the message.
    """
    judged = 0
    suspect: dict[str, tuple[float, float]] = {}
    for name, (of_blocks, outer) in scales.items():
        scale = float(np.max(of_blocks.astype(np.float32), initial=0))
        if outer == 1 or not scale > 0:
            continue
        judged += 1
        if _LARGEST_CODE * scale * outer > _LARGEST_WEIGHT:
            suspect[name] = (scale, outer)
    if 2 * len(suspect) <= judged:
        return
    name, (scale, outer) = next(iter(suspect.items()))
    raise ValueError(
        f"{name} has block scales up to {scale:g} and the global scale {1 / outer:.6g},"
        f" so that its largest value is 6 * {scale:g} / {1 / outer:.6g} ="
        f" {_LARGEST_CODE * scale * outer:.3g}, beyond {_LARGEST_WEIGHT:g}; with the"
        f" inverse it is {_LARGEST_CODE * scale / outer:.3g} ({len(suspect)} of"
        f" {judged} weights are like this): the global scale is inverted, a"
        f" multiplier instead of a divisor; {repair}"
    )


def _check_bytes(name: str, scale: np.ndarray, values: np.ndarray) -> None:
    """Raise a ValueError for a scale that is NaN, or with which values are lost.

    A scale of E4M3 may not be negative, and float32 must hold the values that a scale
    of E8M0 multiplies.
    """
    is_e8m0 = scale.dtype in (np.uint8, SCALE_DTYPE)
    found = scale.view(np.uint8)
    top = int(np.max(found, initial=0))
    if top >= (_E8M0_NAN if is_e8m0 else _E4M3_NAN):
        raise ValueError(
            f"{name} has the scale byte 0x{top:x}, a NaN or a negative scale; quantize"
            " finite weights"
        )
    if is_e8m0 and scale.size:
        missing = -values.shape[1] % (Fp4("mxfp4").block // 2)
        blocks = np.pad(values, ((0, 0), (0, missing)))
        is_used = (blocks.reshape(*scale.shape, -1) & _SIZES).any(axis=-1)
        # 2**-127 is a subnormal float32, which accelerators take for 0, and 6 * 2**126
        # is beyond the largest.
        lost = is_used & ((found == 0) | (found > 252))
        if lost.any():
            raise ValueError(
                f"{name} has the scale 2**{int(found[lost][0]) - 127} in a block with"
                " values, but float32 holds them with 2**-126 to 2**125 only; quantize"
                " the weight in another unit"
            )


def _fp4(
    name: str,
    arrays: Held,
    scale: np.ndarray,
    divides: bool,
    rule: Any,
) -> Operand:
    """Take the codes and the global scale of an FP4 weight out of a file's arrays."""
    values = arrays.pop(f"{name}_packed")
    number = f"{name}_global_scale"
    held = arrays.pop(number) if number in arrays else None
    if held is None and scale.dtype == jnp.float8_e4m3fn:
        raise ValueError(
            f"{name}_scale is float8_e4m3fn, as in NVFP4, but {number} is missing;"
            f" {COPY}"
        )
    if held is None:
        scaling = Fp4("mxfp4")
        dtypes: tuple[DTypeLike, ...] = (np.uint8, SCALE_DTYPE)
    else:
        scaling = Fp4("nvfp4", rule=rule)
        dtypes = (jnp.float8_e4m3fn,)
    is_matrix = values.ndim == 2 and values.dtype == np.uint8
    shape = (values.shape[0], 2 * values.shape[1]) if values.ndim == 2 else (0, 0)
    wanted = scaling.scale_shape(shape)
    if not is_matrix or scale.dtype not in dtypes or scale.shape != wanted:
        raise ValueError(
            f"{name} is {values.dtype}{list(values.shape)} with scales"
            f" {scale.dtype}{list(scale.shape)}, but {scaling.format} has bytes [n, k /"
            f" 2] with scales {np.dtype(dtypes[0])}{list(wanted)}; save the model in"
            " one of the formats that are read here"
        )
    _check_bytes(name, scale, values)
    outer = None
    if held is not None:
        top = float(np.max(scale.astype(np.float32), initial=0))
        outer = jnp.asarray(_outer(number, held, divides, top))
    operand = Operand(
        jnp.asarray(values),
        jnp.asarray(scale.view(scaling.scale_dtype)),
        scaling=scaling,
        outer=outer,
    )
    check_rule(
        name,
        operand,
        "save the weights again, or drop tcfp_jax.fp4_rule from the file's metadata",
    )
    return operand


def _divisor_of(name: str, outer: np.float32) -> np.float32:
    """Return the global scale of a file: 1 / outer.

    Its reciprocal is `outer` again, if that is the reciprocal of any float32.
    """
    with np.errstate(divide="ignore", over="ignore"):
        near = np.float32(1) / np.float32(outer)
    if not (np.isfinite(near) and np.isfinite(outer) and near > 0):
        raise ValueError(
            f"{name} has outer={outer} and needs the global scale {near} in a file, but"
            " both must be positive and finite; quantize finite weights whose largest"
            " is above 1e-30"
        )
    # If its reciprocal differs from `outer`, so do its neighbours' reciprocals: checked
    # for all numbers of a binade.
    return near


def _outer(name: str, held: np.ndarray, divides: bool, top: float) -> np.float32:
    """Return `outer` from a file's global scale, for block scales up to `top`."""
    if held.dtype != np.float32 or held.size != 1:
        raise ValueError(
            f"{name} is {held.dtype}{list(held.shape)}, but a weight has one float32"
            " number; store the quantizer's number, and store weights that were joined"
            " under their own names, each with its own"
        )
    number = np.float32(held.item())
    with np.errstate(divide="ignore", over="ignore"):
        outer = np.float32(1) / number if divides else number
    # Accelerators take subnormal numbers for 0, and products of bytes and scales beyond
    # float32 would be infinite.
    largest = float(outer) * max(1, _LARGEST_CODE * top)
    if not (outer >= _TINY and largest <= _HUGE and number >= _TINY):
        raise ValueError(
            f"{name} is {number} with block scales up to {top:g}, but it and its"
            " reciprocal must be positive and finite, no subnormal float32, and so"
            " must all values; quantize the weight again, or store 1 for zeros"
        )
    return outer


def _float8(name: str, values: np.ndarray, scale: np.ndarray) -> Operand:
    """Return an FP8 weight with one scale, one for each row, or one for each square."""
    if values.dtype != jnp.float8_e4m3fn or values.ndim != 2:
        raise ValueError(
            f"{name} is {values.dtype}{list(values.shape)}; only matrices of"
            " float8_e4m3fn are read"
        )
    if scale.dtype not in (np.float32, np.float16, jnp.bfloat16):
        raise ValueError(
            f"{name}_scale is {scale.dtype}, but the scales of float8_e4m3fn are"
            " floats; save it so"
        )
    scale = scale.astype(np.float32)
    by_rows = scale.shape in (values.shape[:1], (len(values), 1))
    if scale.size == 1 or by_rows:
        # Any scale serves zeros, and some quantizers store 0 for a row of them.
        sizes = values.view(np.uint8) & 0x7F
        is_used = sizes.any(axis=None if scale.size == 1 else 1).reshape(scale.shape)
        scale = np.where(is_used | ~np.isfinite(scale) | (scale < 0), scale, 1)
    if not ((scale >= _TINY) & (scale <= _HUGE / 448)).all():
        raise ValueError(
            f"{name}_scale has numbers from {scale.min()} to {scale.max()}; all must be"
            f" finite, and between {_TINY:g} and {_HUGE / 448:g}, so that float32 holds"
            " the values; quantize finite weights again"
        )
    is_pow2 = bool((np.frexp(scale)[0] == 0.5).all())
    scaling = _float8_scaling(values.shape, scale, is_pow2)
    if scaling is None:
        raise ValueError(
            f"{name} is {values.dtype}{list(values.shape)} with scales"
            f" {list(scale.shape)}; use one scale, one for each row, or powers of two"
            " for squares of 32, 64 or 128"
        )
    if isinstance(scaling, Block):
        scale = scale.astype(SCALE_DTYPE)
    else:
        scale = scale.reshape(scaling.scale_shape(values.shape))
    return Operand(jnp.asarray(values), jnp.asarray(scale), scaling=scaling)


def _float8_scaling(
    shape: tuple[int, ...], scale: np.ndarray, is_pow2: bool
) -> Scaling | None:
    """Return the scaling that scales of this shape have, or None."""
    if scale.size == 1:
        return Tensor("pow2" if is_pow2 else "float32")
    if scale.shape in (shape[:1], (shape[0], 1)):
        return Row("pow2" if is_pow2 else "float32")
    for size in (32, 64, 128):
        if is_pow2 and scale.shape == Block(size).scale_shape(shape):
            return Block(size)
    return None
