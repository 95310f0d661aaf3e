"""How each layer computes its output: one function for Flax Linen and NNX, which takes
the product as an argument.

    forward(read, multiply, *inputs)

`read` gives the layer's parameters and fields; `linen.py` and `nnx.py` have a `Reader`
each. `multiply` computes the product of a kernel as a recipe says. These functions are
the bodies of this project's layers, and conversion runs them instead of Flax's own, so
all of them give the same bits. None of them writes a variable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import check_real
from pallas_kernels.specs import Sharding, entries_of
from tcfp_jax.paths import serialize_with_flax
from tcfp_jax.products.annotations import mark
from tcfp_jax.products.einsum import Contraction, contract, matrix_product, parse
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.layout import Layout
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12, fake_quantize
from tcfp_jax.weights.training import kernel_shape, training_of

serialize_with_flax()  # classes that were defined before Flax was imported

# Fields by which a Flax layer changes its own product. The recipe decides the product,
# so they must be unset.
CHOICES = (
    "precision",
    "dot_general",
    "dot_general_cls",
    "promote_dtype",
    "preferred_element_type",
    "einsum_op",
)


@dataclass(frozen=True)
class Absent:
    """Placeholder for a kernel that exists in quantized form only: its shape and the
    parameter's dtype.

    `parameter` is the stored weight if that is the parameter itself (`tcfp_jax.store`).
    Indexing returns the placeholder, because NNX layers read parameters so; any use
    other than `multiply` raises.

    >>> Absent((3, 4), jnp.dtype("float32"))[...].shape
    (3, 4)
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    parameter: Stored | None = field(default=None, repr=False)

    @staticmethod
    def of(kernel: "jax.Array | Absent | Stored") -> "jax.Array | Absent":
        """Return the placeholder of a kernel that is a stored parameter; return any
        other kernel unchanged.
        """
        if not isinstance(kernel, Stored):
            return kernel
        return Absent(kernel_shape(kernel), training_of(kernel).dtype, kernel)

    def __getitem__(self, index: object) -> "Absent":
        """Return the placeholder itself, for `kernel[...]`."""
        return self

    def __jax_array__(self) -> jax.Array:
        """Raise a NotImplementedError, because there is no float kernel."""
        raise NotImplementedError(
            f"a kernel of shape {list(self.shape)} exists in quantized form only, but"
            " code reads the float one; pass it to multiply alone, or load the float"
            " parameters before to_bf16 or export"
        )


# The product of x and a kernel, by an einsum equation or a `Contraction`; `name=` is
# the parameter's, unless "kernel".
Multiply = Callable[..., jax.Array]


class Reader(Protocol):
    """The view that a forward pass has of a layer: its parameters, and the fields that
    Linen and NNX name differently.

    Linen makes parameters of the given shapes. Its initializer is called for the shape
    `flat` if there is one, and the result is reshaped, so that fan-in counts every
    contracted axis. NNX has its parameters already.
    """

    dtype: DTypeLike | None
    features: int | Sequence[int]  # sizes of the output's last axes
    axis: int | tuple[int, ...]  # axes of the input that `dense_general` contracts
    batch: tuple[int, ...]  # axes that it keeps apart
    kernel_shape: tuple[int, ...]  # of an einsum

    def equation(self, given: str | None) -> str:
        """Return the einsum equation of the call, or else the layer's."""

    def kernel(
        self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None
    ) -> jax.Array | Absent:
        """Return the parameter, or its placeholder."""

    def bias(
        self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None
    ) -> jax.Array | None:
        """Return the parameter, or None."""

    def embedding(self) -> jax.Array | Absent:
        """Return the table of an embedding, `[num_embeddings, features]`."""

    def normalize(
        self, layer: Any, x: jax.Array, *, mask: jax.Array | None
    ) -> jax.Array:
        """Run Flax's own LayerNorm with the attributes of `layer`."""

    def changed(self, name: str, change: Callable[[jax.Array], jax.Array]) -> Any:
        """Return the layer's attribute of this name, with `change` applied to
        parameters.
        """


def _as_tuple(sizes: int | Sequence[int]) -> tuple[int, ...]:
    """Return sizes or axes as a tuple; Flax takes a single one as a number."""
    return tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)


