"""What only a GPU can show: the residual survives XLA, casts are bit-identical to the CPU, products stay in bounds."""

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
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul.api import matmul as matmul_fp8
from pallas_kernels.quantize.api import quantize as quantize_values
from tcfp_jax.quantization import quantize_weight

pytestmark = pytest.mark.gpu

# c eps of the bound c eps (|x| @ |w|). The tensor core's own accumulator keeps about 14 bits of each addend and
# truncates: with fast accumulation the error grows with k; "full" adds in float32 between runs of 128 addends, and it
# does not.
ACCUMULATION_BOUND = {"fast": 2.0**-11, "full": 2.0**-13}
W = jax.random.normal(jax.random.key(0), (512, 256)) * 0.02
E = jax.random.normal(jax.random.key(1), (512, 256)) * 1e-6


def on_cpu(function, *arguments):
    """The same call, op by op, on the CPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), jax.disable_jit():
        return function(*jax.tree.map(lambda a: jax.device_put(np.asarray(a), cpu), arguments))


def same_bits(a, b):
    a, b = (np.asarray(x) for x in (a, b))
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def split_parts(w, e):
    parts = dual_quantize(w, error=e, orientation="both")
    return parts.hi, parts.lo, parts.scale, parts.error, parts.lo_transposed.T


def under_grad(w, e):
    def loss(v):
        parts = split_parts(lax.stop_gradient(v), e)
        return jnp.sum(v * parts[1].astype(jnp.float32)), parts

    return jax.grad(loss, has_aux=True)(w)[1]


def second(tree):
    return jax.tree.map(lambda a: a[1], tree)


TRANSFORMS = {
    "jit": jax.jit(split_parts),
    "grad": jax.jit(under_grad),
    "scan": jax.jit(lambda w, e: second(lax.scan(lambda c, _: (c, split_parts(w, e)), 0, None, 2)[1])),
    "vmap": jax.jit(lambda w, e: second(jax.vmap(split_parts)(jnp.stack([w, w]), jnp.stack([e, e])))),
    "remat": jax.jit(jax.checkpoint(split_parts)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_residual_survives_the_compiler(transform):
    parts = transform(W, E)
    assert float(jnp.mean(parts[1].astype(jnp.float32) != 0)) >= 0.99
    for got, expected in zip(parts, on_cpu(split_parts, W, E), strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("error_dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_residual_survives_in_the_optimizer_update(error_dtype):
    params = {"kernel": W}
    tx = optax.chain(optax.sgd(1e-3), tcfp_jax.error_feedback("tcfp12", error_dtype=error_dtype))

    def two_steps(params):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
        stored = tcfp_jax.layer_state(state)["kernel"]
        return stored.lo, params["kernel"] - stored.dequantize()

    lo, left = jax.jit(two_steps)(params)
    assert float(jnp.mean(lo.astype(jnp.float32) != 0)) >= 0.99
    assert 0 < float(jnp.linalg.norm(left)) < 1e-3 * float(jnp.linalg.norm(W))


def test_an_error_computed_by_the_user_in_jit_is_not_deleted():
    left = jax.jit(lambda x: x - tcfp_jax.quantize(x).dequantize())(W)
    assert same_bits(left, on_cpu(lambda x: x - tcfp_jax.quantize(x).dequantize(), W))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=lambda d: d.__name__)
@pytest.mark.parametrize("scale", ["pow2", "float32"])
def test_quantize_is_bit_identical_to_the_cpu(dtype, scale):
    every_bfloat16 = lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)
    finite = every_bfloat16[jnp.isfinite(every_bfloat16)]
    for x in (finite, W, W * 1e-38, W * 1e37):
        call = functools.partial(quantize_values, dtype=dtype, scale=scale, orientation="both")
        for got, expected in zip(jax.jit(call)(x), on_cpu(call, x), strict=True):
            assert same_bits(got, expected)


def test_stochastic_residual_is_bit_identical_to_the_cpu():
    bits = jax.random.bits(jax.random.key(2), W.shape)
    call = lambda w, bits: dual_quantize(w, bits=bits)[:3]
    for got, expected in zip(jax.jit(call)(W, bits), on_cpu(call, W, bits), strict=True):
        assert same_bits(got, expected)


def test_packed_format_is_bit_identical_to_the_cpu():
    for residual in ("linear", "nf4"):
        call = functools.partial(tcfp_jax.quantize_tcfp12, residual=residual)
        for got, expected in zip(*map(jax.tree.leaves, (jax.jit(call)(W), on_cpu(call, W))), strict=True):
            assert same_bits(got, expected)


@pytest.mark.parametrize("accumulation", ["fast", "full"])
@pytest.mark.parametrize("form", ["single", "dual"])
@pytest.mark.parametrize("x_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=lambda d: d.__name__)
@pytest.mark.parametrize("m, k, n", [(256, 512, 384), (64, 4096, 128), (100, 50, 36)], ids=str)
def test_products_stay_within_the_bound(accumulation, form, x_dtype, m, k, n):
    x = quantize_values(jax.random.normal(jax.random.key(3), (m, k)), x_dtype)
    w = dual_quantize(jax.random.normal(jax.random.key(4), (n, k)))
    lo = w.lo if form == "dual" else None
    scale = x.scale * w.scale
    got = jax.jit(functools.partial(matmul_fp8, accumulation=accumulation, out_dtype=jnp.float32))(
        x.values, w.hi, lo, scale=scale
    )
    a, b = np.asarray(x.values, np.float64), np.asarray(w.hi, np.float64)
    if lo is not None:
        b = b + np.asarray(lo, np.float64)
    bound = ACCUMULATION_BOUND[accumulation] * (np.abs(a) @ np.abs(b).T)
    ratio = np.max(np.abs(np.asarray(got, np.float64) / float(scale) - a @ b.T) / bound)
    print(f"{accumulation} {form} {m}x{k}x{n}: {ratio:.3f} of the bound")
    assert ratio <= 1


@pytest.mark.parametrize("recipe", ["tcfp12", "tcfp12_fast", "tensorwise"])
def test_program_is_fp8_calls_and_quantization(recipe):
    x, g = (jnp.ones(shape, jnp.bfloat16) for shape in ((1024, 512), (1024, 256)))
    stored, _ = quantize_weight(W, tcfp_jax.recipe(recipe))

    def step(x, w, stored, g):
        y, vjp = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe, quantized=stored), x, w)
        return y, vjp(g)

    program = jax.jit(step).lower(x, W, stored, g).compile().as_text()
    expected = {"tcfp12": 4, "tcfp12_fast": 4, "tensorwise": 3}[recipe]
    assert program.count('custom_call_target="__cublas$lt$matmul$f8"') == expected
    entry = program[program.index("ENTRY") :]
    assert not re.search(r"= \S+ transpose\(", entry)
    large = {f"f32[{a},{b}]" for a, b in ((1024, 512), (1024, 256), (512, 1024), (256, 1024))}
    assert not [line for line in entry.splitlines() if any(shape in line.split("fusion(")[0] for shape in large)]


@pytest.mark.parametrize("recipe", ["tcfp12", "tcfp12_fast", "tensorwise"])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf], ids=str)
def test_non_finite_values_stay_loud(recipe, bad):
    x = jax.random.normal(jax.random.key(5), (64, 512))
    product = jax.jit(functools.partial(tcfp_jax.matmul, recipe=recipe))
    assert jnp.isfinite(product(x, W)).all()
    assert jnp.isnan(product(x.at[3, 7].set(bad), W)).all()
    assert jnp.isnan(product(x, W.at[3, 7].set(bad))).all()


def test_killed_run_resumes_bit_for_bit(tmp_path):
    """A run that was killed and resumed in a second process is the uninterrupted one, metrics and held-out loss alike.

    All use the programs that the first one compiled: autotuning may choose other kernels in another process.
    """
    command = [sys.executable, "-m", "models.train", "--compare", "none", "--steps", "120", "--checkpoint-every", "20"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    options = {"cwd": Path(__file__).parents[1], "env": environment}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, "--out", str(whole)], check=True, **options)
    shutil.copytree(whole / "compiled", killed / "compiled")
    process, metrics = subprocess.Popen([*command, "--out", str(killed)], **options), killed / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 30):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run did not get far enough in two minutes"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert metrics.read_bytes().count(b"\n") < 120
    subprocess.run([*command, "--out", str(killed), "--resume"], check=True, **options)
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    results = [re.search(r'"heldout_loss": (\S+),', (out / "summary.json").read_text()) for out in (killed, whole)]
    assert results[0][1] == results[1][1]
