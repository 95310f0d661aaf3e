"""`Recipe`: one frozen, hashable description of how a layer multiplies. It is passed whole, and nothing else is.

A layer `y = x W` has three products: the forward `x W`, the input gradient `g Wᵀ` (dgrad) and the weight gradient
`xᵀ g` (wgrad). A recipe says for each operand which format it takes and for each product how it is accumulated.
`W_lo`, the residual of the weight, is a second FP8 tensor that shares the scale of the first: `W ~ (W_hi + W_lo) s`.

Contradictions raise when the recipe is built, never later, and no setting is changed on the user's behalf.
"""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pallas_kernels.blocks import BLOCKS, ResidualBlocks, Tile, check_block
from pallas_kernels.dispatch import Backend, check_backend

Format = Literal["float8_e4m3fn", "float8_e5m2", "bfloat16"]
Residual = Literal["nearest", "stochastic", "none"]
WeightForm = Literal["dual", "single"]
WeightGradient = Literal["fp8", "bf16"]
Accumulation = Literal["fast", "full"]
Scale = Literal["pow2", "float32"]
WeightCopies = Literal["one", "both"]
Granularity = Literal["tensor", "row", "block"]


class TCFPMode(enum.Enum):
    """What a recipe's weights are: BF16, one FP8 tensor, or TCFP-12's two.

    >>> recipe("tcfp12").mode, recipe("tensorwise").mode
    (<TCFPMode.TCFP12: 'tcfp12'>, <TCFPMode.FP8: 'fp8'>)
    """

    BF16 = "bf16"
    FP8 = "fp8"
    TCFP12 = "tcfp12"


@dataclass(frozen=True)
class Recipe:
    """How a layer multiplies. The defaults are `recipe("tcfp12")`.

    Attributes:
      activation_dtype: format of x in every product. "bfloat16" with FP8 weights quantizes the weights only and
        multiplies their BF16 values.
      weight_dtype: format of `W_hi` and `W_lo`.
      gradient_dtype: format of the output's gradient g in dgrad and (with `wgrad="fp8"`) wgrad.
      residual: how `W_lo` is rounded; "none" stores no `W_lo`. "stochastic" (SRR) makes E[W_hi + W_lo] = W and needs
        a key and no error buffer.
      forward_weight: "dual" multiplies by `W_hi + W_lo` in the forward product, "single" by `W_hi`.
      dgrad_weight: the same for dgrad; "single" is the PyTorch original's ABD, one FP8 product less.
      wgrad: "fp8" multiplies the quantized x and g (x is kept for the backward pass in FP8), "bf16" keeps x in BF16.
      forward_accumulation, dgrad_accumulation, wgrad_accumulation: of the FP8 products on tensor cores, see
        `pallas_kernels.matmul.api.matmul`.
      scale: "pow2" scales, exact in multiplication, or "float32" (amax / largest value, the nanochat rule).
      granularity: what shares a scale. "tensor": all of it. "row": what one product sums for one output (rows of x and
        g, columns of W; anew for each product, torchao's "rowwise"). "block": `block` values, scales are E8M0.
      block: 32, 64 or 128 values along the contraction of each product; None without blocks.
      weight_tile: form of a weight's blocks: "square", block x block, which serves forward and dgrad with one
        quantization, or "vector", quantized once for each of them (OCP MX).
      residual_blocks: "nonzero" neither loads nor multiplies blocks of `W_lo` that are all zeros, for weights of which
        FP8 holds much exactly.
      forward_activation: "dual" splits x into two FP8 tensors as well and adds `x_lo W_hi` to the forward product, for
        an output of BF16's quality; the backward pass sees `x_hi` or, with `wgrad="bf16"`, x.
      error_feedback: `tcfp_jax.error_feedback` keeps what rounding left and adds it to the weight of the next step.
      delayed_scaling: weights are scaled by an amax carried in the optimizer's state (PDDS) instead of a fresh one.
      backend, quantize_backend: of the products, and of the quantizers (which have no "mosaic"); None is the fastest
        that was measured, see `pallas_kernels.dispatch`.
      weight_copies: quantized weights in the optimizer's state in "one" orientation, `[k, n]`, or in "both", which
        doubles their bytes and saves the forward product a transpose on GPUs.

    Raises:
      ValueError: a field has an unknown value, or two fields contradict each other; the message says which.

    >>> Recipe() == recipe("tcfp12")
    True
    """

    activation_dtype: Format = "float8_e4m3fn"
    weight_dtype: Format = "float8_e4m3fn"
    gradient_dtype: Format = "float8_e4m3fn"
    residual: Residual = "nearest"
    forward_weight: WeightForm = "dual"
    dgrad_weight: WeightForm = "dual"
    wgrad: WeightGradient = "bf16"
    forward_accumulation: Accumulation = "fast"
    dgrad_accumulation: Accumulation = "full"
    wgrad_accumulation: Accumulation = "full"
    scale: Scale = "pow2"
    granularity: Granularity = "tensor"
    block: int | None = None
    weight_tile: Tile = "square"
    residual_blocks: ResidualBlocks = "all"
    forward_activation: WeightForm = "single"
    error_feedback: bool = True
    delayed_scaling: bool = False
    backend: Backend | None = None
    quantize_backend: Backend | None = None
    weight_copies: WeightCopies = "both"

    def __post_init__(self) -> None:
        _check_choices(self)
        for backend in (self.backend, self.quantize_backend):
            check_backend(backend)
        for broken, message in _contradictions(self):
            if broken:
                raise ValueError(message)

    @property
    def mode(self) -> TCFPMode:
        """The form of the weights."""
        if self.weight_dtype == "bfloat16":
            return TCFPMode.BF16
        return TCFPMode.FP8 if self.residual == "none" else TCFPMode.TCFP12

    @classmethod
    def from_flags(
        cls,
        use_tensor_cores: bool = True,
        delayed_scaling: bool = False,
        scale_block_size: int | None = None,
        use_fused_kernel: bool = False,
        use_cuda_ext: bool = True,
        error_feedback: bool = True,
        hp_grad_weight: bool = False,
        srr: bool = False,
        abd: bool = False,
    ) -> "Recipe":
        """The recipe that the flags of the PyTorch TCFP's layers describe; README has the table.

        Raises:
          ValueError: flags that contradict each other, such as `srr=True` with `error_feedback=True`, or a
            `scale_block_size` other than 32, 64 and 128.

        >>> Recipe.from_flags(abd=True).dgrad_weight
        'single'
        """
        products: dict[str, Any] = {"wgrad": "bf16" if hp_grad_weight else "fp8"}
        if not use_tensor_cores:
            products = {"activation_dtype": "bfloat16", "gradient_dtype": "bfloat16", "wgrad": "bf16"}
        if scale_block_size is not None:
            products |= {"granularity": "block", "block": scale_block_size, "forward_accumulation": "full"}
        return cls(
            **products,
            residual="stochastic" if srr else "nearest",
            dgrad_weight="single" if abd else "dual",
            error_feedback=error_feedback,
            delayed_scaling=delayed_scaling,
            backend=None if use_cuda_ext else "triton" if use_fused_kernel else "xla",
        )


