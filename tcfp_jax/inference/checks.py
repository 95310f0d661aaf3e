"""Checks of quantized weights that come from files: shapes and dtypes of their arrays,
and values of their scales.
"""

import jax
import numpy as np

from pallas_kernels.numerics import FLOAT8_DTYPES
from pallas_kernels.operands import SCALE_DTYPE, Block, Fp4, Operand

# Bits of 2**121, the scale of float32's largest value
_LARGEST_SCALE = (121 + 127) << 23


def check_operand(path: str, weight: Operand, repair: str) -> None:
    """Raise a ValueError if the arrays of a weight do not fit its scaling and each
    other; `repair` ends the message.
    """
    scaling, four = weight.scaling, isinstance(weight.scaling, Fp4)
    block = SCALE_DTYPE if isinstance(scaling, Block) else np.float32
    wanted = (
        np.dtype(scaling.scale_dtype if isinstance(scaling, Fp4) else block),
        scaling.scale_shape(weight.shape),
    )
    found = (np.dtype(weight.scale.dtype), tuple(weight.scale.shape))
    if found != wanted or four != (weight.values.dtype == np.uint8):
        named = [f"{dtype}{list(shape)}" for dtype, shape in (wanted, found)]
        raise ValueError(
            f"{path} is {weight.values.dtype}{list(weight.values.shape)}, whose scales"
            f" with {scaling} are {named[0]}, but these are {named[1]}; {repair}"
        )
    if not four and weight.values.dtype not in FLOAT8_DTYPES:
        raise ValueError(
            f"{path} is {weight.values.dtype}, which is neither FP8 nor packed FP4"
            f" codes; {repair}"
        )
    of_values = (weight.values.dtype, weight.values.shape)
    expected = {
        "lo": of_values,
        "lo_scale": found,
        "outer": (np.dtype(np.float32), weight.values.shape[:-2]),
    }
    for name, (dtype, shape) in expected.items():
        one = getattr(weight, name)
        if one is not None and (one.dtype, tuple(one.shape)) != (dtype, shape):
            raise ValueError(
                f"{name} of {path} is {one.dtype}{one.shape}, not {dtype}{shape};"
                " restore the whole file"
            )
    check_scales(path, weight)


def check_scales(path: str, weight: Operand) -> None:
    """Raise a ValueError for scales that no quantizer makes; NaN is one, which says
    that the values were lost.
    """
    for name in ("scale", "lo_scale", "outer"):
        scale = getattr(weight, name)
        unknown = isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct | None)
        if (
            unknown
            or scale.dtype == SCALE_DTYPE
            or not getattr(scale, "is_fully_addressable", True)
        ):
            continue
        bits = np.asarray(scale).astype(np.float32).reshape(-1).view(np.int32)
        # Zero is the scale of FP4 blocks of zeros. Some devices read subnormals as
        # zero, and others do not.
        least = np.where(isinstance(weight.scaling, Fp4) & (bits == 0), 0, 1 << 23)
        wrong = ((bits < least) | (bits > _LARGEST_SCALE)) & (
            bits & 0x7FFFFFFF <= 0x7F800000
        )
        if np.any(wrong):
            raise ValueError(
                f"{name} of {path} has {bits[wrong].view(np.float32)[0]:g}, and"
                " quantizers make scales from 2**-126 to 2**121, or 0 for FP4 blocks"
                " of zeros; the file is damaged, or another library wrote it"
            )
