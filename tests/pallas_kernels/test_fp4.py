"""Products with FP4 weights on CPUs: the definition, sizes, bad input, and devices."""

import itertools
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul import decode, kernel, mosaic, reference, unpacked
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.fp4_matmul.kernel import COPYING, Config
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import formats
from tcfp_jax.weights.fp4_packing import _datatype_of, quantize_fp4
from tests import fp4_cases as cases
from tests.formats_oracles import QUICK
from tests.helpers import parametrize, refused, slow_except

SCALINGS = [*cases.SCALINGS, Fp4(rule="one_level")]
N, K = 32, 64
# A program for each scaling, where every operation would be one.
quick = partial(jax.jit, compiler_options=QUICK)
multiply = quick(fp4_matmul, static_argnames=("contracts", "activation", "out_dtype"))
# whole blocks, and short ones
KINDS = [*itertools.product(SCALINGS, (K, 36))]
RANDOM = np.random.default_rng(0)
W = jnp.float32(RANDOM.standard_normal((N, K)))
X = jnp.float32(RANDOM.standard_normal((2, 3, K)))
IN_E4M3 = reference.Fp4Options(jnp.dtype(jnp.bfloat16), "float8_e4m3fn")


@cache
def _quantized():
    """The operand of each of `KINDS`, its values, and the format library's cast."""

    def kinds(w):
        found = []
        for scaling, k in KINDS:
            operand = quantize_fp4(w[:, :k], scaling)
            cast = formats.cast(w[:, :k], _datatype_of(scaling))
            found.append((operand, operand.dequantize(), cast))
        return found

    return quick(kinds)(W)


def weight(scaling, k=K):
    return _quantized()[KINDS.index((scaling, k))][0]


def test_codes_are_those_of_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    each = [code.view(ml_dtypes.float4_e2m1fn) for code in codes]
    expected = np.array(each).astype(np.float32)
    assert_array_equal(np.asarray(fp4.numbers(jnp.asarray(codes))), expected)
    assert_array_equal(fp4.E2M1, expected)
    both = jnp.asarray(np.arange(256, dtype=np.uint8).reshape(2, 128))
    assert_array_equal(fp4.pack(fp4.unpack(both)), both)


@parametrize("scaling", SCALINGS, ids=str)
@parametrize("k", [K, 36])
def test_an_operand_is_the_cast_of_the_format_library(scaling, k):
    operand, values, cast = _quantized()[KINDS.index((scaling, k))]
    assert operand.shape == (N, k)
    assert operand.dtype == jnp.float4_e2m1fn
    assert_array_equal(values, cast)


def test_every_scale_times_every_code_is_a_bfloat16():
    codes = np.arange(256, dtype=np.uint8)
    scales = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    powers = 2.0 ** np.arange(-126, 125)
    for of_blocks in (scales[np.isfinite(scales)], powers):
        exact = np.multiply.outer(of_blocks, fp4.E2M1.astype(np.float64))
        stored = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
        assert_array_equal(stored, exact)


@parametrize("scaling", SCALINGS, ids=str)
@parametrize("contracts", ["k", "n"])
@parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_the_definition_multiplies_values(scaling, contracts, activation):
    w = weight(scaling)
    x = X.astype(jnp.bfloat16)
    values = cases.values_of(w)
    if contracts == "n":
        x = x[..., :N]
        values = values.T
    options = {
        "contracts": contracts,
        "activation": activation,
        "out_dtype": jnp.float32,
    }
    got = multiply(x, w, **options)
    # float32's sum of at most 64 addends, and two roundings of scales
    cases.assert_product(got, cases.rounded(x, activation), values, 68 * 2.0**-24)


@parametrize("turned", [False, True])
@parametrize("n, k, tile", cases.UNPACKED)
def test_triton_unpacks_as_the_definition(n, k, tile, turned):
    w = cases.of_scales_in_turn(n, k, tile)
    got = unpacked.unpack(w, turned=turned, backend="triton")
    cases.assert_unpacked(got, w, turned)