def _check_choices(built: Recipe) -> None:
    choices = {
        "activation_dtype": Format, "weight_dtype": Format, "gradient_dtype": Format, "residual": Residual,
        "forward_weight": WeightForm, "dgrad_weight": WeightForm, "wgrad": WeightGradient,
        "forward_accumulation": Accumulation, "dgrad_accumulation": Accumulation, "wgrad_accumulation": Accumulation,
        "scale": Scale, "weight_copies": WeightCopies, "granularity": Granularity, "weight_tile": Tile,
        "forward_activation": WeightForm, "residual_blocks": ResidualBlocks,
    }  # fmt: skip
    for name, allowed in choices.items():
        if getattr(built, name) not in get_args(allowed):
            raise ValueError(f"{name}={getattr(built, name)!r} is unknown; use one of {list(get_args(allowed))}")
    for name in ("error_feedback", "delayed_scaling"):
        if not isinstance(getattr(built, name), bool):
            raise ValueError(f"{name}={getattr(built, name)!r} is not a bool; use True or False")
    if built.block is not None:
        check_block(built.block, built.weight_tile)


def _contradictions(r: Recipe) -> list[tuple[bool, str]]:
    """(is it broken, what to say) of every rule between fields, in the order in which they are explained best."""
    bf16_weight, bf16_activation = r.weight_dtype == "bfloat16", r.activation_dtype == "bfloat16"
    dual = "dual" in (r.forward_weight, r.dgrad_weight)
    return [
        *_scale_contradictions(r),
        (
            bf16_weight and not (bf16_activation and r.residual == "none" and not r.error_feedback),
            'weight_dtype="bfloat16" leaves nothing to quantize, but other fields ask for FP8; use recipe("bf16")',
        ),
        (
            bf16_activation != (r.gradient_dtype == "bfloat16"),
            f"activation_dtype={r.activation_dtype!r} and gradient_dtype={r.gradient_dtype!r}: a product has either "
            "two BF16 or two FP8 operands; set both to bfloat16 or both to an FP8 format",
        ),
        (
            bf16_activation and r.wgrad == "fp8",
            'activation_dtype="bfloat16" with wgrad="fp8": the weight gradient has no FP8 operands; use wgrad="bf16"',
        ),
        (
            r.wgrad == "fp8" and r.activation_dtype == r.gradient_dtype == "float8_e5m2",
            'activation_dtype and gradient_dtype are both "float8_e5m2", which no tensor core multiplies; '
            'make one of them "float8_e4m3fn" or use wgrad="bf16"',
        ),
        (
            r.weight_dtype == "float8_e5m2" and "float8_e5m2" in (r.activation_dtype, r.gradient_dtype),
            'weight_dtype and activation_dtype or gradient_dtype are both "float8_e5m2", which no tensor core '
            'multiplies; use weight_dtype="float8_e4m3fn"',
        ),
        (
            r.residual == "none" and dual,
            f'residual="none" leaves no W_lo, but forward_weight={r.forward_weight!r} and '
            f'dgrad_weight={r.dgrad_weight!r}; set both to "single" or store a residual',
        ),
        (
            r.residual != "none" and not dual,
            f'residual={r.residual!r} stores a W_lo that no product reads; make forward_weight or dgrad_weight "dual" '
            'or use residual="none"',
        ),
        (
            r.residual != "none" and r.scale == "float32",
            f'residual={r.residual!r} with scale="float32": W_lo is exact only under a power-of-two scale; '
            'use scale="pow2"',
        ),
        (
            r.residual == "stochastic" and r.error_feedback,
            'residual="stochastic" (srr) with error_feedback=True: stochastic rounding is unbiased and keeps no error '
            'buffer; set error_feedback=False or use residual="nearest"',
        ),
        (
            r.residual == "stochastic" and r.delayed_scaling,
            'residual="stochastic" (srr) with delayed_scaling=True: a value clipped by a stale scale would bias it; '
            "set delayed_scaling=False",
        ),
        (
            bf16_weight and r.delayed_scaling,
            'weight_dtype="bfloat16" has no scale to delay; set delayed_scaling=False',
        ),
    ]


