"""Grouped products on a GPU: the cases of the interpreter, and layers of experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import tcfp_jax
from pallas_kernels.grouped_matmul import mosaic
from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_weight_gradient
from pallas_kernels.matmul.api import SUM_BOUND
from pallas_kernels.operands import MatmulOptions
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.grouped import (
    BF16,
    E4M3,
    FORMS,
    by_groups,
    edges,
    float64_of,
    sizes_of,
    within_groups,
    wrong_sizes,
)
from tests.helpers import normal, parametrize

pytestmark = [
    pytest.mark.gpu,
    # Deprecated since jax 0.11 and still the way to 16-byte stores; products on Hopper
    # do not use it.
    pytest.mark.filterwarnings(
        "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
    ),
]
M = 1024
K = 512
N = 384
E = 6


@parametrize("backend", ["mosaic", "xla"])
@parametrize("accumulation", ["fast", "full"])
@parametrize("form", FORMS)
def test_exact_sums_are_exact(form, accumulation, backend):
    options = {
        "out_dtype": jnp.float32,
        "accumulation": accumulation,
        "backend": backend,
    }
    products = [
        (grouped_matmul, by_groups, FORMS[form].by_groups(M, K, N, E)),
        (grouped_weight_gradient, within_groups, FORMS[form].within_groups(M, K, N)),
    ]
    if FORMS[form].halves == 2:
        products.pop()  # a gradient has no residual
    for op, oracle, operands in products:
        multiply = jax.jit(partial(op, **options))
        for name, sizes in edges(M).items():
            got = multiply(*operands, jnp.array(sizes))
            assert_array_equal(got, oracle(*operands, sizes), name)
        for sizes in wrong_sizes(M):
            assert jnp.isnan(multiply(*operands, jnp.array(sizes))).all()


@parametrize("accumulation", ["fast", "full"])
@parametrize("form", ["single", "dual"])
def test_every_config_stays_within_the_bound(form, accumulation):
    m, k, n, e = 8192, 1024, 768, 16
    sizes = np.asarray(sizes_of(m, e, 0.5))
    x = quantize(normal(0, (m, k)), E4M3).rows
    drawn = normal(1, (e, n, k))
    w = jax.vmap(lambda w: dual_quantize(w).rows)(drawn)
    w = w if form == "dual" else w.drop_residual()
    exact = by_groups(x, w, sizes)
    magnitude = by_groups(abs(float64_of(x)), abs(float64_of(w)), sizes)
    bound = SUM_BOUND["mosaic", accumulation] * magnitude + 2.0**-8 * np.abs(exact)
    options = MatmulOptions(jnp.dtype(jnp.bfloat16), accumulation)
    configs = mosaic.candidates(mosaic.Problem.of(options, x, w, e))
    tiles = {(config.tile_m, config.tile_n, config.tile_k) for config in configs}
    assert len(tiles) >= 4
    for config in configs:
        multiply = partial(mosaic.KERNEL.run, options, config=config)
        got = jax.jit(multiply)(x, w, jnp.asarray(sizes))
        assert np.all(np.abs(np.float64(got) - exact) <= bound), config


@parametrize("name", ["bf16", "tensorwise", "tcfp12_single", "rowwise", "blockwise"])
def test_a_layer_of_experts_learns_as_with_xla(name):
    x = normal(0, (M, K))
    w = normal(1, (E, K, N))
    cotangent = normal(2, (M, N))
    sizes = jnp.array(edges(M)["skewed"])

    def step(x, w, backend):
        recipe = tcfp_jax.recipe(name, backend=backend)

        def layer(x, w):
            return tcfp_jax.products.grouped.grouped_matmul(x, w, sizes, recipe=recipe)

        y, vjp = jax.vjp(layer, x, w)
        return y, *vjp(cotangent)

    kernel = jax.jit(partial(step, backend="mosaic"))(x, w)
    xla = jax.jit(partial(step, backend="xla"))(x, w)
    for got, expected in zip(kernel, xla, strict=True):
        error = float(jnp.linalg.norm(got - expected))
        assert error <= 2e-3 * float(jnp.linalg.norm(expected))


@parametrize("recipe", ["bf16", "tensorwise", "blockwise"])
def test_the_kernel_is_the_first_choice_on_hopper(recipe):
    x = jnp.ones((M, K), BF16)
    w = jnp.ones((E, K, N), BF16)
    sizes = jnp.array(edges(M)["skewed"])
    multiply = partial(tcfp_jax.products.grouped.grouped_matmul, recipe=recipe)
    assert "mosaic_gpu" in jax.jit(multiply).lower(x, w, sizes).as_text()
