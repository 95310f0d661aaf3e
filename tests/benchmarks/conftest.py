"""Fixtures of all tests of benchmarks."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    """Optax's Adam raises a float to an integer power, which strict dtype promotion
    refuses.
    """
    with jax.numpy_dtype_promotion("standard"):
        yield
