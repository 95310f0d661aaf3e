"""Facts that only a GPU can show: products stay in bounds, programs hold no surprise,
and a killed run resumes. `test_gpu_quantizers.py` has the quantizers.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from pallas_kernels.hopper.plan import Problem, candidates
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.matmul.api import matmul as matmul_fp8
from pallas_kernels.operands import MatmulOptions, Operand, Tensor
from tcfp_jax.weights.quantization import quantize_weight
from tests.fp8_products import E4M3, E5M2, Case, drawn, within
from tests.helpers import normal, on_cpu, parametrize, refused, same_bits

pytestmark = pytest.mark.gpu
QUANTIZERS = ["xla", "triton"]
MULTIPLIERS = ["xla", "mosaic", "triton"]

RNG = np.random.default_rng(0)
W = jnp.float32(RNG.standard_normal((512, 256)) * 0.02)


@parametrize("x, n", [((1, 256), 64), ((3, 256), 1), ((256,), 64), ((1, 1, 256), 1)])
def test_products_with_one_row_or_column(x, n):
    # XLA has no FP8 algorithm for a product with a vector.
    x, w = [
        Operand(jnp.asarray(RNG.standard_normal(shape), E4M3), jnp.float32(0.5))
        for shape in (x, (n, 256))
    ]
    multiply = partial(matmul_fp8, out_dtype=jnp.float32, backend="xla")
    got = jax.jit(multiply)(x, w)
    assert got.shape == (*x.shape[:-1], n)
    rows = dataclasses.replace(x, values=x.values.reshape(-1, 256))
    case = Case.of(rows, w)
    assert within(got.reshape(-1, n), case.exact, case.magnitude, 2.0**-11)


@parametrize("backend", QUANTIZERS)
@parametrize("error_dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_residual_survives_in_the_optimizer_update(error_dtype, backend):
    params = {"kernel": W}
    recipe = tcfp_jax.recipe("tcfp12", quantize_backend=backend)
    tx = optax.chain(
        optax.sgd(1e-3), tcfp_jax.error_feedback(recipe, error_dtype=error_dtype)
    )

    def two_steps(params):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
        stored = tcfp_jax.layer_state(state)["kernel"]
        return stored.for_dgrad().lo, params["kernel"] - stored.dequantize()

    lo, left = jax.jit(two_steps)(params)
    assert float(jnp.mean(lo.astype(jnp.float32) != 0)) >= 0.99
    assert 0 < float(jnp.linalg.norm(left)) < 1e-3 * float(jnp.linalg.norm(W))


def test_an_error_computed_by_the_user_in_jit_is_not_deleted():
    def error(x):
        return x - tcfp_jax.quantize(x).dequantize()

    with jax.disable_jit():
        expected = on_cpu(error, W)
    assert same_bits(jax.jit(error)(W), expected)


HALVES = {"single": 1, "dual": 2}


@parametrize("backend", MULTIPLIERS)
@parametrize("accumulation", ["fast", "full"])
@parametrize("form", ["single", "dual"])
@parametrize("x_dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@parametrize("m, k, n", [(256, 512, 384), (1024, 4096, 128), (100, 50, 36)], ids=str)
def test_products_stay_within_the_bound(backend, accumulation, form, x_dtype, m, k, n):
    x, w, exact, magnitude = drawn(Tensor(), HALVES[form], (m, k, n), x_dtype)
    call = partial(
        matmul_fp8, accumulation=accumulation, out_dtype=jnp.float32, backend=backend
    )
    mixed = x_dtype == E5M2
    if (backend != "xla" and m == 100) or (backend == "triton" and mixed):
        with refused(r"multiple|one format", NotImplementedError):
            jax.eval_shape(call, x, w)
        return
    got = jax.jit(call)(x, w)
    error = np.abs(np.float64(got) - exact)
    bound = SUM_BOUND[backend, accumulation] * magnitude
    assert np.all(error[bound == 0] == 0)  # x has rows of zeros
    ratio = np.max(error[bound > 0] / bound[bound > 0])
    print(f"{backend} {accumulation} {form} {m}x{k}x{n}: {ratio:.3f} of the bound")
    assert ratio <= 1


@parametrize("accumulation", ["fast", "full"])
@parametrize("form", ["single", "dual"])
@parametrize("index", range(6))
def test_every_kind_of_tile_is_right(accumulation, form, index):
    """Many output tiles for each multiprocessor, rounded to bfloat16, with a bias."""
    m, k, n = 8192, 1024, 4096
    configs = candidates(Problem(m, k, n, HALVES[form]), accumulation)
    assert {config.pipeline for config in configs} == {"steady", "drained"}
    x, w, exact, magnitude = drawn(Tensor(), HALVES[form], (m, k, n))
    bias = normal(5, (n,))
    options = MatmulOptions(jnp.dtype(jnp.bfloat16), accumulation)
    call = partial(mosaic.KERNEL.run, options, config=configs[index])
    got = np.float64(jax.jit(call)(x, w, bias))
    exact = exact + np.float64(bias)
    bound = SUM_BOUND["mosaic", accumulation] * magnitude + 2.0**-8 * np.abs(exact)
    assert np.all(np.abs(got - exact) <= bound)


@parametrize("recipe, products", [("tcfp12", 4), ("tcfp12_fast", 4), ("tensorwise", 3)])
def test_program_is_fp8_calls_and_quantization(recipe, products):
    recipe = tcfp_jax.recipe(recipe, backend="xla", quantize_backend="xla")
    x, g = (jnp.ones(shape, jnp.bfloat16) for shape in ((1024, 512), (1024, 256)))
    stored, _ = quantize_weight(W, recipe)

    def step(x, w, stored, g):
        y, vjp = jax.vjp(
            lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe, quantized=stored), x, w
        )
        return y, vjp(g)

    program = jax.jit(step).lower(x, W, stored, g).compile().as_text()
    assert program.count('custom_call_target="__cublas$lt$matmul$f8"') == products
    entry = program[program.index("ENTRY") :]
    assert not re.search(r"= \S+ transpose\(", entry)
    large = r"f32\[(1024,512|1024,256|512,1024|256,1024)\]"
    for line in entry.splitlines():
        assert not re.search(large, line.split("fusion(")[0])


@parametrize("recipe", ["tcfp12", "tcfp12_fast", "tensorwise"])
@parametrize("bad", [jnp.nan, jnp.inf], ids=str)
def test_non_finite_values_stay_loud(recipe, bad):
    x = normal(5, (64, 512))
    for backends in ({"backend": "xla"}, {"quantize_backend": "triton"}):
        chosen = tcfp_jax.recipe(recipe, **backends)
        product = jax.jit(partial(tcfp_jax.matmul, recipe=chosen))
        assert jnp.isfinite(product(x, W)).all()
        assert jnp.isnan(product(x.at[3, 7].set(bad), W)).all()
        assert jnp.isnan(product(x, W.at[3, 7].set(bad))).all()


def test_killed_run_resumes_bit_for_bit(tmp_path):
    """A run that was killed and resumed in a second process is the uninterrupted one.

    Metrics and held-out loss are the same. All use the programs that the first one
    compiled: autotuning may choose other kernels in another process.
    """
    flags = "--compare none --steps 120 --checkpoint-every 20"
    command = [sys.executable, "-m", "models.train", *flags.split()]
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    }
    options = {"cwd": Path(__file__).parents[2], "env": environment}
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    subprocess.run([*command, "--out", str(whole)], check=True, **options)
    process = subprocess.Popen([*command, "--out", str(killed)], **options)
    metrics = killed / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 30):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, (
            "the run did not get far enough in two minutes"
        )
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert metrics.read_bytes().count(b"\n") < 120
    subprocess.run([*command, "--out", str(killed), "--resume"], check=True, **options)
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    results = [
        re.search(r'"heldout_loss": (\S+),', (out / "summary.json").read_text())
        for out in (killed, whole)
    ]
    assert results[0][1] == results[1][1]
