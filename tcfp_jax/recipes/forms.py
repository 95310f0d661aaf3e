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
ScaleRule = Literal["amax", "four_over_six", "fold_exact"]
Rotation = Literal["none", "wgrad", "backward"]
Rounding = Literal["nearest", "stochastic"]
GradientRounding = Literal["nearest", "stochastic", "eden"]
Backward = Literal["reused", "requantized"]
ForwardOperands = Literal["fp4", "bf16"]


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

    Blocks of 16 values along the contraction share an E4M3 scale, all of an operand a float32 one above them. The
    weight is quantized anew in each forward pass from its float parameter, which the optimizer updates.

    Attributes:
      scale_rule: how blocks that are rounded to nearest are scaled: "amax", their largest value becomes 6;
        "four_over_six", 6 or 4, whichever leaves the smaller squared error; "fold_exact", scales with mantissa 1, 1.25
        or 1.5, by which values are E4M3 numbers, so that all three products are FP8 products of the same operands.
        Blocks that are rounded stochastically get the smallest scale that clips nothing, because clipping is biased.
      rotation: which products' operands are rotated along the contraction, by a Hadamard matrix with random signs:
        "none", "wgrad", or "backward", dgrad's too.
      hadamard: the size of that matrix.
      gradient_rounding: of g in both products: "nearest"; "stochastic"; or "eden" (MS-EDEN), nearest with block scales
        that are then corrected and rounded stochastically, which is unbiased over the rotations.
      activation_rounding: of x in the forward product, and in wgrad where it is "reused". "stochastic" is there to be
        measured as a control.
      backward: what dgrad and wgrad read beside g: "reused", the forward's weight, whose scales are of squares of 16
        for that, and x quantized along the tokens; or "requantized", the forward's own numbers of both, quantized
        along the other axis as g is.
      forward_operands: "fp4"; or "bf16", the forward product alone in BF16, as NVIDIA ends a training.

    Raises:
      ValueError: an unknown value, or two that contradict each other.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4"; Cook et al. 2025, "Four Over Six"; Panferov et
    al. 2026, "Quartet II".

    >>> Fp4Training().draws, Fp4Training(rotation="none", gradient_rounding="nearest").draws
    ('backward', 'nothing')
    """

    scale_rule: ScaleRule = "amax"
    rotation: Rotation = "wgrad"
    hadamard: int = 16
    gradient_rounding: GradientRounding = "stochastic"
    activation_rounding: Rounding = "nearest"
    backward: Backward = "reused"
    forward_operands: ForwardOperands = "fp4"

    def __post_init__(self) -> None:
        check_choices(
            self, scale_rule=ScaleRule, rotation=Rotation, gradient_rounding=GradientRounding,
            activation_rounding=Rounding, backward=Backward, forward_operands=ForwardOperands,
        )  # fmt: skip
        if self.hadamard not in (16, 32, 64, 128):
            raise ValueError(f"hadamard={self.hadamard!r} is no power of two from 16, a block, to 128; use 16")
        if self.backward == "reused" and self.rotation == "backward":
            raise ValueError(
                'rotation="backward" with backward="reused": dgrad would read a weight that is quantized before it is '
                'rotated; use backward="requantized" or rotation="wgrad"'
            )
        if self.gradient_rounding == "eden" and (self.rotation, self.backward) != ("backward", "requantized"):
            raise ValueError(
                f'gradient_rounding="eden" with rotation={self.rotation!r} and backward={self.backward!r}: it is '
                'unbiased over rotations of both operands alone; use rotation="backward" and backward="requantized"'
            )
        if self.gradient_rounding == "eden" and self.scale_rule == "fold_exact":
            raise ValueError(
                'gradient_rounding="eden" with scale_rule="fold_exact": corrected scales have any mantissa; use '
                'gradient_rounding="stochastic"'
            )

    @property
    def draws(self) -> Literal["nothing", "backward", "forward"]:
        """Where random bits are drawn first."""
        if self.activation_rounding == "stochastic" and self.forward_operands == "fp4":
            return "forward"
        drawn = (self.rotation, self.gradient_rounding, self.activation_rounding)
        return "nothing" if drawn == ("none", "nearest", "nearest") else "backward"
