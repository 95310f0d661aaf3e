"""`matmul(x, w, recipe=...)`: the product of a layer, with the backward pass that the
recipe describes.

Each form of weights has a rule of its own. `fp8_weights` states the three products of
FP8 and of hybrids with BF16. `fp4_weights` has the products of packed codes, and `bf16`
and `fp4_training` have the products of float weights. There is one scale for a tensor,
a row or a block, as the recipe's scaling says.

The weight is quantized outside of these rules, or by the optimizer
(`tcfp_jax.error_feedback`), which passes it as `quantized`; then no product needs its
float copy. The gradient is the straight-through one: the gradient of the products above
as if rounding were the identity.

Left out:

* kernels with other axes than `[k, n]`: `tcfp_jax.products.einsum` contracts them, and
  a conversion does it by itself;
* rows in groups: `tcfp_jax.products.grouped_matmul`;
* batches of weights: `jax.vmap`;
* a weight that is quantized in each step and not trained there: `jax.lax.dot_general`
  on operands of `tcfp_jax.quantize`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import shared
from pallas_kernels.operands import Operand, Quantized, check_real
from pallas_kernels.specs import (
    Sharding,
    entries,
    sharding_of,
    varying_alike,
    with_entries,
)
from tcfp_jax.products import bf16, fp4_training, fp4_weights, fp8_weights
from tcfp_jax.products.annotations import WEIGHT_NAME
from tcfp_jax.products.fp8_weights import Asked
from tcfp_jax.recipes import Dual, Recipe, Single, TCFPMode, describe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored, constant
from tcfp_jax.weights.tcfp12 import fake_quantize

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float

# The rule of products by the form of weights. A head without a stored form takes BF16's
# rule.
RULES = {
    TCFPMode.BF16: fp8_weights.RULE,
    TCFPMode.FP8: fp8_weights.RULE,
    TCFPMode.TCFP12: fp8_weights.RULE,
    TCFPMode.FP4: fp4_weights.RULE,
}

_WIDE_FLOATS = frozenset(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))


def matmul(
    x: "Float[jax.Array, '*rows k']",
    w: "Float[jax.Array, 'k n'] | Stored | Parameter | Operand | None",
    *,
    recipe: Recipe | str,
    quantized: Stored | Operand | None = None,
    key: Array | None = None,
    out_sharding: Sharding = None,
) -> "Float[jax.Array, '*rows n']":
    """Return `x @ w` with the operands, products and gradients that `recipe` describes.

    Use this in a model that you write as functions. A converted model and the layers of
    `tcfp_jax.linen` and `tcfp_jax.nnx` call it for you.

    Args:
      x: real floats `[..., k]` of 16 bits or more.
      w: the weight `[k, n]`, real floats; it has the straight-through gradient. Or a
        `Stored` weight (or the result of `split` or `quantize`), which has no float
        copy. A parameter made by `tcfp_jax.store` has a gradient under
        `tcfp_jax.value_and_grad`; any other stored weight is a constant.
      recipe: a `Recipe` or the name of one.
      quantized: `w` as `error_feedback` stored it (`layer_state`). Without it, `w` is
        quantized here.
      key: random key, another at each step: for a stochastic residual if `w` is
        quantized here, and for FP4 training.
      out_sharding: sharding of the result under a mesh with explicit axes, as in
        `lax.dot_general`.

    Returns:
      `[..., n]` in the dtype of x. A NaN or inf makes every output that shares its
      scale NaN: the whole result with one scale per tensor, otherwise the outputs that
      read that row or block. One in the output's gradient does the same to the
      gradients. Sizes that are not multiples of 16 work, but on a GPU each FP8 product
      then pads copies of its operands, which costs about as much as quantizing them
      again.

    Raises:
      TypeError: x or w is integer, complex or 8-bit. Or a derivative is asked for that
        does not exist: with respect to a stored weight, a second one where operands are
        rounded, or one in forward mode with another recipe than "bf16". In a jitted
        function the message of the last is JAX's own: "can't apply forward-mode".
      ValueError: k differs, w is not `[k, n]`, or the recipe cannot read `quantized`.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> matmul(x, w, recipe="tcfp12")[0].tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    if not isinstance(recipe, Recipe):
        recipe = named_recipe(recipe)
    w, quantized = weight_of(w, quantized)
    if w is None and quantized is not None:
        _check_odd(jnp.shape(x), quantized)
    # Equal layers share one trace; a deep model would otherwise trace and lower the
    # same product many times.
    with forward_mode_explained(f'a product with "{describe(recipe)}"'):
        return _shared_product(Asked(recipe, out_sharding), x, w, quantized, key)


