"""A mixture of experts in plain Flax: `lax.ragged_dot` is converted, trained with and
without floats, served.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax import error_feedback, layer_state, optim, transform
from tcfp_jax.conversion import convert_to_tcfp, find_weights, survey
from tcfp_jax.inference import quantize_params
from tcfp_jax.inference.calibration import hessians
from tests.helpers import (
    filled,
    parametrize,
    slow,
    slow_except,
    store_at_once,
    variables_of,
)

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP = 64, 32, 48, 5, 2
GROUPS = ("linear", "small")


class Experts(nn.Module):
    """Each token goes through its two best experts of five; rows are sorted by
    expert.
    """

    @nn.compact
    def __call__(self, x):
        weights, chosen = lax.top_k(
            jax.nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="router")(x)), TOP
        )
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        init = nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        gate, up = (
            self.param(name, init, (EXPERTS, WIDTH, HIDDEN)) for name in ("gate", "up")
        )
        down = self.param("down", init, (EXPERTS, HIDDEN, WIDTH))
        rows = x[order // TOP]
        hidden = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(
            rows, up, sizes
        )
        out = lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)].reshape(
            len(x), TOP, WIDTH
        )
        return x + jnp.einsum("tk,tkd->td", weights, out)


X, MATRIX = filled(
    [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((TOKENS, 1, WIDTH), (WIDTH, WIDTH))
    ]
)
X = X[:, 0]
TARGET = jnp.tanh(1.4 * X @ MATRIX) + X
FLOAT = Experts()
PARAMS = variables_of(FLOAT, X)["params"]
LOW, OTHER = (
    convert_to_tcfp(FLOAT, "tcfp12_single", X, include=GROUPS, rules={"router": None})
    for _ in range(2)
)
# A model that was asked for its weights warns if it is trained without them
WEIGHTS = find_weights(OTHER, X)
store = jax.jit(lambda params: tcfp_jax.store(params, WEIGHTS, key=jax.random.key(3)))


def loss(model, params, collections=None):
    return jnp.mean(
        (model.apply({"params": params, **(collections or {})}, X) - TARGET) ** 2
    )


def relative(found, wanted):
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def test_the_report_lists_products_in_groups():
    report = survey(LOW, X)
    assert [record.weight_path for record in report.converted] == ["gate", "up", "down"]
    assert all(
        record.product.equation == "db,abc->dc in groups" and record.stored
        for record in report.converted
    )
    assert report.converted[0].product.rows == TOKENS * TOP
    assert [record.path for record in report.skipped] == ["router"]
    assert set(WEIGHTS) == {"gate", "up", "down"}
    assert WEIGHTS["up"].layout.stack == (0,)


def test_losses_and_gradients_are_near_those_of_floats():
    exact, gradients = jax.jit(jax.value_and_grad(lambda p: loss(FLOAT, p)))(PARAMS)
    found, low = jax.jit(jax.value_and_grad(lambda p: loss(LOW, p)))(PARAMS)
    stored = store(PARAMS)
    again, of_stored = jax.jit(tcfp_jax.value_and_grad(lambda p: loss(LOW, p)))(stored)
    # A gradient sees six independent roundings of 2**-4 at most: two operands of each
    # product on its way.
    bound = 6**0.5 * 2.0**-4
    assert abs(found - exact) <= bound * exact
    assert abs(again - exact) <= bound * exact
    assert found != exact
    for name in ("gate", "up", "down"):
        assert 0 < relative(low[name], gradients[name]) <= bound
        assert 0 < relative(of_stored[name], gradients[name]) <= bound
    assert relative(low["router"]["kernel"], gradients["router"]["kernel"]) <= 2 * bound


def train(step, params, init):
    def one(carry, _):
        params, state, value = step(*carry)
        return (params, state), value

    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        (params, _), losses = jax.jit(
            lambda params: lax.scan(one, (params, init(params)), None, 80)
        )(params)
    return params, losses


# A quicker test has losses and gradients, and tests/models/test_moe.py trains stored
# experts
@slow
def test_losses_fall_alike_with_and_without_float_weights():
    adam = optax.adam(3e-3)
    feedback = optax.chain(optax.adam(3e-3), error_feedback(WEIGHTS))
    stored_tx = optim.adamw(3e-3, weight_decay=0.0, key=jax.random.key(4))

    def of_floats(model, tx, params, state):
        collections = {"tcfp": layer_state(state)} if tx is feedback else {}
        value, gradients = jax.value_and_grad(lambda p: loss(model, p, collections))(
            params
        )
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def of_stored(params, state):
        value, gradients = tcfp_jax.value_and_grad(lambda p: loss(LOW, p))(params)
        updates, state = stored_tx.update(gradients, state, params)
        return tcfp_jax.apply_updates(params, updates), state, value

    stored = store(PARAMS)
    _, exact = train(functools.partial(of_floats, FLOAT, adam), PARAMS, adam.init)
    _, with_feedback = train(
        functools.partial(of_floats, LOW, feedback), PARAMS, feedback.init
    )
    trained, without_floats = train(of_stored, stored, stored_tx.init)
    assert exact[-1] < 0.4 * exact[0]
    for losses in (with_feedback, without_floats):
        assert np.isfinite(losses).all()
        assert abs(losses[-1] - exact[-1]) <= 0.1 * exact[0]
    # The trained weights serve without floats; only scales are found anew, and W_hi is
    # rounded by them.
    served = quantize_params(tcfp_jax.dequantize(trained), WEIGHTS)
    assert "gate" not in served["params"]
    y, again = (
        jax.jit(LOW.apply)(variables, X) for variables in (served, {"params": trained})
    )
    assert relative(y, again) <= 2.0**-5


def test_other_recipes_say_why_not():
    low = transform(
        lambda p, x: FLOAT.apply({"params": p}, x), "nvfp4_training", include=GROUPS
    )
    skipped = survey(low, PARAMS, X).skipped
    assert {record.weight_path for record in skipped} == {"gate", "up", "down"}
    assert all(
        record.reason.startswith("nvfp4_training has no grouped product")
        for record in skipped
    )


def test_experts_gain_at_smaller_sizes_than_one_matrix():
    def fn(p, x):
        return lax.ragged_dot(x, p["w"], jnp.array([4, 4]))

    low = transform(fn, "tcfp12_single")
    for k, converted in ((768, True), (512, False)):
        params = {"w": jax.ShapeDtypeStruct((2, k, 1024), jnp.float32)}
        x = jax.ShapeDtypeStruct((8, k), jnp.float32)
        assert bool(survey(low, params, x).converted) == converted


@slow_except("4")
@parametrize("experts", [4, 2])  # two or one on each device
def test_experts_over_devices_are_stored(experts):
    """Layers of experts in a scan, split inside `shard_map`: each device multiplies its
    part of the stored stack.
    """
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,))
    sizes = jnp.array([20, 12, 9, 23] if experts == 4 else [20, 12])
    spec = P("e")

    def local(x, w, sizes):
        return jnp.tanh(lax.ragged_dot(x, w, sizes))

    layer = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)

    def fn(p, x):
        return lax.scan(lambda x, w: (layer(x, w, sizes), None), x, p["w"])[0]

    params = {"w": jax.random.normal(jax.random.key(5), (3, experts, WIDTH, WIDTH)) / 6}
    low = transform(fn, "tcfp12_single", include=GROUPS)
    (record,) = survey(low, params, X).converted
    weights = find_weights(low, params, X)
    assert record.stored
    assert weights["w"].layout.stack == (0, 1)

    def square(f):
        return lambda p: jnp.sum(f(p, X) ** 2)

    exact, wanted = jax.jit(jax.value_and_grad(square(fn)))(params)
    found, gradient = jax.jit(jax.value_and_grad(square(low)))(params)
    stored = store_at_once(params, weights, key=jax.random.key(6))
    step = jax.jit(tcfp_jax.value_and_grad(square(low)))
    again, of_stored = step(stored)
    for value, one in ((found, gradient), (again, of_stored)):
        assert 0 < abs(value - exact) <= 2.0**-4 * exact
        assert 0 < relative(one["w"], wanted["w"]) <= 2.0**-3
    # No device holds the weights of the others.
    assert "all-gather" not in step.lower(stored).compile().as_text()


def test_a_matrix_over_devices_is_quantized_at_each_use():
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,))
    sizes = jnp.array([20, 12, 9, 23])

    def fn(p, x):
        return jax.shard_map(
            lambda x, w: lax.ragged_dot(x, w, sizes),
            mesh=mesh,
            in_specs=(P(), P(None, None, "e")),
            out_specs=P(None, "e"),
        )(x, p["w"])

    params = {"w": PARAMS["gate"][:4]}
    low = transform(fn, "tcfp12_single", include=GROUPS)
    (record,) = survey(low, params, X).converted
    assert "quantized at each use" in str(record)
    assert not find_weights(low, params, X)
    assert 0 < relative(low(params, X), fn(params, X)) <= 2.0**-4


def test_moments_for_calibration_are_those_of_each_expert():
    sizes = jnp.array([20, 0, 30, 3])
    low = transform(
        lambda p, x: lax.ragged_dot(x, p["w"], sizes), "tcfp12_single", include=GROUPS
    )
    (found,) = hessians(low, {"w": PARAMS["gate"][:4]}, [X]).values()
    ends = np.cumsum(sizes)
    for moments, end, size in zip(found, ends, sizes.tolist(), strict=True):
        rows = X[end - size : end]
        assert np.allclose(moments, rows.T @ rows, atol=1e-4)


@parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_results_have_the_dtype_that_the_program_asks_for(dtype):
    def fn(p, x):
        return lax.ragged_dot(
            x.astype(jnp.bfloat16),
            p["w"].astype(jnp.bfloat16),
            jnp.array([9, 9, 9, 9, 9]),
            preferred_element_type=dtype,
        )

    low = transform(fn, "tcfp12_single", include=GROUPS)
    found = low({"w": PARAMS["up"]}, X)
    exact = fn({"w": PARAMS["up"]}, X)
    assert found.dtype == exact.dtype == dtype
    assert relative(found.astype(jnp.float32), exact.astype(jnp.float32)) <= 2.0**-4


def test_a_rule_opens_a_wrapper_with_its_own_gradient():
    @jax.custom_vjp
    def wrapped(x, w, sizes):
        return lax.ragged_dot(x, w, sizes)

    wrapped.defvjp(
        lambda *args: (wrapped(*args), args),
        lambda args, g: (g @ args[1][0].T, args[1], None),
    )
    sizes = jnp.array([20, 0, 30, 3])

    def fn(p, x):
        return wrapped(x, p["experts"], sizes)

    params = {"experts": PARAMS["gate"][:4]}
    assert "inside custom_vjp" in str(
        survey(transform(fn, "tcfp12_single", include=GROUPS), params, X)
    )
    low = transform(fn, "tcfp12_single", include=GROUPS, rules={"experts": "inline"})
    assert [record.stored for record in survey(low, params, X).converted] == [True]


def test_experts_by_einsum_are_stacks():
    """Dispatch by one-hot rows to places of a fixed number, and all experts for every
    token.
    """

    def by_places(p, x):
        one_hot = jax.nn.one_hot(jnp.argmax(x @ p["router"], axis=-1), 4)
        place = jnp.cumsum(one_hot, axis=1) * one_hot - 1
        send = jax.nn.one_hot(place.astype(int), 10)
        hidden = jax.nn.silu(
            jnp.einsum(
                "becd,edf->becf", jnp.einsum("bsec,bsd->becd", send, x), p["gate"]
            )
        )
        return jnp.einsum(
            "bsec,becd->bsd", send, jnp.einsum("becf,efd->becd", hidden, p["down"])
        )

    def by_all(p, x):
        return jnp.einsum(
            "bsef,efd->bsd", jnp.einsum("bsd,edf->bsef", x, p["gate"]), p["down"]
        )

    params = {
        "gate": PARAMS["gate"][:4],
        "down": PARAMS["down"][:4],
        "router": jnp.ones((WIDTH, 4)),
    }
    for fn, stacks in ((by_places, [(0,), (0,)]), (by_all, [(), ()])):
        low = transform(fn, "tcfp12_single", include=GROUPS, rules={"router": None})
        weights = find_weights(low, params, X.reshape(2, 32, WIDTH))
        assert [weights[name].layout.stack for name in ("gate", "down")] == stacks


@slow
def test_experts_on_an_explicit_mesh():
    """A stack that lies over devices is stored there, multiplied inside `shard_map`,
    and updated where it lies.
    """
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Explicit,))
    spec = P("e")
    sizes = jnp.array([20, 12, 9, 23])
    with jax.set_mesh(mesh):

        def put(array):
            return jax.device_put(
                array, jax.NamedSharding(mesh, P("e", *[None] * (array.ndim - 1)))
            )

        x = put(X)
        sizes = put(sizes)
        params = {"w": put(PARAMS["gate"][:4])}
        layer = jax.shard_map(
            lax.ragged_dot, in_specs=(spec, spec, spec), out_specs=spec
        )

        def fn(p, x, sizes):
            return layer(x, p["w"], sizes)

        low = transform(fn, "tcfp12_single", include=GROUPS)
        stored = tcfp_jax.store(
            params, find_weights(low, params, x, sizes), key=jax.random.key(6)
        )
        tx = optim.adamw(1e-3, key=jax.random.key(4))
        with jax.numpy_dtype_promotion("standard"):

            @jax.jit
            def step(params, state):
                value, gradients = tcfp_jax.value_and_grad(
                    lambda p: jnp.sum(low(p, x, sizes) ** 2)
                )(params)
                updates, state = tx.update(gradients, state, params)
                return tcfp_jax.apply_updates(params, updates), value

            new, value = step(stored, tx.init(stored))
        exact = jnp.sum(fn(params, x, sizes) ** 2)
        assert 0 < abs(value - exact) <= 2.0**-4 * exact
        for one in (stored, new):
            assert jax.typeof(one["w"].rows.values).sharding.spec == P("e", None, None)
        assert step(new, tx.init(new))[1] < value
