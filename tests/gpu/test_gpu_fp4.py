"""The decode kernel of FP4 weights on a GPU: every scale byte times every code, all
shapes, and refusals.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul import mosaic, reference, unpacked
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.fp4_matmul.kernel import Config
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import matmul, recipe
from tcfp_jax.weights.fp4_packing import quantize_fp4

pytestmark = pytest.mark.gpu
SCALINGS = [Fp4(), Fp4(tile="square"), Fp4("mxfp4")]
FOLDS = Fp4(rule="fold_exact")
in_e4m3 = functools.partial(
    fp4_matmul, activation="float8_e4m3fn", out_dtype=jnp.float32
)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Run as on one GPU, also in a process that sees more: with several, rows are
    rounded before the kernel.
    """
    monkeypatch.setattr(mosaic, "device_count", lambda: 1)


@functools.cache
def operands(scaling, n, k):
    w = jax.random.normal(jax.random.key(0), (n, k))
    return jax.jit(quantize_fp4, static_argnums=1)(w, scaling), jax.random.normal(
        jax.random.key(1), (256, k)
    )


def exact(q):
    """Return codes times scales in float64."""
    numbers = np.asarray(fp4.numbers(fp4.unpack(q.values)), np.float64)
    return numbers * np.asarray(q.scaling.spread(q.scale, q.shape), np.float64)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_every_scale_times_every_code_goes_through_the_kernel(form, steps):
    scaling = Fp4(form)
    block, k = scaling.block, steps * 16 * scaling.block
    # Each of 256 rows has one scale byte and all codes; x picks out one value after
    # another. Two steps are split, so that the other end of the kernel writes.
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, k // 16))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], k // block, axis=1)
    scale = jax.lax.bitcast_convert_type(jnp.asarray(scales), scaling.scale_dtype)
    outer = jnp.float32(1) if scaling.has_outer else None
    w = Operand(fp4.pack(jnp.asarray(codes)), scale, scaling=scaling, outer=outer)
    # 16 values that stand at other places of a step
    for first in (0, block + 16, k - 16):
        x = (
            jnp.zeros((16, k), jnp.bfloat16)
            .at[jnp.arange(16), first + jnp.arange(16)]
            .set(1)
        )
        assert (
            mosaic.configure(reference.Options(jnp.dtype(jnp.float32)), x, w).splits
            == steps
        )
        y = np.asarray(fp4_matmul(x, w, out_dtype=jnp.float32, backend="mosaic"))
        numbers = np.asarray(scale[:, 0].astype(jnp.float32), np.float64)
        # 6 * 2**126 is beyond bfloat16, and infinity times an x of zero is NaN.
        broken = ~(6 * np.abs(numbers) < 2.0**128)
        assert not np.isfinite(y[:, broken]).all(axis=0).any()
        # Below its normal numbers a tensor core may flush.
        expected = np.multiply.outer(fp4.E2M1.astype(np.float64), numbers[~broken])
        normal = (np.abs(expected) < 2.0**127) & (
            (np.abs(expected) >= 2.0**-120) | (expected == 0)
        )
        np.testing.assert_array_equal(y[:, ~broken][normal], expected[normal])


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(64, 512), (256, 2048), (384, 1536), (1024, 14336), (14336, 2048)]
)
@pytest.mark.parametrize("m", [1, 33, 200])
def test_products_are_those_of_float64(scaling, n, k, m):
    q, x = operands(scaling, n, k)
    x = x[:m].astype(jnp.bfloat16)
    got = np.asarray(
        fp4_matmul(x, q, out_dtype=jnp.float32, backend="mosaic"), np.float64
    )
    outer = 1.0 if q.outer is None else float(q.outer)
    wide, w = np.asarray(x, np.float64), exact(q)
    expected, size = outer * (wide @ w.T), outer * (np.abs(wide) @ np.abs(w.T))
    # Tensor cores add 16 products at a time with a bit or two less than float32, k / 16
    # times.
    assert (np.abs(got - expected) <= size * 2.0**-20).all()


def test_one_row_has_the_same_bits_whatever_else_is_multiplied():
    q, x = operands(Fp4(), 1024, 14336)
    x = x.astype(jnp.bfloat16)
    x = x[:64]
    all_rows = fp4_matmul(x, q, out_dtype=jnp.float32, backend="mosaic")
    for m in (1, 8, 33):
        np.testing.assert_array_equal(
            fp4_matmul(x[:m], q, out_dtype=jnp.float32, backend="mosaic"), all_rows[:m]
        )