REFUSED = [
    ({"contracts": "m"}, "contracts='m' is unknown; use one of"),
    ({"activation": "int8"}, "activation='int8' is unknown"),
    ({"w": jnp.ones((N, K))}, "w has the scaling"),
    ({"x": jnp.ones((2, K + 2))}, "must end in k=64"),
    ({"backend": "mosaic"}, "mosaic"),
    ({"outer": None}, "has outer=None"),
]


@parametrize("change, message", REFUSED)
def test_bad_input_says_what_to_do(change, message):
    given = {"x": X.astype(jnp.bfloat16), "w": weight(Fp4())} | change
    if "outer" in given:
        given["w"] = replace(given["w"], outer=given.pop("outer"))
    with refused(message, (TypeError, ValueError, NotImplementedError)):
        fp4_matmul(**given)


BAD_WEIGHTS = [
    (quantize_fp4, jnp.ones((4, 7)), r"k=7 of w\[4, 7\] is odd"),
    (quantize_fp4, jnp.ones(8), "is not a matrix"),
    (fp4.pack, jnp.ones((2, 3), jnp.uint8), "do not fill whole bytes"),
    (partial(Fp4, rule="fold_exact"), "mxfp4", "is not a rule of mxfp4"),
]


@parametrize("call, given, message", BAD_WEIGHTS)
def test_bad_weights_are_refused(call, given, message):
    with refused(message):
        call(given)


@slow_except("n-k-Explicit", "k-k-Explicit", "n-n-Explicit", "k-n-Auto")
@parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@parametrize("contracts", ["k", "n"])
@parametrize("split", [P("a"), P(None, "a")], ids=["n", "k"])
def test_devices_multiply_their_own_parts(kind, contracts, split):
    w = weight(Fp4())
    x = X.reshape(6, K)[:4].astype(jnp.bfloat16)
    if contracts == "n":
        x = x[..., :N]
    options = {"contracts": contracts, "out_dtype": jnp.float32}
    expected = multiply(x, w, **options)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    summed = (contracts == "k") == (split != P("a"))
    if summed and kind == AxisType.Explicit:
        options["out_sharding"] = P()
    of_w = NamedSharding(mesh, split)
    with jax.set_mesh(mesh):
        w = replace(
            w,
            values=jax.device_put(w.values, of_w),
            scale=jax.device_put(w.scale, of_w),
        )
        of_x = NamedSharding(mesh, P(None, "a") if summed else P())
        got = quick(partial(fp4_matmul, **options))(jax.device_put(x, of_x), w)
    assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


# The Hopper kernel's sizes, and the steps around it
# --------------------------------------------------------------------------------------


