"""`Reading`: how well an operand of a product was rounded, four numbers of it."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.operands import Operand, Quantized
from tcfp_jax.products.operands import quantize_operand
from tcfp_jax.recipes import Halves, Recipe
from tcfp_jax.weights.stored import Stored

OperandName = Literal["x", "w", "g"]
OPERANDS: tuple[OperandName, ...] = ("x", "w", "g")
# Larger than the value that it was rounded to by more than this part of it, at the top of the format: it was clipped.
_CLIPPED = 2.0**-10


class Reading(NamedTuple):
    """What rounding made of one operand; float32, with an axis for each loop that the product is in.

    Attributes:
      amax: the largest magnitude.
      underflow: the share of all values that are not zero and were rounded to zero.
      saturation: the share of all values that lie beyond what their scale can hold, and were clipped.
      snr: of the rounded values, in decibels; inf where rounding changed nothing.

    NaN stands for what is not known: of a gradient that comes quantized from the kernel that computed it, only `amax`
    is; of a product that did not run, or whose result has no gradient, nothing is.
    """

    amax: jax.Array
    underflow: jax.Array
    saturation: jax.Array
    snr: jax.Array


def read(values: jax.Array, rounded: Operand | jax.Array) -> Reading:
    """The reading of values and of what they were rounded to, an `Operand` or floats of the same shape.

    >>> from pallas_kernels.quantize.api import quantize
    >>> x = jnp.asarray([448.0, 1.0, 0.0001, 0.0])
    >>> found = read(x, quantize(x, "float8_e4m3fn").rows)
    >>> float(found.amax), float(found.underflow), float(found.saturation), float(found.snr) > 50
    (448.0, 0.25, 0.0, True)
    """
    x = values.astype(jnp.float32)
    q = rounded.dequantize() if isinstance(rounded, Operand) else rounded.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), initial=0.0)
    underflow = jnp.mean(((x != 0) & (q == 0)).astype(jnp.float32))
    # In units of amax, so that squares of small gradients are no zeros.
    unit = 1 / jnp.where(amax > 0, amax, 1.0)
    energy = lambda v: jnp.sum(jnp.square(v * unit))
    snr = 10 * jnp.log10(energy(x) / energy(x - q))
    return Reading(amax, underflow, _saturation(x, q, rounded), snr)


def read_product(
    recipe: Recipe, x: jax.Array, w: jax.Array | None, stored: Stored | None, made: Quantized | None
) -> tuple[Reading, Reading]:
    """The readings of x and of the weight, as the forward product reads them.

    Args:
      recipe: of the product.
      x: `[..., k]`.
      w: `[k, n]`, or zeros in the place of a parameter that is stored; None where there is no float weight.
      stored: the weight as products read it, or None.
      made: x as it was quantized already, or None.
    """
    if made is not None:
        of_x = read(x, made.rows)
    elif recipe.forward == "bf16":
        of_x = read(x, x.astype(jnp.bfloat16))
    else:
        of_x = read(x, _rows(x, recipe.activation, recipe, recipe.activation_halves))
    if stored is None:
        assert w is not None, "one of w and stored is there"
        return of_x, read(w, w.astype(jnp.bfloat16))
    assert recipe.weight is not None, "the weight is stored"
    operand = stored.for_forward(recipe.weight.forward).settled()
    whole = stored.for_forward("hi+lo").dequantize()
    # A parameter that is stored has zeros in the place of floats: what it stands for is all that is stored of it.
    floats = whole if w is None else jnp.where(jnp.any(w != 0), w.T.astype(jnp.float32), whole)
    return of_x, read(floats, operand)


def read_gradient(recipe: Recipe, g: jax.Array, made: Quantized | None = None) -> Reading:
    """The reading of the gradient of a product's result, which may come quantized alone."""
    if made is not None:
        unknown = jnp.full((), jnp.nan, jnp.float32)
        return Reading(jnp.max(jnp.abs(made.rows.dequantize()), initial=0.0), unknown, unknown, unknown)
    if recipe.dgrad == "bf16":
        return read(g, g.astype(jnp.bfloat16))
    return read(g, _rows(g, recipe.gradient, recipe, "hi"))


def _rows(x: jax.Array, dtype: str, recipe: Recipe, halves: Halves) -> Operand:
    """As products read them, to the bit; made by XLA, which fuses it with what reads it here."""
    return quantize_operand(x, dtype, dataclasses.replace(recipe, quantize_backend="xla"), halves=halves).rows


def _saturation(x: jax.Array, q: jax.Array, rounded: Operand | jax.Array) -> jax.Array:
    if not isinstance(rounded, Operand):
        return jnp.zeros((), jnp.float32)
    if not jnp.issubdtype(rounded.values.dtype, jnp.floating):  # two codes in a byte
        return jnp.full((), jnp.nan, jnp.float32)
    top = jnp.abs(rounded.values.astype(jnp.float32)) >= numerics.largest(rounded.values.dtype)
    return jnp.mean((top & (jnp.abs(x) > jnp.abs(q) * (1 + _CLIPPED))).astype(jnp.float32))
