"""`low_precision_moments`: any optax transformation, the formats of its moments, and
their bits.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from optax import contrib

from pallas_kernels import counter
from tcfp_jax import optim
from tcfp_jax.optim.encoding import (
    Blocks,
    _blocked_shape,
    decode,
    encode,
    narrow_leaves,
    stream,
    zeros,
)
from tests.helpers import (
    assert_close,
    decibels,
    drawn,
    mesh_of,
    nnx_model,
    parametrize,
    placed,
    refusals,
    refused,
    same_bits,
    slow_except,
)
from tests.optim.zoo import (
    GRADS,
    KEY,
    PARAMS,
    TRANSFORMATIONS,
    distance,
    stepped,
    stored_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
EIGHT_BITS = functools.partial(optim.low_precision_moments, key=KEY)
RANDOM = stream(jnp.uint32([1, 2]), 3, 4)


def formats_of(state):
    """The dtypes that are stored of the large kernel, by field."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        field, kernel, _ = jax.tree_util.keystr(path).partition("['up']['kernel']")
        if kernel:
            found[field.split(".")[-1]] = str(leaf.dtype)
    return found


# Transformations
# --------------------------------------------------------------------------------------
M = "float8_e4m3fn"
V = "uint8"
F = "float32"
BOTH = {"mu": M, "nu": V}
ADAFACTOR = {"ema": "mu", "v": "nu"}
FIRST = {"up": True, "small": True, "embed": False}
# The formats of fields, by their names.
FORMATS = {
    **dict.fromkeys(TRANSFORMATIONS, BOTH),
    "momentum": {"trace": M},
    "lion": {"mu": M},
    "factored": {"ema": M, "v": F},
    "steps": {**BOTH, "acc_grads": F},
    "muon": {"mu": M},
    "unfactored": {"ema": M, "v": V},
    "masked by tree": BOTH,
    "rmsprop": {**BOTH, "trace": M},
    "adan": {"m": M, "v": M, "n": V, "g": F},
    "amsgrad": {**BOTH, "nu_max": F},
    "sm3": {"nu": M},
    "schedule free": {"nu": V, "z": F},
}
MORE = {
    "unfactored": optax.adafactor(1e-2, momentum=0.9, factored=False),
    "masked by tree": optax.masked(optax.adamw(1e-2), FIRST),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "adan": optax.adan(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "sm3": optax.sm3(1e-2),
    "schedule free": contrib.schedule_free_adamw(1e-2),
}
FIELDS = {
    "momentum": {"trace": "mu"},
    "factored": ADAFACTOR,
    "unfactored": ADAFACTOR,
    "rmsprop": {"trace": "mu"},
    "adan": {"m": "mu", "v": "mu", "n": "nu"},
    "sm3": {"nu": "mu"},
}


@slow_except("adamw", "lion")
@parametrize("name", FORMATS)
def test_any_transformation(name):
    tx = (TRANSFORMATIONS | MORE)[name]
    exact, _ = stepped(tx)
    rounded, state = stepped(EIGHT_BITS(tx, fields=FIELDS.get(name, {})))
    assert formats_of(state.inner).items() >= FORMATS[name].items()
    # Their moments stay float32, but another program may contract other products
    for path in ("small", "embed"):
        assert_close(rounded[path], exact[path], 2e-4, 1e-6)
    # m's rounding error is at most 2**-4 / sqrt(3) of m. Lion and Muon read signs,
    # which turn if m is nearly zero.
    far = distance(exact, rounded, PARAMS, "up", "kernel")
    assert far < 0.1
    # a sign alone; z in float32, and v hardly moves
    if name not in ("lion", "schedule free"):
        assert far > 1e-3


@slow_except("bfloat16-bfloat16")
@parametrize(
    "mu, nu",
    [("bfloat16", "bfloat16"), (jnp.float32, "ue5m3"), (jnp.float8_e4m3fn, "float32")],
)
def test_formats(mu, nu):
    exact, _ = stepped(optax.adam(1e-2))
    rounded, state = stepped(EIGHT_BITS(optax.adam(1e-2), mu=mu, nu=nu))
    wanted = {"mu": jnp.dtype(mu).name, "nu": V if nu == "ue5m3" else nu}
    assert formats_of(state.inner) == wanted
    bound = 0.0056 if mu == "bfloat16" else 0.056
    assert distance(exact, rounded, PARAMS, "up", "kernel") < bound


def test_float32_is_the_transformation_itself():
    tx = optim.low_precision_moments(optax.adam(1e-2), mu="float32", nu="float32")
    exact, state = stepped(optax.adam(1e-2))
    same, wrapped = stepped(tx)
    assert same_bits((exact, state), (same, wrapped.inner))
    assert wrapped.key is None


def other(name):
    """A transformation of another package, with a field that has a sign."""

    def init(params):
        return {name: jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        return updates, {name: jax.tree.map(jnp.add, state[name], updates)}

    return optax.GradientTransformation(init, update)


@parametrize("role, dtype", [("mu", M), ("float32", "float32")])
def test_a_field_of_another_name_has_the_role_that_you_say(role, dtype):
    _, state = stepped(EIGHT_BITS(other("average"), fields={"average": role}))
    assert state.inner["average"]["up"]["kernel"].dtype == dtype


def test_a_sign_where_none_can_be_is_loud():
    _, state = stepped(EIGHT_BITS(other("nu")))
    codes = state.inner["nu"]["up"]
    stored = Blocks(codes["kernel"], state.scales["nu"]["up"]["kernel"])
    assert np.isnan(decode(stored)).all()
    assert np.isfinite(codes["bias"]).all()


def test_path_and_global_shape_say_which_leaves_stay_float32():
    params = {
        "kernel": jnp.zeros((64, 64)),
        "few": jnp.zeros((64, 63)),
        "line": jnp.zeros(8192),
        "token_embedding": {"kernel": jnp.zeros((64, 128))},
        "Embed_0": {"w": jnp.zeros((64, 128))},
        "tall": jnp.zeros((4096, 1)),
    }
    narrow = dict(zip(sorted(params), narrow_leaves(params), strict=True))
    assert [key for key in narrow if narrow[key]] == ["kernel", "tall"]

    def stored(mask):
        state = EIGHT_BITS(optax.adam(0.1), mask=mask).init(params)
        moments = state.inner[0].mu
        found = [key for key in ("kernel", "tall") if moments[key].dtype == M]
        assert list(state.scales["0"]["nu"]) == found
        return found

    def is_tall(tree):
        return jax.tree.map(lambda leaf: leaf.shape[-1] == 1, tree)

    assert stored({**dict.fromkeys(params, True), "tall": False}) == ["kernel"]
    assert stored(is_tall) == ["tall"]


def test_stored_parameters_have_narrow_moments():
    tx = optim.on_stored(EIGHT_BITS(optax.adamw(1e-2)))
    params = stored_of(PARAMS)
    state = tx.init(params)
    assert formats_of(state.inner.inner) == BOTH
    updates, _ = jax.jit(tx.update)(GRADS, state, params)
    assert updates["up"]["kernel"].shape == (64, 128)


def test_bytes_of_moments():
    state = EIGHT_BITS(optax.adamw(1e-2)).init({"up": PARAMS["up"]})
    moments = [tree["up"]["kernel"] for tree in state.inner[0][1:]]
    stored = jax.tree.leaves((moments, state.scales))
    assert sum(leaf.nbytes for leaf in stored) == 2 * 64 * 128 + 2 * 64


BY_BOTH = parametrize(
    "tx",
    [EIGHT_BITS(optax.adamw(1e-2)), optim.adamw(1e-2, key=KEY)],
    ids=["any", "adamw"],
)


@BY_BOTH
def test_optax_finds_the_copies_of_the_parameters(tx):
    shapes = jax.tree.map(lambda leaf: str(leaf.shape), PARAMS)
    state = jax.eval_shape(tx.init, PARAMS)
    marked = optax.tree_utils.tree_map_params(tx, lambda _, shape: shape, state, shapes)
    adam = marked.inner[0] if hasattr(marked, "inner") else marked
    assert adam.mu == adam.nu == shapes
    assert not isinstance(marked.count, str)


@BY_BOTH
def test_parameters_in_boxes(tx):
    model = nnx_model(functools.partial(_linear, 64, 128))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = drawn(4, 64)

    @nnx.jit
    def train(model, optimizer):
        loss = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))
        value, gradients = loss(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(train(model, optimizer)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(optimizer))}
    assert dtypes >= {M, V}


