"""Flax Linen layers: `nn.Dense`, `nn.LayerNorm` and `nn.Embed` with low precision.

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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from tcfp_jax import layers
from tcfp_jax.layers import CHOICES, Absent, Multiply
from tcfp_jax.products.fp4_api import of_fp4
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import fake_quantize

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
    """Let layers run Flax's own code in this context if `is_off` of their path is true.

    Use `tcfp_jax.conversion.to_bf16` instead to switch off layers of a model.
    """
    token = OFF.set(is_off)
    try:
        with _TRACE_KEY(patterns):
            yield
    finally:
        OFF.reset(token)


def _is_off(layer: nn.Module) -> bool:
    """Return whether `to_bf16` switched off a layer, which then runs Flax's own code.

    A layer calls Flax's method without the wrapper that Linen puts around methods
    (`inspect.unwrap`): it runs inside a method of the same name already.
    """
    is_off = OFF.get()
    if is_off is None or layer.scope is None:
        return False
    return is_off("/".join(layer.scope.path))


def _check_fields(layer: nn.Module, kind: type[nn.Dense | nn.Embed]) -> None:
    """Raise a ValueError if a field is set by which Flax changes its own product."""
    fields = kind.__dataclass_fields__
    for name in fields.keys() & set(CHOICES):
        value = getattr(layer, name)
        # By identity, because a user's function equals the default's only if it is the
        # default.
        if value is not fields[name].default:
            raise ValueError(
                f"{type(layer).__name__}({name}={value!r}): the recipe decides how the"
                f" product is computed; leave {name} unset, or use nn.{kind.__name__}"
            )


def _stored_weight(layer: nn.Module, name: str) -> Stored | None:
    if not layer.has_variable(COLLECTION, name):
        return None
    return layer.get_variable(COLLECTION, name)


def _kernel_of(layer: "TCFPDense", shape: tuple[int, int]) -> Array | Absent:
    """Return the layer's kernel, or `Absent` if only a quantized one exists."""
    if not layer.is_initializing():
        if layer.has_variable("params", "kernel"):
            kernel = Absent.of(nn.meta.unbox(layer.get_variable("params", "kernel")))
            if isinstance(kernel, Absent):
                if kernel.shape != shape:
                    raise ValueError(
                        f"kernel is stored as {list(kernel.shape)}, but the layer"
                        f" multiplies by {list(shape)}; pass the parameters of this"
                        " model"
                    )
                return kernel
        elif _stored_weight(layer, "kernel") is not None:
            # a cast of the parameters includes the kernel
            bias = nn.meta.unbox(layer.get_variable("params", "bias"))
            dtype = layer.param_dtype if bias is None else bias.dtype
            return Absent(shape, jnp.dtype(dtype))
    # As `nn.Dense` does, so initial values are equal bit for bit
    return layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)


def _multiplier(layer: "TCFPDense | TCFPEmbed", name: str) -> Multiply:
    """Return the product of a bound layer and the parameter of this name.

    It reads the stored parameter if the caller passed one.
    """

    def key() -> Array | None:
        if layer.has_rng(RNG):
            return layer.make_rng(RNG)
        # The output of `init` is thrown away, so any key serves.
        return jax.random.key(0) if layer.is_initializing() else None

    recipe = layer.recipe
    return functools.partial(
        layers.product,
        recipe=recipe if isinstance(recipe, Recipe) else named_recipe(recipe),
        stored=_stored_weight(layer, name),
        key=key,
    )


