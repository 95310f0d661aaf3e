"""AdamW on hi + lo with 8-bit moments, bit for bit.

The definition is compared with optax, and the kernel with the definition.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import counter, dispatch, moments
from pallas_kernels.adamw import mosaic, reference
from pallas_kernels.adamw.api import IMPLEMENTATIONS, Moments, adamw
from pallas_kernels.adamw.arithmetic import Portable
from pallas_kernels.moments import E4M3
from tests.adamw import (
    KEY,
    OPTIONS,
    SCALE,
    SHAPE,
    data,
    entries,
    rates,
    step_alone,
    step_entry,
    weight,
)
from tests.collectives import GATHERS
from tests.helpers import (
    OLD_JAX,
    entry,
    mesh_of,
    parametrize,
    refused,
    same_bits,
    slow,
    slow_except,
    stacked,
)

step = jax.jit(
    adamw, static_argnames=("momentum", "orientation", "remainder", "backend")
)
by_backend = parametrize("backend", ["xla", "triton"])


def near(got, expected, bound):
    return np.all(np.abs(np.float64(got) - np.float64(expected)) <= bound)


# The definition
# --------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=5)
def exact_weight(g, hi, lo, state, given, options):
    """W' before it is rounded, by the definition's arithmetic on whole blocks.

    It is in units of the weight.
    """
    gradient = moments.to_blocks(g)
    bits = moments.to_blocks(counter.bits_of(g.shape, KEY[0], KEY[1]))
    _, w = reference.update(
        Portable(gradient),
        options,
        reference.Coefficients.of(given),
        gradient,
        reference.State.of(hi, lo, state),
        bits,
    )
    return moments.from_blocks(w, g.shape[1]) * given.new_scale


@parametrize(
    "momentum, t, eps_root",
    [("classic", 1, 0.0), ("classic", 7, 1e-6), ("nesterov", 7, 0.0)],
)
def test_a_step_is_optax_adamw_in_float32(momentum, t, eps_root):
    """From the stored moments, with t = 1 from none.

    The bound: roundings of both, and b1 and b2 in 20 bits.
    """
    g, hi, lo, state = data()
    if t == 1:
        state = Moments.zeros(SHAPE)
    nesterov = momentum == "nesterov"
    tx = optax.adamw(
        0.01, 0.9, 0.95, 1e-8, eps_root, weight_decay=0.1, nesterov=nesterov
    )
    params = jnp.float32(weight(hi, lo) * SCALE)
    start, *rest = tx.init(params)
    m = moments.decode_m(*state[:2])
    v = moments.decode_v(*state[2:])
    before = start._replace(count=jnp.int32(t - 1), mu=m, nu=v)
    with jax.numpy_dtype_promotion("standard"):
        updates, (after, *_) = tx.update(g, (before, *rest), params)
    given = rates(t=t, nesterov=nesterov, eps_root=eps_root)
    got = exact_weight(
        g, hi, lo, state, given, reference.AdamWOptions(momentum=momentum)
    )
    # Terms of an update may cancel, but their rounding errors do not.
    terms = (2 * np.abs(0.9 * m) + np.abs(0.1 * g)) / (1 - 0.9**t)
    divisor = np.sqrt(after.nu / (1 - 0.95**t) + eps_root) + 1e-8
    summed = 0.01 * terms * (2 if nesterov else 1) / divisor
    bound = np.float64(np.abs(params) + 16 * summed) * 2.0**-22
    assert near(got, params + updates, bound)
    assert np.mean(np.abs(updates) > 16 * bound) > 0.95
    # The stored moments lie within a spacing of optax's moments, and the weight within
    # the precision of hi + lo.
    new = step(g, hi, lo, state, given, KEY, momentum=momentum)
    m = moments.decode_m(*new.moments[:2])
    v = moments.decode_v(*new.moments[2:])
    assert near(m, after.mu, np.abs(after.mu) / 8 + of_block(after.mu) * 2.0**-17)
    assert near(v, after.nu, after.nu / 8 + of_block(after.nu) * 2.0**-30)
    w = np.float64(got) / SCALE
    fits = np.abs(w) <= 448
    stored = weight(new.hi, new.lo)
    assert near(stored[fits], w[fits], (np.abs(w) * 2.0**-7 + 2.0**-9)[fits])
    assert float(new.amax) == np.max(np.abs(got))


def of_block(x):
    """The largest magnitude of the block of each value."""
    blocks = np.abs(np.asarray(x)).reshape(-1, 128)
    return np.repeat(np.max(blocks, 1), 128).reshape(SHAPE)


@parametrize("b", [0.9, 0.95, 0.99, 0.999, 0.9999])
def test_twenty_bits_of_b_change_averages_little(b):
    kept = float(reference.Coefficients.of(rates(b1=b)).b1)
    assert abs(kept - b) <= 2.0**-20
    assert int(np.float32(kept).view(np.int32)) % 16 == 0
    assert abs((1 - b) / (1 - kept) - 1) < (2.0**-7 if b > 0.999 else 2.0**-10)


def test_a_change_of_scale_by_binades_changes_no_weight():
    start = data()
    options = reference.AdamWOptions(momentum="nesterov")
    expected = exact_weight(*start, rates(nesterov=True), options)
    for factor in (0.25, 0.5, 2, 8):
        given = rates(nesterov=True, new_scale=SCALE * factor)
        assert np.array_equal(exact_weight(*start, given, options), expected)
        new = step(*start, given, KEY, momentum="nesterov")
        scale = SCALE * factor
        fits = np.abs(expected) <= 448 * scale
        bound = np.abs(expected) * 2.0**-7 + scale * 2.0**-9
        stored = weight(new.hi, new.lo) * scale
        assert near(stored[fits], expected[fits], bound[fits])


@parametrize("options", OPTIONS, ids=["classic", "nesterov", "nearest"])
def test_a_learning_rate_of_zero_changes_no_value(options):
    g, hi, lo, state = data()
    new = step(g, hi, lo, state, rates(lr=0.0), KEY, **options)
    assert np.array_equal(weight(new.hi, new.lo), weight(hi, lo))
    assert not same_bits(new.moments, state)


@by_backend
def test_a_step_that_is_not_taken_leaves_every_bit(backend):
    g, hi, lo, state = data()
    g = g.at[5, 7].set(jnp.nan)
    options = {"orientation": "both", "backend": backend}
    new = step(g, hi, lo, state, rates(keep=False), KEY, **options)
    assert same_bits((new.hi, new.lo, new.moments, new.columns), (hi, lo, state, hi.T))
    assert float(new.amax) == np.max(np.abs(weight(hi, lo))) * SCALE


@by_backend
@parametrize("bad", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_nan_inf_and_overflow_stay_nan(bad, backend):
    """A gradient whose square overflows, too; 3e38 alone is finite."""
    g, hi, lo, state = data()
    new = step(g.at[5, 7].set(bad), hi, lo, state, rates(), KEY, backend=backend)
    assert np.argwhere(np.isnan(weight(new.hi, new.lo))).tolist() == [[5, 7]]
    m = moments.decode_m(*new.moments[:2])
    v = moments.decode_v(*new.moments[2:])
    for moment in (m, v):
        isnan = np.isnan(np.asarray(moment))
        assert np.all(isnan[5, :128])
        assert np.sum(isnan) == 128
    assert np.isfinite(new.amax)
    after = step(g, *new[:2], new.moments, rates(), KEY, backend=backend)
    assert np.all(np.isnan(np.float32(after.hi)[5, :128]))


def test_lo_keeps_the_mean_of_the_weight():
    """Over many keys, within 4 standard errors.

    A step far below lo's grid moves the weight by its mean.
    """
    start = data()
    given = rates(lr=1e-5, decay=0.0)
    exact = exact_weight(*start, given, reference.AdamWOptions()) / SCALE
    draws = 512

    def values(i):
        new = adamw(*start, given, jnp.stack(counter.keys(8, i)))
        return new.hi.astype(jnp.float32) + new.lo.astype(jnp.float32) - exact

    keys = jnp.arange(draws, dtype=jnp.uint32)
    errors = np.float64(jax.jit(lambda: jax.lax.map(values, keys))())
    deviation = errors.std(0)
    moving = deviation > 0
    z = errors.mean(0)[moving] / deviation[moving] * np.sqrt(draws)
    assert np.mean(moving) > 0.9
    assert abs(np.mean(z)) * np.sqrt(z.size) < 4
    assert abs(np.std(z) - 1) < 0.2


@by_backend
def test_lo_and_both_moments_are_rounded_by_bits_of_their_own(backend):
    """Each value lies between two codes, for lo and v right in the middle.

    No two of the three go up together.
    """
    ones = jnp.ones(SHAPE)
    given = rates(lr=1.0625, t=1, eps=0.0, decay=0.0, scale=1.0, new_scale=1.0)
    g = ones * jnp.sqrt(jnp.float32(1.0625 / 0.05))
    hi = ones.astype(E4M3) * 64
    new = step(g, hi, hi * 0, Moments.zeros(SHAPE), given, KEY, backend=backend)
    stored = [
        -new.lo.astype(jnp.float32),
        moments.decode_m(*new.moments[:2]),
        moments.decode_v(*new.moments[2:]),
    ]
    signs = [np.where(np.asarray(x) > np.mean(x), 1.0, -1.0).ravel() for x in stored]
    for x, sign in zip(stored, signs, strict=True):
        assert len(np.unique(x)) == 2
        assert abs(np.mean(sign)) < 0.8
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(signs[a], signs[b])[0, 1]) < 5 / np.sqrt(ones.size)


# The kernel
# --------------------------------------------------------------------------------------


@pytest.mark.optimized("slow")
@slow_except(f"{OPTIONS[1]}-(64, 128)-bfloat16", f"{OPTIONS[2]}-(32, 256)-float32")
@parametrize(
    "options, shape, dtype",
    [
        (OPTIONS[0], (48, 384), "bfloat16"),
        (OPTIONS[1], (48, 384), "float32"),
        (OPTIONS[1], (64, 128), "bfloat16"),
        pytest.param(OPTIONS[2], (32, 256), "float32", marks=pytest.mark.optimized),
    ],
    ids=str,
)
def test_the_kernel_is_the_definition(options, shape, dtype):
    g, hi, lo, state = data(shape, 1)
    given = rates(
        nesterov="momentum" in options,
        new_scale=2 * SCALE,
        gradient_scale=0.7,
        eps_root=1e-9,
    )
    run = partial(step, g.astype(dtype), hi, lo, state, given, KEY, **options)
    got = run(backend="triton")
    assert same_bits(got, run(backend="xla"))
    assert (got.columns is None) == ("orientation" not in options)
    if shape == (64, 128):
        # Also outside of a program of its own, where XLA knows every number and folds
        # what it can.
        operands = (g.astype(dtype), hi, lo, state, given, KEY)
        constant = jax.jit(lambda: adamw(*operands, **options, backend="xla"))
        assert same_bits(got, constant())


def test_a_last_block_may_be_short():
    """XLA's alone: its blocks begin at multiples of 128.

    The first of one row knows nothing of the second.
    """
    g, hi, lo, state = jax.tree.map(lambda x: x[:1], data((2, 200), 2))
    new = step(g, hi, lo, state, rates(), KEY)

    def part(x):
        return x[:, :128] if x.shape[1] == 200 else x[:, :1]

    first = step(*jax.tree.map(part, (g, hi, lo, state)), rates(), KEY, backend="xla")
    assert same_bits(
        (first.hi, first.lo, first.moments),
        jax.tree.map(part, (new.hi, new.lo, new.moments)),
    )
    with refused(r"hi\[1, 200\].*multiples of 16 and 128.*pad", NotImplementedError):
        adamw(g, hi, lo, state, rates(), KEY, backend="triton")


@slow_except("xla")
@pytest.mark.optimized("slow")
@by_backend
def test_a_stack_under_vmap_and_scan_is_its_matrices(backend):
    parts = [data((16, 128), seed) for seed in range(3)]
    stack = stacked(parts)
    keys = jnp.stack([jnp.stack(counter.keys(9, i)) for i in range(3)])
    given_parts = [rates(lr=lr, keep=lr > 0) for lr in (0.01, 0.02, 0.0)]
    given = stacked(given_parts)
    one = partial(adamw, orientation="both", backend=backend)
    mapped = jax.jit(jax.vmap(one))(*stack, given, keys)

    @jax.jit
    def scan(*xs):
        return jax.lax.scan(lambda carry, x: (carry, one(*x)), None, xs)[1]

    assert same_bits(mapped, scan(*stack, given, keys))
    by_definition = partial(step, orientation="both", backend="xla")
    for i, part in enumerate(parts):
        expected = by_definition(*part, given_parts[i], keys[i])
        assert same_bits(entry(mapped, i), expected)
    # Rates and key may be shared, and stacks be stacked.
    twice = jax.vmap(jax.vmap(lambda *xs: one(*xs, rates(), KEY)))
    nested = jax.jit(twice)(*jax.tree.map(lambda x: x[None], stack))
    expected = by_definition(*parts[2], rates(), KEY)
    assert same_bits(entry(nested, 0, 2), expected)


@parametrize("stack", [(), (2,)], ids=str)
def test_an_entry_of_stacks_takes_the_step_of_its_matrices(stack):
    given = entries(*stack)
    at = jnp.int32(2)
    expected = jax.jit(step_alone)(*given, at)
    assert same_bits(jax.jit(step_entry)(*given, at), expected)


@slow_except("P('a', 'b')-xla", "P('a', 'b')-triton")
@pytest.mark.optimized("slow")
@by_backend
@parametrize("spec", [P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))], ids=str)
def test_every_mesh_has_the_same_bits_and_moves_one_number(spec, backend):
    shape = (128, 1024)  # whole tiles for each of eight devices
    start = data(shape, 3)
    expected = step(*start, rates(), KEY, orientation="both", backend="xla")
    spread = NamedSharding(mesh_of(2, 2), spec)
    operands = jax.device_put(start, spread)
    call = jax.jit(partial(adamw, orientation="both", backend=backend))
    compiled = call.lower(*operands, rates(), KEY).compile()
    got = compiled(*operands, rates(), KEY)
    assert same_bits(got, expected)
    assert got.hi.sharding.is_equivalent_to(spread, 2)
    assert got.moments.v_scale.sharding.is_equivalent_to(spread, 2)
    for name in GATHERS:
        assert f" {name}" not in compiled.as_text()


@parametrize("backend", [pytest.param("xla", marks=slow), "triton"])
def test_layers_of_experts_may_be_split_in_either_axis(backend):
    parts = [data((16, 128), seed) for seed in range(4)]
    stack = stacked([stacked(parts[:2]), stacked(parts[2:])])
    spread = NamedSharding(mesh_of(1, 2), P(None, "b"))
    one = partial(adamw, orientation="both", backend=backend)

    def call(stack, *rest):
        return jax.vmap(jax.vmap(lambda x: one(*x, *rest)))(stack)

    operands = jax.device_put(stack, spread), rates(), jnp.asarray(KEY)
    compiled = jax.jit(call).lower(*operands).compile()
    got = compiled(*operands)
    assert got.hi.sharding.is_equivalent_to(spread, 4)
    assert "all-gather" not in compiled.as_text()
    # XLA reads an entry of a split array by a sum, which loses the sign of a zero
    got = jax.device_get(got)
    for i, part in enumerate(parts):
        expected = step(*part, rates(), KEY, orientation="both", backend="xla")
        assert same_bits(entry(got, *divmod(i, 2)), expected)


G = jnp.zeros(SHAPE)
HI = jnp.zeros(SHAPE, E4M3)
STATE = Moments.zeros(SHAPE)
STEP = {"g": G, "hi": HI, "lo": HI, "moments": STATE, "rates": rates(), "key": KEY}
REFUSED = [
    ({"g": HI}, TypeError, "no scale"),
    ({"g": G.astype(jnp.int32)}, TypeError, "astype"),
    ({"g": G[:16]}, ValueError, r"g has shape \[16, 256\]"),
    ({"hi": G}, TypeError, "hi has dtype float32"),
    ({"lo": HI.astype(jnp.float8_e5m2)}, TypeError, "lo has dtype float8_e5m2"),
    (
        {"moments": STATE._replace(v=STATE.v.astype(jnp.int32))},
        TypeError,
        "moments.v has dtype int32",
    ),
    (
        {"moments": STATE._replace(m_scale=STATE.v_scale)},
        TypeError,
        "moments.m_scale has dtype uint8",
    ),
    (
        {"moments": STATE._replace(v_scale=STATE.v_scale[:, :1])},
        ValueError,
        r"\[32, 2\] there",
    ),
    ({"rates": rates()._replace(b1=0.9)}, TypeError, "rates.b1 is 0.9"),
    (
        {"rates": rates()._replace(keep=jnp.float32(1))},
        TypeError,
        "rates.keep .* bool scalar",
    ),
    ({"key": jax.random.key(0)}, TypeError, "counter.keys"),
    ({"g": G[None], "hi": HI[None], "lo": HI[None]}, ValueError, "jax.vmap"),
    ({"momentum": "heavy"}, ValueError, "momentum='heavy' is unknown"),
    ({"orientation": "heavy"}, ValueError, "orientation='heavy' is unknown"),
    ({"remainder": "heavy"}, ValueError, "remainder='heavy' is unknown"),
]


@parametrize("changes, error, message", REFUSED)
def test_bad_input_says_what_to_do(changes, error, message):
    with refused(message, error):
        adamw(**STEP | changes)


@parametrize(
    "kind, capability, chosen",
    [
        ("NVIDIA H200", 9.0, True),
        ("NVIDIA H200", 0.0, True),
        ("NVIDIA A100", 8.0, False),
        ("AMD MI300", 0.0, False),
    ],
)
def test_the_kernel_is_chosen_where_instructions_for_fp8_are(
    kind, capability, chosen, monkeypatch
):
    """A device that is only described has no capability."""
    monkeypatch.setattr(dispatch, "device_kind", lambda: kind)
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
    reason = IMPLEMENTATIONS[0].decline(reference.AdamWOptions())
    assert reason is None if chosen else kind in reason


def test_mosaic_says_why_it_cannot_take_a_step(monkeypatch):

    def reason(rows):
        x = jnp.ones((rows, 256), jnp.float16)
        return mosaic.KERNEL.reject(reference.AdamWOptions(), x, x)

    if OLD_JAX:
        assert "older than 0.11" in reason(64)
        return
    assert "need a GPU" in reason(64)
    for module in (mosaic, dispatch):
        monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(mosaic, "device_count", lambda: 2)
    assert "several devices" in reason(64)
    monkeypatch.setattr(mosaic, "device_count", lambda: 1)
    assert "multiples of 32" in reason(48)
    assert "g is float16" in reason(64)
