"""States, steps and gradients under explicit mesh axes, where shardings are types.

Optax's own contract is in optax/_src/sharding_test.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax import optim
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.layout import Layout, Weight
from tests.helpers import (
    drawn,
    mesh_of,
    parametrize,
    placed,
    refused,
    slow_except,
    step_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
RECIPE = "tcfp12_single"
BOTH = tcfp_jax.recipe(RECIPE, copies="both")
explicit = partial(mesh_of, axis_type=AxisType.Explicit)


def feedback(*args, **options):
    tx = tcfp_jax.error_feedback(*args, **options)
    return optax.chain(optax.sgd(1.0), tx)


NARROW = optim.low_precision_moments(optax.adamw(1e-2), key=KEY)
ADAMW = optim.adamw(1e-2, key=KEY)
ADAMW_BFLOAT16 = optim.adamw(1e-2, key=KEY, moments="bfloat16")
TRANSFORMATIONS = {
    "adamw 8bit": ADAMW,
    "adamw bfloat16": ADAMW_BFLOAT16,
    "adamw float32": optim.adamw(1e-2, moments="float32"),
    "low_precision_moments": NARROW,
    "error_feedback": feedback("tcfp12"),
    "error_feedback float8": feedback("tcfp12", error_dtype="float8_e5m2"),
    "error_feedback rows": feedback("rowwise"),
    "error_feedback blocks": feedback("blockwise"),
    "stored adamw bfloat16": ADAMW_BFLOAT16,
    "stored adamw 8bit": ADAMW,
    "stored on_stored": optim.on_stored(optax.adamw(1e-2)),
    "stored on_stored 8bit": optim.on_stored(NARROW),
}


def types_of(function, *arguments):
    """The types of a function's results, with their shardings; nothing is compiled."""
    return jax.tree.map(jax.typeof, jax.eval_shape(function, *arguments))


def strings(types):
    found = jax.tree_util.tree_flatten_with_path(types)[0]
    return {jax.tree_util.keystr(path): str(kind) for path, kind in found}


@slow_except("error_feedback float8", "stored adamw 8bit")
@parametrize("name", TRANSFORMATIONS)
def test_types_of_states_are_those_of_the_contract(name):
    tx = TRANSFORMATIONS[name]
    mesh = explicit(4, 2)
    sharding = NamedSharding(mesh, P(None, "a", "b"))
    kernel = jax.ShapeDtypeStruct((2, 512, 256), jnp.float32, sharding=sharding)
    grads = params = {"kernel": kernel}
    with jax.set_mesh(mesh):
        if name.startswith("stored"):
            params = jax.eval_shape(lambda p: optim.store(p, BOTH, key=KEY), params)
        before = jax.eval_shape(tx.init, params)
        wanted = types_of(lambda *tree: tree, params, before)
        after = types_of(step_of(tx), grads, params, before)
        assert strings(after) == strings(wanted)
        assert strings(types_of(jax.jit(tx.init), params)) == strings(wanted[1])
    found = state_shardings({"kernel": sharding}, params, lambda p: (p, tx.init(p)))
    for kind, place in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        own = NamedSharding(mesh, kind.sharding.spec)
        assert own.is_equivalent_to(place, kind.ndim)


@parametrize("name", ["adamw 8bit", "low_precision_moments"])
def test_init_takes_shapes_alone(name):
    shape = jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)
    assert jax.tree.leaves(TRANSFORMATIONS[name].init({"kernel": shape}))


@slow_except("error_feedback")
@parametrize("name", ["adamw 8bit", "low_precision_moments", "error_feedback"])
def test_steps_without_a_jit_under_explicit_axes(name):
    tx = TRANSFORMATIONS[name]
    mesh = explicit(2)
    with jax.set_mesh(mesh):
        params = {"kernel": placed(jnp.zeros((2, 64, 128)), mesh, None, "a")}
        before = tx.init(params)
        _, after = tx.update(params, before, params)
        assert jax.tree.map(jax.typeof, before) == jax.tree.map(jax.typeof, after)


