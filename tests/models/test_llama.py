"""The Llama: results, memory of its backward pass, conversion, and errors."""

import doctest
import importlib
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpy.testing import assert_allclose

import tcfp_jax
from models.nets import families, losses, sizes
from models.nets.llama import Llama
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS
from tcfp_jax.conversion import survey
from tcfp_jax.losses import chunks
from tests.helpers import (
    assert_close,
    assert_near,
    filled,
    parametrize,
    refused,
    slow,
    store_at_once,
    variables_of,
)

# `nn.RMSNorm` mixes dtypes in bfloat16
pytestmark = pytest.mark.usefixtures("standard_promotion")
MICRO = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=16)
UNTIED = replace(
    MICRO, head="untied", vocabulary=300, rope_theta=100.0, attention="products"
)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 16))
INPUT = jnp.asarray(TOKENS)
PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down")


def llama(config=MICRO, dtype="float32", **changes):
    """Return (the model, variables of NumPy)."""
    model = Llama(replace(config, **changes), dtype=dtype)
    return model, variables_of(model, INPUT)


def loss(apply, variables):
    logits = apply(variables, INPUT)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 7])


def graded(model, variables):
    return jax.jit(jax.value_and_grad(partial(loss, model.apply)))(variables)


def residuals(model, variables):
    """Shapes of what the backward pass keeps."""

    def backward(v):
        return jax.vjp(partial(loss, model.apply), v)[1]

    return jax.tree.leaves(jax.eval_shape(backward, variables))


def numpy_swiglu(config, block, n):
    gate = n @ block["gate"]["kernel"]
    return (gate / (1 + np.exp(-gate)) * (n @ block["up"]["kernel"])) @ block["down"][
        "kernel"
    ]


def numpy_llama(config, params, tokens, mlp=numpy_swiglu):
    """Return the forward pass in float64, written from the equations: single heads,
    complex rotations.
    """
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, scale):
        return (
            x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * scale
        )

    size = config.head_size
    positions = tokens.shape[1]
    half = size // 2

    def turn(x):
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
            1j
            * np.arange(positions)[:, None]
            * config.rope_theta ** (-2 * np.arange(half) / size)
        )
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = p["embedding"]["embedding"][tokens]
    for layer in range(config.layers):
        block = jax.tree.map(lambda leaf: leaf[layer], p["layers"])
        n = norm(x, block["attention_norm"]["scale"])
        q, k, v = (n @ block[name]["kernel"] for name in ("query", "key", "value"))
        if config.qk_norm != "none":
            shape = {"heads": (*q.shape[:2], -1, size), "all": (*q.shape[:2], 1, -1)}[
                config.qk_norm
            ]
            q = norm(q.reshape(shape), block["query_norm"]["scale"]).reshape(q.shape)
            k = norm(k.reshape(shape), block["key_norm"]["scale"]).reshape(k.shape)
        heads = []
        for head in range(config.heads):
            mine, shared = (
                slice(i * size, (i + 1) * size)
                for i in (head, head * config.kv_heads // config.heads)
            )
            scores = (
                turn(q[..., mine]) @ turn(k[..., shared]).swapaxes(1, 2) / np.sqrt(size)
            )
            weights = np.exp(scores) * np.tri(positions)
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[..., shared])
        x = x + np.concatenate(heads, axis=-1) @ block["output"]["kernel"]
        x = x + mlp(config, block, norm(x, block["mlp_norm"]["scale"]))
    head = (
        p["embedding"]["embedding"].T if config.head == "tied" else p["head"]["kernel"]
    )
    return norm(x, p["final_norm"]["scale"]) @ head


