"""The definition of `row_gradient` in plain JAX: the CPU path and the oracle of the kernel."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Key
from pallas_kernels.row_gradient import rows
from pallas_kernels.row_gradient.rows import Frame, Function

OP = "row_gradient"
Gradients = tuple[jax.Array, tuple[jax.Array, ...]]


@dataclass(frozen=True)
class Options:
    """What is differentiated."""

    function: Function


def row_gradient(
    options: Options,
    x: jax.Array,
    vectors: tuple[jax.Array, ...],
    dys: tuple[jax.Array, ...],
    carried: jax.Array | None,
) -> Gradients:
    """See `api.row_gradient`."""
    traced = rows.trace(options.function, 1 if x.ndim == 1 else x.shape[-2], x, vectors)
    call = lambda x, *vectors: rows.evaluate(traced, Frame(), x, *vectors)
    if x.ndim == 1:
        call = lambda x, *vectors: rows.evaluate(traced, Frame(), x[None], *vectors)[0]
    for _ in range(x.ndim - 2):  # and not a reshape, which a mesh with explicit axes may refuse
        call = jax.vmap(call, in_axes=(0, *[None] * len(vectors)))
    wide = [operand.astype(jnp.float32) for operand in (x, *vectors)]
    _, pull = jax.vjp(call, *wide)
    dx, *sums = pull(functools.reduce(jnp.add, (dy.astype(jnp.float32) for dy in dys)))
    if carried is not None:
        dx = carried.astype(jnp.float32) + dx
    return dx.astype(x.dtype), tuple(s.astype(v.dtype) for s, v in zip(sums, vectors, strict=True))


def key(options: Options, x: jax.Array, *arrays: Any) -> Key:
    """How `tuned.json` names it."""
    return Key(OP, x.dtype.name, (x.size // max(1, x.shape[-1]), x.shape[-1]))
