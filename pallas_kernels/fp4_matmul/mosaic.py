"""`fp4_matmul` on Hopper: the shapes that the kernel takes, its sizes, and the steps
before and after it.

`tuned.json` has the limits that timing found (`limits`); the sizes of a product follow
from them and from its shape.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import pallas_triton, tuning
from pallas_kernels.dispatch import device_cores, device_kind
from pallas_kernels.fp4_matmul import reference, unpacked
from pallas_kernels.fp4_matmul.reference import Activation, Options, scaling_of
from pallas_kernels.hopper import plan
from pallas_kernels.operands import Operand
from pallas_kernels.specs import device_count

# `kernel`, `decode` and `rows` are imported where they are used: a program without this
# kernel saves a second.
if TYPE_CHECKING:
    from pallas_kernels.fp4_matmul.kernel import Config

_SHARED_BYTES = 228_000
_TIMED_ON = "NVIDIA H200"  # for devices on which no limits were found


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Limits between ways of a product that timing found for one format of activations,
    from `tuned.json`.

    Attributes:
      most_rows: rows of x from which on XLA, which unpacks the weight once, is as fast;
        None if it never is. On an H200 with 28672 x 8192 the kernel in BF16 takes 118,
        232 and 401 us at m = 128, 256 and 512, and XLA 317, 373, 504. On an H100 it
        takes 233, 403 and 627 us at m = 256, 512 and 768, and XLA 421, 540 and 705.
      warpgroups: numbers of warpgroups of a block to try, the fastest first. More of
        them share the rows of x.
      stages: steps of k in flight at most.
      band_rows: rows of x that a block takes at most. E4M3 takes as many as `wgmma`
        does, or half of them. In BF16 the codes of four warpgroups leave room for a
        quarter.
      decoding_rows: the time that a block takes to decode, in rows of x that it would
        multiply meanwhile. With 28672 x 8192 in E4M3, bands of 256 rows take 223 us at
        m = 512 and 741 at 2048, and bands of 128 take 210 and 811.
      rounded_rows, rounded_values: rows of x at most that every block rounds itself,
        and values that it reads for that. 28672 x 8192 gains 7 and 3 % at m = 1 and 2
        and loses 2 at 4, where 14336 x 4096 and 8192 x 8192 gain 4 and 5.
    """

    most_rows: int | None
    warpgroups: tuple[int, ...]
    stages: int
    band_rows: tuple[int, ...]
    decoding_rows: int
    rounded_rows: int
    rounded_values: int


def limits(activation: Activation) -> _Limits:
    """Return the limits for activations of a format."""
    timed = tuning.load()
    entries = (
        timed.get(device_kind(), {}).get("fp4_matmul") or timed[_TIMED_ON]["fp4_matmul"]
    )
    found = next(
        entry.configs["mosaic"] for entry in entries if entry.variant == activation
    )
    held: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
    }
    return _Limits(**held)


def reject(options: Options, x: jax.Array, w: Operand) -> str | None:
    """Return why this kernel cannot multiply these operands here, or None."""
    reason = plan.reject(options.out_dtype)
    if reason is not None:
        return reason
    if device_kind() == "cpu":
        return 'codes are decoded in PTX, which has no interpreter; use backend="xla"'
    if options.contracts != "k":
        return (
            f'contracts={options.contracts!r} for backend="mosaic", which multiplies'
            ' along "k"; use backend="xla"'
        )
    scaling = scaling_of(w)
    if options.activation != "bfloat16" and scaling.rule != "fold_exact":
        return (
            f'activation={options.activation!r} with {scaling} for backend="mosaic",'
            " which multiplies codes times scales in E4M3, where those of"
            ' Fp4(rule="fold_exact") alone are exact; quantize so, or use'
            ' backend="xla"'
        )
    if configure(options, x, w) is None:
        (n, k), m, most = (
            w.shape,
            math.prod(x.shape[:-1]),
            limits(options.activation).most_rows,
        )
        return (
            f"m={m}, k={k}, n={n} must be"
            f" {'at least 1' if most is None else f'1 to {most}'}, a multiple of "
            f'{16 * scaling.block} and a multiple of 64 for backend="mosaic" with'
            f" activation={options.activation!r}; "
            'use backend="xla" or pad'
        )
    return None


