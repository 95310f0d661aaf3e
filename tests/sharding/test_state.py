"""Shardings of states follow from the parameters' shardings, steps keep them, and bits
do not depend on the mesh.
"""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax import optim
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.layout import Layout, Weight
from tests.compile_for_h200 import GATHERS, compile_for, h200s, needs_plugin
from tests.helpers import (
    filled,
    mesh_of,
    parametrize,
    placed,
    refusals,
    same_bits,
    shapes_of,
    slow_except,
    step_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
BOTH = tcfp_jax.recipe("tcfp12_single", copies="both")
SHAPES = shapes_of(
    {
        "up": {"kernel": (64, 512), "bias": (512,)},
        "down": {"kernel": (512, 64)},
        "stack": {"kernel": (2, 32, 512)},
    }
)
SPECS = {
    "up": {"kernel": P("a", "b"), "bias": P("b")},
    "down": {"kernel": P(("b", "a"))},
    "stack": {"kernel": P(None, "a", "b")},
}
FLAT = AbstractMesh((4, 2), ("a", "b"))


def on(mesh, specs=SPECS):
    at = partial(NamedSharding, mesh)
    return jax.tree.map(at, specs, is_leaf=lambda node: isinstance(node, P))


def specs_of(shardings):
    """The spec of each array by its path."""
    found = jax.tree_util.tree_flatten_with_path(shardings)[0]
    return {jax.tree_util.keystr(path): leaf.spec for path, leaf in found}


def stored(params, weights=BOTH):
    return optim.store(params, weights, key=KEY)


def state_of(tx):
    """A function from parameters to (parameters, the transformation's state)."""
    return lambda params: (params, tx.init(params))


ADAMW = optim.adamw(1e-2, weight_decay=0.1, key=KEY)
FEEDBACK = optax.chain(
    optim.low_precision_moments(optax.adamw(1e-2), key=KEY),
    tcfp_jax.error_feedback("tcfp12", error_dtype="float8_e5m2"),
)


# Shardings
# --------------------------------------------------------------------------------------
def floats(params):
    return params


def check(specs, params, init, expected):
    """Return shardings, of which these paths have the expected specs."""
    shardings = state_shardings(on(FLAT, specs), params, init)
    found = specs_of(shardings)
    assert {path: found[path] for path in expected} == expected
    return shardings


def test_stored_parameters_and_their_moments():
    params = jax.eval_shape(stored, SHAPES)
    up = "['up']['kernel']"
    stack = "['stack']['kernel']"
    down = "['down']['kernel']"
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
    }
    shardings = check(SPECS, params, state_of(ADAMW), expected)
    shapes = jax.eval_shape(state_of(ADAMW), params)
    assert jax.tree.structure(shardings) == jax.tree.structure(shapes)
    # Shardings of stored parameters serve as those of their kernels.
    assert state_shardings(shardings[0], params, ADAMW.init) == shardings[1]


def test_errors_and_weights_of_error_feedback():
    up = "['up']['kernel']"
    stack = "['stack']['kernel']"
    expected = {
        f"[0].inner[0].mu{up}": P("a", "b"),
        f"[0].scales['0']['nu']{stack}": P(None, "a", "b"),
        "[0].key": P(),
        f"[1].weights{up}.forward.lo": P("b", "a"),
        f"[1].weights{stack}.sample": P(),
        f"[1].scaled_errors{up}": P("a", "b"),
    }
    check(SPECS, SHAPES, FEEDBACK.init, expected)


def feedback(recipe):
    return tcfp_jax.error_feedback(tcfp_jax.recipe(recipe, copies="both"))


