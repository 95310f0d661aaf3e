"""`Recipe`, and the rules between its fields."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels.dispatch import Backend, check_backend
from pallas_kernels.operands import Block, Fp4, Scaling, Tensor
from pallas_kernels.wire import Wire, check_wire
from tcfp_jax.recipes.forms import (
    Amax,
    Copies,
    Dual,
    Format,
    Fp4Training,
    Product,
    Remainder,
    Single,
    TCFPMode,
    WeightFormat,
    check_choices,
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How a layer multiplies. The defaults are `recipe("tcfp12")`.

    Attributes:
      weight: `Dual(...)`, `Single(...)`, or None for BF16.
      scaling: which values share a scale: `Tensor()`, `Row()` (of x and g, columns of W, anew for each product),
        `Block(size, tile)`, where `tile` is the form of a weight's blocks; those of x and g are vectors; or, of a
        weight in float4_e2m1fn, `Fp4(format, tile, rule)`, whose codes serve both products, beside rows of x and g.
      activation: format of x in products that round it to fewer bits than BF16 (`forward` and `wgrad` other than
        "bf16"). "float4_e2m1fn" is for the forward product with an NVFP4 weight: x in NVFP4, too.
      gradient: format of the output's gradient g in FP8 products.
      forward, dgrad, wgrad: how each product multiplies: "fast" and "full" are FP8 with that accumulation (see
        `pallas_kernels.matmul.api.matmul`), "bf16" multiplies BF16 values, those of the stored weight if there is one.
      amax: weights are scaled by a "fresh" amax, or by a "delayed" one that the optimizer's state carries (PDDS).
      copies: quantized weights in the optimizer's state in "one" orientation, `[k, n]`, or in "both", which doubles
        their bytes and saves the forward product a transpose on GPUs.
      fp4: of a recipe without a stored weight: all three products of NVFP4 operands, see `Fp4Training`.
      wire: how devices that share a batch add weight gradients, see `pallas_kernels.wire`; None: as their dtype.
      backend, quantize_backend: of products, and of quantizers (no "mosaic"); None is the fastest that was measured.

    Raises:
      ValueError: a field has an unknown value, or two fields contradict each other; the message says which.

    >>> from tcfp_jax.recipes import recipe
    >>> Recipe() == recipe("tcfp12")
    True
    """

    weight: Single | Dual | None = Dual()
    scaling: Scaling = Tensor()
    activation: WeightFormat = "float8_e4m3fn"
    gradient: Format = "float8_e4m3fn"
    forward: Product = "fast"
    dgrad: Product = "full"
    wgrad: Product = "bf16"
    amax: Amax = "fresh"
    copies: Copies = "both"
    backend: Backend | None = None
    quantize_backend: Backend | None = None
    wire: Wire | None = None
    fp4: Fp4Training | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Single | Dual | None):
            raise ValueError(f"weight={self.weight!r} is unknown; use Dual(...), Single(...) or None for BF16")
        if not isinstance(self.scaling, Scaling):
            raise ValueError(f"scaling={self.scaling!r} is unknown; use Tensor(), Row(), Block(size, tile) or Fp4()")
        check_choices(
            self, activation=WeightFormat, gradient=Format, forward=Product, dgrad=Product, wgrad=Product,
            amax=Amax, copies=Copies,
        )  # fmt: skip
        for backend in (self.backend, self.quantize_backend):
            check_backend(backend)
        check_wire(self.wire)
        for broken, message in rules(self):
            if broken:
                raise ValueError(message)

    @property
    def mode(self) -> TCFPMode:
        """The form of the weights."""
        if self.weight is None:
            return TCFPMode.BF16
        if isinstance(self.scaling, Fp4):
            return TCFPMode.FP4
        return TCFPMode.TCFP12 if isinstance(self.weight, Dual) else TCFPMode.FP8

    @property
    def stochastic(self) -> bool:
        """Whether weights are rounded stochastically, which needs a random key."""
        return self.weight is not None and self.weight.remainder == "stochastic"

    @property
    def draws(self) -> bool:
        """Whether the gradients of a product draw random bits, for which it needs a key: those of FP4 training do."""
        return self.fp4 is not None

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


