"""The fused AdamW step on a GPU has the bits of its definition on the CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels import counter, moments
from pallas_kernels.adamw.api import adamw
from tests.adamw import (
    KEY,
    OPTIONS,
    SCALE,
    data,
    encode,
    entries,
    rates,
    step_alone,
    step_entry,
)
from tests.helpers import entry, on_cpu, parametrize, same_bits, stacked

pytestmark = pytest.mark.gpu
SHAPE = (1024, 2048)
by_engine = parametrize("engine", ["triton", "mosaic"])


def by_definition(*arguments, **options):
    """The same step by XLA, compiled for the CPU."""
    return on_cpu(jax.jit(partial(adamw, backend="xla", **options)), *arguments)


def hard_data():
    """Gradients and moments of 160 binades, and numbers of every kind.

    They are blocks of zeros, subnormals, weights beyond the scale, and both zeros.
    """
    rng = np.random.default_rng(5)
    hi = np.array(data(SHAPE, 5)[1])
    lo = np.array(data(SHAPE, 5)[2])
    rows = 2.0 ** np.linspace(-100, 60, SHAPE[0])[:, None]
    g = (rng.standard_normal(SHAPE) * rows).astype(np.float32)
    g[:, 128:256] = 0
    g[::7, 5] = -0.0
    g[3] = 1e-40
    m = rng.standard_normal(SHAPE) * rows * 2.0 ** rng.integers(-20, 20, SHAPE)
    v = np.square(rng.standard_normal(SHAPE) * np.minimum(rows, 2.0**50))
    v *= 2.0 ** rng.integers(-30, 10, SHAPE)
    m[[5, 7]] = 0
    v[[6, 7]] = 0
    lo[8] = hi[8] = 448
    hi[9] = lo[9] = -0.0
    bits = jax.random.bits(jax.random.key(0), SHAPE)
    return g, hi, lo, on_cpu(encode, np.float32(m), np.float32(v), bits)


def share_of_equal_bytes(a, b):
    a, b = (np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in (a, b))
    return float(np.mean(a == b))


@parametrize("dtype", ["float32", "bfloat16"])
@parametrize("options", OPTIONS, ids=str)
@parametrize("kind", ["usual", "hard"])
@by_engine
def test_every_bit_is_the_definitions(engine, kind, options, dtype):
    g, hi, lo, state = data(SHAPE, 5) if kind == "usual" else hard_data()
    g = jnp.asarray(g, dtype)
    hard = {"eps": 0.0, "new_scale": 2 * SCALE}
    more = hard if kind == "hard" else {"gradient_scale": 0.7}
    given = (g, hi, lo, state, rates(nesterov="momentum" in options, **more), KEY)
    expected = by_definition(*given, **options)
    # the state is on the CPU
    given = jax.tree.map(jnp.asarray, jax.device_get(given))
    by_kernel = jax.jit(partial(adamw, **options, backend=engine))
    got = jax.device_get(by_kernel(*given))
    # which, and how far, where one is not
    shares = jax.tree.map(share_of_equal_bytes, got, expected)
    assert set(jax.tree.leaves(shares)) == {1.0}, shares
    assert np.mean(np.float32(got.lo) != 0) > 0.5


@parametrize("options", OPTIONS, ids=str)
@parametrize("stack", [(), (2,)], ids=str)
def test_an_entry_of_stacks_takes_its_step_in_place(stack, options):
    given = *entries(*stack, shape=SHAPE), jnp.int32(2)
    by_entry = jax.jit(partial(step_entry, **options)).lower(*given).compile()
    assert "mosaic_gpu" in by_entry.as_text()
    assert "triton" not in by_entry.as_text()
    alone = jax.jit(partial(step_alone, backend="triton", **options))
    assert same_bits(by_entry(*given), alone(*given))


@parametrize("orientation", ["rows", "both"])
def test_the_choice_is_the_kernel_and_it_works_in_place(orientation):
    old = jax.tree.map(jnp.array, data(SHAPE, 5)[1:])
    g = data(SHAPE, 5)[0]

    def train(old, g, given, key):
        new = adamw(g, *old, given, key, orientation=orientation)
        return (new.hi, new.lo, new.moments), new.columns

    compiled = jax.jit(train, donate_argnums=0).lower(old, g, rates(), KEY).compile()
    assert "triton" in compiled.as_text()
    assert " copy(" not in compiled.as_text()
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(old)}
    new, columns = compiled(old, g, rates(), KEY)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)} == before
    assert columns is None or same_bits(columns, np.asarray(new[0]).T)


@by_engine
def test_a_step_that_is_not_taken_and_one_that_is_not_finite(engine):
    g, hi, lo, state = data(SHAPE, 5)
    bad = g.at[5, 7].set(jnp.nan).at[6, 200].set(jnp.inf)
    call = jax.jit(partial(adamw, orientation="both", backend=engine))
    kept = call(bad, hi, lo, state, rates(keep=False), KEY)
    assert same_bits(
        (kept.hi, kept.lo, kept.moments, kept.columns),
        (hi, lo, state, hi.T),
    )
    new = call(bad, hi, lo, state, rates(), KEY)
    expected = by_definition(bad, hi, lo, state, rates(), KEY, orientation="both")
    assert same_bits(new, expected)
    assert np.argwhere(np.isnan(np.float32(new.hi))).tolist() == [[5, 7], [6, 200]]


@by_engine
def test_a_stack_is_its_matrices(engine):
    parts = [data((64, 256), seed) for seed in range(3)]
    stack = stacked(parts)
    keys = jnp.stack([jnp.stack(counter.keys(9, i)) for i in range(3)])
    call = jax.vmap(partial(adamw, backend=engine), in_axes=(0, 0, 0, 0, None, 0))
    got = jax.jit(call)(*stack, rates(), keys)
    for i, part in enumerate(parts):
        expected = by_definition(*part, rates(), keys[i])
        assert same_bits(entry(got, i), expected)


@parametrize("shape", [(64, 256), (8, 200)], ids=str)
def test_the_codec_has_the_same_bits_in_xla(shape):
    rng = np.random.default_rng(0)
    x = np.float32(rng.standard_normal(shape) * 2.0 ** rng.integers(-60, 60, shape))
    x[3, 4] = np.nan
    x[5, 5] = -np.inf

    def run(x, bits):
        state = encode(x, jnp.abs(x), bits)
        m = moments.decode_m(*state[:2])
        v = moments.decode_v(*state[2:])
        return state, jnp.nan_to_num(m), jnp.nan_to_num(v)

    bits = np.asarray(counter.bits_of(shape, *counter.keys(1)))
    assert same_bits(jax.jit(run)(x, bits), on_cpu(jax.jit(run), x, bits))


def test_errors_beside_stored_weights_have_the_bits_of_a_cpu():
    """In one program, where XLA cancels casts that undo each other."""
    rng = np.random.default_rng(7)
    w = np.float32(rng.standard_normal((256, 512)) * 0.1)
    change = np.float32(rng.standard_normal((256, 512)) * 1e-5)

    def run(w, change):
        params = tcfp_jax.store({"kernel": w}, "tcfp12_single", remainder="feedback")
        for _ in range(3):
            params = tcfp_jax.apply_updates(params, {"kernel": change})
        return params

    got = jax.device_get(jax.jit(run)(w, change))
    assert same_bits(got, on_cpu(jax.jit(run), w, change))
    assert np.mean(np.float32(got["kernel"].state.error) != 0) > 0.9
