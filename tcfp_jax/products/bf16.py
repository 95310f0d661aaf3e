"""Products of BF16 operands, whose sums are float32 on every platform."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import note
from pallas_kernels.tuning import Key


def dot(
    a: jax.Array, b: jax.Array, a_axes: tuple[int, ...], b_axes: tuple[int, ...], dtype: Any, sharding: Any = None
) -> jax.Array:
    """The product over some axes of each, in bfloat16 or float32; `sharding` as in `lax.dot_general`.

    >>> dot(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 1), jnp.bfloat16), (1,), (0,), jnp.float32).tolist()
    [[3.0], [3.0]]
    """
    k = math.prod(a.shape[axis] for axis in a_axes)
    note(Key("dot_general", str(jnp.dtype(dtype)), (a.size // max(1, k), k, b.size // max(1, k))), a, b)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, ((a_axes, b_axes), ((), ())), preferred_element_type=dtype, out_sharding=sharding)

    # A weight gradient, whose bits this does not change; of other products it would change the order of sums.
    by_first = jnp.dtype(dtype) == jnp.float32 and a_axes[0] == b_axes[0] == 0
    return on_cpu_in_float32(product, a, b) if by_first else product(a, b)


def on_cpu_in_float32(product: Callable[..., Any], *operands: jax.Array) -> Any:
    """`product(*operands)` of BF16 arrays, whose sums are float32; on a CPU of the same values as float32 arrays.

    XLA's CPU casts the operands of most such products itself (jaxlib 0.10 to 0.11), but cannot run one over the first
    axes of both whose result is turned over, as it is where `jax.vmap` maps the second operand alone.

    >>> one_shared = jax.vmap(lambda a, b: dot(a, b, (0,), (0,), jnp.float32), (None, 0))
    >>> one_shared(jnp.ones((2, 1), jnp.bfloat16), jnp.ones((2, 2, 1), jnp.bfloat16)).tolist()
    [[[2.0]], [[2.0]]]
    """

    def widened(*operands: jax.Array) -> Any:
        # Behind a barrier: XLA takes a cast to bfloat16 and back for none.
        return product(*(x.astype(jnp.float32) for x in lax.optimization_barrier(operands)))

    return lax.platform_dependent(*operands, cpu=widened, default=product)
