"""The fused AdamW step on a GPU: the bits of its definition on the CPU, whatever the
numbers are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels import counter, moments
from pallas_kernels.adamw.api import Moments, adamw
from tests.helpers import same_bits
from tests.pallas_kernels.test_adamw import OPTIONS, SCALE, data, rates

pytestmark = pytest.mark.gpu
SHAPE = (1024, 2048)
KEY = np.array([3, 4], np.uint32)
by_engine = pytest.mark.parametrize("engine", ["triton", "mosaic"])


def on_cpu(function, *arguments):
    """The same call, compiled for the CPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.jit(function)(
            *jax.tree.map(lambda a: jax.device_put(np.asarray(a), cpu), arguments)
        )


def hard_data():
    """Gradients and moments of 160 binades, blocks of zeros, subnormals, weights beyond
    the scale, both zeros.
    """
    rng = np.random.default_rng(5)
    g, hi, lo, _ = (
        np.array(x) if not isinstance(x, tuple) else x for x in data(SHAPE, 5)
    )
    rows = 2.0 ** np.linspace(-100, 60, SHAPE[0])[:, None]
    g = (rng.standard_normal(SHAPE) * rows).astype(np.float32)
    g[:, 128:256], g[::7, 5], g[3] = 0, -0.0, 1e-40
    m = (
        rng.standard_normal(SHAPE) * rows * 2.0 ** rng.integers(-20, 20, SHAPE)
    ).astype(np.float32)
    v = (
        np.square(rng.standard_normal(SHAPE) * np.minimum(rows, 2.0**50))
        * 2.0 ** rng.integers(-30, 10, SHAPE)
    ).astype(np.float32)
    m[5], v[6], m[7], v[7] = 0, 0, 0, 0
    lo[8] = hi[8] = 448
    hi[9] = lo[9] = -0.0
    bits = jax.random.bits(jax.random.key(0), SHAPE)
    encode = lambda m, v, bits: Moments(
        *moments.encode_m(m, bits), *moments.encode_v(v, bits)
    )
    return g, hi, lo, on_cpu(encode, m, v, bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["usual", "hard"])
@by_engine
def test_every_bit_is_the_definitions(engine, kind, options, dtype):
    g, hi, lo, state = data(SHAPE, 5) if kind == "usual" else hard_data()
    g = jnp.asarray(g, dtype)
    more = (
        dict(eps=0.0, new_scale=2 * SCALE)
        if kind == "hard"
        else dict(gradient_scale=0.7)
    )
    given = rates(nesterov="momentum" in options, **more)
    call = functools.partial(adamw, **options)
    expected = on_cpu(
        functools.partial(call, backend="xla"), g, hi, lo, state, given, KEY
    )
    # the state is on the CPU
    arguments = jax.tree.map(
        jnp.asarray, jax.device_get((g, hi, lo, state, given, KEY))
    )
    got = jax.device_get(jax.jit(functools.partial(call, backend=engine))(*arguments))
    parts = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    as_bytes = lambda x: np.frombuffer(np.asarray(x).tobytes(), np.uint8)
    # which, and how far, where one is not
    shares = [float(np.mean(as_bytes(a) == as_bytes(b))) for a, b in parts]
    assert shares == [1.0] * len(shares)
    assert np.mean(np.asarray(got.lo, np.float32) != 0) > 0.5


@pytest.mark.parametrize("orientation", ["rows", "both"])
def test_the_choice_is_the_kernel_and_it_works_in_place(orientation):
    old = jax.tree.map(jnp.array, data(SHAPE, 5)[1:])
    g = data(SHAPE, 5)[0]

    def train(old, g, given, key):
        new = adamw(g, *old, given, key, orientation=orientation)
        return (new.hi, new.lo, new.moments), new.columns

    compiled = jax.jit(train, donate_argnums=0).lower(old, g, rates(), KEY).compile()
    assert "triton" in compiled.as_text() and " copy(" not in compiled.as_text()
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(old)}
    new, columns = compiled(old, g, rates(), KEY)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)} == before
    assert columns is None or same_bits(jax.device_get(columns), np.asarray(new[0]).T)


@by_engine
def test_a_step_that_is_not_taken_and_one_that_is_not_finite(engine):
    g, hi, lo, state = data(SHAPE, 5)
    bad = g.at[5, 7].set(jnp.nan).at[6, 200].set(jnp.inf)
    call = jax.jit(functools.partial(adamw, orientation="both", backend=engine))
    kept = call(bad, hi, lo, state, rates(keep=False), KEY)
    assert same_bits(
        jax.device_get((kept.hi, kept.lo, kept.moments, kept.columns)),
        jax.device_get((hi, lo, state, hi.T)),
    )
    new = call(bad, hi, lo, state, rates(), KEY)
    expected = on_cpu(
        functools.partial(adamw, orientation="both", backend="xla"),
        bad,
        hi,
        lo,
        state,
        rates(),
        KEY,
    )
    assert same_bits(jax.device_get(new), jax.device_get(expected))
    assert np.argwhere(np.isnan(np.asarray(new.hi, np.float32))).tolist() == [
        [5, 7],
        [6, 200],
    ]


@by_engine
def test_a_stack_is_its_matrices(engine):
    parts = [data((64, 256), seed) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    keys = jnp.stack([jnp.stack(counter.keys(9, i)) for i in range(3)])
    call = jax.vmap(
        functools.partial(adamw, backend=engine), in_axes=(0, 0, 0, 0, None, 0)
    )
    got = jax.device_get(jax.jit(call)(*stack, rates(), keys))
    for i, part in enumerate(parts):
        expected = on_cpu(
            functools.partial(adamw, backend="xla"), *part, rates(), keys[i]
        )
        assert same_bits(
            jax.tree.map(lambda x: np.asarray(x[i]), got), jax.device_get(expected)
        )


@pytest.mark.parametrize("shape", [(64, 256), (8, 200)], ids=str)
def test_the_codec_has_the_same_bits_in_xla(shape):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-60, 60, shape)).astype(
        np.float32
    )
    x[3, 4], x[5, 5] = np.nan, -np.inf

    def run(x, bits):
        m, v = moments.encode_m(x, bits), moments.encode_v(jnp.abs(x), bits)
        return (
            m,
            v,
            jnp.nan_to_num(moments.decode_m(*m)),
            jnp.nan_to_num(moments.decode_v(*v)),
        )

    bits = np.asarray(counter.bits_of(shape, *counter.keys(1)))
    assert same_bits(
        jax.device_get(jax.jit(run)(x, bits)), jax.device_get(on_cpu(run, x, bits))
    )


def test_errors_beside_stored_weights_have_the_bits_of_a_cpu():
    """In one program, where XLA cancels casts that undo each other."""
    rng = np.random.default_rng(7)
    w, change = (
        (rng.standard_normal((256, 512)) * size).astype(np.float32)
        for size in (0.1, 1e-5)
    )

    def run(w, change):
        params = tcfp_jax.store({"kernel": w}, "tcfp12_single", remainder="feedback")
        for _ in range(3):
            params = tcfp_jax.apply_updates(params, {"kernel": change})
        return params

    got = jax.device_get(jax.jit(run)(w, change))
    assert same_bits(got, jax.device_get(on_cpu(run, w, change)))
    assert np.mean(np.asarray(got["kernel"].state.error, np.float32) != 0) > 0.9
