"""`matmul(x, w, recipe=...)`: the product of a layer, with the backward pass that the
recipe describes.

The three products of `y = x W`, as FP8 tensor cores want them (both operands read along
the contraction):

    forward   y[m, n]  = x_q[m, k]  . (W_hi + W_lo)ᵀ[n, k]    scale s_x s_w
    dgrad     dx[m, k] = g_q[m, n]  . (W_hi + W_lo)[k, n]      scale s_g s_w   (W_hi alone: ABD)
    wgrad     dW[k, n] = x_qᵀ[k, m] . g_qᵀ[n, m]               scale s_x s_g   (or BF16 x and g)

Each scale is one for the tensor, the row or the block, as the recipe's scaling says.

x and g are quantized once each. If wgrad is FP8, one pass makes both orientations, so
the backward pass keeps x in one byte per value and nothing is transposed. The weight is
quantized outside the `custom_vjp`, or by the optimizer (`tcfp_jax.error_feedback`),
which passes it as `quantized`; then no product needs its float copy.

The gradient is the straight-through one: the gradient of the products above as if
rounding were the identity.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_kernels.dispatch import shared
from pallas_kernels.matmul.api import add_product, skip_matmul
from pallas_kernels.matmul.api import matmul as multiply
from pallas_kernels.operands import Fp4, Operand, Orientation, Quantized, check_real
from pallas_kernels.quantize.api import quantize
from pallas_kernels.specs import (
    Sharding,
    entries,
    sharding_of,
    varying_alike,
    with_entries,
)
from pallas_kernels.wire import Wire
from tcfp_jax.products import bf16, fp4_training, fp4_weights
from tcfp_jax.products.annotations import (
    ACTIVATION_NAME,
    WEIGHT_NAME,
    differentiated_once,
    site,
)
from tcfp_jax.recipes import Arithmetic, Dual, Recipe, Single, describe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored, constant

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float


def matmul(
    x: "Float[jax.Array, '*rows k']",
    w: "Float[jax.Array, 'k n'] | Stored | Parameter | Operand | None",
    *,
    recipe: Recipe | str,
    quantized: Stored | Operand | None = None,
    key: jax.Array | None = None,
    out_sharding: Sharding = None,
) -> "Float[jax.Array, '*rows n']":
    """Return `x @ w` with the operands, products and gradients that `recipe` describes.

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
      TypeError: x or w is integer, complex or 8-bit; or a gradient with respect to a
        stored weight is asked for, a second derivative where operands are rounded, or a
        derivative in forward mode with another recipe than "bf16" (in a jitted function
        the message is JAX's own: "can't apply forward-mode").
      ValueError: k differs, w is not `[k, n]`, or the recipe cannot read `quantized`.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> matmul(x, w, recipe="tcfp12")[0].tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    if not isinstance(recipe, Recipe):
        recipe = named_recipe(recipe)
    w, quantized = weight_of(w, quantized)
    if w is None and quantized is not None and isinstance(quantized.scaling, Fp4):
        fp4_weights.check_odd(jnp.shape(x), quantized)
    # Equal layers share one trace; a deep model would otherwise trace and lower the
    # same product many times.
    try:
        return _shared_product(Asked(recipe, out_sharding), x, w, quantized, key)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "forward-mode differentiation (jax.jvp, jax.jacfwd) of a product with"
            f' "{describe(recipe)}": its derivative is a rule for reverse mode; use'
            ' jax.grad, jax.vjp or jax.jacrev, or recipe("bf16") in the functions that'
            " are differentiated forward"
        ) from error


def weight_of(
    w: jax.Array | Stored | Parameter | Operand | None,
    quantized: Stored | Operand | None,
) -> tuple[jax.Array | None, Stored | None]:
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
        quantized, w = opened(w)
    return w, Stored.of(quantized) if isinstance(quantized, Operand) else quantized


def opened(weight: Stored | Parameter) -> tuple[Stored, jax.Array | None]:
    """Return (the weight `[k, n]` as products read it, the zeros `[k, n]` that take its
    gradient, or None).
    """
    return weight.opened() if isinstance(weight, Parameter) else (weight, None)


@dataclass(frozen=True)
class Asked:
    """The static options of a product: how to multiply, and how the result is sharded
    under explicit axes.
    """

    recipe: Recipe
    out_sharding: Sharding = None


