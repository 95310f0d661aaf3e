"""`fsdp` splits the largest axis that stored weights, their moments and their scales
allow.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.sharding import fsdp, shardings_of, state_shardings

MESH = AbstractMesh((8,), ("fsdp",))
KEY = jax.random.key(0)
ALL = ("linear", "small", "head")
WHOLE, FIRST, LAST = P(), P("fsdp"), P(None, None, "fsdp")


def stored_attention(heads, width, recipe="tcfp12_single"):
    """Shapes of attention's stored parameters."""
    x = jax.ShapeDtypeStruct((8, 16, width), jnp.float32)
    model = convert_to_tcfp(
        nn.MultiHeadDotProductAttention(heads, use_bias=False), recipe, x, include=ALL
    )
    floats = jax.eval_shape(model.init, KEY, x)["params"]
    make = lambda floats: tcfp_jax.store(floats, find_weights(model), key=KEY)
    return jax.eval_shape(make, floats)


@pytest.mark.parametrize(
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


def test_heads_that_the_mesh_divides_are_split_if_nothing_larger_may_be():
    # [32, 16, 512]: 64 values of a row would cut blocks of moments
    params = stored_attention(32, 512)
    assert fsdp(params, MESH)["out"]["kernel"].spec == FIRST


def test_float_parameters_and_stacks():
    params = {
        "table": jnp.ones((32, 48)),
        "odd": jnp.ones((6, 9)),
        "scale": jnp.ones(64),
        "count": jnp.int32(0),
    }
    found = {name: sharding.spec for name, sharding in fsdp(params, MESH).items()}
    assert found == {
        "table": P(None, "fsdp"),
        "odd": WHOLE,
        "scale": WHOLE,
        "count": WHOLE,
    }
    layers = jax.eval_shape(
        lambda: tcfp_jax.store(
            {"kernel": jnp.ones((16, 8, 8))}, "tcfp12_single", key=KEY
        )
    )
    # 16 layers of a scan stay together
    assert fsdp(layers, MESH)["kernel"].spec == P(None, "fsdp")
    with pytest.raises(ValueError, match=r"axis='data'.*\['fsdp'\]"):
        fsdp(params, MESH, "data")


def test_blocks_of_weights_are_not_cut():
    weights = lambda k, n: jax.eval_shape(
        lambda: tcfp_jax.store(
            {"kernel": jnp.ones((k, n))}, "tcfp12_blockwise", key=KEY
        )
    )
    assert fsdp(weights(512, 1024), MESH)["kernel"].spec == P(None, "fsdp")
    assert fsdp(weights(512, 512), MESH)["kernel"].spec == WHOLE  # tiles of 128 by 128


def test_placed_parameters_tell_where_they_lie():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    stored = tcfp_jax.store(
        {"kernel": jnp.ones((64, 256)), "bias": jnp.ones(8)}, "tcfp12_single", key=KEY
    )
    assert shardings_of(stored) is None
    placed = jax.device_put(stored, state_shardings(fsdp(stored, mesh), stored))
    assert shardings_of(placed) == state_shardings(fsdp(stored, mesh), stored)
