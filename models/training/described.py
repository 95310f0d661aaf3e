"""Settings of a run in JSON, as its folder holds them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import tcfp_jax
from pallas_kernels.operands import Block, Fp4, Row, Tensor
from tcfp_jax.recipes import Dual, Fp4Training, Recipe, Single

from ..nets.sizes import FAMILIES, family_of
from .intact import read_sealed
from .preferences import settings_for
from .settings import TrainConfig, config_of, settings_of

CONFIG_FILE = "config.json"
_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Dual, Single, Tensor, Row, Block, Fp4, Fp4Training)
}


def holds_run(path: Path) -> bool:
    """Return whether a run was started in `path`."""
    return (path / CONFIG_FILE).is_file()


def read_config(path: Path) -> TrainConfig:
    """Return the configuration of the run in `path`.

    Raises:
      ValueError: `config.json` describes no run of this version.
    """
    content = recorded(path)
    try:
        fields = {**content["config"], "data": tuple(content["config"]["data"])}
        if isinstance(fields["model"], dict):
            fields["model"] = FAMILIES[content["family"]](**fields["model"])
        if isinstance(fields["recipe"], dict):
            fields["recipe"] = recipe_of(fields["recipe"])
        return config_of(fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_run(path, f"{type(error).__name__}: {error}") from error


def resumed(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Return a run with the settings that are given to continue it.

    Raises:
      ValueError: as `config_of`, or a setting of pairs of answers is given for other
        data.
    """
    fields = {**settings_of(config), **given}
    if config.preferences is None:
        fields = {**fields, **settings_for(fields), **given}
    return config_of(fields)


def recorded(path: Path) -> dict[str, Any]:
    """Return the description of the run in a folder.

    Raises:
      ValueError: it is not JSON, has changed, or is not of a run.
    """
    try:
        content = read_sealed(path, CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise _no_run(path, str(error)) from error
    config = content.get("config")
    if not isinstance(config, dict) or "recipe" not in config:
        raise _no_run(path, "it has no settings of a run")
    return content


def _no_run(path: Path, cause: str) -> ValueError:
    return ValueError(
        f"{path / CONFIG_FILE} describes no run ({cause}); restore it or start in"
        " another folder"
    )


def describe(config: TrainConfig, corpus_digest: str) -> dict[str, Any]:
    """Return the settings that must be equal to continue a run, with names and the
    values behind them.
    """
    fields = {**settings_of(config), "dtype": config.compute_dtype}
    if not isinstance(config.model, str):
        fields["model"] = dataclasses.asdict(config.model)
    if isinstance(config.recipe, Recipe):
        fields["recipe"] = described(config.recipe)
    return {
        "config": fields,
        "family": family_of(config.size),
        "model": dataclasses.asdict(config.size),
        "recipe": described(tcfp_jax.recipe(config.recipe)),
        "text": corpus_digest,
        "device": jax.default_backend(),
    }


def described(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe with the class of each nested value: Tensor and Row
    have the same fields.
    """
    fields = dataclasses.asdict(recipe)
    for name, part in _nested(fields):
        part["kind"] = type(getattr(recipe, name)).__name__
    return fields


def recipe_of(fields: dict[str, Any]) -> Recipe:
    """Return the recipe of `described` fields."""
    made = dict(fields)
    for name, part in _nested(fields):
        made[name] = _KINDS[part.pop("kind")](**part)
    return Recipe(**made)


def _nested(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, part) for name, part in fields.items() if isinstance(part, dict)]


def check_same(
    path: Path, stored: dict[str, Any], wanted: dict[str, Any], option: str
) -> None:
    """Raise `ValueError` if the settings of a folder are those of another run; the
    message names every difference.
    """
    old = flatten(stored)
    new = flatten(json.loads(json.dumps(wanted)))
    for name in _ADDED.keys() & new.keys():
        old.setdefault(name, _ADDED[name])
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    # A sample is for readers, each kind of update goes on with the other's state, and
    # the name of a text does not matter if its digest is the same.
    free = ["config.sample", "config.update"]
    if "text" not in names:
        free += ["config.data", "config.tokenizer"]
    names = [name for name in names if name not in free]
    # A different name explains every difference behind it.
    for part in ("model", "recipe"):
        if f"config.{part}" in names:
            names = [name for name in names if not name.startswith(f"{part}.")]
    # A model without a name has its sizes in the config already.
    names = [name for name in names if f"config.{name}" not in names]
    if "config.model" in names:
        names = [name for name in names if name != "family"]
    if names:
        differences = ", ".join(
            f"{name.removeprefix('config.')}={old.get(name)!r} in the folder but"
            f" {new.get(name)!r} now"
            for name in names
        )
        repair = f"resume with the same settings or choose another {option}"
        if "config.weights" in names:
            repair += _CONVERSIONS[new["config.weights"]]
        raise ValueError(f"{path} holds another run: {differences}; {repair}")


# Settings that older folders lack, with the values of their runs.
_ADDED = {
    "config.accumulate": 1,
    "config.finish": None,
    "config.beta": None,
    "config.label_smoothing": None,
    "recipe.storage": "float",
    "recipe.weight.sparse_threshold": 0.0,
}

# Advice: how to convert parameters to the kind that was asked for.
_CONVERSIONS = {
    "stored": (
        " (tcfp_jax.store(params, recipe, key=key) makes stored parameters of float"
        " ones)"
    ),
    "float": " (tcfp_jax.dequantize(params) makes float parameters of stored ones)",
}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts under names such as "config.model".

    >>> flatten({"config": {"model": "tiny"}, "text": 1})
    {'config.model': 'tiny', 'text': 1}
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
