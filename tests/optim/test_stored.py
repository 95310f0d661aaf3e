"""Parameters that are W_hi + W_lo alone: stored, differentiated and updated, in every
kind of model.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tcfp_jax
from pallas_kernels.scaling import Block, Tensor
from tcfp_jax import linen as layers
from tcfp_jax import nnx as nnx_layers
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.convert import hand_out
from tcfp_jax.optim import on_stored
from tcfp_jax.paths import entries, leaves, put
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parameter import Parameter, is_parameter
from tcfp_jax.weights.rewritten import Rewritten
from tcfp_jax.weights.rounding import rewrite
from tests.helpers import (
    decibels,
    filled,
    mesh_of,
    nnx_model,
    same_bits,
    store_at_once,
    variables_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
kernel_of = Parameter.kernel
RECIPE = "tcfp12_single"
KEY = jax.random.key(7)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((2, 6, 16)), jnp.float32)
PARAMS = {
    "up": {
        "kernel": jnp.asarray(RNG.standard_normal((16, 32)) * 0.1, jnp.float32),
        "bias": jnp.zeros(32),
    },
    "down": {"kernel": jnp.asarray(RNG.standard_normal((32, 16)) * 0.1, jnp.float32)},
}
ALL = ("linear", "small", "head")
WEIGHT = Weight(tcfp_jax.recipe(RECIPE), Layout((0,), (1,)))
LOOKED_UP = Weight(tcfp_jax.recipe(RECIPE), Layout((0,), (1,)), float_reads="lookup")


def stored_of(params=PARAMS, recipe=RECIPE, **options):
    options = (
        {"key": KEY} | options
        if options.get("remainder", "stochastic") == "stochastic"
        else options
    )
    return tcfp_jax.store(params, recipe, **options)


def loss(params, x, recipe=RECIPE):
    h = tcfp_jax.matmul(x, params["up"]["kernel"], recipe=recipe) + params["up"]["bias"]
    return jnp.mean(
        (tcfp_jax.matmul(jax.nn.relu(h), params["down"]["kernel"], recipe=recipe) - 1)
        ** 2
    )


def train(tx, params, steps=10, fn=loss, **jit):
    state = jax.jit(tx.init)(params)

    @functools.partial(jax.jit, **jit)
    def step(params, state, x):
        value, gradients = tcfp_jax.value_and_grad(fn)(params, x)
        updates, state = tx.update(gradients, state, params)
        return tcfp_jax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(steps):
        params, state, value = step(params, state, X)
        losses.append(float(value))
    return params, state, losses


# Models
# --------------------------------------------------------------------------------------
class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.relu(layers.TCFPDense(32, recipe=RECIPE)(x))
        return x + layers.TCFPDense(16, recipe=RECIPE)(h), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            nn.remat(Body),
            variable_axes={"params": 0, "tcfp": 0},
            split_rngs={"params": True},
            length=3,
        )
        return body()(x, None)[0]


class General(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 8))(x)
        x = nn.DenseGeneral(16, axis=(-2, -1))(x)
        return nn.Einsum((48, 16), "bsd,fd->bsf")(x)


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return layers.TCFPDense(32, kernel_init=init, recipe=RECIPE)(x)


class PlainBody(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(x))), None


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(x)
        body = nn.scan(
            nn.remat(PlainBody),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return nn.Dense(8)(body()(x, None)[0])


class ByHand(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx_layers.TCFPLinear(16, 32, recipe=RECIPE, rngs=rngs)
        self.down = nnx_layers.TCFPLinear(32, 16, recipe=RECIPE, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Flax(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.RMSNorm(32, rngs=rngs)
        self.down = nnx.LinearGeneral(32, (2, 8), rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(nnx.relu(self.up(x))))


def by_linen(model, convert="no"):
    params = variables_of(model, X)["params"]
    model = (
        convert_to_tcfp(model, RECIPE, X, include=ALL) if convert == "yes" else model
    )
    apply = lambda params, copies=None: model.apply(
        {"params": params} | ({"tcfp": copies} if copies else {}), X
    )
    return apply, params, find_weights(model, X)


def by_nnx(make, convert="no"):
    model = nnx_model(make)
    model = (
        convert_to_tcfp(model, RECIPE, X, include=ALL) if convert == "yes" else model
    )
    weights = find_weights(model, *(() if convert == "yes" else (X,)))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params, copies=None):
        model = nnx.merge(graphdef, params, rest)
        hand_out(model, entries(copies or {}))
        return model(X)

    return apply, params, weights


def by_transform():
    plain = lambda params, x: (
        jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
        @ params["down"]["kernel"]
    )
    low = tcfp_jax.transform(plain, RECIPE, include=ALL)
    return (
        lambda params, copies=None: low(params, X, stored=copies),
        PARAMS,
        find_weights(low, PARAMS, X),
    )


MODELS = {
    "scan and remat": lambda: by_linen(Scanned()),
    "general layers": lambda: by_linen(General(), convert="yes"),
    "boxes": lambda: by_linen(Boxed()),
    "converted linen": lambda: by_linen(Plain(), convert="yes"),
    "nnx by hand": lambda: by_nnx(ByHand),
    "converted nnx": lambda: by_nnx(Flax, convert="yes"),
    "transform": by_transform,
}


@pytest.mark.slow_except("boxes")
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_multiplied_and_differentiated_as_with_float_parameters(
    name,
):
    apply, params, weights = MODELS[name]()
    stored = stored_of(params, weights)
    count = sum(map(is_parameter, jax.tree.leaves(stored, is_leaf=is_parameter)))
    assert count == len(weights) > 0
    floats = tcfp_jax.dequantize(stored)
    assert jax.tree.map(jnp.shape, floats) == jax.tree.map(jnp.shape, params)
    # The same FP8 values next to float parameters, as an optimizer with masters would
    # hold them
    copies = {}
    for path, leaf in leaves(stored, is_parameter).items():
        if is_parameter(leaf):
            put(copies, path.split("/"), leaf.stored)
    mean = lambda params, copies=None: jnp.mean((apply(params, copies) - 1) ** 2)
    found = jax.jit(tcfp_jax.value_and_grad(mean))(stored)
    wanted = jax.jit(jax.value_and_grad(mean))(floats, copies)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    trained, _, losses = train(
        on_stored(optax.adam(1e-2)), stored, 8, lambda params, x: mean(params)
    )
    assert losses[-1] < losses[0] and jax.tree.structure(trained) == jax.tree.structure(
        stored
    )


def test_weights_of_a_model_are_stored_inside_the_jit_that_makes_them():
    model = Scanned()
    floats = lambda key: model.init(key, X)["params"]
    made = jax.jit(lambda key: tcfp_jax.store(lambda: floats(key), RECIPE, key=key))
    # A scan that makes one leaf is another program than one that makes all: bits differ
    # as float32 rounds.
    wanted = jax.jit(floats)(KEY)
    structure = jax.tree.structure(store_at_once(wanted, RECIPE, key=KEY))
    for stored in (made(KEY), tcfp_jax.store(lambda: floats(KEY), RECIPE, key=KEY)):
        assert jax.tree.structure(stored) == structure
        floats_of = jax.jit(tcfp_jax.dequantize)(stored)
        for one, other in zip(
            jax.tree.leaves(floats_of), jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=2**-6, atol=1e-5)
    kernels = [
        leaf
        for leaf in jax.tree.leaves(made(KEY), is_leaf=is_parameter)
        if is_parameter(leaf)
    ]
    assert sorted(kernel.shape for kernel in kernels) == [(3, 16, 32), (3, 32, 16)]
    assert all(
        kernel.rows.scale.shape == (3,) and kernel.nbytes < 2.1 * 3 * 16 * 32
        for kernel in kernels
    )


def test_a_stack_of_constants_is_stored_as_one_of_arguments():
    params = {"w": jax.random.normal(jax.random.key(2), (5, 32, 48))}
    weights = {"w": Weight(tcfp_jax.recipe("tcfp12_single"), Layout((1,), (2,), (0,)))}
    store = lambda params: tcfp_jax.store(params, weights, key=jax.random.key(3))
    assert same_bits(jax.jit(lambda: store(params))(), jax.jit(store)(params))


@pytest.mark.slow_except("feedback-tcfp12_single")
@pytest.mark.parametrize(
    "recipe", [RECIPE, "tcfp12", "tcfp12_fast", "tcfp12_blockwise"]
)
@pytest.mark.parametrize("remainder", ["stochastic", "feedback", "dropped"])
def test_storage_is_a_choice_apart_from_the_recipe(recipe, remainder):
    chosen = (
        tcfp_jax.recipe(recipe, block=32)
        if recipe == "tcfp12_blockwise"
        else tcfp_jax.recipe(recipe)
    )
    params = stored_of(recipe=chosen, remainder=remainder)
    for name in PARAMS:
        assert decibels(PARAMS[name]["kernel"], kernel_of(params[name]["kernel"])) > 55
    tx = on_stored(optax.sgd(0.5))
    params, _, losses = train(tx, params, 8, functools.partial(loss, recipe=chosen))
    assert losses[-1] < 0.9 * losses[0]
    assert (params["up"]["kernel"].state.error is not None) == (remainder == "feedback")
    both = chosen.copies == "both"
    kernel = params["up"]["kernel"]
    assert (kernel.stored.forward is not None) == both
    if both:  # the copies hold the new weight
        assert same_bits(kernel.stored.forward.values, kernel.rows.values.T)
        assert (kernel.stored.forward.lo is not None) == (
            chosen.weight.forward == "hi+lo"
        )


# Optimizers
# --------------------------------------------------------------------------------------
def label(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", params)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(1e-2),
    "accumulated": (
        lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    ),
    "masked": lambda: optax.masked(
        optax.adam(1e-2),
        lambda params: jax.tree.map(lambda leaf: leaf.ndim == 2, params),
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adam(1e-2), "vector": optax.set_to_zero()}, label
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-2, 0.0, 20))
    ),
}


@pytest.mark.slow_except("partition")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optax_transformation_composes(name):
    tx = OPTIMIZERS[name]()
    _, state, losses = train(on_stored(tx), stored_of(), 12)
    assert losses[-1] < losses[0] and int(state.skipped) == 0
    # The same optimizer on the float parameters: updates of the first step are the
    # same.
    floats = tcfp_jax.dequantize(stored_of())
    gradients = jax.tree.map(
        lambda leaf: jnp.asarray(np.random.default_rng(1).standard_normal(leaf.shape)),
        floats,
    )
    gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
    wanted, _ = tx.update(gradients, tx.init(floats), floats)
    on = on_stored(tx)
    updates, _ = on.update(gradients, on.init(stored_of()), stored_of())
    for found, right in zip(
        jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad):
    params, tx = stored_of(remainder="feedback"), on_stored(optax.adamw(1e-2))
    params, state, _ = train(tx, params, 3)
    gradients = jax.tree.map(jnp.ones_like, tcfp_jax.dequantize(params))
    gradients["up"]["bias"] = gradients["up"]["bias"].at[3].set(bad)
    updates, after = tx.update(gradients, state, params)
    assert same_bits(tcfp_jax.apply_updates(params, updates), params)
    assert (
        same_bits(after.inner, state.inner)
        and int(after.skipped) == int(state.skipped) + 1
    )


def test_gradients_may_be_wider_than_the_parameters():
    """optax makes moments of a parameter's dtype, and the first update widens them: a
    branch that skips does, too.
    """
    params = tcfp_jax.store(
        {"kernel": jnp.ones((8, 8), jnp.bfloat16)}, "tcfp12_single", key=KEY
    )
    tx = on_stored(optax.adam(1e-2))
    gradients = {"kernel": jnp.ones((8, 8), jnp.float32)}
    _, state = tx.update(gradients, tx.init(params), params)
    assert (
        state.inner[0].mu["kernel"].dtype == jnp.float32
        and int(state.inner[0].count) == 1
    )
    _, skipped = tx.update(
        {"kernel": gradients["kernel"].at[0, 0].set(jnp.nan)}, state, params
    )
    assert same_bits(skipped.inner, state.inner) and int(skipped.skipped) == 1


def test_an_update_of_zeros_keeps_every_bit():
    params, *_ = train(on_stored(optax.sgd(0.1)), stored_of(), 2)
    zeros = jax.tree.map(jnp.zeros_like, tcfp_jax.dequantize(params))
    assert same_bits(tcfp_jax.apply_updates(params, zeros), params)
    params, *_ = train(on_stored(optax.sgd(0.0)), params, 2)


def test_rounding_follows_the_mean_of_small_updates():
    """An update of a hundredth of the grid's step, four hundred times: nearest rounding
    would lose all of it.
    """
    w = jnp.asarray(np.random.default_rng(3).uniform(0.5, 1.0, (64, 64)), jnp.float32)
    params = stored_of({"kernel": w})
    before, size = kernel_of(params["kernel"]), 2.0**-15

    @jax.jit
    def run(params):
        step = lambda params, _: (
            tcfp_jax.apply_updates(params, {"kernel": jnp.full((64, 64), size)}),
            None,
        )
        return jax.lax.scan(step, params, length=400)[0]

    moved = np.asarray(kernel_of(run(params)["kernel"]) - before, np.float64)
    error = moved.std() / np.sqrt(moved.size)
    assert abs(moved.mean() - 400 * size) < 4 * error and error < 0.05 * 400 * size


@pytest.mark.slow_except("4-0.99-1.01", "512-0.0-0.2")
@pytest.mark.parametrize(
    ("part", "least", "most"), [(4, 0.99, 1.01), (64, 0.99, 1.01), (512, 0.0, 0.2)]
)
def test_feedback_keeps_what_e3m4_does(part, least, most):
    """Updates are a part of the grid's step: a sixty-fourth arrives whole, much less
    arrives hardly at all.
    """
    w = jnp.asarray(np.random.default_rng(3).uniform(0.5, 1.0, (64, 64)), jnp.float32)
    # in E4M3, with a scale of 2**-5
    params, size = stored_of({"kernel": w}, remainder="feedback"), 2.0**-9 / part
    step = lambda params, _: (
        tcfp_jax.apply_updates(params, {"kernel": jnp.full((64, 64), size)}),
        None,
    )
    moved = kernel_of(jax.lax.scan(step, params, length=400)[0]["kernel"]) - kernel_of(
        params["kernel"]
    )
    assert least <= float(moved.mean()) / (400 * size) <= most


@pytest.mark.parametrize("recipe", [RECIPE, "tcfp12_blockwise"])
@pytest.mark.parametrize("binade", [-100, 120])
def test_an_error_is_kept_to_a_128th_of_the_step_of_its_weight(binade, recipe):
    """Weights have every size below their scale, small and large."""
    rng, unit = np.random.default_rng(5), 2.0**binade
    values = rng.choice([-1.0, 1.0], (128, 256)) * 2.0 ** rng.uniform(
        -14, 0, (128, 256)
    )
    wanted = (values * unit).astype(np.float32)
    old = stored_of(
        {"kernel": jnp.zeros((128, 256)).at[0, 0].set(unit)},
        recipe,
        remainder="feedback",
    )
    update = jnp.asarray(wanted).at[0, 0].add(-unit)
    stored = jax.jit(tcfp_jax.apply_updates)(old, {"kernel": update})["kernel"]
    rows = stored.rows
    scale = np.asarray(rows.scale_of_values(), np.float64)
    hi, lo, error = (
        np.asarray(x, np.float64) for x in (rows.values, rows.lo, stored.state.error)
    )
    step = 2.0 ** (
        np.maximum(np.floor(np.log2(np.where(lo == 0, 1e-9, np.abs(lo)))), -6) - 3
    )
    left = (np.asarray(wanted, np.float64) / scale - hi - lo) / step
    assert np.abs(left).max() <= 0.5 and np.abs(left).max() > 0.49
    assert np.abs(left - error / 16).max() <= 1 / 128


def test_errors_of_the_smallest_weights_are_numbers():
    """Their scale times a step of the grid underflows float32."""
    params = stored_of({"kernel": jnp.full((4, 4), 2.0**-124)}, remainder="feedback")
    params = tcfp_jax.apply_updates(params, {"kernel": jnp.full((4, 4), 2.0**-126)})
    assert float(kernel_of(params["kernel"])[0, 0]) == 1.25 * 2.0**-124
    assert jnp.all(jnp.isfinite(params["kernel"].state.error.astype(jnp.float32)))


def test_weights_near_the_largest_float_are_stored():
    """Their scale times the largest number of E4M3 overflows float32."""
    kernel = (
        PARAMS["up"]["kernel"]
        / jnp.max(jnp.abs(PARAMS["up"]["kernel"]))
        * np.float32(3e38)
    )
    assert decibels(kernel, kernel_of(stored_of({"kernel": kernel})["kernel"])) > 58


def test_scales_follow_weights_that_grow_and_shrink():
    params = stored_of({"kernel": PARAMS["up"]["kernel"]})
    wanted = PARAMS["up"]["kernel"]
    grow = jax.jit(
        lambda params, w: tcfp_jax.apply_updates(
            params, {"kernel": w - kernel_of(params["kernel"])}
        )
    )
    for rate in (5 ** (1 / 300), 5 ** (-1 / 300)):
        for _ in range(300):
            wanted = wanted * rate
            params = grow(params, wanted)
        assert decibels(wanted, kernel_of(params["kernel"])) > 58
    params = grow(params, 3 * wanted)  # at once
    assert decibels(3 * wanted, kernel_of(params["kernel"])) > 58


def test_zeros_take_their_first_steps():
    params = stored_of({"kernel": jnp.zeros((16, 32))})
    step = 1e-3 * PARAMS["up"]["kernel"]
    params = tcfp_jax.apply_updates(params, {"kernel": step})
    assert decibels(step, kernel_of(params["kernel"])) > 55


def test_the_bits_do_not_depend_on_the_mesh():
    params = stored_of()
    change = jax.tree.map(lambda leaf: 0.01 * leaf + 1e-3, tcfp_jax.dequantize(params))
    found = []
    for count in (1, 2, 4):
        mesh = mesh_of(count, names=("a",))
        place = lambda leaf, mesh=mesh: jax.device_put(
            leaf,
            NamedSharding(mesh, PartitionSpec("a") if leaf.ndim else PartitionSpec()),
        )
        spread = jax.tree.map(
            lambda leaf, p=place: p(leaf) if leaf.ndim == 2 else leaf, params
        )
        found.append(
            jax.jit(tcfp_jax.apply_updates)(spread, jax.tree.map(place, change))
        )
    assert all(same_bits(one, found[0]) for one in found[1:])


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    tx = on_stored(optax.adamw(1e-2))
    params, state, _ = train(tx, stored_of(), 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        again, state_again = checkpointer.restore(tmp_path / "state", (params, state))
    assert same_bits((again, state_again), (params, state))


def test_gradients_may_be_bfloat16_and_parameters_too():
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    for params, options, wanted in (
        (PARAMS, {"gradient_dtype": "bfloat16"}, "float32"),
        (halves, {}, "bfloat16"),
    ):
        stored = stored_of(params, **options)
        kernel = tcfp_jax.grad(loss)(stored, X)["up"]["kernel"]
        assert (
            kernel.dtype == jnp.bfloat16
            and tcfp_jax.dequantize(stored)["up"]["kernel"].dtype == wanted
        )


def test_arguments_of_value_and_grad_are_those_of_jax():
    fn = lambda x, params: (loss(params, x), x.shape)
    (value, shape), gradients = tcfp_jax.value_and_grad(
        fn, argnums=(1, 0), has_aux=True
    )(X, stored_of())
    assert (
        shape == X.shape
        and gradients[0]["up"]["kernel"].shape == (16, 32)
        and gradients[1].shape == X.shape
    )
    alone, again = tcfp_jax.grad(fn, argnums=-1, has_aux=True)(X, stored_of())
    assert again == shape and same_bits(alone, gradients[0]) and value.shape == ()


READS = {
    "dequantize": lambda w: w.dequantize(),
    "in bfloat16": lambda w: w.dequantize(jnp.bfloat16),
    "transposed": lambda w: w.swap().dequantize().swapaxes(-1, -2),
    "of the tree": lambda w: tcfp_jax.dequantize({"kernel": w})["kernel"],
}


@pytest.mark.slow_except("transposed-blockwise_stored", "of the tree-tcfp12_fast")
@pytest.mark.parametrize("recipe", [RECIPE, "tcfp12_fast", "blockwise_stored"])
@pytest.mark.parametrize("name", READS)
def test_a_stored_weight_that_is_read_as_floats_has_a_gradient(name, recipe):
    if recipe == "blockwise_stored":
        recipe = tcfp_jax.recipe(RECIPE, scaling=Block(32, "square"))
    kernels = jnp.asarray(RNG.standard_normal((3, 32, 32)), jnp.float32)
    for kernel in (kernels[0], kernels):  # one, and a stack
        stored = stored_of({"kernel": kernel}, recipe)
        read = lambda params: jnp.sum(
            READS[name](params["kernel"]).astype(jnp.float32) ** 3
        )
        floats = tcfp_jax.dequantize(stored)["kernel"]
        value, gradients = jax.jit(tcfp_jax.value_and_grad(read))(stored)
        tolerance = 2e-2 if name == "in bfloat16" else 1e-6
        np.testing.assert_allclose(
            gradients["kernel"], 3 * floats**2, rtol=tolerance, atol=1e-6
        )
        # Cubes of either sign cancel: the error is a part of their magnitudes and not
        # of their sum.
        np.testing.assert_allclose(
            value,
            jnp.sum(floats**3),
            atol=tolerance * float(jnp.sum(jnp.abs(floats) ** 3)),
        )
        with pytest.raises(TypeError, match=r"tcfp_jax\.value_and_grad"):
            jax.jit(jax.grad(read))(stored)


def test_a_parameter_that_its_layer_stores_transposed_is_multiplied_by_matmul_itself():
    kernel = PARAMS["up"]["kernel"]
    turned = {"kernel": Weight(tcfp_jax.recipe(RECIPE), Layout((1,), (0,)))}
    both = (stored_of({"kernel": kernel}), stored_of({"kernel": kernel.T}, turned))
    cube = lambda params: jnp.sum(
        tcfp_jax.matmul(X, params["kernel"], recipe=RECIPE) ** 3
    )
    (value, gradients), (same, transposed) = (
        tcfp_jax.value_and_grad(cube)(params) for params in both
    )
    assert gradients["kernel"].shape == (16, 32) and transposed["kernel"].shape == (
        32,
        16,
    )
    # W_lo has other random bits, and W_hi alone is read
    np.testing.assert_allclose(same, value, rtol=1e-5)
    np.testing.assert_allclose(
        transposed["kernel"].T, gradients["kernel"], rtol=1e-5, atol=1e-5
    )


def test_the_product_with_a_swapped_weight_sends_its_gradient_to_the_parameter():
    kernel = jnp.asarray(RNG.standard_normal((16, 16)), jnp.float32)
    both = lambda params, turn: jnp.sum(
        tcfp_jax.matmul(X, turn(params["kernel"]), recipe=RECIPE)[..., :3] ** 2
    )
    turned = tcfp_jax.grad(lambda p: both(p, lambda w: w.swap()))(
        stored_of({"kernel": kernel})
    )["kernel"]
    wanted = tcfp_jax.grad(lambda p: both(p, lambda w: w))(
        stored_of({"kernel": kernel.T})
    )["kernel"]
    np.testing.assert_allclose(turned, wanted.T, rtol=1e-6)


# Mistakes
# --------------------------------------------------------------------------------------
def test_code_that_does_not_know_stored_weights_says_what_to_use():
    params = stored_of()
    with pytest.raises(TypeError, match=r"tcfp_jax\.value_and_grad"):
        jax.grad(loss)(params, X)
    with pytest.raises(TypeError, match=r"tcfp_jax\.dequantize"):
        nn.Dense(32).apply({"params": params["up"]}, X)
    with pytest.raises((TypeError, ValueError), match="Parameter"):
        optax.apply_updates(params, tcfp_jax.dequantize(params))
    tx = optax.adamw(1e-2)
    with pytest.raises((TypeError, ValueError), match=r"on_stored|Parameter"):
        tx.update(tcfp_jax.grad(loss)(params, X), tx.init(params), params)
    with pytest.raises(TypeError, match=r"tcfp_jax\.dequantize"):
        params["up"]["kernel"] * 2
    layer = layers.TCFPDense(32, recipe=RECIPE)
    with pytest.raises(ValueError, match="both"):
        layer.apply(
            {"params": params["up"], "tcfp": {"kernel": params["up"]["kernel"]}}, X
        )


STORE_ERRORS = [
    (dict(recipe="tensorwise"), 'recipe("tcfp12_single")'),
    (dict(recipe="bf16"), 'recipe("tcfp12_single")'),
    (dict(key=None), "key=jax.random.key"),
    (dict(remainder="feedback", key=KEY), "for no other"),
    (dict(remainder="nearest"), "'stochastic', 'feedback', 'dropped'"),
    (dict(params={"bias": jnp.ones(4)}), "find_weights"),
    (
        dict(recipe={}),
        'a recipe that stores none, such as "bf16" or one of FP4 training',
    ),
    (
        dict(recipe={"a/b": WEIGHT}),
        "'up/kernel']: the mapping names ['a/b']; pass the parameters of the model",
    ),
    (
        dict(recipe={"up/kernel": LOOKED_UP}),
        "up/kernel is named, but code other than converted products reads",
    ),
]


@pytest.mark.parametrize(("options", "message"), STORE_ERRORS)
def test_what_cannot_be_stored_says_why(options, message):
    given = dict(params=PARAMS, recipe=RECIPE, key=KEY) | options
    with pytest.raises(ValueError, match=re.escape(message)):
        tcfp_jax.store(given.pop("params"), given.pop("recipe"), **given)


@pytest.mark.parametrize(
    "kernel, gradient",
    [(jnp.int32, None), (jnp.float32, "float8_e5m2"), (jnp.float32, jnp.int32)],
)
def test_gradients_without_a_scale_need_16_bits(kernel, gradient):
    with pytest.raises(
        TypeError, match=r"use (the kernel.astype|gradient_dtype=jnp.bfloat16)"
    ):
        tcfp_jax.store(
            {"kernel": jnp.ones((16, 32), kernel)},
            RECIPE,
            key=KEY,
            gradient_dtype=gradient,
        )


def test_other_wrong_arguments_say_what_to_do():
    params = stored_of()
    with pytest.raises(ValueError, match="stored already"):
        stored_of(params)
    with pytest.raises(ValueError, match="key is a int, not one JAX random key"):
        tcfp_jax.store({"kernel": jnp.ones((16, 32))}, RECIPE, key=0)
    updates = jax.tree.map(jnp.zeros_like, tcfp_jax.dequantize(params))
    updates["up"]["kernel"] = jnp.zeros((32, 16))
    with pytest.raises(
        ValueError, match=r"up/kernel is \[32, 16\], but the parameter is \[16, 32\]"
    ):
        tcfp_jax.apply_updates(params, updates)
    with pytest.raises(ValueError, match="on_stored"):
        tcfp_jax.apply_updates(params, params)
    with pytest.raises(ValueError, match="argnums=3"):
        tcfp_jax.grad(loss, argnums=3)(params, X)
    with pytest.raises(ValueError, match=r"tx\.update"):
        on_stored(optax.sgd(0.1)).update(updates, None)
    with pytest.raises(ValueError, match="pass the parameters of this model"):
        layers.TCFPDense(8, recipe=RECIPE).apply({"params": params["up"]}, X)


@pytest.mark.parametrize(
    "scaling", [Tensor(), Block(32, "square")], ids=["one scale", "in blocks"]
)
@pytest.mark.parametrize("factor", [1.0, 0.0, 0.5])
def test_what_scales_a_rewritten_weight_is_seen(factor, scaling):
    recipe = tcfp_jax.recipe(RECIPE, scaling=scaling)
    old = stored_of(recipe=recipe)["up"]["kernel"]
    new = stored_of({"kernel": 2 * PARAMS["up"]["kernel"]}, recipe)["kernel"]
    made = Rewritten.of(new)
    made = replace(made, witness=jnp.asarray(made.witness) * factor)
    scaled = jax.jit(lambda made: made.onto(old))(made)
    if factor == 0.5:
        assert np.isnan(scaled.rows.dequantize()).all()
        with pytest.raises(ValueError, match="put that part before adamw"):
            made.onto(old)
    else:
        assert same_bits(scaled, new if factor else old) and same_bits(
            made.onto(old), scaled
        )


def test_a_copy_holds_the_halves_that_its_product_reads():
    """A product that reads `W_hi` alone needs no `W_lo` in the transposed copy: it
    would be a wasted byte.
    """
    for recipe, halves in (("tcfp12_single", "hi"), ("tcfp12_fast", "hi+lo")):
        kernel = stored_of(recipe=tcfp_jax.recipe(recipe, copies="both"))["up"][
            "kernel"
        ]
        for weight in (kernel, rewrite(kernel, kernel.dequantize())):
            assert (weight.stored.forward.lo is not None) == (halves == "hi+lo")
            assert weight.rows.lo is not None


def test_the_count_of_roundings_stays_an_integer_of_a_float():
    last = jnp.asarray([1.0, 2.0, 2.0**24 - 1])
    training = stored_of()["up"]["kernel"].state
    advanced = lambda rounding: (
        replace(training, rounding=rounding).next_rounding().tolist()
    )
    assert advanced(last) == [1, 2, 0] and advanced(last - 1) == [0, 1, 2.0**24 - 1]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_weight_that_is_not_finite_stays_visible(bad):
    params = stored_of({"kernel": PARAMS["up"]["kernel"].at[2, 3].set(bad)})
    assert np.isnan(kernel_of(params["kernel"])).all()
    change = jnp.zeros((16, 32)).at[0, 0].set(bad)
    after = tcfp_jax.apply_updates(
        stored_of({"kernel": PARAMS["up"]["kernel"]}), {"kernel": change}
    )
    assert np.isnan(kernel_of(after["kernel"])).all()


def test_kernels_of_a_tree_have_seeds_of_their_own():
    params = stored_of(
        {name: {"kernel": jnp.ones((16, 32))} for name in ("first", "second")}
    )
    first, second = (
        np.asarray(leaf["kernel"].state.rounding) for leaf in params.values()
    )
    assert not np.any(first[:2] == second[:2]) and first[2] == second[2] == 0


def test_filled_kernels_of_stacks_have_seeds_of_their_own():
    params = stored_of(
        filled({"kernel": jax.ShapeDtypeStruct((3, 16, 32), jnp.float32)})
    )
    seeds = np.asarray(params["kernel"].state.rounding)
    assert seeds.shape == (3, 3) and len({tuple(row) for row in seeds}) == 3


def test_equal_kernels_are_stored_with_bits_of_their_own():
    params = stored_of({name: PARAMS["up"] for name in ("a", "b")})
    lows = [params[name]["kernel"].rows.lo.view(jnp.uint8) for name in ("a", "b")]
    assert float((lows[0] != lows[1]).mean()) > 0.1


@pytest.mark.parametrize("shape", [(16, 32), (3, 16, 32)])
def test_a_swapped_parameter_is_the_transposed_kernel(shape):
    kernel = jnp.asarray(RNG.standard_normal(shape), jnp.float32)
    weight = stored_of({"kernel": kernel})["kernel"]
    assert jnp.array_equal(kernel_of(weight.swap()), kernel_of(weight).swapaxes(-1, -2))
    assert same_bits(weight.swap().swap().stored, weight.stored)


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


@pytest.mark.parametrize("name", TURNED)
def test_a_forward_copy_of_w_hi_alone_is_never_read_for_both_halves(name):
    both, one = (
        stored_of(recipe=tcfp_jax.recipe(RECIPE, copies=n))["up"]["kernel"]
        for n in ("both", "one")
    )
    assert both.stored.forward.lo is None and one.stored.forward is None
    assert both.swap().stored.has_residual and both.swap().shape == (32, 16)
    assert same_bits(TURNED[name](both), TURNED[name](one))
