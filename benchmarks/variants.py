"""The ways to train that `benchmarks.convergence` compares, one table for both of its protocols, and groups of them.

A name of `tcfp_jax.recipes.NAMES` is that recipe with float32 weights; "stored" is `tcfp12_single` with `W_hi + W_lo`
as the only copy, 8-bit moments and E4M3 gradients; what follows either says what differs from it.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from models.settings import Moments, Weights
from tcfp_jax.recipes import NAMES, Recipe, recipe

BASELINE, RERUN, OTHER_BATCHES = "bf16", "bf16_rerun", "bf16_other_batches"
RERUN_JITTER = 1e-6
RECOMMENDED = "stored_bfloat16_gradients"  # as the guide and `models.train` store weights


@dataclass(frozen=True)
class Variant:
    """How a run trains: `weights`, `moments` and `ends` as in `models.train`, the rest as `tcfp_jax.store` takes it.

    Attributes:
      recipe: of every layer.
      remainder: what becomes of what rounding a stored weight leaves.
      gradient_dtype: of stored weights' gradients.
      finish: a part of the run, and the recipe that its last steps, and the evaluation, have instead.
      perturbation: relative deviation of noise on the weights before the first step.
      batches: "same" as the baseline's of the same seed, or "other".
      meaning: in words.

    Raises:
      ValueError: the part of `finish` is not between 0 and 1, so that it would never switch.
    """

    recipe: Recipe
    weights: Weights = "float"
    moments: Moments = "float32"
    remainder: Literal["stochastic", "feedback"] = "stochastic"
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    ends: tuple[int, int, str] | None = None
    finish: tuple[float, str | Recipe] | None = None
    perturbation: float = 0.0
    batches: Literal["same", "other"] = "same"
    meaning: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.finish is not None and not 0 < self.finish[0] < 1:
            raise ValueError(
                f"the finish of {self.meaning or 'this variant'} never switches: {self.finish[0]:g} is the part of the "
                "run that has the other recipe; give one between 0 and 1, such as 0.2"
            )

    @property
    def without_finish(self) -> "Variant":
        """The same to the end."""
        return dataclasses.replace(self, finish=None)

    @property
    def trains_digits(self) -> bool:
        """Whether a recipe without random bits, and perhaps a perturbation, is all, as `benchmarks.digits` takes it."""
        return not self.recipe.draws and self == Variant(self.recipe, perturbation=self.perturbation)


def _stored(
    moments: Moments = "8bit", *, meaning: str, remainder: Any = "stochastic", gradient_dtype: Any = "float32",
    **overrides: Any,
) -> Variant:  # fmt: skip
    chosen = recipe("tcfp12_single", **overrides)
    return Variant(chosen, "stored", moments, remainder, gradient_dtype, meaning=f"stored, {meaning}")


def _of(name: str, meaning: str, **overrides: Any) -> Variant:
    return Variant(recipe(name, **overrides), meaning=f"`{name}`, {meaning}")


_NOISE = {
    RERUN: Variant(
        recipe("bf16"), perturbation=RERUN_JITTER, meaning=f"BF16 from weights perturbed by {RERUN_JITTER:g}"
    ),
    OTHER_BATCHES: Variant(recipe("bf16"), batches="other", meaning="BF16 on other batches of the same text"),
}
EMULATED = ("nvfp4_training",)


def _said(name: str) -> str:
    if name in EMULATED:
        return "float32 weights, all products of NVFP4 operands, emulated"
    return "float32 weights" + (", E5M2 gradients" if recipe(name).gradient == "float8_e5m2" else "")


_NAMED = {name: Variant(recipe(name), meaning=_said(name)) for name in NAMES if name != BASELINE}
_STORED = {
    "stored": _stored(meaning="**hi + lo alone, products by hi, E4M3 gradients, 8-bit moments**"),
    "stored_e5m2": _stored(meaning="E5M2 gradients", gradient="float8_e5m2"),
    "stored_bfloat16_moments": _stored("bfloat16", meaning="bfloat16 moments"),
    "stored_bfloat16_moments_e5m2": _stored("bfloat16", meaning="bfloat16 moments, E5M2", gradient="float8_e5m2"),
    "stored_float32_moments": _stored("float32", meaning="float32 moments"),
    "stored_float32_moments_e5m2": _stored("float32", meaning="float32 moments, E5M2", gradient="float8_e5m2"),
    "stored_bfloat16_gradients": _stored(meaning="weights' gradients in bfloat16", gradient_dtype="bfloat16"),
    "stored_dual_forward": _stored(meaning="forward by hi + lo", forward_weight="hi+lo"),
    "stored_feedback": _stored(meaning="an FP8 error in the place of random bits", remainder="feedback"),
}
_FEEDBACK = {
    "tcfp12_no_feedback": _of("tcfp12", "without error feedback", remainder="dropped"),
    "tcfp12_srr": _of("tcfp12", "residual rounded stochastically", remainder="stochastic"),
    "tcfp12_fast_no_feedback": _of("tcfp12_fast", "without error feedback", remainder="dropped"),
    "tensorwise_feedback": _of("tensorwise", "error feedback", remainder="feedback"),
}
_GRADIENTS = {
    "tensorwise_e4m3": _of("tensorwise", "E4M3 gradients", gradient="float8_e4m3fn"),
    "tcfp12_e5m2": _of("tcfp12", "E5M2 gradients", gradient="float8_e5m2"),
    "tcfp12_fast_e5m2": _of("tcfp12_fast", "E5M2 gradients", gradient="float8_e5m2"),
    "tcfp12_wgrad_fp8": _of("tcfp12", "weight gradient in FP8", wgrad="full"),
    "tcfp12_fast_wgrad_bf16": _of("tcfp12_fast", "weight gradient in BF16", wgrad="bf16"),
    "tcfp12_accumulation_fast": _of("tcfp12", "fast accumulation", forward="fast", dgrad="fast"),
    "tcfp12_accumulation_full": _of("tcfp12", "full accumulation", forward="full", dgrad="full"),
    "tcfp12_fast_accumulation_full": _of(
        "tcfp12_fast", "full accumulation", forward="full", dgrad="full", wgrad="full"
    ),
}
_DELAYED = {
    f"{name}_delayed": _of(name, "delayed scales", amax="delayed") for name in ("tensorwise", "tcfp12", "tcfp12_fast")
}
_BLOCKS = {
    **{
        f"{name}_{size}": _of(name, f"blocks of {size}", block=size)
        for name, usual in {"blockwise": 128, "tcfp12_blockwise": 128, "mxfp8": 32}.items()
        for size in (32, 64, 128)
        if size != usual
    },
    **{f"stored_blocks_{size}": _stored(meaning=f"scales of squares of {size}", block=size) for size in (32, 64, 128)},
}
_LATE = {
    f"{name}_last_{percent}_bf16": dataclasses.replace(
        plain, finish=(percent / 100, "bf16"), meaning=f"{said}, the last {percent} % in `bf16`"
    )
    for name, plain, said in (
        ("tensorwise", _NAMED["tensorwise"], "`tensorwise`"), ("stored", _STORED["stored"], "stored"),
    )
    for percent in (10, 20)
}  # fmt: skip
_ENDS = {
    f"{name}_{which}_bf16": dataclasses.replace(plain, ends=(first, last, "bf16"), meaning=f"{said}, {words} in BF16")
    for name, plain, said in (
        ("tensorwise", _NAMED["tensorwise"], "`tensorwise`"), ("stored", _STORED["stored"], "stored"),
    )
    for which, first, last, words in (
        ("last_block", 0, 1, "the last block"), ("ends", 1, 1, "the first and the last block"),
    )
}  # fmt: skip

VARIANTS: dict[str, Variant] = {
    BASELINE: Variant(recipe("bf16"), meaning="BF16, float32 weights and AdamW"),
    **_NOISE, **_NAMED, **_STORED, **_FEEDBACK, **_GRADIENTS, **_DELAYED, **_BLOCKS,
    **_LATE, **_ENDS,
}  # fmt: skip

_OF_FP4 = ("nvfp4", "mxfp4", *EMULATED)
# Beside the baseline, which every run has. Of what differs in one thing, a group has both sides.
GROUPS: dict[str, tuple[str, ...]] = {
    "default": (RERUN, OTHER_BATCHES, "tensorwise", "tcfp12_fast", "stored", RECOMMENDED),
    "noise": tuple(_NOISE),
    "named": tuple(name for name in _NAMED if name not in _OF_FP4),
    "storage": tuple(_STORED),
    "feedback": ("tcfp12", "tcfp12_fast", "tensorwise", *_FEEDBACK, "stored", "stored_feedback"),
    "gradients": ("tensorwise", "tcfp12", "tcfp12_fast", "stored", "stored_e5m2", *_GRADIENTS),
    "delayed": (*(name.removesuffix("_delayed") for name in _DELAYED), *_DELAYED),
    "blocks": ("blockwise", "tcfp12_blockwise", "mxfp8", "stored", *_BLOCKS),
    "fp4": _OF_FP4,
    "late": ("tensorwise", "stored", *_LATE),
    "ends": ("tensorwise", "stored", *_ENDS),
}


def chosen_of(text: str) -> tuple[str, ...]:
    """The variants in "NAME,NAME", each a variant's or a group's, in the order of `VARIANTS`; BF16 is always one.

    >>> chosen_of("noise,stored_e5m2")
    ('bf16', 'bf16_rerun', 'bf16_other_batches', 'stored_e5m2')

    Raises:
      ValueError: a name that is neither.
    """
    names = {name.strip() for name in text.split(",")}
    if unknown := sorted(names - set(VARIANTS) - set(GROUPS)):
        raise ValueError(
            f"--variants has {unknown}, which are unknown; use groups of {list(GROUPS)} or names of {list(VARIANTS)}"
        )
    found = {BASELINE, *(names - set(GROUPS)), *(name for group in names & set(GROUPS) for name in GROUPS[group])}
    return tuple(name for name in VARIANTS if name in found)
