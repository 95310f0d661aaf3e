"""Kernels of FP4 weights on a GPU: every scale byte times every code, all shapes."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul import mosaic, reference, unpacked
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.fp4_matmul.kernel import Config
from pallas_kernels.operands import Fp4
from tcfp_jax import matmul, recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests import fp4_cases as cases
from tests.fp4_cases import FOLDS
from tests.helpers import normal, parametrize, refused

pytestmark = pytest.mark.gpu
FOLDED_SQUARES = Fp4(tile="square", rule="fold_exact")
IN_E4M3 = reference.Fp4Options(jnp.dtype(jnp.float32), "float8_e4m3fn")
in_bf16 = partial(fp4_matmul, out_dtype=jnp.float32)
in_e4m3 = partial(in_bf16, activation="float8_e4m3fn")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Run as on one GPU: with several, rows are rounded before the kernel."""
    monkeypatch.setattr(mosaic, "device_count", lambda: 1)


@cache
def weight(scaling, n, k):
    w = normal(0, (n, k))
    return jax.jit(quantize_fp4, static_argnums=1)(w, scaling)


def operands(scaling, m, n, k):
    """X `[m, k]` in bfloat16, and a weight."""
    x = normal(1, (m, k))
    return x.astype(jnp.bfloat16), weight(scaling, n, k)


def one_hot(rows, k, first):
    """Rows that each pick out one value of k, one after another."""
    place = jnp.arange(rows)
    return jnp.zeros((rows, k), jnp.bfloat16).at[place, first + place].set(1)


@parametrize("steps", [1, 2])
@parametrize("form", ["nvfp4", "mxfp4"])
def test_every_scale_times_every_code(form, steps):
    # Two steps are split, so that the other end of the kernel writes.
    scaling = Fp4(form)
    k = steps * 16 * scaling.block
    w, codes = cases.of_every_scale(scaling, k)
    numbers = np.float64(w.scale[:, 0].astype(jnp.float32))
    # 6 * 2**126 is beyond bfloat16, and infinity times an x of zero is NaN.
    broken = ~(6 * np.abs(numbers) < 2.0**128)
    # 16 values that stand at other places of a step
    for first in (0, scaling.block + 16, k - 16):
        x = one_hot(16, k, first)
        options = reference.Fp4Options(jnp.dtype(jnp.float32))
        assert mosaic.configure(options, x, w).splits == steps
        y = np.asarray(in_bf16(x, w, backend="mosaic"))
        assert not np.isfinite(y[:, broken]).all(axis=0).any()
        picked = fp4.E2M1[codes[0, first : first + 16]].astype(np.float64)
        expected = np.multiply.outer(picked, numbers[~broken])
        size = np.abs(expected)
        # Below its normal numbers a tensor core may flush.
        ordinary = (size < 2.0**127) & ((size >= 2.0**-120) | (size == 0))
        assert_array_equal(y[:, ~broken][ordinary], expected[ordinary])


@parametrize("n, first", [(256, 0), (33792, 256)])
def test_every_scale_times_every_code_in_e4m3(n, first):
    # n decides whether k is split, and with it which end of the kernel writes.
    w, _ = cases.of_every_scale(FOLDS, rows=n)
    expected = np.float64(reference.unpack(False, w).astype(jnp.float32))
    expected /= reference.E4M3_FACTOR
    y = np.float64(in_e4m3(one_hot(256, 512, first), w, backend="mosaic")).T
    broken = np.isnan(expected[:, 0])
    assert np.isnan(y[broken]).all()
    # One product in a row, and x is 448 times 1 / 448, a float32.
    picked = expected[~broken, first : first + 256]
    assert_allclose(y[~broken], picked, rtol=1e-6)


@parametrize("scaling", cases.SCALINGS, ids=str)
@parametrize(
    "n, k", [(64, 512), (256, 2048), (384, 1536), (1024, 14336), (14336, 2048)]
)
@parametrize("m", [1, 33, 200])
def test_products_are_those_of_float64(scaling, n, k, m):
    x, w = operands(scaling, m, n, k)
    got = in_bf16(x, w, backend="mosaic")
    # Tensor cores add 16 products at a time with a bit or two less than float32, k / 16
    # times.
    cases.assert_product(
        got, cases.rounded(x, "bfloat16"), cases.values_of(w), 2.0**-20
    )


@parametrize(
    "n, k",
    [
        (64, 256),
        (256, 2048),
        (384, 1536),
        (1024, 14336),
        (33792, 512),
        (28672, 2048),
        (14336, 2560),
    ],
)
@parametrize("m", [1, 12, 33, 128, 256])
def test_products_in_e4m3_are_those_of_float64(n, k, m):
    x, w = operands(FOLDS, m, n, k)
    rows = cases.rounded(x, "float8_e4m3fn")
    values = cases.values_of(w)
    for backend in ("mosaic", "xla"):
        got = in_e4m3(x, w, backend=backend)
        # The tensor core keeps about 14 bits of each of k / 32 partial sums, which are
        # a small part of the sum of sizes.
        cases.assert_product(got, rows, values, 2.0**-11)
        assert cases.lost(got, rows @ values.T) <= 2.0**-6


@parametrize("scaling", [FOLDS, FOLDED_SQUARES], ids=str)
def test_the_gradient_of_x_in_e4m3(scaling):
    g, w = operands(scaling, 256, 256, 2048)
    g = g[:, :256]
    rows = cases.rounded(g, "float8_e4m3fn")
    got = in_e4m3(g, w, contracts="n")
    cases.assert_product(got, rows, cases.values_of(w).T, 2.0**-11)


