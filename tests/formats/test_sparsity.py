"""M of N sparsity and Hadamard rotations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tcfp_jax.formats import rotate, sparse
from tests.formats_oracles import QUICK
from tests.helpers import normal, parametrize

thinned = jax.jit(sparse, static_argnums=(1, 2, 3), compiler_options=QUICK)
rotated = jax.jit(
    rotate, static_argnames=("size", "dim", "direction"), compiler_options=QUICK
)


@parametrize("dim", [0, -1, -2])
def test_the_largest_stay_with_their_signs(dim):
    x = np.random.default_rng(0).standard_normal((8, 12, 16)).astype(np.float32)
    got = np.moveaxis(np.asarray(thinned(x, 4, 2, dim)), dim, -1).reshape(-1, 4)
    rows = np.moveaxis(x, dim, -1).reshape(-1, 4)
    keep = np.argsort(-np.abs(rows), axis=-1, kind="stable")[:, :2]
    expected = np.zeros_like(rows)
    np.put_along_axis(expected, keep, np.take_along_axis(rows, keep, -1), -1)
    assert np.array_equal(got, expected)


def test_ties_go_to_the_lower_index_and_gradients_to_kept_ones():
    x = jnp.array([-1.0, 1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 2.0])
    assert thinned(x, 4, 2).tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    gradient = jax.grad(lambda x: sparse(x, 4, 1).sum())(x)
    assert gradient.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    rows = jnp.stack([x, -x]).astype(jnp.bfloat16)
    whole = thinned(rows, 4, 2)
    assert whole.dtype == jnp.bfloat16
    assert np.array_equal(jax.vmap(lambda row: sparse(row, 4, 2))(rows), whole)


@parametrize("arguments", [(4, 4), (4, 0), (5, 2), (4, 2, 3)], ids=str)
def test_bad_sparsity_raises(arguments):
    with pytest.raises(ValueError):
        sparse(jnp.zeros((4, 8)), *arguments)
    with pytest.raises(TypeError):
        sparse(jnp.zeros(8, jnp.int32), 4, 2)


def hadamard(size):
    signs = np.ones((1, 1))
    while len(signs) < size:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs / np.sqrt(size)


@parametrize("size", [2, 16])
def test_rotation_is_a_hadamard_matrix(size):
    x = np.random.default_rng(0).standard_normal((3, 4 * size)).astype(np.float32)
    signs = np.asarray(jax.random.rademacher(jax.random.key(0), (size,)))
    expected = ((x.reshape(3, 4, size) * signs) @ hadamard(size)).reshape(x.shape)
    got = rotated(x, size, signs=signs)
    assert_allclose(got, expected, atol=1e-5)
    back = rotated(got, size, signs=signs, direction="inverse")
    assert_allclose(back, x, atol=1e-5)
    assert np.array_equal(rotated(x.T, size, signs=signs, dim=0).T, got)
    assert size > 2 or np.array_equal(rotate(x, size, signs=signs), got)


def test_products_of_rotated_operands_stay():
    x, w = normal(0, (2, 8, 64))
    assert_allclose(rotated(x, 16) @ rotated(w, 16).T, x @ w.T, atol=1e-4)
    outlier = jnp.zeros(16).at[3].set(16.0)
    assert float(jnp.abs(rotated(outlier)).max()) == 4.0


@parametrize(
    "change",
    [
        {"size": 12},
        {"size": 64},
        {"signs": np.ones(8)},
        {"signs": np.zeros(16)},
        {"dim": 2},
        {"direction": "back"},
    ],
)
def test_bad_rotations_raise(change):
    with pytest.raises(ValueError):
        rotate(jnp.zeros((4, 32)), **change)
    with pytest.raises(TypeError):
        rotate(jnp.zeros((4, 32), jnp.int32))
