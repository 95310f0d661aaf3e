"""Failures that models of other people showed, one small test each."""

import copy
import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.conversion import (
    convert_to_tcfp,
    detach,
    diagnose,
    export,
    find_weights,
    survey,
)
from tcfp_jax.inference import load_quantized, quantize_params, restored
from tcfp_jax.nnx import Optimizer, TCFPEmbed, TCFPLinear
from tests.helpers import (
    MLP,
    filled,
    mesh_of,
    nnx_model,
    parametrize,
    refused,
    same_bits,
    slow,
    variables_of,
)

X = jnp.asarray(np.random.default_rng(1).standard_normal((4, 16)), jnp.float32)
TOKENS = jnp.arange(8).reshape(2, 4)
ALL = ("linear", "small", "head")
convert = functools.partial(convert_to_tcfp, include=ALL)
forward = nnx.jit(lambda model, *args: model(*args))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="down")(nn.relu(nn.Dense(32, name="up")(x)))


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(
        np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=tolerance
    )


def optimizer_of(model, *inputs, tx=None):
    """The optimizer of a converted model, whose weights the model reads."""
    chain = optax.chain(
        tx or optax.sgd(0.1), tcfp_jax.error_feedback(find_weights(model, *inputs))
    )
    return Optimizer(model, chain)


def with_state(model, params, *inputs):
    """The variables of a converted Linen model with its stored weights."""
    tx = tcfp_jax.error_feedback(find_weights(model, *inputs))
    return {"params": params, "tcfp": tcfp_jax.layer_state(jax.jit(tx.init)(params))}


def test_other_parameters_than_the_optimizers_raise_until_detach():
    model = convert(nnx_model(MLP), "tcfp12", X)
    fresh = forward(model, X)
    optimizer_of(model)
    close(forward(model, X), fresh)
    nnx.update(model, jax.tree.map(lambda leaf: 2 * leaf, nnx.state(model, nnx.Param)))
    with refused("made of other parameters"):
        model(X)
    assert np.isnan(forward(model, X)).all()
    evaluated = nnx.clone(model)
    detach(evaluated)
    wanted = convert(nnx_model(MLP), "tcfp12", X)
    nnx.update(wanted, nnx.state(model, nnx.Param))
    close(forward(evaluated, X), forward(wanted, X))
    with refused("nothing to undo"):
        detach(evaluated)


def test_other_parameters_than_a_linen_states_raise():
    model = convert(Dense(), "tcfp12", X)
    params = variables_of(Dense(), X)["params"]
    variables = with_state(model, params)
    averaged = jax.tree.map(lambda leaf: 0.9 * leaf, params)
    with refused("made of other parameters"):
        model.apply({**variables, "params": averaged}, X)
    apply = jax.jit(model.apply)
    assert np.isnan(apply({**variables, "params": averaged}, X)).all()
    assert np.isfinite(apply({"params": averaged}, X)).all()
    close(apply(variables, X), apply({"params": params}, X))


class Named(nnx.Module):
    """A weight that is not called kernel, one under remat, and a stack under scan."""

    def __init__(self, rngs):
        self.w_in = nnx.Param(jax.random.normal(rngs.params(), (16, 16)))
        self.inner = nnx.Linear(16, 16, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))(
            rngs.split(2)
        )

    def __call__(self, x):
        x = nnx.remat(lambda inner, x: inner(x))(self.inner, x @ self.w_in)

        def body(x, layer):
            return nnx.tanh(layer(x))

        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


def test_nnx_weights_under_remat_and_scan_are_found_and_kept(capsys):
    model = convert(nnx_model(Named), "tcfp12", X, strict=True)
    weights = find_weights(model)
    assert {path: weight.layout.stack for path, weight in weights.items()} == {
        "inner/kernel": (),
        "layers/kernel": (0,),
        "w_in": (),
    }
    assert {line.path for line in diagnose(nnx_model(Named), X).lines} == set(weights)
    assert capsys.readouterr().out
    fresh = forward(model, X)
    optimizer = optimizer_of(model)
    close(forward(model, X), fresh)
    train(model, optimizer, X)
    fresh = forward(model, X)
    assert np.isfinite(fresh).all()
    # it is the stored weights that multiply
    optimizer.opt_state[1].weights["layers"]["kernel"].forward.scale[...] *= 2
    assert float(jnp.max(jnp.abs(forward(model, X) - fresh))) > 0.05