def _scale_contradictions(r: Recipe) -> list[tuple[bool, str]]:
    """The rules about what shares a scale."""
    blocks, tensor = r.granularity == "block", r.granularity == "tensor"
    two_quantizations = r.granularity == "row" or r.weight_tile == "vector"
    kind = f'granularity="{r.granularity}"' + (f" with weight_tile={r.weight_tile!r}" if blocks else "")
    return [
        (
            blocks and r.block is None,
            f'granularity="block" needs block={BLOCKS[0]}, {BLOCKS[1]} or {BLOCKS[2]}; got block=None',
        ),
        (
            not blocks and r.block is not None,
            f'block={r.block} with granularity={r.granularity!r}, which has no blocks; use granularity="block" or '
            "block=None",
        ),
        (
            not blocks and r.weight_tile == "vector",
            f'weight_tile="vector" with granularity={r.granularity!r}, which has no blocks; use granularity="block"',
        ),
        (
            r.residual_blocks == "nonzero" and not (blocks and r.residual != "none"),
            f'residual_blocks="nonzero" with granularity={r.granularity!r} and residual={r.residual!r}: only a W_lo in '
            'blocks has blocks to leave out; use residual_blocks="all" or recipe("tcfp12_blockwise")',
        ),
        (
            blocks and r.scale == "float32",
            'scale="float32" with granularity="block": the scales of blocks are powers of two, E8M0; use scale="pow2" '
            'or granularity="tensor"',
        ),
        (
            blocks and "fast" in (r.forward_accumulation, r.dgrad_accumulation, r.wgrad_accumulation),
            f'granularity="block" with forward_accumulation={r.forward_accumulation!r}, dgrad_accumulation='
            f"{r.dgrad_accumulation!r} and wgrad_accumulation={r.wgrad_accumulation!r}: a product is promoted to "
            'float32 where its blocks are scaled; make all three "full"',
        ),
        (
            not tensor and r.weight_dtype == "bfloat16",
            f'granularity={r.granularity!r} with weight_dtype="bfloat16", which has no scale; use granularity="tensor"',
        ),
        (
            two_quantizations and r.residual != "none",
            f"residual={r.residual!r} with {kind}: forward and dgrad have two quantizations of the weight, and no one "
            'residual belongs to both; use residual="none" or square blocks',
        ),
        (
            two_quantizations and r.error_feedback,
            f"error_feedback=True with {kind}: forward and dgrad have two quantizations of the weight, which leave two "
            "errors; use error_feedback=False or square blocks",
        ),
        (
            two_quantizations and r.weight_copies == "one",
            f'weight_copies="one" with {kind}: each product reads a quantization of its own; use weight_copies="both"',
        ),
        (
            not tensor and r.delayed_scaling,
            f"delayed_scaling=True with granularity={r.granularity!r}: only whole tensors carry an amax; use "
            'granularity="tensor" or delayed_scaling=False',
        ),
        (
            r.forward_activation == "dual" and not (tensor and r.scale == "pow2" and r.residual != "none"),
            f'forward_activation="dual" with granularity={r.granularity!r}, scale={r.scale!r} and '
            f"residual={r.residual!r}: it needs whole tensors, power-of-two scales and a weight of two tensors; start "
            'from recipe("residual_activation")',
        ),
        (
            r.forward_activation == "dual" and (r.activation_dtype == "bfloat16" or r.forward_weight == "single"),
            f'forward_activation="dual" with activation_dtype={r.activation_dtype!r} and '
            f"forward_weight={r.forward_weight!r}: it adds to the FP8 products of a dual weight; use "
            'forward_activation="single"',
        ),
    ]