@contextlib.contextmanager
def forward_mode_explained(name: str) -> Iterator[None]:
    """Raise JAX's error about forward mode inside of it with a remedy."""
    try:
        yield
    except TypeError as error:
        if "can't apply forward-mode" not in str(error):
            raise
        raise TypeError(
            f"forward-mode differentiation (jax.jvp, jax.jacfwd) of {name}: its"
            " derivative is a rule for reverse mode; use jax.grad, jax.vjp or"
            ' jax.jacrev, or recipe("bf16") in the functions that are differentiated'
            " forward"
        ) from error


def weight_of(
    w: Array | Stored | Parameter | Operand | None,
    quantized: Stored | Operand | None,
) -> tuple[Array | None, Stored | None]:
    """Return (the floats or zeros that take the gradient, the stored form) of a weight,
    either of which may be None.
    """
    if isinstance(w, Operand):
        w = Stored.of(w)
    if isinstance(w, Stored | Parameter):
        # A stored weight is the parameter; with quantized= there would be two answers
        # to which one is multiplied.
        if quantized is not None:
            raise ValueError(
                "w is quantized already and quantized= is given too; pass one of them"
            )
        if isinstance(w, Stored):
            return None, w
        w, quantized = w.layout.untransposed(w.state.slot, w.read())
    return w, Stored.of(quantized) if isinstance(quantized, Operand) else quantized


def product(
    asked: Asked,
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    key: Array | None,
    x_quantized: Quantized | None = None,
) -> Array:
    """Return `matmul` for callers that share a larger part of the program, or have
    quantized x already.
    """
    recipe = asked.recipe
    x, w, quantized = operands_of(recipe, x, w, quantized, key)
    weight = w if quantized is None else quantized
    assert weight is not None, "_check_shapes has looked"
    if 0 in (*x.shape, weight.shape[-1]):
        return _of_nothing(asked, x, w, weight.shape)
    is_vector = x.ndim == 1
    if is_vector:
        # The weight gradient contracts the tokens, so there must be an axis of them.
        spec = (None, *entries(asked.out_sharding, 1))
        asked = Asked(recipe, with_entries(asked.out_sharding, spec))
        x = x[None]
        x_quantized = None
    if isinstance(weight, Stored):
        y = RULES[recipe.mode].product(asked, x, w, weight, x_quantized)
    elif recipe.fp4 is None:
        y = bf16.product(recipe, asked.out_sharding, x, weight)
    elif sharding_of(x) is not None or sharding_of(weight) is not None:
        raise NotImplementedError(
            "FP4 training under a mesh with explicit axes: its blocks and rotations"
            " are not laid out for them; make the mesh with"
            ' axis_types=jax.sharding.AxisType.Auto, or use recipe="bf16" there'
        )
    else:
        y = fp4_training.product(recipe, x, weight, key)
    return y[0] if is_vector else y


def _of_nothing(
    asked: Asked, x: Array, w: Array | None, shape: tuple[int, ...]
) -> Array:
    """Return the product of arrays without values, zero in any arithmetic.

    A scale would need at least one value.
    """
    if w is None:
        w = jnp.zeros((x.shape[-1], shape[-1]), jnp.bfloat16)
    return bf16.dot(x, w, (x.ndim - 1,), (0,), x.dtype, asked.out_sharding)


def operands_of(
    recipe: Recipe,
    x: Array,
    w: Array | None,
    quantized: Stored | None,
    key: Array | None,
) -> tuple[Array, Array | None, Stored | None]:
    """Return (x, w, quantized), checked and with w quantized, as the rules below take
    them.
    """
    check_input("x", x)
    if w is not None:
        check_input("w", w)
    _check_shapes(x.shape, w, quantized)
    quantized = form_read(recipe, w, quantized, key)
    return varying_alike((x, floats_read(recipe, w), quantized))


def floats_read(recipe: Recipe, w: Array | None) -> Array | None:
    """Return a float weight `[*stack, k, n]` as products read it without a stored form.

    With `storage="packed"` it is rounded to the packed format, in blocks along k, with
    the straight-through gradient.
    """
    if w is None or not w.size or recipe.storage == "float":
        return w
    with jax.named_scope("quantize_w"):
        rounded = fake_quantize(w.swapaxes(-1, -2), residual="nf4")
    return checkpoint_name(rounded.swapaxes(-1, -2), WEIGHT_NAME)