@parametrize("config", [MICRO, UNTIED], ids=["tied, xla", "untied, products"])
def test_forward_pass_is_that_of_numpy(config):
    model, variables = llama(config)
    # scales of norms that are not near one
    variables = jax.tree.map(lambda leaf: leaf * 1.5, variables)
    logits = jax.jit(model.apply)(variables, INPUT)
    expected = numpy_llama(config, variables["params"], TOKENS)
    assert logits.dtype == jnp.float32
    assert expected.std() > 0.5
    assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * expected.std())


@slow
def test_remat_keeps_less_and_computes_the_same():
    kept = {}
    found = {}
    for remat in ("block", "products", "none"):
        model, variables = llama(remat=remat)
        kept[remat] = sum(leaf.size for leaf in residuals(model, variables))
        found[remat] = graded(model, variables)
    layer = MICRO.layers * TOKENS.size
    width = MICRO.width
    keys = MICRO.kv_heads * MICRO.head_size
    # q, attended and the residual stream between attention and MLP; k and v; gate and
    # up.
    assert kept["products"] - kept["block"] == layer * (
        3 * width + 2 * keys + 2 * MICRO.hidden
    )
    assert kept["none"] > kept["products"]
    model, variables = llama(remat="products", loop="unrolled")
    found["unrolled"] = graded(model, variables)
    for remat in ("products", "none", "unrolled"):
        assert_close(found[remat], found["block"], rtol=1e-4, atol=1e-6)


def test_layers_that_write_to_the_residual_stream_start_smaller():
    config = replace(MICRO, layers=8)
    layers = jax.jit(Llama(config).init)(random.key(0), jnp.asarray(TOKENS[:1]))[
        "params"
    ]["layers"]
    for name in PRODUCTS:
        expected = 0.02 / 4 if name in ("output", "down") else 0.02
        assert float(layers[name]["kernel"].std()) == pytest.approx(expected, rel=0.1)
        assert not np.array_equal(layers[name]["kernel"][0], layers[name]["kernel"][1])


# Conversion
# --------------------------------------------------------------------------------------


@parametrize(
    "config",
    [MICRO, replace(UNTIED, remat="products")],
    ids=["tied", "untied"],
)
def test_every_product_but_the_head_is_converted(config):
    learner = families.learner(config, tcfp_jax.recipe("tcfp12"), "bfloat16")
    report = survey(learner.model)
    assert [record.weight_path for record in report.converted] == [
        f"layers/{name}/kernel" for name in PRODUCTS
    ]
    head = "embedding/embedding" if config.head == "tied" else "head/kernel"
    assert [record.weight_path for record in report.skipped] == [head]
    assert all(weight.layout.stack == (0,) for weight in learner.weights.values())
    assert len(learner.weights) == 7


# layers quantize at each use here
@pytest.mark.filterwarnings("ignore:a converted Linen model is trained without")
def test_remat_keeps_as_little_of_a_converted_model():
    sizes = []
    for remat in ("block", "none"):
        config = replace(MICRO, remat=remat)
        model = families.learner(config, tcfp_jax.recipe("tcfp12"), "float32").model
        kept = residuals(model, llama()[1])
        sizes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in kept))
    assert sizes[0] < sizes[1] / 2


# Sizes
# --------------------------------------------------------------------------------------


