"""`Recipe`: one frozen, hashable description of how a layer multiplies. It is passed whole, and nothing else is.

A layer `y = x W` has three products: the forward `x W`, the input gradient `g Wᵀ` (dgrad) and the weight gradient
`xᵀ g` (wgrad). A recipe is made of values that hold what belongs together: the form of the stored weight, the scaling
of everything that is quantized, and one choice for each product. What cannot be said cannot contradict itself; the few
rules that are left raise when a recipe is built, and no setting is changed on the user's behalf.

    recipe("tcfp12", wgrad="fast", block=128)         a named recipe, with overrides, see `recipe`
    Recipe(weight=Single(), dgrad="fast", ...)        from its parts
"""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pallas_kernels.dispatch import Backend, check_backend
from pallas_kernels.operands import Block, Row, Scaling, Tensor
from pallas_kernels.wire import Wire, check_wire

Format = Literal["float8_e4m3fn", "float8_e5m2"]
Halves = Literal["hi", "hi+lo"]
Product = Literal["fast", "full", "bf16"]
Remainder = Literal["feedback", "stochastic", "dropped"]
Blocks = Literal["all", "nonzero"]
Amax = Literal["fresh", "delayed"]
Copies = Literal["one", "both"]


class TCFPMode(enum.Enum):
    """What a recipe's weights are: BF16, one FP8 tensor, or TCFP-12's two.

    >>> recipe("tcfp12").mode, recipe("tensorwise").mode
    (<TCFPMode.TCFP12: 'tcfp12'>, <TCFPMode.FP8: 'fp8'>)
    """

    BF16 = "bf16"
    FP8 = "fp8"
    TCFP12 = "tcfp12"


def _check_choices(value: Any, **choices: Any) -> None:
    for name, allowed in choices.items():
        if getattr(value, name) not in get_args(allowed):
            raise ValueError(f"{name}={getattr(value, name)!r} is unknown; use one of {list(get_args(allowed))}")


@dataclass(frozen=True)
class Single:
    """A weight as one FP8 tensor.

    Attributes:
      dtype: its format.
      remainder: what becomes of what rounding leaves: "dropped", or "feedback", added to the weight of the next step
        by `tcfp_jax.error_feedback`.
    """

    dtype: Format = "float8_e4m3fn"
    remainder: Literal["feedback", "dropped"] = "dropped"

    # What `Dual` chooses is given here.
    forward: ClassVar[Halves] = "hi"
    dgrad: ClassVar[Halves] = "hi"
    blocks: ClassVar[Blocks] = "all"

    def __post_init__(self) -> None:
        _check_choices(self, dtype=Format, remainder=Literal["feedback", "dropped"])


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
        _check_choices(self, dtype=Format, remainder=Remainder, forward=Halves, dgrad=Halves, blocks=Blocks)

    @property
    def reads_lo(self) -> bool:
        """Whether a product reads `W_lo`; otherwise it only makes the stored weight precise."""
        return "hi+lo" in (self.forward, self.dgrad)


