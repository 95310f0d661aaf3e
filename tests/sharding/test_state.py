"""Shardings of states follow from the parameters' shardings, steps keep them, and bits
do not depend on the mesh.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax import optim
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.layout import Layout, Weight
from tests import compile_for_h200 as h200
from tests.helpers import filled, mesh_of, same_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
BOTH = tcfp_jax.recipe("tcfp12_single", copies="both")
SHAPES = {
    "up": {"kernel": (64, 512), "bias": (512,)},
    "down": {"kernel": (512, 64)},
    "stack": {"kernel": (2, 32, 512)},
}
SPECS = {
    "up": {"kernel": P("a", "b"), "bias": P("b")},
    "down": {"kernel": P(("b", "a"))},
    "stack": {"kernel": P(None, "a", "b")},
}
is_shape = lambda node: type(node) is tuple
PARAMS = filled(
    jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=is_shape
    )
)
GRADS = filled(PARAMS, seed=1)
FLAT = AbstractMesh((4, 2), ("a", "b"))


def on(mesh, specs=SPECS):
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, P),
    )


def specs_of(tree):
    """The spec of each array by its path, trailing axes that are whole left out."""
    found = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    return {
        path: leaf.spec if isinstance(leaf, NamedSharding) else leaf
        for path, leaf in found.items()
    }


def stored(params):
    return optim.store(params, BOTH, key=KEY)


ADAMW = optim.adamw(1e-2, weight_decay=0.1, key=KEY, quality="on")
FEEDBACK = optax.chain(
    optim.low_precision_moments(optax.adamw(1e-2), key=KEY),
    tcfp_jax.error_feedback("tcfp12", error_dtype="float8_e5m2"),
)


# Shardings
# --------------------------------------------------------------------------------------


def test_stored_parameters_and_their_moments():
    params = jax.eval_shape(stored, PARAMS)
    tree = params, jax.eval_shape(ADAMW.init, params)
    shardings = state_shardings(on(FLAT), tree)
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)
    found = specs_of(shardings)
    up, stack, down = "['up']['kernel']", "['stack']['kernel']", "['down']['kernel']"
    expected = {
        f"[0]{up}.backward.values": P("a", "b"),
        f"[0]{up}.backward.lo": P("a", "b"),
        f"[0]{up}.backward.scale": P(),
        f"[0]{up}.forward.values": P("b", "a"),
        f"[0]{up}.training.amax": P(),
        f"[0]{up}.training.rounding": P(),
        f"[0]{stack}.forward.values": P(None, "b", "a"),
        f"[0]{stack}.backward.scale": P(),
        f"[0]{down}.forward.values": P(None, ("b", "a")),
        "[0]['up']['bias']": P("b"),
        "[1].count": P(),
        "[1].key": P(),
        f"[1].mu{up}": P("a", "b"),
        f"[1].nu{stack}": P(None, "a", "b"),
        "[1].nu['up']['bias']": P("b"),
        f"[1].mu_scale{up}": P("a", "b"),
        f"[1].nu_scale{stack}": P(None, "a", "b"),
        f"[1].mu_scale{down}": P(("b", "a")),
        f"[1].quality{up}.moved": P(),
    }
    assert {path: found[path] for path in expected} == expected
    # From the state alone, as from both.
    assert state_shardings(on(FLAT), tree[1]) == shardings[1]


def test_errors_and_weights_of_error_feedback():
    found = specs_of(state_shardings(on(FLAT), jax.eval_shape(FEEDBACK.init, PARAMS)))
    up, stack = "['up']['kernel']", "['stack']['kernel']"
    expected = {
        f"[0].inner[0].mu{up}": P("a", "b"),
        f"[0].scales['0']['nu']{stack}": P(None, "a", "b"),
        "[0].key": P(),
        f"[1].weights{up}.forward.lo": P("b", "a"),
        f"[1].weights{stack}.sample": P(),
        f"[1].scaled_errors{up}": P("a", "b"),
    }
    assert {path: found[path] for path in expected} == expected


@pytest.mark.parametrize(
    ("recipe", "part", "expected"),
    [
        ("rowwise", "backward.scale", P("a")),
        ("rowwise", "forward.scale", P("b")),
        ("blockwise", "backward.scale", P("a", "b")),
        ("blockwise", "forward.scale", P("b", "a")),
    ],
)
def test_scales_follow_what_they_count(recipe, part, expected):
    params = {"kernel": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    state = jax.eval_shape(
        tcfp_jax.error_feedback(tcfp_jax.recipe(recipe, copies="both")).init, params
    )
    found = specs_of(state_shardings(on(FLAT, {"kernel": P("a", "b")}), state))
    assert found[f".weights['kernel'].{part}"] == expected


HEADS = [
    (Layout((0,), (1, 2)), (64, 4, 128), P("a", "b"), P("a", "b")),  # query
    (Layout((0, 1), (2,)), (4, 128, 256), P("a", None, "b"), P("a", "b")),  # out
    (Layout((1,), (0,)), (512, 256), P("a", "b"), P("a", "b")),  # a table as a head
    # experts, one scale each
    (Layout((1,), (2,), (0,)), (4, 64, 128), P("a", "b"), P("a", "b")),
    # outputs around the input
    (Layout((1,), (0, 2)), (4, 256, 128), P("a", "b"), P("a", "b")),
]


@pytest.mark.parametrize(("layout", "shape", "spec", "matrix"), HEADS, ids=str)
def test_kernels_of_many_axes(layout, shape, spec, matrix):
    weights = {"w": Weight(BOTH, layout)}
    floats = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    params = jax.eval_shape(lambda p: optim.store(p, weights, key=KEY), floats)
    found = specs_of(
        state_shardings(
            on(FLAT, {"w": spec}), (params, jax.eval_shape(ADAMW.init, params))
        )
    )
    *stack, first, second = (
        *matrix,
        *(None,) * (len(layout.matrix_shape(shape)) - len(matrix)),
    )
    turned = NamedSharding(FLAT, P(*stack, second, first))
    ndim = len(stack) + 2
    assert NamedSharding(FLAT, found["[0]['w'].forward.values"]).is_equivalent_to(
        turned, ndim
    )
    for path in ("[0]['w'].backward.values", "[1].mu['w']"):
        assert NamedSharding(FLAT, found[path]).is_equivalent_to(
            NamedSharding(FLAT, matrix), ndim
        )
    if stack:
        assert (
            found["[0]['w'].backward.scale"]
            == found["[0]['w'].training.amax"]
            == P("a")
        )


def test_what_optax_makes_of_parameters():
    params = {"k": jax.ShapeDtypeStruct((128, 256), jnp.float32)}
    placed = {
        "k": jax.ShapeDtypeStruct(
            (128, 256), jnp.float32, sharding=NamedSharding(FLAT, P("a", "b"))
        )
    }
    factored = jax.eval_shape(optax.adafactor(1e-2).init, params)
    of = lambda given, tx: specs_of(
        state_shardings(given, jax.eval_shape(tx.init, params))
    )
    assert of(placed, optax.adafactor(1e-2))["[0].v_row['k']"] == P("a")
    assert of(placed, optax.adafactor(1e-2))["[0].v_col['k']"] == P("b")
    assert of(placed, optax.adafactor(1e-2))["[0].v['k']"] == P()
    assert of(placed, optax.sm3(0.1))["[0].mu['k'][0]"] == P("a")
    memory = of(
        on(FLAT, {"k": P("a", "b")}), optax.lbfgs(0.1, memory_size=3, linesearch=None)
    )
    assert memory["[0].diff_params_memory['k']"] == P(None, "a", "b")
    with pytest.raises(
        ValueError, match=r"does not tell its shape; give jax.ShapeDtypeStruct"
    ):
        state_shardings(on(FLAT, {"k": P("a", "b")}), factored)


# Frameworks
# --------------------------------------------------------------------------------------


class Dense(nn.Module):
    logical: bool

    @nn.compact
    def __call__(self, x):
        with_axes = (
            nn.with_logical_partitioning if self.logical else nn.with_partitioning
        )
        names = ("embed", "mlp") if self.logical else ("a", "b")
        return nn.Dense(
            512, kernel_init=with_axes(nn.initializers.lecun_normal(), names), name="up"
        )(x)


@pytest.mark.parametrize(
    "logical", [False, True], ids=["names of the mesh", "logical names"]
)
def test_metadata_of_linen(logical):
    mesh = mesh_of(4, 2)
    boxed = jax.eval_shape(Dense(logical).init, KEY, jnp.ones((1, 64)))["params"]
    if logical:
        rules = (("embed", "a"), ("mlp", "b"))
        shardings = nn.logical_to_mesh_sharding(
            nn.get_partition_spec(boxed), mesh, rules
        )
    else:
        shardings = nn.get_sharding(boxed, mesh)
    for params in (boxed, nn.unbox(boxed)):
        tree = jax.eval_shape(lambda p: (stored(p), ADAMW.init(stored(p))), params)
        found = specs_of(state_shardings(shardings, tree))
        by_name = {
            path.replace(".value", "", 1) if ".value." in path else path: spec
            for path, spec in found.items()
        }
        value = ".value" if params is boxed else ""
        assert by_name["[0]['up']['kernel'].forward.values"] == P("b", "a")
        assert (
            found[f"[1].mu['up']['kernel']{value}"]
            == found["[1].nu_scale['up']['kernel']"]
            == P("a", "b")
        )


def test_metadata_of_nnx():
    mesh = mesh_of(4, 2)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", "b"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(64, 512, kernel_init=init, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, FEEDBACK, wrt=nnx.Param)
    shardings = nnx.get_named_sharding(nnx.state(model, nnx.Param), mesh)
    found = specs_of(state_shardings(shardings, optimizer.opt_state))
    assert (
        found["[0].inner[0].mu['kernel'].value"]
        == found["[1].scaled_errors['kernel'].value"]
        == P("a", "b")
    )
    assert found["[1].weights['kernel'].forward.values.value"] == P("b", "a")
    assert found["[0].scales['0']['mu']['kernel'].value"] == P("a", "b")
    with pytest.raises(ValueError, match=r"nnx.Optimizer give its opt_state"):
        state_shardings(shardings, nnx.state(optimizer))


# Steps
# --------------------------------------------------------------------------------------


def step_of(kind):
    """(what makes parameters, the transformation, a step)."""
    make, tx, apply = (
        stored,
        optim.adamw(1e-2, weight_decay=0.1, key=KEY),
        optim.apply_updates,
    )
    if kind == "error feedback":
        make, tx, apply = (lambda params: params), FEEDBACK, optax.apply_updates

    def step(grads, params, state):
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    return make, tx, step


KINDS = ["stored", "error feedback"]
# Four devices and two processes of them: tests/optim/test_processes.py.
MESHES = [
    ("stored", (2, 1)),
    *((kind, sizes) for kind in KINDS for sizes in ((8, 1), (4, 2), (2, 4))),
]
# A float leaf, a weight that XLA updates, and a stack that the fused pass does.
PART = lambda tree: {
    "up": {"bias": tree["up"]["bias"]},
    "down": tree["down"],
    "stack": tree["stack"],
}


@functools.cache
def trained(kind, sizes):
    """((parameters, state) after two steps from equal gradients on this mesh, their
    shardings).
    """
    mesh = mesh_of(*sizes)
    shardings = on(mesh, PART(SPECS))
    make, tx, step = step_of(kind)
    params, grads = (
        jax.device_put(tree, shardings) for tree in (PART(PARAMS), PART(GRADS))
    )

    def begin(params):
        made = make(params)
        return made, tx.init(made)

    placed = state_shardings(shardings, jax.eval_shape(begin, params))
    first = jax.jit(begin, out_shardings=placed)(params)
    # no out_shardings: the step itself keeps them
    run = jax.jit(step, donate_argnums=(1, 2))
    return run(grads, *run(grads, *first)), placed


@pytest.mark.slow_except("stored-(4, 2)")
@pytest.mark.optimized("slow")
@pytest.mark.parametrize(("kind", "sizes"), MESHES, ids=str)
def test_a_step_keeps_shardings_and_no_mesh_changes_a_bit(kind, sizes):
    after, shardings = trained(kind, sizes)
    leaves = jax.tree_util.tree_flatten_with_path(after)[0]
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (
            jax.tree_util.keystr(path),
            leaf.sharding,
            wanted,
        )
        # Every matrix, and with it its scales, is in as many parts as the mesh can
        # make.
        if leaf.ndim >= 2 and leaf.size > 1024:
            assert not leaf.is_fully_replicated, jax.tree_util.keystr(path)
    alone, _ = trained(kind, (1, 1))
    assert same_bits(alone, after)


@pytest.mark.slow_except("stored")
@pytest.mark.optimized("slow")
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_restores_on_other_meshes(kind, tmp_path):
    saved, _ = trained(kind, (4, 2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", saved)
    for sizes in ((2, 4), (8, 1), (1, 1)):
        mesh = mesh_of(*sizes)
        shardings = state_shardings(on(mesh, PART(SPECS)), saved)
        into = jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
            saved,
            shardings,
        )
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "run", into)
        assert same_bits(saved, restored)
        assert all(
            jax.tree.leaves(
                jax.tree.map(lambda x, s: x.sharding == s, restored, shardings)
            )
        )


REASON = h200.missing()


@pytest.mark.optimized
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.slow_except("stored")
@pytest.mark.parametrize("kind", KINDS)
def test_no_transposed_copy_crosses_the_mesh_of_h200s(kind):
    mesh = h200.h200s(4, 2)
    make, tx, step = step_of(kind)
    shapes = {"up": {"kernel": (1024, 2048)}, "down": {"kernel": (2048, 1024)}}
    specs = {"up": {"kernel": P("a", "b")}, "down": {"kernel": P("b", "a")}}
    floats = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape
    )
    place = lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s)
    grads = jax.tree.map(place, floats, on(mesh, specs))
    tree = jax.eval_shape(lambda p: (make(p), tx.init(make(p))), floats)
    tree = jax.tree.map(place, tree, state_shardings(on(mesh, specs), tree))
    compiled = h200.compile_for(mesh, step, grads, *tree, donate_argnums=(1, 2))
    moved = re.findall(
        r"= (.*?)"
        r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
        compiled.text,
    )
    assert not moved
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled.text)
    largest = [
        int(np.prod([int(n) for n in dims.split(",") if n]))
        for of in reduced
        for dims in re.findall(r"\[([\d,]*)\]", of)
    ]
    assert reduced and max(largest) <= 64  # amaxes, samples and whether all is finite


# Optax's contract for shardings in types (optax/_src/sharding_test.py)
# ------------------------------------------------

feedback = lambda *args, **options: optax.chain(
    optax.sgd(1.0), tcfp_jax.error_feedback(*args, **options)
)
TRANSFORMATIONS = {
    "adamw 8bit": (None, lambda: optim.adamw(1e-2, key=KEY)),
    "adamw bfloat16": (None, lambda: optim.adamw(1e-2, key=KEY, moments="bfloat16")),
    "adamw float32": (None, lambda: optim.adamw(1e-2, moments="float32")),
    "low_precision_moments": (
        None,
        lambda: optim.low_precision_moments(optax.adamw(1e-2), key=KEY),
    ),
    "error_feedback": (None, lambda: feedback("tcfp12")),
    "error_feedback float8": (
        None,
        lambda: feedback("tcfp12", error_dtype="float8_e5m2"),
    ),
    "error_feedback rows": (None, lambda: feedback("rowwise")),
    "error_feedback blocks": (None, lambda: feedback("blockwise")),
    "stored adamw bfloat16": (
        BOTH,
        lambda: optim.adamw(1e-2, key=KEY, moments="bfloat16"),
    ),
    "stored adamw 8bit": (BOTH, lambda: optim.adamw(1e-2, key=KEY)),
    "stored on_stored": (BOTH, lambda: optim.on_stored(optax.adamw(1e-2))),
    "stored on_stored 8bit": (
        BOTH,
        lambda: optim.on_stored(
            optim.low_precision_moments(optax.adamw(1e-2), key=KEY)
        ),
    ),
}


def types_of(function, *arguments):
    """Return the types of a function's results, with their shardings; nothing is
    compiled.
    """
    shapes = jax.eval_shape(function, *arguments)
    return jax.tree.map(jax.typeof, shapes)


def strings(types):
    return {
        jax.tree_util.keystr(path): str(kind)
        for path, kind in jax.tree_util.tree_flatten_with_path(types)[0]
    }


def matched(types, shardings):
    """Return whether types have the shardings that `state_shardings` returns."""
    pairs = zip(jax.tree.leaves(types), jax.tree.leaves(shardings), strict=True)
    return all(
        x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, s.spec), x.ndim)
        for x, s in pairs
    )


@pytest.mark.slow_except("error_feedback float8", "stored adamw 8bit")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_types_of_states_are_those_of_the_contract(name):
    store_by, make = TRANSFORMATIONS[name]
    tx = make()
    mesh = mesh_of(4, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "a", "b"))
        kernel = jax.ShapeDtypeStruct((2, 512, 256), jnp.float32, sharding=sharding)
        grads = params = {"kernel": kernel}
        if store_by is not None:
            params = jax.eval_shape(lambda p: optim.store(p, store_by, key=KEY), params)
        before = jax.eval_shape(tx.init, params)

        def step(params, state):
            updates, state = tx.update(grads_of(grads), state, params)
            apply = optax.apply_updates if store_by is None else optim.apply_updates
            return apply(params, updates), state

        grads_of = lambda tree: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, out_sharding=leaf.sharding), tree
        )
        wanted = types_of(lambda *tree: tree, params, before)
        assert strings(types_of(step, params, before)) == strings(wanted)
        assert strings(types_of(jax.jit(tx.init), params)) == strings(wanted[1])
        assert matched(wanted, state_shardings({"kernel": sharding}, (params, before)))


@pytest.mark.parametrize("name", ["adamw 8bit", "low_precision_moments"])
def test_init_takes_shapes_alone(name):
    state = TRANSFORMATIONS[name][1]().init(
        {"kernel": jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)}
    )
    assert jax.tree.leaves(state)


@pytest.mark.slow_except("error_feedback")
@pytest.mark.parametrize(
    "name", ["adamw 8bit", "low_precision_moments", "error_feedback"]
)
def test_steps_without_a_jit_under_explicit_axes(name):
    tx = TRANSFORMATIONS[name][1]()
    mesh = mesh_of(2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        params = {
            "kernel": jnp.zeros(
                (2, 64, 128), out_sharding=NamedSharding(mesh, P(None, "a"))
            )
        }
        before = tx.init(params)
        _, after = tx.update(params, before, params)
        assert jax.tree.map(jax.typeof, before) == jax.tree.map(jax.typeof, after)


LAID = [
    (Layout((0,), (1,)), (2, 32, 64), P(None, "a", "b")),  # a stack
    (Layout((0,), (1, 2)), (32, 4, 8), P("a", "b")),
    (Layout((1,), (0,)), (64, 32), P("b", "a")),  # stored transposed
]
READS = {
    "product": lambda w, x: tcfp_jax.matmul(
        x, w, recipe="tcfp12_single", out_sharding=P("a", None)
    ),
    "floats": lambda w, x: tcfp_jax.dequantize(w),
    "matrix": lambda w, x: w.dequantize(),
}


# `matmul` multiplies matrices; layers reshape other kernels for it.
@pytest.mark.slow_except(
    "layout0-shape0-spec0-floats",
    "layout3-shape3-spec3-matrix",
    "layout4-shape4-spec4-product",
)
@pytest.mark.parametrize(
    ("layout", "shape", "spec", "name"),
    [
        (*laid, name)
        for laid in LAID
        for name in READS
        if name != "product" or len(laid[1]) == 2
    ],
)
def test_gradients_of_stored_weights_lie_as_the_weights(layout, shape, spec, name):
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    weights = {"w": Weight(tcfp_jax.recipe("tcfp12_single"), layout)}
    with jax.set_mesh(mesh):
        kernel = jax.device_put(
            filled(jax.ShapeDtypeStruct(shape, jnp.float32)), NamedSharding(mesh, spec)
        )
        x = jnp.ones((4, 32), out_sharding=NamedSharding(mesh, P("a")))
        params = jax.jit(lambda w: tcfp_jax.store({"w": w}, weights, key=KEY))(kernel)
        grad = tcfp_jax.grad(
            lambda params, x: jnp.sum(READS[name](params["w"], x) ** 2)
        )
        # one by one is many small programs
        for call in (jax.jit(grad), *([grad] if name == "matrix" else [])):
            assert (
                jax.typeof(call(params, x)["w"]).sharding.spec
                == jax.typeof(kernel).sharding.spec
            )


# Mistakes
# --------------------------------------------------------------------------------------


def test_mistakes():
    kernel = {"kernel": jax.ShapeDtypeStruct((64, 320), jnp.float32)}
    state = jax.eval_shape(optax.adam(0.1).init, kernel)
    with pytest.raises(
        ValueError,
        match=r"kernel: axis 0 of \[64, 320\] has 64 values, which 3 devices of 'a'",
    ):
        state_shardings(on(AbstractMesh((3,), ("a",)), {"kernel": P("a")}), state)
    with pytest.raises(
        ValueError,
        match=r"P\(None, None, 'a'\) describes 3 axes, but the array is \[64, 320\]",
    ):
        state_shardings(on(FLAT, {"kernel": P(None, None, "a")}), state)
    with pytest.raises(
        TypeError, match=r"the sharding of kernel is .*NamedSharding\(mesh, spec\)"
    ):
        state_shardings({"kernel": P("a")}, state)
    with pytest.raises(
        ValueError,
        match=(
            r"0/mu/kernel \[64, 320\] belongs to none of the 1 parameters, such as"
            r" \['w'"
        ),
    ):
        state_shardings(on(FLAT, {"w": P("a")}), state)
    with pytest.raises(ValueError, match=r"params_shardings is empty"):
        state_shardings({}, state)
    two = {
        "kernel": NamedSharding(FLAT, P()),
        "w": NamedSharding(AbstractMesh((2,), ("a",)), P()),
    }
    with pytest.raises(ValueError, match=r"a state lies on one mesh"):
        state_shardings(two, state)
    params = jax.eval_shape(stored, {"kernel": jnp.ones((64, 512))})
    other = {
        "kernel": jax.ShapeDtypeStruct(
            (32, 512), jnp.float32, sharding=NamedSharding(FLAT, P("a"))
        )
    }
    with pytest.raises(
        ValueError,
        match=r"kernel is \[32, 512\] by its sharding, but \(64, 512\) is stored",
    ):
        state_shardings(other, params)
    with pytest.raises(ValueError, match="nope"):  # JAX's own
        on(FLAT, {"kernel": P("nope")})
    split = Layout((0,), (1, 2))
    params = jax.eval_shape(
        lambda p: optim.store(p, {"w": Weight(BOTH, split)}, key=KEY),
        {"w": jnp.ones((64, 4, 128))},
    )
    with pytest.raises(
        ValueError,
        match=(
            r"w \[64, 4, 128\]: its axes \[1, 2\] are stored as one, and 'b' splits"
            r" axis"
        ),
    ):
        state_shardings(on(FLAT, {"w": P("a", None, "b")}), params)


CUT = {
    "adamw": (
        lambda: optim.adamw(0.1, key=KEY),
        (64, 320),
        r"each of the 4 devices of 'b' has 80 of its 320 values",
    ),
    "low precision": (
        lambda: optim.low_precision_moments(optax.adam(0.1), key=KEY),
        (64, 320),
        r"blocks of 128 values along axis 1",
    ),
    "blocks of weights": (
        lambda: tcfp_jax.error_feedback("blockwise"),
        (512, 256),
        r"blocks of 128 .* 64 of its 256 values.*recipe with",
    ),
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_blocks_cut_by_a_shard_raise_where_that_is_known(name, kind):
    make, shape, message = CUT[name]
    tx, mesh = make(), mesh_of(2, 4, axis_type=kind)
    specs = {"up": {"kernel": P("a", "b")}}
    message = rf"up/kernel.*{message}"
    with jax.set_mesh(mesh):
        params = {
            "up": {
                "kernel": jax.device_put(
                    jnp.zeros(shape), NamedSharding(mesh, specs["up"]["kernel"])
                )
            }
        }
        with pytest.raises(ValueError, match=message):
            tx.init(params)  # concrete
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(tx.init, params)
    state = jax.eval_shape(
        tx.init, {"up": {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}}
    )
    with pytest.raises(ValueError, match=message):
        state_shardings(on(mesh, specs), state)


def test_store_names_a_weight_whose_blocks_are_cut():
    mesh = mesh_of(8)
    recipe = tcfp_jax.recipe(
        "tcfp12_single", scaling=tcfp_jax.recipe("blockwise").scaling
    )
    kernel = jax.device_put(jnp.zeros((256, 256)), NamedSharding(mesh, P("a")))
    with pytest.raises(
        ValueError,
        match=(
            r"up/kernel: blocks of 128 .* each of the 8 devices of 'a' has 32 of"
            r" its 256"
        ),
    ):
        optim.store({"up": {"kernel": kernel}}, recipe, key=KEY)


def test_what_is_kept_transposed_alone_may_be_cut_as_its_blocks_lie():
    """Codes of FP4 are `[n, k]`, so that k is cut in blocks of 16 and n anywhere; and
    the message says how far.
    """
    mesh, tx = mesh_of(8), feedback("nvfp4")
    place = lambda spec: {
        "up": {"kernel": jax.device_put(jnp.zeros((64, 64)), NamedSharding(mesh, spec))}
    }
    assert jax.tree.leaves(tx.init(place(P(None, "a"))))
    with pytest.raises(
        ValueError,
        match=r"blocks of 16 values .* has 8 of its 64 values; split it over 4 at most",
    ):
        tx.init(place(P("a")))
