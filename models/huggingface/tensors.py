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

from pallas_kernels.operands import Operand, Scaling
from tcfp_jax.inference.merging import keep_changes, to_bfloat16
from tcfp_jax.inference.shared_scales import quantize_together
from tcfp_jax.paths import find, put

from ..nets.shapes import LlamaConfig
from .held import Matrices, described

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
    return read(held_variables(tensors, config))


def read(variables: Any) -> Any:
    """Return a tree with the arrays of its `Matrices`."""

    def one(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, Matrices) else leaf

    return jax.tree.map(one, variables)


def held_variables(
    tensors: Mapping[str, Any], config: LlamaConfig, where: str | None = None
) -> dict[str, Any]:
    """Return `from_huggingface` with `Matrices` instead of float matrices, which are
    not read yet.

    Args:
      tensors: As there.
      config: As there.
      where: Name of the folder, for errors about values that are not finite; None
        looks for none.

    Raises:
      ValueError: as there.
    """
    reading = _Reading(tensors, where)
    reading.matrices("embedding/embedding", [_EMBEDDING], turned=False)
    reading.vectors("final_norm/scale", [_FINAL_NORM], config.norm_offset)
    if config.head == "untied":
        reading.matrices("head/kernel", [_HEAD])
    for (ours, kind), theirs in vectors(config).items():
        offset = config.norm_offset if kind == "scale" else 0
        names = _of_layers(theirs, config)
        reading.vectors(f"layers/{ours}/{kind}", names, offset, stacked=True)
    for ours, theirs in PROJECTIONS.items():
        names = _of_layers(f"{theirs}.weight", config)
        reading.matrices(f"layers/{ours}/kernel", names, stacked=True)
    if config.head == "tied":
        reading.left.discard(_HEAD)  # some files hold the embedding twice
    if reading.left:
        raise ValueError(
            f"{reading.place}{sorted(reading.left)[:4]} are no tensors of a Llama of"
            " this size; copy the model's own config.json"
        )
    if not reading.tcfp:
        return {"params": reading.params}
    return {"params": reading.params, "tcfp": reading.tcfp}


def _of_layers(theirs: str, config: LlamaConfig) -> list[str]:
    return [f"model.layers.{layer}.{theirs}" for layer in range(config.layers)]


class _Reading:
    """The variables of a model while tensors by Transformers' names are put into them.

    Attributes:
      left: names of tensors that have no place yet.
      place: beginning of a message, the folder if there is one.
      params, tcfp: the variables.
    """

    def __init__(self, tensors: Mapping[str, Any], where: str | None) -> None:
        self._tensors = tensors
        self._where = where
        self.place = "" if where is None else f"{where}: "
        self.left = {name for name in tensors if not name.endswith(_UNREAD)}
        self.params: dict[str, Any] = {}
        self.tcfp: dict[str, Any] = {}

    def vectors(
        self, path: str, names: list[str], offset: float, *, stacked: bool = False
    ) -> None:
        """Put vectors at a path, as a stack or as the only one."""
        shapes = [self._take(name) for name in names]
        if None in shapes:
            raise _unread(names[shapes.index(None)])
        self._check_alike(path, names, shapes)
        held = [np.asarray(self._tensors[name], np.float32) for name in names]
        whole = np.stack(held) if stacked else held[0]
        put(self.params, path.split("/"), whole + np.float32(offset))

    def matrices(
        self,
        path: str,
        names: list[str],
        *,
        stacked: bool = False,
        turned: bool = True,
    ) -> None:
        """Put matrices at a path, as a stack or as the only one; `turned` says whether
        torch has the transposes.
        """
        taken = [self._take(name) for name in names]
        shapes = [shape for shape in taken if shape is not None]
        if len(shapes) < len(taken):
            self._stored(path, names, stacked)
            return
        self._check_alike(path, names, shapes)
        shape = shapes[0][::-1] if turned else shapes[0]
        if stacked:
            shape = (len(names), *shape)
        held = Matrices(
            self._tensors, tuple(names), shape, stacked, turned, path, self._where
        )
        put(self.params, path.split("/"), held)

    def _stored(self, path: str, names: list[str], stacked: bool) -> None:
        """Put quantized weights at a path; a stored weight has both orientations."""
        found = [self._tensors[name] for name in names]
        if len({str(jax.tree.structure(one)) for one in found}) > 1:
            theirs = names[-1].split(".", 3)[-1].removesuffix(".weight")
            raise ValueError(
                f"the layers store {theirs} in different ways, but a stack has one;"
                " quantize them alike"
            )
        own = path.split("/")
        if own[-1] != "kernel":
            raise _unread(path)
        whole = found[0]
        if stacked:
            whole = jax.tree.map(lambda *parts: jnp.stack(parts), *found)
        put(self.tcfp, own, whole)
        if find(self.params, own[:-1]) is None:
            put(self.params, own[:-1], {})  # Flax knows a layer by its parameters

    def _check_alike(
        self, path: str, names: list[str], shapes: list[tuple[int, ...] | None]
    ) -> None:
        """Raise `ValueError` if the tensors of a stack have several shapes."""
        if len(set(shapes)) > 1:
            raise ValueError(
                f"{self.place}{path} is a stack, but its tensors from {names[0]} to"
                f" {names[-1]} have the shapes {sorted(map(str, set(shapes)))}; copy"
                " all files of one model"
            )

    def _take(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, which has its place now; None of a stored
        weight.
        """
        if name not in self.left:
            raise ValueError(
                f"{self.place}{name} is missing among {sorted(self.left)[:4]} and more;"
                " copy all files of one model"
            )
        self.left.remove(name)
        found = described(self._tensors, name)
        if found is None:
            return None
        shape, dtype = found
        if dtype not in _FLOATS:
            raise ValueError(
                f"{self.place}{name} is {dtype}, which is none of the floats that"
                " weights have here; take the original"
            )
        return shape


def _unread(name: str) -> ValueError:
    return ValueError(f"{name} is quantized, but no product reads it; keep it float")