STATES = {
    "scales of rows": (
        feedback("rowwise"),
        {
            ".weights['kernel'].backward.scale": P("a"),
            ".weights['kernel'].forward.scale": P("b"),
        },
    ),
    "scales of blocks": (
        feedback("blockwise"),
        {
            ".weights['kernel'].backward.scale": P("a", "b"),
            ".weights['kernel'].forward.scale": P("b", "a"),
        },
    ),
    "adafactor": (
        optax.adafactor(1e-2),
        {
            "[0].v_row['kernel']": P("a"),
            "[0].v_col['kernel']": P("b"),
            "[0].v['kernel']": P(),
        },
    ),
    "sm3": (
        optax.sm3(0.1),
        {"[0].mu['kernel'][0]": P("a"), "[0].mu['kernel'][1]": P("b")},
    ),
    "MultiSteps": (
        optax.MultiSteps(optax.adam(0.1), 2),
        {".acc_grads['kernel']": P("a", "b")},
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(0.1),
        {".inner_state[0].mu['kernel']": P("a", "b")},
    ),
    # Its memory has no sharding in optax's own init.
    "lbfgs": (
        optax.lbfgs(0.1, memory_size=3, linesearch=None),
        {"[0].params['kernel']": P("a", "b"), "[0].diff_params_memory['kernel']": P()},
    ),
}


MATRIX = shapes_of({"kernel": (512, 1024)})
SPLIT = {"kernel": P("a", "b")}


@parametrize("name", STATES)
def test_states_are_sharded_as_their_init_makes_them(name):
    tx, expected = STATES[name]
    check(SPLIT, MATRIX, tx.init, expected)


HEADS = [
    (Layout((0,), (1, 2)), (64, 4, 128), P("a", "b"), P("a", "b")),  # query
    (Layout((0, 1), (2,)), (4, 128, 256), P("a", None, "b"), P("a", "b")),  # out
    (Layout((1,), (0,)), (512, 256), P("a", "b"), P("a", "b")),  # a table as a head
    # experts, one scale each
    (Layout((1,), (2,), (0,)), (4, 64, 128), P("a", "b"), P("a", "b", None)),
    # outputs around the input
    (Layout((1,), (0, 2)), (4, 256, 128), P("a", "b"), P("a", "b")),
]


@parametrize("layout, shape, spec, matrix", HEADS, ids=str)
def test_kernels_of_many_axes(layout, shape, spec, matrix):
    weights = {"w": Weight(BOTH, layout)}
    store = partial(stored, weights=weights)
    params = jax.eval_shape(store, shapes_of({"w": shape}))
    shardings = state_shardings(on(FLAT, {"w": spec}), params, state_of(ADAMW))
    found = specs_of(shardings)
    *stack, first, second = matrix
    for path, wanted in (
        ("[0]['w'].forward.values", P(*stack, second, first)),
        ("[0]['w'].backward.values", matrix),
        ("[1].mu['w']", matrix),
    ):
        own = NamedSharding(FLAT, found[path])
        assert own.is_equivalent_to(NamedSharding(FLAT, wanted), len(matrix))
    assert found["[0]['w'].backward.scale"] == P(*stack)
    assert found["[0]['w'].training.amax"] == P(*stack)


# Frameworks
# --------------------------------------------------------------------------------------


@parametrize("logical", [False, True], ids=["mesh names", "logical names"])
def test_metadata_of_linen(logical):
    mesh = mesh_of(4, 2)
    boxed = nn.with_logical_partitioning if logical else nn.with_partitioning
    names = ("embed", "mlp") if logical else ("a", "b")
    model = nn.Dense(512, kernel_init=boxed(nn.initializers.lecun_normal(), names))
    params = jax.eval_shape(model.init, KEY, jnp.ones((1, 64)))["params"]
    if logical:
        rules = (("embed", "a"), ("mlp", "b"))
        specs = nn.get_partition_spec(params)
        shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    else:
        shardings = nn.get_sharding(params, mesh)
    for tree, value in ((params, ".value"), (nn.unbox(params), "")):
        tree = jax.eval_shape(stored, tree)
        found = specs_of(state_shardings(shardings, tree, state_of(ADAMW)))
        assert found[f"[0]['kernel']{value}.forward.values"] == P("b", "a")
        assert found[f"[1].mu['kernel']{value}"] == P("a", "b")
        assert found["[1].nu_scale['kernel']"] == P("a", "b")