def product(
    asked: Asked,
    x: jax.Array,
    w: jax.Array | None,
    quantized: Stored | None,
    key: jax.Array | None,
    x_quantized: Quantized | None = None,
) -> jax.Array:
    """Return `matmul` for callers that share a larger part of the program, or have
    quantized x already.
    """
    recipe = asked.recipe
    x, w, quantized = operands_of(recipe, x, w, quantized, key)
    n = (w if quantized is None else quantized).shape[-1]  # type: ignore[union-attr]
    if 0 in (*x.shape, n):
        # A scale needs at least one value; without values every sum is zero, in any
        # arithmetic.
        wide = (
            jnp.zeros((x.shape[-1], n), jnp.bfloat16)
            if w is None
            else w.astype(jnp.bfloat16)
        )
        return bf16.dot(
            x.astype(jnp.bfloat16),
            wide,
            (x.ndim - 1,),
            (0,),
            x.dtype,
            asked.out_sharding,
        )
    is_vector = x.ndim == 1
    if is_vector:
        # The weight gradient contracts the tokens, so there must be an axis of them.
        asked = Asked(
            recipe,
            with_entries(asked.out_sharding, (None, *entries(asked.out_sharding, 1))),
        )
        x, x_quantized = x[None], None
    if recipe.fp4 is None and quantized is None:
        assert w is not None, "one of w and quantized is there"
        y = bf16.product(recipe, asked.out_sharding, x, w)
    elif recipe.fp4 is None:
        y = _product(asked, x, w, quantized, x_quantized)
    else:
        # FP4 training has its own custom_vjp: it keeps x in BF16, and its backward pass
        # needs random words.
        assert w is not None, "FP4 training stores nothing"
        if sharding_of(x) is not None or sharding_of(w) is not None:
            raise NotImplementedError(
                "FP4 training under a mesh with explicit axes: its blocks and rotations"
                " are not laid out for them; make the mesh with"
                ' axis_types=jax.sharding.AxisType.Auto, or use recipe="bf16" there'
            )
        y = fp4_training.product(recipe, x, w, key)
    return y[0] if is_vector else y


def operands_of(
    recipe: Recipe,
    x: jax.Array,
    w: jax.Array | None,
    quantized: Stored | None,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, Stored | None]:
    """Return (x, w, quantized), checked and with w quantized, as the rules below take
    them.
    """
    check_input("x", x)
    if w is not None:
        check_input("w", w)
    _check_shapes(x.shape, None if w is None else w.shape, quantized)
    return varying_alike((x, w, form_read(recipe, w, quantized, key)))


def form_read(
    recipe: Recipe, w: jax.Array | None, quantized: Stored | None, key: jax.Array | None
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
        form, read = recipe.stored, recipe
        if isinstance(form, Dual) and "hi+lo" not in (form.forward, form.dgrad):
            # Nothing reads W_lo, and outside the optimizer nothing keeps it.
            read = dataclasses.replace(recipe, weight=Single(form.dtype))
        rounding: Any = lambda w, key: quantize_weight(w, read, key=key)[0]
        for _ in w.shape[:-2]:
            # So that each matrix of a stack has a scale of its own
            rounding = jax.vmap(rounding)
        key = key if key is None or w.ndim == 2 else jax.random.split(key, w.shape[:-2])
        with jax.named_scope("quantize_w"):
            quantized = rounding(lax.stop_gradient(w), key)
    if quantized is not None:
        _check_stored(recipe, quantized)
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, WEIGHT_NAME), quantized)


_shared_product = shared(product)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Saved:
    """The residuals of the backward pass."""

    x: jax.Array | Operand  # BF16 [..., k], or FP8 [k, ...] if wgrad is FP8
    w: jax.Array | None  # floats, if no quantized form exists
    quantized: Stored | None
    # A gradient must have the type of its operand, which may not be kept. A weight
    # without floats has none.
    x_type: jax.core.ShapedArray = field(metadata=dict(static=True))
    w_type: jax.core.ShapedArray | None = field(metadata=dict(static=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(asked: Asked, *operands: Any) -> jax.Array:
    # JAX runs this body only if nobody differentiates; otherwise it takes the rule
    # below, without the site.
    return site(forward(asked, *operands)[0], asked.recipe, operands)


def forward(
    asked: Asked,
    x: jax.Array,
    w: jax.Array | None,
    quantized: Stored | None,
    x_q: Quantized | None,
) -> tuple[jax.Array, Saved]:
    """Return (the product, the residuals of its backward pass)."""
    recipe = asked.recipe
    # One pass serves the forward product and wgrad; if neither is FP8, x is not
    # quantized.
    is_packed = isinstance(recipe.scaling, Fp4)
    if x_q is None and (
        recipe.wgrad != "bf16" or (recipe.forward != "bf16" and not is_packed)
    ):
        with jax.named_scope("quantize_x"):
            x_q = quantize_operand(x, recipe.activation, recipe)
    with jax.named_scope("forward"):
        if is_packed:
            # Codes are decoded to exact BF16 numbers, so x may stay in BF16.
            assert quantized is not None, "packed weights are stored"
            y = fp4_weights.forward(x, quantized, recipe, asked.out_sharding)
        elif recipe.forward == "bf16":
            kernel = bf16.weight(
                w,
                quantized,
                "hi+lo" if recipe.stored is None else recipe.stored.forward,
            )
            y = bf16.dot(
                x.astype(jnp.bfloat16),
                kernel,
                (x.ndim - 1,),
                (0,),
                x.dtype,
                asked.out_sharding,
            )
        else:
            assert (
                recipe.stored is not None and quantized is not None and x_q is not None
            ), "FP8 reads stored weights"
            weight = quantized.for_forward(recipe.stored.forward)
            y = _multiply(
                x_q.rows,
                weight,
                recipe,
                recipe.forward,
                out_dtype=x.dtype,
                out_sharding=asked.out_sharding,
            )
    # Only what wgrad reads is kept: one byte per value in FP8, two in BF16, and never
    # the rows of the forward product.
    if recipe.wgrad == "bf16":
        kept: jax.Array | Operand | None = x.astype(jnp.bfloat16)
    else:
        assert x_q is not None, "quantized above"
        kept = x_q.columns
    kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, ACTIVATION_NAME), kept)
    # dgrad reads the quantized weight, so its float copy need not live until the
    # backward pass.
    w_type = None if w is None else jax.typeof(w)
    return y, Saved(
        kept, w if quantized is None else None, quantized, jax.typeof(x), w_type
    )


