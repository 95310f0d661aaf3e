"""Activations and gradients as the products of a recipe read them, and how a quantized gradient travels."""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.operands import Orientation, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.api import quantize
from tcfp_jax.recipes import Halves, Recipe

# Names for remat policies, e.g. jax.checkpoint_policies.save_only_these_names(WEIGHT_NAME, ACTIVATION_NAME):
# without them a policy re-runs the quantization in the backward pass.
WEIGHT_NAME = "tcfp_weight"
ACTIVATION_NAME = "tcfp_activation"


class Ends(NamedTuple):
    """In what form a product gets x and its result's gradient.

    Attributes:
      x_quantized: x as the recipe quantizes it, where whoever computed x did so.
      gradient: "float"; or "quantized", by a `Carrier` beside the result.
    """

    x_quantized: Quantized | None = None
    gradient: Literal["float", "quantized"] = "float"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carrier:
    """The quantized gradient of a product's result, as a result has gradients: beside it, one for each of its arrays.

    The arrays are zeros that nobody computes. Their gradients are what they are for, and these are FP8 as the arrays
    are. Scales of blocks travel as FP8 of the same bits, because a zero has no E8M0 code.
    """

    leaves: tuple[jax.Array, ...]

    @classmethod
    def blank(cls, y: jax.Array, recipe: Recipe) -> "Carrier":
        """The one beside y."""
        shapes = jax.tree.leaves(_shape_of_gradient(y.shape, y.dtype, recipe))
        return cls(tuple(jnp.zeros(leaf.shape, _travels_as(leaf.dtype)) for leaf in shapes))

    @classmethod
    def of(cls, quantized: Quantized) -> "Carrier":
        """The gradient of a blank one."""
        leaves = jax.tree.leaves(quantized)
        return cls(tuple(lax.bitcast_convert_type(leaf, _travels_as(leaf.dtype)) for leaf in leaves))

    def quantized(self, recipe: Recipe) -> Quantized:
        """What it carries."""
        rows = self.leaves[0]
        form = _shape_of_gradient(rows.shape, jnp.dtype(jnp.bfloat16), recipe)
        pairs = zip(self.leaves, jax.tree.leaves(form), strict=True)
        made = [lax.bitcast_convert_type(mine, leaf.dtype) for mine, leaf in pairs]
        return jax.tree.unflatten(jax.tree.structure(form), made)


@functools.lru_cache(maxsize=256)
def _shape_of_gradient(shape: tuple[int, ...], dtype: Any, recipe: Recipe) -> Quantized:
    # By the definition itself: what is dispatched is what `explain` shows.
    options = Quantization(jnp.dtype(recipe.gradient), recipe.scaling.along_rows, orientation_of(recipe))
    return jax.eval_shape(lambda g: reference.quantize(options, g, None), jax.ShapeDtypeStruct(shape, dtype))


def _travels_as(dtype: Any) -> Any:
    return jnp.float8_e4m3fn if dtype == jnp.float8_e8m0fnu else dtype


def orientation_of(recipe: Recipe) -> Orientation:
    """In which orientations the products of a recipe read activations and gradients."""
    return "rows" if recipe.wgrad == "bf16" else "both"


def quantize_operand(x: jax.Array, dtype: str, recipe: Recipe, *, halves: Halves = "hi") -> Quantized:
    """X or g, in the orientations that its products read and no other, from one pass.

    Rows `[..., c]` are contracted along c, in forward and dgrad; columns `[c, ...]` along all other axes, in wgrad, and
    have no residual.
    """
    options: Any = dict(orientation=orientation_of(recipe), backend=recipe.quantize_backend)
    scaling = recipe.scaling.along_rows
    if halves == "hi":
        return quantize(x, dtype, scaling, **options)
    parts = dual_quantize(x, scaling, dtype=dtype, **options)
    return Quantized(parts.rows, None if parts.columns is None else parts.columns.drop_residual())
