"""How each layer computes its output: one function for Flax Linen and NNX.

`linen.py` and `nnx.py` read a layer's parameters and pass them to the functions here,
with the product of a kernel as a recipe says (`Multiply`). So both frameworks give the
same bits. Conversion has no part in this: it rewrites the traced program of a layer of
Flax. None of these functions writes a variable.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import check_real
from pallas_kernels.specs import Shape, Sharding, entries_of
from tcfp_jax.paths import serialize_with_flax
from tcfp_jax.products.annotations import mark
from tcfp_jax.products.einsum import Contraction, contract, matrix_product
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.parameter import Parameter, parameter_of
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12, fake_quantize

serialize_with_flax()  # classes that were defined before Flax was imported

# Fields by which a Flax layer changes its own product. The recipe decides the product,
# so they must be unset.
CHOICES = (
    "precision",
    "dot_general",
    "dot_general_cls",
    "promote_dtype",
    "preferred_element_type",
)


@dataclass(frozen=True)
class Absent:
    """Placeholder for a kernel that exists in quantized form only.

    It has the kernel's shape and the parameter's dtype.

    `parameter` is the stored weight if that is the parameter itself (`tcfp_jax.store`).
    Indexing returns the placeholder, because NNX layers read parameters so; any use
    other than `multiply` raises.

    >>> Absent((3, 4), jnp.dtype("float32"))[...].shape
    (3, 4)
    """

    shape: Shape
    dtype: DTypeLike
    parameter: Parameter | None = field(default=None, repr=False)

    @staticmethod
    def of(kernel: "jax.Array | Absent | Stored | Parameter") -> "jax.Array | Absent":
        """Return the placeholder of a stored parameter, or another kernel itself."""
        if not isinstance(kernel, Stored | Parameter):
            return kernel
        parameter = parameter_of(kernel)
        return Absent(parameter.kernel_shape, parameter.described.dtype, parameter)

    def __getitem__(self, index: object) -> "Absent":
        """Return the placeholder itself, for `kernel[...]`."""
        return self

    def __jax_array__(self) -> Array:
        """Raise a NotImplementedError, because there is no float kernel."""
        raise NotImplementedError(
            f"a kernel of shape {list(self.shape)} exists in quantized form only, but"
            " code reads the float one; pass it to multiply alone, or load the float"
            " parameters before to_bf16 or export"
        )


# Return the product of x and a kernel.
Multiply: TypeAlias = Callable[[Contraction, Array, Array | Absent], Array]


def product(
    contraction: Contraction,
    x: Array,
    kernel: Array | Absent,
    *,
    recipe: Recipe,
    stored: Stored | PackedTCFP12 | None,
    key: Callable[[], Array | None],
    out_sharding: Sharding = None,
) -> Array:
    """Return the product of x and a layer's kernel.

    Args:
      contraction, x, recipe, out_sharding: as in `contract`.
      kernel: real floats, or `Absent` if only `stored` exists.
      stored: the kernel as the optimizer or `quantize_params` stored it. None quantizes
        it here.
      key: returns the random key of this call, or None. A kernel that is quantized here
        with a stochastic residual then takes a fixed key; FP4 training has no gradient
        without one.
    """
    layout = contraction.layout
    shape = None
    floats: Array | None = None
    if isinstance(kernel, Absent):
        # Under nnx.scan and nnx.vmap arrays lose their stacked axes, and a placeholder
        # keeps them.
        shape = kernel.shape[-layout.ndim :]
        if kernel.parameter is not None:
            if stored is not None:
                raise ValueError(
                    "the kernel is a stored parameter, and the state holds a quantized"
                    " copy of it, too; train with tcfp_jax.store or with"
                    " error_feedback, not with both"
                )
            # The slot takes the gradient; outside value_and_grad there is none.
            stored = kernel.parameter.read()
            floats = kernel.parameter.state.slot
    else:
        floats = kernel
    if isinstance(stored, PackedTCFP12):
        # The packed format is for storage; products quantize its values like any float
        # kernel.
        floats = stored.dequantize()
        stored = None
    drawn = None
    if stored is None and (recipe.stochastic or recipe.draws):
        drawn = key()
    if drawn is None and recipe.stochastic:
        drawn = jax.random.key(0)  # evaluation draws the same bits at each call
    if floats is not None:
        # A shape that does not fit is left to `contract`, whose error names the repair.
        if stored is not None and stored.holds(layout.matrix_shape(floats.shape)):
            stored = current(stored, layout.matrix(floats))
        # the census of the model reads it
        floats = mark(floats, layout, recipe, contraction.tokens(x.shape))
    return contract(
        contraction,
        x,
        floats,
        recipe=recipe,
        quantized=stored,
        key=drawn,
        shape=shape,
        out_sharding=out_sharding,
    )


def dense(
    multiply: Multiply,
    inputs: Array,
    kernel: Array | Absent,
    bias: Array | None,
    dtype: DTypeLike | None,
) -> Array:
    """Return `y = x W + b` of `Dense` or `Linear`, x `[..., k]` and W `[k, n]`."""
    inputs = _promotable("inputs", inputs)
    typed = jnp.zeros((), kernel.dtype) if isinstance(kernel, Absent) else kernel
    # Only x is cast to the compute dtype: a kernel in BF16 would have lost the residual
    # that quantization splits off.
    dtype = canonicalize_dtype(inputs, typed, bias, dtype=dtype)
    y = multiply(matrix_product(inputs.ndim), inputs.astype(dtype), kernel)
    if bias is None:
        return y
    return y + bias.astype(dtype).reshape((1,) * (y.ndim - 1) + bias.shape)


def attend(
    multiply: Multiply,
    query: Array,
    table: Array | Absent,
    dtype: DTypeLike | None,
) -> Array:
    """Return `Embed.attend`: `y = q Eᵀ`, E `[num_embeddings, features]`."""
    query = _promotable("query", query)
    dtype = canonicalize_dtype(query, table, dtype=dtype)
    contraction = matrix_product(query.ndim, transposed=True)
    return multiply(contraction, query.astype(dtype), table)


def embed(
    table: Array,
    tokens: Array,
    dtype: DTypeLike | None,
    out_sharding: Sharding = None,
) -> Array:
    """Return the rows of `Embed`, rounded to packed TCFP-12 straight-through."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"Embed looks up integers, but got {tokens.dtype}; cast the tokens to int32"
        )
    rows = jnp.asarray(table)  # a stored table raises: it has no floats
    if rows.shape[0] == 1:  # as in Flax: one row is every row
        rows = jnp.broadcast_to(rows, (*tokens.shape, rows.shape[-1]))
    elif out_sharding is None:
        spec = PartitionSpec(*entries_of(tokens), entries_of(rows)[-1])
        rows = with_automatic_axes(_rows_of, lambda _: spec, rows, tokens)
    else:
        take = jax.sharding.auto_axes(_rows_of, out_sharding=out_sharding)
        rows = take(rows, tokens)
    # The blocks of the format run along a row, so only the rows that are looked up need
    # rounding.
    return fake_quantize(rows).astype(dtype or rows.dtype)


def _rows_of(table: Array, tokens: Array) -> Array:
    return jnp.take(table, tokens, axis=0)


def _promotable(name: str, x: Array) -> Array:
    """Return x as an array of real numbers; Flax promotes integers, so they pass."""
    x = jnp.asarray(x)
    if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_):
        check_real(name, x)
    return x
