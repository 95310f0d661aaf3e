"""NVFP4 as numbers, which training multiplies: rounded and dequantized in as few passes over memory as XLA can.

    x ~ values * outer,   values = E2M1 * scale          16 values share an E4M3 scale, all of x the float32 outer

`values` have at most 6 significant bits, so they are exact in BF16; by the rule "fold_exact", 2**-3 of them is exact in
E4M3, and may be written instead, with outer 2**3 times as large. They are what `parts.quantize` defines, to nearest
and stochastically, by every rule of `scale_choice`, bit for bit: `tests/formats/test_nvfp4_values.py` compares the two.
What is done to each value is written as comparisons with multiples of its block's scale (`e2m1`): nothing is divided,
and XLA fuses all of it into the pass that writes the values. NaN and inf make their block NaN; a cast saturates inf.

"eden" is MS-EDEN (Panferov et al. 2026, "Quartet II"), which no cast has: values are rounded to nearest, with steps
that are best for normal values, and scales are then corrected by <x, x> / <x, rounded x> of what was rotated together
and rounded stochastically, so that the expectation over rotations is x.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.counter import bits_of
from tcfp_jax.formats import e2m1, float_bits, nvfp4_eden, nvfp4_kernel, nvfp4_tiles, scale_choice
from tcfp_jax.formats.float_bits import INFINITY, MANTISSA_BITS, TINY
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_arrays import MODES, Key, Rule
from tcfp_jax.formats.nvfp4_kernel import Numbers, Place
from tcfp_jax.formats.nvfp4_tiles import Options
from tcfp_jax.formats.rotation import rotate_arrays, rotate_by_product
from tcfp_jax.formats.scale_choice import IN_E4M3

BLOCK = 16
_LARGEST = 6.0  # of E2M1
_E4M3, _FLOAT32 = number("e4m3fn"), number("float32")

Rounding = Literal["nearest", "stochastic", "eden"]


class Nvfp4Values(NamedTuple):
    """`values * outer`: numbers of any shape, each an E2M1 number times an E4M3 scale, and a float32 scalar.

    The numbers are bfloat16, or float8_e4m3fn of "fold_exact" scales, which `IN_E4M3` multiplied.
    """

    values: jax.Array
    outer: jax.Array

    def dequantize(self) -> jax.Array:
        """What they stand for, float32."""
        return self.values.astype(jnp.float32) * self.outer


def along(
    x: jax.Array,
    axis: int,
    rule: Rule,
    rounding: Rounding = "nearest",
    key: Key | None = None,
    signs: jax.Array | None = None,
    numbers: Numbers = "bfloat16",
) -> Nvfp4Values:
    """X in blocks of 16 along an axis, the first or the last, rotated along it before where there are signs.

    Args:
      x: real floats, bfloat16 and float32.
      axis: the first or the last.
      rule: how blocks find their scales; "eden" has a rule of its own.
      rounding: of values to nearest even, or stochastically with scales that cover; or "eden".
      key: two words of `pallas_kernels.counter.keys` for the random bits of "stochastic" and "eden".
      signs: `[size]` of 1 and -1, for a rotation of every `size` values, a multiple of 16.
      numbers: "bfloat16"; or "float8_e4m3fn", of the rule "fold_exact", with the axis last, as FP8 products read it.

    Returns:
      `Nvfp4Values` of the shape of x, the axis filled with zeros up to whole blocks and rotations.

    >>> jax.eval_shape(lambda: along(jnp.ones((2, 20)), -1, "amax")).values.shape
    (2, 32)
    >>> jax.eval_shape(lambda: along(jnp.ones((16, 3)), 0, "fold_exact", numbers="float8_e4m3fn")).values.shape
    (3, 16)
    """
    folds = rule == "fold_exact" and rounding != "eden"  # whose corrected scales have any mantissa
    assert numbers == "bfloat16" or folds, "others are no E4M3 numbers"
    x, place, size = _filled(x, axis, signs)
    by_definition = functools.partial(_defined, place=place, rule=rule, rounding=rounding, numbers=numbers)
    if rounding == "eden":
        if signs is None or not nvfp4_eden.serves(x.shape, x.dtype, size, place):
            return by_definition(x, key, signs)
        kernel: Any = lambda x, key, signs: Nvfp4Values(*nvfp4_eden.quantize(x, key, signs, place))
        return lax.platform_dependent(x, key, signs, cuda=kernel, default=by_definition)
    # Rotations by products add in an order of their own, and kernels have one block in a thread.
    apart = signs is None or (place == "first" and size == BLOCK)
    if not apart or not nvfp4_kernel.serves(x.shape, x.dtype, place):
        return by_definition(x, key, signs)
    kernel = functools.partial(_in_one_pass, place=place, rule=rule, rounding=rounding, numbers=numbers)
    return lax.platform_dependent(x, key, signs, cuda=kernel, default=by_definition)


def _defined(
    x: jax.Array,
    key: Key | None,
    signs: jax.Array | None,
    *,
    place: Place,
    rule: Rule,
    rounding: Rounding,
    numbers: Numbers,
) -> Nvfp4Values:
    shape = x.shape
    x, (axes, blocks, group) = _in_blocks(x, signs, place)
    found = quantize(x, axes, rule, rounding, key, blocks, group).values()
    found = found._replace(values=found.values.reshape(shape))
    if numbers == "bfloat16":
        return found
    found = _in_e4m3(found)
    return found._replace(values=jnp.moveaxis(found.values, 0 if place == "first" else -1, -1))


def _filled(x: jax.Array, axis: int, signs: jax.Array | None) -> tuple[jax.Array, Place, int]:
    """(x filled with zeros up to whole blocks and rotations, where their axis is, how many values are one of them)."""
    size = BLOCK if signs is None else signs.shape[0]
    short = -x.shape[axis] % size
    if short:
        x = jnp.pad(x, [(0, short if i == axis % x.ndim else 0) for i in range(x.ndim)])
    return x, "first" if axis % x.ndim == 0 else "last", size


def _in_blocks(x: jax.Array, signs: jax.Array | None, place: Place) -> tuple[jax.Array, Any]:
    """(x, the arguments `axes`, `blocks` and `group` of `quantize`), x rotated, if blocks do not rotate it."""
    shape, first, size = x.shape, place == "first", BLOCK if signs is None else signs.shape[0]
    axis = 0 if first else x.ndim - 1
    apart = signs is not None and first and size == BLOCK  # as the rows of a block then are
    if signs is not None and not apart:
        x = rotate_by_product(x, signs, axis)

    def blocks(x: jax.Array) -> Sequence[jax.Array]:
        whole = x.reshape((-1, BLOCK, *shape[1:]) if first else (*shape[:-1], -1, BLOCK))
        if not apart:
            return (whole,)
        # Row by row: XLA would write what a rotation gives to memory before it finds its maxima.
        rows = [lax.slice_in_dim(whole, i, i + 1, axis=1).astype(jnp.float32) for i in range(BLOCK)]
        assert signs is not None, "only what is rotated is taken apart"
        return rotate_arrays(rows, list(signs))

    return x, ((axis + 1,), blocks, (axis, size // BLOCK))


def _in_e4m3(found: Nvfp4Values) -> Nvfp4Values:
    """The same numbers of "fold_exact" scales, float8_e4m3fn."""
    values = (found.values * jnp.bfloat16(IN_E4M3)).astype(jnp.float8_e4m3fn)
    # Written as they lie, in one byte each, before they are turned: XLA would turn what is rotated, in float32.
    values = with_layout_constraint(values, Layout(tuple(range(values.ndim))))
    return Nvfp4Values(values, found.outer / jnp.float32(IN_E4M3))


@functools.partial(jax.jit, static_argnames=("place", "rule", "rounding", "numbers", "interpret"))
def _in_one_pass(
    x: jax.Array,
    key: Key | None,
    signs: jax.Array | None,
    *,
    place: Place,
    rule: Rule,
    rounding: Rounding,
    numbers: Numbers,
    interpret: bool = False,
) -> Nvfp4Values:
    """The same by a kernel that holds each block in the registers of one thread, after a pass for the maximum of x."""
    rounded: Literal["even", "stochastic"] = "even" if rounding == "nearest" else "stochastic"
    options = Options(MODES[rule], rounded, "none" if signs is None else "hadamard")
    if signs is None:
        amax = jnp.max(scale_choice.finite_magnitude(float_bits.to_bits(x) & jnp.int32(0x7FFFFFFF)))
    else:
        unscaled = nvfp4_tiles.words(options, jnp.float32(1), signs, key)
        amax = float_bits.to_bits(nvfp4_kernel.rotated_amax(x, unscaled, options, place, interpret=interpret))
    outer = scale_choice.choose_outer(amax, _LARGEST, _E4M3, _FLOAT32, options.rule)
    words = nvfp4_tiles.words(options, outer, signs, key)
    values = nvfp4_kernel.quantize_values(x, words, options, place, numbers, interpret=interpret)
    return Nvfp4Values(values, outer if numbers == "bfloat16" else outer / jnp.float32(IN_E4M3))


def squares(w: jax.Array, rule: Rule, numbers: Numbers = "bfloat16") -> Nvfp4Values:
    """A matrix in squares of 16 x 16, filled with zeros up to whole ones, rounded to nearest; its axes as they are.

    >>> jax.eval_shape(lambda: squares(jnp.ones((20, 3)), "amax")).values.shape
    (32, 16)
    """
    padded, axes, blocks = _in_squares(w)
    found = quantize(padded, axes, rule, blocks=blocks).values()
    found = found._replace(values=found.values.reshape(padded.shape))
    return found if numbers == "bfloat16" else _in_e4m3(found)


def _in_squares(w: jax.Array) -> tuple[jax.Array, tuple[int, int], Any]:
    """(the matrix filled with zeros up to whole squares, the arguments `axes` and `blocks` of `quantize`)."""
    padded = jnp.pad(w, [(0, -size % BLOCK) for size in w.shape])
    rows, columns = padded.shape
    return padded, (1, 3), lambda w: (w.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK),)


class Observed(NamedTuple):
    """What becomes of each value where it is quantized; arrays of the shape of `found`.

    Attributes:
      exact: what is rounded, rotated where there are signs; float32.
      found: the numbers, bfloat16, and the scale of all.
      largest: of each value's block, the largest magnitude that its scale holds, in units of `found.outer`; float32.
    """

    exact: jax.Array
    found: Nvfp4Values
    largest: jax.Array


def observe(
    x: jax.Array, axis: int | None, rule: Rule, rounding: Rounding, key: Key | None, signs: jax.Array | None
) -> Observed:
    """What `along` does with these arguments; or, where the axis is None, `squares`. By XLA, on GPUs too.

    >>> seen = jax.jit(lambda x: observe(x, -1, "amax", "nearest", None, None))(jnp.array([[6.2, *[1.0] * 15]]))
    >>> float(seen.exact[0, 0]), float(seen.found.dequantize()[0, 0]), float(seen.largest[0, 1] * seen.found.outer)
    (6.199999809265137, 6.199999809265137, 6.199999809265137)
    """
    if axis is None:
        x, axes, blocks = _in_squares(x)
        coded = quantize(x, axes, rule, blocks=blocks)
    else:
        x, place, _ = _filled(x, axis, signs)
        x, (axes, blocks, group) = _in_blocks(x, signs, place)
        coded = quantize(x, axes, rule, rounding, key, blocks, group)
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
    rule: Rule,
    rounding: Rounding = "nearest",
    key: Key | None = None,
    blocks: Callable[[jax.Array], Sequence[jax.Array]] = lambda x: (x,),
    group: tuple[int, int] = (0, 1),
) -> Coded:
    """X as NVFP4.

    Args:
      x: real floats, bfloat16 and float32.
      axes: those along which a block extends.
      rule: how blocks find their scales.
      rounding: of values, or "eden", of corrected scales.
      key: of the random bits, for "stochastic" and "eden"; the bits of a value depend on its index, which counts the
        values of a block first.
      blocks: of x, what is quantized, in parts along the first of `axes`. It is computed twice, because a pass over x
        that computes it costs less than one over what it gives.
      group: for "eden", the axis and number of consecutive blocks that were rotated together.

    Returns:
      `Coded` of the shape of all blocks. A NaN or inf in x makes its block NaN.

    >>> rounded = jax.jit(lambda x: quantize(x, (1,), "amax").values().dequantize())(jnp.arange(16.0)[None] - 6)
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
    whole, mode, covers = jnp.max(amax), MODES[rule], rounding == "stochastic"
    if rounding == "eden":
        outer = scale_choice.choose_scale(whole, nvfp4_eden.LARGEST * nvfp4_eden.TOP, _FLOAT32)
        (scale,) = scale_choice.tile_scales(amax, outer, nvfp4_eden.LARGEST, _E4M3, "max", False)
        units = e2m1.nearest(magnitude, _divisor(scale, outer))
        lift = scale_choice.lift_of(outer)
        scale = _corrected(scale, (_divisor(scale, outer) * lift) * units, magnitude * lift, axes, group, key)
    else:
        outer = scale_choice.choose_outer(whole, _LARGEST, _E4M3, _FLOAT32, mode)
        scales = scale_choice.tile_scales(amax, outer, _LARGEST, _E4M3, mode, covers)
        scale = scales[0] if len(scales) == 1 else _best(magnitude, scales, outer, axes)
        if covers:
            assert key is not None, "stochastic rounding has random bits"
            units = e2m1.stochastic(magnitude, scale * outer, bits_of(x.shape, *key, fastest=axes[0]))
        else:
            units = e2m1.nearest(magnitude, _divisor(scale, outer))
    scale = jnp.where(lost, jnp.float32(jnp.nan), scale)
    return Coded(x, units, scale, outer)


