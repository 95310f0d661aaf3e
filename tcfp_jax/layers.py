"""How each layer computes its output: one function for Flax Linen and NNX, with the product left open.

    forward(read, multiply, *inputs)

`read` gives the layer's parameters and fields; `tcfp_jax.linen` and `tcfp_jax.nnx` have a `Reader` each. `multiply`
computes the product of a kernel as a recipe says. The functions here are the bodies of this project's layers and what
conversion runs in the place of Flax's own, so that all of them give the same bits. None of them writes a variable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax.sharding import PartitionSpec

from pallas_kernels.explicit import with_automatic_axes
from pallas_kernels.operands import check_real
from pallas_kernels.specs import entries_of
from tcfp_jax.products.annotations import mark
from tcfp_jax.products.einsum import Contraction, axes_product, contract, matrix_product, parse
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12, fake_quantize
from tcfp_jax.weights.training import kernel_shape, training_of, values_of

# Fields by which a Flax layer computes its product in another way; a recipe decides that, so they must be unset.
CHOICES = (
    "precision", "dot_general", "dot_general_cls", "promote_dtype", "preferred_element_type", "einsum_op",
)  # fmt: skip


class Multiply(Protocol):
    """A product of x and a kernel, as an einsum equation or a `Contraction` says; `name` is that of the parameter."""

    def __call__(self, equation: str | Contraction, x: jax.Array, kernel: Any, *, name: str = "kernel") -> jax.Array:
        """`einsum(equation, x, kernel)`."""


class Reader(Protocol):
    """What a forward pass reads of a layer.

    Linen makes parameters of the shapes given, with the initializer called for the shape `flat`, where that is another
    one; NNX has its parameters already.
    """

    @property
    def dtype(self) -> Any:
        """The layer's `dtype`, or None."""

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes of the output's last axes."""

    @property
    def axis(self) -> tuple[int, ...]:
        """The axes of the input that `dense_general` contracts."""

    @property
    def batch(self) -> tuple[int, ...]:
        """The axes of the input that `dense_general` keeps apart."""

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """The shape of an einsum's kernel."""

    def equation(self, given: str | None) -> str:
        """The einsum equation of the call, or that of the layer."""

    def kernel(self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None) -> Any:
        """The parameter, or `Absent`."""

    def bias(self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None) -> jax.Array | None:
        """The parameter, or None."""

    def embedding(self) -> Any:
        """The table of an embedding, `[num_embeddings, features]`."""

    def normalize(self, layer: Any, x: jax.Array, *, mask: jax.Array | None) -> jax.Array:
        """Flax's own LayerNorm, with the attributes of `layer`."""

    def changed(self, name: str, change: Callable[[jax.Array], jax.Array]) -> Any:
        """The layer's attribute of this name, with parameters changed."""


