"""NVFP4 as numbers: the definition's bits in every mode; MS-EDEN over turns; rotations; which bits are drawn."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.counter import bits_of, keys
from tcfp_jax import formats
from tcfp_jax.formats import e2m1, float_bits, nvfp4_eden, nvfp4_values
from tcfp_jax.formats.float_bits import Grid, to_bits
from tcfp_jax.formats.nvfp4_arrays import MODES
from tcfp_jax.formats.nvfp4_values import BLOCK
from tcfp_jax.formats.parts import layout_of, quantize
from tcfp_jax.formats.rounding import Modes
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s, on
from tests.formats_oracles import QUICK, same

KEY = keys(7)
DATATYPES = {
    "last": formats.nvfp4, "first": formats.datatype("e2m1f", "e4m3fn_t16d0_float32"), "squares": formats.nvfp4s
}  # fmt: skip
PRODUCTS = np.unique(np.outer([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn)))
along = jax.jit(nvfp4_values.along, static_argnums=(1, 2, 3), compiler_options=QUICK)
E4M3 = "float8_e4m3fn"


def wild(spread, shape=(32, 64)):
    """Values of many magnitudes, with ties, a block of zeros, an outlier and a NaN."""
    random = np.random.default_rng(0)
    x = np.float32(random.standard_normal(shape) * np.exp(spread * random.standard_normal(shape)))
    x[5, :32], x[5, 0] = np.arange(32) / 4 - 4, 6
    x[16:, 48:], x[4, 5], x[9, 9], x[11, 3] = 0, 1e4, np.nan, 1e-39
    return jnp.asarray(x)


def both(x, place, rule, rounding):
    """(values, outer) of this module and of the definition."""
    drawn = None
    if rounding == "stochastic":  # a block's values follow each other
        whole = (-1, BLOCK, x.shape[1]) if place == "first" else (*x.shape, 1)
        drawn = bits_of(x.reshape(whole).shape, *KEY, fastest=1).reshape(x.shape)
    modes = Modes("even" if drawn is None else "stochastic", MODES[rule])
    parts = quantize(to_bits(x), DATATYPES[place], modes, drawn)
    values = layout_of(x.shape, DATATYPES[place]).join(parts.value * parts.scale)
    how = (rule,) if place == "squares" else ({"last": -1, "first": 0}[place], rule, rounding, KEY)
    find = functools.partial(nvfp4_values.squares if place == "squares" else nvfp4_values.along, x, *how)
    return find(), find(numbers=E4M3) if rule == "fold_exact" else None, (values, parts.outer)


@pytest.mark.parametrize(
    ("place", "modes"),
    [
        ("last", [(rule, rounding) for rule in MODES for rounding in ("nearest", "stochastic")]),
        # What differs is where values lie.
        ("first", [("four_over_six", "nearest"), ("amax", "stochastic"), ("fold_exact", "nearest")]),
        ("squares", [("amax", "nearest"), ("fold_exact", "nearest")]),
    ],
    ids=DATATYPES,
)
def test_values_are_the_definitions_bit_for_bit(place, modes):
    run = jax.jit(lambda x: {mode: both(x, place, *mode) for mode in modes}, compiler_options=QUICK)
    for spread in (0.0, 2.0, 9.0):
        for mode, (found, narrow, (values, outer)) in run(wild(spread)).items():
            assert found.values.dtype == jnp.bfloat16 and float(found.outer) == float(outer), mode
            assert same(found.values, values), (mode, spread)
            if mode[0] == "fold_exact":  # over 2**3 all are E4M3 numbers, with blocks along the last axis
                assert narrow.values.dtype == E4M3 and float(narrow.outer) == 8 * float(outer)
                assert same(narrow.values, (values.T if place == "first" else values) / 8)


def test_stochastic_rounding_takes_the_definitions_neighbour_to_the_last_random_bit():
    """Random numbers next to the one that decides, and quotients with few digits, which it may equal."""
    random, count = np.random.default_rng(0), 1 << 17
    f = np.float32(random.integers(1 << 23, 1 << 24, count) * 2.0 ** random.integers(-60, 40, count))
    f[::2] = np.exp2(np.frexp(f[::2])[1])
    q = random.uniform(0, 6.2, count) * 2.0 ** -random.integers(0, 6, count)
    few = 2.0 ** random.integers(1, 23, count)
    m = np.float32(np.where(random.integers(0, 2, count), q, np.round(q * few) / few) * f)
    exact = m.astype(np.float64) / f
    steps = exact / 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(exact, 1e-9))), 0) - 1)
    k = np.floor((steps % 1) * 2**24) + random.integers(-6, 7, count)
    drawn = np.uint32(np.clip(k, 0, 2**24 - 1)) << 8 | random.integers(0, 256, count).astype(np.uint32)

    @jax.jit
    def run(m, f, drawn):
        units = float_bits.divide_to_odd(to_bits(m), to_bits(f), 23)
        expected = jnp.minimum(float_bits.round_to_grid(units, Grid(0, 1, 6.0), "stochastic", drawn), 6)
        return expected, e2m1.stochastic(m, f, drawn)

    assert same(*run(m, f, drawn))


@pytest.mark.parametrize(
    ("place", "rule", "rounding", "turned", "spread", "numbers"),
    [("last", "amax", "stochastic", False, 2.0, "bfloat16"),
     ("last", "four_over_six", "nearest", False, 9.0, "bfloat16"),
     ("first", "amax", "nearest", True, 9.0, "bfloat16"),
     ("last", "fold_exact", "nearest", False, 9.0, E4M3),
     ("first", "fold_exact", "stochastic", True, 2.0, E4M3)],
)  # fmt: skip
def test_the_kernel_has_the_definitions_bits(place, rule, rounding, turned, spread, numbers):
    x = wild(spread, (32, 128)).at[20, 70].set(jnp.inf)
    assert nvfp4_values.nvfp4_kernel.serves(x.shape, x.dtype, place)
    turn = jnp.where(jnp.arange(16) % 3, 1.0, -1.0) if turned else None
    options = dict(place=place, rule=rule, rounding=rounding, numbers=numbers)
    one_pass = functools.partial(nvfp4_values._in_one_pass, interpret=True, **options)
    both = lambda x: (one_pass(x, KEY, turn), nvfp4_values._defined(x, KEY, turn, **options))
    got, wanted = jax.jit(both, compiler_options=QUICK)(x)
    assert same(got.values, wanted.values) and float(got.outer) == float(wanted.outer)


@pytest.mark.parametrize("axes", [("a", None), (None, "a")])
def test_parts_of_a_mesh_have_the_bits_of_the_whole_transpose(axes):
    """By the kernel, and without it, where a part has too few columns."""
    x, mesh = wild(2.0, (32, 128)), jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    options = dict(place="first", rule="fold_exact", rounding="stochastic", numbers=E4M3)
    place = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    one_pass = functools.partial(nvfp4_values._in_one_pass, interpret=True, signs=None, **options)
    compiled = jax.jit(one_pass, compiler_options=QUICK).lower(jax.device_put(x, place(*axes)), KEY).compile()
    got = compiled(jax.device_put(x, place(*axes)), jax.device_put(KEY, place()))
    assert got.values.sharding.is_equivalent_to(place(*axes[::-1]), 2)
    assert same(got.values, jax.jit(functools.partial(nvfp4_values._defined, signs=None, **options))(x, KEY).values)


@pytest.mark.parametrize(("place", "axes"), [("last", (None, "a")), ("first", (None, "a")), ("first", ("a", None))])
def test_edens_parts_of_a_mesh_have_the_values_of_the_whole(place, axes):
    """By the kernel, and without it, where a part has too few groups or columns."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    at = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    x = jax.random.normal(jax.random.key(2), (64, 64)).astype(jnp.bfloat16)
    turn = jnp.where(jnp.arange(32) % 3, 1.0, -1.0)
    quantize = jax.jit(lambda *of: nvfp4_eden.quantize(*of, place, interpret=True), compiler_options=QUICK)
    parts = (jax.device_put(leaf, at(*where)) for leaf, where in ((x, axes), (KEY, ()), (turn, ())))
    for got, wanted in zip(quantize(*parts), quantize(x, KEY, turn), strict=True):
        assert np.mean(np.asarray(got == wanted)) > 0.999


