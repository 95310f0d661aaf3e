"""Pallas-Triton, imported in this file alone, when a kernel first needs it.

JAX deprecated this backend in 0.11 and will remove it. Without it `dispatch` gives the reason of `missing`, and kernels
outside its tables ask there themselves. The attributes of this module are those of `jax.experimental.pallas.triton`.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from jax.experimental.pallas.triton import CompilerParams as CompilerParams
    from jax.experimental.pallas.triton import elementwise_inline_asm as elementwise_inline_asm
    from jax.experimental.pallas.triton import load as load
    from jax.experimental.pallas.triton import store as store


def __getattr__(name: str) -> object:
    # Half a second that a program without kernels need not pay.
    from jax.experimental.pallas import triton

    return getattr(triton, name)


@functools.cache
def missing() -> str | None:
    """Return the reason why no kernel of Pallas-Triton can run, or None."""
    try:
        __getattr__("CompilerParams")
    except ImportError:
        return f'jax {jax.__version__} has no Pallas-Triton; use backend="xla"'
    return None


def instruct(assembly: str, *values: ArrayLike) -> jax.Array:
    """Return the result of instructions on float32 values, elementwise; no compiler replaces them by others."""
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in values))
    operands = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in values]
    return __getattr__("elementwise_inline_asm")(  # type: ignore[operator]
        assembly, args=operands, pack=1, constraints="=f" + ",f" * len(values),
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )[0]  # fmt: skip
