"""The named recipes, and overrides of them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pallas_kernels.operands import Block, Fp4, Row, Scaling, Tensor
from tcfp_jax.recipes.definition import (
    PRODUCTS,
    Arithmetic,
    Dual,
    Fp4Training,
    Recipe,
    Single,
    TCFPMode,
)

Name = Literal[
    "bf16",
    "tcfp12",
    "tcfp12_fast",
    "tcfp12_single",
    "tensorwise",
    "rowwise",
    "blockwise",
    "tcfp12_blockwise",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "nvfp4_training",
]
NAMES: tuple[Name, ...] = get_args(Name)


def _all(how: Arithmetic, **fields: Any) -> Recipe:
    """Return the recipe whose three products multiply in one way."""
    return Recipe(forward=how, dgrad=how, wgrad=how, **fields)


_NAMED: dict[str, Recipe] = {
    "bf16": _all("bf16", weight=None),
    "tcfp12": Recipe(),
    "tcfp12_fast": _all("fast", weight=Dual(dgrad="hi")),
    # Products never read this W_lo: it makes `W_hi + W_lo` precise enough to be the
    # parameter, see `tcfp_jax.store`.
    "tcfp12_single": Recipe(
        weight=Dual(remainder="dropped", forward="hi", dgrad="hi"),
        wgrad="full",
        copies="one",
    ),
    "tensorwise": Recipe(weight=Single(), gradient="float8_e5m2", wgrad="full"),
    "rowwise": _all("fast", weight=Single(), scaling=Row()),
    "blockwise": _all("full", weight=Single(), scaling=Block(128)),
    "tcfp12_blockwise": _all("full", scaling=Block(128)),
    "mxfp8": _all("full", weight=Single(), scaling=Block(32, "vector")),
    "nvfp4": _all("bf16", weight=Single("float4_e2m1fn"), scaling=Fp4("nvfp4")),
    "mxfp4": _all("bf16", weight=Single("float4_e2m1fn"), scaling=Fp4("mxfp4")),
    "nvfp4_training": _all("bf16", weight=Fp4Training()),
}

# The recipes of modes that are not names of recipes.
_OF_MODE = {TCFPMode.FP8: "tensorwise", TCFPMode.FP4: "nvfp4"}

# Overrides that are not fields of `Recipe`: they stand for a field of `weight` or of
# `scaling`.
_OF_WEIGHT = {
    "weight_dtype": "dtype",
    "remainder": "remainder",
    "forward_weight": "forward",
    "dgrad_weight": "dgrad",
    "residual_blocks": "blocks",
    "sparse_threshold": "sparse_threshold",
    "forward_operands": "forward_operands",
}
_OF_SCALING = {name: name for name in ("block", "tile", "scale", "rule")}


def recipe(name: Name | str | Recipe, **overrides: Any) -> Recipe:
    """Return a named recipe, with overrides.

    Use this to choose how layers multiply: "tcfp12_fast" or "tensorwise" to train
    faster, "tcfp12" to stay closest to BF16, "nvfp4" to serve. `tcfp_jax.explain` shows
    the kernels of a recipe, and `tcfp_jax.conversion.diagnose` compares recipes on a
    model.

    * "bf16": BF16 operands, the baseline.
    * "tcfp12": `W_hi + W_lo` forward and in dgrad, BF16 weight gradient.
    * "tcfp12_fast": `W_hi + W_lo` forward, `W_hi` in dgrad, FP8 weight gradient: four
      fast products for BF16's three.
    * "tcfp12_single": stores `W_hi + W_lo`, without a float copy by `tcfp_jax.store`,
      and multiplies by `W_hi` alone.
    * "tensorwise": E4M3 forward and E5M2 gradients; `scale="float32"` makes it
      nanochat's.
    * "rowwise": a scale for each row of x and column of W, as in torchao.
    * "blockwise": a scale for every 128 values of x and square of W (`block=`).
    * "tcfp12_blockwise": "blockwise" with `W_hi + W_lo`.
    * "mxfp8": OCP MX, with vectors of 32.
    * "nvfp4", "mxfp4": weights of four bits, packed two to a byte, exactly multiplied
      by BF16 activations. `activation="float8_e4m3fn"` rounds these to E4M3 by rows,
      `activation="float4_e2m1fn"` with "nvfp4" to NVFP4.
    * "nvfp4_training": NVIDIA's FP4 training, emulated. Gradients need a random key.
      NVIDIA keeps the last blocks of a model in BF16, see
      `tcfp_jax.conversion.last_blocks`.

    Args:
      name: one of these, a `Recipe`, or a `TCFPMode`.
      overrides: fields of `Recipe`, or short forms of nested fields. `block`, `tile`,
        `scale` and `rule` (of FP4's scales) belong to the scaling; `weight_dtype`,
        `remainder`, `forward_weight`, `dgrad_weight`, `residual_blocks`,
        `sparse_threshold` (with which `residual_blocks` is "nonzero") and
        `forward_operands` to the weight. With a weight of four bits `activation=` also
        sets `forward`: "bf16" for "bfloat16", otherwise "full". `block=` turns "fast"
        products into "full", as block products accumulate in full.

    Raises:
      ValueError: an unknown name or value, fields that contradict each other, or a
        short form of an absent field.
      TypeError: an unknown override.

    >>> recipe("tcfp12", wgrad="full", block=64).scaling
    Block(size=64, tile='square')
    """
    if isinstance(name, TCFPMode):
        name = _OF_MODE.get(name, name.value)
    if isinstance(name, Recipe):
        base = name
    elif isinstance(name, str) and name in _NAMED:
        base = _NAMED[name]
    else:
        raise ValueError(
            f"recipe {name!r:.80} is unknown; use one of {list(_NAMED)} or build a"
            " Recipe"
        )
    if not overrides:
        return base
    fields = dict(overrides)
    of_weight = _take(fields, _OF_WEIGHT)
    of_scaling = _take(fields, _OF_SCALING)
    known = Recipe.__dataclass_fields__
    for key in fields:
        if key not in known:
            names = [*known, *_OF_WEIGHT, *_OF_SCALING]
            raise TypeError(f"a recipe has no {key!r}; use some of {names}")
    if "sparse_threshold" in of_weight:
        of_weight.setdefault("blocks", "nonzero")
    if of_weight:
        fields["weight"] = _with_weight(fields.get("weight", base.weight), of_weight)
    scaling = fields.get("scaling", base.scaling)
    if not isinstance(scaling, Scaling):
        return dataclasses.replace(base, **fields)  # The recipe's own check raises.
    if of_scaling:
        scaling = _with_scaling(scaling, of_scaling)
    if "activation" in fields and scaling.packed:
        in_bf16 = fields["activation"] == "bfloat16"
        fields.setdefault("forward", "bf16" if in_bf16 else "full")
        if in_bf16:
            fields["activation"] = Recipe.activation
    if scaling != base.scaling and scaling.in_blocks:
        for product in PRODUCTS:
            if getattr(base, product) == "fast":
                fields.setdefault(product, "full")
    return dataclasses.replace(base, **{**fields, "scaling": scaling})


def _take(overrides: dict[str, Any], short: Mapping[str, str]) -> dict[str, Any]:
    """Take short overrides out, and return them by the names of their fields."""
    return {
        field: overrides.pop(key) for key, field in short.items() if key in overrides
    }


def describe(recipe: Recipe) -> str:
    """Return the nearest name of a recipe, and the fields in which both differ.

    Use this in a message or a table, where the whole recipe is too long.

    >>> describe(recipe("tensorwise", gradient="float8_e4m3fn"))
    "tensorwise with gradient='float8_e4m3fn'"
    >>> describe(recipe("nvfp4_training", forward_operands="bf16"))
    "nvfp4_training with weight.forward_operands='bf16'"
    """
    alike = [name for name in _NAMED if _kind(_NAMED[name]) == _kind(recipe)]
    found = {name: list(_differences(recipe, _NAMED[name])) for name in alike or _NAMED}
    nearest = min(found, key=lambda name: len(found[name]))
    if not found[nearest]:
        return nearest
    return f"{nearest} with {', '.join(found[nearest])}"


def _kind(recipe: Recipe) -> tuple[type, str | None]:
    """Return the form of the weight, and the format of FP4 codes."""
    return type(recipe.weight), getattr(recipe.scaling, "format", None)


def _differences(value: object, base: object, prefix: str = "") -> Iterator[str]:
    """Yield `name=value` of each field in which two dataclasses differ, also nested."""
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        mine = getattr(value, field.name)
        theirs = getattr(base, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
            yield from _differences(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs:
            yield f"{prefix}{field.name}={mine!r}"


def _with_weight(
    weight: Single | Dual | Fp4Training | None, given: dict[str, Any]
) -> Single | Dual | Fp4Training:
    fields = () if weight is None else dataclasses.fields(weight)
    unknown = sorted(given.keys() - {field.name for field in fields})
    if weight is None or unknown:
        raise ValueError(
            f"{unknown[0]}={given[unknown[0]]!r}: weight={weight} has"
            " no such field; use weight=Dual(...) for a weight of two halves, or"
            " Fp4Training(...) for FP4 training"
        )
    return dataclasses.replace(weight, **given)


def _with_scaling(scaling: Scaling, given: dict[str, Any]) -> Scaling:
    if isinstance(scaling, Fp4):
        for taken in ("block", "scale"):
            if taken in given:
                raise ValueError(
                    f"{taken}={given[taken]!r} with scaling={scaling}: blocks of"
                    f" {scaling.format} hold {scaling.block} values and its scales are"
                    ' its own; use tile= or rule=, the other of recipe("nvfp4") and'
                    ' recipe("mxfp4"), or recipe("mxfp8")'
                )
        return dataclasses.replace(scaling, **given)
    if "rule" in given:
        raise ValueError(
            f"rule={given['rule']!r} with scaling={scaling}: rules choose the scales of"
            ' FP4 weights; use recipe("nvfp4") or recipe("mxfp4")'
        )
    scale = given.get("scale", "pow2")
    if "block" in given and given["block"] is None:
        return Tensor(scale)
    if "block" in given or scaling.in_blocks:
        before = scaling if isinstance(scaling, Block) else Block()
        if scale != "pow2":
            raise ValueError(
                f"scale={scale!r} with {before}: the scales of blocks are"
                ' powers of two, E8M0; use scale="pow2" or'
                ' scaling=Tensor("float32")'
            )
        return Block(given.get("block", before.size), given.get("tile", before.tile))
    if "tile" in given:
        raise ValueError(
            f"tile={given['tile']!r} with scaling={scaling}, which has no blocks; pass"
            " block=32, 64 or 128"
        )
    return dataclasses.replace(scaling, scale=scale)
