"""The launch of an AdamW kernel: its operands, stacks of weights, and parts of devices.

A kernel is a function `kernel(options, columns, words, gradient, *state, *places)` of a
device's part of a stack `[l, k, n]`:

* `columns` is n of the whole weight.
* `words` is the array of `Numbers.words`.
* `places` are the global rows and columns of the part, if there are several devices.
* `state` may be references to stacks of stacks `[L, l, k, n]` or `[L, k, n]`, of which
  one entry takes the step. Its number is the last word of the operand then.

It returns the new state, the bits of the largest magnitudes of tiles, and with
`orientation="both"` the transpose of the new hi.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from pallas_kernels import numerics
from pallas_kernels.adamw.reference import (
    AdamWOptions,
    Coefficients,
    Moments,
    Rates,
    Step,
)
from pallas_kernels.moments import BLOCK
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.specs import device_count, has_explicit_axes

Kernel: TypeAlias = Callable[..., list[Array]]
Ref: TypeAlias = Any  # reference to memory
ROWS = 16  # rows of a tile; a shard has a multiple of them
STATE = 6  # hi, lo, m, m_scale, v, v_scale
WORDS = len(Coefficients._fields) + 4  # of `Numbers`


class Numbers(NamedTuple):
    """The numbers of a step, as a kernel reads them from its operand of 32-bit words.

    Attributes:
      coefficients: coefficients of the arithmetic.
      unit: bits of the scale of the weight after the step, for its amax.
      keep: zero if the step is not taken.
      k0, k1: key words of the random bits.
    """

    coefficients: Coefficients
    unit: Array
    keep: Array
    k0: Array
    k1: Array

    @staticmethod
    def words(rates: Rates, key: Array) -> Array:
        """Return the operand of a kernel."""
        unit = jnp.where(rates.keep, rates.new_scale, rates.scale)
        floats = jnp.stack([*Coefficients.of(rates), unit])
        words = lax.bitcast_convert_type(floats, jnp.uint32)
        integers = jnp.stack([rates.keep.astype(jnp.uint32), key[0], key[1]])
        return jnp.concatenate([words, integers])

    @staticmethod
    def read(word: Callable[[int], Array]) -> "Numbers":
        """Return the numbers from a function that reads a word of the operand."""
        count = len(Coefficients._fields)
        floats = [numerics.from_bits(word(i)) for i in range(count)]
        rest = [word(count + i) for i in range(4)]
        return Numbers(Coefficients._make(floats), *rest)


def launch(
    kernel: Kernel,
    options: AdamWOptions,
    g: Array,
    hi: Array,
    lo: Array,
    state: Moments,
    rates: Rates,
    key: Array,
) -> Step:
    """Take the step by a kernel, see `api.adamw`."""
    operands = (
        Numbers.words(rates, key),
        g,
        hi,
        lo,
        state.m,
        lax.bitcast_convert_type(state.m_scale, jnp.uint8),
        state.v,
        state.v_scale,
    )
    if has_explicit_axes():
        results = _on_each_device(kernel, options, *operands)
    else:
        results = _stacked(kernel, options)(*operands)
    new_hi, new_lo, m, m_scale, v, v_scale, tops, *columns = results
    after = Moments(
        m, lax.bitcast_convert_type(m_scale, state.m_scale.dtype), v, v_scale
    )
    # Bits of floats that are not negative are ordered like the floats.
    amax = numerics.from_bits(jnp.max(tops))
    return Step(new_hi, new_lo, columns[0] if columns else None, after, amax)


def launch_entry(
    kernel: Kernel,
    options: AdamWOptions,
    entry: Array,
    g: Array,
    hi: Ref,
    lo: Ref,
    state: Moments,
    rates: Rates,
    key: Array,
) -> tuple[Array | None, Array]:
    """Take the step of an entry of stacks by a kernel, see `api.adamw_entry`."""
    *stack, k, n = g.shape
    words = Numbers.words
    for _ in stack:
        words = jax.vmap(words)
    numbers = words(rates, key)
    last = jnp.full((*stack, 1), entry, jnp.uint32)
    numbers = jnp.concatenate([numbers, last], axis=-1)
    places = (hi, lo, state.m, state.m_scale, state.v, state.v_scale)
    matrices = g.reshape(-1, k, n)
    rows = numbers.reshape(len(matrices), -1)
    tops, *columns = kernel(options, n, rows, matrices, *places)
    amax = numerics.from_bits(jnp.max(tops, axis=(-2, -1)))
    turned = columns[0].reshape(*stack, n, k) if columns else None
    return turned, amax.reshape(stack)


@cache
def _stacked(kernel: Kernel, options: AdamWOptions) -> Kernel:
    """Return the step of a stack of matrices `[*l, ...]`.

    vmap makes the stack longer, and the step stays in place.
    """

    @custom_vmap
    def call(*operands: Array) -> list[Array]:
        return _on_each_device(kernel, options, *operands)

    @call.def_vmap
    def _rule(
        size: int,
        is_mapped: list[bool],
        *operands: Array,
    ) -> tuple[list[Array], list[bool]]:
        whole = []
        for x, maps in zip(operands, is_mapped, strict=True):
            whole.append(x if maps else jnp.broadcast_to(x, (size, *x.shape)))
        results = call(*whole)
        return results, [True] * len(results)

    return call


def _on_each_device(
    kernel: Kernel, options: AdamWOptions, *operands: Array
) -> list[Array]:
    """Run the kernel on a stack of matrices; each device takes its part of them."""
    *leading, k, n = operands[2].shape
    # A letter for each axis of a stack, because layers of experts are split in their
    # second axis.
    stack = " ".join("abcdefgh"[: len(leading)])
    state = [f"{stack} {axes}" for axes in ("i j", "i j", "i j", "i q", "i j", "i q")]
    inputs = [f"{stack} u", f"{stack} i j", *state]
    outputs = [*state, f"{stack} p q"]
    if options.orientation == "both":
        outputs.append(f"{stack} j i")
    places: list[Array] = []
    if device_count() > 1:
        # Global rows and columns, split like the weight
        places = [lax.iota(jnp.uint32, k), lax.iota(jnp.uint32, n)]
        inputs += ["i", "j"]
    rule = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    blocks = {"p": BlocksOf("i", ROWS, k), "q": BlocksOf("j", BLOCK, n)}

    def local(*operands: Array, summed_over: tuple[str, ...]) -> list[Array]:
        stack = operands[2].shape[:-2]
        merged = [x.reshape(-1, *x.shape[len(stack) :]) for x in operands[: 2 + STATE]]
        results = kernel(options, n, *merged, *operands[2 + STATE :])
        return [x.reshape(*stack, *x.shape[1:]) for x in results]

    return partitioned(local, rule, blocks)(*operands, *places)
