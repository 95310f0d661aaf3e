"""What the products of a recipe read: activations and gradients quantized, and which operands fit each other.

A quantized gradient travels by a `Carrier`.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import check_real
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.operands import Fp4, Orientation, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.api import quantize
from tcfp_jax.recipes import Dual, Halves, Recipe, describe
from tcfp_jax.weights.stored import Stored

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


@jax.custom_jvp
def differentiated_once(operands: Any) -> Any:
    """What a rule of derivatives was given: operands of a backward pass, or of the forward pass that goes with it.

    Both round, and a derivative of rounding is zero almost everywhere. So a second derivative, such as that of a
    penalty on gradients, would lose these terms in silence.

    Raises:
      TypeError: it is differentiated.
    """
    return operands


@differentiated_once.defjvp
def _refuse_twice(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "a second derivative of a product in low precision is asked for (a gradient of gradients, a Hessian): the "
        "gradient is that of rounded operands, and rounding has no derivative of its own, so terms would be zero in "
        'silence; use recipe("bf16") for the products that are differentiated twice'
    )


def check_input(name: str, x: jax.Array) -> None:
    """Raise unless an operand of a product is an array of real floats that are not quantized yet.

    Raises:
      TypeError: it is none.
    """
    check_real(name, x)
    if jnp.dtype(x.dtype).itemsize < 2:
        raise TypeError(
            f"{name} has dtype {x.dtype}; matmul quantizes by itself, pass bfloat16 or float32, or a Stored weight as w"
        )


def check_shapes(x: tuple[int, ...], w: tuple[int, ...] | None, quantized: Stored | None) -> None:
    """Raise unless x `[..., k]` and a weight `[k, n]`, which is there as floats, quantized, or both, can be multiplied.

    Raises:
      ValueError: they cannot.
    """
    weight = w if quantized is None else quantized.shape
    if weight is None:
        raise ValueError(f"x{list(x)} has no weight beside it: w is None, and so is quantized; pass one of them")
    if len(weight) != 2:
        raise ValueError(f"w has shape {tuple(weight)}, not [k, n]; reshape it or use jax.vmap over its leading axes")
    if quantized is not None and quantized.holds((*x[-1:], *weight[1:])):
        weight = (x[-1], weight[1])  # packed codes of an odd k
    if not x or x[-1] != weight[0]:
        raise ValueError(f"x{list(x)} @ w{list(weight)}: the last axis of x must equal the first of w (k)")
    if w is not None and w != weight:
        raise ValueError(f"w has shape {list(w)}, but quantized has {list(weight)}; they must be the same weight")


def check_stored(recipe: Recipe, quantized: Stored) -> None:
    """Raise unless the products of the recipe can read this weight.

    Raises:
      ValueError: they cannot.
    """
    what = quantized.describe()
    if recipe.weight is None:
        raise ValueError(f'recipe "{describe(recipe)}" multiplies float weights, but got a {what}; dequantize it')
    if quantized.serves(recipe.scaling, recipe.weight):
        return
    wanted, repair = f"packed FP4 codes with {recipe.scaling}", "build the state with the same recipe"
    if not isinstance(recipe.scaling, Fp4):
        halves = "hi + lo" if isinstance(recipe.weight, Dual) else "one FP8 tensor"
        wanted = f"a weight of {halves} with {recipe.scaling} in both orientations"
    if isinstance(codes := quantized.scaling, Fp4):
        repair = (
            f'products read codes in the format and tile that they have: use recipe("{codes.format}", '
            f'tile="{codes.tile}"), which fp4_matmul does with recipe=None, or pack the float weight by this recipe'
        )
    raise ValueError(f"the recipe multiplies {wanted}, but quantized is a {what}; {repair}")
