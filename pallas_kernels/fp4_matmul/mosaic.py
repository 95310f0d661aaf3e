"""`fp4_matmul` on Hopper: which shapes the kernel takes, with which sizes."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import device_cores, device_kind
from pallas_kernels.fp4_matmul import reference, unpacked
from pallas_kernels.fp4_matmul.parts import on_each_device
from pallas_kernels.fp4_matmul.reference import Activation, Options
from pallas_kernels.fp4_matmul.sizes import ROWS, Config
from pallas_kernels.hopper.plan import reject_here
from pallas_kernels.operands import Fp4, Operand, Row
from pallas_kernels.specs import device_count

# Above it XLA, which unpacks the weight once, is as fast. On an H200 with 28672 x 8192 the kernel in BF16 takes 118,
# 232 and 401 us at m = 128, 256 and 512, and XLA 317, 373 and 504. In E4M3 the kernel is as fast as a product of E4M3
# that is unpacked already, so that nothing is gained by unpacking.
MOST_ROWS: dict[Activation, float] = {"bfloat16": 512, "float8_e4m3fn": math.inf}
_SHARED_BYTES = 228_000
# Rows of x that every block rounds for itself, in the place of a kernel before, and how many values it may read and
# round for that: on an H200 28672 x 8192 gains 7 and 3 % at m = 1 and 2 and loses 2 at 4, where 14336 x 4096 and
# 8192 x 8192 gain 4 and 5. At m = 8 all lose.
_ROUNDED_BY_BLOCKS, _ROUNDED_VALUES = 4, 48 * 1024
# Steps whose scales come in one copy where E4M3 has at most so many rows: 64 bytes of a row are asked for, and not 16.
# On an H200 that is 1 to 3 %; eight are not faster than four, more rows and BF16 are slower.
_SCALE_STEPS, _FEW_ROWS = (4, 2, 1), 16
# Steps of k that are copied together where E4M3 has at most `_FEW_ROWS`: memory is then asked for 256 bytes of a row.
# On an H100 28672 x 8192 takes 50.7 us at m = 1 and 53.8 at 16, and 53.5 and 56.6 without (`benchmarks.fp4_sizes`);
# of copies alone four steps take no less than two. Rows of x are read once more for it, and their sums are added in
# another order, so that BF16, whose rows have the same bits beside any others, does not.
_ABREAST = 2
# Of a ring that has room for two steps the cache asks this many steps ahead: at m = 256 112 us on an H200, and 120
# without. Where several bands read the same codes it costs 4 to 11 %, and rings of four steps lose 10 to 40.
_PREFETCH = 4
# Of a block, the fastest first on an H200 with 28672 x 8192: the more outputs share the rows of x that it reads the
# better.
_WARPGROUPS = (4, 2, 1)
# Rows of x that a block takes at most: in E4M3 as many as `wgmma` does, or half of them. In BF16 a quarter has room
# beside four warpgroups' codes.
_BANDS: dict[Activation, tuple[int, ...]] = {"bfloat16": (64,), "float8_e4m3fn": (256, 128)}


def reject(options: Options, x: jax.Array, w: Operand) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = reject_here(options.out_dtype)
    if reason is not None:
        return reason
    if device_kind() == "cpu":
        return 'codes are decoded in PTX, which has no interpreter; use backend="xla"'
    if options.contracts != "k":
        return f'contracts={options.contracts!r} for backend="mosaic", which multiplies along "k"; use backend="xla"'
    scaling = w.scaling
    if options.activation != "bfloat16" and not unpacked.folds(scaling):
        return (
            f'activation={options.activation!r} with {scaling} for backend="mosaic", which multiplies codes times '
            'scales in E4M3, where those of Fp4(rule="fold_exact") alone are exact; quantize so, or use backend="xla"'
        )
    (n, k), m = w.shape, math.prod(x.shape[:-1])
    if choose(options, scaling, m, k, n) is None:
        step, most = _step(scaling), MOST_ROWS[options.activation]
        return (
            f"m={m}, k={k}, n={n} must be 1 to {most}, a multiple of {step} and a "
            f'multiple of {ROWS} for backend="mosaic" with activation={options.activation!r}; use backend="xla" or pad'
        )
    return None


def _step(scaling: Any) -> int:
    return 16 * scaling.block


def choose(options: Options, scaling: Any, m: int, k: int, n: int) -> Config | None:
    """The sizes of the kernel for a product, or None where none fit."""
    step = _step(scaling)
    if not 0 < m <= MOST_ROWS[options.activation] or not k or k % step or not n or n % ROWS:
        return None
    sized = [_sized(options, m, k // step, n, step, count) for count in _WARPGROUPS if n % (ROWS * count) == 0]
    fit = [config for config in sized if config is not None]
    # Fewer outputs a block are better than parts of k: 16.2 us at 14336 x 4096, and 16.5. A single warpgroup does not
    # hide its decoding: 19.3 us at 8192 x 8192, and 17.1 with four and parts of k.
    whole = [config for config in fit if config.splits == 1 and config.warpgroups > 1]
    return next(iter(whole or fit), None)


def _sized(options: Options, m: int, steps: int, n: int, step: int, warpgroups: int) -> Config | None:
    """The sizes with so many warpgroups, or None where registers or shared memory do not suffice."""
    from pallas_kernels.fp4_matmul import transposed

    places, tiles, limits = max(1, device_cores(132)), n // (ROWS * warpgroups), _BANDS[options.activation]
    bands, rows = min((_bands(m, most) for most in limits), key=lambda band: _rounds(tiles * band[0], places, band[1]))
    # A block has a multiprocessor to itself. Where they would fill less than half of the chip, as many share k as fit.
    splits = max((count for count in range(1, places // (tiles * bands) + 1) if steps % count == 0), default=1)
    config = Config(warpgroups, splits=splits, rows=None if bands == 1 else rows)
    of_output = transposed.piece(rows) * config.height * options.out_dtype.itemsize if splits == 1 else 0
    of_rows = rows * step * jnp.dtype(options.activation).itemsize
    stages = min(config.stages, (_SHARED_BYTES - of_output) // (config.height * (step // 2 + 16) + of_rows))
    if stages < 2 or not config.holds(rows):
        return None
    config = dataclasses.replace(config, stages=stages)
    if options.activation == "bfloat16":
        return config
    if rows <= _FEW_ROWS:
        room = _SHARED_BYTES - of_output - _ABREAST * stages * of_rows - _of_sums(config, rows)
        abreast = dataclasses.replace(config, abreast=_ABREAST)
        if abreast.serves_abreast(steps // splits) and abreast.weight_bytes(step) <= room:
            config = abreast
        return _with_wide_scales(config, steps // splits, step, room)
    return dataclasses.replace(config, prefetch=_PREFETCH) if stages == 2 and bands == 1 else config


def _of_sums(config: Config, rows: int) -> int:
    """Of shared memory, what sums take that warpgroups add: those of all but the first of `_ABREAST`."""
    return config.height // _ABREAST * (_ABREAST - 1) * rows * 4


def _with_wide_scales(config: Config, steps: int, step: int, room: int) -> Config:
    """The same sizes with scales of as many turns in a copy as divide a block's and have room."""
    turns = steps // config.abreast
    wide = [dataclasses.replace(config, scale_steps=count) for count in _SCALE_STEPS if turns % count == 0]
    return next((each for each in wide if each.weight_bytes(step) <= room), wide[-1])