@pytest.mark.parametrize("value", [1.0, 0.0, jnp.nan, jnp.inf, 1e15, 1e-39])
@pytest.mark.parametrize(("place", "size"), [("last", 128), ("first", 32)])
def test_edens_kernel_has_the_definitions_values(place, size, value):
    """All that differs is the order of sums, which few values notice."""
    x = wild(1.0, (256, 128)).at[9, 9].set(value).at[128:, 64:].set(0)
    x = jnp.nan_to_num(x.at[20, 70].set(value), nan=2.0, posinf=jnp.inf).astype(jnp.bfloat16)
    x = x.at[40, 3].set(value)
    assert nvfp4_eden.serves(x.shape, x.dtype, size, place)
    turn = jnp.where(jnp.arange(size) % 3, 1.0, -1.0)
    how: Any = dict(place=place, rule="amax", rounding="eden", numbers="bfloat16")
    both = lambda x: (
        nvfp4_eden.quantize(x, KEY, turn, place, interpret=True), nvfp4_values._defined(x, KEY, turn, **how)
    )  # fmt: skip
    (values, outer), wanted = jax.jit(both, compiler_options=QUICK)(x)
    got, expected = (np.asarray(found, np.float32) for found in (values, wanted.values))
    np.testing.assert_allclose(float(outer), float(wanted.outer), rtol=1e-6)
    assert np.mean((got == expected) | (np.isnan(got) & np.isnan(expected))) > 0.999
    assert np.array_equal(np.isnan(got), np.isnan(expected)) and np.isnan(got).any() == (not np.isfinite(value))
    assert np.isin(np.abs(got[~np.isnan(got)]), PRODUCTS.astype(np.float32)).all()


