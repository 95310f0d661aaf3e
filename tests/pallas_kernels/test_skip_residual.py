"""Products that leave out residual blocks of zeros: interpreted against float64, compiled for an H200, and timed."""

import dataclasses
import functools
import json
import math
import re

import compile_for_h200 as h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_for_h200 import compile_for, h200s, on
from jax import lax
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_matmul import mosaic
from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_quantize.api import block_quantize

from benchmarks import common, skip_residual
from pallas_kernels.blocks import Blocked, scales_shape
from pallas_kernels.matmul.mosaic import SMALLEST_JAX

needs_mosaic = pytest.mark.skipif(jax.__version_info__[:2] < SMALLEST_JAX, reason="Mosaic's FP8 products need jax 0.11")
needs_plugin = pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
E4M3 = jnp.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("quick_compiles")
X_KEY, W_KEY = jax.random.split(jax.random.key(0))
# Which blocks of 128 x 128 FP8 represents exactly: rows are n-tiles, columns k-blocks.
EXACT = {
    "half": [[1, 0, 0, 1], [0, 1, 1, 0]],
    "ragged": [[1, 0, 1, 1], [0, 0, 0, 0]],
    "all": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


def operands(exact, block=128, tile="square", m=256, bad=None):
    """Operands of a product over k = 512 with n = 256, and it and its sum of magnitudes in float64."""
    x, w = jax.random.normal(X_KEY, (m, 512)), jax.random.normal(W_KEY, (256, 512))
    w = skip_residual.round_blocks(w, jnp.array(EXACT[exact], bool))
    w = w if bad is None else w.at[bad].set(jnp.nan)
    x_q, w_q = block_quantize(x, E4M3, block=block), block_dual_quantize(w, block=block, tile=tile)
    wide = lambda values, scales, rows: (
        np.asarray(values, np.float64) * np.repeat(np.repeat(np.asarray(scales, np.float64), rows, 0), block, 1)
    )
    rows = block if tile == "square" else 1
    a, b = wide(x_q.values, x_q.scales, 1), wide(w_q.hi, w_q.scales, rows) + wide(w_q.lo, w_q.scales, rows)
    halves = Blocked(w_q.hi, w_q.scales), Blocked(w_q.lo, w_q.residual_scales)
    return (Blocked(*x_q[:2]), *halves), a @ b.T, np.abs(a) @ np.abs(b).T


def within(got, exact, magnitude):
    return np.all(np.abs(np.asarray(got, np.float64) - exact) <= 2.0**-19 * magnitude)


def test_the_work_list_puts_what_needs_the_residual_first():
    (_, _, lo), *_ = operands("ragged")
    count, order = mosaic.list_work(lo.scales, 2)
    assert count.tolist() == [1, 4] and order.tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]]
    # Vectors and smaller squares: a tile is left out where all of its blocks are zero.
    (_, _, lo), *_ = operands("half", 32, "square")
    count, order = mosaic.list_work(lo.scales, 2)
    assert count.tolist() == [8, 8] and order[0, :8].tolist() == [*range(4, 12)]
    assert count.dtype == order.dtype == jnp.int32


@needs_mosaic
@pytest.mark.parametrize("exact", EXACT)
def test_the_product_is_that_of_all_blocks(exact):
    arguments, expected, magnitude = operands(exact)
    call = functools.partial(block_matmul, *arguments, block=128, out_dtype=jnp.float32)
    skipping = call(residual_blocks="nonzero", backend="mosaic")
    assert within(skipping, expected, magnitude)
    np.testing.assert_allclose(skipping, call(backend="mosaic"), rtol=0, atol=float(2.0**-18 * magnitude.max()))


@needs_mosaic
@pytest.mark.parametrize(("block", "tile"), [(128, "vector"), (64, "square"), (32, "vector")])
def test_other_blocks(block, tile):
    arguments, expected, magnitude = operands("half", block, tile)
    call = functools.partial(block_matmul, *arguments, block=block, tile=tile, out_dtype=jnp.float32)
    assert within(call(residual_blocks="nonzero", backend="mosaic"), expected, magnitude)


@needs_mosaic
def test_every_config_and_more_tiles_than_blocks():
    arguments, expected, magnitude = operands("ragged", m=512)
    configs = mosaic.candidates(512, 512, 256, 2, 128, "nonzero")
    assert {config.cluster for config in configs} == {1, 2} and {config.stages for config in configs} == {2, 3, 4}
    for config in configs:
        got = mosaic.block_matmul(
            *arguments, block=128, tile="square", out_dtype=jnp.float32, residual_blocks="nonzero", config=config
        )
        assert within(got, expected, magnitude)


@needs_mosaic
def test_nothing_of_a_skipped_block_is_read():
    (x, hi, lo), *_ = operands("all")
    lo = Blocked(jnp.full_like(lo.values, jnp.nan), lo.scales)
    call = functools.partial(block_matmul, block=128, out_dtype=jnp.float32)
    got = call(x, hi, lo, residual_blocks="nonzero", backend="mosaic")
    np.testing.assert_allclose(got, call(x, hi, backend="xla"), rtol=1e-5, atol=1e-3)