def product(
    equation: str | Contraction,
    x: jax.Array,
    kernel: jax.Array | Absent,
    *,
    recipe: Recipe,
    stored: Stored | PackedTCFP12 | None,
    key: Callable[[], jax.Array | None],
    out_sharding: Sharding = None,
) -> jax.Array:
    """Return the product of x and a layer's kernel.

    Args:
      equation, x, recipe, out_sharding: as in `contract`.
      kernel: real floats, or `Absent` if only `stored` exists.
      stored: the kernel as the optimizer or `quantize_params` stored it. None quantizes
        it here.
      key: returns the random key of this call, or None. A kernel that is quantized here
        with a stochastic residual then takes a fixed key; FP4 training has no gradient
        without one.
    """
    contraction = parse(equation, x.ndim) if isinstance(equation, str) else equation
    layout, shape = contraction.layout, None
    floats: jax.Array | None
    if isinstance(kernel, Absent):
        # Under nnx.scan and nnx.vmap arrays lose their stacked axes, and a placeholder
        # keeps them.
        shape, parameter, floats = (
            kernel.shape[len(kernel.shape) - layout.ndim :],
            kernel.parameter,
            None,
        )
        if parameter is not None:
            if stored is not None:
                raise ValueError(
                    "the kernel is a stored parameter, and the state holds a quantized"
                    " copy of it, too; train with tcfp_jax.store or with"
                    " error_feedback, not with both"
                )
            # The slot takes the gradient; outside value_and_grad there is none.
            stored, floats = parameter.read(), training_of(parameter).slot
    else:
        floats = kernel
    if isinstance(stored, PackedTCFP12):
        # The packed format is for storage; products quantize its values like any float
        # kernel.
        floats, stored = stored.dequantize(), None
    drawn = key() if stored is None and (recipe.stochastic or recipe.draws) else None
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


