"""The corpus and the models: input, results, and errors."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import random
from matplotlib.figure import Figure

from models.nets.attention import causal_attention
from models.nets.gpt import GPT, ByteEmbedding
from models.nets.mlp import MLP
from models.nets.shapes import GPTConfig
from models.nets.sizes import MODELS, model_config
from models.training import progress
from models.training.plotting import plot_losses
from models.training.settings import preset
from models.training.text import (
    SEPARATOR,
    is_heldout,
    load_corpus,
    load_installed,
    source_files,
)
from tests.helpers import (
    normal,
    parametrize,
    refused,
    same_bits,
    slow_except,
    variables_of,
)

MICRO = GPTConfig(layers=1, width=32, heads=2, context=16)


@pytest.fixture
def library(tmp_path):
    """A small tree of source files, with files that do not belong."""
    for index in range(60):
        (tmp_path / f"module_{index}.py").write_text(f"value = {index}\n" * 20)
    for name in (
        "test/test_a.py",
        "site-packages/b.py",
        "_sysconfigdata_x.py",
        "json/tests/c.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("excluded\n")
    (tmp_path / "json" / "decoder.py").write_text("kept\n")
    return tmp_path


def test_corpus_is_split_by_file_within_its_limit():
    corpus = load_corpus(byte_limit=500_000)
    assert set(corpus.train_files).isdisjoint(corpus.heldout_files)
    assert all(map(is_heldout, corpus.heldout_files))
    assert not any(map(is_heldout, corpus.train_files))
    assert corpus.train.dtype == np.uint8
    assert len(corpus.train) > len(corpus.heldout) > 0
    files = len(corpus.train_files) + len(corpus.heldout_files)
    assert len(corpus.train) + len(corpus.heldout) <= 500_000 + files
    again = load_corpus(byte_limit=500_000)
    assert corpus.digest == again.digest
    assert corpus.train_files == again.train_files


def test_corpus_takes_library_sources_only(library):
    names = source_files(library)
    assert len(names) == 61
    assert "json/decoder.py" in names
    corpus = load_corpus(library)
    assert corpus.train.tobytes().count(SEPARATOR) == len(corpus.train_files)
    assert b"excluded" not in corpus.train.tobytes() + corpus.heldout.tobytes()


def test_new_files_move_no_other_file(library):
    before = load_corpus(library)
    (library / "another.py").write_text("x = 1\n")
    after = load_corpus(library)
    assert set(before.train_files) <= set(after.train_files)
    assert set(before.heldout_files) <= set(after.heldout_files)
    assert before.digest != after.digest


def test_installed_packages_are_read_once_each(library):
    packages = library / "site-packages"
    for index in range(60):
        text = f"text_{index % 40} = {index % 40}\n" * 20
        (packages / "tests").mkdir(exist_ok=True)
        (packages / "tests" / f"test_{index}.py").write_text(text)
    (packages / "short.py").write_text("x = 1\n")
    corpus = load_installed((packages, library))
    texts = (corpus.train.tobytes() + corpus.heldout.tobytes()).split(SEPARATOR)[:-1]
    # Modules of both roots, without copies and short files
    assert len(texts) == len(set(texts)) == 40 + 60
    names = corpus.train_files + corpus.heldout_files
    assert sum(name.startswith("site-packages/tests/") for name in names) == 40
    assert set(corpus.train_files).isdisjoint(corpus.heldout_files)
    limited = load_installed((packages, library), byte_limit=4000)
    assert len(limited.train) + len(limited.heldout) <= 4000 + len(
        limited.train_files + limited.heldout_files
    )
    with refused("no training file", FileNotFoundError):
        load_installed((library / "json",))


def test_corpus_refuses_an_empty_tree(tmp_path):
    with refused("no training file", FileNotFoundError):
        load_corpus(tmp_path)
    with refused("byte_limit=0"):
        load_corpus(byte_limit=0)


@parametrize("dtype", ["float32", "bfloat16"])
def test_gpt_gives_float32_logits(dtype):
    model = GPT(MICRO, dtype=dtype)
    tokens = jnp.zeros((2, 16), jnp.int32)
    logits = jax.jit(model.apply)(variables_of(model, tokens), tokens)
    assert logits.shape == (2, 16, 256)
    assert logits.dtype == jnp.float32
    assert bool(jnp.isfinite(logits).all())


def test_gpt_is_causal():
    # In BF16: a per-tensor FP8 scale depends on every position, future ones too, though
    # only through its exponent.
    model = GPT(MICRO, recipe="bf16", dtype="float32")
    tokens = random.randint(random.key(1), (1, 16), 0, 256)
    variables = variables_of(model, tokens)
    apply = jax.jit(model.apply)
    changed = tokens.at[0, 10:].set(7)
    before, after = (apply(variables, text) for text in (tokens, changed))
    assert jnp.array_equal(before[:, :10], after[:, :10])
    assert not jnp.array_equal(before[:, 10:], after[:, 10:])


def test_parameters_do_not_depend_on_the_recipe():
    tokens = jnp.zeros((1, 16), jnp.int32)
    trees = [
        jax.jit(GPT(MICRO, recipe=name).init)(random.key(0), tokens)
        for name in ("bf16", "tcfp12", None)
    ]
    assert all(same_bits(trees[0], tree) for tree in trees[1:])


@parametrize(
    "name, millions",
    [("tiny", (0.4, 0.5)), ("small", (3.2, 3.4)), ("gpt2", (124, 125))],
)
def test_sizes(name, millions):
    model = GPT(MODELS[name])
    shapes = jax.eval_shape(
        model.init, random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6
    assert millions[0] < count < millions[1]


def test_byte_embedding_is_nn_embed():
    ours = ByteEmbedding(300, 8)
    flax = nn.Embed(300, 8)
    tokens = jnp.array([[0, 255, 3, 3]])
    variables = flax.init(random.key(0), tokens)
    assert jnp.array_equal(ours.apply(variables, tokens), flax.apply(variables, tokens))
    query = normal(1, (2, 8))
    attended = [
        layer.apply(variables, query, method="attend") for layer in (ours, flax)
    ]
    assert jnp.allclose(*attended, rtol=1e-5, atol=1e-6)

    def total(layer):
        return jax.grad(lambda v: jnp.sum(layer.apply(v, tokens) * jnp.arange(8.0)))(
            variables
        )

    assert jax.tree.all(jax.tree.map(jnp.allclose, total(ours), total(flax)))


def test_models_name_what_is_wrong():
    with refused("heads=3 does not divide width=32"):
        replace(MICRO, heads=3)
    with refused("vocabulary=100"):
        replace(MICRO, vocabulary=100)
    with refused("attention='flash' is unknown"):
        replace(MICRO, attention="flash")
    with refused("below 1"):
        replace(MICRO, layers=0)
    with refused("model 'huge' is unknown"):
        model_config("huge")
    with refused("17 positions exceed the model's context of 16"):
        GPT(MICRO).init(random.key(0), jnp.zeros((1, 17), jnp.int32))
    with refused("dtype='float16'"):
        GPT(MICRO, dtype="float16").init(random.key(0), jnp.zeros((1, 16), jnp.int32))
    with refused("names no layer"):
        MLP(features=()).init(random.key(0), jnp.ones((1, 4)))


@pytest.mark.gpu
def test_cudnn_attends_as_products_do():
    q, k, v = (
        random.normal(random.key(i), (2, 64, 2, 64), jnp.bfloat16) for i in range(3)
    )
    with jax.numpy_dtype_promotion("standard"):
        fast, exact = (
            causal_attention(q, k, v, how).astype(jnp.float32)
            for how in ("cudnn", "products")
        )
    assert jnp.allclose(fast, exact, atol=0.03)


@slow_except("tcfp12", "tensorwise")
@parametrize("recipe", ["bf16", "tcfp12", "tcfp12_fast", "tensorwise"])
def test_mlp_learns_a_separable_task(recipe):
    model = MLP(features=(32, 2), recipe=recipe, dtype=jnp.float32)
    x = normal(0, (64, 16))
    label = jax.nn.one_hot((x[:, 0] > 0).astype(jnp.int32), 2)
    params = variables_of(model, x)

    def loss(params):
        return -jnp.mean(
            jnp.sum(label * jax.nn.log_softmax(model.apply(params, x)), axis=-1)
        )

    @jax.jit
    def losses_of_steps(params):
        def step(params, _):
            value, gradients = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), value

        return jax.lax.scan(step, params, length=31)[1]

    losses = losses_of_steps(params)
    assert losses[-1] < losses[0] / 3


def test_plot_is_a_png(tmp_path, monkeypatch):
    labels = []
    save = Figure.savefig

    def savefig(figure, path, **options):
        labels.append(figure.axes[0].get_ylabel())
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    plot_losses(
        tmp_path / "loss.png",
        {"a": np.linspace(5, 2, 120), "b": np.linspace(5, 3, 120)},
        title="losses",
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert labels == ["training loss (nats per token)"]


def test_the_bar_has_no_empty_field(capsys):
    with progress.bar_of(preset(), 0, True) as bar:
        bar.set_postfix_str("step 10, loss 3.466")
        bar.update(20480)
    for drawn in capsys.readouterr().err.split("\r"):
        assert not re.search(r"\| *,|, *,", drawn)
    assert re.search(r"\| .*tok/s, step 10, loss 3\.466, \d\d:\d\d gone", drawn)