@parametrize(
    "name, billions",
    [
        ("llama-tiny", 4e-4),
        ("llama-124m", 0.124),
        ("llama-1b", 1.236),
        ("llama-8b", 8.030),
    ],
)
def test_sizes(name, billions):
    c = LLAMAS[name]
    shapes = jax.eval_shape(
        Llama(c).init, random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    keys = c.width * c.kv_heads // c.heads
    layer = 2 * c.width + 2 * c.width**2 + 2 * c.width * keys + 3 * c.width * c.hidden
    tables = c.vocabulary * c.width * (1 if c.head == "tied" else 2)
    assert count == c.layers * layer + tables + c.width
    assert count / 1e9 == pytest.approx(billions, abs=1e-3)
    assert c.vocabulary % 128 == 0


@parametrize(
    "change, message",
    [
        ({"heads": 3}, "heads=3 does not divide width=32"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        (
            {"width": 36, "heads": 12, "kv_heads": 12},
            "heads=12 of width=36 have 3 values each.*even size",
        ),
        ({"vocabulary": 100}, "vocabulary=100 is below the 256 byte values"),
        ({"hidden": 0}, "below 1"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must be positive"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be positive"),
        ({"attention": "flash"}, "attention='flash' is unknown"),
        ({"remat": "all"}, "remat='all' is unknown"),
        (
            {"remat": "attended+gates"},
            (
                r"'attended\+gates' is unknown; use 'none', .* 'gate_fp8', .* joined by"
                r" '\+'"
            ),
        ),
        ({"head": "shared"}, "head='shared' is unknown"),
        ({"qk_norm": "on"}, "qk_norm='on' is unknown"),
        ({"head_dim": 3}, "have 3 values each"),
    ],
)
def test_a_config_names_what_is_wrong(change, message):
    with refused(message):
        replace(MICRO, **change)


def test_a_model_names_what_is_wrong():
    with refused(
        r"17 positions exceed the model's context of 16, beyond which .* no"
        r" rotation"
    ):
        Llama(MICRO).init(random.key(0), jnp.zeros((1, 17), jnp.int32))
    with refused("dtype='float16'"):
        Llama(MICRO, dtype="float16").init(random.key(0), jnp.zeros((1, 16), jnp.int32))
    with refused(r"model 'llama-9b' is unknown; use one of .*'llama-8b'"):
        sizes.model_config("llama-9b")
    with refused(
        r"vocabulary=500 with a model that reads bytes alone; use one of"
        r" .*'llama-8b"
    ):
        sizes.model_config("tiny", 500)


def test_the_module_knows_of_low_precision_only_fp8_copies():
    source = importlib.import_module("models.nets.llama")
    known = [
        name
        for name, value in vars(source).items()
        if getattr(value, "__module__", "").startswith("tcfp_jax")
    ]
    assert known == ["checkpoint_in_fp8"]
    assert not hasattr(source, "tcfp_jax")


@parametrize(
    "name",
    [
        "nets.llama",
        "nets.losses",
        "nets.shapes",
        "nets.sizes",
        "nets.families",
        "training.data",
        "training.dpo",
        "training.preferences",
        "training.settings",
    ],
)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(f"models.{name}")).failed == 0


@pytest.mark.gpu
@parametrize(
    "remat", ["none", "products", "block", "attended", "attended+gate_fp8+up_fp8"]
)
def test_flash_attention_and_remat_on_a_gpu(remat):
    config = LlamaConfig(
        layers=2,
        width=256,
        heads=4,
        kv_heads=2,
        hidden=512,
        context=128,
        attention="products",
    )
    exact = Llama(config)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 128)))
    variables = filled(jax.eval_shape(exact.init, random.key(0), tokens))
    fast = Llama(replace(config, attention="cudnn", remat=remat))

    def gradients(model):
        def mean(v):
            return jnp.mean(jax.nn.logsumexp(model.apply(v, tokens), axis=-1))

        return jax.value_and_grad(mean)(variables)

    # Once in the body of each loop that needs it.
    text = str(jax.make_jaxpr(lambda: gradients(fast))())
    assert len(re.findall(r"dot_product_attention_fwd\w*\[", text)) == (
        2 if remat == "block" else 1
    )
    a, ours = jax.jit(lambda: gradients(fast))()
    b, theirs = jax.jit(lambda: gradients(exact))()
    assert float(a) == pytest.approx(float(b), rel=1e-2)
    norms = jax.tree.map(
        lambda x, y: jnp.linalg.norm(x - y) / jnp.linalg.norm(y), ours, theirs
    )
    assert max(map(float, jax.tree.leaves(norms))) < (0.08 if "fp8" in remat else 0.05)


# Losses
# --------------------------------------------------------------------------------------