@dataclass(frozen=True)
class Recipe:
    """How a layer multiplies. The defaults are `recipe("tcfp12")`.

    Attributes:
      weight: `Dual(...)`, `Single(...)`, or None for BF16.
      scaling: which values share a scale: `Tensor()`, `Row()` (of x and g, columns of W, anew for each product) or
        `Block(size, tile)`, where `tile` is the form of a weight's blocks; those of x and g are vectors.
      activation: format of x in FP8 products.
      gradient: format of the output's gradient g in FP8 products.
      forward, dgrad, wgrad: how each product multiplies: "fast" and "full" are FP8 with that accumulation (see
        `pallas_kernels.matmul.api.matmul`), "bf16" multiplies BF16 values, those of the stored weight if there is one.
      activation_halves: "hi+lo" splits x into two FP8 tensors as well and adds `x_lo W_hi` to the forward product, for
        an output of BF16's quality; dgrad and wgrad see `x_hi` or, with `wgrad="bf16"`, x.
      amax: weights are scaled by a "fresh" amax, or by a "delayed" one that the optimizer's state carries (PDDS).
      copies: quantized weights in the optimizer's state in "one" orientation, `[k, n]`, or in "both", which doubles
        their bytes and saves the forward product a transpose on GPUs.
      wire: how devices that share a batch add weight gradients, see `pallas_kernels.wire`; None: as their dtype.
      backend, quantize_backend: of products, and of quantizers (no "mosaic"); None is the fastest that was measured.

    Raises:
      ValueError: a field has an unknown value, or two fields contradict each other; the message says which.

    >>> Recipe() == recipe("tcfp12")
    True
    """

    weight: Single | Dual | None = Dual()
    scaling: Scaling = Tensor()
    activation: Format = "float8_e4m3fn"
    gradient: Format = "float8_e4m3fn"
    forward: Product = "fast"
    dgrad: Product = "full"
    wgrad: Product = "bf16"
    activation_halves: Halves = "hi"
    amax: Amax = "fresh"
    copies: Copies = "both"
    backend: Backend | None = None
    quantize_backend: Backend | None = None
    wire: Wire | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Single | Dual | None):
            raise ValueError(f"weight={self.weight!r} is unknown; use Dual(...), Single(...) or None for BF16")
        if not isinstance(self.scaling, Scaling):
            raise ValueError(f"scaling={self.scaling!r} is unknown; use Tensor(), Row() or Block(size, tile)")
        _check_choices(
            self, activation=Format, gradient=Format, forward=Product, dgrad=Product, wgrad=Product,
            activation_halves=Halves, amax=Amax, copies=Copies,
        )  # fmt: skip
        for backend in (self.backend, self.quantize_backend):
            check_backend(backend)
        check_wire(self.wire)
        for broken, message in _rules(self):
            if broken:
                raise ValueError(message)

    def __getattr__(self, name: str) -> Any:
        if name in _MOVED:
            raise AttributeError(f"Recipe.{name} is {_MOVED[name]} since version 0.2.0; the changelog has the table")
        raise AttributeError(f"Recipe has no attribute {name!r}")

    @property
    def mode(self) -> TCFPMode:
        """The form of the weights."""
        if self.weight is None:
            return TCFPMode.BF16
        return TCFPMode.TCFP12 if isinstance(self.weight, Dual) else TCFPMode.FP8

    @property
    def stochastic(self) -> bool:
        """Whether weights are rounded stochastically, which needs a random key."""
        return self.weight is not None and self.weight.remainder == "stochastic"

    @property
    def feedback(self) -> bool:
        """Whether the optimizer keeps what rounding left."""
        return self.weight is not None and self.weight.remainder == "feedback"

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
        """The recipe that the flags of the PyTorch TCFP's layers describe; the migration guide has the table.

        Raises:
          ValueError: flags that contradict each other, such as `srr=True` with `error_feedback=True`, or a
            `scale_block_size` other than 32, 64 and 128.

        >>> Recipe.from_flags(abd=True).weight.dgrad
        'hi'
        """
        if srr and error_feedback:
            raise ValueError(
                "srr=True with error_feedback=True: stochastic rounding is unbiased and keeps no error buffer; set "
                "error_feedback=False or srr=False"
            )
        remainder: Remainder = "stochastic" if srr else "feedback" if error_feedback else "dropped"
        products: dict[str, Any] = dict(wgrad="bf16" if hp_grad_weight else "full")
        if not use_tensor_cores:
            products = dict(forward="bf16", dgrad="bf16", wgrad="bf16")
        if scale_block_size is not None:
            products = dict(forward="full") | products | dict(scaling=Block(scale_block_size))
        return cls(
            weight=Dual(remainder=remainder, dgrad="hi" if abd else "hi+lo"),
            **products,
            amax="delayed" if delayed_scaling else "fresh",
            backend=None if use_cuda_ext else "triton" if use_fused_kernel else "xla",
        )


