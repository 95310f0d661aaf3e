"""NVFP4 as numbers, which training multiplies: rounded and dequantized in as few passes over memory as XLA can.

    x ~ values * outer,   values = E2M1 * scale          16 values share an E4M3 scale, all of x the float32 outer

`values` have at most 6 significant bits, so they are exact in BF16. They equal the values of `parts.quantize` by the
rule "max", to nearest and stochastically, bit for bit: `tests/formats/test_nvfp4_values.py` compares the two. The
rounding of each value is written as comparisons with multiples of its block's scale (`e2m1`): nothing is divided, and
XLA fuses all of it into the pass that writes the values. NaN and inf make their block NaN; a cast saturates inf.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.counter import bits_of
from tcfp_jax.formats import e2m1, float_bits, nvfp4_kernel, nvfp4_tiles, scale_choice
from tcfp_jax.formats.float_bits import INFINITY, MANTISSA_BITS, TINY
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_arrays import Key
from tcfp_jax.formats.nvfp4_kernel import Place
from tcfp_jax.formats.nvfp4_tiles import Options
from tcfp_jax.formats.rotation import rotate_arrays

BLOCK = 16
_LARGEST = 6.0  # of E2M1
_E4M3, _FLOAT32 = number("e4m3fn"), number("float32")

Rounding = Literal["nearest", "stochastic"]


class Nvfp4Values(NamedTuple):
    """`values * outer`: BF16 numbers, each an E2M1 number times an E4M3 scale, and a float32 scalar."""

    values: jax.Array
    outer: jax.Array

    def dequantize(self) -> jax.Array:
        """Return the numbers that these stand for, float32."""
        return self.values.astype(jnp.float32) * self.outer


def along(
    x: jax.Array, axis: int, rounding: Rounding = "nearest", key: Key | None = None, signs: jax.Array | None = None
) -> Nvfp4Values:
    """Quantize x in blocks of 16 along its first or last axis.

    Args:
      x: real floats, bfloat16 and float32.
      axis: the first or the last.
      rounding: of values to nearest even, or stochastically with scales that cover.
      key: two words of `pallas_kernels.counter.keys` for the random bits of "stochastic".
      signs: `[16]` of 1 and -1: every 16 values along the axis, which then is the first, are rotated before.

    Returns:
      `Nvfp4Values` of the shape of x, the axis filled with zeros up to whole blocks.

    >>> jax.eval_shape(lambda: along(jnp.ones((2, 20)), -1)).values.shape
    (2, 32)
    """
    x, place = _filled(x, axis)
    assert signs is None or place == "first", "rows of a block are rotated, not columns"
    by_definition = functools.partial(_defined, place=place, rounding=rounding)
    if not nvfp4_kernel.serves(x.shape, x.dtype, place):
        return by_definition(x, key, signs)
    kernel = functools.partial(_in_one_pass, place=place, rounding=rounding)
    return lax.platform_dependent(x, key, signs, cuda=kernel, default=by_definition)


def _defined(
    x: jax.Array, key: Key | None, signs: jax.Array | None, *, place: Place, rounding: Rounding
) -> Nvfp4Values:
    axes, blocks = _in_blocks(x, signs, place)
    found = quantize(x, axes, rounding, key, blocks).values()
    return found._replace(values=found.values.reshape(x.shape))


def _filled(x: jax.Array, axis: int) -> tuple[jax.Array, Place]:
    """Return x filled with zeros up to whole blocks, and the place of their axis."""
    short = -x.shape[axis] % BLOCK
    if short:
        x = jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)])
    return x, "first" if axis % x.ndim == 0 else "last"


def _in_blocks(
    x: jax.Array, signs: jax.Array | None, place: Place
) -> tuple[tuple[int], Callable[[jax.Array], Sequence[jax.Array]]]:
    """Return the arguments `axes` and `blocks` of `quantize`."""
    shape, first = x.shape, place == "first"

    def blocks(x: jax.Array) -> Sequence[jax.Array]:
        whole = x.reshape((-1, BLOCK, *shape[1:]) if first else (*shape[:-1], -1, BLOCK))
        if signs is None:
            return (whole,)
        # Row by row: XLA would write the rotated array to memory before it finds its maxima.
        rows = [lax.slice_in_dim(whole, i, i + 1, axis=1).astype(jnp.float32) for i in range(BLOCK)]
        return rotate_arrays(rows, list(signs))

    return (1 if first else x.ndim,), blocks


@functools.partial(jax.jit, static_argnames=("place", "rounding", "interpret"))
def _in_one_pass(
    x: jax.Array,
    key: Key | None,
    signs: jax.Array | None,
    *,
    place: Place,
    rounding: Rounding,
    interpret: bool = False,
) -> Nvfp4Values:
    """The same by a kernel that holds each block in the registers of one thread, after a pass for the maximum of x."""
    rounded: Literal["even", "stochastic"] = "even" if rounding == "nearest" else "stochastic"
    options = Options("max", rounded, "none" if signs is None else "hadamard")
    if signs is None:
        amax = jnp.max(scale_choice.finite_magnitude(float_bits.to_bits(x) & jnp.int32(0x7FFFFFFF)))
    else:
        unscaled = nvfp4_tiles.words(options, jnp.float32(1), signs, key)
        amax = float_bits.to_bits(nvfp4_kernel.rotated_amax(x, unscaled, options, place, interpret=interpret))
    outer = scale_choice.choose_outer(amax, _LARGEST, _E4M3, _FLOAT32, options.rule)
    words = nvfp4_tiles.words(options, outer, signs, key)
    return Nvfp4Values(nvfp4_kernel.quantize_values(x, words, options, place, interpret=interpret), outer)


def squares(w: jax.Array) -> Nvfp4Values:
    """Quantize a matrix in squares of 16 x 16, filled with zeros up to whole ones, to nearest; its axes stay.

    >>> jax.eval_shape(lambda: squares(jnp.ones((20, 3)))).values.shape
    (32, 16)
    """
    padded, axes, blocks = _in_squares(w)
    found = quantize(padded, axes, blocks=blocks).values()
    return found._replace(values=found.values.reshape(padded.shape))


def _in_squares(w: jax.Array) -> tuple[jax.Array, tuple[int, int], Callable[[jax.Array], Sequence[jax.Array]]]:
    """Return the matrix filled with zeros up to whole squares, and the arguments `axes` and `blocks` of `quantize`."""
    padded = jnp.pad(w, [(0, -size % BLOCK) for size in w.shape])
    rows, columns = padded.shape
    return padded, (1, 3), lambda w: (w.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK),)


class Observed(NamedTuple):
    """Each value before and after it is quantized; arrays of the shape of `found`.

    Attributes:
      exact: the values that are rounded, rotated if there are signs; float32.
      found: the numbers, bfloat16, and the scale of all.
      largest: of each value's block, the largest magnitude that its scale holds, in units of `found.outer`; float32.
    """

    exact: jax.Array
    found: Nvfp4Values
    largest: jax.Array


def observe(
    x: jax.Array,
    axis: int | None,
    rounding: Rounding = "nearest",
    key: Key | None = None,
    signs: jax.Array | None = None,
) -> Observed:
    """Return the result of `along` with these arguments, or of `squares` if the axis is None; XLA computes it.

    >>> seen = jax.jit(lambda x: observe(x, -1))(jnp.array([[6.2, *[1.0] * 15]]))
    >>> float(seen.exact[0, 0]), float(seen.found.dequantize()[0, 0]), float(seen.largest[0, 1] * seen.found.outer)
    (6.199999809265137, 6.199999809265137, 6.199999809265137)
    """
    axes: tuple[int, ...]
    if axis is None:
        x, axes, blocks = _in_squares(x)
    else:
        x, place = _filled(x, axis)
        axes, blocks = _in_blocks(x, signs, place)
    coded = quantize(x, axes, rounding, key, blocks)
    largest = jnp.broadcast_to(coded.scale * _LARGEST, coded.x.shape).reshape(x.shape)
    found = coded.values()
    return Observed(coded.x.reshape(x.shape), found._replace(values=found.values.reshape(x.shape)), largest)


class Coded(NamedTuple):
    """Blocks of float32 `x`, the E2M1 magnitude `units` of each value, and the scales of blocks and of all."""

    x: jax.Array
    units: jax.Array
    scale: jax.Array
    outer: jax.Array

    def values(self) -> Nvfp4Values:
        """The numbers, and the scale of all."""
        values = (jnp.copysign(self.units, self.x) * self.scale).astype(jnp.bfloat16)
        return Nvfp4Values(values, self.outer.reshape(()))


def quantize(
    x: jax.Array,
    axes: tuple[int, ...],
    rounding: Rounding = "nearest",
    key: Key | None = None,
    blocks: Callable[[jax.Array], Sequence[jax.Array]] = lambda x: (x,),
) -> Coded:
    """X as NVFP4.

    Args:
      x: real floats, bfloat16 and float32.
      axes: those along which a block extends.
      rounding: of values.
      key: of the random bits, for "stochastic"; the bits of a value depend on its index, which counts the values of a
        block first.
      blocks: of x, what is quantized, in parts along the first of `axes`. It is computed twice, because a pass over x
        that computes it costs less than one over what it gives.

    Returns:
      `Coded` of the shape of all blocks. A NaN or inf in x makes its block NaN.

    >>> rounded = jax.jit(lambda x: quantize(x, (1,)).values().dequantize())(jnp.arange(16.0)[None] - 6)
    >>> rounded[0, :8].round(2).tolist()
    [-6.0, -4.5, -4.5, -3.0, -2.25, -0.75, 0.0, 0.75]
    """
    bits = [lax.bitcast_convert_type(jnp.abs(part.astype(jnp.float32)), jnp.int32) for part in blocks(x)]
    amax = _largest([scale_choice.finite_magnitude(part) for part in bits], axes)
    lost = _largest(bits, axes) >= INFINITY
    # Otherwise XLA finds the maximum of all x in a pass of its own, and keeps what a rotation gives.
    amax, lost, x = lax.optimization_barrier((amax, lost, x))
    x = jnp.concatenate(blocks(x), axis=axes[0]).astype(jnp.float32)
    # Subnormals are zero, as casts read them: by integers, because XLA writes what `where` compares to memory.
    magnitude = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    magnitude &= -jnp.minimum(magnitude >> MANTISSA_BITS, 1)
    magnitude = lax.bitcast_convert_type(magnitude, jnp.float32)
    covers = rounding == "stochastic"
    outer = scale_choice.choose_outer(jnp.max(amax), _LARGEST, _E4M3, _FLOAT32, "max")
    (scale,) = scale_choice.tile_scales(amax, outer, _LARGEST, _E4M3, "max", covers)
    if covers:
        assert key is not None, "stochastic rounding has random bits"
        units = e2m1.stochastic(magnitude, scale * outer, bits_of(x.shape, *key, fastest=axes[0]))
    else:
        product = scale * outer
        # Subnormals are zero, as in `parts`; a divisor above every value makes zeros of what it divides.
        units = e2m1.nearest(magnitude, jnp.where(product < TINY, jnp.float32(2.0**120), product))
    scale = jnp.where(lost, jnp.float32(jnp.nan), scale)
    return Coded(x, units, scale, outer)


def _largest(parts: Sequence[jax.Array], axes: tuple[int, ...]) -> jax.Array:
    return functools.reduce(jnp.maximum, [jnp.max(part, axis=axes, keepdims=True) for part in parts])
