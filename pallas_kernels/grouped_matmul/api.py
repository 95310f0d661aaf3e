"""`grouped_matmul`: rows in groups, each group times a weight of its own.

Layers with a mixture of experts have such products.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.checks import check_choice
from pallas_kernels.dispatch import Backend, dispatch
from pallas_kernels.grouped_matmul import mosaic, reference
from pallas_kernels.grouped_matmul.reference import values_of
from pallas_kernels.operands import Accumulation, MatmulOptions, Operand, check_operands

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float, Int

IMPLEMENTATIONS = (mosaic.KERNEL, reference.DEFINITION)
GRADIENT_IMPLEMENTATIONS = (mosaic.GRADIENT, reference.GRADIENT)


def grouped_matmul(
    x: "Operand | Float[jax.Array, 'm k']",
    w: "Operand | Float[jax.Array, 'e n k']",
    group_sizes: "Int[jax.Array, ' e']",
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    accumulation: Accumulation = "fast",
    backend: Backend | None = None,
) -> "Float[jax.Array, 'm n']":
    """Return the product of each row of x with the weight of its group.

    Use it for layers of experts. For one weight, `matmul` is faster.

    The first `group_sizes[0]` rows belong to the first weight, the next
    `group_sizes[1]` to the second, and so on: `out[i, n] = sum_k x[i, k] s_x * (w[e, n,
    k] + w_lo[e, n, k]) s_w` for row i of group e. The gradient of x is the same call
    with the gradient of the result and the other orientation of the weights,
    `[e, k, n]`.

    Args:
      x: `[m, k]`, an operand without a residual, or a bfloat16 array.
      w: `[e, n, k]`, an operand with a scale for each weight (`Tensor`, `[e]`), each of
        its rows (`Row`, `[e, n]`) or its blocks (`Block`; x then has vectors), or a
        bfloat16 array if x is one. A residual shares its scales.
      group_sizes: integers, zero or more; they may add up to less than m.
      out_dtype: a real float; sums are scaled in float32 and then rounded to it.
      accumulation: as in `matmul`. XLA adds in float32 for both.
      backend: None for the fastest one, or a name.

    Returns:
      `[m, n]` in `out_dtype`. Rows behind the last group are zero. A weight that is not
        finite spoils the results that read it, and no other: XLA makes them NaN, the
        Mosaic kernel NaN or inf. All is NaN if a size is negative or the sizes add up
        to more than m, because a compiled program cannot raise. XLA multiplies every
        row by every weight; the Mosaic kernel needs 128 rows, and k and n whose bytes
        are multiples of 64 and 128.

    Raises:
      TypeError: an operand is neither FP8 nor bfloat16, such as FP4, or sizes are not
        integers.
      ValueError: shapes or scales do not fit, concrete sizes are negative or add up to
        more than m, or an unknown `accumulation` or `backend`.
      NotImplementedError: E5M2 x E5M2, or a named backend that cannot run this product.

    >>> x = jnp.ones((4, 2), jnp.bfloat16)
    >>> w = jnp.asarray([[[1, 1]], [[2, 2]]], jnp.bfloat16)
    >>> grouped_matmul(x, w, jnp.array([1, 2]))[:, 0].tolist()
    [2.0, 4.0, 4.0, 0.0]
    """
    values = values_of(w)
    if values.ndim != 3 or values_of(x).ndim != 2:
        raise ValueError(
            f"x{list(values_of(x).shape)} and w{list(values.shape)} must be"
            " [m, k] and [e, n, k]"
        )
    if isinstance(w, Operand) and w.scale.shape != w.scaling.scale_shape(values.shape):
        raise ValueError(
            f"w{list(values.shape)} with {w.scaling} has scales {list(w.scale.shape)},"
            f" but each of the {len(values)} weights has its own,"
            f" {list(w.scaling.scale_shape(values.shape))}; quantize w by jax.vmap"
        )
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), w)
    _check(x, one, accumulation)
    sizes = check_sizes(group_sizes, values_of(x).shape[0], len(values))
    options = MatmulOptions(jnp.dtype(out_dtype), accumulation)
    return dispatch("grouped_matmul", IMPLEMENTATIONS, backend, options, x, w, sizes)


def grouped_weight_gradient(
    x: "Operand | Float[jax.Array, 'k m']",
    g: "Operand | Float[jax.Array, 'n m']",
    group_sizes: "Int[jax.Array, ' e']",
    *,
    out_dtype: DTypeLike = jnp.float32,
    accumulation: Accumulation = "fast",
    backend: Backend | None = None,
) -> "Float[jax.Array, 'e k n']":
    """Return the gradient of each weight of `grouped_matmul`.

    It is made from the columns of x and of the result's gradient:
    `out[e, k, n] = sum_i x[k, i] s_x * g[n, i] s_g` over the rows i of group e; zero
    for an empty group.

    Args:
      x: `[k, m]`, an operand with one scale, one for each k, or vectors of blocks, or a
        bfloat16 array.
      g: `[n, m]`, of the same kind.
      group_sizes, accumulation, backend: as in `grouped_matmul`.
      out_dtype: a real float.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `grouped_matmul`.

    >>> one = jnp.ones((1, 4), jnp.bfloat16)
    >>> grouped_weight_gradient(one, 2 * one, jnp.array([1, 0, 2]))[:, 0, 0].tolist()
    [2.0, 0.0, 4.0]
    """
    if values_of(x).ndim != 2 or values_of(g).ndim != 2:
        shapes = [list(values_of(one).shape) for one in (x, g)]
        raise ValueError(f"x{shapes[0]} and g{shapes[1]} must be [k, m] and [n, m]")
    _check(x, g, accumulation)
    sizes = check_sizes(group_sizes, values_of(x).shape[1])
    options = MatmulOptions(jnp.dtype(out_dtype), accumulation)
    return dispatch(
        "grouped_weight_gradient",
        GRADIENT_IMPLEMENTATIONS,
        backend,
        options,
        x,
        g,
        sizes,
    )


def check_sizes(group_sizes: ArrayLike, m: int, groups: int | None = None) -> Array:
    """Return sizes of groups of m rows as int32.

    Raises:
      TypeError: sizes are not integers.
      ValueError: they are not one for each group, or concrete and wrong.
    """
    sizes = jnp.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes has dtype {sizes.dtype}; sizes are integers, use"
            " .astype(jnp.int32)"
        )
    if sizes.ndim != 1 or groups not in (None, len(sizes)):
        raise ValueError(
            f"group_sizes has shape {list(sizes.shape)}, not one size for each of"
            f" {groups} groups"
        )
    if not isinstance(sizes, jax.core.Tracer):
        # As they were given, in integers without an end: JAX cuts 64 bits to 32.
        given = np.asarray(group_sizes).tolist()
        if min(given, default=0) < 0 or sum(given) > m:
            raise ValueError(
                f"group_sizes {given[:8]} have the sum {sum(given)}, but x has {m}"
                " rows; sizes are zero or more and add up to at most the number of rows"
            )
    # A size of 64 bits that int32 cannot hold stays wrong.
    is_wrong = (sizes < 0) | (sizes > m)
    return jnp.where(is_wrong, -1, sizes.astype(jnp.int32))


def _check(x: Operand | Array, w: Operand | Array, accumulation: str) -> None:
    check_choice("accumulation", accumulation, ("fast", "full"))
    if isinstance(x, Operand) and isinstance(w, Operand):
        check_operands(x, w)
        return
    a = values_of(x)
    b = values_of(w)
    has_operand = isinstance(x, Operand) or isinstance(w, Operand)
    if has_operand or not a.dtype == b.dtype == jnp.bfloat16:
        raise TypeError(
            f"a grouped product of {a.dtype} and {b.dtype}: pass two FP8 operands or"
            " two bfloat16 arrays"
        )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"x{list(a.shape)} and w{list(b.shape)} must agree in their last axis"
        )
