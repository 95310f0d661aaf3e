"""Second moments are sums over the inputs of the float model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcfp_jax.conversion.transform import transform
from tcfp_jax.inference.probes import second_moments

RNG = np.random.default_rng(0)
PARAMS = {
    "stack": jnp.asarray(RNG.standard_normal((2, 4, 4)), jnp.float32),
    "heads": jnp.asarray(RNG.standard_normal((4, 2, 3)), jnp.float32),
}
X = jnp.asarray(RNG.standard_normal((5, 4)), jnp.float32)
LOW = dict(recipe="tensorwise", include=("linear", "small", "head"))


def model(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    return jnp.einsum("bk,khd->hbd", x, params["heads"])


def test_moments_are_those_of_the_float_models_inputs():
    found = second_moments(transform(model, **LOW), PARAMS, X)
    inputs = [X]
    for w in PARAMS["stack"]:
        inputs.append(jnp.tanh(inputs[-1] @ w))
    wanted = [x.T @ x for x in inputs]
    np.testing.assert_allclose(found["stack"], np.stack(wanted[:2]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["heads"], wanted[2], rtol=1e-5, atol=1e-5)


def test_a_function_without_converted_weights_says_so():
    with pytest.raises(ValueError, match="has no converted weight"):
        second_moments(transform(lambda p, x: jnp.sum(x * p["w"][0]), **LOW), {"w": PARAMS["stack"][0]}, X)
