"""`tcfp_jax.nnx.Optimizer` and `TrainState`, for stored and for fed-back weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import treescope
from flax import linen as nn
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, detach, export, find_weights
from tcfp_jax.linen import TrainState
from tcfp_jax.nnx import Optimizer, TCFPLinear, value_and_grad
from tcfp_jax.weights.parameter import is_quantized
from tests.helpers import (
    MLP,
    drawn,
    parametrize,
    refused,
    same_bits,
    slow_except,
    store_at_once,
)

# optax raises a float to an integer power
pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
X = drawn(8, 16)
ALL = ("linear", "small", "head")
ADAM = optax.adam(1e-2)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="down")(nn.relu(nn.Dense(32, name="up")(x)))


class Counted(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return super().__call__(x)


def loss(model, x):
    y = model(x)
    return jnp.mean((y - x) ** 2), y


def stored(recipe="tcfp12_single"):
    model = convert_to_tcfp(Counted(nnx.Rngs(0)), recipe, X, include=ALL)
    floats = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    nnx.update(model, store_at_once(floats, find_weights(model), key=KEY))
    return model, floats


def kernels(model):
    return [
        leaf
        for leaf in jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=is_quantized)
        if is_quantized(leaf)
    ]


def steps(model, optimizer, count):
    @nnx.jit
    def step(model, optimizer):
        (value, _), gradients = value_and_grad(loss, has_aux=True)(model, X)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer)) for _ in range(count)]


@slow_except("tx2-exact_tx2-AdamWState", "tx3-exact_tx3-OnStoredState")
@parametrize(
    "tx, exact_tx, state",
    [
        (ADAM, ADAM, "OnStoredState"),
        (optax.MultiSteps(ADAM, 2), optax.MultiSteps(ADAM, 2), "OnStoredState"),
        (
            tcfp_jax.optim.adamw(1e-2, moments="float32", weight_decay=0.0),
            ADAM,
            "AdamWState",
        ),
        (tcfp_jax.optim.on_stored(ADAM), ADAM, "OnStoredState"),
    ],
)
def test_stored_weights_train_as_floats_do(tx, exact_tx, state):
    model, floats = stored()
    optimizer = Optimizer(model, tx)
    assert type(optimizer.opt_state).__name__ == state
    low = steps(model, optimizer, 6)
    exact = Counted(nnx.Rngs(0))
    nnx.update(exact, floats)
    wanted = steps(exact, nnx.Optimizer(exact, exact_tx, wrt=nnx.Param), 6)
    assert_allclose(low, wanted, rtol=0.05)
    assert low[-1] < low[0]
    assert len(kernels(model)) == 2
    assert int(model.calls[...]) == 6
    assert all(leaf.state.slot is None for leaf in kernels(model))
    assert int(optimizer.step[...]) == 6


def test_displays_count_stored_parameters_once():
    model, floats = stored()
    count = sum(leaf.size for leaf in jax.tree.leaves(floats))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    before = list(map(id, kernels(model)))
    for text in (repr(model), treescope.render_to_text(model)):
        assert f"Param: {count:,} ({size / 1e3:.1f} KB)" in text.splitlines()[0]
        assert "Parameter(shape=(16, 32), dtype=float8_e4m3fn hi + lo)" in text
    assert repr(model.up).startswith("Linear( # Param: 544 ")
    assert list(map(id, kernels(model))) == before
    traced = []
    nnx.jit(lambda model: traced.append(repr(model)))(model)
    assert f"Param: {count:,} " in traced[0]


def test_gradients_are_those_of_the_floats():
    model, _ = stored()
    exact = Counted(nnx.Rngs(0))
    nnx.update(exact, tcfp_jax.dequantize(nnx.state(model, nnx.Param)))
    (value, y), gradients = value_and_grad(loss, has_aux=True)(model, X)
    (wanted, _), exact_gradients = nnx.value_and_grad(loss, has_aux=True)(exact, X)
    assert_allclose(value, wanted, rtol=0.02)
    assert y.shape == X.shape
    assert jax.tree.structure(gradients) == jax.tree.structure(exact_gradients)
    for a, b in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients), strict=True
    ):
        assert a.shape == b.shape
        assert float(jnp.linalg.norm(a - b)) < 0.1 * float(jnp.linalg.norm(b))
    with refused(r"tcfp_jax\.nnx\.value_and_grad", TypeError):
        nnx.grad(loss, has_aux=True)(model, X)
    some = value_and_grad(
        loss, argnums=nnx.DiffState(0, nnx.PathContains("down")), has_aux=True
    )(model, X)[1]
    assert set(some) == {"down"}


def test_a_stored_model_exports_as_a_plain_one():
    model, _ = stored()
    wanted = tcfp_jax.dequantize(nnx.state(model, nnx.Param))
    assert export(model) is model
    plain = Counted(nnx.Rngs(0))
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    found = nnx.state(model, nnx.Param)
    nnx.update(plain, wanted)
    assert same_bits(found, nnx.state(plain, nnx.Param))
    assert jnp.array_equal(model(X), plain(X))


OURS = functools.partial(tcfp_jax.optim.adamw, weight_decay=0.0, key=KEY)
INJECT = functools.partial(optax.inject_hyperparams, OURS)
AROUND = {
    "steps": optax.MultiSteps(OURS(1e-2), 2),
    "finite": optax.apply_if_finite(OURS(1e-2), 3),
    "stored": optax.MultiSteps(tcfp_jax.optim.on_stored(ADAM), 2),
}


@slow_except("steps-nnx")
@parametrize("framework", ["nnx", "linen"])
@parametrize("name", AROUND)
def test_adamw_trains_inside_what_takes_floats(name, framework):
    model, _ = stored()
    if framework == "nnx":
        losses = steps(model, Optimizer(model, AROUND[name]), 6)
    else:
        linen = convert_to_tcfp(Dense(), "tcfp12_single", X, include=ALL)
        params = jax.jit(Dense().init)(KEY, X)["params"]
        params = store_at_once(params, find_weights(linen), key=KEY)
        state = TrainState.create(apply_fn=linen.apply, params=params, tx=AROUND[name])
        losses = []
        for _ in range(6):
            state, value = step_of_linen(state)
            losses.append(float(value))
    if name != "finite":
        assert losses[0] == losses[1] != losses[2]
    assert losses[-1] < losses[0]


@jax.jit
def step_of_linen(state):
    def of(params):
        return jnp.mean((state.apply_fn({"params": params}, X) - X) ** 2)

    value, gradients = tcfp_jax.value_and_grad(of)(state.params)
    return state.apply_gradients(grads=gradients), value


@parametrize(
    "tx",
    [
        INJECT(static_args=("key", "mask"))(learning_rate=1e-2),
        INJECT()(learning_rate=1e-2),
    ],
)
def test_injected_numbers_need_a_dtype(tx):
    model, _ = stored()
    with refused(r'static_args=\("key", "mask"\), hyperparam_dtype=jnp\.float32'):
        Optimizer(model, tx)


def test_accumulation_quantizes_when_weights_change():
    """Error feedback behind `MultiSteps` is error feedback inside of it."""
    results = []
    for place in ("behind", "inside"):
        model = convert_to_tcfp(Counted(nnx.Rngs(0)), "tcfp12_fast", X, include=ALL)
        tx = optax.adam(1e-2)
        if place == "inside":
            tx = optax.chain(tx, tcfp_jax.error_feedback(find_weights(model)))
        optimizer = Optimizer(model, optax.MultiSteps(tx, 2))
        losses = steps(model, optimizer, 4)
        results.append((losses, np.asarray(model(X))))
    (behind, y_behind), (inside, y_inside) = results
    assert behind == inside
    assert behind[0] == behind[1] != behind[2]
    assert_array_equal(y_behind, y_inside)
    average = jax.tree.map(lambda leaf: 0.9 * leaf, nnx.state(model, nnx.Param))
    averaged = nnx.clone(model)
    detach(averaged)
    nnx.update(averaged, average)
    assert np.isfinite(nnx.jit(lambda model: model(X))(averaged)).all()


def test_the_state_lies_as_the_parameters_do():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    model, _ = stored()
    params = nnx.state(model, nnx.Param)
    lie = tcfp_jax.sharding.state_shardings(
        tcfp_jax.sharding.fsdp(params, mesh), params
    )
    nnx.update(model, jax.device_put(params, lie))
    optimizer = Optimizer(model, optax.adam(1e-2))
    mu = optimizer.opt_state.inner[0].mu
    kernel = kernels(model)[0].rows.values
    assert (
        mu["down"]["kernel"][...].sharding.spec
        == kernel.sharding.spec
        == jax.sharding.PartitionSpec("fsdp")
    )
    assert {
        len(leaf.sharding.device_set) for leaf in jax.tree.leaves(nnx.state(optimizer))
    } == {8}


def test_weights_of_another_model_are_refused():
    layer = TCFPLinear(16, 8, rngs=nnx.Rngs(0))
    other = {"elsewhere": {"kernel": jnp.ones((16, 8))}}
    feedback = tcfp_jax.error_feedback("tcfp12")
    tx = optax.GradientTransformation(
        lambda params: feedback.init(other), feedback.update
    )
    with refused("elsewhere/kernel, are none of TCFPLinear's"):
        Optimizer(layer, tx)


@slow_except("stored")
@parametrize("kind", ["stored", "fed back"])
def test_train_state_of_linen(kind):
    recipe = "tcfp12_single" if kind == "stored" else "tcfp12_fast"
    model = convert_to_tcfp(Dense(), recipe, X, include=ALL)
    params = jax.jit(Dense().init)(KEY, X)["params"]
    exact = TrainStateOfFlax.create(
        apply_fn=Dense().apply, params=params, tx=optax.adam(1e-2)
    )
    if kind == "stored":
        params = store_at_once(params, find_weights(model), key=KEY)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    def of(params, state):
        return jnp.mean((state.apply_fn({"params": params}, X) - X) ** 2)

    @jax.jit
    def step(state, exact):
        value, gradients = tcfp_jax.value_and_grad(of)(state.params, state.quantized)
        wanted, exact_gradients = jax.value_and_grad(of)(exact.params, exact)
        return (
            state.apply_gradients(grads=gradients),
            exact.apply_gradients(grads=exact_gradients),
            (value, wanted),
        )

    losses = []
    for _ in range(6):
        state, exact, both = step(state, exact)
        losses.append(both)
    assert_allclose(*np.transpose(losses), rtol=0.05)
    assert losses[-1][0] < losses[0][0]
    assert int(state.step) == 6
    assert bool(tcfp_jax.layer_state(state.opt_state)) == (kind == "fed back")


TrainStateOfFlax = TrainState.__mro__[1]


def test_train_state_needs_a_converted_model():
    params = Dense().init(KEY, X)["params"]
    with refused("find_weights needs sample inputs"):
        TrainState.create(apply_fn=Dense().apply, params=params, tx=optax.sgd(0.1))
