"""Scales, datatypes and the catalog: codes, contradictions, exact bits, and names."""

import itertools
import re

from tcfp_jax import formats
from tcfp_jax.formats import CATALOG, datatype, number, scale
from tcfp_jax.formats.scales import BlockAxis
from tests.formats_oracles import table
from tests.helpers import parametrize, refused


@parametrize(
    "code, tiles",
    [
        ("float32", ()),
        ("e8m0_ceil", ()),
        ("float16_int8_t0d1", (BlockAxis(0, 1),)),
        ("e8m0_t16s2o1", (BlockAxis(16, -1, 2),)),
        ("e8m0_t32_t16", (BlockAxis(32, -2), BlockAxis(16, -1))),
        ("e8m0_t32d0_t16", (BlockAxis(32, 0), BlockAxis(16, -1))),
        ("e8m0_t32d-1_t16", (BlockAxis(32, -1), BlockAxis(16, -2))),
    ],
)
def test_tiles_of_codes(code, tiles):
    spec = scale(code)
    assert spec.tiles == tiles
    assert spec.is_tensor == (not tiles)
    assert spec.is_tile == any(tile.size for tile in tiles)
    assert spec.is_subtile == ("s2" in code) == bool(spec.offset)


def test_numbers_and_modes_of_codes():
    two = scale("e4m3fn_t16_float32")
    assert (two.number, two.outer) == (number("e4m3fn"), number("float32"))
    assert two.zero is None
    assert hash(two) == hash(scale("e4m3fn_t16_float32"))
    assert scale("e8m0_t32").mode is None
    assert scale("e8m0_t32_mse").mode == "mse"
    assert scale("float8_e8m0fnu_t32").number == scale("e8m0_t32").number


BAD_SCALES = """
    t32                         needs one scale
    e8m0_t33                    power of two
    e8m0_t2048                  power of two
    e8m0_t32s3                  divide
    e8m0_t0s2                   divide
    e8m0_t32o1                  subtiles
    e8m0_t32s4o3                1 or 2 bits
    e8m0_t32d1_t32d1            both tiles
    e8m0_int8                   float scale
    float16_uint8               signed
    float16_e8m0                signed
    int8_t32                    exponent or a float
    float16_t32_t32_t32         two tiles
    e8m0_t16_float32            two levels
    float16_int8_t16_float32    two levels
    float16_float16_float16     needs
    e4m3fn_t0_float32           tiles below
    float16_t16s2o1             power of two
    e8m0_x                      neither
    e8m0_t32_auto               neither
    float32_t32_ceil            exponent
    e8m0_mse_t32                neither
    e4m3fn_t16_float32_t16      follows
    e4m3fn_t16_float32_float32  two numbers
"""


@parametrize("code, why", [*table(BAD_SCALES), ("", "neither"), (3, "text")])
def test_bad_scales_raise(code, why):
    with refused(why):
        scale(code)


CONTRADICTIONS = """
    uint8,float16         zero point
    int8,float16_int8     zero point
    e4m3fn,float16_float16  zero point
    e8m0,float16          exponent
    uint8,float16_int4    narrower
    bfloat16,e8m0_t32     range
    int32,float32         24
    uint32                24
    e2m1f,e8m0_t32s4      offset
    nf4,e8m0_t32s4        has one
    nf4,e8m0_t32s4o1      neither
    icb44fi_e4m3fn        add a scale
"""


@parametrize("codes, why", table(CONTRADICTIONS))
def test_contradictions_raise(codes, why):
    with refused(why):
        datatype(*codes.split(","))


def test_a_scale_is_text_or_a_spec():
    with refused("neither"):
        datatype("e4m3fn", 3)


BITS = """
    mxfp8e5     8.25
    mxfp8e4     8.25
    mxfp6e3     6.25
    mxfp6e2     6.25
    mxfp4e2     4.25
    mxint8      8.25
    mxint4      4.25
    bfp16       9
    mx9         9
    mx6         6
    mx4         4
    nvfp4       4.5
    tcfp12      12.5
    nf4         4.5
    uint8_ff32  9
    uint4_bi32  4.75
    e4m3fn      8
    int8_f      8
    mxfp4s      4.0078125
    icb44fi4_e32s8  4.875
"""


@parametrize("name, bits", table(BITS))
def test_bits_per_value(name, bits):
    assert getattr(formats, name).bits_per_value() == float(bits)


def test_bits_of_a_shape_count_every_scale():
    assert datatype("int8", "float16_t0").bits_per_value((4, 8)) == 8 + 16 / 8
    assert datatype("int8", "float32").bits_per_value((4, 8)) == 8 + 1
    assert formats.mxfp4e2.bits_per_value((40,)) == 4 + 16 / 40
    assert formats.tcfp12.bits_per_value((2, 64)) == 12.5
    assert formats.mxfp4e2.bits_per_value((0, 3)) == 0
    for made, shape, values, scales in (
        (formats.nvfp4, (4, 20), 320, 64),
        (formats.nvfp4s, (20, 17), 1360, 32),
    ):
        expected = {"values": values, "scales": scales, "outer": 32}
        assert made.stored_bits(shape) == expected


def test_equality_is_content():
    assert formats.mxfp8 == formats.mxfp8e4 != formats.mxfp8t16
    assert hash(formats.mxfp8) == hash(formats.mxfp8e4)
    assert formats.mxfp8.name == "mxfp8"


