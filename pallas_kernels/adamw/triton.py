"""The AdamW step in Pallas-Triton: the choice of the kernel in `triton_kernel.py`."""

from typing import Any

from jax import Array

from pallas_kernels.adamw.launch import ROWS, launch
from pallas_kernels.adamw.reference import AdamWOptions, Step
from pallas_kernels.dispatch import Implementation, lacks_fp8
from pallas_kernels.moments import BLOCK


def _reject(options: AdamWOptions, g: Array, hi: Array, *arrays: object) -> str | None:
    """Return the reason why this kernel cannot take the step, or None."""
    k, n = hi.shape
    if k % ROWS or n % BLOCK:
        return (
            f"hi[{k}, {n}]: the sizes must be multiples of {ROWS} and {BLOCK}; use"
            ' backend="xla" or pad'
        )
    return None


def _adamw(options: AdamWOptions, *operands: Any) -> Step:
    """Take the step, see `api.adamw`."""
    # Imported where it is used: half a second that a program without kernels need not
    # pay.
    from pallas_kernels.adamw import triton_kernel

    return launch(triton_kernel.call, options, *operands)


# No shape needs to be timed: on an H200 XLA's fusions of the same arithmetic take three
# times as long.
KERNEL = Implementation("triton", _adamw, _reject, lacks_fp8)
