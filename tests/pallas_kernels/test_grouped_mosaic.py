"""The grouped kernel for Hopper: its lists of work, its interpreter on a CPU, and its
registers on an H200.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic, tiles
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.hopper.plan import SMALLEST_JAX, Config
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Product, Row, Tensor
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.grouped import BF16, E4M3, E5M2, by_groups, integers, sizes_of, within_groups

OLD_JAX = jax.__version_info__[:2] < SMALLEST_JAX
needs_mosaic = pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 products need jax 0.11")
M = 256
# Sizes of 256 rows in six groups: skewed, empty and single ones, all in one, a sum
# below m, nothing.
SIZES = [[131, 0, 54, 1, 0, 70], [0, 0, M, 0, 0, 0], [129, 0, 7, 64, 8, 0], [0] * 6]
SMALL = functools.partial(Config, 128, 128, cluster=1, snake=2, pipeline="ring")


@pytest.mark.parametrize("tile", [4, 128])
@pytest.mark.parametrize(
    "sizes",
    [*SIZES, [1] * 6, [3, 381], [0, 0, 1], np.asarray(sizes_of(3000, 40, 0.2))],
    ids=str,
)
def test_the_list_of_tiles_covers_each_group_and_nothing_else(sizes, tile):
    m = int(sum(sizes)) + 3  # the last group are the rows behind the others
    most = m // tile + len(sizes) + 1

    @jax.jit
    def lists(sizes):
        starts, before = tiles.list_groups(sizes, m, tile)
        return starts, before, tiles.list_tiles(starts, before, m, most)

    starts, before, facts = jax.tree.map(np.asarray, lists(jnp.asarray(sizes)))
    counts = [-(-size // tile) for size in (*sizes, 3)]
    assert starts.tolist() == [0, *np.cumsum(sizes)] and before.tolist() == [
        0,
        *np.cumsum(counts[:-1]),
    ]
    expected, ends = [], np.cumsum([*sizes, 3])
    for group, (size, count, end) in enumerate(
        zip((*sizes, 3), counts, ends, strict=True)
    ):
        expected += [(group, sum(counts[:group]), end - size, end)] * count
    assert [tuple(map(int, fact)) for fact in zip(*facts, strict=True)][
        : len(expected)
    ] == expected
    assert len(expected) <= most


@pytest.mark.parametrize(
    "sizes", [[3, -1, 2], [10, 0, 1], [2**31 - 1, 2**31 - 1, 39], [0, 11, 0]]
)
def test_wrong_sizes_begin_behind_the_rows(sizes):
    starts, _ = tiles.list_groups(jnp.array(sizes, jnp.int32), 10, 4)
    assert int(starts[-1]) > 10


@needs_mosaic
@pytest.mark.slow_except("mixed")
@pytest.mark.parametrize(
    "dtype, scaling, halves, accumulation, config",
    [
        (E5M2, Tensor(), 1, "fast", SMALL(tile_k=128, stages=2)),
        (E4M3, Tensor(), 2, "full", None),
        (E4M3, Row(), 1, "fast", Config(256, 128, 128, 3, 1, pipeline="ring")),
        (E4M3, Block(128), 1, "fast", SMALL(tile_k=128, stages=4)),
        (E5M2, Block(64), 2, "fast", None),
        (E4M3, Block(64, "vector"), 1, "full", None),
        (BF16, None, 1, "fast", SMALL(tile_k=32, stages=3)),
    ],
    ids=["mixed", "residual", "rows", "squares", "small squares", "vectors", "bf16"],
)
def test_rows_of_groups(dtype, scaling, halves, accumulation, config):
    x = integers(
        dtype, (M, 128), scaling.along_rows if isinstance(scaling, Block) else scaling
    )
    w = integers(
        BF16 if dtype == BF16 else E4M3,
        (192, 128),
        scaling,
        stack=(6,),
        halves=halves,
        seed=1,
    )
    options = Product(jnp.dtype(jnp.float32), accumulation)
    multiply = jax.jit(functools.partial(mosaic.grouped_matmul, options, config=config))
    for sizes in SIZES:
        np.testing.assert_array_equal(
            multiply(x, w, jnp.array(sizes)), by_groups(x, w, sizes)
        )
    assert jnp.isnan(multiply(x, w, jnp.array([300, 200, -150, 0, 0, 0]))).all()


@needs_mosaic
@pytest.mark.slow_except("mixed")
@pytest.mark.parametrize(
    "dtype, scaling, accumulation, config",
    [
        (E4M3, Tensor(), "fast", SMALL(tile_k=128, stages=2)),
        (E4M3, Row(), "full", SMALL(tile_k=128, stages=4)),
        (E4M3, Block(64, "vector"), "fast", SMALL(tile_k=64, stages=4)),
        (BF16, None, "fast", SMALL(tile_k=64, stages=3)),
    ],
    ids=["mixed", "rows", "vectors", "bf16"],
)
def test_sums_within_groups(dtype, scaling, accumulation, config):
    x, g = (
        integers(dtype, (96, M), scaling),
        integers(BF16 if dtype == BF16 else E5M2, (64, M), scaling, seed=1),
    )
    options = Product(jnp.dtype(jnp.float32), accumulation)
    multiply = jax.jit(
        functools.partial(mosaic.grouped_weight_gradient, options, config=config)
    )
    for sizes in SIZES:
        np.testing.assert_array_equal(
            multiply(x, g, jnp.array(sizes)), within_groups(x, g, sizes)
        )
    assert jnp.isnan(multiply(x, g, jnp.array([300, 200, 0, 0, 0, 0]))).all()


@needs_mosaic
@pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_sums_of_two_steps_are_promoted_together(steps):
    x, w = (
        integers(E4M3, (M, 128 * steps), Tensor()),
        integers(E4M3, (128, 128 * steps), Tensor(), stack=(6,), seed=1),
    )
    y = mosaic.grouped_matmul(
        Product(jnp.dtype(jnp.float32), "full"),
        x,
        w,
        jnp.array(SIZES[0]),
        config=SMALL(tile_k=128, stages=4),
    )
    np.testing.assert_array_equal(y, by_groups(x, w, SIZES[0]))


@needs_mosaic
def test_rows_behind_the_groups_are_zero_next_to_values_that_are_not_finite():
    x, w = (
        jnp.ones((128, 64), BF16).at[5:].set(jnp.nan),
        jnp.ones((2, 64, 64), BF16).at[1].set(jnp.nan),
    )
    y = np.asarray(
        grouped_matmul(x, w, jnp.array([5, 0]), backend="mosaic"), np.float32
    )
    assert (y[:5] == 64).all() and not y[5:].any()


@needs_mosaic
def test_a_stack_is_multiplied_one_by_one():
    x, w = (
        jnp.ones((2, 128, 64), BF16) * jnp.array([1, 2], BF16)[:, None, None],
        jnp.ones((2, 64, 64), BF16),
    )
    sizes = jnp.array([[5, 123], [0, 7]])
    y = jax.vmap(functools.partial(grouped_matmul, backend="mosaic"), (0, None, 0))(
        x, w, sizes
    )
    assert (y[0] == 64).all() and (y[1, :7] == 128).all() and not y[1, 7:].any()


@pytest.mark.parametrize(
    "x, w, message",
    [
        ((100, 64), (2, 64, 64), "100 rows are fewer than the 128 of a tile"),
        ((128, 80), (2, 64, 80), "the contracted size 80 must be a multiple of 32"),
        ((128, 64), (2, 40, 64), "n=40 must be a multiple of 64"),
    ],
)
def test_shapes_without_a_tile_are_refused_with_the_reason(x, w, message):
    x, w = jnp.ones(x, BF16), jnp.ones(w, BF16)
    with pytest.raises(
        NotImplementedError, match="older than 0.11" if OLD_JAX else message
    ):
        grouped_matmul(x, w, jnp.array([1, 2]), backend="mosaic")


def test_every_candidate_fits():
    shapes = {"olmoe": (65536, 2048, 1024), "gpt-oss": (32768, 2880, 5760)}
    for (m, k, n), width, halves in (
        (shape, w, h) for shape in shapes.values() for w in (1, 2) for h in (1, 2)
    ):
        problem = mosaic.Problem(m, k, n, False, width, 2, halves, False, 64)
        found = mosaic.candidates(problem)
        assert found and k % found[0].tile_k == 0 and found[0].stages >= 2


MODES = {
    "fast": (E4M3, Tensor(), 1, "fast"),
    "full": (E4M3, Tensor(), 1, "full"),
    "rows": (E5M2, Row(), 2, "fast"),
    "bf16": (BF16, None, 1, "fast"),
    "squares": (E4M3, Block(128), 1, "fast"),
    "two": (E5M2, Block(128), 2, "fast"),
}


@needs_mosaic
@pytest.mark.optimized
@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
@pytest.mark.slow_except("rows of groups-fast", "within groups-full")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["rows of groups", "within groups"])
def test_products_stay_in_registers(kind, mode, capfd):
    dtype, scaling, halves, accumulation = MODES[mode]
    mesh, (m, k, n, e) = h200s(1), (65536, 2048, 1024, 64)

    def operand(shape, dtype, halves=1):
        values = on(mesh, shape, dtype)
        if dtype == BF16:
            return values
        own = (
            scaling
            if len(shape) == 3 or not isinstance(scaling, Block)
            else scaling.along_rows
        )
        of_scale = shape[:-2] if isinstance(own, Tensor) else own.scale_shape(shape)
        scale = on(
            mesh, of_scale, SCALE_DTYPE if isinstance(own, Block) else jnp.float32
        )
        return Operand(values, scale, values if halves == 2 else None, scaling=own)

    other = BF16 if dtype == BF16 else E4M3
    if kind == "rows of groups":
        op, operands = (
            grouped_matmul,
            (operand((m, k), dtype), operand((e, n, k), other, halves)),
        )
    else:
        op, operands = (
            grouped_weight_gradient,
            (operand((k, m), other), operand((n, m), dtype)),
        )
    product = functools.partial(op, accumulation=accumulation, backend="mosaic")
    compiled = compile_for(mesh, product, *operands, on(mesh, (e,), jnp.int32))
    assert compiled.targets == ["mosaic_gpu_v2"]
    assert len(compiled.results("fusion")) <= 8  # lists and scales
    stacks = re.findall(r"(\d+) bytes stack frame", "".join(capfd.readouterr()))
    assert stacks and max(map(int, stacks)) <= 64
