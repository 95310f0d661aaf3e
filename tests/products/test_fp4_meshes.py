"""FP4 weights on meshes: where codes lie, steps, and parts of blocks."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax import recipe
from tcfp_jax.products import fp4_matmul
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.stored import Stored
from tests.fp4_cases import lost, rounded, values_of
from tests.fp4_products import (
    RECIPES,
    SQUARES,
    K,
    N,
    W,
    X,
    drawn,
    in_nvfp4,
    multiply,
    packed_by,
    quick,
)
from tests.helpers import (
    assert_near,
    mesh_of,
    parametrize,
    putting,
    refused,
    slow_except,
    with_pull,
)


def placed_codes(recipe, shape, spec):
    """The first half of a weight of `error_feedback`, as shardings."""
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
    params = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
    place = {"kernel": NamedSharding(mesh, spec)}
    found = state_shardings(place, params, tcfp_jax.error_feedback(recipe).init)
    return found.weights["kernel"].forward


def test_a_state_of_codes_lies_as_its_kernel_does():
    found = placed_codes("nvfp4", (K, N), P("fsdp", "tensor"))
    assert found.values.spec == found.scale.spec == P("tensor", "fsdp")
    assert found.outer.spec == P()
    odd = placed_codes("nvfp4", (33, N), P(None, "tensor"))
    assert odd.values.spec == P("tensor")


@parametrize(
    "recipe, shape, spec, cut",
    [
        ("mxfp4", (32, N), P("fsdp"), "32 values along axis 1 of [32, 32]"),
        (SQUARES, (K, 16), P(None, "tensor"), "16 values along axis 0 of [16, 64]"),
    ],
    ids=["mxfp4", "squares"],
)
def test_a_mesh_cuts_no_block_of_codes(recipe, shape, spec, cut):
    message = f"kernel: blocks of {cut} are cut"
    with refused(re.escape(message)):
        placed_codes(recipe, shape, spec)


@pytest.fixture(scope="module")
def stepped():
    """(a transformation, its first state, a step, x, the step on one device)."""
    tx = tcfp_jax.error_feedback("nvfp4")

    def step(params, state, x):
        stored = tcfp_jax.layer_state(state)["kernel"]

        def loss(p, x):
            w = p["kernel"]
            y = tcfp_jax.matmul(x, w, recipe="nvfp4", quantized=stored)
            return jnp.sum(jnp.sin(y))

        dw, dx = jax.grad(loss, (0, 1))(params, x)
        updates = jax.tree.map(lambda g: -0.1 * g, dw)
        return dx, *tx.update(updates, state, params)

    x = X.reshape(-1, K)[:4]
    state = quick(tx.init)({"kernel": W})
    return tx, state, step, x, quick(step)({"kernel": W}, state, x)


@slow_except("explicit")
@parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_a_step_on_two_axes_has_the_bits_of_one_device(kind, stepped):
    mesh = mesh_of(2, 2, names=("fsdp", "tensor"), axis_type=kind)
    tx, state, step, x, alone = stepped
    put = putting(mesh)
    with jax.set_mesh(mesh):
        params = {"kernel": put(W, "fsdp", "tensor")}
        where = {"kernel": NamedSharding(mesh, P("fsdp", "tensor"))}
        places = state_shardings(where, {"kernel": W}, tx.init)
        split = quick(step)(params, jax.device_put(state, places), put(x, "fsdp"))
    assert_near(split[:2], alone[:2], 1e-5)
    found, expected = (
        tcfp_jax.layer_state(made[2])["kernel"].forward for made in (split, alone)
    )
    assert_near(found.dequantize(), expected.dequantize(), 0.6)
    assert np.mean(np.asarray(found.values) == np.asarray(expected.values)) > 0.98


@slow_except("mxfp4-64-bfloat16-False")
@parametrize(
    "name, k, activation, whole",
    [
        ("nvfp4", 64, "bfloat16", False),
        ("mxfp4", 128, "bfloat16", False),
        ("mxfp4", 64, "bfloat16", False),
        ("nvfp4", 128, "bfloat16", True),
        ("nvfp4", 128, "float8_e4m3fn", True),
        ("nvfp4", 128, "float4_e2m1fn", True),
    ],
)
def test_devices_with_parts_of_blocks_gather_the_contraction(
    name, k, activation, whole
):
    """Eight devices have parts of k; only where those are whole blocks does each
    multiply its own.
    """
    mesh = mesh_of(8, axis_type=AxisType.Explicit)
    x = drawn(4, k)
    w = drawn(k, N, seed=1)
    put = putting(mesh)
    chosen = dict(recipe=recipe(name, activation=activation), out_sharding=P())

    @quick
    def run(x, w, packed):
        y, pull = with_pull(fp4_matmul, x, w, **chosen)
        return y, fp4_matmul(x, packed, **chosen), *pull(jnp.ones_like(y))

    with jax.set_mesh(mesh):
        codes = packed_by(put(w, "a"), RECIPES[name]).forward
        axis = "a" if whole else None
        for array in (codes.values, codes.scale):
            assert array.sharding.spec[1] == axis
        # Codes that someone else sharded may be cut where scales cannot.
        cut = Stored.of(dataclasses.replace(codes, values=put(codes.values, None, "a")))
        split = run(put(x, None, "a"), put(w, "a"), cut)
    exact = values_of(codes).T
    ones = np.ones((4, N))
    assert lost(w, exact) < 0.15
    read = in_nvfp4(x) if "float4" in activation else rounded(x, activation)
    y = read @ exact
    assert_near(split, (y, y, ones @ exact.T, rounded(x).T @ ones), 2e-5)


@slow_except("nvfp4")
@parametrize("name", ["nvfp4", "mxfp4"])
def test_types_say_the_mesh_where_none_is_set(name):
    x = drawn(4, K)
    put = putting(mesh_of(2, 2, axis_type=AxisType.Explicit))
    w = put(W, None, "b")
    y = multiply(put(x, "a"), w, recipe=name)
    codes = packed_by(w, RECIPES[name]).forward
    assert jax.typeof(y).sharding.spec == P("a", "b")
    assert codes.values.sharding.spec == codes.scale.sharding.spec == P("b", None)
    assert_near(y, rounded(x) @ values_of(codes).T, 2e-5)
