"""Every public op and layer under automatic and under explicit axes: equal bits, and
shardings as JAX types them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
import tcfp_jax.inference
import tcfp_jax.linen
import tcfp_jax.nnx
from pallas_kernels import counter
from pallas_kernels.adamw.api import Moments, Rates, adamw
from pallas_kernels.matmul.api import matmul, skip_matmul
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tcfp_jax import conversion, formats
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests.compile_for_h200 import compile_for, expected, h200s, missing
from tests.helpers import mesh_of

E4M3 = jnp.float8_e4m3fn
GATHERS = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SCALINGS = (Tensor(), Row(), Block(32, "vector"))


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W, C = drawn(4, 32, 64), drawn(64, 128, seed=1), drawn(4, 32, 128, seed=2)


def run(kind, function, placed, *arguments, kinds=None):
    """`function` compiled under a mesh of 2 x 2 with axes of this kind, and the types
    of its results.
    """
    if kinds is None:
        mesh = mesh_of(2, 2, axis_type=kind)
    else:
        mesh = jax.make_mesh(
            (2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4]
        )
    with jax.set_mesh(mesh):
        put = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arguments, placed, strict=True)
        ]
        return jax.jit(function)(*put)


def bits(x):
    x = np.atleast_1d(
        np.asarray(
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        )
    )
    return x.view(np.uint8)


def check(function, placed, *arguments, specs=None, exact=True):
    """Both kinds of axes give the same; `specs` are those of the results with explicit
    ones.
    """
    automatic, explicit = (
        run(kind, function, placed, *arguments)
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    for a, b in zip(jax.tree.leaves(automatic), jax.tree.leaves(explicit), strict=True):
        if exact:
            assert np.array_equal(bits(a), bits(b))
        else:
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max())
    if specs is not None:
        with jax.set_mesh(mesh_of(2, 2, axis_type=AxisType.Explicit)):
            got = [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves(explicit)]
        assert [P(*spec) for spec in got] == list(specs)


@pytest.mark.slow_except("Tensor-triton", "Block-xla")
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
def test_quantize(scaling, backend):
    call = functools.partial(
        quantize, dtype=E4M3, scaling=scaling, orientation="both", backend=backend
    )
    per_line = {
        Tensor: ([], []),
        Row: (["a", "b"], [None]),
        Block: (["a", "b", None], [None, "a"]),
    }[type(scaling)]
    specs = [P("a", "b", None), P(*per_line[0]), P(None, "a", "b"), P(*per_line[1])]
    check(call, [P("a", "b")], X, specs=specs)


@pytest.mark.slow_except("columns-Block-xla", "partial-Tensor-xla")
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "placed, out, spec",
    [
        ([P("a"), P("b")], None, P("a", None, "b")),
        # partial sums, handed out
        ([P("a", None, "b"), P(None, "b")], P("a", "b"), P("a", "b", None)),
    ],
    ids=["columns", "partial"],
)
def test_matmul(scaling, backend, placed, out, spec):
    def product(x, w):
        asked = out if jax.sharding.get_abstract_mesh().are_all_axes_explicit else None
        x, w = (quantize(v, E4M3, scaling).rows for v in (x, w))
        return matmul(x, w, out_dtype=jnp.float32, out_sharding=asked, backend=backend)

    check(product, placed, X, W.T.copy(), specs=[spec], exact=out is None)


def test_both_operands_split_along_the_contraction_raise_as_in_jax():
    product = lambda x, w: matmul(
        *(quantize(v, E4M3).rows for v in (x, w)), backend="triton"
    )
    with pytest.raises(
        jax.errors.ShardingTypeError
        if hasattr(jax.errors, "ShardingTypeError")
        else Exception,
        match="specify the output sharding",
    ):
        run(
            AxisType.Explicit, product, [P("a", None, "b"), P(None, "b")], X, W.T.copy()
        )


@pytest.mark.parametrize(
    "kinds",
    [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)],
    ids=str,
)
def test_a_mesh_with_axes_of_both_kinds(kinds):
    call = functools.partial(
        quantize,
        dtype=E4M3,
        scaling=Block(32, "vector"),
        orientation="both",
        backend="triton",
    )
    specs = P("a") if kinds[0] == AxisType.Explicit else P(None, "b")
    got = run(None, call, [specs], X, kinds=kinds)
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(jax.jit(call)(X)), strict=True
    ):
        assert np.array_equal(bits(a), bits(b))


def dual(scaling, backend, w):
    return dual_quantize(
        w, scaling, error=jnp.zeros_like(w), orientation="both", backend=backend
    )


def skipping(scaling, backend, x, w):
    w = dual_quantize(w, Block(32), backend=backend).rows
    return skip_matmul(quantize(x, E4M3, Block(32, "vector")).rows, w)


def step(scaling, backend, g, hi):
    numbers = dict(
        b1=0.9,
        b2=0.999,
        rate=0.1,
        rate_g=0,
        correction=1000,
        eps=1e-8,
        eps_root=0,
        decay=1,
        gradient_scale=1,
        scale=1,
        new_scale=1,
    )
    rates = Rates(
        **{name: jnp.float32(x) for name, x in numbers.items()}, keep=jnp.bool_(True)
    )
    hi = hi.astype(E4M3)
    return adamw(
        g,
        hi,
        hi * 0,
        Moments.zeros(hi.shape),
        rates,
        jnp.stack(counter.keys(1, 2)),
        backend=backend,
    )


OPS = {
    "dual": (dual, Tensor(), [P("a", "b")], [W]),
    "dual in squares": (dual, Block(32), [P("a", "b")], [W]),
    "adamw": (step, None, [P("a")] * 2, [W, W]),
}


@pytest.mark.slow_except("dual-xla", "dual in squares-xla")
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("name", OPS)
def test_ops(name, backend):
    function, scaling, placed, arguments = OPS[name]
    check(functools.partial(function, scaling, backend), placed, *arguments)


MADE = {
    "squares": lambda w: dual_quantize(w, Block(32)).rows,
    "vectors": lambda w: quantize(w, E4M3, Block(32, "vector")).rows,
    "fp4": quantize_fp4,
    "packed": tcfp_jax.quantize_tcfp12,
}


@pytest.mark.slow_except("squares", "vectors", "fp4")
@pytest.mark.parametrize("name", MADE)
def test_dequantize(name):
    specs = [P("a", "b")] if name in ("squares", "vectors") else None
    check(lambda w: MADE[name](w).dequantize(), [P("a", "b")], W, specs=specs)


def test_skip_matmul():
    # Split along k, parts are added in the result's bfloat16, and XLA's own definition
    # adds float32.
    check(
        functools.partial(skipping, None, None), [P("a"), P("b")], X, W.reshape(128, 64)
    )


@pytest.mark.parametrize("blocks", ["all", "nonzero"])
def test_a_recipe_in_blocks_lays_its_result_where_it_is_asked_to(blocks):
    recipe = tcfp_jax.recipe("tcfp12_blockwise", residual_blocks=blocks)

    # K is split over devices, so that JAX asks where the result shall lie
    def product(x, w):
        return tcfp_jax.matmul(x, w, recipe=recipe, out_sharding=P("b", None))

    x, w = drawn(32, 256), drawn(256, 128, seed=1)
    found = run(AxisType.Explicit, product, [P(None, "a"), P("a")], x, w)
    assert found.sharding.spec == P("b", None)
    np.testing.assert_allclose(
        found, tcfp_jax.matmul(jnp.asarray(x), jnp.asarray(w), recipe=recipe), atol=1e-4
    )


@pytest.mark.parametrize("count", [1, 2])
def test_a_stack_is_split_over_devices(count):
    """Under `vmap` a kernel runs for the elements that a device has."""
    call = functools.partial(quantize, dtype=E4M3, orientation="both", backend="triton")
    for _ in range(count):
        call = jax.vmap(call)
    check(call, [P("a", None, "b")], drawn(*(2, 2)[:count], 32, 64), specs=None)


FORMATS = {
    "cast": lambda x: formats.cast(x, formats.datatype("e2m1f", "e8m0_t32")),
    "gradient of a cast": jax.grad(
        lambda x: jnp.sum(formats.cast(x, formats.datatype("e4m3f")) * x)
    ),
    "pack": lambda x: formats.unpack(
        formats.pack(x, formats.datatype("e2m1f", "e8m0_t32"))
    ),
    "fake_quantize": lambda x: tcfp_jax.fake_quantize(x, 32),
    "packed": lambda x: tcfp_jax.dequantize_tcfp12(tcfp_jax.quantize_tcfp12(x, 32)),
    "split": lambda x: tcfp_jax.split(x).dequantize(),
    "tcfp_jax.quantize": lambda x: tcfp_jax.quantize(x).dequantize(),
}


@pytest.mark.slow_except("gradient of a cast", "pack", "split")
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    check(FORMATS[name], [P("a", "b")], W)


# Layers: the gradient of sum(y * C), so that what is quantized in the backward pass has
# the same bits everywhere.

LAYERS = {
    "Dense": (linen.Dense(128), X),
    "DenseGeneral": (linen.DenseGeneral((2, 64)), X),
    "Einsum": (linen.Einsum((64, 2, 64), "bsk,khd->bshd"), X),
    "TCFPDense": (tcfp_jax.linen.TCFPDense(128, recipe="tcfp12_fast"), X),
    "LayerNorm": (tcfp_jax.linen.TCFPLayerNorm(), X),
    "Embed": (tcfp_jax.linen.TCFPEmbed(32, 64), np.arange(64).reshape(4, 16) % 32),
}


def kernel_spec(leaf):
    """By columns for kernels; the rows of an embedding are looked up, for which JAX
    wants them whole.
    """
    return P(None, "b") if leaf.ndim > 1 and leaf.shape[0] == 64 else P()


def of_linen(model, x):
    params = jax.jit(model.init)(jax.random.key(0), x)
    shape = jax.eval_shape(model.apply, params, x).shape
    c = drawn(*shape, seed=3)

    def loss(params, x, c):
        y = model.apply(params, x)
        return jnp.sum(y * c), y

    leaves, tree = jax.tree.flatten(params)
    specs = [kernel_spec(leaf) for leaf in leaves]

    def both(x, c, *leaves):
        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(
            jax.tree.unflatten(tree, leaves), x, c
        )
        return y, grads

    return both, [P("a"), P("a"), *specs], [x, c, *leaves]


@pytest.mark.slow_except("Dense")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_linen(name):
    model, x = LAYERS[name]
    if not name.startswith(("TCFP", "LayerNorm", "Embed")):
        model = conversion.convert_to_tcfp(
            model, recipe="tcfp12_fast", include=("linear", "small")
        )
    function, placed, arguments = of_linen(model, x)
    check(function, placed, *arguments, exact=False)


@pytest.mark.slow_except("None-tensorwise", "triton-rowwise")
@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "mxfp8", "tcfp12", "tcfp12_single", "bf16"]
)
@pytest.mark.parametrize("backend", [None, "triton"])
def test_recipes(recipe, backend):
    if backend == "triton" and recipe in ("bf16", "tcfp12", "tcfp12_single"):
        pytest.skip("the others have its kernels")
    options = dict(gradient="float8_e4m3fn") if recipe == "tensorwise" else {}
    recipe = tcfp_jax.recipe(recipe, backend=backend, **options)
    function, placed, arguments = of_linen(
        tcfp_jax.linen.TCFPDense(128, recipe=recipe), X
    )
    check(function, placed, *arguments, exact=False)


NNX = {
    "Linear": (
        lambda rngs: tcfp_jax.nnx.TCFPLinear(64, 128, rngs=rngs, recipe="tcfp12_fast"),
        X,
    ),
    "LinearGeneral": (
        lambda rngs: conversion.convert_to_tcfp(
            nnx.LinearGeneral(64, (2, 64), rngs=rngs), recipe="tcfp12_fast"
        ),
        X,
    ),
    "Einsum": (
        lambda rngs: conversion.convert_to_tcfp(
            nnx.Einsum("bsk,kn->bsn", (64, 128), rngs=rngs), recipe="tcfp12_fast"
        ),
        X,
    ),
    "LayerNorm": (lambda rngs: tcfp_jax.nnx.TCFPLayerNorm(64, rngs=rngs), X),
    "Embed": (
        lambda rngs: tcfp_jax.nnx.TCFPEmbed(32, 64, rngs=rngs),
        np.arange(64).reshape(4, 16) % 32,
    ),
    "converted": (
        lambda rngs: conversion.convert_to_tcfp(
            nnx.Linear(64, 128, rngs=rngs), recipe="tcfp12_fast"
        ),
        X,
    ),
}


@pytest.mark.slow_except("Linear")
@pytest.mark.parametrize("name", NNX)
def test_layers_of_nnx(name):
    make, x = NNX[name]
    graph, state = nnx.split(make(nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)
    c = drawn(*jax.eval_shape(lambda x: nnx.merge(graph, state)(x), x).shape, seed=3)

    def both(x, c, *leaves):
        def loss(leaves):
            y = nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x)
            return jnp.sum(y * c), y

        floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert len(floats) == len(leaves)
        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(leaves)
        return y, grads

    specs = [kernel_spec(leaf) for leaf in leaves]
    check(both, [P("a"), P("a"), *specs], x, c, *leaves, exact=False)


def test_parameters_of_inference():
    model = tcfp_jax.linen.TCFPDense(128, recipe="tcfp12_fast")
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]

    def infer(x, kernel):
        made = tcfp_jax.inference.quantize_params(
            {"kernel": kernel, "bias": jnp.zeros(128)}, "tcfp12_fast"
        )
        return model.apply(made, x)

    check(infer, [P("a"), P(None, "b")], X, params["kernel"], exact=False)


def test_compiled_for_h200s_kernels_run():
    if missing():
        assert not expected(), missing()
        pytest.skip(missing())
    automatic = h200s(8)
    mesh = jax.sharding.Mesh(
        automatic.devices, automatic.axis_names, axis_types=(AxisType.Explicit,)
    )
    on = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec))
    )
    recipe = tcfp_jax.recipe("tensorwise", backend="mosaic", quantize_backend="triton")

    def loss(w, x):
        y = tcfp_jax.matmul(x, w, recipe=recipe, out_sharding=P("a"))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    compiled = compile_for(
        mesh,
        jax.grad(loss, argnums=(0, 1)),
        on((1024, 1024), "a"),
        on((8, 1024, 1024), "a"),
    )
    assert sum("mosaic" in target for target in compiled.targets) == 3, compiled.targets
    assert sum("triton" in target for target in compiled.targets) >= 2, compiled.targets
    # Weights travel as stored, and partial sums of the gradient are handed out.
    moved = {
        name: re.findall(rf"= (.*?) {name}(?:-start)?\(", compiled.text)
        for name in GATHERS
    }
    assert moved["all-gather"] and all(
        "f8e" in types for types in moved["all-gather"]
    ), moved
    assert (
        len(moved["reduce-scatter"]) == 1 and "bf16[" in moved["reduce-scatter"][0]
    ), moved
    assert not moved["all-to-all"] and not moved["collective-permute"], moved
