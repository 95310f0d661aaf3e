"""`Stored`: a quantized weight as the operands of its two products.

    forward     the operand of y = x W, `[..., n, k]`, contracted along k
    backward    the operand of dx = g Wᵀ, `[..., k, n]`, contracted along n

A weight from an optimizer carries a sample of its parameter, so that it never
multiplies in another parameter's place (`tcfp_jax.weights.freshness`). A weight that is
the parameter itself is a `Parameter` (`tcfp_jax.weights.parameter`).
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.derivatives import not_differentiated
from pallas_kernels.operands import Fp4, Operand, Scaling
from pallas_kernels.specs import Shape, device_count
from tcfp_jax.paths import serialize_with_flax
from tcfp_jax.recipes import Dual, Halves, Single
from tcfp_jax.weights.sampling import sample_of_transpose

_E4M3 = jnp.dtype(jnp.float8_e4m3fn)
_E5M2 = jnp.dtype(jnp.float8_e5m2)
NO_GRADIENT = (
    "a gradient with respect to packed FP4 codes is asked for, which have none: train"
    " float adapters next to the frozen weight (LoRA, see docs/fp4.md), or float"
    ' parameters that recipe("nvfp4") packs in every step'
)
_NO_GRADIENT_OF_HALVES = (
    "a gradient with respect to a stored weight is asked for: its halves are FP8, and"
    " so would be their gradients, three bits without a scale. Parameters that"
    " tcfp_jax.store made are differentiated by tcfp_jax.value_and_grad or grad (NNX:"
    " tcfp_jax.nnx.value_and_grad), not by JAX's; next to float parameters,"
    " differentiate these and pass the stored weight as quantized= (in Flax:"
    " layer_state(opt_state) as a constant)"
)


class NotAnArray:
    """A weight that other code may take for a float array; each such use raises.

    Attributes:
      instead: the repair, at the end of the message.
    """

    instead = "or take its float matrix [..., k, n] with weight.dequantize()"

    def describe(self) -> str:
        """Return a description for messages."""
        raise NotImplementedError

    def __getitem__(self, index: object) -> "NotAnArray":
        """Return the weight itself, for `kernel[...]`, because NNX layers read
        parameters so; a part raises.
        """
        if index is not Ellipsis:
            self._refuse("indexes")
        return self

    def _refuse(self, use: str = "reads") -> NoReturn:
        raise TypeError(
            f"the parameter is a stored {self.describe()}, but code {use} it as a"
            " float array; multiply by it with a layer of tcfp_jax or a converted"
            f" model, {self.instead}"
        )

    def _operator(self, *args: object, **options: object) -> NoReturn:
        self._refuse()

    __jax_array__ = __array__ = _operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        __rtruediv__
    ) = _operator
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = _operator


@dataclass(frozen=True)
class Stored(NotAnArray):
    """A quantized weight `[..., k, n]`: values without a gradient.

    Use it as `w` or `quantized=` of a product, for weights that an optimizer keeps next
    to float parameters, or that do not change (inference, frozen weights under LoRA). A
    weight that is trained itself is a `Parameter`.

    * At least one operand is present. An absent one is the transpose of the other.
    * With one scale, or with square blocks, both hold the same numbers. With rows and
      vectors they are two quantizations of one weight.
    * A residual may be in one operand alone: a product that reads both halves then
      reads the transpose of that one.
    * FP4 codes are one operand, packed along k, which serves both products.
    * Leading axes are a stack, and each entry has scales of its own.

    Attributes:
      forward: `[..., n, k]`, or None if it is the transpose of `backward`.
      backward: `[..., k, n]`, or None if it is the transpose of `forward`.
      sample: float32 `[..., 16]`, values of the parameter that the weight was made of
        (`sampling.sample_of`). None if no parameter exists to compare with, as in
        inference.
      padding: the number of zero codes after the first k in packed codes: one if k is
        odd, because a byte holds two.
      e5m2: whether the codes are E5M2. Arrays say so by their dtype; other leaves in
        the places of arrays, such as shardings, need it here. The children of such a
        weight are `forward_float8_e5m2` and so on: checkpoints know arrays by name, and
        Orbax would cast codes from one FP8 format to another.
    """

    forward: Operand | None
    backward: Operand | None
    sample: Array | None = None
    padding: int = 0
    e5m2: bool = False

    _state = None  # an empty place in trees, see `_CHILDREN`

    def __post_init__(self) -> None:
        # A step flattens hundreds of weights, so this compares two objects instead of
        # asking NumPy.
        one = self.forward if self.backward is None else self.backward
        dtype = getattr(getattr(one, "values", None), "dtype", None)
        e5m2 = dtype is _E5M2 or (self.e5m2 and dtype is not _E4M3)
        object.__setattr__(self, "e5m2", e5m2)

    @staticmethod
    def of(operand: Operand) -> "Stored":
        """Return one operand as a stored weight: FP4 codes are `[n, k]`, results of
        `split` and `quantize` `[k, n]`.

        Use this to multiply by an operand that you quantized yourself;
        `tcfp_jax.matmul` does it by itself.
        """
        if operand.scaling.packed:
            return Stored(operand, None)
        return Stored(None, operand)

    @functools.cached_property
    def _one(self) -> Operand:
        """The operand that has all halves of the weight; `backward` if both have."""
        forward = self.forward
        backward = self.backward
        if backward is None:
            if forward is None:
                raise ValueError(
                    "Stored(None, None) holds no weight; give it the operand of one"
                    " product at least"
                )
            return forward
        if forward is not None and backward.lo is None and forward.lo is not None:
            return forward
        return backward

    @property
    def scaling(self) -> Scaling:
        """The scaling of the values."""
        return self._one.scaling

    @property
    def dtype(self) -> jnp.dtype:
        """The format of the values."""
        return self._one.dtype

    @property
    def has_residual(self) -> bool:
        """True if the weight has two halves."""
        return self._one.lo is not None

    @property
    def is_packed(self) -> bool:
        """True if the values are packed FP4 codes."""
        return self.scaling.packed

    @property
    def codes(self) -> Fp4 | None:
        """The format of packed codes, or None."""
        return self.scaling if isinstance(self.scaling, Fp4) else None

    @property
    def has_both(self) -> bool:
        """True if each product has its own operand."""
        return self.forward is not None and self.backward is not None

    @functools.cached_property
    def shape(self) -> Shape:
        """The shape of the weight, `[..., k, n]`."""
        *stack, first, second = self._one.shape
        second -= self.padding
        if self._one is self.backward:
            return (*stack, first, second)
        return (*stack, second, first)

    @functools.cached_property
    def stack(self) -> tuple[int, ...]:
        """The sizes of the leading axes, whose entries have scales of their own."""
        operand = self._one
        of_matrix = operand.scaling.scale_shape(operand.shape[-2:])
        return operand.scale.shape[: operand.scale.ndim - len(of_matrix)]

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return bytes_of(self)

    def serves(self, scaling: Scaling, form: Single | Dual) -> bool:
        """Return whether forward and dgrad of a recipe with this scaling and form of
        weights can read it.
        """
        if isinstance(form, Single):
            has_halves = not self.has_residual
        else:
            reads_both = "hi+lo" in (form.forward, form.dgrad)
            has_halves = self.has_residual or not reads_both
        turns = self.has_both or scaling.serves_both
        return scaling.reads(self.scaling) and has_halves and turns

    def holds(self, shape: Sequence[int]) -> bool:
        """Return whether it is a weight of this shape `[..., k, n]`.

        A checkpoint without a template loses `padding`, so packed codes may hold an odd
        k and a zero code.
        """
        if self.shape == tuple(shape):
            return True
        if not self.is_packed:
            return False
        padded = list(shape)
        k = -2 if self.backward is None else -1
        padded[k] += padded[k] % 2
        return self.shape == tuple(padded)

    def describe(self) -> str:
        """Return a description for messages."""
        if self.is_packed:
            return f"weight of packed FP4 codes with {self.scaling}"
        halves = "hi + lo" if self.has_residual else "one FP8 tensor"
        orientations = "both orientations" if self.has_both else "one orientation"
        return (
            f"weight of {halves} in {self.dtype} with {self.scaling}, in {orientations}"
        )

    def for_forward(self, halves: Halves = "hi+lo") -> Operand:
        """Return the operand of the forward product, `[..., n, k]`: both halves, or
        W_hi alone.

        Use this to call a kernel of `pallas_kernels` yourself; use `tcfp_jax.matmul`
        instead in models.
        """
        return _read(self.forward, self._one, halves)

    def for_dgrad(self, halves: Halves = "hi+lo") -> Operand:
        """Return the operand of the input gradient, `[..., k, n]`: both halves, or W_hi
        alone.

        Use this for the operand of a backward pass that you write yourself.
        """
        return _read(self.backward, self._one, halves)

    def swap(self) -> "Stored":
        """Return the transposed weight `[..., n, k]`, with the two operands exchanged;
        no value moves.

        Use this for a head that reads the transpose of a stored table.
        """
        return replace(
            self,
            forward=self.backward,
            backward=self.forward,
            sample=sample_of_transpose(self.sample),
        )

    def drop_residual(self) -> "Stored":
        """Return W_hi alone.

        Use this to serve a weight in half the memory, if one FP8 tensor is exact
        enough.
        """
        return self._each(Operand.drop_residual)

    def poisoned_unless(self, sound: Array) -> "Stored":
        """Return the weight with NaN scales for matrices that are not `sound`, bool
        `[]` or `[*stack]`.
        """
        return self._each(functools.partial(_poisoned_unless, sound=sound))

    def _each(self, change: Callable[[Operand], Operand]) -> "Stored":
        """Return the weight with each of its operands changed."""
        forward = None if self.forward is None else change(self.forward)
        backward = None if self.backward is None else change(self.backward)
        return replace(self, forward=forward, backward=backward)

    def scale_of_values(self) -> Array:
        """Return float32 scales shaped to multiply `[..., k, n]`; for rows and vectors
        dgrad's.
        """
        if self.is_packed:
            return self._unpadded(self._one.scale_of_values())
        return self.for_dgrad().scale_of_values()

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Return the weight `[..., k, n]`, in float32 and then `dtype`.

        Use this to compare or export values; use `tcfp_jax.dequantize` instead for a
        tree of parameters.

        For rows and vectors these are the values of dgrad.

        Raises:
          TypeError: jax's own `grad` asks for a gradient with respect to the weight.

        >>> from tcfp_jax.recipes import recipe
        >>> from tcfp_jax.weights.quantization import quantize_weight
        >>> stored, _ = quantize_weight(jnp.full((2, 2), 0.5), recipe("tcfp12"))
        >>> stored.dequantize().tolist()
        [[0.5, 0.5], [0.5, 0.5]]
        """
        return self._unpadded(constant(self)._one.dequantize(dtype))

    def _unpadded(self, values: Array) -> Array:
        """Return values of the present operand as those of the weight."""
        if self.padding:
            values = values[..., : -self.padding]
        return values if self._one is self.backward else values.swapaxes(-1, -2)


