"""The catalog: datatypes of TensorCast, OCP's MX, NVFP4, TCFP-12 and NF4 by name.

Read one as `CATALOG[name]` or `formats.<name>`. A name begins with a number (`int8`,
`e4m3`, `fp8` for e4m3fn, `bf8` for e5m2; a trailing `n` or `z` stands for fnuz). After
an underscore, one letter is the number format of the scale and one is the format of the
zero point. The letters are `F` float32, `f` float16 (e5m3, if it scales tiles of signed
numbers), `b` bfloat16, `e` e8m0, `n` e4m3, `i` int8. Digits after them are the size of
a tile, `c` is a channel, and a final `s` makes tiles square.

Some names of TensorCast contradict its definitions; here the name is right. `uint8_*`
have 8 bits (16 there), `bf8b32s` and `bf8nb32s` have tiles of 32 (16 there),
`icb44fi4_f32` has a scale in e5m3 (e5m0 there), and OCP's e2m1, e2m3 and e3m2 have -0
and no NaN (`f`; `fnuz` there). Its float8 names mean the dtypes, not IEEE numbers.
"""

import difflib

from tcfp_jax.formats.datatypes import CATALOG, DataType, datatype


def _add(
    name: str,
    number: str,
    scale: str | None = None,
    *,
    residual: DataType | None = None,
) -> None:
    assert name not in CATALOG, name
    CATALOG[name] = datatype(number, scale, name, residual=residual)


def _add_rows(rows: str) -> None:
    """Add the datatypes of a table: name, number and scale."""
    for row in rows.strip().splitlines():
        _add(*row.split())


_FP8 = {
    "bf8": "e5m2",
    "fp8": "e4m3fn",
    "bf8n": "e5m2b16fnuz",
    "fp8n": "e4m3b8fnuz",
}


def _add_unscaled() -> None:
    codes = (
        "float32 float16 bfloat16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz"
        " float8_e4m3fnuz "
    )
    codes += (
        "e5m2 e5m2fnuz e5m2b16fnuz e4m3fn e4m3fnuz e4m3b8fnuz e3m3fnuz e3m2fnuz"
        " e2m3fnuz e2m1fnuz"
    )
    for code in codes.split():
        _add(code, code)
    for alias, code in _FP8.items():
        _add(alias, code)
    for precision in range(1, 8):
        _add(f"binary8p{precision}", f"binary8p{precision}")


_LETTERS = {
    "F": "float32",
    "f": "float16",
    "b": "bfloat16",
    "n": "e4m3",
    "e": "e8m0",
    "i": "int8",
}


def _add_tensor_and_channel_scaled() -> None:
    for letters in ("FF", "ff", "bb", "Fi", "fi", "bi", "ni"):
        shared = "_".join(_LETTERS[letter] for letter in letters)
        _add(f"uint8_{letters}", "uint8", shared)
        _add(f"uint8_{letters}c", "uint8", f"{shared}_t0")
        _add(f"uint4_{letters}c", "uint4", f"{shared}_t0")
        _add(f"uint8_{letters}32", "uint8", f"{shared}_t32")
        _add(f"uint4_{letters}32", "uint4", f"{shared}_t32")
    _add("uint16_ff", "uint16", "float16_float16")
    _add("uint16_bb", "uint16", "bfloat16_bfloat16")
    for letter in "Ffbne":
        shared = _LETTERS[letter]
        for name, code in _FP8.items():
            _add(f"{name}_{letter}", code, shared)
            if name.startswith("fp8"):
                _add(f"{name}_{letter}c", code, f"{shared}_t0")
        _add(f"int8_{letter}", "int8", shared)
        _add(f"int8_{letter}c", "int8", f"{shared}_t0")
        _add(f"int4_{letter}c", "int4", f"{shared}_t0")
        if letter in "fbe":
            _add(f"int16_{letter}", "int16", shared)
    _add_rows("""
        e5m2_e   e5m2      e8m0
        e5m2z_e  e5m2fnuz  e8m0
        e4m3_e   e4m3fn    e8m0
        e4m3z_e  e4m3fnuz  e8m0
        e3m2_e   e3m2f     e8m0
        e2m3_e   e2m3f     e8m0
    """)


_MX = {
    "mxfp8e5": "e5m2",
    "mxfp8e4": "e4m3fn",
    "mxfp6e3": "e3m2f",
    "mxfp6e2": "e2m3f",
    "mxfp4e2": "e2m1f",
}
_MX_SHORT = {
    "mxbf8": "e5m2",
    "mxfp8": "e4m3fn",
    "mxbf6": "e3m2f",
    "mxfp6": "e2m3f",
    "mxfp4": "e2m1f",
}
_MX_INTEGERS = {"mxint8": "int8", "mxint4": "int4"}


