"""What products read is what their gradients are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax.conversion.observation import operands
from tcfp_jax.conversion.transform import transform

RNG = np.random.default_rng(0)
PARAMS = {
    "stack": jnp.asarray(RNG.standard_normal((2, 4, 4)), jnp.float32),
    "heads": jnp.asarray(RNG.standard_normal((4, 2, 3)), jnp.float32),
}
X = jnp.asarray(RNG.standard_normal((5, 4)), jnp.float32)
LOW = dict(recipe="tensorwise", include=("linear", "small", "head"))


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    return jnp.sum(jnp.einsum("bk,khd->hbd", x, params["heads"]) ** 3)


def test_operands_make_the_gradients_of_the_float_model():
    found, gradients = operands(transform(loss, **LOW), PARAMS, X), jax.grad(loss)(PARAMS, X)
    made = {path: np.einsum("...rk,...rn->...kn", *of) for path, of in found.items()}
    assert made["stack"].shape == (2, 4, 4) and sorted(made) == sorted(PARAMS)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(made[path].reshape(gradient.shape), gradient, rtol=1e-5)
    np.testing.assert_array_equal(found["stack"].x[0], X)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) @ p["w"]), "w is multiplied more than once"),
        (lambda p, x: x @ p["w"], r"results of shapes \[\[5, 4\]\], and a loss is one scalar"),
        (lambda p, x: jnp.sum(x * p["w"][0]), "has no converted weight"),
    ],
)
def test_what_cannot_be_observed_says_why(function, message):
    with pytest.raises(ValueError, match=message):
        operands(transform(function, **LOW), {"w": PARAMS["stack"][0]}, X)
