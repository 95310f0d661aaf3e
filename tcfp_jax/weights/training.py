"""A stored weight that is the parameter itself: only `W_hi + W_lo` exist, and training
rounds into them.

In a parameter tree a `Stored` has a `Training` next to its values: the kernel's shape
and dtype, the slot of its gradient, and the state of rounding. A float8 array cannot
hold a gradient (three bits, no scale). So `value_and_grad` puts a float `slot` of the
kernel's shape into the weight. Products never read the slot; its gradient is the
weight's.

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

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import counter, numerics
from pallas_kernels.operands import Fp4, Operand, Tensor, check_real
from pallas_kernels.quantize.api import dual_quantize
from pallas_kernels.specs import entries_of, moved
from tcfp_jax.paths import serialize_with_flax
from tcfp_jax.recipes import Dual, Recipe, describe
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.sampling import SIZE, agree, is_part, sample_of_codes
from tcfp_jax.weights.stored import NO_GRADIENT, Stored

Remainder = Literal["stochastic", "feedback", "dropped"]

# An error needs mantissa and little range: it is at most half a step of the grid of
# `W_lo`.
ERROR_DTYPE = jnp.float8_e3m4
# An error of 8, the largest that rounding leaves, is half a step
_ERRORS_IN_STEP = 16.0
_WORD_BITS = 24  # float32 holds integers of 24 bits exactly
_WHOLE = 2048  # smaller kernels keep no sample; their amax is compared instead
_TINY = float(jnp.finfo(jnp.float32).tiny)  # some backends flush smaller values to zero
_REPAIR = (
    "codes and scales are not numbers to average, scale, clip or cast. For averages use"
    " tcfp_jax.optim.incremental_update, for other changes"
    " tcfp_jax.apply_updates(params, floats), and read tcfp_jax.dequantize(params)"
)
_HIGH, _LOW, _TARGET = 112.0, 14.0, 56.0
_SCALE_OF_ZERO = 2.0**-16
_static: Any = functools.partial(field, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Training:
    """State of a stored weight that is the parameter.

    Attributes:
      rounding: state of stochastic rounding, float32 `[*stack, 3]`: two words of a seed
        and the count of roundings, as integers below 2**24. Integer arrays would make
        `jax.grad` fail before the error that names `value_and_grad`.
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

    rounding: jax.Array | None
    amax: jax.Array
    error: jax.Array | None
    slot: jax.Array | None
    sample: jax.Array | None
    weight: Weight = _static()
    shape: tuple[int, ...] = _static()
    dtype: DTypeLike = _static()
    gradient_dtype: DTypeLike = _static()
    remainder: Remainder = _static()

    def next_rounding(self) -> jax.Array | None:
        """Return `rounding` after one more rounding; the count restarts after 2**24."""
        if self.rounding is None:
            return None
        count = self.rounding[..., 2]
        following = jnp.where(count >= 2.0**_WORD_BITS - 1, 0.0, count + 1)
        return jnp.concatenate([self.rounding[..., :2], following[..., None]], axis=-1)

    def sampled(self, rows: Operand) -> jax.Array | None:
        """Return the sample of new codes, or None for a kernel without one."""
        return None if self.sample is None else sample_of_codes(rows)

    def intact(self, stored: Stored) -> Stored:
        """Return the weight of this state, if its codes are those that the last
        rounding wrote.

        Codes and scales in a tree can be averaged, scaled and clipped by any code, and
        the result is another weight than the average. A dtype that changed raises. A
        value that changed shows in the sample; a kernel without one is compared with
        its amax. With concrete arrays that raises, too; a traced program makes the
        scales NaN. Inside `value_and_grad`, which has looked, the codes are constants.
        Inside `shard_map` nothing is compared.
        """
        if self.slot is not None:
            values = lax.stop_gradient(dataclasses.replace(stored, training=None))
            return dataclasses.replace(values, training=self)
        rows, form = stored.backward, self.weight.recipe.stored
        if rows is None or rows.lo is None:  # the transpose of a parameter
            turned = stored.swap()
            return turned.training.intact(turned).swap()
        assert rows.lo is not None and form is not None, (
            "a stored parameter has two halves"
        )
        name = f"the stored weight {list(stored.shape)}"
        kept = {"stochastic": self.rounding, "feedback": self.error}
        if any(
            (array is not None) != (self.remainder == remainder)
            for remainder, array in kept.items()
        ):
            raise ValueError(
                f"{name} has remainder={self.remainder!r}, but arrays of another:"
                " restore a checkpoint as it was saved"
            )
        state = (self.amax, self.rounding, self.sample)
        for array, dtype in [
            (rows.values, form.dtype),
            (rows.lo, form.dtype),
            *((x, jnp.float32) for x in state),
        ]:
            if array is not None and array.dtype != dtype:
                raise ValueError(
                    f"{name} holds {array.dtype} where {jnp.dtype(dtype)} was written:"
                    f" {_REPAIR}"
                )
        if is_part(rows.values):
            return stored
        sound = _is_sound(self, rows)
        if isinstance(sound, jax.core.Tracer):
            return stored.poisoned_unless(sound)
        if not bool(jnp.all(sound)):
            raise ValueError(
                f"{name} has other codes than its last rounding wrote: {_REPAIR}"
            )
        return stored


