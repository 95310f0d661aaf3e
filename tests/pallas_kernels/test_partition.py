"""Kernels under meshes of eight virtual devices: what moves, and that bits stay."""

import itertools
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.adamw.api import Moments, Rates, adamw
from pallas_kernels.fp4_matmul import mosaic
from pallas_kernels.matmul.api import matmul
from pallas_kernels.operands import Block, Operand, Row
from pallas_kernels.partition import BlocksOf, partitioned
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.tiled import Tiling
from pallas_kernels.triton_passes import TRITON
from tcfp_jax.formats import CATALOG, cast_kernel, nvfp4_arrays
from tcfp_jax.formats.rounding import Modes
from tests.helpers import float64_of, mesh_of, parametrize, same_bits, slow_except

E4M3 = jnp.float8_e4m3fn
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)


@pytest.fixture
def put():
    """Puts a tree of arrays on a mesh of 2 x 4."""
    mesh = mesh_of(2, 4)
    return lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))


def hard_values(shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))
    x = x.astype(np.float32)
    x[0, :6] = [0.0, -0.0, 1.0625, -1.1875, 1e-40, 2.0**-9]
    return x


def collectives(compiled):
    text = compiled.as_text()
    return {name for name in COLLECTIVES if re.search(rf"= \S+ {name}", text)}


def operands():
    def drawn(rows, size):
        random = np.random.default_rng(rows)
        return jnp.asarray(random.standard_normal((rows, 256)) * size, E4M3)

    half = jnp.float32(0.5)
    return Operand(drawn(256, 30), half), Operand(drawn(128, 60), half, drawn(128, 1))


def product(**options):
    return partial(matmul, out_dtype=jnp.float32, backend="triton", **options)


def of_backends(call, *operands):
    """The results of a call by Triton and by XLA."""
    for backend in ("triton", "xla"):
        yield jax.jit(partial(call, backend=backend))(*operands)


def spread(put, operand, spec):
    """An operand with one scale, its values split."""
    lo = None if operand.lo is None else put(operand.lo, spec)
    return replace(operand, values=put(operand.values, spec), lo=lo)


def close(got, x, w, bias=0.0):
    a = float64_of(x)
    b = float64_of(w)
    error = np.float64(got) - (a @ b.T + np.float64(bias))
    size = np.abs(a) @ np.abs(b).T + np.abs(bias)
    return np.all(np.abs(error) <= 2.0**-18 * size)


@slow_except("x_spec2-w_spec2-expected2", "x_spec3-w_spec3-expected3")
@parametrize(
    "x_spec, w_spec, expected",
    [
        (P("a"), P(), set()),
        (P("a"), P("b"), set()),
        (P(("a", "b")), P(), set()),
        (P(), P("b"), set()),
        (P("a", "b"), P(None, "b"), {"all-reduce"}),
    ],
)
def test_products_move_what_their_sums_need(put, x_spec, w_spec, expected):
    bias = jnp.float32(np.random.default_rng(1).standard_normal(128) * 1e3)
    x, w = operands()
    on_devices = spread(put, x, x_spec), spread(put, w, w_spec)
    compiled = jax.jit(product(bias=bias)).lower(*on_devices).compile()
    assert collectives(compiled) == expected
    assert close(compiled(*on_devices), x, w, bias)


@slow_except("split4-out4-expected4", "b-out6-expected6")
@parametrize(
    "split, out, expected",
    [
        ("b", P("b"), {"reduce-scatter"}),
        ("b", P(None, "b"), {"reduce-scatter"}),
        (("a", "b"), P(("a", "b")), {"reduce-scatter"}),
        (("a", "b"), P("a"), {"reduce-scatter", "all-reduce"}),
        (("a", "b"), P("a", "b"), {"reduce-scatter"}),
        ("b", P("a"), {"all-reduce"}),
        ("b", P(), {"all-reduce"}),
    ],
)
def test_sums_over_a_batch_are_scattered_not_gathered(put, split, out, expected):
    """In a weight gradient tokens are split over devices, and so is the gradient."""
    halves = [operand.drop_residual() for operand in operands()]
    x, w = (spread(put, operand, P(None, split)) for operand in halves)
    sharding = NamedSharding(mesh_of(2, 4), out)
    compiled = jax.jit(product(), out_shardings=sharding).lower(x, w).compile()
    assert collectives(compiled) == expected
    assert close(compiled(x, w), *halves)


@parametrize(
    "x_spec, w_spec, expected",
    [(P("a"), P("b"), set()), (P("a", "b"), P(None, "b"), {"all-reduce"})],
)
def test_products_of_blocks_move_what_their_sums_need(put, x_spec, w_spec, expected):
    x, w = (float64_of(operand).astype(np.float32) for operand in operands())
    x = jax.jit(lambda x: quantize(x, E4M3, Block(32, "vector")).rows)(x)
    w = jax.jit(lambda w: dual_quantize(w, Block(32)).rows)(w)
    on_devices = put(x, x_spec), put(w, w_spec)
    compiled = jax.jit(product()).lower(*on_devices).compile()
    assert collectives(compiled) == expected
    assert close(compiled(*on_devices), x, w)


@slow_except("spec1")
@pytest.mark.optimized
@parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b"))])
def test_quantizers_with_one_scale_move_one_number(put, spec):
    w = put(hard_values((128, 128)), spec)
    error = put(hard_values((128, 128))[::-1] * np.float32(1e-6), spec)

    def call(w, error, backend):
        return dual_quantize(w, error=error, orientation="both", backend=backend)

    by_triton = jax.jit(partial(call, backend="triton"))
    text = by_triton.lower(w, error).compile()
    assert collectives(text) == {"all-reduce"}  # of the amax
    assert "f32[128,128]{1,0} all-reduce" not in text.as_text()
    assert same_bits(*of_backends(call, w, error))


