"""Arrays of more than 2**31 FP8 values, which Pallas-Triton addresses with 32 bits.

The limits are lowered to sizes of tests.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import pallas_triton
from pallas_kernels.adamw import triton_kernel
from pallas_kernels.adamw.api import adamw
from pallas_kernels.operands import Row
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.adamw import KEY, data, rates
from tests.helpers import (
    drawn,
    entry,
    parametrize,
    refused,
    same_bits,
    slow_except,
    stacked,
)

K, N = 16, 384


@pytest.fixture
def limits(monkeypatch):
    """Function that lowers the limits to numbers of values and of bytes."""

    def lower(values, in_bytes=2**32):
        monkeypatch.setattr(pallas_triton, "_OFFSETS", values)
        monkeypatch.setattr(pallas_triton, "_BYTES_OF_32_BIT_OFFSETS", in_bytes)

    return lower


@slow_except("6-2-3-both", "5-1-5-rows")
@parametrize(
    "size, most, parts, orientation",
    [(6, 5, 2, "rows"), (6, 2, 3, "both"), (5, 1, 5, "rows")],
)
def test_adamw_takes_a_stack_by_parts(
    size, most, parts, orientation, limits, monkeypatch
):
    stack = stacked([data((K, N), seed) for seed in range(size)])
    keys = jnp.stack([KEY + i for i in range(size)])
    called = []
    call = triton_kernel._call
    monkeypatch.setattr(
        triton_kernel,
        "_call",
        lambda *args, **options: called.append(args[3]) or call(*args, **options),
    )
    limits(most * K * N)
    step = partial(adamw, orientation=orientation)
    mapped = jax.vmap(lambda x, key: step(*x, rates(), key, backend="triton"))
    found = jax.jit(mapped)(stack, keys)
    assert (size // parts, K, N) in {gradient.shape for gradient in called}
    one = jax.jit(lambda x, key: step(*x, rates(), key, backend="xla"))
    expected = [one(entry(stack, i), keys[i]) for i in range(size)]
    assert same_bits(found, stacked(expected))


def test_a_quantizer_of_tiles_runs_its_definition(limits, monkeypatch):
    x = drawn(K, 3 * N)
    expected = jax.jit(
        lambda x: (quantize(x, jnp.float8_e4m3fn, orientation="both"), dual_quantize(x))
    )(x)
    limits(K * N)
    monkeypatch.setattr(
        pallas_triton, "pallas_call", lambda *args, **options: pytest.fail("a kernel")
    )

    def by_triton(x):
        q = quantize(x, jnp.float8_e4m3fn, orientation="both", backend="triton")
        return q, dual_quantize(x, backend="triton")

    assert same_bits(jax.jit(by_triton)(x), expected)


def test_other_kernels_refuse_and_say_why(limits):
    x = jnp.ones((K, 5 * N), jnp.float32)
    limits(2 * K * N)
    with refused(r"\[16, 1920\] has more than .* backend=\"xla\"", NotImplementedError):
        jax.jit(
            lambda x: quantize(x, jnp.float8_e4m3fn, scaling=Row(), backend="triton")
        )(x)
    # Beyond 2**32 bytes offsets have 64 bits.
    limits(2 * K * N, in_bytes=4 * K * N)
    quantize(x, jnp.float8_e4m3fn, scaling=Row(), backend="triton")
