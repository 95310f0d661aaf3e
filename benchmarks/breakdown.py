"""Where a step's time goes: CUPTI's milliseconds of every kernel, summed by what the kernel is for.

A kernel of a library says by its name what it does. One that XLA made has the name of its instruction, whose metadata
in the compiled program holds the `jax.named_scope`s of what it computes; of several operations in one kernel, that is
the last. So a maximum that a norm's kernel finds beside its result is the norm's.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

Kind = Literal["products", "attention", "norms and activations", "quantization", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Operation = tuple[str, str]  # (types of its results, name with scopes)

# First match wins: cuDNN's attention has "gemm" in some of its names, and AdamW's kernel rounds, too.
_BY_NAME: tuple[tuple[str, Kind], ...] = (
    (r"cudnn|sdpa|fmha|flash", "attention"),
    (r"adamw", "optimizer"),
    (r"quantize", "quantization"),
    (r"matmul|gemm|nvjet|cutlass|cublas|xmma|splitk", "products"),
)
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*)")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_WIDE = re.compile(r"\b(?:bf16|f16|f32)\[([\d,]+)\]")
_SMALL = 2**16  # values: scales, amaxes and statistics of rows have fewer, tensors more


def operations_of(program: str) -> dict[str, Operation]:
    """(types of the results, name with scopes) of every instruction of a compiled program, by its kernel's name.

    >>> text = '  %loop_add.1 = f32[8]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(f)/optimizer/add"}'
    >>> operations_of(text)
    {'loop_add_1': ('f32[8]{0}', 'jit(f)/optimizer/add')}
    """
    found = {}
    for line in program.splitlines():
        if (match := _INSTRUCTION.match(line)) is not None:
            name, rest = match.groups()
            scopes = _SCOPES.search(rest)
            # Types end before the operation: "f32[8]{0} fusion(...", or "(f32[8]{0}, pred[]) fusion(...".
            types = rest[: rest.index(")") + 1] if rest.startswith("(") else rest.split(" ", 1)[0]
            found[re.sub(r"[.\-]", "_", name)] = types, scopes[1] if scopes else ""
    return found


def kind_of(kernel: str, operations: Mapping[str, Operation]) -> Kind:
    """What a kernel is for.

    What XLA made for a quantizer counts as quantization where it writes FP8 or small arrays alone; one that writes a
    tensor of floats as well is the norm or activation that the tensor is.

    >>> kind_of("nvjet_qqtst_128x256", {}), kind_of("cudnn_generated_sdpa_flash_fprop", {})
    ('products', 'attention')
    >>> kind_of("loop_add_1", {"loop_add_1": ("f32[8]{0}", "jit(f)/optimizer/add")})
    'optimizer'
    """
    types, scopes = operations.get(kernel, ("", ""))
    if not scopes:
        lowered = kernel.lower()
        return next((kind for pattern, kind in _BY_NAME if re.search(pattern, lowered)), "norms and activations")
    if "optimizer" in scopes:
        return "optimizer"
    if "quantize" in scopes and not any(_values(sizes) > _SMALL for sizes in _WIDE.findall(types)):
        return "quantization"
    # XLA's own products have the names of their instructions, and perhaps a transpose behind them.
    is_product = scopes.endswith("dot_general") or kernel.startswith("gemm_fusion")
    return "products" if is_product else "norms and activations"


def _values(sizes: str) -> int:
    product = 1
    for size in sizes.split(","):
        product *= int(size)
    return product


def milliseconds_by_kind(kernels: list[tuple[str, float]], program: str) -> dict[Kind, float]:
    """The sum of every kind over (kernel, milliseconds) of one call."""
    operations, sums = operations_of(program), dict.fromkeys(KINDS, 0.0)
    for name, milliseconds in kernels:
        sums[kind_of(name, operations)] += milliseconds
    return sums


def profile(function: Callable[..., Any], args: tuple[Any, ...], program: str) -> dict[Kind, float] | None:
    """Milliseconds by kind of one call, or None where this machine has no CUPTI."""
    if jax.default_backend() != "gpu":
        return None
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(function, aggregate=False)(*args)
    return None if kernels is None else milliseconds_by_kind(kernels, program)
