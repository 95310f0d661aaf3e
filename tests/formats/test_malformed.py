"""Malformed codes, options, packed arrays and files: a ValueError that names the rule,
or a right reading; fuzzed.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import tcfp_jax
from pallas_kernels.scaling import Fp4
from tcfp_jax import formats
from tcfp_jax.inference import load_quantized, quantize_params, restored, unpack
from tcfp_jax.nnx import TCFPLinear
from tcfp_jax.weights.tcfp12 import PackedTCFP12
from tests.helpers import parametrize, refused

X = jnp.linspace(-1.0, 1.0, 128).reshape(4, 32)
cyclic: list[object] = []
cyclic.append(cyclic)
# Values that no argument takes, but for a few that are right in one place.
JUNK = [
    None,
    True,
    -1,
    0,
    2,
    2.0,
    10**400,
    float("nan"),
    "",
    "abc",
    "e4m3",
    b"e4m3",
    [],
    [1.0, 2.0],
    [["?!"]],
    {},
    {"a": 1},
    (4, 2),
    (4.0, 2),
    object(),
    np.ones(2),
    np.ones((2, 2), np.complex64),
    np.float64,
    int,
    complex,
]
TEXT = st.text("eEmMbfnuzicbtsodlra_-0123456789٣４²", max_size=24) | st.sampled_from(
    ["int" + "9" * 5000, "e8m0_t٣٢"]
)
junk = st.sampled_from(JUNK)
FILED = [value for value in JUNK if not isinstance(value, type)]  # no file has a class


def assert_refused_or_read(run, *, types=()):
    """Return the result, or None if it is refused: by a ValueError, or a documented
    TypeError, that names the rule.
    """
    try:
        return run()
    except (ValueError, *types) as error:
        message = f"{type(error).__name__}: {error}"
    words = " (use|give|not|neither|read|pass|pack|drop|add|restore|needs|has|take) "
    assert types or re.search(words, message), message
    return None


@given(st.one_of(TEXT, junk, st.just(cyclic)))
def test_codes(code):
    for parse in (formats.number, formats.scale, formats.datatype, formats.codebook):
        made = assert_refused_or_read(lambda parse=parse: parse(code))
        assert made is None or hash(made) == hash(parse(code))
    assert_refused_or_read(lambda: formats.datatype("e2m1f", code))
    assert_refused_or_read(lambda: formats.datatype("e2m1f", "e8m0", residual=code))
    assert_refused_or_read(lambda: formats.mxfp4e2.bits_per_value(code))


OPTIONS = {
    formats.cast: ("roundmode", "scalemode", "key", "saturate"),
    formats.pack: ("sparsity", "key", "scalemode"),
    formats.quantize_nvfp4: ("rule", "tile", "amax", "signs"),
    formats.rotate: ("size", "signs", "dim", "direction"),
    formats.sparse: ("n", "m", "dim"),
    tcfp_jax.quantize_tcfp12: ("block", "residual", "scale", "sigma", "key"),
}
USUAL = {
    formats.cast: {"datatype": formats.mxfp4e2},
    formats.pack: {"datatype": formats.mxfp4e2},
    formats.sparse: {"n": 4, "m": 2},
}


@given(st.sampled_from(list(OPTIONS)), st.data())
def test_options_and_arrays(function, data):
    """Only an array that is none, or not of real floats, is a TypeError; JAX may warn
    of its dtype before.
    """
    options = USUAL.get(function, {}) | data.draw(
        st.dictionaries(st.sampled_from(OPTIONS[function]), junk, max_size=2)
    )
    refused_by_jax = (TypeError, OverflowError, UserWarning)
    assert_refused_or_read(
        lambda: jax.eval_shape(lambda x: function(x, **options), X),
        types=refused_by_jax if {"amax", "signs"} & set(options) else (),
    )
    assert_refused_or_read(
        lambda: function(data.draw(junk), **USUAL.get(function, {})),
        types=refused_by_jax,
    )


@functools.cache
def packed_as(name):
    if name == "sparse":
        return formats.pack(X, formats.mxfp4e2, sparsity=(4, 2))
    return formats.pack(X, formats.CATALOG[name])


def damaged(data, packed, values, changes):
    """Return (the name of a drawn field, the array with another value in it)."""
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(packed)]))
    right = getattr(packed, name)
    damage = [*JUNK, *values]
    if hasattr(right, "astype"):
        damage += [change(right) for change in changes]
    wrong = data.draw(st.sampled_from(damage))
    return name, dataclasses.replace(packed, **{name: wrong})


def doubled(part):
    return jnp.concatenate([part, part])


@given(
    st.sampled_from(["mxfp4e2", "nvfp4", "uint4_fi32", "mx6", "tcfp12", "sparse"]),
    st.data(),
)
def test_packed_arrays(name, data):
    packed = packed_as(name)
    field, broken = damaged(
        data,
        packed,
        [packed_as("nvfp4"), formats.nvfp4, (4, 33), (8, 32), (-4, -32), jnp.int32],
        [lambda x: x[:-1], lambda x: x[None], lambda x: x.astype(jnp.int8), doubled],
    )
    got = assert_refused_or_read(lambda: jax.eval_shape(lambda: formats.unpack(broken)))
    right = getattr(packed, field)
    if got is not None and getattr(broken, field) is not right:
        assert field in ("dtype", "datatype", "shape") or (field, right) == (
            "sparsity",
            None,
        )


packed_tensor = functools.cache(lambda: tcfp_jax.quantize_tcfp12(X))


@given(st.data())
def test_packed_tensors(data):
    _, broken = damaged(
        data,
        packed_tensor(),
        [33, 31, 1000],
        [
            lambda x: x[:2],
            lambda x: x[0],
            lambda x: x[..., :1],
            lambda x: x.astype(jnp.float32),
            lambda x: x.astype(jnp.float8_e5m2),
        ],
    )
    for read in (tcfp_jax.dequantize_tcfp12, PackedTCFP12.dequantize):
        got = assert_refused_or_read(
            lambda read=read: jax.eval_shape(lambda: read(broken))
        )
        if got is not None:
            assert got.shape[-1] == broken.length


@functools.cache
def plain(recipe):
    """Return the arrays of a stored weight as a checkpointer without a template returns
    them.
    """
    one = quantize_params({"kernel": jnp.ones((64, 32))}, recipe)["tcfp"]["kernel"]
    operand = one.forward or one.backward
    parts = {name: getattr(operand, name) for name in ("values", "scale", "outer")}
    return {name: np.asarray(x) for name, x in parts.items() if x is not None}


def read_back(arrays, recipe):
    variables = {"params": {}, "tcfp": {"kernel": {"forward": arrays}}}
    return restored(variables, recipe)["tcfp"]["kernel"]


SCALES = [0.0, -1.0, 1e-40, 3e38, np.inf, -0.0]


@parametrize("value", SCALES)
@parametrize("recipe", ["tensorwise", "nvfp4"])
def test_scales_that_no_quantizer_makes(recipe, value):
    name = "scale" if recipe == "tensorwise" else "outer"
    arrays = plain(recipe) | {name: np.full_like(plain(recipe)[name], value)}
    if recipe == "nvfp4" and value == 0 and not np.signbit(value):
        assert not np.asarray(read_back(arrays, recipe).dequantize()).any()
        return
    with refused(f"{name} of kernel has .* quantizers make scales"):
        read_back(arrays, recipe)


def test_a_weight_that_overflowed_stays_loud():
    arrays = plain("tensorwise") | {"scale": np.float32(np.nan)}
    assert np.isnan(read_back(arrays, "tensorwise").dequantize()).all()


def test_scales_are_checked_in_variables_for_nnx():
    params = {"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(32)}
    broken = jax.tree.map(
        lambda leaf: jnp.float32(3e38) if leaf.ndim == 0 else leaf,
        quantize_params(params, "tensorwise"),
    )
    model = TCFPLinear(64, 32, recipe="tensorwise", rngs=nnx.Rngs(0))
    with refused(r"scale of kernel has 3e\+38"):
        load_quantized(model, broken)


@given(st.sampled_from(["tensorwise", "nvfp4"]), st.data())
def test_plain_dicts_of_checkpoints(recipe, data):
    arrays = plain(recipe)
    name = data.draw(st.sampled_from([*arrays, "lo", "more"]))
    damage = list(FILED)
    if name in arrays:
        right = arrays[name]
        damage += [right[..., None], right.astype(np.int8), right.astype(np.float64)]
    broken = arrays | {name: data.draw(st.sampled_from(damage))}
    got = assert_refused_or_read(lambda: read_back(broken, recipe))
    assert got is None or broken[name] is None
    for variables in (
        data.draw(st.sampled_from(FILED)),
        {"tcfp": data.draw(st.sampled_from(FILED))},
        {"tcfp": {"kernel": {"forward": data.draw(st.sampled_from(FILED))}}},
    ):
        assert_refused_or_read(lambda variables=variables: restored(variables, recipe))
        assert_refused_or_read(lambda variables=variables: unpack(variables, recipe))


@parametrize("byte", [0b0000_0111, 0b0001_0001, 0b1111_1111], ids=bin)
def test_a_mask_that_keeps_another_count_is_refused(byte):
    packed = packed_as("sparse")
    mask = packed.mask.at[3].set(byte)
    with refused(r"the mask keeps .* of 4 values, not 2; the file is damaged"):
        formats.unpack(dataclasses.replace(packed, mask=mask))


@parametrize("field", ["format", "tile", "rule"])
@parametrize("value", [[], {}, None, 3], ids=str)
def test_another_kind_of_field_is_no_fp4_scaling(field, value):
    with refused(f"{field}={re.escape(repr(value))} is "):
        Fp4(**{field: value})