def form_read(
    recipe: Recipe, w: Array | None, quantized: Stored | None, key: Array | None
) -> Stored | None:
    """Return the stored form of a weight `[*stack, k, n]` that the products read; None
    if they read floats.
    """
    # The weight is quantized outside the custom_vjp, so a remat policy can keep the
    # result by its name, and the gradient with respect to w does not pass through
    # rounding.
    if quantized is not None:
        quantized = constant(quantized)
    elif recipe.stored is not None and w is not None and w.size:
        with jax.named_scope("quantize_w"):
            quantized = _quantized_here(recipe, lax.stop_gradient(w), key)
    if quantized is not None:
        _check_stored(recipe, quantized)
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, WEIGHT_NAME), quantized)


def _quantized_here(recipe: Recipe, w: Array, key: Array | None) -> Stored:
    """Return a weight, or stack of weights, in the form that the products read."""
    form = recipe.stored
    if isinstance(form, Dual) and "hi+lo" not in (form.forward, form.dgrad):
        # Nothing reads W_lo, and outside the optimizer nothing keeps it.
        recipe = replace(recipe, weight=Single(form.dtype))
    return quantize_weight(w, recipe, key=key)[0]


_shared_product = shared(product)


def check_input(name: str, x: Array) -> None:
    """Raise a TypeError unless x is real floats of 16 bits or more."""
    if getattr(x, "dtype", None) in _WIDE_FLOATS:
        return
    check_real(name, x)
    # FP8 without its scale would be multiplied as if the scale were one.
    raise TypeError(
        f"{name} has dtype {x.dtype}; matmul quantizes by itself, pass bfloat16 or"
        " float32, or a Stored weight as w"
    )


def _check_shapes(
    x: tuple[int, ...], w: Array | None, quantized: Stored | None
) -> None:
    """Raise unless x `[..., k]` and the weight `[k, n]`, given as floats, quantized, or
    both, can be multiplied.
    """
    given = w if quantized is None else quantized
    if given is None:
        raise ValueError(
            f"x{list(x)} has no weight: w is None, and so is quantized; pass one of"
            " them"
        )
    weight = given.shape
    if len(weight) != 2:
        raise ValueError(
            f"w has shape {tuple(weight)}, not [k, n]; reshape it or use jax.vmap over"
            " its leading axes"
        )
    if (
        quantized is not None
        and x
        and x[-1] != weight[0]
        and quantized.holds((x[-1], weight[1]))
    ):
        weight = (x[-1], weight[1])  # packed codes of an odd k
    if not x or x[-1] != weight[0]:
        raise ValueError(
            f"x{list(x)} @ w{list(weight)}: the last axis of x must equal the first of"
            " w (k)"
        )
    if w is not None and w.shape != weight:
        raise ValueError(
            f"w has shape {list(w.shape)}, but quantized has {list(weight)}; they must"
            " be the same weight"
        )


def _check_stored(recipe: Recipe, quantized: Stored) -> None:
    """Raise a ValueError unless the products of the recipe can read this weight."""
    if recipe.stored is not None and quantized.serves(recipe.scaling, recipe.stored):
        return
    given = quantized.describe()
    if recipe.stored is None:
        repair = "dequantize it"
        if quantized.has_residual and recipe.fp4 is None:
            repair += (
                ', or use recipe(NAME, forward="bf16", wgrad="bf16",'
                ' forward_weight="hi+lo") with the name of the recipe that stored it,'
                " which multiplies both halves in BF16"
            )
        raise ValueError(
            f'recipe "{describe(recipe)}" multiplies float weights, but got a {given};'
            f" {repair}"
        )
    if recipe.mode is TCFPMode.FP4:
        wanted = f"packed FP4 codes with {recipe.scaling}"
    else:
        halves = "hi + lo" if isinstance(recipe.stored, Dual) else "one FP8 tensor"
        wanted = f"a weight of {halves} with {recipe.scaling} in both orientations"
    repair = _reader_of(quantized) or "build the state with the same recipe"
    raise ValueError(
        f"the recipe multiplies {wanted}, but quantized is a {given}; {repair}"
    )


def _check_odd(x: tuple[int, ...], w: Stored) -> None:
    """Raise a ValueError if x is one value short of packed codes that do not know their
    odd k.
    """
    if w.is_packed and x and x[-1] % 2 and x[-1] + 1 == w.shape[-2]:
        raise ValueError(
            f"x{list(x)} has an odd k={x[-1]}, but the packed w{list(w.shape)} holds"
            f" k={w.shape[-2]}, as a byte holds two codes; pad x with one zero if w was"
            " packed of an odd k, or pass the float weight, which is padded here"
        )


def _reader_of(w: Stored) -> str:
    """Return how to multiply by packed codes, for messages; "" for other weights."""
    codes = w.codes
    if codes is None:
        return ""
    return (
        "products read codes in the format and tile that they have: use"
        f' recipe("{codes.format}", tile="{codes.tile}"), which fp4_matmul does'
        " with recipe=None, or pack the float weight by this recipe"
    )