@nnx.jit
def train(model, optimizer, *inputs):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(*inputs) ** 2))(
        model
    )
    optimizer.update(model, gradients)
    return loss


class Placed(MLP):
    def __call__(self, x):
        return self.down(
            nnx.relu(self.up(x, out_sharding=P("a", "b"))), out_sharding=P("a")
        )


@slow  # test_transform has a function with explicit axes
def test_out_sharding_reaches_the_products():
    model = nnx_model(Placed)
    own = nnx_model(lambda rngs: Placed(rngs, TCFPLinear))
    expected = forward(convert(nnx_model(MLP), "tcfp12"), X)
    with jax.set_mesh(mesh_of(2, 2, axis_type=AxisType.Explicit)):
        specs = {
            "up": {"kernel": P(None, "b"), "bias": P("b")},
            "down": {"kernel": P("b"), "bias": P()},
        }
        for placed in (model, own):
            nnx.update(
                placed,
                jax.tree.map(
                    jax.device_put, nnx.to_pure_dict(nnx.state(placed)), specs
                ),
            )
        x = jax.device_put(X, P("a"))
        convert(model, "tcfp12", x, strict=True)
        results = forward(model, x), forward(own, x)
        for y in results:
            assert y.sharding.spec == P("a", None)
            close(y, expected, 1e-4)
        table = nnx_model(lambda rngs: TCFPEmbed(32, 16, rngs=rngs))
        rows = nnx.jit(lambda table, tokens: table(tokens, out_sharding=P("a")))(
            table, TOKENS
        )
        assert rows.sharding.spec == P("a", None, None)
    close(rows, tcfp_jax.fake_quantize(table.embedding[...])[TOKENS])


class Keyless(nn.Module):
    """A layer called as (equation, x) that names its weight by instance; a layer
    without bias first; a shared scope.
    """

    @nn.compact
    def __call__(self, x):
        first = nn.Sequential([nn.Dense(16, use_bias=False), nn.relu])
        return Projection("w_out")("bk,kn->bn", first(x))


class Projection(nn.Module):
    weight: str

    @nn.compact
    def __call__(self, equation, x):
        w = self.param(self.weight, nn.initializers.normal(), (x.shape[-1], 16))
        return jnp.einsum(equation, x, w)


