"""`Rewritten`: the update of a stored parameter by an optimizer that has written the
new weight already.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcfp_jax.weights.parameter import Parameter

# Any transformation of an update changes these values: both signs, large and small,
# with rows of different means.
_WITNESS: Any = np.array([[1e30, -1e30], [0.3, -3e-7], [17.0, 0.0]], np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rewritten:
    """The new weight in place of an update.

    It is another class than `Parameter`, so `optax.apply_updates`, which would add FP8
    codes, raises on unequal trees.

    Attributes:
      arrays: arrays of the new weight, with codes of one byte as uint8. Arithmetic with
        floats promotes integers, and `onto` sees that by the dtype, also while a
        program is traced.
      witness: known numbers, which a transformation after the optimizer changes as it
        changes the codes. Zeros, as from `optax.MultiSteps` between its steps, keep the
        old weight.
    """

    arrays: list[Array]
    witness: Array

    @staticmethod
    def of(parameter: Parameter) -> "Rewritten":
        """Return the update that replaces the old weight by this one."""
        arrays = []
        for leaf in jax.tree.leaves(parameter):
            if leaf.dtype.itemsize == 1:
                leaf = lax.bitcast_convert_type(leaf, jnp.uint8)
            arrays.append(leaf)
        # A constant instead of an array: `onto` then knows it, and compares nothing in
        # the compiled program.
        return Rewritten(arrays, _WITNESS)

    def onto(self, old: Parameter) -> Parameter:
        """Return the weight after the update.

        Raises:
          ValueError: a transformation after the optimizer changed the update; a traced
            program writes NaN instead.
        """
        changed = ValueError(
            f"the update of a stored weight {list(old.shape)} was changed after"
            " tcfp_jax.optim.adamw wrote it, by a later part of the chain; put that"
            " part before adamw, or use tcfp_jax.optim.on_stored(optax.chain(...))"
        )
        structure: Any
        before, structure = jax.tree.flatten(old)
        made = []
        for new, known in zip(self.arrays, before, strict=True):
            dtype = jnp.uint8 if known.dtype.itemsize == 1 else known.dtype
            if new.shape != known.shape or new.dtype != dtype:
                raise changed
            if dtype == jnp.uint8:
                new = lax.bitcast_convert_type(new, known.dtype)
            made.append(new)
        weight: Parameter = structure.unflatten(made)
        if self.witness is _WITNESS:
            return weight
        whole = jnp.all(self.witness == _WITNESS)
        zero = jnp.all(self.witness == 0)
        if isinstance(whole, jax.core.Tracer):
            chosen = _where(zero, old, weight)
            poisoned = chosen.stored.poisoned_unless(whole | zero)
            return replace(chosen, stored=poisoned)
        if not bool(whole | zero):
            raise changed
        return weight if bool(whole) else old


def _where(condition: Array, one: Parameter, other: Parameter) -> Parameter:
    def chosen(a: Array, b: Array) -> Array:
        return jnp.where(condition, a, b)

    return jax.tree.map(chosen, one, other)
