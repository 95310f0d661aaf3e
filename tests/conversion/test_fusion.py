"""Activations and norms between converted products: found in the trace, computed where they are quantized."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from models.llama import Llama, LlamaConfig
from pallas_kernels.dispatch import Verdict
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.fusion import alike, find, find_norms, operands_of
from tcfp_jax.conversion.transform import transform
from tcfp_jax.inference import quantize_params
from tcfp_jax.products import activation, norm
from tcfp_jax.recipes import recipe as named_recipe
from tests.collectives import collectives
from tests.helpers import mesh_of

ROWS, WIDTH, HIDDEN = 64, 128, 256
INCLUDE = ("linear", "small")


def gated(params, x):
    gate, up = checkpoint_name(x @ params["gate"], "gate"), x @ params["up"]
    return (nn.silu(gate) * up) @ params["down"]


def normed(params, x):
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    y = (wide * (jax.lax.rsqrt(mean_square + 1e-6) * params["gain"].astype(jnp.float32))).astype(x.dtype)
    return x + gated(params, y)


def with_bias(params, x):
    return nn.gelu(x @ params["gate"] + params["bias"]) @ params["down"]


def draw(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 6)
    normal = lambda key, *shape: jax.random.normal(key, shape)
    params = {
        "gate": normal(keys[0], WIDTH, HIDDEN) / 11, "up": normal(keys[1], WIDTH, HIDDEN) / 11,
        "down": normal(keys[2], HIDDEN, WIDTH) / 16, "gain": 1 + normal(keys[3], WIDTH) / 8,
        "bias": normal(keys[4], HIDDEN) / 4, "shift": normal(keys[4], WIDTH) / 8,
    }  # fmt: skip
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params), normal(keys[5], 2, ROWS // 2, WIDTH).astype(dtype)


def is_close(exact, got, least_decibels):
    exact, got = (np.asarray(x, np.float64) for x in (exact, got))
    return np.sum((exact - got) ** 2) <= 10 ** (-least_decibels / 10) * np.sum(exact**2)


def run(low, params, x):
    """(result, gradients), as one program: one by one, operations would be compiled one by one."""

    @jax.jit
    def step(params, x, g):
        y, pull = jax.vjp(low, params, x)
        return y, pull(g)

    return step(params, x, draw(x.dtype)[1])


def parts_of(function, recipe="tensorwise"):
    params, x = draw()
    jaxpr = jax.make_jaxpr(function)(params, x).jaxpr
    shown = [var.aval.shape != x.shape for var in jaxpr.invars]
    products = [n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"]
    recipes = dict.fromkeys(products, named_recipe(recipe))
    operands = operands_of(jaxpr, recipes, shown)
    return find_norms(jaxpr, recipes, operands), find(jaxpr, recipes, operands)


@pytest.mark.parametrize(
    ("function", "expected"),  # (matrices read, products that read it, products whose gradients come quantized)
    [(gated, [(2, 1, 2)]), (normed, [(1, 2, 0), (2, 1, 2)]), (with_bias, [(1, 1, 0)])],
)
def test_what_is_found(function, expected):
    _, parts = parts_of(function)
    found = [
        (part.activation.expression.forms.count("matrix"), len(part.readers), len(part.producers)) for part in parts
    ]
    assert sorted(found) == sorted(expected)


def layer_norm(params, x):
    wide, gain = x.astype(jnp.float32), params["gain"].astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean((wide - mean) ** 2, axis=-1, keepdims=True) + 1e-6)
    return ((wide - mean) / deviation * gain + params["shift"].astype(jnp.float32)).astype(x.dtype)


@jax.custom_vjp
def straight_through_norm(x):
    return x / jnp.max(jnp.abs(x), axis=-1, keepdims=True)


straight_through_norm.defvjp(lambda x: (straight_through_norm(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    ("function", "expected"),  # (vectors, products that read it)
    [
        (normed, [(1, 2)]),
        (lambda params, x: gated(params, layer_norm(params, x)), [(2, 2)]),
        (lambda params, x: gated(params, x / jnp.max(jnp.abs(x), axis=-1, keepdims=True)), [(0, 2)]),
        (gated, []),
        (lambda params, x: gated(params, straight_through_norm(x)), []),  # its author wrote its gradient
    ],
)
def test_norms_are_found(function, expected):
    norms, _ = parts_of(function)
    assert [(len(part.vectors), len(part.readers)) for part in norms] == expected


def reads_hidden(params, x):
    hidden = nn.silu(x @ params["gate"]) * (x @ params["up"])
    return hidden @ params["down"], hidden.sum()


def reads_gate(params, x):
    gate = x @ params["gate"]
    return (nn.silu(gate) * (x @ params["up"])) @ params["down"], gate.sum()


def casts_gate(params, x):
    wide = (x @ params["gate"]).astype(jnp.float32)
    hidden = (nn.silu(wide) * (x @ params["up"]).astype(jnp.float32)).astype(x.dtype)
    return hidden @ params["down"], wide.sum()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (casts_gate, [(1, 0)]),  # through a cast that both make, its gradient has another part
        (reads_hidden, []),  # it must be written anyway
        (reads_gate, [(1, 0)]),  # its gradient has another part
    ],
)
def test_what_others_read_is_left_to_them(function, expected):
    _, parts = parts_of(function)
    assert [(len(part.readers), len(part.producers)) for part in parts] == expected


@pytest.mark.parametrize("recipe", ["tcfp12", "residual_activation", "rowwise"])
def test_recipes_that_read_floats_too_or_scale_rows_have_no_parts(recipe):
    assert parts_of(gated, recipe)[1] == []


def test_norms_of_recipes_that_scale_rows_are_left_alone():
    assert parts_of(normed, "rowwise")[0] == [] and len(parts_of(normed, "tcfp12")[0]) == 1


@pytest.mark.slow_except("gated-tensorwise", "normed-blockwise")
@pytest.mark.parametrize(
    ("function", "recipe"),
    [
        *((gated, recipe) for recipe in ("tensorwise", "tcfp12_fast", "blockwise")),
        (normed, "tensorwise"),
        (normed, "blockwise"),
        (with_bias, "tensorwise"),
    ],
)
def test_results_and_gradients_are_those_of_the_program_left_alone(function, recipe):
    params, x = draw()
    plain = named_recipe(recipe)
    if recipe == "blockwise":
        plain = named_recipe(recipe, block=64)
    results = []
    for chosen in (plain, dataclasses.replace(plain, quantize_backend="triton")):
        low = transform(function, chosen, include=INCLUDE)
        results.append(run(low, params, x))
    for exact, got in zip(*map(jax.tree.leaves, results), strict=True):
        # Each operation is rounded to bfloat16, which moves a few of a hundred FP8 codes by one.
        assert is_close(exact, got, 24)


def heads(params, x):
    """Kernels with more axes than a matrix has, one of them stored the other way around."""
    gate, up = (params[name].reshape(WIDTH, 4, HIDDEN // 4).reshape(WIDTH, HIDDEN) for name in ("gate", "up"))
    down = params["down"].reshape(HIDDEN, 4, WIDTH // 4).transpose(1, 2, 0).reshape(WIDTH, HIDDEN)
    return gated({"gate": gate, "up": up, "down": down.T}, x)


def both_ways(params, x):
    value, hidden = casts_gate(params, x)
    return value + hidden.astype(x.dtype)


@pytest.mark.parametrize("function", [heads, both_ways])
def test_gradients_of_unusual_programs(function):
    params, x = draw()
    params = params | {name: params[name].reshape(WIDTH, 4, -1) for name in ("gate", "up")}
    flat = lambda params: params | {name: params[name].reshape(WIDTH, HIDDEN) for name in ("gate", "up")}
    plain, fused = (
        run(transform(lambda p, x: function(flat(p), x), recipe, include=INCLUDE), params, x)[1]
        for recipe in (named_recipe("tensorwise"), named_recipe("tensorwise", quantize_backend="triton"))
    )
    for exact, got in zip(jax.tree.leaves(plain), jax.tree.leaves(fused), strict=True):
        assert is_close(exact, got, 24)


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("turned", [False, True])
def test_weights_without_a_float_copy(turned):
    """Stored kernels, one of them the other way around, are read by the products around a part."""
    params, x = draw(jnp.float32)
    params = {name: params[name].T if turned else params[name] for name in ("gate", "up", "down")}
    straight = lambda p: {name: p[name].T for name in p} if turned else p
    low = transform(
        lambda p, x: gated(straight(p), x), named_recipe("tensorwise", quantize_backend="triton"), include=INCLUDE
    )
    stored = quantize_params(params, find_weights(low, params, x))["tcfp"]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    assert "map_quantize" in str(jax.make_jaxpr(lambda x: low(shapes, x, stored=stored))(x))
    assert is_close(low(params, x, stored=stored), low(shapes, x, stored=stored), 60)


def test_a_kernel_runs_or_nothing_changes():
    params, x = draw()
    plain = transform(gated, "tensorwise", include=INCLUDE)
    text = lambda low: str(jax.make_jaxpr(lambda p, x: jax.vjp(low, p, x)[1](x))(params, x))
    fused = transform(gated, named_recipe("tensorwise", quantize_backend="triton"), include=INCLUDE)
    assert "map_quantize" not in text(plain)
    assert "map_quantize" in text(fused)
    of_norm = transform(normed, named_recipe("tensorwise", quantize_backend="triton"), include=INCLUDE)
    assert "row_gradient" in text(of_norm)
    assert "row_gradient" not in text(transform(normed, "tensorwise", include=INCLUDE))


def test_what_is_not_finite_stays_visible():
    params, x = draw()
    low = transform(gated, named_recipe("tensorwise", quantize_backend="triton"), include=INCLUDE)
    y, (gradients, _) = run(low, params, x.at[0, 0, 0].set(jnp.nan))
    assert np.isnan(np.asarray(y, np.float32)).all()
    assert all(np.isnan(np.asarray(gradients[name], np.float32)).any() for name in ("gate", "up", "down"))


@pytest.mark.slow
def test_parts_of_a_llama_in_float32_change_nothing(monkeypatch):
    """As on a GPU where every kernel is the fastest, computed by their definitions: nothing is rounded in between."""
    fastest = lambda table, *asked: (Verdict("triton", None), Verdict("xla", "triton comes first"))
    config = LlamaConfig(layers=2, width=64, heads=2, kv_heads=1, hidden=128, context=32, remat="block")
    model, tokens = Llama(config, dtype="float32"), jnp.arange(64).reshape(2, 32)
    params = model.init(jax.random.key(0), tokens)["params"]
    results, has_parts = [], []
    for kernels in ("none", "all"):
        if kernels == "all":
            for module in (activation, norm):
                monkeypatch.setattr(module, "judge", fastest)
        low = convert_to_tcfp(model, "tensorwise", tokens, include=INCLUDE)
        loss = lambda params, low=low: jnp.mean(low.apply({"params": params}, tokens) ** 2)
        program = jax.make_jaxpr(jax.value_and_grad(loss))(params)
        results.append(jax.jit(jax.value_and_grad(loss))(params))
        has_parts.append("norm_gradient" in program.pretty_print(name_stack=True))
    assert has_parts == [False, True]
    for exact, got in zip(*map(jax.tree.leaves, results), strict=True):
        assert is_close(exact, got, 90)  # a norm's sums are added in another order


@pytest.mark.slow_except("scan")
@pytest.mark.parametrize("around", ["checkpoint", "vmap", "scan"])
def test_under_transformations(around):
    params, x = draw()
    low = transform(gated, named_recipe("tensorwise", quantize_backend="triton"), include=INCLUDE)
    loss = lambda p, x: jnp.sum(low(p, x).astype(jnp.float32) ** 2)
    expected = jax.jit(jax.grad(loss))(params, x)
    if around == "checkpoint":
        policy = jax.checkpoint_policies.save_only_these_names("gate")
        got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(params, x)
    elif around == "vmap":
        both = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, jnp.stack([x, x]))
        got = jax.tree.map(lambda leaf: leaf[1], both)
    else:
        total = lambda p, x: jax.lax.scan(lambda s, x: (s + loss(p, x), None), 0.0, x[None])[0]
        got = jax.jit(jax.grad(total))(params, x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert is_close(a, b, 30)


def test_products_of_one_x_quantize_it_once():
    """On several devices each quantization would have an all-reduce of its own, and XLA would not know them equal."""
    mesh, (params, x) = mesh_of(2), draw()
    low = jax.jit(transform(gated, "tensorwise", include=INCLUDE))
    compiled = low.lower(params, jax.device_put(x, NamedSharding(mesh, PartitionSpec("a")))).compile()
    amaxes = [part for c in collectives(compiled.as_text()) for part in c.parts if c.operation == "all-reduce"]
    assert [part.size for part in amaxes] == [1, 1]  # of x, and of what "down" reads


def test_what_quantizes_otherwise_shares_nothing():
    params, x = draw()
    jaxpr = jax.make_jaxpr(gated)(params, x).jaxpr
    gate, up, down = (n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general")
    shown = [var.aval.shape != x.shape for var in jaxpr.invars]
    operands = operands_of(jaxpr, dict.fromkeys((gate, up, down), named_recipe("tensorwise")), shown)
    of = lambda *names: alike(operands, dict(zip((gate, up, down), map(named_recipe, names), strict=True)))
    assert of("tensorwise", "tensorwise", "bf16") == dict.fromkeys((gate, up), (gate, up))
    assert of("tensorwise", "bf16", "tensorwise") == of("rowwise", "rowwise", "rowwise") == {}


@pytest.mark.parametrize("reduced", [jnp.sum, jnp.max, jnp.min])
def test_a_function_of_rows_is_what_its_program_was(reduced):
    x, gain = draw(jnp.float32)[1][0], draw(jnp.float32)[0]["gain"]
    function = lambda x, gain: (x - reduced(x, axis=-1, keepdims=True)) * gain
    program = jax.make_jaxpr(function)(x, gain)
    assert [norm.problem(eqn, x.shape) for eqn in program.jaxpr.eqns] == [None] * len(program.jaxpr.eqns)
    np.testing.assert_allclose(norm.RowFunction(program, "")(x, gain), function(x, gain), rtol=1e-6)
    down = jax.make_jaxpr(lambda x: x - reduced(x, axis=0, keepdims=True))(x)
    problems = [norm.problem(eqn, x.shape) for eqn in down.jaxpr.eqns]
    assert any(problem is not None and "over other axes" in problem for problem in problems)


def test_kernels_are_asked_for_in_the_format_that_they_write(monkeypatch):
    """E4M3 for what the next product reads, E5M2 for what those before it get back."""
    asked = []

    def judge(table, backend, options, *given):
        asked.append(options.dtype.name)
        return (Verdict("triton", None),)

    monkeypatch.setattr(activation, "judge", judge)
    recipe, x = named_recipe("tensorwise"), jnp.ones((32, 128), jnp.bfloat16)
    part = activation.Activation.of(jax.make_jaxpr(nn.silu)(x), recipe, recipe)
    assert part.here((x,)) is not None and asked == ["float8_e4m3fn", "float8_e5m2"]