def test_metadata_of_nnx():
    mesh = mesh_of(4, 2)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", "b"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(64, 512, kernel_init=init, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    shardings = nnx.get_named_sharding(params, mesh)
    found = specs_of(state_shardings(shardings, params, FEEDBACK.init))
    assert found["[0].inner[0].mu['kernel'].value"] == P("a", "b")
    assert found["[0].scales['0']['mu']['kernel']"] == P("a", "b")
    assert found["[1].scaled_errors['kernel'].value"] == P("a", "b")
    assert found["[1].weights['kernel'].forward.values"] == P("b", "a")


# Steps
# --------------------------------------------------------------------------------------


def kind_of(kind):
    """(what makes the parameters, the transformation)."""
    return (floats, FEEDBACK) if kind == "error feedback" else (stored, ADAMW)


KINDS = ["stored", "error feedback"]
# Four devices and two processes of them: tests/optim/test_processes.py.
MESHES = [
    ("stored", (2, 1)),
    *((kind, sizes) for kind in KINDS for sizes in ((8, 1), (4, 2), (2, 4))),
]


def part(tree):
    """A float leaf, a weight that XLA updates, and a stack that the fused pass does."""
    return {**tree, "up": {"bias": tree["up"]["bias"]}}


def places_of(kind, mesh):
    make, tx = kind_of(kind)
    params = jax.eval_shape(make, part(SHAPES))
    return state_shardings(on(mesh, part(SPECS)), params, state_of(tx))


@functools.cache
def trained(kind, sizes):
    """(parameters and state after two steps from equal gradients, their shardings)."""
    mesh = mesh_of(*sizes)
    make, tx = kind_of(kind)
    shardings = on(mesh, part(SPECS))
    params = jax.device_put(part(filled(SHAPES)), shardings)
    grads = jax.device_put(part(filled(SHAPES, seed=1)), shardings)
    places = places_of(kind, mesh)
    begin = jax.jit(lambda params: state_of(tx)(make(params)), out_shardings=places)
    first = begin(params)
    # no out_shardings: the step itself keeps them
    run = jax.jit(step_of(tx), donate_argnums=(1, 2))
    return run(grads, *run(grads, *first)), places


@slow_except("stored-(4, 2)")
@pytest.mark.optimized("slow")
@parametrize("kind, sizes", MESHES, ids=str)
def test_a_step_keeps_shardings_and_no_mesh_changes_a_bit(kind, sizes):
    after, shardings = trained(kind, sizes)
    leaves = jax.tree_util.tree_flatten_with_path(after)[0]
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(shardings), strict=True):
        name = jax.tree_util.keystr(path)
        is_kept = leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
        assert is_kept, (name, leaf.sharding, wanted)
        # Every matrix, and with it its scales, is in as many parts as the mesh can
        # make.
        if leaf.ndim >= 2 and leaf.size > 1024:
            assert not leaf.is_fully_replicated, name
    alone, _ = trained(kind, (1, 1))
    assert same_bits(alone, after)