def test_served_linen_weights_of_any_name_apply():
    base = Keyless()
    params = variables_of(Keyless(), X)["params"]
    model = convert(base, "tcfp12", X, strict=True)
    leaves = {
        "/".join(entry.key for entry in path)
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    assert (
        {record.weight_path for record in survey(model).converted}
        == leaves
        == set(find_weights(model))
    )
    served = quantize_params(params, find_weights(model))
    assert not jax.tree.leaves(served["params"])  # no float copy next to an FP8 one
    apply = jax.jit(model.apply)
    close(apply(served, X), apply({"params": params}, X))


def test_a_conversion_that_raises_changes_nothing():
    model = nnx_model(MLP)
    graphdef = nnx.graphdef(model)
    for arguments, options in (
        ((X,), {"rules": {"(": None}}),
        ((X,), {"include": ()}),
        ((X[:, :3],), {}),
    ):
        with pytest.raises((ValueError, TypeError)):
            convert(model, "tcfp12", *arguments, **options)
        assert nnx.graphdef(model) == graphdef
        assert type(model.up) is nnx.Linear
    convert(model, "tcfp12", X)
    convert(model, "tensorwise", X)
    wanted = convert(nnx_model(MLP), "tensorwise", X)
    assert same_bits(forward(model, X), forward(wanted, X))
    assert {record.recipe for record in survey(model).converted} == {
        tcfp_jax.recipe("tensorwise")
    }
    with refused("no product"):
        # all are too small: the first conversion stays
        convert_to_tcfp(model, "tcfp12", X)
    assert same_bits(forward(model, X), forward(wanted, X))
    assert nnx.graphdef(export(model)) == graphdef


class Table(nnx.Embed):
    pass


class Shared(nnx.Module):
    """A head that is a subclass of Embed, a layer that is never multiplied, and one
    Param in two layers.
    """

    def __init__(self, rngs):
        self.table = Table(32, 16, rngs=rngs)
        self.positions = nnx.Embed(8, 16, rngs=rngs)
        self.first, self.second = (
            nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(2)
        )
        self.second.kernel = self.first.kernel
        self.unused = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        return self.table.attend(self.second(nnx.tanh(self.first(x))))


def test_reports_of_nnx_models_are_true():
    model = convert(nnx_model(Shared), "tcfp12", TOKENS, strict=True)
    report = survey(model)
    weights = find_weights(model)
    assert [record.weight_path for record in report.converted] == [
        "first/kernel"
    ] * 2 + ["table/embedding"]
    assert report.converted[2].product.head
    assert set(weights) == {
        "first/kernel",
        "table/embedding",
    }
    # never multiplied
    assert type(model.unused) is nnx.Linear
    assert type(model.positions) is nnx.Embed
    state = jax.eval_shape(
        tcfp_jax.error_feedback(weights).init, nnx.state(model, nnx.Param)
    )
    assert {
        path for path in ("unused", "positions") if path in tcfp_jax.layer_state(state)
    } == set()
    assert str(survey(nnx.clone(model))) == str(report)
    optimizer = optimizer_of(model)
    train(model, optimizer, TOKENS)
    assert model.second.kernel is model.first.kernel
    assert np.isfinite(forward(model, TOKENS)).all()
    with refused("strict=True: no product matches the rule 'unused'"):
        convert(
            nnx_model(Shared), "tcfp12", TOKENS, strict=True, rules={"unused": None}
        )


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(module, x, _):
            return (nn.tanh(nn.Dense(16, name="dense")(x)), None)

        return nn.scan(
            body, variable_axes={"params": 1}, split_rngs={"params": True}, length=3
        )(self, x, None)[0]


class ScannedNNX(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(
            lambda rngs: nnx.Linear(16, 16, rngs=rngs), in_axes=0, out_axes=1
        )
        self.layers = make(rngs.split(3))

    def __call__(self, x):
        def body(x, layer):
            return nnx.tanh(layer(x))

        return nnx.scan(body, in_axes=(nnx.Carry, 1), out_axes=nnx.Carry)(
            x, self.layers
        )


def test_stacks_along_the_second_axis_are_stored_and_read():
    params = variables_of(Scanned(), X)["params"]
    model = convert(Scanned(), "tcfp12", X, strict=True)
    assert params["dense"]["kernel"].shape == (16, 3, 16)
    assert find_weights(model)["dense/kernel"].layout.stack == (1,)
    apply = jax.jit(model.apply)
    y = apply({"params": params}, X)
    close(apply(with_state(model, params), X), y)
    close(apply(quantize_params(params, find_weights(model)), X), y)
    model = convert(nnx_model(ScannedNNX), "tcfp12", X, strict=True)
    assert find_weights(model)["layers/kernel"].layout.stack == (1,)
    fresh = forward(model, X)
    optimizer = optimizer_of(model)
    close(forward(model, X), fresh)
    train(model, optimizer, X)
    assert np.isfinite(forward(model, X)).all()


class Keywords(nn.Module):
    @nn.compact
    def __call__(self, *, x, train=False):
        return nn.Dense(16)(x)


class KeywordsNNX(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, *, x, train=False):
        return self.linear(x)


@parametrize("make", [Keywords, lambda: nnx_model(KeywordsNNX)], ids=["linen", "nnx"])
def test_models_of_keywords_take_options_alone(make, capsys):
    options = {"x": X, "train": True}
    model = convert(make(), "tcfp12", options=options, strict=True)
    assert (
        len(survey(model).converted)
        == len(survey(model, options=options).converted)
        == 1
    )
    assert find_weights(model) == find_weights(model, options=options)
    assert len(diagnose(make(), options=options).lines) == 1
    assert capsys.readouterr().out
    for call in (
        lambda o: convert(make(), "tcfp12", options=o),
        lambda o: survey(model, options=o),
    ):
        with refused("tran", TypeError):
            call({"x": X, "tran": True})


class Gains(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(name="norm")(x)


def test_nothing_converted_lists_what_was_seen():
    with refused(r"of Gains .*multiplies none.*norm/bias \[16\], norm/scale \[16\]"):
        convert(Gains(), "tcfp12", X)
    with refused(r"(?s)too small.*up/kernel \[16, 32\]\n    down/kernel"):
        convert_to_tcfp(nnx_model(MLP), "tcfp12", X)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.lora = nnx.LoRA(16, 4, 16, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) + self.lora(x)


def test_lora_trains_next_to_stored_weights():
    model = convert(nnx_model(Adapted), "tcfp12", X, rules={"lora": None})
    assert [record.path for record in survey(model).converted] == ["linear"]
    served = quantize_params(nnx.state(model, nnx.Param), find_weights(model))
    load_quantized(model, served)  # the frozen weight has no float values any more
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    before = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(X) - 1) ** 2)

        value, gradients = nnx.value_and_grad(
            loss, argnums=nnx.DiffState(0, nnx.LoRAParam)
        )(model)
        optimizer.update(model, gradients)
        return value

    with jax.numpy_dtype_promotion("standard"):
        losses = [float(step(model, optimizer)) for _ in range(3)]
    after = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    assert losses[2] < losses[0]
    assert not jnp.array_equal(before["lora"]["lora_a"], after["lora"]["lora_a"])

    low = tcfp_jax.transform(
        lambda p, adapter, x: x @ p["w"] + x @ adapter["a"] @ adapter["b"],
        "tcfp12",
        include=ALL,
    )
    params = filled({"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)})
    adapter = {"a": X.T, "b": X}
    stored = quantize_params(params, find_weights(low, params, adapter, X))["tcfp"]
    frozen = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}

    def loss(adapter):
        return jnp.mean(low(frozen, adapter, X, stored=stored) ** 2)

    gradients = jax.jit(jax.grad(loss))(adapter)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients))


