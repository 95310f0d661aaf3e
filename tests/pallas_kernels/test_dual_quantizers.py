"""`dual_quantize` with every scaling: against NumPy's formulas, and kernels against the
reference.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pallas_kernels.operands import Block, Tensor
from pallas_kernels.quantize.api import dual_quantize
from tests.helpers import (
    decibels,
    entry,
    float64_of,
    parametrize,
    same_bits,
    slow_except,
)
from tests.quantizer_oracles import (
    E4M3,
    E5M2,
    LARGEST,
    SQUARES,
    by_both,
    flushed,
    formula,
    hard_values,
    narrow,
    optimized,
    parts,
    split,
)

W = hard_values((64, 32)) * np.float32(1e-2)
ERROR = hard_values((64, 32), 1) * np.float32(1e-6)
BITS = np.random.default_rng(2).integers(0, 2**32, (128, 256), np.uint32)


@parametrize(
    "scaling, dtype",
    [
        (Tensor(), E4M3),
        (Tensor(), E5M2),
        *((square, E4M3) for square in SQUARES),
        (Block(64, "vector"), E5M2),
    ],
    ids=str,
)
def test_both_halves_are_the_formula_and_nothing_is_lost(scaling, dtype):
    w = hard_values((72, 150))
    error = hard_values((72, 150), 1) * np.float32(1e-6)
    orientation = "both" if scaling.serves_both else "rows"
    q = split(w, scaling, dtype=dtype, error=error, orientation=orientation)
    target = flushed(w + error)
    for index, part in parts(scaling, w.shape):
        scale, multiplier = formula(scaling, target[part], LARGEST[dtype])
        assert np.float32(q.rows.scale)[index] == scale
        scaled = (target[part] * multiplier).astype(np.float32)
        hi = scaled.astype(narrow(dtype))
        rest = (np.float64(scaled) - np.float64(hi)).astype(np.float32)
        lo = rest.astype(narrow(dtype))
        assert same_bits(np.asarray(q.rows.hi)[part], hi)
        assert np.array_equal(np.float32(np.asarray(q.rows.lo)[part]), np.float32(lo))
    whole = float64_of(q.rows) + np.float64(q.error)
    assert_array_equal(whole, target.astype(np.float64))
    if scaling.serves_both:
        assert q.columns.shape == (150, 72)
        assert same_bits(q.columns, q.rows.turn())
        assert_array_equal(float64_of(q.columns), float64_of(q.rows).T)


def test_a_block_without_residual_says_so():
    w = np.full((64, 96), 0.5, np.float32)
    # a residual far below the grid rounds to minus zero
    w[0, 0] = np.nextafter(np.float32(0.5), 0)
    w[40, 70] = 0.3
    for q in by_both(split, w, Block(32)):
        lo = q.rows.lo
        assert np.signbit(np.float32(lo[0, 0]))
        assert lo[0, 0] == 0
        is_skipped = np.asarray(q.rows.lo_scale).view(np.uint8) == 0
        assert is_skipped.tolist() == [[True] * 3, [True, True, False]]


def test_lo_catches_values_that_a_stale_scale_clips():
    x = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
    largest = np.max(np.abs(x))
    fresh = split(x, amax=largest).rows
    stale = split(x, amax=largest * np.float32(0.5)).rows
    assert float(jnp.max(jnp.abs(stale.hi.astype(jnp.float32)))) == 448
    assert decibels(x, float64_of(fresh)) > 50
    assert decibels(x, float64_of(stale)) > 50


@slow_except(
    "Tensor(scale='pow2')-nearest-bfloat16-both",
    "Tensor(scale='pow2')-stochastic-float32-both",
    "Tensor(scale='pow2')-nearest-float8_e5m2-rows",
    "Block(size=64, tile='square')-stochastic-None-both",
)
@parametrize(
    "scaling, rounding, error, orientation",
    [
        *optimized(
            (Tensor(), "nearest", None, "both"),
            (Tensor(), "nearest", "bfloat16", "both"),
            (Tensor(), "nearest", None, "rows"),
            (Tensor(), "stochastic", "float32", "both"),
            (Tensor(), "stochastic", None, "rows"),
        ),
        (Tensor(), "nearest", "float8_e5m2", "rows"),
        (Block(32), "nearest", "float32", "both"),
        (Block(64), "stochastic", None, "both"),
        (Block(128), "nearest", "bfloat16", "both"),
        (Block(128), "nearest", None, "rows"),
    ],
    ids=str,
)
def test_the_kernel_is_the_reference_bit_for_bit(scaling, rounding, error, orientation):
    w = W
    if isinstance(scaling, Block):
        w = hard_values((128, 256))
        w[:64, :128] = 0.5
    options = dict(orientation=orientation)
    if error is not None:
        small = hard_values(w.shape, 1) * np.float32(1e-4)
        options["error"] = small.astype(jnp.dtype(error))
    if rounding == "stochastic":
        options["bits"] = BITS[: w.shape[0], : w.shape[1]]
    got, expected = by_both(split, w, scaling, **options)
    assert same_bits(got, expected)
    assert np.count_nonzero(np.float32(got.rows.lo)) > 0


@pytest.mark.optimized
@slow_except("triton")
@parametrize("backend", ["triton", "xla"])
def test_transformations_change_no_bit(backend):
    """With an error and with random bits; under XLA single operations, too."""
    bits = BITS[:64, :32]

    def call(w, error):
        both = partial(dual_quantize, w, orientation="both", backend=backend)
        return both(error=error), both(bits=bits)

    def loss(w, error):
        return jnp.sum(w), call(jax.lax.stop_gradient(w), error)

    w = jnp.asarray(W)
    error = jnp.asarray(ERROR)
    expected = jax.jit(call)(w, error)
    stacks = (jnp.stack([3 * w, w]), jnp.stack([-error, error]))
    mapped = jax.jit(jax.vmap(call))(*stacks)
    looped = jax.lax.map(lambda pair: call(*pair), stacks)
    _, under_grad = jax.grad(loss, has_aux=True)(w, error)
    remat = jax.jit(jax.checkpoint(call))(w, error)
    for got in (call(w, error), entry(mapped, 1), entry(looped, 1), under_grad, remat):
        assert same_bits(got, expected)
