"""`fsdp` splits the largest axis that stored weights, their moments and their scales
allow.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.sharding import fsdp, shardings_of, state_shardings
from tests.helpers import mesh_of, parametrize, refused

MESH = AbstractMesh((8,), ("fsdp",))
KEY = jax.random.key(0)
ALL = ("linear", "small", "head")
WHOLE = P()
FIRST = P("fsdp")
LAST = P(None, None, "fsdp")


def stored_attention(heads, width, recipe="tcfp12_single"):
    """Shapes of attention's stored parameters."""
    x = jax.ShapeDtypeStruct((8, 16, width), jnp.float32)
    model = convert_to_tcfp(
        nn.MultiHeadDotProductAttention(heads, use_bias=False), recipe, x, include=ALL
    )
    floats = jax.eval_shape(model.init, KEY, x)["params"]
    weights = find_weights(model)
    return jax.eval_shape(lambda p: tcfp_jax.store(p, weights, key=KEY), floats)


@parametrize(
    "heads, width, query, out",
    [
        # [4, 16, 64]: 4 heads, parts of heads are not contiguous, 8 of 64 values cut a
        # block
        (4, 64, FIRST, WHOLE),
        (4, 1024, FIRST, LAST),  # [4, 256, 1024]: 128 values of a row on each device
        (32, 1024, FIRST, LAST),
        (16, 2048, FIRST, LAST),
    ],
)
def test_kernels_of_attention(heads, width, query, out):
    params = stored_attention(heads, width)
    found = fsdp(params, MESH)
    assert found["query"]["kernel"].spec == found["key"]["kernel"].spec == query
    assert found["out"]["kernel"].spec == out
    # raises for a placement that is not legal
    assert state_shardings(found, params, tcfp_jax.optim.adamw(1e-3, key=KEY).init)
    arrays = state_shardings(found, params)["out"]["kernel"].rows
    assert arrays.values.spec == (WHOLE if out == WHOLE else P(None, "fsdp"))


def test_heads_are_split_if_nothing_larger_may_be():
    # [32, 16, 512]: 64 values of a row would cut blocks of moments
    params = stored_attention(32, 512)
    assert fsdp(params, MESH)["out"]["kernel"].spec == FIRST


def stored(*shape, recipe="tcfp12_single"):
    params = {"kernel": jnp.ones(shape)}
    return jax.eval_shape(lambda: tcfp_jax.store(params, recipe, key=KEY))


CASES = {
    "a table": (jnp.ones((32, 48)), P(None, "fsdp")),
    "no divisor": (jnp.ones((6, 9)), WHOLE),
    "a vector": (jnp.ones(64), WHOLE),
    "a number": (jnp.int32(0), WHOLE),
    # 16 layers of a scan stay together
    "layers": (stored(16, 8, 8), P(None, "fsdp")),
    "blocks": (stored(512, 1024, recipe="tcfp12_blockwise"), P(None, "fsdp")),
    # tiles of 128 by 128
    "cut blocks": (stored(512, 512, recipe="tcfp12_blockwise"), WHOLE),
}


@parametrize("name", CASES)
def test_the_largest_axis_that_may_be_split_is(name):
    params, spec = CASES[name]
    (found,) = jax.tree.leaves(fsdp(params, MESH))
    assert found.spec == spec


def test_an_axis_that_the_mesh_lacks_is_named():
    with refused(r"axis='data'.*\['fsdp'\]"):
        fsdp({"table": jnp.ones((32, 48))}, MESH, "data")


def test_placed_parameters_tell_where_they_lie():
    params = {"kernel": jnp.ones((64, 256)), "bias": jnp.ones(8)}
    stored = tcfp_jax.store(params, "tcfp12_single", key=KEY)
    assert shardings_of(stored) is None
    mesh = mesh_of(8, names=("fsdp",))
    shardings = state_shardings(fsdp(stored, mesh), stored)
    assert shardings_of(jax.device_put(stored, shardings)) == shardings
