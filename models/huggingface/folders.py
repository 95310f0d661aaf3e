"""Folders of Hugging Face: a model to start from, and the trained model as another one.

    params = read_folder(folder, shapes, read_shape(folder))
    write_folder(other, params, read_shape(folder), "fp8", source=folder,
    tokenizer=None)

A folder has

FOLDER/config.json      the shape (`models.huggingface.configs`)
FOLDER/*.safetensors    the weights, in one file or in several with an index
FOLDER/tokenizer.json
    the tokenizer, with tokenizer_config.json and a chat template
    (`models.huggingface.tokenizer`)
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from pallas_kernels.operands import Fp4, Row, Scaling
from tcfp_jax.inference import folders, safetensors
from tcfp_jax.inference.compressed_tensors import save_compressed
from tcfp_jax.paths import leaves

from ..nets.shapes import LlamaConfig
from .configs import is_folder, llama_dict
from .held import Matrices
from .tensors import held_variables, read, to_huggingface
from .tokenizer import COMPANIONS, FILE

Form = Literal["bf16", "fp8", "nvfp4"]
_SCALINGS: dict[str, Scaling] = {"fp8": Row(), "nvfp4": Fp4("nvfp4")}


def read_folder(folder: Path, shapes: Any, config: LlamaConfig) -> Any:
    """Return the parameters in a folder, float32 on the host, as a tree of these
    shapes.

    Raises:
      FileNotFoundError, ValueError: as `open_folder`, or a value is not finite.
    """
    return read(open_folder(folder, shapes, config))


def open_folder(folder: Path, shapes: Any, config: LlamaConfig) -> Any:
    """Return the parameters in a folder as a tree of these shapes, whose matrices are
    read when they are used (`Matrices`).

    Use this for `tcfp_jax.store`, which reads them layer by layer.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, weights are quantized, or they are those of another
        model.
    """
    _, arrays, _ = safetensors.read(folder, "float")
    params = held_variables(arrays, config, str(folder))["params"]
    found = leaves(params)
    wanted = leaves(shapes)
    for name in sorted({*found, *wanted}):
        shape = list(getattr(found.get(name), "shape", ()))
        asked = list(wanted[name].shape) if name in wanted else "none"
        if name not in found or shape != asked:
            raise ValueError(
                f"{folder} has {name!r} of shape {shape}, and its config.json and"
                f" tokenizer ask for {asked}; copy all files of one model"
            )
        leaf = found[name]
        if not isinstance(leaf, Matrices) and not np.isfinite(leaf).all():
            raise ValueError(
                f"{folder} has values in {name!r} that are not finite; copy the file"
                " again"
            )
    return params


def check_folder(
    folder: Path, config: object, start: str | None, tokenizer: str | None = None
) -> None:
    """Raise `ValueError` if `write_folder` cannot write a model of this size, start and
    tokenizer there; nothing is created.
    """
    if type(config) is not LlamaConfig:
        raise ValueError(
            f"{folder} would be a folder of Hugging Face, which is for Llamas; choose a"
            " name that ends in .npz"
        )
    if start is None or not is_folder(start):
        llama_dict(replace(config, lora=0))
    elif folder.resolve() == Path(start).resolve():
        raise ValueError(
            f"{folder} is the folder that the run starts from; choose another"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; choose another name")
    check_place(folder)
    safetensors.check_target(folder)
    _sources(tokenizer)


def check_place(path: Path) -> None:
    """Raise `ValueError` if no file and no folder can be made at a path; nothing is
    created.
    """
    place = existing(path)
    if not place.is_dir():
        raise ValueError(f"{path} lies below {place}, which is a file; choose another")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(
            f"{path} cannot be made, as nothing can be written in {place}; choose"
            " another"
        )


def existing(path: Path) -> Path:
    """Return a folder, or the folder of a file; if it does not exist, the closest one
    above it that does.
    """
    if path.is_dir():
        return path
    return next(above for above in path.absolute().parents if above.exists())


def write_folder(
    folder: Path,
    params: Mapping[str, Any],
    config: LlamaConfig,
    form: Form,
    source: Path | None,
    tokenizer: str | None,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as a folder that Transformers and vLLM read.

    Args:
      folder: The folder to write; it is made if it is missing.
      params: Float parameters, as in `to_huggingface`.
      config: Size of the model.
      form: "bf16"; "fp8" has E4M3 weights with a scale for each output channel, and
        asks engines to round activations as well; "nvfp4" has weights of 4.5 bits.
      source: Folder of which the run started, whose `config.json` is copied; None
        describes a Llama.
      tokenizer: A `tokenizer.json`, which is copied with the files that belong to it.
        If the folder holds files of another tokenizer, they are deleted.
      changes: As in `to_huggingface`.

    Raises:
      OSError: a file cannot be written, such as on a full disk.
      ValueError: the size is not a Llama, and there is no source; the folder holds the
        shards of another model; or a file next to the tokenizer lies elsewhere.
    """
    safetensors.check_target(folder)
    sources = _sources(tokenizer)
    if source is None:
        found = llama_dict(config)
    else:
        found = folders.read_object(source, safetensors.CONFIG)
    for name in ("quantization_config", "dtype"):
        found.pop(name, None)
    found |= dict(torch_dtype="bfloat16", vocab_size=config.vocabulary)
    scaling = _SCALINGS.get(form)
    tensors = to_huggingface(params, config, scaling, jnp.bfloat16, changes)
    folder.mkdir(parents=True, exist_ok=True)
    if form == "bf16":
        safetensors.write(folder / safetensors.FILE, tensors, {"format": "pt"})
        (folder / safetensors.INDEX).unlink(missing_ok=True)
        text = json.dumps(found, indent=2) + "\n"
        folders.replace_text(folder, safetensors.CONFIG, text)
    else:
        save_compressed(
            folder,
            tensors,
            config=found,
            activations="float8" if form == "fp8" else "bfloat16",
        )
    for name, path in sources.items():
        if path is None:
            (folder / name).unlink(missing_ok=True)
            continue
        with (
            folders.opened(path.parent, path.name) as read,
            folders.replacing(folder, name) as written,
        ):
            shutil.copyfileobj(read, written)


def _sources(tokenizer: str | None) -> dict[str, Path | None]:
    """Return the files to copy next to a model, by their names there; None is missing.

    Raises:
      ValueError: one of them is a link to the outside, a device or a pipe.
    """
    if tokenizer is None:
        return {}
    path = Path(tokenizer)
    sources: dict[str, Path | None] = {}
    for name in COMPANIONS:
        found = path if name == FILE else path.with_name(name)
        sources[name] = None
        if found.exists():
            folders.opened(found.parent, found.name).close()
            sources[name] = found
    return sources
