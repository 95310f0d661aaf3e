"""AdamW on hi + lo with 8-bit moments: the definition against optax, the kernel against
the definition, bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import counter, dispatch, moments, pallas_triton
from pallas_kernels.adamw import mosaic, reference
from pallas_kernels.adamw.api import IMPLEMENTATIONS, Moments, Rates, adamw
from pallas_kernels.adamw.arithmetic import Portable
from pallas_kernels.hopper import plan
from pallas_kernels.operands import SCALE_DTYPE
from tests import compile_for_h200 as h200
from tests.helpers import mesh_of, same_bits

E4M3 = moments.E4M3
SHAPE = (32, 256)
SCALE = 2.0**-9
OPTIONS = [{}, dict(momentum="nesterov", orientation="both"), dict(remainder="nearest")]
by_option = pytest.mark.parametrize(
    "options", OPTIONS, ids=["classic", "nesterov and columns", "nearest"]
)


@functools.cache
def data(shape=SHAPE, seed=0):
    """(g, hi, lo, moments) as after some steps, of rows of very different sizes; one
    row of moments is zero.
    """
    rng = np.random.default_rng(seed)
    normal = lambda: rng.standard_normal(shape)
    rows = 2.0 ** -(np.arange(shape[0]) % 13)[:, None] * 1e-2
    w, g, m = np.clip(normal() * 100, -448, 448), normal() * rows, normal() * rows
    g[:, 3], m[1] = 0, 0
    v = np.square(normal() * rows) * (np.arange(shape[0]) != 1)[:, None]
    hi = w.astype(E4M3)
    lo = (w - hi.astype(np.float64)).astype(E4M3)
    bits = counter.bits_of(shape, *counter.keys(seed))
    encode = jax.jit(
        lambda m, v: Moments(*moments.encode_m(m, bits), *moments.encode_v(v, bits))
    )
    return (
        jnp.asarray(g, jnp.float32),
        jnp.asarray(hi),
        jnp.asarray(lo),
        encode(np.float32(m), np.float32(v)),
    )


def rates(
    *,
    lr=0.01,
    t=7,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    eps_root=0.0,
    decay=0.1,
    nesterov=False,
    keep=True,
    **more,
):
    """Return the numbers of a step, as an optimizer computes them."""
    new_scale = more.get("new_scale", SCALE)
    numbers = dict(
        b1=b1,
        b2=b2,
        rate=lr / (1 - b1**t) / new_scale,
        rate_g=0.0,
        correction=1 / (1 - b2**t),
        eps=eps,
        eps_root=eps_root,
        decay=1 - lr * decay,
        gradient_scale=1.0,
        scale=SCALE,
        new_scale=new_scale,
    )
    if nesterov:
        numbers["rate"] = lr * b1 / (1 - b1 ** (t + 1)) / new_scale
        numbers["rate_g"] = lr * (1 - b1) / (1 - b1**t) / new_scale
    return Rates(
        **{name: jnp.float32(x) for name, x in (numbers | more).items()},
        keep=jnp.bool_(keep),
    )


KEY = jnp.asarray(np.array([3, 4], np.uint32))
step = jax.jit(
    adamw, static_argnames=("momentum", "orientation", "remainder", "backend")
)


def weight(step_or_pair):
    hi, lo = step_or_pair[:2]
    return np.asarray(hi, np.float64) + np.asarray(lo, np.float64)


# The definition
# --------------------------------------------------------------------------------------


def exact_weight(g, hi, lo, state, given, options):
    """W' before it is rounded, in units of the weight, by the definition's arithmetic
    on whole blocks.
    """
    blocks = moments.to_blocks
    codes = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8)[..., None].astype(
        jnp.int32
    )
    old = reference.State(
        blocks(hi),
        blocks(lo),
        blocks(state.m),
        codes(state.m_scale),
        blocks(state.v),
        codes(state.v_scale),
    )
    bits = blocks(counter.bits_of(g.shape, KEY[0], KEY[1]))
    coefficients = reference.Coefficients.of(given)
    _, w = reference.update(
        Portable(blocks(g)), options, coefficients, blocks(g), old, bits
    )
    return moments.from_blocks(w, g.shape[1]) * given.new_scale


@pytest.mark.parametrize(
    "momentum, t, eps_root",
    [("classic", 1, 0.0), ("classic", 7, 1e-6), ("nesterov", 7, 0.0)],
)
def test_a_step_is_optax_adamw_in_float32(momentum, t, eps_root):
    """From the stored moments, with t = 1 from none. The bound: roundings of both, and
    b1 and b2 in 20 bits.
    """
    g, hi, lo, state = data()
    if t == 1:
        state = Moments.zeros(SHAPE)
    settings = dict(b1=0.9, b2=0.95, eps=1e-8, eps_root=eps_root)
    tx = optax.adamw(
        0.01, weight_decay=0.1, nesterov=momentum == "nesterov", **settings
    )
    params = jnp.asarray(weight((hi, lo)) * SCALE, jnp.float32)
    start, *rest = tx.init(params)
    m, v = moments.decode_m(*state[:2]), moments.decode_v(*state[2:])
    with jax.numpy_dtype_promotion("standard"):
        updates, (after, *_) = tx.update(
            g, (start._replace(count=jnp.int32(t - 1), mu=m, nu=v), *rest), params
        )
    given = rates(t=t, nesterov=momentum == "nesterov", eps_root=eps_root)
    options = reference.Options(momentum=momentum)
    got = jax.jit(exact_weight, static_argnums=5)(g, hi, lo, state, given, options)
    # Terms of an update may cancel, but their rounding errors do not.
    summed = (
        (2 * np.abs(0.9 * m) + np.abs(0.1 * g))
        / (1 - 0.9**t)
        * (1 if momentum == "classic" else 2)
    )
    bound = np.abs(params) + 16 * 0.01 * summed / (
        np.sqrt(after.nu / (1 - 0.95**t) + eps_root) + 1e-8
    )
    bound = np.asarray(bound, np.float64) * 2.0**-22
    assert np.all(
        np.abs(np.asarray(got, np.float64) - np.asarray(params + updates, np.float64))
        <= bound
    )
    assert np.mean(np.abs(updates) > 16 * bound) > 0.95
    # The stored moments lie within a spacing of optax's moments, and the weight within
    # the precision of hi + lo.
    new = step(g, hi, lo, state, given, KEY, momentum=momentum)
    largest = lambda x: np.repeat(
        np.max(np.abs(np.asarray(x).reshape(-1, 128)), 1), 128
    ).reshape(SHAPE)
    assert np.all(
        np.abs(moments.decode_m(*new.moments[:2]) - after.mu)
        <= np.abs(after.mu) / 8 + largest(after.mu) * 2.0**-17
    )
    assert np.all(
        np.abs(moments.decode_v(*new.moments[2:]) - after.nu)
        <= after.nu / 8 + largest(after.nu) * 2.0**-30
    )
    w = np.asarray(got, np.float64) / SCALE
    assert np.all(
        np.abs(weight(new) - w)[np.abs(w) <= 448]
        <= (np.abs(w) * 2.0**-7 + 2.0**-9)[np.abs(w) <= 448]
    )
    assert float(new.amax) == np.max(np.abs(got))


def test_b_is_what_optax_has_after_many_steps():
    """Twenty bits of b2 change what v converges to by less than 2**-11 of it, even for
    b2 = 0.9999.
    """
    for b in (0.9, 0.95, 0.99, 0.999, 0.9999):
        kept = float(reference.Coefficients.of(rates(b1=b)).b1)
        assert abs(kept - b) <= 2.0**-20
        assert int(np.float32(kept).view(np.int32)) % 16 == 0
        assert abs((1 - b) / (1 - kept) - 1) < (2.0**-7 if b > 0.999 else 2.0**-10)


def test_a_change_of_scale_by_binades_changes_no_weight():
    g, hi, lo, state = data()
    options = reference.Options(momentum="nesterov")
    weigh = jax.jit(exact_weight, static_argnums=5)
    expected = weigh(g, hi, lo, state, rates(nesterov=True), options)
    for factor in (0.25, 0.5, 2, 8):
        given = rates(nesterov=True, new_scale=SCALE * factor)
        assert np.array_equal(weigh(g, hi, lo, state, given, options), expected)
        new = step(g, hi, lo, state, given, KEY, momentum="nesterov")
        fits = np.abs(expected) <= 448 * SCALE * factor
        error = np.abs(weight(new) * SCALE * factor - np.asarray(expected, np.float64))
        assert np.all(
            error[fits] <= (np.abs(expected) * 2.0**-7 + SCALE * factor * 2.0**-9)[fits]
        )


@by_option
def test_a_learning_rate_of_zero_changes_no_value(options):
    g, hi, lo, state = data()
    new = step(g, hi, lo, state, rates(lr=0.0), KEY, **options)
    assert np.array_equal(weight(new), weight((hi, lo)))
    assert not same_bits(new.moments, state)


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_a_step_that_is_not_taken_leaves_every_bit(backend):
    g, hi, lo, state = data()
    new = step(
        g.at[5, 7].set(jnp.nan),
        hi,
        lo,
        state,
        rates(keep=False),
        KEY,
        orientation="both",
        backend=backend,
    )
    assert same_bits((new.hi, new.lo, new.moments, new.columns), (hi, lo, state, hi.T))
    assert float(new.amax) == np.max(np.abs(weight((hi, lo)))) * SCALE


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_what_is_not_finite_is_never_a_number_again(bad, backend):
    """A gradient whose square overflows, too; 3e38 alone is finite."""
    g, hi, lo, state = data()
    new = step(g.at[5, 7].set(bad), hi, lo, state, rates(), KEY, backend=backend)
    w = np.asarray(new.hi, np.float32) + np.asarray(new.lo, np.float32)
    assert np.argwhere(np.isnan(w)).tolist() == [[5, 7]]
    for back in (
        moments.decode_m(*new.moments[:2]),
        moments.decode_v(*new.moments[2:]),
    ):
        isnan = np.isnan(np.asarray(back))
        assert np.all(isnan[5, :128]) and np.sum(isnan) == 128
    assert np.isfinite(new.amax)
    after = step(g, *new[:2], new.moments, rates(), KEY, backend=backend)
    assert np.all(np.isnan(np.asarray(after.hi, np.float32)[5, :128]))


def test_lo_keeps_the_mean_of_the_weight():
    """Over many keys, within 4 standard errors: a step far below lo's grid moves the
    weight by its mean.
    """
    g, hi, lo, state = data()
    given = rates(lr=1e-5, decay=0.0)
    exact = (
        np.asarray(
            jax.jit(exact_weight, static_argnums=5)(
                g, hi, lo, state, given, reference.Options()
            )
        )
        / SCALE
    )
    draws = 512

    def values(i):
        new = adamw(g, hi, lo, state, given, jnp.stack(counter.keys(8, i)))
        return new.hi.astype(jnp.float32) + new.lo.astype(jnp.float32) - exact

    errors = np.asarray(
        jax.jit(lambda: jax.lax.map(values, jnp.arange(draws, dtype=jnp.uint32)))(),
        np.float64,
    )
    deviation = errors.std(0)
    moving = deviation > 0
    z = errors.mean(0)[moving] / deviation[moving] * np.sqrt(draws)
    assert np.mean(moving) > 0.9
    assert abs(np.mean(z)) * np.sqrt(z.size) < 4 and abs(np.std(z) - 1) < 0.2


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_lo_and_both_moments_are_rounded_by_bits_of_their_own(backend):
    """Each value lies between two codes, for lo and v right in the middle, and no two
    of the three go up together.
    """
    ones, zeros = jnp.ones(SHAPE), jnp.zeros(SHAPE, E4M3)
    given = rates(
        lr=1.0625, t=1, b1=0.9, b2=0.95, eps=0.0, decay=0.0, scale=1.0, new_scale=1.0
    )
    g = ones * jnp.sqrt(jnp.float32(1.0625 / 0.05))
    new = step(
        g,
        ones.astype(E4M3) * 64,
        zeros,
        Moments.zeros(SHAPE),
        given,
        KEY,
        backend=backend,
    )
    stored = (
        -new.lo.astype(jnp.float32),
        moments.decode_m(*new.moments[:2]),
        moments.decode_v(*new.moments[2:]),
    )
    signs = [np.where(np.asarray(x) > np.mean(x), 1.0, -1.0).ravel() for x in stored]
    assert all(
        len(np.unique(x)) == 2 and abs(np.mean(sign)) < 0.8
        for x, sign in zip(stored, signs)
    )
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(signs[a], signs[b])[0, 1]) < 5 / np.sqrt(ones.size)


# The kernel
# --------------------------------------------------------------------------------------


@pytest.mark.optimized("slow")
@pytest.mark.slow_except(
    f"{OPTIONS[1]}-(64, 128)-bfloat16", f"{OPTIONS[2]}-(32, 256)-float32"
)
@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
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
    run = functools.partial(step, g.astype(dtype), hi, lo, state, given, KEY, **options)
    got = run(backend="triton")
    assert same_bits(got, run(backend="xla"))
    assert (got.columns is None) == ("orientation" not in options)
    if shape == (64, 128):
        # Also outside of a program of its own, where XLA knows every number and folds
        # what it can.
        constant = jax.jit(
            lambda: adamw(
                g.astype(dtype), hi, lo, state, given, KEY, **options, backend="xla"
            )
        )()
        assert same_bits(got, constant)


def test_a_last_block_may_be_short():
    """XLA's alone: its blocks begin at multiples of 128. The first of one row knows
    nothing of the second.
    """
    g, hi, lo, state = jax.tree.map(lambda x: x[:1], data((2, 200), 2))
    new = step(g, hi, lo, state, rates(), KEY)
    part = lambda x: x[:, :128] if x.shape[1] == 200 else x[:, :1]
    first = step(*jax.tree.map(part, (g, hi, lo, state)), rates(), KEY, backend="xla")
    assert same_bits(
        (first.hi, first.lo, first.moments),
        jax.tree.map(part, (new.hi, new.lo, new.moments)),
    )
    with pytest.raises(
        NotImplementedError, match=r"hi\[1, 200\].*multiples of 16 and 128.*pad"
    ):
        adamw(g, hi, lo, state, rates(), KEY, backend="triton")


@pytest.mark.slow_except("xla")
@pytest.mark.optimized("slow")
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_a_stack_under_vmap_and_scan_is_its_matrices(backend):
    parts = [data((16, 128), seed) for seed in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    keys = jnp.stack([jnp.stack(counter.keys(9, i)) for i in range(3)])
    lrs = [0.01, 0.02, 0.0]
    given = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(rates(lr=lr, keep=lr > 0) for lr in lrs)
    )
    one = functools.partial(adamw, orientation="both", backend=backend)
    mapped = jax.jit(jax.vmap(one))(*stack, given, keys)
    scanned = jax.jit(lambda *xs: jax.lax.scan(lambda c, x: (c, one(*x)), None, xs)[1])(
        *stack, given, keys
    )
    assert same_bits(mapped, scanned)
    for i, part in enumerate(parts):
        expected = step(
            *part,
            rates(lr=lrs[i], keep=lrs[i] > 0),
            keys[i],
            orientation="both",
            backend="xla",
        )
        assert same_bits(jax.tree.map(lambda x: x[i], mapped), expected)
    # Rates and key may be shared, and stacks be stacked.
    twice = jax.vmap(jax.vmap(lambda *xs: one(*xs, rates(), KEY)))
    nested = jax.jit(twice)(*jax.tree.map(lambda x: x[None], stack))
    expected = step(*parts[2], rates(), KEY, orientation="both", backend="xla")
    assert same_bits(jax.tree.map(lambda x: x[0, 2], nested), expected)


@pytest.mark.slow_except("P('a', 'b')-xla", "P('a', 'b')-triton")
@pytest.mark.optimized("slow")
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize(
    "spec", [P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))], ids=str
)
def test_every_mesh_has_the_same_bits_and_moves_one_number(spec, backend):
    shape = (128, 1024)  # whole tiles for each of eight devices
    g, hi, lo, state = data(shape, 3)
    expected = step(g, hi, lo, state, rates(), KEY, orientation="both", backend="xla")
    spread = NamedSharding(mesh_of(2, 2), spec)
    operands = jax.device_put((g, hi, lo, state), spread)
    call = jax.jit(functools.partial(adamw, orientation="both", backend=backend))
    compiled = call.lower(*operands, rates(), KEY).compile()
    got = compiled(*operands, rates(), KEY)
    assert same_bits(jax.device_get(got), jax.device_get(expected))
    assert got.hi.sharding.is_equivalent_to(
        spread, 2
    ) and got.moments.v_scale.sharding.is_equivalent_to(spread, 2)
    text = compiled.as_text()
    moved = [
        name
        for name in ("all-gather", "all-to-all", "collective-permute")
        if f" {name}" in text
    ]
    assert not moved, moved


@pytest.mark.parametrize(
    "backend", [pytest.param("xla", marks=pytest.mark.slow), "triton"]
)
def test_layers_of_experts_may_be_split_in_either_axis(backend):
    parts = [data((16, 128), seed) for seed in range(4)]
    stack = jax.tree.map(
        lambda *leaves: jnp.stack(leaves).reshape(2, 2, *leaves[0].shape), *parts
    )
    spread = NamedSharding(mesh_of(1, 2), P(None, "b"))
    one = functools.partial(adamw, orientation="both", backend=backend)
    call = lambda stack, *rest: jax.vmap(jax.vmap(lambda x: one(*x, *rest)))(stack)
    operands = jax.device_put(stack, spread), rates(), jnp.asarray(KEY)
    compiled = jax.jit(call).lower(*operands).compile()
    got = compiled(*operands)
    assert (
        got.hi.sharding.is_equivalent_to(spread, 4)
        and "all-gather" not in compiled.as_text()
    )
    # XLA reads an entry of a split array by a sum, which loses the sign of a zero
    got = jax.device_get(got)
    for i, part in enumerate(parts):
        expected = step(*part, rates(), KEY, orientation="both", backend="xla")
        assert same_bits(
            jax.tree.map(lambda x: x[divmod(i, 2)], got), jax.device_get(expected)
        )


def test_bad_input_says_what_to_do():
    g, hi, lo, state = data()
    good = (g, hi, lo, state, rates(), KEY)
    replaced = lambda i, x: (*good[:i], x, *good[i + 1 :])
    for arguments, error, says in [
        (replaced(0, hi), TypeError, "no scale"),
        (replaced(0, g.astype(jnp.int32)), TypeError, "astype"),
        (replaced(0, g[:16]), ValueError, r"g has shape \[16, 256\]"),
        (replaced(1, g), TypeError, "hi has dtype float32"),
        (
            replaced(2, lo.astype(jnp.float8_e5m2)),
            TypeError,
            "lo has dtype float8_e5m2",
        ),
        (
            replaced(3, state._replace(v=state.v.astype(jnp.int32))),
            TypeError,
            "moments.v has dtype int32",
        ),
        (
            replaced(3, state._replace(m_scale=state.v_scale)),
            TypeError,
            "moments.m_scale has dtype uint8",
        ),
        (
            replaced(3, state._replace(v_scale=state.v_scale[:, :1])),
            ValueError,
            r"\[32, 2\] there",
        ),
        (replaced(4, rates()._replace(b1=0.9)), TypeError, "rates.b1 is 0.9"),
        (
            replaced(4, rates()._replace(keep=jnp.float32(1))),
            TypeError,
            "rates.keep .* bool scalar",
        ),
        (replaced(5, jax.random.key(0)), TypeError, "counter.keys"),
        (
            tuple(x[None] if i < 3 else x for i, x in enumerate(good)),
            ValueError,
            "jax.vmap",
        ),
    ]:
        with pytest.raises(error, match=says):
            adamw(*arguments)
    for option in ("momentum", "orientation", "remainder"):
        with pytest.raises(ValueError, match=f"{option}='heavy' is unknown"):
            adamw(*good, **{option: "heavy"})


@pytest.mark.parametrize(
    ("kind", "capability", "chosen"),
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
    monkeypatch.setattr(dispatch, "compute_capability", lambda: capability)
    reason = IMPLEMENTATIONS[0].decline(reference.Options())
    assert reason is None if chosen else kind in reason


def test_mosaic_says_why_it_cannot_take_a_step(monkeypatch):
    reason = lambda rows: mosaic.reject(
        reference.Options(), *[jnp.ones((rows, 256), jnp.float16)] * 2
    )
    if jax.__version_info__[:2] < plan.SMALLEST_JAX:
        assert "older than 0.11" in reason(64)
        return
    assert "need a GPU" in reason(64)
    for module in (mosaic, dispatch):
        monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA H200")
    for devices, rows, expected in (
        (2, 64, "several devices"),
        (1, 48, "multiples of 32"),
        (1, 64, "g is float16"),
    ):
        monkeypatch.setattr(mosaic, "device_count", lambda devices=devices: devices)
        assert expected in reason(rows)


# Compiled for an H200, without one
# ------------------------------------------------------------------------------------

needs_compiler = [
    pytest.mark.optimized,
    pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing())),
]


def described(mesh, shape, *axes, dtype=jnp.float32):
    on = functools.partial(h200.on, mesh)
    few = (*shape[:-1], shape[-1] // 128)
    state = Moments(
        on(shape, E4M3, *axes),
        on(few, SCALE_DTYPE, *axes),
        on(shape, jnp.uint8, *axes),
        on(few, jnp.uint8, *axes),
    )
    numbers = Rates(
        **{
            name: on((), jnp.bool_ if name == "keep" else jnp.float32)
            for name in Rates._fields
        }
    )
    old = on(shape, E4M3, *axes), on(shape, E4M3, *axes), state
    return old, on(shape, dtype, *axes), numbers, on((2,), jnp.uint32)


def train(old, g, given, key, orientation="rows", mapped=False):
    call = functools.partial(adamw, orientation=orientation)
    if mapped:
        call = jax.vmap(call, in_axes=(0, 0, 0, 0, None, None))
    new = call(g, *old, given, key)
    return (new.hi, new.lo, new.moments), new.columns, new.amax


class TestCompiled:
    pytestmark = needs_compiler

    @pytest.mark.parametrize("orientation", ["rows", "both"])
    @pytest.mark.parametrize("shape", [(4096, 16384), (4, 1024, 4096)], ids=str)
    @pytest.mark.parametrize("engine", ["triton", "mosaic"])
    def test_a_step_is_one_kernel_in_place(
        self, engine, shape, orientation, monkeypatch
    ):
        """Nothing else has a weight's size: no copy of what is donated, of a stack
        neither, and no loop over it.
        """
        if engine == "mosaic":
            if jax.__version_info__[:2] < plan.SMALLEST_JAX:
                pytest.skip("Mosaic's FP8 needs jax 0.11")
            monkeypatch.setattr(
                pallas_triton, "missing", lambda: "Pallas-Triton is gone"
            )
        mesh = h200.h200s(1)
        call = functools.partial(train, orientation=orientation, mapped=len(shape) == 3)
        compiled = h200.compile_for(
            mesh, call, *described(mesh, shape), donate_argnums=0
        )
        assert compiled.targets == [
            {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}[engine]
        ]
        assert not compiled.results("copy") and not compiled.results("while")
        size = np.prod(shape)
        entry = compiled.text.split("ENTRY")[1]
        large = [
            line
            for line in entry.splitlines()
            if " fusion(" in line and f"[{size // 128},128]" in line
        ]
        assert (
            not large
            and len([line for line in entry.splitlines() if " fusion(" in line]) <= 4
        )

    def test_under_a_mesh_each_device_steps_its_part(self):
        mesh = h200.h200s(2, 2)
        compiled = h200.compile_for(
            mesh, train, *described(mesh, (4096, 16384), "a", "b"), donate_argnums=0
        )
        assert compiled.targets == ["__gpu$xla.gpu.triton"]
        assert not compiled.results("all-gather") and not compiled.results("copy")
        assert len(compiled.results("all-reduce")) == 1  # the amax

    def test_each_device_steps_its_experts_of_every_layer(self):
        mesh, twice = (
            h200.h200s(2),
            lambda old, g, *rest: jax.vmap(lambda *xs: train(*xs, *rest, mapped=True))(
                old, g
            ),
        )
        given = described(mesh, (2, 4, 1024, 2048), None, "a")
        compiled = h200.compile_for(mesh, twice, *given, donate_argnums=0)
        assert compiled.targets == ["__gpu$xla.gpu.triton"]
        assert not any(
            compiled.results(name) for name in ("copy", "all-reduce", *h200.GATHERS)
        )