def _add_tiled() -> None:
    for name, code in (_MX | _MX_SHORT | _MX_INTEGERS | {"mxfp5e2": "e2m2f"}).items():
        _add(name, code, "e8m0_t32")
    for name, code in (_MX_SHORT | _MX_INTEGERS).items():
        _add(f"{name}t16", code, "e8m0_t16")
        _add(f"{name}t16s", code, "e8m0_t16_t16")
    for name, code in _MX_SHORT.items():
        if name != "mxbf8":
            _add(f"{name}s", code, "e8m0_t32_t32")
            _add(f"{name}s16", code, "e8m0_t16_t16")
    for name, code in {
        "nvb8": "e5m2",
        "nvf8": "e4m3fn",
        "nvb6": "e3m2f",
        "nvf6": "e2m3f",
        "nvf4": "e2m1f",
    }.items():
        _add(name, code, "e4m3_t16")
        _add(f"{name}s", code, "e4m3_t16_t16")
    for name, code in {"fp8": "e4m3fn", "fp8n": "e4m3b8fnuz"}.items():
        _add(f"{name}F32s", code, "float32_t32_t32")
        _add(f"{name}f32s", code, "float16_t32_t32")
    _add_rows("""
        bf8b32s       e5m2        bfloat16_t32_t32
        bf8nb32s      e5m2b16fnuz bfloat16_t32_t32
        bfp16         int8        e8m0_t8
        bfp16t16      int8        e8m0_t16
        uint4_f12i432 uint4       e5m6_int4_t32
        int4_b32      int4        bfloat16_t32
        int4_f32      int4        e5m3_t32
        int8_b16      int8        bfloat16_t16
        int8_b32      int8        bfloat16_t32
        int8_f16      int8        e5m3_t16
        int8_f32      int8        e5m3_t32
        e1m6b1_e32    e1m6b1fnuz  e8m0_t32
        e1m2b1_e32    e1m2b1fnuz  e8m0_t32
        e1m2b1_f32    e1m2b1fnuz  e5m3_t32
        e2m1_f32      e2m1f       e5m3_t32
        e3m2_f32      e3m2f       e5m3_t32
        e2m3_f32      e2m3f       e5m3_t32
        e4m3_f32      e4m3fn      e5m3_t32
        mx9           int8        e8m0_t16s2o1
        mx6           int5        e8m0_t16s2o1
        mx4           int3        e8m0_t16s2o1
    """)
    for subtile, offset in ((8, 1), (4, 1), (8, 2), (4, 2)):
        _add(f"e2m1_e32s{subtile}o{offset}", "e2m1f", f"e8m0_t32s{subtile}o{offset}")
    for width, code in {"4": "e4m3fn", "3": "e3m2fnuz", "2": "e2m3fnuz"}.items():
        for tile in ("32", "32s16", "32s8", "32s4"):
            _add(f"icb44fi{width}_e{tile}", f"icb44fi_{code}", f"e8m0_t{tile}")
            _add(f"icb44fi{width}_f{tile}", f"icb44fi_{code}", f"e5m3_t{tile}")
    _add_rows("""
        nf4             nf4   float32_t64
        nvfp4           e2m1f e4m3fn_t16_float32
        nvfp4s          e2m1f e4m3fn_t16_t16_float32
        nvfp4_one_level e2m1f e4m3fn_t16
    """)
    _add(
        "tcfp12",
        "e4m3fn",
        "e8m0_t32_ceil",
        residual=datatype("linear4", "e8m0_t32_mse"),
    )


def named(given: DataType | str) -> DataType:
    """Return a datatype, or the one that `datatype` makes of this text.

    Raises:
      ValueError: neither a name of the catalog, nor codes of a number and a scale.

    >>> named("mxfp4e2").bits_per_value(), named("e2m1f_e8m0_t16").bits_per_value()
    (4.25, 4.5)
    """
    if not isinstance(given, str):
        return given
    try:
        return datatype(given)
    except ValueError as error:
        near = difflib.get_close_matches(given.lower(), CATALOG, n=3, cutoff=0.5)
        hint = f"; did you mean one of {near}?" if near else "."
        raise ValueError(
            f"the catalog has no datatype {given!r}{hint} `python -m"
            " tcfp_jax.formats` lists it, and formats.datatype(number, scale) makes"
            f" others. As codes: {error}"
        ) from error


_add_unscaled()
_add_tensor_and_channel_scaled()
_add_tiled()
