"""Faults that other people's models showed, each as the smallest program that has it."""

import jax.numpy as jnp

from tcfp_jax import error_feedback, layer_state, transform
from tcfp_jax.conversion import find_weights
from tcfp_jax.inference import quantize_params


def test_names_with_slashes_are_paths():
    """Haiku's: `{"mlp/~/linear_0": {"w": ...}}`. Its float kernels stayed beside the stored ones."""
    params, x = {"mlp/~/linear_0": {"w": jnp.ones((16, 16)), "b": jnp.zeros(16)}}, jnp.ones((2, 16))
    apply = lambda params, x: x @ params["mlp/~/linear_0"]["w"] + params["mlp/~/linear_0"]["b"]
    low = transform(apply, "tcfp12_fast", include=("linear", "small", "head"))
    weights = find_weights(low, params, x)
    assert set(weights) == {"mlp/~/linear_0/w"}
    served = quantize_params(params, weights)
    assert set(served["params"]["mlp/~/linear_0"]) == {"b"}
    stored = layer_state(error_feedback(weights).init(params))
    assert (low(params, x, stored=stored) == low(params, x)).all()
