"""Llamas in the form of Transformers: names of tensors and the configuration, in both directions.

    tensors = to_huggingface(params, config, Fp4())                   # float parameters, or variables that serve
    save_compressed("folder", tensors, config=llama_dict(config))
    tensors, found = load_compressed("folder")
    variables = from_huggingface(tensors, llama_config(found))        # of Llama(llama_config(found))

Torch's matrices are `[out, in]`, one per layer; ours are `[in, out]` in a stack of all layers. Rotary positions turn
the same pairs in both.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.llama import LlamaConfig
from pallas_kernels.operands import Operand, Scaling
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
# Engines multiply these as one matrix, so they share scales, as in `quantize_params(..., fused=FUSED)`.
FUSED = (("query", "key", "value"), ("gate", "up"))
_EMBEDDING, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "max_position_embeddings", "vocab_size"), int
    ),
    "rms_norm_eps": int | float, "rope_theta": int | float,
}  # fmt: skip
# Scales of activations and cache that an engine may round; both stay bfloat16 here.
_OF_ACTIVATIONS = (".input_global_scale", ".input_scale", ".k_scale", ".v_scale")


def llama_dict(config: LlamaConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the `config.json` of Transformers' LlamaForCausalLM for a size.

    >>> from models.llama import LLAMAS
    >>> llama_dict(LLAMAS["llama-tiny"])["intermediate_size"]
    384
    """
    return dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", attention_bias=False,
        mlp_bias=False, attention_dropout=0.0, hidden_size=config.width, intermediate_size=config.hidden,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_size, vocab_size=config.vocabulary, max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta, rope_scaling=None,
        tie_word_embeddings=config.head == "tied", torch_dtype=dtype,
    )  # fmt: skip