@parametrize("m", [1, 40, 600])
def test_both_operands_in_nvfp4(m):
    x, w = operands(Fp4(), m, 256, 2048)
    how = recipe("nvfp4", activation="float4_e2m1fn")
    got = jax.jit(partial(matmul, recipe=how))(x.astype(jnp.float32), w)
    rows = cases.values_of(jax.jit(quantize_fp4)(x))
    cases.assert_product(got, rows, cases.values_of(w), 2.0**-20)


@parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_products_with_many_rows(activation):
    x, w = operands(FOLDS, 1024, 1024, 512)
    got = in_bf16(x, w, activation=activation)
    expected = np.float64(x) @ cases.values_of(w).T
    # In E4M3 by bands of rows, else by an unpacked weight.
    most = 1e-5 if activation == "bfloat16" else 10 ** (-28 / 20)
    assert cases.lost(got, expected) < most


def test_a_row_has_the_same_bits_whatever_else_is_multiplied():
    x, w = operands(Fp4(), 64, 1024, 14336)
    all_rows = in_bf16(x, w, backend="mosaic")
    for m in (1, 8, 33):
        few = in_bf16(x[:m], w, backend="mosaic")
        assert_array_equal(few, all_rows[:m])


@parametrize("n, k", [(8192, 1792), (1024, 14336), (14336, 2048), (33792, 512)])
@parametrize("m", [1, 5, 8])
def test_blocks_round_rows_as_a_kernel_before_them(n, k, m):
    x, w = operands(FOLDS, m, n, k)
    x = x.at[m - 1, 3].set(jnp.inf if m == 5 else 7.0).at[0, 0].set(1e-39)
    copied = mosaic.configure(IN_E4M3, x, w)
    found = []
    for rounds in (True, False):
        config = dataclasses.replace(copied, rounds_rows=rounds)
        run = partial(mosaic.KERNEL.run, IN_E4M3, config=config)
        found.append(np.asarray(jax.jit(run)(x, w)))
    by_blocks, before = found
    assert_array_equal(by_blocks, before)
    assert np.isnan(by_blocks[-1]).all() == (m == 5)
    assert np.isfinite(by_blocks[:1]).all()


@parametrize("m", [1, 8, 300])
@parametrize("k", [512, 14336])
def test_ordered_rows_are_those_of_xla(m, k):
    x, _ = operands(FOLDS, m, 64, k)
    outer = jnp.float32(0.3)
    rows = -(-m // 8) * 8
    found = []
    for backend in ("triton", "xla"):
        run = partial(mosaic.ordered_rows, rows, backend=backend)
        values, factors = jax.jit(run)(x, outer)
        found.append((np.asarray(values).view(np.uint8), np.asarray(factors)[:m]))
    jax.tree.map(assert_array_equal, *found)


@parametrize("n, k", [(64, 256), (384, 1536), (33792, 512)])
@parametrize("m", [257, 600, 1024])
def test_bands_of_rows_are_products_of_fewer_rows(n, k, m):
    x, w = operands(FOLDS, m, n, k)
    got = in_e4m3(x, w, backend="mosaic")
    few = [
        in_e4m3(x[first : first + 256], w, backend="mosaic")
        for first in range(0, m, 256)
    ]
    # With few rows k may be split, and parts are added in float32.
    assert cases.lost(got, jnp.concatenate(few)) <= 2.0**-6


def test_leading_axes_bfloat16_and_squares_in_e4m3():
    x, w = operands(FOLDED_SQUARES, 60, 256, 2048)
    multiply = partial(fp4_matmul, activation="float8_e4m3fn", backend="mosaic")
    flat = multiply(x, w)
    deep = multiply(x.reshape(3, 20, -1), w)
    assert flat.dtype == jnp.bfloat16
    assert_array_equal(deep.reshape(60, -1), flat)
    wide = in_e4m3(x, w, backend="mosaic")
    assert_array_equal(flat, wide.astype(jnp.bfloat16))


@parametrize(
    "sizes",
    [(4, 3, 1), (4, 2, 4), (2, 4, 1), (2, 3, 28), (1, 6, 56), (1, 2, 7)],
    ids=str,
)
@parametrize("m", [48, 96])
def test_no_size_of_the_kernel_changes_the_result(sizes, m):
    x, w = operands(FOLDS, m, 1024, 14336)
    run = partial(mosaic.KERNEL.run, IN_E4M3, config=Config(*sizes))
    # Errors of sums in about 14 bits, which differ with the parts of k.
    assert cases.lost(jax.jit(run)(x, w), in_e4m3(x, w, backend="xla")) <= 2.0**-6


@parametrize("turned", [False, True])
@parametrize(
    "n, k, tile",
    [*cases.UNPACKED, (144, 320, "vector"), (4096, 1024, "vector")],
)
def test_triton_unpacks_as_the_definition(n, k, tile, turned):
    w = cases.of_scales_in_turn(n, k, tile)
    run = partial(unpacked.unpack, turned=turned, backend="triton")
    cases.assert_unpacked(jax.jit(run)(w), w, turned)


@parametrize(
    "sizes, options, message",
    [
        ((1025, 512, 64), {}, r"m=1025, k=512, n=64 must be 1 to \d+,"),
        ((8, 512, 48), {}, "n=48"),
        ((8, 272, 64), {}, "k=272"),
        ((8, 512, 64), {"contracts": "n"}, "contracts='n'"),
        (
            (8, 512, 64),
            {"activation": "float8_e4m3fn"},
            "multiplies codes times scales",
        ),
    ],
)
def test_the_kernel_names_what_it_rejects(sizes, options, message):
    m, k, n = sizes
    w = quantize_fp4(jnp.ones((n, k)))
    x = jnp.ones((m, n if options.get("contracts") == "n" else k))
    with refused(message, NotImplementedError):
        fp4_matmul(x, w, backend="mosaic", **options)
    assert fp4_matmul(x, w, **options).shape[0] == m
