"""Temporary memory of Llama's blocks and steps, compiled for an H200: recipes never
need more than BF16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import llama as benchmark
from benchmarks import timing
from models.nets import llama
from models.nets.shapes import LlamaConfig
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import h200s
from tests.helpers import parametrize, slow_except

REASON = h200.missing()
pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
# All matrices of one shape, so that few kernels are compiled.
SIZE = LlamaConfig(
    layers=2,
    width=1024,
    heads=8,
    kv_heads=8,
    hidden=1024,
    context=2048,
    vocabulary=8192,
    remat="products",
)
TOKENS = (8, 2048)
FEW = 2**16  # bytes of scales, keys and sums, which BF16 does not have


class CaughtError(Exception):
    """Ends a benchmark before it compiles."""


@jax.custom_vjp
def attention(q, k, v):
    """Read, write and keep the same arrays as flash attention; cuDNN's does not compile
    without a device.
    """
    return _attend(q, k, v)[0]


def _attend(q, k, v):
    q, k, v = lax.optimization_barrier((q, k, v))
    out = q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2)
    out, sums = lax.optimization_barrier((out, jnp.sum(q.astype(jnp.float32), axis=-1)))
    out, sums = checkpoint_name((out, sums), "attended")
    return out, (q, k, v, out, sums)


def _attend_backward(kept, g):
    q, k, v, out, sums, g = lax.optimization_barrier((*kept, g))
    dk = (
        (g * sums[..., None].astype(g.dtype))
        .reshape(*k.shape[:3], -1, k.shape[3])
        .sum(3)
    )
    return lax.optimization_barrier((g + out + q, dk + k, dk + v))


attention.defvjp(_attend, _attend_backward)


@pytest.fixture
def arena(monkeypatch):
    """Return the temporary bytes of a candidate of `benchmarks.llama`, from shapes
    alone.
    """
    caught = {}

    def catch(jitted, *args):
        caught["program"] = jitted, args
        raise CaughtError

    monkeypatch.setattr(
        llama, "causal_attention", lambda q, k, v, how, **_: attention(q, k, v)
    )
    monkeypatch.setattr(timing, "compile_timed", catch)
    mesh = h200s(1)

    def bytes_of(part, name, size):
        config = benchmark.Config(
            size, size, TOKENS, TOKENS, (name,), include=("linear", "small")
        )
        # In tracing and lowering, because both choose kernels for the device.
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            jax.numpy_dtype_promotion("standard"),
        ):
            with pytest.raises(CaughtError):
                benchmark.MAKE[part](config, name)
            jitted, args = caught["program"]
            whole = NamedSharding(mesh, PartitionSpec())
            args = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=whole
                ),
                args,
            )
            return (
                jitted.lower(*args)
                .compile(compiler_options=h200.OPTIONS)
                .memory_analysis()
                .temp_size_in_bytes
            )

    return bytes_of


@slow_except("step-stored", "block-tcfp12_fast")
@parametrize(
    "part, name",
    [("step", "tensorwise"), ("step", "stored"), ("block", "tcfp12_fast")],
)
def test_no_recipe_needs_a_larger_arena_than_bf16(arena, part, name):
    size = SIZE if part == "step" else dataclasses.replace(SIZE, remat="none")
    plain, found = (arena(part, which, size) for which in ("bf16", name))
    assert found <= plain + FEW
