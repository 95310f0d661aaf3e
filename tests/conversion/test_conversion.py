"""Conversion of Linen models: the same parameters and bits as hand-written layers, a
report, state that arrives.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tcfp_jax
from tcfp_jax.conversion import (
    convert_to_tcfp,
    export,
    find_weights,
    restore,
    survey,
    to_bf16,
)
from tcfp_jax.inference import quantize_params
from tcfp_jax.linen import TCFPDense
from tcfp_jax.recipes import NAMES
from tcfp_jax.recipes import recipe as named_recipe
from tests.helpers import parametrize, refused, same_bits, slow_except, variables_of

X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 16)), jnp.float32)
TOKENS = jnp.arange(8).reshape(2, 4)
ALL = ("linear", "small", "head")
STORED = [name for name in NAMES if named_recipe(name).stored is not None]
convert = functools.partial(convert_to_tcfp, include=ALL)


class MLP(nn.Module):
    dense: type = nn.Dense
    remat: str = "no"

    @nn.compact
    def __call__(self, x):
        dense = nn.remat(self.dense) if self.remat == "yes" else self.dense
        return dense(16, use_bias=False, name="down")(nn.relu(dense(32, name="up")(x)))

    @nn.compact
    def features(self, x):
        return self.dense(8, name="other")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(
            nn.LayerNorm(name="norm")(x)
        )
        hidden = nn.gelu(nn.DenseGeneral((4, 8), name="up")(x))
        return x + nn.Einsum((4, 8, 16), "...hd,hdn->...n", name="down")(hidden), None


class GPT(nn.Module):
    layers: int = 2
    form: str = "scan"

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(32, 16, name="embedding")
        x = embedding(tokens)
        if self.form == "scan":
            axes = dict(
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = nn.scan(nn.remat(Block), **axes)(name="blocks")(x, None)
        else:
            for layer in range(self.layers):
                x, _ = Block(name=f"block_{layer}")(x)
        return embedding.attend(nn.LayerNorm(name="norm")(x))


def run(model, variables, *inputs, **options):
    """A compiled call; the same model with the same options compiles once."""
    if not options:
        return jax.jit(model.apply)(variables, *inputs)
    return jax.jit(
        lambda variables, *inputs: model.apply(variables, *inputs, **options)
    )(variables, *inputs)


def state_of(weights, params):
    return jax.jit(
        lambda params: tcfp_jax.layer_state(
            tcfp_jax.error_feedback(weights).init(params)
        )
    )(params)


def low_precision_products(model, variables, *inputs):
    """How many products of the traced model are this project's."""

    def count(jaxpr):  # by calls: equal products share one program
        def inner(eqn):
            return jax.tree.leaves(
                list(eqn.params.values()),
                is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"),
            )

        def own(eqn):
            return eqn.primitive.name == "custom_vjp_call"

        def bodies(eqn):
            return [
                getattr(leaf, "jaxpr", leaf)
                for leaf in inner(eqn)
                if hasattr(leaf, "eqns")
            ]

        return sum(
            1 if own(eqn) else sum(map(count, bodies(eqn))) for eqn in jaxpr.eqns
        )

    return count(jax.make_jaxpr(lambda v: model.apply(v, *inputs))(variables).jaxpr)


def step(model, params, x, weights):
    """One training step from the same parameters: (new parameters, optimizer state)."""
    tx = optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback(weights))

    @jax.jit
    def run(params):
        state = tx.init(params)

        def loss(p):
            return jnp.mean(
                model.apply({"params": p, "tcfp": tcfp_jax.layer_state(state)}, x) ** 2
            )

        updates, after = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), after

    return run(params)


@slow_except("tcfp12_fast-no")
@pytest.mark.optimized("slow")
@parametrize(
    "recipe, remat",
    [("bf16", "no"), ("tcfp12", "yes"), ("tcfp12_fast", "no"), ("tensorwise", "yes")],
)
def test_a_step_is_that_of_the_model_written_by_hand(recipe, remat):
    base = MLP(remat=remat)
    params = variables_of(base, X)["params"]
    dense = type(
        "Dense", (TCFPDense,), {"recipe": recipe, "__annotations__": {"recipe": str}}
    )
    converted = convert(base, recipe)
    by_hand = MLP(dense=dense, remat=remat)
    assert isinstance(converted, MLP)
    assert same_bits(
        step(converted, params, X, recipe), step(by_hand, params, X, recipe)
    )


