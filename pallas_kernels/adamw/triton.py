"""`adamw` as one Pallas-Triton pass in place: 4 bytes and a gradient are read, 4 bytes
written, nothing else.

A program holds 16 blocks of 128 values. Without a transposed copy the blocks are
consecutive in memory, across the ends of rows. With one they lie below each other, so
that the tile can be transposed. Random bits are hashed in registers from the global
index, so a device that holds a part of the weight is told the first row and column of
its part.

The compiled kernel uses the arithmetic of `_Device`, and the interpreter
`reference.Portable`; the bits are the same.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels import counter, moments
from pallas_kernels import pallas_triton as plgpu
from pallas_kernels.adamw import reference
from pallas_kernels.adamw.reference import (
    Coefficients,
    Moments,
    Options,
    Portable,
    Rates,
    State,
    Step,
)
from pallas_kernels.moments import BLOCK
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.specs import device_count, has_explicit_axes, varying

Kernel: TypeAlias = Callable[..., list[jax.Array]]
ROWS = 16  # rows of a tile; a shard has a multiple of them
_WARPS = 4
_STATE = 6  # hi, lo, m, m_scale, v, v_scale
_TINY, _HUGE = "0f03800000", "0f7B800000"  # 2**-120 and 2**120 in PTX


def reject(
    options: Options, g: jax.Array, hi: jax.Array, *arrays: object
) -> str | None:
    """Return the reason why this kernel cannot take the step, or None."""
    k, n = hi.shape
    if k % ROWS or n % BLOCK:
        return (
            f"hi[{k}, {n}]: the sizes must be multiples of {ROWS} and {BLOCK}; use"
            ' backend="xla" or pad'
        )
    return None


def adamw(
    options: Options,
    g: jax.Array,
    hi: jax.Array,
    lo: jax.Array,
    state: Moments,
    rates: Rates,
    key: jax.Array,
    kernel: Kernel | None = None,
) -> Step:
    """Take the step, see `api.adamw`; `kernel` is another one, for a device's part of a
    stack.
    """
    as_bytes = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint8)
    operands = (
        _words(rates, key),
        g,
        hi,
        lo,
        state.m,
        as_bytes(state.m_scale),
        state.v,
        state.v_scale,
    )
    run = (
        functools.partial(_partitioned, options, kernel)
        if has_explicit_axes()
        else _stacked(options, kernel)
    )
    results = run(*operands)
    new_hi, new_lo, m, m_scale, v, v_scale, tops, *columns = results
    after = Moments(
        m, lax.bitcast_convert_type(m_scale, state.m_scale.dtype), v, v_scale
    )
    # Bits of floats that are not negative are ordered like the floats.
    amax = lax.bitcast_convert_type(jnp.max(tops), jnp.float32)
    return Step(new_hi, new_lo, columns[0] if columns else None, after, amax)


def _words(rates: Rates, key: jax.Array) -> jax.Array:
    """Return 32-bit words: `Coefficients`, scale of the weight after the step (for its
    amax), keep, and the key.
    """
    unit = jnp.where(rates.keep, rates.new_scale, rates.scale)
    floats = lax.bitcast_convert_type(
        jnp.stack([*Coefficients.of(rates), unit]), jnp.uint32
    )
    return jnp.concatenate(
        [floats, jnp.stack([rates.keep.astype(jnp.uint32), key[0], key[1]])]
    )


@functools.cache
def _stacked(options: Options, kernel: Kernel | None) -> Kernel:
    """Return the step of a stack of matrices `[*l, ...]`; vmap makes the stack longer,
    and the step stays in place.
    """

    @custom_vmap
    def call(*operands: jax.Array) -> list[jax.Array]:
        return _partitioned(options, kernel, *operands)

    @call.def_vmap
    def _rule(
        size: int, is_mapped: list[bool], *operands: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        whole = [
            x if maps else jnp.broadcast_to(x, (size, *x.shape))
            for x, maps in zip(operands, is_mapped, strict=True)
        ]
        results = call(*whole)
        return results, [True] * len(results)

    return call


def _partitioned(
    options: Options, kernel: Kernel | None, *operands: jax.Array
) -> list[jax.Array]:
    *leading, k, n = operands[2].shape
    # Global rows and columns, split like the weight; a single device needs none.
    places = (
        ()
        if device_count() == 1
        else (lax.iota(jnp.uint32, k), lax.iota(jnp.uint32, n))
    )
    # A letter for each axis of a stack, because layers of experts are split in their
    # second axis.
    l = " ".join("abcdefgh"[: len(leading)])
    state = [f"{l} {x}" for x in ("i j", "i j", "i j", "i q", "i j", "i q")]
    inputs = [f"{l} u", f"{l} i j", *state, *("i", "j")[: len(places)]]
    outputs = [*state, f"{l} p q"] + [f"{l} j i"] * (options.orientation == "both")
    blocks = {"p": BlocksOf("i", ROWS, k), "q": BlocksOf("j", BLOCK, n)}

    def local(*operands: jax.Array, summed_over: tuple[str, ...]) -> list[jax.Array]:
        stack, rest = operands[2].shape[:-2], operands[2 + _STATE :]
        merged = [x.reshape(-1, *x.shape[len(stack) :]) for x in operands[: 2 + _STATE]]
        call = functools.partial(_call, options, n)
        if plgpu.unreachable(*merged[1:]):
            call = functools.partial(_by_parts, call)
        results = (
            kernel(options, n, *merged, *rest)
            if kernel
            else plgpu.on_platform(call, *merged, *rest)
        )
        return [x.reshape(*stack, *x.shape[1:]) for x in results]

    return partitioned(local, f"{', '.join(inputs)} -> {', '.join(outputs)}", blocks)(
        *operands, *places
    )


def _by_parts(call: Kernel, *operands: jax.Array, interpret: bool) -> list[jax.Array]:
    """Run the kernel on parts of a stack in turn: each is copied out and in again, and
    the state stays in place.
    """
    l = operands[1].shape[0]
    part = lambda x, parts: jax.ShapeDtypeStruct((l // parts, *x.shape[1:]), x.dtype)
    divisors = [parts for parts in range(1, l + 1) if l % parts == 0]
    fit = lambda parts: (
        plgpu.unreachable(*(part(x, parts) for x in operands[1 : 2 + _STATE])) is None
    )
    parts = next(filter(fit, divisors), l)
    entries, places = operands[: 2 + _STATE], operands[2 + _STATE :]
    cut = [x.reshape(parts, l // parts, *x.shape[1:]) for x in entries]

    def step(
        state: list[jax.Array], given: tuple[jax.Array, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        i, *read = given
        old = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in state]
        new = call(*read, *old, *places, interpret=interpret)
        return [
            lax.dynamic_update_index_in_dim(x, y, i, 0)
            for x, y in zip(state, new, strict=False)
        ], new[_STATE:]

    state, rest = lax.scan(step, cut[2:], (jnp.arange(parts), *cut[:2]))
    return [x.reshape(l, *x.shape[2:]) for x in (*state, *rest)]


def _call(
    options: Options, columns: int, *operands: jax.Array, interpret: bool
) -> list[jax.Array]:
    """Run the kernel on a device's part of a stack; `columns` is n of the whole
    weight.
    """
    # Imported where it is used: half a second that a program without kernels need not
    # pay.
    from jax.experimental import pallas as pl

    # A result in place has the type of its operand.
    operands = varying(operands, *operands)
    words, gradient, *state = operands[: 2 + _STATE]
    places = operands[2 + _STATE :]
    l, k, n = gradient.shape
    turned = options.orientation == "both"
    rows = 2 * ROWS if turned and k % (2 * ROWS) == 0 else ROWS
    if turned:
        grid: tuple[int, ...] = (n // BLOCK, k // rows, l)
        views = lambda x: x
        values, scales = (
            pl.BlockSpec((None, rows, size), lambda j, i, s: (s, i, j))
            for size in (BLOCK, 1)
        )
        tops = jax.ShapeDtypeStruct((l, k // ROWS, n // BLOCK), jnp.int32)
        top = pl.BlockSpec((None, rows // ROWS, 1), lambda j, i, s: (s, i, j))
    else:
        tiles = k * n // (rows * BLOCK)
        grid, views = (
            (tiles, l),
            lambda x: x.reshape(-1, BLOCK if x.shape == gradient.shape else 1),
        )
        values, scales = (
            pl.BlockSpec((rows, size), lambda i, s: (i + s * tiles, 0))
            for size in (BLOCK, 1)
        )
        tops = jax.ShapeDtypeStruct((l, tiles), jnp.int32)
        top = pl.BlockSpec((None, 1), lambda i, s: (s, i))
    viewed = [views(x) for x in state]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in viewed] + [tops]
    specs = [values, values, values, scales, values, scales]
    results = [*specs, top]
    if turned:
        shapes.append(jax.ShapeDtypeStruct((l, n, k), state[0].dtype))
        results.append(pl.BlockSpec((None, BLOCK, rows), lambda j, i, s: (s, j, i)))
    of_entry = pl.BlockSpec((None, words.shape[1]), lambda *at: (at[-1], 0))
    first = pl.BlockSpec((1,), lambda *at: (0,))
    new = plgpu.pallas_call(
        functools.partial(
            _kernel,
            options,
            (rows, n, columns),
            Portable if interpret else _Device,
            len(places),
        ),
        out_shape=varying(shapes, *operands),
        grid=grid,
        in_specs=[of_entry, values, *specs, *[first] * len(places)],
        out_specs=results,
        input_output_aliases={2 + i: i for i in range(_STATE)},
        compiler_params=plgpu.CompilerParams(
            num_warps=_WARPS * rows // ROWS, num_stages=1
        ),
        interpret=interpret,
        name="adamw",
    )(words, views(gradient), *viewed, *places)
    after = [x.reshape(old.shape) for x, old in zip(new, state)]
    return [*after, new[_STATE].reshape(l, k // ROWS, n // BLOCK), *new[_STATE + 1 :]]


def _kernel(
    options: Options,
    sizes: tuple[int, int, int],
    arithmetic: Callable[[jax.Array], Portable],
    places: int,
    words: Any,
    gradient_ref: Any,
    *refs: Any,
) -> None:
    """Compute one tile. Results overwrite the operands, so a step that is not taken
    writes nothing.
    """
    from jax.experimental import pallas as pl

    old_refs, place, new_refs = (
        refs[:_STATE],
        refs[_STATE : _STATE + places],
        refs[_STATE + places :],
    )
    count = len(Coefficients._fields)
    c = Coefficients(
        *(lax.bitcast_convert_type(words[i], jnp.float32) for i in range(count))
    )
    unit, keep, k0, k1 = (words[count + i] for i in range(4))
    gradient = gradient_ref[...].astype(jnp.float32)
    old = State(*(ref[...] for ref in old_refs))
    old = old._replace(
        m_scale=old.m_scale.astype(jnp.int32), v_scale=old.v_scale.astype(jnp.int32)
    )
    first = _first_indices(options, sizes, *(ref[0] for ref in place))
    # A block begins at a multiple of 128, so adding a column is setting its bits.
    lanes = lax.broadcasted_iota(jnp.uint32, gradient.shape, 1)
    bits = counter.finish(counter.begin(first ^ k0) ^ lanes, k1)
    do = arithmetic(gradient)
    new, weight = reference.update(do, options, c, gradient, old, bits)

    unit = lax.bitcast_convert_type(unit, jnp.float32)
    largest = do.multiply(do.largest(weight), unit)

    # Masked stores, because a branch would keep everything in registers across it.
    for ref, x in zip(new_refs, new, strict=False):
        plgpu.store(
            ref, x.astype(ref.dtype), mask=jnp.broadcast_to(keep != 0, ref.shape)
        )
    _summarize(new_refs[_STATE:], new.hi, largest)

    @pl.when(keep == 0)
    def _leave() -> None:
        hi, lo = (ref[...] for ref in old_refs[:2])
        _summarize(
            new_refs[_STATE:],
            hi,
            do.multiply(
                do.largest(hi.astype(jnp.float32) + lo.astype(jnp.float32)), unit
            ),
        )


def _summarize(refs: Any, hi: jax.Array, largest: jax.Array) -> None:
    """Write the results that are not in place: the bits of the tile's largest
    magnitude, and hi transposed.
    """
    top, *turned = refs
    top[...] = jnp.broadcast_to(
        jnp.max(lax.bitcast_convert_type(largest, jnp.int32)), top.shape
    )
    for ref in turned:
        ref[...] = hi.T


def _first_indices(
    options: Options, sizes: tuple[int, int, int], *place: jax.Array
) -> jax.Array:
    """Return the global index of the first value of each block, in a weight of
    `columns` columns, n of them here.
    """
    from jax.experimental import pallas as pl

    rows, n, columns = sizes
    word = lambda x: (
        jnp.uint32(x % 2**32) if isinstance(x, int) else x.astype(jnp.uint32)
    )
    below = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    first = word(pl.program_id(0) * rows + below)
    if options.orientation == "both":
        first = word(pl.program_id(1) * rows + below) * word(columns) + word(
            pl.program_id(0)
        ) * word(BLOCK)
    elif n == columns:
        # Rows are whole, so blocks are consecutive as in the weight.
        first = first * word(BLOCK)
    else:
        row, block = first // word(n // BLOCK), first % word(n // BLOCK)
        first = row * word(columns) + block * word(BLOCK)
    return first + place[0] * word(columns) + place[1] if place else first


class _Device(Portable):
    """Elementary operations by single instructions of the device, so that none is
    contracted or dropped.

    `.ftz` flushes subnormal inputs and results to zero, as a CPU does under XLA.
    """

    def __init__(self, gradient: jax.Array) -> None:
        del gradient  # instructions need no guard

    _run = staticmethod(plgpu.instruct)

    def multiply(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._run("mul.rn.ftz.f32 $0, $1, $2;", a, b)

    def add_exact_product(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return self._run("fma.rn.ftz.f32 $0, $1, $2, $3;", a, b, c)

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._run("add.rn.ftz.f32 $0, $1, $2;", a, b)

    def subtract(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._run("sub.rn.ftz.f32 $0, $1, $2;", a, b)

    def root(self, x: jax.Array) -> jax.Array:
        """Return the correctly rounded root of x >= 2**-100, as `sqrt.rn` without its
        branch for smaller values.
        """
        return self._run(
            "{ .reg .f32 y, s, h, r; rsqrt.approx.ftz.f32 y, $1; mul.rn.ftz.f32 s, $1,"
            " y; mul.rn.ftz.f32 h, y, 0f3F000000; neg.f32 r, s; fma.rn.f32 r, r, s, $1;"
            " fma.rn.f32 $0, r, h, s; }",
            x,
        )

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """Return the correctly rounded 1 / x, as `rcp.rn` without its branch for other
        x.
        """
        return self._run(
            "{ .reg .f32 y, e, n; rcp.approx.ftz.f32 y, $1; neg.f32 n, $1; fma.rn.f32"
            " e, n, y, 0f3F800000; fma.rn.f32 $0, y, e, y; }",
            x,
        )

    def e4m3(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (x in E4M3, the same value as float32); in a kernel XLA cannot delete
        the cast and back.
        """
        rounded = x.astype(moments.E4M3)
        return rounded, rounded.astype(jnp.float32)

    def stochastic_e4m3(
        self, x: jax.Array, inverse: jax.Array | None, random: jax.Array
    ) -> jax.Array:
        """Return `moments.stochastic_e4m3` of x or x * inverse: the sum carries into
        the bits that are kept.
        """
        tiny = self._run(
            f"mul.rn.f32 $0, $1, {_TINY};", x if inverse is None else inverse
        )
        tiny = tiny if inverse is None else self._run("mul.rn.f32 $0, $1, $2;", x, tiny)
        cut = (lax.bitcast_convert_type(tiny, jnp.int32) + random) & jnp.int32(
            -(1 << moments.RANDOM_BITS)
        )
        wide = self._run(
            f"mul.rn.f32 $0, $1, {_HUGE};", lax.bitcast_convert_type(cut, jnp.float32)
        )
        return wide.astype(moments.E4M3)

    def add_v_bits(self, v: jax.Array, bits: jax.Array) -> jax.Array:
        """Return the bits of v >= 0 plus `moments.v_bits`; results of a device have no
        subnormals, and one NaN.
        """
        return lax.bitcast_convert_type(v, jnp.int32) + moments.v_bits(bits)

    def largest(self, x: jax.Array) -> jax.Array:
        # The device's maximum ignores NaN.
        return jnp.max(jnp.abs(x), axis=-1, keepdims=True)

    def largest_or_nan(self, v: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(v, jnp.int32)
        return lax.bitcast_convert_type(
            jnp.max(bits, axis=-1, keepdims=True), jnp.float32
        )
