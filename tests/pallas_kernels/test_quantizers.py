"""`quantize` and `dual_quantize` with every scaling: against NumPy's formulas, and
kernels against the references.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.operands import BLOCK_SIZES, SCALE_DTYPE, Block, Row, Tensor
from pallas_kernels.quantize import computed, triton_rows
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.quantize.computed import quantize_computed
from tests.helpers import decibels, float64_of, same_bits

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ONCE = (Tensor("pow2"), Tensor("float32"))
ROWS = (Row("pow2"), Row("float32"))
SQUARES = tuple(Block(size, "square") for size in BLOCK_SIZES)
VECTOR = Block(32, "vector")
BLOCKS = (*SQUARES, *(Block(size, "vector") for size in BLOCK_SIZES))


# Jitted, because the dozens of operations of the references would be compiled one by
# one.
STATIC = ("dtype", "scaling", "orientation", "backend")
quantized = jax.jit(quantize, static_argnames=STATIC)
split = jax.jit(dual_quantize, static_argnames=STATIC)


def optimized(*cases):
    return [pytest.param(*case, marks=pytest.mark.optimized) for case in cases]


def scalings(*which):
    return pytest.mark.parametrize("scaling", which, ids=str)


def hard_values(shape, seed=0):
    """Values of very different sizes, a block of zeros, negative zeros, ties and
    subnormals.
    """
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp(6 * rng.standard_normal(shape))).astype(
        np.float32
    )
    x[..., :32, :32] = 0
    x[..., 0, :6] = [-0.0, 1e-40, 2.0**-9, 1.0625, -1.1875, 0.0]
    return x


def parts(scaling, shape):
    """(the index of a scale, the values that share it) of every scale of a matrix."""
    if isinstance(scaling, Tensor):
        return [((), np.s_[:, :])]
    if isinstance(scaling, Row):
        return [((i,), np.s_[i : i + 1, :]) for i in range(shape[0])]
    size = scaling.size
    rows = size if scaling.tile == "square" else 1
    count = -(-shape[0] // rows), -(-shape[1] // size)
    return [
        ((i, j), np.s_[i * rows : (i + 1) * rows, j * size : (j + 1) * size])
        for i, j in np.ndindex(*count)
    ]


def formula(scaling, x, largest):
    """(scale, what x is multiplied by) of values that share a scale, by NumPy in
    float64.
    """
    amax = np.max(np.abs(x).astype(np.float64))
    if scaling.scale == "float32":
        multiplier = np.float32(largest / max(amax, 1e-12))
        return np.float32(1) / multiplier, multiplier
    scale = (
        1.0
        if amax < 2.0**-126
        else 2.0 ** np.clip(np.ceil(np.log2(amax / largest)), -126, 127)
    )
    return np.float32(scale), np.float32(1 / scale)


def flushed(x):
    """Return x with zeros of the same sign instead of subnormals."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)


def one_nan(tree):
    """E5M2 has three codes of NaN: NumPy's of all."""
    return jax.tree.map(
        lambda leaf: np.where(
            np.isnan(np.float32(leaf)), leaf.dtype.type(np.nan), leaf
        ),
        tree,
    )


def narrow(dtype):
    return ml_dtypes.finfo(dtype).dtype


