"""The library without Pallas-Triton, which JAX will remove: everything runs by XLA and
Mosaic, with clear reasons.
"""

import subprocess
import sys
from pathlib import Path

from tests.helpers import OLD_JAX

# None in `sys.modules` makes an import raise.
SCRIPT = """
import sys

sys.modules.update(
    {"jax.experimental.pallas.triton": None, "jax._src.pallas.triton": None}
)
import jax, jax.numpy as jnp
import tcfp_jax
from pallas_kernels import dispatch, tiled
from pallas_kernels.fp4_matmul.unpacked import unpack
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Block, Fp4, Operand, Quantization, Tensor
from pallas_kernels.quantize.api import (
    DUAL_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    dual_quantize,
    quantize,
)
from tcfp_jax import formats
from tcfp_jax.formats import casting
from tcfp_jax.formats.nvfp4_arrays import quantize_nvfp4, quantize_values

x = jax.random.normal(jax.random.key(0), (128, 128))
q, w = quantize(x, jnp.float8_e4m3fn, orientation="both").rows, dual_quantize(x).rows
product = matmul(q, w)
if "mosaic" in sys.argv:
    interpreted = matmul(q, w, backend="mosaic")
    assert jnp.allclose(
        product.astype(jnp.float32),
        interpreted.astype(jnp.float32),
        rtol=0.01,
        atol=0.01,
    )
assert jnp.allclose(formats.cast(x, formats.mxfp8e4), x, rtol=0.13, atol=0.01)
codes, scales, outer = quantize_nvfp4(x)
if "mosaic" in sys.argv:
    interpreted = quantize_values(x, -1, backend="mosaic")
    assert (quantize_values(x, -1).values == interpreted.values).all()
jax.eval_shape(
    unpack, Operand(codes, scales, scaling=Fp4(rule="fold_exact"), outer=outer)
)

params = tcfp_jax.store(
    {"kernel": x}, tcfp_jax.recipe("tcfp12_single"), key=jax.random.key(1)
)
tx = tcfp_jax.optim.adamw(1e-3, moments="8bit", key=jax.random.key(2))


def loss(params):
    y = tcfp_jax.matmul(x, params["kernel"], recipe="tcfp12_single")
    return jnp.mean(y**2)


@jax.jit
def step(params, state):
    value, gradients = tcfp_jax.value_and_grad(loss)(params)
    updates, state = tx.update(gradients, state, params)
    return value, tcfp_jax.apply_updates(params, updates), state


value, params, state = step(params, tx.init(params))
assert step(params, state)[0] < value


def of_quantizer():
    quantize(x, jnp.float8_e4m3fn, backend="triton")


def of_product():
    matmul(q, q, backend="triton")


for call in (of_quantizer, of_product):
    try:
        call()
    except NotImplementedError as error:
        assert f"triton: jax {jax.__version__} has no Pallas-Triton" in str(error), (
            error
        )
    else:
        raise AssertionError("a kernel ran")
for module in (dispatch, tiled, casting):  # programs for another device than this one
    module.device_kind = lambda: "NVIDIA H200"
if "mosaic" in sys.argv:  # which comes first, though it was not timed
    for scaling in (Tensor(), Block(64, "square"), Block(64, "vector")):
        options = Quantization(q.values.dtype, scaling, "both")
        tables = [(IMPLEMENTATIONS, None), (DUAL_IMPLEMENTATIONS, x, None, None)]
        for table, *rest in tables[: 1 + scaling.serves_both]:
            judged = dispatch.judge(table[type(scaling)], None, options, x, *rest)
            assert judged[0].reason is None, judged
explained = str(tcfp_jax.explain((8192, 4096), (4096, 16384), "tensorwise"))
assert f"not triton: jax {jax.__version__} has no Pallas-Triton" in explained, explained
assert jnp.allclose(formats.cast(x, formats.mxfp8e4), x, rtol=0.13, atol=0.01)
"""


def test_everything_runs_by_xla_and_mosaic():
    # whose interpreter needs a new jax
    engines = [] if OLD_JAX else ["mosaic"]
    run = [sys.executable, "-c", SCRIPT, *engines]
    done = subprocess.run(
        run, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
