"""`fp4_matmul` on Hopper: the kernel's shapes and sizes, and the steps around it.

`tuned.json` has the limits that timing found (`limits`); the sizes of a product follow
from them and from its shape.
"""

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from pallas_kernels import tuning
from pallas_kernels.dispatch import (
    Backend,
    Implementation,
    device_cores,
    device_kind,
    dispatch,
)
from pallas_kernels.fp4_matmul import reference, triton
from pallas_kernels.fp4_matmul.devices import on_each_device
from pallas_kernels.fp4_matmul.reference import (
    E4M3_FACTOR,
    ActivationFormat,
    Fp4Options,
    scaling_of,
)
from pallas_kernels.fp4_matmul.unpacked import multiply, quantize_rows
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
    """Limits between ways of a product, which timing found: part of `tuned.json`.

    There is one set for each format of activations.

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


def limits(activation: ActivationFormat) -> _Limits:
    """Return the limits for activations of a format."""
    timed = tuning.load()
    entries = timed.get(device_kind(), {}).get("fp4_matmul")
    for entry in entries or timed[_TIMED_ON]["fp4_matmul"]:
        if entry.variant == activation:
            found = dict(entry.configs["mosaic"])
            # JSON has lists, and a frozen value has tuples.
            for name in ("warpgroups", "band_rows"):
                found[name] = tuple(found[name])
            return _Limits(**found)
    raise KeyError(f"tuned.json has no limits for {activation}")


def _reject(options: Fp4Options, x: Array, w: Operand) -> str | None:
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
    if options.activation == "float4_e2m1fn":
        return 'x of codes for backend="mosaic", which reads floats; use backend="xla"'
    scaling = scaling_of(w)
    if options.activation != "bfloat16" and scaling.rule != "fold_exact":
        return (
            f'activation={options.activation!r} with {scaling} for backend="mosaic",'
            " which multiplies codes times scales in E4M3, where those of"
            ' Fp4(rule="fold_exact") alone are exact; quantize so, or use'
            ' backend="xla"'
        )
    if configure(options, x, w) is not None:
        return None
    n, k = w.shape
    m = math.prod(x.shape[:-1])
    most = limits(options.activation).most_rows
    range_of_m = "at least 1" if most is None else f"1 to {most}"
    return (
        f"m={m}, k={k}, n={n} must be {range_of_m}, a multiple of"
        f' {16 * scaling.block} and a multiple of 64 for backend="mosaic" with'
        f' activation={options.activation!r}; use backend="xla" or pad'
    )


# Sizes of the kernel
# --------------------------------------------------------------------------------------


def configure(options: Fp4Options, x: Array | Operand, w: Operand) -> "Config | None":
    """Return the sizes of the kernel for this product, or None if none fit."""
    from pallas_kernels.fp4_matmul.kernel import OUTPUTS

    n, k = w.shape
    m = math.prod(x.shape[:-1])
    step = 16 * scaling_of(w).block
    found = limits(options.activation)
    most = math.inf if found.most_rows is None else found.most_rows
    if not 0 < m <= most or not k or k % step or not n or n % OUTPUTS:
        return None
    fit: list[Config] = []
    for warpgroups in found.warpgroups:
        if n % (OUTPUTS * warpgroups) == 0:
            fit += _sized(options, found, (m, k, n), step, warpgroups)
    # Fewer outputs a block are better than parts of k: 16.2 us at 14336 x 4096, and
    # 16.5. A single warpgroup does not hide its decoding: 19.3 us at 8192 x 8192, and
    # 17.1 with four and parts of k.
    for config in fit:
        if config.splits == 1 and config.warpgroups > 1:
            return config
    return fit[0] if fit else None


def _sized(
    options: Fp4Options,
    found: _Limits,
    sizes: tuple[int, int, int],
    step: int,
    warpgroups: int,
) -> "list[Config]":
    """Return the sizes for a number of warpgroups, if there are any.

    There are none if registers or shared memory do not suffice.
    """
    from pallas_kernels.fp4_matmul import kernel

    m, k, n = sizes
    places = max(1, device_cores(132))
    tiles = n // (kernel.OUTPUTS * warpgroups)
    bands, rows = _fastest_bands(found, m, tiles, places)
    # A block has a multiprocessor to itself. If they would fill less than half of the
    # chip, as many share k as fit.
    splits = 1
    for count in range(2, places // (tiles * bands) + 1):
        if k // step % count == 0:
            splits = count
    config = kernel.Config(warpgroups, splits=splits, rows=None if bands == 1 else rows)
    room = _SHARED_BYTES - _output_bytes(config, options, kernel.piece(rows))
    of_weight = config.height * (step // 2 + 16)
    of_x = rows * step * jnp.dtype(options.activation).itemsize
    stages = min(found.stages, room // (of_weight + of_x))
    if stages < 2 or not config.holds(rows):
        return []
    return [dataclasses.replace(config, stages=stages)]


def _fastest_bands(found: _Limits, m: int, tiles: int, places: int) -> tuple[int, int]:
    """Return the number of bands of rows that takes the least time, and their rows."""

    def time(band: tuple[int, int]) -> int:
        # Each round of blocks on the chip takes as long as its rows and its decoding.
        count, rows = band
        rounds = -(-tiles * count // places)
        return rounds * (rows + found.decoding_rows)

    return min((_bands(m, most) for most in found.band_rows), key=time)


def _bands(m: int, most: int) -> tuple[int, int]:
    """Return how many bands of at most `most` rows hold m, and the rows of a band.

    They are a multiple of 8. Rows of several bands are a multiple of 32: their sums are
    written side by side in whole cache lines.
    """
    bands = -(-m // most)
    unit = 8 if bands == 1 else 32
    return bands, -(-m // (unit * bands)) * unit


def _output_bytes(config: "Config", options: Fp4Options, rows: int) -> int:
    """Return the bytes of shared memory for output rows: none for parts of k."""
    if config.splits > 1:
        return 0
    return rows * config.height * options.out_dtype.itemsize


def _rounding(
    config: "Config",
    options: Fp4Options,
    x: Array | ShapeDtypeStruct,
) -> "Config":
    """Return the sizes for blocks that round x themselves if its rows are few.

    Otherwise the given sizes are returned.
    """
    from pallas_kernels.fp4_matmul import decode, rows

    m, k = x.shape
    part = k // config.splits
    found = limits(options.activation)
    few = m <= found.rounded_rows and m * (k + part) <= found.rounded_values
    if not few or x.dtype != jnp.bfloat16:
        return config
    room = _SHARED_BYTES - rows.ROWS * part - _output_bytes(config, options, rows.ROWS)
    step = decode.step_of("nvfp4")
    # A part of k splits into units of two steps, of which the last one may overlap the
    # one before.
    if part < 2 * step or part % step or config.weight_bytes(step) > room:
        return config
    return dataclasses.replace(config, rounds_rows=True)


# The steps before and after the kernel
# --------------------------------------------------------------------------------------


def _fp4_matmul(
    options: Fp4Options,
    x: Array,
    w: Operand,
    *,
    config: "Config | None" = None,
) -> Array:
    """Return the product, see `api.fp4_matmul`.

    XLA multiplies a device's part that no sizes fit.
    """
    from pallas_kernels.fp4_matmul import decode

    def on_device(
        options: Fp4Options,
        x: Array | Operand,
        w: Operand,
        table: Array,
    ) -> Array:
        chosen = config or configure(options, x, w)
        if chosen is None:
            return multiply(options, x, w)
        if isinstance(x, Operand):
            return _in_fp8(chosen, options, x, w, table)
        if options.activation == "bfloat16":
            return _in_bf16(chosen, options, x, w, table)
        chosen = config or _rounding(chosen, options, x)
        return _in_fp8(chosen, options, x, w, table)

    table = jnp.asarray(decode.table_of(scaling_of(w).format, options.activation))
    if options.activation == "bfloat16" or device_count() == 1:
        return on_each_device(on_device, options, x, w, table)
    # A row's scale is found from all of it, so rows are rounded before devices have
    # parts of them.
    return on_each_device(on_device, options, quantize_rows(x), w, table)


KERNEL = Implementation("mosaic", _fp4_matmul, _reject, configure=configure)


def _padded(m: int, config: "Config") -> int:
    """Return the number of rows that blocks read: x's own rows, then zeros."""
    rows = config.rows or 8
    return -(-m // rows) * rows


def _in_bf16(
    config: "Config",
    options: Fp4Options,
    x: Array,
    w: Operand,
    table: Array,
) -> Array:
    from pallas_kernels.fp4_matmul import decode, kernel

    m = x.shape[0]
    form = scaling_of(w).format
    more = _padded(m, config) - m
    rows = jnp.pad(x.astype(jnp.bfloat16), ((0, more), (0, 0)))
    ordered = decode.permuted(rows, form)
    call = partial(
        kernel.call, config, form, ordered, w.values, reference.scale_bytes(w), table
    )
    if config.splits == 1:
        factor = jnp.full(1, 1.0) if w.outer is None else w.outer.reshape(1)
        return call(factor, ShapeDtypeStruct((m, w.shape[0]), options.out_dtype))
    out = _added(call())[:, :m].T * decode.BF16_FACTOR[form]
    return (out if w.outer is None else out * w.outer).astype(options.out_dtype)


def _in_fp8(
    config: "Config",
    options: Fp4Options,
    x: Array | Operand,
    w: Operand,
    table: Array,
) -> Array:
    """Return the product of the rows of x, which may be rounded already."""
    from pallas_kernels.fp4_matmul import kernel

    m = x.shape[0]
    outer = jnp.float32(1) if w.outer is None else w.outer
    if not config.rounds_rows:
        values, factors = ordered_rows(_padded(m, config), x, outer)
    else:
        assert not isinstance(x, Operand), "rows that are rounded are not rounded again"
        values = x
        factors = outer.reshape(1)
    # 256 values are the most that a dimension of a copy has.
    tables = table.reshape(2, 256)
    call = partial(
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
        return call(ShapeDtypeStruct((m, w.shape[0]), options.out_dtype))
    return _added(call()).T[:m].astype(options.out_dtype)


def _added(sums: Array) -> Array:
    """Add parts in order.

    So a row has the same bits whichever rows are multiplied with it.
    """
    return sum(sums[1:], sums[0])


# Rows in the kernel's order
# --------------------------------------------------------------------------------------


def ordered_rows(
    rows: int,
    x: Array | Operand,
    outer: Array,
    *,
    backend: Backend | None = None,
) -> tuple[Array, Array]:
    """Return the rows of x `[m, k]` as the kernel reads them: (values, factors).

    Values are E4M3 `[rows, k]` in the order of `decode.permuted`, and factors float32
    `[rows]`. A factor is the scale of a row times `outer`, the float32 scale of the
    weight, over `E4M3_FACTOR`. Rows from m on are zeros. The rows of x may be rounded
    already.
    """
    if isinstance(x, Operand):
        return _in_order(rows, x, outer)
    return dispatch("ordered_rows", ROWS_IMPLEMENTATIONS, backend, rows, x, outer)


def _round_and_order(rows: int, x: Array, outer: Array) -> tuple[Array, Array]:
    return _in_order(rows, quantize_rows(x), outer)


def _in_order(rows: int, x: Operand, outer: Array) -> tuple[Array, Array]:
    from pallas_kernels.fp4_matmul import decode

    more = rows - x.shape[0]
    values = jnp.pad(x.values, ((0, more), (0, 0)))
    values = decode.permuted(values, "nvfp4")
    return values, jnp.pad(outer / E4M3_FACTOR * x.scale, (0, more))


# Both round rows and order them.
ROWS_IMPLEMENTATIONS = (
    triton.ROWS,
    Implementation("xla", _round_and_order),
)
