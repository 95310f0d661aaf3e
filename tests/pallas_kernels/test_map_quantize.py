"""Tensors that are quantized as they are computed: bits of the definition, whatever computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pallas_kernels.expression import Expression, form_of
from pallas_kernels.map_quantize.api import map_quantize
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize.api import quantize

SHAPE = (2, 64, 256)
M, K = 128, 256


def swiglu(gate, up):
    return nn.silu(gate) * up


def swiglu_gradient(gradient, gate, up):
    return jax.vjp(swiglu, gate, up)[1](gradient)


def scaled(x, inverse_rms, gain):
    return (x.astype(jnp.float32) * (inverse_rms * gain)).astype(jnp.bfloat16)


def leaky(x, slope):
    return jnp.where(x > 0, x, x * slope)


def draw(*shapes, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [2 * jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


SCALINGS = [Tensor(), Row(), Row("float32"), Block(128, "vector"), Block(64, "vector")]
PROGRAMS = {
    "swiglu": (swiglu, draw(SHAPE, SHAPE)),
    "swiglu gradient": (swiglu_gradient, draw(SHAPE, SHAPE, SHAPE)),
    "gelu": (nn.gelu, draw(SHAPE)),
    "squared relu": (lambda x: nn.relu(x) ** 2, draw(SHAPE)),
    "norm": (scaled, [*draw(SHAPE), *draw((2, 64, 1), (K,), dtype=jnp.float32)]),
    "one value": (leaky, draw(SHAPE, ())),
}


def expression_of(program, inputs):
    return Expression.of(jax.make_jaxpr(program)(*inputs), M, K)


@pytest.mark.slow_except("swiglu-Tensor(scale='pow2')", "swiglu-Block(size=64, tile='vector')")
@pytest.mark.parametrize(
    "scaling", [Tensor(), Row(), Row("float32"), Block(128, "vector"), Block(64, "vector")], ids=str
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernel_has_the_bits_of_the_definition(name, scaling):
    program, inputs = PROGRAMS[name]
    expression = expression_of(program, inputs)
    dtype = jnp.float8_e5m2 if "gradient" in name else jnp.float8_e4m3fn
    run = lambda backend: map_quantize(
        expression, inputs, dtype, scaling, shape=SHAPE, orientation="both", backend=backend
    )
    kernel, defined = run("triton"), run("xla")
    assert jax.tree.structure(kernel) == jax.tree.structure(defined)
    for got, expected in zip(jax.tree.leaves(kernel), jax.tree.leaves(defined), strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("orientation", ["rows", "both"])
@pytest.mark.parametrize("scaling", [Tensor(), Row(), Block(64, "vector")], ids=str)
def test_it_is_quantize_of_what_the_expression_says(scaling, orientation):
    program, inputs = PROGRAMS["swiglu gradient"]
    expression = expression_of(program, inputs)
    made = map_quantize(expression, inputs, jnp.float8_e5m2, scaling, shape=SHAPE, orientation=orientation)
    results = expression(*(x.reshape(M, K) for x in inputs))
    for got, x, dtype in zip(made, results, expression.dtypes, strict=True):
        # The values are bfloat16's: rounding them to it changes nothing.
        np.testing.assert_array_equal(x, x.astype(dtype).astype(jnp.float32))
        expected = quantize(x.astype(dtype).reshape(SHAPE), jnp.float8_e5m2, scaling, orientation=orientation)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_expression_is_its_program_up_to_the_rounding_of_each_operation(name):
    program, inputs = PROGRAMS[name]
    wide = [x.astype(jnp.float64 if jax.config.jax_enable_x64 else jnp.float32) for x in inputs]
    exact, got = program(*wide), expression_of(program, inputs)(*(_flat(x) for x in inputs))
    for a, b in zip(jax.tree.leaves(exact), got, strict=True):
        a = a.astype(jnp.float32)
        size = jnp.max(jnp.abs(a))
        assert jnp.max(jnp.abs(a.reshape(M, K) - b)) <= 8 * 2.0**-9 * size


def _flat(x):
    form = form_of(x.shape, M, K)
    return x.reshape({"matrix": (M, K), "rows": (M, 1), "columns": (1, K), "one": ()}[form])


def test_equal_programs_are_equal_and_others_are_not():
    first, second = (expression_of(*PROGRAMS["swiglu"]) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != expression_of(*PROGRAMS["gelu"])


@pytest.mark.parametrize(
    ("program", "shape", "match"),
    [
        (lambda x: jnp.cumsum(x, axis=-1), (M, K), "cumsum is not elementwise"),
        (lambda x: x - x.mean(-1, keepdims=True), (M, K), "reduce_sum is not elementwise"),
        (lambda x: x.T, (M, M), "transpose is not elementwise"),
        (lambda x: x[:, :7], (M, K), "neither a matrix"),
        (lambda x: x + np.ones((M, K), np.float32), (M, K), "holds 1 arrays"),
    ],
)
def test_what_is_not_elementwise_is_refused(program, shape, match):
    x = jnp.ones(shape)
    with pytest.raises(ValueError, match=match):
        Expression.of(jax.make_jaxpr(program)(x), *shape)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(shape=(2, 64, 128)), r"over \[128, 256\]"),
        (dict(inputs=draw(SHAPE)), "takes"),
        (dict(scaling=Block(64)), "vectors"),
    ],
)
def test_arguments_that_do_not_fit(change, match):
    program, inputs = PROGRAMS["swiglu"]
    options = dict(inputs=inputs, dtype=jnp.float8_e4m3fn, scaling=Tensor(), shape=SHAPE) | change
    with pytest.raises(ValueError, match=match):
        map_quantize(expression_of(program, inputs), **options)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(value):
    program, (gate, up) = PROGRAMS["swiglu"]
    inputs = [gate.at[0, 0, 0].set(value), up]
    for backend in ("xla", "triton"):
        (made,) = map_quantize(expression_of(program, inputs), inputs, jnp.float8_e4m3fn, shape=SHAPE, backend=backend)
        assert np.isnan(made.rows.dequantize()).all()