# Any transformation of an update changes these values: both signs, large and small,
# with rows of different means.
_WITNESS: Any = np.array([[1e30, -1e30], [0.3, -3e-7], [17.0, 0.0]], np.float32)


serialize_with_flax(Training)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rewritten:
    """The update of a stored weight by an optimizer that has written the new weight
    already.

    It is another class than `Stored`, so `optax.apply_updates`, which would add FP8
    codes, raises on unequal trees.

    Attributes:
      arrays: arrays of the new weight, with codes of one byte as uint8. Arithmetic with
        floats promotes integers, and `onto` sees that by the dtype, also while a
        program is traced.
      witness: known numbers, which a transformation after the optimizer changes as it
        changes the codes. Zeros, as from `optax.MultiSteps` between its steps, keep the
        old weight.
    """

    arrays: list[jax.Array]
    witness: jax.Array

    @staticmethod
    def of(stored: Stored) -> "Rewritten":
        """Return the update that replaces the old weight by this one."""
        as_bytes = lambda x: (
            lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
        )
        # A constant instead of an array: `onto` then knows it, and compares nothing in
        # the compiled program.
        return Rewritten(list(map(as_bytes, jax.tree.leaves(stored))), _WITNESS)

    def onto(self, old: Stored) -> Stored:
        """Return the weight after the update.

        Raises:
          ValueError: a transformation after the optimizer changed the update; a traced
            program writes NaN instead.
        """
        message = (
            f"the update of a stored weight {list(old.shape)} was changed after"
            " tcfp_jax.optim.adamw wrote it, by a later part of the chain; put that"
            " part before adamw, or use tcfp_jax.optim.on_stored(optax.chain(...))"
        )
        treedef: Any
        before, treedef = jax.tree.flatten(old)
        made = []
        for new, known in zip(self.arrays, before, strict=True):
            if new.shape != known.shape or new.dtype != (
                jnp.uint8 if known.dtype.itemsize == 1 else known.dtype
            ):
                raise ValueError(message)
            made.append(
                lax.bitcast_convert_type(new, known.dtype)
                if new.dtype == jnp.uint8
                else new
            )
        weight = treedef.unflatten(made)
        if self.witness is _WITNESS:
            return weight
        whole, zero = jnp.all(self.witness == _WITNESS), jnp.all(self.witness == 0)
        if not isinstance(whole, jax.core.Tracer):
            if not bool(whole | zero):
                raise ValueError(message)
            return weight if bool(whole) else old
        chosen = jax.tree.map(
            lambda new, known: jnp.where(zero, known, new), weight, old
        )
        return chosen.poisoned_unless(whole | zero)


def is_stored(node: object) -> bool:
    """Return whether a node of a tree is a stored weight; use it as `is_leaf`."""
    return isinstance(node, Stored)


def training_of(stored: Stored) -> Training:
    """Return the training state of a stored weight, which must be a parameter."""
    if stored.training is None and isinstance(stored.scaling, Fp4):
        raise TypeError(NO_GRADIENT)
    if stored.training is None:
        raise TypeError(
            f"a {stored.describe()} is a copy of a parameter, as error_feedback and"
            " split make it, and cannot be trained; make parameters with"
            " tcfp_jax.store(params, recipe, key=key)"
        )
    return stored.training


