"""The kernels in their interpreters: bit-identical quantizers, products within float32 rounding."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from pallas_kernels.dual_quantize.api import dual_quantize
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.api import matmul
from pallas_kernels.partition import partitioned
from pallas_kernels.quantize.api import quantize
from pallas_kernels.tiled import fit_tile

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
KEYS = jax.random.split(jax.random.key(0), 4)
OLD_JAX = jax.__version_info__[:2] < mosaic.SMALLEST_JAX
BACKENDS = [
    "triton",
    pytest.param("mosaic", marks=pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 products need jax 0.11")),
]
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
pytestmark = pytest.mark.usefixtures("quick_compiles")


def same_bits(a, b):
    leaves = [jax.tree.leaves(tree) for tree in (a, b)]
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(*leaves, strict=True)
    )


def hard_values(shape, dtype=jnp.float32):
    """Values of every size, ties, zeros and subnormals."""
    x = jax.random.normal(KEYS[0], shape) * jnp.exp(4 * jax.random.normal(KEYS[1], shape))
    x = x.at[0, :6].set(jnp.array([0.0, -0.0, 1.0625, -1.1875, 1e-40, 2.0**-9]))
    return x.astype(dtype)


class TestQuantize:
    @pytest.mark.optimized
    @pytest.mark.parametrize("dtype", [E4M3, E5M2])
    @pytest.mark.parametrize("scale", ["pow2", "float32"])
    @pytest.mark.parametrize("orientation", ["rows", "both"])
    def test_the_reference_bit_for_bit(self, dtype, scale, orientation):
        x = hard_values((64, 48), jnp.bfloat16)
        call = functools.partial(quantize, dtype=dtype, scale=scale, orientation=orientation)
        assert same_bits(call(x, backend="triton"), call(x, backend="xla"))

    @pytest.mark.optimized
    def test_leading_axes_and_a_given_amax(self):
        x = hard_values((32, 48)).reshape(2, 16, 48)
        call = functools.partial(quantize, dtype=E4M3, amax=jnp.float32(0.5), orientation="both")
        got = call(x, backend="triton")
        assert got.transposed.shape == (48, 2, 16)
        assert same_bits(got, call(x, backend="xla"))

    @pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
    def test_what_is_not_finite_is_nan(self, bad):
        got = quantize(hard_values((32, 32)).at[3, 3].set(bad), E4M3, orientation="both", backend="triton")
        assert np.isnan(np.asarray(got.values, np.float32)).all()
        assert np.isnan(np.asarray(got.transposed, np.float32)).all()

    @pytest.mark.parametrize(("shape", "reason"), [((24, 32), "[24, 32]: both sizes"), ((32,), "no tiles")])
    def test_what_it_cannot_tile(self, shape, reason):
        with pytest.raises(NotImplementedError, match=re.escape(reason)):
            quantize(jnp.ones(shape), E4M3, backend="triton")


class TestDualQuantize:
    W, E = hard_values((64, 32)) * 1e-2, jax.random.normal(KEYS[2], (64, 32)) * 1e-4

    @pytest.mark.optimized
    @pytest.mark.parametrize("orientation", ["rows", "both"])
    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    @pytest.mark.parametrize("error", [None, jnp.float32, jnp.bfloat16])
    def test_the_reference_bit_for_bit(self, orientation, rounding, error):
        options = dict(
            error=None if error is None else self.E.astype(error),
            bits=jax.random.bits(KEYS[3], self.W.shape) if rounding == "stochastic" else None,
            orientation=orientation,
        )
        got, expected = (dual_quantize(self.W, backend=backend, **options) for backend in ("triton", "xla"))
        assert same_bits(got, expected)
        assert np.count_nonzero(np.asarray(got.lo, np.float32)) > 0

    @pytest.mark.optimized
    def test_under_jit_grad_scan_and_vmap(self):
        stack = jnp.stack([self.W, 3 * self.W])
        call = functools.partial(dual_quantize, orientation="both")
        expected = jax.vmap(functools.partial(call, backend="xla"))(stack)
        kernel = functools.partial(call, backend="triton")
        assert same_bits(jax.jit(jax.vmap(kernel))(stack), expected)
        assert same_bits(jax.lax.map(kernel, stack), expected)
        _, parts = jax.grad(lambda w: (jnp.sum(w), kernel(jax.lax.stop_gradient(w))), has_aux=True)(self.W)
        assert same_bits(parts, jax.tree.map(lambda a: a[0], expected))


class TestMatmul:
    X = (jax.random.normal(KEYS[0], (256, 256)) * 30).astype(E4M3)
    HI = (jax.random.normal(KEYS[1], (128, 256)) * 60).astype(E4M3)
    LO = jax.random.normal(KEYS[2], (128, 256)).astype(E4M3)
    BIAS = jax.random.normal(KEYS[3], (128,)) * 1e3
    SCALE = jnp.float32(0.25)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("accumulation", ["fast", "full"])
    @pytest.mark.parametrize("halves", [1, 2])
    @pytest.mark.parametrize("bias", ["bias", "no bias"])
    def test_float32_rounding_of_the_reference(self, backend, accumulation, halves, bias):
        call = functools.partial(
            matmul, self.X, self.HI, self.LO if halves == 2 else None, scale=self.SCALE, out_dtype=jnp.float32,
            bias=self.BIAS if bias == "bias" else None, accumulation=accumulation,
        )  # fmt: skip
        got, expected = call(backend=backend), call(backend="xla")
        magnitude = np.abs(np.asarray(self.X, np.float32)) @ np.abs(np.asarray(self.HI, np.float32)).T * 0.25
        assert np.all(np.abs(got - expected) <= 2.0**-18 * (magnitude + 1e3))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_bfloat16_results_and_leading_axes(self, backend):
        call = functools.partial(matmul, self.X.reshape(2, 128, 256), self.HI, self.LO, scale=self.SCALE)
        got, expected = call(backend=backend), call(backend="xla")
        assert got.shape == (2, 128, 128)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), rtol=2.0**-7, atol=1.0)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_weight_gradient_contracts_all_tokens(self, backend):
        x, g = self.X.T.reshape(256, 2, 128), self.HI.reshape(128, 2, 128)
        call = functools.partial(matmul, x, g, scale=self.SCALE, out_dtype=jnp.float32)
        np.testing.assert_allclose(call(backend=backend), call(backend="xla"), rtol=1e-5, atol=1e-1)

    @pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 products need jax 0.11")
    @pytest.mark.parametrize("accumulation", ["fast", "full"])
    def test_mosaic_multiplies_mixed_formats_with_every_config(self, accumulation):
        x = self.X.astype(jnp.float32).astype(E5M2)
        configs = mosaic.candidates(256, 256, 128, 2, accumulation)
        assert {config.cluster for config in configs} == {1, 2}
        options = dict(scale=self.SCALE, bias=None, out_dtype=jnp.dtype(jnp.float32), accumulation=accumulation)
        expected = matmul(x, self.HI, self.LO, scale=self.SCALE, out_dtype=jnp.float32)
        for config in configs:
            got = mosaic.matmul(x, self.HI, self.LO, out_sharding=None, config=config, **options)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-1)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_under_vmap(self, backend):
        x = self.X.reshape(2, 128, 256)
        call = jax.vmap(functools.partial(matmul, scale=self.SCALE, out_dtype=jnp.float32, backend=backend), (0, None))
        expected = matmul(x, self.HI, scale=self.SCALE, out_dtype=jnp.float32)
        np.testing.assert_allclose(call(x, self.HI), expected, rtol=1e-5, atol=1e-1)

    @pytest.mark.parametrize(
        ("backend", "x", "reason"),
        [
            ("triton", jnp.ones((32, 24), E4M3), "k=24 and n=32 must be multiples of 16"),
            ("triton", jnp.ones((32, 32), E5M2), "one format, not float8_e5m2 x float8_e4m3fn"),
            ("mosaic", jnp.ones((100, 128), E4M3), "jax" if OLD_JAX else "m=100 must be a multiple of 128"),
        ],
    )
    def test_what_it_rejects(self, backend, x, reason):
        with pytest.raises(NotImplementedError, match=re.escape(reason)):
            matmul(x, jnp.ones((32, x.shape[1]), E4M3), scale=self.SCALE, backend=backend)


class TestPartition:
    """Eight virtual devices, compiled by XLA's partitioner."""

    MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def put(self, x, spec):
        return jax.device_put(x, NamedSharding(self.MESH, spec))

    def collectives(self, compiled):
        text = compiled.as_text()
        return {name for name in COLLECTIVES if re.search(rf"= \S+ {name}", text)}

    @pytest.mark.parametrize(
        ("x_spec", "w_spec", "expected"),
        [
            (P("a"), P(), set()),
            (P("a"), P("b"), set()),
            (P(("a", "b")), P(), set()),
            (P(), P("b"), set()),
            (P("a", "b"), P(None, "b"), {"all-reduce"}),
        ],
    )
    def test_products_move_what_their_sums_need(self, x_spec, w_spec, expected):
        x, hi, lo = (
            self.put(value, spec)
            for value, spec in ((TestMatmul.X, x_spec), (TestMatmul.HI, w_spec), (TestMatmul.LO, w_spec))
        )
        call = functools.partial(matmul, scale=jnp.float32(0.25), out_dtype=jnp.float32, bias=TestMatmul.BIAS)
        compiled = jax.jit(functools.partial(call, backend="triton")).lower(x, hi, lo).compile()
        assert self.collectives(compiled) == expected
        np.testing.assert_allclose(compiled(x, hi, lo), call(x, hi, lo, backend="xla"), rtol=1e-5, atol=1e-1)

    @pytest.mark.optimized
    @pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b"))])
    def test_quantizers_move_one_number(self, spec):
        w = self.put(hard_values((128, 128)), spec)
        error = self.put(hard_values((128, 128))[::-1] * jnp.float32(1e-6), spec)
        call = lambda w, error, backend: dual_quantize(w, error=error, orientation="both", backend=backend)
        compiled = jax.jit(functools.partial(call, backend="triton")).lower(w, error).compile()
        assert self.collectives(compiled) == {"all-reduce"}  # of the amax
        assert "f32[128,128]{1,0} all-reduce" not in compiled.as_text()
        assert same_bits(compiled(w, error), call(w, error, backend="xla"))

    @pytest.mark.optimized
    def test_parts_that_no_tile_divides(self):
        w = self.put(hard_values((32, 32)), P(("a", "b")))  # four rows on each device
        call = functools.partial(dual_quantize, orientation="both")
        assert same_bits(jax.jit(functools.partial(call, backend="triton"))(w), call(w, backend="xla"))
        x = self.put(TestMatmul.X[:32], P(("a", "b")))
        call = functools.partial(matmul, x, TestMatmul.HI, TestMatmul.LO, scale=jnp.float32(1), out_dtype=jnp.float32)
        np.testing.assert_allclose(jax.jit(lambda: call(backend="triton"))(), call(backend="xla"), rtol=1e-5, atol=1)

    def test_operands_that_split_alike_are_brought_together_once(self):
        seen = []

        def local(x, w, *, summed_over):
            seen.append((x.shape, w.shape, summed_over))
            return x @ w.T

        x, w = self.put(jnp.ones((16, 8)), P("a")), self.put(jnp.ones((32, 8)), P("a"))
        out = jax.jit(partitioned(local, "m k, n k -> m n"))(x, w)
        assert np.all(np.asarray(out) == 8)
        assert seen[-1] in [((8, 8), (32, 8), ()), ((16, 8), (16, 8), ())]

    def test_explicit_axes_are_left_to_xla(self):
        mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="explicit axes"):
            dual_quantize(jnp.ones((32, 32)), backend="triton")


def test_tiles_divide():
    for m, k in itertools.product((16, 48, 64, 80, 4096), repeat=2):
        tile = fit_tile(m, k)
        assert m % tile.rows == k % tile.columns == 0
    assert fit_tile(64, 0) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["tcfp12", "tcfp12_fast"])
def test_a_layer_and_its_gradients(backend, name):
    x, w = jax.random.normal(KEYS[0], (128, 256)), jax.random.normal(KEYS[1], (256, 128))

    def gradients(backend, quantize_backend):
        recipe = tcfp_jax.recipe(name, backend=backend, quantize_backend=quantize_backend)

        def loss(x, w):
            return jnp.sum(jnp.sin(tcfp_jax.matmul(x, w, recipe=recipe)))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)

    # The sums of a product differ in their last bits, which may move a gradient to the neighbouring FP8 value.
    for got, expected in zip(
        *map(jax.tree.leaves, (gradients(backend, "triton"), gradients("xla", "xla"))), strict=True
    ):
        assert np.abs(got - expected).max() <= 1e-3 * np.abs(expected).max()