LETTERS = dict(
    table("""
    F float32
    f float16
    b bfloat16
    n e4m3
    e e8m0
    i int8
""")
)
NUMBERS = dict(
    table("""
    bf8 e5m2
    fp8 e4m3fn
    bf8n e5m2b16fnuz
    fp8n e4m3b8fnuz
    bf6 e3m2f
    fp6 e2m3f
    fp4 e2m1f
    e5m2 e5m2
    e4m3 e4m3fn
    e5m2z e5m2fnuz
    e4m3z e4m3fnuz
    e3m2 e3m2f
    e2m3 e2m3f
    e2m1 e2m1f
    b8 e5m2
    f8 e4m3fn
    b6 e3m2f
    f6 e2m3f
    f4 e2m1f
""")
)


# The names of the catalog, with the number and the scale that they stand for.
of = NUMBERS.__getitem__


def scaled(name, letters, tile):
    """The codes of a name such as `int8_fc`."""
    shared = [LETTERS[letter] for letter in letters]
    if letters == "f" and tile in ("16", "32"):
        shared = ["e5m3"]
    if tile is not None:
        shared.append("t0" if tile == "c" else f"t{tile}")
    return NUMBERS.get(name, name), "_".join(shared)


RULES = [
    (r"(u?int\d+|(?:bf|fp)8n?|e\dm\dz?)_([Ffbnei]{1,2})(c|16|32)?", scaled),
    (
        r"mx(bf|fp)(\d)(t16)?(s16|s)?",
        lambda kind, bits, t16, square: (
            of(kind + bits),
            "e8m0" + f"_t{16 if t16 or square == 's16' else 32}" * (2 if square else 1),
        ),
    ),
    (
        r"mxfp(\d)e(\d)",
        lambda bits, e: (
            f"e{e}m{int(bits) - 1 - int(e)}"
            + {"85": "", "84": "fn"}.get(bits + e, "f"),
            "e8m0_t32",
        ),
    ),
    (
        r"mxint(\d)(t16)?(s)?",
        lambda bits, t16, square: (
            f"int{bits}",
            "e8m0" + ("_t16" if t16 else "_t32") * (2 if square else 1),
        ),
    ),
    (
        r"nv([bf]\d)(s)?",
        lambda n, square: (of(n), "e4m3" + "_t16" * (2 if square else 1)),
    ),
    (
        r"((?:bf|fp)8n?)([Ffb])32s",
        lambda n, letter: (of(n), LETTERS[letter] + "_t32_t32"),
    ),
    (r"mx(\d)", lambda bits: (f"int{int(bits) - 1}", "e8m0_t16s2o1")),
    (r"bfp16(t16)?", lambda t16: ("int8", "e8m0_t16" if t16 else "e8m0_t8")),
    (
        r"(e1m\d)b1_([ef])32",
        lambda n, letter: (f"{n}b1fnuz", {"e": "e8m0", "f": "e5m3"}[letter] + "_t32"),
    ),
    (r"e2m1_e32(s\do\d)", lambda sub: ("e2m1f", f"e8m0_t32{sub}")),
    (
        r"icb44fi(\d)_([ef])(32(?:s\d+)?)",
        lambda d, letter, tile: (
            "icb44fi_" + {"4": "e4m3fn", "3": "e3m2fnuz", "2": "e2m3fnuz"}[d],
            {"e": "e8m0_t", "f": "e5m3_t"}[letter] + tile,
        ),
    ),
]
NAMED = ("nf4", "nvfp4", "nvfp4s", "nvfp4_one_level", "tcfp12", "uint4_f12i432")


@parametrize("name", CATALOG)
def test_a_name_says_what_it_is(name):
    made = CATALOG[name]
    assert made.name == name
    assert getattr(formats, name) is made
    if name in NAMED:
        return
    codes = [NUMBERS.get(name, name)]
    for pattern, rule in RULES:
        match = re.fullmatch(pattern, name)
        if match:
            codes = rule(*match.groups())
            break
    assert made == datatype(*codes)


TENSORCAST = """
    float32 float16 bfloat16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz
    e5m2 e5m2fnuz e5m2b16fnuz binary8p3 e4m3fnuz e4m3fn e4m3b8fnuz binary8p4 binary8p5
    e3m3fnuz e3m2fnuz e2m3fnuz e2m1fnuz uint16_ff uint16_bb int16_f int16_b int16_e
    uint8_ff uint8_bb uint8_fi uint8_bi int8_f int8_b int8_e e5m2_e e5m2z_e e4m3_e
    e4m3z_e e3m2_e e2m3_e mxfp8e5 mxfp8e4 mxfp6e3 mxfp6e2 mxfp4e2 mxfp5e2 mxint8 mxint4
    bfp16 uint4_ff32 uint4_fi32 uint4_bb32 uint4_bi32 uint4_f12i432 int4_b32 int4_f32
    e1m6b1_e32 e1m2b1_e32 e1m2b1_f32 e2m1_f32 e3m2_f32 e2m3_f32 e4m3_f32 mx9 mx6 mx4
    e2m1_e32s8o1 e2m1_e32s4o1 e2m1_e32s8o2 e2m1_e32s4o2
    int8_f32 int8_f16 int8_b16 int8_b32
"""


def test_catalog_has_tensorcasts_names():
    names = set(TENSORCAST.split())
    for digit, letter, subtile in itertools.product(
        "432", "ef", ("", "s16", "s8", "s4")
    ):
        names.add(f"icb44fi{digit}_{letter}32{subtile}")
    assert names <= set(CATALOG)