@pytest.mark.filterwarnings("ignore")
def test_qwix_lora_is_converted_after_it_and_refused_before_it():
    qwix = pytest.importorskip(
        "qwix", reason="qwix is not installed; it is part of the extra wild"
    )
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=2.0)

    def make():
        return nnx_model(MLP)

    model = qwix.apply_lora_to_model(make(), provider, X, rngs=nnx.Rngs(0))
    convert(model, "tcfp12", X, rules={"lora": None}, strict=True)
    assert [record.weight_path for record in survey(model).converted] == [
        "up/kernel",
        "down/kernel",
    ]

    def loss(model):
        return jnp.mean((model(X) - 1) ** 2)

    gradients = nnx.to_pure_dict(
        nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    )
    assert all(
        float(jnp.abs(gradients[name]["kernel_lora_b"]).max()) > 0
        for name in ("up", "down")
    )
    with refused(r"export\(model\) first"):
        qwix.apply_lora_to_model(
            convert(make(), "tcfp12", X), provider, X, rngs=nnx.Rngs(0)
        )


def test_another_packages_class_of_a_converted_one_raises():
    model = convert(nnx_model(MLP), "tcfp12", X)
    object.__setattr__(model, "__class__", type("MLP", (type(model),), {}))
    for call in (
        lambda: model(X),
        lambda: survey(model),
        lambda: convert(model, "tcfp12", X),
        lambda: export(model),
    ):
        with refused(r"export\(model\) first"):
            call()


class Everything(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


def test_served_weights_load_into_a_model_of_shapes(
    tmp_path,
):
    orbax = pytest.importorskip(
        "orbax.checkpoint",
        reason="orbax is not installed; it is part of the test extra",
    )
    model = nnx_model(Everything)
    model.eval()
    convert(model, "tcfp12", X)
    model.norm.var.set_value(jnp.full(16, 2.0))
    served = quantize_params(
        nnx.state(model, (nnx.Param, nnx.BatchStat)), find_weights(model)
    )
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "served", served)
        checkpointer.wait_until_finished()
        loaded = checkpointer.restore(tmp_path / "served")
    # orbax knows no class without a template
    assert isinstance(loaded["tcfp"]["first"]["kernel"], dict)
    shapes = nnx.eval_shape(lambda: Everything(nnx.Rngs(0)))
    shapes.eval()
    convert(shapes, "tcfp12", X)
    with refused("restored"):
        load_quantized(shapes, loaded)
    load_quantized(shapes, restored(loaded, find_weights(model)))
    close(forward(shapes, X), forward(model, X))
    assert shapes.second.kernel is shapes.first.kernel


