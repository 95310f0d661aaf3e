"""What the products of a recipe read: activations and gradients quantized, and which operands fit each other."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.operands import Fp4, Orientation, Quantized, check_real
from pallas_kernels.quantize.api import quantize
from tcfp_jax.recipes import Dual, Recipe, describe
from tcfp_jax.weights.stored import Stored

# Names for remat policies, e.g. jax.checkpoint_policies.save_only_these_names(WEIGHT_NAME, ACTIVATION_NAME):
# without them a policy re-runs the quantization in the backward pass.
WEIGHT_NAME = "tcfp_weight"
ACTIVATION_NAME = "tcfp_activation"


def quantize_operand(x: jax.Array, dtype: str, recipe: Recipe) -> Quantized:
    """Quantize x or g, in one pass and only in the orientations that its products read.

    Rows `[..., c]` are contracted along c, in forward and dgrad; columns `[c, ...]` along all other axes, in wgrad.
    """
    orientation: Orientation = "rows" if recipe.wgrad == "bf16" else "both"
    return quantize(x, dtype, recipe.scaling.along_rows, orientation=orientation, backend=recipe.quantize_backend)


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
    if recipe.stored is None:
        raise ValueError(f'recipe "{describe(recipe)}" multiplies float weights, but got a {what}; dequantize it')
    if quantized.serves(recipe.scaling, recipe.stored):
        return
    wanted, repair = f"packed FP4 codes with {recipe.scaling}", "build the state with the same recipe"
    if not isinstance(recipe.scaling, Fp4):
        halves = "hi + lo" if isinstance(recipe.stored, Dual) else "one FP8 tensor"
        wanted = f"a weight of {halves} with {recipe.scaling} in both orientations"
    if isinstance(codes := quantized.scaling, Fp4):
        repair = (
            f'products read codes in the format and tile that they have: use recipe("{codes.format}", '
            f'tile="{codes.tile}"), which fp4_matmul does with recipe=None, or pack the float weight by this recipe'
        )
    raise ValueError(f"the recipe multiplies {wanted}, but quantized is a {what}; {repair}")
