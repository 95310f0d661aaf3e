"""The grouped kernel for Hopper: its lists, its interpreter, and its registers."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pallas_kernels.grouped_matmul import mosaic, tiles
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.hopper.plan import SMALLEST_JAX, Config
from pallas_kernels.operands import SCALE_DTYPE, Block, MatmulOptions, Operand, Tensor
from tests.compile_for_h200 import compile_for, h200s, largest_stack, needs_plugin, on
from tests.grouped import (
    BF16,
    FORMS,
    by_groups,
    edges,
    sizes_of,
    within_groups,
    wrong_sizes,
)
from tests.helpers import parametrize, refused, slow, slow_except

OLD_JAX = jax.__version_info__[:2] < SMALLEST_JAX
needs_mosaic = pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 products need jax 0.11")
M = 256
SIZES = [edges(M)[name] for name in ("skewed", "one group", "sum below m", "nothing")]
SMALL = partial(Config, 128, 128, cluster=1, snake=2, pipeline="ring")


@parametrize("tile", [4, 128])
@parametrize(
    "sizes",
    [*SIZES, [1] * 6, [3, 381], [0, 0, 1], np.asarray(sizes_of(3000, 40, 0.2))],
    ids=str,
)
def test_tiles_cover_each_group_and_nothing_else(sizes, tile):
    sizes = [*sizes, 3]  # the last group are the rows behind the others
    m = int(sum(sizes))
    most = m // tile + len(sizes)

    @jax.jit
    def lists(sizes):
        starts, before = tiles.list_groups(sizes, m, tile)
        return starts, before, tiles.list_tiles(starts, before, m, most)

    found = lists(jnp.asarray(sizes[:-1]))
    starts, before, facts = jax.tree.map(np.asarray, found)
    start = 0
    expected = []
    for group, size in enumerate(sizes):
        assert starts[group] == start
        assert before[group] == len(expected)
        fact = (group, len(expected), start, start + size)
        expected += [fact] * -(-size // tile)
        start += size
    assert len(expected) <= most
    assert np.transpose(facts)[: len(expected)].tolist() == [*map(list, expected)]


@parametrize(
    "sizes", [[3, -1, 2], [10, 0, 1], [1, 2**31 - 1, 2**31 - 1, 11], [0, 11, 0]]
)
def test_wrong_sizes_begin_behind_the_rows(sizes):
    starts, _ = tiles.list_groups(jnp.array(sizes, jnp.int32), 10, 4)
    assert int(starts[-1]) > 10


def check(op, oracle, operands, accumulation, config):
    options = MatmulOptions(jnp.dtype(jnp.float32), accumulation)
    multiply = jax.jit(partial(op, options, config=config))
    for sizes in SIZES:
        got = multiply(*operands, jnp.array(sizes))
        assert_array_equal(got, oracle(*operands, sizes))
    assert jnp.isnan(multiply(*operands, jnp.array(wrong_sizes(M)[-1]))).all()


@needs_mosaic
@slow_except("mixed")
@parametrize(
    "form, accumulation, config",
    [
        ("mixed", "fast", SMALL(tile_k=128, stages=2)),
        ("residual", "full", None),
        ("rows", "fast", Config(256, 128, 128, 3, 1, pipeline="ring")),
        ("squares", "fast", SMALL(tile_k=128, stages=4)),
        ("small squares", "fast", None),
        ("small vectors", "full", None),
        ("bf16", "fast", SMALL(tile_k=32, stages=3)),
    ],
    ids=["mixed", "residual", "rows", "squares", "small squares", "vectors", "bf16"],
)
def test_rows_of_groups(form, accumulation, config):
    operands = FORMS[form].by_groups(M, 128, 192, 6)
    check(mosaic.KERNEL.run, by_groups, operands, accumulation, config)


@needs_mosaic
@slow_except("mixed")
@parametrize(
    "form, accumulation, config",
    [
        ("mixed", "fast", SMALL(tile_k=128, stages=2)),
        ("rows", "full", SMALL(tile_k=128, stages=4)),
        ("small vectors", "fast", SMALL(tile_k=64, stages=4)),
        ("bf16", "fast", SMALL(tile_k=64, stages=3)),
    ],
    ids=["mixed", "rows", "vectors", "bf16"],
)
def test_sums_within_groups(form, accumulation, config):
    operands = FORMS[form].within_groups(M, 96, 64)
    check(mosaic.GRADIENT.run, within_groups, operands, accumulation, config)


@needs_mosaic
@parametrize("steps", [pytest.param(2, marks=slow), 3])
def test_two_steps_are_promoted_together(steps):
    operands = FORMS["tensor"].by_groups(M, 128 * steps, 128, 6)
    options = MatmulOptions(jnp.dtype(jnp.float32), "full")
    config = SMALL(tile_k=128, stages=4)
    y = mosaic.KERNEL.run(options, *operands, jnp.array(SIZES[0]), config=config)
    assert_array_equal(y, by_groups(*operands, SIZES[0]))


@needs_mosaic
def test_rows_behind_the_groups_are_zero_next_to_nan():
    x = jnp.ones((128, 64), BF16).at[5:].set(jnp.nan)
    w = jnp.ones((2, 64, 64), BF16).at[1].set(jnp.nan)
    y = grouped_matmul(x, w, jnp.array([5, 0]), backend="mosaic")
    assert (y[:5] == 64).all()
    assert not y[5:].any()


@needs_mosaic
@parametrize("form", ["tensor", "rows", "squares"])
def test_a_scale_of_nan_stays_out_of_the_rows_behind_the_groups(form):
    x, w = FORMS[form].by_groups(M, 128, 128, 6)
    # The last group has no rows, and its weight is the nearest of the rows behind it.
    w = replace(w, scale=w.scale.at[5].set(jnp.nan))
    sizes = jnp.array(SIZES[2])
    assert SIZES[2][5] == 0
    if form != "tensor":
        x = replace(x, scale=x.scale.at[sum(SIZES[2]) :].set(jnp.nan))
    y = grouped_matmul(x, w, sizes, backend="mosaic")
    assert_array_equal(np.float32(y), by_groups(x, w, SIZES[2]))


@needs_mosaic
@parametrize("form", ["bf16", "tensor"])
def test_a_weight_with_nan_is_that_of_its_own_rows_as_on_xla(form):
    x, w = FORMS[form].by_groups(M, 128, 128, 6)
    nan = jnp.nan
    if form == "bf16":
        w = w.at[0, 3, 5].set(nan).at[4].set(nan)
    else:
        w = replace(w, values=w.values.at[0, 3, 5].set(nan).at[4].set(nan))
    sizes = jnp.array(SIZES[0])
    multiply = partial(grouped_matmul, x, w, sizes, out_dtype=jnp.float32)
    xla = multiply(backend="xla")
    found = multiply(backend="mosaic")
    assert jnp.isnan(xla[: SIZES[0][0], 3]).all()
    assert_array_equal(found, xla)


@needs_mosaic
def test_a_stack_is_multiplied_one_by_one():
    x = jnp.ones((2, 128, 64), BF16) * jnp.array([1, 2], BF16)[:, None, None]
    w = jnp.ones((2, 64, 64), BF16)
    sizes = jnp.array([[5, 123], [0, 7]])
    multiply = partial(grouped_matmul, backend="mosaic")
    y = jax.vmap(multiply, (0, None, 0))(x, w, sizes)
    assert (y[0] == 64).all()
    assert (y[1, :7] == 128).all()
    assert not y[1, 7:].any()


@parametrize(
    "x, w, message",
    [
        ((100, 64), (2, 64, 64), "100 rows are fewer than the 128 of a tile"),
        ((128, 80), (2, 64, 80), "the contracted size 80 must be a multiple of 32"),
        ((128, 64), (2, 40, 64), "n=40 must be a multiple of 64"),
    ],
)
def test_shapes_without_a_tile_are_refused_with_the_reason(x, w, message):
    x = jnp.ones(x, BF16)
    w = jnp.ones(w, BF16)
    message = "older than 0.11" if OLD_JAX else message
    with refused(message, NotImplementedError):
        grouped_matmul(x, w, jnp.array([1, 2]), backend="mosaic")


@parametrize("shape", [(65536, 2048, 1024), (32768, 2880, 5760)], ids=str)
def test_every_candidate_fits(shape):
    for width, halves in itertools.product((1, 2), (1, 2)):
        problem = mosaic.Problem(*shape, False, width, 2, halves, False, 64)
        found = mosaic.candidates(problem)
        assert found
        assert shape[1] % found[0].tile_k == 0
        assert found[0].stages >= 2


def described(mesh, shape, dtype, scaling, halves=1):
    """An operand that is not there."""
    values = on(mesh, shape, dtype)
    if dtype == BF16:
        return values
    of_scale = shape[:-2]
    if not isinstance(scaling, Tensor):
        of_scale = scaling.scale_shape(shape)
    scale = on(
        mesh, of_scale, SCALE_DTYPE if isinstance(scaling, Block) else jnp.float32
    )
    return Operand(values, scale, values if halves == 2 else None, scaling=scaling)


@needs_mosaic
@pytest.mark.optimized
@needs_plugin
@slow_except("rows-mixed-fast", "within-tensor-full")
@parametrize(
    "form, accumulation",
    [
        ("mixed", "fast"),
        ("tensor", "full"),
        ("residual", "fast"),
        ("rows", "fast"),
        ("bf16", "fast"),
        ("squares", "fast"),
        ("small squares", "fast"),
    ],
)
@parametrize("kind", ["rows", "within"])
def test_products_stay_in_registers(kind, form, accumulation, capfd):
    mesh = h200s(1)
    m, k, n, e = 65536, 2048, 1024, 64
    one = FORMS[form]
    if kind == "rows":
        op = grouped_matmul
        x = described(mesh, (m, k), one.x, one.of_rows)
        w = described(mesh, (e, n, k), one.w, one.scaling, one.halves)
    else:
        op = grouped_weight_gradient
        x = described(mesh, (k, m), one.w, one.of_rows)
        w = described(mesh, (n, m), one.x, one.of_rows)
    product = partial(op, accumulation=accumulation, backend="mosaic")
    compiled = compile_for(mesh, product, x, w, on(mesh, (e,), jnp.int32))
    assert compiled.targets == ["mosaic_gpu_v2"]
    assert len(compiled.results("fusion")) <= 8  # lists and scales
    assert largest_stack(capfd) <= 64