def test_parameters_next_to_an_optimizer_split_and_restore():
    model = convert(nnx_model(MLP), "tcfp12", X)
    before = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer_of(model)
    assert jax.tree.structure(nnx.state(model, nnx.Param)) == jax.tree.structure(before)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert jax.tree.structure(params) == jax.tree.structure(before)

    def is_param(node):
        return isinstance(node, nnx.Param)

    assert not any(map(is_param, jax.tree.leaves(rest, is_leaf=is_param)))
    close(forward(nnx.merge(graphdef, params, rest), X), forward(model, X))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(model, state)
    assert np.isfinite(forward(model, X)).all()


def test_diagnose_of_a_model_of_shapes_and_its_mark():
    shapes = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
    found = diagnose(shapes, jax.ShapeDtypeStruct((4, 16), jnp.float32))
    assert [line.path for line in found.lines] == ["up/kernel", "down/kernel"]
    assert all(line.snr_db is None and line.extrapolated for line in found.lines)
    assert "*" in str(found.lines[0])
    assert "* smaller than the smallest product" in str(found)


class Wrapper:
    """As transformers' Flax models: a module inside, and a repr of thousands of
    lines.
    """

    module = Dense()

    def __repr__(self):
        return "weights\n" * 10000


class Callable(Wrapper):
    module = None

    def __call__(self, x):
        return x


@parametrize("function", [lambda m: convert(m, "tcfp12"), survey, find_weights, export])
def test_wrong_objects_are_named_with_the_repair(function):
    for model, repair in (
        (Wrapper(), r"\.module"),
        (Callable(), r"tcfp_jax\.transform"),
        ("gpt2", "pass the model"),
    ):
        with refused(f"{type(model).__name__}.*{repair}", TypeError) as error:
            function(model)
        assert len(str(error.value)) < 400
    with refused("'hello' is a string", TypeError):
        convert(Dense(), "tcfp12", "hello")


