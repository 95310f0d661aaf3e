"""The named recipes, and overrides of them."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args

from pallas_kernels.operands import Block, Fp4, Row, Scaling, Tensor
from tcfp_jax.recipes.definition import Dual, Fp4Training, Recipe, Single

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

# Products never read this W_lo: it makes `W_hi + W_lo` precise enough to be the
# parameter, see `tcfp_jax.store`.
_UNREAD_RESIDUAL = Dual(remainder="dropped", forward="hi", dgrad="hi")
_BF16: Any = dict(forward="bf16", dgrad="bf16", wgrad="bf16")
_FULL: Any = dict(forward="full", dgrad="full", wgrad="full")
_FAST: Any = dict(forward="fast", dgrad="fast", wgrad="fast")
_NAMED: dict[str, Recipe] = {
    "bf16": Recipe(weight=None, **_BF16),
    "tcfp12": Recipe(),
    "tcfp12_fast": Recipe(weight=Dual(dgrad="hi"), **_FAST),
    "tcfp12_single": Recipe(
        weight=_UNREAD_RESIDUAL,
        forward="fast",
        dgrad="full",
        wgrad="full",
        copies="one",
    ),
    "tensorwise": Recipe(
        weight=Single(),
        gradient="float8_e5m2",
        forward="fast",
        dgrad="full",
        wgrad="full",
    ),
    "rowwise": Recipe(weight=Single(), scaling=Row(), **_FAST),
    "blockwise": Recipe(weight=Single(), scaling=Block(128), **_FULL),
    "tcfp12_blockwise": Recipe(scaling=Block(128), **_FULL),
    "mxfp8": Recipe(weight=Single(), scaling=Block(32, "vector"), **_FULL),
    "nvfp4": Recipe(weight=Single("float4_e2m1fn"), scaling=Fp4("nvfp4"), **_BF16),
    "mxfp4": Recipe(weight=Single("float4_e2m1fn"), scaling=Fp4("mxfp4"), **_BF16),
    "nvfp4_training": Recipe(weight=Fp4Training(), **_BF16),
}

# Overrides that are not fields of `Recipe`: they stand for a field of `weight` or of
# `scaling`.
_OF_WEIGHT = {
    "weight_dtype": "dtype",
    "remainder": "remainder",
    "forward_weight": "forward",
    "dgrad_weight": "dgrad",
    "residual_blocks": "blocks",
    "forward_operands": "forward_operands",
}
_OF_SCALING = ("block", "tile", "scale", "rule")


def recipe(name: Name | str | Recipe, **overrides: Any) -> Recipe:
    """Return a named recipe, with overrides.

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
      name: one of these, or a `Recipe`.
      overrides: fields of `Recipe`, or short forms of nested fields. `block`, `tile`,
        `scale` and `rule` (of FP4's scales) belong to the scaling; `weight_dtype`,
        `remainder`, `forward_weight`, `dgrad_weight`, `residual_blocks` and
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
    if not isinstance(name, Recipe | str) or (
        isinstance(name, str) and name not in _NAMED
    ):
        raise ValueError(
            f"recipe {name!r} is unknown; use one of {list(_NAMED)} or build a Recipe"
        )
    base = name if isinstance(name, Recipe) else _NAMED[name]
    if not overrides:
        return base
    names = [*Recipe.__dataclass_fields__, *_OF_WEIGHT, *_OF_SCALING]
    if unknown := next((key for key in overrides if key not in names), None):
        raise TypeError(f"a recipe has no {unknown!r}; use some of {names}")
    of_weight = {
        _OF_WEIGHT[key]: value for key, value in overrides.items() if key in _OF_WEIGHT
    }
    of_scaling = {key: value for key, value in overrides.items() if key in _OF_SCALING}
    fields = {
        key: value
        for key, value in overrides.items()
        if key in Recipe.__dataclass_fields__
    }
    if of_weight:
        fields["weight"] = _with_weight(fields.get("weight", base.weight), of_weight)
    if of_scaling:
        fields["scaling"] = _with_scaling(
            fields.get("scaling", base.scaling), of_scaling
        )
    if "activation" in fields and isinstance(fields.get("scaling", base.scaling), Fp4):
        if fields["activation"] == "bfloat16":
            fields = {"forward": "bf16"} | fields | {"activation": Recipe.activation}
        else:
            fields = {"forward": "full"} | fields
    if isinstance(fields.get("scaling"), Block):
        fields = {
            p: "full"
            for p in ("forward", "dgrad", "wgrad")
            if getattr(base, p) == "fast"
        } | fields
    return dataclasses.replace(base, **fields)


def describe(recipe: Recipe) -> str:
    """Return the name of a recipe, or the nearest name of its kind and the fields that
    differ.

    >>> describe(recipe("tensorwise", gradient="float8_e4m3fn"))
    "tensorwise with gradient='float8_e4m3fn'"
    >>> describe(recipe("nvfp4_training", forward_operands="bf16"))
    "nvfp4_training with weight.forward_operands='bf16'"
    """
    kind = lambda one: (type(one.weight), getattr(one.scaling, "format", None))
    alike = {
        name: known for name, known in _NAMED.items() if kind(known) == kind(recipe)
    }
    found = {
        name: list(_differences(recipe, known))
        for name, known in (alike or _NAMED).items()
    }
    nearest = min(found, key=lambda name: len(found[name]))
    return f"{nearest} with {', '.join(found[nearest])}" if found[nearest] else nearest


def _differences(value: object, base: object, prefix: str = "") -> Iterator[str]:
    """Yield `name=value` of every field in which two values of a kind differ, down to
    nested fields.
    """
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        mine, theirs = getattr(value, field.name), getattr(base, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
            yield from _differences(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs:
            yield f"{prefix}{field.name}={mine!r}"


def _with_weight(
    weight: Single | Dual | Fp4Training | None, given: dict[str, Any]
) -> Single | Dual | Fp4Training:
    unknown = (
        set(given) - {field.name for field in dataclasses.fields(weight)}
        if weight is not None
        else set(given)
    )
    if weight is None or unknown:
        raise ValueError(
            f"{sorted(unknown)[0]}={given[sorted(unknown)[0]]!r}: weight={weight} has"
            " no such field; use weight=Dual(...) for a weight of two halves, or"
            " Fp4Training(...) for FP4 training"
        )
    return dataclasses.replace(weight, **given)


def _with_scaling(scaling: Scaling, given: dict[str, Any]) -> Scaling:
    if isinstance(scaling, Fp4):
        if taken := next((name for name in ("block", "scale") if name in given), None):
            raise ValueError(
                f"{taken}={given[taken]!r} with scaling={scaling}: blocks of"
                f" {scaling.format} hold {scaling.block} values and its scales are its"
                ' own; use tile= or rule=, the other of recipe("nvfp4") and'
                ' recipe("mxfp4"), or recipe("mxfp8")'
            )
        return dataclasses.replace(scaling, **given)
    if "rule" in given:
        raise ValueError(
            f"rule={given['rule']!r} with scaling={scaling}: rules choose the scales of"
            ' FP4 weights; use recipe("nvfp4") or recipe("mxfp4")'
        )
    if given.get("block", ...) is None:
        return Tensor(given.get("scale", "pow2"))
    if "block" in given or isinstance(scaling, Block):
        before = scaling if isinstance(scaling, Block) else Block()
        if given.get("scale", "pow2") != "pow2":
            raise ValueError(
                f"scale={given['scale']!r} with {before}: the scales of blocks are"
                ' powers of two, E8M0; use scale="pow2" or'
                ' scaling=Tensor("float32")'
            )
        return Block(given.get("block", before.size), given.get("tile", before.tile))
    if "tile" in given:
        raise ValueError(
            f"tile={given['tile']!r} with scaling={scaling}, which has no blocks; pass"
            " block=32, 64 or 128"
        )
    return dataclasses.replace(scaling, scale=given["scale"])
