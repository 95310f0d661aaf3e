"""Sizes of the FP4 decode kernels on one H200: each is compared with XLA's product, then timed with cold weights.

    PYTHONPATH=.:/tmp/site python .ci/gpu/decode_sizes.py        (about 60 s; it stops itself at 110 s)

A line for each case, and $OUT/decode_sizes.json after each. A case that fails says so and the next one runs; one that
hangs ends the program. The best sizes belong into `pallas_kernels.fp4_matmul.mosaic`. None are those that it chooses.
"""

import functools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

STARTED = time.monotonic()
OUT = os.path.join(os.environ.get("OUT", "."), "decode_sizes.json")
ROWS: list[dict] = []
LIMIT = float(os.environ.get("LIMIT", 110))


def note(**row):
    ROWS.append(row)
    print(f"{time.monotonic() - STARTED:5.1f}s", " ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    with open(OUT, "w") as file:
        json.dump(ROWS, file, indent=1)


def watch():
    time.sleep(LIMIT)
    print("stopped: time is up", flush=True)
    os._exit(3)


threading.Thread(target=watch, daemon=True).start()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from benchmarks import timing  # noqa: E402
from pallas_kernels.fp4_matmul import mosaic, parts  # noqa: E402
from pallas_kernels.fp4_matmul.kernel import Config  # noqa: E402
from pallas_kernels.fp4_matmul.reference import Options  # noqa: E402
from pallas_kernels.operands import Fp4  # noqa: E402
from tcfp_jax.weights.fp4 import quantize_fp4  # noqa: E402

BF16, E4M3 = "bfloat16", "float8_e4m3fn"
LARGE, SQUARE, SMALL = (28672, 8192), (8192, 8192), (14336, 4096)
# (n, k), activation, m: (warpgroups, stages, splits, rows), None for those that are chosen, or "xla".
CASES = {
    (LARGE, BF16, 1): [None],
    (LARGE, BF16, 16): [None, (4, 3, 1, None)],
    (LARGE, BF16, 64): [None],
    (LARGE, E4M3, 16): [None],
    (LARGE, E4M3, 64): [None],
    (LARGE, E4M3, 128): [None],
    (LARGE, E4M3, 256): [None, (2, 4, 1, 128)],
    (SQUARE, BF16, 16): [None, (2, 6, 2, None)],
    (SQUARE, E4M3, 16): [None, (2, 6, 2, None)],
    (SMALL, BF16, 16): [None, (2, 6, 1, None), (4, 4, 2, None)],
    (SMALL, E4M3, 16): [None, (2, 6, 1, None)],
    (LARGE, E4M3, 512): [None, (2, 2, 1, 256), "xla"],
    (LARGE, E4M3, 1024): [None],
    (LARGE, E4M3, 2048): [None, (2, 4, 1, 128), "xla"],
    (LARGE, E4M3, 4096): [None],
}
COLD = 240e6
CALLS = 6


@functools.cache
def weight(shape):
    w = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    q = jax.jit(quantize_fp4, static_argnums=1)(w, Fp4(rule="fold_exact"))
    count = lambda leaf: max(1, round(COLD / leaf.nbytes + 0.5))
    copies = lambda tree: [tree, *(jax.tree.map(jnp.copy, tree) for _ in range(count(tree) - 1))]
    return copies(w), copies(q)


def prepared(case):
    (shape, activation, m), sizes = case
    x = jax.random.normal(jax.random.key(1), (m, shape[1]), jnp.bfloat16)
    options = Options(jnp.dtype(jnp.bfloat16), activation)
    config = Config(*sizes) if isinstance(sizes, tuple) else None
    multiply = functools.partial(mosaic.fp4_matmul, options, config=config)
    if sizes == "xla":
        multiply = functools.partial(parts.by_xla, options)
    run = jax.jit(lambda x, ws: [multiply(x, w) for w in ws])
    try:
        return case, x, run.lower(x, weight(shape)[1]).compile()
    except Exception as problem:
        return case, x, problem


def micros(function, args, count):
    times = (timing._kernel_times if jax.default_backend() == "gpu" else timing._wall_times)(function, args, CALLS)
    return round(sorted(times)[len(times) // 2] * 1e3 / count, 1)


note(what="start", jax=jax.__version__, device=jax.devices()[0].device_kind)
for shape, *_ in CASES:
    weight(shape)
with ThreadPoolExecutor(6) as pool:
    programs = list(pool.map(prepared, [(case, sizes) for case, found in CASES.items() for sizes in found]))
note(what="compiled")
base, expected = {}, {}
for (shape, activation, m), _ in [case for case, *_ in programs]:
    key = shape, activation, m
    x, (wide, packed) = jax.random.normal(jax.random.key(1), (m, shape[1]), jnp.bfloat16), weight(shape)
    if (shape, m) not in base:
        multiply = jax.jit(lambda x, ws: [x @ w.T for w in ws])
        base[shape, m] = micros(multiply, (x, wide), len(wide))
        note(what="bf16", n=shape[0], k=shape[1], m=m, us=base[shape, m])
    if key not in expected:
        options = Options(jnp.dtype(jnp.bfloat16), activation)
        expected[key] = jax.jit(functools.partial(parts.by_xla, options))(x, packed[0]).astype(jnp.float32)
for ((shape, activation, m), sizes), x, program in programs:
    row = dict(n=shape[0], k=shape[1], activation=activation, m=m, sizes=sizes)
    if isinstance(program, Exception):
        note(**row, failed=f"{type(program).__name__}: {str(program).strip()[:200]}")
        continue
    packed, want = weight(shape)[1], expected[shape, activation, m]
    got = program(x, packed)[-1].astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    us = micros(program, (x, packed), len(packed))
    note(**row, us=us, over_bf16=round(base[shape, m] / us, 2), error=f"{error:.1e}", ok=error < 2.0**-6)
