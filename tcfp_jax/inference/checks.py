"""Checks of quantized weights, and of the variables that hold them."""

from collections.abc import Mapping

import jax
import numpy as np

from pallas_kernels.numerics import FLOAT8_DTYPES
from pallas_kernels.operands import SCALE_DTYPE, Operand
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Weight

# Bits of 2**121, the scale of float32's largest value
_LARGEST_SCALE = (121 + 127) << 23


def check_operand(path: str, weight: Operand, repair: str) -> None:
    """Raise a ValueError if the arrays of a weight do not fit its scaling.

    `repair` ends the message.
    """
    scaling = weight.scaling
    wanted = (np.dtype(scaling.scale_dtype), scaling.scale_shape(weight.shape))
    found = (np.dtype(weight.scale.dtype), tuple(weight.scale.shape))
    values = weight.values
    is_packed = values.dtype == np.uint8
    if found != wanted or scaling.packed != is_packed:
        raise ValueError(
            f"{path} is {values.dtype}{list(values.shape)}, whose scales"
            f" with {scaling} are {wanted[0]}{list(wanted[1])}, but these are"
            f" {found[0]}{list(found[1])}; {repair}"
        )
    if not is_packed and values.dtype not in FLOAT8_DTYPES:
        raise ValueError(
            f"{path} is {values.dtype}, which is neither FP8 nor packed FP4"
            f" codes; {repair}"
        )
    expected = {
        "lo": (values.dtype, values.shape),
        "lo_scale": found,
        "outer": (np.dtype(np.float32), values.shape[:-2]),
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
    """Raise a ValueError for scales that no quantizer makes.

    NaN is one that they make: it says that the values were lost.
    """
    for name in ("scale", "lo_scale", "outer"):
        scale = getattr(weight, name)
        if isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct | None):
            continue
        if scale.dtype == SCALE_DTYPE or not getattr(
            scale, "is_fully_addressable", True
        ):
            continue
        bits = np.asarray(scale).astype(np.float32).reshape(-1).view(np.int32)
        # Zero is the scale of FP4 blocks of zeros. Some devices read subnormals as
        # zero, and others do not.
        is_zero = weight.scaling.packed & (bits == 0)
        least = np.where(is_zero, 0, 1 << 23)
        is_nan = bits & 0x7FFFFFFF > 0x7F800000
        wrong = ((bits < least) | (bits > _LARGEST_SCALE)) & ~is_nan
        if np.any(wrong):
            raise ValueError(
                f"{name} of {path} has {bits[wrong].view(np.float32)[0]:g}, and"
                " quantizers make scales from 2**-126 to 2**121, or 0 for FP4 blocks"
                " of zeros; the file is damaged, or another library wrote it"
            )


def part_of(variables: Mapping[str, PyTree], name: str) -> PyTree:
    """Return the parameters or the stored weights of variables of `quantize_params`."""
    part = variables.get(name) if isinstance(variables, Mapping) else None
    if not isinstance(part, Mapping):
        raise ValueError(
            f'the variables have no dict "{name}"; pass the result of quantize_params,'
            ' {"params", "tcfp"}'
        )
    return part


def check_weights(recipe: object) -> None:
    """Raise a ValueError unless this is a recipe, a name, or from `find_weights`."""
    if isinstance(recipe, Mapping) and not all(
        isinstance(weight, Weight) for weight in recipe.values()
    ):
        raise ValueError(
            "recipe= is a mapping, but not from paths to Weight; pass"
            " find_weights(model)"
        )
    if not isinstance(recipe, Recipe | str | Mapping):
        raise ValueError(
            f"recipe= is a {type(recipe).__name__}; pass a recipe, its name, or"
            " find_weights(model)"
        )