def shapes(m, k, n):
    """The operands of a product of a fold-exact weight without their values."""
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    codes = jax.ShapeDtypeStruct((n, k // 2), jnp.uint8)
    return x, Operand(codes, None, scaling=cases.FOLDS)


@parametrize(
    "m, n, sizes",
    [
        (64, 28672, (4, 4, 1)),
        (16, 28672, (4, 4, 1)),
        (128, 28672, (2, 4, 1)),
        (256, 28672, (2, 2, 1)),
        (16, 14336, (2, 4, 1)),
        (16, 8192, (4, 4, 4)),
        (64, 8192, (4, 4, 4)),
        (200, 192, (1, 4, 16, 128)),
        (257, 28672, (4, 3, 1, 96)),
        (512, 28672, (2, 4, 1, 128)),
        (2048, 28672, (2, 2, 1, 256)),
        (512, 192, (1, 4, 8, 128)),
        (0, 64, None),
        (64, 96, None),
    ],
)
def test_sizes_for_e4m3_fit_the_chip(m, n, sizes):
    assert mosaic.configure(IN_E4M3, *shapes(m, 8192, n)) == (sizes and Config(*sizes))


@parametrize(
    "m, n, k, rounds",
    [
        (1, 28672, 8192, True),
        (2, 28672, 8192, True),
        (4, 28672, 8192, False),
        (17, 28672, 8192, False),
        (1, 14336, 2048, True),
        (16, 14336, 768, False),
        (4, 8192, 8192, True),
        (5, 8192, 8192, False),
        (1, 4096, 14336, True),
        (1, 28672, 16384, False),
        (1, 28672, 256, False),
    ],
)
def test_blocks_round_few_rows_themselves(m, n, k, rounds):
    x, w = shapes(m, k, n)
    chosen = mosaic.configure(IN_E4M3, x, w)
    config = mosaic._rounding(chosen, IN_E4M3, x)
    assert config == replace(chosen, rounds_rows=rounds)
    step = decode.step_of("nvfp4")
    held = k // config.splits if rounds else config.stages * step
    assert config.weight_bytes(step) + 8 * -(-m // 8) * held <= mosaic._SHARED_BYTES


@parametrize("warpgroups", [1, 2, 4])
def test_registers_that_are_handed_over_exist(warpgroups):
    # A thread that asks for more than its block was started with waits for ever.
    even, more = Config(warpgroups).registers
    assert COPYING + warpgroups * more <= (warpgroups + 1) * even <= 512
    assert even % 8 == more % 8 == 0


@slow_except("5-512-float16")
@parametrize(
    "m, k, dtype",
    [(5, 512, "bfloat16"), (8, 768, "float32"), (5, 512, "float16")],
)
def test_ordered_rows_are_those_of_the_definition(m, k, dtype):
    random = np.random.default_rng(0)
    x = np.ldexp(random.standard_normal((m, k)), random.integers(-14, 3, (m, 1)))
    x[0] = 0
    x[1, 3] = np.nan
    x[2, 5] = np.inf
    x = jnp.float32(x).astype(dtype)
    outer = jnp.float32(0.3)
    values, factors = mosaic.ordered_rows(8, x, outer, backend="triton")
    rows = quick(reference.quantize_rows)(x)
    expected, of_rows = mosaic.ordered_rows(8, rows, outer)
    assert_array_equal(values.view(np.uint8), expected.view(np.uint8))
    assert_array_equal(factors[:m], of_rows[:m])
    assert not np.asarray(values[m:]).view(np.uint8).any()
    assert np.isfinite(factors[m:]).all()


def product_of(config, form, x, codes, scales, table, factors=None, out=None):
    """The definition of the kernel `kernel.call`, from its own operands."""
    scale = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    w = Operand(codes, scale, scaling=Fp4(), outer=jnp.float32(1))
    decoded = decode.permuted(reference.unpack(False, w), form).astype(jnp.float32)
    if config.rounds_rows:
        rows = reference.quantize_rows(jnp.pad(x, ((0, 8 - x.shape[0]), (0, 0))))
        x = decode.permuted(rows.values, form)
        factors = factors / reference.E4M3_FACTOR * rows.scale
    assert x.shape[0] == 8
    assert table.shape == (2, 256)
    x = x.astype(jnp.float32)
    if out is not None:
        return ((decoded @ x.T) * factors).T.astype(out.dtype)[: out.shape[0]]
    # One tile of two steps, of which each of two blocks has one.
    halves = zip(jnp.split(decoded, 2, axis=1), jnp.split(x, 2, axis=1), strict=True)
    return jnp.stack([(w @ x.T) * factors for w, x in halves])


@slow_except("8-False", "1-True")
@parametrize("devices, rounds", [(8, False), (1, False), (1, True)])
def test_the_kernels_operands_and_results(devices, rounds, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 512)).astype(ml_dtypes.bfloat16)
    scales = rng.integers(0, 120, (64, 32), np.uint8).view(ml_dtypes.float8_e4m3fn)
    w = Operand(
        jnp.asarray(rng.integers(0, 256, (64, 256), np.uint8)),
        jnp.asarray(scales),
        scaling=cases.FOLDS,
        outer=jnp.float32(0.01),
    )
    options = reference.Fp4Options(jnp.dtype(jnp.float32), "float8_e4m3fn")
    monkeypatch.setattr(kernel, "call", product_of)
    monkeypatch.setattr(mosaic, "device_count", lambda: devices)

    @jax.jit
    def products(x, w):
        found = [unpacked.fp4_matmul(options, x, w)]
        for splits in (1, 2):
            config = Config(1, splits=splits, rounds_rows=rounds)
            found.append(mosaic.KERNEL.run(options, x, w, config=config))
        return found

    expected, *found = products(x, w)
    atol = 1e-5 * np.abs(expected).max()
    for got in found:
        assert_allclose(got, expected, rtol=1e-4, atol=atol)