def rounding(config: Config, options: Options, x: jax.Array | jax.ShapeDtypeStruct, n: int) -> Config:
    """The same sizes for blocks that round x themselves, where its rows are few; else those given."""
    from pallas_kernels.fp4_matmul import decode_fp8, rounded

    (m, k), step, part = x.shape, decode_fp8.STEP, x.shape[1] // config.splits
    if (
        m > _ROUNDED_BY_BLOCKS
        or m * (k + part) > _ROUNDED_VALUES
        or not rounded.serves(part)
        or x.dtype != jnp.bfloat16
    ):
        return config
    of_output = rounded.ROWS * config.height * options.out_dtype.itemsize if config.splits == 1 else 0
    room = _SHARED_BYTES - rounded.ROWS * part - of_output - _of_sums(config, rounded.ROWS)
    found = _with_wide_scales(dataclasses.replace(config, x="rounded"), part // step, step, room)
    return found if found.weight_bytes(step) <= room else config


def _bands(m: int, most: int) -> tuple[int, int]:
    """How many bands of at most so many rows hold m, and their rows, a multiple of 8.

    Of several bands it is one of 32, because their sums are written beside each other in whole cache lines.
    """
    bands = -(-m // most)
    unit = 8 if bands == 1 else 32
    return bands, -(-m // (unit * bands)) * unit


def _rounds(blocks: int, places: int, rows: int) -> int:
    """What blocks on so many places take: each as long as rows and what its decoding takes, 27 more.

    On an H200 with 28672 x 8192 in E4M3: bands of 256 rows take 223 us at m = 512 and 741 at 2048, and bands of 128
    210 and 811.
    """
    return -(-blocks // places) * (rows + 27)


def _padded(m: int, config: Config) -> int:
    """Rows of x with those of zeros that its blocks read."""
    rows = config.rows or 8
    return -(-m // rows) * rows


def configure(options: Options, x: jax.Array, w: Operand) -> Config | None:
    """The sizes of this product."""
    n, k = w.shape
    return choose(options, w.scaling, math.prod(x.shape[:-1]), k, n)


def fp4_matmul(options: Options, x: jax.Array, w: Operand, *, config: Config | None = None) -> jax.Array:
    """The product, see `api.fp4_matmul`; a device's part that no sizes fit is multiplied by XLA."""
    # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
    from pallas_kernels.fp4_matmul import decode, decode_fp8, ordered_rows

    def chosen_for(x: jax.Array, w: Operand) -> Config | None:
        return config or choose(options, w.scaling, x.shape[0], *w.shape[::-1])

    def in_bfloat16(options: Options, x: jax.Array, w: Operand, table: jax.Array) -> jax.Array:
        chosen = chosen_for(x, w)
        return reference.fp4_matmul(options, x, w) if chosen is None else _in_bfloat16(chosen, options, x, w, table)

    def in_fp8(
        options: Options, x: jax.Array, w: Operand, table: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        rows, chosen = None if scale is None else Operand(x, scale, scaling=Row("float32")), chosen_for(x, w)
        if chosen is None:
            return unpacked.in_fp8(options, rows or unpacked.quantize_rows(x), w)
        if config is None and rows is None:
            chosen = rounding(chosen, options, x, w.shape[0])
        return _in_fp8(chosen, options, rows or x, w, table)

    assert isinstance(w.scaling, Fp4), "api checked it"
    if options.activation == "bfloat16":
        table = jnp.asarray(decode.table(w.scaling.format))
        return on_each_device(in_bfloat16, options, x, w, {"table": ("t", table)})
    arrays = {"table": ("t", jnp.asarray(decode_fp8.table()))}
    if device_count() == 1 and ordered_rows.serves(x.shape[-1]):
        return on_each_device(in_fp8, options, x, w, arrays)
    # Rounded before devices have parts of a row, whose scale is found from all of it.
    rows = unpacked.quantize_rows(x)
    return on_each_device(in_fp8, options, rows.values, w, arrays | {"scale": ("m", rows.scale)})


def _in_bfloat16(config: Config, options: Options, x: jax.Array, w: Operand, table: jax.Array) -> jax.Array:
    from pallas_kernels.fp4_matmul import decode, kernel

    scaling = w.scaling
    assert isinstance(scaling, Fp4), "api checked it"
    m = x.shape[0]
    rows = jnp.pad(x.astype(jnp.bfloat16), ((0, _padded(m, config) - m), (0, 0)))
    ordered = decode.permuted(rows, scaling.format)
    call = functools.partial(kernel.call, config, scaling.format, ordered, w.values, reference.scale_bytes(w), table)
    if config.splits == 1:
        factor = jnp.full(1, 1.0) if w.outer is None else w.outer.reshape(1)
        return call(factor, jax.ShapeDtypeStruct((m, w.shape[0]), options.out_dtype))
    out = _added(call())[:, :m].T * decode.FACTOR[scaling.format]
    return reference.scale_sum(out, None, w.outer).astype(options.out_dtype)


def _in_fp8(config: Config, options: Options, x: jax.Array | Operand, w: Operand, table: jax.Array) -> jax.Array:
    """The product of the rows of x, which may be rounded already."""
    from pallas_kernels.fp4_matmul import decode_fp8, kernel, ordered_rows

    (m, _), outer = x.shape, jnp.float32(1) if w.outer is None else w.outer
    count = _padded(m, config)
    if isinstance(x, Operand):
        assert config.x == "copied", "rows that are rounded are not rounded again"
        rows = decode_fp8.permuted(jnp.pad(x.values, ((0, count - m), (0, 0))))
        factors = jnp.pad(outer / decode_fp8.FACTOR * x.scale, (0, count - m))
    elif config.x != "copied":
        rows, factors = x, outer.reshape(1)
    else:
        rows, factors = ordered_rows.ordered(x, count, outer)
    # 256 values are the most that a dimension of a copy has.
    tables = table.reshape(2, 256)
    call = functools.partial(kernel.call, config, "nvfp4", rows, w.values, reference.scale_bytes(w), tables, factors)
    if config.splits == 1:
        return call(jax.ShapeDtypeStruct((m, w.shape[0]), options.out_dtype))
    return _added(call()).T[:m].astype(options.out_dtype)


def _added(sums: jax.Array) -> jax.Array:
    """One after the other, so that a row has the same bits whatever is multiplied beside it."""
    return sum(sums[1:], sums[0])