def _rules(r: Recipe) -> list[tuple[bool, str]]:
    """(whether it is broken, what to say) of every rule between fields, in the order in which they explain best."""
    weight, scaling = r.weight, r.scaling
    products = dict(forward=r.forward, dgrad=r.dgrad, wgrad=r.wgrad)
    fp8 = {name for name, how in products.items() if how != "bf16"}
    e5m2 = "float8_e5m2"
    operands = dict(
        forward=(r.activation, weight and weight.dtype), dgrad=(r.gradient, weight and weight.dtype),
        wgrad=(r.activation, r.gradient),
    )  # fmt: skip
    clash = sorted(name for name in fp8 if operands[name] == (e5m2, e5m2))
    dual = isinstance(weight, Dual)
    stored = weight is not None and (dual or weight.remainder == "feedback" or r.copies == "one")
    return [
        (
            weight is None and bool(fp8 or r.amax == "delayed" or scaling != Tensor()),
            f"weight=None stores nothing in FP8, but {', '.join(sorted(fp8)) or 'amax or scaling'} asks for it; use "
            'weight=Single() or Dual(), or recipe("bf16") without overrides',
        ),
        (
            "wgrad" in fp8 and fp8 != set(products),
            f"wgrad={r.wgrad!r} with forward={r.forward!r} and dgrad={r.dgrad!r}: it multiplies the x and g that those "
            'two quantized; use wgrad="bf16", or "fast" or "full" for all three',
        ),
        (
            bool(clash),
            f"{' and '.join(clash)} would multiply float8_e5m2 x float8_e5m2, which no tensor core does; make one of "
            "weight.dtype, activation and gradient float8_e4m3fn",
        ),
        (
            dual and scaling.scale == "float32",
            f"weight={weight} with scaling={scaling}: W_lo is exact only under a power-of-two scale; use "
            'scale="pow2", or weight=Single()',
        ),
        (
            stored and not scaling.serves_both,
            f"weight={weight} and copies={r.copies!r} with scaling={scaling}: forward and dgrad have two quantizations "
            "of the weight, so no one residual, error or copy belongs to both; use weight=Single() with "
            'copies="both", or square blocks',
        ),
        (
            isinstance(scaling, Block) and "fast" in products.values(),
            f"scaling={scaling} with {', '.join(f'{n}={p!r}' for n, p in products.items())}: a product is promoted to "
            'float32 where its blocks are scaled; use "full" for "fast"',
        ),
        (
            r.amax == "delayed" and (r.stochastic or not isinstance(scaling, Tensor)),
            f'amax="delayed" with scaling={scaling} and weight={weight}: only whole tensors carry an amax, and a value '
            'that a stale scale clips would bias stochastic rounding; use amax="fresh"',
        ),
        (
            r.activation_halves == "hi+lo" and not (dual and scaling == Tensor() and r.forward != "bf16"),
            f'activation_halves="hi+lo" with weight={weight}, scaling={scaling} and forward={r.forward!r}: the three '
            'products of two split operands share power-of-two scales of whole tensors; use activation_halves="hi" '
            'or recipe("residual_activation")',
        ),
        (
            weight is not None and weight.blocks == "nonzero" and not isinstance(scaling, Block),
            f'blocks="nonzero" with scaling={scaling}: only a W_lo in blocks has blocks to leave out; use '
            'blocks="all" or recipe("tcfp12_blockwise")',
        ),
    ]


_E5M2: Format = "float8_e5m2"
# W_lo is no operand: it makes `W_hi + W_lo` precise enough to be the parameter itself, see `tcfp_jax.store`.
_SINGLE_PRODUCTS = Dual(remainder="dropped", forward="hi", dgrad="hi")
_IN_BLOCKS: Any = dict(forward="full", dgrad="full", wgrad="full")
_NAMED = {
    "bf16": Recipe(weight=None, forward="bf16", dgrad="bf16", wgrad="bf16"),
    "tcfp12": Recipe(),
    "tcfp12_fast": Recipe(weight=Dual(dgrad="hi"), forward="fast", dgrad="fast", wgrad="fast"),
    "tcfp12_single": Recipe(weight=_SINGLE_PRODUCTS, forward="fast", dgrad="full", wgrad="full", copies="one"),
    "residual_activation": Recipe(activation_halves="hi+lo", forward="full"),
    "tensorwise": Recipe(weight=Single(), gradient=_E5M2, forward="fast", dgrad="full", wgrad="full"),
    "rowwise": Recipe(weight=Single(), scaling=Row(), forward="fast", dgrad="fast", wgrad="fast"),
    "blockwise": Recipe(weight=Single(), scaling=Block(128), **_IN_BLOCKS),
    "tcfp12_blockwise": Recipe(scaling=Block(128), **_IN_BLOCKS),
    "mxfp8": Recipe(weight=Single(), scaling=Block(32, "vector"), **_IN_BLOCKS),
}
NAMES = tuple(_NAMED)

