"""Copies in FP8 under a remat, and the choice of kept values by the bytes of compiled
steps.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import tcfp_jax
from pallas_kernels.operands import Row
from pallas_kernels.quantize.api import quantize
from tcfp_jax.conversion import survey
from tcfp_jax.remat import checkpoint_in_fp8, device_budget, save_what_fits, step_bytes
from tests.helpers import decibels, same_bits

save = jax.checkpoint_policies.save_only_these_names
LAYERS, ROWS, WIDTH, HIDDEN = 3, 8, 16, 32


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


WEIGHTS = {
    "gate": draw(0, LAYERS, WIDTH, HIDDEN) / 4,
    "up": draw(1, LAYERS, WIDTH, HIDDEN) / 4,
    "down": draw(2, LAYERS, HIDDEN, WIDTH) / 8,
}
X = draw(3, ROWS, WIDTH)


def hidden(w, x, kept):
    gate, up = (
        kept(checkpoint_name(x @ w[name], name), f"{name}_fp8")
        for name in ("gate", "up")
    )
    return (jax.nn.silu(gate) * up) @ w["down"]


def model(policy, kept=checkpoint_in_fp8):
    """Return the loss of weights and activations, with scanned and rematerialized
    layers.
    """
    block = jax.checkpoint(
        lambda x, w: x + hidden(w, x, kept), policy=policy, prevent_cse=False
    )
    return lambda w, x: jnp.sum(
        lax.scan(lambda x, w: (block(x, w), None), x, w)[0] ** 2
    )


def dequantized(x):
    return quantize(x, jnp.float8_e4m3fn, Row()).rows.dequantize(x.dtype)


@jax.custom_jvp
def like_a_copy(exact, rounded):
    """Exact in the forward pass, and rounded in the backward pass: the meaning of a
    copy, without a remat.
    """
    return exact


like_a_copy.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def by_definition(w, x):
    """The loss with each layer's gradient taken at rounded gate and up."""

    def layer(x, w):
        plain = lambda x, name: x
        straight = lambda x, name: x + lax.stop_gradient(dequantized(x) - x)
        return (
            x
            + like_a_copy(
                lax.stop_gradient(hidden(w, x, plain)), hidden(w, x, straight)
            ),
            None,
        )

    return jnp.sum(lax.scan(layer, x, w)[0] ** 2)


@functools.cache
def gradients(policy):
    return jax.jit(jax.value_and_grad(model(policy), argnums=(0, 1)))(WEIGHTS, X)


EXACT = {
    "nothing": save(),
    "names": save("gate", "up"),
    "everything": jax.checkpoint_policies.everything_saveable,
    "products": jax.checkpoint_policies.dots_saveable,
}


@pytest.mark.parametrize("name", EXACT)
def test_a_policy_without_the_name_changes_no_bit(name):
    without = jax.jit(
        jax.value_and_grad(model(EXACT[name], lambda x, name: x), argnums=(0, 1))
    )(WEIGHTS, X)
    assert same_bits(gradients(EXACT[name]), without)


def test_the_forward_pass_is_exact_and_gradients_are_those_at_the_copies():
    (exact, _), (loss, found) = (
        gradients(EXACT["nothing"]),
        gradients(save("gate_fp8", "up_fp8")),
    )
    assert same_bits(loss, exact)
    expected = jax.jit(jax.grad(by_definition, argnums=(0, 1)))(WEIGHTS, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        found,
        expected,
    )


def test_copies_cost_gradients_as_much_as_rounding_to_e4m3_does():
    """E4M3 keeps 31.5 dB. A gradient depends on both copies, and on the copies of later
    layers.
    """
    (_, exact), (_, found) = (
        gradients(EXACT["nothing"]),
        gradients(save("gate_fp8", "up_fp8")),
    )
    snr = jax.tree.map(decibels, exact, found)
    assert all(28 < value < 34 for value in jax.tree.leaves(snr)), snr


