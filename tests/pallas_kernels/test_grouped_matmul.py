"""Grouped products against a loop over the groups in float64."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.grouped_matmul.reference import rows_inside
from pallas_kernels.operands import Block, MatmulOptions, Operand, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.grouped import BF16, E4M3, E5M2, by_groups, float64_of, within_groups
from tests.helpers import parametrize, refused, slow_except

M, K, N, E = 37, 19, 11, 4
# Sizes of 37 rows: odd ones, empty groups, all rows in one group, a sum below m,
# nothing, single rows.
SIZES = [
    [7, 13, 5, 12],
    [0, 20, 0, 17],
    [0, 0, 37, 0],
    [3, 0, 9, 1],
    [0, 0, 0, 0],
    [1, 1, 1, 1],
]
KINDS = ["bf16", "tensor", "float32 scale", "dual", "rows", "squares", "vectors"]
ROUNDING = 2.0**-19  # of sums in float32, per unit of |x| @ |w|


@cache
def operands(kind):
    """(x, w, columns of x, columns of g) of a kind, and the four in float64.

    Rows and weights have very different sizes.
    """
    rng = np.random.default_rng(0)

    def draw(*shape, spread=()):
        factor = np.exp(2 * rng.standard_normal(spread)) if spread else 1
        return jnp.float32(rng.standard_normal(shape) * factor)

    x = draw(M, K, spread=(M, 1))
    w = draw(E, N, K, spread=(E, 1, 1))
    g = draw(M, N)
    if kind == "bf16":
        found = [one.astype(BF16) for one in (x, w, x.T, g.T)]
        return found, [np.float64(one) for one in found]
    scaling = {
        "rows": Row(),
        "squares": Block(64),
        "vectors": Block(32, "vector"),
        "float32 scale": Tensor("float32"),
    }.get(kind, Tensor())

    def rows(x, dtype=E4M3):
        return quantize(x, dtype, scaling.along_rows).rows

    def weight(w):
        if kind in ("dual", "squares"):
            return dual_quantize(w, scaling).rows
        return quantize(w, E4M3, scaling).rows

    @jax.jit
    def quantized(x, w, g):
        return rows(x), jax.vmap(weight)(w), rows(x.T), rows(g.T, E5M2)

    found = quantized(x, w, g)
    return found, [float64_of(one) for one in found]


def check(got, oracle, x, w, sizes):
    bound = ROUNDING * oracle(np.abs(x), np.abs(w), sizes)
    assert np.all(np.abs(got - oracle(x, w, sizes)) <= bound)


@slow_except("dual", "rows", "squares")
@parametrize("kind", KINDS)
def test_products_of_groups(kind):
    (x, w, columns, g), exact = operands(kind)
    forward = jax.jit(partial(grouped_matmul, out_dtype=jnp.float32))
    gradient = jax.jit(grouped_weight_gradient)
    for sizes in SIZES:
        got = np.float64(forward(x, w, jnp.asarray(sizes)))
        check(got, by_groups, *exact[:2], sizes)
        assert got[: sum(sizes)].all()
        assert not got[sum(sizes) :].any()
        got = np.float64(gradient(columns, g, jnp.asarray(sizes)))
        check(got, within_groups, *exact[2:], sizes)


@parametrize("sizes", [[40, 0, 0, 0], [30, -1, 2, 0], [1, 2**31 - 1, 2**31 - 1, 38]])
def test_wrong_sizes_make_nan_in_a_compiled_program(sizes):
    (x, w, columns, g), _ = operands("dual")
    sizes = jnp.array(sizes, jnp.int32)
    assert jnp.isnan(jax.jit(grouped_matmul)(x, w, sizes)).all()
    assert jnp.isnan(jax.jit(grouped_weight_gradient)(columns, g, sizes)).all()


# Sums of 1, -2**31, -1 and 37: the last one is a sound number of rows.
OVERFLOWING = [1, 2**31 - 1, 2**31 - 1, 38]


def test_a_sum_of_sizes_that_overflows_is_wrong():
    (x, w, columns, g), _ = operands("dual")
    sizes = jnp.array(OVERFLOWING, jnp.int32)
    options = MatmulOptions()
    assert jnp.isnan(reference.DEFINITION.run(options, x, w, sizes)).all()
    assert jnp.isnan(reference.GRADIENT.run(options, columns, g, sizes)).all()
    assert rows_inside(sizes, M).all()


def test_rows_behind_the_groups_are_zero_next_to_nan():
    (x, w, *_), _ = operands("tensor")
    poisoned = Operand(w.values, w.scale.at[3].set(jnp.nan))
    y = np.float32(grouped_matmul(x, poisoned, jnp.array([3, 4, 0, 5])))
    assert np.isnan(y[7:12]).all()
    assert np.isfinite(y[:7]).all()
    assert not y[12:].any()


@parametrize("kind", ["bf16", "dual", "rows", "squares"])
def test_only_a_weights_own_rows_are_nan(kind):
    (x, w, *_), _ = operands(kind)
    values = w if kind == "bf16" else w.values
    poisoned = values.at[3, 2, 5].set(jnp.nan)
    if kind != "bf16":
        poisoned = replace(w, values=poisoned)
    sizes = jnp.array([7, 13, 0, 9])
    multiply = partial(grouped_matmul, group_sizes=sizes, out_dtype=jnp.float32)
    want = np.array(multiply(x, w))
    want[20:29, 2] = np.nan
    assert_array_equal(multiply(x, poisoned), want)


@parametrize("sizes", [(1e37, 1e-30), (1e-30, 1e37), (1e-18, 1e-18), (1e18, 1e18)])
@parametrize("scaling", [Tensor(), Row()], ids=str)
def test_scales_meet_no_end_that_the_result_does_not(scaling, sizes):
    of_x, of_w = sizes
    x = quantize(jnp.full((M, K), of_x), E4M3, scaling).rows
    w = jax.vmap(lambda w: quantize(w, E4M3, scaling).rows)(jnp.full((E, N, K), of_w))
    y = grouped_matmul(x, w, jnp.array([37, 0, 0, 0]), out_dtype=jnp.float32)
    assert_allclose(y, K * of_x * of_w, rtol=0.05)
    columns = [quantize(jnp.full((N, M), of), E4M3, scaling).rows for of in sizes]
    dw = grouped_weight_gradient(*columns, jnp.array([M]), out_dtype=jnp.float32)
    assert_allclose(dw, M * of_x * of_w, rtol=0.05)


@slow_except("axes0", "axes2", "axes3")
@parametrize("axes", [(0, None, 0), (None, 0, None), (None, None, 0), (0, 0, 0)])
def test_vmap_over_any_operand(axes):
    (x, w, *_), _ = operands("dual")
    given = [x, w, jnp.array([7, 13, 5, 1])]

    def stacked(leaf):
        return jnp.stack([leaf, leaf[::-1] if leaf.ndim else leaf])

    mapped = [i for i, axis in enumerate(axes) if axis == 0]
    for i in mapped:
        given[i] = jax.tree.map(stacked, given[i])
    one = jax.vmap(grouped_matmul, axes)
    twice = jax.vmap(one, (None, None, 0))
    got = twice(given[0], given[1], jnp.stack([given[2]] * 2))
    for entry in range(2):
        picked = list(given)
        for i in mapped:
            picked[i] = jax.tree.map(lambda leaf, at=entry: leaf[at], given[i])
        assert np.array_equal(got[1, entry], grouped_matmul(*picked))


BF = jnp.ones((3, 2), BF16)
Q = Operand(jnp.ones((3, 2), E4M3), jnp.float32(1))
QW = Operand(jnp.ones((2, 4, 2), E4M3), jnp.ones(2))
ONE_SCALE = Operand(QW.values, jnp.float32(1))
OTHER = Operand(Q.values.astype(E5M2), Q.scale)
OTHER_W = Operand(QW.values.astype(E5M2), QW.scale)
LONG = Operand(jnp.ones((3, 5), E4M3), jnp.float32(1))
SLOW = dict(accumulation="slow")
TRITON = dict(backend="triton")
REFUSED = [
    (Q, QW, [1.0, 1.0], {}, TypeError, "sizes are integers"),
    (Q, QW, [1, 1, 1], {}, ValueError, "for each of 2 groups"),
    (Q, QW, [2, 2], {}, ValueError, "the sum 4, but x has 3 rows"),
    (Q, QW, [-1, 2], {}, ValueError, r"\[-1, 2\]"),
    (Q, ONE_SCALE, [1, 2], {}, ValueError, "each of the 2 weights"),
    (LONG, QW, [1, 2], {}, ValueError, "must agree"),
    (BF, jnp.ones((2, 4, 5), BF16), [1, 2], {}, ValueError, "last axis"),
    (Q, Q, [1, 2], {}, ValueError, r"\[m, k\] and \[e, n, k\]"),
    (BF, QW, [1, 2], {}, TypeError, "bfloat16 and float8_e4m3fn"),
    (jnp.ones((3, 2)), jnp.ones((2, 4, 2)), [1, 2], {}, TypeError, "two bfloat16"),
    (OTHER, OTHER_W, [1, 2], {}, NotImplementedError, "no tensor core"),
    (Q, QW, [1, 2], SLOW, ValueError, "'slow' is unknown"),
    (Q, QW, [1, 2], TRITON, NotImplementedError, "no 'triton' implementation"),
]


@parametrize("x, w, sizes, options, error, message", REFUSED)
def test_bad_input(x, w, sizes, options, error, message):
    with refused(message, error):
        grouped_matmul(x, w, jnp.array(sizes), **options)


def test_a_gradient_needs_matrices():
    with refused(r"\[k, m\] and \[n, m\]"):
        grouped_weight_gradient(Q, QW, jnp.array([1, 1]))