@pytest.mark.skipif(h200.missing() is not None and not h200.expected(), reason=str(h200.missing()))
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("rule", "rounding", "axis", "size", "numbers"),
    [("amax", "stochastic", 0, 16, "bfloat16"), ("fold_exact", "stochastic", 0, 16, E4M3),
     ("amax", "eden", 0, 128, "bfloat16"), ("amax", "eden", -1, 128, "bfloat16")],
)  # fmt: skip
def test_on_an_h200_what_is_rotated_is_written_once(rule, rounding, axis, size, numbers):
    """Two kernels, one for the maximum, and no float32 of x's size beside them."""
    mesh = h200s(1)
    x, key, turn = (on(mesh, *of) for of in (((4096, 1024), jnp.bfloat16), ((2,), jnp.uint32), ((size,), jnp.float32)))
    run = lambda x, key, turn: nvfp4_values.along(x, axis, rule, rounding, (key[0], key[1]), turn, numbers)
    compiled = compile_for(mesh, run, x, key, turn)
    assert compiled.targets == ["__gpu$xla.gpu.triton"] * 2 and compiled.temporary_bytes <= 1 << 16


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 1e38, 1e-39, 0.0])
def test_bad_input_is_loud_in_its_block_alone(value):
    x = jnp.ones((2, 32)).at[0, 3].set(value)
    got = np.asarray(along(x, -1, "amax").dequantize())
    assert np.isnan(got[0, :16]).all() == (not np.isfinite(value)) and np.isfinite(got[:, 16:]).all()
    np.testing.assert_allclose(got[1], 1 if value != 1e38 else 0, atol=1e-6)
    assert (np.asarray(along(jnp.zeros((2, 32)), -1, "amax").dequantize()) == 0).all()


