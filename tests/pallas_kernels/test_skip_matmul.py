"""`skip_matmul`, which leaves out residual blocks of zeros.

It is interpreted against float64, and compiled for an H200.
"""

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from pallas_kernels.hopper.plan import Problem, candidates
from pallas_kernels.matmul import mosaic, reference
from pallas_kernels.matmul.api import matmul, skip_matmul
from pallas_kernels.operands import Block, MatmulOptions
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.compile_for_h200 import (
    GATHERS,
    compile_for,
    h200s,
    largest_stack,
    needs_plugin,
    on_blocks,
)
from tests.fp8_products import E4M3, Case, ones, within
from tests.helpers import assert_near, needs_mosaic, parametrize, refused

# Which blocks of 128 x 128 FP8 represents exactly: rows are n-tiles, columns k-blocks.
EXACT = {
    "half": [[1, 0, 0, 1], [0, 1, 1, 0]],
    "ragged": [[1, 0, 1, 1], [0, 0, 0, 0]],
    "all": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0]],
}
by_kernel = partial(skip_matmul, backend="mosaic")
in_float32 = partial(by_kernel, out_dtype=jnp.float32)


@cache
def drawn(exact, scaling=Block(128), m=256, bad=None):
    """A product over k = 512 with n = 256, and blocks of w that are exact."""
    rng = np.random.default_rng(0)
    is_exact = np.kron(np.array(EXACT[exact], bool), np.ones((128, 128), bool))

    @jax.jit
    def quantized(x, w):
        rounded = quantize(w, E4M3, Block(128)).rows.dequantize()
        w = jnp.where(is_exact, rounded, w)
        if bad is not None:
            w = w.at[bad].set(jnp.nan)
        x = quantize(x, E4M3, scaling.along_rows).rows
        return x, dual_quantize(w, scaling).rows

    x = rng.standard_normal((m, 512)).astype(np.float32)
    w = rng.standard_normal((256, 512)).astype(np.float32)
    return Case.of(*quantized(x, w))


def test_the_work_list_begins_with_blocks_that_need_the_residual():
    count, order = mosaic._list_work(drawn("ragged").w.lo_scale, 2)
    assert count.tolist() == [1, 4]
    assert order.tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]]
    # Vectors and smaller squares: a tile is left out where all of its blocks are zero.
    count, order = mosaic._list_work(drawn("half", Block(32)).w.lo_scale, 2)
    assert count.tolist() == [8, 8]
    assert order[0, :8].tolist() == [*range(4, 12)]
    assert count.dtype == order.dtype == jnp.int32


@needs_mosaic
@parametrize(
    "exact, scaling",
    [
        *((exact, Block(128)) for exact in EXACT),
        ("half", Block(128, "vector")),
        ("half", Block(64)),
        ("half", Block(32, "vector")),
    ],
    ids=str,
)
def test_the_product_is_that_of_all_blocks(exact, scaling):
    x, w, expected, magnitude = drawn(exact, scaling)
    skipping = in_float32(x, w)
    assert within(skipping, expected, magnitude)
    if scaling == Block(128):
        every = matmul(x, w, out_dtype=jnp.float32, backend="mosaic")
        bound = float(2.0**-18 * magnitude.max())
        assert_near(skipping, every, bound)


@needs_mosaic
def test_kinds_of_configs_and_more_tiles_than_blocks():
    x, w, expected, magnitude = drawn("ragged", m=512)
    configs = candidates(Problem.of(x, w), "full")
    assert {config.cluster for config in configs} == {1, 2}
    assert {config.stages for config in configs} == {2, 3, 4}
    # One of each height and cluster; a GPU runs all of them.
    kinds = {(config.tile_m, config.cluster): config for config in configs}
    options = MatmulOptions(jnp.dtype(jnp.float32), "full")
    for config in kinds.values():
        got = mosaic.KERNEL.run(options, x, w, None, config=config)
        assert within(got, expected, magnitude)


@needs_mosaic
def test_nothing_of_a_skipped_block_is_read():
    x, w, *_ = drawn("all")
    got = in_float32(x, replace(w, lo=jnp.full_like(w.lo, jnp.nan)))
    expected = matmul(x, w.drop_residual(), out_dtype=jnp.float32, backend="xla")
    assert_allclose(got, expected, rtol=1e-5, atol=1e-3)


@needs_mosaic
def test_a_nan_is_in_a_block_that_is_not_skipped():
    x, w, *_ = drawn("half", bad=(3, 20))
    assert np.asarray(w.lo_scale).view(np.uint8)[0, 0] != 0
    got = np.asarray(in_float32(x, w))
    assert np.isnan(got[:, :128]).all()
    assert np.isfinite(got[:, 128:]).all()


def test_the_reference_is_that_of_matmul():
    x, w, *_ = drawn("ragged")
    assert np.array_equal(skip_matmul(x, w, backend="xla"), matmul(x, w, backend="xla"))


def test_a_weight_without_a_residual_in_blocks_is_refused():
    x, w, *_ = drawn("ragged")
    message = re.escape(f"scaling {Block(128)} and no residual")
    with refused(message):
        skip_matmul(x, w.drop_residual())
    one = ones((16, 16))
    with refused("only a residual in blocks has blocks to"):
        skip_matmul(one, replace(one, lo=one.values))


def test_tuned_json_tells_them_apart():
    x, w, *_ = drawn("ragged")
    options = MatmulOptions(jnp.dtype(jnp.bfloat16), "full")
    skipped = reference.key(options, x, w, None).variant
    whole = replace(w, lo_scale=None)
    assert skipped == "dual nonzero square 128 bfloat16"
    assert reference.key(options, x, whole, None).variant == "dual square 128 bfloat16"


@needs_plugin
@pytest.mark.optimized
@parametrize(
    "block, tile",
    [(128, "square"), (128, "vector"), (64, "square"), (32, "square")],
)
def test_the_kernel_stays_in_registers(block, tile, capfd):
    mesh = h200s(1)
    operands = on_blocks(mesh, (8192, 4096, 16384), Block(block, tile))
    compiled = compile_for(mesh, by_kernel, *operands)
    assert compiled.targets.count("mosaic_gpu_v2") == 1
    assert largest_stack(capfd) <= 128


@needs_plugin
@pytest.mark.optimized
@parametrize("x_axes, w_axes", [(("a",), ("b",)), (("a", "b"), (None, "b"))])
def test_each_device_lists_its_own_work(x_axes, w_axes):
    mesh = h200s(2, 2)
    operands = on_blocks(mesh, (8192, 4096, 16384), Block(128), x_axes, w_axes)
    compiled = compile_for(mesh, by_kernel, *operands)
    assert not any(compiled.results(name) for name in GATHERS)
