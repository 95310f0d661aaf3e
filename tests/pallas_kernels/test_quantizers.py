"""`quantize` with every scaling: against NumPy's formulas, and kernels against the
references; and all that quantizers refuse.
"""

import re
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Row, Tensor
from pallas_kernels.quantize import triton_rows
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.quantize.computed import quantize_computed
from tests.helpers import parametrize, refused, same_bits, slow_except
from tests.quantizer_oracles import (
    BLOCKS,
    E4M3,
    E5M2,
    LARGEST,
    ONCE,
    ROWS,
    VECTOR,
    by_both,
    flushed,
    formula,
    hard_values,
    narrow,
    one_nan,
    optimized,
    parts,
    quantized,
    scalings,
)


@parametrize(
    "scaling, dtype",
    [
        *((scaling, E4M3) for scaling in (*ONCE, *ROWS, *BLOCKS)),
        *((scaling, E5M2) for scaling in (*ONCE, Row("float32"))),
        *((scaling, E5M2) for scaling in (Block(64, "vector"), Block(32, "square"))),
    ],
    ids=str,
)
def test_every_scale_and_value_is_the_formula(scaling, dtype):
    """Of rows, and of columns, which are rows of the transpose."""
    x = hard_values((72, 150))
    got = quantized(x, dtype, scaling, orientation="both")
    scale_dtype = SCALE_DTYPE if scaling in BLOCKS else jnp.float32
    for operand, matrix in ((got.rows, x), (got.columns, x.T)):
        assert operand.scaling == scaling
        assert operand.shape == matrix.shape
        assert operand.scale.dtype == scale_dtype
        assert operand.scale.shape == scaling.scale_shape(matrix.shape)
        assert_formula(operand, flushed(matrix), dtype)


def assert_formula(operand, x, dtype):
    """Every scale and value of an operand is that of NumPy."""
    values = np.asarray(operand.values)
    scales = np.float32(operand.scale)
    found = parts(operand.scaling, x.shape)
    assert scales.size == len(found)
    largest = LARGEST[dtype]
    for index, part in found:
        scale, multiplier = formula(operand.scaling, x[part], largest)
        expected = np.clip(x[part] * multiplier, -largest, largest)
        assert scales[index] == scale
        assert same_bits(values[part], expected.astype(narrow(dtype)))


@scalings(*ONCE, *ROWS)
@parametrize("factor", [0.0, 1e30])
def test_the_formula_of_zeros_and_of_large_values(scaling, factor):
    x = np.random.default_rng(0).standard_normal((4, 48)).astype(np.float32)
    x *= np.float32(factor)
    assert_formula(quantized(x, E4M3, scaling).rows, x, E4M3)


@scalings(Tensor(), Row(), Block(32, "vector"), Block(32, "square"))
def test_rows_alone_are_the_rows_of_both(scaling):
    x = hard_values((72, 150))
    alone = quantized(x, E4M3, scaling)
    both = quantized(x, E4M3, scaling, orientation="both")
    assert alone.columns is None
    assert same_bits(alone.rows, both.rows)


@scalings(Tensor(), Row(), Block(32, "vector"))
@parametrize("shape", [(2, 32, 48), (5,), (0, 4)], ids=str)
def test_columns_have_the_last_axis_first(scaling, shape):
    x = hard_values(shape) if len(shape) > 2 else np.ones(shape, np.float32)
    columns = quantized(x, E4M3, scaling, orientation="both").columns
    assert columns.shape == (shape[-1], *shape[:-1])
    flat = quantized(x.reshape(-1, shape[-1]).T, E4M3, scaling).rows
    assert same_bits(columns.values.reshape(flat.shape), flat.values)
    assert same_bits(columns.scale, flat.scale)


@scalings(Tensor(), Row(), Block(32, "vector"), Block(32, "square"))
@parametrize("backend", ["xla", "triton"])
@parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_spreads_within_its_scale(scaling, bad, backend):
    x = np.ones((64, 64), np.float32)
    x[3, 40] = bad
    q = quantized(x, E4M3, scaling, orientation="both", backend=backend)
    expected = np.zeros((64, 64), bool)
    for _, part in parts(scaling, x.shape):
        expected[part] |= not np.isfinite(x[part]).all()
    is_nan = np.isnan(np.float32(q.rows.values))
    assert np.array_equal(is_nan, expected)
    assert np.isnan(np.float32(q.columns.values)).sum() == expected.sum()


