"""Times backends and tile sizes on this device and writes the winners to `pallas_kernels/tuned.json`.

Run by `python -m benchmarks.gemm --tune`. The shapes are the products and quantizers of Transformer MLPs of three
widths, forward and backward. Each candidate is compared with XLA's result before it is timed; the file is written
after every entry, and entries of other devices stay.
"""

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import tune_blocks
from benchmarks.common import threaded, time_interleaved
from benchmarks.quantizers import keep_error, same_bits
from benchmarks.shapes import H200_SHAPES, GemmShape, random_operands
from pallas_kernels import tuning
from pallas_kernels.dispatch import Backend, device_kind
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import SUM_BOUND, Accumulation, matmul
from pallas_kernels.quantize.api import quantize
from pallas_kernels.tuning import Entry

ROUNDS, CALLS = 3, 4
Cases = Literal["all", "missing"]
Named = tuple[Backend, Callable[..., Any], Any]  # backend, jitted function, config


class Case(NamedTuple):
    """One variant of an op at one shape, and the ways to run it, XLA's first.

    `agree(arguments, backend, got, expected)` says whether a result is as good as XLA's. With "donates" the second
    argument is an error, timed as a training step has it: its memory becomes the new error's.
    """

    op: str
    shape: tuple[int, ...]
    variant: str
    draw: Callable[[], tuple[Any, ...]]
    candidates: list[Named]
    agree: Callable[..., bool]
    memory: Literal["keeps", "donates"] = "keeps"


def run(budget_seconds: float = math.inf, only: str = "", cases: Cases = "all") -> list[Entry]:
    """Time every case whose "op variant" contains `only`; "missing" ones are those that `tuned.json` does not have.

    Entries are written as they are found.
    """
    started, entries = time.perf_counter(), []
    for case in itertools.chain(_products(), _quantizers(), _block_cases()):
        if only not in f"{case.op} {case.variant}" or (cases == "missing" and _is_timed(case)):
            continue
        if time.perf_counter() - started > budget_seconds:
            print(f"budget of {budget_seconds:g} s: stopped before {case.op} {case.variant} at {case.shape}")
            break
        entry = time_case(case)
        print(f"{case.op} {case.variant} {case.shape}: {entry.backend}, {dict(entry.milliseconds)}", flush=True)
        write(case.op, entry)
        entries.append(entry)
    return entries


def _is_timed(case: Case) -> bool:
    entries = tuning.load().get(device_kind(), {}).get(case.op, ())
    return any((entry.shape, entry.variant) == (case.shape, case.variant) for entry in entries)


def time_case(case: Case) -> Entry:
    """The entry of one case: every candidate compiled, compared with the first (XLA), and timed in turn."""
    arguments, candidates, at = case.draw(), case.candidates, f"{case.shape} ({case.variant})"
    with ThreadPoolExecutor() as pool:  # most of a kernel's compilation is ptxas, a process of its own
        compiled = list(pool.map(lambda named: named[1].lower(*arguments).compile(), candidates))
    expected = compiled[0](*arguments)
    for (backend, _, config), function in zip(candidates, compiled, strict=True):
        if not case.agree(arguments, backend, function(*arguments), expected):
            raise ArithmeticError(f"{backend} {config} at {at} differs from XLA; it is not timed")
    named: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for i, (_, function, _) in enumerate(candidates):
        named[str(i)] = (function, arguments)
        if case.memory == "donates":
            w, error = arguments
            named[str(i)] = (threaded(keep_error(function), error, w), ())
    times = time_interleaved(named, rounds=ROUNDS, calls=CALLS)
    milliseconds: dict[str, float] = {}
    configs: dict[str, dict[str, Any]] = {}
    for i, (backend, _, config) in enumerate(candidates):
        taken = times[str(i)].median_ms
        if taken < milliseconds.get(backend, math.inf):
            milliseconds[backend] = round(taken, 5)
            if config is not None:
                configs[backend] = dataclasses.asdict(config)
    winner: Any = min(milliseconds, key=lambda backend: milliseconds[backend])
    return Entry(case.shape, case.variant, winner, milliseconds, configs)


def write(op: str, entry: Entry) -> None:
    """Put one entry into `tuned.json`, in the place of an older one of its shape and variant."""
    content = json.loads(tuning.PATH.read_text(encoding="utf-8"))
    entries = content.setdefault(device_kind(), {}).setdefault(op, [])
    entries[:] = [e for e in entries if (tuple(e["shape"]), e["variant"]) != (entry.shape, entry.variant)]
    entries.append(dataclasses.asdict(entry))
    tuning.PATH.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tuning.load.cache_clear()


def _same_sums(accumulation: Accumulation, arguments: Any, backend: Backend, got: Any, expected: Any) -> bool:
    """Whether two products are within their bounds of each other."""
    x, *halves, scale = arguments
    signless = [lax.bitcast_convert_type(lax.bitcast_convert_type(v, jnp.uint8) & 0x7F, v.dtype) for v in (x, *halves)]
    magnitude = matmul(*signless, scale=scale, accumulation="full", out_dtype=jnp.float32, backend="xla")
    wide = [v.astype(jnp.float32) for v in (got, expected)]
    # Each result is rounded to its dtype once more, XLA's sum of two products twice.
    rounding = 3 * float(jnp.finfo(got.dtype).eps) / 2
    bound = (SUM_BOUND[backend, accumulation] + SUM_BOUND["xla", accumulation]) * magnitude + rounding * abs(wide[1])
    return bool(np.asarray(jnp.all(jnp.abs(wide[0] - wide[1]) <= bound)))


