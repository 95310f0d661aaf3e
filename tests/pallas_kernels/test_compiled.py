"""Programs compiled for an H200 without a GPU, and read; none is executed here."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tcfp_jax
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Block, Row
from pallas_kernels.quantize.api import dual_quantize, quantize
from tcfp_jax import formats
from tcfp_jax.weights.quantization import quantize_weight
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import (
    GATHERS,
    compile_for,
    h200s,
    largest_stack,
    on,
    on_blocks,
    on_once,
)
from tests.helpers import parametrize, slow_except

pytestmark = [
    pytest.mark.optimized,
    h200.needs_plugin,
]

F8 = jnp.float8_e4m3fn
M, K, N = 8192, 4096, 16384
# Registers that do not fit go to the stack. What is allowed is spilled around the loop
# over k, not inside its products.
LARGEST_STACK = 128
by_triton = partial(quantize, dtype=F8, backend="triton")
CUBLAS_F8 = "__cublas$lt$matmul$f8"


def results(compiled, *names):
    """Types of the results of these operations."""
    found = []
    for name in names:
        found += compiled.results(name)
    return found


@slow_except(
    "float8_e4m3fn-1-fast",
    "float8_e4m3fn-2-full",
    "float8_e5m2-1-full",
    "float8_e5m2-2-fast",
)
@parametrize("accumulation", ["fast", "full"])
@parametrize("halves", [1, 2])
@parametrize("x_dtype", [F8, jnp.float8_e5m2])
def test_mosaic_products_stay_in_registers(accumulation, halves, x_dtype, capfd):
    mesh = h200s(1)
    product = partial(matmul, accumulation=accumulation, backend="mosaic")
    compiled = compile_for(
        mesh,
        product,
        on_once(mesh, (M, K), x_dtype),
        on_once(mesh, (N, K), F8, halves=halves),
    )
    assert compiled.targets == ["mosaic_gpu_v2"]
    assert largest_stack(capfd) <= LARGEST_STACK


@slow_except("128-square-2", "64-square-1", "32-square-2", "128-vector-1")
@parametrize(
    "block, tile, halves",
    [
        (128, "square", 1),
        (128, "square", 2),
        (64, "square", 1),
        (64, "square", 2),
        (32, "square", 2),
        (128, "vector", 1),
        (64, "vector", 1),
    ],
)
def test_block_scaled_products_stay_in_registers(block, tile, halves, capfd):
    mesh = h200s(1)
    operands = on_blocks(mesh, (M, K, N), Block(block, tile), halves=halves)
    compiled = compile_for(mesh, partial(matmul, backend="mosaic"), *operands)
    assert compiled.targets == ["mosaic_gpu_v2"]
    assert largest_stack(capfd) <= LARGEST_STACK


@parametrize(
    "x, n, axes",
    [
        ((1, 256), 64, []),
        ((3, 256), 1, []),
        ((256,), 64, []),
        ((1, 1, 256), 1, []),
        ((2, 256), 64, ["a"]),
        ((2, 1, 256), 64, ["a", None]),
        ((1, 2, 256), 64, [None, "a"]),
        ((4, 256), 64, ["a"]),
    ],
)
def test_one_row_on_a_device_reaches_fp8_tensor_cores(x, n, axes):
    """Or one column."""
    mesh = h200s(2 if axes else 1)
    w = on_once(mesh, (n, 256), F8)
    product = partial(matmul, backend="xla")
    compiled = compile_for(mesh, product, on_once(mesh, x, F8, *axes), w)
    assert compiled.targets == [CUBLAS_F8]
    shape = ",".join(map(str, (*x[:-1], n)))
    assert axes or f"->bf16[{shape}]" in compiled.text.splitlines()[0]


@parametrize(
    "x_axes, w_axes, sums", [(("a",), ("b",), 0), (("a", "b"), (None, "b"), 1)]
)
def test_block_scaled_products_under_a_mesh_gather_nothing(x_axes, w_axes, sums):
    mesh = h200s(2, 2)
    operands = on_blocks(mesh, (M, K, N), Block(128), x_axes, w_axes)
    compiled = compile_for(mesh, partial(matmul, backend="mosaic"), *operands)
    assert not results(compiled, *GATHERS)
    assert (len(compiled.results("all-reduce")) > 0) == (sums > 0)


@parametrize("block", [32, 128])
def test_blocks_are_quantized_in_one_pass_without_an_amax_before(block):
    mesh = h200s(1)
    call = partial(by_triton, scaling=Block(block, "vector"), orientation="both")
    compiled = compile_for(mesh, call, on(mesh, (M, K), jnp.bfloat16))
    assert compiled.targets == ["__gpu$xla.gpu.triton"]
    assert not compiled.results("reduce")
    assert not compiled.results("transpose")


@parametrize("scale", ["pow2", "float32"])
@parametrize(
    "orientation, k, kernels",
    [("rows", 14336, 1), ("both", 4096, 4), ("both", 1000, 4)],
)
def test_rows_are_quantized_by_kernels_alone(orientation, k, kernels, scale):
    """Rows alone need one; XLA makes nothing of x.

    For both there are the magnitudes, scales of rows and of columns, and values.
    """
    mesh = h200s(1)
    call = partial(by_triton, scaling=Row(scale), orientation=orientation)
    compiled = compile_for(mesh, call, on(mesh, (M, k), jnp.bfloat16))
    assert compiled.targets == ["__gpu$xla.gpu.triton"] * kernels
    assert not results(compiled, "fusion", "copy", "transpose", "reduce")
    # The magnitudes of tiles, 2 bytes a line each, and inverse scales.
    assert compiled.temporary_bytes <= 0.05 * M * k


@parametrize(
    "orientation, axes, moved",
    [
        ("rows", ("a",), set()),
        ("rows", ("a", "b"), {"s32[4096]"}),
        ("both", ("a",), {"s32[4096]"}),
        ("both", ("a", "b"), {"s32[4096]", "s32[2048]"}),
    ],
)
def test_rows_under_a_mesh_move_the_largest_magnitudes_of_lines(
    orientation, axes, moved
):
    mesh = h200s(2, 2)
    call = partial(by_triton, scaling=Row(), orientation=orientation)
    compiled = compile_for(mesh, call, on(mesh, (M, K), jnp.bfloat16, *axes))
    assert not results(compiled, *GATHERS)
    assert {shape.split("{")[0] for shape in compiled.results("all-reduce")} == moved


@slow_except("mosaic-float32", "triton-bfloat16")
@parametrize("bias", [jnp.bfloat16, jnp.float32])
@parametrize("backend", ["mosaic", "triton"])
def test_the_epilogue_is_part_of_the_product(backend, bias):
    mesh = h200s(1)
    operands = on_once(mesh, (M, K), F8), on_once(mesh, (N, K), F8, halves=2)
    compiled = compile_for(
        mesh,
        partial(matmul, out_dtype=bias, backend=backend),
        *operands,
        on(mesh, (N,), bias),
    )
    assert len(compiled.targets) == 1
    assert not [shape for shape in compiled.results("fusion") if f"[{M},{N}]" in shape]


@parametrize("feedback", ["error", "no error"])
def test_a_weight_is_split_in_one_kernel_after_its_amax(feedback):
    mesh = h200s(1)
    w = on(mesh, (K, N), jnp.float32)

    def split(w, error):
        return dual_quantize(
            w,
            error=error if feedback == "error" else None,
            orientation="both",
            backend="triton",
        )

    compiled = compile_for(mesh, split, w, w)
    assert compiled.targets == ["__gpu$xla.gpu.triton"]
    # The rest is the amax and scalars: nothing of the weight's size is written besides.
    assert not [shape for shape in compiled.results("fusion") if f"[{K},{N}]" in shape]
    assert not compiled.results("transpose")


def test_activations_are_quantized_in_one_kernel():
    mesh = h200s(1)
    call = partial(by_triton, orientation="both")
    compiled = compile_for(mesh, call, on(mesh, (8, 1024, K), jnp.bfloat16))
    assert compiled.targets == ["__gpu$xla.gpu.triton"]
    assert not compiled.results("transpose")


@slow_except("None-tcfp12-4", "xla-tcfp12_fast-4", "None-tensorwise-3")
@parametrize("name, products", [("tcfp12", 4), ("tcfp12_fast", 4), ("tensorwise", 3)])
@parametrize("backend", ["xla", None])
def test_the_products_of_a_layer_run_on_fp8_tensor_cores(name, products, backend):
    """No weight is transposed, and no product is float32, forward and backward.

    The optimizer quantized the weights.
    """
    mesh = h200s(1)
    recipe = tcfp_jax.recipe(name, backend=backend)
    m, k, n = 2048, 1024, 4096
    w = jax.ShapeDtypeStruct((k, n), jnp.float32)
    stored = jax.eval_shape(lambda w: quantize_weight(w, recipe)[0], w)
    arguments = jax.tree.map(lambda a: on(mesh, a.shape, a.dtype), (w, stored))

    def step(x, g, w, stored):
        y, vjp = jax.vjp(
            lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe, quantized=stored), x, w
        )
        return y, vjp(g)

    x = on(mesh, (m, k), jnp.bfloat16)
    g = on(mesh, (m, n), jnp.bfloat16)
    compiled = compile_for(mesh, step, x, g, *arguments)
    # one call for both halves of a weight
    by_kernel = compiled.targets.count("mosaic_gpu_v2")
    if backend == "xla":
        assert (compiled.targets.count(CUBLAS_F8), by_kernel) == (products, 0)
    else:
        assert by_kernel > 0
        found = compiled.targets.count(CUBLAS_F8) + by_kernel
        assert products - 2 <= found <= products
    for moved in compiled.results("transpose"):
        assert f"[{k},{n}]" not in moved
        assert f"[{n},{k}]" not in moved
    assert f"f32[{m},{n}]" not in compiled.text.split("ENTRY")[1]


@slow_except(
    "x_axes0-w_axes0-0-mosaic",
    "x_axes1-w_axes1-0-mosaic",
    "x_axes2-w_axes2-1-mosaic",
    "x_axes1-w_axes1-0-triton",
    "x_axes2-w_axes2-1-xla",
)
@parametrize("backend", ["xla", "triton", "mosaic"])
@parametrize(
    "x_axes, w_axes, sums",
    [(("a",), (), 0), (("a",), ("b",), 0), (("a", "b"), (None, "b"), 1)],
)
def test_products_under_a_mesh_gather_nothing(backend, x_axes, w_axes, sums):
    mesh = h200s(2, 2)
    operands = (
        on_once(mesh, (M, K), F8, *x_axes),
        on_once(mesh, (N, K), F8, *w_axes, halves=2),
    )
    compiled = compile_for(mesh, partial(matmul, backend=backend), *operands)
    assert not results(compiled, *GATHERS)
    assert (len(compiled.results("all-reduce")) > 0) == (sums > 0)


@parametrize("backend", ["xla", "triton", "mosaic"])
@parametrize(
    "dtype, scaling",
    [("float32", None), ("bfloat16", None), ("float32", Block(128, "vector"))],
)
def test_weight_gradients_of_a_shared_batch_gather_nothing(backend, dtype, scaling):
    """FSDP: eight devices have tokens of their own.

    Each keeps its part of the gradient, summed in its dtype.
    """
    mesh = h200s(8)
    tokens = 65536
    if scaling is None:
        # Triton multiplies one format
        gradients = F8 if backend == "triton" else jnp.float8_e5m2
        operands = (
            on_once(mesh, (K, tokens), F8, None, "a"),
            on_once(mesh, (1024, tokens), gradients, None, "a"),
        )
    else:
        operands = on_blocks(
            mesh, (K, tokens, 1024), scaling, (None, "a"), (None, "a"), halves=1
        )
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    call = partial(matmul, out_dtype=dtype, backend=backend)
    compiled = compile_for(mesh, call, *operands, out_shardings=sharding)
    assert not results(compiled, *GATHERS)
    moved = compiled.results("reduce-scatter") + compiled.results("all-reduce")
    assert len(moved) == 1
    assert backend == "xla" or {"float32": "f32", "bfloat16": "bf16"}[dtype] in moved[0]


@parametrize("backend", ["xla", "triton"])
def test_quantizers_under_a_mesh_move_one_number(backend):
    mesh = h200s(2, 2)
    call = partial(dual_quantize, orientation="both", backend=backend)
    compiled = compile_for(mesh, call, on(mesh, (K, N), jnp.float32, "a", "b"))
    assert not results(compiled, *GATHERS)
    assert set(compiled.results("all-reduce")) == {"f32[]"}


@parametrize("error_dtype", ["float32", "bfloat16"])
def test_an_optimizer_step_writes_errors_in_place(error_dtype):
    """Only the kernel touches donated errors.

    They are neither copied nor read for the amax.
    """
    mesh = h200s(1)
    recipe = tcfp_jax.recipe("tcfp12_fast", quantize_backend="triton")
    tx = optax.chain(
        optax.sgd(1e-3), tcfp_jax.error_feedback(recipe, error_dtype=error_dtype)
    )
    params = {"kernel": jax.ShapeDtypeStruct((K, N), jnp.float32)}
    state, params = (
        jax.tree.map(lambda a: on(mesh, a.shape, a.dtype), tree)
        for tree in (jax.eval_shape(tx.init, params), params)
    )

    def step(state, params, gradients):
        updates, state = tx.update(gradients, state, params)
        return state, optax.apply_updates(params, updates)

    compiled = compile_for(mesh, step, state, params, params, donate_argnums=(0, 1))
    assert compiled.targets == ["__gpu$xla.gpu.triton"]
    assert not [shape for shape in compiled.results("copy") if f"[{K},{N}]" in shape]
    whole = [
        line
        for line in compiled.text.split("ENTRY")[1].splitlines()
        if f"[{K},{N}]" in line
    ]
    # w, its update and max |w|
    assert len([line for line in whole if " fusion(" in line]) == 1


def test_a_rematerialized_gelu_after_a_product_of_xla_compiles():
    mesh = h200s(1)
    recipe = tcfp_jax.recipe("tensorwise", backend="xla")

    def loss(w, v, x):
        hidden = jax.checkpoint(jax.nn.gelu)(tcfp_jax.matmul(x, w, recipe=recipe))
        return jnp.sum(tcfp_jax.matmul(hidden, v, recipe=recipe).astype(jnp.float32))

    arguments = [on(mesh, shape, jnp.float32) for shape in ((512, 1024), (1024, 512))]
    compiled = compile_for(
        mesh, jax.grad(loss, (0, 1)), *arguments, on(mesh, (1024, 512), jnp.bfloat16)
    )
    # the second product and x's gradient are dead code
    assert compiled.targets.count(CUBLAS_F8) == 4


def test_kernels_serve_a_scanned_rematerialized_step():
    """Kernels by name through jit, grad, remat and scan.

    A layer has four products, and none by cuBLAS.
    """
    mesh = h200s(1)
    recipe = tcfp_jax.recipe("tcfp12_fast", backend="mosaic", quantize_backend="triton")
    layers, m, k = 3, 1024, 1024

    def loss(w, x):
        layer = jax.checkpoint(
            lambda x, w: (jax.nn.gelu(tcfp_jax.matmul(x, w, recipe=recipe)), None)
        )
        return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))

    x = on(mesh, (m, k), jnp.bfloat16)
    w = on(mesh, (layers, k, k), jnp.float32)
    compiled = compile_for(mesh, jax.grad(loss), w, x)
    # Forward once in each loop; dgrad and wgrad in the second.
    assert compiled.targets.count("mosaic_gpu_v2") == 4
    assert set(compiled.targets) == {"mosaic_gpu_v2", "__gpu$xla.gpu.triton"}


@parametrize("name", ["mxfp8e4", "mxfp4e2"])
def test_a_cast_with_a_scale_a_tile_is_one_kernel(name):
    """It is one read of x and one write, and nothing else has its size.

    Under a mesh each device casts its own part.
    """
    call = partial(formats.cast, datatype=getattr(formats, name))
    alone = compile_for(h200s(1), call, on(h200s(1), (M, K), jnp.bfloat16))
    assert alone.targets == ["__gpu$xla.gpu.triton"]
    assert not alone.results("fusion")
    assert not alone.results("copy")
    assert "f64[" not in alone.text
    split = compile_for(
        h200s(2, 2), call, on(h200s(2, 2), (M, K), jnp.bfloat16, "a", "b")
    )
    assert split.targets == ["__gpu$xla.gpu.triton"]
    assert not results(split, *GATHERS, "all-reduce")


def test_a_cast_is_one_kernel_under_vmap_and_grad():
    def loss(x):
        return jnp.sum(
            jax.vmap(lambda x: formats.cast(x, formats.mxfp8e4))(x).astype(jnp.float32)
            ** 2
        )

    compiled = compile_for(
        h200s(1), jax.value_and_grad(loss), on(h200s(1), (4, 1024, K), jnp.bfloat16)
    )
    assert compiled.targets == ["__gpu$xla.gpu.triton"]
    assert " while(" not in compiled.text


def test_an_unscaled_cast_is_one_fusion():
    compiled = compile_for(
        h200s(1),
        partial(formats.cast, datatype=formats.e4m3fn),
        on(h200s(1), (M, K), jnp.bfloat16),
    )
    assert len(re.findall(r" fusion\(", compiled.text.split("ENTRY")[1])) == 1
    assert "f64[" not in compiled.text