@parametrize("recipe", sorted(set(STORED) - {"tcfp12", "tcfp12_fast", "tensorwise"}))
def test_every_recipe_converts_with_its_state(recipe):
    model = convert(MLP(), recipe, X, strict=True)
    params = variables_of(MLP(), X)["params"]
    after, _ = jax.eval_shape(
        lambda params: step(model, params, X, find_weights(model)), params
    )
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, params)


def test_initial_parameters_are_those_of_the_base_model():
    def init(model):
        return jax.jit(model.init)(jax.random.key(1), X)

    assert same_bits(init(convert(MLP(), "tcfp12")), init(MLP()))


def test_the_base_model_is_untouched_in_any_order_of_tracing():
    outputs = []
    variables = variables_of(MLP(), X)
    for first in ("base", "converted"):
        base = MLP()
        models = {"base": base, "converted": convert(base, "tcfp12")}
        order = sorted(models, key=lambda name: name != first)
        result = {
            name: jax.jit(lambda v, name=name: models[name].apply(v, X))(variables)
            for name in order
        }
        counts = {
            name: low_precision_products(models[name], variables, X) for name in order
        }
        assert counts == {"base": 0, "converted": 2}
        outputs.append(result)
    assert same_bits(outputs[0], outputs[1])
    assert not same_bits(outputs[0]["base"], outputs[0]["converted"])


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(x)


class Cached(nn.Module):
    """Layers behind caches of traced functions, which do not know of interceptors."""

    @nn.compact
    def __call__(self, x):
        return nn.jit(Inner)(name="jit")(nn.remat(Inner)(name="remat")(x))


@parametrize("first", ["base", "converted"])
def test_caches_of_traced_functions_know_the_conversion(first):
    base = Cached()
    variables = variables_of(base, X)
    models = {"base": base, "converted": convert(base, "tensorwise")}
    order = sorted(models, key=lambda name: name != first)
    found = {
        name: low_precision_products(models[name], variables, X)
        for name in [*order, *order]
    }
    assert found == {"base": 0, "converted": 2}
    results = {name: run(models[name], variables, X) for name in [*order, *order]}
    kernels = [variables["params"][name]["Dense_0"] for name in ("remat", "jit")]

    @jax.jit
    def by_hand(x):
        layer = TCFPDense(16, recipe="tensorwise")
        exact = nn.Dense(16).apply(
            {"params": kernels[1]}, nn.Dense(16).apply({"params": kernels[0]}, x)
        )
        return exact, layer.apply(
            {"params": kernels[1]}, layer.apply({"params": kernels[0]}, x)
        )

    for name, expected in zip(("base", "converted"), by_hand(X), strict=True):
        np.testing.assert_allclose(results[name], expected, rtol=0, atol=1e-5)
    assert len(survey(models["converted"], X).converted) == 2


@pytest.fixture(scope="module")
def gpt():
    """(base model, its variables, the converted model, its weights)."""
    model = convert(GPT(), "tcfp12_fast", TOKENS, strict=True)
    return GPT(), variables_of(GPT(), TOKENS), model, find_weights(model)


def test_attention_einsum_and_tied_head_under_scan_and_remat(gpt):
    base, variables, model, weights = gpt
    before = run(base, variables, TOKENS)
    assert len(survey(model).converted) == 7
    assert (
        len(survey(convert(GPT(form="unrolled"), "tcfp12_fast", TOKENS)).converted)
        == 13
    )
    params, state = step(model, variables["params"], TOKENS, weights)
    assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    stored = tcfp_jax.layer_state(state)
    assert stored["blocks"]["attention"]["query"]["kernel"].shape == (2, 16, 16)
    assert stored["blocks"]["down"]["kernel"].stack == (2,)
    assert same_bits(jax.jit(lambda v: base.apply(v, TOKENS))(variables), before)
    assert same_bits(run(export(model), variables, TOKENS), before)


def test_state_reaches_layers_under_a_scan_that_does_not_name_it(gpt):
    _, variables, model, weights = gpt
    tx = tcfp_jax.error_feedback(weights)

    @jax.jit
    def outputs(params):
        """The result for the original parameters with the state of other ones."""
        state = tcfp_jax.layer_state(tx.init(params))
        return model.apply({**variables, "tcfp": state}, TOKENS)

    fresh = run(model, variables, TOKENS)
    np.testing.assert_allclose(outputs(variables["params"]), fresh, rtol=0, atol=1e-5)
    for path in weights:  # state of other weights changes the result: none is dropped
        changed = jax.tree_util.tree_map_with_path(
            lambda p, leaf: (
                leaf + 0.1 * np.sign(leaf)
                if "/".join(entry.key for entry in p) == path
                else leaf
            ),
            variables["params"],
        )
        assert not jnp.allclose(outputs(changed), fresh, atol=1e-4), path


