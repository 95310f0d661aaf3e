"""`row_gradient` as one Pallas-Triton pass: a program holds whole rows, and sums the vectors' gradients over its rows.

The function is evaluated and differentiated inside the kernel, on a few rows at a time. x, dy and what is carried are
read once, dx is written once: 8 bytes a value of bfloat16. Each program writes its sums, float32, which XLA adds: where
a device runs few programs with many rows each, that is a hundredth of what moves.

While a step calculates, the next step's rows are on their way, so that a program waits for memory once.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from pallas_kernels import dispatch, tuning
from pallas_kernels.partition import partitioned, varying
from pallas_kernels.row_gradient import rows
from pallas_kernels.row_gradient.reference import OP, Gradients, Options, key
from pallas_kernels.row_gradient.rows import Frame

_H200_MULTIPROCESSORS = 132
# A program holds whole rows in registers: so many bytes at most, and up to half of them while it has others under way.
# Compiled for an H200, rows of up to 8192 values of bfloat16 stay there, but for a tenth of a LayerNorm's of 5120 and
# 8192: so many of its instructions move what does not fit. Of an RMSNorm of 16384 it is a sixth.
LONGEST_ROW_BYTES, _BYTES_AHEAD = 32768, 16384
# A warp's lanes take 8 values each of one row, and 512 bytes more of that row or of the next: sums over rows then need
# no other thread. All programs of a multiprocessor together have so many warps, of 128 registers a thread.
_LINE, _WARP_BYTES, _WARPS = 256, 1024, 16
Loads = Literal["ahead", "now"]


@dataclass(frozen=True)
class Config:
    """How rows are shared out.

    Attributes:
      rows: of a step, a power of two.
      warps: of 32 threads in a program.
      programs: on each multiprocessor.
      loads: "ahead", the rows of the next step are read before this one calculates; "now", when it does.
    """

    rows: int
    warps: int
    programs: int
    loads: Loads = "ahead"


def guess(k: int, dtype: Any) -> Config:
    """What should do for rows of k.

    >>> guess(4096, "bfloat16"), guess(100, "float32")
    (Config(rows=2, warps=16, programs=1, loads='ahead'), Config(rows=2, warps=1, programs=16, loads='ahead'))
    """
    width, size = _power_of_2(k), jnp.dtype(dtype).itemsize
    warps = min(_WARPS, max(1, width // _LINE))
    count = max(1, warps * _WARP_BYTES // (width * size))
    count = count // 2 if count == width else count  # see `misfit`
    ahead = count * width * size <= _BYTES_AHEAD
    return Config(max(1, count), warps, _WARPS // warps, "ahead" if ahead else "now")


def candidates(k: int, dtype: Any) -> list[Config]:
    """Configs worth timing for rows of k, the best guess first: as many bytes a thread as the guess has, or half."""
    width, first = _power_of_2(k), guess(k, dtype)
    found = [first]
    per_thread = first.rows * width // first.warps
    sides = itertools.product((first.rows, first.rows // 2), (first.warps, first.warps // 2, 2 * first.warps))
    for count, warps in sides:
        share = 2 if 2 * count * width == per_thread * warps else 1
        if count and 0 < warps <= 2 * _WARPS and share * count * width == per_thread * warps:
            found += [Config(count, warps, max(1, share * _WARPS // warps), loads) for loads in get_args(Loads)]
    return [config for config in dict.fromkeys(found) if misfit(config, k) is None]


def misfit(config: Config, k: int) -> str | None:
    """Why a config cannot run rows of k, or None."""
    width = _power_of_2(k)
    if config.rows > 1 and config.rows in (k, width):
        return f"rows={config.rows} could be mistaken for columns of k={k}; take half"
    return None


def reject(options: Options, x: jax.Array, *arrays: Any) -> str | None:
    """Why this kernel cannot run, or None."""
    k = x.shape[-1]
    if not x.size:
        return f'x{list(x.shape)} has no values; use backend="xla"'
    if k * x.dtype.itemsize > LONGEST_ROW_BYTES:
        return (
            f'rows of k={k} in {x.dtype} exceed the {LONGEST_ROW_BYTES} bytes that a program holds; use backend="xla"'
        )
    return None


def decline(options: Options, x: jax.Array, *arrays: Any) -> str | None:
    """Why this kernel is not the first choice, or None."""
    return tuning.decline("triton", key(options, x, *arrays))


def configure(options: Options, x: jax.Array, *arrays: Any) -> Config:
    """The config that was measured for rows of this length, else the best guess."""
    k = x.shape[-1]
    entry = tuning.find(key(options, x), "triton")
    # How many values a step takes says little of rows of another length.
    if entry is not None and "triton" in entry.configs and _power_of_2(entry.shape[-1]) == _power_of_2(k):
        tuned = Config(**entry.configs["triton"])
        if misfit(tuned, k) is None:
            return tuned
    return guess(k, x.dtype)


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def row_gradient(
    options: Options,
    x: jax.Array,
    vectors: tuple[jax.Array, ...],
    dys: tuple[jax.Array, ...],
    carried: jax.Array | None,
    *,
    config: Config | None = None,
) -> Gradients:
    """See `api.row_gradient`; `config` overrides the tuned or guessed one."""
    config = config or configure(options, x)
    traced = rows.trace(options.function, config.rows, x, vectors)
    matrices = [a for a in (x, *dys, carried) if a is not None]
    rule = (
        ", ".join(["i j"] * len(matrices) + ["j"] * len(vectors)) + " -> " + ", ".join(["i j"] + ["j"] * len(vectors))
    )

    def local(*operands: jax.Array, summed_over: tuple[str, ...]) -> list[jax.Array]:
        call = functools.partial(_call, traced, config, len(dys), len(vectors))
        dx, *partial = lax.platform_dependent(
            *operands, cpu=functools.partial(call, interpret=True), cuda=functools.partial(call, interpret=False)
        )
        sums = [jnp.sum(part, axis=0) for part in partial]
        return [dx, *(lax.psum(s, summed_over) if summed_over else s for s in sums)]

    dx, *sums = partitioned(local, rule, whole=("j",), merged={"i": x.shape[:-1]})(*matrices, *vectors)
    return dx, tuple(s.astype(v.dtype) for s, v in zip(sums, vectors, strict=True))


def _share_out(config: Config, m: int) -> int:
    """The steps of a program: rows are shared out evenly, in whole programs where that costs less than a tenth.

    >>> _share_out(Config(rows=1, warps=8, programs=2), 8192), _share_out(Config(4, 8, 2), 10)
    (32, 1)
    """
    steps = -(-m // config.rows)
    fewest = -(-steps // (config.programs * dispatch.device_cores(otherwise=_H200_MULTIPROCESSORS)))
    return next((n for n in range(fewest, fewest + fewest // 10 + 1) if m % (n * config.rows) == 0), fewest)


def _call(
    traced: core.ClosedJaxpr, config: Config, gradients: int, count: int, *operands: jax.Array, interpret: bool
) -> list[jax.Array]:
    """Dx, of so many gradients of y, and for each of `count` vectors the sums of every program."""
    # Imported where it is used: half a second that a program without kernels need not pay.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (m, k), width = operands[0].shape, _power_of_2(operands[0].shape[1])
    steps = _share_out(config, m)
    programs = -(-m // (steps * config.rows))
    matrix = pl.BlockSpec((steps * config.rows, width), lambda i: (i, 0))
    dx, sums = jax.ShapeDtypeStruct((m, k), operands[0].dtype), jax.ShapeDtypeStruct((programs, k), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, traced, config, (m, k, steps), gradients, count),
        out_shape=varying([dx, *[sums] * count], *operands),
        grid=(programs,),
        in_specs=[matrix] * (len(operands) - count) + [pl.BlockSpec((width,), lambda i: (0,))] * count,
        out_specs=[matrix] + [pl.BlockSpec((None, width), lambda i: (i, 0))] * count,
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=1),
        interpret=interpret,
        name=OP,
    )(*operands)


def _kernel(
    traced: core.ClosedJaxpr, config: Config, sizes: tuple[int, int, int], gradients: int, count: int, *refs: Any
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (m, k, steps), size = sizes, config.rows
    inputs, vector_refs = refs[: len(refs) - 2 * count - 1], refs[len(refs) - 2 * count - 1 : len(refs) - count - 1]
    dx_ref, sum_refs = refs[len(refs) - count - 1], refs[len(refs) - count :]
    width = dx_ref.shape[1]
    of_program = m - pl.program_id(0) * (steps * size)  # rows from its first on
    own = steps if m % (steps * size) == 0 else jnp.minimum(steps, (of_program + size - 1) // size)
    lane = None if k == width else lax.iota(jnp.int32, width) < k

    def rows_of(step: Any, ref: Any) -> tuple[Any, jax.Array | None]:
        """A step's rows in memory, and which values are there."""
        shape, inside = (size, width), None
        if lane is not None:
            inside = lax.broadcasted_iota(jnp.int32, shape, 1) < k
        if m % size:
            row = lax.broadcasted_iota(jnp.int32, shape, 0) < of_program - step * size
            inside = row if inside is None else inside & row
        return ref.at[pl.ds(step * size, size), :], inside

    def load(step: Any) -> tuple[jax.Array, ...]:
        return tuple(_load(*rows_of(step, ref)) for ref in inputs)

    def calculate(step: Any, loaded: tuple[jax.Array, ...], sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, *rest = (block.astype(jnp.float32) for block in loaded)
        dy, carried = functools.reduce(jnp.add, rest[:gradients]), rest[gradients:]
        padded = {} if lane is None else {k: width}
        limits = {} if lane is None else {k: k}
        frame = Frame(padded, limits | ({size: of_program - step * size} if m % size else {}))
        # Read anew in every step, from the cache: held, each takes as many registers as x.
        vectors = [_load(ref, lane).astype(jnp.float32) for ref in vector_refs]
        _, pull = jax.vjp(functools.partial(rows.evaluate, traced, frame), x, *vectors)
        dx, *parts = pull(dy)
        dx = carried[0] + dx if carried else dx
        ref, mask = rows_of(step, dx_ref)
        plgpu.store(ref, dx.astype(dx_ref.dtype), mask=mask)
        return tuple(s + part for s, part in zip(sums, parts, strict=True))

    zeros = tuple(jnp.zeros(width, jnp.float32) for _ in vector_refs)
    if config.loads == "now":
        sums = lax.fori_loop(0, own, lambda step, sums: calculate(step, load(step), sums), zeros)
    else:

        def advance(step: Any, state: Any) -> Any:
            loaded, sums = state
            # The last step reads its own rows again, from the cache.
            following = load(jnp.minimum(step + 1, own - 1))
            return following, calculate(step, loaded, sums)

        _, sums = lax.fori_loop(0, own, advance, (load(0), zeros))
    for ref, s in zip(sum_refs, sums, strict=True):
        plgpu.store(ref, s, mask=lane)


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Values of a block, zero where the mask is not set."""
    from jax.experimental.pallas import triton as plgpu

    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)