class TCFPDense(nn.Dense):
    """`nn.Dense` whose product follows a recipe: `y = x W + b`, W `[k, features]`.

    Use this to write a model whose layers have low precision from the start. Use
    `tcfp_jax.conversion.convert_to_tcfp` instead for a model that exists, and for
    `nn.DenseGeneral`, `nn.Einsum` and attention.

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
    >>> x = jax.numpy.ones((2, 3))
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    >>> jax.tree.map(jax.numpy.shape, variables)
    {'params': {'bias': (4,), 'kernel': (3, 4)}}
    """

    recipe: Recipe | str = "tcfp12"

    @nn.compact
    def __call__(
        self, inputs: "Float[jax.Array, '*rows k']"
    ) -> "Float[jax.Array, '*rows features']":
        """Map `inputs` `[..., k]` to `[..., features]`."""
        if _is_off(self):
            return inspect.unwrap(nn.Dense.__call__)(self, inputs)
        _check_fields(self, nn.Dense)
        kernel = _kernel_of(self, (jnp.shape(inputs)[-1], self.features))
        bias = None
        if self.use_bias:
            shape = (self.features,)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        multiply = _multiplier(self, "kernel")
        return layers.dense(multiply, inputs, kernel, bias, self.dtype)


class Fp4Dense(TCFPDense):
    """`TCFPDense` with a weight of four bits, by the recipe "nvfp4" or another one.

    Use this to serve a layer from packed codes, or below an adapter that is trained
    while the codes are frozen. Use the recipe "nvfp4_training" in `TCFPDense` to train.

    The layer packs the parameter of `nn.Dense` at each use;
    `tcfp_jax.inference.quantize_params` packs it once.

    Raises:
      ValueError: the recipe packs no weight, or `TCFPDense` raises it.
    """

    recipe: Recipe | str = "nvfp4"

    def __post_init__(self) -> None:
        of_fp4(self.recipe)  # where the layer is written, instead of at its first call
        super().__post_init__()


class TCFPLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose scale and bias are rounded to the packed TCFP-12 format.

    Use this only to repeat a model of the original with rounded norms: it saves no
    time. The gradient is straight-through. Block scales come from amax, because sigma
    scales would clip gains. Fields and parameters are `nn.LayerNorm`'s.

    >>> x = jax.numpy.ones((2, 4))
    >>> variables = jax.eval_shape(TCFPLayerNorm().init, jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['bias', 'scale']
    """

    @nn.nowrap
    def param(self, *args: Any, **options: Any) -> Any:
        """Return a parameter for Flax's own code, rounded."""
        value = super().param(*args, **options)
        return value if _is_off(self) else fake_quantize(value)


class TCFPEmbed(nn.Embed):
    """`nn.Embed` with rows rounded to packed TCFP-12, and `attend` by a recipe.

    Use this for a table that is also the output head: `attend` multiplies like
    `TCFPDense`. Use `nn.Embed` if tokens are only looked up, which FP8 does not speed
    up. Fields and the parameter are `nn.Embed`'s, plus `recipe`, for `attend` only. The
    rounding is straight-through.

    Raises:
      ValueError: tokens that are not integers, or `promote_dtype` is set.

    >>> layer = TCFPEmbed(8, 4)
    >>> tokens = jax.numpy.arange(3)
    >>> query = jax.numpy.ones((2, 4))
    >>> variables = layer.init(jax.random.key(0), tokens)
    >>> layer.apply(variables, query, method="attend").shape
    (2, 8)
    """

    recipe: Recipe | str = "tcfp12"

    def __call__(self, inputs: Array) -> Array:
        """Map integer tokens `[...]` to `[..., features]`."""
        if _is_off(self):
            return inspect.unwrap(nn.Embed.__call__)(self, inputs)
        _check_fields(self, nn.Embed)
        return layers.embed(self.embedding, inputs, self.dtype)

    def attend(self, query: Array) -> Array:
        """Map `query` `[..., features]` to scores `[..., num_embeddings]`.

        Use this for an output head that shares the table; use `TCFPDense` for a head of
        its own.
        """
        if _is_off(self):
            return inspect.unwrap(nn.Embed.attend)(self, query)
        _check_fields(self, nn.Embed)
        multiply = _multiplier(self, "embedding")
        return layers.attend(multiply, query, self.embedding, self.dtype)


# The Flax class of each layer of ours.
OWN: dict[type[nn.Module], type[nn.Module]] = {
    TCFPDense: nn.Dense,
    Fp4Dense: nn.Dense,
    TCFPEmbed: nn.Embed,
    TCFPLayerNorm: nn.LayerNorm,
}
