"""Calls that users of other libraries type, as docs/migrate.md says that they work."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tcfp_jax
from pallas_kernels.operands import Block
from pallas_kernels.quantize.api import quantize
from tcfp_jax import Recipe, TCFPMode, fake_quantize, matmul, recipe
from tcfp_jax.conversion import convert_to_tcfp, diagnose, find_weights, survey
from tcfp_jax.linen import TCFPDense, TCFPLayerNorm
from tcfp_jax.nnx import TCFPLayerNorm as NnxLayerNorm
from tcfp_jax.products import fp4_matmul, grouped_matmul, pack_fp4
from tcfp_jax.weights.small_blocks import skipped_share, without_small_blocks
from tests.helpers import assert_close, drawn, parametrize, refused, same_bits, slow

X = drawn(4, 64)
W = drawn(64, 32, seed=1)
EVERY = ("linear", "small", "head")


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "migrate.md").read_text()
ON_PAGE = sorted(set(re.findall(r"`(recipe\([^`]*\))`", PAGE)) - {"recipe()"})


def test_every_recipe_of_the_page_can_be_built():
    assert len(ON_PAGE) > 8
    for text in ON_PAGE:
        whole = text.replace("from_flags(...)", "from_flags()")
        whole = whole.replace("...", '"tcfp12"')
        made = eval(whole, {"recipe": recipe, "Recipe": Recipe, "t": 1e-3})
        assert isinstance(made, Recipe), text


def test_the_page_begins_with_the_measured_speeds():
    opening = re.search(r"MLP is (\S+) times .* H100,\s+and (\S+) times with", PAGE)
    card = RESULTS / "nvidia-h100-80gb-hbm3" / "train_step.json"
    rows = json.loads(card.read_text())["rows"]
    shape = "8192x4096x16384"
    found = {
        row["recipe"]: row["speed_over_bf16"] for row in rows if row["shape"] == shape
    }
    for text, name in zip(opening.groups(), ("tcfp12", "tcfp12_fast"), strict=True):
        assert float(text) == pytest.approx(found[name], abs=0.02)


# Digits instead of MNIST


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))


@slow
def test_digits_do_not_tell_recipes_apart():
    datasets = pytest.importorskip("sklearn.datasets", reason="no scikit-learn")
    images, labels = datasets.load_digits(return_X_y=True)
    images = np.float32(images / 16)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = np.split(order, [len(order) // 5])
    start = Classifier().init(jax.random.key(0), images[:1])
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, 200))

    def accuracy(name):
        model = convert_to_tcfp(Classifier(), name, images[:128], include=EVERY)

        def loss(params, x, y):
            logits = model.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        @jax.jit
        def step(params, state, x, y):
            updates, state = optimizer.update(
                jax.grad(loss)(params, x, y), state, params
            )
            return optax.apply_updates(params, updates), state

        params = start
        state = optimizer.init(params)
        for number in range(200):
            batch = np.random.default_rng(number).choice(train, 128)
            params, state = step(params, state, images[batch], labels[batch])
        found = model.apply(params, images[test]).argmax(-1)
        return float(np.mean(found == labels[test]))

    names = ("bf16", "tcfp12", "tensorwise", "rowwise", "nvfp4")
    with jax.numpy_dtype_promotion("standard"):  # as Optax needs
        found = np.array([accuracy(name) for name in names])
    assert found.min() > 0.97
    assert np.ptp(found) < 0.01


# Modes of PyTorch TCFP


class Block2(nn.Module):
    """The quick start of PyTorch TCFP: two layers, an activation and a norm."""

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(32)(x))
        return nn.LayerNorm()(nn.Dense(64)(x))


@parametrize(
    "mode, name",
    [
        (TCFPMode.TCFP12, "tcfp12"),
        (TCFPMode.FP8, "tensorwise"),
        (TCFPMode.FP4, "nvfp4"),
        (TCFPMode.BF16, "bf16"),
    ],
    ids=str,
)
def test_a_mode_is_a_recipe(mode, name):
    assert recipe(mode) is recipe(name)
    assert recipe(mode).mode is mode
    assert recipe(mode, wire="float32") == recipe(name, wire="float32")


def program(function, *args):
    return str(jax.make_jaxpr(function)(*args))


def test_a_mode_is_taken_wherever_a_recipe_is():
    stored = []
    layers = []
    for how in (TCFPMode.TCFP12, "tcfp12"):
        store = partial(tcfp_jax.store, recipe=how, key=jax.random.key(0))
        stored.append(jax.eval_shape(store, {"kernel": W}))
        apply = TCFPDense(32, use_bias=False, recipe=how).apply
        layers.append(program(apply, {"params": {"kernel": W}}, X))
    assert stored[0] == stored[1]
    assert layers[0] == layers[1]
    rules = {"Dense_0": TCFPMode.TCFP12}
    model = convert_to_tcfp(Block2(), "bf16", X, rules=rules)
    found = {record.weight_path: record for record in survey(model).converted}
    assert found["Dense_0/kernel"].recipe == recipe("tcfp12")


@parametrize("given", [{"mode": TCFPMode.TCFP12}, {}], ids=str)
def test_convert_by_mode(given):
    converted = convert_to_tcfp(nn.Dense(32, use_bias=False), include=EVERY, **given)
    wanted = convert_to_tcfp(nn.Dense(32, use_bias=False), "tcfp12", include=EVERY)
    variables = {"params": {"kernel": W}}
    assert program(converted.apply, variables, X) == program(wanted.apply, variables, X)
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    assert convert_to_tcfp(model, include=EVERY, **given) is model
    assert find_weights(model, X)["kernel"].recipe == recipe("tcfp12")


def test_a_recipe_and_a_mode_are_too_much():
    with refused("recipe='bf16' and mode=<TCFPMode.TCFP12: 'tcfp12'>"):
        convert_to_tcfp(Block2(), "bf16", mode=TCFPMode.TCFP12)


# Norms


@parametrize("include", ["norm", "layer_norm", ("linear", "small", "norm")], ids=str)
def test_norms_of_linen_are_rounded(include):
    scale = drawn(64).at[3].set(100.0)
    variables = {"params": {"scale": scale, "bias": drawn(64, seed=1)}}
    model = convert_to_tcfp(nn.LayerNorm(), "tcfp12", X, include=include)
    assert set(survey(model).rounded) == {"scale", "bias"}
    by_hand = TCFPLayerNorm().apply(variables, X)
    np.testing.assert_allclose(model.apply(variables, X), by_hand, rtol=1e-5, atol=1e-6)
    exact = nn.LayerNorm().apply(variables, X)
    assert np.abs(exact - by_hand).max() > 1e-3
    np.testing.assert_allclose(by_hand, exact, rtol=0.02, atol=0.2)


def test_only_norms_are_rounded():
    model = convert_to_tcfp(Block2(), "tcfp12", X, include=(*EVERY, "norm"))
    found = survey(model)
    assert set(found.rounded) == {"LayerNorm_0/scale", "LayerNorm_0/bias"}
    assert len(found.converted) == 2


class Scanned(nn.Module):
    """Three blocks of the quick start, as one loop over stacked parameters."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Block2Step,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers(name="layers")(x, None)[0]


