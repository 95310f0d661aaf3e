"""States, steps and gradients under explicit mesh axes, where shardings are types.

Optax's own contract is in optax/_src/sharding_test.py.
"""

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
from tests.helpers import filled, mesh_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
BOTH = tcfp_jax.recipe("tcfp12_single", copies="both")


def feedback(*args, **options):
    tx = tcfp_jax.error_feedback(*args, **options)
    return optax.chain(optax.sgd(1.0), tx)


NARROW = optim.low_precision_moments(optax.adamw(1e-2), key=KEY)
ADAMW = optim.adamw(1e-2, key=KEY)
ADAMW_BFLOAT16 = optim.adamw(1e-2, key=KEY, moments="bfloat16")
TRANSFORMATIONS = {
    "adamw 8bit": (None, ADAMW),
    "adamw bfloat16": (None, ADAMW_BFLOAT16),
    "adamw float32": (None, optim.adamw(1e-2, moments="float32")),
    "low_precision_moments": (None, NARROW),
    "error_feedback": (None, feedback("tcfp12")),
    "error_feedback float8": (None, feedback("tcfp12", error_dtype="float8_e5m2")),
    "error_feedback rows": (None, feedback("rowwise")),
    "error_feedback blocks": (None, feedback("blockwise")),
    "stored adamw bfloat16": (BOTH, ADAMW_BFLOAT16),
    "stored adamw 8bit": (BOTH, ADAMW),
    "stored on_stored": (BOTH, optim.on_stored(optax.adamw(1e-2))),
    "stored on_stored 8bit": (BOTH, optim.on_stored(NARROW)),
}


def types_of(function, *arguments):
    """The types of a function's results, with their shardings; nothing is compiled."""
    return jax.tree.map(jax.typeof, jax.eval_shape(function, *arguments))


def strings(types):
    found = jax.tree_util.tree_flatten_with_path(types)[0]
    return {jax.tree_util.keystr(path): str(kind) for path, kind in found}


@pytest.mark.slow_except("error_feedback float8", "stored adamw 8bit")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_types_of_states_are_those_of_the_contract(name):
    weights, tx = TRANSFORMATIONS[name]
    mesh = mesh_of(4, 2, axis_type=AxisType.Explicit)
    sharding = NamedSharding(mesh, P(None, "a", "b"))
    kernel = jax.ShapeDtypeStruct((2, 512, 256), jnp.float32, sharding=sharding)
    grads = params = {"kernel": kernel}
    apply = optax.apply_updates if weights is None else optim.apply_updates

    def step(grads, params, state):
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    with jax.set_mesh(mesh):
        if weights is not None:
            params = jax.eval_shape(lambda p: optim.store(p, weights, key=KEY), params)
        before = jax.eval_shape(tx.init, params)
        wanted = types_of(lambda *tree: tree, params, before)
        assert strings(types_of(step, grads, params, before)) == strings(wanted)
        assert strings(types_of(jax.jit(tx.init), params)) == strings(wanted[1])
    found = state_shardings({"kernel": sharding}, params, lambda p: (p, tx.init(p)))
    for kind, place in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        own = NamedSharding(mesh, kind.sharding.spec)
        assert own.is_equivalent_to(place, kind.ndim)


@pytest.mark.parametrize("name", ["adamw 8bit", "low_precision_moments"])
def test_init_takes_shapes_alone(name):
    shape = jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)
    assert jax.tree.leaves(TRANSFORMATIONS[name][1].init({"kernel": shape}))


@pytest.mark.slow_except("error_feedback")
@pytest.mark.parametrize(
    "name", ["adamw 8bit", "low_precision_moments", "error_feedback"]
)
def test_steps_without_a_jit_under_explicit_axes(name):
    _, tx = TRANSFORMATIONS[name]
    mesh = mesh_of(2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "a"))
        params = {"kernel": jnp.zeros((2, 64, 128), out_sharding=sharding)}
        before = tx.init(params)
        _, after = tx.update(params, before, params)
        assert jax.tree.map(jax.typeof, before) == jax.tree.map(jax.typeof, after)


