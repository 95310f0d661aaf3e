"""`skip_matmul`, which leaves out residual blocks of zeros: interpreted against
float64, and compiled for an H200.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.plan import SMALLEST_JAX, Problem, candidates
from pallas_kernels.matmul import mosaic, reference
from pallas_kernels.matmul.api import matmul, skip_matmul
from pallas_kernels.operands import Block, Operand, Product
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import GATHERS, compile_for, h200s, on_blocks
from tests.helpers import float64_of

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__[:2] < SMALLEST_JAX,
    reason="Mosaic's FP8 products need jax 0.11",
)
needs_plugin = pytest.mark.skipif(
    h200.missing() is not None, reason=str(h200.missing())
)
E4M3 = jnp.float8_e4m3fn
# Which blocks of 128 x 128 FP8 represents exactly: rows are n-tiles, columns k-blocks.
EXACT = {
    "half": [[1, 0, 0, 1], [0, 1, 1, 0]],
    "ragged": [[1, 0, 1, 1], [0, 0, 0, 0]],
    "all": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


@functools.cache
def operands(exact, scaling=Block(128), m=256, bad=None):
    """Operands of a product over k = 512 with n = 256, and it and its sum of magnitudes
    in float64.
    """
    rng = np.random.default_rng(0)

    @jax.jit
    def quantized(x, w, exact):
        rounded = quantize(w, E4M3, Block(128)).rows.dequantize()
        w = jnp.where(jnp.repeat(jnp.repeat(exact, 128, 0), 128, 1), rounded, w)
        w = w if bad is None else w.at[bad].set(jnp.nan)
        return quantize(x, E4M3, scaling.along_rows).rows, dual_quantize(
            w, scaling
        ).rows

    drawn = (rng.standard_normal((rows, 512)).astype(np.float32) for rows in (m, 256))
    x, w = quantized(*drawn, np.array(EXACT[exact], bool))
    a, b = float64_of(x), float64_of(w)
    return x, w, a @ b.T, np.abs(a) @ np.abs(b).T


def within(got, exact, magnitude):
    return np.all(np.abs(np.asarray(got, np.float64) - exact) <= 2.0**-19 * magnitude)


float32_product = functools.partial(
    skip_matmul, out_dtype=jnp.float32, backend="mosaic"
)


def test_the_work_list_puts_what_needs_the_residual_first():
    count, order = mosaic._list_work(operands("ragged")[1].lo_scale, 2)
    assert count.tolist() == [1, 4] and order.tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]]
    # Vectors and smaller squares: a tile is left out where all of its blocks are zero.
    count, order = mosaic._list_work(operands("half", Block(32))[1].lo_scale, 2)
    assert count.tolist() == [8, 8] and order[0, :8].tolist() == [*range(4, 12)]
    assert count.dtype == order.dtype == jnp.int32


@needs_mosaic
@pytest.mark.parametrize(
    ("exact", "scaling"),
    [
        *((exact, Block(128)) for exact in EXACT),
        ("half", Block(128, "vector")),
        ("half", Block(64)),
        ("half", Block(32, "vector")),
    ],
    ids=str,
)
def test_the_product_is_that_of_all_blocks(exact, scaling):
    x, w, expected, magnitude = operands(exact, scaling)
    skipping = float32_product(x, w)
    assert within(skipping, expected, magnitude)
    if scaling == Block(128):
        every = matmul(x, w, out_dtype=jnp.float32, backend="mosaic")
        np.testing.assert_allclose(
            skipping, every, rtol=0, atol=float(2.0**-18 * magnitude.max())
        )


@needs_mosaic
def test_kinds_of_configs_and_more_tiles_than_blocks():
    x, w, expected, magnitude = operands("ragged", m=512)
    configs = candidates(Problem.of(x, w), "full")
    assert {config.cluster for config in configs} == {1, 2} and {
        config.stages for config in configs
    } == {2, 3, 4}
    # One of each height and cluster; a GPU runs all of them.
    for config in {
        (config.tile_m, config.cluster): config for config in configs
    }.values():
        got = mosaic.matmul(
            Product(jnp.dtype(jnp.float32), "full"), x, w, None, config=config
        )
        assert within(got, expected, magnitude)


@needs_mosaic
def test_nothing_of_a_skipped_block_is_read():
    x, w, *_ = operands("all")
    got = float32_product(x, dataclasses.replace(w, lo=jnp.full_like(w.lo, jnp.nan)))
    expected = matmul(x, w.drop_residual(), out_dtype=jnp.float32, backend="xla")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-3)


@needs_mosaic
def test_a_nan_is_in_a_block_that_is_not_skipped():
    x, w, *_ = operands("half", bad=(3, 20))
    assert np.asarray(w.lo_scale).view(np.uint8)[0, 0] != 0
    got = np.asarray(float32_product(x, w))
    assert np.isnan(got[:, :128]).all() and np.isfinite(got[:, 128:]).all()


def test_bad_input_and_the_reference():
    x, w, *_ = operands("ragged")
    assert np.array_equal(skip_matmul(x, w, backend="xla"), matmul(x, w, backend="xla"))
    one = Operand(jnp.ones((16, 16), E4M3), jnp.float32(1))
    for pair, message in (
        ((x, w.drop_residual()), f"scaling {Block(128)} and no residual"),
        (
            (one, dataclasses.replace(one, lo=one.values)),
            "only a residual in blocks has blocks to leave out",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            skip_matmul(*pair)


def test_tuned_json_tells_them_apart():
    (x, w, *_), options = operands("ragged"), Product(jnp.dtype(jnp.bfloat16), "full")
    names = [
        reference.key(options, x, w, None).variant
        for w in (dataclasses.replace(w, lo_scale=None), w)
    ]
    assert names == ["dual square 128 bfloat16", "dual nonzero square 128 bfloat16"]


@needs_plugin
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("block", "tile"),
    [(128, "square"), (128, "vector"), (64, "square"), (32, "square")],
)
def test_the_kernel_stays_in_registers(block, tile, capfd):
    mesh = h200s(1)
    x, w = on_blocks(mesh, (8192, 4096, 16384), Block(block, tile))
    compiled = compile_for(mesh, functools.partial(skip_matmul, backend="mosaic"), x, w)
    assert compiled.targets.count("mosaic_gpu_v2") == 1
    stacks = re.findall(r"(\d+) bytes stack frame", "".join(capfd.readouterr()))
    assert stacks and max(map(int, stacks)) <= 128


@needs_plugin
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("x_axes", "w_axes"), [(("a",), ("b",)), (("a", "b"), (None, "b"))]
)
def test_each_device_lists_its_own_work(x_axes, w_axes):
    mesh = h200s(2, 2)
    x, w = on_blocks(mesh, (8192, 4096, 16384), Block(128), x_axes, w_axes)
    compiled = compile_for(mesh, functools.partial(skip_matmul, backend="mosaic"), x, w)
    assert not [shape for name in GATHERS for shape in compiled.results(name)]
