"""Sums of weight gradients over devices: the dtype that is sent, and the distance from
a float32 sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Operand
from tests.compile_for_h200 import compile_for, expected, h200s, missing, on_once
from tests.helpers import mesh_of

E4M3 = jnp.float8_e4m3fn
K, N, TOKENS, DEVICES = 32, 64, 128, 4
WIRES = ("float32", "bfloat16", "bfloat16_parts")


def operands():
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal((rows, TOKENS)) * 30, E4M3) for rows in (K, N)
    ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("handed", [P("a"), P()], ids=["scattered", "everywhere"])
@pytest.mark.parametrize("wire", WIRES)
def test_sums_are_within_their_bound(wire, handed, kind):
    mesh = mesh_of(DEVICES, axis_type=kind)
    one = jnp.float32(1)

    def product(a, b):
        asked = handed if kind == AxisType.Explicit else None
        return matmul(
            Operand(a, one),
            Operand(b, one),
            out_dtype=jnp.float32,
            wire=wire,
            out_sharding=asked,
        )

    a, b = operands()
    with jax.set_mesh(mesh):
        put = [jax.device_put(x, NamedSharding(mesh, P(None, "a"))) for x in (a, b)]
        got = jax.jit(product, out_shardings=NamedSharding(mesh, handed))(*put)
    parts = [
        np.asarray(x, np.float64).reshape(-1, DEVICES, TOKENS // DEVICES)
        for x in (a, b)
    ]
    partial = np.einsum("kdt,ndt->dkn", *parts)
    # bfloat16 keeps 8 bits: a part is off by 2**-8 of itself, and so is each of d - 1
    # sums, or what is gathered.
    roundings = {
        "float32": 2.0**-14,
        "bfloat16": DEVICES,
        "bfloat16_parts": 1 if handed == P("a") else 2,
    }[wire]
    bound = 2.0**-8 * 1.01 * roundings * np.abs(partial).sum(0)
    error = np.abs(np.asarray(got, np.float64) - partial.sum(0))
    assert np.all(error <= bound)
    assert wire == "float32" or error.max() > 0  # it is rounded


@pytest.mark.parametrize("recipe", ["tcfp12", "tensorwise"])
def test_a_recipe_says_it(recipe):
    mesh = mesh_of(2)
    x, w = (
        np.random.default_rng(i).standard_normal(s).astype(np.float32)
        for i, s in enumerate([(32, 64), (64, 32)])
    )
    loss = lambda w, x, r: jnp.sum(tcfp_jax.matmul(x, w, recipe=r) * jnp.arange(32.0))
    found = []
    with jax.set_mesh(mesh):
        put = (
            jax.device_put(w, NamedSharding(mesh, P("a"))),
            jax.device_put(x, NamedSharding(mesh, P("a"))),
        )
        for wire in (None, "bfloat16_parts"):
            asked = tcfp_jax.recipe(recipe, wire=wire)
            step = jax.jit(
                jax.grad(lambda w, x, r=asked: loss(w, x, r)),
                out_shardings=NamedSharding(mesh, P("a")),
            )
            compiled = step.lower(*put).compile()
            assert ("all-to-all" in compiled.as_text()) == (wire is not None)
            found.append(np.asarray(compiled(*put)))
    np.testing.assert_allclose(*found, atol=2.0**-7 * np.abs(found[0]).max())


def test_sums_in_fp8_are_refused():
    with pytest.raises(ValueError, match="would add gradients in FP8"):
        tcfp_jax.recipe("tensorwise", wire="float8_e5m2")
    with pytest.raises(ValueError, match="wire='int8' is unknown"):
        tcfp_jax.recipe("tensorwise", wire="int8")


@pytest.mark.parametrize(
    ("wire", "operation", "dtype"),
    [
        ("float32", "reduce-scatter", "f32"),
        ("bfloat16", "reduce-scatter", "bf16"),
        ("bfloat16_parts", "all-to-all", "bf16"),
    ],
)
def test_compiled_for_h200s(wire, operation, dtype):
    if missing():
        assert not expected(), missing()
        pytest.skip(missing())
    mesh, (k, n, tokens) = h200s(8), (1024, 2048, 8192)
    a, b = (
        on_once(mesh, (k, tokens), E4M3, None, "a"),
        on_once(mesh, (n, tokens), E4M3, None, "a"),
    )
    product = lambda a, b: matmul(
        a, b, out_dtype=jnp.float32, wire=wire, backend="mosaic"
    )
    compiled = compile_for(
        mesh, product, a, b, out_shardings=NamedSharding(mesh, P("a"))
    )
    moved = {
        name: compiled.results(name)
        for name in ("reduce-scatter", "all-to-all", "all-reduce", "all-gather")
    }
    assert [name for name, results in moved.items() if results] == [operation], moved
    assert all(f"{dtype}[" in result for result in moved[operation]), moved
