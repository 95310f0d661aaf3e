"""Pallas-Triton, imported in this file alone, when a kernel first needs it.

JAX deprecated this backend in 0.11 and will remove it. Without it `dispatch` gives the
reason of `missing`. The attributes of this module are those of
`jax.experimental.pallas.triton`.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax
from jax.typing import ArrayLike

from pallas_kernels.arithmetic import Instructions, Portable

if TYPE_CHECKING:
    from jax.experimental.pallas.triton import CompilerParams as CompilerParams
    from jax.experimental.pallas.triton import (
        elementwise_inline_asm as elementwise_inline_asm,
    )
    from jax.experimental.pallas.triton import load as load
    from jax.experimental.pallas.triton import store as store

# Pallas-Triton takes 32-bit offsets for arrays of up to so many bytes, and Triton reads
# them as signed numbers.
_BYTES_OF_32_BIT_OFFSETS = 2**32
_OFFSETS = 2**31
T = TypeVar("T")


def __getattr__(name: str) -> object:
    # Half a second that a program without kernels need not pay.
    from jax.experimental.pallas import triton

    return getattr(triton, name)


@cache
def missing() -> str | None:
    """Return the reason why no kernel of Pallas-Triton can run, or None."""
    try:
        __getattr__("CompilerParams")
    except ImportError:
        return f'jax {jax.__version__} has no Pallas-Triton; use backend="xla"'
    return None


def unreachable(*arrays: Array | ShapeDtypeStruct) -> str | None:
    """Return the reason why a kernel cannot address these arrays, or None.

    >>> unreachable(jax.ShapeDtypeStruct((2**31,), jnp.int8))
    >>> unreachable(jax.ShapeDtypeStruct((2**33,), jnp.int8))
    >>> unreachable(jax.ShapeDtypeStruct((3, 2**30), jnp.int8))[:49]
    'int8[3, 1073741824] has more than 2**31 values, w'
    """
    for x in arrays:
        values = math.prod(x.shape)
        bytes_ = values * jnp.dtype(x.dtype).itemsize
        if values > _OFFSETS and bytes_ <= _BYTES_OF_32_BIT_OFFSETS:
            return (
                f"{jnp.dtype(x.dtype)}{list(x.shape)} has more than 2**31 values, which"
                " the 32-bit offsets of Pallas-Triton do not reach"
            )
    return None


def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    **options: Any,
) -> Callable[..., Any]:
    """Return `pl.pallas_call` of a Triton kernel.

    It refuses arrays that the kernel would address wrongly.
    """
    from jax.experimental import pallas as pl

    def call(*operands: Array) -> Any:
        reason = unreachable(*operands, *jax.tree.leaves(out_shape))
        if reason is not None:
            raise NotImplementedError(f'{reason}; use backend="xla" or split the array')
        return pl.pallas_call(kernel, out_shape=out_shape, **options)(*operands)

    return call


def on_platform(call: Callable[..., T], *operands: object) -> T:
    """Return `call(*operands, interpret=...)`, which CPUs interpret."""
    interpreted = partial(call, interpret=True)
    compiled = partial(call, interpret=False)
    return lax.platform_dependent(*operands, cpu=interpreted, cuda=compiled)


def instruct(assembly: str, *values: ArrayLike) -> Array:
    """Return the result of instructions on float32 values, elementwise.

    No compiler replaces them by others.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in values))
    operands = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in values]
    return __getattr__("elementwise_inline_asm")(  # type: ignore[operator]
        assembly,
        args=operands,
        pack=1,
        constraints="=f" + ",f" * len(values),
        result_shape_dtypes=[ShapeDtypeStruct(shape, jnp.float32)],
    )[0]


def operations(interpret: bool) -> Portable:
    """Return the operations of a kernel, compiled by instructions."""
    return Portable() if interpret else Instructions(instruct)