def test_scan_and_unrolled_multiply_alike(gpt):
    _, variables, model, _ = gpt
    unrolled = {
        name: value for name, value in variables["params"].items() if name != "blocks"
    }
    blocks = variables["params"]["blocks"]
    unrolled |= {
        f"block_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(2)
    }
    y = run(convert(GPT(form="unrolled"), "tcfp12_fast"), {"params": unrolled}, TOKENS)
    np.testing.assert_allclose(y, run(model, variables, TOKENS), rtol=0, atol=2e-2)


class Shared(nn.Module):
    def setup(self):
        self.dense = nn.Dense(16)
        self.experts = nn.vmap(
            nn.Dense,
            in_axes=0,
            out_axes=0,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )(16)

    def __call__(self, x):
        return self.encode(self.dense(x))

    def encode(self, x):
        return self.experts(self.dense(x))


def test_shared_modules_vmap_and_other_methods():
    base = Shared()
    variables = variables_of(base, X)
    model = convert(base, "tensorwise", X, strict=True)
    weights = find_weights(model)
    assert {path: weight.layout.stack for path, weight in weights.items()} == {
        "dense/kernel": (),
        "experts/kernel": (0,),
    }
    params, state = step(model, variables["params"], X, weights)
    collection = {"params": params, "tcfp": tcfp_jax.layer_state(state)}
    methods = ("encode", Shared.encode, model.encode, lambda m, x: m.encode(x))

    @jax.jit
    def outputs(collection):
        bound = model.bind({"params": collection["params"]}).encode(X)
        alone = model.apply({"params": collection["params"]}, X, method="encode")
        flax = base.apply({"params": collection["params"]}, X, method="encode")
        return (
            [model.apply(collection, X, method=method) for method in methods],
            flax,
            bound,
            alone,
        )

    results, flax, bound, alone = outputs(collection)
    assert all(same_bits(y, results[0]) and not same_bits(y, flax) for y in results)
    assert same_bits(bound, alone)


class Parts(nn.Module):
    """A model whose parts are asked for and called, as transformers encodes and
    decodes; `given` is one by name.
    """

    given: nn.Module

    def setup(self):
        self.inner = nn.Dense(32)

    def __call__(self, x):
        return self.given(nn.relu(self.inner(x)))

    def part(self):
        return self.inner


FUNCTIONS = {
    "a part of a method": (lambda module, x: module.part()(x), "inner"),
    "a part": (functools.partial(lambda module, x: module.inner(x)), "inner"),
    "a part by name": ("given", "given"),
}


@parametrize("name", FUNCTIONS)
def test_a_function_of_the_module_is_converted_as_a_method_is(name):
    method, part = FUNCTIONS[name]
    model = convert(Parts(nn.Dense(16)), "tensorwise", X)
    params = variables_of(model, X)["params"]
    x = X if part == "inner" else jnp.tile(X, 2)
    found = model.apply({"params": params}, x, method=method)
    layer = TCFPDense(params[part]["bias"].size, recipe="tensorwise")
    assert same_bits(found, layer.apply({"params": params[part]}, x))
    served = quantize_params(params, find_weights(model))
    assert same_bits(model.apply(served, x, method=method), found)
    with refused(
        r"part of the converted Parts returns a Dense.*module\.part\(\)\(x\)", TypeError
    ):
        model.bind({"params": params}).part()


class Outer(nn.Module):
    model: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="own")(self.model(x))


def test_a_converted_model_inside_another():
    outer = Outer(convert(MLP(), "tensorwise"))
    params = variables_of(outer, X)["params"]

    @jax.jit
    def by_hand(params):
        inner = convert(MLP(), "tensorwise").apply({"params": params["model"]}, X)
        return nn.Dense(16).apply({"params": params["own"]}, inner)

    assert same_bits(run(outer, {"params": params}, X), by_hand(params))


def test_state_reaches_every_layer_of_a_bound_model_too(gpt):
    _, variables, model, weights = gpt
    given = {**variables, "tcfp": state_of(weights, variables["params"])}
    bound, applied = jax.jit(
        lambda given: (model.bind(given)(TOKENS), model.apply(given, TOKENS))
    )(given)
    assert same_bits(bound, applied)


def test_state_without_layouts_names_the_repair():
    model = convert(nn.DenseGeneral((4, 8)), "tcfp12")
    variables = variables_of(model, X)

    def apply(variables):
        state = tcfp_jax.layer_state(
            tcfp_jax.error_feedback("tcfp12").init(variables["params"])
        )
        return model.apply({**variables, "tcfp": state}, X)

    with refused("find_weights"):
        jax.eval_shape(apply, variables)


