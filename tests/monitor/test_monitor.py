"""Readings say what rounding did, in loops, branches and layers of all kinds; and a
step without them has none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tcfp_jax
from pallas_kernels.quantize.api import quantize
from tcfp_jax import monitor
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.linen import TCFPDense
from tcfp_jax.monitor.readings import read
from tcfp_jax.products import fp4_training, matmul
from tcfp_jax.weights.layout import Layout, Weight
from tests.helpers import decibels, same_bits, store_at_once

pytestmark = pytest.mark.usefixtures("standard_promotion")
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.standard_normal((2, 16, 16)) / 4, jnp.float32)
X = jnp.asarray(RNG.standard_normal((8, 16)), jnp.float32).at[0, 0].set(1e-4)
PARAMS = {"up": {"kernel": W[0]}, "down": {"kernel": W[1]}}


def loss_of(recipe, params, x):
    multiply = functools.partial(tcfp_jax.matmul, recipe=recipe)
    return jnp.sum(
        multiply(
            jnp.tanh(multiply(x, params["up"]["kernel"])), params["down"]["kernel"]
        )
        ** 2
    )


def numbers(x, q):
    x, q = np.asarray(x, np.float64), np.asarray(q, np.float64)
    return np.abs(x).max(), np.mean((x != 0) & (q == 0)), 0.0, decibels(x, q)


@pytest.mark.slow_except("tensorwise")
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "tcfp12_fast", "bf16"])
def test_readings_are_those_of_the_operands(name):
    recipe = tcfp_jax.recipe(name)
    loss = functools.partial(loss_of, recipe)
    (value, gradients), readings = jax.jit(monitor.value_and_grad(loss))(PARAMS, X)
    assert same_bits(
        (value, gradients), jax.jit(tcfp_jax.value_and_grad(loss))(PARAMS, X)
    )
    assert list(readings) == ["down/kernel", "up/kernel"]

    hidden = jnp.tanh(tcfp_jax.matmul(X, W[0], recipe=recipe))
    y = tcfp_jax.matmul(hidden, W[1], recipe=recipe)
    given = {
        "up/kernel": {"x": X, "w": W[0]},
        "down/kernel": {"x": hidden, "w": W[1], "g": 2 * y},
    }
    for path, operands in given.items():
        for operand, v in operands.items():
            found = readings[path][operand]
            rounded = (
                v.astype(jnp.bfloat16)
                if name == "bf16"
                else _rounded(recipe, operand, v)
            )
            np.testing.assert_allclose(
                found, numbers(v, rounded), rtol=1e-3, err_msg=f"{path} {operand}"
            )


def _rounded(recipe, operand, v):
    if operand == "w" and recipe.mode is tcfp_jax.TCFPMode.TCFP12:
        return tcfp_jax.split(v).dequantize()
    if operand == "w":
        return quantize(v.T, recipe.weight.dtype, recipe.scaling).rows.dequantize().T
    return quantize(
        v, recipe.gradient if operand == "g" else recipe.activation, recipe.scaling
    ).rows.dequantize()


def test_what_was_clipped_is_counted():
    x = jnp.asarray([[1000.0, 449.0, 448.0, 1.0]])
    rounded = quantize(x, "float8_e4m3fn", amax=jnp.float32(448.0)).rows
    assert float(read(x, rounded).saturation) == 0.5
    # 448 and -10, together 0.5 too small
    near = jnp.asarray([[438.5, 448.0], [1.0, -2.0]])
    assert float(read(near, tcfp_jax.split(near)).saturation) == 0


def test_zeros_are_known():
    x = jnp.zeros((2, 4))
    assert [float(value) for value in read(x, quantize(x, "float8_e4m3fn").rows)] == [
        0.0,
        0.0,
        0.0,
        np.inf,
    ]
    nan = x.at[0, 0].set(jnp.nan)
    assert np.isnan(read(nan, quantize(nan, "float8_e4m3fn").rows).snr)


def test_loops_and_branches_have_entries_of_their_own():
    def loss(params, x, turned):
        def block(x, w):
            return jax.nn.relu(tcfp_jax.matmul(x, w, recipe="tensorwise")), None

        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["stack"])
        multiply = lambda name: (
            lambda x: tcfp_jax.matmul(x, params[name], recipe="tensorwise")
        )
        return jnp.sum(jax.lax.cond(turned, multiply("yes"), multiply("no"), x))

    product = lambda x, w: jnp.sum(tcfp_jax.matmul(x, w, recipe="tensorwise"))
    _, bare = jax.eval_shape(monitor.value_and_grad(product, argnums=1), X, W[0])
    assert list(bare) == ["argument 1"]
    params = {"stack": W, "yes": W[0], "no": W[1]}
    _, readings = jax.jit(monitor.value_and_grad(loss))(params, X, True)
    assert (
        readings["stack"]["x"].snr.shape == (2,)
        and np.isfinite(readings["stack"]["g"].snr).all()
    )
    np.testing.assert_allclose(readings["stack"]["w"].amax, jnp.abs(W).max((1, 2)))
    assert (
        np.isfinite(readings["yes"]["g"].amax)
        and np.isnan([*readings["no"]["g"], *readings["no"]["x"]]).all()
    )


@pytest.mark.slow
def test_vmap_puts_an_axis_in_front():
    multiply = functools.partial(tcfp_jax.matmul, recipe="tensorwise")
    params, x = {"experts": W}, jnp.stack([X, 2 * X])
    _, readings = monitor.value_and_grad(
        lambda p, x: jnp.sum(jax.vmap(multiply)(x, p["experts"]) ** 2)
    )(params, x)
    np.testing.assert_allclose(readings["experts"]["x"].amax, jnp.abs(x).max((1, 2)))
    last = lambda p, x: jnp.sum(jax.vmap(multiply, in_axes=(1, 0))(x, p["experts"]))
    with pytest.raises(NotImplementedError, match="only axes in front"):
        monitor.value_and_grad(last)(params, x.swapaxes(0, 1))


class Mlp(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        if self.kind == "plain":
            return nn.Dense(16, name="down", use_bias=False)(
                nn.relu(nn.Dense(16, name="up", use_bias=False)(x))
            )
        dense = functools.partial(TCFPDense, 16, recipe="tcfp12_single", use_bias=False)
        return dense(name="down")(nn.relu(dense(name="up")(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (
            nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(2)
        )

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@functools.cache
def model_of(kind):
    """(apply(params, stored, x), float parameters, weights)."""
    if kind == "nnx":
        model = convert_to_tcfp(
            Nnx(nnx.Rngs(0)), "tcfp12_single", X, include=("linear", "small")
        )
        graphdef, state = nnx.split(model)
        return (
            lambda params, _, x: nnx.merge(graphdef, params)(x),
            state,
            find_weights(model),
        )
    model = Mlp(kind)
    if kind == "plain":
        model = convert_to_tcfp(model, "tcfp12_single", X, include=("linear", "small"))
    return (
        lambda params, stored, x: model.apply({"params": params, "tcfp": stored}, x),
        PARAMS,
        find_weights(model, X),
    )


@pytest.mark.slow_except("by hand-stored")
@pytest.mark.parametrize("weights", ["float", "stored"])
@pytest.mark.parametrize("kind", ["by hand", "plain", "nnx"])
def test_layers_of_all_kinds(kind, weights):
    apply, params, found = model_of(kind)
    stored = {}
    if weights == "stored":
        params = store_at_once(params, found, key=jax.random.key(0))
    elif kind != "nnx":
        stored = tcfp_jax.layer_state(tcfp_jax.error_feedback(found).init(params))
    loss = lambda params, stored, x: jnp.sum(apply(params, stored, x) ** 2)
    _, readings = jax.jit(monitor.value_and_grad(loss))(params, stored, X)
    assert list(readings) == ["down/kernel", "up/kernel"]
    floats = tcfp_jax.dequantize(params)
    for path, reading in readings.items():
        kernel = floats[path.split("/")[0]]["kernel"]
        kernel = kernel.get_value() if hasattr(kernel, "get_value") else kernel
        np.testing.assert_allclose(reading["w"].amax, jnp.abs(kernel).max())
        assert (
            25 < reading["w"].snr < 35
            and 25 < reading["x"].snr < 35
            and 25 < reading["g"].snr < 35
        )


TRACED = jax.make_user_context()


@pytest.mark.parametrize(
    "name, module",
    [
        ("tcfp12_single", matmul),
        pytest.param("nvfp4_training", fp4_training, marks=pytest.mark.slow),
    ],
)
def test_a_step_without_readings_is_what_it_was(name, module, monkeypatch):
    one = {"up": {"kernel": W[0]}}
    params = (
        one
        if name == "nvfp4_training"
        else store_at_once(one, name, key=jax.random.key(0))
    )

    def text(context):
        loss = lambda params, x: tcfp_jax.matmul(
            x, params["up"]["kernel"], recipe=name, key=jax.random.key(0)
        ).sum()
        with TRACED(context):  # which has traces of its own
            return [
                jax.jit(program).lower(params, X).as_text()
                for program in (tcfp_jax.value_and_grad(loss), loss)
            ]

    with_sites = text("with sites")
    monkeypatch.setattr(module, "site", lambda result, *_: result)
    assert text("without") == with_sites
    assert "monitor" not in with_sites[0]


multiply = functools.partial(tcfp_jax.matmul, recipe="tensorwise")


@jax.custom_vjp
def with_a_rule(x, w):
    return multiply(x, w)


with_a_rule.defvjp(
    lambda x, w: (multiply(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, saved[0].T @ g),
)


def in_a_while_loop(x, w):
    again = lambda carried: (carried[0] + 1, multiply(carried[1], w))
    return jax.lax.while_loop(lambda carried: carried[0] < 2, again, (0, x))[1]


def hidden(params, x):
    return jnp.sum(with_a_rule(x, params["up"]["kernel"]))


def looped(params, x):
    return jnp.sum(in_a_while_loop(x, params["up"]["kernel"]))


def differentiated(params, x):
    return jnp.sum(jax.grad(lambda x: jnp.sum(multiply(x, params["up"]["kernel"])))(x))


def exact(params, x):
    return jnp.sum(x @ params["up"]["kernel"])


UNREAD = [
    (hidden, 0, ValueError, r"computes 1 .*none .* inside of jax.custom_vjp, where"),
    (looped, 0, ValueError, r"are inside of jax.lax.while_loop, where no probe"),
    (differentiated, 0, NotImplementedError, "differentiates a low-precision product"),
    (exact, 0, ValueError, "computes no low-precision product; observe the loss"),
    (exact, 2, ValueError, "argnums=2"),
]


@pytest.mark.parametrize(("loss", "argnums", "error", "message"), UNREAD)
def test_a_function_without_a_reading_says_so(loss, argnums, error, message):
    with pytest.raises(error, match=message):
        monitor.value_and_grad(loss, argnums=argnums)(PARAMS, X)


def test_a_product_that_no_probe_reaches_is_nan():
    def half(params, x):
        seen = multiply(x, params["down"]["kernel"])
        return hidden(params, x) + jnp.sum(seen**2)

    _, readings = jax.jit(monitor.value_and_grad(half))(PARAMS, X)
    assert set(readings["up/kernel"]) == {"x", "w", "g"}
    assert np.isnan([*readings["up/kernel"].values()]).all()
    assert np.isfinite([*readings["down/kernel"].values()]).all()


def test_updates_of_weights_beside_float_parameters():
    tx = optax.chain(optax.adam(1e-2), tcfp_jax.error_feedback("tcfp12"))
    state = tx.init(PARAMS)
    gradients = jax.tree.map(jnp.ones_like, PARAMS)
    updates, after = tx.update(gradients, state, PARAMS)
    layers = tcfp_jax.layer_state(state), tcfp_jax.layer_state(after)
    found = monitor.update_quality(*layers, updates)["up/kernel"]
    assert float(found.moved) == 1 and float(found.edq) == pytest.approx(1, abs=0.01)
    assert float(monitor.stale_moments(state, after)["up/kernel"]) == 0
    with pytest.raises(ValueError, match="pass weights=find_weights"):
        monitor.update_quality(*layers, jax.tree.map(lambda leaf: leaf[:8], updates))
    # A kernel of three axes is stored as the matrix that its layout makes of it.
    weights = {"kernel": Weight(tcfp_jax.recipe("tcfp12"), Layout((1,), (0, 2)))}
    feedback, kernel = (
        tcfp_jax.error_feedback(weights),
        {"kernel": jax.random.normal(jax.random.key(1), (4, 16, 2))},
    )
    before, change = feedback.init(kernel), jax.tree.map(lambda w: 0.1 * w, kernel)
    _, after = feedback.update(change, before, kernel)
    found = monitor.update_quality(
        *map(tcfp_jax.layer_state, (before, after)), change, weights
    )["kernel"]
    assert float(found.edq) == pytest.approx(1, abs=0.02)


def test_moments_at_rest():
    # large enough for narrow moments
    params = {"up": {"kernel": jnp.tile(W[0], (8, 16))}}
    tx = tcfp_jax.optim.adamw(1e-2, key=jax.random.key(0))
    step = lambda state: tx.update(jax.tree.map(jnp.ones_like, params), state, params)[
        1
    ]
    first = step(tx.init(params))
    assert float(monitor.stale_moments(tx.init(params), first)["up/kernel"]) == 0
    # v grows by half; its grid is a sixteenth: all move. With nothing to add, nothing
    # does.
    assert float(monitor.stale_moments(first, step(first))["up/kernel"]) < 0.1
    assert float(monitor.stale_moments(first, first)["up/kernel"]) == 1
    with pytest.raises(ValueError, match="no second moments"):
        monitor.stale_moments((), ())


@pytest.mark.parametrize(
    "narrow, named",
    [
        (tcfp_jax.optim.adamw, False),
        (
            lambda lr, key: tcfp_jax.optim.low_precision_moments(
                optax.adam(lr), key=key
            ),
            True,
        ),
    ],
    ids=["adamw", "any"],
)
def test_moments_in_eight_bits_are_compared_as_values(narrow, named):
    kernel = jnp.ones((32, 128))
    params = {"kernel": kernel} if named else kernel
    tx = narrow(1e-2, key=jax.random.key(0))
    first = tx.update(
        jax.tree.map(lambda w: w * 2.0**-8, params), tx.init(params), params
    )[1]
    # v of 2**16 times as much: codes stay, but for the decay of the first, and each
    # scale is another.
    second = tx.update(params, tx.init(params), params)[1]
    path = "kernel" if named else ""
    assert float(monitor.stale_moments(first, second)[path]) == 0
    assert float(monitor.stale_moments(first, first)[path]) == 1


@pytest.mark.parametrize("binade", [-110, 125])
def test_the_magnitude_of_an_operand_is_no_part_of_its_snr(binade):
    """Values near float32's largest have squares beyond it, and the inverse of their
    amax is subnormal.
    """
    x = jnp.asarray(RNG.uniform(-4, 4, (16, 16)), jnp.float32)
    near, far = (
        read(v, quantize(v, "float8_e4m3fn").rows) for v in (x, x * 2.0**binade)
    )
    assert float(near.snr) == float(far.snr)
