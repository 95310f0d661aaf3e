"""The update inside the backward pass on a GPU has the bits of the ordinary step."""

import jax
import jax.numpy as jnp
import pytest

import tcfp_jax
from tests.helpers import parametrize, same_bits
from tests.inside_cases import CASES, KEY

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("standard_promotion")]
TX = tcfp_jax.optim.adamw(1e-3, key=KEY)


# XLA adds the gradients of biases in another order beside other operations.
@parametrize("name", [name for name in CASES if name != "nnx"])
def test_a_step_has_the_bits_of_the_ordinary_one(name):
    case = CASES[name]()

    @jax.jit
    def ordinary(params, opt_state, batch):
        value, gradients = tcfp_jax.value_and_grad(case.loss)(params, batch)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return tcfp_jax.apply_updates(params, updates), opt_state, value

    step = tcfp_jax.train_step(case.loss, TX)
    state = step.init(jax.tree.map(jnp.copy, case.params))
    params, opt_state, value = ordinary(case.params, TX.init(case.params), case.batch)
    state, metrics = step(state, case.batch)
    assert metrics.loss == value
    assert same_bits((state.params, state.opt_state), (params, opt_state))
