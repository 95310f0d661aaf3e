"""One weight in one step of `error_feedback`: quantized, with the error that is left.

An update forms `target = w + error`, rounds it to a `Stored`, and keeps the new error.
A recipe with a delayed amax takes its scale from earlier steps, and keeps the amax.
"""

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.operands import Contracts, Tensor
from tcfp_jax.recipes import Recipe, TCFPMode
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.sampling import sample_of
from tcfp_jax.weights.stored import Stored

_AMAX_DECAY = 0.999
# Stored weight, error and amax of the step before; None if the recipe reads none
Before: TypeAlias = tuple[Stored | None, Array | None, Array | None]


class Entry(NamedTuple):
    """State of one weight: its stored form, its error and its delayed amax."""

    weight: Stored
    error: Array | None
    amax: Array | None


class WeightStep(NamedTuple):
    """How one weight is quantized in one step.

    A model has hundreds of weights and a few shapes: weights of one shape, dtype,
    sharding and recipe share a traced and lowered function. XLA inlines the calls, so
    the bits do not change.
    """

    recipe: Recipe
    error_dtype: jnp.dtype
    contracts: Contracts = "first"

    @functools.partial(jax.jit, static_argnums=0)
    def first(self, w: Array, key: Array | None) -> Entry:
        """Return the first state of a weight."""
        error = None
        if self.recipe.feedback:
            error = jnp.zeros_like(w, self._handed_dtype())
        amax = None
        if self.recipe.amax == "delayed":
            amax = numerics.amax(w, axis=(-2, -1))
        return self._quantize(w, key, error, amax, amax)

    @functools.partial(jax.jit, static_argnums=0)
    def next(self, w: Array, key: Array | None, before: Before) -> Entry:
        """Return the state of a weight after a step that left it at `w`."""
        stored, kept, carried = before
        error = None if kept is None else kept.astype(self._handed_dtype())
        if error is not None and stored is not None:
            error = error * _units(stored)
        if self.recipe.amax == "fresh":
            # max |w| serves instead of max |w + error|: an error is at most half an ulp
            # of lo, and lo catches the part that exceeds the range of hi. XLA fuses max
            # |w| into the computation of w; the other reads errors again.
            known = (
                error is not None
                and self.recipe.mode is TCFPMode.TCFP12
                and self.recipe.scaling == Tensor()
            )
            amax = numerics.amax(w, axis=(-2, -1)) if known else None
            return self._quantize(w, key, error, amax, None)
        target = w.astype(jnp.float32)
        if error is not None:
            target = target + error.astype(jnp.float32)
        seen = numerics.amax(target, axis=(-2, -1))
        assert carried is not None, "the state of a delayed amax has one"
        after = _next_amax(carried, seen)
        return self._quantize(w, key, error, carried, after)

    def reads(self, stored: Stored, kept: Array, carried: Array) -> Before:
        """Return the state that `next` reads.

        The rest is None, and the program does not take it along.
        """
        feedback = self.recipe.feedback
        scaled = feedback and self.error_dtype == jnp.float8_e5m2
        delayed = self.recipe.amax == "delayed"
        return (
            stored if scaled else None,
            kept if feedback else None,
            carried if delayed else None,
        )

    def _quantize(
        self,
        w: Array,
        key: Array | None,
        error: Array | None,
        amax: Array | None,
        amax_after: Array | None,
    ) -> Entry:
        with jax.named_scope("quantize_w"):
            weight, left = quantize_weight(
                w,
                self.recipe,
                error=error,
                key=key,
                amax=amax,
                copies=self.recipe.copies,
                contracts=self.contracts,
            )
        weight = dataclasses.replace(weight, sample=sample_of(w))
        if left is not None:
            left = self._write_error(left, weight)
        return Entry(weight, left, amax_after)

    def _handed_dtype(self) -> DTypeLike:
        """Return the dtype in which quantizers take and return errors.

        FP8 needs a scale, so it is float32 there.
        """
        return jnp.float32 if self.error_dtype == jnp.float8_e5m2 else self.error_dtype

    def _write_error(self, error: Array, stored: Stored) -> Array:
        if self.recipe.amax == "delayed":
            error = error.astype(jnp.float32)
            # A value that a stale scale clipped leaves more than a rounding error. The
            # next scale fits again, and feeding the excess back would overshoot by as
            # much. NaN compares false and stays.
            halves = 2 if stored.has_residual else 1
            most = numerics.largest_rounding_error(stored.dtype, halves=halves)
            limit = most * stored.scale_of_values()
            error = jnp.where(jnp.abs(error) > limit, jnp.zeros_like(error), error)
        if self.error_dtype == jnp.float8_e5m2:
            return numerics.saturating_cast(error / _units(stored), self.error_dtype)
        return error.astype(self.error_dtype)


def _units(stored: Stored) -> Array:
    """Return the scale of each value of an error, which is never zero."""
    scale = stored.scale_of_values()
    if stored.is_packed:
        return jnp.where(scale == 0, jnp.float32(1), scale)
    return scale


def _next_amax(carried: Array, seen: Array) -> Array:
    """Return the delayed amax of the next step (PDDS).

    It rises at once and falls slowly; NaN and inf stay visible. Quantization by the
    amax of earlier steps needs one pass over W. It is safe, because `W_lo` reaches
    twice as far as `W_hi`: a weight may double between two steps without loss. A plain
    moving average takes hundreds of steps to follow a growing weight, and clips all the
    while.
    """
    return jnp.maximum(seen, _AMAX_DECAY * carried + (1 - _AMAX_DECAY) * seen)
