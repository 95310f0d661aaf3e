"""The W4A8 decode kernel on one H200: right for some shapes, then timed alone with cold weights for several sizes.

    PYTHONPATH=.:/tmp/site python .ci/gpu/decode_sizes.py        (about 80 s; it stops itself at 110 s)

A line for each case, and $OUT/w4a8.json after each. A case that fails says so and the next one runs; one that hangs
ends the program, which has written all before it. Cases without a handing over of registers or clusters come first. The
best sizes belong into `pallas_kernels.fp4_matmul.mosaic._SHAPES`.
"""

import functools
import json
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

STARTED = time.monotonic()
OUT = os.path.join(os.environ.get("OUT", "."), "w4a8.json")
ROWS: list[dict] = []
BEAT = [time.monotonic()]
LIMIT, SILENCE = (float(os.environ.get(name, value)) for name, value in (("LIMIT", 110), ("SILENCE", 45)))


def note(**row):
    ROWS.append(row)
    BEAT[0] = time.monotonic()
    print(f"{time.monotonic() - STARTED:5.1f}s", " ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    with open(OUT, "w") as file:
        json.dump(ROWS, file, indent=1)


def watch():
    while True:
        time.sleep(1)
        now = time.monotonic()
        if now - STARTED > LIMIT or now - BEAT[0] > SILENCE:
            print(
                f"stopped: {'time is up' if now - STARTED > LIMIT else f'nothing for {SILENCE} s, a hang'}", flush=True
            )
            os._exit(3)


threading.Thread(target=watch, daemon=True).start()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import timing  # noqa: E402
from pallas_kernels.fp4_matmul import decode_fp8, kernel, mosaic, reference  # noqa: E402
from pallas_kernels.fp4_matmul.api import fp4_matmul  # noqa: E402
from pallas_kernels.operands import Fp4  # noqa: E402
from tcfp_jax.weights.fp4 import quantize_fp4  # noqa: E402

GPU = jax.default_backend() == "gpu"
FOLDS = Fp4(rule="fold_exact")
LARGE = (28672, 8192) if GPU else (512, 512)
pool = ThreadPoolExecutor(6)
note(what="start", jax=jax.__version__, device=jax.devices()[0].device_kind)


@functools.cache
def weight(n, k):
    w = jax.random.normal(jax.random.key(0), (n, k), jnp.bfloat16)
    return w, jax.jit(quantize_fp4, static_argnums=1)(w, FOLDS)


@functools.cache
def others(n, k):
    """A copy of the weight, so that no product finds its own in the L2 cache."""
    w = weight(n, k)[1]
    return [(jnp.copy(w.values), jnp.copy(jax.lax.bitcast_convert_type(w.scale, jnp.uint8)))]


@functools.cache
def rows(m, k):
    x = jax.random.normal(jax.random.key(1), (m, k), jnp.bfloat16)
    of_x = jax.jit(reference.quantize_rows)(x)
    return x, of_x.values, of_x.scale


@functools.cache
def expected(m, n, k):
    """The product of the very operands, by XLA in BF16 with float32 sums."""
    (_, w), (_, values, scale) = weight(n, k), rows(m, k)

    @jax.jit
    def product(values, scale, w):
        axes = (((1,), (1,)), ((), ()))
        wide = jnp.bfloat16 if GPU else jnp.float32
        operands = values.astype(wide), reference.decode(w).astype(wide)
        sums = jax.lax.dot_general(*operands, axes, preferred_element_type=jnp.float32)
        return sums * w.outer * scale[:, None]

    return np.asarray(product(values, scale, w), np.float64)


def error(got, m, n, k):
    want = expected(m, n, k)
    got = np.asarray(got.astype(jnp.float32), np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def alone(config, m, copies, out_dtype):
    """A jitted function of (x in order, factors, weights) that runs the kernel on each weight in turn."""

    def run(values, factors, weights):
        table = jnp.asarray(decode_fp8.table()).reshape(2, 256)
        outs = []
        for codes, scales in weights:
            call = functools.partial(kernel.call, config, "nvfp4", values, codes, scales, table)
            outs.append(call(factors, out_dtype) if config.splits == 1 else call())
        return outs

    return jax.jit(run)


def prepared(m, n, k, config):
    (_, w), (_, values, scale) = weight(n, k), rows(m, k)
    more = mosaic._padded(m, config) - m
    ordered = jax.jit(decode_fp8.permuted)(jnp.pad(values, ((0, more), (0, 0))))
    factors = jnp.pad(scale * w.outer / decode_fp8.FACTOR, (0, more))
    return ordered, factors, w


def finished(out, config, m, factors):
    if config.splits == 1:
        return out[:m]
    return (out.sum(0)[:, :m].T) * factors[:m, None]


def compiled(case):
    """(case, the compiled kernel or the error)."""
    m, n, k, sizes, copies, dtype = case
    try:
        config = kernel.Config(*sizes)
        ordered, factors, w = prepared(m, n, k, config)
        scales = jax.lax.bitcast_convert_type(w.scale, jnp.uint8)
        weights = [(w.values, scales)] + list(others(n, k))[: copies - 1]
        args = jax.block_until_ready((ordered, factors, weights))
        BEAT[0] = time.monotonic()
        return case, config, args, alone(config, m, copies, dtype).lower(*args).compile()
    except Exception as problem:
        return case, None, None, problem


def say(problem):
    text = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return f"{type(problem).__name__}: {text[:200]}"


# 1. Right? (m, n, k, (warpgroups, stages, splits, cluster)) -----------------------------------------------------------
f32, bf16 = jnp.float32, jnp.bfloat16
RIGHT = [
    (64, 256, 2048, (4, 3, 1, 1), f32), (64, 256, 2048, (4, 3, 4, 1), f32), (8, 64, 256, (1, 2, 1, 1), f32),
    (40, 1024, 4096, (2, 4, 1, 1), bf16), (128, 256, 2048, (2, 4, 1, 1), bf16), (96, 512, 4096, (4, 3, 1, 1), bf16),
    (256, 256, 2048, (2, 2, 1, 1), f32), (64, 512, 2048, (2, 4, 1, 2), f32), (256, 512, 4096, (2, 2, 1, 2), bf16),
    (208, 512, 4096, (2, 2, 2, 2), f32),
]  # fmt: skip
for m, n, k in {(m, n, k) for m, n, k, _, _ in RIGHT} | {(m, *LARGE) for m in (16, 64, 128, 256)}:
    weight(n, k), rows(m, k), others(n, k)
    BEAT[0] = time.monotonic()
note(what="operands")
for done in pool.map(compiled, [(m, n, k, sizes, 1, dtype) for m, n, k, sizes, dtype in RIGHT]):
    (m, n, k, sizes, _, _), config, args, program = done
    row = dict(what="right", m=m, n=n, k=k, sizes=sizes)
    if config is None:
        note(**row, failed=say(program))
        continue
    try:
        wrong = error(finished(program(*args)[0], config, m, args[1]), m, n, k)
        note(**row, error=f"{wrong:.2e}", ok=wrong < 2.0**-5)
    except Exception as problem:
        note(**row, failed=say(problem))

# 2. How fast, alone, over BF16 in the same run? Copies beyond the L2 cache. -------------------------------------------
SIZES = {
    16: [(4, 4, 1, 1), (4, 5, 1, 1), (2, 6, 1, 1), (1, 4, 1, 1)],
    64: [(4, 4, 1, 1), (4, 3, 1, 1), (2, 5, 1, 1), (1, 4, 1, 1), (2, 5, 1, 2), (4, 4, 1, 2)],
    128: [(2, 4, 1, 1), (2, 3, 1, 1), (1, 4, 1, 1), (2, 4, 1, 2), (1, 4, 1, 2), (2, 4, 2, 2)],
    256: [(2, 2, 1, 1), (1, 2, 1, 1), (2, 2, 1, 2), (1, 2, 1, 2)],
}
n, k = LARGE
CALLS = 6


def micros(function, args, count):
    times = (timing._kernel_times if GPU else timing._wall_times)(function, args, CALLS)
    return sorted(times)[len(times) // 2] * 1e3 / count


cases = [(m, n, k, sizes, 2, bf16) for m in SIZES for sizes in SIZES[m]]
cases.sort(key=lambda case: (case[3][3] > 1, [64, 128, 16, 256].index(case[0])))
programs = list(pool.map(compiled, cases))  # all before the first is timed: CUPTI sees every kernel of the process
note(what="compiled")
base = {}
for m in SIZES:
    x, w = rows(m, k)[0], weight(n, k)[0]
    multiply = jax.jit(lambda x, w: x @ w.T)  # one copy: 470 MB are far beyond the cache
    base[m] = micros(multiply, (x, w), 1)
    note(what="bf16", m=m, us=round(base[m], 1))
for case, config, args, program in programs:
    m, _, _, sizes, copies, _ = case
    row = dict(what="kernel", m=m, sizes=sizes)
    if config is None:
        note(**row, failed=say(program))
        continue
    try:
        wrong = error(finished(program(*args)[0], config, m, args[1]), m, n, k)
        us = micros(program, args, copies)
        note(**row, us=round(us, 1), over_bf16=round(base[m] / us, 2), error=f"{wrong:.2e}")
    except Exception as problem:
        note(**row, failed=say(problem))
        if "-v" in sys.argv:
            traceback.print_exc()

# 3. The whole op, quantization of x in it -----------------------------------------------------------------------------
for m in SIZES:
    try:
        whole = jax.jit(functools.partial(fp4_matmul, activation="float8_e4m3fn", backend="mosaic"))
        x, (_, w) = rows(m, k)[0], weight(n, k)
        copies = [w, jax.tree.map(jnp.copy, w)]
        each = jax.jit(lambda x, ws: [whole(x, w) for w in ws])
        us = micros(each, (x, copies), 2)
        note(
            what="op",
            m=m,
            us=round(us, 1),
            over_bf16=round(base[m] / us, 2),
            error=f"{error(each(x, copies)[0], m, n, k):.2e}",
        )
    except Exception as problem:
        note(what="op", m=m, failed=say(problem))
