"""`Recipe`, the forms of weight that it names, and the rules between its fields."""

import enum
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args, get_origin, get_type_hints

from pallas_kernels.checks import check_choice
from pallas_kernels.dispatch import Backend, check_backend
from pallas_kernels.operands import Block, Scaling, Tensor
from pallas_kernels.wire import Wire, check_wire

Float8 = Literal["float8_e4m3fn", "float8_e5m2"]
Float8OrFloat4 = Literal["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
# The parts of W_hi + W_lo that a product reads.
Halves = Literal["hi", "hi+lo"]
# How a product multiplies: FP8 with the accumulation of that name, or BF16.
Arithmetic = Literal["fast", "full", "bf16"]
# Treatment of a weight's rounding error.
Remainder = Literal["feedback", "stochastic", "dropped"]
# How many orientations of a weight the optimizer's state holds.
Copies = Literal["one", "both"]


# The fields of the three products.
PRODUCTS = ("forward", "dgrad", "wgrad")


class TCFPMode(enum.StrEnum):
    """The form of weights: BF16, packed FP4 codes, one FP8 tensor, or TCFP-12's two.

    Use this to ask which kind of recipe you hold, by `Recipe.mode`. Every function that
    takes a recipe takes a mode, too: BF16 and TCFP12 are recipes of that name, FP8 is
    "tensorwise" and FP4 is "nvfp4".

    >>> from tcfp_jax.recipes import recipe
    >>> recipe("tcfp12").mode, recipe("nvfp4").mode
    (<TCFPMode.TCFP12: 'tcfp12'>, <TCFPMode.FP4: 'fp4'>)
    """

    BF16 = "bf16"
    FP4 = "fp4"
    FP8 = "fp8"
    TCFP12 = "tcfp12"


class _Checked:
    """A dataclass whose fields of a `Literal` type must have one of its values."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                check_choice(name, getattr(self, name), get_args(hint))


@dataclass(frozen=True)
class Single(_Checked):
    """A weight as one FP8 tensor, or as packed FP4 codes.

    Use this when three bits of mantissa are enough for the weight in every product, or
    to serve a model from four bits per weight.

    Attributes:
      dtype: the format; "float4_e2m1fn" needs `scaling=Fp4(...)`.
      remainder: "dropped" forgets the rounding error; "feedback" adds it at the next
        step (`tcfp_jax.error_feedback`).
    """

    dtype: Float8OrFloat4 = "float8_e4m3fn"
    remainder: Literal["feedback", "dropped"] = "dropped"

    # The fields of `Dual` that a single tensor leaves no choice for.
    forward: ClassVar[Halves] = "hi"
    dgrad: ClassVar[Halves] = "hi"
    blocks: ClassVar[Literal["all", "nonzero"]] = "all"
    sparse_threshold: ClassVar[float] = 0.0


@dataclass(frozen=True)
class Dual(_Checked):
    """A weight as two FP8 tensors that share their scales, `W ~ (W_hi + W_lo) s`.

    Use this when one FP8 tensor loses too much of the weight: both together are about
    as exact as BF16.

    Attributes:
      dtype: the format of both tensors.
      remainder: "feedback" adds the rounding error to the weight of the next step, by
        `tcfp_jax.error_feedback`. "stochastic" rounds `W_lo` so that E[W_hi + W_lo] = W
        (SRR), with a key and no buffer. "dropped" forgets it.
      forward, dgrad: the halves that each product reads. "hi" in dgrad is the
        original's ABD: one FP8 product less.
      blocks: "nonzero" skips blocks of `W_lo` that are all zeros. Use it for weights
        that FP8 holds mostly exactly.
      sparse_threshold: with "nonzero", FP8 products also skip blocks of `W_lo` whose
        largest magnitude is at most this. The stored weight keeps them.
    """

    dtype: Float8 = "float8_e4m3fn"
    remainder: Remainder = "feedback"
    forward: Halves = "hi+lo"
    dgrad: Halves = "hi+lo"
    blocks: Literal["all", "nonzero"] = "all"
    sparse_threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold = self.sparse_threshold
        is_number = isinstance(threshold, numbers.Real) and threshold is not True
        if not is_number or not 0 <= threshold < math.inf:
            raise ValueError(
                f"sparse_threshold={threshold!r} is a magnitude of weights; use 0 or a"
                " positive, finite number"
            )
        if threshold and self.blocks == "all":
            raise ValueError(
                f'sparse_threshold={threshold} with blocks="all": only products that'
                ' skip blocks of zeros drop small ones; use blocks="nonzero"'
            )


@dataclass(frozen=True)
class Fp4Training(_Checked):
    """Emulation of FP4 training: products round weight, x and g to NVFP4.

    The weight stays a float parameter. The rounded numbers are exact in BF16, so BF16
    products multiply them. Use this to find out how a model learns in FP4; it saves
    neither time nor memory. See `tcfp_jax.products.fp4_training`.

    Attributes:
      forward_operands: "fp4", or "bf16" for the forward product alone. NVIDIA ends a
        training with "bf16": the last tenth of it closes most of the gap to BF16.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4".
    """

    forward_operands: Literal["fp4", "bf16"] = "fp4"


@dataclass(frozen=True)
class Recipe(_Checked):
    """How a layer multiplies. The defaults are `recipe("tcfp12")`.

    Use this when no named recipe fits and overrides of one would be longer; usually
    `recipe(name, **overrides)` is shorter.

    Attributes:
      weight: `Dual(...)` or `Single(...)`, in which the weight is stored;
        `Fp4Training(...)`, which rounds a float weight at each product; or None for
        BF16.
      scaling: which values share a scale. `Tensor()` is one for all. `Row()` has
        one for each row of x and g and for each column of W, anew for each product.
        `Block(size, tile)` has one for each block; `tile` is the form of a weight's
        blocks, and x and g have vectors. `Fp4(format, tile, rule)` is for a weight in
        float4_e2m1fn, whose codes serve both products.
      activation: the format of x in products that round it to fewer bits than BF16.
        "float4_e2m1fn" is for the forward product with an NVFP4 weight: x is NVFP4,
        too.
      gradient: the format of the output's gradient g in FP8 products.
      forward, dgrad, wgrad: how each product multiplies. "fast" and "full" are FP8 with
        that accumulation (see `pallas_kernels.matmul.api.matmul`). "bf16" multiplies
        BF16 values, also of a stored weight.
      amax: weights are scaled by a "fresh" amax, or by a "delayed" one from the
        optimizer's state (PDDS).
      copies: the orientations of a weight in the optimizer's state. "one" is `[k, n]`.
        "both" doubles the bytes and saves the forward product a transpose on GPUs.
      backend, quantize_backend: the implementation of products and of quantizers. None
        takes the fastest that was measured.
      wire: the dtype in which devices add weight gradients, see `pallas_kernels.wire`.
        None is the gradient's own.
      storage: "packed" is for BF16 products: they read the float weight rounded to the
        packed TCFP-12 format (12.5 bits, a residual of NF4, blocks along k), and the
        gradient is straight-through. It simulates that format, and saves no time.

    Raises:
      ValueError: a field has an unknown value, or two fields contradict each other.

    >>> from tcfp_jax.recipes import recipe
    >>> Recipe() == recipe("tcfp12")
    True
    """

    weight: Single | Dual | Fp4Training | None = Dual()
    scaling: Scaling = Tensor()
    activation: Float8OrFloat4 = "float8_e4m3fn"
    gradient: Float8 = "float8_e4m3fn"
    forward: Arithmetic = "fast"
    dgrad: Arithmetic = "full"
    wgrad: Arithmetic = "bf16"
    amax: Literal["fresh", "delayed"] = "fresh"
    copies: Copies = "both"
    backend: Backend | None = None
    quantize_backend: Backend | None = None
    wire: Wire | None = None
    storage: Literal["float", "packed"] = "float"

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Single | Dual | Fp4Training | None):
            raise ValueError(
                f"weight={self.weight!r} is unknown; use Dual(...), Single(...),"
                " Fp4Training(...) or None for BF16"
            )
        if not isinstance(self.scaling, Scaling):
            raise ValueError(
                f"scaling={self.scaling!r} is unknown; use Tensor(), Row(), Block(size,"
                " tile) or Fp4()"
            )
        super().__post_init__()
        for backend in (self.backend, self.quantize_backend):
            check_backend(backend)
        check_wire(self.wire)
        for rules in RULES:
            for contradiction in rules(self):
                raise ValueError(contradiction)

    @functools.cached_property
    def stored(self) -> Single | Dual | None:
        """The form of the stored weight, or None if products read the float weight.

        Use this to read the form's fields; use `Recipe.weight` if emulated FP4 training
        matters too.
        """
        return None if isinstance(self.weight, Fp4Training) else self.weight

    @functools.cached_property
    def fp4(self) -> Fp4Training | None:
        """The emulation of FP4 training, or None.

        Use this to ask whether products draw random bits and store nothing.
        """
        return self.weight if isinstance(self.weight, Fp4Training) else None

    @functools.cached_property
    def mode(self) -> TCFPMode:
        """The form of the weights."""
        if self.stored is None:
            return TCFPMode.BF16
        if self.scaling.packed:
            return TCFPMode.FP4
        return TCFPMode.TCFP12 if isinstance(self.weight, Dual) else TCFPMode.FP8

    @functools.cached_property
    def stochastic(self) -> bool:
        """True if weights are rounded stochastically, which needs a random key.

        Use this to decide whether `tcfp_jax.error_feedback` or a product needs `key=`.
        """
        return isinstance(self.weight, Dual) and self.weight.remainder == "stochastic"

    @functools.cached_property
    def draws(self) -> bool:
        """True if gradients draw random bits, which needs a key: FP4 training does.

        Use this to decide whether each step of training needs a random key.
        """
        return self.fp4 is not None

    @functools.cached_property
    def feedback(self) -> bool:
        """True if the optimizer keeps the rounding error of a weight.

        Use this to ask whether `tcfp_jax.error_feedback` keeps an error buffer.
        """
        return self.stored is not None and self.stored.remainder == "feedback"

    @classmethod
    def from_flags(
        cls,
        use_tensor_cores: bool = True,
        delayed_scaling: bool = False,
        scale_block_size: int | None = None,
        use_fused_kernel: bool = False,
        use_cuda_ext: bool = True,
        error_feedback: bool | None = None,
        hp_grad_weight: bool = False,
        srr: bool = False,
        abd: bool = False,
    ) -> "Recipe":
        """Return the recipe of the nine flags of the PyTorch TCFP's layers.

        Use this to move a script from there; the migration guide has the table. Use
        `recipe` in new code. `error_feedback=None` is True, unless `srr` replaces it.
        Flags that the original ignores next to others are ignored here, with a warning.

        Raises:
          ValueError: flags contradict each other or are not bools, or
            `scale_block_size` is not 32, 64 or 128.

        >>> Recipe.from_flags(abd=True).weight.dgrad
        'hi'
        """
        for name, flag in list(locals().items()):
            may_be_none = name == "error_feedback" and flag is None
            is_flag = name not in ("cls", "scale_block_size")
            if is_flag and not may_be_none and not isinstance(flag, bool):
                # "false" of a file of settings would be true.
                raise ValueError(
                    f"{name}={flag!r} is a {type(flag).__name__}; use True or False"
                )
        if srr and error_feedback:
            raise ValueError(
                "srr=True with error_feedback=True: stochastic rounding is unbiased and"
                " keeps no error buffer; set error_feedback=False or srr=False"
            )
        blocks = None if scale_block_size is None else Block(scale_block_size)
        if not use_tensor_cores:
            for name, is_given in (
                ("delayed_scaling", delayed_scaling),
                ("scale_block_size", blocks is not None),
                ("abd", abd),
                ("srr", srr),
            ):
                if is_given:
                    _warn_of_flag(name, "use_tensor_cores=False")
            return cls(None, forward="bf16", dgrad="bf16", storage="packed")
        if delayed_scaling and (blocks is not None or srr):
            other = "srr=True" if srr else f"scale_block_size={scale_block_size}"
            _warn_of_flag("delayed_scaling", other)
            delayed_scaling = False
        remainder: Remainder = "dropped" if error_feedback is False else "feedback"
        backend: Backend | None = "triton" if use_fused_kernel else "xla"
        return cls(
            weight=Dual(
                remainder="stochastic" if srr else remainder,
                dgrad="hi" if abd else "hi+lo",
            ),
            scaling=blocks or Tensor(),
            # Partial sums are promoted to float32 where blocks are scaled, so block
            # products accumulate in full.
            forward="full" if blocks else "fast",
            dgrad="full",
            wgrad="bf16" if hp_grad_weight else "full",
            amax="delayed" if delayed_scaling else "fresh",
            backend=None if use_cuda_ext else backend,
        )


def _warn_of_flag(name: str, other: str) -> None:
    """Warn that a flag of `from_flags` has no effect next to another one."""
    warnings.warn(
        f"{name} is ignored with {other}, as in PyTorch TCFP; drop one of them",
        stacklevel=3,
    )


def _fp8_products(r: Recipe) -> list[str]:
    return [name for name in PRODUCTS if getattr(r, name) != "bf16"]


def _of_products(r: Recipe) -> str:
    return f"forward={r.forward!r}, dgrad={r.dgrad!r}, wgrad={r.wgrad!r}"


def _in_e5m2_twice(r: Recipe) -> list[str]:
    """Return the FP8 products whose operands are both E5M2."""
    of_weight = r.stored and r.stored.dtype
    operands = {
        "forward": {r.activation, of_weight},
        "dgrad": {r.gradient, of_weight},
        "wgrad": {r.activation, r.gradient},
    }
    return [name for name in _fp8_products(r) if operands[name] == {"float8_e5m2"}]


def _contradictions_of_fp4(r: Recipe) -> Iterator[str]:
    """Yield the broken rules of four-bit weights and of FP4 training."""
    packed = r.scaling.packed
    if packed != (r.stored is not None and r.stored.dtype == "float4_e2m1fn"):
        yield (
            f"weight={r.weight} with scaling={r.scaling}: codes of four bits and the"
            ' scales of FP4 belong together; use weight=Single("float4_e2m1fn") with'
            ' scaling=Fp4(...), or recipe("nvfp4") or recipe("mxfp4")'
        )
    if packed and "fast" in (r.forward, r.dgrad):
        yield (
            f"forward={r.forward!r} and dgrad={r.dgrad!r} with scaling={r.scaling}:"
            ' products with FP4 add in float32; use "full" for E4M3 activations or'
            ' gradients, or "bf16"'
        )
    in_nvfp4 = getattr(r.scaling, "format", None) == "nvfp4"
    if r.activation == "float4_e2m1fn" and not (
        in_nvfp4 and r.forward == "full" and r.wgrad == "bf16"
    ):
        yield (
            f'activation="float4_e2m1fn" with scaling={r.scaling},'
            f" forward={r.forward!r} and wgrad={r.wgrad!r}: NVFP4 activations are"
            " multiplied by NVFP4 weights, in the forward product alone; use"
            ' recipe("nvfp4", activation="float4_e2m1fn"), or'
            ' activation="float8_e4m3fn"'
        )
    for name, how in (("activation", r.forward), ("gradient", r.dgrad)):
        dtype = getattr(r, name)
        if packed and how == "full" and dtype == "float8_e5m2":
            yield (
                f"{name}={dtype!r} with scaling={r.scaling}: 8-bit operands next to"
                " FP4 are E4M3 with a scale for each row; use"
                f' {name}="float8_e4m3fn", or "bf16" for that product'
            )
    others = (r.wire, r.quantize_backend, r.amax)
    if r.fp4 is not None and (_fp8_products(r) or others != (None, None, "fresh")):
        yield (
            f"weight={r.weight} with {_of_products(r)}, wire={r.wire!r},"
            f" quantize_backend={r.quantize_backend!r} and amax={r.amax!r}: FP4"
            " training quantizes a float weight at each product, by the format"
            ' library, and adds in float32; use "bf16" for all three products and'
            " leave the other fields unset"
        )


def _contradictions_of_products(r: Recipe) -> Iterator[str]:
    """Yield the broken rules of the three products and their operands."""
    in_fp8 = _fp8_products(r)
    if r.stored is None and (in_fp8 or r.amax == "delayed" or r.scaling != Tensor()):
        yield (
            f"weight={r.weight} stores nothing in FP8, but"
            f" {', '.join(in_fp8) or 'amax or scaling'} asks for it; use"
            ' weight=Single() or Dual(), or recipe("bf16") without overrides'
        )
    if r.storage == "packed" and r.weight is not None:
        yield (
            f'storage="packed" with weight={r.weight}: products round a float weight to'
            ' the packed format; use recipe("bf16", storage="packed"), or leave storage'
        )
    x_and_g_in_bf16 = "bf16" in (r.forward, r.dgrad)
    if r.wgrad != "bf16" and x_and_g_in_bf16 and not r.scaling.packed:
        yield (
            f"{_of_products(r)}: wgrad multiplies the x and g that the other two"
            ' quantized; use wgrad="bf16", or "fast" or "full" for all three'
        )
    twice = _in_e5m2_twice(r)
    if twice:
        yield (
            f"{' and '.join(twice)} would multiply float8_e5m2 x"
            " float8_e5m2, which no tensor core does; make one of weight.dtype,"
            " activation and gradient float8_e4m3fn"
        )


def _contradictions_of_scaling(r: Recipe) -> Iterator[str]:
    """Yield the broken rules of scales, residuals and amax."""
    if isinstance(r.weight, Dual) and r.scaling.scale == "float32":
        yield (
            f"weight={r.weight} with scaling={r.scaling}: W_lo is exact only under a"
            ' power-of-two scale; use scale="pow2", or weight=Single()'
        )
    # One residual, error or copy of the weight serves both forward and dgrad.
    shared = isinstance(r.weight, Dual) or r.feedback or r.copies == "one"
    if r.stored is not None and shared and not r.scaling.serves_both:
        yield (
            f"weight={r.weight} and copies={r.copies!r} with scaling={r.scaling}:"
            " forward and dgrad have two quantizations of the weight, so no residual,"
            ' error or copy serves both; use weight=Single() with copies="both", or'
            " square blocks"
        )
    blocks = r.scaling.in_blocks
    if blocks and "fast" in (r.forward, r.dgrad, r.wgrad):
        yield (
            f"scaling={r.scaling} with {_of_products(r)}: a product is promoted to"
            ' float32 where its blocks are scaled; use "full" for "fast"'
        )
    if r.amax == "delayed" and (r.stochastic or not isinstance(r.scaling, Tensor)):
        yield (
            f'amax="delayed" with scaling={r.scaling} and weight={r.weight}: only whole'
            " tensors carry an amax, and a value that an old scale clips would bias"
            ' stochastic rounding; use amax="fresh"'
        )
    if r.stored is not None and r.stored.blocks == "nonzero" and not blocks:
        threshold = r.stored.sparse_threshold
        yield (
            f'blocks="nonzero" and sparse_threshold={threshold} with'
            f" scaling={r.scaling}: only a W_lo in blocks has blocks to skip; use"
            ' blocks="all" or recipe("tcfp12_blockwise", sparse_threshold=...)'
        )


# The rules between fields, in the order in which they explain best.
RULES: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    _contradictions_of_fp4,
    _contradictions_of_products,
    _contradictions_of_scaling,
)
