"""Products with FP4 weights on CPUs: codes, the definition, what is refused, and devices."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import fp4
from pallas_kernels.fp4_matmul.api import fp4_matmul
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import formats
from tcfp_jax.weights.fp4 import datatype_of, quantize_fp4
from tests.formats_oracles import QUICK

SCALINGS = [Fp4(), Fp4(tile="square"), Fp4("mxfp4"), Fp4(rule="one_level")]
N, K = 32, 64


# A program for each scaling, where every operation would be one.
quick = functools.partial(jax.jit, compiler_options=QUICK)
multiply = quick(fp4_matmul, static_argnames=("contracts", "activation", "out_dtype"))


KINDS = [(scaling, k) for scaling in SCALINGS for k in (K, 36)]  # whole blocks, and short ones
RANDOM = np.random.default_rng(0)
W, X = (jnp.asarray(RANDOM.standard_normal(shape), jnp.float32) for shape in ((N, K), (2, 3, K)))


@functools.cache
def _quantized():
    """Of each of `KINDS` the operand, what it stands for, and the format library's cast."""
    of = lambda w, s: (made := quantize_fp4(w, s), made.dequantize(), formats.cast(w, datatype_of(s)))
    return quick(lambda w: [of(w[:, :k], scaling) for scaling, k in KINDS])(W)


def operands(scaling, k=K):
    made = _quantized()[KINDS.index((scaling, k))]
    return made[0], X[..., :k].astype(jnp.bfloat16), made[1:]


def test_codes_are_those_of_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.astype(np.uint8).view(np.uint8)
    expected = np.array([c.view(ml_dtypes.float4_e2m1fn) for c in expected]).astype(np.float32)
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


@pytest.mark.parametrize(("scaling", "bits"), [(Fp4(), 4.5), (Fp4("mxfp4"), 4.25), (Fp4(tile="square"), 4.03125)])
def test_bits_are_those_of_the_bytes(scaling, bits):
    q = jax.eval_shape(functools.partial(quantize_fp4, scaling=scaling), jax.ShapeDtypeStruct((64, 128), jnp.float32))
    assert scaling.bits((64, 128)) == bits
    assert 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in (q.values, q.scale)) / (64 * 128) == bits


def test_every_scale_times_every_code_is_a_bfloat16():
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    powers = 2.0 ** np.arange(-126, 125)
    for of_blocks in (scales[np.isfinite(scales)], powers):
        exact = np.multiply.outer(of_blocks, fp4.E2M1.astype(np.float64))
        np.testing.assert_array_equal(exact.astype(ml_dtypes.bfloat16).astype(np.float64), exact)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("contracts", ["k", "n"])
@pytest.mark.parametrize("activation", ["bfloat16", "float8_e4m3fn"])
def test_the_definition_is_the_product_of_dequantized_operands(scaling, contracts, activation):
    q, x, _ = operands(scaling)
    x = x if contracts == "k" else x[..., :N]
    spread = quick(lambda q: fp4.numbers(fp4.unpack(q.values)) * scaling.spread(q.scale, q.shape))
    exact = np.asarray(spread(q), np.float64)
    wide = np.asarray(x, np.float64)
    if activation != "bfloat16":
        scale = np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True) / np.float32(448)
        rounded = (np.asarray(x, np.float32) * (1 / scale)).astype(ml_dtypes.float8_e4m3fn)
        wide = rounded.astype(np.float64) * scale.astype(np.float64)
    outer = 1.0 if q.outer is None else float(q.outer)
    expected = outer * (wide @ (exact.T if contracts == "k" else exact))
    got = multiply(x, q, contracts=contracts, activation=activation, out_dtype=jnp.float32)
    # float32's sum of at most 64 addends, and two roundings of scales.
    bound = outer * (np.abs(wide) @ np.abs(exact.T if contracts == "k" else exact)) * 68 * 2.0**-24
    assert (np.abs(np.asarray(got, np.float64) - expected) <= bound).all()


def test_a_nan_scale_is_read_by_its_own_outputs_alone():
    q, x, _ = operands(Fp4())
    broken = Operand(q.values, q.scale.at[3, 1].set(jnp.nan), scaling=q.scaling, outer=q.outer)
    y = multiply(x, broken)
    assert jnp.isnan(y[..., 3]).all() and jnp.isfinite(jnp.delete(y, 3, axis=-1)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(contracts="m"), "contracts='m' is unknown; use \"k\""),
        (dict(activation="int8"), "activation='int8' is unknown"),
        (dict(w=jnp.ones((N, K))), "w has the scaling"),
        (dict(x=jnp.ones((2, K + 2))), "must end in k=64"),
        (dict(backend="mosaic"), "mosaic"),
    ],
)
def test_bad_input_says_what_to_do(change, message):
    q, x, _ = operands(Fp4())
    arguments = dict(x=x, w=q) | change
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        fp4_matmul(arguments.pop("x"), arguments.pop("w"), **arguments)


def test_odd_k_and_other_bad_weights_are_refused():
    with pytest.raises(ValueError, match=r"k=7 of w\[4, 7\] is odd"):
        quantize_fp4(jnp.ones((4, 7)))
    with pytest.raises(ValueError, match="is no matrix"):
        quantize_fp4(jnp.ones(8))
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        fp4.pack(jnp.ones((2, 3), jnp.uint8))
    with pytest.raises(ValueError, match="rule='fold_exact' is none of mxfp4's"):
        Fp4("mxfp4", rule="fold_exact")
    q, x, _ = operands(Fp4())
    with pytest.raises(ValueError, match="has outer=None"):
        fp4_matmul(x, Operand(q.values, q.scale, scaling=q.scaling))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
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
        w = Operand(place(q.values, split), place(q.scale, split), scaling=q.scaling, outer=q.outer)
        x = place(x, P(None, "a") if summed else P())
        out = P() if summed and kind == AxisType.Explicit else None
        got = quick(functools.partial(fp4_matmul, contracts=contracts, out_dtype=jnp.float32, out_sharding=out))(x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