class TestQuantize:
    @pytest.mark.parametrize(
        "scaling, dtype",
        [(scaling, E4M3) for scaling in (*ONCE, *ROWS, *BLOCKS)]
        + [
            (scaling, E5M2)
            for scaling in (
                *ONCE,
                Row("float32"),
                Block(64, "vector"),
                Block(32, "square"),
            )
        ],
        ids=str,
    )
    def test_every_scale_and_value_is_the_formula(self, scaling, dtype):
        """Of rows, and of columns, which are rows of the transpose."""
        x = hard_values((72, 150))
        got = quantized(x, dtype, scaling, orientation="both")
        for operand, matrix in ((got.rows, x), (got.columns, x.T)):
            assert operand.scaling == scaling and operand.shape == matrix.shape
            assert operand.scale.dtype == (
                SCALE_DTYPE if scaling in BLOCKS else jnp.float32
            )
            found = parts(scaling, matrix.shape)
            assert operand.scale.size == len(
                found
            ) and operand.scale.shape == scaling.scale_shape(matrix.shape)
            values, scales = (
                np.asarray(operand.values),
                np.asarray(operand.scale, np.float32),
            )
            for index, part in found:
                scale, multiplier = formula(scaling, matrix[part], LARGEST[dtype])
                expected = np.clip(
                    flushed(matrix[part]) * multiplier, -LARGEST[dtype], LARGEST[dtype]
                )
                assert scales[index] == scale and same_bits(
                    values[part], expected.astype(narrow(dtype))
                )

    @scalings(*ONCE, *ROWS)
    def test_the_formula_of_zeros_and_of_large_values(self, scaling):
        for factor in (0.0, 1e30):
            x = np.random.default_rng(0).standard_normal((4, 48)).astype(
                np.float32
            ) * np.float32(factor)
            got = quantized(x, E4M3, scaling).rows
            for index, part in parts(scaling, x.shape):
                scale, multiplier = formula(scaling, x[part], 448.0)
                expected = np.clip(x[part] * multiplier, -448, 448).astype(narrow(E4M3))
                assert np.asarray(got.scale)[index] == scale and same_bits(
                    np.asarray(got.values)[part], expected
                )

    @scalings(Tensor(), Row(), Block(32, "vector"), Block(32, "square"))
    def test_rows_alone_are_the_rows_of_both(self, scaling):
        x = hard_values((72, 150))
        alone, both = (
            quantized(x, E4M3, scaling),
            quantized(x, E4M3, scaling, orientation="both"),
        )
        assert alone.columns is None and same_bits(alone.rows, both.rows)

    @scalings(Tensor(), Row(), Block(32, "vector"))
    @pytest.mark.parametrize("shape", [(2, 32, 48), (5,), (0, 4)], ids=str)
    def test_columns_have_the_last_axis_first(self, scaling, shape):
        x = hard_values(shape) if len(shape) > 2 else np.ones(shape, np.float32)
        columns = quantized(x, E4M3, scaling, orientation="both").columns
        assert columns.shape == (shape[-1], *shape[:-1])
        flat = quantized(x.reshape(-1, shape[-1]).T, E4M3, scaling).rows
        assert same_bits(columns.values.reshape(flat.shape), flat.values) and same_bits(
            columns.scale, flat.scale
        )

    @pytest.mark.parametrize(
        "scaling, backend",
        [
            (s, b)
            for s in (Tensor(), Row(), Block(32, "vector"), Block(32, "square"))
            for b in ("xla", "triton")
        ],
        ids=str,
    )
    @pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
    def test_what_is_not_finite_is_nan_where_it_shares_a_scale_alone(
        self, scaling, bad, backend
    ):
        x = np.ones((64, 64), np.float32)
        x[3, 40] = bad
        q = quantized(x, E4M3, scaling, orientation="both", backend=backend)
        expected = np.zeros((64, 64), bool)
        for _, part in parts(scaling, x.shape):
            expected[part] |= not np.isfinite(x[part]).all()
        assert np.array_equal(np.isnan(np.asarray(q.rows.values, np.float32)), expected)
        assert (
            np.isnan(np.asarray(q.columns.values, np.float32)).sum() == expected.sum()
        )

    # Powers of two scale exactly, so what LLVM fuses can change no bit: one size of
    # blocks shows it.
    @pytest.mark.parametrize(
        "scaling, dtype, orientation",
        [
            *optimized((Tensor(), E4M3, "rows"), (Tensor("float32"), E5M2, "both")),
            *optimized((VECTOR, E4M3, "both"), (Block(32), E4M3, "both")),
            *((scaling, E4M3, "both") for scaling in BLOCKS if scaling.size > 32),
            *((scaling, E5M2, "rows") for scaling in (VECTOR, Block(32))),
        ],
        ids=str,
    )
    def test_the_kernel_is_the_reference_bit_for_bit(self, scaling, dtype, orientation):
        shape = (
            (64, 48)
            if isinstance(scaling, Tensor)
            else (128, 256)
            if scaling.size > 32
            else (64, 96)
        )
        x = hard_values(shape).astype(jnp.bfloat16)
        if isinstance(scaling, Block):
            x[40, 70] = np.nan
        call = functools.partial(quantized, x, dtype, scaling, orientation=orientation)
        assert same_bits(one_nan(call(backend="triton")), one_nan(call(backend="xla")))

    @pytest.mark.optimized
    @pytest.mark.parametrize(
        "scaling, dtype, x_dtype",
        [
            (Row("pow2"), E4M3, "float32"),
            *(
                pytest.param(row, dtype, "bfloat16", marks=pytest.mark.slow)
                for row in ROWS
                for dtype in LARGEST
            ),
            pytest.param(Row("float32"), E4M3, "float16", marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_the_kernels_of_rows_are_the_reference_bit_for_bit(
        self, scaling, dtype, x_dtype
    ):
        """No tile divides these rows and columns, some of which are zeros, tiny,
        subnormal or not finite.
        """
        x = hard_values((200, 300)).clip(-6e4, 6e4).astype(x_dtype)
        x[5], x[:, 33], x[7], x[9, 1] = 0, 0, 1e-39, np.nan
        x[8, ::2], x[8, 1::2], x[150, 290] = 2e-37, 1e-39, -np.inf
        for orientation in ("rows", "both"):
            call = functools.partial(
                quantized, x, dtype, scaling, orientation=orientation
            )
            assert same_bits(
                one_nan(call(backend="triton")), one_nan(call(backend="xla"))
            )

    @pytest.mark.parametrize("orientation", ["rows", "both"])
    def test_lines_longer_than_a_program_holds(self, orientation, monkeypatch):
        monkeypatch.setattr(triton_rows, "LONGEST_ROW", 64)
        monkeypatch.setattr(triton_rows, "MOST_TILES", 1)
        x = hard_values((80, 70))
        call = functools.partial(
            quantized, x, E4M3, Row("float32"), orientation=orientation
        )
        assert same_bits(call(backend="triton"), call(backend="xla"))

    @pytest.mark.slow_except("Tensor(scale='pow2')", "Block(size=32, tile='vector')")
    @pytest.mark.optimized
    @scalings(Tensor(), Row(), Block(32, "vector"))
    def test_the_kernel_takes_leading_axes_and_a_given_amax(self, scaling):
        x = hard_values((2, 32, 64))
        amax = jnp.float32(0.5) if isinstance(scaling, Tensor) else None
        call = functools.partial(
            quantized, x, E4M3, scaling, amax=amax, orientation="both"
        )
        got = call(backend="triton")
        assert got.columns.shape == (64, 2, 32)
        assert same_bits(got, call(backend="xla"))


class TestDualQuantize:
    W, E = (
        hard_values((64, 32)) * np.float32(1e-2),
        hard_values((64, 32), 1) * np.float32(1e-6),
    )
    BITS = np.random.default_rng(2).integers(0, 2**32, (128, 256), np.uint32)

    @pytest.mark.parametrize(
        "scaling, dtype",
        [
            (Tensor(), E4M3),
            (Tensor(), E5M2),
            *((square, E4M3) for square in SQUARES),
            (Block(64, "vector"), E5M2),
        ],
        ids=str,
    )
    def test_both_halves_are_the_formula_and_nothing_is_lost(self, scaling, dtype):
        w, error = hard_values((72, 150)), hard_values((72, 150), 1) * np.float32(1e-6)
        q = split(
            w,
            scaling,
            dtype=dtype,
            error=error,
            orientation="both" if scaling.serves_both else "rows",
        )
        target = flushed(w + error)
        for index, part in parts(scaling, w.shape):
            scale, multiplier = formula(scaling, target[part], LARGEST[dtype])
            assert np.asarray(q.rows.scale, np.float32)[index] == scale
            scaled = (target[part] * multiplier).astype(np.float32)
            hi = scaled.astype(narrow(dtype))
            lo = (
                (np.float64(scaled) - np.float64(hi))
                .astype(np.float32)
                .astype(narrow(dtype))
            )
            assert same_bits(np.asarray(q.rows.hi)[part], hi)
            assert np.array_equal(
                np.float32(np.asarray(q.rows.lo)[part]), np.float32(lo)
            )
        whole = float64_of(q.rows) + np.asarray(q.error, np.float64)
        np.testing.assert_array_equal(whole, target.astype(np.float64))
        if scaling.serves_both:
            assert q.columns.shape == (150, 72) and same_bits(q.columns, q.rows.turn())
            np.testing.assert_array_equal(float64_of(q.columns), float64_of(q.rows).T)

    def test_a_block_without_residual_says_so(self):
        w = np.full((64, 96), 0.5, np.float32)
        # a residual far below the grid rounds to minus zero
        w[0, 0] = np.nextafter(np.float32(0.5), 0)
        w[40, 70] = 0.3
        for backend in ("xla", "triton"):
            rows = split(w, Block(32), backend=backend).rows
            assert np.signbit(np.float32(rows.lo[0, 0])) and rows.lo[0, 0] == 0
            assert np.array_equal(
                np.asarray(rows.lo_scale).view(np.uint8) == 0,
                [[True] * 3, [True, True, False]],
            )

    def test_what_a_stale_scale_clips_is_caught_by_lo(self):
        x = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
        fresh, stale = (
            split(x, amax=np.max(np.abs(x)) * np.float32(f)).rows for f in (1, 0.5)
        )
        assert float(jnp.max(jnp.abs(stale.hi.astype(jnp.float32)))) == 448
        assert min(decibels(x, float64_of(q)) for q in (fresh, stale)) > 50

    @pytest.mark.slow_except(
        "Tensor(scale='pow2')-nearest-bfloat16-both",
        "Tensor(scale='pow2')-stochastic-float32-both",
        "Tensor(scale='pow2')-nearest-float8_e5m2-rows",
        "Block(size=64, tile='square')-stochastic-None-both",
    )
    @pytest.mark.parametrize(
        "scaling, rounding, error, orientation",
        [
            *optimized(
                (Tensor(), "nearest", None, "both"),
                (Tensor(), "nearest", "bfloat16", "both"),
            ),
            *optimized(
                (Tensor(), "nearest", None, "rows"),
                (Tensor(), "stochastic", "float32", "both"),
            ),
            *optimized((Tensor(), "stochastic", None, "rows")),
            (Tensor(), "nearest", "float8_e5m2", "rows"),
            (Block(32), "nearest", "float32", "both"),
            (Block(64), "stochastic", None, "both"),
            (Block(128), "nearest", "bfloat16", "both"),
            (Block(128), "nearest", None, "rows"),
        ],
        ids=str,
    )
    def test_the_kernel_is_the_reference_bit_for_bit(
        self, scaling, rounding, error, orientation
    ):
        w = self.W if isinstance(scaling, Tensor) else hard_values((128, 256))
        if isinstance(scaling, Block):
            w[:64, :128] = 0.5
        options = dict(
            error=None
            if error is None
            else (hard_values(w.shape, 1) * np.float32(1e-4)).astype(jnp.dtype(error)),
            bits=self.BITS[: w.shape[0], : w.shape[1]]
            if rounding == "stochastic"
            else None,
            orientation=orientation,
        )
        got, expected = (
            split(w, scaling, backend=backend, **options)
            for backend in ("triton", "xla")
        )
        assert same_bits(got, expected)
        assert np.count_nonzero(np.asarray(got.rows.lo, np.float32)) > 0

    @pytest.mark.optimized
    def test_transformations_change_no_bit_of_the_kernel(self):
        stack, errors = np.stack([self.W, 3 * self.W]), np.stack([self.E, -self.E])
        call = lambda w, e: dual_quantize(
            w, error=e, orientation="both", backend="triton"
        )
        second = lambda tree: jax.tree.map(lambda leaf: leaf[1], tree)
        expected = split(stack[1], error=errors[1], orientation="both", backend="xla")
        under_grad = jax.grad(
            lambda w, e: (jnp.sum(w), call(jax.lax.stop_gradient(w), e)), has_aux=True
        )
        for got in (
            second(jax.jit(jax.vmap(call))(stack, errors)),
            second(jax.lax.map(lambda pair: call(*pair), (stack, errors))),
            under_grad(stack[1], errors[1])[1],
        ):
            assert same_bits(got, expected)

    @pytest.mark.optimized
    @pytest.mark.slow
    def test_transformations_change_no_bit_of_the_reference(self):
        """With an error and with random bits; single operations, too."""
        bits = jnp.asarray(self.BITS[:64, :32])

        def call(w):
            return dual_quantize(w, error=w * jnp.float32(1e-3)), dual_quantize(
                w, bits=bits
            )

        w = jnp.asarray(self.W)
        expected = call(w)
        for got in (
            jax.jit(call)(w),
            jax.tree.map(
                lambda a: a[1], jax.jit(jax.vmap(call))(np.stack([self.E, self.W]))
            ),
            jax.tree.map(lambda a: a[0], jax.lax.map(call, w[None])),
            jax.jit(jax.checkpoint(call))(w),
        ):
            assert same_bits(got, expected)


SQUARE = jnp.ones((64, 64))
by_triton = lambda shape, scaling: quantize(
    jnp.ones(shape), E4M3, scaling, backend="triton"
)
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
        (ValueError, "scale='amax' is unknown", functools.partial(kind, "amax"))
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


@pytest.mark.parametrize("error, message, call", REFUSED)
def test_what_is_refused_and_why(error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call()


@dataclasses.dataclass(frozen=True)
class Shares:
    """Softmax less the target, as the loss of a head computes it, times powers of
    two.
    """

    twice: bool

    def __call__(self, x, total, targets, factors, places):
        share = jnp.exp2(1.442695 * (x.astype(jnp.float32) - total)) - jnp.where(
            targets == places, 1.0, 0.0
        )
        return (share * factors, share * 2.0**13) if self.twice else (share * 2.0**13,)


@pytest.mark.slow_except("(64, 96)-one scale", "(64, 96)-rows", "(48, 40)-rows")
@pytest.mark.parametrize("twice", [False, True], ids=["one scale", "rows"])
# 40 columns make no tiles
@pytest.mark.parametrize("shape", [(64, 96), (48, 40)], ids=str)
def test_computed_values_are_the_rounded_values_of_the_function_in_both_orientations(
    shape, twice
):
    rng, compute = np.random.default_rng(3), Shares(twice)
    x = jnp.asarray(4 * rng.standard_normal(shape), jnp.bfloat16).at[2, 5].set(jnp.nan)
    total, targets = (
        jax.nn.logsumexp(x.astype(jnp.float32), axis=1),
        jnp.arange(shape[0]) % shape[1],
    )
    rows, columns = (
        (total, targets, jnp.exp2((8 + targets % 6).astype(jnp.float32))),
        (jnp.arange(shape[1]),),
    )
    floats = compute(x, *(v[:, None] for v in rows), columns[0][None])
    wanted = [
        quantized(g, E5M2, Tensor(), amax=jnp.float32(LARGEST[E5M2])).rows.values
        for g in floats
    ]
    for backend in ("xla", "triton") if shape[1] % 16 == 0 else ("xla",):
        call = functools.partial(
            quantize_computed,
            compute,
            dtype=E5M2,
            rows=rows,
            columns=columns,
            results=1 + twice,
            backend=backend,
        )
        values, turned = jax.jit(call)(x)
        assert (
            np.isnan(np.float32(values[2])).all()
            and np.isnan(np.float32(turned[:, 2])).all()
        )
        for got, want in ((values, wanted[0]), (turned.T, wanted[-1])):
            got, want = np.float64(got), np.float64(want)
            # A neighbour at most, where exponentials differ in a bit.
            near = np.abs(got - want) <= 2.0**-2 * np.abs(want) + 2.0**-16
            assert (near | np.isnan(want)).all() and (got == want)[
                ~np.isnan(want)
            ].mean() > 0.99


def test_computed_values_need_no_kernel_where_a_gpu_has_no_instructions_for_fp8(
    monkeypatch,
):
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA A100")
    monkeypatch.setattr(dispatch, "compute_capability", lambda: 8.0)
    options = computed.Computed(Shares(False), E5M2, 1)
    kernel, mosaic, reference = dispatch.judge(
        computed.IMPLEMENTATIONS, None, options, jnp.ones((64, 64)), (), ()
    )
    assert (
        "NVIDIA A100 has no instructions" in kernel.reason and reference.reason is None
    )
    assert "not a Hopper GPU" in mosaic.reason or "older than 0.11" in mosaic.reason
