"""`Stored`: a quantized weight, as what its two products read of it.

    forward     the operand of y = x W, `[..., n, k]`, contracted along k
    backward    the operand of dx = g Wᵀ, `[..., k, n]`, contracted along n

With one scale, or with square blocks, both hold the same numbers, and one may be absent: it is then the transpose of
the other. With rows and vectors they are two quantizations of one weight. Codes of FP4 are one operand, packed along k,
which both products read as it is. A stack of weights has leading axes and a scale for each entry.

A weight that an optimizer made carries a sample of the parameter that it was made of, so that it is never multiplied in
the place of another one: see `tcfp_jax.weights.freshness`. A weight that is the parameter itself, of which no float
copy exists, has a `Training`: see `tcfp_jax.weights.training`.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.operands import Fp4, Operand, Scaling
from pallas_kernels.specs import device_count
from tcfp_jax.recipes import Dual, Halves, Single

NO_GRADIENT = (
    "a gradient with respect to packed FP4 codes is asked for, which have none: train float adapters beside the frozen "
    'weight (LoRA, see docs/fp4.md), or float parameters that recipe("nvfp4") packs in every step'
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stored:
    """A weight `[..., k, n]` as the recipe's products read it; made by `quantize_weight`.

    Attributes:
      forward: `[..., n, k]`, or None where it is the transpose of `backward`.
      backward: `[..., k, n]`, or None where it is the transpose of `forward`.
      sample: float32 `[..., 16]`, values of the parameter that the weight was made of (`freshness.sample_of`); None
        where there is none to compare with, as in weights for inference.
      training: of a weight that is the parameter (`training.Training`), or None.
      padding: how many codes of zero packed codes have behind their k: one where k is odd, as a byte holds two.
    """

    forward: Operand | None
    backward: Operand | None
    sample: jax.Array | None = None
    training: Any = None
    padding: int = field(default=0, metadata=dict(static=True))

    @property
    def _one(self) -> Operand:
        present = self.backward if self.backward is not None else self.forward
        if present is None:
            raise ValueError("Stored(None, None) holds no weight; give it the operand of one product at least")
        return present

    @property
    def scaling(self) -> Scaling:
        """Which values share a scale."""
        return self._one.scaling

    @property
    def dtype(self) -> jnp.dtype:
        """The format of the values."""
        return self._one.dtype

    @property
    def has_residual(self) -> bool:
        """Whether the weight has two halves."""
        return self._one.lo is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, `[..., k, n]`."""
        shape = self._one.shape
        if self.padding:
            shape = (*shape[:-1], shape[-1] - self.padding)
        return shape if self.backward is not None else (*shape[:-2], shape[-1], shape[-2])

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes of a stack, of which each entry has scales of its own."""
        operand = self._one
        inner = len(operand.scaling.scale_shape(operand.shape[-2:]))
        return operand.scale.shape[: operand.scale.ndim - inner]

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def serves(self, scaling: Scaling, form: Single | Dual) -> bool:
        """Whether forward and dgrad of a recipe with this scaling, and weights of this form, can read it."""
        one = self._one
        both = self.forward is not None and self.backward is not None
        halves = one.lo is not None if "hi+lo" in (form.forward, form.dgrad) else True
        if isinstance(form, Single):
            halves = one.lo is None
        if isinstance(one.scaling, Fp4) and isinstance(scaling, Fp4):
            # By what rule its scales were found is nothing that a product reads.
            return (one.scaling.format, one.scaling.tile) == (scaling.format, scaling.tile)
        return one.scaling == scaling and halves and (both or scaling.serves_both)

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether it is a weight of this shape `[..., k, n]`.

        Packed codes whose `padding` a checkpoint without a template did not keep may hold an odd k and a code of zero.
        """
        padded = list(shape)
        if isinstance(self.scaling, Fp4):
            k = -2 if self.backward is None else -1
            padded[k] += padded[k] % 2
        return self.shape in (tuple(shape), tuple(padded))

    def describe(self) -> str:
        """What it is, for messages."""
        if isinstance(self.scaling, Fp4):
            return f"weight of packed FP4 codes with {self.scaling}"
        halves = "hi + lo" if self.has_residual else "one FP8 tensor"
        both = self.forward is not None and self.backward is not None
        orientations = "both orientations" if both else "one orientation"
        return f"weight of {halves} in {self.dtype} with {self.scaling}, in {orientations}"

    def for_forward(self, halves: Halves = "hi+lo") -> Operand:
        """What the forward product reads, `[..., n, k]`: all of it, or W_hi alone."""
        return _read(self.forward, self._one, halves)

    def for_dgrad(self, halves: Halves = "hi+lo") -> Operand:
        """What the input gradient reads, `[..., k, n]`: all of it, or W_hi alone."""
        return _read(self.backward, self._one, halves)

    def swap(self) -> "Stored":
        """The transposed weight `[..., n, k]`: what was read forward is read backward; nothing moves.

        Places of the sample come in pairs, one half of them the transposes of the other, so the halves change places.
        Of a weight that is the parameter it is the transposed matrix, through which the gradient goes to the parameter.
        """
        sample = None if self.sample is None else jnp.roll(self.sample, self.sample.shape[-1] // 2, axis=-1)
        training = self.training
        if training is not None:
            slot, layout = self._slot, dataclasses.replace(training.weight.layout, inputs=(0,), outputs=(1,), stack=())
            training = dataclasses.replace(
                training,
                slot=None if slot is None else slot.swapaxes(-1, -2),
                error=None if training.error is None else training.error.swapaxes(-1, -2),
                weight=dataclasses.replace(training.weight, layout=layout),
                shape=(self.shape[-1], self.shape[-2]),
            )
        return dataclasses.replace(self, forward=self.backward, backward=self.forward, sample=sample, training=training)

    def drop_residual(self) -> "Stored":
        """W_hi alone."""
        only = lambda operand: None if operand is None else operand.drop_residual()
        return dataclasses.replace(self, forward=only(self.forward), backward=only(self.backward))

    def poisoned_unless(self, sound: jax.Array) -> "Stored":
        """The same with NaN for the scales of matrices that are not sound, bool `[]` or `[*stack]`; other bits stay."""
        poisoned = lambda operand: None if operand is None else _poisoned_unless(operand, sound)
        return dataclasses.replace(self, forward=poisoned(self.forward), backward=poisoned(self.backward))

    def scale_of_values(self) -> jax.Array:
        """The scales in float32, shaped to multiply `[..., k, n]`; of rows and vectors those that dgrad reads."""
        if isinstance(self.scaling, Fp4):
            return self._unpadded(self._one.scale_of_values())
        return self.for_dgrad().scale_of_values()

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The weight `[..., k, n]`, in float32 and then `dtype`; of rows and vectors as dgrad reads it.

        The gradient of a weight that `tcfp_jax.store` made goes to it, as `tcfp_jax.grad` takes it.

        Raises:
          TypeError: jax's own `grad` asks for a gradient with respect to the weight.

        >>> from tcfp_jax.recipes import recipe
        >>> from tcfp_jax.weights.quantization import quantize_weight
        >>> quantize_weight(jnp.full((2, 2), 0.5), recipe("tcfp12"))[0].dequantize().tolist()
        [[0.5, 0.5], [0.5, 0.5]]
        """
        values, slot = self._unpadded(constant(self)._one.dequantize(dtype)), self._slot
        return values if slot is None else values + slot.astype(dtype)

    @property
    def _slot(self) -> jax.Array | None:
        """The zeros to which the gradient of a weight that is the parameter goes, as the matrix `[..., k, n]`."""
        slot = None if self.training is None else self.training.slot
        return None if slot is None else self.training.weight.layout.stacked(slot.ndim).matrix(slot)

    def _unpadded(self, values: jax.Array) -> jax.Array:
        """Values of the operand that is there as those of the weight `[..., k, n]`."""
        if self.padding:
            values = values[..., : -self.padding]
        return values if self.backward is not None else values.swapaxes(-1, -2)

    def __getitem__(self, index: Any) -> "Stored":
        """The same, for `kernel[...]`, as NNX layers read a parameter.

        Raises:
          TypeError: a part of it is asked for.
        """
        if index is not Ellipsis:
            self._refuse("indexes")
        return self

    def _refuse(self, what: str = "reads") -> NoReturn:
        floats = (
            "give tcfp_jax.optim.on_stored(tx) to optax, or take the float parameters with tcfp_jax.dequantize(params)"
            if self.training is not None
            else "or take its float matrix [..., k, n] with weight.dequantize()"
        )
        raise TypeError(
            f"the parameter is a stored {self.describe()}, but code {what} it as a float array; multiply by it with a "
            f"layer of tcfp_jax or a converted model, {floats}"
        )

    def __jax_array__(self) -> NoReturn:
        """Raise: it is no float array."""
        self._refuse()

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        """Raise: it is no float array."""
        self._refuse()

    def _operator(self, *args: Any) -> NoReturn:
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = _operator


def of_operand(operand: Operand) -> Stored:
    """One operand as a stored weight: codes of FP4 are `[n, k]`, what `split` and `quantize` made of w is `[k, n]`."""
    return Stored(operand, None) if isinstance(operand.scaling, Fp4) else Stored(None, operand)


# Not a check in the rule of a product: a shared trace whose rule has raised once cannot be differentiated any more
# (jax 0.10 to 0.12: `fwd_jaxpr_from_zeros` empties the stores of a rule that it keeps for other zeros).
@jax.custom_jvp
def _constant(stored: Stored) -> Stored:
    return stored


@_constant.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    if isinstance(primals[0].scaling, Fp4):
        raise TypeError(NO_GRADIENT)
    raise TypeError(
        "a gradient with respect to a stored weight is asked for: its halves are FP8, and so would be their "
        "gradients, three bits without a scale. Parameters that tcfp_jax.store made are differentiated by "
        "tcfp_jax.value_and_grad or tcfp_jax.grad, in the place of jax's; beside float parameters, differentiate these "
        "and pass the stored weight as quantized= (in Flax: layer_state(opt_state) as a constant)"
    )


def constant(stored: Stored) -> Stored:
    """The values of a stored weight, of which no gradient may be asked; what it has for training is left out.

    Raises:
      TypeError: they are differentiated, as by `jax.grad` with respect to the weight.
    """
    return _constant(dataclasses.replace(stored, sample=None, training=None))


def _poisoned_unless(operand: Operand, sound: jax.Array) -> Operand:
    scale = operand.scale
    sound = sound.reshape(sound.shape + (1,) * (scale.ndim - sound.ndim))
    if scale.dtype == jnp.float32:
        # A product, not a choice: under explicit axes it takes operands of which one is sharded and one is not.
        return dataclasses.replace(operand, scale=scale * jnp.where(sound, jnp.float32(1), jnp.float32(jnp.nan)))
    code = lax.bitcast_convert_type(scale, jnp.uint8) | jnp.where(sound, jnp.uint8(0), jnp.uint8(0xFF))
    return dataclasses.replace(operand, scale=lax.bitcast_convert_type(code, scale.dtype))


def _read(operand: Operand | None, other: Operand, halves: Halves) -> Operand:
    """The halves of an operand, or of the transpose of the other one where it is absent."""
    chosen = other if operand is None else operand
    if halves == "hi" and chosen.lo is not None:
        chosen = chosen.drop_residual()
    if operand is not None:
        return chosen
    # Devices that hold parts of a weight gather it once for the products of both orientations.
    return chosen.turn_late() if chosen.values.ndim == 2 and device_count() > 1 else chosen.turn()
