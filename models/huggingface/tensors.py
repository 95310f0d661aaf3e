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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.operands import Operand, Scaling
from tcfp_jax.inference.merging import keep_changes, to_bfloat16
from tcfp_jax.inference.shared_scales import quantize_together
from tcfp_jax.paths import find, put
from tcfp_jax.weights.layerwise import OnHost, is_on_host

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

    Matrices of layers are converted one after another, so a device holds one of them.

    Args:
      variables: Float parameters, whose stacks may be read by layers (`OnHost`), or
        `{"params": ..., "tcfp": ...}` of `quantize_params(..., fused=FUSED)`.
      config: Size of the model.
      scaling: Quantizes the float matrices of the layers, q with k and v, gate with up.
      dtype: Dtype of tensors that stay float.
      changes: The part that adapters added to each matrix of the layers, `[layers, k,
        n]` or an object whose `[layer]` is `[k, n]`; None without adapters. Rounding to
        nearest would lose it (`tcfp_jax.inference.merging`).

    Returns:
      NumPy arrays, and `Operand`s `[n, k]` of them for weights that are quantized.

    Raises:
      ValueError: `scaling` is given for weights that are quantized already.
    """
    params = variables.get("params", variables)
    stored = variables.get("tcfp", {})
    layers = params["layers"]
    tensors: dict[str, Any] = {}

    def put_float(name: str, values: Any) -> None:
        tensors[name] = np.asarray(values).astype(dtype, copy=False)

    put_float(_EMBEDDING, params["embedding"]["embedding"])
    final_norm = np.asarray(params["final_norm"]["scale"])
    put_float(_FINAL_NORM, final_norm - config.norm_offset)
    if config.head == "untied":
        head = find(stored, ["head", "kernel"])
        if head is None:
            floats = _on_host(params["head"]["kernel"])[...]
            tensors[_HEAD] = np.asarray(_turned(floats, dtype))
        else:
            tensors[_HEAD] = jax.device_get(head.for_forward("hi"))
    for (ours, kind), theirs in vectors(config).items():
        offset = config.norm_offset if kind == "scale" else 0
        stack = np.asarray(layers[ours][kind]) - offset
        for name, vector in zip(_of_layers(theirs, config), stack, strict=True):
            put_float(name, vector)

    stacks: dict[str, OnHost] = {}
    quantized: dict[str, Operand] = {}
    for name in PROJECTIONS:
        weight = find(stored, ["layers", name, "kernel"])
        if weight is None:
            stacks[name] = _on_host(layers[name]["kernel"])
        else:
            quantized[name] = jax.device_get(_stack(weight.for_forward("hi")))
    if scaling is not None and quantized:
        raise ValueError(
            f"scaling={scaling}, but {sorted(quantized)} are quantized already; leave"
            " it out"
        )
    rounded = _rounding(scaling, dtype)
    for layer in range(config.layers):
        found: dict[str, Any] = {}
        for name, codes in quantized.items():
            found[name] = jax.tree.map(operator.itemgetter((layer, ...)), codes)
        for group in (*FUSED, ("output",), ("down",)):
            own = {name: stacks[name][layer] for name in group if name in stacks}
            if own:
                found |= rounded(own, _of_layer(changes, own, layer))
        for ours, matrix in found.items():
            tensors[f"model.layers.{layer}.{PROJECTIONS[ours]}.weight"] = matrix
    return tensors


def _on_host(parameter: Any) -> OnHost:
    """Return a parameter whose layers NumPy reads: each slice of a stack on a device
    would compile a program of its own.
    """
    return parameter if is_on_host(parameter) else np.asarray(parameter)


def _of_layer(
    changes: Mapping[str, Any] | None, names: Iterable[str], layer: int
) -> dict[str, jax.Array] | None:
    """Return what adapters added to the matrices of a layer, `[n, k]`."""
    if changes is None:
        return None
    return {name: _turned(changes[name][layer], jnp.float32) for name in names}


@functools.partial(jax.jit, static_argnums=1)
def _turned(matrix: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the transpose in a dtype; NumPy would take minutes for a large model."""
    return jnp.swapaxes(matrix, -1, -2).astype(dtype)


def _rounding(scaling: Scaling | None, dtype: DTypeLike) -> Callable[..., Any]:
    """Return a function that returns the matrices of a group as files have them.

    Its arguments are the matrices, `[k, n]`, and their changes, `[n, k]` or None. The
    result is on the host.
    """
    quantize: Any = to_bfloat16
    if scaling is not None:
        quantize = functools.partial(quantize_together, scaling=scaling)

    def rounded(
        matrices: Mapping[str, Any], changes: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        if scaling is None and changes is None:
            made: Any = {name: _turned(w, dtype) for name, w in matrices.items()}
            return jax.device_get(made)
        turned = {name: _turned(w, jnp.float32) for name, w in matrices.items()}
        if changes is None:
            return jax.device_get(quantize(turned))
        made = jax.device_get(keep_changes(quantize, turned, changes))
        if scaling is None:
            return {name: w.astype(dtype) for name, w in made.items()}
        return made

    return rounded


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
        self, path: str, names: list[str], shapes: Sequence[tuple[int, ...] | None]
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