def bytes_of(tree: object) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


Children = tuple[Any, ...]
Static = tuple[int, bool]


def _keys(format: str) -> list[jax.tree_util.GetAttrKey]:
    names = [f"forward{format}", f"backward{format}", "sample", "training"]
    return [jax.tree_util.GetAttrKey(name) for name in names]


# Names of the children in a tree, by which checkpoints know them, by whether the codes
# are E5M2. The last is the state of a `Parameter`, and None in a `Stored`: checkpoints
# have an entry for it, and Orbax puts names in the places of children, of None too.
_CHILDREN = {False: _keys(""), True: _keys("_float8_e5m2")}


def _children(stored: Stored) -> tuple[Children, Static]:
    children = (stored.forward, stored.backward, stored.sample, stored._state)
    return children, (stored.padding, stored.e5m2)


def register(
    kind: type,
    children_of: Callable[[Any], tuple[Children, Static]],
    make: Callable[[Static, Iterable[Any]], NotAnArray],
) -> None:
    """Make a class of weights a pytree whose children checkpoints know by name."""

    def named(weight: Any) -> tuple[Children, Static]:
        children, (padding, e5m2) = children_of(weight)
        return tuple(zip(_CHILDREN[e5m2], children, strict=True)), (padding, e5m2)

    jax.tree_util.register_pytree_with_keys(kind, named, make, children_of)
    serialize_with_flax(kind)


