"""Flax Linen layers: `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum`, `nn.LayerNorm` and
`nn.Embed` with low precision.

A layer creates `params` only, with Flax's names and shapes, so checkpoints of both are
interchangeable. Pass the `tcfp` collection (`tcfp_jax.layer_state`) to multiply by
stored kernels; under `nn.scan` and `nn.vmap` name it in
`variable_axes={"params": 0, "tcfp": 0}`. Without it a layer quantizes its parameter at
each call, as `init` and evaluation do. No forward pass writes a variable.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Initializer
from jax.typing import DTypeLike

from tcfp_jax import layers
from tcfp_jax.layers import CHOICES, Absent, Multiply
from tcfp_jax.products.einsum import Contraction
from tcfp_jax.products.fp4_api import of_fp4
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.stored import Stored

if TYPE_CHECKING:  # shapes for readers, editors and tests
    from jaxtyping import Float

COLLECTION = "tcfp"
RNG = "tcfp"

# Tells by a layer's path if it runs Flax's own code now; set while a model that
# `to_bf16` switched off is traced. It changes the trace, so it is part of the key of
# every cache of traced functions.
OFF: contextvars.ContextVar[Callable[[str], bool] | None] = contextvars.ContextVar(
    "tcfp_linen_off", default=None
)
_TRACE_KEY = jax.make_user_context(None)


@contextlib.contextmanager
def switched_off(
    patterns: tuple[str, ...], is_off: Callable[[str], bool]
) -> Iterator[None]:
    """Let layers of ours run Flax's own code inside this context if `is_off` of their
    path is true.
    """
    token = OFF.set(is_off)
    try:
        with _TRACE_KEY(patterns):
            yield
    finally:
        OFF.reset(token)


def _kernel_of(
    layer: Any, name: str, init: Initializer, shape: tuple[int, ...]
) -> jax.Array | Absent:
    """Return the layer's parameter, or `Absent` if inference weights replaced it."""
    dtype = getattr(layer, "param_dtype", jnp.float32)
    if not layer.is_initializing() and layer.has_variable("params", name):
        kernel = Absent.of(nn.meta.unbox(layer.get_variable("params", name)))
        if isinstance(kernel, Absent):
            if kernel.shape != tuple(shape):
                raise ValueError(
                    f"{name} is stored as {list(kernel.shape)}, but the layer"
                    f" multiplies by {list(shape)}; pass the parameters of this model"
                )
            return kernel
    if not (
        layer.is_initializing()
        or layer.has_variable("params", name)
        or _stored_weight(layer, name) is None
    ):
        # a cast of the parameters includes the kernel
        bias = nn.meta.unbox(layer.get_variable("params", "bias"))
        return Absent(tuple(shape), jnp.dtype(dtype if bias is None else bias.dtype))
    # As `nn.Dense` does, so initial values are equal bit for bit
    return layer.param(name, init, shape, dtype)


def _stored_weight(layer: nn.Module, name: str) -> Stored | None:
    return (
        layer.get_variable(COLLECTION, name)
        if layer.has_variable(COLLECTION, name)
        else None
    )


def _multiplier(layer: Any) -> Multiply:
    """Return the product of a bound Linen layer, which reads the stored kernel if the
    caller passed one.
    """
    # The output of `init` is thrown away, so any key serves.
    of_init = lambda: jax.random.key(0) if layer.is_initializing() else None
    key = lambda: layer.make_rng(RNG) if layer.has_rng(RNG) else of_init()
    recipe = (
        layer.recipe if isinstance(layer.recipe, Recipe) else named_recipe(layer.recipe)
    )

    def multiply(
        equation: str | Contraction,
        x: jax.Array,
        kernel: jax.Array | Absent,
        *,
        name: str = "kernel",
    ) -> jax.Array:
        return layers.product(
            equation,
            x,
            kernel,
            recipe=recipe,
            stored=_stored_weight(layer, name),
            key=key,
        )

    return multiply


def _flax_body(
    layer: nn.Module, kind: type, method: str = "__call__"
) -> Callable[..., Any] | None:
    """Return Flax's own method of a layer that `to_bf16` switched off; check the fields
    of any other layer.
    """
    is_off = OFF.get()
    if (
        is_off is not None
        and layer.scope is not None
        and is_off("/".join(layer.scope.path))
    ):
        # Without the wrapper that Linen puts around methods: this one runs inside a
        # method of the same name already.
        return functools.partial(inspect.unwrap(getattr(kind, method)), layer)
    # By identity, because a user's function equals the default's only if it is the
    # default.
    fields = getattr(kind, "__dataclass_fields__", {})
    for name in CHOICES:
        if (
            name in fields
            and (value := getattr(layer, name)) is not fields[name].default
        ):
            raise ValueError(
                f"{type(layer).__name__}({name}={value!r}): the recipe decides how the"
                f" product is computed; leave {name} unset, or use nn.{kind.__name__}"
            )
    return None


