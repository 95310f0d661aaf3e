"""`pack_fp4`, `fp4_matmul` and `fp4_linear`: products with a weight of four bits,
packed once or at each call.

    packed = pack_fp4(w)                  # once; w is float [k, n]
    y = fp4_matmul(x, packed)             # x in BF16
    y = fp4_matmul(x, w, recipe="mxfp4")  # packed here, as MXFP4
    both = recipe("nvfp4", activation="float4_e2m1fn")
    y = fp4_matmul(x, w, recipe=both)     # both operands in NVFP4

Left out: training of the codes (train adapters next to them, or float parameters with
recipe("nvfp4_training")), stacks of weights (`jax.vmap`), groups of rows, and codes of
your own choice (`tcfp_jax.inference.choose_codes`).
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.operands import Operand, check_real
from pallas_kernels.specs import Sharding
from tcfp_jax.products.matmul import matmul
from tcfp_jax.recipes import Recipe, TCFPMode, describe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored


def pack_fp4(w: Array, recipe: Recipe | str = "nvfp4") -> Stored:
    """Pack a float weight `[k, n]` into codes and scales: 4.5 bits per value, or 4.25
    with "mxfp4".

    Use this for a weight that does not change. The result is a pytree that
    `fp4_matmul`, `tcfp_jax.matmul` and layers read as a constant. If k is odd, it holds
    one more code of zero, which its `shape` does not count.

    Raises:
      TypeError: w is not real floating point.
      ValueError: w is not a matrix, or the recipe does not pack weights into four bits.

    >>> packed = pack_fp4(jnp.ones((64, 8)))
    >>> packed.shape, packed.forward.values.shape, packed.nbytes
    ((64, 8), (8, 32), 292)
    >>> odd = pack_fp4(jnp.ones((33, 8)))
    >>> odd.shape, odd.forward.values.shape
    ((33, 8), (8, 17))
    """
    w = jnp.asarray(w)
    check_real("w", w)
    if w.ndim != 2:
        raise ValueError(
            f"w{list(w.shape)} is not a matrix [k, n]; reshape it, or use jax.vmap over"
            " its leading axes"
        )
    return quantize_weight(w, of_fp4(recipe))[0]


def fp4_matmul(
    x: Array,
    w: Array | Stored | Operand,
    *,
    recipe: Recipe | str | None = None,
    out_sharding: Sharding = None,
) -> Array:
    """Return `x @ w` with a weight of four bits.

    Use this to serve a weight in 4.5 bits per value or less, or to try FP4 on one
    product. `y = outer * sum_k x (code * scale)` is exact but for float32 sums.

    Args:
      x: real floats `[..., k]` of 16 bits or more; any sizes.
      w: real floats `[k, n]`, which are packed here and get the straight-through
        gradient; or packed codes (`pack_fp4`, `quantize_params`), a constant without a
        gradient.
      recipe: "nvfp4", "mxfp4" or a recipe made of them. None is "nvfp4" for floats; for
        codes it is their own format. Its `activation` says how x is rounded: to BF16,
        unless it is "float8_e4m3fn" (W4A8, a float32 scale for each row; the kernel
        needs codes of the rule "fold_exact") or "float4_e2m1fn" (W4A4, NVFP4). Its
        `dgrad` says the same of the gradient of the result.
      out_sharding: sharding of the result under a mesh with explicit axes, as in
        `lax.dot_general`.

    Returns:
      `[..., n]` in the dtype of x. dx reads the same codes; dw is a BF16 product, or
      FP8 if the recipe says so. A NaN or inf in w makes every output NaN that reads its
      block. One in x makes its row NaN, or inf with BF16 activations. Sums are float32
      before NVFP4's `outer` multiplies them, so results from 2**128 outer on are inf.
      In W4A8 the scale of a row is at least 1e-12 / 448, as in recipes with
      scale="float32".

    Raises:
      TypeError: x or w is not real floating point, or a gradient with respect to packed
        codes is asked for.
      ValueError: k differs, the codes have another format or tile than the recipe, or
        the recipe does not pack weights.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> fp4_matmul(x, w, recipe="mxfp4")[0].tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    if isinstance(w, Operand):
        w = Stored.of(w)
    if recipe is None:
        recipe = "nvfp4"
        codes = w.codes if isinstance(w, Stored) else None
        if codes is not None:
            recipe = named_recipe(codes.format, scaling=codes)
    chosen = of_fp4(recipe)
    weight = w if isinstance(w, Stored) else jnp.asarray(w)
    return matmul(jnp.asarray(x), weight, recipe=chosen, out_sharding=out_sharding)


def fp4_linear(
    x: Array,
    w: Array | Stored | Operand,
    bias: Array | None = None,
    *,
    recipe: Recipe | str | None = None,
    out_sharding: Sharding = None,
) -> Array:
    """Return `x @ w + bias` with a weight of four bits.

    Use this instead of `fp4_matmul` for a layer with a bias `[n]`.

    >>> x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.5)
    >>> fp4_linear(x, w, jnp.ones(4), recipe="mxfp4")[0].tolist()
    [2.5, 2.5, 2.5, 2.5]
    """
    y = fp4_matmul(x, w, recipe=recipe, out_sharding=out_sharding)
    if bias is None:
        return y
    bias = jnp.asarray(bias)
    check_real("bias", bias)
    if bias.shape != y.shape[-1:]:
        raise ValueError(
            f"bias has shape {list(bias.shape)}, but w has n={y.shape[-1]} outputs;"
            " pass one value for each"
        )
    return y + bias.astype(y.dtype)


def of_fp4(recipe: Recipe | str) -> Recipe:
    """Return the recipe, or raise a ValueError if it does not pack weights into four
    bits.
    """
    chosen = named_recipe(recipe)
    if chosen.fp4 is not None:
        raise ValueError(
            f'recipe "{describe(chosen)}" packs no weight: in training each product'
            " quantizes a float one anew; multiply with tcfp_jax.matmul(x, w,"
            ' recipe=..., key=key) or a TCFP layer, or pack by recipe="nvfp4"'
        )
    if chosen.mode is not TCFPMode.FP4:
        kept = (
            f"weight={chosen.weight} with {chosen.scaling}"
            if chosen.stored is not None
            else "weights as floats"
        )
        raise ValueError(
            f'recipe "{describe(chosen)}" stores {kept}, not packed codes of four bits;'
            ' use recipe="nvfp4" or "mxfp4", or multiply with tcfp_jax.matmul or a'
            " TCFP layer"
        )
    return chosen
