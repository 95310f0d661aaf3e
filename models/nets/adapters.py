"""LoRA: two thin matrices next to each frozen matrix of a Llama, `y = x W + 2 (x A) B`,
of which only A and B train.

Frozen matrices of layers are quantized once (`tcfp_jax.inference.quantize_params`), and
no float copy of them exists. Other frozen matrices have the dtype of their products.

Source: Hu et al. 2021, "LoRA".
"""

from collections.abc import Callable
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
from tcfp_jax.weights.parameter import is_quantized

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


def has_adapters(params: Any) -> bool:
    """Return whether there are adapters among parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return any(is_adapter(path) for path, _ in leaves)


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


def merged(
    params: Any, quantized: Any, joined_by: Callable[[Any, Any], Any] | None = None
) -> Any:
    """Return float32 parameters of the model without adapters, which are added to the
    matrices.

    Args:
      params: Parameters of a run.
      quantized: Its frozen weights.
      joined_by: Function of a matrix, float or quantized, and of its adapter or None,
        which returns the leaf; None adds them.
    """
    join = added if joined_by is None else joined_by
    found: dict[str, Any] = {}
    for path, leaf in (entries(params) | entries(quantized)).items():
        layer, _, name = path.rpartition("/")
        if layer.endswith(SUFFIX):
            continue
        adapter = None
        if name == "kernel":
            adapter = find(params, f"{layer}{SUFFIX}".split("/"))
        put(found, path.split("/"), join(leaf, adapter))
    return found


def added(matrix: Any, adapter: Any) -> jax.Array:
    """Return a matrix, float or quantized, with its adapter or None, in float32."""
    whole = matrix.dequantize() if is_quantized(matrix) else matrix
    if adapter is not None:
        whole = whole + change_of(adapter)
    return whole.astype(jnp.float32)


def change_of(adapter: Any) -> jax.Array:
    """Return what an adapter adds to its matrix, `[..., k, n]`."""
    return SCALE * adapter["a"] @ adapter["b"]


@dataclass(frozen=True)
class Change:
    """Change of the matrices of a stack by an adapter; `change[layer]` is `[k, n]`.

    Attributes:
      adapter: The two thin matrices of each layer.
    """

    adapter: Any

    def __getitem__(self, layer: int) -> jax.Array:
        """Return what the adapter adds to a layer."""
        return _change_of_layer(self.adapter, layer)


@jax.jit
def _change_of_layer(adapter: Any, layer: jax.Array) -> jax.Array:
    return change_of(layer_of(adapter, layer))


def layer_of(tree: Any, layer: jax.Array) -> Any:
    """Return a layer of a tree of stacks, in a compiled program."""

    def own(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)

    return jax.tree.map(own, tree)


def changes_of(params: Any) -> dict[str, Change] | None:
    """Return what adapters add to the matrices of the layers, by the names of these;
    None without adapters.
    """
    found = {}
    for path in entries(params):
        layer, _, name = path.rpartition("/")
        if name == "a" and layer.endswith(SUFFIX):
            own = layer.rpartition("/")[2].removesuffix(SUFFIX)
            found[own] = Change(find(params, layer.split("/")))
    return found or None
