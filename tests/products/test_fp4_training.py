"""FP4 training: products of dequantized operands, unbiased gradients, and random bits
that a key decides.
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, export
from tcfp_jax.conversion.transform import transform
from tcfp_jax.formats import nvfp4_arrays
from tcfp_jax.formats.nvfp4_arrays import Nvfp4Values
from tcfp_jax.linen import TCFPDense
from tcfp_jax.nnx import TCFPLinear
from tcfp_jax.products import fp4_training
from tcfp_jax.recipes import Fp4Training, recipe
from tests.formats_oracles import QUICK
from tests.helpers import mesh_of, variables_of

KEY = jax.random.key(3)
FP4 = recipe("nvfp4_training")
FORWARD_IN_BF16 = recipe("nvfp4_training", forward_operands="bf16")


def operands(m=32, k=48, n=32, dtype=jnp.float32):
    x, w, g = (
        jax.random.normal(jax.random.key(i), shape, dtype)
        for i, shape in enumerate([(m, k), (k, n), (m, n)])
    )
    x = x.astype(jnp.bfloat16).astype(dtype)  # as which the backward pass has it
    return (
        x.at[3, 7].set(20),
        w / 7,
        g * jnp.exp(jax.random.normal(jax.random.key(9), (m, 1), dtype)),
    )


# Each quantizer is compiled once for all tests, instead of once in each product.
quantize_values = jax.jit(
    nvfp4_arrays.quantize_values, static_argnums=1, compiler_options=QUICK
)


def rule(how, x, w, g, key):
    """(y, dx, dw) by the rule of `tcfp_jax.matmul`, without the program that it would
    make of them.
    """
    y, saved = fp4_training._forward(how, x, w, fp4_training._words_of(key))
    return y, *fp4_training._backward(how, saved, g)[:2]


def products(how, x, w, g, key):
    """The same with compiled quantizers, which no other program can hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp4_training, "quantize_values", quantize_values)
        return rule(how, x, w, g, key)


