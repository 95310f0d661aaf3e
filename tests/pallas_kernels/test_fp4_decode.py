"""The PTX of FP4 kernels, run in NumPy: decoding of codes, and rounding of rows."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul import decode, reference, rows
from pallas_kernels.operands import Fp4
from tests import ptx
from tests.fp4_cases import of_every_scale
from tests.helpers import parametrize, slow

E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture
def run_in(monkeypatch):
    """Run the words and effects of kernels on shared memory, bytes in NumPy."""

    def run_in(memory):
        def words(count, operands, text, effects=False):
            return ptx.run(text, count, operands, memory)

        def effect(operands, text):
            ptx.run(text, 0, operands, memory)

        monkeypatch.setattr(decode, "words", words)
        monkeypatch.setattr(decode, "effect", effect)
        monkeypatch.setattr(decode, "constant", np.uint32)

    return run_in


def test_decoding_to_e4m3_gives_the_bits_of_the_definition():
    w, codes = of_every_scale(Fp4())
    words = np.asarray(w.values).view(np.uint32)
    table = reference.e4m3_table().reshape(256, 2)
    low, high = ptx.run(decode.E4M3_TEXT, 2, [words, table[:, :1], table[:, 1:]])
    got = np.stack([low, high], -1).view(np.uint8).reshape(w.shape)
    expected = np.asarray(reference.unpack(False, w)).view(np.uint8)
    scale = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    broken = np.isnan(scale)
    assert broken.sum() == 2
    assert_array_equal(got[~broken], expected[~broken])
    assert ((got & 127) == 127)[broken].all()
    # Nothing saturated, and with fold-exact scales only subnormal numbers rounded.
    exact = fp4.E2M1[codes] * (scale * np.float32(reference.E4M3_FACTOR))[:, None]
    folds = np.isin(np.arange(256) % 8, (0, 2, 4))[:, None]
    normal = (np.abs(exact) >= 2.0**-6) & folds
    assert normal.mean() > 0.25
    assert_array_equal(got.view(E4M3).astype(np.float32)[normal], exact[normal])


@parametrize("form", ["nvfp4", "mxfp4"])
def test_decoding_to_bfloat16_gives_the_definition(form):
    # The same instructions have run on a GPU, so this also tests the interpreter of
    # PTX.
    w, _ = of_every_scale(Fp4(form))
    words = np.asarray(w.values).view(np.uint32)
    scale = decode.table_of(form, "bfloat16")[:, None]
    rescale = [np.uint32(factor) for factor in decode.RESCALE[form]]
    pairs = ptx.run(decode.BF16_TEXT[form], 4, [words, scale, *rescale])
    # codes (i, i + 4)
    got = np.stack(pairs, -1).view(np.uint16).view(ml_dtypes.bfloat16)
    got = got.astype(np.float64).reshape(*words.shape, 4, 2).swapaxes(-1, -2)
    got = got.reshape(w.shape) * decode.BF16_FACTOR[form]
    expected = np.float64(reference.decode(w))
    size = np.abs(expected)
    ordinary = (size >= 2.0**-117) & (size < 2.0**125)
    assert ordinary.mean() > 0.8
    assert_array_equal(got[ordinary], expected[ordinary])


def swizzled(codes):
    """Bytes `[n, step / 2]` as a copy with the widest swizzle writes them.

    8 rows of 128 bytes follow 8 rows (PTX ISA, "Swizzling modes").
    """
    n, width = codes.shape
    low = np.arange(8)[:, None]
    units = np.empty((n // 8, width // 128, 8, 8, 16), np.uint8)
    ordered = codes.reshape(n // 8, 8, width // 128, 8, 16).transpose(0, 2, 1, 3, 4)
    units[:, :, low, np.arange(8) ^ low] = ordered
    return units.reshape(-1)


@parametrize(
    "form, dtype",
    [("nvfp4", "bfloat16"), ("mxfp4", "bfloat16"), ("nvfp4", "float8_e4m3fn")],
)
def test_a_thread_decodes_its_part_of_wgmma(form, dtype, run_in):
    rng = np.random.default_rng(0)
    n = 64
    step = decode.step_of(form)
    size = decode.CHUNK[dtype]
    codes = rng.integers(0, 256, (n, step // 2), np.uint8)
    range_of_scales = (0, 120) if form == "nvfp4" else (110, 140)
    scales = rng.integers(*range_of_scales, (n, 16), np.uint8)
    table = decode.table_of(form, dtype).view(np.uint8)
    of_scales = codes.size
    of_table = of_scales + scales.size
    run_in(np.concatenate([swizzled(codes), scales.reshape(-1), table]))

    thread = np.arange(128)
    (of_code,) = decode.words(1, [thread], decode.PLACES[form])
    (of_scale,) = decode.words(1, [thread], decode.SCALE_PLACE)
    words = decode._scale_words(of_scale, of_scales)
    # PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16" and "m64nNk32": four
    # bytes of k in each register.
    values = 4 // jnp.dtype(dtype).itemsize
    first_row = 16 * (thread // 32) + thread % 32 // 4
    first_k = values * (thread % 4)
    got = np.empty((n, step), jnp.dtype(dtype))
    for chunk in range(step // size):
        if dtype == "bfloat16":
            loaded = decode._code_words(form, chunk // 2, of_code, 0)
            registers = decode._bf16_words(form, chunk, loaded, of_table, words)
        else:
            loaded = decode._code_words(form, chunk, of_code, 0)
            registers = decode._e4m3_words(chunk, loaded, of_table, words)
        for (part, half), word in np.ndenumerate(registers):
            k = size * chunk + 4 * values * part + first_k[:, None] + np.arange(values)
            found = word[:, None].view(got.dtype).reshape(128, values)
            got[(first_row + 8 * half)[:, None], k] = found
    numbers = fp4.E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(n, step)]
    scaling = Fp4(form)
    scale = scales.view(scaling.scale_dtype).astype(np.float32)
    factor = reference.E4M3_FACTOR
    if dtype == "bfloat16":
        factor = 1 / decode.BF16_FACTOR[form]
    exact = numbers * np.repeat(scale, scaling.block, axis=1) * np.float32(factor)
    ordered = decode.permuted(jnp.asarray(exact.astype(dtype)), form)
    assert_array_equal(got.astype(np.float32), np.float32(ordered))


@parametrize(
    "m, steps, warpgroups",
    [pytest.param(5, 8, 4, marks=slow), (2, 7, 2)],
)
def test_blocks_round_rows_as_the_definition(m, steps, warpgroups, run_in, monkeypatch):
    random = np.random.default_rng(0)
    drawn = random.standard_normal((m, 256 * steps))
    x = np.ldexp(drawn, random.integers(-14, 3, (m, 1)))
    x[0] = 0
    x[1, 3] = np.nan
    x[2:3, -1] = np.inf
    x[-1, 5] = -1e-39
    x[3:4] *= 1e-14
    x = x.astype(ml_dtypes.bfloat16)
    # Shared memory: the largest magnitudes of warps, then rows in the tiles of `wgmma`,
    # 8 rows of 128 bytes.
    warps = 4 * warpgroups
    threads = np.arange(128 * warpgroups)
    first_row = 4 * 8 * warps
    memory = np.zeros(first_row + 2048 * steps, np.uint8)
    run_in(memory)
    monkeypatch.setattr(rows.lax, "axis_index", lambda name: threads // 128)

    def share(row):
        """The first step of each unit of a thread's warpgroup, with its pairs."""
        for first in map(np.asarray, rows._share_of(steps, warpgroups)):
            at = 256 * first[:, None] + 4 * (threads % 128)[:, None] + np.arange(4)
            yield first.astype(np.uint32), x[row][at].view(np.uint32).T

    for row in range(m):
        pairs = []
        for _, of_unit in share(row):
            pairs += [*of_unit]
        rows._store_largest(row, pairs, np.uint32(0), warps, threads)
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
    assert broken.any()
    assert not broken.all()
    assert not got[m:].any()
    assert_array_equal(scales, expected.scale)
    assert_array_equal(got[:m][~broken], values[~broken])
    for found in (got[:m], values):
        assert (found[broken] & 127 == 127).all()
