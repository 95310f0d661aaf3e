"""Virtual casts: `cast(x, datatype)` is `x` with the values that a datatype can hold, in the dtype of `x`.

A cast has two halves that packing shares: `quantize` finds each value's place on its number's grid and the scales
(`Parts`), and `assemble` multiplies them. Both are integer work on the bits of float32, and float32 arithmetic that is
exact or correctly rounded everywhere; they never cast to a small dtype and back, which XLA on a GPU would delete. So
results are bit-identical on every backend, with and without jit.

* Exponent scales and unscaled numbers treat subnormal float32 and bfloat16 exactly, as inputs and as results.
* Float scales and zero points read subnormal inputs as zero and write results below 2**-126 as zero.
* A NaN or inf has no part in its tile's scale. NaN stays NaN; where a scaled number has no code for it (FP4, FP6,
  integers, codebooks) its tile's scale becomes NaN, and with it the tile, as OCP's MX specification has it.
* `saturate=True`: inf and what is too large become the largest value. `saturate=False`: inf where the number has it,
  else NaN where it has that, else the largest value, as ml_dtypes does (rounding "zero" overflows only from inf).
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.specs import entries_of
from tcfp_jax.formats import cast_kernel, float_bits
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.float_bits import RoundMode
from tcfp_jax.formats.quantization import assemble, quantize, random_bits
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import TWO_LEVEL_MODES, ScaleMode

_INITIAL = Modes()
_DEFAULTS = contextvars.ContextVar("tcfp_jax.formats.defaults", default=_INITIAL)


@contextlib.contextmanager
def defaults(
    *, roundmode: RoundMode | None = None, scalemode: ScaleMode | None = None, saturate: bool | None = None
) -> Iterator[None]:
    """The modes that `cast` and `pack` use within a `with` block where their arguments name none; blocks nest.

    A jitted function reads the defaults once, when it is traced. A default `scalemode` concerns only the scales that
    it is for and that do not name a mode of their own; others keep "max".

    Raises:
      ValueError: an unknown mode.

    >>> from tcfp_jax import formats
    >>> with defaults(roundmode="zero"):
    ...     print(cast(jnp.float32(1.9), formats.datatype("int8")))
    1.0
    """
    modes = _with_defaults(roundmode, scalemode, saturate)
    token = _DEFAULTS.set(modes)
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def cast(
    x: ArrayLike,
    datatype: DataType,
    *,
    roundmode: RoundMode | None = None,
    scalemode: ScaleMode | None = None,
    key: jax.Array | None = None,
    saturate: bool | None = None,
) -> jax.Array:
    """`x` rounded to the values of a datatype: `round(x / scale) * scale`, with the gradient of the identity.

    That is also the gradient of values that saturate. Where the datatype has a zero point or a residual, it is added;
    and what the dtype of `x` cannot hold is rounded to it, such as bfloat16 a value times a float32 scale.

    Args:
      x: real floats of any shape; float64 is rounded to float32 first. Ragged last tiles are filled with zeros.
      datatype: made by `formats.datatype`, or of the catalog.
      roundmode: "even" (nearest, ties to even; the default), "nearest" (ties away from zero), "zero" (toward zero), or
        "stochastic" (one of the two neighbours, by distance: E[result] = x but for what saturates, as the largest
        values of a tile may by the default `scalemode` of powers of two; by "ceil" none does).
      scalemode: "max" (the default), "midmax", "ceil", "mse" or "auto", for exponent scales that do not name their own;
        "max", "four_over_six" or "fold_exact" for NVFP4's two levels. The docstring of
        `tcfp_jax.formats.scale_rules` has the formulas.
      key: JAX random key, for "stochastic" only.
      saturate: what happens to inf and what is too large; True by default. See the module's docstring.

    Returns:
      The shape and dtype of `x`.

    Raises:
      TypeError: `x` is not real floating point, or `datatype` is not a DataType.
      ValueError: an unknown mode, a key without "stochastic" or the reverse, a `scalemode` for a datatype that has no
        scale of its kind or whose exponent scales name their own, or a tile that does not fit the shape of an array
        that is not empty.

    Source: TensorCast (AMD); OCP Microscaling Formats 1.0, section 6.3.

    >>> from tcfp_jax import formats
    >>> cast(jnp.array([1.0, -0.3, 0.07]), formats.datatype("e2m1f", "e8m0")).tolist()
    [1.0, -0.25, 0.125]
    """
    array, modes = check_arguments(x, datatype, roundmode, scalemode, key, saturate)
    if array.size == 0:
        return array
    rounded = lambda array, key: _rounded(array, datatype, modes, key)
    # Tables are looked up and tiles are cut, which explicit axes refuse.
    same = PartitionSpec(*entries_of(array))
    return _straight_through(array, with_automatic_axes(rounded, lambda _: same, lax.stop_gradient(array), key))


@jax.custom_jvp
def _straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    return rounded


@_straight_through.defjvp
def _(primals, tangents):
    return primals[1], tangents[0]


def _rounded(x: jax.Array, datatype: DataType, modes: Modes, key: jax.Array | None) -> jax.Array:
    if cast_kernel.serves(x.shape, x.dtype, datatype, modes) and cast_kernel.wanted():
        return _in_one_pass(x, datatype, modes)
    return _define(x, datatype, modes, key)


@functools.partial(jax.jit, static_argnames=("datatype", "modes"))
def _in_one_pass(x: jax.Array, datatype: DataType, modes: Modes) -> jax.Array:
    """By the kernel where the program runs on an NVIDIA GPU; a default GPU does not say so of every program."""
    assert datatype.scale is not None, "the kernel serves scaled numbers only"
    kernel = functools.partial(cast_kernel.cast_tiles, datatype=datatype, scalemode=modes.of_scale(datatype.scale))
    by_definition = functools.partial(_define, datatype=datatype, modes=modes)
    return lax.platform_dependent(x, cuda=kernel, default=by_definition)


def _define(x: jax.Array, datatype: DataType, modes: Modes, key: jax.Array | None = None) -> jax.Array:
    return float_bits.from_bits(_quantized_bits(float_bits.to_bits(x), datatype, modes, key), x.dtype)


# Jitted here, so that a call outside jit is one program per datatype and shape: op by op, the few hundred operations of
# a long division would be compiled one by one.
@functools.partial(jax.jit, static_argnames=("datatype", "modes"))
def _quantized_bits(bits: jax.Array, datatype: DataType, modes: Modes, key: jax.Array | None) -> jax.Array:
    """float32 bits of the cast of an array given by its bits."""
    return assemble(quantize(bits, datatype, modes, random_bits(key, bits.shape)), datatype, bits.shape)


# Arguments ------------------------------------------------------------------------------------------------------------


def check_arguments(
    x: ArrayLike,
    datatype: DataType,
    roundmode: RoundMode | None,
    scalemode: ScaleMode | None,
    key: jax.Array | None,
    saturate: bool | None,
) -> tuple[jax.Array, Modes]:
    """(`x` as an array, the modes), or the errors that `cast` documents."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"x is {array.dtype}, and casts take real floats; convert it first, such as x.astype(float32)")
    if not isinstance(datatype, DataType):
        raise TypeError(f"datatype is {type(datatype).__name__}; make a DataType with formats.datatype(number, scale)")
    scales = [part.scale for part in (datatype, datatype.residual) if part is not None and part.scale is not None]
    exponents = [scale for scale in scales if scale.number.kind == "exponent"]
    if scalemode in TWO_LEVEL_MODES[1:]:
        if not any(scale.is_nvfp4 for scale in scales) or datatype.number.name != "e2m1f":
            raise ValueError(
                f"scalemode={scalemode!r} chooses E4M3 scales of E2M1 values below a scale of the tensor, which "
                f"{datatype.name} has not; use nvfp4 or nvfp4s, or drop it"
            )
    elif scalemode not in (None, "max") and not exponents:
        raise ValueError(f"scalemode={scalemode!r} chooses among powers of two, which {datatype.name} has not; drop it")
    if scalemode not in (None, *TWO_LEVEL_MODES[1:]) and exponents and all(scale.mode for scale in exponents):
        raise ValueError(
            f"scalemode={scalemode!r} is not for {datatype.name}, whose scales name their own mode "
            f"({', '.join(scale.name for scale in exponents)}); drop it"
        )
    modes = _with_defaults(roundmode, scalemode, saturate)
    if (key is None) != (modes.roundmode != "stochastic"):
        missing = 'roundmode="stochastic" needs key=jax.random.key(seed)' if key is None else "drop key="
        raise ValueError(f"roundmode={modes.roundmode!r} and key={'none' if key is None else 'given'}: {missing}")
    return array, replace(modes, scalemode="midmax" if modes.scalemode == "auto" else modes.scalemode)


def _with_defaults(roundmode: RoundMode | None, scalemode: ScaleMode | None, saturate: bool | None) -> Modes:
    scoped = _DEFAULTS.get()
    modes = Modes(
        scoped.roundmode if roundmode is None else roundmode,
        scoped.scalemode if scalemode is None else scalemode,
        scoped.saturate if saturate is None else saturate,
    )
    for name, kind in (("roundmode", RoundMode), ("scalemode", ScaleMode)):
        if getattr(modes, name) not in get_args(kind):
            raise ValueError(f"{name}={getattr(modes, name)!r} is unknown; use one of {list(get_args(kind))}")
    if not isinstance(modes.saturate, bool):
        raise ValueError(f"saturate={modes.saturate!r} must be True or False")
    return modes
