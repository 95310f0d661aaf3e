"""`low_precision_moments`: any optax transformation, the formats of its moments, and
their bits.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
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
from tests.helpers import decibels, filled, mesh_of, nnx_model, same_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")
SHAPES = {
    "layer": {"kernel": (64, 128), "bias": (128,)},
    "small": {"kernel": (32, 32)},
    "embed": {"table": (64, 128)},
}
PARAMS = filled(
    jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"),
        SHAPES,
        is_leaf=lambda s: type(s) is tuple,
    )
)
GRADS = filled(PARAMS, seed=1)
LABELS = {"layer": "adam", "small": "sgd", "embed": "sgd"}
KEY = jax.random.key(3)
EIGHT_BITS = functools.partial(optim.low_precision_moments, key=KEY)


def steps(tx, n=4, params=PARAMS, grads=GRADS):
    """(the sum of n updates, the state after them), in one program."""

    @jax.jit
    def run(grads):
        def one(carry, _):
            total, state = carry
            updates, state = tx.update(grads, state, params)
            return (jax.tree.map(jnp.add, total, updates), state), None

        start = jax.tree.map(jnp.zeros_like, params), tx.init(params)
        return jax.lax.scan(one, start, length=n)[0]

    return run(grads)


def formats_of(state):
    """The dtypes that are stored of the large kernel, by field."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path)
        if "['layer']['kernel']" in name:
            found[name.split("['layer']")[0].split(".")[-1]] = str(leaf.dtype)
    return found


def matrices(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


M, V, F = "float8_e4m3fn", "uint8", "float32"
PARTS = {"adam": optax.adamw(1e-2), "sgd": optax.sgd(0.1, 0.9)}
FIRST = {"layer": True, "small": True, "embed": False}
SCHEDULE = optax.linear_schedule(1e-2, 0, 9)
ADAFACTOR = functools.partial(optax.adafactor, 1e-2, momentum=0.9)
BOTH = {"mu": M, "nu": V}
# For each name: the transformation, `fields`, and the formats of its fields.
TRANSFORMATIONS = {
    "adamw": (optax.adamw(1e-2), {}, BOTH),
    "momentum": (optax.sgd(0.1, 0.9), {"trace": "mu"}, {"trace": M}),
    "lion": (optax.lion(1e-3), {}, {"mu": M}),
    "adafactor": (
        ADAFACTOR(factored=False),
        {"ema": "mu", "v": "nu"},
        {"ema": M, "v": V},
    ),
    "factored": (
        ADAFACTOR(min_dim_size_to_factor=64),
        {"ema": "mu", "v": "nu"},
        {"ema": M, "v": F},
    ),
    "steps": (optax.MultiSteps(optax.adamw(1e-2), 2), {}, {**BOTH, "acc_grads": F}),
    "masked": (optax.masked(optax.adamw(1e-2), FIRST), {}, BOTH),
    "masked by function": (optax.masked(optax.adam(1e-2), matrices), {}, BOTH),
    "partition": (optax.partition(PARTS, LABELS), {}, BOTH),
    "injected": (optax.inject_hyperparams(optax.adamw)(SCHEDULE), {}, BOTH),
    "chain": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
        {},
        BOTH,
    ),
    "muon": (contrib.muon(1e-2), {}, {"mu": M}),
    "rmsprop": (
        optax.rmsprop(1e-2, centered=True, momentum=0.9),
        {"trace": "mu"},
        {**BOTH, "trace": M},
    ),
    "adan": (
        optax.adan(1e-2),
        {"m": "mu", "v": "mu", "n": "nu"},
        {"m": M, "v": M, "n": V, "g": F},
    ),
    "amsgrad": (optax.amsgrad(1e-2), {}, {**BOTH, "nu_max": F}),
    "sm3": (optax.sm3(1e-2), {"nu": "mu"}, {"nu": M}),
    "schedule free": (contrib.schedule_free_adamw(1e-2), {}, {"nu": V, "z": F}),
}