def llama_config(found: Mapping[str, Any]) -> LlamaConfig:
    """Return the size that a `config.json` describes.

    Raises:
      ValueError: it describes another model, no whole Llama, or one with an option that `models.llama` does not have.

    >>> from models.llama import LLAMAS
    >>> llama_config(llama_dict(LLAMAS["llama-tiny"])) == LLAMAS["llama-tiny"]
    True
    """
    if not isinstance(found, Mapping) or found.get("model_type") != "llama":
        kind = found.get("model_type") if isinstance(found, Mapping) else type(found).__name__
        raise ValueError(f"model_type={kind!r} is not 'llama', the one model that is known here")
    ropes = [found.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(one, Mapping) for one in ropes):
        raise ValueError(f"rope_scaling and rope_parameters are {ropes}, not objects; copy the model's config.json")
    rope = {**ropes[0], **ropes[1]}
    held = {**dict.fromkeys(_NUMBERS), **found, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
    held["num_key_value_heads"] = held["num_key_value_heads"] or held["num_attention_heads"]
    held["rope_theta"] = rope.get("rope_theta") or held["rope_theta"] or 10_000.0
    for name, kind in _NUMBERS.items():  # the file may be someone else's
        if not isinstance(held[name], kind) or held[name] <= 0:
            raise ValueError(f"{name}={held[name]!r} is not a positive number; copy the model's config.json")
    heads, width = held["num_attention_heads"], held["hidden_size"]
    expected = {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": width // heads,
        "rope_type": "default",
    }  # fmt: skip
    for name, value in expected.items():
        if held.get(name, value) not in (value, None):
            raise ValueError(f"{name}={held[name]!r}, but models.llama computes {value!r} alone; take another model")
    return LlamaConfig(
        layers=held["num_hidden_layers"], width=width, heads=heads, hidden=held["intermediate_size"],
        kv_heads=held["num_key_value_heads"], context=held["max_position_embeddings"], vocabulary=held["vocab_size"],
        head="tied" if found.get("tie_word_embeddings") else "untied", rope_theta=float(held["rope_theta"]),
        norm_eps=held["rms_norm_eps"],
    )  # fmt: skip


def to_huggingface(
    variables: Mapping[str, Any], config: LlamaConfig, scaling: Scaling | None = None, dtype: DTypeLike = jnp.bfloat16
) -> dict[str, Any]:
    """Return the tensors of a Llama by Transformers' names.

    Args:
      variables: Float parameters, or `{"params": ..., "tcfp": ...}` of `quantize_params(..., fused=FUSED)`.
      config: Size of the model.
      scaling: Quantizes the float matrices of the layers, q with k and v, gate with up.
      dtype: Dtype of tensors that stay float.

    Returns:
      NumPy arrays, and `Operand`s `[n, k]` of them for weights that are quantized.

    Raises:
      ValueError: `scaling` is given for weights that are quantized already.
    """
    params, stored = variables.get("params", variables), variables.get("tcfp", {})
    layers = params["layers"]
    tensors: dict[str, Any] = {_EMBEDDING: params["embedding"]["embedding"], _FINAL_NORM: params["final_norm"]["scale"]}
    if config.head == "untied":
        head = find(stored, ["head", "kernel"])
        tensors[_HEAD] = params["head"]["kernel"].T if head is None else head.for_forward("hi")
    matrices: dict[str, Any] = {}
    for group in (*FUSED, ("output",), ("down",)):
        held = {name: find(stored, ["layers", name, "kernel"]) for name in group}
        floats = {n: jnp.swapaxes(layers[n]["kernel"], -1, -2) for n, weight in held.items() if weight is None}
        if scaling is not None and len(floats) < len(group):
            raise ValueError(f"scaling={scaling}, but {group} are quantized already; leave it out")
        matrices |= {name: _stack(weight.for_forward("hi")) for name, weight in held.items() if weight is not None}
        matrices |= floats if scaling is None else quantize_together(floats, scaling)
    # On the host, because each slice of a layer on a device would compile a program of its own.
    matrices, layers = jax.device_get((matrices, layers))
    for layer in range(config.layers):
        one = lambda stack, layer=layer: jax.tree.map(lambda leaf: leaf[layer, ...], stack)
        place = f"model.layers.{layer}"
        tensors |= {f"{place}.{theirs}.weight": one(matrices[ours]) for ours, theirs in PROJECTIONS.items()}
        tensors |= {f"{place}.{theirs}.weight": one(layers[ours]["scale"]) for ours, theirs in NORMS.items()}
    return {name: t if isinstance(t, Operand) else np.asarray(t).astype(dtype) for name, t in tensors.items()}


def _stack(weight: Operand) -> Operand:
    """Return a stack of matrices; `find_weights` makes a matrix of a stack of one layer."""
    return weight if weight.values.ndim == 3 else jax.tree.map(lambda leaf: leaf[None, ...], weight)


def from_huggingface(tensors: Mapping[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """Return the variables of a `Llama`: `{"params": ...}`, and `"tcfp"` with quantized weights.

    Args:
      tensors: Arrays and `Stored` weights by Transformers' names, as `load_compressed` returns them. Scales of
        activations and of the cache are left out, because both stay float here.
      config: Size of the model, `llama_config` of its `config.json`.

    Raises:
      ValueError: a tensor is unknown or missing, or layers store a weight in different ways.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_OF_ACTIVATIONS)}
    variables: dict[str, Any] = {"params": {}, "tcfp": {}}

    def take(name: str) -> Any:
        if name not in tensors:
            raise ValueError(
                f"{name} is missing among {sorted(tensors)[:4]} and more; pass the tensors of a whole Llama"
            )
        found = tensors.pop(name)
        return found if isinstance(found, Stored) else jnp.asarray(found, jnp.float32)

    def hold(names: list[str], value: Any) -> None:
        if not isinstance(value, Stored):
            put(variables["params"], names, value)
        elif names[-1] == "kernel":
            put(variables["tcfp"], names, value)
            put(variables["params"], names[:-1], {})  # Flax knows a layer by its parameters
        else:
            raise ValueError(f"{'/'.join(names)} is quantized, but no product reads it; keep it float")

    turned = lambda value: value if isinstance(value, Stored) else jnp.swapaxes(value, -1, -2)
    hold(["embedding", "embedding"], take(_EMBEDDING))
    hold(["final_norm", "scale"], take(_FINAL_NORM))
    if config.head == "untied":
        hold(["head", "kernel"], turned(take(_HEAD)))
    for ours, theirs in (PROJECTIONS | NORMS).items():
        held = [take(f"model.layers.{layer}.{theirs}.weight") for layer in range(config.layers)]
        if len({str(jax.tree.structure(one)) for one in held}) > 1:
            raise ValueError(f"the layers store {theirs} in different ways, but a stack has one; quantize them alike")
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *held)
        hold(
            ["layers", ours, "scale"] if ours in NORMS else ["layers", ours, "kernel"],
            stack if ours in NORMS else turned(stack),
        )
    if config.head == "tied":
        tensors.pop(_HEAD, None)  # some files hold the embedding twice
    if tensors:
        raise ValueError(f"{sorted(tensors)[:4]} are no tensors of a Llama of this size; pass the model's own config")
    return variables if variables["tcfp"] else {"params": variables["params"]}
