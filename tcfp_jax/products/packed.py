"""Products of a layer with packed FP4 codes: forward and input gradient read the same bytes.

    forward   y[m, n]  = outer * x[m, k]  . (code * scale)[n, k]ᵀ
    dgrad     dx[m, k] = outer * g[m, n]  . (code * scale)[n, k]

x and g are rounded to BF16, in which codes times scales are exact, or to E4M3 with a scale for each row. Codes of an
odd k end in a zero, beside which x gets one, too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.products.axes import Sharding, entries, resharded, sharding_of, with_entries
from tcfp_jax.recipes import Product, Recipe
from tcfp_jax.weights.stored import Stored


def check_width(x: tuple[int, ...], w: Stored) -> None:
    """Raise where x `[..., k]` is one short of packed codes: nobody said that their last row is a code of zero.

    Raises:
      ValueError: it is.
    """
    if isinstance(w.scaling, Fp4) and x and x[-1] % 2 and x[-1] + 1 == w.shape[-2]:
        raise ValueError(
            f"x{list(x)} has an odd k={x[-1]}, but the packed w{list(w.shape)} holds k={w.shape[-2]}, as a byte holds "
            "two codes; pad x with one zero if w was packed of an odd k, or pass the float weight, which is padded here"
        )


def forward(x: jax.Array, w: Stored, recipe: Recipe, out_sharding: Sharding) -> jax.Array:
    """The product of x `[..., k]` and a packed weight, `[..., n]` in the dtype of x."""
    codes = _codes(w)
    if codes.shape[-1] != x.shape[-1]:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    return fp4_matmul(
        x, codes, activation=_rounded(recipe.forward), out_sharding=out_sharding, backend=recipe.backend
    )  # fmt: skip


def dgrad(g: jax.Array, w: Stored, recipe: Recipe, k: int, dtype: Any, sharding: Sharding) -> jax.Array:
    """The gradient of x `[..., k]`, in `dtype`, from that of the result, `[..., n]`."""
    codes = _codes(w)
    odd = codes.shape[-1] != k
    asked = with_entries(sharding, (*entries(sharding, g.ndim)[:-1], None)) if odd else sharding
    options: Any = dict(contracts="n", out_dtype=dtype, out_sharding=asked, backend=recipe.backend)
    dx = fp4_matmul(g, codes, activation=_rounded(recipe.dgrad), **options)
    if not odd:
        return dx
    dx = dx[..., :k]
    return dx if sharding_of(dx) is None or sharding is None else resharded(dx, entries(sharding, g.ndim))


def _codes(w: Stored) -> Operand:
    assert w.forward is not None, "a transposed weight was turned around before"
    return w.forward


def _rounded(how: Product) -> Any:
    return "bfloat16" if how == "bf16" else "float8_e4m3fn"
