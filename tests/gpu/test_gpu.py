"""Facts that only a GPU can show.

The residual survives XLA, casts are bit-identical to the CPU, products stay in bounds.
"""

import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tcfp_jax
from pallas_kernels.hopper.plan import Problem, candidates
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.matmul.api import matmul as matmul_fp8
from pallas_kernels.operands import Operand, Product, Tensor
from pallas_kernels.quantize.api import dual_quantize
from pallas_kernels.quantize.api import quantize as quantize_values
from tcfp_jax.weights.quantization import quantize_weight
from tests.fp8_products import E4M3, E5M2, Case, drawn, within
from tests.helpers import same_bits

pytestmark = pytest.mark.gpu
QUANTIZERS = ["xla", "triton"]
MULTIPLIERS = ["xla", "mosaic", "triton"]

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.standard_normal((512, 256)) * 0.02, jnp.float32)
E = jnp.asarray(RNG.standard_normal((512, 256)) * 1e-6, jnp.float32)


def on_cpu(function, *arguments):
    """The same call, op by op, on the CPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), jax.disable_jit():
        return function(
            *jax.tree.map(lambda a: jax.device_put(np.asarray(a), cpu), arguments)
        )


def split_parts(w, e, backend="xla"):
    return dual_quantize(w, error=e, orientation="both", backend=backend)


def under_grad(split, w, e):
    def loss(v):
        parts = split(lax.stop_gradient(v), e)
        return jnp.sum(v * parts.rows.lo.astype(jnp.float32)), parts

    return jax.grad(loss, has_aux=True)(w)[1]


def second(tree):
    return jax.tree.map(lambda a: a[1], tree)


TRANSFORMS = {
    "jit": lambda split, w, e: split(w, e),
    "grad": under_grad,
    "scan": lambda split, w, e: second(
        lax.scan(lambda c, _: (c, split(w, e)), 0, None, 2)[1]
    ),
    "vmap": lambda split, w, e: second(
        jax.vmap(split)(jnp.stack([w, w]), jnp.stack([e, e]))
    ),
    "remat": lambda split, w, e: jax.checkpoint(split)(w, e),
}


@pytest.mark.parametrize(
    ("x", "n"), [((1, 256), 64), ((3, 256), 1), ((256,), 64), ((1, 1, 256), 1)]
)
def test_products_with_one_row_or_column(x, n):
    # XLA has no FP8 algorithm for a product with a vector.
    x, w = [
        Operand(jnp.asarray(RNG.standard_normal(shape), E4M3), jnp.float32(0.5))
        for shape in (x, (n, 256))
    ]
    multiply = functools.partial(matmul_fp8, out_dtype=jnp.float32, backend="xla")
    got = jax.jit(multiply)(x, w)
    assert got.shape == (*x.shape[:-1], n)
    rows = dataclasses.replace(x, values=x.values.reshape(-1, 256))
    case = Case.of(rows, w)
    assert within(got.reshape(-1, n), case.exact, case.magnitude, 2.0**-11)


@pytest.mark.parametrize("backend", QUANTIZERS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_residual_survives_the_compiler(transform, backend):
    split = functools.partial(split_parts, backend=backend)
    parts = jax.jit(functools.partial(transform, split))(W, E)
    assert float(jnp.mean(parts.rows.lo.astype(jnp.float32) != 0)) >= 0.99
    assert same_bits(parts, on_cpu(split_parts, W, E))


@pytest.mark.parametrize("backend", QUANTIZERS)
@pytest.mark.parametrize("error_dtype", ["float32", "bfloat16", "float8_e5m2"])
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
    left = jax.jit(lambda x: x - tcfp_jax.quantize(x).dequantize())(W)
    assert same_bits(left, on_cpu(lambda x: x - tcfp_jax.quantize(x).dequantize(), W))


@pytest.mark.parametrize("backend", [*QUANTIZERS, "mosaic"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("scale", ["pow2", "float32"])
def test_quantize_is_bit_identical_to_the_cpu(dtype, scale, backend):
    every_bfloat16 = lax.bitcast_convert_type(
        jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16
    ).reshape(256, 256)
    finite = jnp.where(jnp.isfinite(every_bfloat16), every_bfloat16, 0)
    for x in (finite, W, W * 1e-38, W * 1e37):
        call = functools.partial(
            quantize_values, dtype=dtype, scaling=Tensor(scale), orientation="both"
        )
        expected = on_cpu(functools.partial(call, backend="xla"), x)
        assert same_bits(jax.jit(functools.partial(call, backend=backend))(x), expected)


@pytest.mark.parametrize("error", [None, "float32", "bfloat16"])
def test_mosaic_splits_as_the_definition(error):
    e = None if error is None else E.astype(error)

    def split(backend, w, e):
        return dual_quantize(
            w, error=e, amax=np.float32(0.01), orientation="both", backend=backend
        )

    def numbers(x):
        # a GPU's NaN has other bits than a CPU's
        return np.nan_to_num(np.asarray(x, np.float32), nan=1)

    for w in (W, W * 1e-38, W.at[3, 5].set(jnp.inf).at[4, 6].set(jnp.nan)):
        got = split("mosaic", w, e)
        wanted = on_cpu(functools.partial(split, "xla"), w, e)
        assert same_bits(got[:2], wanted[:2])
        assert same_bits(numbers(got.error), numbers(wanted.error))


@pytest.mark.parametrize("backend", [*QUANTIZERS, "mosaic"])
def test_stochastic_residual_is_bit_identical_to_the_cpu(backend):
    bits = jax.random.bits(jax.random.key(2), W.shape)

    def call(w, bits, backend):
        return dual_quantize(w, bits=bits, backend=backend)

    got = jax.jit(functools.partial(call, backend=backend))(W, bits)
    assert same_bits(got, on_cpu(functools.partial(call, backend="xla"), W, bits))


def test_packed_format_is_bit_identical_to_the_cpu():
    for residual in ("linear", "nf4"):
        call = functools.partial(tcfp_jax.quantize_tcfp12, residual=residual)
        assert same_bits(jax.jit(call)(W), on_cpu(call, W))


HALVES = {"single": 1, "dual": 2}


@pytest.mark.parametrize("backend", MULTIPLIERS)
@pytest.mark.parametrize("accumulation", ["fast", "full"])
@pytest.mark.parametrize("form", ["single", "dual"])
@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize(
    "m, k, n", [(256, 512, 384), (1024, 4096, 128), (100, 50, 36)], ids=str
)
def test_products_stay_within_the_bound(backend, accumulation, form, x_dtype, m, k, n):
    x, w, exact, magnitude = drawn(Tensor(), HALVES[form], (m, k, n), x_dtype)
    call = functools.partial(
        matmul_fp8, accumulation=accumulation, out_dtype=jnp.float32, backend=backend
    )
    mixed = x_dtype == E5M2
    if (backend != "xla" and m == 100) or (backend == "triton" and mixed):
        with pytest.raises(NotImplementedError, match=r"multiple|one format"):
            jax.eval_shape(call, x, w)
        return
    got = jax.jit(call)(x, w)
    error = np.abs(np.asarray(got, np.float64) - exact)
    bound = SUM_BOUND[backend, accumulation] * magnitude
    assert np.all(error[bound == 0] == 0)  # x has rows of zeros
    ratio = np.max(error[bound > 0] / bound[bound > 0])
    print(f"{backend} {accumulation} {form} {m}x{k}x{n}: {ratio:.3f} of the bound")
    assert ratio <= 1


@pytest.mark.parametrize("accumulation", ["fast", "full"])
@pytest.mark.parametrize("form", ["single", "dual"])
@pytest.mark.parametrize("index", range(6))
def test_every_kind_of_tile_is_right(accumulation, form, index):
    """Many output tiles for each multiprocessor, rounded to bfloat16, with a bias."""
    m, k, n = 8192, 1024, 4096
    configs = candidates(Problem(m, k, n, HALVES[form]), accumulation)
    assert {config.pipeline for config in configs} == {"steady", "drained"}
    x, w, exact, magnitude = drawn(Tensor(), HALVES[form], (m, k, n))
    bias = jax.random.normal(jax.random.key(5), (n,))
    options = Product(jnp.dtype(jnp.bfloat16), accumulation)
    call = functools.partial(mosaic.KERNEL.run, options, config=configs[index])
    got = np.asarray(jax.jit(call)(x, w, bias), np.float64)
    exact = exact + np.asarray(bias, np.float64)
    bound = SUM_BOUND["mosaic", accumulation] * magnitude + 2.0**-8 * np.abs(exact)
    assert np.all(np.abs(got - exact) <= bound)


@pytest.mark.parametrize(
    "recipe, products", [("tcfp12", 4), ("tcfp12_fast", 4), ("tensorwise", 3)]
)
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


@pytest.mark.parametrize("recipe", ["tcfp12", "tcfp12_fast", "tensorwise"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf], ids=str)
def test_non_finite_values_stay_loud(recipe, bad):
    x = jax.random.normal(jax.random.key(5), (64, 512))
    for backends in ({"backend": "xla"}, {"quantize_backend": "triton"}):
        product = jax.jit(
            functools.partial(
                tcfp_jax.matmul, recipe=tcfp_jax.recipe(recipe, **backends)
            )
        )
        assert jnp.isfinite(product(x, W)).all()
        assert jnp.isnan(product(x.at[3, 7].set(bad), W)).all()
        assert jnp.isnan(product(x, W.at[3, 7].set(bad))).all()


def test_killed_run_resumes_bit_for_bit(tmp_path):
    """A run that was killed and resumed in a second process is the uninterrupted one.

    Metrics and held-out loss are the same. All use the programs that the first one
    compiled: autotuning may choose other kernels in another process.
    """
    command = [
        sys.executable,
        "-m",
        "models.train",
        "--compare",
        "none",
        "--steps",
        "120",
        "--checkpoint-every",
        "20",
    ]
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    }
    options = {"cwd": Path(__file__).parents[2], "env": environment}
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    subprocess.run([*command, "--out", str(whole)], check=True, **options)
    shutil.copytree(whole / "compiled", killed / "compiled")
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