class _Reader:
    def __init__(self, layer: Any) -> None:
        self._layer, self.dtype = layer, layer.dtype
        # Each kind of layer has some of these fields; only its own function reads them.
        self.features, self.axis = (
            getattr(layer, "features", ()),
            getattr(layer, "axis", ()),
        )
        self.kernel_shape, batch = (
            getattr(layer, "shape", ()),
            getattr(layer, "batch_dims", ()),
        )
        self.batch = tuple(batch) if isinstance(batch, Iterable) else (batch,)
        if self.batch != tuple(range(len(self.batch))):
            raise ValueError(
                f"batch_dims={self.batch} must be consecutive leading axes from 0"
            )

    def equation(self, given: str | None) -> str:
        return nn.merge_param("einsum_str", self._layer.einsum_str, given)

    def kernel(
        self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None
    ) -> jax.Array | Absent:
        return _kernel_of(
            self._layer, "kernel", _reshaping(self._layer.kernel_init, flat), shape
        )

    def bias(
        self, shape: tuple[int, ...], flat: tuple[int, ...] | None = None
    ) -> jax.Array | None:
        if not self._layer.use_bias:
            return None
        return self._layer.param(
            "bias",
            _reshaping(self._layer.bias_init, flat),
            shape,
            self._layer.param_dtype,
        )

    def embedding(self) -> jax.Array | Absent:
        return self._layer.embedding

    def normalize(
        self, layer: Any, x: jax.Array, *, mask: jax.Array | None
    ) -> jax.Array:
        return inspect.unwrap(nn.LayerNorm.__call__)(layer, x, mask=mask)

    def changed(self, name: str, change: Callable[[jax.Array], jax.Array]) -> Any:
        # Flax's LayerNorm makes and reads its parameters by `self.param`
        value = getattr(self._layer, name)
        return (
            (lambda *args, **options: change(value(*args, **options)))
            if name == "param"
            else value
        )


def _reshaping(init: Initializer, flat: tuple[int, ...] | None) -> Initializer:
    """Return an initializer that runs for the shape `flat` and reshapes the result,
    also inside a box.
    """

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        value = init(key, flat or shape, dtype)
        return nn.meta.replace_boxed(value, jnp.reshape(nn.meta.unbox(value), shape))

    return init if flat is None else initialize


