"""Passes in Pallas Mosaic: the kernel interpreted, and compiled for an H200;
`tests/gpu` has their bits on a GPU.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.operands import Block, Quantization, Row, Tensor
from pallas_kernels.quantize import mosaic
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.quantize.computed import quantize_computed
from tcfp_jax.formats import CATALOG, cast_kernel
from tcfp_jax.formats.cast_kernel import Cast
from tcfp_jax.formats.rounding import Modes
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.helpers import OLD_JAX, needs_mosaic, parametrize, refused, same_bits, slow

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
BF16 = "bfloat16"
F32 = "float32"
SHAPE = (4096, 8192)
needs_h200 = pytest.mark.skipif(
    OLD_JAX or h200.missing() is not None, reason=str(h200.missing())
)


def values_of(shape, dtype, deviation):
    """Normal values, with a NaN, infinities, a negative zero and subnormals."""
    x = np.random.default_rng(0).standard_normal(shape) * deviation
    x[1, 1] = np.nan
    x[3, 5] = np.inf
    x[7, 9] = -np.inf
    x[9, 2] = -0.0
    x[20, 20] = 1e-39
    x[21, 30] = -1e-39
    return jnp.asarray(x.astype(dtype))


def assert_reference(call, *arguments, **options):
    """The kernel's results are those of XLA, bit for bit."""
    run = partial(call, *arguments, **options)
    assert same_bits(run(backend="mosaic"), run(backend="xla"))


@needs_mosaic
@parametrize("orientation", [pytest.param("rows", marks=slow), "both"])
@parametrize("scaling", [Tensor("float32"), Row(), Row("float32")], ids=str)
def test_the_kernel_is_the_reference_bit_for_bit(scaling, orientation):
    x = values_of((256, 128), BF16, 3).reshape(2, 128, 128)
    amax = jnp.float32(5) if isinstance(scaling, Tensor) else None
    assert_reference(quantize, x, E4M3, scaling, amax=amax, orientation=orientation)


@needs_mosaic
@parametrize("scaling", [Tensor("float32"), Row()], ids=str)
def test_other_shapes_are_refused(scaling):
    x = jnp.ones((100, 96), BF16)
    why = r"\[100, 96\] must be multiples of 128 and 64"
    with refused(why, NotImplementedError):
        quantize(x, E4M3, scaling, backend="mosaic")


@needs_mosaic
@parametrize("with_bits", [False, True])
@parametrize("with_error", [False, True])
def test_both_halves_are_the_reference_bit_for_bit(with_error, with_bits):
    w = values_of((256, 64), F32, 1)
    options = {"amax": jnp.float32(2), "orientation": "both"}
    if with_error:
        options["error"] = values_of((256, 64), F32, 0.01)
    if with_bits:
        options["bits"] = jax.random.bits(jax.random.key(0), w.shape)
    assert_reference(dual_quantize, w, **options)


@needs_mosaic
@parametrize(
    "size, with_error",
    [(32, True), pytest.param(64, False, marks=slow), (128, False)],
)
def test_blocks_are_the_reference_bit_for_bit(size, with_error):
    x = values_of((128, 128), F32, 3)
    x = x.at[64:].multiply(2.0**-70).at[:, 96:].set(0)
    error = x * 0.01 if with_error else None
    squares = Block(size)
    vectors = Block(size, "vector")
    assert_reference(dual_quantize, x, squares, error=error, orientation="both")
    assert_reference(quantize, x, E4M3, squares, orientation="both")
    assert_reference(quantize, x, E4M3, vectors, orientation="both")
    assert_reference(quantize, x, E4M3, vectors, orientation="rows")


def test_a_tile_must_fit_into_shared_memory():
    x = jnp.ones((128, 128))
    options = Quantization(E4M3, Block(128), "both")
    reason = mosaic.DUAL.reject(options, x, x, x.astype(jnp.uint32), None)
    assert "a tile takes 262144 bytes of shared memory" in reason


def computed(x, *vectors, results=2, backend="mosaic"):
    def compute(x, total, ids, factors, places):
        share = jnp.exp2(x.astype(jnp.float32) - total)
        share -= jnp.where(ids == places, 1.0, 0.0)
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
@parametrize("results", [1, 2])
def test_computed_values_are_the_reference_bit_for_bit(results):
    x = values_of((128, 192), BF16, 2)
    ids = jnp.arange(192)
    rows = jnp.full(128, 5.0), ids[:128] % 7, jnp.full(128, 32.0)
    assert_reference(computed, x, *rows, ids, results=results)


def by_mosaic(call, scaling, **options):
    """A call of one argument by Mosaic, in both orientations."""
    return partial(
        call,
        dtype=E4M3,
        scaling=scaling,
        orientation="both",
        backend="mosaic",
        **options,
    )


def cast(x):
    options = Cast(CATALOG["mxfp4e2"], Modes(scalemode="midmax"))
    return cast_kernel.cast_tiles(cast_kernel.MOSAIC, options, x)


def assert_no_spills(capfd, call, *operands):
    compiled = compile_for(h200s(1), call, *operands)
    assert compiled.targets == ["mosaic_gpu_v2"]
    said = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes stack frame", said) == ["0"], said


def assert_devices_take_their_parts(call, dtype):
    mesh = h200s(2, 2)
    parts = compile_for(mesh, call, on(mesh, SHAPE, dtype, "a", "b"))
    assert parts.targets == ["mosaic_gpu_v2"]
    for gather in h200.GATHERS:
        assert not parts.results(gather)


@needs_h200
def test_passes_with_vectors_compile_without_spills(capfd):
    mesh = h200s(1)
    kinds = ((4096, F32), (4096, "int32"), (4096, F32), (8192, "int32"))
    vectors = [on(mesh, (size,), dtype) for size, dtype in kinds]
    assert_no_spills(capfd, computed, on(mesh, SHAPE, BF16), *vectors)


@needs_h200
@parametrize(
    "call, dtype",
    [
        *((by_mosaic(quantize, Block(size, "vector")), BF16) for size in (128, 64, 32)),
        *((by_mosaic(quantize, Block(size)), BF16) for size in (128, 32)),
        *((by_mosaic(dual_quantize, Block(size)), F32) for size in (128, 32)),
        (by_mosaic(quantize, Tensor(), amax=jnp.float32(1)), BF16),
        (by_mosaic(dual_quantize, Tensor(), amax=jnp.float32(1)), F32),
        (by_mosaic(quantize, Row()), BF16),
        (cast, BF16),
    ],
)
def test_a_pass_compiles_without_spills(call, dtype, capfd):
    assert_no_spills(capfd, call, on(h200s(1), SHAPE, dtype))


@needs_h200
def test_devices_take_their_parts():
    assert_devices_take_their_parts(by_mosaic(quantize, Row()), BF16)
    split = by_mosaic(dual_quantize, Tensor(), amax=jnp.float32(1))
    assert_devices_take_their_parts(split, F32)


@needs_h200
def test_an_error_is_replaced_where_it_lies():
    def split(w, error):
        return by_mosaic(dual_quantize, Tensor(), amax=jnp.float32(1))(w, error=error)

    matrix = on(h200s(1), SHAPE, F32)
    alone = compile_for(h200s(1), split, matrix, matrix, donate_argnums=1)
    assert alone.temporary_bytes < 4096
    assert alone.targets == ["mosaic_gpu_v2"]