@pytest.mark.parametrize(("n", "first"), [(256, 0), (33792, 256)])
def test_every_scale_times_every_code_goes_through_the_kernel_in_e4m3(n, first):
    # Each row has one scale byte and all codes; each of 256 rows of x picks out one
    # value of a step. n decides whether k is split, and with it which end of the kernel
    # writes.
    codes = np.tile(np.arange(16, dtype=np.uint8), (n, 32))
    bytes_ = np.arange(n).astype(np.uint8)
    scale = jax.lax.bitcast_convert_type(
        jnp.asarray(np.repeat(bytes_[:, None], 32, axis=1)), jnp.float8_e4m3fn
    )
    w = Operand(
        fp4.pack(jnp.asarray(codes)), scale, scaling=FOLDS, outer=jnp.float32(1)
    )
    expected = (
        reference.decode(w, jnp.float8_e4m3fn, 2.0**-3)[:256].astype(jnp.float32) * 8
    )
    expected = np.asarray(jnp.tile(expected, (n // 256, 1)), np.float64)
    x = (
        jnp.zeros((256, 512), jnp.bfloat16)
        .at[jnp.arange(256), first + jnp.arange(256)]
        .set(1)
    )
    y = np.asarray(in_e4m3(x, w, backend="mosaic"), np.float64).T
    broken = np.isnan(expected[:, 0])
    assert np.isnan(y[broken]).all()
    # One product in a row, and x is 448 times 1 / 448, a float32.
    np.testing.assert_allclose(
        y[~broken], expected[~broken, first : first + 256], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("n", "k"),
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
@pytest.mark.parametrize("m", [1, 12, 33, 128, 256])
def test_products_in_e4m3_are_those_of_an_unpacked_weight(n, k, m):
    q, x = operands(FOLDS, n, k)
    x = x[:m].astype(jnp.bfloat16)
    got, by_xla = (
        np.asarray(in_e4m3(x, q, backend=backend), np.float64)
        for backend in ("mosaic", "xla")
    )
    rows = reference.quantize_rows(x)
    wide = (
        np.asarray(rows.values.astype(jnp.float32), np.float64)
        * np.asarray(rows.scale, np.float64)[:, None]
    )
    w = float(q.outer) * exact(q)
    expected, size = wide @ w.T, np.abs(wide) @ np.abs(w.T)
    # The tensor core keeps about 14 bits of each of k / 32 partial sums, which are a
    # small part of `size`.
    bound = size * 2.0**-11
    assert (np.abs(got - expected) <= bound).all()
    assert (np.abs(got - by_xla) <= 2 * bound).all()
    assert np.linalg.norm(got - expected) <= 2.0**-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("n", "k"), [(8192, 1792), (1024, 14336), (14336, 2048), (33792, 512)]
)
@pytest.mark.parametrize("m", [1, 5, 8])
def test_blocks_round_rows_as_a_kernel_before_them_does(n, k, m):
    q, x = operands(FOLDS, n, k)
    x = (
        x[:m]
        .astype(jnp.bfloat16)
        .at[m - 1, 3]
        .set(jnp.inf if m == 5 else 7.0)
        .at[0, 0]
        .set(1e-39)
    )
    options = reference.Options(jnp.dtype(jnp.float32), "float8_e4m3fn")
    copied = mosaic.configure(options, x, q)
    run = functools.partial(mosaic.fp4_matmul, options)
    by_blocks, before = (
        np.asarray(
            jax.jit(
                functools.partial(
                    run, config=dataclasses.replace(copied, rounds_rows=rounds)
                )
            )(x, q)
        )
        for rounds in (True, False)
    )
    np.testing.assert_array_equal(by_blocks, before)
    assert (
        np.isnan(by_blocks[-1]).all() == (m == 5) and np.isfinite(by_blocks[:1]).all()
    )


@pytest.mark.parametrize(("n", "k"), [(64, 256), (384, 1536), (33792, 512)])
@pytest.mark.parametrize("m", [257, 600, 1024])
def test_bands_of_rows_are_products_of_fewer_rows(n, k, m):
    q, x = operands(FOLDS, n, k)
    x = jnp.tile(x, (4, 1))[:m].astype(jnp.bfloat16)
    got = in_e4m3(x, q, backend="mosaic")
    few = jnp.concatenate(
        [
            in_e4m3(x[first : first + 256], q, backend="mosaic")
            for first in range(0, m, 256)
        ]
    )
    # With few rows k may be split, and parts are added in float32.
    assert float(jnp.linalg.norm(got - few)) <= 2.0**-6 * float(jnp.linalg.norm(few))


def test_leading_axes_bfloat16_and_squares_in_e4m3():
    q, x = operands(Fp4(tile="square", rule="fold_exact"), 256, 2048)
    x = x[:60].astype(jnp.bfloat16)
    flat = fp4_matmul(x, q, activation="float8_e4m3fn", backend="mosaic")
    deep = fp4_matmul(
        x.reshape(3, 20, -1), q, activation="float8_e4m3fn", backend="mosaic"
    )
    assert flat.dtype == jnp.bfloat16
    np.testing.assert_array_equal(deep.reshape(60, -1), flat)
    np.testing.assert_array_equal(
        flat, in_e4m3(x, q, backend="mosaic").astype(jnp.bfloat16)
    )


@pytest.mark.parametrize(
    "sizes",
    [(4, 3, 1), (4, 2, 4), (2, 4, 1), (2, 3, 28), (1, 6, 56), (1, 2, 7)],
    ids=str,
)
@pytest.mark.parametrize("m", [48, 96])
def test_no_size_of_the_kernel_changes_what_it_computes(sizes, m):
    q, x = operands(FOLDS, 1024, 14336)
    options = reference.Options(jnp.dtype(jnp.float32), "float8_e4m3fn")
    run = jax.jit(functools.partial(mosaic.fp4_matmul, options, config=Config(*sizes)))
    x = x[:m].astype(jnp.bfloat16)
    got, expected = np.asarray(run(x, q)), np.asarray(in_e4m3(x, q, backend="xla"))
    # Errors of sums in about 14 bits, which differ with the parts of k.
    assert np.linalg.norm(got - expected) <= 2.0**-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("n", "k"), [(256, 512), (144, 320), (4096, 1024)])
def test_a_weight_is_unpacked_as_the_definition_says(n, k, turned):
    codes = jax.random.bits(jax.random.key(0), (n, k // 2), jnp.uint8)
    scale = jax.lax.bitcast_convert_type(
        jnp.arange(n * k // 16).reshape(n, -1).astype(jnp.uint8), jnp.float8_e4m3fn
    )
    w = Operand(codes, scale, scaling=FOLDS)
    by_kernel = functools.partial(unpacked.unpack, turned=turned, backend="triton")
    got = np.asarray(jax.jit(by_kernel)(w)).view(np.uint8)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = np.asarray(
            reference.decode(jax.tree.map(np.asarray, w), jnp.float8_e4m3fn, 2.0**-3)
        ).view(np.uint8)
    expected = expected.T if turned else expected
    broken = expected & 127 == 127
    np.testing.assert_array_equal(got[~broken], expected[~broken])
    assert (got[broken] & 127 == 127).all() and broken.any()


@pytest.mark.parametrize(
    "scaling", [FOLDS, Fp4(tile="square", rule="fold_exact")], ids=str
)
def test_the_gradient_of_x_in_e4m3(scaling):
    q, x = operands(scaling, 256, 2048)
    g = x[:, :256].astype(jnp.bfloat16)
    got = np.asarray(in_e4m3(g, q, contracts="n"), np.float64)
    rows = reference.quantize_rows(g)
    wide = (
        np.asarray(rows.values.astype(jnp.float32), np.float64)
        * np.asarray(rows.scale, np.float64)[:, None]
    )
    w = float(q.outer) * exact(q)
    assert (np.abs(got - wide @ w) <= (np.abs(wide) @ np.abs(w)) * 2.0**-11).all()


@pytest.mark.parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_products_with_many_rows(activation):
    scaling = Fp4(rule="fold_exact")
    q, x = operands(scaling, 1024, 512)
    x = jnp.tile(x, (4, 1)).astype(jnp.bfloat16)
    got = np.asarray(
        fp4_matmul(x, q, activation=activation, out_dtype=jnp.float32), np.float64
    )
    expected = np.asarray(x, np.float64) @ (float(q.outer) * exact(q)).T
    lost = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    # In E4M3 by bands of rows, else by an unpacked weight.
    assert lost < (1e-5 if activation == "bfloat16" else 10 ** (-28 / 20)), (
        -20 * np.log10(lost)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(m=1025), r"m=1025, k=512, n=64 must be 1 to \d+,"),
        (dict(n=48), "n=48"),
        (dict(k=272), "k=272"),
        (dict(contracts="n"), "contracts='n'"),
        (dict(activation="float8_e4m3fn"), "multiplies codes times scales"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(change, message):
    sizes = dict(m=8, n=64, k=512) | {
        name: value for name, value in change.items() if name in "mnk"
    }
    options = {name: value for name, value in change.items() if name not in "mnk"}
    q = quantize_fp4(jnp.ones((sizes["n"], sizes["k"])))
    x = jnp.ones((sizes["m"], sizes["n" if options.get("contracts") == "n" else "k"]))
    with pytest.raises(NotImplementedError, match=message):
        fp4_matmul(x, q, backend="mosaic", **options)
    assert fp4_matmul(x, q, **options).shape[0] == sizes["m"]


@pytest.mark.parametrize("m", [1, 40, 600])
def test_both_operands_in_nvfp4_are_those_of_float64(m):
    q, x = operands(Fp4(), 256, 2048)
    x = jnp.tile(x, (3, 1))[:m].astype(jnp.bfloat16)
    how = recipe("nvfp4", activation="float4_e2m1fn")
    got = np.asarray(
        jax.jit(functools.partial(matmul, recipe=how))(x.astype(jnp.float32), q),
        np.float64,
    )
    of_x = jax.jit(quantize_fp4)(x)
    wide, w = float(of_x.outer) * exact(of_x), float(q.outer) * exact(q)
    assert (np.abs(got - wide @ w.T) <= (np.abs(wide) @ np.abs(w.T)) * 2.0**-20).all()