class Conv1D(nn.Module):
    """A kernel stored transposed."""

    features: int

    @nn.compact
    def __call__(self, x):
        return (
            x
            @ self.param(
                "kernel", nn.initializers.normal(), (self.features, x.shape[-1])
            ).T
        )


class TwoKinds(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Conv1D(16, name="conv")(nn.Dense(16, name="dense")(x))


def test_an_unknown_layer_with_a_transposed_kernel_is_converted():
    model = convert(TwoKinds(), "tcfp12", X, strict=True)
    assert [(r.path, r.product.equation) for r in survey(model).converted] == [
        ("dense", "cda,ab->cdb"),
        ("conv", "cdb,ab->cda"),
    ]
    model = convert(Conv1D(16), "tcfp12", X, strict=True)
    variables = variables_of(Conv1D(16), X)

    def by_hand(kernel):
        return tcfp_jax.matmul(X, kernel.T, recipe="tcfp12")

    y = run(model, variables, X)
    assert same_bits(y, jax.jit(by_hand)(variables["params"]["kernel"]))
    # The stored form keeps the axes, and products read it transposed.
    state = state_of(find_weights(model), variables["params"])
    np.testing.assert_allclose(
        run(model, {**variables, "tcfp": state}, X), y, atol=1e-6
    )


class TiedByHand(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(32, 16, name="embedding")
        return nn.Dense(16, name="dense")(embedding(tokens)) @ embedding.embedding.T


def test_a_head_that_is_tied_by_hand_is_a_head():
    report = survey(
        convert_to_tcfp(
            TiedByHand(), "tcfp12", TOKENS, include=("linear", "small"), strict=True
        )
    )
    assert [r.weight_path for r in report.converted] == ["dense/kernel"]
    assert [(r.weight_path, r.product.head) for r in report.skipped] == [
        ("embedding/embedding", True)
    ]
    assert len(survey(convert(TiedByHand(), "tcfp12", TOKENS)).converted) == 2


def test_rules_first_match_wins_and_unmatched_are_listed():
    def by_product(path, product):
        return "tensorwise" if product.n == 32 else None

    rules = [("up", "bf16"), by_product, ("down", None), ("never", "tcfp12")]
    report = survey(convert_to_tcfp(MLP(), "tcfp12", X, rules=rules[1:]))
    assert [(r.path, r.recipe) for r in report.converted] == [
        ("up", tcfp_jax.recipe("tensorwise"))
    ]
    assert [(r.path, r.reason) for r in report.skipped] == [("down", "rule 'down'")]
    assert report.unmatched_rules == ("'never'",)
    report = survey(convert_to_tcfp(MLP(), "tcfp12", X, rules=rules))
    assert report.converted[0].recipe == tcfp_jax.recipe("bf16")
    assert "by_product" in report.unmatched_rules


def test_default_leaves_head_and_small_layers_and_says_so():
    report = survey(convert_to_tcfp(GPT(), "tcfp12", TOKENS, rules={"up": "tcfp12"}))
    reasons = {record.path: record.reason for record in report.skipped}
    assert "too small" in reasons["blocks/down"]
    assert [record.path for record in report.converted] == ["blocks/up"]
    assert any("output head" in record.reason for record in report.skipped)


def test_layers_that_are_switched_off_are_flax_bit_for_bit():
    base = MLP()
    variables = variables_of(base, X)
    exact = run(base, variables, X)
    model = convert(base, "tcfp12", X)
    low = run(model, variables, X)
    off = to_bf16(model, "up", "down")
    assert same_bits(run(off, variables, X), exact)
    assert [record.path for record in survey(to_bf16(model, "up")).converted] == [
        "down"
    ]
    half = restore(off, "up")
    assert not same_bits(run(half, variables, X), exact)
    assert same_bits(run(restore(half, "down"), variables, X), low)
    state = state_of("tcfp12", variables["params"])
    assert same_bits(run(off, {**variables, "tcfp": state}, X), exact)
    with refused("'block' finds no low-precision product"):
        to_bf16(model, "block")
    with refused("'up' was not switched off"):
        restore(model, "up")


def test_models_written_by_hand_are_switched_and_surveyed_too():
    model = MLP(dense=TCFPDense)
    variables = variables_of(MLP(), X)
    off = to_bf16(model, "up")
    assert [record.path for record in survey(off, X).converted] == ["down"]
    assert "by hand" in str(survey(model, X))
    assert sorted(find_weights(model, X)) == [
        "down/kernel",
        "up/kernel",
    ]
    assert same_bits(run(to_bf16(off, "down"), variables, X), run(MLP(), variables, X))
    assert same_bits(run(restore(off, "up"), variables, X), run(model, variables, X))
    assert export(TCFPDense(4, use_bias=False)) == nn.Dense(4, use_bias=False)
    for hand_written in (model, off):
        with refused(r"MLP was not converted.*write Flax's own.*to_bf16"):
            export(hand_written)
    with refused("MLP is not converted"):
        survey(MLP(), X)


class Annotated(nn.Module):
    """Partitioned parameters, and a collection that the model writes."""

    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x)
        return nn.Dense(
            16,
            kernel_init=nn.with_partitioning(nn.initializers.normal(), ("k", "n")),
            name="dense",
        )(x)


def test_boxed_parameters_and_mutable_collections():
    base = Annotated()
    variables = variables_of(base, X)
    model = convert(base, "tcfp12", X, strict=True)
    state = state_of(find_weights(model), variables["params"])
    assert state["dense"]["kernel"].shape == (16, 16)
    y, written = run(
        model,
        {"params": variables["params"], "tcfp": state},
        X,
        mutable=["intermediates", "params"],
    )
    assert set(written) == {"intermediates", "params"}
    assert jax.tree.structure(written["params"]) == jax.tree.structure(
        variables["params"]
    )
    # The same quantized kernel; two programs may sum its product in another order.
    np.testing.assert_allclose(
        y, run(model, {"params": variables["params"]}, X), rtol=1e-5, atol=1e-6
    )
    with refused(r"none of the 1 weights .* other/kernel is not"):
        tcfp_jax.error_feedback(
            {"other/kernel": find_weights(model)["dense/kernel"]}
        ).init(variables["params"])
    with refused("mask"):
        tcfp_jax.error_feedback(find_weights(model), mask=lambda params: params)


def test_accumulation_feeds_one_state():
    base = MLP()
    params = variables_of(base, X)["params"]
    model = convert(base, "tcfp12")
    tx = optax.MultiSteps(
        optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback("tcfp12")), 2
    )
    state = jax.jit(tx.init)(params)
    first = tcfp_jax.layer_state(state)

    @jax.jit
    def update(state):
        def loss(p):
            return jnp.mean(
                model.apply({"params": p, "tcfp": tcfp_jax.layer_state(state)}, X) ** 2
            )

        return tx.update(jax.grad(loss)(params), state, params)[1]

    with jax.numpy_dtype_promotion("standard"):
        state = update(state)
        assert same_bits(tcfp_jax.layer_state(state), first)
        state = update(state)
    assert not same_bits(tcfp_jax.layer_state(state), first)


