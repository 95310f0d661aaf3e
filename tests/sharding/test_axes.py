"""Every public op and layer under automatic and under explicit axes: equal bits, and
shardings as JAX types them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

import tcfp_jax
import tcfp_jax.inference
import tcfp_jax.linen
import tcfp_jax.nnx
from pallas_kernels import counter
from pallas_kernels.adamw.api import Moments, adamw
from pallas_kernels.matmul.api import matmul, skip_matmul
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tcfp_jax import conversion, formats
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests.adamw import rates
from tests.compile_for_h200 import GATHERS, compile_for, h200s, needs_plugin, on
from tests.helpers import (
    drawn,
    mesh_of,
    parametrize,
    placed,
    refused,
    same_bits,
    slow_except,
    variables_of,
)

E4M3 = jnp.float8_e4m3fn
SCALINGS = {"Tensor": Tensor(), "Row": Row(), "Block": Block(32, "vector")}
X = drawn(4, 32, 64)
W = drawn(64, 128, seed=1)
BACKENDS = parametrize("backend", ["xla", "triton"])
quantize_both = partial(quantize, dtype=E4M3, orientation="both")


def run(mesh, function, specs, *arguments):
    """The function compiled under a mesh, with each argument split by its spec."""
    with jax.set_mesh(mesh):
        pairs = zip(arguments, specs, strict=True)
        return jax.jit(function)(*(placed(x, mesh, *spec) for x, spec in pairs))


def check(function, specs, *arguments, wanted=None, exact=True):
    """Both kinds of axes give the same; `wanted` are the specs of results with explicit
    ones.
    """
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    automatic = run(mesh_of(2, 2), function, specs, *arguments)
    explicit = run(mesh, function, specs, *arguments)
    if exact:
        assert same_bits(*map(jax.device_get, (automatic, explicit)))
    else:
        pairs = zip(jax.tree.leaves(automatic), jax.tree.leaves(explicit), strict=True)
        for a, b in pairs:
            a = np.asarray(a, np.float32)
            b = np.asarray(b, np.float32)
            assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(a).max())
    if wanted is not None:
        with jax.set_mesh(mesh):
            got = [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves(explicit)]
        assert [P(*spec) for spec in got] == list(wanted)


# Kernels
# --------------------------------------------------------------------------------------
SCALES = {
    "Tensor": (P(), P()),
    "Row": (P("a", "b"), P(None)),
    "Block": (P("a", "b", None), P(None, "a")),
}


@slow_except("Tensor-triton", "Block-xla")
@BACKENDS
@parametrize("scaling", SCALINGS)
def test_quantize(scaling, backend):
    of_rows, of_columns = SCALES[scaling]
    wanted = [P("a", "b", None), of_rows, P(None, "a", "b"), of_columns]
    call = partial(quantize_both, scaling=SCALINGS[scaling], backend=backend)
    check(call, [P("a", "b")], X, wanted=wanted)


PARTIAL = [P("a", None, "b"), P(None, "b")]


@slow_except("columns-Block-xla", "partial-Tensor-xla")
@BACKENDS
@parametrize("scaling", SCALINGS)
@parametrize(
    "specs, out, wanted",
    [
        ([P("a"), P("b")], None, P("a", None, "b")),
        # partial sums, handed out
        (PARTIAL, P("a", "b"), P("a", "b", None)),
    ],
    ids=["columns", "partial"],
)
def test_matmul(scaling, backend, specs, out, wanted):
    def product(x, w):
        asked = out if jax.sharding.get_abstract_mesh().are_all_axes_explicit else None
        x, w = (quantize(v, E4M3, SCALINGS[scaling]).rows for v in (x, w))
        return matmul(x, w, out_dtype=jnp.float32, out_sharding=asked, backend=backend)

    check(product, specs, X, W.T, wanted=[wanted], exact=out is None)


def test_operands_split_along_the_contraction_raise_as_in_jax():
    def product(x, w):
        x, w = (quantize(v, E4M3).rows for v in (x, w))
        return matmul(x, w, backend="triton")

    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    error = getattr(jax.errors, "ShardingTypeError", Exception)
    with refused("specify the output sharding", error):
        run(mesh, product, PARTIAL, X, W.T)


@parametrize(
    "kinds, spec",
    [
        ((AxisType.Explicit, AxisType.Auto), P("a")),
        ((AxisType.Auto, AxisType.Explicit), P(None, "b")),
    ],
    ids=str,
)
def test_a_mesh_with_axes_of_both_kinds(kinds, spec):
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4]
    )
    call = partial(quantize_both, scaling=Block(32, "vector"), backend="triton")
    got = jax.device_get(run(mesh, call, [spec], X))
    assert same_bits(got, jax.device_get(jax.jit(call)(X)))


def dual(w, scaling, backend):
    error = jnp.zeros_like(w)
    return dual_quantize(w, scaling, error=error, orientation="both", backend=backend)


def step(g, hi, backend):
    hi = hi.astype(E4M3)
    words = jnp.stack(counter.keys(1, 2))
    moments = Moments.zeros(hi.shape)
    return adamw(g, hi, hi * 0, moments, rates(), words, backend=backend)


OPS = {
    "dual": (partial(dual, scaling=Tensor()), P("a", "b"), W),
    "dual in squares": (partial(dual, scaling=Block(32)), P("a", "b"), W),
    "adamw": (step, P("a"), W, W),
}


@slow_except("dual-xla", "dual in squares-xla")
@BACKENDS
@parametrize("name", OPS)
def test_ops(name, backend):
    function, spec, *arguments = OPS[name]
    call = partial(function, backend=backend)
    check(call, [spec] * len(arguments), *arguments)


MADE = {
    "squares": lambda w: dual_quantize(w, Block(32)).rows,
    "vectors": lambda w: quantize(w, E4M3, Block(32, "vector")).rows,
    "fp4": quantize_fp4,
    "packed": tcfp_jax.quantize_tcfp12,
}


@slow_except("squares", "vectors", "fp4")
@parametrize("name", MADE)
def test_dequantize(name):
    wanted = [P("a", "b")] if name in ("squares", "vectors") else None
    check(lambda w: MADE[name](w).dequantize(), [P("a", "b")], W, wanted=wanted)


def test_skip_matmul():
    # Split along k, parts are added in the result's bfloat16, and XLA's own definition
    # adds float32.
    def skipping(x, w):
        rows = quantize(x, E4M3, Block(32, "vector")).rows
        return skip_matmul(rows, dual_quantize(w, Block(32)).rows)

    check(skipping, [P("a"), P("b")], X, W.reshape(128, 64))


@parametrize(
    "changes",
    [{}, {"residual_blocks": "nonzero"}, {"sparse_threshold": 2.0**-5}],
    ids=str,
)
def test_a_recipe_in_blocks_lays_its_result_as_asked(changes):
    recipe = tcfp_jax.recipe("tcfp12_blockwise", **changes)
    multiply = partial(tcfp_jax.matmul, recipe=recipe)
    product = partial(multiply, out_sharding=P("b", None))
    x = drawn(32, 256)
    w = drawn(256, 128, seed=1)
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    # K is split over devices, so that JAX asks where the result shall lie
    found = run(mesh, product, [P(None, "a"), P("a")], x, w)
    assert found.sharding.spec == P("b", None)
    assert_allclose(found, multiply(x, w), atol=1e-4)


@parametrize("stack", [(2,), (2, 2)], ids=str)
def test_a_stack_is_split_over_devices(stack):
    """Under `vmap` a kernel runs for the elements that a device has."""
    call = partial(quantize_both, backend="triton")
    for _ in stack:
        call = jax.vmap(call)
    check(call, [P("a", None, "b")], drawn(*stack, 32, 64))


MXFP4 = formats.datatype("e2m1f", "e8m0_t32")


def squared(x):
    return jnp.sum(formats.cast(x, formats.datatype("e4m3f")) * x)


FORMATS = {
    "cast": lambda x: formats.cast(x, MXFP4),
    "gradient of a cast": jax.grad(squared),
    "pack": lambda x: formats.unpack(formats.pack(x, MXFP4)),
    "fake_quantize": lambda x: tcfp_jax.fake_quantize(x, 32),
    "packed": lambda x: tcfp_jax.dequantize_tcfp12(tcfp_jax.quantize_tcfp12(x, 32)),
    "split": lambda x: tcfp_jax.split(x).dequantize(),
    "tcfp_jax.quantize": lambda x: tcfp_jax.quantize(x).dequantize(),
}


@slow_except("gradient of a cast", "pack", "split")
@parametrize("name", FORMATS)
def test_formats(name):
    check(FORMATS[name], [P("a", "b")], W)


# Layers: the gradient of sum(y * c), so that the backward pass quantizes the same bits
# everywhere.
# --------------------------------------------------------------------------------------
def kernel_spec(leaf):
    """By columns for kernels; the rows of an embedding are looked up, for which JAX
    wants them whole.
    """
    return P(None, "b") if leaf.ndim > 1 and leaf.shape[0] == 64 else P()


def check_layer(apply, params, x):
    leaves, tree = jax.tree.flatten(params)
    c = drawn(*jax.eval_shape(apply, params, x).shape, seed=3)

    def both(x, c, *leaves):
        def loss(leaves):
            y = apply(jax.tree.unflatten(tree, leaves), x)
            return jnp.sum(y * c), y

        (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(leaves)
        return y, gradients

    specs = [P("a"), P("a"), *map(kernel_spec, leaves)]
    check(both, specs, x, c, *leaves, exact=False)


def converted(model):
    include = ("linear", "small")
    return conversion.convert_to_tcfp(model, recipe="tcfp12_fast", include=include)


IDS = np.arange(64).reshape(4, 16) % 32
EINSUM = ((64, 2, 64), "bsk,khd->bshd")
LINEN = {
    "Dense": converted(linen.Dense(128)),
    "DenseGeneral": converted(linen.DenseGeneral((2, 64))),
    "Einsum": converted(linen.Einsum(*EINSUM)),
    "TCFPDense": tcfp_jax.linen.TCFPDense(128, recipe="tcfp12_fast"),
    "LayerNorm": tcfp_jax.linen.TCFPLayerNorm(),
    "Embed": tcfp_jax.linen.TCFPEmbed(32, 64),
}


@slow_except("Dense")
@parametrize("name", LINEN)
def test_layers_of_linen(name):
    x = IDS if name == "Embed" else X
    check_layer(LINEN[name].apply, variables_of(LINEN[name], x), x)


NNX = {
    "Linear": partial(tcfp_jax.nnx.TCFPLinear, 64, 128, recipe="tcfp12_fast"),
    "LayerNorm": partial(tcfp_jax.nnx.TCFPLayerNorm, 64),
    "Embed": partial(tcfp_jax.nnx.TCFPEmbed, 32, 64),
    "converted Linear": partial(nnx.Linear, 64, 128),
    "converted LinearGeneral": partial(nnx.LinearGeneral, 64, (2, 64)),
    "converted Einsum": partial(nnx.Einsum, "bsk,kn->bsn", (64, 128)),
}


@slow_except("Linear")
@parametrize("name", NNX)
def test_layers_of_nnx(name):
    model = NNX[name](rngs=nnx.Rngs(0))
    if name.startswith("converted"):
        model = converted(model)
    graph, state = nnx.split(model)
    for leaf in jax.tree.leaves(state):
        assert jnp.issubdtype(leaf.dtype, jnp.floating)

    def apply(state, x):
        return nnx.merge(graph, state)(x)

    check_layer(apply, state, IDS if name == "Embed" else X)


RECIPES = {
    "tensorwise": {"gradient": "float8_e4m3fn"},
    "rowwise": {},
    "mxfp8": {},
    "tcfp12": {},
    "tcfp12_single": {},
    "bf16": {},
}


@slow_except("None-tensorwise", "triton-rowwise")
@parametrize("recipe", RECIPES)
@parametrize("backend", [None, "triton"])
def test_recipes(recipe, backend):
    if backend == "triton" and recipe in ("bf16", "tcfp12", "tcfp12_single"):
        pytest.skip("the others have its kernels")
    recipe = tcfp_jax.recipe(recipe, backend=backend, **RECIPES[recipe])
    model = tcfp_jax.linen.TCFPDense(128, recipe=recipe)
    check_layer(model.apply, variables_of(model, X), X)


def test_parameters_of_inference():
    model = tcfp_jax.linen.TCFPDense(128, recipe="tcfp12_fast")

    def infer(x, kernel):
        params = {"kernel": kernel, "bias": jnp.zeros(128)}
        made = tcfp_jax.inference.quantize_params(params, "tcfp12_fast")
        return model.apply(made, x)

    check(infer, [P("a"), P(None, "b")], X, W, exact=False)


@needs_plugin
def test_compiled_for_h200s_kernels_run():
    automatic = h200s(8)
    explicit = (AxisType.Explicit,)
    mesh = jax.sharding.Mesh(
        automatic.devices, automatic.axis_names, axis_types=explicit
    )
    recipe = tcfp_jax.recipe("tensorwise", backend="mosaic", quantize_backend="triton")

    def loss(w, x):
        y = tcfp_jax.matmul(x, w, recipe=recipe, out_sharding=P("a"))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    w = on(mesh, (1024, 1024), jnp.bfloat16, "a")
    x = on(mesh, (8, 1024, 1024), jnp.bfloat16, "a")
    compiled = compile_for(mesh, jax.grad(loss, argnums=(0, 1)), w, x)
    assert sum("mosaic" in target for target in compiled.targets) == 3, compiled.targets
    assert sum("triton" in target for target in compiled.targets) >= 2, compiled.targets
    # Weights travel as stored, and partial sums of the gradient are handed out.
    gathered, *others = (compiled.results(name) for name in GATHERS)
    assert gathered
    assert all("f8e" in types for types in gathered), gathered
    assert not any(others), others
    (scattered,) = compiled.results("reduce-scatter")
    assert "bf16[" in scattered
