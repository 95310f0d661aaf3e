"""Conversion of Linen models: the same parameters and bits as hand-written layers, a report, state that arrives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, export, find_weights, register_adapter, restore, survey, to_bf16
from tcfp_jax.linen import TCFPDense, TCFPDenseGeneral, TCFPEinsum, TCFPEmbed, TCFPLayerNorm

X = jax.random.normal(jax.random.key(0), (2, 4, 16))
TOKENS = jnp.arange(8).reshape(2, 4)
ALL = ("linear", "small", "head")
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
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(nn.LayerNorm(name="norm")(x))
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
            axes = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = nn.scan(nn.remat(Block), **axes)(name="blocks")(x, None)
        else:
            for layer in range(self.layers):
                x, _ = Block(name=f"block_{layer}")(x)
        return embedding.attend(nn.LayerNorm(name="norm")(x))


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        jnp.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def step(model, params, x, weights, **options):
    """One training step from the same parameters: (new parameters, optimizer state)."""
    tx = optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback(weights, **options))
    state = jax.jit(tx.init)(params)

    @jax.jit
    def run(params, state):
        loss = lambda p: jnp.mean(model.apply({"params": p, "tcfp": tcfp_jax.layer_state(state)}, x) ** 2)
        updates, after = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), after

    return run(params, state)


@pytest.mark.parametrize("remat", ["no", "yes"])
@pytest.mark.parametrize("recipe", ["bf16", "tcfp12", "tcfp12_fast", "tensorwise"])
def test_a_step_is_that_of_the_model_written_by_hand(recipe, remat):
    base = MLP(remat=remat)
    variables = base.init(jax.random.key(1), X)
    by_hand = MLP(dense=functools.partial(TCFPDense, recipe=recipe)) if remat == "no" else None
    if by_hand is None:
        by_hand = MLP(
            dense=type("Dense", (TCFPDense,), {"recipe": recipe, "__annotations__": {"recipe": str}}), remat="yes"
        )
    converted = convert(base, recipe)
    assert same(converted.init(jax.random.key(1), X), variables) and isinstance(converted, MLP)
    assert same(step(converted, variables["params"], X, recipe), step(by_hand, variables["params"], X, recipe))


def test_base_model_is_untouched_and_order_of_tracing_never_matters():
    outputs = []
    for first in ("base", "converted"):
        base = MLP()
        variables = base.init(jax.random.key(1), X)
        models = {"base": base, "converted": convert(base, "tcfp12")}
        order = sorted(models, key=lambda name: name != first)
        result = {name: jax.jit(models[name].apply)(variables, X) for name in order}
        result |= {f"{name} again": jax.jit(lambda v, name=name: models[name].apply(v, X))(variables) for name in order}
        outputs.append(result)
    assert same(outputs[0], outputs[1])
    assert not same(outputs[0]["base"], outputs[0]["converted"])


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(x)


class Cached(nn.Module):
    """Layers behind caches of traced functions, which do not know of interceptors."""

    @nn.compact
    def __call__(self, x):
        return nn.jit(Inner)(name="jit")(nn.remat(Inner)(name="remat")(x))


@pytest.mark.parametrize("first", ["base", "converted"])
def test_caches_of_traced_functions_know_the_conversion(first):
    base = Cached()
    variables = base.init(jax.random.key(1), X)
    expected = TCFPDense(16, recipe="tensorwise").apply(
        {"params": variables["params"]["jit"]["Dense_0"]},
        TCFPDense(16, recipe="tensorwise").apply({"params": variables["params"]["remat"]["Dense_0"]}, X),
    )
    exact = variables["params"]["jit"]["Dense_0"]["kernel"]
    exact = X @ variables["params"]["remat"]["Dense_0"]["kernel"] @ exact
    models = {"base": base, "converted": convert(base, "tensorwise")}
    for name in sorted(models, key=lambda name: name != first) * 2:
        y = models[name].apply(variables, X)
        np.testing.assert_allclose(y, exact if name == "base" else expected, rtol=0, atol=1e-5)
    assert len(survey(models["converted"], X).converted) == 2


def test_attention_einsum_and_tied_head_under_scan_and_remat():
    base = GPT()
    variables = jax.jit(base.init)(jax.random.key(1), TOKENS)
    before = jax.jit(base.apply)(variables, TOKENS)
    model = convert(base, "tcfp12_fast", TOKENS, strict=True)
    assert len(survey(model).converted) == 7 and not survey(model).unseen
    assert len(survey(convert(GPT(form="unrolled"), "tcfp12_fast", TOKENS)).converted) == 13
    weights = find_weights(model)
    params, state = step(model, variables["params"], TOKENS, weights)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    stored = tcfp_jax.layer_state(state)
    assert stored["blocks"]["attention"]["query"]["kernel"].hi.shape == (2, 16, 16)
    assert stored["blocks"]["down"]["kernel"].scale.shape == (2,)
    # State of other weights changes every layer's result: none is dropped.
    apply = jax.jit(model.apply)
    fresh = apply(variables, TOKENS)
    state_of = jax.jit(lambda params: tcfp_jax.layer_state(tcfp_jax.error_feedback(weights).init(params)))
    mine = state_of(variables["params"])
    np.testing.assert_allclose(apply({**variables, "tcfp": mine}, TOKENS), fresh, rtol=0, atol=1e-5)
    for path in weights:
        changed = jax.tree_util.tree_map_with_path(
            lambda p, leaf: leaf + 0.1 * jnp.sign(leaf) if "/".join(entry.key for entry in p) == path else leaf,
            variables["params"],
        )
        assert not jnp.allclose(apply({**variables, "tcfp": state_of(changed)}, TOKENS), fresh, atol=1e-4), path
    assert jnp.array_equal(jax.jit(base.apply)(variables, TOKENS), before)
    assert jnp.array_equal(jax.jit(export(model).apply)(variables, TOKENS), before)


def test_scan_and_unrolled_multiply_alike():
    unrolled, scanned = (convert(GPT(form=form), "tcfp12") for form in ("unrolled", "scan"))
    variables = jax.jit(GPT(form="unrolled").init)(jax.random.key(1), TOKENS)["params"]
    stacked = {name: value for name, value in variables.items() if not name.startswith("block_")}
    stacked["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(variables[f"block_{i}"] for i in range(2)))
    expected = jax.jit(unrolled.apply)({"params": variables}, TOKENS)
    np.testing.assert_allclose(jax.jit(scanned.apply)({"params": stacked}, TOKENS), expected, rtol=0, atol=2e-2)


class Shared(nn.Module):
    def setup(self):
        self.dense = nn.Dense(16)
        self.experts = nn.vmap(
            nn.Dense, in_axes=0, out_axes=0, variable_axes={"params": 0}, split_rngs={"params": True}
        )(16)

    def __call__(self, x):
        return self.encode(self.dense(x))

    def encode(self, x):
        return self.experts(self.dense(x))


def test_shared_modules_vmap_and_other_methods():
    base = Shared()
    variables = base.init(jax.random.key(1), X)
    model = convert(base, "tensorwise", X, strict=True)
    weights = find_weights(model)
    assert {path: weight.layout.stack for path, weight in weights.items()} == {
        "dense/kernel": (),
        "experts/kernel": (0,),
    }
    params, state = step(model, variables["params"], X, weights)
    collection = {"params": params, "tcfp": tcfp_jax.layer_state(state)}
    for method in ("encode", Shared.encode, model.encode, lambda m, x: m.encode(x)):
        y = model.apply(collection, X, method=method)
        assert not jnp.array_equal(y, base.apply({"params": params}, X, method="encode"))
        assert jnp.array_equal(y, model.apply(collection, X, method="encode"))
    assert jnp.array_equal(
        model.bind({"params": params}).encode(X), model.apply({"params": params}, X, method="encode")
    )


class Outer(nn.Module):
    model: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="own")(self.model(x))


def test_a_converted_model_inside_another():
    outer = Outer(convert(MLP(), "tensorwise"))
    variables = outer.init(jax.random.key(1), X)
    inner = convert(MLP(), "tensorwise").apply({"params": variables["params"]["model"]}, X)
    expected = nn.Dense(16).apply({"params": variables["params"]["own"]}, inner)
    assert jnp.array_equal(outer.apply(variables, X), expected)


def test_state_that_a_lifted_transform_would_drop_raises():
    model = convert(GPT(), "tcfp12", TOKENS)
    variables = GPT().init(jax.random.key(1), TOKENS)
    state = tcfp_jax.layer_state(tcfp_jax.error_feedback(find_weights(model)).init(variables["params"]))
    with pytest.raises(ValueError, match=r'add "tcfp": 0 to variable_axes'):
        model.bind({**variables, "tcfp": state})(TOKENS)


def test_state_without_layouts_names_the_repair():
    model = convert(nn.DenseGeneral((4, 8)), "tcfp12")
    variables = model.init(jax.random.key(1), X)
    state = tcfp_jax.layer_state(tcfp_jax.error_feedback("tcfp12").init(variables["params"]))
    with pytest.raises(ValueError, match="find_weights"):
        model.apply({**variables, "tcfp": state}, X)


class Conv1D(nn.Module):
    """A kernel stored transposed."""

    features: int

    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.normal(), (self.features, x.shape[-1])).T


class TwoKinds(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Conv1D(16, name="conv")(nn.Dense(16, name="dense")(x))


def test_strict_finds_what_no_adapter_saw_and_register_adapter_teaches():
    class Known(Conv1D):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.normal(), (self.features, x.shape[-1])).T

    def forward(layer, multiply, x):
        kernel = layer.param("kernel", nn.initializers.normal(), (layer.features, x.shape[-1]))
        return multiply("...k,nk->...n", x, kernel)

    report = survey(convert(TwoKinds(), "tcfp12", X))
    assert [product.parameters for product in report.unseen] == [("conv/kernel",)] and "no adapter saw" in str(report)
    with pytest.raises(ValueError, match=r"conv/kernel.*register_adapter"):
        convert(TwoKinds(), "tcfp12", X, strict=True)
    register_adapter(Known, forward)
    model = convert(Known(16), "tcfp12", X, strict=True)
    variables = model.init(jax.random.key(1), X)
    assert jnp.array_equal(
        model.apply(variables, X), tcfp_jax.matmul(X, variables["params"]["kernel"].T, recipe="tcfp12")
    )
    for weights in ("tcfp12", find_weights(model)):  # a transposed kernel is stored as it is, and read transposed
        state = tcfp_jax.layer_state(tcfp_jax.error_feedback(weights).init(variables["params"]))
        np.testing.assert_allclose(model.apply({**variables, "tcfp": state}, X), model.apply(variables, X), atol=1e-6)


def test_rules_first_match_wins_and_unmatched_are_listed():
    by_module = lambda path, module: "tensorwise" if getattr(module, "features", 0) == 32 else None
    rules = [("up", "bf16"), by_module, ("down", None), ("never", "tcfp12")]
    report = survey(convert_to_tcfp(MLP(), "tcfp12", X, rules=rules[1:]))
    assert [(r.path, r.recipe) for r in report.converted] == [("up", tcfp_jax.recipe("tensorwise"))]
    assert [(r.path, r.choice.reason) for r in report.skipped] == [("down", "rule 'down'")]
    assert report.unmatched_rules == ("'never'",)
    report = survey(convert_to_tcfp(MLP(), "tcfp12", X, rules=rules))
    assert report.converted[0].recipe == tcfp_jax.recipe("bf16") and "<lambda>" in report.unmatched_rules


def test_default_leaves_head_and_small_layers_and_says_so():
    report = survey(convert_to_tcfp(GPT(), "tcfp12", TOKENS, rules={"up": "tcfp12"}))
    reasons = {record.path: record.choice.reason for record in report.skipped if record.parameter != "scale"}
    assert "too small" in reasons["blocks/down"] and [record.path for record in report.converted] == ["blocks/up"]
    assert any("output head" in record.choice.reason for record in report.skipped)


def test_layers_that_are_switched_off_are_flax_bit_for_bit():
    base = MLP()
    variables = base.init(jax.random.key(1), X)
    model = convert(base, "tcfp12")
    off = to_bf16(model, "up", "down")
    assert jnp.array_equal(off.apply(variables, X), base.apply(variables, X))
    assert [record.path for record in survey(to_bf16(convert(base, "tcfp12", X), "up")).converted] == ["down"]
    half = restore(off, "up")
    assert not jnp.array_equal(half.apply(variables, X), base.apply(variables, X))
    assert jnp.array_equal(restore(half, "down").apply(variables, X), model.apply(variables, X))
    state = tcfp_jax.layer_state(tcfp_jax.error_feedback("tcfp12").init(variables["params"]))
    assert jnp.array_equal(off.apply({**variables, "tcfp": state}, X), base.apply(variables, X))


@pytest.mark.parametrize(
    "theirs, mine",
    [
        (nn.DenseGeneral((4, 8)), TCFPDenseGeneral((4, 8))),
        (nn.DenseGeneral(8, axis=(1, -1), use_bias=False), TCFPDenseGeneral(8, axis=(1, -1), use_bias=False)),
        (nn.DenseGeneral(8, batch_dims=(0,)), TCFPDenseGeneral(8, batch_dims=(0,))),
        (nn.Einsum((16, 2, 8), "btk,khd->bthd"), TCFPEinsum((16, 2, 8), "btk,khd->bthd")),
        (nn.Einsum((8, 16), "...k,nk->...n"), TCFPEinsum((8, 16), "...k,nk->...n")),
        (nn.Einsum((4, 16, 8), "btk,tkn->btn"), TCFPEinsum((4, 16, 8), "btk,tkn->btn")),
        (nn.LayerNorm(), TCFPLayerNorm()),
    ],
    ids=lambda layer: str(type(layer).__name__),
)
def test_layers_have_flax_parameters_and_nearly_its_results(theirs, mine):
    variables = jax.jit(theirs.init)(jax.random.key(1), X)
    assert same(jax.jit(mine.init)(jax.random.key(1), X), variables)
    exact, y = jax.jit(theirs.apply)(variables, X), jax.jit(mine.apply)(variables, X)
    error = y - exact
    assert error.shape == exact.shape and float(jnp.sum(error**2) / jnp.sum(exact**2)) < 1e-2
    if not isinstance(mine, nn.LayerNorm):
        converted = convert(theirs, "tcfp12")
        assert jnp.array_equal(jax.jit(converted.apply)(variables, X), y)
    gradients = jax.jit(jax.grad(lambda v: jnp.sum(mine.apply(v, X) ** 2)))(variables)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))


def test_embed_rounds_rows_and_attends():
    theirs, mine = nn.Embed(32, 16), TCFPEmbed(32, 16)
    variables = theirs.init(jax.random.key(1), TOKENS)
    assert same(jax.jit(mine.init)(jax.random.key(1), TOKENS), variables)
    table = variables["params"]["embedding"]
    assert jnp.array_equal(jax.jit(mine.apply)(variables, TOKENS), jax.jit(tcfp_jax.fake_quantize)(table)[TOKENS])
    assert jnp.array_equal(mine.apply(variables, X, method="attend"), tcfp_jax.matmul(X, table.T, recipe="tcfp12"))
    gradient = jax.jit(jax.grad(lambda v: mine.apply(v, TOKENS).sum()))(variables)["params"]["embedding"]
    assert jnp.array_equal(gradient[:8], jnp.ones((8, 16)))  # straight-through


def test_layer_norm_keeps_gains_and_is_converted_only_when_asked():
    gains = {"params": {"scale": jnp.full(16, 1.0).at[3].set(100.0), "bias": jnp.zeros(16)}}
    y, exact = jax.jit(TCFPLayerNorm().apply)(gains, X), nn.LayerNorm().apply(gains, X)
    np.testing.assert_allclose(y, exact, rtol=0.02, atol=0.2)
    model = convert_to_tcfp(nn.LayerNorm(), "tcfp12", X, include="layer_norm")
    assert jnp.array_equal(jax.jit(model.apply)(gains, X), y)


class Annotated(nn.Module):
    """Partitioned parameters, and a collection that the model writes."""

    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x)
        return nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.normal(), ("k", "n")), name="dense")(x)


def test_boxed_parameters_and_mutable_collections():
    base = Annotated()
    variables = base.init(jax.random.key(1), X)
    model = convert(base, "tcfp12", X, strict=True)
    tx = tcfp_jax.error_feedback(find_weights(model))
    state = tcfp_jax.layer_state(tx.init(variables["params"]))
    assert state["dense"]["kernel"].hi.shape == (16, 16)
    y, written = model.apply({"params": variables["params"], "tcfp": state}, X, mutable=["intermediates", "params"])
    assert set(written) == {"intermediates", "params"}
    assert jax.tree.structure(written["params"]) == jax.tree.structure(variables["params"])
    assert jnp.array_equal(y, model.apply({"params": variables["params"]}, X))
    with pytest.raises(ValueError, match="parameters lack other/kernel"):
        tcfp_jax.error_feedback({"other/kernel": find_weights(model)["dense/kernel"]}).init(variables["params"])
    with pytest.raises(ValueError, match="mask"):
        tcfp_jax.error_feedback(find_weights(model), mask=lambda params: params)


def test_accumulation_feeds_one_state():
    base = MLP()
    params = base.init(jax.random.key(1), X)["params"]
    model = convert(base, "tcfp12")
    tx = optax.MultiSteps(optax.chain(optax.sgd(0.1), tcfp_jax.error_feedback("tcfp12")), 2)
    state = jax.jit(tx.init)(params)
    first = tcfp_jax.layer_state(state)

    @jax.jit
    def update(state):
        loss = lambda p: jnp.mean(model.apply({"params": p, "tcfp": tcfp_jax.layer_state(state)}, X) ** 2)
        return tx.update(jax.grad(loss)(params), state, params)[1]

    with jax.numpy_dtype_promotion("standard"):
        state = update(state)
        assert same(tcfp_jax.layer_state(state), first)
        state = update(state)
    assert not same(tcfp_jax.layer_state(state), first)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((object(), "tcfp12"), {}, TypeError, "neither a flax.linen.Module"),
        ((MLP(), "tcfp13"), {}, ValueError, "tcfp12_fast"),
        ((MLP(), "tcfp12"), {"rules": {"(": "bf16"}}, ValueError, "no regular expression"),
        ((MLP(), "tcfp12"), {"rules": {"up": "tcfp13"}}, ValueError, "tcfp12_fast"),
        ((MLP(), "tcfp12"), {"rules": [3]}, ValueError, "neither a .regex, recipe. pair"),
        ((MLP(), "tcfp12"), {"include": "heads"}, ValueError, "heads.*linear"),
        ((MLP(), "tcfp12"), {"strict": True}, ValueError, "sample inputs"),
        ((nn.relu, "tcfp12"), {}, TypeError, "neither"),
        ((MLP(), "tcfp12", X), {}, ValueError, "no layer of MLP.*too small.*register_adapter"),
        ((nn.Dense(4, precision="highest"), "tcfp12", X), {"include": ALL}, ValueError, "precision='highest'"),
        ((nn.Dropout(0.5, deterministic=True), "tcfp12", X), {}, ValueError, "no layer that is known"),
    ],
)  # fmt: skip
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        convert_to_tcfp(*arguments, **options)


def test_nothing_converted_is_an_error_when_it_shows():
    model = convert_to_tcfp(MLP(), "tcfp12")
    variables = model.init(jax.random.key(1), X)
    with pytest.raises(ValueError, match="no layer of MLP"):
        model.apply(variables, X)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((object, lambda *a: 0), TypeError, "no subclass"),
        ((nn.Dense, 3), TypeError, "not callable"),
        ((nn.Dense, lambda layer: 0), TypeError, "does not fit"),
    ],
)
def test_adapters_that_do_not_fit(arguments, error, message):
    with pytest.raises(error, match=message):
        register_adapter(*arguments)
    with pytest.raises(ValueError, match="no method"):
        register_adapter(Inner, lambda layer, multiply, x: x, method="attend")


def test_an_adapter_that_multiplies_nothing_raises():
    class Lazy(Conv1D):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.normal(), (self.features, x.shape[-1])).T

    register_adapter(Lazy, lambda layer, multiply, x: x)
    with pytest.raises(ValueError, match="never called multiply"):
        convert(Lazy(16), "tcfp12", X)
