"""`fp4_matmul` and `fp4_linear`: products with weights of four bits, packed beforehand or here.

y = fp4_matmul(x, w)                                    w float [k, n]: NVFP4 with two levels of scales, x in BF16
y = fp4_matmul(x, w, recipe="mxfp4")                    MXFP4
y = fp4_matmul(x, w, recipe=recipe("nvfp4", rule="one_level"))            E4M3 scales alone
y = fp4_matmul(x, w, recipe=recipe("nvfp4", rule="fold_exact"), activation="float8_e4m3fn")     x in E4M3, by rows
packed = pack_fp4(w)                                    once, two codes a byte; fp4_matmul(x, packed)
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_real
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.products.axes import Sharding
from tcfp_jax.products.layer import matmul
from tcfp_jax.recipes import Recipe, TCFPMode, describe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored, of_operand

Activation = Literal["bfloat16", "float8_e4m3fn"]


def pack_fp4(w: jax.Array, recipe: Recipe | str = "nvfp4") -> Stored:
    """A float weight `[k, n]` as packed codes with their scales: 4.5 bits a value, 4.25 with "mxfp4".

    The result is a pytree, a constant of products: `fp4_matmul`, `tcfp_jax.matmul` and layers read it as it is. With
    an odd k it holds one more code, of zero, which its `shape` does not count.

    Raises:
      TypeError: w is not real floating point.
      ValueError: w is no matrix, or the recipe is not one of FP4.

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
        raise ValueError(f"w{list(w.shape)} is no matrix [k, n]; reshape it, or use jax.vmap over its leading axes")
    return quantize_weight(w, of_fp4(recipe))[0]


def fp4_matmul(
    x: jax.Array,
    w: Any,
    *,
    recipe: Recipe | str | None = None,
    activation: Activation | None = None,
    out_sharding: Sharding = None,
) -> jax.Array:
    """`x @ w` with a weight of four bits, `y = outer * sum_k x (code * scale)`, exact but for float32 sums.

    Args:
      x: real floats `[..., k]` of 16 bits or more; any sizes.
      w: real floats `[k, n]`, packed here, whose gradient is the straight-through one; or packed codes (`pack_fp4`,
        `quantize_params`), which are a constant: no gradient goes to them.
      recipe: "nvfp4", "mxfp4" or a recipe made of them; None is "nvfp4" for floats, and for codes what they are.
      activation: what x is rounded to: "bfloat16" (W4A16) or "float8_e4m3fn" with a float32 scale for each row (W4A8),
        for codes of the rule "fold_exact", as no kernel reads others beside it; None is as the recipe's `forward` says,
        "bfloat16" unless it was changed. dx has `dgrad` of the recipe.
      out_sharding: of the result under a mesh with explicit axes, as in `lax.dot_general`.

    Returns:
      `[..., n]` in the dtype of x. dx reads the same codes; dw is a BF16 product, FP8 where the recipe says so. A NaN
      or inf in w makes the outputs NaN that read its block, one in x those of its row NaN or, in W4A16, inf. Sums are
      float32 before NVFP4's `outer` multiplies them, so that results from 2**128 outer on are inf: from 1.2e35 max |w|
      on, by the rule "amax". In W4A8 the scale of a row is that of 1e-12 at least, as in recipes with scale="float32".

    Raises:
      TypeError: x or w is not real floating point; or a gradient with respect to packed codes is asked for.
      ValueError: k differs, codes of another format or tile than the recipe's, or a recipe that is not one of FP4.

    >>> fp4_matmul(jnp.ones((2, 3)), jnp.full((3, 4), 0.5), recipe="mxfp4")[0].tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    if isinstance(w, Operand):
        w = of_operand(w)
    if recipe is None and isinstance(w, Stored) and isinstance(w.scaling, Fp4):
        recipe = named_recipe(w.scaling.format, scaling=w.scaling)
    chosen = of_fp4("nvfp4" if recipe is None else recipe)
    if activation is not None:
        forward = {"bfloat16": "bf16", "float8_e4m3fn": "full"}
        if activation not in forward:
            raise ValueError(f"activation={activation!r} is unknown; use one of {list(forward)}")
        chosen = named_recipe(chosen, forward=forward[activation])
    return matmul(
        jnp.asarray(x), w if isinstance(w, Stored) else jnp.asarray(w), recipe=chosen, out_sharding=out_sharding
    )


def fp4_linear(x: jax.Array, w: Any, bias: jax.Array | None = None, **options: Any) -> jax.Array:
    """`x @ w + bias` with a weight of four bits; everything else as in `fp4_matmul`.

    Raises:
      TypeError: bias is not real floating point; and what `fp4_matmul` raises.
      ValueError: bias is not `[n]`; and what `fp4_matmul` raises.

    >>> fp4_linear(jnp.ones((2, 3)), jnp.full((3, 4), 0.5), jnp.ones(4), recipe="mxfp4")[0].tolist()
    [2.5, 2.5, 2.5, 2.5]
    """
    y = fp4_matmul(x, w, **options)
    if bias is None:
        return y
    bias = jnp.asarray(bias)
    check_real("bias", bias)
    if bias.shape != y.shape[-1:]:
        raise ValueError(
            f"bias has shape {list(bias.shape)}, but w has n={y.shape[-1]} outputs; pass one value for each"
        )
    return y + bias.astype(y.dtype)


def of_fp4(recipe: Recipe | str) -> Recipe:
    """The recipe, if it packs weights of four bits.

    Raises:
      ValueError: it does not.

    >>> of_fp4("mxfp4").scaling.format
    'mxfp4'
    """
    chosen = named_recipe(recipe)
    if chosen.fp4 is not None:
        raise ValueError(
            f'recipe "{describe(chosen)}" packs no weight: in training each product quantizes a float one anew; '
            'multiply with tcfp_jax.matmul(x, w, recipe=..., key=key) or a TCFP layer, or pack by recipe="nvfp4"'
        )
    if chosen.mode is not TCFPMode.FP4:
        kept = f"weight={chosen.weight} with {chosen.scaling}" if chosen.weight is not None else "weights as floats"
        raise ValueError(
            f'recipe "{describe(chosen)}" stores {kept}, not packed codes of four bits; use recipe="nvfp4" or "mxfp4", '
            "or multiply with tcfp_jax.matmul or a TCFP layer"
        )
    return chosen
