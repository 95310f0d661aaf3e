"""`matmul` with every scaling, on every backend, against float64.

Kernels run in their interpreters.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import tcfp_jax
from pallas_kernels.hopper import plan
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import add_product, matmul
from pallas_kernels.operands import Block, MatmulOptions, Operand, Row, Tensor
from tests.fp8_products import E4M3, E5M2, drawn, ones, within
from tests.helpers import OLD_JAX, needs_mosaic, parametrize, refused, slow_except

BACKENDS = ["xla", "triton", pytest.param("mosaic", marks=needs_mosaic)]
in_float32 = partial(matmul, out_dtype=jnp.float32)


@parametrize("backend", BACKENDS)
@parametrize("accumulation", ["fast", "full"])
@parametrize("halves, of_bias", [(1, 1), (2, 1), (2, 0)])
def test_with_one_scale_an_operand(backend, accumulation, halves, of_bias):
    x, w, exact, magnitude = drawn(Tensor(), halves)
    size = of_bias * np.float32(np.median(magnitude))
    bias = size * np.random.default_rng(1).standard_normal(128, np.float32)
    given = bias if of_bias else None
    got = in_float32(x, w, given, accumulation=accumulation, backend=backend)
    assert within(got, exact + np.float64(bias), magnitude + np.abs(bias))


@slow_except(
    "Block(size=128, tile='square')-2-xla",
    "Block(size=128, tile='square')-2-triton",
    "Block(size=32, tile='vector')-2-triton",
    "Row(scale='pow2')-1-xla",
    "Row(scale='pow2')-1-triton",
)
@parametrize("backend", BACKENDS)
@parametrize(
    "scaling, halves",
    [
        (Block(128, "square"), 2),
        (Block(128, "vector"), 1),
        (Block(64, "square"), 1),
        (Block(32, "vector"), 2),
        (Row("pow2"), 1),
        (Row("float32"), 1),
    ],
    ids=str,
)
def test_with_many_scales_an_operand(scaling, halves, backend):
    x, w, exact, magnitude = drawn(scaling, halves)
    assert within(in_float32(x, w, backend=backend), exact, magnitude)


@parametrize(
    "x_dtype, w_dtype, out_dtype",
    [
        (E4M3, E4M3, jnp.float32),
        (E5M2, E4M3, jnp.float16),
        (E4M3, E5M2, jnp.bfloat16),
        (E4M3, E4M3, jnp.float16),
    ],
)
@parametrize(
    "scaling", [Tensor("pow2"), Tensor("float32"), Row("pow2"), Block(32)], ids=str
)
def test_formats_and_results(x_dtype, w_dtype, scaling, out_dtype):
    x, w, exact, magnitude = drawn(scaling, 1, (32, 48, 16), x_dtype, w_dtype)
    got = matmul(x, w, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    rounding = max(float(jnp.finfo(out_dtype).eps), 2.0**-21)
    assert within(got, exact, magnitude, 4 * rounding)


@parametrize("backend", BACKENDS)
@parametrize("scaling", [Tensor(), Block(128)], ids=str)
def test_bfloat16_results_and_leading_axes(scaling, backend):
    x, w, exact, magnitude = drawn(scaling)
    scale = x.scale if scaling == Tensor() else x.scale.reshape(2, 128, 2)
    stack = replace(x, values=x.values.reshape(2, 128, 256), scale=scale)
    got = matmul(stack, w, jnp.ones(128), backend=backend)
    assert got.shape == (2, 128, 128)
    assert got.dtype == jnp.bfloat16
    size = magnitude + np.abs(exact) + 1
    assert within(got.reshape(256, 128), exact + 1, size, 2.0**-8)


@parametrize(
    "sizes, backend",
    [
        ((32, 64, 48), None),
        ((32, 64, 48), "triton"),
        ((1, 16, 16), None),
        ((16, 16, 1), None),
    ],
)
def test_a_product_is_added(sizes, backend):
    m, k, n = sizes
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (m, k))
    w = rng.integers(-8, 9, (n, k))
    total = rng.integers(-8, 9, (m, n))
    half = jnp.float32(0.5)
    w_dtype = E4M3 if backend else E5M2  # Triton multiplies one format
    found = add_product(
        jnp.float32(total),
        Operand(jnp.asarray(x, E4M3), half),
        Operand(jnp.asarray(w).astype(w_dtype), half),
        "full",
        backend,
    )
    stored = np.float64(jnp.asarray(w).astype(w_dtype))
    assert_array_equal(found, total + x @ stored.T / 4)


def test_ragged_sizes():
    x, w, exact, magnitude = drawn(Block(32), shape=(24, 50, 70))
    assert within(in_float32(x, w), exact, magnitude)


@parametrize("backend", BACKENDS)
@parametrize("scaling", [Tensor(), Block(128, "vector"), Row()], ids=str)
def test_a_weight_gradient_contracts_all_tokens(scaling, backend):
    case = drawn(scaling, 1)
    x, w = [
        replace(operand, values=operand.values.reshape(-1, 2, 128))
        for operand in (case.x, case.w)
    ]
    got = in_float32(x, w, backend=backend)
    assert got.shape == (256, 128)
    assert within(got, case.exact, case.magnitude)


def check_configs(configs, case, accumulation):
    assert {config.cluster for config in configs} == {1, 2}
    options = MatmulOptions(jnp.dtype(jnp.float32), accumulation)
    for config in configs:
        got = mosaic.KERNEL.run(options, case.x, case.w, None, config=config)
        assert within(got, case.exact, case.magnitude)


@needs_mosaic
@parametrize("accumulation", ["fast", "full"])
def test_every_config_of_the_kernel_with_mixed_formats(accumulation):
    configs = plan.candidates(plan.Problem(256, 256, 128, 2), accumulation)
    check_configs(configs, drawn(Tensor(), x_dtype=E5M2), accumulation)


@needs_mosaic
@slow_except("squares of 128")
@parametrize(
    "scaling, halves",
    [(Block(128), 2), (Block(64), 1), (Block(64, "vector"), 1)],
    ids=["squares of 128", "squares of 64", "vectors of 64"],
)
def test_every_config_of_the_kernel_with_blocks(scaling, halves):
    configs = plan.candidates(plan.Problem(256, 256, 128, halves, scaling), "full")
    chunked = [config for config in configs if config.chunks > 1]
    kinds = {(config.pipeline, config.chunks) for config in chunked}
    of_vectors = {("ring", 2), ("ring", 4), ("drained", 2), ("drained", 4)}
    assert kinds == (of_vectors if scaling.tile == "vector" else set())
    check_configs(configs, drawn(scaling, halves), "full")


@parametrize("backend", BACKENDS[:2])
def test_one_scale_needs_products_above_2_to_the_minus_108(backend):
    """Scales whose product is no normal float32 make the result 0.

    Rows are scaled one after the other.
    """
    x, w, exact, magnitude = drawn(Tensor(), 1)
    scale = float(x.scale * w.scale)

    def scaled(operand, scaling, by):
        rows = () if scaling == Tensor() else operand.shape[:1]
        return Operand(operand.values, jnp.full(rows, by, jnp.float32), scaling=scaling)

    def product(exponent, scaling):
        small = scaled(x, scaling, 2.0**-60)
        smaller = scaled(w, scaling, 2.0 ** (exponent + 60))
        got = in_float32(small, smaller, backend=backend)
        return np.float64(got) * (scale / 2.0**exponent)

    # Results below 2**-126 are 0, sums of codes below one or two.
    size = magnitude + 2.0**17 * scale
    assert within(product(-126, Tensor()), exact, size, 2.0**-16)
    assert not product(-127, Tensor()).any()
    assert within(product(-127, Row()), exact, size, 2.0**-16)


@parametrize("backend", BACKENDS)
def test_under_vmap(backend):
    x, w, exact, magnitude = drawn(Tensor(), 1)

    @jax.vmap
    def multiply(values):
        return in_float32(Operand(values, x.scale), w, backend=backend)

    got = multiply(x.values.reshape(2, 128, 256))
    assert within(got.reshape(256, 128), exact, magnitude)


@parametrize("backend", [None, "triton"])
def test_the_scales_of_a_residual_change_nothing(backend):
    x, w, *_ = drawn(Block(32), 2, (32, 64, 32))
    assert w.lo_scale is not None
    without = matmul(x, replace(w, lo_scale=None), backend=backend)
    assert np.array_equal(matmul(x, w, backend=backend), without)


FITS = ones((32, 48))
OTHER = ones((32, 48), E5M2)
X = ones((32, 64), scaling=Block(32, "vector"))
W = ones((32, 64), scaling=Block(32))
RAGGED = (
    ones((24, 50), scaling=Block(32, "vector")),
    ones((70, 50), scaling=Block(32)),
)


def changed(operand, **fields):
    return replace(operand, **fields)


REFUSED = [
    (
        (ones((32, 24)), ones((32, 24))),
        {"backend": "triton"},
        NotImplementedError,
        "m=32, k=24 and n=32 must be multiples of 16",
    ),
    (
        (OTHER, FITS),
        {"backend": "triton"},
        NotImplementedError,
        "one format, not float8_e5m2 x float8_e4m3fn",
    ),
    (
        (ones((100, 128)), ones((32, 128))),
        {"backend": "mosaic"},
        NotImplementedError,
        "jax" if OLD_JAX else "m=100 must be a multiple of 128",
    ),
    (
        RAGGED,
        {"backend": "mosaic"},
        NotImplementedError,
        "jax" if OLD_JAX else "m=24 must be a multiple of",
    ),
    (
        RAGGED,
        {"backend": "triton"},
        NotImplementedError,
        "m=24, k=50 and n=70 must be multiples of 16, whole blocks with",
    ),
    ((OTHER, OTHER), {}, NotImplementedError, "no tensor core"),
    ((FITS, ones((48, 32))), {}, ValueError, "x[32, 48] and w[48, 32]"),
    (
        (FITS, changed(FITS, lo=OTHER.values)),
        {},
        ValueError,
        "both halves must match",
    ),
    (
        (changed(FITS, values=jnp.ones((32, 48))), FITS),
        {},
        TypeError,
        "not an FP8 format",
    ),
    (
        (changed(FITS, lo=FITS.values), FITS),
        {},
        NotImplementedError,
        "multiply x_hi and x_lo apart",
    ),
    ((FITS, FITS, jnp.ones(48)), {}, ValueError, "bias has shape"),
    (
        (FITS, FITS),
        {"accumulation": "slow"},
        ValueError,
        "accumulation='slow' is unknown",
    ),
    (
        (
            changed(X, scaling=Block(64, X.scaling.tile)),
            changed(W, scaling=Block(64, W.scaling.tile)),
        ),
        {},
        ValueError,
        "has scales [32, 1], but these are [32, 2]",
    ),
    (
        (changed(X, scale=X.scale.astype(jnp.float32)), W),
        {},
        TypeError,
        "the scales of x have dtype float32, not float8_e8m0fnu",
    ),
    (
        (changed(X, scaling=Block(64, "vector")), W),
        {},
        NotImplementedError,
        "no product combines them; quantize x with",
    ),
    ((X, W), {"accumulation": "fast"}, ValueError, 'accumulation="fast" with Block'),
]


@parametrize("operands, options, error, message", REFUSED)
def test_operands_are_refused_with_the_reason(operands, options, error, message):
    with refused(re.escape(message), error):
        matmul(*operands, **options)


def test_e5m2_twice_is_not_added():
    with refused("float8_e5m2 x float8_e5m2", NotImplementedError):
        add_product(jnp.zeros((32, 32)), OTHER, OTHER, "full")


@slow_except("tcfp12-triton")
@parametrize("backend", BACKENDS[1:])
@parametrize("name", ["tcfp12", "tcfp12_fast"])
def test_a_layer_and_its_gradients(backend, name):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 256)).astype(np.float32)
    w = rng.standard_normal((256, 128)).astype(np.float32)

    def gradients(backend, quantize_backend):
        recipe = tcfp_jax.recipe(
            name, backend=backend, quantize_backend=quantize_backend
        )

        def loss(x, w):
            return jnp.sum(jnp.sin(tcfp_jax.matmul(x, w, recipe=recipe)))

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w))

    # The sums of a product differ in their last bits, which may move a gradient to the
    # neighbouring FP8 value.
    found = gradients(backend, "triton")
    for got, expected in zip(found, gradients("xla", "xla"), strict=True):
        assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected)
