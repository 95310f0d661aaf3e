"""The report has a line for each parameter of a product: stored, converted only or
float, with the reason and the place.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, find_weights, survey
from tcfp_jax.weights.parameter import is_quantized
from tests.conversion import programs
from tests.helpers import parametrize, refused, same_bits, variables_of

ALL = ("linear", "small", "head")
RECIPE = "tcfp12_single"
X = programs.X
STEPS = programs.STEPS
P = programs.P
HERE = r" in programs\.py:\d+"
NO_INPUT = "no input takes part: its other operand comes from parameters"
# The storage of `w`, and then of other parameters: (function, input, kinds, reason).
PROGRAMS = {
    "plain": (programs.dense, X, dict(w="stored", o="stored"), ""),
    "penalty": (
        programs.with_penalty,
        X,
        dict(w="converted only", o="stored"),
        rf"stays float: read by `abs`{HERE}$",
    ),
    "logged norm": (
        programs.with_norm,
        X,
        dict(w="converted only", o="stored"),
        rf"stays float: read by `jnp\.linalg\.norm`{HERE}$",
    ),
    "changed by a loop": (
        programs.with_decayed_copy,
        X,
        dict(w="converted only"),
        rf"stays float: read by `mul`{HERE}$",
    ),
    "chosen by a branch": (
        programs.with_a_choice,
        X,
        dict(w="converted only"),
        rf"stays float: read by `add`{HERE}$",
    ),
    "penalty of a product": (
        programs.with_orthogonality,
        X,
        dict(w="converted only"),
        rf"stays float: read by `\S+`{HERE}$",
    ),
    "scan from zeros": (
        programs.scan_from_zeros,
        STEPS,
        dict(w="stored", v="stored"),
        "",
    ),
    "unrolled from zeros": (
        programs.unrolled_from_zeros,
        STEPS,
        dict(w="stored", v="stored"),
        "",
    ),
    "unrolled from ones": (programs.unrolled_from_ones, STEPS, dict(w="stored"), ""),
    "scan from a parameter": (
        programs.scan_from_a_parameter,
        STEPS,
        dict(w="stored"),
        "",
    ),
    "unrolled from a parameter": (
        programs.unrolled_from_a_parameter,
        STEPS,
        dict(w="converted only", v="stored"),
        rf"stays float: read by `\S+`{HERE}$",
    ),
    "a part of a weight": (
        programs.halves,
        X,
        dict(v="converted only", w="stored"),
        rf"stays float: a part without a stored form is multiplied{HERE}$",
    ),
    "rows that are looked up": (
        programs.tied,
        X,
        dict(w="converted only"),
        rf'stays float: its rows are looked up by `\S+`{HERE}; include="embed"',
    ),
    "latents": (
        programs.queries,
        X,
        dict(v="float", start="float", w="stored"),
        rf"stays float: {NO_INPUT}, constants or state{HERE}$",
    ),
    "positions": (programs.positions, X, dict(v="stored", w="stored"), ""),
    "a weight times constants": (
        programs.mixing,
        X,
        dict(v="float", w="stored"),
        "stays float",
    ),
}


def kinds_of(report):
    return {line.path: line.kind for line in report.parameters}


@parametrize("name", PROGRAMS)
def test_each_parameter_has_its_line(name):
    function, x, kinds, reason = PROGRAMS[name]
    low = tcfp_jax.transform(function, RECIPE, include=ALL)
    report = survey(low, P, x)
    found = kinds_of(report)
    assert {path: found[path] for path in kinds} == kinds
    weights = find_weights(low, P, x)
    for line in report.parameters:
        assert (line.kind == "stored") == (line.reason == "")
        assert str(line) in str(report)
    first = next(iter(kinds))
    line = next(line for line in report.parameters if line.path == first)
    assert bool(reason) == bool(line.reason)
    if reason:
        assert re.search(reason, line.reason), line.reason
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stored = tcfp_jax.store(P, weights, key=jax.random.key(0))
    assert {path for path in stored if is_quantized(stored[path])} == {
        path for path, kind in found.items() if kind == "stored"
    }
    only = [line for line in report.parameters if line.kind == "converted only"]
    assert len(said) == bool(only)
    for line in only:
        assert f"{line.path} {line.reason}" in str(said[0].message)


@parametrize("function", [programs.state_alone, programs.queries])
def test_strict_raises_for_a_product_without_an_input(function):
    low = tcfp_jax.transform(function, RECIPE, include=ALL, strict=True)
    with refused(rf"(?s)1 products.*{NO_INPUT}"):
        jax.eval_shape(low, P, X)


def test_a_recipe_without_stored_weights_is_a_line_alone():
    rules = {"^w$": "bf16"}
    low = tcfp_jax.transform(programs.dense, RECIPE, include=ALL, rules=rules)
    assert "w converted only, stays float: bf16 stores no weight" in re.sub(
        " +", " ", str(survey(low, P, X))
    )
    stored = tcfp_jax.store(P, find_weights(low, P, X), key=jax.random.key(0))
    assert is_quantized(stored["o"])
    assert not is_quantized(stored["w"])


def test_store_names_the_reason_if_every_weight_stays_float():
    low = tcfp_jax.transform(programs.penalties, RECIPE, include=ALL)
    reason = r"(?s)2 parameters.*stay float:.*o stays float: read by.*w stays float"
    with refused(rf"{reason}.*error_feedback"):
        tcfp_jax.store(P, find_weights(low, P, X), key=jax.random.key(0))


class Parts(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(32, 32, rngs=rngs)
        self.head = Penalized(rngs)

    def __call__(self, x):
        return self.head(self.body(x))


class Penalized(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.dense(x), jnp.linalg.norm(self.dense.kernel[...])


def test_weights_of_parts_keep_the_reasons():
    model = Parts(nnx.Rngs(0))
    convert_to_tcfp(model.body, RECIPE, X, include=ALL)
    convert_to_tcfp(model.head, RECIPE, X, include=ALL)
    weights = find_weights(model)
    assert sorted(weights) == ["body/kernel", "head/dense/kernel"]
    assert list(weights.floats) == ["head/dense/kernel"]
    params = nnx.state(model, nnx.Param)
    with pytest.warns(match=r"head/dense/kernel stays float: read by `jnp\.linalg"):
        tcfp_jax.store(params, weights, key=jax.random.key(0))


def by_hand(p, xs, start):
    def times(x, w):
        return tcfp_jax.matmul(x, w, recipe=RECIPE)

    h = start
    for x in jnp.moveaxis(xs, 1, 0):
        h = jnp.tanh(times(x, p["v"]) + times(h, p["w"]))
    return times(h, p["o"])


@parametrize(
    "function, start",
    [
        (programs.scan_from_zeros, jnp.zeros((4, 32))),
        (programs.unrolled_from_zeros, jnp.zeros((4, 32))),
        (programs.unrolled_from_ones, jnp.ones((4, 32))),
        (programs.scan_from_a_parameter, P["start"]),
    ],
)
def test_every_round_of_a_recurrent_net_is_converted(function, start):
    low = tcfp_jax.transform(function, RECIPE, include=ALL)
    found = jax.jit(low)(P, STEPS)
    right = jax.jit(by_hand)(P, STEPS, start)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
    stored = tcfp_jax.store(P, find_weights(low, P, STEPS), remainder="dropped")
    np.testing.assert_allclose(jax.jit(low)(stored, STEPS), right, atol=2e-2)


def cell_by_hand(i, h, x):
    state = jnp.full((4, 16), 0.5)
    inner = tcfp_jax.matmul(x, i, recipe=RECIPE)
    return jnp.tanh(inner + tcfp_jax.matmul(state, h, recipe=RECIPE))


def test_a_product_with_a_models_state_is_converted():
    cell = programs.NnxCell(nnx.Rngs(0))
    right = jax.jit(cell_by_hand)(cell.i.kernel[...], cell.h.kernel[...], X)
    convert_to_tcfp(cell, RECIPE, X, include=ALL, strict=True)
    assert kinds_of(survey(cell)) == {"i/kernel": "stored", "h/kernel": "stored"}

    def call(model, x):
        return model(x)

    np.testing.assert_allclose(nnx.jit(call)(cell, X), right, rtol=1e-5, atol=1e-6)

    variables = variables_of(programs.LinenCell(), X)
    variables["memory"] = {"state": jnp.full((4, 16), 0.5)}
    model = convert_to_tcfp(programs.LinenCell(), RECIPE, X, include=ALL, strict=True)
    assert kinds_of(survey(model)) == {"i/kernel": "stored", "h/kernel": "stored"}
    found, _ = jax.jit(lambda v: model.apply(v, X, mutable="memory"))(variables)
    kernels = [variables["params"][name]["kernel"] for name in ("i", "h")]
    right = jax.jit(cell_by_hand)(*kernels, X)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_statistics_of_a_weight_stay_float():
    variables = variables_of(programs.Spectral(), X)
    model = convert_to_tcfp(programs.Spectral(), RECIPE, X, include=ALL)
    report = survey(model)
    assert kinds_of(report) == {
        "first/kernel": "stored",
        "normed/kernel": "converted only",
    }
    assert len(report.records) == 2
    # the line of the module's author, not one of Flax
    assert re.search(rf"read by `\S+`{HERE}$", report.parameters[1].reason)

    def statistics(model):
        return jax.jit(lambda v: model.apply(v, X, mutable="batch_stats")[1])(variables)

    assert same_bits(statistics(model), statistics(programs.Spectral()))
