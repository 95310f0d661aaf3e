"""cuDNN's products of blocks for Blackwell: numbers on a CPU, programs for a B200.

No other GPU chooses them.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels import dispatch
from pallas_kernels.fp4_matmul import api as fp4_api
from pallas_kernels.fp4_matmul import reference
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.matmul import api as matmul_api
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Block, Fp4, MatmulOptions, Operand
from pallas_kernels.quantize.api import dual_quantize, quantize
from tcfp_jax import products as layers
from tcfp_jax import recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on, on_blocks
from tests.helpers import (
    assert_near,
    float64_of,
    normal,
    parametrize,
    refused,
    slow,
    value_and_gradients,
)

MX = Block(32, "vector")
CALL = "__cudnn$blockScaledDot"
OLD_JAX = jax.__version_info__ < (0, 12)
needs_scaled_matmul = pytest.mark.skipif(
    OLD_JAX, reason="a CPU has scaled_matmul with jax 0.12"
)
E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2


@functools.cache
def mx(seed, *shape, dtype=E4M3):
    return quantize(normal(seed, shape), dtype, MX).rows


@functools.cache
def nv(seed, *shape):
    return quantize_fp4(normal(seed, shape), Fp4())


@needs_scaled_matmul
@parametrize(("leading", "dtype"), [((8,), E4M3), ((2, 4), E5M2)], ids=["e4m3", "e5m2"])
def test_mxfp8_is_the_product_of_dequantized_blocks(leading, dtype):
    x = mx(0, *leading, 64, dtype=dtype)
    w = mx(1, 24, 64)
    bias = normal(2, (24,))
    found = matmul(x, w, bias, out_dtype=jnp.float32, backend="cudnn")
    exact = float64_of(x) @ float64_of(w).T + np.float64(bias)
    magnitude = np.abs(float64_of(x)) @ np.abs(float64_of(w)).T + np.abs(bias)
    assert found.shape == (*leading, 24)
    assert (np.abs(found - exact) <= 64 * 2.0**-24 * magnitude).all()


@needs_scaled_matmul
def test_nvfp4_is_the_product_of_dequantized_codes_and_a_nan_is_seen():
    x, w = nv(0, 8, 64), nv(1, 24, 64)
    bits = jnp.asarray(w.scale).view(jnp.uint8).at[3, 0].set(0x7F)
    w = replace(w, scale=bits.view(E4M3))
    found = fp4_matmul(x, w, activation="float4_e2m1fn", backend="cudnn")
    wide_x, wide_w = (np.float64(one.dequantize()) for one in (x, w))
    exact = wide_x @ wide_w.T
    magnitude = np.abs(wide_x) @ np.abs(wide_w).T
    assert np.isnan(found[:, 3]).all()
    others = np.arange(24) != 3
    errors = np.abs(found - exact)[:, others]
    assert (errors <= 66 * 2.0**-24 * magnitude[:, others]).all()


@slow
@needs_scaled_matmul
def test_a_recipe_trains_in_mxfp8():
    x, w, g = normal(0, (2, 32, 64)), normal(1, (64, 96)), normal(2, (2, 32, 96))
    trained = {
        backend: value_and_gradients(
            tcfp_jax.matmul, x, w, g, recipe=recipe("mxfp8", backend=backend)
        )
        for backend in ("xla", "cudnn")
    }
    for found, expected in zip(*trained.values(), strict=True):
        assert_near(found, expected, 2.0**-7 * np.abs(expected).max())


@needs_scaled_matmul
def test_a_recipe_multiplies_codes_by_codes():
    x, w = normal(0, (2, 4, 64)), normal(1, (64, 24))
    w4a4 = recipe("nvfp4", activation="float4_e2m1fn")
    packed = layers.pack_fp4(w, w4a4)
    found = layers.fp4_matmul(x, packed, recipe=replace(w4a4, backend="cudnn"))
    expected = layers.fp4_matmul(x, packed, recipe=w4a4)
    assert found.shape == (2, 4, 24)
    assert_near(found, expected, 64 * 2.0**-22 * np.abs(expected).max())


def test_codes_of_x_are_exact_in_bfloat16():
    x, w = nv(0, 8, 64), nv(1, 24, 64)
    found = fp4_matmul(x, w, activation="float4_e2m1fn")
    expected = fp4_matmul(reference.decode(x), w, out_dtype=jnp.float32) * x.outer
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


@parametrize(
    ("x", "activation", "reason"),
    [
        ("codes", "bfloat16", "activation='bfloat16'"),
        ("blocks", "bfloat16", "activation='bfloat16'"),
        ("floats", "float4_e2m1fn", "activation='float4_e2m1fn'"),
        ("blocks", "float4_e2m1fn", "x has the scaling Block"),
    ],
    ids=["codes", "blocks", "floats", "blocks as codes"],
)
def test_x_has_the_form_of_its_format(x, activation, reason):
    if x == "floats":
        given = normal(0, (8, 64))
    else:
        given = (nv if x == "codes" else mx)(0, 8, 64)
    with refused(reason, TypeError):
        fp4_matmul(given, nv(1, 24, 64), activation=activation)


REFUSED = {
    "two halves": "2 halves",
    "squares": "square",
    "short block": "k=48 is not a multiple",
    "wire": "wire=float32",
    "floats": "two operands of codes",
    "mxfp4": "vectors of NVFP4",
}


@needs_scaled_matmul
@parametrize("name", REFUSED)
def test_other_products_are_refused_by_name(name):
    with refused(REFUSED[name], NotImplementedError):
        refused_product(name)


def refused_product(name):
    """A product that cuDNN cannot run."""
    by_cudnn = functools.partial(matmul, backend="cudnn")
    codes_by_cudnn = functools.partial(fp4_matmul, backend="cudnn")
    x = mx(0, 8, 64)
    if name == "two halves":
        by_cudnn(x, dual_quantize(normal(1, (32, 64)), Block(32)).rows)
    if name == "squares":
        by_cudnn(x, quantize(normal(1, (32, 64)), E4M3, Block(32)).rows)
    if name == "short block":
        by_cudnn(mx(0, 8, 48), mx(1, 24, 48))
    if name == "wire":
        by_cudnn(x, mx(1, 24, 64), wire="float32")
    if name == "floats":
        codes_by_cudnn(normal(0, (8, 64)), nv(1, 24, 64))
    if name == "mxfp4":
        mxfp4 = quantize_fp4(normal(1, (24, 64)), Fp4("mxfp4"))
        codes_by_cudnn(mxfp4, mxfp4, activation="float4_e2m1fn")


@pytest.fixture
def tables():
    """The table of each operation, and arguments by shapes alone."""

    blocks = (mx(0, 8, 64), mx(1, 24, 64))
    codes = (nv(0, 8, 64), nv(1, 24, 64))
    blocks, codes = jax.eval_shape(lambda *pairs: pairs, blocks, codes)
    of_codes = reference.Fp4Options(jnp.dtype(jnp.float32), "float4_e2m1fn")
    return [
        (
            matmul_api.IMPLEMENTATIONS[Block],
            None,
            MatmulOptions(jnp.bfloat16, "full"),
            *blocks,
            None,
        ),
        (fp4_api.IMPLEMENTATIONS, None, of_codes, *codes),
    ]


def reasons_against(tables):
    """The reason against cuDNN of both operations on the device in use."""
    judged = [verdict for table in tables for verdict in dispatch.judge(*table)]
    found = [one.reason for one in judged if one.backend == "cudnn"]
    assert len(found) == 2
    return found


def test_a_cpu_takes_it_only_by_name(tables):
    assert all("only where it is named" in one for one in reasons_against(tables))


@pytest.mark.optimized
@h200.needs_plugin
@parametrize(
    ("target", "reason"),
    [("h200", "no tensor cores that read the scales"), ("b200", "not timed")],
    ids=["h200", "b200"],
)
def test_a_gpu_takes_it_only_by_name(target, reason, tables):
    mesh = h200s(1, target=target)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = reasons_against(tables)
    assert all(reason in one for one in found), found


@pytest.mark.optimized
@h200.needs_plugin
@parametrize("sizes", [(256, 512, 256), (48, 96, 80)], ids=str)
def test_a_b200_multiplies_by_cudnn_alone(sizes):
    m, k, n = sizes
    mesh = h200s(1, target="b200")

    def codes(rows):
        return Operand(
            on(mesh, (rows, k // 2), jnp.uint8),
            on(mesh, (rows, k // 16), E4M3),
            outer=on(mesh, (), jnp.float32),
            scaling=Fp4(),
        )

    def of_blocks(x, w):
        return matmul(x, w, backend="cudnn")

    def of_codes(x, w):
        return fp4_matmul(x, w, activation="float4_e2m1fn", backend="cudnn")

    pairs = {
        of_blocks: on_blocks(mesh, sizes, MX, halves=1),
        of_codes: (codes(m), codes(n)),
    }
    for multiply, pair in pairs.items():
        compiled = compile_for(mesh, multiply, *pair)
        assert compiled.targets == [CALL]
        assert compiled.results("dot") == []
