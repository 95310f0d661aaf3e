"""Sums of weight gradients over devices: the dtype that is sent, and the distance from
a float32 sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

import tcfp_jax
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Operand
from tests.compile_for_h200 import compile_for, h200s, needs_plugin, on_once
from tests.helpers import drawn, mesh_of, parametrize, placed, refusals

E4M3 = jnp.float8_e4m3fn
K = 32
N = 64
TOKENS = 128
DEVICES = 4
# bfloat16 keeps 8 bits: a part is off by 2**-8 of itself, and so is each of d - 1 sums,
# or what is gathered.
ROUNDINGS = {
    ("float32", "scattered"): 2.0**-14,
    ("float32", "everywhere"): 2.0**-14,
    ("bfloat16", "scattered"): DEVICES,
    ("bfloat16", "everywhere"): DEVICES,
    ("bfloat16_parts", "scattered"): 1,
    ("bfloat16_parts", "everywhere"): 2,
}


@parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@parametrize("wire, handed", ROUNDINGS)
def test_sums_are_within_their_bound(wire, handed, kind):
    mesh = mesh_of(DEVICES, axis_type=kind)
    spec = P("a") if handed == "scattered" else P()
    one = jnp.float32(1)

    def product(a, b):
        return matmul(
            Operand(a, one),
            Operand(b, one),
            out_dtype=jnp.float32,
            wire=wire,
            out_sharding=spec if kind == AxisType.Explicit else None,
        )

    a = (30 * drawn(K, TOKENS)).astype(E4M3)
    b = (30 * drawn(N, TOKENS, seed=1)).astype(E4M3)
    with jax.set_mesh(mesh):
        run = jax.jit(product, out_shardings=NamedSharding(mesh, spec))
        got = np.asarray(run(*placed((a, b), mesh, None, "a")), np.float64)
    parts = [
        np.asarray(x, np.float64).reshape(-1, DEVICES, TOKENS // DEVICES)
        for x in (a, b)
    ]
    partial = np.einsum("kdt,ndt->dkn", *parts)
    bound = 2.0**-8 * 1.01 * ROUNDINGS[wire, handed] * np.abs(partial).sum(0)
    error = np.abs(got - partial.sum(0))
    assert np.all(error <= bound)
    assert wire == "float32" or error.max() > 0  # it is rounded


@parametrize("recipe", ["tcfp12", "tensorwise"])
def test_a_recipe_says_it(recipe):
    mesh = mesh_of(2)
    of_rows = NamedSharding(mesh, P("a"))

    def gradient(wire):
        asked = tcfp_jax.recipe(recipe, wire=wire)

        @functools.partial(jax.jit, out_shardings=of_rows)
        @jax.grad
        def step(w, x):
            return jnp.sum(tcfp_jax.matmul(x, w, recipe=asked) * jnp.arange(32.0))

        with jax.set_mesh(mesh):
            w, x = placed((drawn(64, 32, seed=1), drawn(32, 64)), mesh, "a")
            compiled = step.lower(w, x).compile()
            assert ("all-to-all" in compiled.as_text()) == (wire is not None)
            return np.asarray(compiled(w, x))

    found = gradient(None)
    atol = 2.0**-7 * np.abs(found).max()
    assert_allclose(found, gradient("bfloat16_parts"), atol=atol)


tensorwise = functools.partial(tcfp_jax.recipe, "tensorwise")
test_other_wires_are_refused = refusals(
    {
        ValueError: {
            "would add gradients in FP8": lambda: tensorwise(wire="float8_e5m2"),
            "wire='int8' is unknown": lambda: tensorwise(wire="int8"),
        },
    }
)
OPERATIONS = ("reduce-scatter", "all-to-all", "all-reduce", "all-gather")


@needs_plugin
@parametrize(
    "wire, operation, dtype",
    [
        ("float32", "reduce-scatter", "f32"),
        ("bfloat16", "reduce-scatter", "bf16"),
        ("bfloat16_parts", "all-to-all", "bf16"),
    ],
)
def test_compiled_for_h200s(wire, operation, dtype):
    mesh = h200s(8)
    a = on_once(mesh, (1024, 8192), E4M3, None, "a")
    b = on_once(mesh, (2048, 8192), E4M3, None, "a")
    product = functools.partial(
        matmul, out_dtype=jnp.float32, wire=wire, backend="mosaic"
    )
    of_rows = NamedSharding(mesh, P("a"))
    compiled = compile_for(mesh, product, a, b, out_shardings=of_rows)
    moved = {name: compiled.results(name) for name in OPERATIONS}
    assert [name for name in moved if moved[name]] == [operation], moved
    assert all(f"{dtype}[" in result for result in moved[operation]), moved