def rules(r: Recipe) -> list[tuple[bool, str]]:
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
    four = _fp4_problem(r)
    return [
        (four is not None, four or ""),
        (
            weight is None and bool((fp8 and r.fp4 is None) or r.amax == "delayed" or scaling != Tensor()),
            f"weight=None stores nothing in FP8, but {', '.join(sorted(fp8)) or 'amax or scaling'} asks for it; use "
            'weight=Single() or Dual(), or recipe("bf16") without overrides',
        ),
        (
            "wgrad" in fp8 and fp8 != set(products) and not isinstance(scaling, Fp4),
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
            stored and not (scaling.serves_both or isinstance(scaling, Fp4)),
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
            weight is not None and weight.blocks == "nonzero" and not isinstance(scaling, Block),
            f'blocks="nonzero" with scaling={scaling}: only a W_lo in blocks has blocks to leave out; use '
            'blocks="all" or recipe("tcfp12_blockwise")',
        ),
    ]


def _fp4_problem(r: Recipe) -> str | None:
    """What contradicts FP4 weights, FP4 scales of others, or FP4 training."""
    weight, scaling = r.weight, r.scaling
    codes, scales = weight is not None and weight.dtype == "float4_e2m1fn", isinstance(scaling, Fp4)
    if codes != scales:
        return (
            f"weight={weight} with scaling={scaling}: codes of four bits and the scales of FP4 belong together; use "
            'weight=Single("float4_e2m1fn") with scaling=Fp4(...), or recipe("nvfp4") or recipe("mxfp4")'
        )
    if scales and "fast" in (r.forward, r.dgrad):
        return (
            f"forward={r.forward!r} and dgrad={r.dgrad!r} with scaling={scaling}: sums of products with FP4 are "
            'float32; use "full" for E4M3 activations or gradients, or "bf16"'
        )
    in_four = r.activation == "float4_e2m1fn"
    nvfp4 = isinstance(scaling, Fp4) and scaling.format == "nvfp4"
    if in_four and not (nvfp4 and r.forward == "full" and r.wgrad == "bf16"):
        return (
            f'activation="float4_e2m1fn" with scaling={scaling}, forward={r.forward!r} and wgrad={r.wgrad!r}: NVFP4 '
            "activations are multiplied by NVFP4 weights, in the forward product alone; use "
            'recipe("nvfp4", activation="float4_e2m1fn"), or activation="float8_e4m3fn"'
        )
    eight = {"activation": "bf16" if in_four else r.forward, "gradient": r.dgrad}
    wrong = next((name for name, how in eight.items() if how == "full" and getattr(r, name) != "float8_e4m3fn"), None)
    if scales and wrong is not None:
        return (
            f"{wrong}={getattr(r, wrong)!r} with scaling={scaling}: 8-bit operands beside FP4 are E4M3 with a scale "
            f'for each row; use {wrong}="float8_e4m3fn", or "bf16" for that product'
        )
    products = (r.forward, r.dgrad, r.wgrad)
    if r.fp4 is not None and (weight is not None or r.wire is not None or products != ("bf16", "bf16", "bf16")):
        return (
            f"fp4={r.fp4} with weight={weight}, wire={r.wire!r} and products {products}: FP4 training quantizes a "
            'float weight at each use and adds in float32; use weight=None, wire=None and "bf16" for all three'
        )
    if r.fp4 is not None and r.quantize_backend is not None:
        return (
            f"fp4={r.fp4} with quantize_backend={r.quantize_backend!r}: the format library quantizes FP4, by its "
            "kernel wherever that runs; leave quantize_backend=None"
        )
    return None
