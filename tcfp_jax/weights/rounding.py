"""Rounding into a stored parameter: `make_parameter` from floats, `rewrite` to new
values.

**The scale rule.** A kernel that updates a weight in one pass cannot know the largest
value that it will write. So each rounding leaves `amax`, and the next one scales by it.
Scales change by whole binades, which rounds nothing, and only when `amax / scale`
leaves (14, 112]; the new scale brings it into (28, 56]. So a weight may wander over
three binades before its scale moves. It may grow fourfold in one step without loss, and
eightfold before it is clipped, because `W_hi` and `W_lo` together reach twice as far as
E4M3's 448. Normal values have 60 dB everywhere there. A weight of zeros has no amax and
starts with the scale 2**-16, which fits a first step between 1e-8 and 1e-2. The pass of
`adamw` takes a larger scale if its learning rate allows a larger step (`optim.steps`).
"""

import math
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import counter, numerics
from pallas_kernels.checks import check_choice
from pallas_kernels.operands import Operand, Quantized, Tensor, check_real
from pallas_kernels.quantize.api import dual_quantize
from pallas_kernels.specs import entries_of, moved
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Dual, Recipe, describe
from tcfp_jax.weights.layerwise import OnHost, at_once, by_layers
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.sampling import SIZE
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import WORD_BITS, Remainder, Training

# An error needs mantissa and little range: it is at most half a step of the grid of
# `W_lo`.
ERROR_DTYPE = jnp.float8_e3m4
# An error of 8, the largest that rounding leaves, is half a step
_ERRORS_IN_STEP = 16.0
_WHOLE = 2048  # smaller kernels keep no sample; their amax is compared instead
_HIGH, _LOW, _TARGET = 112.0, 14.0, 56.0  # of amax / scale
_SCALE_OF_ZERO = 2.0**-16