def configure(options: Options, x: jax.Array | Operand, w: Operand) -> "Config | None":
    """Return the sizes of the kernel for this product, or None if none fit."""
    from pallas_kernels.fp4_matmul.kernel import OUTPUTS

    (n, k), m, step, found = (
        w.shape,
        math.prod(x.shape[:-1]),
        16 * scaling_of(w).block,
        limits(options.activation),
    )
    most = math.inf if found.most_rows is None else found.most_rows
    if not 0 < m <= most or not k or k % step or not n or n % OUTPUTS:
        return None
    counts = [count for count in found.warpgroups if n % (OUTPUTS * count) == 0]
    fit = [
        config
        for count in counts
        if (config := _sized(options, found, m, k // step, n, step, count)) is not None
    ]
    # Fewer outputs a block are better than parts of k: 16.2 us at 14336 x 4096, and
    # 16.5. A single warpgroup does not hide its decoding: 19.3 us at 8192 x 8192, and
    # 17.1 with four and parts of k.
    whole = [config for config in fit if config.splits == 1 and config.warpgroups > 1]
    return next(iter(whole or fit), None)


def _sized(
    options: Options,
    found: _Limits,
    m: int,
    steps: int,
    n: int,
    step: int,
    warpgroups: int,
) -> "Config | None":
    """Return the sizes for a number of warpgroups, or None if registers or shared
    memory do not suffice.
    """
    from pallas_kernels.fp4_matmul import kernel

    places, tiles = max(1, device_cores(132)), n // (kernel.OUTPUTS * warpgroups)
    # Each round of blocks on the chip takes as long as its rows and its decoding.
    time = lambda band: -(-tiles * band[0] // places) * (band[1] + found.decoding_rows)
    bands, rows = min((_bands(m, most) for most in found.band_rows), key=time)
    # A block has a multiprocessor to itself. If they would fill less than half of the
    # chip, as many share k as fit.
    splits = max(
        (
            count
            for count in range(1, places // (tiles * bands) + 1)
            if steps % count == 0
        ),
        default=1,
    )
    config = kernel.Config(warpgroups, splits=splits, rows=None if bands == 1 else rows)
    of_output = (
        kernel.piece(rows) * config.height * options.out_dtype.itemsize
        if splits == 1
        else 0
    )
    of_stage = (
        config.height * (step // 2 + 16)
        + rows * step * jnp.dtype(options.activation).itemsize
    )
    stages = min(found.stages, (_SHARED_BYTES - of_output) // of_stage)
    return (
        dataclasses.replace(config, stages=stages)
        if stages >= 2 and config.holds(rows)
        else None
    )


def _bands(m: int, most: int) -> tuple[int, int]:
    """Return how many bands of at most `most` rows hold m, and their rows, a multiple
    of 8.

    Rows of several bands are a multiple of 32: their sums are written side by side in
    whole cache lines.
    """
    bands = -(-m // most)
    unit = 8 if bands == 1 else 32
    return bands, -(-m // (unit * bands)) * unit


def _rounding(
    config: "Config", options: Options, x: jax.Array | jax.ShapeDtypeStruct, n: int
) -> "Config":
    """Return the same sizes for blocks that round x themselves if its rows are few,
    otherwise those given.
    """
    from pallas_kernels.fp4_matmul import decode, rows

    (m, k), part, found = (
        x.shape,
        x.shape[1] // config.splits,
        limits(options.activation),
    )
    few = m <= found.rounded_rows and m * (k + part) <= found.rounded_values
    of_output = (
        rows.ROWS * config.height * options.out_dtype.itemsize
        if config.splits == 1
        else 0
    )
    room = _SHARED_BYTES - rows.ROWS * part - of_output
    step = decode.step_of("nvfp4")
    # A part of k splits into units of two steps, of which the last one may overlap the
    # one before.
    fits = part >= 2 * step and part % step == 0 and config.weight_bytes(step) <= room
    return (
        dataclasses.replace(config, rounds_rows=True)
        if few and fits and x.dtype == jnp.bfloat16
        else config
    )


def fp4_matmul(
    options: Options, x: jax.Array, w: Operand, *, config: "Config | None" = None
) -> jax.Array:
    """Return the product, see `api.fp4_matmul`; XLA multiplies a device's part that no
    sizes fit.
    """
    from pallas_kernels.fp4_matmul import decode
    from pallas_kernels.quantize.triton_rows import LONGEST_ROW

    def on_device(
        options: Options, x: jax.Array | Operand, w: Operand, table: jax.Array
    ) -> jax.Array:
        chosen = config or configure(options, x, w)
        if chosen is None:
            return unpacked.multiply(options, x, w)
        if not isinstance(x, Operand):
            if options.activation == "bfloat16":
                return _in_bf16(chosen, options, x, w, table)
            chosen = config or _rounding(chosen, options, x, w.shape[0])
        return _in_fp8(chosen, options, x, w, table)

    table = jnp.asarray(decode.table_of(scaling_of(w).format, options.activation))
    # A row's scale is found from all of it, so rows are rounded before devices have
    # parts of them. A kernel of Pallas-Triton rounds them in the order in which this
    # kernel reads them.
    rounds = (
        device_count() == 1
        and 0 < x.shape[-1] <= LONGEST_ROW
        and pallas_triton.missing() is None
    )
    whole = options.activation == "bfloat16" or rounds
    return unpacked.on_each_device(
        on_device, options, x if whole else unpacked.quantize_rows(x), w, table
    )


def _padded(m: int, config: "Config") -> int:
    """Return the number of rows that blocks read: x's own rows, then zeros."""
    rows = config.rows or 8
    return -(-m // rows) * rows


def _in_bf16(
    config: "Config", options: Options, x: jax.Array, w: Operand, table: jax.Array
) -> jax.Array:
    from pallas_kernels.fp4_matmul import decode, kernel

    m, form = x.shape[0], scaling_of(w).format
    rows = jnp.pad(x.astype(jnp.bfloat16), ((0, _padded(m, config) - m), (0, 0)))
    ordered = decode.permuted(rows, form)
    call = functools.partial(
        kernel.call, config, form, ordered, w.values, reference.scale_bytes(w), table
    )
    if config.splits == 1:
        factor = jnp.full(1, 1.0) if w.outer is None else w.outer.reshape(1)
        return call(factor, jax.ShapeDtypeStruct((m, w.shape[0]), options.out_dtype))
    out = _added(call())[:, :m].T * decode.BF16_FACTOR[form]
    return (out if w.outer is None else out * w.outer).astype(options.out_dtype)


def _in_fp8(
    config: "Config",
    options: Options,
    x: jax.Array | Operand,
    w: Operand,
    table: jax.Array,
) -> jax.Array:
    """Return the product of the rows of x, which may be rounded already."""
    from pallas_kernels.fp4_matmul import decode, kernel, rows

    (m, _), outer = x.shape, jnp.float32(1) if w.outer is None else w.outer
    count = _padded(m, config)
    if isinstance(x, Operand):
        assert not config.rounds_rows, "rows that are rounded are not rounded again"
        values = decode.permuted(jnp.pad(x.values, ((0, count - m), (0, 0))), "nvfp4")
        factors = jnp.pad(outer / reference.E4M3_FACTOR * x.scale, (0, count - m))
    elif config.rounds_rows:
        values, factors = x, outer.reshape(1)
    else:
        values, factors = rows.ordered(x, count, outer)
    # 256 values are the most that a dimension of a copy has.
    tables = table.reshape(2, 256)
    call = functools.partial(
        kernel.call,
        config,
        "nvfp4",
        values,
        w.values,
        reference.scale_bytes(w),
        tables,
        factors,
    )
    if config.splits == 1:
        return call(jax.ShapeDtypeStruct((m, w.shape[0]), options.out_dtype))
    return _added(call()).T[:m].astype(options.out_dtype)


def _added(sums: jax.Array) -> jax.Array:
    """Add parts in order, so that a row has the same bits whichever rows are multiplied
    with it.
    """
    return sum(sums[1:], sums[0])