def test_error_feedback_of_a_stack_that_a_mesh_splits():
    mesh = explicit(2)
    with jax.set_mesh(mesh):
        kernel = placed(jnp.ones((2, 16, 16)), mesh, "a")
        state = tcfp_jax.error_feedback("tcfp12").init({"kernel": kernel})
    assert state.errors["kernel"].sharding.spec[0] == "a"


# Gradients
# --------------------------------------------------------------------------------------
LAID = {
    "a stack": (Layout((0,), (1,)), (2, 32, 64), P(None, "a", "b")),
    "two outputs": (Layout((0,), (1, 2)), (32, 4, 8), P("a", "b")),
    "transposed": (Layout((1,), (0,)), (64, 32), P("b", "a")),
}


def product(w, x):
    return tcfp_jax.matmul(x, w, recipe=RECIPE, out_sharding=P("a", None))


def floats(w, x):
    return tcfp_jax.dequantize(w)


def matrix(w, x):
    return w.dequantize()


# `matmul` multiplies matrices; layers reshape other kernels for it.
CASES = [(laid, read) for read in (floats, matrix) for laid in LAID]
CASES.append(("transposed", product))


@slow_except("a stack-floats", "two outputs-matrix", "transposed-product")
@parametrize(
    "laid, read", CASES, ids=[f"{laid}-{read.__name__}" for laid, read in CASES]
)
def test_gradients_of_stored_weights_lie_as_the_weights(laid, read):
    layout, shape, spec = LAID[laid]
    weights = {"w": Weight(tcfp_jax.recipe(RECIPE), layout)}
    mesh = explicit(2, 2)

    @tcfp_jax.grad
    def gradient(params, x):
        return jnp.sum(read(params["w"], x) ** 2)

    with jax.set_mesh(mesh):
        kernel = placed(drawn(*shape), mesh, *spec)
        x = placed(jnp.ones((4, 32)), mesh, "a")
        params = jax.jit(lambda w: tcfp_jax.store({"w": w}, weights, key=KEY))(kernel)
        calls = [jax.jit(gradient)]
        if read is matrix:  # one by one is many small programs
            calls.append(gradient)
        for call in calls:
            found = jax.typeof(call(params, x)["w"])
            assert found.sharding.spec == jax.typeof(kernel).sharding.spec


# Blocks that a shard cuts
# --------------------------------------------------------------------------------------
CUT = {
    "adamw": (
        ADAMW,
        (64, 320),
        "each of the 4 devices of 'b' has 80 of its 320 values",
    ),
    "low precision": (NARROW, (64, 320), "blocks of 128 values along axis 1"),
    "blocks of weights": (
        tcfp_jax.error_feedback("blockwise"),
        (512, 256),
        "blocks of 128 .* 64 of its 256 values.*recipe with",
    ),
}


@parametrize("name", CUT)
@parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_blocks_cut_by_a_shard_raise_where_that_is_known(name, kind):
    tx, shape, message = CUT[name]
    mesh = mesh_of(2, 4, axis_type=kind)
    refuse = partial(pytest.raises, ValueError, match=f"up/kernel.*{message}")
    with jax.set_mesh(mesh):
        params = {"up": {"kernel": placed(jnp.zeros(shape), mesh, "a", "b")}}
        with refuse():
            tx.init(params)  # concrete
        if kind == AxisType.Explicit:
            with refuse():
                jax.eval_shape(tx.init, params)
    shardings = {"up": {"kernel": params["up"]["kernel"].sharding}}
    with refuse():
        state_shardings(shardings, params, tx.init)


def test_a_weight_kept_transposed_may_be_cut_as_its_blocks_lie():
    """Codes of FP4 are `[n, k]`, so that k is cut in blocks of 16 and n anywhere; and
    the message says how far.
    """
    mesh = mesh_of(8)
    tx = feedback("nvfp4")
    kernel = jnp.zeros((64, 64))
    assert jax.tree.leaves(tx.init({"kernel": placed(kernel, mesh, None, "a")}))
    message = r"blocks of 16 values .* has 8 of its 64 values; split it over 4 at most"
    with refused(message):
        tx.init({"kernel": placed(kernel, mesh, "a")})
