"""Stored parameters that are transposed, and code that does not know stored ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tcfp_jax
from tcfp_jax import optim
from tcfp_jax.linen import TCFPDense
from tcfp_jax.weights.layout import Layout, Weight
from tests.helpers import assert_close, drawn, parametrize, refusals, refused, same_bits
from tests.optim.zoo import KERNEL, KEY, RECIPE, TWO_LAYERS, X, loss, stored_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
WEIGHT = Weight(tcfp_jax.recipe(RECIPE), Layout((0,), (1,)))
LOOKED_UP = Weight(tcfp_jax.recipe(RECIPE), Layout((0,), (1,)), float_reads="lookup")
HEADS = Weight(tcfp_jax.recipe(RECIPE), Layout((0,), (1, 2)))
TRANSPOSED = Weight(tcfp_jax.recipe(RECIPE), Layout((1,), (0,)))


# Transposed
# --------------------------------------------------------------------------------------
def test_matmul_multiplies_a_parameter_stored_transposed():
    def cube(params):
        return jnp.sum(tcfp_jax.matmul(X, params["kernel"], recipe=RECIPE) ** 3)

    run = tcfp_jax.value_and_grad(cube)
    value, gradients = run(stored_of({"kernel": KERNEL}))
    same, transposed = run(stored_of({"kernel": KERNEL.T}, {"kernel": TRANSPOSED}))
    assert gradients["kernel"].shape == (16, 32)
    # W_lo has other random bits, and W_hi alone is read
    np.testing.assert_allclose(same, value, rtol=1e-5)
    assert_close(transposed["kernel"].T, gradients["kernel"], 1e-5, 1e-5)


def test_the_gradient_of_a_swapped_weight_is_its_parameters():
    kernel = drawn(16, 16)

    def gradient(params, turned):
        def square(params):
            weight = params["kernel"].swap() if turned else params["kernel"]
            return jnp.sum(tcfp_jax.matmul(X, weight, recipe=RECIPE)[..., :3] ** 2)

        return tcfp_jax.grad(square)(params)["kernel"]

    found = gradient(stored_of({"kernel": kernel}), turned=True)
    wanted = gradient(stored_of({"kernel": kernel.T}), turned=False)
    np.testing.assert_allclose(found, wanted.T, rtol=1e-6)


@parametrize("shape", [(16, 32), (3, 16, 32)])
def test_a_swapped_parameter_is_the_transposed_kernel(shape):
    weight = stored_of({"kernel": drawn(*shape)})["kernel"]
    turned = weight.swap()
    assert jnp.array_equal(turned.dequantize(), weight.dequantize().swapaxes(-1, -2))
    assert same_bits(turned.swap().stored, weight.stored)


TURNED = {
    "swap": lambda w: w.swap().dequantize().T,
    "for_forward": lambda w: w.stored.for_forward().dequantize().T,
    "for_dgrad of a swap": lambda w: w.swap().stored.for_dgrad().dequantize().T,
    "matmul": lambda w: tcfp_jax.matmul(X, w, recipe="tcfp12"),
    "matmul of a swap": lambda w: tcfp_jax.matmul(
        jnp.ones((4, 32)), w.swap(), recipe="tcfp12_fast"
    ),
    "drop_residual": lambda w: w.swap().stored.drop_residual().dequantize().T,
}


@parametrize("name", TURNED)
def test_a_forward_copy_of_w_hi_is_never_read_for_both_halves(name):
    both, one = (
        stored_of(recipe=tcfp_jax.recipe(RECIPE, copies=copies))["up"]["kernel"]
        for copies in ("both", "one")
    )
    assert both.stored.forward.lo is None
    assert one.stored.forward is None
    assert both.swap().stored.has_residual
    assert both.swap().shape == (32, 16)
    assert same_bits(TURNED[name](both), TURNED[name](one))


# Refused
# --------------------------------------------------------------------------------------
def with_stored(call):
    """A call of stored parameters, which are made when it runs."""
    return lambda: call(stored_of())


def floats_of_another_shape(params):
    updates = jax.tree.map(jnp.zeros_like, TWO_LAYERS)
    updates["up"]["kernel"] = jnp.zeros((32, 16))
    tcfp_jax.apply_updates(params, updates)


def adamw_of_optax(params):
    tx = optax.adamw(1e-2)
    tx.update(tcfp_jax.grad(loss)(params, X), tx.init(params), params)


def stored_twice(params):
    layer = TCFPDense(32, recipe=RECIPE)
    layer.apply({"params": params["up"], "tcfp": {"kernel": params["up"]["kernel"]}}, X)


def in_a_dense_of(layer):
    return with_stored(lambda params: layer.apply({"params": params["up"]}, X))


ADAMW = optim.adamw(1e-2, moments="float32")
ON_STORED = optim.on_stored(optax.adam(1e-2))
NARROW = optim.low_precision_moments(optax.adam(1e-2), key=KEY)
FEEDBACK = optim.error_feedback("tcfp12")


def update(tx, grads=TWO_LAYERS, of=None):
    """The call of an optimizer with these gradients, and the state of another."""

    def call(params):
        given = grads(params) if callable(grads) else grads
        tx.update(given, jax.eval_shape((of or tx).init, params), params)

    return with_stored(call)


def update_of_floats(tx):
    tx.update(TWO_LAYERS, ADAMW.init(TWO_LAYERS), TWO_LAYERS)


def update_of_a_reshaped_kernel():
    """Its moments have the shape of the stored matrix."""
    kernel = {"kernel": drawn(16, 4, 8)}
    params = stored_of(kernel, {"kernel": HEADS})
    ADAMW.update(kernel, ADAMW.init(params), kernel)


def applied(call):
    """The call with stored parameters and their updates by AdamW."""

    def run(params):
        updates, state = ADAMW.update(TWO_LAYERS, ADAMW.init(params), params)
        call(params, updates, state)

    return with_stored(run)


apply = tcfp_jax.apply_updates
HELD = "first argument of tx.update, hold a stored weight at down/kernel, where floats"
OF_STORED = "second argument of apply_updates, hold the update of a stored weight at do"
test_an_argument_instead_of_another_is_named = refusals(
    {
        ValueError: {
            f"gradients, {HELD}": update(ADAMW, lambda params: params),
            f"{HELD} belong; pass the": update(ON_STORED, lambda params: params),
            "of type tuple, but the parameters of type dict; .* second result of": (
                update(ADAMW, (0.0, TWO_LAYERS))
            ),
            "of type tuple, .* pass": update(ON_STORED, (0.0, TWO_LAYERS)),
            "have no down/kernel, which is a par": update(ADAMW, TWO_LAYERS["up"]),
            "have rest, which is not a par": update(ADAMW, {**TWO_LAYERS, "rest": X}),
            "hold None at down/kernel": update(
                ADAMW, {**TWO_LAYERS, "down": {"kernel": None}}
            ),
            "other containers": lambda: ADAMW.update([(X,)], ADAMW.init([[X]]), [[X]]),
            r"a moment of kernel is \[16, 32\] in the state, not \[16, 4, 8\]": (
                update_of_a_reshaped_kernel
            ),
            "third of tx.update, hold an object of type function, where": (
                lambda: ADAMW.init(loss)
            ),
            "hold an object of type str at up, where": lambda: ON_STORED.init(
                {"up": "kernel"}
            ),
            "first argument of store, hold an object of type str, where": (
                lambda: tcfp_jax.store(RECIPE, TWO_LAYERS, key=KEY)
            ),
            r"optim\.on_stored\(low_precision_moments": with_stored(NARROW.init),
            "are stored weights, and error_feedback keeps": with_stored(FEEDBACK.init),
            "first argument of apply_updates, hold the update of a stored weight": (
                applied(lambda params, updates, state: apply(updates, params))
            ),
            "of apply_updates, are of type tuple, .*returns .updates, state": (
                applied(lambda params, *made: apply(params, made))
            ),
            OF_STORED: applied(
                lambda params, updates, state: apply(TWO_LAYERS, updates)
            ),
            "apply_updates, hold a stored weight at down": with_stored(
                lambda params: apply(TWO_LAYERS, params)
            ),
            "of incremental_update, have no": with_stored(
                lambda params: optim.incremental_update(params["up"], params, 0.5)
            ),
            "of incremental_update, hold the update": applied(
                lambda params, updates, state: optim.incremental_update(
                    updates, params, 0.5
                )
            ),
        },
        TypeError: {
            "type OnStoredState, not adamw's; pass": update(ADAMW, of=ON_STORED),
            "type AdamWState, not on_stored's": update(ON_STORED, of=ADAMW),
            "type AdamWState, not low_precision_moments's": lambda: update_of_floats(
                NARROW
            ),
            "type AdamWState, not error_feedback's": lambda: update_of_floats(FEEDBACK),
        },
    }
)


EITHER = (TypeError, ValueError)
test_code_that_does_not_know_stored_weights_says_the_remedy = refusals(
    {
        TypeError: {
            r"tcfp_jax\.value_and_grad": with_stored(
                lambda params: jax.grad(loss)(params, X)
            ),
            r"tcfp_jax\.dequantize": in_a_dense_of(nn.Dense(32)),
            "dequantize": with_stored(lambda params: params["up"]["kernel"] * 2),
        },
        EITHER: {
            "Parameter": with_stored(
                lambda params: optax.apply_updates(params, TWO_LAYERS)
            ),
            r"on_stored|Parameter": with_stored(adamw_of_optax),
        },
        ValueError: {
            "both": with_stored(stored_twice),
            "stored already": with_stored(stored_of),
            r"up/kernel is \[32, 16\], but the parameter is \[16, 32\]": with_stored(
                floats_of_another_shape
            ),
            "on_stored": with_stored(
                lambda params: tcfp_jax.apply_updates(params, params)
            ),
            "argnums=3": with_stored(
                lambda params: tcfp_jax.grad(loss, argnums=3)(params, X)
            ),
            r"tx\.update": lambda: optim.on_stored(optax.sgd(0.1)).update(
                TWO_LAYERS, None
            ),
            "pass the parameters of this model": in_a_dense_of(
                TCFPDense(8, recipe=RECIPE)
            ),
        },
    }
)


def store(params=TWO_LAYERS, weights=RECIPE, key=KEY, **options):
    tcfp_jax.store(params, weights, key=key, **options)


test_parameters_that_cannot_be_stored_say_why = refusals(
    {
        ValueError: {
            r'too few bits .*recipe\("tcfp12_single"\)': lambda: store(
                weights="tensorwise"
            ),
            r'recipe\("tcfp12_single"\)': lambda: store(weights="bf16"),
            "key=jax.random.key": lambda: store(key=None),
            "key is a int, not one JAX random key": lambda: store(key=0),
            "for no other": lambda: store(remainder="feedback"),
            "'stochastic', 'feedback', 'dropped'": lambda: store(remainder="nearest"),
            "find_weights": lambda: store({"bias": jnp.ones(4)}),
            'a recipe that stores none, such as "bf16" or one of FP4 training': (
                lambda: store(weights={})
            ),
            r"'up/kernel'\]: the mapping names \['a/b'\]; pass the parameters of the": (
                lambda: store(weights={"a/b": WEIGHT})
            ),
            "up/kernel is named, but code other than converted products reads": (
                lambda: store(weights={"up/kernel": LOOKED_UP})
            ),
        }
    }
)
SIXTEEN_BITS = r"use (the kernel.astype|gradient_dtype=jnp.bfloat16)"


@parametrize(
    "kernel, gradient",
    [(jnp.int32, None), (jnp.float32, "float8_e5m2"), (jnp.float32, jnp.int32)],
)
def test_gradients_without_a_scale_need_16_bits(kernel, gradient):
    params = {"kernel": jnp.ones((16, 32), kernel)}
    with refused(SIXTEEN_BITS, TypeError):
        store(params, gradient_dtype=gradient)