@scalings(Tensor(), Row(), Block(32, "vector"), Block(32, "square"))
@parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_rounding_makes_no_inf_of_the_largest_value(scaling, dtype):
    largest = jnp.finfo(dtype).max
    x = jnp.full((64, 64), largest, dtype).at[::2].multiply(-1)
    made = [quantize(x, E4M3, scaling), quantize(x, E5M2, scaling)]
    if not isinstance(scaling, Row) and scaling != Block(32, "vector"):
        made.append(dual_quantize(x, scaling))
    for q in made:
        assert np.array_equal(q.rows.dequantize(dtype), x)


def test_an_inf_of_e5m2_stays_one():
    values = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1], E5M2)
    wide = Operand(values, jnp.float32(2)).dequantize(jnp.float16)
    assert np.array_equal(
        np.float32(wide), [np.inf, -np.inf, np.nan, 2], equal_nan=True
    )


# Powers of two scale exactly, so what LLVM fuses can change no bit: one size of
# blocks shows it.
@parametrize(
    "scaling, dtype, orientation",
    [
        *optimized((Tensor(), E4M3, "rows"), (Tensor("float32"), E5M2, "both")),
        *optimized((VECTOR, E4M3, "both"), (Block(32), E4M3, "both")),
        *((scaling, E4M3, "both") for scaling in BLOCKS if scaling.size > 32),
        *((scaling, E5M2, "rows") for scaling in (VECTOR, Block(32))),
    ],
    ids=str,
)
def test_the_kernel_is_the_reference_bit_for_bit(scaling, dtype, orientation):
    if isinstance(scaling, Tensor):
        x = hard_values((64, 48))
    else:
        x = hard_values((128, 256) if scaling.size > 32 else (64, 96))
        x[40, 70] = np.nan
    x = x.astype(jnp.bfloat16)
    assert_same_by_both(x, dtype, scaling, orientation=orientation)


def assert_same_by_both(*arguments, **options):
    got, expected = by_both(quantized, *arguments, **options)
    assert same_bits(one_nan(got), one_nan(expected))


@pytest.mark.optimized
@parametrize(
    "scaling, dtype, x_dtype",
    [
        (Row("pow2"), E4M3, "float32"),
        *((Row("pow2"), dtype, "bfloat16") for dtype in LARGEST),
        *((Row("float32"), dtype, "bfloat16") for dtype in LARGEST),
        (Row("float32"), E4M3, "float16"),
    ],
    ids=str,
)
@slow_except(f"Row(scale='pow2')-{E4M3}-float32")
def test_the_kernels_of_rows_are_the_reference_bit_for_bit(scaling, dtype, x_dtype):
    """No tile divides these rows and columns, some of which are zeros, tiny,
    subnormal or not finite.
    """
    x = hard_values((200, 300)).clip(-6e4, 6e4).astype(x_dtype)
    x[5] = 0
    x[:, 33] = 0
    x[7] = 1e-39
    x[8, ::2] = 2e-37
    x[8, 1::2] = 1e-39
    x[9, 1] = np.nan
    x[150, 290] = -np.inf
    for orientation in ("rows", "both"):
        assert_same_by_both(x, dtype, scaling, orientation=orientation)


@parametrize("orientation", ["rows", "both"])
def test_lines_longer_than_a_program_holds(orientation, monkeypatch):
    monkeypatch.setattr(triton_rows, "LONGEST_ROW", 64)
    monkeypatch.setattr(triton_rows, "MOST_TILES", 1)
    x = hard_values((80, 70))
    assert_same_by_both(x, E4M3, Row("float32"), orientation=orientation)


@slow_except("Tensor(scale='pow2')", "Block(size=32, tile='vector')")
@pytest.mark.optimized
@scalings(Tensor(), Row(), Block(32, "vector"))
def test_the_kernel_takes_leading_axes_and_a_given_amax(scaling):
    x = hard_values((2, 32, 64))
    amax = jnp.float32(0.5) if isinstance(scaling, Tensor) else None
    got, expected = by_both(quantized, x, E4M3, scaling, amax=amax, orientation="both")
    assert got.columns.shape == (64, 2, 32)
    assert same_bits(got, expected)


