"""`Reading`: four numbers that say how well an operand of a product was rounded.

Most products have three operands: x, the weight of the forward product, and g as dgrad
reads it. FP4 training quantizes the operands of wgrad again, and the weight of dgrad
after a forward product in BF16; these have readings, too.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import fp4, numerics
from pallas_kernels.operands import Operand, Quantized
from tcfp_jax.formats.nvfp4_arrays import observe
from tcfp_jax.products.fp4_training import OperandName, quantization
from tcfp_jax.products.fp8_weights import halves_read, quantize_operand, read_weight
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.stored import Stored

OPERANDS: tuple[OperandName, ...] = ("x", "w", "g", "w_dgrad", "x_wgrad", "g_wgrad")
# A value at the top of the format counts as clipped if it exceeds its rounded value by
# more than this share.
_CLIPPED = 2.0**-10


class Reading(NamedTuple):
    """Effect of rounding on one operand.

    Use this to find operands that lose values: watch `underflow` of gradients first,
    then `saturation`.

    The fields are float32, with an axis for each loop around the product.

    Attributes:
      amax: the largest magnitude.
      underflow: share of all values that are not zero and were rounded to zero.
      saturation: share of all values that exceed the range of their scale and were
        clipped.
      snr: signal-to-noise ratio of the rounded values, in decibels; inf if rounding
        changed nothing.

    All four are NaN for a product that did not run, whose result has no gradient, or
    that no probe can reach. For an operand that is rotated before it is rounded, `amax`
    is taken before the rotation and the rest after it.
    """

    amax: Array
    underflow: Array
    saturation: Array
    snr: Array


def read(values: Array, rounded: Operand | Array) -> Reading:
    """Return the reading of values and their rounded values.

    These are an `Operand`, or floats of the same shape.

    >>> from pallas_kernels.quantize.api import quantize
    >>> x = jnp.asarray([448.0, 1.0, 0.0001, 0.0])
    >>> found = read(x, quantize(x, "float8_e4m3fn").rows)
    >>> float(found.amax), float(found.underflow), float(found.saturation)
    (448.0, 0.25, 0.0)
    >>> float(found.snr) > 50
    True
    """
    x = values.astype(jnp.float32)
    if isinstance(rounded, Operand):
        q = rounded.dequantize()
        clipped = _clipped(x, q, rounded)
    else:
        q = rounded.astype(jnp.float32)
        clipped = jnp.zeros(x.shape, bool)
    return _compared(x, x, q, clipped)


def _compared(given: Array, x: Array, q: Array, clipped: Array) -> Reading:
    """Return the reading of float32 x and its rounded values q.

    x was made of the values given.
    """
    amax = jnp.max(jnp.abs(given), initial=0.0).astype(jnp.float32)
    # In units near amax the squares of small gradients do not become zero, and those of
    # large ones stay finite.
    unit = numerics.reciprocal_pow2(numerics.pow2_cover(amax, 4.0))
    noise = jnp.sum(jnp.square((x - q) * unit))
    signal = jnp.sum(jnp.square(x * unit))
    # also if x is zero
    snr = jnp.where(noise == 0, jnp.inf, 10 * jnp.log10(signal / noise))
    return Reading(amax, _share((x != 0) & (q == 0)), _share(clipped), snr)


def _share(these: Array) -> Array:
    return jnp.mean(these.astype(jnp.float32))


def _clipped(x: Array, q: Array, rounded: Operand) -> Array:
    """Return which values exceed the largest number of the format at their scale."""
    if rounded.scaling.packed:
        numbers = fp4.numbers(fp4.unpack(rounded.values))
        return (jnp.abs(numbers) >= np.max(fp4.E2M1)) & _beyond(x, q)
    dtype = rounded.values.dtype
    largest = numerics.largest(dtype)
    spare = _CLIPPED
    if rounded.lo is not None:  # lo rounds values at the top to either side, too
        spare = 2 * numerics.largest_rounding_error(dtype, halves=2) / largest
    is_top = jnp.abs(rounded.values.astype(jnp.float32)) >= largest
    return is_top & _beyond(x, q, spare)


def _beyond(x: Array, q: Array, spare: float = _CLIPPED) -> Array:
    return jnp.abs(x) > jnp.abs(q) * (1 + spare)


def operands(recipe: Recipe) -> tuple[OperandName, ...]:
    """Return the operands that `read_product` and then `read_gradients` reads.

    >>> from tcfp_jax.recipes import recipe
    >>> [operands(recipe(name)) for name in ("tensorwise", "nvfp4_training")]
    [('x', 'w', 'g'), ('x', 'w', 'x_wgrad', 'g', 'g_wgrad')]
    """
    if recipe.fp4 is None:
        return "x", "w", "g"
    if recipe.fp4.forward_operands == "bf16":
        return "x", "w", "w_dgrad", "x_wgrad", "g", "g_wgrad"
    return "x", "w", "x_wgrad", "g", "g_wgrad"


def read_product(
    recipe: Recipe,
    x: Array,
    w: Array | None,
    stored: Stored | None,
    made: Quantized | None,
    words: Array | None = None,
) -> tuple[Reading, ...]:
    """Return the readings of x and the weight, in the order of `operands`.

    `w` is `[k, n]`, or a stack of a grouped product. It is zeros for a stored
    parameter, and None without a float weight. `made` is x if it is quantized already;
    `words` are those of FP4 training's key.
    """
    if recipe.fp4 is not None:
        assert w is not None, "nothing is stored"
        return _read_fp4_training(recipe, x, w, words)
    if made is not None:
        of_x = read(x, made.rows)
    elif recipe.forward == "bf16":
        of_x = read(x, x.astype(jnp.bfloat16))
    elif recipe.activation == "float4_e2m1fn":
        tokens = _tokens(x)
        # a byte holds two codes
        tokens = jnp.pad(tokens, ((0, 0), (0, tokens.shape[-1] % 2)))
        of_x = read(tokens, quantize_fp4(tokens))
    else:
        of_x = read(x, _rows(x, recipe.activation, recipe))
    weight = read_weight(w, stored)
    if not isinstance(weight, Stored):
        return of_x, read(weight, weight.astype(jnp.bfloat16))
    operand = weight.for_forward(halves_read(recipe, "forward")).settled()
    whole = weight.for_forward("hi+lo").dequantize()
    # A stored parameter has zeros for w; its own value is then hi + lo. Packed codes of
    # an odd k end in a zero.
    if w is None:
        return of_x, read(whole, operand)
    given = w.swapaxes(-1, -2).astype(jnp.float32)
    sizes = zip(whole.shape, given.shape, strict=True)
    given = jnp.pad(given, [(0, size - n) for size, n in sizes])
    return of_x, read(jnp.where(jnp.any(w != 0), given, whole), operand)


def read_gradients(
    recipe: Recipe, g: Array, words: Array | None = None
) -> tuple[Reading, ...]:
    """Return the readings of the gradient of a result, in the order of `operands`."""
    if recipe.fp4 is not None:
        of_tokens = _read_nvfp4("g_wgrad", _tokens(g), words)
        return _read_nvfp4("g", g, words), of_tokens
    if recipe.dgrad == "bf16":
        return (read(g, g.astype(jnp.bfloat16)),)
    return (read(g, _rows(g, recipe.gradient, recipe)),)


def _read_fp4_training(
    recipe: Recipe, x: Array, w: Array, words: Array | None
) -> tuple[Reading, ...]:
    assert recipe.fp4 is not None, "the caller looked"
    of_w = _read_nvfp4("w", w, words)
    in_bf16 = x.astype(jnp.bfloat16)
    # The backward pass quantizes x after its cast to BF16.
    of_tokens = _read_nvfp4("x_wgrad", _tokens(x), words, _tokens(in_bf16))
    if recipe.fp4.forward_operands == "fp4":
        return _read_nvfp4("x", x, words), of_w, of_tokens
    w_in_bf16 = w.astype(jnp.bfloat16)
    return read(x, in_bf16), read(w, w_in_bf16), of_w, of_tokens


def _read_nvfp4(
    operand: OperandName,
    x: Array,
    words: Array | None,
    given: Array | None = None,
) -> Reading:
    """Return the reading of an operand of FP4 training.

    `given` is quantized instead of x if it is there. Zeros that fill up blocks do not
    count, except along a rotated axis, where the rotation has mixed them in.
    """
    how = quantization(operand, words)
    found = observe(x if given is None else given, *how)
    exact = found.exact if given is None else observe(x, *how).exact
    kept = [slice(size) for size in x.shape]
    if how.signs is not None and how.axis is not None:
        kept[how.axis] = slice(None)
    inside = tuple(kept)
    q = found.found.dequantize()
    codes = jnp.abs(found.found.values.astype(jnp.float32))
    clipped = (codes >= found.largest) & (q != 0) & _beyond(exact, q)
    given = x.astype(jnp.float32)
    return _compared(given, exact[inside], q[inside], clipped[inside])


def _tokens(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _rows(x: Array, dtype: str, recipe: Recipe) -> Operand:
    """Return the rows that products read, to the bit.

    XLA quantizes, because it fuses that with the reading.
    """
    by_xla = dataclasses.replace(recipe, quantize_backend="xla")
    return quantize_operand(x, dtype, by_xla).rows
