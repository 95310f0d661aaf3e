"""Grouped products against a loop over the groups in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.operands import Block, Operand, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.grouped import by_groups, float64_of, within_groups

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
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


@functools.cache
def operands(kind, experts=E):
    """(x, w, columns of x, columns of g, the four in float64); rows and weights of very
    different sizes.
    """
    rng = np.random.default_rng(0)
    spread = lambda *shape: jnp.asarray(
        np.exp(2 * rng.standard_normal(shape)), jnp.float32
    )
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x, w, g = (
        draw(M, K) * spread(M, 1),
        draw(experts, N, K) * spread(experts, 1, 1),
        draw(M, N),
    )
    if kind == "bf16":
        found = (
            x.astype(jnp.bfloat16),
            w.astype(jnp.bfloat16),
            x.T.astype(jnp.bfloat16),
            g.T.astype(jnp.bfloat16),
        )
        return found, [np.asarray(one, np.float64) for one in found]
    scalings = {
        "rows": Row(),
        "squares": Block(64),
        "vectors": Block(32, "vector"),
        "float32 scale": Tensor("float32"),
    }
    scaling = scalings.get(kind, Tensor())
    split = lambda w: (
        (
            dual_quantize(w, scaling)
            if kind in ("dual", "squares")
            else quantize(w, E4M3, scaling)
        ).rows
    )
    rows = lambda x, dtype=E4M3: quantize(x, dtype, scaling.along_rows).rows
    found = jax.jit(
        lambda x, w, g: (rows(x), jax.vmap(split)(w), rows(x.T), rows(g.T, E5M2))
    )(x, w, g)
    return found, [float64_of(one) for one in found]


@pytest.mark.slow_except("dual", "rows", "squares")
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_groups(kind):
    (x, w, columns, g), exact = operands(kind)
    forward = jax.jit(functools.partial(grouped_matmul, out_dtype=jnp.float32))
    gradient = jax.jit(grouped_weight_gradient)
    for sizes in SIZES:
        got = np.asarray(forward(x, w, jnp.asarray(sizes)), np.float64)
        bound = by_groups(np.abs(exact[0]), np.abs(exact[1]), sizes)
        assert np.all(
            np.abs(got - by_groups(exact[0], exact[1], sizes)) <= ROUNDING * bound
        )
        assert got[: sum(sizes)].all() and not got[sum(sizes) :].any()
        got = np.asarray(gradient(columns, g, jnp.asarray(sizes)), np.float64)
        bound = within_groups(np.abs(exact[2]), np.abs(exact[3]), sizes)
        assert np.all(
            np.abs(got - within_groups(exact[2], exact[3], sizes)) <= ROUNDING * bound
        )


def test_one_group_of_all_rows_is_the_dense_product():
    (x, w, *_), exact = operands("dual", 1)
    multiply = jax.jit(functools.partial(grouped_matmul, out_dtype=jnp.float32))
    got = np.asarray(multiply(x, w, jnp.array([M])), np.float64)
    assert np.all(
        np.abs(got - exact[0] @ exact[1][0].T)
        <= ROUNDING * (np.abs(exact[0]) @ np.abs(exact[1][0]).T)
    )


def test_sizes_that_are_no_sizes_make_nan_in_a_compiled_program():
    (x, w, columns, g), _ = operands("dual")
    forward, gradient = jax.jit(grouped_matmul), jax.jit(grouped_weight_gradient)
    for sizes in ([40, 0, 0, 0], [30, -1, 2, 0], [2**31 - 1, 2**31 - 1, 39, 0]):
        sizes = jnp.array(sizes, jnp.int32)
        assert (
            jnp.isnan(forward(x, w, sizes)).all()
            and jnp.isnan(gradient(columns, g, sizes)).all()
        )


def test_rows_behind_the_groups_are_zero_next_to_a_weight_that_is_not_finite():
    (x, w, *_), _ = operands("tensor")
    poisoned = Operand(w.values, w.scale.at[3].set(jnp.nan))
    y = np.asarray(grouped_matmul(x, poisoned, jnp.array([3, 4, 0, 5])), np.float32)
    assert np.isnan(y[7:12]).all() and np.isfinite(y[:7]).all() and not y[12:].any()


@pytest.mark.slow_except("axes0", "axes2", "axes3")
@pytest.mark.parametrize(
    "axes", [(0, None, 0), (None, 0, None), (None, None, 0), (0, 0, 0)]
)
def test_vmap_over_any_operand(axes):
    (x, w, *_), _ = operands("dual")
    stack = lambda tree: jax.tree.map(
        lambda leaf: jnp.stack([leaf, leaf[::-1] if leaf.ndim else leaf]), tree
    )
    sizes = jnp.array([7, 13, 5, 1])
    given = [
        stack(one) if axis == 0 else one
        for one, axis in zip((x, w, sizes), axes, strict=True)
    ]
    pick = lambda i: [
        jax.tree.map(lambda a: a[i], q) if axis == 0 else q
        for q, axis in zip(given, axes, strict=True)
    ]
    got = jax.vmap(jax.vmap(grouped_matmul, axes), (None, None, 0))(
        *given[:2], jnp.stack([given[2]] * 2)
    )
    for i in range(2):
        np.testing.assert_array_equal(
            np.asarray(got[1, i], np.float32),
            np.asarray(grouped_matmul(*pick(i)), np.float32),
        )


BF = jnp.ones((3, 2), jnp.bfloat16)
Q = Operand(jnp.ones((3, 2), E4M3), jnp.float32(1))
QW = Operand(jnp.ones((2, 4, 2), E4M3), jnp.ones(2))
BAD = {
    "float sizes": (Q, QW, jnp.ones(2), {}, TypeError, "sizes are integers"),
    "too many sizes": (Q, QW, jnp.ones(3, int), {}, ValueError, "for each of 2 groups"),
    "sum above m": (
        Q,
        QW,
        jnp.array([2, 2]),
        {},
        ValueError,
        "the sum 4, but x has 3 rows",
    ),
    "negative": (Q, QW, jnp.array([-1, 2]), {}, ValueError, r"\[-1, 2\]"),
    "one scale": (
        Q,
        Operand(QW.values, jnp.float32(1)),
        jnp.array([1, 2]),
        {},
        ValueError,
        "each of the 2 weights",
    ),
    "another k": (
        Operand(jnp.ones((3, 5), E4M3), jnp.float32(1)),
        QW,
        jnp.array([1, 2]),
        {},
        ValueError,
        "must agree",
    ),
    "another k in BF16": (
        BF,
        jnp.ones((2, 4, 5), jnp.bfloat16),
        jnp.array([1, 2]),
        {},
        ValueError,
        "last axis",
    ),
    "a matrix": (Q, Q, jnp.array([1, 2]), {}, ValueError, r"\[m, k\] and \[e, n, k\]"),
    "mixed": (BF, QW, jnp.array([1, 2]), {}, TypeError, "bfloat16 and float8_e4m3fn"),
    "float32": (
        BF.astype(jnp.float32),
        jnp.ones((2, 4, 2)),
        jnp.array([1, 2]),
        {},
        TypeError,
        "two bfloat16",
    ),
    "E5M2 twice": (
        Operand(Q.values.astype(E5M2), Q.scale),
        Operand(QW.values.astype(E5M2), QW.scale),
        jnp.array([1, 2]),
        {},
        NotImplementedError,
        "no tensor core",
    ),
    "accumulation": (
        Q,
        QW,
        jnp.array([1, 2]),
        dict(accumulation="slow"),
        ValueError,
        "'slow' is unknown",
    ),
    "backend": (
        Q,
        QW,
        jnp.array([1, 2]),
        dict(backend="triton"),
        NotImplementedError,
        "no 'triton' implementation",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    x, w, sizes, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        grouped_matmul(x, w, sizes, **options)


def test_a_gradient_needs_matrices():
    with pytest.raises(ValueError, match=r"\[k, m\] and \[n, m\]"):
        grouped_weight_gradient(Q, QW, jnp.array([1, 1]))
