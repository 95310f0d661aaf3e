"""The AdamW step on Hopper: the choice of the kernel in `mosaic_kernel.py`."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.adamw.launch import ROWS, Ref, launch, launch_entry
from pallas_kernels.adamw.reference import AdamWOptions, Step
from pallas_kernels.dispatch import Implementation, device_kind
from pallas_kernels.hopper import plan
from pallas_kernels.moments import BLOCK
from pallas_kernels.specs import device_count


def _reject(options: AdamWOptions, g: Array, hi: Array, *arrays: object) -> str | None:
    """Return the reason why this kernel cannot take the step, or None."""
    reason = plan.reject(jnp.bfloat16)
    if reason is not None:
        return reason
    if device_kind() == "cpu":
        return 'its instructions need a GPU; use backend="triton" or "xla"'
    if device_count() > 1:
        # JAX cannot partition a function with references, by which the state is
        # replaced where it lies.
        return 'several devices; use backend="triton" or "xla"'
    k, n = hi.shape[-2:]
    rows = 2 * ROWS
    if k % rows or n % BLOCK:
        return (
            f"hi[{k}, {n}]: the sizes must be multiples of {rows} and {BLOCK}; use"
            ' backend="xla" or pad'
        )
    if g.dtype not in (jnp.bfloat16, jnp.float32):
        return f"g is {g.dtype}, not bfloat16 or float32"
    return None


def _adamw(options: AdamWOptions, *operands: Any) -> Step:
    """Take the step, see `api.adamw`."""
    # Imported where it is used: a second that a program without this kernel need not
    # pay, and needs jax 0.11.
    from pallas_kernels.adamw import mosaic_kernel

    return launch(mosaic_kernel.call, options, *operands)


def _reject_entry(
    options: AdamWOptions, entry: Array, g: Array, hi: Ref, *arrays: object
) -> str | None:
    """Return the reason why this kernel cannot take the step of an entry, or None."""
    if g.ndim > 3:
        return f"an entry g{list(g.shape)} is no matrix, nor a stack of matrices"
    return _reject(options, g, hi)


def _adamw_entry(options: AdamWOptions, *operands: Any) -> tuple[Array | None, Array]:
    """Take the step of an entry, see `api.adamw_entry`."""
    from pallas_kernels.adamw import mosaic_kernel

    return launch_entry(mosaic_kernel.call_entry, options, *operands)


KERNEL = Implementation("mosaic", _adamw, _reject)
OF_ENTRIES = Implementation("mosaic", _adamw_entry, _reject_entry)