def train(
    kernel: jax.Array,
    weight: Weight,
    *,
    key: jax.Array | None,
    remainder: Remainder,
    gradient_dtype: DTypeLike | None = None,
) -> Stored:
    """Return a kernel as a stored weight that is the parameter from now on; see
    `tcfp_jax.store`.

    Axes of the kernel in front of the layout's are a stack of layers with a scale each.

    >>> from tcfp_jax.recipes import recipe
    >>> from tcfp_jax.weights.layout import Layout
    >>> weight = Weight(recipe("tcfp12_single"), Layout((0,), (1,)))
    >>> kernel_of(train(jnp.full((2, 2), 0.5), weight, key=jax.random.key(0), remainder="stochastic")).tolist()
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
    target = weight.layout.stacked(kernel.ndim).matrix(kernel).astype(jnp.float32)
    weight, stack = _unstacked(weight), target.shape[:-2]
    amax = numerics.amax(target, axis=(-2, -1))
    rounding = None
    if key is not None:
        seed = jax.random.bits(key, (*stack, 2), jnp.uint32) >> (32 - _WORD_BITS)
        rounding = jnp.concatenate(
            [seed.astype(jnp.float32), jnp.zeros((*stack, 1), jnp.float32)], axis=-1
        )
        # a stack that explicit axes split
        rounding = moved(rounding, (*entries_of(amax), None))
    error = jnp.zeros(target.shape, ERROR_DTYPE) if remainder == "feedback" else None
    shape = kernel.shape[kernel.ndim - weight.layout.ndim :]
    # `_written` fills it
    sample = jnp.zeros((*stack, SIZE)) if target.size > _WHOLE else None
    training = Training(
        rounding,
        amax,
        error,
        None,
        sample,
        weight,
        shape,
        dtype,
        of_gradient,
        remainder,
    )
    scale = (
        next_scale(jnp.zeros_like(amax), amax)
        if weight.recipe.scaling == Tensor()
        else None
    )
    return _written(Stored(None, None, training=training), target, scale)


def kernel_of(stored: Stored, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the float kernel of a stored weight; inside `value_and_grad` it has a
    gradient like any parameter.
    """
    training = training_of(stored)
    values = stored.read().dequantize().astype(dtype or training.dtype)
    kernel = training.weight.layout.stacked(_ndim(stored)).kernel(
        values, kernel_shape(stored)
    )
    return (
        kernel if training.slot is None else kernel + training.slot.astype(kernel.dtype)
    )


def kernel_shape(stored: Stored) -> tuple[int, ...]:
    """Return the shape of the kernel of a stored weight, with the axes of a stack of
    layers.
    """
    training = training_of(stored)
    extra = _ndim(stored) - training.weight.layout.ndim
    return (*stored.shape[:extra], *training.shape)


def rewrite(stored: Stored, target: jax.Array) -> Stored:
    """Return the weight with the values `target`, float32 `[*stack, k, n]`, rounded by
    its own rule.

    A NaN or inf in the target makes the whole weight NaN.
    """
    training, rows = training_of(stored), stored.backward
    assert rows is not None, "a stored parameter has its own orientation"
    if training.error is not None:
        error = training.error.astype(jnp.float32) * (_step_of(rows) / _ERRORS_IN_STEP)
        target = target + error * rows.scale_of_values()
    amax = numerics.amax(target, axis=(-2, -1))
    scale = (
        next_scale(rows.scale, amax)
        if training.weight.recipe.scaling == Tensor()
        else None
    )
    new = dataclasses.replace(training, amax=amax, rounding=training.next_rounding())
    return _written(
        dataclasses.replace(stored, training=new), target, scale, training.rounding
    )


def next_scale(scale: jax.Array, amax: jax.Array) -> jax.Array:
    """Return the next scale, from the last one and the amax of the last rounding (see
    the module's docstring).

    >>> [float(next_scale(jnp.float32(1.0), jnp.float32(a))) for a in (100.0, 112.0, 113.0, 14.0, 13.0, 0.0)]
    [1.0, 1.0, 4.0, 0.25, 0.25, 1.52587890625e-05]
    """
    fresh = numerics.pow2_cover(amax, _TARGET)
    fresh = jnp.where(amax == 0, jnp.float32(_SCALE_OF_ZERO), fresh)
    keep = (amax > _LOW * scale) & (amax <= _HIGH * scale)
    return jnp.where(keep, scale, fresh)


