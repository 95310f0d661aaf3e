"""Grouped products on a GPU against a loop over the groups in float64, for any sizes of
groups, and in layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels.grouped_matmul import mosaic
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.operands import Block, Product, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.grouped import (
    BF16,
    E4M3,
    E5M2,
    by_groups,
    float64_of,
    integers,
    sizes_of,
    within_groups,
)

pytestmark = [
    pytest.mark.gpu,
    # Deprecated since jax 0.11 and still the way to 16-byte stores; products on Hopper
    # do not use it.
    pytest.mark.filterwarnings(
        "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
    ),
]
M, K, N, E = 1024, 512, 384, 6
SIZES = {
    "skewed": [437, 3, 193, 0, 264, 127],
    "one group": [0, 0, M, 0, 0, 0],
    "single rows": [1] * E,
    "sum below m": [130, 0, 7, 255, 8, 0],
    "nothing": [0] * E,
    "tiles": [128, 256, 0, 128, 384, 128],
    "ladder": [63, 65, 31, 2, 95, 5],
}
WRONG = [[M, 1, 0, 0, 0, 0], [30, -1, 2, 0, 0, 0]]
FORMS = {
    "bf16": (BF16, BF16, None, 1),
    "tensor": (E4M3, E4M3, Tensor(), 1),
    "mixed": (E5M2, E4M3, Tensor(), 1),
    "residual": (E4M3, E4M3, Tensor(), 2),
    "rows": (E4M3, E5M2, Row(), 1),
    "squares": (E4M3, E4M3, Block(128), 1),
    "small squares": (E5M2, E4M3, Block(64), 2),
    "vectors": (E4M3, E5M2, Block(128, "vector"), 1),
}


@pytest.mark.parametrize("backend", ["mosaic", "xla"])
@pytest.mark.parametrize("accumulation", ["fast", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_exact_sums_are_exact(form, accumulation, backend):
    x_dtype, w_dtype, scaling, halves = FORMS[form]
    of_rows = scaling if scaling is None else scaling.along_rows
    x, w = (
        integers(x_dtype, (M, K), of_rows),
        integers(w_dtype, (N, K), scaling, (E,), halves, seed=1),
    )
    options = dict(out_dtype=jnp.float32, accumulation=accumulation, backend=backend)
    forward = jax.jit(functools.partial(grouped_matmul, **options))
    for name, sizes in SIZES.items():
        np.testing.assert_array_equal(
            forward(x, w, jnp.array(sizes)), by_groups(x, w, sizes), name
        )
    assert all(jnp.isnan(forward(x, w, jnp.array(sizes))).all() for sizes in WRONG)
    if halves == 1:
        columns, g = (
            integers(w_dtype, (K, M), of_rows),
            integers(x_dtype, (N, M), of_rows, seed=1),
        )
        gradient = jax.jit(functools.partial(grouped_weight_gradient, **options))
        for name, sizes in SIZES.items():
            got = gradient(columns, g, jnp.array(sizes))
            np.testing.assert_array_equal(got, within_groups(columns, g, sizes), name)
        assert all(
            jnp.isnan(gradient(columns, g, jnp.array(sizes))).all() for sizes in WRONG
        )


@pytest.mark.parametrize("accumulation", ["fast", "full"])
@pytest.mark.parametrize("form", ["single", "dual"])
def test_every_config_stays_within_the_bound(form, accumulation):
    m, k, n, e = 8192, 1024, 768, 16
    sizes = np.asarray(sizes_of(m, e, 0.5))
    x = quantize(jax.random.normal(jax.random.key(0), (m, k)), E4M3).rows
    w = jax.vmap(lambda w: dual_quantize(w).rows)(
        jax.random.normal(jax.random.key(1), (e, n, k))
    )
    w = w if form == "dual" else w.drop_residual()
    exact, magnitude = (
        by_groups(*pair, sizes)
        for pair in ((x, w), (abs(float64_of(x)), abs(float64_of(w))))
    )
    options = Product(jnp.dtype(jnp.bfloat16), accumulation)
    configs = mosaic.candidates(mosaic.Problem.of(options, x, w, e))
    assert (
        len({(config.tile_m, config.tile_n, config.tile_k) for config in configs}) >= 4
    )
    for config in configs:
        got = jax.jit(functools.partial(mosaic.grouped_matmul, options, config=config))(
            x, w, jnp.asarray(sizes)
        )
        error = np.abs(np.asarray(got, np.float64) - exact)
        assert np.all(
            error
            <= SUM_BOUND["mosaic", accumulation] * magnitude + 2.0**-8 * np.abs(exact)
        ), config


@pytest.mark.parametrize(
    "name", ["bf16", "tensorwise", "tcfp12_single", "rowwise", "blockwise"]
)
def test_a_layer_of_experts_learns_with_the_kernel_as_with_xla(name):
    x, w = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(M, K), (E, K, N)])
    )
    sizes, cotangent = (
        jnp.array(SIZES["skewed"]),
        jax.random.normal(jax.random.key(2), (M, N)),
    )

    def step(x, w, backend):
        recipe = tcfp_jax.recipe(name, backend=backend)
        y, vjp = jax.vjp(
            lambda x, w: tcfp_jax.products.grouped.grouped_matmul(
                x, w, sizes, recipe=recipe
            ),
            x,
            w,
        )
        return y, *vjp(cotangent)

    kernel, xla = (
        jax.jit(functools.partial(step, backend=backend))(x, w)
        for backend in ("mosaic", "xla")
    )
    for got, expected in zip(kernel, xla, strict=True):
        assert float(jnp.linalg.norm(got - expected)) <= 2e-3 * float(
            jnp.linalg.norm(expected)
        )


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "blockwise"])
def test_the_kernel_is_the_first_choice_on_hopper(recipe):
    x, w, sizes = (
        jnp.ones((M, K), BF16),
        jnp.ones((E, K, N), BF16),
        jnp.array(SIZES["skewed"]),
    )
    call = jax.jit(
        lambda *a: tcfp_jax.products.grouped.grouped_matmul(*a, recipe=recipe)
    )
    assert "mosaic_gpu" in call.lower(x, w, sizes).as_text()
