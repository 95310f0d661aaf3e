"""Folders that other engines read: `compressed-tensors`, the format of llm-compressor,
vLLM and Transformers.

    save_compressed("model", tensors, config=config)         # model.safetensors and config.json
    tensors, config = load_compressed("model")

Tensors have the names of the torch modules. A weight `X.weight` `[n, k]` (out, in)
becomes

    Fp4("nvfp4")       X.weight_packed uint8 [n, k/2], X.weight_scale E4M3 [n, k/16], X.weight_global_scale float32 [1]
    Fp4("mxfp4")       X.weight_packed uint8 [n, k/2], X.weight_scale uint8 [n, k/32], the exponents of E8M0
    FP8                X.weight E4M3 [n, k], X.weight_scale float32: [1] (`Tensor`), [n, 1] (`Row`), one for each square

Byte j of a row holds the codes 2j (low half) and 2j + 1. The global scale is a divisor,
`value = code * scale / global`, whereas `Operand.outer` is a multiplier. Source:
vllm-project/compressed-tensors 0.20, whose package decodes these files to the same bits
(tests/inference/test_compressed_tensors.py).
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.operands import SCALE_DTYPE, Block, Fp4, Operand, Row, Tensor
from tcfp_jax.inference import safetensors
from tcfp_jax.inference.safetensors import FLOAT8, MXFP4, NVFP4
from tcfp_jax.inference.shared_scales import FUSED, check_rule, settle_families
from tcfp_jax.weights.stored import Stored

# Metadata of the file: the rule that found the scales of its NVFP4 weights, or, in
# JSON, the rule of each by name.
_RULE = "tcfp_jax.fp4_rule"
# A weight with larger values is suspect: this is the largest float16.
_LARGEST_WEIGHT = float(np.finfo(np.float16).max)
_LARGEST_CODE = 6.0
_E4M3_NAN, _E8M0_NAN = 0x7F, 0xFF
_SIZES = np.uint8(0x77)  # the bits of a byte of two codes without their signs
_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
_COPY = "copy all files"
_INVERT = (
    "store 1 / weight_global_scale, or, if the file is not yours,"
    ' load_compressed(folder, global_scale="{other}")'
)


def save_compressed(
    folder: str | Path,
    tensors: Mapping[str, Operand | Stored | jax.Array | np.ndarray],
    *,
    config: Mapping[str, object] | None = None,
    ignore: Sequence[str] = ("lm_head",),
    fused: Sequence[Sequence[str]] = FUSED,
    activations: Literal["bfloat16", "float8"] = "bfloat16",
) -> None:
    """Write quantized weights and float tensors as a folder of the compressed-tensors
    format.

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
      ValueError: nothing is quantized; a weight is a stack; blocks do not divide k; a
        name is taken; scales are NaN, look inverted to readers, or break the rule
        "fold_exact" that they name; fused weights differ; "float8" without FP8 weights;
        or a choice is unknown.

    >>> import tempfile
    >>> from tcfp_jax.weights.fp4_packing import quantize_fp4
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_compressed(folder, {"up_proj.weight": quantize_fp4(jnp.ones((2, 16)))})
    ...     load_compressed(folder)[0]["up_proj.weight"].dequantize().shape
    (16, 2)
    """
    if activations not in ("bfloat16", "float8"):
        raise ValueError(
            f'activations={activations!r} is unknown; use "bfloat16" or "float8"'
        )
    weights = {
        n.removesuffix(".weight"): _matrix(n, t)
        for n, t in tensors.items()
        if isinstance(t, Operand | Stored)
    }
    if others := [
        n
        for n, t in tensors.items()
        if not isinstance(t, Operand | Stored) and not hasattr(t, "ndim")
    ]:
        raise TypeError(
            f"{others[0]} is a {type(tensors[others[0]]).__name__}; pass an Operand, or"
            " its array"
        )
    if not weights:
        raise ValueError(
            f"none of {list(tensors)[:4]} is quantized; pass Operands, such as"
            " quantize_together returns"
        )
    if both := sorted(set(weights) & set(ignore)):
        raise ValueError(
            f"ignore={list(ignore)} names {both[0]}, which is quantized; drop one of"
            " the two"
        )
    floats = {
        name: t for name, t in tensors.items() if not isinstance(t, Operand | Stored)
    }
    matrices = [
        n.removesuffix(".weight")
        for n, t in floats.items()
        if n.endswith(".weight") and t.ndim == 2
    ]
    schemes = {
        name: _scheme(name, weight, activations) for name, weight in weights.items()
    }
    if activations == "float8" and not any(
        scheme["format"] == FLOAT8 for scheme in schemes.values()
    ):
        raise ValueError(
            'activations="float8" is for FP8 weights, and none is here; leave it out'
        )
    described = {
        name: json.dumps(scheme, sort_keys=True) for name, scheme in schemes.items()
    }
    weights = settle_families(weights, described, matrices, fused)
    outers = {
        name: float(w.outer) for name, w in weights.items() if w.outer is not None
    }
    written = dict(floats)
    for name, weight in weights.items():
        arrays = _arrays(name, weight)
        if taken := sorted(set(arrays) & set(floats)):
            raise ValueError(
                f"{taken[0]} is among the tensors, but holds a part of {name}.weight in"
                " a file; drop it"
            )
        written |= arrays
    repair = "quantize the weight itself, or exclude it"
    _check_global_scales(
        {n: (np.asarray(written[f"{n}.weight_scale"]), outers[n]) for n in outers},
        repair,
    )
    scalings = {f"{name}.weight": weight.scaling for name, weight in weights.items()}
    rules = {
        name: one.rule
        for name, one in scalings.items()
        if isinstance(one, Fp4) and one.has_outer
    }
    noted: set[str] = set(rules.values())
    ignored = list(dict.fromkeys([*ignore, *matrices]))
    full = {
        **(config or {}),
        "quantization_config": _quantization_config(schemes, ignored),
    }
    try:  # before any file changes
        text = json.dumps(full, indent=2)
    except TypeError as error:
        raise ValueError(
            f"config= is not JSON: {error}; pass numbers and text, as"
            " config.to_dict() has"
        ) from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {
        "format": "pt",
        **(
            {_RULE: min(noted) if len(noted) == 1 else json.dumps(rules)}
            if noted
            else {}
        ),
    }
    safetensors.write(folder / safetensors.FILE, written, metadata)
    # an older model's index would name other files
    (folder / safetensors.INDEX).unlink(missing_ok=True)
    (folder / safetensors.CONFIG).write_text(text + "\n")


def load_compressed(
    folder: str | Path, *, global_scale: Literal["divisor", "multiplier"] = "divisor"
) -> tuple[dict[str, Stored | jax.Array], dict[str, Any]]:
    """Return (tensors by torch's names, `config.json`) of a folder of the
    compressed-tensors format.

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
      ValueError: a file, its header, the index or the config is damaged or is not
        inside of the folder; a tensor is in two files, or not in the one that the index
        names; the format is another; weights are rotated or sparse, have zero points,
        scales that are NaN, negative or out of range, or break the rule "fold_exact"
        that the file notes; codes or scales are missing; a weight has unknown arrays; a
        global scale is inverted or not one positive number.
    """
    if global_scale not in ("divisor", "multiplier"):
        raise ValueError(
            f'global_scale={global_scale!r} is unknown; use "divisor" or "multiplier"'
        )
    config, arrays, metadata = safetensors.read(Path(folder))
    tensors: dict[str, Stored | jax.Array] = {}
    scales: dict[str, tuple[np.ndarray, float]] = {}
    for name in [
        name.removesuffix("_scale") for name in arrays if name.endswith(".weight_scale")
    ]:
        noted = metadata[f"{name}_scale"].get(_RULE, "amax")
        # A single word is the rule of all codes of the file.
        rule = _rules(noted).get(name, "amax") if noted.startswith("{") else noted
        operand = _operand(name, arrays, global_scale == "divisor", rule)
        tensors[name] = Stored(forward=operand, backward=None)
        if operand.outer is not None:
            scales[name.removesuffix(".weight")] = (
                np.asarray(operand.scale),
                float(operand.outer),
            )
    # Arrays of a weight that are left over were not read: an order of its columns,
    # another scale, or the weight again.
    if (
        unread := next(
            (n for n in arrays if n[: n.rfind(".weight") + len(".weight")] in tensors),
            None,
        )
    ) is not None:
        raise ValueError(
            f"{unread} comes with the codes and scales of its weight, and its meaning"
            " is unknown here; save the model in one of the formats that are read"
            " here, without it"
        )
    alone = (
        n
        for n, a in arrays.items()
        if n.endswith(".weight_packed") or a.dtype == jnp.float8_e4m3fn
    )
    if (lone := next(alone, None)) is not None:
        raise ValueError(
            f"{lone} is there, but {lone.removesuffix('_packed')}_scale is missing;"
            f" {_COPY}"
        )
    other = "divisor" if global_scale == "multiplier" else "multiplier"
    _check_global_scales(scales, _INVERT.format(other=other))
    return (
        tensors | {name: jnp.asarray(array) for name, array in arrays.items()},
        config,
    )


def _matrix(name: str, weight: Operand | Stored) -> Operand:
    """Return the matrix `[n, k]` that a file holds."""
    operand = weight.for_forward("hi") if isinstance(weight, Stored) else weight
    operand = (
        operand.settled()
        if isinstance(operand.scaling, Fp4)
        else operand.settled().drop_residual()
    )
    if not name.endswith(".weight"):
        raise ValueError(
            f"{name} is quantized, but does not end in .weight, as torch names weights;"
            " add it"
        )
    if operand.values.ndim != 2:
        raise ValueError(
            f"{name} is a stack {list(operand.shape)}; give each matrix [n, k] its own"
            " name"
        )
    scaling, dtype = operand.scaling, operand.values.dtype
    if not isinstance(scaling, Fp4) and dtype != jnp.float8_e4m3fn:
        raise TypeError(
            f"{name} is {dtype}, which engines do not multiply; store weights in"
            " float8_e4m3fn"
        )
    if isinstance(scaling, Block) and scaling.tile == "vector":
        raise TypeError(
            f"{name} has {scaling}, which compressed-tensors has no FP8 format for; use"
            ' tile="square"'
        )
    # The code of zero that fills the last byte of an odd k does not count as a value.
    k = operand.shape[-1] - (weight.padding if isinstance(weight, Stored) else 0)
    if isinstance(scaling, Fp4) and k % scaling.block:
        raise ValueError(
            f"{name} has k={k}, and {scaling.format}'s blocks of {scaling.block} must"
            " divide it in a file; keep this weight float, and its module in `ignore`"
        )
    check_rule(name, operand, "choose its codes by that rule")
    return operand


def _scheme(name: str, weight: Operand, activations: str) -> dict[str, Any]:
    """Return a weight's config group, without its targets."""
    scaling = weight.scaling
    made: dict[str, Any] = dict(
        num_bits=8, type="float", symmetric=True, dynamic=False, group_size=None
    )
    made |= dict(block_structure=None, actorder=None, scale_dtype=None, zp_dtype=None)
    inputs = None
    if isinstance(scaling, Fp4):
        nvfp4 = scaling.format == "nvfp4"
        dtype = "torch.float8_e4m3fn" if nvfp4 else "torch.uint8"
        made |= dict(
            num_bits=4,
            strategy="tensor_group" if nvfp4 else "group",
            group_size=scaling.block,
        )
        made |= dict(scale_dtype=dtype, zp_dtype=dtype)
        form = NVFP4 if nvfp4 else MXFP4
    else:
        form = FLOAT8
        made["strategy"] = {Tensor: "tensor", Row: "channel", Block: "block"}[
            type(scaling)
        ]
        if isinstance(scaling, Block):
            made["block_structure"] = [scaling.size, scaling.size]
        if activations == "float8":
            inputs = dict(
                num_bits=8, type="float", symmetric=True, dynamic=True, strategy="token"
            )
    return dict(
        format=form, weights=made, input_activations=inputs, output_activations=None
    )


def _quantization_config(
    schemes: Mapping[str, dict[str, Any]], ignore: list[str]
) -> dict[str, Any]:
    groups: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(json.dumps(scheme), []).append(name)
    formats = {scheme["format"] for scheme in schemes.values()}
    # A single scheme is for all linear modules except `ignore`; each of several schemes
    # names its modules.
    targets = [["Linear"]] if len(groups) == 1 else list(groups.values())
    return dict(
        quant_method="compressed-tensors",
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        config_groups={
            f"group_{i}": json.loads(scheme) | dict(targets=names)
            for i, (scheme, names) in enumerate(zip(groups, targets, strict=True))
        },
        ignore=ignore,
        kv_cache_scheme=None,
        global_compression_ratio=None,
    )


def _arrays(name: str, weight: Operand) -> dict[str, np.ndarray]:
    """Return the arrays of a weight in a file, by name."""
    scaling, scale = weight.scaling, np.asarray(weight.scale)
    values = np.asarray(weight.values)
    if not isinstance(scaling, Fp4):
        numbers = np.asarray(scale, np.float32)  # exact, also for E8M0
        numbers = numbers.reshape(
            {Tensor: (1,), Row: (-1, 1), Block: numbers.shape}[type(scaling)]
        )
        if not np.isfinite(numbers).all():
            raise ValueError(
                f"{name} has a scale that is not finite; quantize finite weights"
            )
        return {f"{name}.weight": values, f"{name}.weight_scale": numbers}
    if scaling.tile == "square":
        scale = np.repeat(scale, scaling.block, axis=0)[: values.shape[0]]
    _check_bytes(name, scale, values)
    if scaling.format == "mxfp4":
        return {
            f"{name}.weight_packed": values,
            f"{name}.weight_scale": scale.view(np.uint8),
        }
    outer = np.float32(1 if weight.outer is None else weight.outer)
    held = {f"{name}.weight_packed": values, f"{name}.weight_scale": scale}
    return held | {f"{name}.weight_global_scale": _divisor_of(name, outer).reshape(1)}


def _check_bytes(name: str, scale: np.ndarray, values: np.ndarray) -> None:
    """Raise if a scale is NaN, in E4M3 negative, or in E8M0 one by which float32 does
    not hold the values.
    """
    is_e8m0, found = scale.dtype in (np.uint8, SCALE_DTYPE), scale.view(np.uint8)
    if scale.size and (top := int(found.max())) >= (
        _E8M0_NAN if is_e8m0 else _E4M3_NAN
    ):
        raise ValueError(
            f"{name} has the scale byte 0x{top:x}, a NaN or a negative scale; quantize"
            " finite weights"
        )
    if is_e8m0 and scale.size:
        blocks = np.pad(
            values, ((0, 0), (0, -values.shape[1] % (Fp4("mxfp4").block // 2)))
        )
        is_used = (blocks.reshape(*scale.shape, -1) & _SIZES).any(axis=-1)
        # 2**-127 is a subnormal float32, which accelerators take for 0, and 6 * 2**126
        # is beyond the largest.
        if (lost := is_used & ((found == 0) | (found > 252))).any():
            raise ValueError(
                f"{name} has the scale 2**{int(found[lost][0]) - 127} in a block with"
                " values, but float32 holds them with 2**-126 to 2**125 only; quantize"
                " the weight in another unit"
            )


def _check_global_scales(
    scales: Mapping[str, tuple[np.ndarray, float]], repair: str
) -> None:
    """Raise if most NVFP4 weights have a global scale that looks inverted, by (block
    scales, `outer` as read) by name.

    A quantizer that fills the range of E4M3 has a largest block scale s near 448 and a global scale of 448 * 6 / max
    |w|, so a reader of the inverse finds values up to 7.2e6 / max |w|. A weight is suspect if `6 * s * outer` exceeds
    the largest float16, and a file is inverted if more than half of the weights whose global scale is not 1 are
    suspect. That never holds if half of the weights fit float16, and always if the largest values of most weights are
    below 110 (below 36 for "four_over_six" and "fold_exact", which have s from 256 on).
    """
    largest = {
        name: (float(s.astype(np.float32).max(initial=0)), outer)
        for name, (s, outer) in scales.items()
    }
    judged = {
        name: (s, outer) for name, (s, outer) in largest.items() if outer != 1 and s > 0
    }
    suspect = {
        name: pair
        for name, pair in judged.items()
        if _LARGEST_CODE * pair[0] * pair[1] > _LARGEST_WEIGHT
    }
    if 2 * len(suspect) <= len(judged):
        return
    name, (scale, outer) = next(iter(suspect.items()))
    raise ValueError(
        f"{name} has block scales up to {scale:g} and the global scale {1 / outer:.6g},"
        f" so that its largest value is 6 * {scale:g} / {1 / outer:.6g} ="
        f" {_LARGEST_CODE * scale * outer:.3g}, beyond {_LARGEST_WEIGHT:g}; with the"
        f" inverse it is {_LARGEST_CODE * scale / outer:.3g} ({len(suspect)} of"
        f" {len(judged)} weights are like this): the global scale is inverted, a"
        f" multiplier instead of a divisor; {repair}"
    )


@functools.lru_cache(maxsize=1)
def _rules(noted: str) -> Mapping[str, Any]:
    """Return the rules that a file notes for its weights, by name."""
    try:
        return json.loads(noted)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the metadata {_RULE} of a file is not JSON: {error}; {_COPY}"
        ) from error


def _operand(
    name: str, arrays: dict[str, np.ndarray], divides: bool, rule: Any
) -> Operand:
    """Take the arrays of the weight "X.weight" out of a file's, and return it."""
    if f"{name}_zero_point" in arrays and np.any(
        arrays.pop(f"{name}_zero_point").astype(np.float32)
    ):
        raise ValueError(
            f"{name} has zero points, and no format here has them; quantize it with"
            " symmetric=True"
        )
    scale = arrays.pop(f"{name}_scale")
    if not {name, f"{name}_packed"} & set(arrays):
        raise ValueError(
            f"{name}_scale is there, but neither {name} nor {name}_packed; {_COPY}"
        )
    if f"{name}_packed" not in arrays:
        return _float8(name, arrays.pop(name), scale)
    values = arrays.pop(f"{name}_packed")
    n, k = (values.shape[0], 2 * values.shape[1]) if values.ndim == 2 else (0, 0)
    held = arrays.pop(f"{name}_global_scale", None)
    if held is None and scale.dtype == jnp.float8_e4m3fn:
        raise ValueError(
            f"{name}_scale is float8_e4m3fn, as in NVFP4, but {name}_global_scale is"
            f" missing; {_COPY}"
        )
    scaling = Fp4("mxfp4") if held is None else Fp4("nvfp4", rule=rule)
    dtypes = (np.uint8, SCALE_DTYPE) if held is None else (jnp.float8_e4m3fn,)
    wanted = scaling.scale_shape((n, k))
    if (
        values.ndim != 2
        or values.dtype != np.uint8
        or scale.dtype not in dtypes
        or scale.shape != wanted
    ):
        raise ValueError(
            f"{name} is {values.dtype}{list(values.shape)} with scales"
            f" {scale.dtype}{list(scale.shape)}, but {scaling.format} has bytes [n, k /"
            f" 2] with scales {np.dtype(dtypes[0])}{list(wanted)}; save the model in"
            " one of the formats that are read here"
        )
    _check_bytes(name, scale, values)
    top = float(scale.astype(np.float32).max(initial=0)) if held is not None else 0
    outer = (
        None
        if held is None
        else jnp.asarray(_outer(f"{name}_global_scale", held, divides, top))
    )
    operand = Operand(
        jnp.asarray(values),
        jnp.asarray(scale.view(scaling.scale_dtype)),
        scaling=scaling,
        outer=outer,
    )
    check_rule(
        name,
        operand,
        f"save the weights again, or drop {_RULE} from the file's metadata",
    )
    return operand


def _divisor_of(name: str, outer: np.float32) -> np.float32:
    """Return the global scale of a file, 1 / outer, whose reciprocal is `outer` again
    if any float32's is.
    """
    with np.errstate(divide="ignore", over="ignore"):
        near = np.float32(1) / np.float32(outer)
    if not (np.isfinite(near) and np.isfinite(outer) and near > 0):
        raise ValueError(
            f"{name} has outer={outer} and needs the global scale {near} in a file, but"
            " both must be positive and finite; quantize finite weights whose largest"
            " is above 1e-30"
        )
    # If its reciprocal differs from `outer`, so do its neighbours' reciprocals: checked
    # for all numbers of a binade.
    return near


def _outer(name: str, held: np.ndarray, divides: bool, top: float) -> np.float32:
    """Return `outer` from the global scale that a file holds for block scales up to
    `top`.
    """
    if held.dtype != np.float32 or held.size != 1:
        raise ValueError(
            f"{name} is {held.dtype}{list(held.shape)}, but a weight has one float32"
            " number; store the quantizer's number, and store weights that were joined"
            " under their own names, each with its own"
        )
    number = np.float32(held.item())
    with np.errstate(divide="ignore", over="ignore"):
        outer = np.float32(1) / number if divides else number
    # Accelerators take subnormal numbers for 0, and products of bytes and scales beyond
    # float32 would be infinite.
    if not (
        outer >= _TINY
        and float(outer) * max(1, _LARGEST_CODE * top) <= _HUGE
        and number >= _TINY
    ):
        raise ValueError(
            f"{name} is {number} with block scales up to {top:g}, but it and its"
            " reciprocal must be positive and finite, no subnormal float32, and so"
            " must all values; quantize the weight again, or store 1 for zeros"
        )
    return outer


def _float8(name: str, values: np.ndarray, scale: np.ndarray) -> Operand:
    """Return an FP8 weight with one scale, one for each row, or one for each square."""
    if values.dtype != jnp.float8_e4m3fn or values.ndim != 2:
        raise ValueError(
            f"{name} is {values.dtype}{list(values.shape)}; only matrices of"
            " float8_e4m3fn are read"
        )
    if scale.dtype not in (np.float32, np.float16, jnp.bfloat16):
        raise ValueError(
            f"{name}_scale is {scale.dtype}, but the scales of float8_e4m3fn are"
            " floats; save it so"
        )
    scale = scale.astype(np.float32)
    rows = (values.shape[:1], (len(values), 1))
    if scale.size == 1 or scale.shape in rows:
        # Any scale serves zeros, and some quantizers store 0 for a row of them.
        is_used = (
            (values.view(np.uint8) & 0x7F)
            .any(axis=None if scale.size == 1 else 1)
            .reshape(scale.shape)
        )
        scale = np.where(is_used | ~np.isfinite(scale) | (scale < 0), scale, 1)
    if not ((scale >= _TINY) & (scale <= _HUGE / 448)).all():
        raise ValueError(
            f"{name}_scale has numbers from {scale.min()} to {scale.max()}; all must be"
            f" finite, and between {_TINY:g} and {_HUGE / 448:g}, so that float32 holds"
            " the values; quantize finite weights again"
        )
    pow2 = bool((np.frexp(scale)[0] == 0.5).all())
    made = lambda scale, scaling: Operand(
        jnp.asarray(values), jnp.asarray(scale), scaling=scaling
    )
    if scale.size == 1:
        return made(scale.reshape(()), Tensor("pow2" if pow2 else "float32"))
    if scale.shape in rows:
        return made(scale.reshape(-1), Row("pow2" if pow2 else "float32"))
    for size in (32, 64, 128):
        if pow2 and scale.shape == Block(size).scale_shape(values.shape):
            return made(scale.astype(SCALE_DTYPE), Block(size))
    raise ValueError(
        f"{name} is {values.dtype}{list(values.shape)} with scales {list(scale.shape)};"
        " use one scale, one for each row, or powers of two for squares of 32, 64"
        " or 128"
    )
