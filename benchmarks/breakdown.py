"""Time of a step by kind of kernel, from the profiler's timeline.

A library's kernel has a name that tells its purpose. A kernel of XLA has the name of
its instruction. The instruction's metadata in the compiled program holds the
`jax.named_scope`s of the operation, or of the last of several. So a maximum that a
norm's kernel finds next to its result counts as the norm. Copies and fills by the
driver are a kind: a scan copies values that it keeps for its backward pass.
"""

import glob
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

Kind = Literal[
    "products",
    "attention",
    "norms and activations",
    "quantization",
    "optimizer",
    "copies",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Operation = tuple[str, str]  # (types of its results, name with scopes)

# First match wins: cuDNN's attention has "gemm" in some of its names, and AdamW's
# kernel rounds, too.
_BY_NAME: tuple[tuple[str, Kind], ...] = (
    (r"^(memcpy|memset)", "copies"),
    (r"cudnn|sdpa|fmha|flash", "attention"),
    (r"adamw", "optimizer"),
    (r"quantize", "quantization"),
    (r"matmul|gemm|nvjet|cutlass|cublas|xmma|splitk", "products"),
)
# Types end before the operation: "f32[8]{0} fusion(...", or "(f32[8]{0}, pred[])
# fusion(...".
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+)(.*)")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_WIDE = re.compile(r"\b(?:bf16|f16|f32)\[([\d,]+)\]")
_TRACED = 3  # calls on the timeline
_SMALL = 2**16  # values: scales, amaxes and statistics of rows have fewer, tensors more


def operations_of(program: str) -> dict[str, Operation]:
    """Return (types of the results, name with scopes) of instructions by kernel.

    >>> text = '  %loop_add.1 = f32[8]{0} fusion(%a), metadata={op_name="f/optimizer"}'
    >>> operations_of(text)
    {'loop_add_1': ('f32[8]{0}', 'f/optimizer')}
    """
    found = {}
    for line in program.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, types, rest = match.groups()
        scopes = _SCOPES.search(rest)
        found[re.sub(r"[.\-]", "_", name)] = types, scopes[1] if scopes else ""
    return found


def kind_of(kernel: str, operations: Mapping[str, Operation]) -> Kind:
    """Return the kind of a kernel.

    XLA's kernel of a quantizer counts as quantization if it writes only FP8 or small
    arrays. If it writes a tensor of floats, too, it counts as the norm or activation of
    that tensor.

    >>> kind_of("nvjet_qqtst_128x256", {}), kind_of("cudnn_sdpa_flash_fprop", {})
    ('products', 'attention')
    >>> kind_of("loop_add_1", {"loop_add_1": ("f32[8]{0}", "jit(f)/optimizer/add")})
    'optimizer'
    """
    types, scopes = operations.get(kernel, ("", ""))
    if not scopes:
        lowered = kernel.lower()
        for pattern, kind in _BY_NAME:
            if re.search(pattern, lowered):
                return kind
        return "norms and activations"
    if "optimizer" in scopes:
        return "optimizer"
    if "quantize" in scopes and not any(
        _values(sizes) > _SMALL for sizes in _WIDE.findall(types)
    ):
        return "quantization"
    # XLA's own products have the names of their instructions, perhaps with a transpose
    # at the end.
    is_product = scopes.endswith("dot_general") or kernel.startswith("gemm_fusion")
    return "products" if is_product else "norms and activations"


def _values(sizes: str) -> int:
    return math.prod(map(int, sizes.split(",")))


def milliseconds_by_kind(
    kernels: list[tuple[str, float]], program: str
) -> dict[Kind, float]:
    """Return the sum of every kind over (kernel, milliseconds) of one call."""
    operations = operations_of(program)
    sums = dict.fromkeys(KINDS, 0.0)
    for name, milliseconds in kernels:
        sums[kind_of(name, operations)] += milliseconds
    return sums


def profile(
    function: Callable[..., Any], args: tuple[Any, ...], program: str
) -> dict[Kind, float] | None:
    """Return milliseconds by kind, the mean of three calls, or None on a CPU."""
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_TRACED):
                out = function(*args)
            jax.block_until_ready(out)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        kernels = []
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                # Other lines of a device's plane repeat the kernels of its streams, by
                # instruction and by scope.
                if not plane.name.startswith("/device:GPU"):
                    continue
                if line.name.startswith("Stream"):
                    kernels += [(e.name, e.duration_ns / 1e6) for e in line.events]
    kernels = [(name, milliseconds / _TRACED) for name, milliseconds in kernels]
    return milliseconds_by_kind(kernels, program)