@pytest.mark.slow_except("adamw", "lion")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_any_transformation(name):
    tx, fields, expected = TRANSFORMATIONS[name]
    exact, _ = steps(tx)
    rounded, state = steps(EIGHT_BITS(tx, fields=fields))
    found = formats_of(state.inner)
    assert {field: found[field] for field in expected} == expected
    # Their moments stay float32, but another program may contract other products
    for path in ("small", "embed"):
        for a, b in zip(
            jax.tree.leaves(exact[path]), jax.tree.leaves(rounded[path]), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    a, b = (
        np.asarray(tree["layer"]["kernel"], np.float64) for tree in (exact, rounded)
    )
    # m's rounding error is at most 2**-4 / sqrt(3) of m. Lion and Muon read signs,
    # which turn if m is nearly zero.
    assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(a)
    # a sign alone; z in float32, and v hardly moves
    if name not in ("lion", "schedule free"):
        assert np.linalg.norm(a - b) > 1e-3 * np.linalg.norm(a)


@pytest.mark.slow_except("bfloat16-bfloat16")
@pytest.mark.parametrize(
    "mu, nu",
    [("bfloat16", "bfloat16"), (jnp.float32, "ue5m3"), (jnp.float8_e4m3fn, "float32")],
)
def test_formats(mu, nu):
    exact, _ = steps(optax.adam(1e-2))
    rounded, state = steps(EIGHT_BITS(optax.adam(1e-2), mu=mu, nu=nu))
    names = {"ue5m3": "uint8"}
    expected = {"mu": jnp.dtype(mu).name, "nu": names.get(nu, nu)}
    assert formats_of(state.inner) == expected
    a, b = (tree["layer"]["kernel"] for tree in (exact, rounded))
    assert decibels(a, b) > (45 if mu == "bfloat16" else 25)


def test_float32_is_the_transformation_itself():
    tx = optim.low_precision_moments(optax.adam(1e-2), mu="float32", nu="float32")
    exact, state = steps(optax.adam(1e-2))
    same, wrapped = steps(tx)
    assert (
        same_bits(exact, same)
        and same_bits(state, wrapped.inner)
        and wrapped.key is None
    )


REFUSED = {
    "mu": (
        "ue5m3",
        "float8_e5m2",
        "float16",
        "int8",
        "float8_e8m0fnu",
        "float4_e2m1fn",
        "float64",
        "mxfp8",
    ),
    "nu": ("float8_e4m3fn", "float8_e5m2", ml_dtypes.float8_e3m4, "float16"),
}


@pytest.mark.parametrize(
    "role, reason", [("mu", "needs a sign"), ("nu", "code for zero")]
)
def test_formats_that_cannot_hold_moments(role, reason):
    message = rf"{role}=.*{reason}.*use one of.*float32"
    for name in REFUSED[role]:
        with pytest.raises(ValueError, match=message):
            EIGHT_BITS(optax.adam(0.1), **{role: name})


CONTRADICTIONS = [
    ({"key": None}, "key=jax.random.key"),
    ({"mu": "float32", "nu": "float32"}, "rounds nothing.*drop the key"),
    ({"tx": optax.sgd(0.1)}, "keeps nothing that mirrors the parameters"),
    ({"fields": {"mu": "signed"}}, "the role is unknown"),
    (
        {"fields": {"momentum": "mu"}},
        r"\['momentum'\].*has the fields \['mu', 'nu'\]",
    ),
    ({"mask": {"other": True}}, "mask must be a tree of bools"),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS, ids=str)
def test_contradictions(options, message):
    options = {"tx": optax.adam(0.1), "key": KEY, **options}
    with pytest.raises(ValueError, match=message):
        optim.low_precision_moments(**options).init(PARAMS)


def other(name):
    """A transformation of another package, with a field that has a sign."""
    return optax.GradientTransformation(
        lambda params: {name: jax.tree.map(jnp.zeros_like, params)},
        lambda updates, state, params=None: (
            updates,
            {name: jax.tree.map(jnp.add, state[name], updates)},
        ),
    )


def test_a_field_of_another_name_has_the_role_that_you_say():
    message = r"no field is named mu or nu among \['average'\].*\{'average': \"mu\"\}"
    with pytest.raises(ValueError, match=message):
        EIGHT_BITS(other("average")).init(PARAMS)
    for role, dtype in (("mu", jnp.float8_e4m3fn), ("float32", jnp.float32)):
        _, state = steps(EIGHT_BITS(other("average"), fields={"average": role}))
        assert state.inner["average"]["layer"]["kernel"].dtype == dtype


def test_a_sign_where_none_can_be_is_loud():
    _, state = steps(EIGHT_BITS(other("nu")))
    stored = Blocks(
        *(tree["nu"]["layer"]["kernel"] for tree in (state.inner, state.scales))
    )
    assert np.isnan(decode(stored)).all()
    assert np.isfinite(state.inner["nu"]["layer"]["bias"]).all()


def test_what_stays_float32_depends_on_path_and_global_shape():
    params = {
        "kernel": jnp.zeros((64, 64)),
        "few": jnp.zeros((64, 63)),
        "line": jnp.zeros(8192),
        "token_embedding": {"kernel": jnp.zeros((64, 128))},
        "Embed_0": {"w": jnp.zeros((64, 128))},
        "tall": jnp.zeros((4096, 1)),
    }
    keys = sorted(params)
    narrow = dict(zip(keys, narrow_leaves(params), strict=True))
    assert [key for key in keys if narrow[key]] == ["kernel", "tall"]
    state = EIGHT_BITS(
        optax.adam(0.1), mask={**dict.fromkeys(params, True), "tall": False}
    ).init(params)
    stored = [
        key
        for key in keys
        if getattr(state.inner[0].mu[key], "dtype", None) == jnp.float8_e4m3fn
    ]
    assert stored == ["kernel"] == list(state.scales["0"]["mu"])
    by_function = EIGHT_BITS(
        optax.adam(0.1),
        mask=lambda tree: jax.tree.map(lambda x: x.shape[-1] == 1, tree),
    )
    assert list(by_function.init(params).scales["0"]["nu"]) == ["tall"]


@pytest.mark.parametrize("shape", [(512, 3, 16), (8192, 1), (5, 7, 130)], ids=str)
@pytest.mark.parametrize("form", ["float8_e4m3fn", "ue5m3", "bfloat16"])
def test_blocks_of_any_shape(shape, form):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x = x * x if form == "ue5m3" else x
    stored = encode(form, jnp.asarray(x), stream(jnp.uint32([1, 2]), 0, 0))
    if form != "bfloat16":
        *leading, last = _blocked_shape(shape)
        assert stored.values.shape == shape and stored.scale.shape == (
            *leading,
            -(-last // 128),
        )
    assert decibels(x, decode(stored)) > (48 if form == "bfloat16" else 27)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "ue5m3", "bfloat16"])