@parametrize(
    "again",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_converted_models_are_copied_and_pickled(again):
    variables = variables_of(Dense(), X)
    model = convert(Dense(), "tcfp12", X)
    twin = again(model)
    assert same_bits(
        jax.jit(twin.apply)(variables, X), jax.jit(model.apply)(variables, X)
    )
    assert str(survey(twin, X)) == str(survey(model))
    model = convert(nnx_model(MLP), "tcfp12", X)
    optimizer_of(model)
    twin = again(model)
    assert str(survey(twin)) == str(survey(model))
    assert same_bits(forward(twin, X), forward(model, X))
    assert type(export(twin)) is MLP
    assert type(model) is not MLP


def test_intermediates_of_a_converted_model_are_captured():
    model = convert(Dense(), "tcfp12", X)
    variables = variables_of(Dense(), X)

    def run(model):
        return jax.jit(lambda v: model.apply(v, X, capture_intermediates=True))(
            variables
        )

    y, found = run(model)
    _, wanted = run(Dense())
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    close(found["intermediates"]["__call__"][0], y)


def test_unsigned_inputs_and_methods_of_the_base_class():
    model = convert(Dense(), "tcfp12")
    variables = variables_of(Dense(), X)
    x = jnp.arange(64, dtype=jnp.uint8).reshape(4, 16)
    with jax.numpy_dtype_promotion("standard"):
        close(
            jax.jit(model.apply)(variables, x),
            jax.jit(model.apply)(variables, x.astype(jnp.float32)),
        )
    called = jax.jit(nn.apply(Dense.__call__, model))
    assert same_bits(called(variables, X), jax.jit(model.apply)(variables, X))


def test_narrow_layers_convert_to_mxfp8():
    model = nn.Dense(8)
    x = X[:, :4]
    variables = variables_of(model, x)
    low = convert(model, "mxfp8", x, strict=True)
    exact = jax.jit(model.apply)(variables, x)
    close(jax.jit(low.apply)(variables, x), exact, 0.1 * float(jnp.abs(exact).max()))
    assert np.isfinite(
        jax.jit(low.apply)(with_state(low, variables["params"]), x)
    ).all()


def test_an_optimizer_that_is_none_of_ours_is_said_once():
    model = convert(nnx_model(MLP), "tcfp12_fast", X, rules={"this model alone": None})
    find_weights(model)

    def loss(model):
        return jnp.mean(model(X) ** 2)

    Optimizer(model, optax.sgd(0.1), wrt=lambda path, _: "bias" in path)
    nnx.grad(loss)(model)  # its optimizer was made, of biases alone
    find_weights(model)
    with pytest.warns(UserWarning, match="no tcfp_jax.nnx.Optimizer was made"):
        nnx.grad(loss)(model)
    with warnings.catch_warnings(record=True) as said:
        nnx.grad(loss)(model)
    assert not said


def test_a_linen_model_without_its_stored_weights_warns_once():
    model = convert(Dense(), "tcfp12_fast", X)
    params = variables_of(Dense(), X)["params"]
    stored = tcfp_jax.layer_state(
        tcfp_jax.error_feedback(find_weights(model)).init(params)
    )

    def loss(params, **rest):
        return jnp.mean(model.apply({"params": params, **rest}, X) ** 2)

    loss(params)  # evaluation quantizes on the fly, and means to
    with pytest.warns(UserWarning, match=r'"tcfp": layer_state\(opt_state\)'):
        jax.jit(jax.grad(loss))(params)
    find_weights(model)
    with warnings.catch_warnings(record=True) as said:
        jax.grad(loss)(params, tcfp=stored)
        jax.jit(jax.grad(lambda params: loss(params)))(params)
    assert not said


def test_bridges_of_flax_carry_converted_models():
    variables = variables_of(Dense(), X)
    model = bridge.ToNNX(convert(Dense(), "tcfp12", X), rngs=nnx.Rngs(0)).lazy_init(X)
    nnx.update(
        model, {name: dict(entry) for name, entry in variables["params"].items()}
    )
    close(forward(model, X), jax.jit(convert(Dense(), "tcfp12").apply)(variables, X))
    model = convert(bridge.ToNNX(Dense(), rngs=nnx.Rngs(0)).lazy_init(X), "tcfp12", X)
    assert {record.weight_path for record in survey(model).converted} == {
        "up/kernel",
        "down/kernel",
    }
    linen = bridge.to_linen(MLP)
    variables = filled(jax.eval_shape(linen.init, jax.random.key(0), X))
    model = convert(linen, "tcfp12", X)
    y = jax.jit(model.apply)(variables, X)
    exact = jax.jit(linen.apply)(variables, X)
    assert len(survey(model).converted) == 2
    assert not same_bits(y, exact)
    close(y, exact, 0.1 * float(jnp.abs(exact).max()))


@parametrize(
    "make", [nn.jit, lambda kind: nn.map_variables(kind, "params", lambda tree: tree)]
)
def test_classes_that_flax_makes_of_a_converted_one_run(make):
    variables = variables_of(nn.Dense(16), X)
    model = convert(nn.Dense(16), "tcfp12", X)
    again = make(type(model))(16)
    found = jax.jit(again.apply)(variables, X)
    assert jnp.allclose(found, jax.jit(model.apply)(variables, X), rtol=0, atol=1e-5)


def test_a_bias_of_several_axes_is_no_weight():
    def fn(p, x):
        return jnp.einsum(
            "bthd,bshd->bths",
            jnp.einsum("btk,khd->bthd", x, p["w"]) + p["b"][None, None],
            p["k"],
        )

    params = {
        "w": jnp.ones((16, 2, 8)),
        "b": jnp.ones((2, 8)),
        "k": jnp.ones((2, 3, 2, 8)),
    }
    low = tcfp_jax.transform(
        lambda p, x, k: fn({**p, "k": k}, x), "tcfp12", include=ALL
    )
    report = survey(
        low, {name: params[name] for name in "wb"}, jnp.ones((2, 3, 16)), params["k"]
    )
    assert [record.weight_path for record in report.converted] == ["w"]
    assert not report.skipped
