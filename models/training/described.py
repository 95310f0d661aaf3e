"""A recipe in JSON, as the folder of a run holds it."""

import dataclasses
from typing import Any

from pallas_kernels.operands import Block, Fp4, Row, Tensor
from tcfp_jax.recipes import Dual, Fp4Training, Recipe, Single

_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Dual, Single, Tensor, Row, Block, Fp4, Fp4Training)
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
