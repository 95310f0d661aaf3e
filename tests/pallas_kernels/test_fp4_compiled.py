"""Products with FP4 weights, compiled for an H200 without one, and read."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import pallas_triton
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import matmul, recipe
from tcfp_jax.products import fp4_matmul as layer_matmul
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.fp4_cases import FOLDS
from tests.helpers import parametrize, refused, slow, slow_except

pytestmark = [
    pytest.mark.optimized,
    h200.needs_plugin,
]
N, K = 2048, 4096
# As many outputs as the chip has multiprocessors, times four warpgroups of 64: k is not
# split.
WHOLE = 132 * 256
MOSAIC = "mosaic_gpu_v2"
TRITON = "__gpu$xla.gpu.triton"


def weight(mesh, scaling, axis=None, n=N):
    codes = on(mesh, (n, K // 2), jnp.uint8, axis)
    scale = on(mesh, scaling.scale_shape((n, K)), scaling.scale_dtype, axis)
    outer = on(mesh, (), jnp.float32) if scaling.has_outer else None
    return Operand(codes, scale, scaling=scaling, outer=outer)


def compiled_product(m, scaling, n=N, **options):
    """The program of one H200 for a product of m rows of x in bfloat16."""
    mesh = h200s(1)
    multiply = partial(fp4_matmul, **options)
    x = on(mesh, (m, K), jnp.bfloat16)
    return compile_for(mesh, multiply, x, weight(mesh, scaling, n=n))


def assert_in_registers(said):
    """Assert by the messages of ptxas that nothing was spilled or serialized."""
    assert set(re.findall(r"(\d+) bytes stack frame", said)) == {"0"}
    assert "serialized" not in said


@slow_except(
    "nvfp4-2048-8",
    "nvfp4-2048-64",
    "mxfp4-2048-40",
    "mxfp4-2048-320",
    "nvfp4-28672-8",
    "nvfp4-28672-320",
)
@parametrize("m", [8, 40, 64, 320])
@parametrize("form, n", [("nvfp4", N), ("mxfp4", N), ("nvfp4", 28672)])
def test_decoding_stays_in_registers(form, n, m, capfd):
    compiled = compiled_product(m, Fp4(form), n)
    # Nothing chooses another implementation where rows are few; its table of scales is
    # a constant.
    assert compiled.targets == [MOSAIC]
    assert "u32[256]{0} fusion" not in compiled.text
    assert_in_registers("".join(capfd.readouterr()))
    # Other arrays than the weight have the size of x or of the result.
    assert compiled.temporary_bytes < 4 * (m * K * 2 + m * n * 4 * 4)
    # x is ordered, and where k is split parts of sums are added and scaled.
    assert len(compiled.results("fusion")) <= (1 if n == 28672 else 3)


@slow_except("5-2048", "4-33792", "16-28672", "64-33792", "300-2048")
@parametrize(
    "m, n",
    [
        (5, N),
        (4, WHOLE),
        (16, 28672),
        (12, 14336),
        (40, N),
        (64, WHOLE),
        (256, WHOLE),
        (2048, N),
        (300, N),
    ],
)
def test_decoding_to_e4m3_stays_in_registers(m, n, capfd):
    compiled = compiled_product(m, FOLDS, n, activation="float8_e4m3fn")
    # Blocks round few rows themselves, where they have more than one step of them.
    assert compiled.targets == ([MOSAIC] if m == 4 else [TRITON, MOSAIC])
    assert_in_registers("".join(capfd.readouterr()))
    # With whole k the kernel writes the product, and x is the only other array; parts
    # of k are float32.
    assert compiled.temporary_bytes == 0 or m != 4
    parts = 32 * 40 * N * 4 if m < 64 else 0
    assert compiled.temporary_bytes < 8 * m * K + parts


@parametrize("m", [3, 72])  # that no other test has traced with Triton
def test_mosaic_multiplies_without_triton(m, monkeypatch):
    reason = "this jax has no Pallas-Triton"
    monkeypatch.setattr(pallas_triton, "missing", lambda: reason)
    compiled = compiled_product(m, FOLDS, WHOLE, activation="float8_e4m3fn")
    # Blocks round few rows themselves; Mosaic rounds many by another kernel.
    assert set(compiled.targets) == {MOSAIC}


@parametrize(
    "m, rows, dtype",
    [(1, 1, "float32"), (12, 12, "bfloat16"), (12, 16, "float32")],
)
@parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_the_kernel_writes_the_rows_of_x(activation, m, rows, dtype):
    compiled = compiled_product(
        m, FOLDS, WHOLE, activation=activation, out_dtype=jnp.dtype(dtype)
    )
    short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    written = compiled.results("custom-call")[-1]
    assert written.startswith(f"{short}[{rows},{WHOLE}]")
    # Numbers of four bytes are copied in tiles of 8 rows, the last of which XLA cuts.
    cut = f"{short}[{m},{WHOLE}]"
    found = [result for result in compiled.results("fusion") if result.startswith(cut)]
    assert len(found) == (rows != m)


@parametrize("scaling", [Fp4(), Fp4("mxfp4")], ids=str)
def test_scales_that_are_not_exact_in_e4m3_are_refused(scaling):
    message = r'those of Fp4\(rule="fold_exact"\) alone are exact'
    with refused(message, NotImplementedError):
        compiled_product(64, scaling, activation="float8_e4m3fn", backend="mosaic")


def test_each_device_decodes_its_own_rows_of_the_weight():
    mesh = h200s(2)
    x = on(mesh, (8, K), jnp.bfloat16)
    compiled = compile_for(mesh, fp4_matmul, x, weight(mesh, Fp4(), "a"))
    assert compiled.targets == [MOSAIC]
    assert not compiled.results("all-gather")


@parametrize(
    "activation, unpacked",
    [("bfloat16", f"u32[{N},{K // 2}]"), ("float8_e4m3fn", f"s16[{N},{K // 16},8]")],
)
def test_many_rows_unpack_the_weight_in_one_pass(activation, unpacked):
    compiled = compiled_product(2048, FOLDS, activation=activation, backend="xla")
    # Two values of a byte are written as one word by one kernel, and read by the
    # product.
    results = [*compiled.results("fusion"), *compiled.results("custom-call")]
    assert len([result for result in results if unpacked in result]) == 1
    in_fp8 = activation == "float8_e4m3fn"
    values = 1 if in_fp8 else 2
    assert compiled.temporary_bytes < 1.2 * N * K * values + 8 * 2048 * K
    assert ("__cublas$lt$matmul$f8" in compiled.targets) == in_fp8


@parametrize("devices", [pytest.param(1, marks=slow), 2])
def test_nvfp4_operands_are_rounded_once(devices):
    mesh = h200s(devices)
    operand = weight(mesh, Fp4(), "a" if devices == 2 else None)
    how = recipe("nvfp4", activation="float4_e2m1fn")
    multiply = partial(layer_matmul, recipe=how)
    compiled = compile_for(mesh, multiply, on(mesh, (16, K), jnp.bfloat16), operand)
    assert compiled.targets == [TRITON, MOSAIC]
    assert not compiled.results("all-gather")


def few_rows(x, w):
    """A product with a weight that is quantized here, and decoded."""
    return fp4_matmul(x, quantize_fp4(w))


def gradients(x, w):
    def loss(x, w):
        y = matmul(x, w, recipe=recipe("tensorwise", backend="mosaic"))
        return y.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))(x, w)


@parametrize(
    "rows, inside, results, kernels, reduced",
    [
        # XLA packs the codes.
        (16, few_rows, P("a"), {MOSAIC}, 0),
        (4096, gradients, (P("a"), P()), {MOSAIC, TRITON}, 1),
    ],
    ids=["16", "4096"],
)
def test_kernels_in_a_shard_map_that_checks_types(
    rows, inside, results, kernels, reduced
):
    mesh = h200s(2)
    x = on(mesh, (rows, N), jnp.bfloat16, "a")
    w = on(mesh, (N, N), jnp.bfloat16)
    run = jax.shard_map(inside, in_specs=(P("a"), P()), out_specs=results)
    compiled = compile_for(mesh, run, x, w)
    assert set(compiled.targets) == kernels
    # Nothing moves but the sum of the gradients of a weight that devices share.
    assert not compiled.results("all-gather")
    assert len(compiled.results("all-reduce")) == reduced
