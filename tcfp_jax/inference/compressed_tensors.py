"""Folders that other engines read: `compressed-tensors`.

This is the format of llm-compressor, vLLM and Transformers. `file_weights` has the
arrays of each weight.

    save_compressed("model", tensors, config=config)    # model.safetensors, config.json
    tensors, config = load_compressed("model")

Tensors have the names of the torch modules. Source: vllm-project/compressed-tensors
0.20, whose package decodes these files to the same bits
(tests/inference/test_compressed_tensors.py).
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.checks import check_choice
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.inference import folders, safetensors
from tcfp_jax.inference.file_weights import (
    arrays_of,
    check_global_scales,
    matrix_of,
    scheme_of,
    take_weight,
)
from tcfp_jax.inference.folders import Json
from tcfp_jax.inference.safetensors import COPY, FLOAT8, Arrays
from tcfp_jax.inference.shared_scales import FUSED, Groups, settle_families
from tcfp_jax.weights.stored import Stored

# Metadata of the file: the rule that found the scales of its NVFP4 weights, or, in
# JSON, the rule of each by name.
_RULE = "tcfp_jax.fp4_rule"


def save_compressed(
    folder: str | Path,
    tensors: Mapping[str, Operand | Stored | Array | np.ndarray],
    *,
    config: Mapping[str, object] | None = None,
    ignore: Sequence[str] = ("lm_head",),
    fused: Groups = FUSED,
    activations: Literal["bfloat16", "float8"] = "bfloat16",
) -> None:
    """Write quantized weights and floats as a folder of the compressed-tensors format.

    Use this to serve a trained model with vLLM, SGLang or Transformers. Use Orbax with
    `quantize_params` to load it in JAX again.

    Args:
      folder: made if missing; its `model.safetensors` and `config.json` are replaced,
        and an index is deleted.
      tensors: by torch's names, such as "model.layers.0.self_attn.q_proj.weight":
        `Operand`s `[n, k]` or `Stored` weights `[k, n]`, whose names end in ".weight",
        and arrays. A split weight is written as its W_hi. Scales of squares are
        repeated, which engines cannot read otherwise. NVFP4 weights of zeros get the
        global scale of the weights that they are fused with, or 1.
      config: `config.json` of the model, as Transformers has it; `quantization_config`
        is added.
      ignore: linear modules that stay float. Matrices among `tensors` that are not
        quantized are added.
      fused: groups of modules that an engine multiplies as one matrix. Their members
        must be stored alike, with one `outer`, as `quantize_params(..., fused=...)` and
        `quantize_together` make them.
      activations: "float8" asks engines to round the inputs of FP8 weights to E4M3, one
        scale for each token.

    Raises:
      ImportError: the `safetensors` package is missing, which
        `pip install "tcfp_jax[export]"` brings.
      TypeError: compressed-tensors does not have the format of a weight.
      ValueError: nothing is quantized, a weight is a stack, or a choice is unknown.
        Blocks do not divide k, or a name is taken. Scales are NaN, look inverted to
        readers, or break the rule "fold_exact" that they name. Fused weights differ.
        "float8" is asked for without FP8 weights. The folder holds the shards of
        another model.

    >>> import tempfile
    >>> from tcfp_jax.weights.fp4_packing import quantize_fp4
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_compressed(folder, {"up_proj.weight": quantize_fp4(jnp.ones((2, 16)))})
    ...     load_compressed(folder)[0]["up_proj.weight"].dequantize().shape
    (16, 2)
    """
    check_choice("activations", activations, ("bfloat16", "float8"))
    weights: dict[str, Operand] = {}
    floats: dict[str, Array | np.ndarray] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Operand | Stored):
            weights[name.removesuffix(".weight")] = matrix_of(name, tensor)
        elif hasattr(tensor, "ndim"):
            floats[name] = tensor
        else:
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; pass an Operand, or its array"
            )
    _check_names(tensors, weights, ignore)
    matrices = [
        name.removesuffix(".weight")
        for name, tensor in floats.items()
        if name.endswith(".weight") and tensor.ndim == 2
    ]
    schemes = {name: scheme_of(weight, activations) for name, weight in weights.items()}
    formats = {scheme["format"] for scheme in schemes.values()}
    if activations == "float8" and FLOAT8 not in formats:
        raise ValueError(
            'activations="float8" is for FP8 weights, and none is here; leave it out'
        )
    described = {
        name: json.dumps(scheme, sort_keys=True) for name, scheme in schemes.items()
    }
    weights = settle_families(weights, described, matrices, fused)
    written = dict(floats) | _arrays_of_all(weights, floats)
    ignored = list(dict.fromkeys([*ignore, *matrices]))
    quantization = _quantization_config(schemes, ignored)
    try:  # before any file changes
        text = json.dumps(
            {**(config or {}), "quantization_config": quantization}, indent=2
        )
    except TypeError as error:
        raise ValueError(
            f"config= is not JSON: {error}; pass numbers and text, as"
            " config.to_dict() has"
        ) from error
    folder = Path(folder)
    safetensors.check_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} | _noted_rules(weights)
    safetensors.write(folder / safetensors.FILE, written, metadata)
    # an older model's index would name other files
    (folder / safetensors.INDEX).unlink(missing_ok=True)
    folders.replace_text(folder, safetensors.CONFIG, text + "\n")


def load_compressed(
    folder: str | Path, *, global_scale: Literal["divisor", "multiplier"] = "divisor"
) -> tuple[dict[str, Stored | Array], Json]:
    """Return (tensors by torch's names, `config.json`) of such a folder.

    Use this to serve or fine-tune a model that llm-compressor or `save_compressed`
    wrote.

    Args:
      folder: holds `config.json` and `model.safetensors`, or several files and their
        index.
      global_scale: "multiplier" for a file that holds the inverse of the format's
        global scale.

    Returns:
      Quantized weights as `Stored` `[k, n]` under "X.weight", all else as arrays by its
      name. An FP4 weight has `scaling=Fp4(format)`, with the rule that
      `save_compressed` noted for it, or "amax".

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: the `safetensors` package is missing, which
        `pip install "tcfp_jax[export]"` brings.
      ValueError: a file, its header, the index or the config is damaged, or is not
        inside of the folder. A tensor is in two files, or not in the one that the index
        names. The format is another. Weights are rotated or sparse, or have zero
        points. Scales are NaN, negative or out of range, or break the rule "fold_exact"
        that the file notes. Codes or scales are missing, or a weight has unknown
        arrays. A global scale is inverted or not one positive number.
    """
    check_choice("global_scale", global_scale, ("divisor", "multiplier"))
    config, arrays, metadata = safetensors.read(Path(folder))
    tensors: dict[str, Stored | Array] = {}
    scales: dict[str, tuple[np.ndarray, float]] = {}
    scaled = [name for name in arrays if name.endswith(".weight_scale")]
    for name in [name.removesuffix("_scale") for name in scaled]:
        rule = _rule_of(name, metadata[f"{name}_scale"].get(_RULE, "amax"))
        operand = take_weight(name, arrays, global_scale == "divisor", rule)
        tensors[name] = Stored(forward=operand, backward=None)
        if operand.outer is not None:
            module = name.removesuffix(".weight")
            scales[module] = (np.asarray(operand.scale), float(operand.outer))
    floats = dict(arrays)
    _check_left_over(floats, tensors)
    other = "divisor" if global_scale == "multiplier" else "multiplier"
    check_global_scales(
        scales,
        "store 1 / weight_global_scale, or, if the file is not yours,"
        f' load_compressed(folder, global_scale="{other}")',
    )
    return tensors | {n: jnp.asarray(array) for n, array in floats.items()}, config


def _check_names(
    tensors: Mapping[str, object], weights: Mapping[str, Operand], ignore: Sequence[str]
) -> None:
    """Raise a ValueError if nothing is quantized, or `ignore` names a weight."""
    if not weights:
        raise ValueError(
            f"none of {list(tensors)[:4]} is quantized; pass Operands, such as"
            " quantize_together returns"
        )
    both = sorted(weights.keys() & set(ignore))
    if both:
        raise ValueError(
            f"ignore={list(ignore)} names {both[0]}, which is quantized; drop one of"
            " the two"
        )


def _arrays_of_all(
    weights: Mapping[str, Operand], floats: Mapping[str, object]
) -> Arrays:
    """Return the arrays of all weights; raise a ValueError if a name is taken."""
    written: Arrays = {}
    scales: dict[str, tuple[np.ndarray, float]] = {}
    for name, weight in weights.items():
        arrays = arrays_of(name, weight)
        taken = sorted(arrays.keys() & floats.keys())
        if taken:
            raise ValueError(
                f"{taken[0]} is among the tensors, but holds a part of {name}.weight in"
                " a file; drop it"
            )
        written |= arrays
        if weight.outer is not None:
            scale = np.asarray(arrays[f"{name}.weight_scale"])
            scales[name] = (scale, float(weight.outer))
    check_global_scales(scales, "quantize the weight itself, or exclude it")
    return written


def _quantization_config(
    schemes: Mapping[str, Json], ignore: list[str]
) -> dict[str, object]:
    """Return the entry of `config.json` that says how modules are quantized."""
    modules: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        modules.setdefault(json.dumps(scheme), []).append(name)
    groups = {}
    for i, (text, names) in enumerate(modules.items()):
        # A single scheme is for all linear modules except `ignore`; each of several
        # schemes names its modules.
        targets = ["Linear"] if len(modules) == 1 else names
        groups[f"group_{i}"] = json.loads(text) | {"targets": targets}
    formats = {scheme["format"] for scheme in schemes.values()}
    return dict(
        quant_method="compressed-tensors",
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        config_groups=groups,
        ignore=ignore,
        kv_cache_scheme=None,
        global_compression_ratio=None,
    )


def _noted_rules(weights: Mapping[str, Operand]) -> dict[str, str]:
    """Return the metadata of a file for the rules of its NVFP4 weights."""
    rules: dict[str, str] = {}
    for name, weight in weights.items():
        if isinstance(weight.scaling, Fp4) and weight.scaling.has_outer:
            rules[f"{name}.weight"] = weight.scaling.rule
    if not rules:
        return {}
    different = set(rules.values())
    return {_RULE: min(different) if len(different) == 1 else json.dumps(rules)}


def _rule_of(name: str, noted: str) -> str:
    """Return the rule that a file notes for a weight."""
    # A single word is the rule of all codes of the file.
    return _rules(noted).get(name, "amax") if noted.startswith("{") else noted


@functools.lru_cache(maxsize=1)
def _rules(noted: str) -> Mapping[str, str]:
    """Return the rules that a file notes for its weights, by name."""
    try:
        return json.loads(noted)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the metadata {_RULE} of a file is not JSON: {error}; {COPY}"
        ) from error


def _check_left_over(
    arrays: Mapping[str, np.ndarray], tensors: Mapping[str, object]
) -> None:
    """Raise a ValueError for arrays of a weight that were not read.

    Such an array is an order of the weight's columns, another scale, or the weight
    again.
    """
    for name, array in arrays.items():
        if name[: name.rfind(".weight") + len(".weight")] in tensors:
            raise ValueError(
                f"{name} comes with the codes and scales of its weight, and its meaning"
                " is unknown here; save the model in one of the formats that are read"
                " here, without it"
            )
        if name.endswith(".weight_packed") or array.dtype == jnp.float8_e4m3fn:
            raise ValueError(
                f"{name} is there, but {name.removesuffix('_packed')}_scale is missing;"
                f" {COPY}"
            )
