"""LoRA: two thin matrices next to each frozen matrix of a Llama, `y = x W + 2 (x A) B`,
of which only A and B train.

Frozen matrices of layers are quantized once (`tcfp_jax.inference.quantize_params`), and
no float copy of them exists. Other frozen matrices have the dtype of their products.

Source: Hu et al. 2021, "LoRA".
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from tcfp_jax.inference import quantize_params
from tcfp_jax.optim.feedback import ErrorFeedbackState
from tcfp_jax.paths import entries, find, path_names, put
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layerwise import by_layers, is_on_host, on_device

SUFFIX = "_adapter"
SCALE = 2.0


class Adapter(nn.Module):
    """The product `2 (x A) B` of a rank; B is zero at first, so that the model begins
    as it was.
    """

    rank: int
    features: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return what is added to the product of the frozen matrix."""
        dtype = jnp.dtype(self.dtype)
        width = x.shape[-1]
        a = self.param(
            "a", nn.initializers.normal(width**-0.5), (width, self.rank), jnp.float32
        )
        b = self.param(
            "b", nn.initializers.zeros, (self.rank, self.features), jnp.float32
        )
        return x @ a.astype(dtype) @ b.astype(dtype) * jnp.asarray(SCALE, dtype)


def is_adapter(path: Any) -> bool:
    """Return whether a JAX key path is that of an adapter."""
    return any(name.endswith(SUFFIX) for name in path_names(path))


def adapting(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer of the adapters alone, with a place for frozen weights in its
    state (`frozen`).
    """

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "adapter" if is_adapter(path) else "frozen", params
        )

    alone = optax.partition(
        {"adapter": optimizer, "frozen": optax.set_to_zero()}, labels
    )
    return optax.chain(alone, optax.identity())


def adapters_of(params: Any) -> dict[str, Any]:
    """Return the adapters among parameters, as nested dicts."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_adapter(path):
            put(found, path_names(path), leaf)
    return found


def joined(params: Any, adapters: Any) -> dict[str, Any]:
    """Return parameters without adapters and the adapters in one tree."""
    found: dict[str, Any] = {}
    for path, leaf in (entries(params) | entries(adapters)).items():
        put(found, path.split("/"), leaf)
    return found


def frozen(
    params: Any,
    weights: Any,
    optimizer: optax.GradientTransformation,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Any, Any]:
    """Return (parameters without the matrices that products read quantized, state of
    `adapting` with these matrices).

    Args:
      params: Float parameters with adapters. If matrices are on the host, the device
        holds one float layer at a time (`tcfp_jax.inference.quantize_params`).
      weights: As `tcfp_jax.conversion.find_weights` returns them: none of a model in
        BF16.
      optimizer: Made by `adapting`.
      dtype: Dtype of activations, in which frozen matrices stay that are not quantized.
        Their products and lookups would round them to it.
    """
    quantized: Any = {}
    if weights and not isinstance(weights, Recipe):
        variables = quantize_params(params, weights)
        params = variables["params"]
        quantized = variables["tcfp"]

    def kept(path: Any, leaf: Any) -> Any:
        stacked = path_names(path)[0] == "layers"
        if is_adapter(path) or len(leaf.shape) < 2 + stacked:
            return on_device(leaf)
        rounded = _Rounded(jnp.dtype(dtype))
        if stacked and is_on_host(leaf):
            return by_layers(rounded, leaf)
        return rounded(on_device(leaf))

    params = jax.tree_util.tree_map_with_path(kept, params)
    trained, _ = optimizer.init(params)
    return params, (trained, ErrorFeedbackState(quantized, None, None, None, None))


@dataclass(frozen=True)
class _Rounded:
    """Rounding to a dtype, as a function that equals others of the same dtype."""

    dtype: jnp.dtype

    def __call__(self, matrix: jax.Array) -> jax.Array:
        return matrix.astype(self.dtype)


def merged(params: Any, quantized: Any) -> Any:
    """Return float32 parameters of the model without adapters, which are added to the
    matrices.
    """
    found: dict[str, Any] = {}
    whole = {
        **entries(params),
        **{path: weight.dequantize() for path, weight in entries(quantized).items()},
    }
    for path, leaf in whole.items():
        layer, _, name = path.rpartition("/")
        if layer.endswith(SUFFIX):
            continue
        adapter = find(params, f"{layer}{SUFFIX}".split("/"))
        if name == "kernel" and adapter is not None:
            leaf = leaf + SCALE * adapter["a"] @ adapter["b"]
        put(found, path.split("/"), leaf.astype(jnp.float32))
    return found


def changes_of(params: Any) -> dict[str, Any] | None:
    """Return what adapters add to the matrices of the layers, by layer; None without
    adapters.
    """
    found = {}
    for path, a in entries(params).items():
        layer, _, name = path.rpartition("/")
        if name == "a" and layer.endswith(SUFFIX):
            b = find(params, f"{layer}/b".split("/"))
            own = layer.rpartition("/")[2].removesuffix(SUFFIX)
            found[own] = SCALE * a @ b
    return found or None