@needs_mosaic
def test_a_nan_is_in_a_block_that_is_not_skipped():
    arguments, *_ = operands("half", bad=(3, 20))
    assert np.asarray(arguments[2].scales).view(np.uint8)[0, 0] != 0
    got = block_matmul(*arguments, block=128, residual_blocks="nonzero", out_dtype=jnp.float32, backend="mosaic")
    assert np.isnan(np.asarray(got)[:, :128]).all() and np.isfinite(np.asarray(got)[:, 128:]).all()


def test_the_reference_multiplies_zeros():
    arguments, *_ = operands("half")
    call = functools.partial(block_matmul, *arguments, block=128, backend="xla")
    assert np.array_equal(call(residual_blocks="nonzero"), call())


def test_bad_input():
    x, hi, lo = operands("half")[0]
    with pytest.raises(ValueError, match=re.escape('residual_blocks=\'some\' is unknown; use "all" or "nonzero"')):
        block_matmul(x, hi, lo, block=128, residual_blocks="some")
    with pytest.raises(ValueError, match="pass w_lo"):
        block_matmul(x, hi, block=128, residual_blocks="nonzero")


def test_tuned_json_tells_them_apart():
    options = dict(block=128, tile="square", out_dtype=jnp.bfloat16)
    names = [mosaic.variant(2, residual_blocks=blocks, **options) for blocks in ("all", "nonzero")]
    assert names == ["dual square 128 bfloat16", "dual nonzero square 128 bfloat16"]


def abstract_operands(mesh, block, tile, x_axes=(), w_axes=()):
    m, k, n = 8192, 4096, 16384
    blocked = [
        Blocked(on(mesh, shape, E4M3, *axes), on(mesh, scales_shape(shape, block, form), jnp.float8_e8m0fnu, *axes))
        for shape, form, axes in (((m, k), "vector", x_axes), ((n, k), tile, w_axes))
    ]
    return blocked[0], blocked[1], blocked[1]


@needs_plugin
@pytest.mark.optimized
@pytest.mark.parametrize(("block", "tile"), [(128, "square"), (128, "vector"), (64, "square"), (32, "square")])
def test_the_kernel_stays_in_registers(block, tile, capfd):
    mesh = h200s(1)
    call = functools.partial(block_matmul, block=block, tile=tile, residual_blocks="nonzero", backend="mosaic")
    compiled = compile_for(mesh, call, *abstract_operands(mesh, block, tile))
    assert compiled.targets.count("mosaic_gpu_v2") == 1
    stacks = re.findall(r"(\d+) bytes stack frame", "".join(capfd.readouterr()))
    # The tile sizes were chosen with jax 0.11, which GPUs have run; the LLVM of 0.12 spills more of the smaller blocks.
    limit = 128 if block == 128 or jax.__version_info__[:2] == (0, 11) else 256
    assert stacks and max(map(int, stacks)) <= limit


@needs_plugin
@pytest.mark.optimized
@pytest.mark.parametrize(("x_axes", "w_axes"), [(("a",), ("b",)), (("a", "b"), (None, "b"))])
def test_each_device_lists_its_own_work(x_axes, w_axes):
    mesh = h200s(2, 2)
    call = functools.partial(block_matmul, block=128, residual_blocks="nonzero", backend="mosaic")
    compiled = compile_for(mesh, call, *abstract_operands(mesh, 128, "square", x_axes, w_axes))
    assert not [
        shape for name in ("all-gather", "all-to-all", "collective-permute") for shape in compiled.results(name)
    ]


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_weights_of_the_benchmark_are_exact_in_their_part(part):
    w = skip_residual.draw_weight((512, 1024), part, seed=0)
    q = block_dual_quantize(w, block=128)
    codes = np.asarray(lax.bitcast_convert_type(q.residual_scales, jnp.uint8))
    assert np.mean(codes == 0) == part
    assert np.count_nonzero(np.asarray(w)) == w.size


def test_smoke(tmp_path):
    rows = skip_residual.main(["--smoke", "--out", str(tmp_path)])
    content = json.loads((tmp_path / common.device_slug() / "skip_residual.json").read_text())
    assert content["benchmark"] == "skip_residual" and len(content["rows"]) == len(rows) > 0
    assert {row.kind for row in rows} >= {"bf16", "all blocks", "nonzero blocks"}
    for row in rows:
        numbers = [value for value in dataclasses.asdict(row).values() if isinstance(value, int | float)]
        assert all(map(math.isfinite, numbers))


def test_a_wrong_product_is_not_timed(monkeypatch):
    monkeypatch.setattr(skip_residual, "SUM_BOUND", dict.fromkeys(skip_residual.SUM_BOUND, 0.0))
    monkeypatch.setattr(skip_residual, "OUTPUT_BOUND", 0.0)
    with pytest.raises(ArithmeticError, match="not timed"):
        skip_residual.measure(skip_residual.SMOKE)
