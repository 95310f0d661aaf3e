"""`matmul` of operands with every scaling, on every backend, against float64; kernels
run in their interpreters.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels.hopper import plan
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import add_product, matmul
from pallas_kernels.operands import Block, Operand, Product, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.helpers import float64_of

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OLD_JAX = jax.__version_info__[:2] < plan.SMALLEST_JAX
needs_mosaic = pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 products need jax 0.11")
BACKENDS = ["xla", "triton", pytest.param("mosaic", marks=needs_mosaic)]
# Of sums in float32, per unit of |x| @ |w|.
ROUNDING = 2.0**-19


@functools.cache
def operands(scaling, halves=2, m=256, k=256, n=128, x_dtype=E4M3, w_dtype=E4M3):
    """(x, w, x @ w.T, |x| @ |w|.T) with the products in float64; rows of very different
    sizes.
    """

    rng = np.random.default_rng(0)
    drawn = [
        (
            rng.standard_normal((rows, k)) * np.exp(2 * rng.standard_normal((rows, 1)))
        ).astype(np.float32)
        for rows in (m, n)
    ]

    @jax.jit
    def quantized(x, w):
        x = quantize(x, x_dtype, scaling.along_rows).rows
        return x, (
            dual_quantize(w, scaling, dtype=w_dtype)
            if halves == 2
            else quantize(w, w_dtype, scaling)
        ).rows

    x, w = quantized(*drawn)
    a, b = float64_of(x), float64_of(w)
    return x, w, a @ b.T, np.abs(a) @ np.abs(b).T


def within(got, exact, magnitude, bound=ROUNDING):
    return np.all(np.abs(np.asarray(got, np.float64) - exact) <= bound * magnitude)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulation", ["fast", "full"])
@pytest.mark.parametrize(("halves", "of_bias"), [(1, 1), (2, 1), (2, 0)])
def test_with_one_scale_an_operand(backend, accumulation, halves, of_bias):
    x, w, exact, magnitude = operands(Tensor(), halves)
    bias = (
        of_bias
        * np.random.default_rng(1).standard_normal(128, np.float32)
        * np.float32(np.median(magnitude))
    )
    got = matmul(
        x,
        w,
        bias if of_bias else None,
        out_dtype=jnp.float32,
        accumulation=accumulation,
        backend=backend,
    )
    assert within(got, exact + np.float64(bias), magnitude + np.abs(bias))


@pytest.mark.slow_except(
    "Block(size=128, tile='square')-2-xla",
    "Block(size=128, tile='square')-2-triton",
    "Block(size=32, tile='vector')-2-triton",
    "Row(scale='pow2')-1-xla",
    "Row(scale='pow2')-1-triton",
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
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
    x, w, exact, magnitude = operands(scaling, halves)
    got = matmul(x, w, out_dtype=jnp.float32, backend=backend)
    assert within(got, exact, magnitude)


@pytest.mark.parametrize(
    "x_dtype, w_dtype, out_dtype",
    [
        (E4M3, E4M3, jnp.float32),
        (E5M2, E4M3, jnp.float16),
        (E4M3, E5M2, jnp.bfloat16),
        (E4M3, E4M3, jnp.float16),
    ],
)
@pytest.mark.parametrize(
    "scaling", [Tensor("pow2"), Tensor("float32"), Row("pow2"), Block(32)], ids=str
)
def test_formats_and_results(x_dtype, w_dtype, scaling, out_dtype):
    x, w, exact, magnitude = operands(scaling, 1, 32, 48, 16, x_dtype, w_dtype)
    got = matmul(x, w, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    assert within(
        got, exact, magnitude, 4 * max(float(jnp.finfo(out_dtype).eps), 2.0**-21)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [Tensor(), Block(128)], ids=str)
def test_bfloat16_results_and_leading_axes(scaling, backend):
    x, w, exact, magnitude = operands(scaling)
    scale = x.scale if scaling == Tensor() else x.scale.reshape(2, 128, 2)
    stack = dataclasses.replace(x, values=x.values.reshape(2, 128, 256), scale=scale)
    bias = jnp.ones(128)
    got = matmul(stack, w, bias, backend=backend)
    assert got.shape == (2, 128, 128) and got.dtype == jnp.bfloat16
    assert within(
        got.reshape(256, 128), exact + 1, magnitude + np.abs(exact) + 1, 2.0**-8
    )


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("sizes", [(32, 64, 48), (1, 16, 16), (16, 16, 1)])
def test_a_product_is_added(sizes, backend):
    m, k, n = sizes
    if backend and 1 in sizes:
        pytest.skip("the kernel takes whole tiles")
    draw = lambda *shape, seed=0: np.random.default_rng(seed).integers(-8, 9, shape)
    x, w, total = (
        jnp.asarray(draw(*shape, seed=i))
        for i, shape in enumerate(((m, k), (n, k), (m, n)))
    )
    w = w.astype(E4M3 if backend else E5M2)  # Triton multiplies one format
    scaled, wide = (
        lambda values: Operand(values, jnp.float32(0.5)),
        total.astype(jnp.float32),
    )
    found = add_product(wide, scaled(x.astype(E4M3)), scaled(w), "full", backend)
    np.testing.assert_array_equal(
        found, np.asarray(total) + np.asarray(x) @ np.asarray(w.astype(int)).T / 4
    )
    with pytest.raises(NotImplementedError, match="float8_e5m2 x float8_e5m2"):
        add_product(
            wide,
            scaled(x.astype(E5M2)),
            scaled(w.astype(jnp.float32).astype(E5M2)),
            "full",
        )


def test_ragged_sizes():
    x, w, exact, magnitude = operands(Block(32), m=24, k=50, n=70)
    assert within(matmul(x, w, out_dtype=jnp.float32), exact, magnitude)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [Tensor(), Block(128, "vector"), Row()], ids=str)
def test_a_weight_gradient_contracts_all_tokens(scaling, backend):
    x, w, exact, magnitude = operands(scaling, 1)
    tokens = [
        dataclasses.replace(o, values=o.values.reshape(-1, 2, 128)) for o in (x, w)
    ]
    got = matmul(*tokens, out_dtype=jnp.float32, backend=backend)
    assert got.shape == (256, 128) and within(got, exact, magnitude)


@needs_mosaic
@pytest.mark.parametrize("accumulation", ["fast", "full"])
def test_every_config_of_the_kernel_with_mixed_formats(accumulation):
    x, w, exact, magnitude = operands(Tensor(), x_dtype=E5M2)
    configs = plan.candidates(plan.Problem(256, 256, 128, 2), accumulation)
    assert {config.cluster for config in configs} == {1, 2}
    for config in configs:
        got = mosaic.matmul(
            Product(jnp.dtype(jnp.float32), accumulation), x, w, None, config=config
        )
        assert within(got, exact, magnitude)


@needs_mosaic
@pytest.mark.slow_except("squares of 128")
@pytest.mark.parametrize(
    "scaling, halves",
    [(Block(128), 2), (Block(64), 1), (Block(64, "vector"), 1)],
    ids=["squares of 128", "squares of 64", "vectors of 64"],
)
def test_every_config_of_the_kernel_with_blocks(scaling, halves):
    x, w, exact, magnitude = operands(scaling, halves)
    configs = plan.candidates(plan.Problem(256, 256, 128, halves, scaling), "full")
    assert {config.cluster for config in configs} == {1, 2}
    vectors = {
        (config.pipeline, config.chunks) for config in configs if config.chunks > 1
    }
    assert vectors == (
        set()
        if scaling.tile == "square"
        else {(p, c) for p in ("ring", "drained") for c in (2, 4)}
    )
    for config in configs:
        got = mosaic.matmul(
            Product(jnp.dtype(jnp.float32), "full"), x, w, None, config=config
        )
        assert within(got, exact, magnitude)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_one_scale_an_operand_needs_products_above_2_to_the_minus_108(backend):
    """Scales whose product is no normal float32 make the result 0; rows are scaled one
    after the other.
    """
    x, w, exact, magnitude = operands(Tensor(), 1)
    scale = float(x.scale * w.scale)
    multiply = functools.partial(matmul, out_dtype=jnp.float32, backend=backend)

    def scaled_by(exponent, scaling):
        by = [
            np.full(() if scaling == Tensor() else o.shape[0], s, np.float32)
            for o, s in ((x, 2.0**-60), (w, 2.0 ** (exponent + 60)))
        ]
        small = [
            Operand(o.values, jnp.asarray(s), scaling=scaling)
            for o, s in zip((x, w), by, strict=True)
        ]
        return np.asarray(multiply(*small), np.float64) * (scale / 2.0**exponent)

    # Results below 2**-126 are 0, sums of codes below one or two.
    size = magnitude + 2.0**17 * scale
    assert within(scaled_by(-126, Tensor()), exact, size, 2.0**-16)
    assert not scaled_by(-127, Tensor()).any()
    assert within(scaled_by(-127, Row()), exact, size, 2.0**-16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_vmap(backend):
    x, w, exact, magnitude = operands(Tensor(), 1)
    call = jax.vmap(
        lambda values: matmul(
            Operand(values, x.scale), w, out_dtype=jnp.float32, backend=backend
        )
    )
    assert within(
        call(x.values.reshape(2, 128, 256)).reshape(256, 128), exact, magnitude
    )


@pytest.mark.parametrize("backend", [None, "triton"])
def test_the_scales_of_a_residual_change_nothing(backend):
    x, w, *_ = operands(Block(32), 2, 32, 64, 32)
    assert w.lo_scale is not None
    without = matmul(x, dataclasses.replace(w, lo_scale=None), backend=backend)
    assert np.array_equal(matmul(x, w, backend=backend), without)


def ones(shape, dtype=E4M3):
    return Operand(jnp.ones(shape, dtype), jnp.float32(1))


in_blocks = lambda backend: matmul(
    *operands(Block(32), m=24, k=50, n=70)[:2], backend=backend
)
FITS, OTHER, NO_KERNEL = ones((32, 48)), ones((32, 48), E5M2), NotImplementedError
REFUSED = [
    (
        NO_KERNEL,
        "m=32, k=24 and n=32 must be multiples of 16",
        lambda: matmul(*[ones((32, 24))] * 2, backend="triton"),
    ),
    (
        NO_KERNEL,
        "one format, not float8_e5m2 x float8_e4m3fn",
        lambda: matmul(OTHER, FITS, backend="triton"),
    ),
    (
        NO_KERNEL,
        "jax" if OLD_JAX else "m=100 must be a multiple of 128",
        lambda: matmul(ones((100, 128)), ones((32, 128)), backend="mosaic"),
    ),
    (
        NO_KERNEL,
        "jax" if OLD_JAX else "m=24 must be a multiple of",
        lambda: in_blocks("mosaic"),
    ),
    (
        NO_KERNEL,
        "m=24, k=50 and n=70 must be multiples of 16, whole blocks with",
        lambda: in_blocks("triton"),
    ),
    (NO_KERNEL, "no tensor core", lambda: matmul(OTHER, OTHER)),
    (ValueError, "x[32, 48] and w[48, 32]", lambda: matmul(FITS, ones((48, 32)))),
    (
        ValueError,
        "both halves must match",
        lambda: matmul(FITS, dataclasses.replace(FITS, lo=OTHER.values)),
    ),
    (
        TypeError,
        "not an FP8 format",
        lambda: matmul(dataclasses.replace(FITS, values=jnp.ones((32, 48))), FITS),
    ),
    (
        NO_KERNEL,
        "multiply x_hi and x_lo apart",
        lambda: matmul(dataclasses.replace(FITS, lo=FITS.values), FITS),
    ),
    (ValueError, "bias has shape", lambda: matmul(FITS, FITS, jnp.ones(48))),
    (
        ValueError,
        "accumulation='slow' is unknown",
        lambda: matmul(FITS, FITS, accumulation="slow"),
    ),
]


@pytest.mark.parametrize("error, message, call", REFUSED)
def test_what_is_refused_and_why(error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_scales_that_do_not_fit_their_values():
    x, w, *_ = operands(Block(32), 2, 32, 64, 32)
    wider = [dataclasses.replace(o, scaling=Block(64, o.scaling.tile)) for o in (x, w)]
    with pytest.raises(
        ValueError, match=re.escape("has scales [32, 1], but these are [32, 2]")
    ):
        matmul(*wider)
    with pytest.raises(
        TypeError, match="the scales of x have dtype float32, not float8_e8m0fnu"
    ):
        matmul(dataclasses.replace(x, scale=x.scale.astype(jnp.float32)), w)
    with pytest.raises(
        NotImplementedError, match="no product combines them; quantize x with"
    ):
        matmul(dataclasses.replace(x, scaling=Block(64, "vector")), w)
    with pytest.raises(ValueError, match='accumulation="fast" with Block'):
        matmul(x, w, accumulation="fast")


@pytest.mark.slow_except("tcfp12-triton")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", ["tcfp12", "tcfp12_fast"])
def test_a_layer_and_its_gradients(backend, name):
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((128, 256), (256, 128))
    )

    def gradients(backend, quantize_backend):
        recipe = tcfp_jax.recipe(
            name, backend=backend, quantize_backend=quantize_backend
        )

        def loss(x, w):
            return jnp.sum(jnp.sin(tcfp_jax.matmul(x, w, recipe=recipe)))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)

    # The sums of a product differ in their last bits, which may move a gradient to the
    # neighbouring FP8 value.
    for got, expected in zip(
        *map(jax.tree.leaves, (gradients(backend, "triton"), gradients("xla", "xla"))),
        strict=True,
    ):
        assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected)