def test_eden_is_unbiased_over_rotations_and_has_less_noise():
    x = jax.random.normal(jax.random.key(6), (4, 128)) * jnp.exp(jax.random.normal(jax.random.key(8), (4, 128)))

    def drawn(seed, rounding):
        turn = 1.0 - 2.0 * (bits_of((128,), *keys(seed, 0)) >> 31).astype(jnp.float32)
        q = nvfp4_values.along(x, -1, "amax", rounding, keys(seed, 1), turn).dequantize()
        return jax.vmap(lambda row: formats.rotate(row, 128, signs=turn, direction="inverse"))(q)

    squares, count = {}, 400
    for rounding in ("eden", "stochastic"):
        many = jax.jit(jax.vmap(functools.partial(drawn, rounding=rounding)))(jnp.arange(count, dtype=jnp.uint32))
        many = np.asarray(many, np.float64)
        error = many.std(0) / np.sqrt(count)
        scaled = (many.mean(0) - np.asarray(x)) / error
        assert np.abs(scaled.mean()) < 0.3 and 0.7 < scaled.std() < 1.3  # as of a mean without bias
        squares[rounding] = np.square(error).sum()
    assert squares["eden"] < 0.55 * squares["stochastic"]


@pytest.mark.parametrize("exponent", [-100, -70, 65, 100])
def test_edens_corrections_do_not_depend_on_the_size_of_what_is_rounded(exponent):
    """Sums of squares of gradients below 2**-63 or above 2**64 are not float32 numbers."""
    x = jax.random.normal(jax.random.key(6), (4, 128))
    quantize = lambda x: along(x, -1, "amax", "eden", KEY, jnp.ones(128))
    plain, moved = quantize(x), quantize(x * 2.0**exponent)
    assert np.array_equal(np.asarray(moved.values, np.float32), np.asarray(plain.values, np.float32))
    assert float(moved.outer) == float(plain.outer) * 2.0**exponent


def test_edens_values_are_codes_times_scales():
    values = np.asarray(along(wild(9.0), -1, "four_over_six", "eden", KEY).values, np.float32)
    assert np.isin(np.abs(values[~np.isnan(values)]), PRODUCTS.astype(np.float32)).all()
    assert np.isnan(values[9, :16]).all() and np.isnan(values).sum() == BLOCK  # no other block
    assert (values[20, 48:] == 0).all()


@pytest.mark.parametrize(
    ("axis", "size", "dtype"), [(0, 16, "float32"), (0, 32, "bfloat16"), (-1, 16, "float32"), (-1, 128, "bfloat16")]
)
def test_rotations_are_the_format_librarys(axis, size, dtype, monkeypatch):
    def keep(x, axes, *rest):
        blocks = jnp.concatenate(rest[3](x), axis=axes[0]).astype(jnp.float32)
        return types.SimpleNamespace(values=lambda: nvfp4_values.Nvfp4Values(blocks, jnp.float32(1)))

    monkeypatch.setattr(nvfp4_values, "quantize", keep)
    monkeypatch.setattr(nvfp4_values.nvfp4_kernel, "serves", lambda *_: False)
    x = jax.random.normal(jax.random.key(0), (32, 128)).astype(dtype)
    turn = np.where(np.arange(size) % 3, 1.0, -1.0).astype(np.float32)
    run = lambda x, turn: (
        nvfp4_values.along(x, axis, "amax", signs=turn).values,
        formats.rotate(x.astype(jnp.float32), size, signs=turn, dim=axis),
    )
    got, want = jax.jit(run, compiler_options=QUICK)(x, turn)
    if axis == 0 and size == BLOCK:
        assert same(got, want)
    np.testing.assert_allclose(got, want, atol=1e-5)
