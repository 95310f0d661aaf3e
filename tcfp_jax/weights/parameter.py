"""`Parameter`: a stored weight that is the parameter itself; only `W_hi + W_lo` exist.

`tcfp_jax.store` makes parameters, and training rounds into them
(`tcfp_jax.weights.rounding`). Codes and scales in a tree can be averaged, scaled and
clipped by any code, and the result is another weight than the average. So each rounding
leaves a sample of the values that it wrote, and the next use compares them.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.operands import Operand
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.layout import Layout
from tcfp_jax.weights.sampling import is_part, sample_of_transpose
from tcfp_jax.weights.stored import (
    NO_GRADIENT,
    Children,
    NotAnArray,
    Static,
    Stored,
    bytes_of,
    register,
)
from tcfp_jax.weights.training import Training

_REPAIR = (
    "codes and scales are not numbers to average, scale, clip or cast. For averages use"
    " tcfp_jax.optim.incremental_update, for other changes"
    " tcfp_jax.apply_updates(params, floats), and read tcfp_jax.dequantize(params)"
)


@dataclass(frozen=True)
class Parameter(NotAnArray):
    """A stored weight that is trained.

    `tcfp_jax.store` makes it. Multiply by it with layers, converted models,
    `tcfp_jax.matmul` and its relatives; take gradients by `tcfp_jax.value_and_grad`,
    and update it by `tcfp_jax.apply_updates`.

    * Its values have two halves, and the operand `[*stack, k, n]` is present (`rows`).
    * The operand of the forward product is a copy of the same values, or absent.
    * The values are those that the last rounding wrote: `intact` raises otherwise.
    * `swap()` is the transpose for one product; no tree holds it.

    Attributes:
      stored: the values.
      state: their state as a trained parameter.
    """

    stored: Stored
    state: Training

    instead = (
        "give tcfp_jax.optim.on_stored(tx) to optax, or take the float parameters with"
        " tcfp_jax.dequantize(params)"
    )

    @property
    def rows(self) -> Operand:
        """The operand `[*stack, k, n]`, which each rounding writes."""
        rows = self.stored.backward
        if rows is None or rows.lo is None:
            raise TypeError(
                "the transpose of a stored parameter has no rows to round into; use the"
                " parameter itself"
            )
        return rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored matrix, `[*stack, k, n]`."""
        return self.stored.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The format of the values."""
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return bytes_of(self)

    @property
    def described(self) -> Training:
        """The state, for its description of the kernel."""
        return self.state

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of the kernel, with the axes of a stack of layers in front."""
        own = self.described.weight.layout
        layers = len(self.shape) - 2 - len(own.stack)
        return own.stacked(own.ndim + layers) if layers else own

    @functools.cached_property
    def kernel_shape(self) -> tuple[int, ...]:
        """The shape of the kernel, with the axes of a stack of layers."""
        shape = self.described.shape
        layers = self.layout.ndim - len(shape)
        return (*self.shape[:layers], *shape)

    @property
    def slot(self) -> Array | None:
        """The zeros `[*stack, k, n]` that take the gradient, or None."""
        slot = self.state.slot
        return None if slot is None else self.layout.matrix(slot)

    def describe(self) -> str:
        """Return a description for messages."""
        return self.stored.describe()

    def read(self) -> Stored:
        """Return the values as products read them.

        Use this for a constant copy of the weight; use `dequantize` instead if a
        gradient is wanted.

        Codes that other code changed raise, or become NaN in a traced program
        (`intact`).
        """
        return self.intact().stored

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Return the weight `[*stack, k, n]`, in float32 and then `dtype`.

        Use this for the stored matrix; use `kernel` instead for the shape that Flax
        made.

        It has a gradient under `tcfp_jax.grad`.
        """
        values = self.read().dequantize(dtype)
        slot = self.slot
        return values if slot is None else values + slot.astype(dtype)

    def kernel(self) -> Array:
        """Return the float kernel; inside `value_and_grad` it has a gradient like any
        parameter.

        Use this where code needs the float parameter; use `tcfp_jax.dequantize` instead
        for a whole tree.
        """
        values = self.read().dequantize().astype(self.state.dtype)
        kernel = self.layout.kernel(values, self.kernel_shape)
        slot = self.state.slot
        return kernel if slot is None else kernel + slot.astype(kernel.dtype)

    def swap(self) -> "Parameter":
        """Return the transposed weight `[..., n, k]`; no value moves.

        Use it for a head that reads the transpose of its table. The gradient goes
        through the transposed matrix to the parameter.
        """
        state = self.state
        slot = self.slot
        own = replace(state.weight.layout, inputs=(0,), outputs=(1,), stack=())
        swapped = replace(
            state,
            slot=None if slot is None else slot.swapaxes(-1, -2),
            sample=sample_of_transpose(state.sample),
            error=None if state.error is None else state.error.swapaxes(-1, -2),
            weight=replace(state.weight, layout=own),
            shape=(self.shape[-1], self.shape[-2]),
        )
        return Parameter(self.stored.swap(), swapped)

    def intact(self) -> "Parameter":
        """Return the parameter, if its codes are those that the last rounding wrote.

        A dtype that changed raises. A value that changed shows in the sample; a kernel
        without one is compared with its amax. With concrete arrays that raises, too; a
        traced program makes the scales NaN. Inside `value_and_grad`, which has looked,
        the codes are constants, and only dtypes are compared. Inside `shard_map`
        nothing is compared.
        """
        if self.state.slot is not None:
            self._check_dtypes()
            return replace(self, stored=lax.stop_gradient(self.stored))
        rows = self.stored.backward
        if rows is None or rows.lo is None:  # the transpose of a parameter
            return self.swap().intact().swap()
        self._check_arrays()
        if is_part(rows.values):
            return self
        sound = self.state.is_sound(rows)
        if isinstance(sound, jax.core.Tracer):
            return replace(self, stored=self.stored.poisoned_unless(sound))
        if not bool(jnp.all(sound)):
            raise ValueError(
                f"{self._name} has other codes than its last rounding wrote: {_REPAIR}"
            )
        return self

    @property
    def _name(self) -> str:
        return f"the stored weight {list(self.shape)}"

    def _check_dtypes(self) -> None:
        """Raise a ValueError if a value or a scale was cast."""
        for array in jax.tree.leaves(self.stored):
            if array.dtype.itemsize > 1 and array.dtype != jnp.float32:
                raise ValueError(
                    f"{self._name} holds {array.dtype} where codes of 8 bits or float32"
                    f" were written: {_REPAIR}"
                )

    def _check_arrays(self) -> None:
        """Raise a ValueError if arrays of the state, or dtypes, are not those that a
        rounding writes.
        """
        state = self.state
        rows = self.rows
        kept = {"stochastic": state.rounding, "feedback": state.error}
        for remainder, array in kept.items():
            if (array is not None) != (state.remainder == remainder):
                raise ValueError(
                    f"{self._name} has remainder={state.remainder!r}, but arrays of"
                    " another: restore a checkpoint as it was saved"
                )
        of_codes = state.form.dtype
        written: list[tuple[Array | None, DTypeLike]]
        written = [(rows.values, of_codes), (rows.lo, of_codes)]
        for array in (state.amax, state.rounding, state.sample):
            written.append((array, jnp.float32))
        for array, dtype in written:
            if array is not None and array.dtype != dtype:
                raise ValueError(
                    f"{self._name} holds {array.dtype} where {jnp.dtype(dtype)} was"
                    f" written: {_REPAIR}"
                )


def is_parameter(node: object) -> bool:
    """Return whether a node of a tree is a stored parameter; use it as `is_leaf`.

    Use this to map over trees of trained weights; use `is_quantized` to find copies and
    constants, too.
    """
    return isinstance(node, Parameter)


def is_quantized(node: object) -> bool:
    """Return whether a node of a tree is a quantized weight; use it as `is_leaf`.

    Use this to map over any tree with stored weights; use `is_parameter` if only
    trained ones count.

    It is one that is trained (`Parameter`), or a copy or constant (`Stored`).
    """
    return isinstance(node, Parameter | Stored)


def parameter_of(weight: Parameter | Stored) -> Parameter:
    """Return a quantized weight, which must be a parameter.

    Raises:
      TypeError: it is a copy of a parameter, or a constant.
    """
    if isinstance(weight, Parameter):
        return weight
    if weight.is_packed:
        raise TypeError(NO_GRADIENT)
    raise TypeError(
        f"a {weight.describe()} is a copy of a parameter, as error_feedback and"
        " split make it, and cannot be trained; make parameters with"
        " tcfp_jax.store(params, recipe, key=key)"
    )


def intact(params: PyTree) -> PyTree:
    """Return a tree of parameters, if no codes have changed since they were written."""

    def one(leaf: PyTree) -> PyTree:
        return parameter_of(leaf).intact() if is_quantized(leaf) else leaf

    return jax.tree.map(one, params, is_leaf=is_quantized)


# In a tree a parameter looks as its values with one more child: checkpoints,
# shardings and serializers know the arrays by these names.
def _children(parameter: Parameter) -> tuple[Children, Static]:
    stored = parameter.stored
    children = (stored.forward, stored.backward, stored.sample, parameter.state)
    return children, (stored.padding, stored.e5m2)


def _parameter_of(static: Static, children: Iterable[Any]) -> Parameter:
    forward, backward, sample, state = children
    return Parameter(Stored(forward, backward, sample, *static), state)


register(Parameter, _children, _parameter_of)
