"""Times variants of the block kernel: `python scratch_blocks.py [group ...]`, each verified against XLA first."""

import functools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.products import Form, _magnitude, same_bits
from benchmarks.shapes import GemmShape, dot_bf16, random_operands
from benchmarks.timing import time_interleaved
from pallas_kernels.hopper import kernel
from pallas_kernels.hopper.plan import Config, block_misfit
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.operands import Block, Tensor

BUDGET = 110
START = time.perf_counter()
BASE = dict(turns="free", memory=40, prefetch=False, ring=False, chunks=1, squares=False)
C = lambda **kw: Config(**{**dict(tile_m=256, tile_n=128, tile_k=128, stages=3, cluster=1), **kw})


def vectors(block, stages):
    c = functools.partial(C, tile_k=block, stages=stages)
    yield "today", {}, c(inner="n")
    yield "today cluster 2", {}, c(cluster=2)
    yield "free, 2 chunks, 24", dict(chunks=2, memory=24), c(inner="n")
    yield "free, 2 chunks, ring", dict(chunks=2, ring=True), c(inner="n")
    yield "free, 4 chunks", dict(chunks=4), c(inner="n")
    yield "issue", dict(turns="issue"), c(inner="n")
    for turns in ("issue", "done"):
        yield f"{turns}, 2 chunks, 24", dict(turns=turns, chunks=2, memory=24), c(inner="n")
        yield f"{turns}, 4 chunks", dict(turns=turns, chunks=4), c(inner="n")
    yield "issue, 4 chunks, inner m", dict(turns="issue", chunks=4), c()
    yield "issue, 4 chunks, cluster 2", dict(turns="issue", chunks=4), c(cluster=2)
    deep = dict(stages=4 * 128 // block, store_buffers=1)
    yield "issue, 4 chunks, ring, 4 x 128 deep", dict(turns="issue", chunks=4, ring=True), c(inner="n", **deep)
    yield "issue, 4 chunks, 4 x 128 deep", dict(turns="issue", chunks=4), c(inner="n", **deep)
    yield "issue, 2 chunks, ring", dict(turns="issue", chunks=2, ring=True), c(inner="n")
    yield "issue, 4 chunks, ring", dict(turns="issue", chunks=4, ring=True), c(inner="n")
    yield "issue, 4 chunks, ring, cluster 2", dict(turns="issue", chunks=4, ring=True), c(cluster=2)


def squares(block, stages):
    c = functools.partial(C, tile_k=block, stages=stages)
    ahead = dict(prefetch=True, squares=True)
    yield "today", {}, c(inner="n")
    yield "today cluster 2", {}, c(cluster=2)
    yield "free, ahead", ahead, c(inner="n")
    yield "free, ahead, ring", dict(ahead, ring=True), c(inner="n")
    yield "issue", dict(turns="issue", squares=True), c(inner="n")
    for turns in ("issue", "done"):
        yield f"{turns}, ahead", dict(ahead, turns=turns), c(inner="n")
        yield f"{turns}, ahead, 24", dict(ahead, turns=turns, memory=24), c(inner="n")
        yield f"{turns}, ahead, ring", dict(ahead, turns=turns, ring=True), c(inner="n")
    yield "issue, ahead, inner m", dict(ahead, turns="issue"), c()
    yield "issue, ahead, cluster 2", dict(ahead, turns="issue"), c(cluster=2)
    yield "issue, ahead, steady", dict(ahead, turns="issue"), c(inner="n", pipeline="steady", stages=stages // 2 * 2 or 2)
    deep = dict(stages=4 * 128 // block, store_buffers=1)
    yield "issue, ahead, 4 x 128 deep", dict(ahead, turns="issue"), c(inner="n", **deep)
    yield "issue, ahead, ring, 4 x 128 deep", dict(ahead, turns="issue", ring=True), c(inner="n", **deep)
    yield "issue, ahead, ring, cluster 2", dict(ahead, turns="issue", ring=True), c(cluster=2)


GROUPS = {
    "wgrad": ((4096, 8192, 14336), Form(1, scaling=Block(128, "vector"), out_dtype="float32"), vectors(128, 3)),
    "square": ((8192, 4096, 14336), Form(1, scaling=Block(128)), squares(128, 3)),
    "wgrad2": ((14336, 8192, 4096), Form(1, scaling=Block(128, "vector"), out_dtype="float32"), vectors(128, 3)),
    "square2": ((8192, 14336, 4096), Form(1, scaling=Block(128)), squares(128, 3)),
    "square64": ((8192, 4096, 14336), Form(1, scaling=Block(64)), squares(64, 6)),
    "wgrad64": ((4096, 8192, 14336), Form(1, scaling=Block(64, "vector"), out_dtype="float32"), vectors(64, 6)),
}


def lower(form, config, knobs, pair):
    kernel.X.update(BASE)
    kernel.X.update(knobs)
    run = jax.jit(lambda x, w: form.multiply(x, w, backend="mosaic", config=config))
    lowered = run.lower(*pair)
    kernel.X.update(BASE)
    return lowered


@jax.jit
def worst(got, expected, magnitude, bound, rounding):
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.max(jnp.abs(got - expected) / (bound * magnitude + rounding * jnp.abs(expected) + 1e-30))


def measure(name, pool):
    sizes, form, variants = GROUPS[name]
    shape = GemmShape(*sizes)
    x, w = random_operands(shape)
    pair = form.quantize(x, w, backend="xla")
    found = [v for v in variants if block_misfit(v[2], *sizes, 1) is None]
    if name.endswith("2"):
        found = [v for v in found if "today" in v[0] or "4 chunks" in v[0] or "issue, ahead" in v[0]]
    # Compiled by the pool while the next one is traced; knobs count where it is traced, here.
    lowered = [pool.submit(lower(form, config, knobs, pair).compile) for _, knobs, config in found]
    plain = Form(1, "fast", Tensor(), form.out_dtype)
    plain_pair = plain.quantize(x, w)
    # What a promotion costs without a scale: one scale an operand, promoted every 128 of k.
    whole = Form(1, "full", Tensor(), form.out_dtype)
    bare = [
        pool.submit(lower(whole, C(inner="n"), dict(turns=turns), plain_pair).compile) for turns in ("free", "issue")
    ]
    others = [
        pool.submit(jax.jit(dot_bf16).lower(x, w.astype(jnp.bfloat16)).compile),
        pool.submit(jax.jit(functools.partial(plain.multiply, backend=None)).lower(*plain_pair).compile),
        pool.submit(jax.jit(functools.partial(form.multiply, backend="xla")).lower(*pair).compile),
    ]
    compiled = [one.result() for one in lowered + others + bare]
    compiled, (bf16, tensor, xla, *bare) = compiled[: len(lowered)], compiled[len(lowered) :]
    expected = xla(*pair)
    wide = Form(1, "full", form.scaling, "float32")
    magnitude = jax.jit(functools.partial(wide.multiply, backend="xla"))(*jax.tree.map(_magnitude, pair))
    bound = SUM_BOUND["mosaic", "full"] + SUM_BOUND["xla", "full"]
    rounding = 3 * float(jnp.finfo(expected.dtype).eps) / 2
    candidates = {
        "BF16": (bf16, (x, w.astype(jnp.bfloat16))),
        "one scale, fast": (tensor, plain_pair),
        "one scale, promoted every 128, free": (bare[0], plain_pair),
        "one scale, promoted every 128, issue": (bare[1], plain_pair),
        "XLA": (xla, pair),
    }
    notes = {}
    first = None
    for (label, knobs, config), function in zip(found, compiled, strict=True):
        got = function(*pair)
        error = float(worst(got, expected, magnitude, bound, rounding))
        first = got if first is None else first
        same = same_bits(got, first)
        notes[label] = f"error {error:.3f} of bound, {'same bits' if same else 'OTHER BITS'}"
        if error <= 1:
            candidates[label] = (function, pair)
        else:
            notes[label] += " WRONG"
            print(f"{name}: {label} WRONG: {notes[label]}", flush=True)
        del got
    del magnitude, expected, first
    times = time_interleaved(candidates, rounds=3, calls=4)
    print(f"== {name} {shape} {form.variant} ({time.perf_counter() - START:.0f} s)")
    for label, timing in times.items():
        rate = shape.operations / timing.median_ms / 1e9
        print(f"{rate:7.0f} TFLOP/s {timing.median_ms:7.4f} ms (min {timing.min_ms:.4f})  {label}  {notes.get(label, '')}")
    best = min(times, key=lambda label: times[label].median_ms if label in notes else 9e9)
    for label in ("one scale, fast", "today", best):
        function, arguments = candidates[label]
        for _ in range(400 if jax.default_backend() == "gpu" else 1):
            out = function(*arguments)
        query = "clocks.sm,power.draw,temperature.gpu"
        if jax.default_backend() == "gpu":
            told = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True)
            print(f"   under load: {label}: {told.stdout.decode().strip()}")
        jax.block_until_ready(out)
    sys.stdout.flush()


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as pool:
        for group in sys.argv[1:] or GROUPS:
            if time.perf_counter() - START > BUDGET:
                print(f"== {group} left out: {BUDGET} s are over", flush=True)
                continue
            try:
                measure(group, pool)
            except Exception as error:  # the next group may still tell something
                print(f"== {group} failed: {type(error).__name__}: {str(error)[:800]}", flush=True)