def _largest(parts: Sequence[jax.Array], axes: tuple[int, ...]) -> jax.Array:
    return functools.reduce(jnp.maximum, [jnp.max(part, axis=axes, keepdims=True) for part in parts])


# Scales ---------------------------------------------------------------------------------------------------------------


def _product(scale: jax.Array, outer: jax.Array) -> jax.Array:
    """What a block's values are multiplied by; subnormals are zero, as in `parts`."""
    product = scale * outer
    return jnp.where(product < TINY, 0, product)


def _divisor(scale: jax.Array, outer: jax.Array) -> jax.Array:
    """What a block's values are divided by; where that is zero, more than any of its values."""
    product = _product(scale, outer)
    return jnp.where(product > 0, product, jnp.float32(2.0**120))


def _best(magnitude: jax.Array, scales: list[jax.Array], outer: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Of each block the scale that leaves the smallest error, the first where they are equal."""

    def error(scale: jax.Array) -> jax.Array:
        one = float_bits.to_bits(jnp.float32(1))
        inverse = float_bits.divide(one, lax.bitcast_convert_type(_product(scale, outer), jnp.int32))
        units = e2m1.nearest(magnitude, _divisor(scale, outer))
        return scale_choice.score(magnitude * inverse, units, scale, axes)

    best, least = scales[0], error(scales[0])
    for scale in scales[1:]:
        other = error(scale)
        best, least = jnp.where(other < least, scale, best), jnp.minimum(other, least)
    return best


def _corrected(
    scale: jax.Array,
    rounded: jax.Array,
    magnitude: jax.Array,
    axes: tuple[int, ...],
    group: tuple[int, int],
    key: Key | None,
) -> jax.Array:
    """Scales times <x, x> / <x, rounded x> of what was rotated together, rounded stochastically to E4M3 (MS-EDEN)."""
    assert key is not None, "scales are rounded with random bits"
    axis, count = group

    def summed(products: jax.Array) -> jax.Array:
        blocks = jnp.sum(products, axis=axes, keepdims=True)
        apart = blocks.reshape(*blocks.shape[:axis], -1, count, *blocks.shape[axis + 1 :])
        sums = jnp.sum(apart, axis=axis + 1, keepdims=True)
        return jnp.broadcast_to(sums, apart.shape).reshape(blocks.shape)

    whole, along = summed(magnitude * magnitude), summed(magnitude * rounded)
    wanted = scale * jnp.where(along > 0, whole / jnp.where(along > 0, along, 1), 1)
    wanted = jnp.minimum(wanted, jnp.float32(_E4M3.max))
    return float_bits.round_to_grid(wanted, scale_choice.grid_of(_E4M3), "stochastic", bits_of(scale.shape, *key))
