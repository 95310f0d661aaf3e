"""Products with FP4 weights as an H200 would run them: compiled without one, and
read.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import matmul, recipe
from tcfp_jax.products import fp4_matmul as layer_matmul
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on

REASON = h200.missing()
pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    # The rows of x are rounded by such a kernel.
]
N, K = 2048, 4096


def weight(mesh, scaling, axis=None, n=N):
    scale = on(mesh, scaling.scale_shape((n, K)), scaling.scale_dtype, axis)
    outer = on(mesh, (), jnp.float32) if scaling.has_outer else None
    return Operand(
        on(mesh, (n, K // 2), jnp.uint8, axis), scale, scaling=scaling, outer=outer
    )


@pytest.mark.slow_except(
    "nvfp4-2048-8",
    "nvfp4-2048-64",
    "mxfp4-2048-40",
    "mxfp4-2048-320",
    "nvfp4-28672-8",
    "nvfp4-28672-320",
)
@pytest.mark.parametrize("m", [8, 40, 64, 320])
@pytest.mark.parametrize(("form", "n"), [("nvfp4", N), ("mxfp4", N), ("nvfp4", 28672)])
def test_decoding_stays_in_registers(form, n, m, capfd):
    mesh = h200s(1)
    compiled = compile_for(
        mesh, fp4_matmul, on(mesh, (m, K), jnp.bfloat16), weight(mesh, Fp4(form), n=n)
    )
    # Nothing chooses another implementation where rows are few; its table of scales is
    # a constant.
    assert (
        compiled.targets == ["mosaic_gpu_v2"]
        and "u32[256]{0} fusion" not in compiled.text
    )
    said = "".join(capfd.readouterr())
    assert (
        set(re.findall(r"(\d+) bytes stack frame", said)) == {"0"}
        and "serialized" not in said
    )
    # Other arrays than the weight have the size of x or of the result.
    assert compiled.temporary_bytes < 4 * (m * K * 2 + m * n * 4 * 4)
    # x is ordered, and where k is split parts of sums are added and scaled.
    assert len(compiled.results("fusion")) <= (1 if n == 28672 else 3)


@pytest.mark.slow_except("5-2048", "4-33792", "16-28672", "64-33792", "300-2048")
@pytest.mark.parametrize(
    ("m", "n"),
    [
        (5, N),
        (4, 132 * 256),
        (16, 28672),
        (12, 14336),
        (40, N),
        (64, 132 * 256),
        (256, 132 * 256),
        (2048, N),
        (300, N),
    ],
)
def test_decoding_to_e4m3_stays_in_registers(m, n, capfd):
    mesh, scaling = h200s(1), Fp4(rule="fold_exact")
    multiply = functools.partial(fp4_matmul, activation="float8_e4m3fn")
    compiled = compile_for(
        mesh, multiply, on(mesh, (m, K), jnp.bfloat16), weight(mesh, scaling, n=n)
    )
    # Blocks round few rows themselves, where they have more than one step of them.
    assert compiled.targets == ["__gpu$xla.gpu.triton"] * (m != 4) + ["mosaic_gpu_v2"]
    said = "".join(capfd.readouterr())
    assert (
        set(re.findall(r"(\d+) bytes stack frame", said)) == {"0"}
        and "serialized" not in said
    )
    # With whole k the kernel writes the product, and x is the only other array; parts
    # of k are float32.
    assert compiled.temporary_bytes == 0 or m != 4
    assert compiled.temporary_bytes < 8 * m * K + (32 * 40 * N * 4 if m < 64 else 0)


@pytest.mark.parametrize(
    ("m", "rows", "dtype"),
    [(1, 1, "float32"), (12, 12, "bfloat16"), (12, 16, "float32")],
)
@pytest.mark.parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_the_kernel_writes_the_rows_that_are_asked_for(activation, m, rows, dtype):
    mesh = h200s(1)
    multiply = functools.partial(
        fp4_matmul, activation=activation, out_dtype=jnp.dtype(dtype)
    )
    operand = weight(mesh, Fp4(rule="fold_exact"), n=132 * 256)
    compiled = compile_for(mesh, multiply, on(mesh, (m, K), jnp.bfloat16), operand)
    short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    assert compiled.results("custom-call")[-1].startswith(
        f"{short}[{rows},{132 * 256}]"
    )
    # Numbers of four bytes are copied in tiles of 8 rows, the last of which XLA cuts.
    cut = [
        result
        for result in compiled.results("fusion")
        if result.startswith(f"{short}[{m},{132 * 256}]")
    ]
    assert len(cut) == (rows != m)


@pytest.mark.parametrize("scaling", [Fp4(), Fp4("mxfp4")], ids=str)
def test_scales_that_are_not_exact_in_e4m3_are_refused(scaling):
    mesh = h200s(1)
    multiply = functools.partial(
        fp4_matmul, activation="float8_e4m3fn", backend="mosaic"
    )
    with pytest.raises(
        NotImplementedError, match=r'those of Fp4\(rule="fold_exact"\) alone are exact'
    ):
        compile_for(
            mesh, multiply, on(mesh, (64, K), jnp.bfloat16), weight(mesh, scaling)
        )


def test_each_device_decodes_its_own_rows_of_the_weight():
    mesh = h200s(2)
    compiled = compile_for(
        mesh, fp4_matmul, on(mesh, (8, K), jnp.bfloat16), weight(mesh, Fp4(), "a")
    )
    assert compiled.targets == ["mosaic_gpu_v2"] and not compiled.results("all-gather")


@pytest.mark.parametrize(
    ("activation", "unpacked"),
    [("bfloat16", f"u32[{N},{K // 2}]"), ("float8_e4m3fn", f"s16[{N},{K // 16},8]")],
)
def test_many_rows_unpack_the_weight_in_one_pass(activation, unpacked):
    mesh = h200s(1)
    multiply = functools.partial(fp4_matmul, activation=activation, backend="xla")
    operand = weight(mesh, Fp4(rule="fold_exact"))
    compiled = compile_for(mesh, multiply, on(mesh, (2048, K), jnp.bfloat16), operand)
    # Two values of a byte are written as one word by one kernel, and read by the
    # product.
    written = [
        name
        for kind in ("fusion", "custom-call")
        for name in compiled.results(kind)
        if unpacked in name
    ]
    assert len(written) == 1
    values = 2 if activation == "bfloat16" else 1
    assert compiled.temporary_bytes < 1.2 * N * K * values + 8 * 2048 * K
    assert ("__cublas$lt$matmul$f8" in compiled.targets) == (
        activation == "float8_e4m3fn"
    )


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_both_operands_in_nvfp4_are_rounded_in_one_pass_and_decoded_in_registers(
    devices,
):
    mesh, how = h200s(devices), recipe("nvfp4", activation="float4_e2m1fn")
    operand = weight(mesh, Fp4(), "a" if devices == 2 else None)
    multiply = functools.partial(layer_matmul, recipe=how)
    compiled = compile_for(mesh, multiply, on(mesh, (16, K), jnp.bfloat16), operand)
    assert compiled.targets == [
        "__gpu$xla.gpu.triton",
        "mosaic_gpu_v2",
    ] and not compiled.results("all-gather")


@pytest.mark.parametrize("rows", [16, 4096])
def test_kernels_in_a_shard_map_that_checks_what_varies(rows):
    mesh, w = h200s(2), on(h200s(2), (N, N), jnp.bfloat16)

    def few(x, w):  # quantized here, and decoded
        return fp4_matmul(x, quantize_fp4(w))

    def gradients(x, w):
        loss = lambda x, w: (
            matmul(x, w, recipe=recipe("tensorwise", backend="mosaic"))
            .astype(jnp.float32)
            .sum()
        )
        return jax.grad(loss, (0, 1))(x, w)

    inside, results = (few, P("a")) if rows == 16 else (gradients, (P("a"), P()))
    run = jax.shard_map(inside, in_specs=(P("a"), P()), out_specs=results)
    compiled = compile_for(mesh, run, on(mesh, (rows, N), jnp.bfloat16, "a"), w)
    assert set(compiled.targets) == {"mosaic_gpu_v2", "__gpu$xla.gpu.triton"}
    # Nothing moves but the sum of the gradients of a weight that devices share.
    assert not compiled.results("all-gather") and len(
        compiled.results("all-reduce")
    ) == (rows != 16)
