"""Parameters that are W_hi + W_lo alone: stored, differentiated and updated, in every
kind of model.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tcfp_jax
from pallas_kernels.scaling import Block
from tcfp_jax import linen as layers
from tcfp_jax import nnx as nnx_layers
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.convert import hand_out
from tcfp_jax.optim import on_stored
from tcfp_jax.paths import entries, leaves, put
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parameter import is_parameter
from tests.helpers import (
    MLP,
    assert_close,
    decibels,
    drawn,
    filled,
    nnx_model,
    parametrize,
    refused,
    same_bits,
    slow,
    slow_except,
    step_of,
    store_at_once,
    variables_of,
)
from tests.optim.zoo import (
    KEY,
    RECIPE,
    TRANSFORMATIONS,
    TWO_LAYERS,
    X,
    loss,
    stored_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
ALL = ("linear", "small", "head")
TCFPDense = functools.partial(layers.TCFPDense, recipe=RECIPE)


def train(tx, params, steps=10, fn=loss):
    """(parameters, state, losses) after some steps."""
    step = step_of(tx)

    @jax.jit
    def run(params, state):
        value, gradients = tcfp_jax.value_and_grad(fn)(params, X)
        return *step(gradients, params, state), value

    state = jax.jit(tx.init)(params)
    losses = []
    for _ in range(steps):
        params, state, value = run(params, state)
        losses.append(float(value))
    return params, state, losses


def parameters_of(tree):
    """The stored kernels of a tree."""
    found = jax.tree.leaves(tree, is_leaf=is_parameter)
    return [leaf for leaf in found if is_parameter(leaf)]


# Models
# --------------------------------------------------------------------------------------
class Body(nn.Module):
    dense: Callable

    @nn.compact
    def __call__(self, x, _):
        return x + self.dense(16)(nn.relu(self.dense(32)(x))), None


class Scanned(nn.Module):
    dense: Callable = TCFPDense
    collections: tuple[str, ...] = ("params", "tcfp")

    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            nn.remat(Body),
            variable_axes=dict.fromkeys(self.collections, 0),
            split_rngs={"params": True},
            length=3,
        )
        return body(self.dense)(x, None)[0]


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(x)
        return nn.Dense(8)(Scanned(nn.Dense, ("params",))(x))


class General(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 8))(x)
        x = nn.DenseGeneral(16, axis=(-2, -1))(x)
        return nn.Einsum((48, 16), "bsd,fd->bsf")(x)


class Flax(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.down = nnx.LinearGeneral(32, (2, 8), rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(nnx.relu(self.up(x))))


def by_linen(model, convert=False):
    params = variables_of(model, X)["params"]
    if convert:
        model = convert_to_tcfp(model, RECIPE, X, include=ALL)

    def apply(params, copies=None):
        state = {"tcfp": copies} if copies else {}
        return model.apply({"params": params, **state}, X)

    return apply, params, find_weights(model, X)


def by_nnx(make, convert=False):
    model = nnx_model(make)
    if convert:
        model = convert_to_tcfp(model, RECIPE, X, include=ALL)
    weights = find_weights(model) if convert else find_weights(model, X)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params, copies=None):
        model = nnx.merge(graphdef, params, rest)
        hand_out(model, entries(copies or {}))
        return model(X)

    return apply, params, weights


def by_transform():
    def plain(params, x):
        h = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
        return h @ params["down"]["kernel"]

    low = tcfp_jax.transform(plain, RECIPE, include=ALL)

    def apply(params, copies=None):
        return low(params, X, stored=copies)

    return apply, TWO_LAYERS, find_weights(low, TWO_LAYERS, X)


def boxed():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    return by_linen(TCFPDense(32, kernel_init=init))


BY_HAND = functools.partial(
    MLP, linear=functools.partial(nnx_layers.TCFPLinear, recipe=RECIPE)
)
MODELS = {
    "scan and remat": (by_linen, Scanned()),
    "general layers": (by_linen, General(), True),
    "boxes": (boxed,),
    "converted linen": (by_linen, Plain(), True),
    "nnx by hand": (by_nnx, BY_HAND),
    "converted nnx": (by_nnx, Flax, True),
    "transform": (by_transform,),
}


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


@slow_except("boxes")
@parametrize("name", MODELS)
def test_models_have_the_gradients_of_float_parameters(name):
    make, *arguments = MODELS[name]
    apply, params, weights = make(*arguments)
    stored = stored_of(params, weights)
    assert len(parameters_of(stored)) == len(weights) > 0
    floats = tcfp_jax.dequantize(stored)
    assert jax.tree.map(jnp.shape, floats) == jax.tree.map(jnp.shape, params)
    # The same FP8 values next to float parameters, as an optimizer with masters would
    # hold them
    copies = {}
    for path, leaf in leaves(stored, is_parameter).items():
        if is_parameter(leaf):
            put(copies, path.split("/"), leaf.stored)

    def mean(params, copies=None):
        return jnp.mean((apply(params, copies) - 1) ** 2)

    found = jax.jit(tcfp_jax.value_and_grad(mean))(stored)
    wanted = jax.jit(jax.value_and_grad(mean))(floats, copies)
    assert dtypes(found) == dtypes(wanted)
    assert_close(found, wanted, 1e-6, 1e-7)
    tx = on_stored(optax.adam(1e-2))
    trained, _, losses = train(tx, stored, 8, lambda params, x: mean(params))
    assert losses[-1] < losses[0]
    assert jax.tree.structure(trained) == jax.tree.structure(stored)


def test_weights_are_stored_inside_the_jit_that_makes_them():
    def floats(key):
        return Scanned().init(key, X)["params"]

    def make(key):
        return tcfp_jax.store(lambda: floats(key), RECIPE, key=key)

    made = jax.jit(make)(KEY)
    # A scan that makes one leaf is another program than one that makes all: bits differ
    # as float32 rounds.
    wanted = jax.jit(floats)(KEY)
    structure = jax.tree.structure(store_at_once(wanted, RECIPE, key=KEY))
    for stored in (made, make(KEY)):
        assert jax.tree.structure(stored) == structure
        assert_close(jax.jit(tcfp_jax.dequantize)(stored), wanted, 2**-6, 5e-5)
    kernels = parameters_of(made)
    assert sorted(kernel.shape for kernel in kernels) == [(3, 16, 32), (3, 32, 16)]
    for kernel in kernels:
        assert kernel.rows.scale.shape == (3,)
        assert kernel.nbytes < 2.1 * 3 * 16 * 32


def test_a_stack_of_constants_is_stored_as_one_of_arguments():
    params = {"w": drawn(5, 32, 48)}
    weights = {"w": Weight(tcfp_jax.recipe(RECIPE), Layout((1,), (2,), (0,)))}
    constant = jax.jit(lambda: stored_of(params, weights))
    assert same_bits(constant(), store_at_once(params, weights, key=KEY))


@slow_except("feedback-tcfp12_single")
@parametrize("recipe", [RECIPE, "tcfp12", "tcfp12_fast", "tcfp12_blockwise"])
@parametrize("remainder", ["stochastic", "feedback", "dropped"])
def test_storage_is_a_choice_apart_from_the_recipe(recipe, remainder):
    options = {"block": 32} if recipe == "tcfp12_blockwise" else {}
    chosen = tcfp_jax.recipe(recipe, **options)
    params = stored_of(recipe=chosen, remainder=remainder)
    floats = tcfp_jax.dequantize(params)
    for name in TWO_LAYERS:
        assert decibels(TWO_LAYERS[name]["kernel"], floats[name]["kernel"]) > 55
    tx = on_stored(optax.sgd(0.5))
    params, _, losses = train(tx, params, 8, functools.partial(loss, recipe=chosen))
    assert losses[-1] < 0.9 * losses[0]
    kernel = params["up"]["kernel"]
    assert (kernel.state.error is not None) == (remainder == "feedback")
    forward = kernel.stored.forward
    assert (forward is not None) == (chosen.copies == "both")
    if forward is not None:  # the copies hold the new weight
        assert same_bits(forward.values, kernel.rows.values.T)
        assert (forward.lo is not None) == (chosen.weight.forward == "hi+lo")


# Optimizers
# --------------------------------------------------------------------------------------
@slow_except("partition")
@parametrize("name", TRANSFORMATIONS)
def test_any_optax_transformation_composes(name):
    tx = TRANSFORMATIONS[name]
    on = on_stored(tx)
    params = stored_of()
    _, state, losses = train(on, params, 12)
    assert losses[-1] < losses[0]
    assert int(state.skipped) == 0
    # The first updates are those of the float parameters.
    floats = tcfp_jax.dequantize(params)
    gradients = filled(floats, seed=1)
    wanted, _ = tx.update(gradients, tx.init(floats), floats)
    updates, _ = on.update(gradients, on.init(params), params)
    assert_close(updates, wanted, 1e-5, 1e-7)


def test_gradients_may_be_wider_than_the_parameters():
    """optax makes moments of a parameter's dtype, and the first update widens them: a
    branch that skips does, too.
    """
    params = stored_of({"kernel": jnp.ones((8, 8), jnp.bfloat16)})
    tx = on_stored(optax.adam(1e-2))
    gradients = {"kernel": jnp.ones((8, 8), jnp.float32)}
    _, state = tx.update(gradients, tx.init(params), params)
    assert state.inner[0].mu["kernel"].dtype == jnp.float32
    assert int(state.inner[0].count) == 1
    broken = {"kernel": gradients["kernel"].at[0, 0].set(jnp.nan)}
    _, skipped = tx.update(broken, state, params)
    assert same_bits(skipped.inner, state.inner)
    assert int(skipped.skipped) == 1


# Gradients
# --------------------------------------------------------------------------------------
HALVES = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TWO_LAYERS)


@parametrize(
    "params, options, wanted",
    [
        (TWO_LAYERS, {"gradient_dtype": "bfloat16"}, "float32"),
        (HALVES, {}, "bfloat16"),
    ],
    ids=["gradients", "parameters"],
)
def test_gradients_and_parameters_may_be_bfloat16(params, options, wanted):
    stored = stored_of(params, **options)
    gradient = tcfp_jax.grad(loss)(stored, X)["up"]["kernel"]
    assert gradient.dtype == jnp.bfloat16
    assert tcfp_jax.dequantize(stored)["up"]["kernel"].dtype == wanted


def test_arguments_of_value_and_grad_are_those_of_jax():
    def fn(x, params):
        return loss(params, x), x.shape

    params = stored_of()
    both = tcfp_jax.value_and_grad(fn, argnums=(1, 0), has_aux=True)
    (value, shape), (of_params, of_x) = both(X, params)
    assert value.shape == ()
    assert shape == X.shape == of_x.shape
    assert of_params["up"]["kernel"].shape == (16, 32)
    alone, again = tcfp_jax.grad(fn, argnums=-1, has_aux=True)(X, params)
    assert again == shape
    assert same_bits(alone, of_params)


CUBED = drawn(3, 32, 32)
READS = {
    "dequantize": lambda w: w.dequantize(),
    "in bfloat16": lambda w: w.dequantize(jnp.bfloat16),
    "transposed": lambda w: w.swap().dequantize().swapaxes(-1, -2),
    "of the tree": lambda w: tcfp_jax.dequantize({"kernel": w})["kernel"],
}


@slow_except("transposed-blockwise_stored", "of the tree-tcfp12_fast")
@parametrize("recipe", [RECIPE, "tcfp12_fast", "blockwise_stored"])
@parametrize("name", READS)
def test_a_stored_weight_that_is_read_as_floats_has_a_gradient(name, recipe):
    if recipe == "blockwise_stored":
        recipe = tcfp_jax.recipe(RECIPE, scaling=Block(32, "square"))
    tolerance = 2e-2 if name == "in bfloat16" else 1e-6

    def read(params):
        return jnp.sum(READS[name](params["kernel"]).astype(jnp.float32) ** 3)

    for kernel in (CUBED[0], CUBED):  # one, and a stack
        stored = stored_of({"kernel": kernel}, recipe)
        floats = tcfp_jax.dequantize(stored)["kernel"]
        value, gradients = jax.jit(tcfp_jax.value_and_grad(read))(stored)
        assert_close(gradients["kernel"], 3 * floats**2, tolerance, 1e-6)
        # Cubes of either sign cancel: the error is a part of their magnitudes and not
        # of their sum.
        magnitude = float(jnp.sum(jnp.abs(floats) ** 3))
        np.testing.assert_allclose(
            value, jnp.sum(floats**3), atol=tolerance * magnitude
        )
        with refused(r"tcfp_jax\.value_and_grad", TypeError):
            jax.jit(jax.grad(read))(stored)


@slow
@parametrize(
    ("remainder", "key"),
    [("stochastic", KEY), ("feedback", None), ("dropped", None)],
)
def test_stacks_on_the_host_have_the_bits_of_arrays(remainder, key):
    """Layers, layers of experts, and a single matrix."""
    shapes = {"up": (3, 40, 24), "experts": (2, 3, 16, 24), "head": (40, 64)}
    host = {
        name: {"kernel": np.asarray(drawn(*shape))} for name, shape in shapes.items()
    }
    host["norm"] = {"scale": np.ones(4, np.float32)}
    options = dict(recipe=RECIPE, key=key, remainder=remainder)
    arrays = jax.tree.map(jnp.asarray, host)
    assert same_bits(tcfp_jax.store(host, **options), tcfp_jax.store(arrays, **options))
