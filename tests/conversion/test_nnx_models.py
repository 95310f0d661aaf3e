"""Methods of converted NNX models: whatever a method does to its model or returns, it
does as before conversion.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tcfp_jax import error_feedback
from tcfp_jax.conversion import convert_to_tcfp, export, find_weights, survey
from tcfp_jax.nnx import Optimizer, TCFPLinear, value_and_grad
from tests.helpers import nnx_model, parametrize, refused, same_bits, store_at_once

X = jnp.asarray(np.random.default_rng(1).standard_normal((4, 16)), jnp.float32)


def convert(model, *inputs, recipe="tensorwise", **options):
    return convert_to_tcfp(
        model, recipe, *inputs, include=("linear", "small", "head"), **options
    )


LINEAR = functools.partial(nnx.Linear, 16, 16, use_bias=False)


class Everything(nnx.Module):
    """Modules in lists and dicts, and methods that write, sow, return parts of the
    model, or yield.
    """

    activation = staticmethod(jnp.tanh)

    def __init__(self, rngs):
        self.blocks = nnx.List([LINEAR(rngs=rngs) for _ in range(2)])
        self.by_name = nnx.Dict(out=LINEAR(rngs=rngs))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.last = nnx.data(None)
        self.mode = "new"

    def __call__(self, x):
        self.calls[...] += 1
        for block in self.blocks:
            x = self.activation(block(x))
        self.sow(nnx.Intermediate, "hidden", x)
        self.last, self.mode = x, "used"
        return self.by_name["out"](x)

    def draw(self, x, rngs):
        return self.by_name["out"](x) + jax.random.normal(rngs.noise(), x.shape)

    def part(self, number):
        return self.blocks[number], self.calls

    def layers(self, x):
        for block in self.blocks:
            x = block(x)
            yield x

    @contextlib.contextmanager
    def opened(self):
        self.mode = "open"
        yield self.blocks[0]
        self.mode = "closed"

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def name(cls):
        return cls.__name__

    @property
    def width(self):
        return self.blocks[0].kernel.shape[0]

    @nnx.jit
    def compiled(self, x):
        self.calls[...] += 1
        return self.by_name["out"](x)

    def gradient(self, x):
        return nnx.grad(lambda block, x: jnp.mean(block(x) ** 2))(self.blocks[0], x)

    def mapped(self, x):
        return nnx.vmap(lambda block, x: block(x), in_axes=(None, 0))(self.blocks[0], x)


pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


@pytest.fixture
def models():
    """(Flax's own model, the converted one), of the same parameters."""
    return nnx_model(Everything), convert(nnx_model(Everything), X, strict=True)


@nnx.jit
def train(model, optimizer):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(X) - 1) ** 2))(
        model
    )
    optimizer.update(model, gradients)
    return loss


def near(found, exact):
    np.testing.assert_allclose(
        found, exact, rtol=0, atol=0.15 * float(jnp.abs(exact).max())
    )
    assert not same_bits(found, exact)


def test_what_a_method_writes_is_written(models):
    base, model = models
    assert [record.path for record in survey(model).converted] == [
        "blocks/0",
        "blocks/1",
        "by_name/out",
    ]
    assert model.calls[...] == 0 and model.mode == "new"  # a survey writes nothing
    structure = jax.tree.structure
    for number in (1, 2):
        near(model(X), base(X))
        assert model.calls[...] == number
        assert model.mode == "used"
    near(model.last, base.last)
    near(model.hidden.get_value()[0], base.hidden.get_value()[0])
    assert structure(nnx.state(model)) == structure(nnx.state(base))
    run = nnx.jit(lambda model, x: model(x))
    near(run(model, X), run(base, X))
    assert model.calls[...] == 3
    assert type(model.blocks) is nnx.List
    assert isinstance(model.blocks[0], nnx.Linear)
    assert nnx.graphdef(export(model)) == nnx.graphdef(base)


def test_arguments_that_are_rngs_count_and_draw_as_before(models):
    base, model = models
    rngs = [nnx.Rngs(noise=3) for _ in models]
    for _ in range(2):
        near(model.draw(X, rngs[1]), base.draw(X, rngs[0]))
    assert rngs[1].noise.count[...] == rngs[0].noise.count[...] == 2


def test_static_methods_properties_and_generators_stay(models):
    base, model = models
    block, calls = model.part(1)
    assert block is model.blocks[1]
    assert calls is model.calls
    assert model.double(3) == 6
    assert model.name() == "Everything"
    assert model.width == 16
    found = list(model.layers(X))
    exact = list(base.layers(X))
    assert len(found) == 2
    near(found[1], exact[1])
    with model.opened() as block:
        assert block is model.blocks[0]
        assert model.mode == "open"
    assert model.mode == "closed"
    model.blocks.append(LINEAR(rngs=nnx.Rngs(0)))
    assert len(model.blocks) == 3


def test_transformations_of_flax_inside_and_outside(models):
    base, model = models
    near(model.compiled(X), base.compiled(X))
    assert model.calls[...] == 1
    # A product that the method itself differentiates is left alone, and has the float
    # model's gradient.
    found = model.gradient(X)
    exact = base.gradient(X)
    np.testing.assert_allclose(found["kernel"][...], exact["kernel"][...], rtol=1e-6)
    assert "inside jax.grad" in str(survey(convert(nnx_model(Differentiated), X)))
    near(model.mapped(X), base.mapped(X))
    near(
        *(
            nnx.vmap(lambda m, x: m.by_name["out"](x), in_axes=(None, 0))(m, X)
            for m in (model, base)
        )
    )
    near(
        *(
            nnx.jit(lambda m, x: m.draw(x, nnx.Rngs(noise=1)))(m, X)
            for m in (model, base)
        )
    )