@parametrize(
    "arguments, options, error, message",
    [
        ((object(), "tcfp12"), {}, TypeError, "neither a flax.linen.Module"),
        ((MLP(), "tcfp13"), {}, ValueError, "tcfp12_fast"),
        (
            (MLP(), "tcfp12"),
            {"rules": {"(": "bf16"}},
            ValueError,
            "not a regular expression",
        ),
        ((MLP(), "tcfp12"), {"rules": {"up": "tcfp13"}}, ValueError, "tcfp12_fast"),
        (
            (MLP(), "tcfp12"),
            {"rules": [3]},
            ValueError,
            "neither a .regex, recipe. pair",
        ),
        ((MLP(), "tcfp12"), {"include": "heads"}, ValueError, "heads.*linear"),
        ((MLP(), "tcfp12"), {"strict": True}, ValueError, "sample inputs"),
        ((nn.relu, "tcfp12"), {}, TypeError, "neither"),
        (
            (MLP(), "tcfp12", X),
            {},
            ValueError,
            "(?s)no product of MLP.*widen include:.*too small",
        ),
        (
            (nn.Dense(4, precision="highest"), "tcfp12", X),
            {"include": ALL},
            ValueError,
            "precision='HIGHEST'",
        ),
        (
            (nn.Dropout(0.5, deterministic=True), "tcfp12", X),
            {},
            ValueError,
            "multiplies none of its parameters",
        ),
    ],
)
def test_bad_input(arguments, options, error, message):
    with refused(message, error):
        convert_to_tcfp(*arguments, **options)


def test_nothing_converted_is_an_error_when_it_shows():
    model = convert_to_tcfp(MLP(), "tcfp12")
    with refused("no product of MLP"):
        jax.eval_shape(model.apply, variables_of(model, X), X)
