"""The update of layers inside the backward pass: the bits of the ordinary step, and
what it refuses.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import tcfp_jax
from tcfp_jax.conversion import find_weights
from tcfp_jax.remat import step_bytes
from tests.helpers import (
    drawn,
    parametrize,
    placed,
    refused,
    same_bits,
    slow,
    slow_except,
)
from tests.inside_cases import (
    CASES,
    KEY,
    LAYERS,
    RECIPE,
    X,
    plain,
    product,
    stack,
    store,
)

# XLA's attention promotes dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")
TX = tcfp_jax.optim.adamw(1e-3, key=KEY)
CLIPS = tcfp_jax.optim.adamw(1e-3, key=KEY, max_norm=0.01)


# XLA keeps some sums of a table's two gradients in float32, in one program and not in
# the other.
EXACT = {"xla_allow_excess_precision": False}


def ordinary(loss, tx=TX):
    @functools.partial(jax.jit, compiler_options=EXACT)
    def step(params, opt_state, batch):
        value, gradients = tcfp_jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return tcfp_jax.apply_updates(params, updates), opt_state, value, gradients

    return step


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


@slow_except("plain")
@parametrize("name", CASES)
def test_two_steps_have_the_bits_of_ordinary_ones(name):
    case = CASES[name]()
    before = ordinary(case.loss)
    step = tcfp_jax.train_step(case.loss, TX)
    params = case.params
    opt_state = TX.init(params)
    state = step.init(copied(params))
    exact = jax.jit(step, compiler_options=EXACT)
    for _ in range(2):
        params, opt_state, value, _ = before(params, opt_state, case.batch)
        state, metrics = exact(state, case.batch)
        assert metrics.loss == value
    assert same_bits((state.params, state.opt_state), (params, opt_state))
    stacks = [path for path, kept in metrics.skipped.items() if kept.ndim]
    assert stacks
    assert set(case.inside) <= set(metrics.skipped)
    old = jax.tree.leaves(case.params)
    changed = [
        not np.array_equal(one, other)
        for one, other in zip(old, jax.tree.leaves(state.params), strict=True)
        if one.dtype == jnp.float8_e4m3fn
    ]
    assert all(changed)


def test_both_steps_go_on_where_the_other_stopped():
    case = plain()
    before = ordinary(case.loss)
    step = tcfp_jax.train_step(case.loss, TX)
    first = before(case.params, TX.init(case.params), X)
    wanted = before(*first[:2], X)[:2]
    state, _ = step(step.state(*copied(first[:2])), X)
    assert same_bits((state.params, state.opt_state), wanted)
    state, _ = step(step.init(copied(case.params)), X)
    assert same_bits(before(state.params, state.opt_state, X)[:2], wanted)


def poisoned(at):
    """A loss whose gradient is NaN at a layer and below; its value is finite."""

    @jax.custom_vjp
    def spoil(x, bad):
        return x

    def backward(bad, g):
        return jnp.where(bad, jnp.nan, g), None

    spoil.defvjp(lambda x, bad: (x, bad), backward)

    def loss(params, x):
        @jax.checkpoint
        def layer(x, given):
            kernel, number = given
            return spoil(x + product(x, kernel), number == at), None

        x, _ = jax.lax.scan(layer, x, (params["kernel"], jnp.arange(LAYERS)))
        return jnp.mean(x**2)

    return loss


def test_a_layer_without_a_finite_gradient_keeps_its_values():
    params = store({"kernel": stack()})
    step = tcfp_jax.train_step(poisoned(at=1), TX)
    state, metrics = step(step.init(copied(params)), X)
    assert metrics.skipped["kernel"].tolist() == [True, True, False]
    assert (int(state.opt_state.skipped), int(state.opt_state.count)) == (1, 1)
    old = params["kernel"].stored.backward.values
    new = state.params["kernel"].stored.backward.values
    assert [bool((one == other).all()) for one, other in zip(old, new)] == [
        True,
        True,
        False,
    ]
    assert not np.any(state.opt_state.nu["kernel"][:2])


def test_a_loss_that_is_not_finite_changes_nothing():
    case = plain()
    step = tcfp_jax.train_step(lambda params, x: case.loss(params, x) * jnp.inf, TX)
    state, metrics = step(step.init(copied(case.params)), X)
    assert all(kept.all() for kept in metrics.skipped.values())
    assert same_bits(state.params, case.params)
    assert (int(state.opt_state.skipped), int(state.opt_state.count)) == (1, 0)


def test_a_rate_that_is_not_finite_changes_nothing():
    case = plain()
    tx = tcfp_jax.optim.adamw(lambda count: 1 / count, key=KEY)
    step = tcfp_jax.train_step(case.loss, tx)
    state, metrics = step(step.init(copied(case.params)), X)
    assert all(kept.all() for kept in metrics.skipped.values())
    assert same_bits(state.params, case.params)
    assert (int(state.opt_state.skipped), int(state.opt_state.count)) == (1, 0)


def norms_of(moments, scales):
    """Norms of the matrices of a stack of first moments."""
    values = moments.astype(jnp.float32)
    floats = values * jnp.repeat(scales.astype(jnp.float32), 128, axis=-1)
    return jnp.sqrt(jnp.sum(floats**2, axis=(1, 2)))


def test_late_clipping_divides_the_limit_by_the_second_moments():
    """The same gradient again, of whose norm half is allowed."""
    case = plain()
    opt_state = TX.init(case.params)
    *_, gradients = ordinary(case.loss)(case.params, opt_state, X)
    floats = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    norm = optax.tree.norm(floats)
    own = jnp.sqrt(jnp.sum(floats["layers"]["up"]["kernel"] ** 2, axis=(1, 2)))
    half = tcfp_jax.optim.adamw(1e-3, key=KEY, max_norm=float(norm) / 2)
    assert norm / 2 > own.max(), "the first step clips nothing"
    step = tcfp_jax.train_step(case.loss, half, clip="late")
    state, metrics = step(step.init(copied(case.params)), X)
    np.testing.assert_allclose(metrics.norm, norm, 1e-5)
    seen = opt_state._replace(nu=state.opt_state.nu, nu_scale=state.opt_state.nu_scale)
    state, _ = step(step.state(copied(case.params), seen), X)
    moments = state.opt_state.mu["layers"]["up"]["kernel"]
    scales = state.opt_state.mu_scale["layers"]["up"]["kernel"]
    # The first moment is a tenth of the clipped gradient.
    np.testing.assert_allclose(norms_of(moments, scales), own / 20, rtol=0.03)


def test_late_clipping_lets_a_gradient_come_back():
    """Second moments that have nearly gone leave a part of the limit."""

    def loss(params, x):
        return jnp.mean(product(x * params["scale"], params["kernel"]) ** 2)

    params = {**store({"kernel": stack()[0]}), "scale": jnp.ones(128)}
    step = tcfp_jax.train_step(loss, CLIPS, clip="late")
    first, _ = step(step.init(copied(params)), X)
    nu = {**first.opt_state.nu, "scale": jnp.full(128, 1e-30)}
    seen = CLIPS.init(params)._replace(nu=nu, nu_scale=first.opt_state.nu_scale)
    state, metrics = step(step.state(copied(params), seen), X)
    assert metrics.norm > 0.01, "the step clips"
    change = jnp.max(jnp.abs(state.params["scale"] - params["scale"]))
    np.testing.assert_allclose(change, 1e-3, rtol=0.1)


def test_clipping_by_matrix_limits_each_layer():
    case = plain()
    step = tcfp_jax.train_step(case.loss, CLIPS, clip="matrix")
    state, metrics = step(step.init(copied(case.params)), X)
    moments = state.opt_state.mu["layers"]["up"]["kernel"]
    scales = state.opt_state.mu_scale["layers"]["up"]["kernel"]
    # The first moment is a tenth of the clipped gradient.
    np.testing.assert_allclose(norms_of(moments, scales), 0.001, rtol=0.05)
    assert metrics.norm > 0.01


def two_scans(params, x):
    def layer(x, kernel):
        return product(x, kernel), None

    for _ in range(2):
        x, _ = jax.lax.scan(layer, x, params["kernel"])
    return jnp.mean(x)


def also_penalized(params, x):
    def layer(x, kernel):
        return product(x, kernel), None

    x, _ = jax.lax.scan(layer, x, params["kernel"])
    return jnp.mean(x) + jnp.sum(params["kernel"].kernel() ** 2)


def carried(params, x):
    def layer(carry, kernel):
        x, every = carry
        return (product(x, kernel), every), None

    carry = (x, params["kernel"])
    (x, _), _ = jax.lax.scan(layer, carry, params["kernel"])
    return jnp.mean(x)


def twice_in_a_layer(params, x):
    def layer(x, kernel):
        part = jax.checkpoint(lambda x, kernel: product(x, kernel))
        return part(part(x, kernel), kernel), None

    x, _ = jax.lax.scan(layer, x, params["kernel"])
    return jnp.mean(x)


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (product(x, w), None), x, params["kernel"])
    return jnp.mean(x)


def mapped(params, x):
    return jnp.mean(jax.vmap(functools.partial(scanned, params))(x[:, None]))


def also_read_without_a_gradient(params, x):
    """The backward pass would read the kernel again, behind its update."""

    def layer(x, kernel):
        @jax.checkpoint
        def part(x, kernel):
            return x + jnp.mean(jax.lax.stop_gradient(kernel.read().dequantize()))

        return product(part(x, kernel), kernel), None

    x, _ = jax.lax.scan(layer, x, params["kernel"])
    return jnp.mean(x)


def in_a_branch(params, x):
    def layer(x, kernel):
        return jax.lax.cond(x[0, 0] > 0, lambda: product(x, kernel), lambda: x), None

    x, _ = jax.lax.scan(layer, x, params["kernel"])
    return jnp.mean(x)


def not_a_scalar(params, x):
    return product(x, params["kernel"])[0]


REFUSED = {
    "another optimizer": (
        lambda: tcfp_jax.train_step(plain().loss, optax.adam(1e-3)),
        TypeError,
        r"adamw, but got a GradientTransformation.*ordinary",
    ),
    "a chain": (
        lambda: tcfp_jax.train_step(plain().loss, optax.chain(TX)),
        TypeError,
        "need all of them",
    ),
    "accumulation": (
        lambda: tcfp_jax.train_step(plain().loss, optax.MultiSteps(TX, 4)),
        TypeError,
        r"a MultiSteps: .*accumulation over microbatches \(use a larger batch .*FSDP",
    ),
    "float masters": (
        lambda: tcfp_jax.train_step(
            plain().loss,
            optax.chain(optax.adam(1e-3), tcfp_jax.error_feedback("tcfp12")),
        ),
        TypeError,
        r"error_feedback, which keeps float weights.*ordinary step \(value_and_grad",
    ),
    "exact clipping": (
        lambda: tcfp_jax.train_step(plain().loss, CLIPS),
        ValueError,
        r"max_norm=0.01\) clips by the norm of all.*late",
    ),
    "nothing to clip": (
        lambda: tcfp_jax.train_step(plain().loss, TX, clip="late"),
        ValueError,
        "no max_norm",
    ),
    "an unknown clip": (
        lambda: tcfp_jax.train_step(plain().loss, CLIPS, clip="exact"),
        ValueError,
        "late",
    ),
}


@parametrize("name", REFUSED)
def test_what_cannot_be_updated_inside_is_refused(name):
    call, error, message = REFUSED[name]
    with refused(message, error):
        call()


READ_TWICE = {
    "two scans": (two_scans, "2 scans"),
    "a penalty": (also_penalized, "reads the whole stack"),
    "a carry": (carried, "the carry or the constants of a scan"),
    "two parts of a layer": (twice_in_a_layer, "2 parts of a layer"),
    "a part without a gradient": (also_read_without_a_gradient, "2 parts of a layer"),
    "vmap": (mapped, r"inside jax.vmap.* with the whole batch"),
    "a branch": (in_a_branch, r"a branch of lax.cond .* in front of the branch"),
}


@parametrize("name", READ_TWICE)
def test_a_stack_that_is_read_elsewhere_is_refused(name):
    loss, message = READ_TWICE[name]
    step = tcfp_jax.train_step(loss, TX)
    state = step.init(store({"kernel": stack()}))
    with refused(message):
        step(state, X)


def halved(params, x):
    return scanned(jax.tree.map(lambda leaf: leaf * 0.5, params), x)


def averaged(params, x):
    return scanned(jax.tree.map(lambda one, two: (one + two) / 2, params, params), x)


def summed(params, x):
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(params)]
    return scanned(params, x) + sum(map(jnp.sum, leaves))


def penalized(params, x):
    return scanned(params, x) + optax.tree.norm(params)


def of_one_layer(params, x):
    def layer(x, kernel):
        return product(x, jax.tree.map(jnp.sin, kernel)), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["kernel"])[0])


def of_floats_alone(change):
    """Change the arrays of floats, as mixed precision does."""

    def one(leaf):
        return change(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return one


def as_bfloat16(leaf):
    return leaf.astype(jnp.bfloat16)


CHANGES = {
    "half": lambda leaf: leaf * 0.5,
    "itself": lambda leaf: leaf + leaf,
    "nothing added": lambda leaf: leaf + 0.0,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "sqrt": jnp.sqrt,
    "a cast": as_bfloat16,
    "positive values": lambda leaf: jnp.where(leaf > 0, leaf, 0),
    "a cast of floats": of_floats_alone(as_bfloat16),
    "half of floats": of_floats_alone(lambda leaf: leaf * 0.5),
    "tanh of floats": of_floats_alone(jnp.tanh),
    "other floats": of_floats_alone(jnp.zeros_like),
}
LOSSES = {
    "an average": averaged,
    "a sum": summed,
    "a penalty": penalized,
    "an entry": of_one_layer,
}


def of_changed(change, loss):
    return lambda params, x: loss(jax.tree.map(change, params), x)


def alone(params, x):
    """A matrix outside of loops."""
    return jnp.mean(product(x, params["kernel"]))


ARITHMETIC = {name: (loss, stack()) for name, loss in LOSSES.items()}
for name, change in CHANGES.items():
    ARITHMETIC[f"{name}, stack"] = (of_changed(change, scanned), stack())
    ARITHMETIC[f"{name}, matrix"] = (of_changed(change, alone), stack()[0])


@parametrize("name", ARITHMETIC)
def test_arithmetic_on_the_parameters_of_a_loss_is_refused(name):
    loss, kernel = ARITHMETIC[name]
    with refused(r"stored weight.*dequantize.*ordinary step", TypeError):
        of_shapes(tcfp_jax.train_step(loss, TX), store({"kernel": kernel}))


MOVES = {
    "nowhere": lambda leaf: leaf,
    "copies": jnp.copy,
    "without a gradient": jax.lax.stop_gradient,
    "floats without a gradient": of_floats_alone(jax.lax.stop_gradient),
}


@parametrize("name", MOVES)
def test_arrays_of_a_parameter_may_move(name):
    step = tcfp_jax.train_step(of_changed(MOVES[name], alone), TX)
    assert of_shapes(step, store({"kernel": stack()[0]})).skipped["kernel"].shape == ()


def test_a_rebuilt_tree_is_updated_inside():
    step = tcfp_jax.train_step(of_changed(MOVES["nowhere"], scanned), TX)
    metrics = of_shapes(step, store({"kernel": stack()}))
    assert metrics.skipped["kernel"].shape == (LAYERS,)


def test_gradients_that_the_loss_asks_for_are_refused():
    def loss(params, x):
        value, gradients = tcfp_jax.value_and_grad(scanned)(params, x)
        return value + jnp.sum(gradients["kernel"] ** 2)

    with refused(r"gradient of a stored weight \[3, 128, 128\].*ordinary", TypeError):
        of_shapes(tcfp_jax.train_step(loss, TX), store({"kernel": stack()}))


@parametrize(
    "result, given",
    [
        ((0.0, 1, 2), "a tuple of 3"),
        (jnp.zeros(()), r"float32\[\]"),
        (None, "NoneType"),
    ],
)
def test_a_result_that_is_no_pair_is_refused(result, given):
    step = tcfp_jax.train_step(lambda params, x: result, TX, has_aux=True)
    with refused(rf"returns \(loss, aux\), but it returned .*{given}", TypeError):
        of_shapes(step, {})


def several(params, x):
    y = product(x, params["kernel"])
    return y.mean(), (y**2).mean()


def nothing(params, x):
    return None


@parametrize(
    "loss, found",
    [
        (not_a_scalar, r"float32\[128\]"),
        (several, r"float32\[\], float32\[\]"),
        (nothing, "NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss, found):
    step = tcfp_jax.train_step(loss, TX)
    state = step.init(store({"kernel": drawn(128, 128)}))
    with refused(f"{found}, not a real scalar.*several losses", TypeError):
        step(state, X)


def of_shapes(step, params):
    """The metrics of a step that is traced alone."""
    state = jax.eval_shape(lambda: step.init(params))
    return jax.eval_shape(step, state, X)[1]


@parametrize("name", ["parts", "branches", "layers of nnx"])
def test_parts_of_a_layer_share_its_slot(name):
    case = CASES[name]()
    metrics = of_shapes(tcfp_jax.train_step(case.loss, TX), case.params)
    assert metrics.skipped[case.inside[0]].shape == (LAYERS,)


def test_a_head_is_updated_before_the_layers():
    """Its gradient is gone when the backward pass of the layers begins."""

    def floats(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["kernel"])
        return jnp.mean((x @ params["head"]) ** 2)

    params = {"kernel": stack(), "head": stack(2)[0]}
    low = tcfp_jax.transform(floats, RECIPE, include=("linear", "small", "head"))
    step = tcfp_jax.train_step(low, TX)
    params = store(params, find_weights(low, params, X))
    state = jax.eval_shape(lambda: step.init(params))
    equations = jax.make_jaxpr(step)(state, X).jaxpr.eqns
    names = [equation.primitive.name for equation in equations]
    written = [
        place
        for place, equation in enumerate(equations)
        if equation.primitive.name == "swap"
        and equation.invars[0].aval.shape == params["head"].shape
    ]
    assert len(written) == 4, "both halves and both moments"
    backward = len(names) - 1 - names[::-1].index("scan")
    assert max(written) < backward


def unrolled(params, x):
    for layer in range(LAYERS):
        x = product(x, jax.tree.map(lambda leaf: leaf[layer], params["kernel"]))
    return jnp.mean(x)


@parametrize(
    "loss, moments, why",
    [(unrolled, "8bit", "no scan runs"), (scanned, "bfloat16", "not of these formats")],
)
def test_gradients_of_all_layers_are_warned_of(loss, moments, why):
    tx = tcfp_jax.optim.adamw(1e-3, moments=moments, key=KEY)
    step = tcfp_jax.train_step(loss, tx)
    words = rf"all layers of some weights.*kernel \[3, 128, 128\] \({why}"
    with pytest.warns(UserWarning, match=words):
        metrics = of_shapes(step, store({"kernel": stack()}))
    assert metrics.skipped["kernel"].shape == ()


def test_a_small_stack_that_no_scan_runs_over_is_warned_of():
    """It is less than a quarter of the values."""

    def loss(params, x):
        return scanned(params["large"], x) + unrolled(params["small"], x)

    params = {"large": {"kernel": stack(layers=12)}, "small": {"kernel": stack()}}
    words = r"does: small/kernel \[3, 128, 128\] \(no scan runs over it, it is read by"
    with pytest.warns(UserWarning, match=words):
        metrics = of_shapes(tcfp_jax.train_step(loss, TX), store(params))
    assert metrics.skipped["large/kernel"].shape == (12,)


def in_parts(params, x):
    """Microbatches inside the loss: each round reads all layers."""
    return jnp.mean(
        jax.lax.map(functools.partial(scanned, params), x.reshape(2, 8, -1))
    )


def of_floats(params, x):
    return jnp.mean(x @ params["float"])


def also_of_floats(params, x):
    return scanned(params, x) + of_floats(params, x)


@parametrize(
    "loss, stored, floats, why",
    [
        (in_parts, {"kernel": stack()}, {}, "read by the carry or the constants"),
        (of_floats, {}, {"float": stack()[0]}, "float .*float.; store the weights"),
        (also_of_floats, {"kernel": stack()}, {"float": stack(2)}, "float .*float.;"),
    ],
)
def test_a_step_that_saves_nothing_says_why(loss, stored, floats, why):
    params = {**(store(stored) if stored else {}), **floats}
    with pytest.warns(UserWarning, match=f"gradients of all layers.*{why}"):
        of_shapes(tcfp_jax.train_step(loss, TX), params)


def test_an_entry_that_the_loss_cuts_is_explained():
    def cut(params, x):
        def layer(x, pair):
            return product(x, jax.tree.map(lambda leaf: leaf[0], pair)), None

        return jnp.mean(jax.lax.scan(layer, x, params["kernel"])[0])

    params = store({"kernel": jnp.stack([stack(1, 2), stack(2, 2)])})
    with pytest.raises(IndexError) as found:
        of_shapes(tcfp_jax.train_step(cut, TX), params)
    assert "not cut it further" in found.value.__notes__[0]


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh(
        (2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        params = store(placed({"kernel": stack()}, mesh, None, "a"))
        with refused(r"explicit axes .*AxisType.Auto"):
            of_shapes(tcfp_jax.train_step(scanned, TX), params)


def test_a_weight_that_shard_map_reads_is_refused():
    mesh = jax.make_mesh(
        (2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )

    def loss(params, x):
        def layer(x, kernel):
            specs = PartitionSpec("a"), PartitionSpec()
            sharded = jax.shard_map(product, in_specs=specs, out_specs=specs[0])
            return sharded(x, kernel), None

        return jnp.mean(jax.lax.scan(layer, x, params["kernel"])[0])

    with (
        jax.set_mesh(mesh),
        refused("shard_map reads the stored weight kernel", TypeError),
    ):
        of_shapes(tcfp_jax.train_step(loss, TX), store({"kernel": stack()}))


@parametrize("kind", ["parameters", "another optimizer"])
def test_a_state_of_something_else_is_refused(kind):
    step = tcfp_jax.train_step(scanned, TX)
    params = {"kernel": jnp.zeros((2, 2))}
    state = params
    words = r"a dict, not that of train_step; .*step.init\(params\)"
    if kind == "another optimizer":
        state = step.state(params, optax.sgd(1.0).init(params))
        words = "type tuple, not adamw's"
    with refused(words, TypeError):
        jax.eval_shape(step, state, X)


def test_a_parameter_of_integers_is_refused():
    params = {**store({"kernel": stack()}), "count": jnp.int32(3)}
    with refused(r"parameter count is int32\[\].*the inputs", TypeError):
        of_shapes(tcfp_jax.train_step(scanned, TX), params)


@parametrize("loss", [0.0, np.float32(1)])
def test_a_constant_is_a_loss(loss):
    step = tcfp_jax.train_step(lambda params, x: loss, TX)
    assert of_shapes(step, {}).loss.dtype == jnp.float32
    assert of_shapes(step, store({"kernel": stack()[0]})).loss.shape == ()


def test_numbers_of_a_clipped_step_are_float32():
    step = tcfp_jax.train_step(scanned, CLIPS, clip="late")
    with jax.enable_x64(True):
        metrics = of_shapes(step, store({"kernel": stack()}))
    assert metrics.norm.dtype == jnp.float32


def test_the_dtype_of_a_stack_reads_nothing():
    def loss(params, x):
        assert params["kernel"].dtype == jnp.float8_e4m3fn
        return scanned(params, x)

    metrics = of_shapes(tcfp_jax.train_step(loss, TX), store({"kernel": stack()}))
    assert metrics.skipped["kernel"].shape == (LAYERS,)


def test_a_gradient_through_a_step_is_refused():
    step = tcfp_jax.train_step(plain().loss, TX)
    state = jax.eval_shape(lambda: step.init(plain().params))

    def loss_after(x, state):
        return step(state, x)[1].loss

    for of in (loss_after, jax.jit(loss_after)):
        with refused(r"a gradient through train_step.*has none", TypeError):
            jax.eval_shape(jax.grad(of), X, state)


def test_a_weight_that_all_layers_share_is_updated_once():
    def loss(params, x):
        def layer(x, _):
            return x + product(x, params["kernel"]), None

        x, _ = jax.lax.scan(layer, x, length=LAYERS)
        return jnp.mean(x**2)

    params = store({"kernel": stack()[0]})
    wanted = ordinary(loss)(params, TX.init(params), X)
    step = tcfp_jax.train_step(loss, TX)
    state, _ = step(step.init(copied(params)), X)
    assert same_bits((state.params, state.opt_state), wanted[:2])


@slow  # compiles twice; a quicker test has the buffers of a step
def test_a_state_that_is_not_donated_exists_twice():
    case = plain()
    step = tcfp_jax.train_step(case.loss, TX)
    state = step.init(copied(case.params))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    programs = []
    for options in ({}, {"donate_argnums": 0}):
        made = jax.jit(step, **options).lower(state, case.batch).compile()
        programs.append((step_bytes(made), made.memory_analysis()))
    (twice, apart), (once, in_place) = programs
    assert apart.alias_size_in_bytes == 0
    assert in_place.alias_size_in_bytes >= 0.99 * whole
    # The temporary memory of both programs differs a little.
    assert twice >= once + 0.8 * whole


def test_aux_and_donation():
    case = plain()

    def loss(params, x):
        return case.loss(params, x), x.sum()

    step = tcfp_jax.train_step(loss, TX, has_aux=True)
    state = step.init(copied(case.params))
    before = jax.tree.leaves(state.params)
    _, metrics = step(state, X)
    np.testing.assert_allclose(metrics.aux, X.sum(), rtol=1e-6)
    assert all(leaf.is_deleted() for leaf in before if leaf.size > 1000)