def shape_at(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@slow_except("stored")
@pytest.mark.optimized("slow")
@parametrize("kind", KINDS)
def test_a_state_restores_on_other_meshes(kind, tmp_path):
    saved, _ = trained(kind, (4, 2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", saved)
    for sizes in ((2, 4), (8, 1), (1, 1)):
        shardings = places_of(kind, mesh_of(*sizes))
        with ocp.StandardCheckpointer() as checkpointer:
            into = jax.tree.map(shape_at, saved, shardings)
            restored = checkpointer.restore(tmp_path / "run", into)
        assert same_bits(saved, restored)
        is_placed = jax.tree.map(lambda x, s: x.sharding == s, restored, shardings)
        assert all(jax.tree.leaves(is_placed))


@needs_plugin
@pytest.mark.optimized
@slow_except("stored")
@parametrize("kind", KINDS)
def test_no_transposed_copy_crosses_the_mesh_of_h200s(kind):
    mesh = h200s(4, 2)
    make, tx = kind_of(kind)
    shapes = shapes_of(
        {"up": {"kernel": (1024, 2048)}, "down": {"kernel": (2048, 1024)}}
    )
    specs = {"up": {"kernel": P("a", "b")}, "down": {"kernel": P("b", "a")}}
    shardings = on(mesh, specs)
    grads = jax.tree.map(shape_at, shapes, shardings)
    params = jax.eval_shape(make, shapes)
    tree = jax.eval_shape(state_of(tx), params)
    places = state_shardings(shardings, params, state_of(tx))
    tree = jax.tree.map(shape_at, tree, places)
    compiled = compile_for(mesh, step_of(tx), grads, *tree, donate_argnums=(1, 2))
    for operation in (*GATHERS, "reduce-scatter"):
        assert not compiled.results(operation)
    reduced = compiled.results("all-reduce")
    sizes = []
    for shape in re.findall(r"\[([\d,]*)\]", " ".join(reduced)):
        sizes.append(np.prod([int(n) for n in shape.split(",") if n]))
    assert reduced
    assert max(sizes) <= 64  # amaxes, samples and whether all is finite


# Mistakes
# --------------------------------------------------------------------------------------

KERNEL = shapes_of({"kernel": (64, 320)})
QUERY = {"w": Weight(BOTH, Layout((0,), (1, 2)))}
QUERY_FLOATS = shapes_of({"w": (64, 4, 128)})
SPLIT_QUERY = on(FLAT, {"w": P("a", None, "b")})


def of(shardings, params=KERNEL, *init):
    return lambda: state_shardings(shardings, params, *init)


def kernel_at(mesh, *spec):
    return of({"kernel": NamedSharding(mesh, P(*spec))})


def stored_query():
    store = partial(stored, weights=QUERY)
    state_shardings(SPLIT_QUERY, jax.eval_shape(store, QUERY_FLOATS))


CUT = {"up": {"kernel": jax.ShapeDtypeStruct((256, 256), jnp.float32)}}
BLOCKWISE = tcfp_jax.recipe("tcfp12_blockwise")


def cut_when_stored():
    kernel = placed(jnp.zeros((256, 256)), mesh_of(8), "a")
    stored({"up": {"kernel": kernel}}, BLOCKWISE)


def cut_by_sharding():
    shardings = on(mesh_of(8), {"up": {"kernel": P("a")}})
    store = partial(stored, weights=BLOCKWISE)
    state_shardings(shardings, jax.eval_shape(store, CUT))


test_mistakes = refusals(
    {
        ValueError: {
            r"kernel: axis 0 of \[64, 320\] has 64 values, which 3 devices of 'a'": (
                kernel_at(AbstractMesh((3,), ("a",)), "a")
            ),
            r"P\(None, None, 'a'\) describes 3 axes, but the array is \[64, 320\]": (
                kernel_at(FLAT, None, None, "a")
            ),
            r"0/count has no sharding among the 1 .* such as kernel.*tx.init\)": of(
                on(FLAT, {"kernel": P("a")}),
                jax.eval_shape(optax.adam(0.1).init, KERNEL),
            ),
            "params_shardings is empty": of({}),
            "a state is on one mesh": of(
                {
                    "kernel": NamedSharding(FLAT, P()),
                    "w": NamedSharding(AbstractMesh((2,), ("a",)), P()),
                }
            ),
            r"w \[64, 4, 128\]: its axes \[1, 2\] are stored as one, and 'b'": (
                stored_query
            ),
            r"w \[64, 4, 128\]: P\('a', None, 'b'\) splits an axis that the stored": of(
                SPLIT_QUERY, QUERY_FLOATS, tcfp_jax.error_feedback(QUERY).init
            ),
            "up/kernel: blocks of 128 .* each of the 8 devices .* has 32 of its 256": (
                cut_when_stored
            ),
            "up/kernel: blocks of 128 .* has 32 of its 256": cut_by_sharding,
        },
        TypeError: {
            r"the sharding of kernel is .*NamedSharding\(mesh, spec\)": of(
                {"kernel": P("a")}
            ),
        },
    }
)