# What an override that is not a field of `Recipe` is short for: a field of `weight` or of `scaling`.
_SHORT_WEIGHT = {
    "weight_dtype": "dtype", "remainder": "remainder", "forward_weight": "forward", "dgrad_weight": "dgrad",
    "residual_blocks": "blocks",
}  # fmt: skip
_SHORT_SCALING = ("block", "tile", "scale")
# Fields of the first edition, and what says the same since 0.2.0.
_MOVED = {
    "activation_dtype": "activation= or forward=\"bf16\"", "gradient_dtype": 'gradient= or dgrad="bf16"',
    "residual": 'weight=Single() or Dual(), and remainder="stochastic"',
    "forward_accumulation": "forward=", "dgrad_accumulation": "dgrad=", "wgrad_accumulation": "wgrad=",
    "granularity": "scaling=Row() or block=", "weight_tile": "tile=", "forward_activation": "activation_halves=",
    "error_feedback": 'remainder="feedback" or "dropped"', "delayed_scaling": 'amax="delayed"',
    "weight_copies": "copies=",
}  # fmt: skip


def recipe(name: str | Recipe, **overrides: Any) -> Recipe:
    """A named recipe, with overrides.

    "bf16": BF16 operands, the baseline. "tcfp12": `W_hi + W_lo` forward and in dgrad, BF16 weight gradient.
    "tcfp12_fast": `W_hi + W_lo` forward, `W_hi` in dgrad, FP8 weight gradient: four FP8 products, all with fast
    accumulation, instead of BF16's three. "tcfp12_single": stores `W_hi + W_lo`, without a float copy by
    `tcfp_jax.store`, and multiplies by `W_hi` alone, one FP8 product each. "residual_activation": `W_hi + W_lo` times
    `x_hi + x_lo` without their smallest product, for an output of BF16's quality. One FP8 product each: "tensorwise",
    E4M3 forward and E5M2 gradients (with `scale="float32"` nanochat's rule); "rowwise", a scale for each row of x and
    column of W, torchao's; "blockwise", a scale for every 128 values of x and square of W (`block=`); "mxfp8", OCP MX
    with vectors of 32.
    "tcfp12_blockwise" is "blockwise" with `W_hi + W_lo`.

    Args:
      name: one of these, or a `Recipe`.
      overrides: fields of `Recipe`, or short forms of what is in them: `block`, `tile` and `scale` of the scaling;
        `weight_dtype`, `remainder`, `forward_weight`, `dgrad_weight` and `residual_blocks` of the weight. `block=`
        makes "full" of a named recipe's "fast" products, because products in blocks are promoted.

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
    for key, value in overrides.items():
        if key in Recipe.__dataclass_fields__:
            fields[key] = value
        elif key in _SHORT_WEIGHT:
            of_weight[_SHORT_WEIGHT[key]] = value
        elif key in _SHORT_SCALING:
            of_scaling[key] = value
        elif key in _MOVED:
            raise TypeError(f"{key}= is {_MOVED[key]} since version 0.2.0; the changelog has the table")
        else:
            known = [*Recipe.__dataclass_fields__, *_SHORT_WEIGHT, *_SHORT_SCALING]
            raise TypeError(f"a recipe has no {key!r}; use some of {known}")
    if of_weight:
        fields["weight"] = _with_weight(fields.get("weight", base.weight), of_weight)
    if of_scaling:
        fields["scaling"] = _with_scaling(fields.get("scaling", base.scaling), of_scaling)
    if isinstance(fields.get("scaling"), Block):
        fields = {p: "full" for p in ("forward", "dgrad", "wgrad") if getattr(base, p) == "fast"} | fields
    return dataclasses.replace(base, **fields)


def _with_weight(weight: Single | Dual | None, given: dict[str, Any]) -> Single | Dual:
    unknown = set(given) - {field.name for field in dataclasses.fields(weight)} if weight is not None else set(given)
    if weight is None or unknown:
        raise ValueError(
            f"{sorted(unknown)[0]}={given[sorted(unknown)[0]]!r}: weight={weight} has no such field; use "
            "weight=Dual(...) for a weight of two halves"
        )
    return dataclasses.replace(weight, **given)


def _with_scaling(scaling: Scaling, given: dict[str, Any]) -> Scaling:
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
