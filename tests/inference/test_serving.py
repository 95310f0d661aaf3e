"""Inference weights without float kernels, in orbax, Linen and NNX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from flax import linen as nn
from flax import nnx as flax_nnx
from numpy.testing import assert_allclose

import tcfp_jax
from tcfp_jax import paths
from tcfp_jax.conversion import convert_to_tcfp, export, find_weights, to_bf16
from tcfp_jax.inference import load_quantized, quantize_params, restored, unpack
from tcfp_jax.layers import Absent
from tcfp_jax.linen import TCFPDense
from tcfp_jax.recipes import recipe as tcfp_recipe
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.tcfp12 import PackedTCFP12
from tests.helpers import (
    assert_near,
    drawn,
    nnx_model,
    normal,
    parametrize,
    refused,
    same_bits,
    slow_except,
    variables_of,
)

X = drawn(2, 4, 32, seed=1)
TOKENS = jnp.arange(8).reshape(2, 4)
ALL = ("linear", "small", "head")
convert = partial(convert_to_tcfp, include=("linear", "small"))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((4, 8), name="heads")(x)
        x = nn.DenseGeneral(32, axis=(-2, -1), name="out")(x)
        return nn.Dense(8, name="lm_head")(x)


class NNXModel(flax_nnx.Module):
    """An embedding that is also the head, heads, and layers stacked for `nnx.scan`."""

    def __init__(self, rngs):
        self.embedding = flax_nnx.Embed(32, 32, rngs=rngs)
        self.heads = flax_nnx.LinearGeneral(32, (4, 8), rngs=rngs)
        self.out = flax_nnx.Einsum("bthd,hdn->btn", (4, 8, 32), (32,), rngs=rngs)
        make = flax_nnx.vmap(
            lambda rngs: flax_nnx.Linear(32, 32, rngs=rngs), in_axes=0, out_axes=0
        )
        self.layers = make(rngs.split(2))

    def __call__(self, tokens):
        x = self.out(self.heads(self.embedding(tokens)))

        def body(x, layer):
            return flax_nnx.tanh(layer(x))

        x = flax_nnx.scan(body, in_axes=(flax_nnx.Carry, 0), out_axes=flax_nnx.Carry)(
            x, self.layers
        )
        return self.embedding.attend(x)


def saved_and_loaded(served, path, weights=None):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "served", served)
        checkpointer.wait_until_finished()
        if weights is not None and not isinstance(
            served["tcfp"]["heads"]["kernel"], PackedTCFP12
        ):
            # without a template
            assert same_bits(
                restored(checkpointer.restore(path / "served"), weights), served
            )
        return checkpointer.restore(
            path / "served", jax.tree.map(np.empty_like, served)
        )


@slow_except("tcfp12_fast-packed")
@parametrize(
    "recipe, storage",
    [("tcfp12", "recipe"), ("tensorwise", "recipe"), ("tcfp12_fast", "packed")],
)
def test_linen_models_run_without_the_float_kernels(recipe, storage, tmp_path):
    params = variables_of(Model(), X)["params"]
    model = convert(Model(), recipe, X)
    weights = find_weights(model)
    served = quantize_params(params, weights, storage=storage)
    assert "kernel" not in served["params"]["heads"]
    assert "kernel" in served["params"]["lm_head"]
    apply = jax.jit(model.apply)
    expected = apply({"params": params}, X)
    y = apply(served, X)
    tolerance = 1e-6 if storage == "recipe" else 0.05 * float(jnp.abs(expected).max())
    assert_near(y, expected, tolerance)
    assert same_bits(apply(saved_and_loaded(served, tmp_path, weights), X), y)
    if storage == "packed":
        assert isinstance(served["tcfp"]["heads"]["kernel"], PackedTCFP12)
        # quantized once
        assert_near(apply(unpack(served, weights), X), y, 1e-6)


class Coder(nn.Module):
    """Methods with parameters of their own, and a call that reads a cache."""

    def setup(self):
        self.up = nn.Dense(16, use_bias=False)
        self.down = nn.Dense(32)

    def __call__(self, x):
        if x.shape[1] == 1:
            if not self.has_variable("cache", "sum"):
                raise ValueError("no cache")
            x = x + self.get_variable("cache", "sum")
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.up(x)

    def decode(self, x):
        return self.down(x)


def encoded_and_decoded(model, served):
    encoded = model.apply(served, X, method="encode")
    return encoded, model.bind(served).decode(encoded)


def read_from_a_cache(model, served):
    return model.apply({**served, "cache": {"sum": jnp.ones(32)}}, X[:, :1])


@parametrize("call", [encoded_and_decoded, read_from_a_cache])
def test_every_call_of_float_variables_runs_without_kernels(call):
    params = variables_of(Coder(), X)["params"]
    model = convert(Coder(), "tcfp12", X, include=ALL)
    served = quantize_params(params, find_weights(model))
    found, expected = (
        jax.tree.leaves(call(model, variables))
        for variables in (served, {"params": params})
    )
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, 1e-5)


def test_state_of_another_model_and_unknown_shapes_raise():
    params = variables_of(Coder(), X)["params"]
    model = convert(Coder(), "tcfp12", X, include=ALL)
    served = quantize_params(params, find_weights(model))
    one_more = {
        "params": served["params"],
        "tcfp": {**served["tcfp"], "other": served["tcfp"]["up"]},
    }
    with refused("the state holds 'other/kernel', which is not a parameter of Coder"):
        model.apply(one_more, X, method="encode")
    with refused("no cache") as caught:
        read_from_a_cache(convert(Coder(), "tcfp12", include=ALL), served)
    assert "pass sample inputs to convert_to_tcfp" in caught.value.__notes__[0]


CAST = {"model": convert(Model(), "tcfp12", X), "layer": TCFPDense(8, recipe="tcfp12")}


@slow_except("model-packed", "layer-recipe")
@parametrize("storage", ["recipe", "packed"])
@parametrize("model", CAST.values(), ids=CAST)
def test_cast_models_answer_in_their_dtype_without_kernels(model, storage):
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), variables_of(model, X)["params"]
    )
    served = quantize_params(params, find_weights(model, X), storage=storage)
    x = X.astype(jnp.bfloat16)
    assert (
        model.apply(served, x).dtype
        == model.apply({"params": params}, x).dtype
        == jnp.bfloat16
    )


@slow_except("packed")
@parametrize("storage", ["recipe", "packed"])
def test_nnx_models_run_without_the_float_kernels(storage, tmp_path):
    forward = flax_nnx.jit(lambda model, tokens: model(tokens))
    all_layers = partial(
        convert, recipe="tcfp12_fast", include=("linear", "small", "head")
    )
    model = all_layers(nnx_model(NNXModel))
    expected = forward(model, TOKENS)
    weights = find_weights(model, TOKENS)
    assert len(weights) == 4
    served = quantize_params(
        flax_nnx.state(model, flax_nnx.Param), weights, storage=storage
    )
    assert set(served["params"]["layers"]) == {"bias"}
    assert set(served["params"]["embedding"]) == {"embedding"}
    # shapes: no float kernel ever exists
    bare = all_layers(flax_nnx.eval_shape(lambda: NNXModel(flax_nnx.Rngs(0))))
    load_quantized(bare, saved_and_loaded(served, tmp_path))
    floats = [
        leaf.size
        for leaf in jax.tree.leaves(flax_nnx.state(bare))
        if leaf.dtype == jnp.float32
    ]
    # the embedding
    assert max(floats) == 32 * 32
    assert sum(size > 100 for size in floats) == 1
    y = forward(bare, TOKENS)
    tolerance = 1e-6 if storage == "recipe" else 0.1 * float(jnp.abs(expected).max())
    assert_near(y, expected, tolerance)
    if storage == "packed":
        load_quantized(bare, unpack(served, weights))
        assert_near(forward(bare, TOKENS), y, 1e-6)
    with refused("quantized kernels only"):
        export(bare)
    # Layers that are switched off multiply by the stored weight, in the dtype of the
    # model.
    assert_near(
        forward(to_bf16(bare, "heads"), TOKENS),
        expected,
        0.1 * float(jnp.abs(expected).max()),
    )


TABLE = drawn(48, 32, seed=2)
NAMED = {
    "experts": {"w_up": TABLE.T, "scale": jnp.ones(3)},
    "embed": {"table": TABLE},
    "head": {"weight": TABLE},
}


@parametrize("storage", ["recipe", "packed"])
def test_stored_weights_leave_params_except_lookup_tables(
    storage,
):
    weight = partial(Weight, tcfp_recipe("tcfp12"))
    weights = {
        "experts/w_up": weight(Layout((0,), (1,))),
        "embed/table": weight(Layout((1,), (0,)), float_reads="lookup"),
        "head/weight": weight(Layout((1,), (0,))),
    }
    served = quantize_params(NAMED, weights, storage=storage)
    assert jax.tree.map(jnp.shape, served["params"]) == {
        "experts": {"scale": (3,)},
        "embed": {"table": (48, 32)},
        "head": {},
    }
    assert set(paths.entries(served["tcfp"])) == set(weights)
    assert storage == "packed" or all(
        stored.sample is None for stored in paths.entries(served["tcfp"]).values()
    )
    with refused("float_reads='often'"):
        weight(Layout((0,), (1,)), float_reads="often")


class Normalized(flax_nnx.Module):
    def __init__(self, rngs):
        self.linear = flax_nnx.Linear(32, 32, rngs=rngs)
        self.norm = flax_nnx.BatchNorm(32, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x), use_running_average=True)


def test_averages_travel_with_the_weights_into_a_model_of_shapes():
    model = convert(nnx_model(Normalized), "tcfp12", X)
    model.norm.mean.set_value(jnp.full(32, 0.5))
    model.norm.var.set_value(jnp.full(32, 2.0))
    state = flax_nnx.state(model, (flax_nnx.Param, flax_nnx.BatchStat))
    served = quantize_params(state, find_weights(model))
    bare = convert(
        flax_nnx.eval_shape(lambda: Normalized(flax_nnx.Rngs(0))), "tcfp12", X
    )
    load_quantized(bare, served)
    forward = flax_nnx.jit(lambda model, x: model(x))
    assert_near(forward(bare, X), forward(model, X), 1e-5)


class HeadAlone(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, use_bias=False, name="lm_head")(nn.LayerNorm(name="norm")(x))


class Transposed(nn.Module):
    param_dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.normal(), (8, x.shape[-1])).T


@parametrize(
    "module",
    [HeadAlone(), Transposed()],
    ids=["child of the root", "layer of one's own"],
)
def test_a_layer_may_lose_all_its_parameters(module, tmp_path):
    params = variables_of(module, X)["params"]
    model = convert(module, "tcfp12", X, include=ALL)
    served = saved_and_loaded(quantize_params(params, find_weights(model)), tmp_path)
    assert set(served["params"]) == set(params) - {"kernel"}
    assert not jax.tree.leaves(served["params"].get("lm_head"))
    apply = jax.jit(model.apply)
    assert_near(apply(served, X), apply({"params": params}, X), 1e-5)


def test_bad_input():
    params = {"kernel": jnp.ones((32, 4))}
    with refused("storage"):
        quantize_params(params, "tcfp12", storage="hi")
    with refused("nothing to quantize"):
        quantize_params(params, "bf16")
    trains = (
        r'trains with Fp4Training.* serve with recipe\("nvfp4"\), .*recipe\("nvfp4",'
        r' tile="square", rule="amax"\)'
    )
    for given in (
        "nvfp4_training",
        {"kernel": Weight(tcfp_recipe("nvfp4_training"), Layout((0,), (1,)))},
    ):
        with refused(trains):
            quantize_params(params, given)
    with refused("the mapping of weights is empty: .* was converted by a recipe"):
        quantize_params(params, {})
    for given in (
        "nvfp4",
        {"kernel": Weight(tcfp_recipe("nvfp4"), Layout((0,), (1,)))},
    ):
        with refused(
            r'storage="packed" .* 12.5 bits .* kernel in four by'
            r' Fp4\(.*storage="recipe"'
        ):
            quantize_params(params, given, storage="packed")
    with refused(r'pass variables\["params"\]'):
        quantize_params({"params": params}, "tcfp12")
    with refused(r"pass tcfp_jax.dequantize\(params\)"):
        quantize_params(
            tcfp_jax.store(params, "tcfp12_single", key=jax.random.key(0)), "tcfp12"
        )
    params["bias"] = jnp.zeros(4)
    served = quantize_params(params, "tcfp12")
    apply = jax.jit(TCFPDense(4).apply)
    assert_near(apply(served, X), apply({"params": params}, X), 1e-5)
    with refused("nothing is packed"):
        unpack(served, "tcfp12")
    with refused("applies the variables itself", TypeError):
        load_quantized(TCFPDense(4), served)

    def make(**options):
        return flax_nnx.eval_shape(
            lambda: flax_nnx.Linear(32, 4, rngs=flax_nnx.Rngs(0), **options)
        )

    with refused("a stored weight has no low-precision layer here"):
        load_quantized(make(), served)
    model = convert(make(use_bias=False), "tcfp12")
    with refused("the variables has bias, which the model lacks"):
        load_quantized(model, served)
    assert not isinstance(model.kernel, Absent)  # nothing changed


@parametrize(
    "use",
    [
        restored,
        unpack,
        lambda given, _: load_quantized(
            flax_nnx.Linear(2, 2, rngs=flax_nnx.Rngs(0)), given
        ),
    ],
)
@parametrize("given", [{}, [], {"params": {}, "tcfp": 3}, {"params": {}}])
def test_what_quantize_params_did_not_make_is_refused(use, given):
    with refused('have no dict "tcfp"; pass the result of quantize_params'):
        use(given, "tensorwise")


@parametrize(
    "entry",
    [{"values": 1}, {"scale": 1}, {"values": 1, "scale": 1, "more": 1}, [1]],
    ids=str,
)
def test_a_checkpoint_with_other_parts_is_no_stored_weight(entry):
    with refused(r"kernel has .* which is no stored weight"):
        restored(
            {"params": {}, "tcfp": {"kernel": {"forward": entry, "backward": None}}},
            "tensorwise",
        )


@parametrize("change", [{"remainder": "stochastic"}, {"amax": "delayed"}], ids=str)
def test_what_only_training_needs_is_left_out(change):
    """Recipes may draw bits or carry an amax; here weights round to nearest."""
    params = {"kernel": normal(0, (32, 16))}
    recipe = tcfp_recipe("tcfp12", **change)
    for asked in (recipe, {"kernel": Weight(recipe, Layout((0,), (1,)))}):
        served = quantize_params(params, asked)["tcfp"]
        assert same_bits(
            served,
            quantize_params(params, tcfp_recipe("tcfp12", remainder="dropped"))["tcfp"],
        )


@slow_except("nvfp4")
@parametrize("other", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "mxfp4"])
def test_a_checkpoint_is_not_given_the_scales_of_another_recipe(other):
    """Dicts without classes would stand for other numbers by another scaling."""
    w = {"kernel": normal(0, (64, 48))}
    for name in ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "mxfp4"):
        held = quantize_params(w, name)["tcfp"]["kernel"].forward
        entry = {
            part: getattr(held, part)
            for part in ("values", "scale", "outer")
            if getattr(held, part) is not None
        }
        plain = {"params": {}, "tcfp": {"kernel": {"forward": entry, "backward": None}}}
        if name == other:
            back = restored(plain, other)["tcfp"]["kernel"].forward
            assert (back.dequantize() == held.dequantize()).all()
            continue
        with refused(r"kernel is .*; pass the recipe that .* were quantized by"):
            restored(plain, other)


class Rotated(flax_nnx.Module):
    """A table that is an array and no variable."""

    def __init__(self, rngs):
        self.linear = flax_nnx.Linear(32, 32, rngs=rngs)
        self.angle = flax_nnx.data(jnp.zeros(32))

    def __call__(self, x):
        return self.linear(x) * jnp.cos(self.angle)


def test_arrays_that_are_no_variables_load_with_the_weights():
    models = [convert(nnx_model(Rotated, seed), "tcfp12") for seed in (0, 1)]
    models[0].angle = jnp.arange(32.0)
    served = quantize_params(flax_nnx.state(models[0]), find_weights(models[0], X))
    load_quantized(models[1], served)
    assert same_bits(models[1].angle, models[0].angle)
    run = flax_nnx.jit(lambda model, x: model(x))
    assert_allclose(run(models[1], X), run(models[0], X), atol=1e-5)
    with refused("the variables has table, which the model lacks"):
        load_quantized(
            models[1], {**served, "params": {**served["params"], "table": jnp.ones(2)}}
        )
