"""Quantizers on a GPU: kernels and XLA have the CPU's bits for every scaling."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tcfp_jax
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize.api import dual_quantize, quantize
from tests.helpers import entry, normal, on_cpu, parametrize, same_bits
from tests.quantizer_oracles import BLOCKS, E4M3, E5M2, ONCE, ROWS, SQUARES

pytestmark = pytest.mark.gpu
KERNELS = ["triton", "mosaic"]
BACKENDS = ["xla", *KERNELS]
ODD = (1001, 300)
W = normal(0, (512, 256)) * 0.02
E = normal(1, (512, 256)) * 1e-6
in_both = partial(quantize, orientation="both")


def by(backend, call, *arguments):
    return jax.jit(partial(call, backend=backend))(*arguments)


def by_definition(call, *arguments):
    """The result of XLA on the CPU, op by op."""
    with jax.disable_jit():
        return on_cpu(partial(call, backend="xla"), *arguments)


def every_bfloat16():
    codes = jnp.arange(2**16, dtype=jnp.uint16)
    values = lax.bitcast_convert_type(codes, jnp.bfloat16).reshape(256, 256)
    return jnp.where(jnp.isfinite(values), values, 0)


INPUTS = {
    "every bfloat16": every_bfloat16,
    "usual": lambda: W,
    "subnormal": lambda: W * 1e-38,
    "huge": lambda: W * 1e37,
}


@parametrize("backend", BACKENDS)
@parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@parametrize("scaling", ONCE, ids=str)
@parametrize("name", INPUTS)
def test_one_scale_is_bit_identical_to_the_cpu(name, scaling, dtype, backend):
    x = INPUTS[name]()
    call = partial(in_both, dtype=dtype, scaling=scaling)
    assert same_bits(by(backend, call, x), by_definition(call, x))


def hard_rows(shape, dtype):
    """Rows of very different sizes; zeros, subnormals, and a NaN and an inf in lines of
    their own.
    """
    x = normal(0, shape) * jnp.exp(4 * normal(1, (shape[0], 1)))
    x = x.at[5].set(0).at[:, 33].set(0)
    x = x.at[7].set(1e-39).at[8].set(2e-37).at[8, 1::2].set(1e-39)
    return x.at[9, 1].set(jnp.nan).at[20, 290].set(-jnp.inf).astype(dtype)


@jax.jit
def agree(a, b):
    """Whether both are the same bits; E5M2 has several codes of NaN, any of which will
    do.
    """

    def same(a, b):
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        is_same = lax.bitcast_convert_type(a, bits) == lax.bitcast_convert_type(b, bits)
        return jnp.all(is_same | (jnp.isnan(a) & jnp.isnan(b)))

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(same, a, b))))


@parametrize("dtype", [E4M3, E5M2])
@parametrize("scaling", ROWS, ids=str)
@parametrize("orientation", ["rows", "both"])
@parametrize(
    "shape, x_dtype",
    [
        ((8192, 4096), "bfloat16"),
        ((8192, 14336), "bfloat16"),
        ((4096, 14336), "float32"),
        (ODD, "bfloat16"),
        (ODD, "float32"),
        (ODD, "float16"),
        ((64, 40000), "bfloat16"),
    ],
    ids=str,
)
def test_rows_are_the_same_on_every_backend(
    shape, x_dtype, orientation, scaling, dtype
):
    x = hard_rows(shape, x_dtype)
    call = partial(quantize, dtype=dtype, scaling=scaling, orientation=orientation)
    expected = by("xla", call, x)
    assert agree(by("triton", call, x), expected)
    if shape[0] % 128 == 0:
        assert agree(by("mosaic", call, x), expected)
    if shape == ODD:
        reference = on_cpu(jax.jit(partial(call, backend="xla")), x)
        assert on_cpu(agree, reference, expected)


@parametrize("make", [partial, jax.vmap], ids=["leading axes", "vmap"])
def test_rows_under_vmap_and_with_leading_axes(make):
    x = hard_rows((4 * 256, 512), "bfloat16").reshape(4, 256, 512)

    def call(x, backend):
        return make(partial(in_both, dtype=E4M3, scaling=Row(), backend=backend))(x)

    expected = by("xla", call, x)
    for backend in KERNELS:
        assert same_bits(by(backend, call, x), expected)


@parametrize("scaling", BLOCKS, ids=str)
def test_blocks_are_the_same_on_every_backend(scaling):
    x = normal(0, (512, 1024)) * jnp.exp(3 * normal(1, (512, 1)))
    x = x.at[3, 5].set(jnp.nan).at[200:264, :128].set(0.0).astype(jnp.bfloat16)
    call = partial(in_both, dtype=E4M3, scaling=scaling)
    expected = on_cpu(jax.jit(partial(call, backend="xla")), x)
    for backend in BACKENDS:
        assert same_bits(by(backend, call, x), expected)


# Two halves
# --------------------------------------------------------------------------------------


def split(w, e, backend="xla"):
    return dual_quantize(w, error=e, orientation="both", backend=backend)


def under_grad(split, w, e):
    def loss(v):
        parts = split(lax.stop_gradient(v), e)
        return jnp.sum(v * parts.rows.lo.astype(jnp.float32)), parts

    return jax.grad(loss, has_aux=True)(w)[1]


def under_scan(split, w, e):
    _, scanned = lax.scan(lambda c, _: (c, split(w, e)), 0, None, 2)
    return entry(scanned, 1)


def under_vmap(split, w, e):
    return entry(jax.vmap(split)(jnp.stack([w, w]), jnp.stack([e, e])), 1)


def under_remat(split, w, e):
    return jax.checkpoint(split)(w, e)


def under_jit(split, w, e):
    return split(w, e)


@parametrize("backend", BACKENDS[:2])
@parametrize("transform", [under_jit, under_grad, under_scan, under_vmap, under_remat])
def test_residual_survives_the_compiler(transform, backend):
    parts = jax.jit(partial(transform, partial(split, backend=backend)))(W, E)
    assert float(jnp.mean(parts.rows.lo.astype(jnp.float32) != 0)) >= 0.99
    assert same_bits(parts, by_definition(split, W, E))


@parametrize("error", [None, "float32", "bfloat16"])
def test_mosaic_splits_as_the_definition(error):
    e = None if error is None else E.astype(error)

    def call(w, e, backend):
        amax = np.float32(0.01)
        return dual_quantize(w, error=e, amax=amax, orientation="both", backend=backend)

    def numbers(x):
        # a GPU's NaN has other bits than a CPU's
        return np.nan_to_num(np.float32(x), nan=1)

    for w in (W, W * 1e-38, W.at[3, 5].set(jnp.inf).at[4, 6].set(jnp.nan)):
        got = call(w, e, "mosaic")
        wanted = by_definition(call, w, e)
        assert same_bits(got[:2], wanted[:2])
        assert same_bits(numbers(got.error), numbers(wanted.error))


@parametrize("backend", BACKENDS)
@parametrize("with_bits", [False, True])
@parametrize("scaling", [Tensor(), *SQUARES], ids=str)
def test_the_residual_is_there_and_that_of_the_cpu(scaling, with_bits, backend):
    w = W.at[:128, :128].set(0.5) if isinstance(scaling, Block) else W
    more = jax.random.bits(jax.random.key(2), w.shape) if with_bits else E

    def call(w, more, backend):
        given = {"bits": more} if with_bits else {"error": more}
        options = {"scaling": scaling, "orientation": "both", "backend": backend}
        return dual_quantize(w, **given, **options)

    got = by(backend, call, w, more)
    assert same_bits(got, by_definition(call, w, more))
    assert np.mean(np.float32(got.rows.lo[128:]) != 0) > 0.95


@parametrize("residual", ["linear", "nf4"])
def test_packed_format_is_bit_identical_to_the_cpu(residual):
    call = partial(tcfp_jax.quantize_tcfp12, residual=residual)
    with jax.disable_jit():
        expected = on_cpu(call, W)
    assert same_bits(jax.jit(call)(W), expected)
