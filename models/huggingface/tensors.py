"""Tensors of Llama, Qwen and Gemma by the names of Transformers, in both directions.

    tensors = to_huggingface(params, config, Fp4())
        # float parameters, or variables that serve
    save_compressed("folder", tensors, config=llama_dict(config))
    tensors, found = load_compressed("folder")
    variables = from_huggingface(tensors, llama_config(found))
        # of Llama(llama_config(found))

Torch's matrices are `[out, in]`, one per layer; ours are `[in, out]` in a stack of all
layers. Rotary positions turn the same pairs in both. Gemma's files hold the scale of a
norm less 1. `models.huggingface.configs` reads the configuration.
"""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.nets.shapes import LlamaConfig
from pallas_kernels.operands import Operand, Scaling
from tcfp_jax.inference.merging import keep_changes, to_bfloat16
from tcfp_jax.inference.shared_scales import quantize_together
from tcfp_jax.paths import find, put
from tcfp_jax.weights.stored import Stored

_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PROJECTIONS = {
    **{ours: f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{ours: f"mlp.{theirs}" for ours, theirs in _MLP.items()},
}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
# Engines multiply these as one matrix, so they share scales, as in
# `quantize_params(..., fused=FUSED)`.
FUSED = (("query", "key", "value"), ("gate", "up"))
_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
# Scales of activations and cache that an engine may round, and both stay bfloat16 here;
# frequencies of old files.
_UNREAD = (
    ".input_global_scale",
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".rotary_emb.inv_freq",
)

_FLOATS = [np.dtype(one) for one in ("float64", "float32", "float16", jnp.bfloat16)]


def vectors(config: LlamaConfig) -> dict[tuple[str, str], str]:
    """Return Transformers' names of the norms and biases of a layer, by layer and
    parameter here.
    """
    norms = dict(_AFTER if config.post_norms == "on" else NORMS)
    if config.qk_norm == "heads":
        norms |= dict(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    found = {(ours, "scale"): f"{theirs}.weight" for ours, theirs in norms.items()}
    if config.bias == "qkv":
        found |= {(name, "bias"): f"{PROJECTIONS[name]}.bias" for name in FUSED[0]}
    return found


def to_huggingface(
    variables: Mapping[str, Any],
    config: LlamaConfig,
    scaling: Scaling | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the tensors of a Llama by Transformers' names.

    Args:
      variables: Float parameters, or `{"params": ..., "tcfp": ...}` of
        `quantize_params(..., fused=FUSED)`.
      config: Size of the model.
      scaling: Quantizes the float matrices of the layers, q with k and v, gate with up.
      dtype: Dtype of tensors that stay float.
      changes: The part `[layers, k, n]` of each matrix of the layers that adapters
        added; None without adapters. Rounding to nearest would lose it
        (`tcfp_jax.inference.merging`).

    Returns:
      NumPy arrays, and `Operand`s `[n, k]` of them for weights that are quantized.

    Raises:
      ValueError: `scaling` is given for weights that are quantized already.
    """
    params = variables.get("params", variables)
    stored = variables.get("tcfp", {})
    layers = params["layers"]
    tensors: dict[str, Any] = {_EMBEDDING: params["embedding"]["embedding"]}
    tensors[_FINAL_NORM] = params["final_norm"]["scale"] - config.norm_offset
    if config.head == "untied":
        head = find(stored, ["head", "kernel"])
        tensors[_HEAD] = (
            params["head"]["kernel"].T if head is None else head.for_forward("hi")
        )
    matrices: dict[str, Any] = {}
    for group in (*FUSED, ("output",), ("down",)):
        floats: dict[str, jax.Array] = {}
        for name in group:
            weight = find(stored, ["layers", name, "kernel"])
            if weight is None:
                floats[name] = jnp.swapaxes(layers[name]["kernel"], -1, -2)
            else:
                matrices[name] = _stack(weight.for_forward("hi"))
        if scaling is not None and len(floats) < len(group):
            raise ValueError(
                f"scaling={scaling}, but {group} are quantized already; leave it out"
            )
        matrices |= _rounded(floats, scaling, changes)
    named = {f"{theirs}.weight": matrices[ours] for ours, theirs in PROJECTIONS.items()}
    for (ours, kind), theirs in vectors(config).items():
        offset = config.norm_offset if kind == "scale" else 0
        named[theirs] = layers[ours][kind] - offset
    # On the host, because each slice of a layer on a device would compile a program of
    # its own.
    named = jax.device_get(named)
    for layer in range(config.layers):
        of_layer = jax.tree.map(operator.itemgetter((layer, ...)), named)
        tensors |= {
            f"model.layers.{layer}.{name}": tensor for name, tensor in of_layer.items()
        }
    for name, tensor in tensors.items():
        if not isinstance(tensor, Operand):
            tensors[name] = np.asarray(tensor).astype(dtype)
    return tensors


def _rounded(
    floats: Mapping[str, Any],
    scaling: Scaling | None,
    changes: Mapping[str, Any] | None,
) -> Mapping[str, Any]:
    """Return the matrices of a group, quantized if there is a scaling."""
    quantize: Any = to_bfloat16
    if scaling is not None:
        quantize = functools.partial(quantize_together, scaling=scaling)
    if changes is None:
        return floats if scaling is None else quantize(floats)
    of_group = {name: jnp.swapaxes(changes[name], -1, -2) for name in floats}
    made = []
    # One layer after another, because the search holds several copies of the weights
    for layer in range(next(iter(floats.values())).shape[0]):
        w, change = jax.tree.map(operator.itemgetter(layer), (dict(floats), of_group))
        made.append(jax.device_get(keep_changes(quantize, w, change)))
    return jax.tree.map(lambda *layers: np.stack(layers), *made)


def _stack(weight: Operand) -> Operand:
    """Return a stack of matrices; `find_weights` makes a matrix of a stack of one
    layer.
    """
    if weight.values.ndim == 3:
        return weight
    return jax.tree.map(lambda leaf: leaf[None, ...], weight)


def _turned(matrix: Any) -> Any:
    """Return a matrix `[out, in]` as ours; a stored weight has both orientations."""
    return matrix if isinstance(matrix, Stored) else np.swapaxes(matrix, -1, -2)


def from_huggingface(tensors: Mapping[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """Return the variables of a `Llama`: `{"params": ...}`, and `"tcfp"` with quantized
    weights.

    Args:
      tensors: Arrays and `Stored` weights by Transformers' names, as `load_compressed`
        returns them. Scales of activations and of the cache are left out, because both
        stay float here.
      config: Size of the model, `llama_config` of its `config.json`.

    Raises:
      ValueError: a tensor is unknown or missing, or layers store a weight in different
        ways.
    """
    left = {name for name in tensors if not name.endswith(_UNREAD)}
    variables: dict[str, Any] = {"params": {}, "tcfp": {}}

    def take(name: str) -> Any:
        if name not in left:
            raise ValueError(
                f"{name} is missing among {sorted(left)[:4]} and more; pass the"
                " tensors of a whole Llama"
            )
        left.remove(name)
        found = tensors[name]
        if not isinstance(found, Stored) and found.dtype not in _FLOATS:
            raise ValueError(
                f"{name} is {found.dtype}, which is none of the floats that weights"
                " have here; take the original"
            )
        return found if isinstance(found, Stored) else np.asarray(found, np.float32)

    def hold(names: list[str], value: Any) -> None:
        if not isinstance(value, Stored):
            put(variables["params"], names, value)
        elif names[-1] == "kernel":
            put(variables["tcfp"], names, value)
            if find(variables["params"], names[:-1]) is None:
                # Flax knows a layer by its parameters
                put(variables["params"], names[:-1], {})
        else:
            raise ValueError(
                f"{'/'.join(names)} is quantized, but no product reads it; keep it"
                " float"
            )

    def of_layers(theirs: str) -> list[Any]:
        return [
            take(f"model.layers.{layer}.{theirs}") for layer in range(config.layers)
        ]

    hold(["embedding", "embedding"], take(_EMBEDDING))
    hold(["final_norm", "scale"], take(_FINAL_NORM) + np.float32(config.norm_offset))
    if config.head == "untied":
        hold(["head", "kernel"], _turned(take(_HEAD)))
    for (ours, kind), theirs in vectors(config).items():
        held = of_layers(theirs)
        if any(isinstance(one, Stored) for one in held):
            raise ValueError(
                f"{theirs} is quantized, but no product reads it; keep it float"
            )
        offset = config.norm_offset if kind == "scale" else 0
        hold(["layers", ours, kind], np.stack(held) + np.float32(offset))
    for ours, theirs in PROJECTIONS.items():
        held = of_layers(f"{theirs}.weight")
        if len({str(jax.tree.structure(one)) for one in held}) > 1:
            raise ValueError(
                f"the layers store {theirs} in different ways, but a stack has one;"
                " quantize them alike"
            )
        stack = jnp.stack if isinstance(held[0], Stored) else np.stack
        joined = jax.tree.map(lambda *parts, stack=stack: stack(parts), *held)
        hold(["layers", ours, "kernel"], _turned(joined))
    if config.head == "tied":
        left.discard(_HEAD)  # some files hold the embedding twice
    if left:
        raise ValueError(
            f"{sorted(left)[:4]} are no tensors of a Llama of this size; pass the"
            " model's own config"
        )
    return variables if variables["tcfp"] else {"params": variables["params"]}