def _written(
    stored: Stored,
    target: jax.Array,
    scale: jax.Array | None,
    rounding: jax.Array | None = None,
) -> Stored:
    """Return `stored` with values, error and copies made from `target`; `scale` is None
    for blocks.
    """
    training = training_of(stored)
    recipe, stochastic = training.weight.recipe, training.remainder == "stochastic"
    form = recipe.stored
    assert form is not None, "checked when the weight was stored"
    amax = None
    if scale is not None:
        # Weights above 2**125 have the scale 2**121, whose largest magnitude is not a
        # float32.
        amax = jnp.minimum(
            scale * numerics.largest(form.dtype), jnp.finfo(jnp.float32).max
        )
    rounding = training.rounding if rounding is None else rounding

    def one(target: jax.Array, amax: Any, rounding: Any) -> tuple[Operand, Any, Any]:
        bits = None
        if stochastic:
            bits = counter.bits_of(
                target.shape,
                *counter.keys(*(rounding[i].astype(jnp.uint32) for i in range(3))),
            )
        error = (
            jnp.zeros(target.shape, jnp.float32)
            if training.remainder == "feedback"
            else None
        )
        # XLA's backend computes the random bits where it uses them, and needs no array
        # of them.
        parts = dual_quantize(
            target,
            recipe.scaling,
            dtype=form.dtype,
            bits=bits,
            error=error,
            amax=amax,
            backend="xla",
            orientation="both" if recipe.copies == "both" else "rows",
        )
        return parts.rows, parts.columns, parts.error

    for _ in target.shape[:-2]:
        one = jax.vmap(one)
    rows, columns, left = one(target, amax, rounding)
    if columns is not None and form.forward == "hi":
        columns = columns.drop_residual()
    error = None if left is None else _kept_error(left, rows)
    return Stored(
        columns,
        rows,
        training=dataclasses.replace(
            training, error=error, sample=training.sampled(rows)
        ),
    )


@jax.jit
def _is_sound(training: Training, rows: Operand) -> jax.Array:
    """Return whether codes are those that a rounding wrote; bool `[*stack]`. NaN is
    sound, because it shows anyway.
    """
    if training.sample is not None:
        found = sample_of_codes(rows)
        return agree(found, training.sample, jnp.float32(_TINY), rows.values) | jnp.any(
            jnp.isnan(found), axis=-1
        )
    sound = jnp.bool_(True)
    if training.rounding is not None:
        sound = jnp.all(jnp.floor(training.rounding) == training.rounding, axis=-1)
    assert rows.lo is not None
    values = (
        rows.values.astype(jnp.float32) + rows.lo.astype(jnp.float32)
    ) * rows.scale_of_values()
    found = numerics.amax(values, axis=(-2, -1))
    # Half a step of the smaller half, twice for stochastic rounding: a 128th of the
    # largest value in E4M3.
    tolerance = 2.0 ** -(2 * jnp.finfo(rows.dtype).nmant + 1) * training.amax + _TINY
    return sound & (
        (jnp.abs(found - training.amax) <= tolerance)
        | jnp.isnan(found)
        | jnp.isnan(training.amax)
    )


def _kept_error(left: jax.Array, rows: Operand) -> jax.Array:
    """Return a float32 rounding error in `ERROR_DTYPE`; nothing clips, because these
    values have chosen the scale.
    """
    # Two factors: the scale of the smallest weights times a step underflows float32.
    # Division is not exact on GPUs.
    scaled = left * numerics.reciprocal_pow2(rows.scale_of_values())
    units = scaled * numerics.reciprocal_pow2(_step_of(rows) / _ERRORS_IN_STEP)
    return numerics.round_to(units, ERROR_DTYPE).astype(ERROR_DTYPE)


def _step_of(rows: Operand) -> jax.Array:
    """Return the distance between neighbours of each `W_lo` in units of the scale: a
    power of two, float32.
    """
    assert rows.lo is not None, "a stored parameter has two halves"
    return numerics.spacing(rows.lo.astype(jnp.float32), rows.dtype)


def _ndim(stored: Stored) -> int:
    """Return the number of axes of the kernel: first a stack of layers, then the axes
    of its layout.
    """
    layout = training_of(stored).weight.layout
    return layout.ndim + len(stored.shape) - len(layout.stack) - 2


def _unstacked(weight: Weight) -> Weight:
    """Return the weight of one layer of a stack: `nn.scan` takes arrays apart, and
    static fields must fit the parts.
    """
    layout, count = weight.layout, len(weight.layout.stack)
    if layout.stack != tuple(range(count)):
        return weight
    without = lambda axes: tuple(axis - count for axis in axes)
    return dataclasses.replace(
        weight, layout=Layout(without(layout.inputs), without(layout.outputs))
    )


def _check(recipe: Recipe, key: jax.Array | None, remainder: str) -> None:
    if isinstance(recipe.scaling, Fp4):
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
    if remainder not in get_args(Remainder):
        raise ValueError(
            f"remainder={remainder!r} is unknown; use one of"
            f" {list(get_args(Remainder))}"
        )
    if (key is None) == (remainder == "stochastic"):
        raise ValueError(
            f"remainder={remainder!r} with key={'None' if key is None else 'a key'}:"
            ' random bits are for remainder="stochastic", which needs'
            " key=jax.random.key(seed), and for no other"
        )
