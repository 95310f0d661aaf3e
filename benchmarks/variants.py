"""The ways to train that `benchmarks.convergence` compares, and groups of them.

A name of `tcfp_jax.recipes.NAMES` is that recipe with float32 weights. "stored" is
`tcfp12_single` with `W_hi + W_lo` as the only copy, 8-bit moments and E4M3 gradients. A
suffix names the difference. "flags" are the layers of the PyTorch original
(`Recipe.from_flags`), which it compares on a TinyGPT. A `Study` compares variants with
another one than BF16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from models.training.forms import MomentFormat, Weights
from models.training.settings import Included
from tcfp_jax import formats
from tcfp_jax.linen import TCFPDense
from tcfp_jax.recipes import NAMES, Recipe, recipe

BASELINE, RERUN, OTHER_BATCHES = "bf16", "bf16_rerun", "bf16_other_batches"
RERUN_JITTER = 1e-6
# as the guide and `models.train` store weights
RECOMMENDED = "stored_bfloat16_gradients"
EMULATED = ("nvfp4_training",)
# BF16's numbers from another recipe than BF16's: `fake_quantized` knows its layers by
# it.
FAKE_RECIPE = recipe("bf16", backend="xla")
Clip = Literal["exact", "late", "matrix"]


@dataclass(frozen=True)
class Variant:
    """A way to train: `weights` and `moments` as in `models.train`, the rest as
    `tcfp_jax.store` takes it.

    Attributes:
      recipe: Recipe of every layer.
      remainder: Treatment of the rounding error of a stored weight.
      gradient_dtype: Dtype of the gradients of stored weights.
      include: "every" stores tables and multiplies the head in FP8, too, where weights
        are stored; "layers" does not.
      clip: Clipping by the norm of all gradients ("exact"), or inside the backward pass
        as `tcfp_jax.train_step` does it.
      products: Recipe of the products, if it is not that of the state.
      perturbation: Relative deviation of noise on the float parameters before the first
        step.
      batches: "same" as the baseline's of the same seed, or "other".
      meaning: Description in words.
    """

    recipe: Recipe
    weights: Weights = "float"
    moments: MomentFormat = "float32"
    remainder: Literal["stochastic", "feedback"] = "stochastic"
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    include: Included = "every"
    clip: Clip = "exact"
    products: Recipe | None = None
    perturbation: float = 0.0
    batches: Literal["same", "other"] = "same"
    meaning: str = field(default="", compare=False, repr=False)


def _stored(
    meaning: str, options: Mapping[str, Any] | None = None, **own: Any
) -> Variant:
    """Return stored weights by `tcfp12_single` with these options of a recipe."""
    chosen = recipe("tcfp12_single", **(options or {}))
    meaning = f"stored, {meaning}"
    return Variant(chosen, "stored", meaning=meaning, **{"moments": "8bit", **own})


def _of(name: str, meaning: str, **overrides: Any) -> Variant:
    return Variant(recipe(name, **overrides), meaning=f"`{name}`, {meaning}")


def _flags(meaning: str, **flags: Any) -> Variant:
    return Variant(Recipe.from_flags(**flags), meaning=f"TCFP-12, {meaning}")


def _said(name: str) -> str:
    if name in EMULATED:
        return "float32 weights, all products of NVFP4 operands, emulated"
    return "float32 weights" + (
        ", E5M2 gradients" if recipe(name).gradient == "float8_e5m2" else ""
    )


_NOISE = {
    RERUN: Variant(
        recipe("bf16"),
        perturbation=RERUN_JITTER,
        meaning=f"BF16 from weights perturbed by {RERUN_JITTER:g}",
    ),
    OTHER_BATCHES: Variant(
        recipe("bf16"),
        batches="other",
        meaning="BF16 on other batches of the same text",
    ),
}
_NAMED: dict[str, Variant] = {
    name: Variant(recipe(name), meaning=_said(name))
    for name in NAMES
    if name != BASELINE
}
_STORED = {
    "stored": _stored(
        "**hi + lo alone, products by hi, E4M3 gradients, 8-bit moments**"
    ),
    "stored_e5m2": _stored("E5M2 gradients", {"gradient": "float8_e5m2"}),
    "stored_float32_moments": _stored("float32 moments", moments="float32"),
    "stored_bfloat16_gradients": _stored(
        "weights' gradients in bfloat16", gradient_dtype="bfloat16"
    ),
    "stored_bf16_head": _stored(
        "the same, table and head float, head in BF16",
        gradient_dtype="bfloat16",
        include="layers",
    ),
    "stored_feedback": _stored(
        "an FP8 error instead of random bits", remainder="feedback"
    ),
}


def _recommended(meaning: str, **own: Any) -> Variant:
    """Return stored weights as the guide stores them, with a difference."""
    return _stored(meaning, gradient_dtype="bfloat16", **own)


_STUDIED = {
    "stored_rerun": _recommended(
        f"norms perturbed by {RERUN_JITTER:g}", perturbation=RERUN_JITTER
    ),
    "stored_late_clip": _recommended(
        'updated inside the backward pass, `clip="late"`', clip="late"
    ),
    "stored_matrix_clip": _recommended(
        'updated inside the backward pass, `clip="matrix"`', clip="matrix"
    ),
    "stored_exact_head": _recommended("head in BF16", include="bf16_head"),
    "stored_exact_head_rerun": _recommended(
        f"the same, norms perturbed by {RERUN_JITTER:g}",
        include="bf16_head",
        perturbation=RERUN_JITTER,
    ),
}
_OPTIONS = {
    "tcfp12_no_feedback": _of("tcfp12", "without error feedback", remainder="dropped"),
    "tcfp12_fast_no_feedback": _of(
        "tcfp12_fast", "without error feedback", remainder="dropped"
    ),
    "tensorwise_e4m3": _of("tensorwise", "E4M3 gradients", gradient="float8_e4m3fn"),
    "tensorwise_delayed": _of("tensorwise", "delayed scales", amax="delayed"),
    "blockwise_32": _of("blockwise", "blocks of 32", block=32),
    "stored_blocks_128": _stored("scales of squares of 128", {"block": 128}),
}
FLAGS = {
    "flags_tcfp12": _flags("**the flags as the original has them**"),
    "flags_no_error_feedback": _flags("`error_feedback=False`", error_feedback=False),
    "flags_srr": _flags(
        "`srr=True` instead of error feedback", error_feedback=False, srr=True
    ),
    "flags_abd": _flags("`abd=True`", abd=True),
    "flags_hp_grad_weight": _flags("`hp_grad_weight=True`", hp_grad_weight=True),
    "flags_abd_hp_grad_weight": _flags(
        "`abd=True, hp_grad_weight=True`", abd=True, hp_grad_weight=True
    ),
    "flags_delayed_scaling": _flags("`delayed_scaling=True`", delayed_scaling=True),
    "flags_no_tensor_cores": _flags(
        "`use_tensor_cores=False`: weights alone are rounded", use_tensor_cores=False
    ),
    **{
        f"flags_block_{size}": _flags(
            f"`scale_block_size={size}`", scale_block_size=size
        )
        for size in (128, 64, 32)
    },
    "fake_quantization": Variant(
        FAKE_RECIPE,
        meaning="fake quantization: E4M3 weights and activations, BF16 products",
    ),
}

VARIANTS: dict[str, Variant] = {
    BASELINE: Variant(recipe("bf16"), meaning="BF16, float32 weights and AdamW"),
    **_NOISE,
    **_NAMED,
    **_STORED,
    **_STUDIED,
    **_OPTIONS,
    **FLAGS,
}

_OF_FP4 = ("nvfp4", "mxfp4", *EMULATED)
# The baseline is part of every run, so no group names it. A group has both sides of
# each comparison.
GROUPS: dict[str, tuple[str, ...]] = {
    "default": (
        RERUN,
        OTHER_BATCHES,
        "tensorwise",
        "tcfp12_fast",
        "stored",
        RECOMMENDED,
    ),
    "noise": tuple(_NOISE),
    "named": tuple(name for name in _NAMED if name not in _OF_FP4),
    "storage": tuple(_STORED),
    "feedback": (
        "tcfp12",
        "tcfp12_no_feedback",
        "tcfp12_fast",
        "tcfp12_fast_no_feedback",
        "stored",
        "stored_feedback",
    ),
    "gradients": ("tensorwise", "tensorwise_e4m3", "stored", "stored_e5m2"),
    "delayed": ("tensorwise", "tensorwise_delayed"),
    "blocks": (
        "blockwise",
        "blockwise_32",
        "tcfp12_blockwise",
        "stored",
        "stored_blocks_128",
    ),
    "fp4": _OF_FP4,
    "flags": (RERUN, *FLAGS, "tensorwise", "tensorwise_e4m3"),
    "whole": (
        RERUN,
        "tensorwise",
        "rowwise",
        RECOMMENDED,
        "stored_bf16_head",
        *EMULATED,
    ),
}


@dataclass(frozen=True)
class Study:
    """Forks that are compared with another variant than BF16.

    Attributes:
      baseline: The variant that trains the bases, and that others are compared with.
      rerun: The same from perturbed weights.
      others: The variants in question.
      possessive: The baseline's losses in the titles of a table.
    """

    baseline: str
    rerun: str
    others: tuple[str, ...]
    possessive: str

    @property
    def names(self) -> tuple[str, ...]:
        """All of its variants."""
        return (self.baseline, self.rerun, *self.others)


# Each has a JSON of its own.
STUDIES = {
    "clipping": Study(
        RECOMMENDED,
        "stored_rerun",
        ("stored_late_clip", "stored_matrix_clip"),
        "exact clipping's",
    ),
    "head": Study(
        "stored_exact_head",
        "stored_exact_head_rerun",
        (RECOMMENDED,),
        "the BF16 head's",
    ),
}
OF_BF16 = Study(BASELINE, RERUN, (), "BF16's")


def chosen_of(text: str) -> tuple[str, ...]:
    """Return the variants in "NAME,NAME" in the order of `VARIANTS`.

    A name is a variant's or a group's. BF16 is always one of them.

    >>> chosen_of("noise,stored_e5m2")
    ('bf16', 'bf16_rerun', 'bf16_other_batches', 'stored_e5m2')

    Raises:
      ValueError: a name is neither a variant's nor a group's.
    """
    names = {name.strip() for name in text.split(",")}
    unknown = sorted(names - set(VARIANTS) - set(GROUPS))
    if unknown:
        raise ValueError(
            f"--variants has {unknown}, which are unknown; use groups of {list(GROUPS)}"
            f" or names of {list(VARIANTS)}"
        )
    found = {BASELINE}
    for name in names:
        found.update(GROUPS.get(name, (name,)))
    return tuple(name for name in VARIANTS if name in found)


def fake_quantized(
    next_function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    context: nn.module.InterceptorContext,
) -> jax.Array:
    """Compute `y = Q(x) Q(W) + b` for layers of `FAKE_RECIPE`.

    The gradient is as if Q were the identity. Use it with `nn.intercept_methods`. Q
    rounds to E4M3 with the smallest power of two that clips nothing.
    """
    layer = context.module
    if not (
        isinstance(layer, TCFPDense)
        and layer.recipe == FAKE_RECIPE
        and context.method_name == "__call__"
    ):
        return next_function(*args, **kwargs)
    params, (x,) = layer.variables["params"], args
    q = partial(
        formats.cast, datatype=formats.datatype("e4m3fn", "e8m0"), scalemode="ceil"
    )
    y = jnp.matmul(q(x), q(params["kernel"]).astype(x.dtype))
    return y + params["bias"].astype(x.dtype)
