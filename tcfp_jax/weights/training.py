"""`Training`: the state of a stored weight that is the parameter, next to its values.

It holds the kernel's shape and dtype, the slot of its gradient, and the state of
rounding. A float8 array cannot hold a gradient (three bits, no scale). So
`value_and_grad` puts a float `slot` of the kernel's shape into the weight. Products
never read the slot; its gradient is the weight's.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.operands import Operand
from tcfp_jax.paths import serialize_with_flax
from tcfp_jax.recipes import Dual
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.sampling import agree, sample_of_codes

Remainder = Literal["stochastic", "feedback", "dropped"]

WORD_BITS = 24  # float32 holds integers of 24 bits exactly
_TINY = float(jnp.finfo(jnp.float32).tiny)  # some backends flush smaller values to zero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Training:
    """State of a stored weight that is the parameter.

    Use this to read what `tcfp_jax.store` decided; use `Parameter` for the values.

    Attributes:
      rounding: state of stochastic rounding, float32 `[*stack, 3]`: two words of a seed
        and the count of roundings, as integers below 2**24. Integer arrays would make
        `jax.grad` fail before the error that names `value_and_grad`. Inside of it keys
        `[*stack]`, on which arithmetic raises.
      amax: the largest |w| at the last rounding, float32 `[*stack]`.
      error: the last rounding error, if `remainder` is "feedback": E3M4, in sixteenths
        of the step at each `W_lo`.
      slot: zeros of the kernel's shape whose gradient is the weight's; only inside
        `value_and_grad`.
      sample: float32 `[*stack, 16]`, values that the last rounding wrote (`sampling`);
        None up to 2048 values.
      weight: recipe and layout of the kernel.
      shape: shape of the kernel, without the axes of a stack of layers.
      dtype: dtype of the float parameter.
      gradient_dtype: dtype of its gradient.
      remainder: "stochastic" rounds to either neighbour so that the mean is right;
        "feedback" keeps the error in E3M4 and adds it to the next update; "dropped"
        forgets it.
    """

    rounding: Array | None
    amax: Array
    error: Array | None
    slot: Array | None
    sample: Array | None
    weight: Weight = field(metadata=dict(static=True))
    shape: tuple[int, ...] = field(metadata=dict(static=True))
    dtype: DTypeLike = field(metadata=dict(static=True))
    gradient_dtype: DTypeLike = field(metadata=dict(static=True))
    remainder: Remainder = field(metadata=dict(static=True))

    @property
    def form(self) -> Dual:
        """The two halves that the recipe stores."""
        form = self.weight.recipe.stored
        if not isinstance(form, Dual):
            raise TypeError(f"{form} is no form of a stored parameter")
        return form

    def next_rounding(self) -> Array | None:
        """Return `rounding` after one more rounding; the count restarts after 2**24."""
        if self.rounding is None:
            return None
        count = self.rounding[..., 2]
        following = jnp.where(count >= 2.0**WORD_BITS - 1, 0.0, count + 1)
        return jnp.concatenate([self.rounding[..., :2], following[..., None]], axis=-1)

    def sampled(self, rows: Operand) -> Array | None:
        """Return the sample of new codes, or None for a kernel without one."""
        return None if self.sample is None else sample_of_codes(rows)

    @jax.jit
    def is_sound(self, rows: Operand) -> Array:
        """Return whether codes are those that a rounding wrote; bool `[*stack]`.

        NaN is sound, because it shows anyway.
        """
        if self.sample is not None:
            found = sample_of_codes(rows)
            same = agree(found, self.sample, jnp.float32(_TINY), rows.values)
            return same | jnp.any(jnp.isnan(found), axis=-1)
        sound = jnp.bool_(True)
        if self.rounding is not None:
            sound = jnp.all(jnp.floor(self.rounding) == self.rounding, axis=-1)
        hi = rows.values.astype(jnp.float32)
        values = (hi + rows.residual.astype(jnp.float32)) * rows.scale_of_values()
        found = numerics.amax(values, axis=(-2, -1))
        # Half a step of the smaller half, twice for stochastic rounding: a 128th of the
        # largest value in E4M3.
        tolerance = 2.0 ** -(2 * jnp.finfo(rows.dtype).nmant + 1) * self.amax + _TINY
        close = jnp.abs(found - self.amax) <= tolerance
        return sound & (close | jnp.isnan(found) | jnp.isnan(self.amax))


serialize_with_flax(Training)
