"""Kernels with one scale per tensor or row, small: for NVIDIA's compute-sanitizer.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform \\
        compute-sanitizer --tool memcheck --error-exitcode 9 python tests/sanitize.py

The platform allocator asks CUDA for every array, so that an access outside of one is
seen.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Row
from pallas_kernels.quantize.api import dual_quantize, quantize


def main() -> None:
    """Quantize, split and multiply with each kernel that this jax has."""
    x = jax.random.normal(jax.random.key(0), (8192, 512)).astype(jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (1024, 512))
    both = dict(orientation="both", backend="triton")
    in_e4m3 = functools.partial(quantize, dtype=jnp.float8_e4m3fn, backend="triton")
    x_q = jax.jit(functools.partial(in_e4m3, orientation="both"))(x).rows
    for orientation in ("rows", "both"):  # lines that no tile divides
        of_rows = functools.partial(in_e4m3, scaling=Row(), orientation=orientation)
        jax.block_until_ready(jax.jit(of_rows)(x[:1001, :300]))
    split = jax.jit(lambda w, e: dual_quantize(w, error=e, **both))
    w_q = split(w, w * jnp.float32(1e-3)).rows
    bits = jax.random.bits(jax.random.key(2), w.shape)
    draw = jax.jit(lambda w, b: dual_quantize(w, bits=b, **both))
    jax.block_until_ready(draw(w, bits))
    bias = jnp.ones(w.shape[0])
    for backend in ("mosaic", "triton"):
        for accumulation in ("fast", "full"):
            for weight in (w_q.drop_residual(), w_q):
                call = functools.partial(
                    matmul, accumulation=accumulation, backend=backend
                )
                out = jax.jit(call)(x_q, weight, bias)
                largest = float(jnp.abs(out).max())
                print(backend, accumulation, weight.nbytes, largest, flush=True)


if __name__ == "__main__":
    main()