def test_a_model_in_a_closure_of_a_gradient_is_not_changed(models):
    base, model = models
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    def out(m):
        return jax.jit(jax.grad(lambda x: jnp.mean(m.by_name["out"](x) ** 2)))(X)

    near(out(model), out(base))
    assert same_bits(before, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    # A model that counts its calls cannot be closed over, converted or not
    for m in models:
        with pytest.raises(
            nnx.errors.TraceContextError if hasattr(nnx, "errors") else Exception
        ):
            jax.grad(lambda x, m=m: jnp.mean(m(x)))(X)
    assert not any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model))
    )


class Differentiated(nnx.Module):
    def __init__(self, rngs):
        self.first = LINEAR(rngs=rngs)
        self.second = LINEAR(rngs=rngs)

    def __call__(self, x):
        return nnx.grad(lambda second, x: jnp.mean(second(x) ** 2))(
            self.second, self.first(x)
        )


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.first = LINEAR(rngs=rngs)
        self.second = LINEAR(rngs=rngs)

    def __call__(self, x):
        hidden = self.first(x)
        self.sow(nnx.Intermediate, "hidden", hidden)
        return self.second(hidden)


def test_intermediates_are_captured():
    """Without a list of modules: Flax itself cannot merge the state of one while it
    captures.
    """
    outputs = [
        nnx.capture(model, nnx.Intermediate)(X)
        for model in (nnx_model(Sowing), convert(nnx_model(Sowing), X))
    ]
    (exact, wanted), (found, captured) = outputs
    near(found, exact)
    near(captured["hidden"].get_value()[0], wanted["hidden"].get_value()[0])
    assert jax.tree.structure(captured) == jax.tree.structure(wanted)


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.first = LINEAR(rngs=rngs)
        self.second = LINEAR(rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def test_shared_parameters_train_as_if_quantized_at_each_use():
    models = [convert(nnx_model(Shared), X) for _ in range(2)]
    results = []
    for model, stored in zip(models, ("stored", "at each use"), strict=True):
        kind = Optimizer if stored == "stored" else nnx.Optimizer
        optimizer = kind(model, optax.sgd(0.1), wrt=nnx.Param)
        results.append([float(train(model, optimizer)) for _ in range(3)])
        assert model.second.kernel is model.first.kernel
    np.testing.assert_allclose(*results, rtol=1e-2)
    assert results[0][2] < results[0][0]


class HalfConverted(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Sequential(LINEAR(rngs=rngs), nnx.tanh, LINEAR(rngs=rngs))
        self.second = LINEAR(rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


@nnx.jit
def train_stored(model, optimizer):
    def loss(model):
        return jnp.mean((model(X) - 1) ** 2)

    value, gradients = value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


@parametrize("form", ["float", "feedback", "stored"])
def test_a_part_that_is_converted_alone_trains_as_by_rules(form):
    part = nnx_model(HalfConverted)
    convert(part.first, X, recipe="tcfp12_single")
    whole = nnx_model(HalfConverted)
    convert(whole, X, recipe="tcfp12_single", rules={"second": None})
    losses = []
    for model in (part, whole):
        weights = find_weights(model)
        assert sorted(weights) == ["first/layers/0/kernel", "first/layers/2/kernel"]
        tx = optax.sgd(0.1)
        if form == "feedback":
            tx = optax.chain(tx, error_feedback(weights))
        if form == "stored":
            params = nnx.state(model, nnx.Param)
            nnx.update(model, store_at_once(params, weights, key=jax.random.key(0)))
        optimizer = Optimizer(model, tx)
        losses.append([float(train_stored(model, optimizer)) for _ in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


def test_questions_about_a_model_name_its_converted_parts():
    model = nnx_model(HalfConverted)
    convert(model.first, X)
    with refused(r"HalfConverted is not.*\['first'\]"):
        survey(model)
    model.second = TCFPLinear(16, 16, rngs=nnx.Rngs(0))
    with refused(r"'second' is .* outside of .*\['first'\]"):
        find_weights(model)


@parametrize("kind", ["hijax", "ref"])
def test_variables_that_no_trace_follows_are_named(kind):
    with nnx.var_defaults(**{kind: True}):
        model = nnx.Sequential(LINEAR(rngs=nnx.Rngs(0)))
        with refused(f"'layers/0/kernel' .* {kind}=True"):
            convert(model, X)


class PlainObject(nnx.Module, pytree=False):
    """A list of layers is a list, and the module is not a pytree, as in models of tunix
    0.1.0.
    """

    def __init__(self, rngs):
        self.layers = [LINEAR(rngs=rngs) for _ in range(2)]

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


class Decided(nnx.Module):
    """A base that decides for its subclasses, and takes no arguments of theirs, as
    `nnx.bridge.Module` does.
    """

    def __init_subclass__(cls):
        super().__init_subclass__(pytree=False)


class OfDecided(Decided):
    __init__ = PlainObject.__init__
    __call__ = PlainObject.__call__


@parametrize("kind", [PlainObject, OfDecided], ids=["own word", "word of a base"])
def test_modules_that_are_no_pytrees_are_none_after_conversion(kind):
    plain = kind(nnx.Rngs(0))
    model = convert(nnx.clone(plain), X)
    with refused("abstract array", TypeError):
        # A pytree without leaves ran, with the parameters for constants
        jax.jit(lambda model: model(X))(model)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-1), wrt=nnx.Param)
    losses = [float(train(model, optimizer)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert same_bits(nnx.jit(lambda model: model(X))(model), model(X))
    assert not same_bits(model(X), plain(X))