_BF16 = Recipe(
    activation_dtype="bfloat16", weight_dtype="bfloat16", gradient_dtype="bfloat16", residual="none",
    forward_weight="single", dgrad_weight="single", wgrad="bf16", error_feedback=False,
)  # fmt: skip
_TCFP12 = Recipe()
_SINGLE: dict[str, Any] = dict(
    residual="none", forward_weight="single", dgrad_weight="single", wgrad="fp8", error_feedback=False
)
_NAMED = {
    "bf16": _BF16,
    "tcfp12": _TCFP12,
    "tcfp12_fast": dataclasses.replace(
        _TCFP12, dgrad_weight="single", wgrad="fp8", dgrad_accumulation="fast", wgrad_accumulation="fast"
    ),
    "residual_activation": dataclasses.replace(_TCFP12, forward_activation="dual", forward_accumulation="full"),
    "tensorwise": Recipe(**_SINGLE, gradient_dtype="float8_e5m2"),
    "rowwise": Recipe(**_SINGLE, granularity="row", dgrad_accumulation="fast", wgrad_accumulation="fast"),
    "blockwise": Recipe(**_SINGLE, granularity="block", block=128, forward_accumulation="full"),
    "tcfp12_blockwise": Recipe(granularity="block", block=128, wgrad="fp8", forward_accumulation="full"),
    "mxfp8": Recipe(**_SINGLE, granularity="block", block=32, weight_tile="vector", forward_accumulation="full"),
}


NAMES = tuple(_NAMED)


def recipe(name: str | Recipe, **overrides: Any) -> Recipe:
    """A named recipe, with fields replaced.

    "bf16": BF16 operands, the baseline. "tcfp12": `W_hi + W_lo` forward and in dgrad, BF16 weight gradient.
    "tcfp12_fast": `W_hi + W_lo` forward, `W_hi` in dgrad, FP8 weight gradient: four FP8 products, all with fast
    accumulation, instead of BF16's three. "residual_activation": `W_hi + W_lo` times `x_hi + x_lo` without their
    smallest product, for an output of BF16's quality. One FP8 product each: "tensorwise", E4M3 forward and E5M2
    gradients (with `scale="float32"` nanochat's rule); "rowwise", a scale for each row of x and column of W, torchao's;
    "blockwise", a scale for every 128 values of x and square of W (`block=`); "mxfp8", OCP MX with vectors of 32.
    "tcfp12_blockwise" is "blockwise" with `W_hi + W_lo`.

    Raises:
      ValueError: an unknown name or field value, or fields that contradict each other.
      TypeError: a field that `Recipe` does not have.

    >>> recipe("tcfp12", wgrad="fp8").wgrad
    'fp8'
    """
    if isinstance(name, Recipe):
        return dataclasses.replace(name, **overrides)
    if name not in _NAMED:
        raise ValueError(f"recipe {name!r} is unknown; use one of {list(_NAMED)} or build a Recipe")
    return dataclasses.replace(_NAMED[name], **overrides)