def _forward_rule(
    asked: Asked,
    x: jax.Array,
    w: jax.Array | None,
    quantized: Stored | None,
    x_quantized: Quantized | None,
) -> tuple[jax.Array, Saved]:
    if quantized is not None:
        # Nothing reads w then, and JAX would drop an unread operand together with this
        # check.
        quantized, w = differentiated_once((quantized, w))
    return forward(asked, rounded(asked.recipe, x), w, quantized, x_quantized)


def rounded(recipe: Recipe, x: jax.Array) -> jax.Array:
    """Return activations or gradients; only products of BF16 ones have true second
    derivatives.
    """
    return (
        x
        if (recipe.forward, recipe.dgrad, recipe.wgrad) == ("bf16", "bf16", "bf16")
        else differentiated_once(x)
    )


def backward(
    asked: Asked,
    saved: Saved,
    g: jax.Array,
    g_q: Quantized | None = None,
    total: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, None, None]:
    """Return the gradients of x and w (added to `total`) from the result's, g, which
    `g_q` may hold quantized.
    """
    recipe, x_type, w_type = asked.recipe, saved.x_type, saved.w_type
    x_sharding = sharding_of(x_type)
    g = rounded(recipe, g)
    is_packed = isinstance(recipe.scaling, Fp4)
    wgrad_reads_fp8 = recipe.wgrad != "bf16" and w_type is not None
    # As in the forward pass, one quantization of g serves dgrad (rows) and wgrad
    # (columns).
    if g_q is None and (wgrad_reads_fp8 or (recipe.dgrad != "bf16" and not is_packed)):
        with jax.named_scope("quantize_g"):
            g_q = quantize_operand(g, recipe.gradient, recipe)
    with jax.named_scope("dgrad"):
        if is_packed:
            assert saved.quantized is not None, "packed weights are stored"
            dx = fp4_weights.dgrad(
                g, saved.quantized, recipe, x_type.shape[-1], x_type.dtype, x_sharding
            )
        elif recipe.dgrad == "bf16":
            kernel = bf16.weight(
                saved.w,
                saved.quantized,
                "hi+lo" if recipe.stored is None else recipe.stored.dgrad,
            )
            dx = bf16.dot(
                g.astype(jnp.bfloat16),
                kernel,
                (g.ndim - 1,),
                (1,),
                x_type.dtype,
                x_sharding,
            )
        else:
            assert (
                recipe.stored is not None
                and saved.quantized is not None
                and g_q is not None
            )
            weight = saved.quantized.for_dgrad(recipe.stored.dgrad)
            dx = _multiply(
                g_q.rows,
                weight,
                recipe,
                recipe.dgrad,
                out_dtype=x_type.dtype,
                out_sharding=x_sharding,
            )
    if w_type is None:
        # A frozen weight, such as one for inference or under LoRA adapters, costs no
        # wgrad.
        return dx, None, None, None
    w_sharding = sharding_of(w_type)
    with jax.named_scope("wgrad"):
        if recipe.wgrad != "bf16":
            assert (
                isinstance(saved.x, Operand)
                and g_q is not None
                and g_q.columns is not None
            ), "quantized above"
            options: Any = dict(
                out_dtype=w_type.dtype, out_sharding=w_sharding, wire=recipe.wire
            )
            if total is not None and recipe.wire is None:
                return (
                    dx,
                    add_product(
                        total, saved.x, g_q.columns, recipe.wgrad, recipe.backend
                    ),
                    None,
                    None,
                )
            dw = _multiply(saved.x, g_q.columns, recipe, recipe.wgrad, **options)
        else:
            assert isinstance(saved.x, jax.Array), "kept in BF16"
            g = g.astype(jnp.bfloat16)
            if recipe.wire is not None:
                dw = bf16.weight_gradient(
                    saved.x, g, w_type.dtype, w_sharding, recipe.wire
                )
            else:
                tokens = tuple(range(g.ndim - 1))
                dw = bf16.dot(saved.x, g, tokens, tokens, w_type.dtype, w_sharding)
    return dx, dw if total is None else total + dw, None, None