class TCFPDense(nn.Dense):
    """`nn.Dense` whose product follows a recipe: `y = x W + b`, x `[..., k]`, W
    `[k, features]`.

    Fields, parameter names, shapes and initial values are `nn.Dense`'s, plus:

    Attributes:
      recipe: a `tcfp_jax.Recipe` or the name of one.

    `dtype` is the dtype of x, y and b. The kernel is quantized from its own
    `param_dtype`, because rounding it to bfloat16 first would lose the residual. A
    stochastic residual without state draws its bits from the rng stream "tcfp" if the
    caller passes one, otherwise from a fixed key (evaluation, `init`).

    Raises:
      TypeError: integer or complex inputs.
      ValueError: `precision`, `dot_general`, `dot_general_cls` or `promote_dtype` is
        set, which the recipe overrides.

    >>> layer = TCFPDense(4, recipe="tcfp12")
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jax.numpy.ones((2, 3)))
    >>> jax.tree.map(jax.numpy.shape, variables)
    {'params': {'bias': (4,), 'kernel': (3, 4)}}
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(
        self, inputs: "Float[jax.Array, '*rows k']"
    ) -> "Float[jax.Array, '*rows features']":
        """Map `inputs` `[..., k]` to `[..., features]`."""
        if (flax := _flax_body(self, nn.Dense)) is not None:
            return flax(inputs)
        return layers.dense(_Reader(self), _multiplier(self), inputs)


class Fp4Dense(TCFPDense):
    """`TCFPDense` with a weight of four bits, by the recipe "nvfp4" unless you give
    another one that packs.

    The layer packs the parameter of `nn.Dense` at each use;
    `tcfp_jax.inference.quantize_params` packs it once.

    Raises:
      ValueError: the recipe packs no weight, or `TCFPDense` raises it.
    """

    recipe: Recipe | str = "nvfp4"

    def __post_init__(self) -> None:
        of_fp4(self.recipe)  # where the layer is written, instead of at its first call
        super().__post_init__()


class TCFPDenseGeneral(nn.DenseGeneral):
    """`nn.DenseGeneral` whose product follows a recipe; its kernel is
    `[*batch, *in, *features]`.

    Fields and parameters are `nn.DenseGeneral`'s, plus `recipe`, as in `TCFPDense`. To
    store a kernel of more than two axes as a matrix, build the state with
    `tcfp_jax.error_feedback(tcfp_jax.conversion.find_weights(model, *inputs))`.

    Raises:
      TypeError: integer or complex inputs.
      ValueError: a field is set that the recipe decides, as in `TCFPDense`.

    >>> layer = TCFPDenseGeneral((2, 4), recipe="tcfp12")
    >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), jax.numpy.ones((5, 3)))
    >>> y.shape, variables["params"]["kernel"].shape
    ((5, 2, 4), (3, 2, 4))
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Map `inputs` `[*batch, ..., *in]` to `[*batch, ..., *features]`."""
        if (flax := _flax_body(self, nn.DenseGeneral)) is not None:
            return flax(inputs)
        return layers.dense_general(_Reader(self), _multiplier(self), inputs)


class TCFPEinsum(nn.Einsum):
    """`nn.Einsum` whose product follows a recipe; letters that x, kernel and result
    share have a scale per entry.

    Fields and parameters are `nn.Einsum`'s, plus `recipe`. Build its state as for
    `TCFPDenseGeneral`.

    Raises:
      TypeError: integer or complex inputs.
      ValueError: a field is set that the recipe decides, or the equation does not fit.
      NotImplementedError: an equation that is not a stack of matrix products.

    >>> layer = TCFPEinsum((3, 2, 4), "bk,khd->bhd", recipe="tcfp12")
    >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), jax.numpy.ones((5, 3)))
    >>> y.shape, variables["params"]["bias"].shape
    ((5, 2, 4), (2, 4))
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Return the einsum of `inputs` and the kernel, plus the bias."""
        if (flax := _flax_body(self, nn.Einsum)) is not None:
            return flax(inputs, einsum_str)
        return layers.einsum(_Reader(self), _multiplier(self), inputs, einsum_str)


class TCFPLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format,
    with a straight-through gradient.

    Block scales come from amax, because sigma scales would clip gains. Fields and
    parameters are `nn.LayerNorm`'s.

    >>> sorted(jax.eval_shape(TCFPLayerNorm().init, jax.random.key(0), jax.numpy.ones((2, 4)))["params"])
    ['bias', 'scale']
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalize x; `mask` as in `nn.LayerNorm`."""
        if (flax := _flax_body(self, nn.LayerNorm)) is not None:
            return flax(x, mask=mask)
        return layers.layer_norm(_Reader(self), x, mask=mask)


class TCFPEmbed(nn.Embed):
    """`nn.Embed` whose rows are rounded to the packed TCFP-12 format, and whose
    `attend` follows a recipe.

    Fields and the parameter are `nn.Embed`'s, plus `recipe`, for `attend` only. The
    rounding is straight-through.

    Raises:
      ValueError: tokens that are not integers, or `promote_dtype` is set.

    >>> layer = TCFPEmbed(8, 4)
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jax.numpy.arange(3))
    >>> jax.eval_shape(lambda v: layer.apply(v, jax.numpy.ones((2, 4)), method="attend"), variables).shape
    (2, 8)
    """

    recipe: Recipe | str = "tcfp12"

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Map integer tokens `[...]` to `[..., features]`."""
        if (flax := _flax_body(self, nn.Embed)) is not None:
            return flax(inputs)
        return layers.embed(_Reader(self), inputs)

    def attend(self, query: jax.Array) -> jax.Array:
        """Map `query` `[..., features]` to scores `[..., num_embeddings]`."""
        if (flax := _flax_body(self, nn.Embed, "attend")) is not None:
            return flax(query)
        return layers.attend(_Reader(self), _multiplier(self), query)


# The Flax class of each layer of ours.
OWN: dict[type, type] = {
    TCFPDense: nn.Dense,
    Fp4Dense: nn.Dense,
    TCFPDenseGeneral: nn.DenseGeneral,
    TCFPEinsum: nn.Einsum,
    TCFPEmbed: nn.Embed,
    TCFPLayerNorm: nn.LayerNorm,
}
