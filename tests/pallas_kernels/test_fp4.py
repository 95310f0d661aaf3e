"""Products with FP4 weights on CPUs: codes, the definition, bad input, and devices."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul import decode, kernel, mosaic, reference, rows, unpacked
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.fp4_matmul.kernel import COPYING, Config
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import formats
from tcfp_jax.weights.fp4_packing import _datatype_of, quantize_fp4
from tests import ptx
from tests.formats_oracles import QUICK

SCALINGS = [Fp4(), Fp4(tile="square"), Fp4("mxfp4"), Fp4(rule="one_level")]
N, K = 32, 64


# A program for each scaling, where every operation would be one.
quick = functools.partial(jax.jit, compiler_options=QUICK)
multiply = quick(fp4_matmul, static_argnames=("contracts", "activation", "out_dtype"))
# whole blocks, and short ones
KINDS = [(scaling, k) for scaling in SCALINGS for k in (K, 36)]
RANDOM = np.random.default_rng(0)
W, X = (
    jnp.asarray(RANDOM.standard_normal(shape), jnp.float32)
    for shape in ((N, K), (2, 3, K))
)


@functools.cache
def _quantized():
    """Return the operand of each of `KINDS`, its dequantized values, and the format
    library's cast.
    """
    of = lambda w, s: (
        made := quantize_fp4(w, s),
        made.dequantize(),
        formats.cast(w, _datatype_of(s)),
    )
    return quick(lambda w: [of(w[:, :k], scaling) for scaling, k in KINDS])(W)


_spread = quick(
    lambda q: fp4.numbers(fp4.unpack(q.values)) * q.scaling.spread(q.scale, q.shape)
)


def operands(scaling, k=K):
    made = _quantized()[KINDS.index((scaling, k))]
    return made[0], X[..., :k].astype(jnp.bfloat16), made[1:]


def test_codes_are_those_of_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    expected = np.array([c.view(ml_dtypes.float4_e2m1fn) for c in codes]).astype(
        np.float32
    )
    np.testing.assert_array_equal(np.asarray(fp4.numbers(jnp.asarray(codes))), expected)
    np.testing.assert_array_equal(fp4.E2M1, expected)
    both = jnp.asarray(np.arange(256, dtype=np.uint8).reshape(2, 128))
    np.testing.assert_array_equal(fp4.pack(fp4.unpack(both)), both)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("k", [K, 36])
def test_an_operand_is_what_the_format_library_casts_to(scaling, k):
    q, _, (dequantized, cast) = operands(scaling, k)
    assert q.shape == (N, k) and q.dtype == jnp.float4_e2m1fn
    np.testing.assert_array_equal(dequantized, cast)


def test_every_scale_times_every_code_is_a_bfloat16():
    scales = (
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    )
    powers = 2.0 ** np.arange(-126, 125)
    for of_blocks in (scales[np.isfinite(scales)], powers):
        exact = np.multiply.outer(of_blocks, fp4.E2M1.astype(np.float64))
        np.testing.assert_array_equal(
            exact.astype(ml_dtypes.bfloat16).astype(np.float64), exact
        )


def exhaustive(form="nvfp4"):
    """A weight with each scale byte in a row of its own, and each code at each place of
    a word.
    """
    scaling = Fp4(form)
    codes = np.tile(
        (np.arange(16)[:, None] + np.arange(16)).reshape(-1) % 16, (256, 2)
    ).astype(np.uint8)
    scale = np.repeat(
        np.arange(256, dtype=np.uint8)[:, None], codes.shape[1] // scaling.block, axis=1
    )
    outer = jnp.float32(1) if scaling.has_outer else None
    scale = jnp.asarray(scale.view(scaling.scale_dtype))
    return Operand(
        fp4.pack(jnp.asarray(codes)), scale, scaling=scaling, outer=outer
    ), codes


def test_decoding_to_e4m3_gives_the_bits_of_the_definition():
    w, codes = exhaustive()
    words, table = (
        np.asarray(w.values).view(np.uint32),
        reference.e4m3_table().reshape(256, 2),
    )
    low, high = ptx.run(decode.E4M3_TEXT, 2, [words, table[:, :1], table[:, 1:]])
    got = np.stack([low, high], -1).view(np.uint8).reshape(w.shape)
    expected = np.asarray(
        reference.decode(w, jnp.float8_e4m3fn, reference.E4M3_FACTOR)
    ).view(np.uint8)
    scale = (
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    broken = np.isnan(scale)
    assert (
        (got == expected)[~broken].all()
        and ((got & 127) == 127)[broken].all()
        and broken.sum() == 2
    )
    # Nothing saturated, and with fold-exact scales only subnormal numbers rounded.
    exact = fp4.E2M1[codes] * (scale * np.float32(reference.E4M3_FACTOR))[:, None]
    normal = (np.abs(exact) >= 2.0**-6) & np.isin(np.arange(256) % 8, (0, 2, 4))[
        :, None
    ]
    np.testing.assert_array_equal(
        got.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[normal], exact[normal]
    )
    assert normal.mean() > 0.25


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_decoding_to_bfloat16_gives_the_definition(form):
    # The same instructions have run on a GPU, so this also tests the interpreter of
    # PTX.
    w, _ = exhaustive(form)
    words = np.asarray(w.values).view(np.uint32)
    scale = decode.table_of(form, "bfloat16")[:, None]
    pairs = ptx.run(
        decode.BF16_TEXT[form], 4, [words, scale, *map(np.uint32, decode.RESCALE[form])]
    )
    # codes (i, i + 4)
    got = (
        np.stack(pairs, -1).view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    )
    got = (
        got.reshape(*words.shape, 4, 2).swapaxes(-1, -2).reshape(w.shape)
        * decode.BF16_FACTOR[form]
    )
    expected = np.asarray(reference.decode(w), np.float64)
    ordinary = (
        np.isfinite(expected)
        & (np.abs(expected) >= 2.0**-117)
        & (np.abs(expected) < 2.0**125)
    )
    np.testing.assert_array_equal(got[ordinary], expected[ordinary])
    assert ordinary.mean() > 0.8


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("nvfp4", "bfloat16"), ("mxfp4", "bfloat16"), ("nvfp4", "float8_e4m3fn")],
)
def test_a_thread_decodes_what_its_part_of_wgmma_multiplies(form, dtype, monkeypatch):
    block, chunk_size, table = (
        Fp4(form).block,
        decode.CHUNK[dtype],
        decode.table_of(form, dtype).view(np.uint8),
    )
    rng, n, step = np.random.default_rng(0), 64, decode.step_of(form)
    codes = rng.integers(0, 256, (n, step // 2), np.uint8)
    scales = rng.integers(
        *((0, 120) if form == "nvfp4" else (110, 140)), (n, 16), np.uint8
    )
    # Shared memory: codes as a copy with the widest swizzle lays them down, 8 rows of
    # 128 bytes after 8 rows (PTX ISA, "Swizzling modes"); scales; and the table.
    low = np.arange(8)[:, None]
    units = np.empty((n // 8, step // 256, 8, 8, 16), np.uint8)
    units[:, :, low, np.arange(8) ^ low] = codes.reshape(
        n // 8, 8, step // 256, 8, 16
    ).transpose(0, 2, 1, 3, 4)
    parts = [units.reshape(-1), scales.reshape(-1), table]
    of_codes, of_scales, of_table = np.cumsum([0, *(len(part) for part in parts)])[:3]
    memory = np.concatenate(parts)
    run = lambda count, operands, text, effects=False: ptx.run(
        text, count, operands, memory
    )
    monkeypatch.setattr(decode, "words", run)
    monkeypatch.setattr(decode, "constant", np.uint32)

    thread = np.arange(128)
    (of_code,), (of_scale,) = (
        run(1, [thread], text) for text in (decode.PLACES[form], decode.SCALE_PLACE)
    )
    words = decode._scale_words(of_scale, of_scales)
    # PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16" and "m64nNk32": four
    # bytes of k in each register.
    values = 4 // jnp.dtype(dtype).itemsize
    first_row, first_k = 16 * (thread // 32) + thread % 32 // 4, values * (thread % 4)
    got = np.empty((n, step), jnp.dtype(dtype))
    for chunk in range(step // chunk_size):
        if dtype == "bfloat16":
            loaded = decode._code_words(form, chunk // 2, of_code, of_codes)
            registers = decode._bf16_words(form, chunk, loaded, of_table, words)
        else:
            loaded = decode._code_words(form, chunk, of_code, of_codes)
            registers = decode._e4m3_words(chunk, loaded, of_table, words)
        for (part, half), word in np.ndenumerate(registers):
            k = (
                chunk_size * chunk
                + 4 * values * part
                + first_k[:, None]
                + np.arange(values)
            )
            got[(first_row + 8 * half)[:, None], k] = (
                word[:, None].view(got.dtype).reshape(128, values)
            )
    numbers = fp4.E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(n, step)]
    scale = np.repeat(
        scales.view(Fp4(form).scale_dtype).astype(np.float32), block, axis=1
    )
    factor = (
        1 / decode.BF16_FACTOR[form] if dtype == "bfloat16" else reference.E4M3_FACTOR
    )
    ordered = decode.permuted(
        jnp.asarray((numbers * scale * np.float32(factor)).astype(dtype)), form
    )
    np.testing.assert_array_equal(
        got.astype(np.float32), np.asarray(ordered, np.float32)
    )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "tile"), [(256, 64, "vector"), (48, 192, "vector"), (128, 128, "square")]
)
def test_a_weight_is_unpacked_as_the_definition_says(n, k, tile, turned):
    scaling, rng = Fp4(tile=tile, rule="fold_exact"), np.random.default_rng(0)
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    # A scale of each byte, if there are 256 scales: 127 and 255 are NaN.
    scale = np.arange(math.prod(scaling.scale_shape((n, k))), dtype=np.uint8).reshape(
        scaling.scale_shape((n, k))
    )
    w = Operand(
        jnp.asarray(codes),
        jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)),
        scaling=scaling,
    )
    got = unpacked.unpack(w, turned=turned, backend="triton")
    expected = quick(functools.partial(unpacked.unpack, turned=turned))(w)
    got, expected = (np.asarray(array).view(np.uint8) for array in (got, expected))
    broken = expected & 127 == 127
    np.testing.assert_array_equal(got[~broken], expected[~broken])
    assert (got[broken] & 127 == 127).all() and broken.any() == (scale.size > 127)


@pytest.mark.slow_except("5-512-float16")
@pytest.mark.parametrize(
    ("m", "k", "dtype"),
    [(5, 512, "bfloat16"), (8, 768, "float32"), (5, 512, "float16")],
)
def test_ordered_rows_are_those_of_the_definition(m, k, dtype):
    random = np.random.default_rng(0)
    x = np.ldexp(random.standard_normal((m, k)), random.integers(-14, 3, (m, 1)))
    x[0], x[1, 3], x[2, 5] = 0, np.nan, np.inf
    x, outer = jnp.asarray(x, jnp.float32).astype(dtype), jnp.float32(0.3)
    values, factors = mosaic.ordered_rows(8, x, outer, backend="triton")
    expected = quick(reference.quantize_rows)(x)
    bits = lambda array: np.asarray(array).view(np.uint8)
    np.testing.assert_array_equal(
        bits(values[:m]), bits(decode.permuted(expected.values, "nvfp4"))
    )
    np.testing.assert_array_equal(
        factors[:m], outer / reference.E4M3_FACTOR * expected.scale
    )
    assert not bits(values[m:]).any() and np.isfinite(factors[m:]).all()


@pytest.mark.parametrize(
    ("m", "steps", "warpgroups"),
    [pytest.param(5, 8, 4, marks=pytest.mark.slow), (2, 7, 2)],
)
def test_blocks_round_rows_as_the_definition_does(m, steps, warpgroups, monkeypatch):
    random = np.random.default_rng(0)
    x = np.ldexp(
        random.standard_normal((m, 256 * steps)), random.integers(-14, 3, (m, 1))
    )
    x[0], x[1, 3], x[2:3, -1], x[-1, 5] = 0, np.nan, np.inf, -1e-39
    x[3:4] *= 1e-14
    x = x.astype(ml_dtypes.bfloat16)
    # Shared memory: the largest magnitudes of warps, then rows in the tiles of `wgmma`,
    # 8 rows of 128 bytes.
    warps, threads = 4 * warpgroups, np.arange(128 * warpgroups)
    first_row = 4 * 8 * warps
    memory = np.zeros(first_row + 2048 * steps, np.uint8)
    monkeypatch.setattr(
        decode,
        "words",
        lambda n, given, text, effects=False: ptx.run(text, n, given, memory),
    )
    monkeypatch.setattr(
        decode, "effect", lambda given, text: ptx.run(text, 0, given, memory)
    )
    monkeypatch.setattr(decode, "constant", np.uint32)

    def share(row):
        """The first step of the units of a thread's warpgroup, and its pairs of
        values.
        """
        monkeypatch.setattr(rows.lax, "axis_index", lambda name: threads // 128)
        for first in map(np.asarray, rows._share_of(steps, warpgroups)):
            at = 256 * first[:, None] + 4 * (threads % 128)[:, None] + np.arange(4)
            yield first.astype(np.uint32), x[row][at].view(np.uint32).T

    for row in range(m):
        rows._store_largest(
            row,
            [pair for _, pairs in share(row) for pair in pairs],
            np.uint32(0),
            warps,
            threads,
        )
    scales = []
    for row in range(m):
        multiplier, scale = rows._scale_of(row, np.uint32(0), warps)
        scales.append(scale.view(np.float32).item())
        for first, pairs in share(row):
            (at,) = rows._places_of(row, [np.uint32(first_row) + 2048 * first], threads)
            decode.effect([at, *pairs, multiplier], rows.WRITE_ROUNDED)
    tiles = memory[first_row:].reshape(2 * steps, 8, 8, 16)
    low = np.arange(8)[:, None]
    got = tiles[:, low, np.arange(8) ^ low].transpose(1, 0, 2, 3).reshape(8, -1)
    expected = reference.quantize_rows(jnp.asarray(x))
    values = np.asarray(decode.permuted(expected.values, "nvfp4")).view(np.uint8)
    broken = ~np.isfinite(np.asarray(expected.scale))
    assert broken.any() and not broken.all() and not got[m:].any()
    np.testing.assert_array_equal(scales, expected.scale)
    np.testing.assert_array_equal(got[:m][~broken], values[~broken])
    assert (got[:m][broken] & 127 == 127).all() and (values[broken] & 127 == 127).all()


@pytest.mark.slow_except("8-False", "1-True")
@pytest.mark.parametrize(("devices", "rounds"), [(8, False), (1, False), (1, True)])
def test_what_surrounds_the_kernel_pads_orders_and_scales(devices, rounds, monkeypatch):
    rng = np.random.default_rng(0)
    x, codes = (
        rng.normal(size=(2, 3, 512)).astype(ml_dtypes.bfloat16),
        rng.integers(0, 256, (64, 256), np.uint8),
    )
    scales = jnp.asarray(
        rng.integers(0, 120, (64, 32), np.uint8).view(ml_dtypes.float8_e4m3fn)
    )
    q = Operand(
        jnp.asarray(codes),
        scales,
        scaling=Fp4(rule="fold_exact"),
        outer=jnp.float32(0.01),
    )
    options = reference.Options(jnp.dtype(jnp.float32), "float8_e4m3fn")

    def call(config, form, x, codes, scales, table, factors=None, out=None):
        # The definition of the kernel, from its own operands.
        scale = jax.lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
        w = Operand(codes, scale, scaling=Fp4(), outer=jnp.float32(1))
        values = reference.decode(w, jnp.float8_e4m3fn, reference.E4M3_FACTOR)
        decoded = decode.permuted(values, "nvfp4").astype(jnp.float32)
        if config.rounds_rows:
            found = reference.quantize_rows(jnp.pad(x, ((0, 8 - x.shape[0]), (0, 0))))
            x, factors = (
                decode.permuted(found.values, "nvfp4"),
                factors / reference.E4M3_FACTOR * found.scale,
            )
        assert x.shape[0] == 8 and table.shape == (2, 256)
        if out is not None:
            return ((decoded @ x.astype(jnp.float32).T) * factors).T.astype(out.dtype)[
                : out.shape[0]
            ]
        # One tile of two steps, of which each of two blocks has one.
        halves = [
            jnp.split(array, 2, axis=1) for array in (decoded, x.astype(jnp.float32))
        ]
        return jnp.stack([(w @ x.T) * factors for w, x in zip(*halves, strict=True)])

    monkeypatch.setattr(kernel, "call", call)
    monkeypatch.setattr(mosaic, "device_count", lambda: devices)
    configs = [Config(1, splits=splits, rounds_rows=rounds) for splits in (1, 2)]

    @jax.jit
    def both(x, q):
        expected = unpacked.fp4_matmul(options, x, q)
        return expected, [
            mosaic.fp4_matmul(options, x, q, config=config) for config in configs
        ]

    expected, products = both(x, q)
    for got in products:
        np.testing.assert_allclose(
            got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
        )


IN_E4M3 = reference.Options(jnp.dtype(jnp.bfloat16), "float8_e4m3fn")


def shapes(m, k, n):
    """The operands of a product of a fold-exact weight without their values."""
    made, scaling = jax.ShapeDtypeStruct, Fp4(rule="fold_exact")
    return made((m, k), jnp.bfloat16), Operand(
        made((n, k // 2), jnp.uint8), None, scaling=scaling
    )


@pytest.mark.parametrize(
    ("m", "n", "sizes"),
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


@pytest.mark.parametrize(
    ("m", "n", "k", "rounds"),
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
    assert config == dataclasses.replace(chosen, rounds_rows=rounds)
    step = decode.step_of("nvfp4")
    held = k // config.splits if rounds else config.stages * step
    assert config.weight_bytes(step) + 8 * -(-m // 8) * held <= mosaic._SHARED_BYTES


@pytest.mark.parametrize("warpgroups", [1, 2, 4])
def test_registers_that_are_handed_over_exist(warpgroups):
    # A thread that asks for more than its block was started with waits for ever.
    even, more = Config(warpgroups).registers
    assert (
        COPYING + warpgroups * more <= (warpgroups + 1) * even <= 512
        and even % 8 == more % 8 == 0
    )


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("contracts", ["k", "n"])
@pytest.mark.parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_the_definition_is_the_product_of_dequantized_operands(
    scaling, contracts, activation
):
    q, x, _ = operands(scaling)
    x = x if contracts == "k" else x[..., :N]
    exact = np.asarray(_spread(q), np.float64)
    wide = np.asarray(x, np.float64)
    if activation != "bfloat16":
        scale = np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True) / np.float32(
            448
        )
        in_e4m3 = (np.asarray(x, np.float32) * (1 / scale)).astype(
            ml_dtypes.float8_e4m3fn
        )
        wide = in_e4m3.astype(np.float64) * scale.astype(np.float64)
    outer = 1.0 if q.outer is None else float(q.outer)
    expected = outer * (wide @ (exact.T if contracts == "k" else exact))
    got = multiply(
        x, q, contracts=contracts, activation=activation, out_dtype=jnp.float32
    )
    # float32's sum of at most 64 addends, and two roundings of scales.
    bound = (
        outer
        * (np.abs(wide) @ np.abs(exact.T if contracts == "k" else exact))
        * 68
        * 2.0**-24
    )
    assert (np.abs(np.asarray(got, np.float64) - expected) <= bound).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(contracts="m"), "contracts='m' is unknown; use \"k\""),
        (dict(activation="int8"), "activation='int8' is unknown"),
        (dict(w=jnp.ones((N, K))), "w has the scaling"),
        (dict(x=jnp.ones((2, K + 2))), "must end in k=64"),
        (dict(backend="mosaic"), "mosaic"),
        (dict(outer=None), "has outer=None"),
    ],
)
def test_bad_input_says_what_to_do(change, message):
    q, x, _ = operands(Fp4())
    arguments = dict(x=x, w=q) | change
    if "outer" in arguments:
        arguments["w"] = dataclasses.replace(q, outer=arguments.pop("outer"))
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        fp4_matmul(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_fp4(jnp.ones((4, 7))), r"k=7 of w\[4, 7\] is odd"),
        (lambda: quantize_fp4(jnp.ones(8)), "is not a matrix"),
        (lambda: fp4.pack(jnp.ones((2, 3), jnp.uint8)), "do not fill whole bytes"),
        (
            lambda: Fp4("mxfp4", rule="fold_exact"),
            "rule='fold_exact' is not a rule of mxfp4",
        ),
    ],
)
def test_bad_weights_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow_except("n-k-Explicit", "k-k-Explicit", "n-n-Explicit", "k-n-Auto")
@pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"]
)
@pytest.mark.parametrize("contracts", ["k", "n"])
@pytest.mark.parametrize("split", [P("a"), P(None, "a")], ids=["n", "k"])
def test_devices_multiply_their_own_parts(kind, contracts, split):
    q, x, _ = operands(Fp4())
    x = x.reshape(6, K)[:4]
    x = x if contracts == "k" else x[..., :N]
    expected = multiply(x, q, contracts=contracts, out_dtype=jnp.float32)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    summed = (contracts == "k") == (split != P("a"))
    with jax.set_mesh(mesh):
        place = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))
        w = Operand(
            place(q.values, split),
            place(q.scale, split),
            scaling=q.scaling,
            outer=q.outer,
        )
        x = place(x, P(None, "a") if summed else P())
        out = P() if summed and kind == AxisType.Explicit else None
        got = quick(
            functools.partial(
                fp4_matmul, contracts=contracts, out_dtype=jnp.float32, out_sharding=out
            )
        )(x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