def _stored_of(static: Static, children: Iterable[Any]) -> Stored:
    forward, backward, sample, state = children
    stored = Stored(forward, backward, sample, *static)
    object.__setattr__(stored, "_state", state)
    return stored


register(Stored, _children, _stored_of)
serialize_with_flax(Operand)


def constant(stored: Stored) -> Stored:
    """Return a stored weight without its sample, as a constant.

    Differentiating it, as `jax.grad` with respect to the weight does, raises a
    TypeError.
    """
    # A rule of its own instead of a check in the product's rule: once a rule of a
    # shared trace has raised, that trace cannot be differentiated again (jax 0.10 to
    # 0.12: `fwd_jaxpr_from_zeros` empties the stores of a rule that it keeps).
    message = NO_GRADIENT if stored.is_packed else _NO_GRADIENT_OF_HALVES
    return not_differentiated(message, replace(stored, sample=None))


def _poisoned_unless(operand: Operand, sound: Array) -> Operand:
    scale = operand.scale
    sound = sound.reshape(sound.shape + (1,) * (scale.ndim - sound.ndim))
    if scale.dtype == jnp.float32:
        # A product instead of jnp.where, which refuses a sharded and an unsharded
        # operand under explicit axes.
        factor = jnp.where(sound, jnp.float32(1), jnp.float32(jnp.nan))
        return replace(operand, scale=scale * factor)
    nan = jnp.where(sound, jnp.uint8(0), jnp.uint8(0xFF))
    code = lax.bitcast_convert_type(scale, jnp.uint8) | nan
    return replace(operand, scale=lax.bitcast_convert_type(code, scale.dtype))


def _read(operand: Operand | None, other: Operand, halves: Halves) -> Operand:
    """Return the halves of an operand, or of the transpose of the other one.

    The transpose is read if the operand is absent, or if it lacks a half that is asked
    for.
    """
    wants_residual = halves == "hi+lo" and other.lo is not None
    if operand is not None and (operand.lo is not None or not wants_residual):
        return _halves_of(operand, halves)
    other = _halves_of(other, halves)
    # With a late transpose, devices that hold parts of a weight gather it once for both
    # products.
    if other.values.ndim == 2 and device_count() > 1:
        return other.turn_late()
    return other.turn()


def _halves_of(operand: Operand, halves: Halves) -> Operand:
    if halves == "hi" and operand.lo is not None:
        return operand.drop_residual()
    return operand