def dense(read: Reader, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """Return `Dense` or `Linear` of x `[..., k]`: `y = x W + b`, W `[k, features]`."""
    inputs, features = _promotable("inputs", inputs), _as_tuple(read.features)
    kernel, bias = read.kernel((inputs.shape[-1], *features)), read.bias(features)
    # Only x is cast to the compute dtype: a kernel in BF16 would have lost the residual
    # that quantization splits off.
    dtype = _dtype_of(inputs, kernel, bias, read.dtype)
    y = multiply(matrix_product(inputs.ndim), inputs.astype(dtype), kernel)
    return (
        y
        if bias is None
        else y + bias.astype(dtype).reshape((1,) * (y.ndim - 1) + features)
    )


def dense_general(read: Reader, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """Return `DenseGeneral` or `LinearGeneral`: contract `axis`, keep `batch` apart; W
    `[*batch, *in, *features]`.
    """
    inputs, features = _promotable("inputs", inputs), _as_tuple(read.features)
    shape, ndim, given = (
        inputs.shape,
        inputs.ndim,
        (*(axis := _as_tuple(read.axis)), *read.batch),
    )
    if (
        not all(-ndim <= one < ndim for one in given)
        or len({one % ndim for one in given}) < len(given)
        or not axis
    ):
        raise ValueError(
            f"axis={axis} and batch axes {read.batch} of inputs{list(shape)}: at least"
            f" one must be contracted and each must be one of {ndim} and be named once;"
            " correct axis="
        )
    axes, batch = (
        tuple(sorted(one % ndim for one in chosen)) for chosen in (axis, read.batch)
    )
    first, last = len(batch), len(batch) + len(axes)
    places = tuple(range(last + len(features)))
    layout = Layout(places[first:last], places[last:], places[:first])
    # its result is [*batch, ..., *features]
    contraction = Contraction(layout, inputs.ndim, axes, batch)
    take = lambda chosen: tuple(shape[one] for one in chosen)
    # Flax initializes the kernel as a matrix, so that fan-in counts every contracted
    # axis.
    matrix = (prod(take(batch)) * prod(take(axes)), prod(features))
    kernel = read.kernel(take(batch) + take(axes) + features, matrix)
    bias = read.bias(take(batch) + features, (prod(take(batch)) * prod(features),))
    return _affine(contraction, multiply, inputs, kernel, bias, read.dtype)


def einsum(
    read: Reader, multiply: Multiply, inputs: jax.Array, einsum_str: str | None = None
) -> jax.Array:
    """Return `Einsum` by the equation of the call or of the layer."""
    inputs = _promotable("inputs", inputs)
    contraction = parse(read.equation(einsum_str), inputs.ndim)
    kernel = read.kernel(read.kernel_shape)
    bias = read.bias(
        tuple(size for size in _sizes(contraction, kernel) if size is not None)
    )
    return _affine(contraction, multiply, inputs, kernel, bias, read.dtype)


def attend(read: Reader, multiply: Multiply, query: jax.Array) -> jax.Array:
    """Return `Embed.attend`: `y = q Eᵀ`, E `[num_embeddings, features]`."""
    query = _promotable("query", query)
    embedding = read.embedding()
    dtype = canonicalize_dtype(query, embedding, dtype=read.dtype)
    return multiply(
        matrix_product(query.ndim, transposed=True),
        query.astype(dtype),
        embedding,
        name="embedding",
    )


def embed(read: Reader, inputs: jax.Array, out_sharding: Sharding = None) -> jax.Array:
    """Return `Embed` with rows rounded to the packed TCFP-12 format,
    straight-through.
    """
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        raise ValueError(
            f"Embed looks up integers, but got {inputs.dtype}; cast the tokens to int32"
        )
    rows: Any = jnp.asarray(read.embedding())  # a stored table raises: it has no floats
    if rows.shape[0] == 1:  # as in Flax: one row is every row
        rows = jnp.broadcast_to(rows, (*inputs.shape, rows.shape[-1]))
    else:
        # The blocks of the format run along a row, so only the rows that are looked up
        # need rounding.
        take = lambda rows, inputs: jnp.take(rows, inputs, axis=0)
        if out_sharding is None:
            spec = PartitionSpec(*entries_of(inputs), entries_of(rows)[-1])
            rows = with_automatic_axes(take, lambda _: spec, rows, inputs)
        else:
            rows = jax.sharding.auto_axes(take, out_sharding=out_sharding)(rows, inputs)
    return fake_quantize(rows).astype(read.dtype or rows.dtype)


def layer_norm(
    read: Reader, x: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
    """Return `LayerNorm` with scale and bias rounded to the packed TCFP-12 format,
    straight-through.
    """
    return read.normalize(_Rounded(read), x, mask=mask)


@dataclass(frozen=True)
class _Rounded:
    """A layer whose parameters Flax's own code reads rounded."""

    _read: Reader

    def __getattr__(self, name: str) -> Any:
        return self._read.changed(name, fake_quantize)


def _affine(
    contraction: Contraction,
    multiply: Multiply,
    x: jax.Array,
    kernel: jax.Array | Absent,
    bias: jax.Array | None,
    dtype: DTypeLike | None,
) -> jax.Array:
    """Return the product plus the bias, in the dtype in which Flax would multiply."""
    dtype = _dtype_of(x, kernel, bias, dtype)
    y = multiply(contraction, x.astype(dtype), kernel)
    if bias is None:
        return y
    sizes = _sizes(contraction, kernel)
    return y + bias.astype(dtype).reshape(
        [1 if size is None else size for size in sizes]
    )


def _sizes(contraction: Contraction, kernel: jax.Array | Absent) -> list[int | None]:
    """Return the sizes of the result's axes that come from the kernel, which may have
    stacked axes in front.
    """
    return contraction.kernel_sizes(
        kernel.shape[len(kernel.shape) - contraction.layout.ndim :]
    )


def _dtype_of(
    x: jax.Array,
    kernel: jax.Array | Absent,
    bias: jax.Array | None,
    dtype: DTypeLike | None,
) -> DTypeLike:
    typed = jnp.zeros((), kernel.dtype) if isinstance(kernel, Absent) else kernel
    return canonicalize_dtype(x, typed, bias, dtype=dtype)


def _promotable(name: str, x: jax.Array) -> jax.Array:
    """Return `x` as an array of real numbers; integers pass, because Flax promotes them
    to the parameters' dtype.
    """
    x = jnp.asarray(x)
    if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_):
        check_real(name, x)
    return x