def make_parameter(
    kernel: Array | OnHost,
    weight: Weight,
    *,
    key: Array | None,
    remainder: Remainder,
    gradient_dtype: DTypeLike | None = None,
    shardings: PyTree | None = None,
) -> Parameter:
    """Return a kernel as a stored parameter; see `tcfp_jax.store`.

    Axes of the kernel in front of the layout's are a stack of layers with a scale each.
    A stack on the host is moved to the device layer by layer, and its arrays get
    `shardings`.

    >>> from tcfp_jax.recipes import recipe
    >>> from tcfp_jax.weights.layout import Layout
    >>> weight = Weight(recipe("tcfp12_single"), Layout((0,), (1,)))
    >>> kernel = jnp.full((2, 2), 0.5)
    >>> make_parameter(kernel, weight, key=None, remainder="dropped").kernel().tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    _check(weight.recipe, key, remainder)
    check_real("the kernel", kernel)
    dtype = jnp.dtype(kernel.dtype)
    of_gradient = dtype if gradient_dtype is None else jnp.dtype(gradient_dtype)
    if not jnp.issubdtype(of_gradient, jnp.floating) or of_gradient.itemsize < 2:
        raise TypeError(
            f"gradient_dtype={of_gradient} of a kernel in {dtype}: a gradient has no"
            " scale and needs floats of 16 bits or more; use"
            " gradient_dtype=jnp.bfloat16 or jnp.float32"
        )
    layout = weight.layout.stacked(len(kernel.shape))
    weight = replace(weight, layout=weight.layout.unstacked)
    *stack, rows, columns = layout.matrix_shape(kernel.shape)
    rounding = None
    if key is not None:
        seed = jax.random.bits(key, (*stack, 2), jnp.uint32) >> (32 - WORD_BITS)
        count = jnp.zeros((*stack, 1), jnp.float32)
        rounding = jnp.concatenate([seed.astype(jnp.float32), count], axis=-1)
    sample = None
    if math.prod((*stack, rows, columns)) > _WHOLE:
        sample = jnp.zeros((*stack, SIZE))
    blank = Training(
        rounding=rounding,
        amax=jnp.zeros(stack),
        error=None,
        slot=None,
        sample=sample,
        weight=weight,
        shape=kernel.shape[len(kernel.shape) - weight.layout.ndim :],
        dtype=dtype,
        gradient_dtype=of_gradient,
        remainder=remainder,
    )
    if isinstance(kernel, Array):
        return _rounded(kernel, blank)
    if len(kernel.shape) > weight.layout.ndim:
        return by_layers(_rounded, kernel, blank, shardings=shardings)
    return at_once(_rounded, kernel, blank, shardings=shardings)


def _rounded(kernel: Array, blank: Training) -> Parameter:
    """Return a kernel, or a layer of it, as a parameter whose state was blank."""
    layout = blank.weight.layout.stacked(kernel.ndim)
    target = layout.matrix(kernel).astype(jnp.float32)
    amax = numerics.amax(target, axis=(-2, -1))
    rounding = blank.rounding
    if rounding is not None:
        # a stack that explicit axes split
        rounding = moved(rounding, (*entries_of(amax), None))
    scale = None
    if blank.weight.recipe.scaling == Tensor():
        scale = next_scale(jnp.zeros_like(amax), amax)
    return _written(
        replace(blank, rounding=rounding, amax=amax), target, scale, rounding
    )


def rewrite(parameter: Parameter, target: Array) -> Parameter:
    """Return the parameter with the values `target`, float32 `[*stack, k, n]`, rounded
    by its own rule.

    A NaN or inf in the target makes the whole weight NaN.
    """
    state = parameter.state
    rows = parameter.rows
    if state.error is not None:
        error = state.error.astype(jnp.float32) * (_step_of(rows) / _ERRORS_IN_STEP)
        target = target + error * rows.scale_of_values()
    amax = numerics.amax(target, axis=(-2, -1))
    scale = None
    if state.weight.recipe.scaling == Tensor():
        scale = next_scale(rows.scale, amax)
    after = replace(state, amax=amax, rounding=state.next_rounding())
    return _written(after, target, scale, state.rounding)


def next_scale(scale: Array, amax: Array) -> Array:
    """Return the next scale, from the last one and the amax of the last rounding.

    The module's docstring states the rule.

    >>> last = jnp.float32(1.0)
    >>> [float(next_scale(last, jnp.float32(a))) for a in (112.0, 113.0, 13.0)]
    [1.0, 4.0, 0.25]
    """
    fresh = numerics.pow2_cover(amax, _TARGET)
    fresh = jnp.where(amax == 0, jnp.float32(_SCALE_OF_ZERO), fresh)
    keep = (amax > _LOW * scale) & (amax <= _HIGH * scale)
    return jnp.where(keep, scale, fresh)


def _written(
    state: Training,
    target: Array,
    scale: Array | None,
    rounding: Array | None,
) -> Parameter:
    """Return the parameter with values, error and copies made from `target`.

    Args:
      state: the state after the rounding, but for error and sample.
      target: values to round.
      scale: their scale; None for blocks, which find their own.
      rounding: state of stochastic rounding before it.
    """
    recipe = state.weight.recipe
    form = state.form
    amax = None
    if scale is not None:
        # Weights above 2**125 have the scale 2**121, whose largest magnitude is not a
        # float32.
        amax = jnp.minimum(
            scale * numerics.largest(form.dtype), jnp.finfo(jnp.float32).max
        )

    def one(target: Array, amax: Array | None, rounding: Array | None) -> Quantized:
        bits = None
        if rounding is not None:
            words = [rounding[i].astype(jnp.uint32) for i in range(3)]
            bits = counter.bits_of(target.shape, *counter.keys(*words))
        error = None
        if state.remainder == "feedback":
            error = jnp.zeros(target.shape, jnp.float32)
        # XLA's backend computes the random bits where it uses them, and needs no array
        # of them.
        return dual_quantize(
            target,
            recipe.scaling,
            dtype=form.dtype,
            bits=bits,
            error=error,
            amax=amax,
            backend="xla",
            orientation="both" if recipe.copies == "both" else "rows",
        )

    for _ in target.shape[:-2]:
        one = jax.vmap(one)
    rows, columns, left = one(target, amax, rounding)
    if columns is not None and form.forward == "hi":
        columns = columns.drop_residual()
    error = None if left is None else _kept_error(left, rows)
    state = replace(state, error=error, sample=state.sampled(rows))
    return Parameter(Stored(columns, rows), state)


def _kept_error(left: Array, rows: Operand) -> Array:
    """Return a float32 rounding error in `ERROR_DTYPE`; nothing clips, because these
    values have chosen the scale.
    """
    # Two factors: the scale of the smallest weights times a step underflows float32.
    # Division is not exact on GPUs.
    scaled = left * numerics.reciprocal_pow2(rows.scale_of_values())
    units = scaled * numerics.reciprocal_pow2(_step_of(rows) / _ERRORS_IN_STEP)
    return numerics.round_to(units, ERROR_DTYPE).astype(ERROR_DTYPE)


def _step_of(rows: Operand) -> Array:
    """Return the distance between neighbours of each `W_lo` in units of the scale: a
    power of two, float32.
    """
    return numerics.spacing(rows.residual.astype(jnp.float32), rows.dtype)


def _check(recipe: Recipe, key: Array | None, remainder: str) -> None:
    if recipe.scaling.packed:
        raise ValueError(
            f"weight={recipe.stored} with scaling={recipe.scaling}: codes of four bits"
            " are too coarse to be a parameter that updates change; keep float"
            ' parameters, which recipe("nvfp4") packs in every step (error_feedback'
            " keeps the codes), or freeze the packed weight and train adapters (LoRA,"
            " see docs/fp4.md)"
        )
    if recipe.stored is None:
        raise ValueError(
            f'recipe "{describe(recipe)}" stores nothing: its products read float'
            " parameters, which the optimizer updates; keep these, or store with"
            ' recipe("tcfp12_single")'
        )
    if not isinstance(recipe.stored, Dual):
        raise ValueError(
            f"weight={recipe.stored} has no residual, and one FP8 tensor has too few"
            ' bits to be a parameter; store with recipe("tcfp12_single"), which'
            " multiplies by W_hi alone, or keep float parameters and error_feedback"
        )
    check_choice("remainder", remainder, get_args(Remainder))
    if (key is None) == (remainder == "stochastic"):
        raise ValueError(
            f"remainder={remainder!r} with key={'None' if key is None else 'a key'}:"
            ' random bits are for remainder="stochastic", which needs'
            " key=jax.random.key(seed), and for no other"
        )
