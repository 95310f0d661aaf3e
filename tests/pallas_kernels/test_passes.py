"""Passes in Pallas Mosaic: the kernel interpreted, and compiled for an H200;
`tests/gpu` has their bits on a GPU.
"""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.hopper import plan
from pallas_kernels.operands import Block, Quantization, Row, Tensor
from pallas_kernels.quantize import mosaic
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.quantize.computed import quantize_computed
from tcfp_jax.formats import CATALOG, cast_kernel
from tcfp_jax.formats.cast_kernel import Cast
from tcfp_jax.formats.rounding import Modes
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.helpers import same_bits

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
BF16, F32 = "bfloat16", "float32"
OLD_JAX = jax.__version_info__[:2] < plan.SMALLEST_JAX
needs_mosaic = pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 needs jax 0.11")


def values_of(shape, dtype, deviation):
    """Normal values, with a NaN, infinities, a negative zero and subnormals."""
    x = np.random.default_rng(0).standard_normal(shape) * deviation
    x[1, 1], x[3, 5], x[7, 9], x[9, 2], x[20, 20], x[21, 30] = (
        np.nan,
        np.inf,
        -np.inf,
        -0.0,
        1e-39,
        -1e-39,
    )
    return x.astype(ml_dtypes.bfloat16 if dtype == BF16 else np.float32)


@needs_mosaic
@pytest.mark.parametrize(
    "orientation", [pytest.param("rows", marks=pytest.mark.slow), "both"]
)
@pytest.mark.parametrize("scaling", [Tensor("float32"), Row(), Row("float32")], ids=str)
@pytest.mark.parametrize("shape", [(2, 128, 128), (100, 96)], ids=str)
def test_the_kernel_is_the_reference_bit_for_bit(shape, scaling, orientation):
    x = jnp.asarray(values_of((np.prod(shape[:-1]), shape[-1]), BF16, 3)).reshape(shape)
    amax = jnp.float32(5) if isinstance(scaling, Tensor) else None
    call = functools.partial(
        quantize, x, E4M3, scaling, amax=amax, orientation=orientation
    )
    if shape[-1] % 64:
        with pytest.raises(
            NotImplementedError, match=r"\[100, 96\] must be multiples of 128 and 64"
        ):
            call(backend="mosaic")
        return
    assert same_bits(call(backend="mosaic"), call(backend="xla"))


@needs_mosaic
@pytest.mark.parametrize("with_bits", [False, True])
@pytest.mark.parametrize("with_error", [False, True])
def test_both_halves_are_the_reference_bit_for_bit(with_error, with_bits):
    w, error = (
        jnp.asarray(values_of((256, 64), F32, deviation)) for deviation in (1, 0.01)
    )
    bits = jax.random.bits(jax.random.key(0), w.shape) if with_bits else None
    call = functools.partial(
        dual_quantize,
        w,
        error=error if with_error else None,
        bits=bits,
        amax=jnp.float32(2),
    )
    got, expected = (
        call(orientation="both", backend=backend) for backend in ("mosaic", "xla")
    )
    assert same_bits(got, expected)


@needs_mosaic
@pytest.mark.parametrize(
    "size, with_error",
    [(32, True), pytest.param(64, False, marks=pytest.mark.slow), (128, False)],
)
def test_blocks_are_the_reference_bit_for_bit(size, with_error):
    x = (
        jnp.asarray(values_of((128, 128), F32, 3))
        .at[64:]
        .multiply(2.0**-70)
        .at[:, 96:]
        .set(0)
    )
    error = x * 0.01 if with_error else None
    call = lambda backend: dual_quantize(
        x, Block(size), error=error, orientation="both", backend=backend
    )
    assert same_bits(call("mosaic"), call("xla"))
    for block, orientation in (
        (Block(size), "both"),
        (Block(size, "vector"), "both"),
        (Block(size, "vector"), "rows"),
    ):
        call = functools.partial(quantize, x, E4M3, block, orientation=orientation)
        assert same_bits(call(backend="mosaic"), call(backend="xla"))
    options = Quantization(E4M3, Block(128), "both")
    reason = mosaic.reject_dual(options, x, x, x.astype(jnp.uint32), None)
    assert "of shared memory" in reason


