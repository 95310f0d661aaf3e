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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import time_interleaved
from benchmarks.shapes import H200_SHAPES, GemmShape
from pallas_kernels import tuning
from pallas_kernels.dispatch import device_kind
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import matmul
from pallas_kernels.quantize.api import quantize
from pallas_kernels.tuning import Entry

ROUNDS, CALLS = 3, 4
# Largest difference between two results, in parts of the largest value: sums of fast accumulation differ by 2**-11.
TOLERANCE = 2.0**-6
Named = tuple[str, Callable[..., Any], Any]  # backend, jitted function, config


def run(budget_seconds: float = math.inf) -> list[Entry]:
    """Time every variant at every shape; entries are written as they are found."""
    started, entries = time.perf_counter(), []
    for op, shape, variant, arguments, candidates in itertools.chain(_products(), _quantizers()):
        if time.perf_counter() - started > budget_seconds:
            print(f"budget of {budget_seconds:g} s: stopped before {op} {variant} at {shape}")
            break
        entry = time_variant(shape, variant, arguments(), candidates)
        print(f"{op} {variant} {shape}: {entry.backend}, {dict(entry.milliseconds)} {dict(entry.configs)}", flush=True)
        write(op, entry)
        entries.append(entry)
    return entries


def time_variant(shape: tuple[int, ...], variant: str, arguments: tuple[Any, ...], candidates: list[Named]) -> Entry:
    """The entry of one variant: every candidate compiled, compared with the first (XLA), and timed in turn."""
    with ThreadPoolExecutor() as pool:  # most of a kernel's compilation is ptxas, a process of its own
        compiled = list(pool.map(lambda named: named[1].lower(*arguments).compile(), candidates))
    expected = compiled[0](*arguments)
    for (backend, _, config), function in zip(candidates, compiled, strict=True):
        if not _close(function(*arguments), expected):
            raise ArithmeticError(f"{backend} {config} at {shape} ({variant}) differs from XLA; it is not timed")
    named = {str(i): (named[1], arguments) for i, named in enumerate(candidates)}
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
    return Entry(shape, variant, winner, milliseconds, configs)


def write(op: str, entry: Entry) -> None:
    """Put one entry into `tuned.json`, in the place of an older one of its shape and variant."""
    content = json.loads(tuning.PATH.read_text(encoding="utf-8"))
    entries = content.setdefault(device_kind(), {}).setdefault(op, [])
    entries[:] = [e for e in entries if (tuple(e["shape"]), e["variant"]) != (entry.shape, entry.variant)]
    entries.append(dataclasses.asdict(entry))
    tuning.PATH.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tuning.load.cache_clear()


def _close(got: Any, expected: Any) -> bool:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        wide = [jnp.asarray(v, jnp.float32) for v in (a, b)]
        if not np.asarray(jnp.max(jnp.abs(wide[0] - wide[1])) <= TOLERANCE * jnp.max(jnp.abs(wide[1]))):
            return False
    return True


def _products() -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], tuple[Any, ...]], list[Named]]]:
    for mlp in H200_SHAPES:
        m, d, d_ff = mlp.m, mlp.k, mlp.n
        layer = [GemmShape(m, d, d_ff), GemmShape(m, d_ff, d)]  # forward of both layers, and dgrad of the other
        for shape, (halves, accumulation) in itertools.product(
            layer, ((2, "fast"), (1, "fast"), (2, "full"), (1, "full"))
        ):
            yield _product(shape, halves, accumulation, jnp.bfloat16)
        for shape in (GemmShape(d, m, d_ff), GemmShape(d_ff, m, d)):
            yield _product(shape, 1, "full", jnp.float32)


def _product(shape: GemmShape, halves: int, accumulation: str, out_dtype: Any) -> Any:
    def draw() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = [(shape.m, shape.k), *[(shape.n, shape.k)] * halves]
        draw_one = jax.jit(
            lambda key, size: (jax.random.normal(key, size) * 60).astype(jnp.float8_e4m3fn), static_argnums=1
        )
        return (*(draw_one(key, size) for key, size in zip(keys, sizes, strict=False)), jnp.bfloat16(2.0**-10))

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
    return "matmul", (shape.m, shape.k, shape.n), variant, draw, candidates


def configs(shape: GemmShape, halves: int, accumulation: str) -> list[mosaic.Config]:
    """The tile sizes worth timing: the guesses, and around the first of them other orders, depths and pipelines."""
    guesses = mosaic.candidates(shape.m, shape.k, shape.n, halves, accumulation)
    around = [
        dataclasses.replace(guess, **change)
        for guess in guesses[:2]
        for change in (dict(snake=16), dict(inner="n"), dict(pipeline="steady"), dict(pipeline="steady", stages=4))
    ]
    fitting = [c for c in around if mosaic.misfit(c, shape.m, shape.k, shape.n, halves) is None]
    return list(dict.fromkeys([*guesses, *fitting]))


def _quantizers() -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], tuple[Any, ...]], list[Named]]]:
    for mlp in H200_SHAPES:
        for rows, columns in ((mlp.m, mlp.k), (mlp.m, mlp.n)):
            for orientation in ("rows", "both"):
                call = functools.partial(quantize, dtype=jnp.float8_e4m3fn, orientation=orientation)
                draw = functools.partial(_draw, (rows, columns), (jnp.bfloat16,))
                yield "quantize", (rows, columns), f"{orientation} bfloat16", draw, _both(call)
        for shape in ((mlp.k, mlp.n), (mlp.n, mlp.k)):
            split = functools.partial(dual_quantize, orientation="both")
            yield (
                "dual_quantize",
                shape,
                "both nearest no error",
                functools.partial(_draw, shape, (jnp.float32,)),
                _both(split),
            )
            with_error = functools.partial(_split_with_error, split)
            draw = functools.partial(_draw, shape, (jnp.float32, jnp.float32))
            yield "dual_quantize", shape, "both nearest error float32", draw, _both(with_error)


def _split_with_error(split: Callable[..., Any], w: Any, error: Any, *, backend: Any) -> Any:
    return split(w, error=error * 1e-3, backend=backend)


def _draw(shape: tuple[int, int], dtypes: tuple[Any, ...]) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), len(dtypes))
    return tuple(jax.random.normal(key, shape).astype(dtype) for key, dtype in zip(keys, dtypes, strict=True))


def _both(call: Callable[..., Any]) -> list[Named]:
    return [(backend, jax.jit(functools.partial(call, backend=backend)), None) for backend in ("xla", "triton")]
