"""Virtual casts: `cast(x, datatype)` has the values of a datatype in the dtype of `x`.

A cast has two halves, which packing shares: `quantize` finds scales and values
(`QuantizedArray`), and `assemble` multiplies them. Both are integer work on the bits of
float32, and float32 arithmetic that is exact or correctly rounded everywhere. They
never cast to a small dtype and back, which XLA on a GPU would delete. So results are
bit-identical on every backend, with and without jit.

* Exponent scales and unscaled numbers treat subnormal float32 and bfloat16 exactly, as
  inputs and as results.
* Float scales and zero points read subnormal inputs as zero and write results below
  2**-126 as zero.
* A NaN or inf does not influence the scale of its tile. NaN stays NaN. If a scaled
  number has no code for NaN (FP4, FP6, integers, codebooks), the scale becomes NaN and
  with it the whole tile, as OCP's MX specification says.
* `saturate=True`: inf and values that are too large become the largest value.
  `saturate=False`: they become inf if the number has it, else NaN if it has that, else
  the largest value, as in ml_dtypes. By "zero" only inf overflows.
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.checks import check_choice
from pallas_kernels.dispatch import Implementation, device_kind, dispatch
from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.specs import entries_of
from pallas_kernels.tiled import Engine
from pallas_kernels.triton_passes import TRITON
from tcfp_jax.formats import cast_kernel, float_bits
from tcfp_jax.formats.cast_kernel import Cast
from tcfp_jax.formats.catalog import named
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.float_bits import RoundMode
from tcfp_jax.formats.quantization import assemble, quantize
from tcfp_jax.formats.rotation import check_axis
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import TWO_LEVEL_MODES, ScaleMode

# Names of the same modes in microxcaling, TensorCast and torchao.
_ELSEWHERE = {
    "scalemode=floor": ': OCP\'s rule, floor(log2(amax)) - emax, is "max"',
    "scalemode=rceil": ': the smallest scale that clips nothing is "ceil"',
    "roundmode=floor": ': microxcaling\'s "floor", toward zero, is "zero"',
    "roundmode=away": ': ties away from zero are "nearest"',
}


def cast(
    x: ArrayLike,
    datatype: DataType | str,
    *,
    axis: int = -1,
    roundmode: RoundMode = "even",
    scalemode: ScaleMode | None = None,
    key: Array | None = None,
    saturate: bool = True,
) -> Array:
    """Round `x` to the values of a datatype: `round(x / scale) * scale`.

    Use this to train or evaluate with the numbers of a format that no product of this
    library has, and to see what a format loses. It computes values in the dtype of x:
    use `formats.pack` to store them in few bits.

    The gradient is that of the identity. Values that saturate have that gradient too. A
    zero point or a residual of the datatype is added. A result that the dtype of `x`
    cannot hold is rounded to it, such as a bfloat16 value times a float32 scale.

    Args:
      x: real floats of any shape; float64 is rounded to float32 first. Ragged last
        tiles are filled with zeros.
      datatype: made by `formats.datatype`, or from the catalog, also by its name.
      axis: the axis along which tiles are cut, instead of the last one.
      roundmode: "even" (nearest, ties to even), "nearest" (ties away from zero), "zero"
        (toward zero), or "stochastic" (one of the two neighbours, by distance).
        "stochastic" is unbiased except for values that saturate: the largest of a tile
        may, under the default `scalemode` of powers of two; under "ceil" none does.
        With an integer zero point the ends of a tile may. Codebooks of several tables
        (icb) choose by the rounded values, with a bias.
      scalemode: "max" (the default), "midmax", "ceil", "mse" or "auto" for exponent
        scales that do not name their own mode; "max", "four_over_six" or "fold_exact"
        for NVFP4's two levels. `tcfp_jax.formats.scale_rules` has the formulas. "max"
        is OCP's rule, which others call "floor".
      key: JAX random key, for "stochastic" only.
      saturate: whether inf and values that are too large become the largest value; see
        the module's docstring.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not real floating point, or `datatype` is not a DataType.
      ValueError: an unknown mode. A key without "stochastic", the reverse, or several
        keys. A `scalemode` for a datatype without a scale of its kind, or whose
        exponent scales name their own. A tile that does not fit `x`.

    Source: TensorCast (AMD); OCP Microscaling Formats 1.0, section 6.3.

    >>> from tcfp_jax import formats
    >>> cast(jnp.array([1.0, -0.3, 0.07]), formats.datatype("e2m1f", "e8m0")).tolist()
    [1.0, -0.25, 0.125]
    """
    datatype = named(datatype)
    array, modes = check_arguments(x, datatype, roundmode, scalemode, key, saturate)
    if array.size == 0:
        return array
    if axis != -1:
        check_axis(axis, array.shape, "axis")
        last = jnp.moveaxis(array, axis, -1)
        made = cast(
            last,
            datatype,
            roundmode=roundmode,
            scalemode=scalemode,
            key=key,
            saturate=saturate,
        )
        return jnp.moveaxis(made, -1, axis)

    def rounded(x: Array, key: Array | None) -> Array:
        options = Cast(datatype, modes)
        made: Array = dispatch("cast", IMPLEMENTATIONS, None, options, x, key)
        return made

    # Tables are looked up and tiles are cut, which explicit axes refuse.
    same = PartitionSpec(*entries_of(array))
    return _straight_through(
        array,
        with_automatic_axes(rounded, lambda _: same, lax.stop_gradient(array), key),
    )


@jax.custom_jvp
def _straight_through(x: Array, rounded: Array) -> Array:
    return rounded


@_straight_through.defjvp
def _(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return primals[1], tangents[0]


# Jitted here, so that a call outside jit is one program per datatype and shape.
# Otherwise the few hundred operations of a long division would be compiled one by one.
@functools.partial(jax.jit, static_argnums=0)
def _define(options: Cast, x: Array, key: Array | None) -> Array:
    """Return the cast by its definition."""
    random = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    bits = float_bits.to_bits(x)
    parts = quantize(bits, options.datatype, options.modes, random)
    made = assemble(parts, options.datatype, x.shape)
    return float_bits.from_bits(made, x.dtype)


def _by_kernel(engine: Engine, options: Cast, x: Array, key: Array | None) -> Array:
    """Return the cast by a kernel."""
    kernel = functools.partial(cast_kernel.cast_tiles, engine, options)
    if device_kind() == "cpu":  # in its interpreter
        return kernel(x)
    # XLA decides, because a program may run on another device.
    made: Array = lax.platform_dependent(
        x, cuda=kernel, default=functools.partial(_define, options, key=None)
    )
    return made


def _decline_triton(*call: object) -> str | None:
    kind = device_kind()
    return None if kind.startswith("NVIDIA") else f"{kind} is not an NVIDIA GPU"


IMPLEMENTATIONS = (
    Implementation(
        "triton",
        functools.partial(_by_kernel, TRITON),
        cast_kernel.reject,
        _decline_triton,
    ),
    Implementation(
        "mosaic",
        functools.partial(_by_kernel, cast_kernel.MOSAIC),
        cast_kernel.reject_mosaic,
    ),
    Implementation("xla", _define),
)


def check_key(key: object) -> None:
    """Raise a ValueError unless this is None or one JAX random key.

    A key may be typed, or raw data.
    """
    if key is None:
        return
    dtype = getattr(key, "dtype", jnp.float32)
    shape = getattr(key, "shape", ())
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        is_one = shape == ()
    else:
        is_one = dtype == jnp.uint32 and len(shape) == 1
    if not is_one:
        raise ValueError(
            f"key is a {type(key).__name__}, not one JAX random key; use"
            " jax.random.key(seed)"
        )


def check_arguments(
    x: ArrayLike,
    datatype: DataType,
    roundmode: RoundMode,
    scalemode: ScaleMode | None,
    key: Array | None,
    saturate: bool,
) -> tuple[Array, Modes]:
    """Return (`x` as an array, the modes), or raise the errors of `cast`."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"x is {array.dtype}, and casts take real floats; convert it first, such as"
            " x.astype(float32)"
        )
    if not isinstance(datatype, DataType):
        raise TypeError(
            f"datatype is {type(datatype).__name__}; give a DataType, or a name of the"
            " catalog"
        )
    hint = _ELSEWHERE.get(f"roundmode={roundmode}", "")
    check_choice("roundmode", roundmode, get_args(RoundMode), hint)
    if scalemode is not None:
        hint = _ELSEWHERE.get(f"scalemode={scalemode}", "")
        check_choice("scalemode", scalemode, get_args(ScaleMode), hint)
        _check_scalemode(scalemode, datatype)
    if not isinstance(saturate, bool):
        raise ValueError(f"saturate={saturate!r} is not a bool; use True or False")
    if key is None and roundmode == "stochastic":
        raise ValueError(
            "roundmode='stochastic' and key=none: roundmode=\"stochastic\" needs"
            " key=jax.random.key(seed)"
        )
    if key is not None and roundmode != "stochastic":
        raise ValueError(f"roundmode={roundmode!r} and key=given: drop key=")
    check_key(key)
    mode: ScaleMode = "midmax" if scalemode == "auto" else scalemode or "max"
    return array, Modes(roundmode, mode, saturate)


def _check_scalemode(scalemode: ScaleMode, datatype: DataType) -> None:
    """Raise a ValueError unless the datatype has a scale for which it is a rule."""
    scales = []
    for part in (datatype, datatype.residual):
        if part is not None and part.scale is not None:
            scales.append(part.scale)
    exponents = [scale for scale in scales if scale.number.kind == "exponent"]
    if scalemode in TWO_LEVEL_MODES[1:]:
        is_nvfp4 = any(scale.is_nvfp4 for scale in scales)
        if not is_nvfp4 or datatype.number.name != "e2m1f":
            raise ValueError(
                f"scalemode={scalemode!r} chooses E4M3 scales of E2M1 values below a"
                f" scale of the tensor, which {datatype.name} does not have; use nvfp4"
                " or nvfp4s, or drop it"
            )
        return
    if scalemode != "max" and not exponents:
        raise ValueError(
            f"scalemode={scalemode!r} chooses among powers of two, which"
            f" {datatype.name} does not have; drop it"
        )
    if exponents and all(scale.mode for scale in exponents):
        names = ", ".join(scale.name for scale in exponents)
        raise ValueError(
            f"scalemode={scalemode!r} is not for {datatype.name}, whose scales name"
            f" their own mode ({names}); drop it"
        )