@parametrize("dtype", [jnp.float32, jnp.bfloat16])
@parametrize("kept", ["logits", "inputs"])
def test_losses_of_a_head_are_those_of_its_logits(kept, dtype, monkeypatch):
    # 32 rows are four times the eight of eight devices
    monkeypatch.setattr(chunks, "TOKENS_AT_ONCE", 1)
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((2, 16, 8)), dtype)
    w = jnp.asarray(rng.standard_normal((8, 300)), jnp.float32)

    def of_head(x, w, t):
        return jnp.mean(losses.head_losses(x, w, t, kept=kept))

    def plain(x, w, t):
        return jnp.mean(losses.cross_entropy(x @ w.astype(dtype), t))

    args = x, w, INPUT
    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(*args) for f in (of_head, plain)
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a = a.astype(jnp.float32)
        b = b.astype(jnp.float32)
        assert_near(a, b, tolerance * float(jnp.abs(b).max()))


def test_cross_entropy_is_minus_the_logarithm_of_a_softmax():
    logits = np.random.default_rng(4).standard_normal((2, 16, 300))
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(shares, TOKENS[..., None], -1)[..., 0])
    assert_allclose(
        losses.cross_entropy(jnp.asarray(logits), INPUT),
        expected,
        rtol=1e-5,
    )


def test_a_backward_pass_of_losses_holds_no_logits():
    model, variables = llama(UNTIED, "bfloat16", remat="block")

    def of_losses(v):
        return model.apply(v, INPUT[:, :-1], INPUT[:, 1:]).mean()

    kept = jax.tree.leaves(
        jax.eval_shape(lambda v: jax.vjp(of_losses, v)[1], variables)
    )
    assert not [
        leaf.shape
        for leaf in kept
        if leaf.shape[-1:] == (300,) and leaf.shape[0] != UNTIED.width
    ]

    # Losses of the same parameters without it.
    def by_logits(v):
        return losses.cross_entropy(model.apply(v, INPUT[:, :-1]), INPUT[:, 1:]).mean()

    found, expected = (
        jax.jit(jax.value_and_grad(f))(variables) for f in (of_losses, by_logits)
    )
    jax.tree.map(
        lambda a, b: assert_near(a, b, 0.05 * np.abs(b).max()),
        found,
        expected,
    )


# Conversion/test_heads.py has heads by the recipe, and the test above has the Llama's
# losses
@slow
@parametrize("config", [UNTIED, MICRO], ids=["untied", "tied"])
def test_a_converted_head_multiplies_by_the_recipe_in_losses(config, monkeypatch):
    monkeypatch.setattr(chunks, "TOKENS_AT_ONCE", 1)
    model, variables = llama(config, "bfloat16", remat="block")
    converted = tcfp_jax.conversion.convert_to_tcfp(
        model, "tcfp12_single", INPUT, include=("linear", "small", "head", "embed")
    )
    weights = tcfp_jax.conversion.find_weights(converted)
    path = ("head", "kernel") if config is UNTIED else ("embedding", "embedding")
    assert "/".join(path) in weights
    params = store_at_once(variables["params"], weights, key=random.key(0))

    def of_losses(params):
        return converted.apply({"params": params}, INPUT[:, :-1], INPUT[:, 1:]).mean()

    def by_logits(params):
        return losses.cross_entropy(
            converted.apply({"params": params}, INPUT[:, :-1]), INPUT[:, 1:]
        ).mean()

    found, expected = (
        jax.jit(tcfp_jax.value_and_grad(f))(params) for f in (of_losses, by_logits)
    )
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=2e-3)
    for place in (path, ("layers", "down", "kernel")):
        a = found[1]
        b = expected[1]
        for name in place:
            a = a[name]
            b = b[name]
        assert float(jnp.linalg.norm(a - b)) < 0.12 * float(jnp.linalg.norm(b))