def test_one_byte_a_value_is_kept_and_no_product_is_computed_again():
    kept, products = {}, {}
    for names in [(), ("gate", "up"), ("gate_fp8", "up_fp8")]:
        loss = model(save(*names))
        backward = jax.eval_shape(
            lambda w, loss=loss: jax.vjp(lambda w: loss(w, X), w)[1], WEIGHTS
        )
        kept[names] = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward)
        )
        products[names] = str(jax.make_jaxpr(jax.grad(loss))(WEIGHTS, X)).count(
            "dot_general"
        )
    values = 2 * LAYERS * ROWS * HIDDEN
    assert kept["gate", "up"] - kept[()] == 4 * values
    # a scale per row
    assert kept["gate_fp8", "up_fp8"] - kept[()] == values + 2 * LAYERS * ROWS * 4
    assert products[()] - 2 == products["gate", "up"] == products["gate_fp8", "up_fp8"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_so_in_the_gradient(value):
    found = jax.jit(jax.grad(model(save("gate_fp8", "up_fp8"))))(
        WEIGHTS, X.at[0, 0].set(value)
    )
    assert all(not np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    one = jax.checkpoint(lambda x: checkpoint_in_fp8(2 * x, "x") ** 2, policy=save("x"))
    rows = jax.grad(lambda x: one(x).sum())(jnp.array([[1.0, value], [1.0, 2.0]]))
    assert np.isnan(rows[0]).all() and rows[1].tolist() == [8.0, 16.0]


def test_it_composes():
    loss = model(save("gate_fp8", "up_fp8"))
    of_x = jax.jit(jax.grad(lambda x: loss(WEIGHTS, x)))
    batch = jnp.stack([X, 2 * X])
    mapped = jax.jit(jax.vmap(jax.grad(lambda x: loss(WEIGHTS, x))))(batch)
    np.testing.assert_allclose(mapped, [of_x(x) for x in batch], rtol=1e-5, atol=1e-5)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(
        X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    )
    np.testing.assert_allclose(of_x(split), of_x(X), rtol=1e-5, atol=1e-5)
    _, tangent = jax.jvp(lambda x: loss(WEIGHTS, x), (X,), (X,))
    assert float(tangent) == pytest.approx(
        float(jnp.vdot(gradients(EXACT["nothing"])[1][1], X)), rel=1e-4
    )


def test_a_converted_function_keeps_copies_too():
    converted = lambda policy: tcfp_jax.transform(
        model(policy), "tcfp12_single", include=("linear", "small")
    )
    report = survey(converted(EXACT["nothing"]), WEIGHTS, X)
    assert [record.weight_path for record in report.converted] == ["gate", "up", "down"]
    (exact, expected), (loss, found) = (
        jax.jit(jax.value_and_grad(converted(policy)))(WEIGHTS, X)
        for policy in (EXACT["nothing"], save("gate_fp8", "up_fp8"))
    )
    assert same_bits(loss, exact) and not same_bits(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.linalg.norm(a - b)) < 0.1 * float(jnp.linalg.norm(b))


def test_copies_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"x is a scalar.*one scale per row"):
        checkpoint_in_fp8(jnp.float32(1), "x")
    with pytest.raises(TypeError, match="x has dtype int32"):
        checkpoint_in_fp8(jnp.arange(3), "x")
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    with pytest.raises(NotImplementedError, match="which can only be kept or not"):
        jax.grad(
            lambda x: jax.checkpoint(
                lambda x: checkpoint_in_fp8(x, "x") ** 2, policy=offload
            )(x).sum()
        )(X)


class Step:
    """A step that needs `needed` bytes, instead of a compiled one."""

    def __init__(self, needed):
        self.argument_size_in_bytes, self.output_size_in_bytes = needed - 7, 10
        self.alias_size_in_bytes, self.temp_size_in_bytes = 5, 2

    def compile(self):
        return self

    def memory_analysis(self):
        return self


@pytest.mark.parametrize("count", range(1, 10))
def test_the_most_that_fits_is_found_with_few_compiles(count):
    for fitting in range(1, count + 1):
        tried = []
        fit = save_what_fits(
            lambda level: tried.append(level) or Step(100 * level),
            range(1, count + 1),
            100 * fitting,
        )
        assert (fit.level, fit.needed, fit.budget) == (
            fitting,
            100 * fitting,
            100 * fitting,
        )
        assert step_bytes(fit.compiled) == fit.needed
        assert tried[0] == count and len(tried) == len(set(tried)) <= 1 + np.ceil(
            np.log2(count)
        )


def test_a_compiled_step_fits_by_its_own_bytes():
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    levels = {
        names: save(*names) for names in [(), ("gate_fp8", "up_fp8"), ("gate", "up")]
    }

    def make_step(names):
        return jax.jit(jax.grad(model(levels[names]))).lower(
            jax.eval_shape(lambda: WEIGHTS), x
        )

    sizes = [step_bytes(make_step(names).compile()) for names in levels]
    assert sizes[0] < sizes[2]
    fit = save_what_fits(make_step, list(levels), sizes[0])
    assert fit.needed <= sizes[0] < sizes[2] and fit.level != ("gate", "up")
    assert same_bits(
        fit.compiled(WEIGHTS, X),
        jax.jit(jax.grad(model(levels[fit.level])))(WEIGHTS, X),
    )
    with pytest.raises(
        ValueError,
        match=(
            rf"no level fits: .*\(\), needs {sizes[0]:,} bytes .*the budget is 1,000 "
        ),
    ):
        save_what_fits(make_step, [()], 1000)


def test_the_budget_is_that_of_the_device(monkeypatch):
    with pytest.raises(ValueError, match="has no levels"):
        save_what_fits(Step, [])
    with pytest.raises(TypeError, match="budget='80GB' must be a number of bytes"):
        save_what_fits(Step, [1], budget="80GB")
    with pytest.raises(
        NotImplementedError, match="does not report its memory; give a budget in bytes"
    ):
        save_what_fits(Step, [1])
    devices = [
        SimpleNamespace(memory_stats=lambda limit=limit: {"bytes_limit": limit})
        for limit in (2000, 1000)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert (device_budget(), device_budget(margin=0.5)) == (950, 500)
    assert save_what_fits(Step, [900, 960]).level == 900
