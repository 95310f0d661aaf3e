"""Readings say what rounding did, in loops, branches and layers of all kinds; and a
step without them has none.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from numpy.testing import assert_allclose

import tcfp_jax
from pallas_kernels.quantize.api import quantize
from tcfp_jax import monitor
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.linen import TCFPDense
from tcfp_jax.monitor.readings import read
from tcfp_jax.products import fp4_training, fp8_weights
from tcfp_jax.weights.layout import Layout, Weight
from tests.helpers import (
    MLP,
    all_finite,
    decibels,
    drawn,
    parametrize,
    refusals,
    refused,
    same_bits,
    slow,
    slow_except,
    store_at_once,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
W = drawn(2, 16, 16) / 4
X = drawn(8, 16, seed=1).at[0, 0].set(1e-4)
PARAMS = {"up": {"kernel": W[0]}, "down": {"kernel": W[1]}}
multiply = partial(tcfp_jax.matmul, recipe="tensorwise")
e4m3 = partial(quantize, dtype="float8_e4m3fn")


def read_e4m3(x):
    """The reading of an array that is quantized with one scale."""
    return read(x, e4m3(x).rows)


def observed(loss, *arguments):
    """The readings of a step."""
    return jax.jit(monitor.value_and_grad(loss))(*arguments)[1]


@slow_except("tensorwise")
@parametrize("name", ["tensorwise", "rowwise", "tcfp12_fast", "bf16"])
def test_readings_are_those_of_the_operands(name):
    recipe = tcfp_jax.recipe(name)
    product = partial(tcfp_jax.matmul, recipe=recipe)

    def loss(params, x):
        hidden = jnp.tanh(product(x, params["up"]["kernel"]))
        return jnp.sum(product(hidden, params["down"]["kernel"]) ** 2)

    result, readings = jax.jit(monitor.value_and_grad(loss))(PARAMS, X)
    assert same_bits(result, jax.jit(tcfp_jax.value_and_grad(loss))(PARAMS, X))
    assert list(readings) == ["down/kernel", "up/kernel"]
    hidden = jnp.tanh(product(X, W[0]))
    given = {
        "up/kernel": {"x": X, "w": W[0]},
        "down/kernel": {"x": hidden, "w": W[1], "g": 2 * product(hidden, W[1])},
    }
    for path, operands in given.items():
        for operand, x in operands.items():
            q = np.asarray(rounded(recipe, operand, x), np.float64)
            lost = np.mean((np.asarray(x) != 0) & (q == 0))
            wanted = np.abs(x).max(), lost, 0.0, decibels(x, q)
            assert_allclose(
                readings[path][operand], wanted, rtol=1e-3, err_msg=f"{path} {operand}"
            )


def rounded(recipe, operand, x):
    if recipe.mode is tcfp_jax.TCFPMode.BF16:
        return x.astype(jnp.bfloat16)
    if operand == "w" and recipe.mode is tcfp_jax.TCFPMode.TCFP12:
        return tcfp_jax.split(x).dequantize()
    if operand == "w":
        return quantize(x.T, recipe.weight.dtype, recipe.scaling).rows.dequantize().T
    dtype = recipe.gradient if operand == "g" else recipe.activation
    return quantize(x, dtype, recipe.scaling).rows.dequantize()


def test_clipped_values_are_counted():
    x = jnp.asarray([[1000.0, 449.0, 448.0, 1.0]])
    assert float(read(x, e4m3(x, amax=jnp.float32(448.0)).rows).saturation) == 0.5
    # 448 and -10, together 0.5 too small
    near = jnp.asarray([[438.5, 448.0], [1.0, -2.0]])
    assert float(read(near, tcfp_jax.split(near)).saturation) == 0


def test_zeros_are_known():
    x = jnp.zeros((2, 4))
    assert [float(value) for value in read_e4m3(x)] == [0.0, 0.0, 0.0, np.inf]
    assert np.isnan(read_e4m3(x.at[0, 0].set(jnp.nan)).snr)


@parametrize("binade", [-110, 125])
def test_the_magnitude_of_an_operand_is_no_part_of_its_snr(binade):
    """Values near float32's largest have squares beyond it, and the inverse of their
    amax is subnormal.
    """
    x = jnp.clip(drawn(16, 16), -4, 4)
    assert float(read_e4m3(x).snr) == float(read_e4m3(x * 2.0**binade).snr)


# Loops, branches and layers
# --------------------------------------------------------------------------------------
def test_loops_and_branches_have_entries_of_their_own():
    def loss(params, x, turned):
        def block(x, w):
            return jax.nn.relu(multiply(x, w)), None

        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["stack"])
        yes = partial(multiply, w=params["yes"])
        no = partial(multiply, w=params["no"])
        return jnp.sum(jax.lax.cond(turned, yes, no, x))

    params = {"stack": W, "yes": W[0], "no": W[1]}
    readings = observed(loss, params, X, True)
    stack = readings["stack"]
    assert stack["x"].snr.shape == (2,)
    assert all_finite(stack["g"].snr)
    assert_allclose(stack["w"].amax, jnp.abs(W).max((1, 2)))
    assert np.isfinite(readings["yes"]["g"].amax)
    assert np.isnan([*readings["no"]["g"], *readings["no"]["x"]]).all()


def test_a_weight_without_a_path_is_named_by_its_argument():
    def product(x, w):
        return jnp.sum(multiply(x, w))

    _, readings = jax.eval_shape(monitor.value_and_grad(product, argnums=1), X, W[0])
    assert list(readings) == ["argument 1"]


@slow
def test_vmap_puts_an_axis_in_front():
    def loss(params, x, axes):
        return jnp.sum(jax.vmap(multiply, in_axes=axes)(x, params["experts"]) ** 2)

    params = {"experts": W}
    x = jnp.stack([X, 2 * X])
    _, readings = monitor.value_and_grad(loss)(params, x, 0)
    assert_allclose(readings["experts"]["x"].amax, jnp.abs(x).max((1, 2)))
    with refused("only axes in front", NotImplementedError):
        monitor.value_and_grad(loss)(params, x.swapaxes(0, 1), (1, 0))


class Mlp(nn.Module):
    dense: type

    @nn.compact
    def __call__(self, x):
        up = self.dense(16, use_bias=False, name="up")
        return self.dense(16, use_bias=False, name="down")(nn.relu(up(x)))


@functools.cache
def model_of(kind):
    """(apply(params, stored, x), float parameters, weights)."""

    def convert(model):
        include = ("linear", "small")
        return convert_to_tcfp(model, "tcfp12_single", X, include=include)

    if kind == "nnx":
        model = convert(MLP(nnx.Rngs(0)))
        graphdef, state = nnx.split(model)

        def merged(params, stored, x):
            return nnx.merge(graphdef, params)(x)

        return merged, state, find_weights(model)
    if kind == "plain":
        model = convert(Mlp(nn.Dense))
    else:
        model = Mlp(partial(TCFPDense, recipe="tcfp12_single"))

    def apply(params, stored, x):
        return model.apply({"params": params, "tcfp": stored}, x)

    return apply, PARAMS, find_weights(model, X)


@slow_except("by hand-stored")
@parametrize("weights", ["float", "stored"])
@parametrize("kind", ["by hand", "plain", "nnx"])
def test_layers_of_all_kinds(kind, weights):
    apply, params, found = model_of(kind)
    stored = {}
    if weights == "stored":
        params = store_at_once(params, found, key=KEY)
    elif kind != "nnx":
        stored = tcfp_jax.layer_state(tcfp_jax.error_feedback(found).init(params))

    def loss(params, stored, x):
        return jnp.sum(apply(params, stored, x) ** 2)

    readings = observed(loss, params, stored, X)
    assert list(readings) == ["down/kernel", "up/kernel"]
    floats = tcfp_jax.dequantize(params)
    for path, reading in readings.items():
        (kernel,) = jax.tree.leaves(floats[path.split("/")[0]]["kernel"])
        assert_allclose(reading["w"].amax, jnp.abs(kernel).max())
        for operand in ("w", "x", "g"):
            assert 25 < reading[operand].snr < 35


TRACED = jax.make_user_context()


@parametrize(
    "name, module",
    [
        ("tcfp12_single", fp8_weights),
        pytest.param("nvfp4_training", fp4_training, marks=slow),
    ],
)
def test_a_step_without_readings_is_what_it_was(name, module, monkeypatch):
    params = {"kernel": W[0]}
    if name != "nvfp4_training":
        params = store_at_once(params, name, key=KEY)

    def loss(params, x):
        return tcfp_jax.matmul(x, params["kernel"], recipe=name, key=KEY).sum()

    def text(context):
        with TRACED(context):  # which has traces of its own
            return [
                jax.jit(program).lower(params, X).as_text()
                for program in (tcfp_jax.value_and_grad(loss), loss)
            ]

    with_sites = text("with sites")
    monkeypatch.setattr(module, "site", lambda result, *_: result)
    assert text("without") == with_sites
    assert "monitor" not in with_sites[0]


# Products that no probe reaches
# --------------------------------------------------------------------------------------
@jax.custom_vjp
def with_a_rule(x, w):
    return multiply(x, w)


with_a_rule.defvjp(
    lambda x, w: (multiply(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, saved[0].T @ g),
)


def hidden(params, x):
    return jnp.sum(with_a_rule(x, params["up"]["kernel"]))


def looped(params, x):
    def again(carried):
        return carried[0] + 1, multiply(carried[1], params["up"]["kernel"])

    return jnp.sum(jax.lax.while_loop(lambda c: c[0] < 2, again, (0, x))[1])


def differentiated(params, x):
    return jnp.sum(jax.grad(lambda x: jnp.sum(multiply(x, params["up"]["kernel"])))(x))


def exact(params, x):
    return jnp.sum(x @ params["up"]["kernel"])


def observe(loss, argnums=0):
    return lambda: monitor.value_and_grad(loss, argnums=argnums)(PARAMS, X)


test_a_function_without_a_reading_says_so = refusals(
    {
        ValueError: {
            "computes 1 .*none .* inside of jax.custom_vjp, where": observe(hidden),
            "are inside of jax.lax.while_loop, where no probe": observe(looped),
            "computes no low-precision product; observe the loss": observe(exact),
            "argnums=2": observe(exact, 2),
        },
        NotImplementedError: {
            "differentiates a low-precision product": observe(differentiated),
        },
    }
)


def test_a_product_that_no_probe_reaches_is_nan():
    def half(params, x):
        seen = multiply(x, params["down"]["kernel"])
        return hidden(params, x) + jnp.sum(seen**2)

    readings = observed(half, PARAMS, X)
    assert set(readings["up/kernel"]) == {"x", "w", "g"}
    assert np.isnan([*readings["up/kernel"].values()]).all()
    assert np.isfinite([*readings["down/kernel"].values()]).all()


# Updates and moments
# --------------------------------------------------------------------------------------
def feedback_of(params, updates, weights="tcfp12"):
    """The stored weights before and after updates, by error feedback."""
    tx = tcfp_jax.error_feedback(weights)
    state = tx.init(params)
    _, after = tx.update(updates, state, params)
    return tcfp_jax.layer_state(state), tcfp_jax.layer_state(after)


def test_updates_of_weights_beside_float_parameters():
    updates = jax.tree.map(lambda leaf: 0.01 * jnp.ones_like(leaf), PARAMS)
    layers = feedback_of(PARAMS, updates)
    found = monitor.update_quality(*layers, updates)["up/kernel"]
    assert float(found.moved) == 1
    assert float(found.edq) == pytest.approx(1, abs=0.01)
    with refused("pass weights=find_weights"):
        monitor.update_quality(*layers, jax.tree.map(lambda leaf: leaf[:8], updates))


def test_updates_of_a_kernel_of_three_axes():
    """It is stored as the matrix that its layout makes of it."""
    weights = {"kernel": Weight(tcfp_jax.recipe("tcfp12"), Layout((1,), (0, 2)))}
    params = {"kernel": drawn(4, 16, 2)}
    updates = {"kernel": 0.1 * params["kernel"]}
    layers = feedback_of(params, updates, weights)
    found = monitor.update_quality(*layers, updates, weights)["kernel"]
    assert float(found.edq) == pytest.approx(1, abs=0.02)


NARROW = {
    "adamw": tcfp_jax.optim.adamw(1e-2, key=KEY),
    "any": tcfp_jax.optim.low_precision_moments(optax.adam(1e-2), key=KEY),
}


def stale(before, after):
    (share,) = monitor.stale_moments(before, after).values()
    return float(share)


@parametrize("name", NARROW)
def test_narrow_moments_that_rest_are_counted(name):
    params = jnp.ones((32, 128))
    if name == "any":  # fields of optax have the names of a tree
        params = {"kernel": params}
    tx = NARROW[name]

    def step(state, factor=1.0):
        grads = jax.tree.map(lambda w: w * factor, params)
        return tx.update(grads, state, params)[1]

    start = tx.init(params)
    first = step(start)
    assert stale(start, first) == 0
    # v grows by half; its grid is a sixteenth: all move. With nothing to add, nothing
    # does.
    assert stale(first, step(first)) < 0.1
    assert stale(first, first) == 1
    # v of 2**16 times as much: codes stay, but for the decay of the first, and each
    # scale is another.
    assert stale(step(start, 2.0**-8), first) == 0


def test_moments_of_adam_beside_error_feedback_are_found():
    tx = optax.chain(optax.adam(1e-2), tcfp_jax.error_feedback("tcfp12"))
    state = tx.init(PARAMS)
    _, after = tx.update(PARAMS, state, PARAMS)
    assert float(monitor.stale_moments(state, after)["up/kernel"]) == 0
    with refused("no second moments"):
        monitor.stale_moments((), ())
