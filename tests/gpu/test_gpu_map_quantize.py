"""Activations that are quantized as they are computed, on a GPU: bits of the definition, which XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pallas_kernels.expression import Expression
from pallas_kernels.map_quantize.api import map_quantize
from pallas_kernels.operands import Block, Row, Tensor
from tests.pallas_kernels.test_map_quantize import scaled, swiglu, swiglu_gradient

pytestmark = [
    pytest.mark.gpu,
    # Deprecated since jax 0.11 and still the way to 16-byte stores.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
SHAPE = (2, 512, 1024)
M, K = 1024, 1024
SCALINGS = [Tensor(), Row(), Row("float32"), Block(128, "vector"), Block(64, "vector")]
PROGRAMS = {
    "swiglu": (swiglu, (SHAPE, SHAPE)),
    "swiglu gradient": (swiglu_gradient, (SHAPE, SHAPE, SHAPE)),
    "gelu": (nn.gelu, (SHAPE,)),
    "squared relu": (lambda x: nn.relu(x) ** 2, (SHAPE,)),
    "norm": (scaled, (SHAPE, (2, 512, 1), (K,))),
}


def draw(shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    wide = lambda shape: jnp.float32 if shape != SHAPE else jnp.bfloat16
    return [2 * jax.random.normal(k, shape).astype(wide(shape)) for k, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    "scaling", [Tensor(), Row(), Row("float32"), Block(128, "vector"), Block(64, "vector")], ids=str
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernel_has_the_bits_of_the_definition(name, scaling):
    program, shapes = PROGRAMS[name]
    inputs = draw(shapes)
    expression = Expression.of(jax.make_jaxpr(program)(*inputs), M, K)
    run = lambda backend: jax.jit(
        lambda *inputs: map_quantize(
            expression, inputs, jnp.float8_e4m3fn, scaling, shape=SHAPE, orientation="both", backend=backend
        )
    )(*inputs)
    for got, expected in zip(jax.tree.leaves(run("triton")), jax.tree.leaves(run("xla")), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("name", ["logistic", "tanh", "exp", "silu", "gelu"])
def test_functions_of_every_bfloat16(name):
    program = {"silu": nn.silu, "gelu": nn.gelu, "exp": jnp.exp}.get(name) or getattr(jax.lax, name)
    codes = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16).reshape(256, 256), jnp.bfloat16)
    x = jnp.where(jnp.isfinite(codes), codes, 0)
    expression = Expression.of(jax.make_jaxpr(program)(x), 256, 256)
    run = lambda backend: (
        map_quantize(expression, (x,), jnp.float8_e5m2, Block(64, "vector"), shape=x.shape, backend=backend)[0].rows
    )
    different = np.asarray(run("triton").values).view(np.uint8) != np.asarray(run("xla").values).view(np.uint8)
    assert different.sum() == 0, f"{different.sum()} of 65536"
