"""Block-scaled quantization and products: against NumPy, and kernels in their interpreters against the references."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pallas_kernels.block_dual_quantize.api import block_dual_quantize
from pallas_kernels.block_matmul import mosaic as block_mosaic
from pallas_kernels.block_matmul.api import block_matmul
from pallas_kernels.block_quantize.api import block_quantize

from pallas_kernels.blocks import BLOCKS, Blocked, scales_shape
from pallas_kernels.matmul import mosaic

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
KEYS = jax.random.split(jax.random.key(0), 6)
TILES = ("vector", "square")
pytestmark = pytest.mark.usefixtures("quick_compiles")
OLD_JAX = jax.__version_info__[:2] < mosaic.SMALLEST_JAX
needs_mosaic = pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 products need jax 0.11")


def ragged_values(shape, key=KEYS[0]):
    """Blocks of very different sizes, one of zeros, negative zeros and subnormals."""
    spread = jnp.exp(6 * jax.random.normal(KEYS[1], shape))
    x = jax.random.normal(key, shape) * spread
    return x.at[:32, :32].set(0.0).at[0, :3].set(jnp.array([-0.0, 1e-40, 2.0**-9]))


def same_bits(a, b):
    leaves = [jax.tree.leaves(tree) for tree in (a, b)]
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(*leaves, strict=True)
    )


def scale_of(values, largest):
    """The smallest power of two that holds a block, by NumPy in float64; 1 for zeros."""
    amax = np.max(np.abs(np.asarray(values, np.float64)))
    return 1.0 if amax < 2.0**-126 else 2.0 ** np.clip(np.ceil(np.log2(amax / largest)), -126, 127)


class TestQuantize:
    @pytest.mark.parametrize("block", BLOCKS)
    @pytest.mark.parametrize("tile", TILES)
    @pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
    def test_every_block_is_the_formula(self, block, tile, dtype, largest):
        x = np.asarray(ragged_values((72, 150)))
        got = block_quantize(jnp.asarray(x), dtype, block=block, tile=tile)
        assert got.scales.dtype == jnp.float8_e8m0fnu
        assert got.scales.shape == scales_shape(x.shape, block, tile)
        rows = block if tile == "square" else 1
        for (i, j), scale in np.ndenumerate(np.asarray(got.scales, np.float32)):
            part = np.s_[i * rows : (i + 1) * rows, j * block : (j + 1) * block]
            assert scale == scale_of(x[part], largest)
            normal = np.where(np.abs(x[part]) < 2.0**-126, np.copysign(0, x[part]), x[part])
            scaled = (np.float64(normal) / float(scale)).astype(np.float32)
            assert np.asarray(got.values)[part].tobytes() == scaled.astype(ml_dtypes.finfo(dtype).dtype).tobytes()

    @pytest.mark.parametrize("block", BLOCKS)
    def test_a_square_quantizes_a_matrix_and_its_transpose_alike(self, block):
        x = ragged_values((72, 150))
        of_x, of_turned = (block_quantize(v, E4M3, block=block, tile="square", orientation="both") for v in (x, x.T))
        assert same_bits((of_x.transposed, of_x.transposed_scales), (of_turned.values, of_turned.scales))

    @pytest.mark.parametrize("tile", TILES)
    def test_what_is_not_finite_is_nan_in_its_block_alone(self, tile):
        x = jnp.ones((64, 64)).at[3, 40].set(jnp.inf)
        values = np.asarray(block_quantize(x, E4M3, block=32, tile=tile).values, np.float32)
        bad = np.zeros((64, 64), bool)
        bad[3 if tile == "vector" else slice(0, 32), 32:] = True
        assert np.array_equal(np.isnan(values), bad)

    def test_vectors_along_all_other_axes(self):
        x = ragged_values((64, 40)).reshape(2, 32, 40)
        got = block_quantize(x, E4M3, block=32, orientation="both")
        expected = block_quantize(x.reshape(64, 40).T, E4M3, block=32)
        assert got.transposed.shape == (40, 2, 32)
        assert same_bits((got.transposed.reshape(40, 64), got.transposed_scales), expected[:2])

    @pytest.mark.parametrize("tile", TILES)
    @pytest.mark.parametrize(
        "block, orientation",
        # Powers of two scale exactly, so what LLVM fuses can change no bit; one size shows it.
        [pytest.param(32, "both", marks=pytest.mark.optimized), (64, "both"), (128, "both"), (64, "rows")],
    )
    def test_the_kernel_is_the_reference_bit_for_bit(self, block, orientation, tile):
        x = ragged_values((128, 256)).at[100, 200].set(jnp.nan).astype(jnp.bfloat16)
        call = functools.partial(block_quantize, x, E4M3, block=block, tile=tile, orientation=orientation)
        assert same_bits(call(backend="triton"), call(backend="xla"))

    def test_bad_input(self):
        x = jnp.ones((64, 64))
        for options, message in (
            (dict(block=16), "block=16 is not supported; use one of [32, 64, 128]"),
            (dict(block=32, tile="row"), "tile='row' is unknown"),
            (dict(block=32, orientation="columns"), "orientation='columns' is unknown"),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                block_quantize(x, E4M3, **options)
        with pytest.raises(ValueError, match="squares a matrix"):
            block_quantize(jnp.ones((2, 64, 64)), E4M3, block=32, tile="square")
        with pytest.raises(TypeError, match="float16 is not an FP8 format"):
            block_quantize(x, jnp.float16, block=32)
        with pytest.raises(NotImplementedError, match=r"w?x\[64, 48\]: both sizes must be multiples of block=32"):
            block_quantize(jnp.ones((64, 48)), E4M3, block=32, backend="triton")


class TestDualQuantize:
    @pytest.mark.parametrize("block", BLOCKS)
    def test_nothing_is_lost(self, block):
        w, error = ragged_values((72, 150)), ragged_values((72, 150), KEYS[2]) * 1e-6
        q = block_dual_quantize(w, block=block, error=error)
        scales = np.repeat(np.repeat(np.asarray(q.scales, np.float64), block, 0), block, 1)[:72, :150]
        whole = (np.asarray(q.hi, np.float64) + np.asarray(q.lo, np.float64)) * scales + np.asarray(q.error, np.float64)
        target = np.asarray(w + error)
        np.testing.assert_array_equal(whole, np.where(np.abs(target) < 2.0**-126, 0, np.float64(target)))

    def test_a_block_without_residual_says_so(self):
        w = jnp.full((64, 96), 0.5).at[40, 70].set(0.3)
        codes = np.asarray(block_dual_quantize(w, block=32).residual_scales).view(np.uint8)
        assert np.array_equal(codes == 0, [[True, True, True], [True, True, False]])

    @pytest.mark.parametrize(
        "block, rounding, feedback",
        [(32, "nearest", "float32"), (64, "stochastic", "no error"), (128, "nearest", "bfloat16"),
         (128, "nearest", "no error")],
    )  # fmt: skip
    def test_the_kernel_is_the_reference_bit_for_bit(self, block, rounding, feedback):
        w = ragged_values((128, 256)).at[:64, :128].set(0.5)
        error = None if feedback == "no error" else (ragged_values(w.shape, KEYS[2]) * 1e-4).astype(feedback)
        bits = jax.random.bits(KEYS[3], w.shape) if rounding == "stochastic" else None
        call = functools.partial(block_dual_quantize, w, block=block, error=error, bits=bits, orientation="both")
        assert same_bits(call(backend="triton"), call(backend="xla"))

    def test_bad_input(self):
        with pytest.raises(ValueError, match="other vectors"):
            block_dual_quantize(jnp.ones((64, 64)), block=32, tile="vector", orientation="both")
        with pytest.raises(ValueError, match="error has shape"):
            block_dual_quantize(jnp.ones((64, 64)), block=32, error=jnp.ones((64, 32)))
        with pytest.raises(NotImplementedError, match="only squares"):
            block_dual_quantize(jnp.ones((64, 64)), block=32, tile="vector", backend="triton")


def operands(block, tile, halves, m=256, k=256, n=128):
    """Operands of `block_matmul`, and their product and its sum of magnitudes in float64."""
    x, w = jax.random.normal(KEYS[4], (m, k)), jax.random.normal(KEYS[5], (n, k))
    x, w = (v * jnp.exp(2 * jax.random.normal(key, (v.shape[0], 1))) for v, key in zip((x, w), KEYS, strict=False))
    x_q, w_q = block_quantize(x, E4M3, block=block), block_dual_quantize(w, block=block, tile=tile)
    wide = lambda values, scales, rows: (
        np.asarray(values, np.float64)
        * np.repeat(np.repeat(np.asarray(scales, np.float64), rows, 0), block, 1)[: values.shape[0], :k]
    )
    rows = block if tile == "square" else 1
    parts = [wide(w_q.hi, w_q.scales, rows), wide(w_q.lo, w_q.scales, rows)][:halves]
    a, b = wide(x_q.values, x_q.scales, 1), sum(parts)
    lo = (Blocked(w_q.lo, w_q.residual_scales),) if halves == 2 else ()
    return (Blocked(*x_q[:2]), Blocked(w_q.hi, w_q.scales), *lo), a @ b.T, np.abs(a) @ np.abs(b).T


class TestMatmul:
    @pytest.mark.parametrize("backend", ["xla", "triton", pytest.param("mosaic", marks=needs_mosaic)])
    @pytest.mark.parametrize(
        "block, tile, halves", [(128, "square", 2), (128, "vector", 1), (64, "square", 1), (32, "vector", 2)]
    )
    def test_the_product_within_float32_rounding(self, block, tile, halves, backend):
        arguments, exact, magnitude = operands(block, tile, halves)
        got = block_matmul(*arguments, block=block, tile=tile, out_dtype=jnp.float32, backend=backend)
        assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= 2.0**-19 * magnitude)

    @needs_mosaic
    @pytest.mark.parametrize("block, halves", [(128, 2), (64, 1)])
    def test_every_config_of_the_kernel(self, block, halves):
        arguments, exact, magnitude = operands(block, "square", halves)
        configs = block_mosaic.candidates(256, 256, 128, halves, block)
        assert {config.cluster for config in configs} == {1, 2}
        lo = arguments[2:] or (None,)
        for config in configs:
            got = block_mosaic.block_matmul(
                *arguments[:2], *lo, block=block, tile="square", out_dtype=jnp.float32, config=config
            )
            assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= 2.0**-19 * magnitude)

    def test_ragged_sizes_and_leading_axes(self):
        arguments, exact, magnitude = operands(32, "square", 2, m=24, k=50, n=70)
        x, *rest = arguments
        x = Blocked(x.values.reshape(2, 12, 50), x.scales.reshape(2, 12, 2))
        got = jax.jit(functools.partial(block_matmul, block=32, out_dtype=jnp.float32))(x, *rest)
        assert got.shape == (2, 12, 70)
        assert np.all(np.abs(np.asarray(got, np.float64).reshape(24, 70) - exact) <= 2.0**-19 * magnitude)

    def test_bad_input(self):
        x, w = operands(32, "square", 1)[0]
        with pytest.raises(ValueError, match=re.escape("has scales [256, 4], but these are [256, 8]")):
            block_matmul(x, w, block=64)
        with pytest.raises(TypeError, match="the scales of x have dtype float32, not float8_e8m0fnu"):
            block_matmul(Blocked(x.values, x.scales.astype(jnp.float32)), w, block=32)
        part = Blocked(x.values[:100], x.scales[:100])
        with pytest.raises(NotImplementedError, match="jax" if OLD_JAX else "m=100 must be a multiple of"):
            block_matmul(part, w, block=32, backend="mosaic")


class TestPartition:
    """Eight virtual devices: blocks are local, so quantizers move nothing at all."""

    MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    @pytest.mark.optimized
    @pytest.mark.parametrize(
        "spec, tile", [(P("a"), "square"), (P("a", "b"), "vector"), (P(None, ("a", "b")), "square")]
    )
    def test_quantizers_move_nothing(self, spec, tile):
        x = jax.device_put(ragged_values((256, 256)), NamedSharding(self.MESH, spec))
        call = functools.partial(block_quantize, dtype=E4M3, block=32, tile=tile, orientation="both")
        compiled = jax.jit(functools.partial(call, backend="triton")).lower(x).compile()
        assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
        assert same_bits(compiled(x), call(x, backend="xla"))

    @pytest.mark.optimized
    def test_an_axis_is_not_split_inside_a_block(self):
        x = jax.device_put(ragged_values((256, 128)), NamedSharding(self.MESH, P("a", "b")))
        call = functools.partial(block_quantize, dtype=E4M3, block=64)
        got = jax.jit(functools.partial(call, backend="triton"))(x)
        assert same_bits(got, call(x, backend="xla"))
