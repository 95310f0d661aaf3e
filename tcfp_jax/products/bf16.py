"""Products of BF16 operands, whose sums are float32 on every platform."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.dispatch import note
from pallas_kernels.partition import partitioned
from pallas_kernels.specs import Sharding, entries
from pallas_kernels.tuning import Key
from pallas_kernels.wire import Scatter, Wire, reduced


def dot(
    a: jax.Array,
    b: jax.Array,
    a_axes: tuple[int, ...],
    b_axes: tuple[int, ...],
    dtype: DTypeLike,
    sharding: Sharding = None,
) -> jax.Array:
    """Return the product over some axes of each in `dtype`, summed in float32; `sharding` as in `lax.dot_general`.

    >>> dot(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 1), jnp.bfloat16), (1,), (0,), jnp.float32).tolist()
    [[3.0], [3.0]]
    """
    k = math.prod(a.shape[axis] for axis in a_axes)
    # Not by division, because `jax.export` may leave sizes open.
    m, n = (math.prod(x.shape[i] for i in range(x.ndim) if i not in axes) for x, axes in ((a, a_axes), (b, b_axes)))
    # A BF16 result comes straight from the product; a cast of a float32 one would be a pass over it.
    product_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    note(Key("dot_general", str(jnp.dtype(product_dtype)), (m, k, n)), a, b)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(
            a, b, ((a_axes, b_axes), ((), ())), preferred_element_type=product_dtype, out_sharding=sharding
        )

    def widened(*operands: jax.Array) -> jax.Array:
        # The barrier keeps XLA from deleting a cast to bfloat16 and back.
        return product(*(x.astype(jnp.float32) for x in lax.optimization_barrier(operands)))

    # XLA's CPU casts the operands of most such products itself (jaxlib 0.10 to 0.11). It cannot run one that contracts
    # the first axes of both and transposes its result, which `jax.vmap` over the second operand alone makes. Only for
    # these weight gradients, whose bits it does not change; in other products it would change the order of sums.
    by_first = product_dtype == jnp.float32 and a_axes[0] == b_axes[0] == 0
    y = lax.platform_dependent(a, b, cpu=widened, default=product) if by_first else product(a, b)
    return y.astype(dtype)


def weight_gradient(x: jax.Array, g: jax.Array, dtype: DTypeLike, sharding: Sharding, wire: Wire) -> jax.Array:
    """Return `xᵀ g` of x `[*m, k]` and g `[*m, n]`, as `[k, n]`; devices send partial sums as `wire` says."""

    def local(x: jax.Array, g: jax.Array, *, summed_over: tuple[str, ...], scattered: Sequence[Scatter] = ()) -> Any:
        out = lax.dot_general(x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return reduced(out, scattered, summed_over, wire).astype(dtype)

    wanted = None if sharding is None else entries(sharding, 2)
    call = partitioned(local, "m k, m n -> k n", scattered=True, merged={"m": x.shape[:-1]}, wanted=wanted)
    return call(x, g)