def test_rounding_is_unbiased(form):
    rng = np.random.default_rng(0)
    x = np.exp2(rng.uniform(-20, 0, (1, 128))).astype(np.float32)
    if form != "ue5m3":
        x = x * rng.choice([-1, 1], x.shape)
    n = 2**14

    @jax.jit
    def sums(x):
        rounded = lambda i: decode(encode(form, x, counter.keys(7, i))) - x
        errors = jax.lax.map(rounded, jnp.arange(n, dtype=jnp.uint32), batch_size=256)
        scaled = errors / jnp.abs(x)
        return scaled.mean(0), scaled.std(0)

    mean, deviation = (np.asarray(v, np.float64) for v in sums(jnp.asarray(x)))
    standard = deviation / np.sqrt(n)
    # Among 128 values, four standard errors occur now and then
    assert (np.abs(mean) <= 4.5 * standard + 1e-6).all()
    assert np.sqrt(np.mean((mean / np.where(standard == 0, 1, standard)) ** 2)) < 1.3
    assert (deviation > 0).mean() > 0.9


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_the_average_of_squares_follows_a_drop_of_the_gradient(b2):
    tx, params = optax.scale_by_rms(decay=b2), {"kernel": jnp.zeros((64, 64))}
    low = optim.low_precision_moments(tx, key=KEY)
    after = int(3 / (1 - b2))

    @jax.jit
    def run():
        def pair(state, g):
            grads = {"kernel": jnp.full((64, 64), g)}
            return (tx.update(grads, state[0])[1], low.update(grads, state[1])[1]), None

        state = tx.init(params), low.init(params)
        state, _ = jax.lax.scan(pair, state, jnp.full(after, 1.0))
        state, _ = jax.lax.scan(pair, state, jnp.full(after, 0.1))
        return state

    exact, rounded = run()
    v = decode(Blocks(rounded.inner.nu["kernel"], rounded.scales["nu"]["kernel"]))
    assert abs(float(v.mean()) / float(exact.nu["kernel"].mean()) - 1) < 0.02
    assert (v > 0).all()


MOMENTUM = EIGHT_BITS(optax.sgd(0.1, 0.5), fields={"trace": "mu"})


def test_bits_depend_on_key_step_and_leaf():
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 64))}
    grads = {name: GRADS["layer"]["kernel"].reshape(128, 64)[:64] for name in params}
    _, state = steps(MOMENTUM, params=params, grads=grads)
    trace = state.inner[0].trace
    assert not same_bits(trace["a"], trace["b"])
    assert same_bits(state.scales["0"]["trace"]["a"], state.scales["0"]["trace"]["b"])
    _, again = steps(MOMENTUM, params=params, grads=grads)
    assert same_bits(state, again)
    _, other_key = steps(
        EIGHT_BITS(optax.sgd(0.1, 0.5), key=jax.random.key(4), fields={"trace": "mu"}),
        params=params,
        grads=grads,
    )
    assert not same_bits(trace["a"], other_key.inner[0].trace["a"])
    keys = [stream(jnp.uint32([1, 2]), step, 0) for step in (1, 2)]
    assert len({tuple(int(word) for word in key) for key in keys}) == 2


