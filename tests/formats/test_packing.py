"""Real storage: unpack(pack(x)) has the bits of the cast, in exactly the bytes of the
datatype.
"""

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tcfp_jax import formats
from tcfp_jax.formats import CATALOG, cast, datatype, number, pack, unpack
from tcfp_jax.formats.encoding import decode, encode, from_bytes, to_bytes
from tests.formats_oracles import FLOATS, QUICK, packed_and_cast, quick, same_bits


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_is_that_of_ml_dtypes(name):
    spec = number(name)
    codes = np.arange(2**spec.bits, dtype=np.uint8 if spec.bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):
        values = codes.view(np.dtype(getattr(ml_dtypes, name, name))).astype(np.float32)
    both = lambda codes, values: (decode(codes, spec), encode(values, spec))
    got, again = map(
        np.asarray,
        jax.jit(both, compiler_options=QUICK)(codes.astype(np.uint32), values),
    )
    nan = np.isnan(values)
    assert (
        np.array_equal(got.view(np.uint32)[~nan], values.view(np.uint32)[~nan])
        and np.isnan(got[nan]).all()
    )
    assert (
        np.array_equal(again[~nan], codes[~nan])
        and np.isin(again[nan], codes[nan]).all()
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32])
def test_codes_fill_bytes_without_gaps(bits):
    random = np.random.default_rng(bits)
    codes = random.integers(0, 2**bits, 37, dtype=np.uint64).astype(np.uint32)
    both = lambda codes: (data := to_bytes(codes, bits), from_bytes(data, bits, 37))
    data, again = jax.jit(both, compiler_options=QUICK)(codes)
    whole = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    assert bytes(np.asarray(data)) == whole.to_bytes(-(-37 * bits // 8), "little")
    assert np.array_equal(again, codes)


def expected_bytes(made, shape):
    own = sum(
        -(-bits // 8)
        for name, bits in made.stored_bits(shape).items()
        if name != "residual"
    )
    return own + (expected_bytes(made.residual, shape) if made.residual else 0)


DRAWN = sorted({made: name for name, made in CATALOG.items()}.values())


# Draws share programs, which take longer to compile than to run. PACKING_PROGRAMS=200
# gives every draw its own.
PROGRAMS = int(os.environ.get("PACKING_PROGRAMS", "20"))


def random_program(seed):
    """Return (datatype, shape, dtype) for the catalog, with tiles along any axis."""
    random = np.random.default_rng(seed)
    made = CATALOG[DRAWN[seed * 37 % len(DRAWN)]]
    if made.scale is not None and len(made.scale.tiles) == 1:
        dim = int(random.choice([-2, -1, 0]))
        code = "_".join(
            p + f"d{dim}" if p[0] == "t" else p for p in made.scale.name.split("_")
        )
        made = datatype(made.number, code, residual=made.residual)
    least = max([2] + [tile.size for tile in made.scale.tiles] if made.scale else [2])
    shape = (
        int(random.integers(least, 2 * least)),
        int(random.integers(max(least, 3), least + 40)),
    )
    return made, shape, str(random.choice(["float32", "bfloat16", "float16"]))


@pytest.mark.slow_except("0")
@pytest.mark.parametrize("start", range(4))
def test_unpack_is_the_cast_on_random_draws(start):
    """Return 200 draws of (datatype, shape, axis, dtype, values)."""
    for draw in range(start, 200, 4):
        made, shape, dtype = random_program(draw % PROGRAMS)
        random = np.random.default_rng(draw)
        x = (
            random.standard_normal(shape)
            * 2.0 ** random.integers(-12, 12)
            * (random.random(shape) > 0.05)
        )
        packed, unpacked, expected = packed_and_cast(
            x.astype(np.float32).astype(jnp.dtype(dtype)), made
        )
        assert same_bits(unpacked, expected), (made.name, shape, dtype)
        assert packed.nbytes == expected_bytes(made, shape)


@pytest.mark.parametrize(
    ("name", "shape"),
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
def test_bits_of_shapes_that_no_array_of_the_datatype_has_raise(name, shape):
    for bits in (
        getattr(formats, name).stored_bits,
        getattr(formats, name).bits_per_value,
    ):
        with pytest.raises(ValueError, match=r"shape|its axis of"):
            bits(shape)


@pytest.mark.parametrize(
    "shape", [(0, 64), (0, 3), (64, 0), (4, 0, 64), (7, 40), (64, 128)]
)
@pytest.mark.parametrize(
    "name",
    [
        "mxfp4e2",
        "int8_Fc",
        "e4m3fn",
        "e3m2fnuz",
        "uint4_fi32",
        "mx6",
        "nvfp4",
        "icb44fi4_e32s8",
        "tcfp12",
    ],
)
def test_bytes_of_any_shape_are_those_counted(name, shape):
    made = getattr(formats, name)
    # the count needs only shapes
    run = (lambda f, x: f(x)) if shape == (4, 0, 64) else jax.eval_shape
    packed = run(lambda x: pack(x, made), jnp.ones(shape))
    assert packed.nbytes == expected_bytes(made, shape)
    assert shape != (64, 128) or packed.nbytes * 8 == made.bits_per_value(
        shape
    ) * np.prod(shape)
    assert made.bits_per_value(shape) * np.prod(shape) == sum(
        made.stored_bits(shape).values()
    ) * (0 not in shape)


def test_layout_is_that_of_the_hardware_formats():
    x = np.zeros(32, np.float32)
    x[:4] = 1.0, -6.0, 0.5, 4.0
    packed = pack(jnp.asarray(x), formats.mxfp4e2)
    assert packed.values[:2].tolist() == [
        0x2 | 0xF << 4,
        0x1 | 0x6 << 4,
    ] and packed.scales.tolist() == [127]
    assert np.array_equal(packed.values[:2], [0xF2, 0x61])
    eight = pack(jnp.asarray(x), formats.mxfp8e4)
    values = np.asarray(eight.values).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.asarray(eight.scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(values * scale, x)


def test_special_values_come_back():
    x = jnp.ones((2, 64)).at[0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
    for name in ("mxfp8e5", "nvfp4", "uint8_fi32"):
        made = getattr(formats, name)
        _, unpacked, expected = packed_and_cast(x, made, saturate=False)
        assert same_bits(unpacked, expected), name
    _, unpacked, expected = packed_and_cast(x, datatype("int8"))
    assert same_bits(unpacked, expected)
    with pytest.raises(ValueError, match="no code"):
        pack(x, datatype("e2m1f"))


def test_modes_reach_packing():
    x = jax.random.normal(jax.random.key(0), (4, 64))
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


@pytest.mark.slow_except("int8_f", "e4m3fn")
@pytest.mark.parametrize("name", ["nvfp4", "int8_f", "e4m3fn"])
def test_sparse_arrays_are_the_cast_of_what_was_kept_and_masks_are_bits(name):
    x = jax.random.normal(jax.random.key(0), (8, 64)).at[1].set(-0.0)
    # a NaN would be the whole tensor's
    x = x if name == "int8_f" else x.at[0, 0].set(jnp.nan)
    made = getattr(formats, name)
    packed, unpacked, _ = packed_and_cast(x, made, sparsity=(4, 2))
    assert same_bits(unpacked, quick(formats.sparse(x, 4, 2), made))
    assert (
        packed.mask.size == x.size // 8
        and packed.values.size * 8 == x.size // 2 * made.number.bits
    )
    for bad in ("nf4", "uint8_ff", "tcfp12"):
        with pytest.raises(ValueError, match="sparsity"):
            pack(x, getattr(formats, bad), sparsity=(4, 2))


def test_a_traced_nan_without_a_code_is_stored_as_zero():
    x = jnp.array([[jnp.nan, 1.0, -2.0, 0.3]])
    lost = unpack(jax.jit(lambda x: pack(x, datatype("e2m1f")))(x))
    assert same_bits(lost, cast(x.at[0, 0].set(0.0), datatype("e2m1f")))


def test_packed_arrays_are_pytrees_that_orbax_saves_and_restores(tmp_path):
    import orbax.checkpoint as ocp

    x = jax.random.normal(jax.random.key(0), (4, 64)).astype(jnp.bfloat16)
    state = {"w": jax.jit(lambda x: pack(x, formats.nvfp4), compiler_options=QUICK)(x)}
    assert state["w"].shape == (4, 64) and state["w"].dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", jax.tree.map(jnp.zeros_like, state)
        )
    assert same_bits(jax.jit(unpack)(restored["w"]), quick(x, formats.nvfp4))
    with pytest.raises(TypeError, match="pack"):
        unpack(x)