def test_error_feedback_of_a_stack_that_a_mesh_splits():
    mesh = mesh_of(2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        kernel = jnp.ones((2, 16, 16), out_sharding=NamedSharding(mesh, P("a")))
        state = tcfp_jax.error_feedback("tcfp12").init({"kernel": kernel})
    assert state.errors["kernel"].sharding.spec[0] == "a"


LAID = [
    (Layout((0,), (1,)), (2, 32, 64), P(None, "a", "b")),  # a stack
    (Layout((0,), (1, 2)), (32, 4, 8), P("a", "b")),
    (Layout((1,), (0,)), (64, 32), P("b", "a")),  # stored transposed
]


def product(w, x):
    return tcfp_jax.matmul(x, w, recipe="tcfp12_single", out_sharding=P("a", None))


def floats(w, x):
    return tcfp_jax.dequantize(w)


def matrix(w, x):
    return w.dequantize()


# `matmul` multiplies matrices; layers reshape other kernels for it.
READS = [(*laid, read) for laid in LAID for read in (floats, matrix)]
READS.append((*LAID[2], product))


@pytest.mark.slow_except(
    "layout0-shape0-spec0-floats",
    "layout3-shape3-spec3-matrix",
    "layout6-shape6-spec6-product",
)
@pytest.mark.parametrize(("layout", "shape", "spec", "read"), READS)
def test_gradients_of_stored_weights_lie_as_the_weights(layout, shape, spec, read):
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    weights = {"w": Weight(tcfp_jax.recipe("tcfp12_single"), layout)}
    with jax.set_mesh(mesh):
        kernel = filled(jax.ShapeDtypeStruct(shape, jnp.float32))
        kernel = jax.device_put(kernel, NamedSharding(mesh, spec))
        x = jnp.ones((4, 32), out_sharding=NamedSharding(mesh, P("a")))
        params = jax.jit(lambda w: tcfp_jax.store({"w": w}, weights, key=KEY))(kernel)
        grad = tcfp_jax.grad(lambda params, x: jnp.sum(read(params["w"], x) ** 2))
        # one by one is many small programs
        for call in [jax.jit(grad), grad] if read is matrix else [jax.jit(grad)]:
            found = jax.typeof(call(params, x)["w"])
            assert found.sharding.spec == jax.typeof(kernel).sharding.spec


CUT = {
    "adamw": (
        ADAMW,
        (64, 320),
        r"each of the 4 devices of 'b' has 80 of its 320 values",
    ),
    "low precision": (NARROW, (64, 320), r"blocks of 128 values along axis 1"),
    "blocks of weights": (
        tcfp_jax.error_feedback("blockwise"),
        (512, 256),
        r"blocks of 128 .* 64 of its 256 values.*recipe with",
    ),
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_blocks_cut_by_a_shard_raise_where_that_is_known(name, kind):
    tx, shape, message = CUT[name]
    mesh = mesh_of(2, 4, axis_type=kind)
    sharding = NamedSharding(mesh, P("a", "b"))
    message = rf"up/kernel.*{message}"
    with jax.set_mesh(mesh):
        params = {"up": {"kernel": jax.device_put(jnp.zeros(shape), sharding)}}
        with pytest.raises(ValueError, match=message):
            tx.init(params)  # concrete
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(tx.init, params)
    with pytest.raises(ValueError, match=message):
        state_shardings({"up": {"kernel": sharding}}, params, tx.init)


def test_a_weight_kept_transposed_alone_may_be_cut_as_its_blocks_lie():
    """Codes of FP4 are `[n, k]`, so that k is cut in blocks of 16 and n anywhere; and
    the message says how far.
    """
    mesh, tx = mesh_of(8), feedback("nvfp4")

    def placed(*spec):
        kernel = jnp.zeros((64, 64))
        return {"kernel": jax.device_put(kernel, NamedSharding(mesh, P(*spec)))}

    assert jax.tree.leaves(tx.init(placed(None, "a")))
    message = r"blocks of 16 values .* has 8 of its 64 values; split it over 4 at most"
    with pytest.raises(ValueError, match=message):
        tx.init(placed("a"))
