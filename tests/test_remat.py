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
from tests.helpers import (
    assert_close,
    decibels,
    drawn,
    mesh_of,
    parametrize,
    placed,
    refusals,
    refused,
    same_bits,
)

save = jax.checkpoint_policies.save_only_these_names
LAYERS = 3
ROWS = 8
WIDTH = 16
HIDDEN = 32
NAMES = ("gate", "up")
IN_FP8 = ("gate_fp8", "up_fp8")
WEIGHTS = {
    "gate": drawn(LAYERS, WIDTH, HIDDEN) / 4,
    "up": drawn(LAYERS, WIDTH, HIDDEN, seed=1) / 4,
    "down": drawn(LAYERS, HIDDEN, WIDTH, seed=2) / 8,
}
X = drawn(ROWS, WIDTH, seed=3)


def as_it_is(x, name):
    return x


def hidden(w, x, kept):
    gate, up = (
        kept(checkpoint_name(x @ w[name], name), f"{name}_fp8") for name in NAMES
    )
    return (jax.nn.silu(gate) * up) @ w["down"]


def total(layer, w, x):
    """A loss of scanned layers."""
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)


def model(policy, kept=checkpoint_in_fp8):
    """The loss of weights and activations, with rematerialized layers."""

    def layer(x, w):
        return x + hidden(w, x, kept)

    block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return functools.partial(total, block)


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

    def straight(x, name):
        return x + lax.stop_gradient(dequantized(x) - x)

    def layer(x, w):
        exact = lax.stop_gradient(hidden(w, x, as_it_is))
        return x + like_a_copy(exact, hidden(w, x, straight))

    return total(layer, w, x)


def gradients_of(loss):
    """(the loss, its gradients of weights and of x)."""
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(WEIGHTS, X)


@functools.cache
def gradients(policy):
    return gradients_of(model(policy))


EXACT = {
    "nothing": save(),
    "names": save("gate", "up"),
    "everything": jax.checkpoint_policies.everything_saveable,
    "products": jax.checkpoint_policies.dots_saveable,
}


@parametrize("name", EXACT)
def test_a_policy_without_the_name_changes_no_bit(name):
    without = gradients_of(model(EXACT[name], as_it_is))
    assert same_bits(gradients(EXACT[name]), without)


def test_the_loss_is_exact_and_gradients_are_those_at_copies():
    loss, found = gradients(save(*IN_FP8))
    assert same_bits(loss, gradients(EXACT["nothing"])[0])
    assert_close(found, gradients_of(by_definition)[1], 1e-4, 1e-4)


def test_copies_cost_gradients_as_much_as_rounding_to_e4m3_does():
    """E4M3 keeps 31.5 dB. A gradient depends on both copies, and on the copies of later
    layers.
    """
    exact = gradients(EXACT["nothing"])[1]
    snr = jax.tree.map(decibels, exact, gradients(save(*IN_FP8))[1])
    assert all(28 < value < 34 for value in jax.tree.leaves(snr)), snr


def test_one_byte_a_value_is_kept_and_no_product_runs_again():
    kept = {}
    products = {}
    for names in ((), NAMES, IN_FP8):
        loss = model(save(*names))

        def backward(w, loss=loss):
            return jax.vjp(lambda w: loss(w, X), w)[1]

        leaves = jax.tree.leaves(jax.eval_shape(backward, WEIGHTS))
        kept[names] = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        text = str(jax.make_jaxpr(jax.grad(loss))(WEIGHTS, X))
        products[names] = text.count("dot_general")
    values = 2 * LAYERS * ROWS * HIDDEN
    assert kept[NAMES] - kept[()] == 4 * values
    # a scale per row
    assert kept[IN_FP8] - kept[()] == values + 2 * LAYERS * ROWS * 4
    assert products[()] - 2 == products[NAMES] == products[IN_FP8]


@parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_so_in_the_gradient(value):
    _, (found, _) = jax.jit(jax.value_and_grad(model(save(*IN_FP8)), argnums=(0, 1)))(
        WEIGHTS, X.at[0, 0].set(value)
    )
    assert all(not np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    one = jax.checkpoint(lambda x: checkpoint_in_fp8(2 * x, "x") ** 2, policy=save("x"))
    rows = jax.grad(lambda x: one(x).sum())(jnp.array([[1.0, value], [1.0, 2.0]]))
    assert np.isnan(rows[0]).all()
    assert rows[1].tolist() == [8.0, 16.0]


def test_it_composes():
    loss = functools.partial(model(save(*IN_FP8)), WEIGHTS)
    gradient = jax.grad(loss)
    of_x = jax.jit(gradient)
    batch = jnp.stack([X, 2 * X])
    close = functools.partial(assert_close, rtol=1e-5, atol=1e-5)
    close(jax.jit(jax.vmap(gradient))(batch), jnp.stack([of_x(x) for x in batch]))
    close(of_x(placed(X, mesh_of(2), "a")), of_x(X))
    _, tangent = jax.jvp(loss, (X,), (X,))
    exact = jnp.vdot(gradients(EXACT["nothing"])[1][1], X)
    assert float(tangent) == pytest.approx(float(exact), rel=1e-4)


@parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_copies_of_the_largest_values_are_finite(dtype):
    x = jnp.full((2, 4), jnp.finfo(dtype).max, dtype)
    product = jax.checkpoint(
        lambda x, y: jnp.sum(checkpoint_in_fp8(x, "x") * y), policy=save("x")
    )
    _, copy = jax.grad(product, (0, 1))(x, jnp.zeros_like(x))
    assert (copy == x).all()


def test_second_derivatives_are_exact_or_refused():
    def second(policy):
        def cube(x):
            return jnp.sum(checkpoint_in_fp8(x, "x") ** 3)

        gradient = jax.grad(jax.checkpoint(cube, policy=policy))
        return jax.grad(lambda x: jnp.mean(gradient(x)))(X)

    assert_close(second(save()), 6 * X / X.size, 1e-6, 0)
    with refused("a policy without the names", TypeError):
        second(save("x"))


def test_a_converted_function_keeps_copies_too():
    def run(policy):
        include = ("linear", "small")
        low = tcfp_jax.transform(model(policy), "tcfp12_single", include=include)
        report = survey(low, WEIGHTS, X)
        paths = [record.weight_path for record in report.converted]
        assert paths == ["gate", "up", "down"]
        return jax.jit(jax.value_and_grad(low))(WEIGHTS, X)

    exact, expected = run(EXACT["nothing"])
    loss, found = run(save(*IN_FP8))
    assert same_bits(loss, exact)
    assert not same_bits(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.linalg.norm(a - b)) < 0.1 * float(jnp.linalg.norm(b))


def offloaded():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    copied = jax.checkpoint(lambda x: checkpoint_in_fp8(x, "x") ** 2, policy=policy)
    jax.grad(lambda x: copied(x).sum())(X)


# Steps that fit
# --------------------------------------------------------------------------------------
class Step:
    """A step that needs `needed` bytes, instead of a compiled one."""

    def __init__(self, needed):
        self.argument_size_in_bytes = needed - 7
        self.output_size_in_bytes = 10
        self.alias_size_in_bytes = 5
        self.temp_size_in_bytes = 2

    def compile(self):
        return self

    def memory_analysis(self):
        return self


@parametrize("count", range(1, 10))
def test_the_most_that_fits_is_found_with_few_compiles(count):
    for fitting in range(1, count + 1):
        tried = []

        def make_step(level, tried=tried):
            tried.append(level)
            return Step(100 * level)

        budget = 100 * fitting
        fit = save_what_fits(make_step, range(1, count + 1), budget)
        assert (fit.level, fit.needed, fit.budget) == (fitting, budget, budget)
        assert step_bytes(fit.compiled) == fit.needed
        assert tried[0] == count
        assert len(tried) == len(set(tried)) <= 1 + np.ceil(np.log2(count))


class StepBeyondTheCompiler(Step):
    """A step of a level above 4 runs its compiler out of memory."""

    def __init__(self, level, error="RESOURCE_EXHAUSTED: Out of memory"):
        super().__init__(100 * level)
        self.level = level
        self.error = error

    def compile(self):
        if self.level > 4:
            raise jax.errors.JaxRuntimeError(self.error)
        return self


@parametrize("levels", [[1, 2, 4, 8, 16], [1, 4, 64], [4, 5]])
def test_a_level_that_the_compiler_cannot_fit_does_not_fit(levels):
    assert save_what_fits(StepBeyondTheCompiler, levels, 10**6).level == 4


def test_no_level_fits_the_compiler():
    with refused(r"no level fits: .*5, needs more memory than"):
        save_what_fits(StepBeyondTheCompiler, [5, 6], 10**6)
    broken = functools.partial(StepBeyondTheCompiler, error="INTERNAL: broken")
    with refused("broken", jax.errors.JaxRuntimeError):
        save_what_fits(broken, [1, 5], 10**6)


def test_a_compiled_step_fits_by_its_own_bytes():
    def step(names):
        return jax.jit(jax.grad(model(save(*names))))

    def make_step(names):
        return step(names).lower(WEIGHTS, X)

    levels = [(), IN_FP8, NAMES]
    sizes = [step_bytes(make_step(names).compile()) for names in levels]
    assert sizes[0] < sizes[2]
    fit = save_what_fits(make_step, levels, sizes[0])
    assert fit.needed <= sizes[0]
    assert fit.level != NAMES
    assert same_bits(fit.compiled(WEIGHTS, X), step(fit.level)(WEIGHTS, X))
    message = rf"no level fits: .*\(\), needs {sizes[0]:,} bytes .*the budget is 1,000 "
    with refused(message):
        save_what_fits(make_step, [()], 1000)


def test_the_budget_is_that_of_the_device(monkeypatch):
    devices = [
        SimpleNamespace(memory_stats=lambda limit=limit: {"bytes_limit": limit})
        for limit in (2000, 1000)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert (device_budget(), device_budget(margin=0.5)) == (950, 500)
    assert save_what_fits(Step, [900, 960]).level == 900


test_mistakes = refusals(
    {
        ValueError: {
            "x is a scalar.*one scale per row": lambda: checkpoint_in_fp8(
                jnp.float32(1), "x"
            ),
            "has no levels": lambda: save_what_fits(Step, []),
        },
        TypeError: {
            "x has dtype int32": lambda: checkpoint_in_fp8(jnp.arange(3), "x"),
            "budget='80GB' must be a number of bytes": lambda: save_what_fits(
                Step, [1], budget="80GB"
            ),
        },
        NotImplementedError: {
            "which can only be kept or not": offloaded,
            "does not report its memory; give a budget in bytes": lambda: (
                save_what_fits(Step, [1])
            ),
        },
    }
)
