"""`row_gradient`: both backends against NumPy's formulas, on blocks that rows fill and on wider ones."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch, tuning
from pallas_kernels.row_gradient import triton
from pallas_kernels.row_gradient.api import row_gradient
from pallas_kernels.row_gradient.reference import Options
from pallas_kernels.row_gradient.triton import Config
from tests.helpers import mesh_of, same_bits
from tests.norms import NORMS, GemmaNorm, agree, draw, expected, layer_norm, plain_rms_norm, rms_norm

BACKENDS = ("xla", "triton")
backends = pytest.mark.parametrize("backend", BACKENDS)
gradient = jax.jit(row_gradient, static_argnames=("function", "backend"))
TINY = (10, 48)


def log_ratio(x, gain):
    """Zeros, which is what lies outside of a block, have an infinite logarithm and gradient."""
    return (jnp.log(x) - jnp.mean(jnp.log(x), axis=-1, keepdims=True)) / gain


def log_ratio_of_gain(x, gain):
    """The same of the vector, and a maximum."""
    return (x - jnp.max(x, axis=-1, keepdims=True)) * (jnp.log(gain) / jnp.mean(jnp.log(gain)))


@pytest.mark.slow_except("gemma-(21, 96)-bfloat16-xla", "layer-(12, 64)-float32-xla", "layer-(12, 64)-float32-triton")
@backends
@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        *((name, (21, 96), "bfloat16") for name in NORMS),
        *((name, (12, 64), "float32") for name in ("layer", "rms")),
        ("layer", TINY, "float16"),
    ],
    ids=str,
)
def test_every_gradient_is_the_formula_and_rounded_once(name, shape, dtype, backend):
    """The norms round between, in the dtype of x or their own; the gradients do not."""
    arguments = draw(name, shape, dtype)
    dx, dvectors = gradient(NORMS[name][0], *arguments, backend=backend)
    assert [a.dtype for a in (dx, *dvectors)] == [jnp.dtype(dtype)] * (1 + NORMS[name][1])
    assert agree((dx, dvectors), expected(name, *arguments))


@backends
def test_without_what_is_carried_and_with_vectors_of_their_own_dtype(backend):
    x, (gain, bias), dy, carried = draw("layer", TINY, "bfloat16")
    vectors = (gain.astype(jnp.float32), bias)
    got = gradient(layer_norm, x, vectors, dy, backend=backend)
    assert got[1][0].dtype == jnp.float32
    assert agree(got, expected("layer", x, vectors, dy, jnp.zeros_like(carried)))


@pytest.mark.slow_except("float32-xla")
@backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_carried_arrives_unchanged(backend, dtype):
    x, vectors, dy, carried = draw("rms", TINY, dtype)
    dx, (dgain,) = gradient(rms_norm, x, vectors, jnp.zeros_like(dy), carried, backend=backend)
    assert same_bits(dx, carried) and not np.any(dgain)


@pytest.mark.slow_except("4-24-ahead", "2-40-now")
@pytest.mark.parametrize("loads", ["ahead", "now"])
@pytest.mark.parametrize("rows, m", [(1, 7), (4, 24), (4, 23), (2, 40)])
def test_programs_of_several_steps(rows, m, loads, monkeypatch):
    """Two programs: the last may have fewer steps, and the last step fewer rows."""
    monkeypatch.setattr(dispatch, "device_cores", lambda otherwise: 2)
    arguments = draw("layer", (m, 96), "bfloat16")
    config = Config(rows, 1, 1, loads)
    x, vectors, dy, carried = arguments
    run = jax.jit(functools.partial(triton.row_gradient, Options(layer_norm), config=config))
    got = run(x, vectors, (dy,), carried)
    assert agree(got, expected("layer", *arguments))


@backends
def test_several_gradients_are_added_in_float32(backend):
    x, vectors, dy, carried = draw("rms", (16, 48), "bfloat16")
    run = lambda dys: row_gradient(rms_norm, x, vectors, dys, carried, backend=backend)
    # Bit-equal to the gradient of a float32 sum: halves of it are exact.
    one, several = run(dy.astype(jnp.float32)), run((dy / 2, dy / 4, dy / 4))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("function", [log_ratio, log_ratio_of_gain])
def test_what_lies_outside_has_no_part(function, monkeypatch):
    monkeypatch.setattr(dispatch, "device_cores", lambda otherwise: 1)
    x, (gain,), dy, carried = draw("rms", (7, 48), "float32")
    x, gain = jnp.abs(x) + 0.1, jnp.abs(gain) + 1.5
    run = jax.jit(functools.partial(triton.row_gradient, Options(function), config=Config(4, 1, 1)))
    got = run(x, (gain,), (dy,), carried)
    _, pull = jax.vjp(function, x, gain)
    dx, dgain = pull(dy)
    for a, b in ((got[0], dx + carried), (got[1][0], dgain)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_except("nan-xla", "inf-xla", "inf-triton")
@backends
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_stays_in_its_row_and_its_sums(backend, bad):
    """Of x it reaches the gain's gradient everywhere or in its column; of dy the bias's in its column alone."""
    x, vectors, dy, carried = draw("layer", TINY, "float32")
    dx, (dgain, dbias) = gradient(layer_norm, x.at[9, 5].set(bad), vectors, dy, carried, backend=backend)
    finite = np.isfinite(dx)
    assert finite[:9].all() and not finite[9].any() and not np.isfinite(dgain[5]) and np.isfinite(dbias).all()
    dx, (dgain, dbias) = gradient(layer_norm, x, vectors, dy.at[9, 5].set(bad), carried, backend=backend)
    finite = np.isfinite(dx)
    assert finite[:9].all() and not finite[9].any()
    assert all(np.array_equal(~np.isfinite(s), np.arange(48) == 5) for s in (dgain, dbias))


@pytest.mark.slow_except("(2, 3, 48)-xla", "(48,)-xla")
@backends
@pytest.mark.parametrize("shape", [(2, 3, 48), (48,)], ids=str)
def test_leading_axes_are_rows(backend, shape):
    arguments = draw("rms", shape, "float32")
    got = gradient(rms_norm, *arguments, backend=backend)
    assert got[0].shape == shape and agree(got, expected("rms", *arguments))


@backends
def test_under_vmap_each_element_has_its_own_sums(backend):
    x, vectors, dy, carried = draw("rms", (2, 5, 48), "float32")
    call = functools.partial(row_gradient, rms_norm, backend=backend)
    got = jax.jit(jax.vmap(call, in_axes=(0, None, 0, 0)))(x, vectors, dy, carried)
    for i in range(2):
        one = jax.tree.map(lambda a, i=i: a[i], got)
        assert agree(one, expected("rms", x[i], vectors, dy[i], carried[i]))


@pytest.mark.slow_except("P(('a', 'b'),)")
@pytest.mark.parametrize("spec", [P("a"), P(("a", "b")), P(None, "b")], ids=str)
def test_under_a_mesh_only_sums_cross_devices(spec):
    mesh = mesh_of(2, 4)
    arguments = draw("layer", (32, 48), "bfloat16")
    x, vectors, dy, carried = arguments
    put = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    placed = put(x), vectors, put(dy), put(carried)
    call = jax.jit(functools.partial(row_gradient, layer_norm, backend="triton"))
    compiled = call.lower(*placed).compile()
    text = compiled.as_text()
    if spec != P(None, "b"):  # rows must be whole
        assert "all-gather" not in text
        assert "bf16[32,48]" not in "".join(re.findall(r"= .* all-reduce.*", text))
        assert "all-reduce" in text
    assert agree(compiled(*placed), expected("layer", *arguments))


def test_explicit_axes():
    arguments = draw("rms", (2, 8, 48), "float32")
    mesh = mesh_of(2, axis_type=AxisType.Explicit, names=("a",))
    with jax.set_mesh(mesh):
        x, dy, carried = (jax.device_put(arguments[i], NamedSharding(mesh, P("a"))) for i in (0, 2, 3))
        got = gradient(rms_norm, x, arguments[1], dy, carried)
        by_kernel = row_gradient(rms_norm, x, arguments[1], dy, carried, backend="triton")
    assert agree(got, expected("rms", *arguments)) and agree(by_kernel, expected("rms", *arguments))


def test_equal_functions_share_a_program():
    arguments = draw("gemma", TINY, "float32")
    sizes = []
    for _ in range(2):
        row_gradient(GemmaNorm(1e-3, "float32"), *arguments, backend="triton")
        sizes.append(dispatch._jitted(triton.row_gradient)._cache_size())
    assert sizes[0] == sizes[1]


def test_measured_configs_serve_rows_of_their_length(monkeypatch):
    measured = Config(4, 2, 3, "now")
    entry = tuning.Entry((64, 4096), "bfloat16", "triton", {"triton": 1.0}, {"triton": vars(measured)})
    monkeypatch.setattr(tuning, "find", lambda key, backend: entry)
    configs = [triton.configure(None, jax.ShapeDtypeStruct((8, k), jnp.bfloat16)) for k in (4096, 3000, 1024)]
    assert configs == [measured, measured, triton.guess(1024, "bfloat16")]


@pytest.mark.parametrize(
    "k, dtype", [*itertools.product((1, 2, 16, 48, 128, 768, 4096, 8192), ("bfloat16", "float32")), (16384, "float16")]
)
def test_guesses_fit(k, dtype):
    first, *others = triton.candidates(k, dtype)
    assert first == triton.guess(k, dtype) and len({first, *others}) == 1 + len(others) <= 8
    for config in (first, *others):
        assert triton.misfit(config, k) is None and config.rows & (config.rows - 1) == 0
        # A thread holds so many bytes of x, and a multiprocessor so many threads with the registers for them.
        held = config.rows * 2 ** (k - 1).bit_length() * jnp.dtype(dtype).itemsize / (32 * config.warps)
        assert held <= 64 and config.programs * config.warps <= 32


def test_what_the_kernel_cannot_hold():
    for shape, reason in (((0, 48), "x[0, 48] has no values"), ((1, 20000), "rows of k=20000 in float32 exceed")):
        x = jnp.zeros(shape)
        with pytest.raises(NotImplementedError, match=re.escape(reason)):
            row_gradient(plain_rms_norm, x, (), x, backend="triton")


def test_nothing_to_sum():
    x = jnp.zeros((0, 48))
    dx, (dgain,) = row_gradient(rms_norm, x, (jnp.ones(48),), x)
    assert dx.shape == (0, 48) and not np.any(dgain)


HELD = np.ones(48, np.float32)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x, g: jnp.cumsum(x, axis=-1) * g, "uses cumsum on [2, 48], which is neither elementwise"),
        (lambda x, g: x - jnp.sum(x, axis=0) * g, "uses reduce_sum on [2, 48]"),
        (lambda x, g: jax.nn.relu(x) * g, "uses custom_jvp_call"),
        (lambda x, g: x * g * HELD, "function holds an array of its own, (48,)"),
        (lambda x, g: jnp.sum(x * g, axis=-1), "must turn rows [r, 48] into one array of floats [r, 48]; it returns"),
        (lambda x, g: x > g, "must turn rows"),
        (lambda x, g: jnp.sum((x * g).reshape(-1, 2, 24), axis=1, keepdims=True) + x[..., :24], "must turn rows"),
        (lambda x, g: (x * g).reshape(-1, 2, 24).reshape(-1, 48), "uses reshape on [2, 48]"),
    ],
    ids=["cumsum", "columns", "custom", "held", "shape", "bool", "rank", "reshape"],
)
def test_functions_that_are_not_of_rows(function, message):
    x = jnp.ones(TINY)
    with pytest.raises(ValueError, match=re.escape(message)):
        row_gradient(function, x, (jnp.ones(48),), x)


class Unhashable:
    """A function with something that may change."""

    __hash__ = None

    def __call__(self, x, gain):
        return x * gain


def test_bad_input():
    x, gain = jnp.ones(TINY), (jnp.ones(48),)
    with pytest.raises(ValueError, match=re.escape("vectors[0] has shape [10], but x[10, 48] needs [48] there")):
        row_gradient(rms_norm, x, (jnp.ones(10),), x)
    with pytest.raises(ValueError, match=re.escape("carried has shape [48]")):
        row_gradient(rms_norm, x, gain, x, x[0])
    with pytest.raises(ValueError, match="x is a scalar"):
        row_gradient(rms_norm, x[0, 0], gain, x[0, 0])
    with pytest.raises(TypeError, match="dy has dtype int32, not one of bfloat16"):
        row_gradient(rms_norm, x, gain, x.astype(jnp.int32))
    with pytest.raises(TypeError, match="cannot be hashed"):
        row_gradient(Unhashable(), x, gain, x)
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        row_gradient(rms_norm, x, gain, x, backend="cuda")