@dataclass(frozen=True)
class Absent:
    """Stands for a kernel of which only the quantized form exists: its shape and the parameter's dtype.

    `parameter` is the stored weight, where that is the parameter itself (`tcfp_jax.store`). Indexed, as NNX layers read
    their parameters, it is itself; as an operand of anything but `multiply` it raises.

    >>> Absent((3, 4), jnp.dtype("float32"))[...].shape
    (3, 4)
    """

    shape: tuple[int, ...]
    dtype: Any
    parameter: Any = field(default=None, repr=False)

    @staticmethod
    def of(kernel: Any) -> Any:
        """What stands for a kernel that is a stored parameter; any other is itself."""
        if not isinstance(kernel, Stored):
            return kernel
        return Absent(kernel_shape(kernel), training_of(kernel).dtype, kernel)

    def __getitem__(self, index: Any) -> "Absent":
        """The same, for `kernel[...]`."""
        return self

    def __jax_array__(self) -> Any:
        """Raise: there is no float kernel.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            f"a kernel of shape {list(self.shape)} exists in quantized form only, but code reads the float one; pass "
            "it to multiply alone, or load the float parameters before to_bf16 or export"
        )


def forward_of(function: Callable[..., jax.Array], reader: Callable[[Any], Reader]) -> Callable[..., jax.Array]:
    """The function for layers that `reader` reads: `forward(layer, multiply, *inputs)`, as adapters are called."""

    def forward(layer: Any, multiply: Multiply, *inputs: Any, **options: Any) -> jax.Array:
        return function(reader(layer), multiply, *inputs, **options)

    return forward


def as_tuple(sizes: int | Sequence[int]) -> tuple[int, ...]:
    """Sizes or axes, of which Flax takes one as it is."""
    return tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)


def as_contraction(equation: str | Contraction, x: jax.Array) -> Contraction:
    """The contraction itself, or what an equation that a user wrote says of this x."""
    return parse(equation, x.ndim) if isinstance(equation, str) else equation


def product(
    contraction: Contraction,
    x: jax.Array,
    kernel: Any,
    *,
    recipe: Recipe,
    stored: Any,
    key: Callable[[], jax.Array | None],
    out_sharding: Any = None,
) -> jax.Array:
    """The product of x and a layer's kernel.

    Args:
      contraction: which axes are multiplied.
      x: real floats.
      kernel: real floats, or `Absent` where `stored` is all there is.
      recipe: how to multiply.
      stored: what the optimizer, or `quantize_params`, made of the kernel; None where it is quantized here.
      key: gives the random key of a kernel that is quantized here with a stochastic residual, where None is a fixed
        one, and of FP4 training, which has no gradient without one.
      out_sharding: of the result under a mesh with explicit axes, as `contract` takes it.
    """
    shape = None
    if isinstance(kernel, Absent):
        # Under nnx.scan and nnx.vmap arrays lose their stacked axes; what stands for one keeps them.
        shape, parameter = kernel.shape[len(kernel.shape) - contraction.layout.ndim :], kernel.parameter
        kernel = None
        if parameter is not None:
            if stored is not None:
                raise ValueError(
                    "the kernel is a stored parameter, and the state holds a quantized copy of it, too; train with "
                    "tcfp_jax.store or with error_feedback, not with both"
                )
            stored, kernel = values_of(parameter), training_of(parameter).slot
    if isinstance(stored, PackedTCFP12):
        stored, kernel = None, stored.dequantize()
    drawn = key() if stored is None and (recipe.stochastic or recipe.draws) else None
    if drawn is None and recipe.stochastic:
        drawn = jax.random.key(0)  # in evaluation: calls repeat
    if kernel is not None:
        if stored is not None and stored.holds(contraction.layout.matrix_shape(kernel.shape)):
            stored = current(stored, contraction.layout.matrix(kernel))
        kernel = mark(kernel, contraction.layout, recipe, contraction.tokens(x.shape))  # for the census of the model
    return contract(
        contraction, x, kernel, recipe=recipe, quantized=stored, key=drawn, shape=shape, out_sharding=out_sharding
    )


def dense(read: Reader, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """`Dense`, `Linear`: `y = x W + b`, x `[..., k]`, W `[k, features]`."""
    inputs = _promotable("inputs", inputs)
    contraction = matrix_product(inputs.ndim)
    kernel, bias = read.kernel((inputs.shape[-1], *read.features)), read.bias(read.features)
    return _affine(contraction, multiply, inputs, kernel, bias, read.dtype)


def dense_general(read: Reader, multiply: Multiply, inputs: jax.Array) -> jax.Array:
    """`DenseGeneral`, `LinearGeneral`: contracts `axis`, keeps `batch` apart; W `[*batch, *in, *features]`."""
    inputs = _promotable("inputs", inputs)
    axes, batch = _axes(inputs.shape, read.axis, read.batch)
    features = read.features
    contraction = axes_product(inputs.ndim, axes, batch, len(features))
    take = lambda chosen: tuple(inputs.shape[axis] for axis in chosen)
    # Flax initializes the matrix that the kernel is, so that fan-in counts every contracted axis.
    matrix = (prod(take(batch)) * prod(take(axes)), prod(features))
    kernel = read.kernel(take(batch) + take(axes) + features, matrix)
    bias = read.bias(take(batch) + features, (prod(take(batch)) * prod(features),))
    return _affine(contraction, multiply, inputs, kernel, bias, read.dtype)


def einsum(read: Reader, multiply: Multiply, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
    """`Einsum`: the equation of the call or of the layer."""
    inputs = _promotable("inputs", inputs)
    contraction = parse(read.equation(einsum_str), inputs.ndim)
    kernel = read.kernel(read.kernel_shape)
    sizes = contraction.kernel_sizes(kernel.shape[len(kernel.shape) - contraction.layout.ndim :])
    bias = read.bias(tuple(size for size in sizes if size is not None))
    return _affine(contraction, multiply, inputs, kernel, bias, read.dtype)


def attend(read: Reader, multiply: Multiply, query: jax.Array) -> jax.Array:
    """`Embed.attend`: `y = q Eᵀ`, E `[num_embeddings, features]`."""
    query = _promotable("query", query)
    embedding = read.embedding()
    dtype = canonicalize_dtype(query, embedding, dtype=read.dtype)
    return multiply(matrix_product(query.ndim, transposed=True), query.astype(dtype), embedding, name="embedding")


def embed(read: Reader, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
    """`Embed` whose rows are rounded to the packed TCFP-12 format, straight-through."""
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        raise ValueError(f"Embed looks up integers, but got {inputs.dtype}; cast the tokens to int32")
    rows = read.embedding()
    if rows.shape[0] == 1:  # as Flax does: one row is every row
        rows = jnp.broadcast_to(rows, (*inputs.shape, rows.shape[-1]))
    else:
        # Blocks run along a row, so the rows looked up are all that matter.
        take = lambda rows, inputs: jnp.take(rows, inputs, axis=0)
        if out_sharding is None:
            spec = PartitionSpec(*entries_of(inputs), entries_of(rows)[-1])
            rows = with_automatic_axes(take, lambda _: spec, rows, inputs)
        else:
            rows = jax.sharding.auto_axes(take, out_sharding=out_sharding)(rows, inputs)
    return fake_quantize(rows).astype(read.dtype or rows.dtype)


def layer_norm(read: Reader, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """`LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format, straight-through."""
    return read.normalize(_Rounded(read), x, mask=mask)


def _axes(shape: tuple[int, ...], axis: tuple[int, ...], batch: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The axes of an input that `dense_general` contracts, and those that it keeps apart, counted from 0 and sorted."""
    ndim, given = len(shape), (*axis, *batch)
    if not all(-ndim <= one < ndim for one in given) or len({one % ndim for one in given}) < len(given) or not axis:
        raise ValueError(
            f"axis={axis} and batch axes {batch} of inputs{list(shape)}: at least one must be contracted, and each "
            f"must be one of {ndim} and be named once; correct axis="
        )
    return tuple(tuple(sorted(one % ndim for one in chosen)) for chosen in (axis, batch))


class _Rounded:
    """A layer as Flax's own code reads it, with its parameters rounded."""

    def __init__(self, read: Reader) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return self._read.changed(name, fake_quantize)


def _affine(
    contraction: Contraction, multiply: Multiply, x: jax.Array, kernel: Any, bias: jax.Array | None, dtype: Any
) -> jax.Array:
    """The product plus the bias, in the dtype in which Flax would multiply."""
    typed = jnp.zeros((), kernel.dtype) if isinstance(kernel, Absent) else kernel
    dtype = canonicalize_dtype(x, typed, bias, dtype=dtype)
    y = multiply(contraction, x.astype(dtype), kernel)
    if bias is None:
        return y
    sizes = contraction.kernel_sizes(kernel.shape[len(kernel.shape) - contraction.layout.ndim :])
    return y + bias.astype(dtype).reshape([1 if size is None else size for size in sizes])


def _promotable(name: str, x: jax.Array) -> jax.Array:
    """`x` as an array of real numbers: integers, which Flax promotes to the dtype of the parameters, are right, too."""
    x = jnp.asarray(x)
    if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_):
        check_real(name, x)
    return x