@pytest.mark.slow_except("P(None, ('a', 'b'))")
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, ("a", "b"))], ids=str)
@pytest.mark.optimized("slow")
def test_bits_are_the_same_on_every_mesh(spec):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 320)), jnp.float32)
    stored = jax.jit(
        lambda x: [
            encode(form, x * x, stream(jnp.uint32([1, 2]), 3, 4))
            for form in ("ue5m3", M, "bfloat16")
        ]
    )
    alone = stored(x)
    mesh = mesh_of(2, 2)
    assert same_bits(alone, stored(jax.device_put(x, NamedSharding(mesh, spec))))


def test_bytes_donation_and_checkpoints(tmp_path):
    tx = EIGHT_BITS(optax.adamw(1e-2))
    params = {"layer": PARAMS["layer"]}
    grads = {"layer": GRADS["layer"]}
    update = jax.jit(tx.update, donate_argnums=1)
    state = tx.init(params)
    stored = (
        state.inner[0].mu["layer"]["kernel"],
        state.inner[0].nu["layer"]["kernel"],
        state.scales,
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) == 2 * 64 * 128 + 2 * 64
    for _ in range(2):
        _, state = update(grads, state, params)
    kept = jax.tree.map(jnp.copy, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(
            tmp_path / "state", jax.eval_shape(lambda: kept)
        )
    assert same_bits(kept, restored)
    _, one = update(grads, kept, params)
    _, two = update(grads, restored, params)
    assert same_bits(one, two) and int(one.count) == 3
    tx.init(params)  # the key of the donated state was its own


def test_stored_parameters():
    params = optim.store({"layer": PARAMS["layer"]}, "tcfp12_single", key=KEY)
    grads = {"layer": GRADS["layer"]}
    tx = optim.on_stored(EIGHT_BITS(optax.adamw(1e-2)))
    state = tx.init(params)
    assert formats_of(state.inner.inner) == {"mu": M, "nu": V}
    updates, state = jax.jit(tx.update)(grads, state, params)
    assert updates["layer"]["kernel"].shape == (64, 128)
    broken = {"layer": {**grads["layer"], "bias": jnp.full(128, jnp.nan)}}
    _, after = jax.jit(tx.update)(broken, state, params)
    assert same_bits(after.inner, state.inner) and int(after.skipped) == 1


@pytest.mark.parametrize(
    "tx",
    [EIGHT_BITS(optax.adam(1e-2)), optim.adamw(1e-2, key=KEY)],
    ids=["any", "adamw"],
)
def test_optax_finds_the_copies_of_the_parameters(tx):
    shapes = jax.tree.map(lambda leaf: str(leaf.shape), PARAMS)
    marked = optax.tree_utils.tree_map_params(
        tx, lambda leaf, shape: shape, jax.eval_shape(tx.init, PARAMS), shapes
    )
    adam = marked.inner[0] if hasattr(marked, "inner") else marked
    assert adam.mu == adam.nu == shapes and not isinstance(marked.count, str)


@pytest.mark.parametrize(
    "tx",
    [EIGHT_BITS(optax.adamw(1e-2)), optim.adamw(1e-2, key=KEY)],
    ids=["any", "adamw"],
)
def test_parameters_in_boxes(tx):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(64, 128, rngs=rngs)

    model = nnx_model(Model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)

    @nnx.jit
    def train(model, optimizer):
        value, gradients = nnx.value_and_grad(
            lambda model: jnp.mean(model.layer(x) ** 2)
        )(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(train(model, optimizer)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    state = jax.tree.leaves(nnx.state(optimizer))
    assert {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8)} <= {
        leaf.dtype for leaf in state
    }


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float8_e4m3fn", "ue5m3"])
@pytest.mark.parametrize("shape", [(64, 200), (16, 8, 32)])
def test_zeros_are_what_rounding_makes_of_zeros(form, shape):
    word = jnp.uint32(3)
    wanted = encode(form, jnp.zeros(shape), (word, word))
    assert same_bits(zeros(form, jnp.ones(shape)), wanted)


def test_the_largest_floats_stay_finite_in_bfloat16():
    """Most of them lie above its largest number, to which they would be rounded up."""
    largest = np.float32(jnp.finfo(jnp.float32).max)
    x = jnp.tile(jnp.array([largest, -largest, jnp.inf, jnp.nan]), 64)
    found = np.asarray(
        encode("bfloat16", x, stream(jnp.uint32([1, 2]), 3, 4)), np.float32
    ).reshape(-1, 4)
    assert (np.abs(found[:, :2]) == np.float32(jnp.finfo(jnp.bfloat16).max)).all()
    assert np.isinf(found[:, 2]).all() and np.isnan(found[:, 3]).all()
