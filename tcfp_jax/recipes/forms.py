"""What a recipe is made of: the forms of a stored weight, and the words for what can be chosen."""

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

Format = Literal["float8_e4m3fn", "float8_e5m2"]
WeightFormat = Literal["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
Halves = Literal["hi", "hi+lo"]
Product = Literal["fast", "full", "bf16"]
Remainder = Literal["feedback", "stochastic", "dropped"]
Blocks = Literal["all", "nonzero"]
Amax = Literal["fresh", "delayed"]
Copies = Literal["one", "both"]


class TCFPMode(enum.Enum):
    """What a recipe's weights are: BF16, packed FP4 codes, one FP8 tensor, or TCFP-12's two.

    >>> from tcfp_jax.recipes import recipe
    >>> recipe("tcfp12").mode, recipe("nvfp4").mode
    (<TCFPMode.TCFP12: 'tcfp12'>, <TCFPMode.FP4: 'fp4'>)
    """

    BF16 = "bf16"
    FP4 = "fp4"
    FP8 = "fp8"
    TCFP12 = "tcfp12"


def check_choices(value: Any, **choices: Any) -> None:
    """Raise `ValueError` where an attribute of `value` has none of the values that its `Literal` allows."""
    for name, allowed in choices.items():
        if getattr(value, name) not in get_args(allowed):
            raise ValueError(f"{name}={getattr(value, name)!r} is unknown; use one of {list(get_args(allowed))}")


@dataclass(frozen=True)
class Single:
    """A weight as one FP8 tensor, or as packed FP4 codes.

    Attributes:
      dtype: its format; "float4_e2m1fn" belongs to `scaling=Fp4(...)`.
      remainder: what becomes of what rounding leaves: "dropped", or "feedback", added to the weight of the next step
        by `tcfp_jax.error_feedback`.
    """

    dtype: WeightFormat = "float8_e4m3fn"
    remainder: Literal["feedback", "dropped"] = "dropped"

    # What `Dual` chooses is given here.
    forward: ClassVar[Halves] = "hi"
    dgrad: ClassVar[Halves] = "hi"
    blocks: ClassVar[Blocks] = "all"

    def __post_init__(self) -> None:
        check_choices(self, dtype=WeightFormat, remainder=Literal["feedback", "dropped"])


@dataclass(frozen=True)
class Dual:
    """A weight as two FP8 tensors that share their scales, `W ~ (W_hi + W_lo) s`.

    Attributes:
      dtype: the format of both.
      remainder: what becomes of what rounding leaves: "feedback", added to the weight of the next step by
        `tcfp_jax.error_feedback`; "stochastic", `W_lo` is rounded so that E[W_hi + W_lo] = W (SRR), which needs a key
        and no error buffer; or "dropped".
      forward, dgrad: the halves that each of these products reads; "hi" in dgrad is the PyTorch original's ABD, one FP8
        product less.
      blocks: those of `W_lo` that are multiplied; "nonzero" leaves out blocks that are all zeros, for weights of which
        FP8 holds much exactly.
    """

    dtype: Format = "float8_e4m3fn"
    remainder: Remainder = "feedback"
    forward: Halves = "hi+lo"
    dgrad: Halves = "hi+lo"
    blocks: Blocks = "all"

    def __post_init__(self) -> None:
        check_choices(self, dtype=Format, remainder=Remainder, forward=Halves, dgrad=Halves, blocks=Blocks)

    @property
    def reads_lo(self) -> bool:
        """Whether a product reads `W_lo`; otherwise it only makes the stored weight precise."""
        return "hi+lo" in (self.forward, self.dgrad)


@dataclass(frozen=True)
class Fp4Training:
    """All three products of NVFP4 operands, emulated: their values are exact BF16 numbers, which BF16 products read.

    `tcfp_jax.products.fp4_training` describes the products. The weight is quantized anew in each forward pass from its
    float parameter, which the optimizer updates.

    Attributes:
      forward_operands: "fp4"; or "bf16", the forward product alone in BF16. NVIDIA ends a training with it: the last
        tenth of the steps in "bf16" removes most of the loss that FP4 costs.

    Raises:
      ValueError: an unknown value.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4".
    """

    forward_operands: Literal["fp4", "bf16"] = "fp4"

    def __post_init__(self) -> None:
        check_choices(self, forward_operands=Literal["fp4", "bf16"])
