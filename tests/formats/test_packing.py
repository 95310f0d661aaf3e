"""Real storage: unpack(pack(x)) has the bits of the cast, in exactly the bytes of the
datatype.
"""

import math
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcfp_jax import formats
from tcfp_jax.formats import CATALOG, cast, datatype, number, pack, unpack
from tcfp_jax.formats.encoding import decode, encode, from_bytes, to_bytes
from tests.formats_oracles import FLOATS, QUICK, packed_and_cast, quick, same, same_bits
from tests.helpers import normal, parametrize, refused, slow_except


@parametrize("name", FLOATS)
def test_every_code_is_that_of_ml_dtypes(name):
    spec = number(name)
    codes = np.arange(2**spec.bits, dtype=np.uint8 if spec.bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):
        values = codes.view(np.dtype(getattr(ml_dtypes, name, name))).astype(np.float32)

    def both(codes, values):
        return decode(codes, spec), encode(values, spec)

    run = jax.jit(both, compiler_options=QUICK)
    got, again = run(codes.astype(np.uint32), values)
    nan = np.isnan(values)
    assert same(got, values)
    assert np.array_equal(again[~nan], codes[~nan])
    assert np.isin(again[nan], codes[nan]).all()


@parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32])
def test_codes_fill_bytes_without_gaps(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, 37, dtype=np.uint64)

    def both(codes):
        data = to_bytes(codes, bits)
        return data, from_bytes(data, bits, 37)

    run = jax.jit(both, compiler_options=QUICK)
    data, again = run(codes.astype(np.uint32))
    whole = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    assert bytes(np.asarray(data)) == whole.to_bytes(-(-37 * bits // 8), "little")
    assert np.array_equal(again, codes)


def expected_bytes(made, shape):
    parts = made.stored_bits(shape)
    if parts.pop("residual", 0):
        return expected_bytes(made.residual, shape) + sum_of_bytes(parts)
    return sum_of_bytes(parts)


def sum_of_bytes(parts):
    return sum(-(-bits // 8) for bits in parts.values())


DRAWN = sorted({made: name for name, made in CATALOG.items()}.values())


# Draws share programs, which take longer to compile than to run. PACKING_PROGRAMS=200
# gives every draw its own.
PROGRAMS = int(os.environ.get("PACKING_PROGRAMS", "20"))


def random_program(seed):
    """Return (datatype, shape, dtype) for the catalog, with tiles along any axis."""
    random = np.random.default_rng(seed)
    made = CATALOG[DRAWN[seed * 37 % len(DRAWN)]]
    scale = made.scale
    if scale is not None and len(scale.tiles) == 1:
        dim = int(random.choice([-2, -1, 0]))
        code = re.sub(r"(_t[0-9a-z]+)", rf"\1d{dim}", scale.name)
        made = datatype(made.number, code, residual=made.residual)
    sizes = [tile.size for tile in scale.tiles] if scale else []
    least = max([2, *sizes])
    rows = random.integers(least, 2 * least)
    columns = random.integers(max(least, 3), least + 40)
    dtype = str(random.choice(["float32", "bfloat16", "float16"]))
    return made, (int(rows), int(columns)), dtype


@slow_except("0")
@parametrize("start", range(4))
def test_unpack_is_the_cast_on_random_draws(start):
    """200 draws of (datatype, shape, axis, dtype, values)."""
    for draw in range(start, 200, 4):
        made, shape, dtype = random_program(draw % PROGRAMS)
        random = np.random.default_rng(draw)
        x = random.standard_normal(shape) * 2.0 ** random.integers(-12, 12)
        x = (x * (random.random(shape) > 0.05)).astype(np.float32)
        packed, unpacked, expected = packed_and_cast(x.astype(jnp.dtype(dtype)), made)
        assert same_bits(unpacked, expected), (made.name, shape, dtype)
        assert packed.nbytes == expected_bytes(made, shape)


@parametrize(
    "name, shape",
    [
        ("mxfp4e2", (8,)),
        ("mxfp4e2", ()),
        ("nvfp4s", (64,)),
        ("mxfp4e2", (-4, 32)),
        ("e4m3fn", (2.5,)),
        ("mxfp6s", (32, 16)),
        ("tcfp12", (4, 16)),
    ],
)
def test_bits_of_impossible_shapes_raise(name, shape):
    made = getattr(formats, name)
    for bits in (made.stored_bits, made.bits_per_value):
        with refused(r"shape|its axis of"):
            bits(shape)


EVERY_PART = (
    "mxfp4e2 int8_Fc e4m3fn e3m2fnuz uint4_fi32 mx6 nvfp4 icb44fi4_e32s8 tcfp12"
)


@parametrize("name", ["mxfp4e2", "nvfp4", "nf4", "e3m2fnuz", "uint4_ffc", "e4m3fn"])
def test_packing_promotes_no_ranks(name):
    x = normal(1, (8, 64))
    expected = cast(x, name)
    with jax.numpy_rank_promotion("raise"):
        assert same_bits(unpack(pack(x, name)), expected)


@parametrize("shape", [(0, 64), (0, 3), (64, 0), (4, 0, 64), (7, 40), (64, 128)])
@parametrize("name", EVERY_PART.split())
def test_bytes_of_any_shape_are_those_counted(name, shape):
    made = getattr(formats, name)
    packed = jax.eval_shape(lambda x: pack(x, made), jnp.ones(shape))
    size = math.prod(shape)
    assert packed.nbytes == expected_bytes(made, shape)
    assert shape != (64, 128) or packed.nbytes * 8 == made.bits_per_value(shape) * size
    stored = sum(made.stored_bits(shape).values())
    assert made.bits_per_value(shape) * size == (stored if size else 0)


@parametrize("name", EVERY_PART.split())
def test_an_array_without_values_is_packed(name):
    made = getattr(formats, name)
    packed = pack(jnp.ones((4, 0, 64)), made)
    assert packed.nbytes == expected_bytes(made, (4, 0, 64))


def test_layout_is_that_of_the_hardware_formats():
    x = np.zeros(32, np.float32)
    x[:4] = 1.0, -6.0, 0.5, 4.0
    packed = pack(x, formats.mxfp4e2)
    assert packed.values[:2].tolist() == [0xF2, 0x61]
    assert packed.scales.tolist() == [127]
    eight = pack(x, formats.mxfp8e4)
    values = np.asarray(eight.values).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.asarray(eight.scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(values * scale, x)


def test_special_values_come_back():
    x = jnp.ones((2, 64)).at[0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
    for made, saturate in (
        (formats.mxfp8e5, False),
        (formats.nvfp4, False),
        (formats.uint8_fi32, False),
        (datatype("int8"), True),
    ):
        _, unpacked, expected = packed_and_cast(x, made, saturate=saturate)
        assert same_bits(unpacked, expected), made.name
    with refused("no code"):
        pack(x, datatype("e2m1f"))


def test_modes_reach_packing():
    x = normal(0, (4, 64))
    key = jax.random.key(1)
    stochastic = {"roundmode": "stochastic", "key": key}
    for made, modes in (
        (formats.mxfp4e2, stochastic),
        (formats.mxfp4e2, {"scalemode": "ceil"}),
        (formats.tcfp12, stochastic),
    ):
        _, unpacked, expected = packed_and_cast(x, made, **modes)
        assert same_bits(unpacked, expected)
        assert not same_bits(expected, quick(x, made))


@slow_except("int8_f", "e4m3fn")
@parametrize("name", ["nvfp4", "int8_f", "e4m3fn"])
def test_sparse_arrays_are_the_cast_of_kept_values(name):
    x = normal(0, (8, 64)).at[1].set(-0.0)
    # a NaN would be the whole tensor's
    x = x if name == "int8_f" else x.at[0, 0].set(jnp.nan)
    made = getattr(formats, name)
    packed, unpacked, _ = packed_and_cast(x, made, sparsity=(4, 2))
    assert same_bits(unpacked, quick(formats.sparse(x, 4, 2), made))
    assert packed.mask.size == x.size // 8
    assert packed.values.size * 8 == x.size // 2 * made.number.bits


@parametrize("name", ["nf4", "uint8_ff", "tcfp12", "e5m0"])
def test_sparsity_needs_a_code_of_zero(name):
    made = CATALOG.get(name) or datatype(name)
    with refused("sparsity"):
        pack(jnp.ones((8, 64)), made, sparsity=(4, 2))


def test_a_traced_nan_without_a_code_is_stored_as_zero():
    x = jnp.array([[jnp.nan, 1.0, -2.0, 0.3]])
    lost = unpack(jax.jit(lambda x: pack(x, datatype("e2m1f")))(x))
    assert same_bits(lost, cast(x.at[0, 0].set(0.0), datatype("e2m1f")))


def test_orbax_saves_and_restores_packed_arrays(tmp_path):
    import orbax.checkpoint as ocp

    x = normal(0, (4, 64)).astype(jnp.bfloat16)
    packed, unpacked, _ = packed_and_cast(x, formats.nvfp4)
    assert packed.shape == (4, 64)
    assert packed.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(packed))
    state = {"w": packed}
    empty = jax.tree.map(jnp.zeros_like, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", empty)
    assert same_bits(jax.jit(unpack)(restored["w"]), unpacked)
    with refused("pack", TypeError):
        unpack(x)