_product.defvjp(_forward_rule, backward)


def quantize_operand(x: jax.Array, dtype: DTypeLike, recipe: Recipe) -> Quantized:
    """Quantize x or g `[..., c]`, in one pass and only in the orientations that its
    products read.

    Rows `[..., c]` are contracted along c, in forward and dgrad; columns `[c, ...]`
    along all other axes, in wgrad.
    """
    orientation: Orientation = "rows" if recipe.wgrad == "bf16" else "both"
    return quantize(
        x,
        dtype,
        recipe.scaling.along_rows,
        orientation=orientation,
        backend=recipe.quantize_backend,
    )


def _multiply(
    a: Operand,
    b: Operand,
    recipe: Recipe,
    how: Arithmetic,
    *,
    out_dtype: DTypeLike,
    out_sharding: Sharding = None,
    wire: Wire | None = None,
) -> jax.Array:
    """Return `a @ b.T` of dequantized operands `[..., *c]` and `[n, *c]`, as
    `[..., n]`.
    """
    assert how != "bf16", "a BF16 product has no FP8 operands"
    if (
        recipe.stored is not None
        and recipe.stored.blocks == "nonzero"
        and b.lo is not None
    ):
        # Its kernel reads values that are contracted along their last axis.
        return skip_matmul(
            a,
            b.settled(),
            out_dtype=out_dtype,
            out_sharding=out_sharding,
            backend=recipe.backend,
        )
    return multiply(
        a,
        b,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        accumulation=how,
        backend=recipe.backend,
        wire=wire,
    )


def check_input(name: str, x: jax.Array) -> None:
    """Raise a TypeError unless x is real floats of 16 bits or more."""
    check_real(name, x)
    # FP8 without its scale would be multiplied as if the scale were one.
    if jnp.dtype(x.dtype).itemsize < 2:
        raise TypeError(
            f"{name} has dtype {x.dtype}; matmul quantizes by itself, pass bfloat16 or"
            " float32, or a Stored weight as w"
        )


def _check_shapes(
    x: tuple[int, ...], w: tuple[int, ...] | None, quantized: Stored | None
) -> None:
    """Raise unless x `[..., k]` and the weight `[k, n]`, given as floats, quantized, or
    both, can be multiplied.
    """
    weight = w if quantized is None else quantized.shape
    if weight is None:
        raise ValueError(
            f"x{list(x)} has no weight: w is None, and so is quantized; pass one of"
            " them"
        )
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
    if w is not None and w != weight:
        raise ValueError(
            f"w has shape {list(w)}, but quantized has {list(weight)}; they must be the"
            " same weight"
        )


def _check_stored(recipe: Recipe, quantized: Stored) -> None:
    """Raise a ValueError unless the products of the recipe can read this weight."""
    if recipe.stored is not None and quantized.serves(recipe.scaling, recipe.stored):
        return
    what = quantized.describe()
    if recipe.stored is None:
        raise ValueError(
            f'recipe "{describe(recipe)}" multiplies float weights, but got a {what};'
            " dequantize it"
        )
    wanted, repair = (
        f"packed FP4 codes with {recipe.scaling}",
        "build the state with the same recipe",
    )
    if not isinstance(recipe.scaling, Fp4):
        halves = "hi + lo" if isinstance(recipe.stored, Dual) else "one FP8 tensor"
        wanted = f"a weight of {halves} with {recipe.scaling} in both orientations"
    if isinstance(codes := quantized.scaling, Fp4):
        repair = (
            "products read codes in the format and tile that they have: use"
            f' recipe("{codes.format}", tile="{codes.tile}"), which fp4_matmul does'
            " with recipe=None, or pack the float weight by this recipe"
        )
    raise ValueError(
        f"the recipe multiplies {wanted}, but quantized is a {what}; {repair}"
    )
