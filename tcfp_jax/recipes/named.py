"""The named recipes, and overrides of them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.operands import Block, Fp4, Row, Scaling, Tensor
from tcfp_jax.recipes.definition import Recipe
from tcfp_jax.recipes.forms import Dual, Format, Fp4Training, Single

_E5M2: Format = "float8_e5m2"
# W_lo is no operand: it makes `W_hi + W_lo` precise enough to be the parameter itself, see `tcfp_jax.store`.
_SINGLE_PRODUCTS = Dual(remainder="dropped", forward="hi", dgrad="hi")
_IN_BLOCKS: Any = dict(forward="full", dgrad="full", wgrad="full")
_FP4: Any = dict(weight=Single("float4_e2m1fn"), forward="bf16", dgrad="bf16", wgrad="bf16")
_NO_STORED: Any = dict(weight=None, forward="bf16", dgrad="bf16", wgrad="bf16")
_NAMED = {
    "bf16": Recipe(**_NO_STORED),
    "tcfp12": Recipe(),
    "tcfp12_fast": Recipe(weight=Dual(dgrad="hi"), forward="fast", dgrad="fast", wgrad="fast"),
    "tcfp12_single": Recipe(weight=_SINGLE_PRODUCTS, forward="fast", dgrad="full", wgrad="full", copies="one"),
    "tensorwise": Recipe(weight=Single(), gradient=_E5M2, forward="fast", dgrad="full", wgrad="full"),
    "rowwise": Recipe(weight=Single(), scaling=Row(), forward="fast", dgrad="fast", wgrad="fast"),
    "blockwise": Recipe(weight=Single(), scaling=Block(128), **_IN_BLOCKS),
    "tcfp12_blockwise": Recipe(scaling=Block(128), **_IN_BLOCKS),
    "mxfp8": Recipe(weight=Single(), scaling=Block(32, "vector"), **_IN_BLOCKS),
    "nvfp4": Recipe(scaling=Fp4("nvfp4"), **_FP4),
    "mxfp4": Recipe(scaling=Fp4("mxfp4"), **_FP4),
    "nvfp4_training": Recipe(**_NO_STORED, fp4=Fp4Training()),
}
NAMES = tuple(_NAMED)

# What an override that is not a field of `Recipe` is short for: a field of `weight` or of `scaling`.
_SHORT_WEIGHT = {
    "weight_dtype": "dtype", "remainder": "remainder", "forward_weight": "forward", "dgrad_weight": "dgrad",
    "residual_blocks": "blocks",
}  # fmt: skip
_SHORT_SCALING = ("block", "tile", "scale", "rule")
_SHORT_FP4 = ("forward_operands",)


def recipe(name: str | Recipe, **overrides: Any) -> Recipe:
    """A named recipe, with overrides.

    "bf16": BF16 operands, the baseline. "tcfp12": `W_hi + W_lo` forward and in dgrad, BF16 weight gradient.
    "tcfp12_fast": `W_hi + W_lo` forward, `W_hi` in dgrad, FP8 weight gradient: four FP8 products, all with fast
    accumulation, instead of BF16's three. "tcfp12_single": stores `W_hi + W_lo`, without a float copy by
    `tcfp_jax.store`, and multiplies by `W_hi` alone, one FP8 product each. One FP8 product each: "tensorwise",
    E4M3 forward and E5M2 gradients (with `scale="float32"` nanochat's rule); "rowwise", a scale for each row of x and
    column of W, torchao's; "blockwise", a scale for every 128 values of x and square of W (`block=`); "mxfp8", OCP MX
    with vectors of 32.
    "tcfp12_blockwise" is "blockwise" with `W_hi + W_lo`. Weights of four bits, packed two to a byte and multiplied
    exactly by BF16 activations: "nvfp4", a scale in E4M3 for 16 values and one for the tensor, and "mxfp4", OCP MX
    with E8M0 scales of 32; `activation=` rounds activations to "float8_e4m3fn" by rows or, with "nvfp4", to
    "float4_e2m1fn", NVFP4 as well.
    "nvfp4_training" is NVIDIA's FP4 training, emulated (`Fp4Training`): gradients need a random key. NVIDIA keeps the
    last blocks of a model in BF16, see `tcfp_jax.conversion.last_blocks`.

    Args:
      name: one of these, or a `Recipe`.
      overrides: fields of `Recipe`, or short forms of what is in them: `block`, `tile`, `scale` and `rule` (of FP4's
        scales) of the scaling; `weight_dtype`, `remainder`, `forward_weight`, `dgrad_weight` and `residual_blocks` of
        the weight; the fields of `Fp4Training`. With a weight of four bits `activation=` also sets `forward`: "bf16"
        for "bfloat16", otherwise "full". `block=` makes "full" of a named recipe's "fast" products, because
        products in blocks are promoted.

    Raises:
      ValueError: an unknown name or value, fields that contradict each other, or a short form of something that the
        recipe does not have.
      TypeError: an override that is not known.

    >>> recipe("tcfp12", wgrad="full", block=64).scaling
    Block(size=64, tile='square')
    """
    if not isinstance(name, Recipe) and name not in _NAMED:
        raise ValueError(f"recipe {name!r} is unknown; use one of {list(_NAMED)} or build a Recipe")
    base = name if isinstance(name, Recipe) else _NAMED[name]
    if not overrides:
        return base
    fields: dict[str, Any] = {}
    of_weight: dict[str, Any] = {}
    of_scaling: dict[str, Any] = {}
    of_fp4: dict[str, Any] = {}
    for key, value in overrides.items():
        if key in Recipe.__dataclass_fields__:
            fields[key] = value
        elif key in _SHORT_WEIGHT:
            of_weight[_SHORT_WEIGHT[key]] = value
        elif key in _SHORT_SCALING:
            of_scaling[key] = value
        elif key in _SHORT_FP4:
            of_fp4[key] = value
        else:
            known = [*Recipe.__dataclass_fields__, *_SHORT_WEIGHT, *_SHORT_SCALING, *_SHORT_FP4]
            raise TypeError(f"a recipe has no {key!r}; use some of {known}")
    if of_weight:
        fields["weight"] = _with_weight(fields.get("weight", base.weight), of_weight)
    if of_scaling:
        fields["scaling"] = _with_scaling(fields.get("scaling", base.scaling), of_scaling)
    if of_fp4:
        if base.fp4 is None:
            raise ValueError(f"{sorted(of_fp4)[0]}= is of FP4 training, and {base} has none; pass fp4=Fp4Training(...)")
        fields["fp4"] = dataclasses.replace(fields.get("fp4", base.fp4), **of_fp4)
    if "activation" in fields and isinstance(fields.get("scaling", base.scaling), Fp4):
        if fields["activation"] == "bfloat16":
            fields = {"forward": "bf16"} | fields | {"activation": Recipe.activation}
        else:
            fields = {"forward": "full"} | fields
    if isinstance(fields.get("scaling"), Block):
        fields = {p: "full" for p in ("forward", "dgrad", "wgrad") if getattr(base, p) == "fast"} | fields
    return dataclasses.replace(base, **fields)


def describe(recipe: Recipe) -> str:
    """The name of a recipe, or that of the nearest one of its kind and the fields in which it differs.

    >>> describe(recipe("tensorwise", gradient="float8_e4m3fn"))
    "tensorwise with gradient='float8_e4m3fn'"
    >>> describe(recipe("nvfp4_training", forward_operands="bf16"))
    "nvfp4_training with fp4.forward_operands='bf16'"
    """
    kind = lambda one: (one.fp4 is None, type(one.weight), getattr(one.scaling, "format", None))
    alike = {name: known for name, known in _NAMED.items() if kind(known) == kind(recipe)}
    found = {name: list(_differences(recipe, known)) for name, known in (alike or _NAMED).items()}
    nearest = min(found, key=lambda name: len(found[name]))
    return f"{nearest} with {', '.join(found[nearest])}" if found[nearest] else nearest


def _differences(value: object, base: object, prefix: str = "") -> Iterator[str]:
    """`name=value` of every field in which two of a kind differ, down to the fields of their values."""
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        mine, theirs = getattr(value, field.name), getattr(base, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
            yield from _differences(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs:
            yield f"{prefix}{field.name}={mine!r}"


def _with_weight(weight: Single | Dual | None, given: dict[str, Any]) -> Single | Dual:
    unknown = set(given) - {field.name for field in dataclasses.fields(weight)} if weight is not None else set(given)
    if weight is None or unknown:
        raise ValueError(
            f"{sorted(unknown)[0]}={given[sorted(unknown)[0]]!r}: weight={weight} has no such field; use "
            "weight=Dual(...) for a weight of two halves"
        )
    return dataclasses.replace(weight, **given)


def _with_scaling(scaling: Scaling, given: dict[str, Any]) -> Scaling:
    if isinstance(scaling, Fp4):
        return _with_fp4(scaling, given)
    if "rule" in given:
        raise ValueError(
            f"rule={given['rule']!r} with scaling={scaling}: rules choose the scales of FP4 weights; use "
            'recipe("nvfp4") or recipe("mxfp4")'
        )
    if given.get("block", ...) is None:
        return Tensor(given.get("scale", "pow2"))
    if "block" in given or isinstance(scaling, Block):
        before = scaling if isinstance(scaling, Block) else Block()
        if given.get("scale", "pow2") != "pow2":
            raise ValueError(
                f"scale={given['scale']!r} with {before}: the scales of blocks are powers of two, E8M0; use "
                'scale="pow2" or scaling=Tensor("float32")'
            )
        return Block(given.get("block", before.size), given.get("tile", before.tile))
    if "tile" in given:
        raise ValueError(
            f"tile={given['tile']!r} with scaling={scaling}, which has no blocks; pass block=32, 64 or 128"
        )
    return dataclasses.replace(scaling, scale=given["scale"])


def _with_fp4(scaling: Fp4, given: dict[str, Any]) -> Fp4:
    for name in ("block", "scale"):
        if name in given:
            raise ValueError(
                f"{name}={given[name]!r} with scaling={scaling}: blocks of {scaling.format} hold {scaling.block} "
                'values and its scales are its own; use tile= or rule=, the other of recipe("nvfp4") and '
                'recipe("mxfp4"), or recipe("mxfp8")'
            )
    return dataclasses.replace(scaling, **given)