@slow_except("spec2-square")
@pytest.mark.optimized
@parametrize(
    "spec, tile",
    [(P("a"), "square"), (P("a", "b"), "vector"), (P(None, ("a", "b")), "square")],
)
def test_quantizers_with_blocks_move_nothing(put, spec, tile):
    x = put(hard_values((256, 256)), spec)
    call = partial(quantize, dtype=E4M3, scaling=Block(32, tile), orientation="both")
    compiled = jax.jit(partial(call, backend="triton")).lower(x).compile()
    assert not collectives(compiled)
    assert same_bits(*of_backends(call, x))


@slow_except("P('a', 'b')-rows", "P('a', 'b')-both")
@pytest.mark.optimized
@parametrize("orientation", ["rows", "both"])
@parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b"))], ids=str)
def test_quantizers_of_rows_move_magnitudes_of_shared_lines(put, spec, orientation):
    x = hard_values((256, 512))
    x[3, 7] = np.nan
    x = put(x, spec)
    call = partial(quantize, dtype=E4M3, scaling=Row(), orientation=orientation)
    compiled = jax.jit(partial(call, backend="triton")).lower(x).compile()
    shared = orientation == "both" or spec != P("a")
    assert collectives(compiled) == ({"all-reduce"} if shared else set())
    reduced = re.findall(r"= \S*\[([\d,]*)\]\S* all-reduce", compiled.as_text())
    assert all("," not in shape for shape in reduced), reduced  # vectors, of lines
    equal = partial(np.array_equal, equal_nan=True)
    assert jax.tree.all(jax.tree.map(equal, *of_backends(call, x)))


@pytest.mark.optimized
def test_an_axis_is_not_split_inside_a_block(put):
    x = put(hard_values((256, 128)), P("a", "b"))
    call = partial(quantize, x, E4M3, Block(64, "vector"))
    assert same_bits(*of_backends(call))


def test_a_mesh_cuts_no_block(put):
    """Each of four parts of 120 values would hold 30, less than a block of 32."""
    x = jnp.asarray(hard_values((8, 120)))

    def largest(x, summed_over):
        return Block(32, "vector").amax(x)

    of_parts = jax.jit(
        partitioned(largest, "m k -> m q", {"q": BlocksOf("k", 32, 120)})
    )
    assert same_bits(of_parts(put(x, P("a", "b"))), largest(x, ()))


@pytest.mark.optimized
def test_parts_that_no_tile_divides(put):
    values = put(hard_values((32, 32)), P(("a", "b")))  # four rows on each device
    call = partial(dual_quantize, values, orientation="both")
    assert same_bits(*of_backends(call))
    x, w = operands()
    x = replace(x, values=x.values[:32])
    split = spread(put, x, P(("a", "b")))
    assert close(jax.jit(product())(split, w), x, w)


def test_operands_that_split_alike_are_brought_together_once(put):
    seen = []

    def local(x, w, *, summed_over):
        seen.append((x.shape, w.shape, summed_over))
        return x @ w.T

    x = put(jnp.ones((16, 8)), P("a"))
    w = put(jnp.ones((32, 8)), P("a"))
    out = jax.jit(partitioned(local, "m k, n k -> m n"))(x, w)
    assert np.all(np.asarray(out) == 8)
    assert seen[-1] in [((8, 8), (32, 8), ()), ((16, 8), (16, 8), ())]


def test_tiles_divide():
    for m, k in itertools.product((16, 48, 64, 80, 4096), repeat=2):
        rows, columns, _ = Tiling().fit(m, k)
        assert m % rows == k % columns == 0
    assert Tiling().fit(64, 0) is None


ONE = jnp.float32(1)
HALF = partial(Operand, scale=jnp.float32(0.5))
RATES = Rates(*[ONE] * len(Rates._fields))._replace(keep=jnp.bool_(True))
WORDS = (jnp.uint32(1), jnp.uint32(2))
# Of rows that vary, beside numbers that do not.
KERNELS = {
    "tiles": lambda x: quantize(x, E4M3, orientation="both", backend="triton"),
    "tiles in place": lambda x: dual_quantize(
        x, error=jnp.zeros(x.shape), backend="triton"
    ),
    "lines": lambda x: quantize(x, E4M3, Row(), orientation="both", backend="triton"),
    "rows": lambda x: quantize(x, E4M3, Row(), backend="triton"),
    "product": lambda x: matmul(
        HALF(x.astype(E4M3)), HALF(jnp.ones((128, 128), E4M3)), backend="triton"
    ),
    "adamw": lambda x: adamw(
        x,
        *[x.astype(E4M3)] * 2,
        Moments.zeros(x.shape),
        RATES,
        jnp.stack(WORDS),
        backend="triton",
    ),
    "ordered rows": lambda x: mosaic.ordered_rows(128, x, ONE, backend="triton"),
    "cast": lambda x: cast_kernel.cast_tiles(
        TRITON, cast_kernel.Cast(CATALOG["mxfp8e4"], Modes()), x
    ),
    "nvfp4": lambda x: nvfp4_arrays.quantize_values(x, 0, WORDS).values,
}


@parametrize("name", KERNELS)
def test_results_of_kernels_vary_as_their_operands(name):
    def inside(x):
        for leaf in jax.tree.leaves(KERNELS[name](x)):
            assert jax.typeof(leaf).manual_axis_type.varying == {"a"}, leaf
        return lax.psum(x, "a")

    jax.eval_shape(
        jax.shard_map(inside, mesh=mesh_of(2), in_specs=P("a"), out_specs=P()),
        jnp.ones((256, 128)),
    )
