"""Another way to share scales is a class in a union and a line in each of two tables.

ARCHITECTURE says so.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.matmul import api as matmul
from pallas_kernels.matmul import reference as product
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as rounding
from tcfp_jax.recipes import Single, definition
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import normal


@dataclass(frozen=True)
class Tenth:
    """One scale for a tensor, a tenth of max |x|.

    It is not a power of two, and not the rule of any other scaling.
    """

    scale = "float32"
    scale_dtype = jnp.float32
    serves_both = True
    in_blocks = False
    squares = False
    packed = False

    @property
    def along_rows(self):
        return self

    def reads(self, other):
        return self == other

    def scale_shape(self, shape):
        return shape[:-2]

    def find(self, x, dtype, amax=None):
        scale = numerics.amax(x) / jnp.float32(10)
        return scale, 1 / scale

    def spread(self, scale, shape):
        return scale.reshape(scale.shape + (1,) * (len(shape) - scale.ndim))

    def turn(self, scale):
        return scale


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(
        quantize.IMPLEMENTATIONS, Tenth, (Implementation("xla", rounding.quantize),)
    )
    monkeypatch.setitem(
        matmul.IMPLEMENTATIONS, Tenth, (Implementation("xla", product.matmul),)
    )
    monkeypatch.setattr(definition, "Scaling", definition.Scaling | Tenth)


def test_a_new_scaling_is_stored_multiplied_and_trained(known):
    recipe = tcfp_jax.recipe("tensorwise", scaling=Tenth(), remainder="feedback")
    x = normal(0, (16, 32))
    w = normal(1, (32, 8))
    stored, _ = quantize_weight(w, recipe)
    wanted = np.float64(x) @ np.float64(w)
    for one in (w, stored):
        got = tcfp_jax.matmul(x, one, recipe=recipe)
        assert np.linalg.norm(got - wanted) < 0.06 * np.linalg.norm(wanted)
    assert stored.shape == (32, 8)
    assert stored.swap().shape == (8, 32)
    tx = tcfp_jax.error_feedback(recipe)
    state = tx.init({"kernel": w})
    _, state = tx.update({"kernel": jnp.zeros_like(w)}, state, {"kernel": w})
    assert recipe.weight == Single(remainder="feedback")
    assert float(jnp.max(jnp.abs(state.errors["kernel"]))) > 0

    def total(x, w):
        return jnp.sum(tcfp_jax.matmul(x, w, recipe=recipe))

    dx, dw = jax.grad(total, argnums=(0, 1))(x, w)
    assert dx.shape == x.shape
    assert dw.shape == w.shape
    assert jnp.isfinite(dw).all()