def _same_bits(arguments: Any, backend: Backend, got: Any, expected: Any) -> bool:
    return same_bits(got, expected)


def _products() -> Iterator[Case]:
    for mlp in H200_SHAPES:
        m, d, d_ff = mlp.m, mlp.k, mlp.n
        layer = [GemmShape(m, d, d_ff), GemmShape(m, d_ff, d)]  # forward of both layers, and dgrad of the other
        accumulations: tuple[Accumulation, ...] = ("fast", "full")
        for shape, halves, accumulation in itertools.product(layer, (2, 1), accumulations):
            yield _product(shape, halves, accumulation, jnp.bfloat16)
        for shape, accumulation in itertools.product((GemmShape(d, m, d_ff), GemmShape(d_ff, m, d)), accumulations):
            yield _product(shape, 1, accumulation, jnp.float32)


def _product(shape: GemmShape, halves: int, accumulation: Accumulation, out_dtype: Any) -> Case:
    def draw() -> tuple[Any, ...]:
        # A true residual: an H200 at its power limit is 11 % faster where the second half is zero.
        x, w = random_operands(shape)
        x_q = quantize(x, jnp.float8_e4m3fn, backend="xla")
        w_q = dual_quantize(w, backend="xla")
        weights = (w_q.hi, w_q.lo)[:halves]
        return (x_q.values, *weights, (x_q.scale * w_q.scale).astype(jnp.bfloat16))

    def multiply(x: Any, w: Any, *rest: Any, backend: Any, config: Any = None) -> Any:
        *lo, scale = rest
        options = dict(scale=scale, accumulation=accumulation)
        if config is None:
            return matmul(x, w, *lo, out_dtype=out_dtype, backend=backend, **options)
        return mosaic.matmul(
            x, w, lo[0] if lo else None, bias=None, out_dtype=jnp.dtype(out_dtype), out_sharding=None, config=config,
            **options,
        )  # fmt: skip

    candidates: list[Named] = [("xla", jax.jit(functools.partial(multiply, backend="xla")), None)]
    for config in configs(shape, halves, accumulation):
        candidates.append(("mosaic", jax.jit(functools.partial(multiply, backend="mosaic", config=config)), config))
    variant = mosaic.variant(halves == 2, accumulation, out_dtype)
    agree = functools.partial(_same_sums, accumulation)
    return Case("matmul", (shape.m, shape.k, shape.n), variant, draw, candidates, agree)


def configs(shape: GemmShape, halves: int, accumulation: str) -> list[mosaic.Config]:
    """The tile sizes worth timing: the best guesses, each in both orders of the output tiles."""
    guesses = mosaic.candidates(shape.m, shape.k, shape.n, halves, accumulation)[:8]
    return [dataclasses.replace(guess, inner=inner) for guess in guesses for inner in ("m", "n")]


def _quantizers() -> Iterator[Case]:
    for mlp in H200_SHAPES:
        for rows, columns in ((mlp.m, mlp.k), (mlp.m, mlp.n)):
            for orientation in ("rows", "both"):
                call = functools.partial(quantize, dtype=jnp.float8_e4m3fn, orientation=orientation)
                draw = functools.partial(_draw, (rows, columns), (jnp.bfloat16,))
                yield Case("quantize", (rows, columns), f"{orientation} bfloat16", draw, _both(call), _same_bits)
            split = functools.partial(dual_quantize, orientation="rows")
            draw = functools.partial(_draw, (rows, columns), (jnp.bfloat16,))
            yield Case("dual_quantize", (rows, columns), "rows nearest no error", draw, _both(split), _same_bits)
        for shape in ((mlp.k, mlp.n), (mlp.n, mlp.k)):
            split = functools.partial(dual_quantize, orientation="both")
            draw = functools.partial(_draw, shape, (jnp.float32,))
            yield Case("dual_quantize", shape, "both nearest no error", draw, _both(split), _same_bits)
            for dtype in (jnp.float32, jnp.bfloat16):
                draw = functools.partial(_draw, shape, (jnp.float32, dtype))
                call, variant = functools.partial(_split_with_error, split), f"both nearest error {jnp.dtype(dtype)}"
                yield Case("dual_quantize", shape, variant, draw, _both(call), _same_bits, "donates")


def _block_cases() -> Iterator[Case]:
    for arguments in tune_blocks.products():
        yield Case(*arguments)
    for op, shape, variant, dtypes, call in tune_blocks.quantizers():
        draw = functools.partial(_draw, shape, dtypes)
        if len(dtypes) == 1:
            yield Case(op, shape, variant, draw, _both(call), _same_bits)
        else:
            with_error = functools.partial(_split_with_error, call)
            yield Case(op, shape, variant, draw, _both(with_error), _same_bits, "donates")


def _split_with_error(split: Callable[..., Any], w: Any, error: Any, *, backend: Any) -> Any:
    return split(w, error=error, backend=backend)


def _draw(shape: tuple[int, int], dtypes: tuple[Any, ...]) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), len(dtypes))
    sizes = (1.0, 1e-3)  # of a value and of its error
    return tuple(
        (jax.random.normal(key, shape) * size).astype(dtype)
        for key, dtype, size in zip(keys, dtypes, sizes, strict=False)
    )


def _both(call: Callable[..., Any]) -> list[Named]:
    return [(backend, jax.jit(functools.partial(call, backend=backend)), None) for backend in ("xla", "triton")]
