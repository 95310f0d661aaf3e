"""`Stored`: a quantized weight as the operands of its two products, and
`quantize_weight`, which makes it.

    forward     the operand of y = x W, `[..., n, k]`, contracted along k
    backward    the operand of dx = g Wᵀ, `[..., k, n]`, contracted along n

With one scale, or with square blocks, both hold the same numbers, and one may be
absent: it is then the transpose of the other. With rows and vectors they are two
quantizations of one weight. FP4 codes are one operand, packed along k, which serves
both products. A stack of weights has leading axes and a scale for each entry.

A weight from an optimizer carries a sample of its parameter, so that it never
multiplies in another parameter's place (`tcfp_jax.weights.freshness`). A weight that is
the parameter itself has a `Training` (`tcfp_jax.weights.training`).
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels import numerics
from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import (
    Contracts,
    Fp4,
    Operand,
    Orientation,
    Scaling,
    check_real,
)
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.specs import device_count, entries_of, shards
from tcfp_jax.paths import serialize_with_flax
from tcfp_jax.recipes import Copies, Dual, Halves, Recipe, Single
from tcfp_jax.weights.fp4_packing import quantize_fp4

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float

_E4M3, _E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
NO_GRADIENT = (
    "a gradient with respect to packed FP4 codes is asked for, which have none: train"
    " float adapters next to the frozen weight (LoRA, see docs/fp4.md), or float"
    ' parameters that recipe("nvfp4") packs in every step'
)


@dataclass(frozen=True)
class Stored:
    """A quantized weight `[..., k, n]`.

    Attributes:
      forward: `[..., n, k]`, or None if it is the transpose of `backward`.
      backward: `[..., k, n]`, or None if it is the transpose of `forward`.
      sample: float32 `[..., 16]`, values of the parameter that the weight was made of
        (`sampling.sample_of`). None if no parameter exists to compare with, as in
        inference.
      training: state of a weight that is the parameter (`training.Training`), or None.
      padding: the number of zero codes behind k in packed codes: one if k is odd,
        because a byte holds two.
      e5m2: whether the codes are E5M2. Arrays say so by their dtype; other leaves in
        the places of arrays, such as shardings, need it here. The children of such a
        weight are `forward_float8_e5m2` and so on: checkpoints know arrays by name, and
        Orbax would cast codes from one FP8 format to another.
    """

    forward: Operand | None
    backward: Operand | None
    sample: jax.Array | None = None
    training: Any = None
    padding: int = 0
    e5m2: bool = False

    @staticmethod
    def of(operand: Operand) -> "Stored":
        """Return one operand as a stored weight: FP4 codes are `[n, k]`, results of
        `split` and `quantize` `[k, n]`.
        """
        return (
            Stored(operand, None)
            if isinstance(operand.scaling, Fp4)
            else Stored(None, operand)
        )

    @property
    def _one(self) -> Operand:
        """The operand that has all halves of the weight; `backward` if both have."""
        present = [
            operand for operand in (self.backward, self.forward) if operand is not None
        ]
        if not present:
            raise ValueError(
                "Stored(None, None) holds no weight; give it the operand of one product"
                " at least"
            )
        return next(
            (operand for operand in present if operand.lo is not None), present[0]
        )

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
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, `[..., k, n]`."""
        shape = self._one.shape
        if self.padding:
            shape = (*shape[:-1], shape[-1] - self.padding)
        return (
            shape if self._one is self.backward else (*shape[:-2], shape[-1], shape[-2])
        )

    @property
    def stack(self) -> tuple[int, ...]:
        """The sizes of the leading axes of a stack, whose entries have scales of their
        own.
        """
        operand = self._one
        inner = len(operand.scaling.scale_shape(operand.shape[-2:]))
        return operand.scale.shape[: operand.scale.ndim - inner]

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self)
        )

    def serves(self, scaling: Scaling, form: Single | Dual) -> bool:
        """Return whether forward and dgrad of a recipe with this scaling and form of
        weights can read it.
        """
        one = self._one
        both = self.forward is not None and self.backward is not None
        halves = one.lo is not None if "hi+lo" in (form.forward, form.dgrad) else True
        if isinstance(form, Single):
            halves = one.lo is None
        if isinstance(one.scaling, Fp4) and isinstance(scaling, Fp4):
            # Products do not care about the rule that found the scales.
            return (one.scaling.format, one.scaling.tile) == (
                scaling.format,
                scaling.tile,
            )
        return one.scaling == scaling and halves and (both or scaling.serves_both)

    def holds(self, shape: Sequence[int]) -> bool:
        """Return whether it is a weight of this shape `[..., k, n]`.

        A checkpoint without a template loses `padding`, so packed codes may hold an odd
        k and a zero code.
        """
        padded = list(shape)
        if isinstance(self.scaling, Fp4):
            k = -2 if self.backward is None else -1
            padded[k] += padded[k] % 2
        return self.shape in (tuple(shape), tuple(padded))

    def describe(self) -> str:
        """Return a description for messages."""
        if isinstance(self.scaling, Fp4):
            return f"weight of packed FP4 codes with {self.scaling}"
        halves = "hi + lo" if self.has_residual else "one FP8 tensor"
        both = self.forward is not None and self.backward is not None
        orientations = "both orientations" if both else "one orientation"
        return (
            f"weight of {halves} in {self.dtype} with {self.scaling}, in {orientations}"
        )

    def for_forward(self, halves: Halves = "hi+lo") -> Operand:
        """Return the operand of the forward product, `[..., n, k]`: both halves, or
        W_hi alone.
        """
        return _read(self.forward, self._one, halves)

    def for_dgrad(self, halves: Halves = "hi+lo") -> Operand:
        """Return the operand of the input gradient, `[..., k, n]`: both halves, or W_hi
        alone.
        """
        return _read(self.backward, self._one, halves)

    def swap(self) -> "Stored":
        """Return the transposed weight `[..., n, k]`, with the two operands exchanged;
        no value moves.

        The places of one half of the sample are the transposes of the other half's, so
        the halves change places. If the weight is the parameter, its gradient goes
        through the transposed matrix to the parameter.
        """
        rolled = lambda sample: (
            None if sample is None else jnp.roll(sample, sample.shape[-1] // 2, axis=-1)
        )
        training = self.training
        if training is not None:
            slot, layout = (
                self._slot,
                dataclasses.replace(
                    training.weight.layout, inputs=(0,), outputs=(1,), stack=()
                ),
            )
            training = dataclasses.replace(
                training,
                slot=None if slot is None else slot.swapaxes(-1, -2),
                sample=rolled(training.sample),
                error=(
                    None if training.error is None else training.error.swapaxes(-1, -2)
                ),
                weight=dataclasses.replace(training.weight, layout=layout),
                shape=(self.shape[-1], self.shape[-2]),
            )
        sides: Any = dict(forward=self.backward, backward=self.forward)
        return dataclasses.replace(
            self, **sides, sample=rolled(self.sample), training=training
        )

    def drop_residual(self) -> "Stored":
        """Return W_hi alone, which is not a parameter."""
        only = lambda operand: None if operand is None else operand.drop_residual()
        one = self.read()
        return dataclasses.replace(
            one, forward=only(one.forward), backward=only(one.backward)
        )

    def poisoned_unless(self, sound: jax.Array) -> "Stored":
        """Return the weight with NaN scales for matrices that are not `sound`, bool
        `[]` or `[*stack]`.
        """
        poisoned = lambda operand: (
            None if operand is None else _poisoned_unless(operand, sound)
        )
        return dataclasses.replace(
            self, forward=poisoned(self.forward), backward=poisoned(self.backward)
        )

    def read(self) -> "Stored":
        """Return the weight as products read it: without its training state, and as it
        was written.

        Codes of a parameter that other code changed raise, or become NaN in a traced
        program (`Training.intact`).
        """
        return (
            self
            if self.training is None
            else dataclasses.replace(self.training.intact(self), training=None)
        )

    def scale_of_values(self) -> jax.Array:
        """Return float32 scales shaped to multiply `[..., k, n]`; for rows and vectors
        dgrad's.
        """
        if isinstance(self.scaling, Fp4):
            return self._unpadded(self._one.scale_of_values())
        return self.for_dgrad().scale_of_values()

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Return the weight `[..., k, n]`, in float32 and then `dtype`; for rows and
        vectors the values of dgrad.

        The result has a gradient under `tcfp_jax.grad` if `tcfp_jax.store` made the
        weight.

        Raises:
          TypeError: jax's own `grad` asks for a gradient with respect to the weight.

        >>> from tcfp_jax.recipes import recipe
        >>> quantize_weight(jnp.full((2, 2), 0.5), recipe("tcfp12"))[0].dequantize().tolist()
        [[0.5, 0.5], [0.5, 0.5]]
        """
        values, slot = (
            self._unpadded(constant(self.read())._one.dequantize(dtype)),
            self._slot,
        )
        return values if slot is None else values + slot.astype(dtype)

    @property
    def _slot(self) -> jax.Array | None:
        """The zeros `[..., k, n]` that take the gradient of a weight that is the
        parameter, or None.
        """
        slot = None if self.training is None else self.training.slot
        return (
            None
            if slot is None
            else self.training.weight.layout.stacked(slot.ndim).matrix(slot)
        )

    def _unpadded(self, values: jax.Array) -> jax.Array:
        """Return values of the present operand as values of the weight
        `[..., k, n]`.
        """
        if self.padding:
            values = values[..., : -self.padding]
        return values if self._one is self.backward else values.swapaxes(-1, -2)

    def __getitem__(self, index: object) -> "Stored":
        """Return the weight itself, for `kernel[...]`, because NNX layers read
        parameters so; a part raises.
        """
        if index is not Ellipsis:
            self._refuse("indexes")
        return self

    def _refuse(self, what: str = "reads") -> NoReturn:
        floats = (
            "give tcfp_jax.optim.on_stored(tx) to optax, or take the float parameters"
            " with tcfp_jax.dequantize(params)"
            if self.training is not None
            else "or take its float matrix [..., k, n] with weight.dequantize()"
        )
        raise TypeError(
            f"the parameter is a stored {self.describe()}, but code {what} it as a"
            " float array; multiply by it with a layer of tcfp_jax or a converted"
            f" model, {floats}"
        )

    def _operator(self, *args: object, **options: object) -> NoReturn:
        self._refuse()

    __jax_array__ = __array__ = _operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        __rtruediv__
    ) = _operator
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = _operator


def is_e5m2(stored: Stored) -> bool:
    """Return whether the codes of a stored weight are E5M2; see `Stored.e5m2`."""
    # A step flattens hundreds of weights, so this compares two objects instead of
    # asking NumPy.
    one = stored.forward if stored.backward is None else stored.backward
    dtype = getattr(getattr(one, "values", None), "dtype", None)
    return dtype is _E5M2 or (stored.e5m2 and dtype is not _E4M3)


def _children(stored: Stored) -> tuple[tuple[Any, ...], tuple[int, bool]]:
    return (stored.forward, stored.backward, stored.sample, stored.training), (
        stored.padding,
        is_e5m2(stored),
    )


def _named_children(
    stored: Stored,
) -> tuple[tuple[tuple[Any, Any], ...], tuple[int, bool]]:
    children, static = _children(stored)
    format = "_float8_e5m2" if static[1] else ""
    names = (f"forward{format}", f"backward{format}", "sample", "training")
    return (
        tuple(zip(map(jax.tree_util.GetAttrKey, names), children, strict=True)),
        static,
    )


def _joined(static: tuple[int, bool], children: Iterable[Any]) -> Stored:
    forward, backward, sample, training = children
    return Stored(forward, backward, sample, training, *static)


jax.tree_util.register_pytree_with_keys(Stored, _named_children, _joined, _children)
serialize_with_flax(Stored, Operand)


# A rule of its own instead of a check in the product's rule: once a rule of a shared
# trace has raised, that trace cannot be differentiated again (jax 0.10 to 0.12:
# `fwd_jaxpr_from_zeros` empties the stores of a rule that it keeps).
@jax.custom_jvp
def _constant(stored: Stored) -> Stored:
    return stored


@_constant.defjvp
def _refuse(primals: tuple[Stored], tangents: object) -> NoReturn:
    if isinstance(primals[0].scaling, Fp4):
        raise TypeError(NO_GRADIENT)
    raise TypeError(
        "a gradient with respect to a stored weight is asked for: its halves are FP8,"
        " and so would be their gradients, three bits without a scale. Parameters that"
        " tcfp_jax.store made are differentiated by tcfp_jax.value_and_grad or grad"
        " (NNX: tcfp_jax.nnx.value_and_grad), not by JAX's; next to float parameters,"
        " differentiate these and pass the stored weight as quantized= (in Flax:"
        " layer_state(opt_state) as a constant)"
    )


def constant(stored: Stored) -> Stored:
    """Return the values of a stored weight without its sample and training state; they
    cannot be differentiated.

    Differentiating them, as `jax.grad` with respect to the weight does, raises a
    TypeError.
    """
    return _constant(dataclasses.replace(stored, sample=None, training=None))


def _poisoned_unless(operand: Operand, sound: jax.Array) -> Operand:
    scale = operand.scale
    sound = sound.reshape(sound.shape + (1,) * (scale.ndim - sound.ndim))
    if scale.dtype == jnp.float32:
        # A product instead of jnp.where, which refuses a sharded and an unsharded
        # operand under explicit axes.
        return dataclasses.replace(
            operand,
            scale=scale * jnp.where(sound, jnp.float32(1), jnp.float32(jnp.nan)),
        )
    code = lax.bitcast_convert_type(scale, jnp.uint8) | jnp.where(
        sound, jnp.uint8(0), jnp.uint8(0xFF)
    )
    return dataclasses.replace(
        operand, scale=lax.bitcast_convert_type(code, scale.dtype)
    )


def _read(operand: Operand | None, other: Operand, halves: Halves) -> Operand:
    """Return the halves of an operand, or of the transpose of the other one if a half
    is absent.
    """
    if (
        operand is not None
        and halves == "hi+lo"
        and operand.lo is None
        and other.lo is not None
    ):
        operand = None
    chosen = other if operand is None else operand
    if halves == "hi" and chosen.lo is not None:
        chosen = chosen.drop_residual()
    if operand is not None:
        return chosen
    # With a late transpose, devices that hold parts of a weight gather it once for both
    # products.
    return (
        chosen.turn_late()
        if chosen.values.ndim == 2 and device_count() > 1
        else chosen.turn()
    )


def quantize_weight(
    w: "Float[jax.Array, '*stack k n']",
    recipe: Recipe,
    *,
    error: "Float[jax.Array, '*stack k n'] | None" = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    copies: Copies = "both",
    contracts: Contracts = "first",
) -> "tuple[Stored, Float[jax.Array, '*stack k n'] | None]":
    """Return (the weight `[k, n]` as the recipe stores it, the new error in the dtype
    of `error`, or None).

    Args:
      w: the weight, real floats.
      recipe: how to store it; a stochastic residual needs a `key`.
      error: the rounding error of earlier steps, of the shape of `w`.
      key: random key.
      amax: the magnitude to scale by instead of max |w + error|.
      copies: "both" orientations, or "one", `[k, n]`. FP4 codes exist once, `[n, k]`.
      contracts: the axis of `w` that the forward product contracts. Use "last" for the
        `[n, k]` of a transposed layout, whose layer multiplies by `Stored.swap()` of
        the result. FP4 packs along that axis.
    """
    check_real("w", w)
    form = recipe.stored
    if form is None:
        raise ValueError(
            "this recipe keeps weights in BF16; there is nothing to quantize, use"
            ' recipe("tcfp12")'
        )
    orientation: Orientation = "both" if copies == "both" else "rows"
    options: Any = dict(
        amax=amax, orientation=orientation, backend=recipe.quantize_backend
    )
    if isinstance(form, Dual):
        bits = None
        if form.remainder == "stochastic":
            if key is None:
                raise ValueError(
                    'remainder="stochastic" needs key=jax.random.key(seed) for its'
                    " random bits"
                )
            bits = jax.random.bits(key, w.shape, jnp.uint32)
        parts = dual_quantize(
            w, recipe.scaling, dtype=form.dtype, error=error, bits=bits, **options
        )
        # Dgrad contracts rows of `[k, n]` along n, and the forward product reads
        # columns.
        return Stored(parts.columns, parts.rows), parts.error
    target = w.astype(jnp.float32)
    if error is not None:
        target = target + error.astype(jnp.float32)
    if isinstance(recipe.scaling, Fp4):
        if amax is not None:
            raise ValueError(
                f"amax= scales a whole tensor, but scaling={recipe.scaling} has blocks;"
                " drop one of them"
            )
        stored = _packed(target, recipe.scaling, contracts)
    else:
        one = quantize(target, form.dtype, recipe.scaling, **options)
        stored = Stored(one.columns, one.rows)
    if error is None:
        return stored, None
    return stored, numerics.residual(target, stored.dequantize()).astype(error.dtype)


def _packed(w: jax.Array, scaling: Fp4, contracts: Contracts) -> Stored:
    """Return the codes `[n, k]` of a matrix, which serve both products; an odd k gets a
    row of zeros.
    """
    n, k = entries_of(w) if contracts == "last" else entries_of(w)[::-1]
    rows, columns = w.shape if contracts == "last" else w.shape[::-1]
    mesh = jax.typeof(w).sharding.mesh
    # A device holds whole blocks, or all of an axis.
    n = (
        n
        if rows % (shards(mesh, n) * (scaling.block if scaling.tile == "square" else 1))
        == 0
        else None
    )
    k = k if columns % (shards(mesh, k) * scaling.block) == 0 else None

    def pack(w: jax.Array) -> Operand:
        w = w if contracts == "last" else w.T
        return quantize_fp4(jnp.pad(w, ((0, 0), (0, w.shape[-1] % 2))), scaling)

    # Blocks merge and cut axes, which explicit types refuse; XLA does it with automatic
    # ones.
    operand = with_automatic_axes(
        pack, lambda leaf: PartitionSpec(*(n, k)[: leaf.ndim]), w
    )
    odd = columns % 2
    return (
        Stored(operand, None, padding=odd)
        if contracts == "first"
        else Stored(None, operand, padding=odd)
    )