def assert_product(got, a, b):
    """`got` is the product of exact numbers, but for the order in which float32
    adds.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    bound = 2.0**-20 * (np.abs(a) @ np.abs(b)) + 1e-30
    assert (np.abs(np.asarray(got, np.float64) - a @ b) <= bound).all()


@pytest.mark.parametrize("how", [FP4, FORWARD_IN_BF16], ids=["fp4", "forward in bf16"])
def test_products_are_those_of_the_format_librarys_values(how):
    (_, k, n), (x, w, g) = (20, 37, 25), operands(20, 37, 25)
    y, dx, dw = products(how, x, w, g, KEY)
    use = {
        name: fp4_training.quantization(name, fp4_training._words_of(KEY))
        for name in get_args(fp4_training.OperandName)
    }
    of = lambda name, values: quantize_values(values, *use[name]).dequantize()
    w_q = quantize_values(w, None).dequantize()[:k, :n]
    if how == FP4:
        assert_product(y, of("x", x)[:, :k], w_q)
    else:
        assert_product(y, *(v.astype(jnp.bfloat16).astype(jnp.float32) for v in (x, w)))
    assert_product(dx, of("g", g)[:, :n], w_q.T)
    assert_product(dw, of("x_wgrad", x).T, of("g_wgrad", g))


def test_rotations_cancel_where_nothing_is_rounded(monkeypatch):
    seen = lambda chosen, x, signs, key: nvfp4_arrays.observe(
        x, chosen[0].axis, key, signs
    )
    monkeypatch.setattr(
        nvfp4_arrays,
        "_dispatched",
        lambda *use: Nvfp4Values(seen(*use).exact, jnp.float32(1)),
    )
    x, w, g = operands(128, 32, 32)
    _, dx, dw = jax.jit(functools.partial(rule, FP4), compiler_options=QUICK)(
        x, w, g, KEY
    )
    np.testing.assert_allclose(dw, x.T @ g, atol=1e-4)
    np.testing.assert_allclose(dx, g @ w.T, atol=1e-4)


@functools.cache
def many():
    """(keys, products of each)."""
    keys = jax.random.split(KEY, 256)
    return keys, jax.vmap(lambda key: products(FP4, *operands(32, 32, 32), key))(keys)


def test_gradients_are_unbiased():
    x, w, g = operands(32, 32, 32)
    drawn = [np.asarray(part, np.float64) for part in many()[1]]
    assert (drawn[0] == drawn[0][0]).all()  # the forward pass draws nothing
    for got, want in zip(
        drawn[1:], (g @ quantize_values(w, None).dequantize().T, x.T @ g), strict=True
    ):
        noise = np.linalg.norm(got - got.mean(0), axis=(1, 2)).mean()
        left = np.linalg.norm(got.mean(0) - np.asarray(want))
        # 256 draws leave a sixteenth of the noise; x in NVIDIA's wgrad is rounded to
        # nearest, over random rotations.
        assert left < 0.1 * noise, (left, noise)


def test_rounding_gradients_to_nearest_would_be_biased():  # the control
    _, w, g = operands(32, 32, 32)
    w_q = quantize_values(w, None).dequantize().T
    want = g @ w_q
    bias = quantize_values(g, -1).dequantize() @ w_q - want
    assert float(jnp.linalg.norm(bias)) > 0.05 * float(jnp.linalg.norm(want))


def test_without_a_key_there_is_a_forward_pass_and_no_gradient():
    x, w, g = operands(32, 32, 32)
    y = tcfp_jax.matmul(x, w, recipe="nvfp4_training")
    np.testing.assert_array_equal(y, products(FP4, x, w, g, KEY)[0])
    loss = lambda x, w: tcfp_jax.matmul(x, w, recipe="nvfp4_training").sum()
    for place in (0, 1):
        with pytest.raises(
            ValueError,
            match=(
                r'recipe "nvfp4_training" draws random bits, and got no key; .*key= of'
            ),
        ):
            jax.grad(loss, place)(x, w)


def test_remat_and_scan_draw_the_same_bits_and_every_step_others():
    x, w, g = operands(32, 32, 32)
    loss = lambda w, key: (tcfp_jax.matmul(x, w, recipe=FP4, key=key) * g).sum()
    steps = lambda w: jax.lax.scan(
        lambda w, i: (
            w,
            jax.value_and_grad(jax.checkpoint(loss))(w, jax.random.fold_in(KEY, i)),
        ),
        w,
        jnp.arange(3),
    )[1]
    losses, gradients = jax.jit(steps, compiler_options=QUICK)(w)
    for i in range(3):
        y, _, gradient = products(FP4, x, w, g, jax.random.fold_in(KEY, i))
        np.testing.assert_allclose(losses[i], (y * g).sum(), rtol=1e-5)
        np.testing.assert_allclose(gradients[i], gradient, rtol=1e-4, atol=1e-4)
    assert (
        float(jnp.abs(gradients[0] - gradients[1]).max()) > 0.1
        and len(set(losses.tolist())) == 1
    )


def test_vmap_and_meshes_are_the_same_products():
    x, w, g = operands(32, 32, 32)
    keys, drawn = many()
    for one, both in zip(products(FP4, x, w, g, keys[1]), drawn, strict=True):
        np.testing.assert_allclose(one, both[1], rtol=1e-5, atol=1e-4)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = lambda array: jax.device_put(
        array, NamedSharding(mesh, PartitionSpec("data"))
    )
    on_two = jax.jit(functools.partial(rule, FP4), compiler_options=QUICK)(
        split(x), w, split(g), KEY
    )
    for one, both in zip(products(FP4, x, w, g, KEY), on_two, strict=True):
        np.testing.assert_allclose(one, both, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_in_shard_map_each_device_has_the_products_of_its_tokens():
    (x, w, g), data, same = operands(64, 32, 32), PartitionSpec("a"), PartitionSpec()

    def inside(x, w, g):
        y, pull = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=FP4, key=KEY), x, w)
        return y, *pull(g)

    parts = jax.shard_map(
        inside,
        mesh=mesh_of(2),
        in_specs=(data, same, data),
        out_specs=(data, data, same),
    )
    y, dx, dw = jax.jit(parts, compiler_options=QUICK)(x, w, g)
    first, last = (
        products(FP4, x[half], w, g[half], KEY) for half in (slice(32), slice(32, 64))
    )
    for got, *expected in zip((y, dx), first, last):
        np.testing.assert_allclose(got, jnp.concatenate(expected), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, first[2] + last[2], rtol=1e-5, atol=1e-4)


def test_layers_take_keys_from_rngs():
    x, how = operands(32, 32, 32)[0], FORWARD_IN_BF16
    model = nn.Sequential([TCFPDense(32, recipe=how), TCFPDense(32, recipe=how)])
    variables = variables_of(model, x)
    loss = lambda v, key: jnp.square(model.apply(v, x, rngs={"tcfp": key})).sum()
    gradients = jax.jit(jax.grad(loss), compiler_options=QUICK)
    first, again, other = (gradients(variables, jax.random.key(i)) for i in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    kernel = lambda tree, layer=0: np.asarray(
        tree["params"][f"layers_{layer}"]["kernel"]
    )
    assert all((kernel(first, layer) != kernel(other, layer)).any() for layer in (0, 1))
    with pytest.raises(ValueError, match=r'rngs=\{"tcfp": key\}'):
        jax.grad(lambda v: model.apply(v, x).sum())(variables)

    layer = TCFPLinear(32, 32, recipe=how, rngs=nnx.Rngs(0))
    gradient = lambda layer: nnx.grad(lambda layer: jnp.square(layer(x)).sum())(
        layer
    ).kernel[...]
    # each call has a key of its own
    assert (np.asarray(gradient(layer)) != np.asarray(gradient(layer))).any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fp4Training("fp8"), "forward_operands='fp8' is unknown"),
        (
            lambda: recipe("nvfp4_training", wgrad="full"),
            "FP4 training quantizes a float weight",
        ),
        (
            lambda: recipe("nvfp4_training", quantize_backend="xla"),
            "FP4 training quantizes a float weight",
        ),
        (lambda: recipe("tcfp12", forward_operands="bf16"), "has no such field"),
    ],
)
def test_recipes_cannot_contradict_themselves(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_converted_models_draw_by_place_and_turn():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.relu(nn.Dense(32)(x)), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Layer),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return layers()(x, None)[0]

    x = operands(32, 32, 32)[0]
    model = convert_to_tcfp(
        Scanned(), FORWARD_IN_BF16, x, include=("linear", "small", "head")
    )
    variables = variables_of(Scanned(), x)
    loss = lambda v, key: jnp.square(
        model.apply(v, x, rngs=None if key is None else {"tcfp": key})
    ).sum()
    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)
    first, again, other = (
        jax.tree.leaves(gradient(variables, jax.random.key(i)))[-1] for i in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any(axis=(1, 2)).all()
    with pytest.raises(ValueError, match="got no key"):
        jax.grad(loss)(variables, None)


def test_equal_products_of_a_converted_function_are_rounded_by_bits_of_their_own():
    """Of two places in a program, and of two rounds of a loop: equal operands, other
    gradients.
    """
    x, w, g = operands(32, 32, 32)

    def loss(params, x):
        y = sum(jnp.sum((x @ params[name]) * g) for name in ("first", "second"))
        return y + jnp.sum(
            jax.lax.scan(lambda carry, w: (carry, (x @ w) * g), 0.0, params["stack"])[1]
        )

    params = {"first": w, "second": w, "stack": jnp.stack([w, w])}
    converted = transform(loss, FORWARD_IN_BF16, include=("linear", "small", "head"))
    gradient = jax.jit(
        lambda key: jax.grad(functools.partial(converted, product_key=key))(params, x)
    )
    found = jax.tree.leaves(gradient(jax.random.key(1)))
    for a, b in ((found[0], found[1]), found[2]):
        assert np.mean(np.asarray(a) != np.asarray(b)) > 0.1


class Two(nnx.Module):
    """Two layers, and perhaps the rngs that they were made with."""

    def __init__(self, rngs, keep=False):
        self.first, self.second = (
            nnx.Linear(32, 32, use_bias=False, rngs=rngs) for _ in range(2)
        )
        if keep:
            self.rngs = rngs

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


convert_two = functools.partial(convert_to_tcfp, include=("linear", "small", "head"))


def test_converted_nnx_models_draw_from_streams_of_their_own():
    x = operands(32, 32, 32)[0]
    model = convert_two(Two(nnx.Rngs(0)), FORWARD_IN_BF16, x, rngs=nnx.Rngs(tcfp=3))
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x)).mean())(
            model
        )
        optimizer.update(model, gradients)
        return loss, nnx.to_pure_dict(gradients)

    held = nnx.to_pure_dict(nnx.state(model, nnx.RngState))
    # checkpoints have them
    assert set(held["tcfp_keys"]) == set(held["first"]["tcfp_keys"]) == {"key", "count"}
    (loss, first), (again, second) = step(model, optimizer), step(model, optimizer)
    assert loss == again  # no parameter changed, and the forward pass draws nothing
    assert all(
        (first[name]["kernel"] != second[name]["kernel"]).any()
        for name in ("first", "second")
    )
    assert model.tcfp_keys.count[...] == 2
    # a part draws from its own
    nnx.grad(lambda model: jnp.square(model.first(x)).mean())(model)
    assert (model.tcfp_keys.count[...], model.first.tcfp_keys.count[...]) == (2, 1)

    export(model)
    assert not jax.tree.leaves(nnx.state(model, nnx.RngState))


def test_converted_nnx_models_without_keys():
    x = operands(32, 32, 32)[0]
    loss = lambda model: jnp.square(model(x)).mean()
    model = convert_two(Two(nnx.Rngs(0)), FORWARD_IN_BF16, x)
    assert jnp.isfinite(loss(model))  # an evaluation needs none
    with pytest.raises(
        ValueError,
        match=r"draws random bits, and got no key; .*rngs=nnx.Rngs\(tcfp=seed\)",
    ):
        nnx.grad(loss)(model)
    with pytest.raises(TypeError, match=r"rngs is a .*; pass nnx.Rngs\(tcfp=seed\)"):
        convert_two(Two(nnx.Rngs(0)), FORWARD_IN_BF16, x, rngs=jax.random.key(0))
    with pytest.raises(
        ValueError, match=r'a Linen model gets them at apply, as rngs=\{"tcfp": key\}'
    ):
        convert_two(nn.Dense(32), FORWARD_IN_BF16, x, rngs=nnx.Rngs(0))


@pytest.mark.slow_except("the model's own")
@pytest.mark.parametrize(
    "kept", [True, False], ids=["the model's own", "the default of what is given"]
)
def test_where_converted_nnx_models_find_a_stream(kept):
    x, given = operands(32, 32, 32)[0], None if kept else nnx.Rngs(5)
    model = convert_two(
        Two(nnx.Rngs(0, tcfp=1), keep=kept), FORWARD_IN_BF16, rngs=given
    )
    gradient = lambda: nnx.grad(lambda model: jnp.square(model(x)).mean())(
        model
    ).second.kernel[...]
    assert (
        np.asarray(gradient()) != np.asarray(gradient())
    ).any() and model.tcfp_keys.count[...] == 2
    plain = convert_two(
        Two(nnx.Rngs(0, tcfp=1), keep=kept), "tensorwise", x, rngs=given
    )
    assert not hasattr(plain, "tcfp_keys")  # nothing draws


def test_a_stored_weight_is_refused():
    x, w, _ = operands(32, 32, 32)
    multiply = lambda x, w: tcfp_jax.matmul(
        x, tcfp_jax.quantize(w.T), recipe="nvfp4_training", key=KEY
    )
    with pytest.raises(ValueError, match="multiplies float weights"):
        jax.eval_shape(multiply, x, w)


def test_no_two_operands_are_rounded_by_the_same_bits():
    """Roundings of one value by the same bits err alike, and errors that are not
    independent add up.
    """
    words = fp4_training._words_of(KEY)
    found = {
        name: fp4_training.quantization(name, words)
        for name in get_args(fp4_training.OperandName)
    }
    keys = [
        tuple(int(word) for word in each.key)
        for each in found.values()
        if each.key is not None
    ]
    assert len(keys) == 2 and len(set(keys)) == 2
    assert {name for name, each in found.items() if each.signs is not None} == {
        "x_wgrad",
        "g_wgrad",
    }
    assert np.array_equal(found["x_wgrad"].signs, found["g_wgrad"].signs)
    assert {name for name, each in found.items() if each.key is not None} == {
        "g",
        "g_wgrad",
    }