def computed(x, *vectors, results=2, backend="mosaic"):
    def compute(x, total, ids, factors, places):
        share = jnp.exp2(x.astype(jnp.float32) - total) - jnp.where(
            ids == places, 1.0, 0.0
        )
        return (share * factors, share * 2.0**8)[:results]

    return quantize_computed(
        compute,
        x,
        E4M3,
        rows=vectors[:3],
        columns=vectors[3:],
        results=results,
        backend=backend,
    )


@needs_mosaic
@pytest.mark.parametrize("results", [1, 2])
def test_computed_values_are_the_reference_bit_for_bit(results):
    x, ids = jnp.asarray(values_of((128, 192), BF16, 2)), jnp.arange(192)
    vectors = (jnp.full(128, 5.0), ids[:128] % 7, jnp.full(128, 32.0), ids)
    got, expected = (
        computed(x, *vectors, results=results, backend=backend)
        for backend in ("mosaic", "xla")
    )
    assert same_bits(got, expected)


@needs_mosaic
@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_passes_with_vectors_compile_without_spills_and_devices_take_their_parts(capfd):
    mesh, x = h200s(1), on(h200s(1), (4096, 8192), BF16)
    vectors = [
        on(mesh, (size,), dtype)
        for size, dtype in ((4096, F32), (4096, "int32"), (4096, F32), (8192, "int32"))
    ]
    rows = functools.partial(
        quantize, dtype=E4M3, scaling=Row(), orientation="both", backend="mosaic"
    )
    blocks = [
        (functools.partial(rows, scaling=Block(size, "vector")), x)
        for size in (128, 64, 32)
    ]
    cast = functools.partial(
        cast_kernel.cast_tiles,
        cast_kernel.MOSAIC,
        Cast(CATALOG["mxfp4e2"], Modes(scalemode="midmax")),
    )
    for call, *operands in ((rows, x), (computed, x, *vectors), *blocks, (cast, x)):
        assert compile_for(mesh, call, *operands).targets == ["mosaic_gpu_v2"]
    assert (
        re.findall(r"(\d+) bytes stack frame", "".join(capfd.readouterr())) == ["0"] * 6
    )
    parts = compile_for(
        h200s(2, 2), rows, on(h200s(2, 2), (4096, 8192), BF16, "a", "b")
    )
    assert parts.targets == ["mosaic_gpu_v2"] and not [
        x for gather in h200.GATHERS for x in parts.results(gather)
    ]


@needs_mosaic
@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
@pytest.mark.parametrize("scaling", [Tensor(), Block(128), Block(32)], ids=str)
@pytest.mark.parametrize("call, dtype", [(quantize, BF16), (dual_quantize, F32)])
def test_a_pass_compiles_without_spills(call, dtype, scaling, capfd):
    mesh, amax = h200s(1), jnp.float32(1) if scaling == Tensor() else None
    options = dict(
        dtype=E4M3, amax=amax, orientation="both", backend="mosaic", scaling=scaling
    )
    compiled = compile_for(
        mesh, functools.partial(call, **options), on(mesh, (4096, 8192), dtype)
    )
    assert compiled.targets == ["mosaic_gpu_v2"]
    said = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame", said) == ["0"], said


@needs_mosaic
@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
def test_an_error_is_replaced_where_it_lies_and_devices_take_their_parts():
    amax = jnp.float32(1)

    def split(w, error=None):
        return dual_quantize(
            w, error=error, amax=amax, orientation="both", backend="mosaic"
        )

    alone = compile_for(
        h200s(1), split, *[on(h200s(1), (4096, 8192), F32)] * 2, donate_argnums=1
    )
    assert alone.temporary_bytes < 4096 and alone.targets == ["mosaic_gpu_v2"]
    parts = compile_for(
        h200s(2, 2), split, on(h200s(2, 2), (4096, 8192), F32, "a", "b")
    )
    assert parts.targets == ["mosaic_gpu_v2"] and not [
        x for gather in h200.GATHERS for x in parts.results(gather)
    ]
