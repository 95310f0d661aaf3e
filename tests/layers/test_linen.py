"""The Flax layers: Flax's parameters, the stored kernel if given, and no state."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import random
from numpy.testing import assert_allclose

import tcfp_jax
from tcfp_jax.linen import TCFPDense
from tests.helpers import (
    assert_near,
    normal,
    parametrize,
    refused,
    same_bits,
    slow_except,
    unwatched,
)

X = normal(0, (4, 6, 32))
RECIPES = ("bf16", "tcfp12", "tcfp12_fast", "tensorwise")


class Network(nn.Module):
    recipe: tcfp_jax.Recipe | str = "tcfp12"
    remat: str = "no"

    @nn.compact
    def __call__(self, x):
        dense = nn.remat(TCFPDense) if self.remat == "yes" else TCFPDense
        x = nn.relu(dense(16, recipe=self.recipe, name="first")(x))
        return dense(32, recipe=self.recipe, use_bias=False, name="second")(x)


@parametrize(
    "options", [{}, {"use_bias": False}, {"param_dtype": jnp.bfloat16}], ids=str
)
def test_parameters_are_those_of_dense(options):
    x = X.astype(options.get("param_dtype", X.dtype))
    theirs = nn.Dense(16, **options).init(random.key(1), x)
    assert same_bits(TCFPDense(16, **options).init(random.key(1), x), theirs)


@parametrize("recipe", ["bf16", "tcfp12_fast"])
def test_layer_is_matmul_plus_bias(recipe):
    layer = TCFPDense(16, recipe=recipe, bias_init=nn.initializers.normal())
    variables = layer.init(random.key(1), X)
    params = variables["params"]
    expected = tcfp_jax.matmul(X, params["kernel"], recipe=recipe) + params["bias"]
    assert jnp.array_equal(layer.apply(variables, X), expected)


def test_dtype_is_that_of_the_result_and_never_of_the_kernel():
    variables = nn.Dense(16).init(random.key(1), X)
    layer = TCFPDense(16, dtype=jnp.bfloat16)
    y = layer.apply(variables, X)
    kernel = variables["params"]["kernel"]
    expected = tcfp_jax.matmul(X.astype(jnp.bfloat16), kernel, recipe="tcfp12")
    assert y.dtype == jnp.bfloat16 and jnp.array_equal(y, expected)  # the bias is zero


@slow_except("tcfp12_fast")
@parametrize("recipe", RECIPES[1:])
def test_stored_kernel_is_used(recipe):
    network = Network(recipe)
    params = network.init(random.key(1), X)["params"]
    tx = tcfp_jax.error_feedback(recipe)
    state = tcfp_jax.layer_state(tx.init(params))
    apply = jax.jit(network.apply)
    fresh = apply({"params": params}, X)
    stored = apply({"params": params, "tcfp": state}, X)
    # The same FP8 operands; each product is one program, which may sum in another order
    # beside a quantizer.
    assert_near(stored, fresh, 1e-5)
    doubled = unwatched(
        tcfp_jax.layer_state(tx.init(jax.tree.map(lambda p: 2 * p, params)))
    )
    assert jnp.max(jnp.abs(apply({"params": params, "tcfp": doubled}, X) - fresh)) > 0.1


def trainer(network, recipe, **options):
    """Return a function that trains and returns (losses, params, state)."""
    tx = optax.chain(optax.adam(1e-2), tcfp_jax.error_feedback(recipe, **options))

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            y = network.apply(
                {"params": params, "tcfp": tcfp_jax.layer_state(opt_state)}, X
            )
            return jnp.mean((y - X) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    @jax.numpy_dtype_promotion("standard")  # Adam raises a float to an integer power
    def run(steps=8):
        params = network.init(random.key(1), X)["params"]
        losses = []
        opt_state = tx.init(params)
        for _ in range(steps):
            params, opt_state, value = step(params, opt_state)
            losses.append(float(value))
        return losses, params, opt_state

    return run


STOCHASTIC = tcfp_jax.recipe("tcfp12", remainder="stochastic")


@slow_except("stochastic")
@parametrize("recipe", [*RECIPES, STOCHASTIC], ids=[*RECIPES, "stochastic"])
def test_training_learns_and_repeats_bit_for_bit(recipe):
    run = trainer(
        Network(recipe),
        recipe,
        **({"key": random.key(3)} if recipe == STOCHASTIC else {}),
    )
    (losses, *state) = run()
    (again, *same_state) = run()
    assert losses[-1] < 0.95 * losses[0]
    assert losses == again
    assert same_bits(state, same_state)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return TCFPDense(32, name="dense")(nn.RMSNorm(name="norm")(x))


def test_a_parameter_named_scale_is_no_weight():
    """`RMSNorm` has a parameter `scale`, once taken for a quantized weight."""
    losses, params, opt_state = trainer(Normed(), "tcfp12")()
    assert losses[-1] < losses[0]
    assert set(params) == {"dense", "norm"}
    state = tcfp_jax.layer_state(opt_state)
    assert set(state) == {"dense"}
    assert set(state["dense"]) == {"kernel"}


def test_remat_changes_nothing():
    losses, *_ = trainer(Network("tcfp12_fast"), "tcfp12_fast")(3)
    with_remat, *_ = trainer(Network("tcfp12_fast", remat="yes"), "tcfp12_fast")(3)
    assert_allclose(losses, with_remat, rtol=1e-6)


class Stack(nn.Module):
    recipe: tcfp_jax.Recipe | str = "tcfp12"

    @nn.compact
    def __call__(self, x):
        def layer(module, carry, _):
            return TCFPDense(32, recipe=module.recipe, name="layer")(carry), None

        scan = nn.scan(
            layer,
            variable_axes={"params": 0, "tcfp": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(self, x, None)[0]


def test_scan_over_layers_reads_the_stacked_state():
    network = Stack()
    params = network.init(random.key(1), X)["params"]
    state = tcfp_jax.layer_state(tcfp_jax.error_feedback("tcfp12").init(params))
    assert state["layer"]["kernel"].stack == (3,)
    fresh = network.apply({"params": params}, X)
    assert_near(network.apply({"params": params, "tcfp": state}, X), fresh, 1e-5)


def test_stochastic_layer_takes_the_rng_stream():
    layer = TCFPDense(16, recipe=STOCHASTIC)
    variables = layer.init(random.key(1), X)

    def run(**rngs):
        return layer.apply(variables, X, rngs=rngs)

    assert jnp.array_equal(run(), run())
    assert not jnp.array_equal(run(tcfp=random.key(1)), run(tcfp=random.key(2)))


@parametrize(
    "options",
    [
        {"precision": "highest"},
        {"dot_general": jax.lax.dot_general},
        {"promote_dtype": lambda *a, dtype: a},
    ],
    ids=lambda o: next(iter(o)),
)
def test_fields_that_would_be_ignored_raise(options):
    with refused(f"{next(iter(options))}.*nn.Dense"):
        TCFPDense(16, **options).init(random.key(0), X)