SQUARE = jnp.ones((64, 64))


def by_triton(shape, scaling):
    return quantize(jnp.ones(shape), E4M3, scaling, backend="triton")


REFUSED = [
    (
        NotImplementedError,
        "x[24, 32]: both sizes must be multiples of 16",
        lambda: by_triton((24, 32), Tensor()),
    ),
    (NotImplementedError, "no tiles", lambda: by_triton((32,), Tensor())),
    (
        NotImplementedError,
        "x[64, 48]: both sizes must be multiples of block=32",
        lambda: by_triton((64, 48), VECTOR),
    ),
    (NotImplementedError, "x[0, 64] has no values", lambda: by_triton((0, 64), Row())),
    (
        NotImplementedError,
        "squares",
        lambda: dual_quantize(SQUARE, VECTOR, backend="triton"),
    ),
    (
        NotImplementedError,
        "cannot run with backend='mosaic'",
        lambda: dual_quantize(SQUARE, backend="mosaic"),
    ),
    (
        NotImplementedError,
        'x[48, 40]: both sizes must be multiples of 16; use backend="xla" or pad',
        lambda: quantize_computed(
            lambda x: (x,), jnp.ones((48, 40)), E5M2, backend="triton"
        ),
    ),
    (
        ValueError,
        "orientation='columns' is unknown",
        lambda: quantize(SQUARE, E4M3, orientation="columns"),
    ),
    (
        ValueError,
        "backend='cuda' is unknown",
        lambda: quantize(SQUARE, E4M3, backend="cuda"),
    ),
    *(
        (
            ValueError,
            "has several scales",
            lambda s=s: quantize(SQUARE, E4M3, s, amax=1.0),
        )
        for s in (Row(), Block(32))
    ),
    (
        ValueError,
        "no square blocks, which are cut",
        lambda: quantize(jnp.ones((2, 64, 64)), E4M3, Block(32)),
    ),
    *(
        (
            ValueError,
            "x is a scalar, which has",
            lambda s=s: quantize(jnp.float32(1), E4M3, s),
        )
        for s in (Row(), VECTOR)
    ),
    (TypeError, "float16 is not an FP8 format", lambda: quantize(SQUARE, jnp.float16)),
    (TypeError, "only real floats", lambda: quantize(SQUARE.astype(jnp.int32), E4M3)),
    (
        ValueError,
        "block=16 is not supported; use one of [32, 64, 128]",
        lambda: Block(16),
    ),
    (ValueError, "tile='row' is unknown", lambda: Block(32, "row")),
    *(
        (ValueError, "scale='amax' is unknown", partial(kind, "amax"))
        for kind in (Tensor, Row)
    ),
    (
        ValueError,
        "a residual needs scales that both orientations share",
        lambda: dual_quantize(SQUARE, Row()),
    ),
    (
        ValueError,
        "exact only under a power-of-two scale",
        lambda: dual_quantize(SQUARE, Tensor("float32")),
    ),
    (
        ValueError,
        "has several scales",
        lambda: dual_quantize(SQUARE, Block(32), amax=1.0),
    ),
    (
        ValueError,
        "other vectors",
        lambda: dual_quantize(SQUARE, VECTOR, orientation="both"),
    ),
    *(
        (
            ValueError,
            "error has",
            lambda s=s: dual_quantize(SQUARE, s, error=SQUARE[1:]),
        )
        for s in (ONCE[0], VECTOR)
    ),
    (
        ValueError,
        "bits has shape",
        lambda: dual_quantize(SQUARE, bits=jnp.ones((64, 32), jnp.uint32)),
    ),
    (
        TypeError,
        "not uint32",
        lambda: dual_quantize(SQUARE, bits=SQUARE.astype(jnp.int32)),
    ),
]


@parametrize("error, message, call", REFUSED)
def test_refusals_say_why(error, message, call):
    with refused(re.escape(message), error):
        call()