class Block2Step(Block2):
    @nn.compact
    def __call__(self, x, _):
        return super().__call__(x), None


def test_norms_of_a_stack_are_rounded():
    model = convert_to_tcfp(Scanned(), "tcfp12", X, include=(*EVERY, "norm"))
    expected = {f"layers/LayerNorm_0/{name}" for name in ("scale", "bias")}
    assert set(survey(model).rounded) == expected


def test_norms_of_nnx_are_rounded():
    layers = []
    for kind in (NnxLayerNorm, nnx.LayerNorm):
        layer = kind(64, rngs=nnx.Rngs(0))
        layer.scale[...] = drawn(64)
        layers.append(nnx.Sequential(layer))
    by_hand, model = layers
    exact = model(X)
    convert_to_tcfp(model, "tcfp12", X, include=("norm",))
    np.testing.assert_allclose(model(X), by_hand(X), rtol=1e-5, atol=1e-6)
    assert np.abs(exact - model(X)).max() > 1e-3


# The fake-quantized layer


FAKE = Recipe.from_flags(use_tensor_cores=False)


def rounded(w):
    """Return W as the layer reads it, with blocks along k."""
    return fake_quantize(w.T, residual="nf4").T


def test_the_layer_without_tensor_cores_reads_the_packed_format():
    g = drawn(4, 32, seed=2)
    found, vjp = jax.vjp(lambda x, w: matmul(x, w, recipe=FAKE), X, W)
    wanted, plain = jax.vjp(lambda x, w: matmul(x, w, recipe="bf16"), X, rounded(W))
    # dgrad reads the rounded weight, and the gradient of rounding is the identity. The
    # same products are added in another order.
    assert_close((found, vjp(g)), (wanted, plain(g)), rtol=1e-5, atol=1e-4)
    assert np.abs(found - matmul(X, W, recipe="bf16")).max() > 1e-2


@slow
def test_the_packed_format_reaches_every_kind_of_product():
    experts = jnp.stack([W, 2 * W])
    sizes = jnp.array([1, 3])
    found = grouped_matmul(X, experts, sizes, recipe=FAKE)
    experts = jnp.stack([rounded(W), 2 * rounded(W)])
    wanted = grouped_matmul(X, experts, sizes, recipe="bf16")
    assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    targets = jnp.arange(4)
    found = tcfp_jax.losses.cross_entropy(X, W, targets, recipe=FAKE)
    wanted = tcfp_jax.losses.cross_entropy(X, rounded(W), targets, recipe="bf16")
    assert_close(found, wanted, rtol=1e-5)
    model = convert_to_tcfp(nn.DenseGeneral((4, 8)), FAKE, X, include=EVERY)
    variables = {"params": {"kernel": W.reshape(64, 4, 8), "bias": jnp.zeros((4, 8))}}
    wanted = matmul(X, rounded(W), recipe="bf16").reshape(4, 4, 8)
    assert_close(model.apply(variables, X), wanted, rtol=1e-5, atol=1e-4)