def _linear(inputs, outputs, rngs):
    return nnx.Linear(inputs, outputs, rngs=rngs)


# Numbers
# --------------------------------------------------------------------------------------
EVERY_FORM = parametrize("form", [M, "ue5m3", "bfloat16"])


@parametrize("shape", [(512, 3, 16), (8192, 1), (5, 7, 130)], ids=str)
@EVERY_FORM
def test_blocks_of_any_shape(shape, form):
    x = drawn(*shape)
    if form == "ue5m3":
        x = x * x
    stored = encode(form, x, RANDOM)
    if form != "bfloat16":
        *leading, last = _blocked_shape(shape)
        assert stored.values.shape == shape
        assert stored.scale.shape == (*leading, -(-last // 128))
    assert decibels(x, decode(stored)) > (48 if form == "bfloat16" else 27)


@EVERY_FORM
def test_rounding_is_unbiased(form):
    rng = np.random.default_rng(0)
    x = np.exp2(rng.uniform(-20, 0, (1, 128))).astype(np.float32)
    if form != "ue5m3":
        x = x * rng.choice([-1, 1], x.shape)
    x = jnp.asarray(x, jnp.float32)
    n = 2**14

    @jax.jit
    def sums():
        def error(i):
            return decode(encode(form, x, counter.keys(7, i))) - x

        errors = jax.lax.map(error, jnp.arange(n, dtype=jnp.uint32), batch_size=256)
        scaled = errors / jnp.abs(x)
        return scaled.mean(0), scaled.std(0)

    mean, deviation = (np.asarray(v, np.float64) for v in sums())
    standard = deviation / np.sqrt(n)
    # Among 128 values, four standard errors occur now and then
    assert (np.abs(mean) <= 4.5 * standard + 1e-6).all()
    assert np.sqrt(np.mean((mean / np.where(standard == 0, 1, standard)) ** 2)) < 1.3
    assert (deviation > 0).mean() > 0.9


@parametrize("b2", [0.95, 0.999])
def test_the_average_of_squares_follows_a_drop_of_the_gradient(b2):
    params = {"kernel": jnp.zeros((64, 64))}
    after = int(3 / (1 - b2))

    @functools.partial(jax.jit, static_argnums=0)
    def run(tx):
        def step(state, g):
            grads = {"kernel": jnp.full((64, 64), g)}
            return tx.update(grads, state)[1], None

        sizes = jnp.repeat(
            jnp.float32([1.0, 0.1]), after, total_repeat_length=2 * after
        )
        return jax.lax.scan(step, tx.init(params), sizes)[0]

    tx = optax.scale_by_rms(decay=b2)
    exact = run(tx).nu["kernel"]
    rounded = run(EIGHT_BITS(tx))
    stored = Blocks(rounded.inner.nu["kernel"], rounded.scales["nu"]["kernel"])
    v = decode(stored)
    assert abs(float(v.mean()) / float(exact.mean()) - 1) < 0.02
    assert (v > 0).all()


def test_bits_depend_on_key_step_and_leaf():
    kernel = jnp.ones((64, 64))
    params = {"a": kernel, "b": kernel}
    grads = dict.fromkeys(params, drawn(64, 64))

    def state_of(key):
        tx = EIGHT_BITS(optax.sgd(0.1, 0.5), key=key, fields={"trace": "mu"})
        return stepped(tx, params, grads=grads)[1]

    state = state_of(KEY)
    trace = state.inner[0].trace
    scales = state.scales["0"]["trace"]
    assert not same_bits(trace["a"], trace["b"])
    assert same_bits(scales["a"], scales["b"])
    assert same_bits(state, state_of(KEY))
    other_key = state_of(jax.random.key(4))
    assert not same_bits(trace["a"], other_key.inner[0].trace["a"])
    words = [stream(jnp.uint32([1, 2]), step, 0) for step in (1, 2)]
    assert not same_bits(*words)


@slow_except("P(None, ('a', 'b'))")
@parametrize("spec", [P("a"), P(None, "a"), P(None, ("a", "b"))], ids=str)
@pytest.mark.optimized("slow")
def test_bits_are_the_same_on_every_mesh(spec):
    @jax.jit
    def stored(x):
        return [encode(form, x * x, RANDOM) for form in ("ue5m3", M, "bfloat16")]

    x = drawn(64, 320)
    assert same_bits(stored(x), stored(placed(x, mesh_of(2, 2), *spec)))


@parametrize("form", ["float32", "bfloat16", M, "ue5m3"])
@parametrize("shape", [(64, 200), (16, 8, 32)])
def test_zeros_are_rounded_zeros(form, shape):
    wanted = encode(form, jnp.zeros(shape), RANDOM)
    assert same_bits(zeros(form, jnp.ones(shape)), wanted)


def test_the_largest_floats_stay_finite_in_bfloat16():
    """Most of them lie above its largest number, to which they would be rounded up."""
    largest = jnp.finfo(jnp.float32).max
    x = jnp.tile(jnp.float32([largest, -largest, jnp.inf, jnp.nan]), 64)
    found = np.asarray(encode("bfloat16", x, RANDOM), np.float32).reshape(-1, 4)
    assert (np.abs(found[:, :2]) == np.float32(jnp.finfo(jnp.bfloat16).max)).all()
    assert np.isinf(found[:, 2]).all()
    assert np.isnan(found[:, 3]).all()


# Mistakes
# --------------------------------------------------------------------------------------
REASONS = {"mu": "needs a sign", "nu": "code for zero"}
CANNOT_HOLD = [
    ("mu", "ue5m3"),
    ("mu", "float8_e5m2"),
    ("mu", "float16"),
    ("mu", "int8"),
    ("mu", "float8_e8m0fnu"),
    ("mu", "float4_e2m1fn"),
    ("mu", "float64"),
    ("mu", "mxfp8"),
    ("nu", "float8_e4m3fn"),
    ("nu", "float8_e5m2"),
    ("nu", ml_dtypes.float8_e3m4),
    ("nu", "float16"),
]


@parametrize("role, form", CANNOT_HOLD, ids=str)
def test_formats_that_cannot_hold_moments(role, form):
    message = rf"{role}=.*{REASONS[role]}.*use one of.*float32"
    with refused(message):
        EIGHT_BITS(optax.adam(0.1), **{role: form})


def init(tx=optax.adam(0.1), **options):
    EIGHT_BITS(tx, **options).init(PARAMS)


test_contradictions = refusals(
    {
        ValueError: {
            "key=jax.random.key": lambda: init(key=None),
            "rounds nothing.*drop the key": lambda: init(mu="float32", nu="float32"),
            "keeps nothing that mirrors the parameters": lambda: init(
                tx=optax.sgd(0.1)
            ),
            "the role is unknown": lambda: init(fields={"mu": "signed"}),
            r"\['momentum'\].*has the fields \['mu', 'nu'\]": lambda: init(
                fields={"momentum": "mu"}
            ),
            r"no field is named mu or nu among \['average'\].*\{'average': \"mu\"\}": (
                lambda: init(tx=other("average"))
            ),
            "mask must be a tree of bools": lambda: init(mask={"other": True}),
        },
    }
)