@slow
def test_diagnose_knows_the_packed_format(capsys):
    params = {"kernel": W, "bias": jnp.zeros(32)}
    snr = diagnose(nn.Dense(32), X, recipe=FAKE, params=params).lines[0].snr_db
    kernel = np.asarray(W, np.float64)
    wanted = 10 * np.log10(np.sum(kernel**2) / np.sum((rounded(W) - kernel) ** 2))
    # The product rounds the result to BF16, which has 56 dB.
    assert wanted - 1.5 < snr < wanted
    assert "storage='packed'" in capsys.readouterr().out


# Blocks under a threshold

THRESHOLD = 2.0**-11


def weight_of_two_sizes():
    """A weight whose left blocks have small residuals."""
    return drawn(64, 64, seed=3) * jnp.where(jnp.arange(64) < 32, 2.0**-8, 1.0)


def test_blocks_under_the_threshold_are_zero_in_products():
    w = weight_of_two_sizes()
    how = recipe("tcfp12_blockwise", block=32, sparse_threshold=THRESHOLD)
    assert how.weight.blocks == "nonzero"
    operand = tcfp_jax.split(w, block=32)
    dropped = operand.lo.at[:, :32].set(0)
    by_hand = operand.values.astype(jnp.float32) + dropped.astype(jnp.float32)
    by_hand = by_hand * operand.scale_of_values()
    read = without_small_blocks(operand, THRESHOLD)
    assert same_bits(read.lo, dropped)
    assert same_bits(read.dequantize(), by_hand)
    assert float(skipped_share(read)) == 0.5
    assert float(skipped_share(operand)) == 0.0

    x = drawn(32, 64)
    y, vjp = jax.vjp(lambda x: matmul(x, w, recipe=how), x)
    vectors = Block(32, "vector")
    x_read = quantize(x, jnp.float8_e4m3fn, vectors).rows.dequantize()
    g_read = quantize(y, jnp.float8_e4m3fn, vectors).rows.dequantize()
    np.testing.assert_allclose(y, x_read @ by_hand, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(vjp(y)[0], g_read @ by_hand.T, rtol=1e-5, atol=1e-3)


def test_a_nan_is_not_dropped():
    w = weight_of_two_sizes().at[0, 0].set(jnp.nan)
    read = without_small_blocks(tcfp_jax.split(w, block=32), THRESHOLD)
    assert float(skipped_share(read)) == 0.25


def test_diagnose_counts_what_the_threshold_drops(capsys):
    params = {"kernel": weight_of_two_sizes(), "bias": jnp.zeros(64)}
    lines = []
    for threshold in (0.0, THRESHOLD):
        how = recipe(
            "tcfp12_blockwise",
            block=32,
            residual_blocks="nonzero",
            sparse_threshold=threshold,
        )
        found = diagnose(nn.Dense(64), jnp.zeros((4, 64)), recipe=how, params=params)
        lines += found.lines
    assert [line.skipped for line in lines] == [0.0, 0.5]
    assert lines[0].snr_db > lines[1].snr_db > 30
    assert "products skip 50.0% of W_lo's blocks" in capsys.readouterr().out


def test_a_weight_without_blocks_has_none_to_skip():
    with refused("no residual in blocks"):
        skipped_share(tcfp_jax.quantize(W))


# Rules of qwix


@parametrize("last, expected", [([], ["0", "1"]), ([(".*", None)], ["0"])], ids=str)
def test_a_last_rule_makes_an_allow_list(last, expected):
    rules = [(r"^Dense_0$", "tensorwise"), *last]
    model = convert_to_tcfp(Block2(), "rowwise", X, rules=rules, include=EVERY)
    found = {record.weight_path for record in survey(model).converted}
    assert found == {f"Dense_{number}/kernel" for number in expected}


# Filters of torchao


def test_a_filter_of_torchao_is_told_what_a_rule_returns():
    def keep(path, product):
        return product.k % 16 == 0

    with refused(r"rule keep returned True for 'Dense_0/kernel'.*False is \"bf16\""):
        convert_to_tcfp(Block2(), "rowwise", X, rules=[keep], include=EVERY)


def test_a_group_is_shown_by_one_name():
    with refused(r"include=\(\"linear\", \"norm\"\), or name it"):
        convert_to_tcfp(nn.Dense(32), "tcfp12", X, include="layer_norm", strict=True)


# FP4 products


@slow
def test_both_operands_in_four_bits_have_the_correlation_of_an_fp4_gemm():
    w4a4 = recipe("nvfp4", activation="float4_e2m1fn")
    x = drawn(256, 2944)
    w = drawn(2944, 2944, seed=1)
    found = fp4_matmul(x, pack_fp4(w, w4a4), recipe=w4a4)
    exact = np.float64(x) @ np.float64(w)
    pearson = np.corrcoef(exact.ravel(), np.float64(found).ravel())[0, 1]
    assert pearson == pytest.approx(0.991, abs=5e-4)
