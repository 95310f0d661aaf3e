"""Pairs of answers: how they are read, the loss of direct preference optimization, and
runs that learn from them.
"""

import functools
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from models import train
from models.huggingface.folders import write_folder
from models.huggingface.tokenizer import read_tokenizer
from models.nets.llama import Llama
from models.nets.losses import IGNORED, cross_entropy, head_objective
from models.nets.meshes import everywhere, make_mesh, parse_mesh
from models.nets.shapes import LlamaConfig
from models.training.data import Data
from models.training.described import resumed
from models.training.dpo import (
    REWARDS,
    dpo_losses,
    numbers_of,
    reference_of,
    reference_variables,
)
from models.training.evaluation import evaluate_pairs
from models.training.examples import COUNTED, DOCUMENTS, TOKENS, load_examples
from models.training.learners import model_of
from models.training.options import parser_of, with_hyphens
from models.training.preferences import (
    EMPTY,
    EQUAL,
    LONG,
    Preferences,
    are_pairs,
    load_pairs,
    pair,
)
from models.training.running import corpus_of
from models.training.settings import (
    Float,
    Stored,
    TrainConfig,
    config_of,
    preset,
    settings_of,
)
from models.training.steps import batch_key, init, loss_function, make_train_step
from tcfp_jax import matmul
from tcfp_jax.recipes import recipe
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import normal, parametrize, refused, same_bits, slow

pytestmark = pytest.mark.usefixtures("standard_promotion")
LETTERS = [*" abcdefgh.<>", "<begin>", "<end>"]
BEGIN, END = len(LETTERS) - 2, len(LETTERS) - 1
CHAT = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }}."
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
USER = dict(role="user", content="a")
SIZE = LlamaConfig(
    layers=1,
    width=32,
    heads=2,
    kv_heads=1,
    hidden=32,
    context=16,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of single characters with a chat template, and 80 pairs, of which
    chosen answers have early letters.
    """
    folder = tmp_path_factory.mktemp("pairs")
    numbers = {letter: i for i, letter in enumerate(LETTERS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "."))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.add_special_tokens(["<begin>", "<end>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", BEGIN)]
    )
    model.save(str(folder / "tokenizer.json"))
    settings = dict(eos_token="<end>", chat_template=CHAT)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(80):
        parts = [
            draw.choice(list(letters), 3) for letters in ("abcdefgh", "abcd", "efgh")
        ]
        lines.append(of_text(*map("".join, parts)))
    write(folder / "pairs.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return read_tokenizer(folder / "tokenizer.json")


def of_text(prompt, chosen, rejected):
    return dict(prompt=prompt, chosen=chosen, rejected=rejected)


def of_chat(prompt, chosen, rejected):
    roles = ("user", "assistant")
    turns = [dict(role=roles[i % 2], content=one) for i, one in enumerate(prompt)]
    answers = [[dict(role="assistant", content=one)] for one in (chosen, rejected)]
    return of_text(turns, *answers)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config_for(folder, **settings):
    data = Data(
        (str(folder / "pairs.jsonl"),), len(LETTERS), str(folder / "tokenizer.json")
    )
    given = dict(
        model=SIZE,
        recipe="tcfp12_single",
        weights=Stored("8bit"),
        steps=20,
        batch=16,
        sequence=8,
        learning_rate=5e-3,
        weight_decay=0.0,
        data=data,
        preferences=Preferences(),
    )
    return TrainConfig(**(given | settings))


class TestReading:
    def test_a_pair_of_texts(self, tokenizer):
        rows = pair(of_text("ab", "c", "dd"), tokenizer, 8)
        assert rows[:, TOKENS].tolist() == [
            [BEGIN, 1, 2, 3, END, 0, 0, 0],
            [BEGIN, 1, 2, 4, 4, END, 0, 0],
        ]
        assert rows[:, COUNTED].tolist() == [
            [0, 0, 0, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 1, 1, 0, 0],
        ]
        assert rows[:, DOCUMENTS].sum(-1).tolist() == [5, 6]

    def test_a_pair_of_chats_counts_the_last_answers(self, tokenizer):
        rows = pair(of_chat(["a", "b", "c"], "d", "e"), tokenizer, 16)
        user, assistant, stop = map(LETTERS.index, "<>.")
        turns = [user, 1, stop, assistant, 2, stop, user, 3, stop, assistant]
        assert rows[0, TOKENS, :12].tolist() == [*turns, 4, stop]
        assert rows[1, TOKENS, :12].tolist() == [*turns, 5, stop]
        assert rows[:, COUNTED].tolist() == [[0] * 10 + [1, 1] + [0] * 4] * 2

    def test_a_long_row_keeps_its_start(self, tokenizer):
        rows = pair(of_text("ab", "cccccc", "d"), tokenizer, 5)
        assert rows[0, TOKENS].tolist() == [BEGIN, 1, 2, 3, 3]
        assert rows[0, COUNTED].tolist() == [0, 0, 0, 1, 1]

    @parametrize(
        "line, reason",
        [
            (of_text("ab", " ", "d"), EMPTY),
            (of_chat(["a"], "b", ""), EMPTY),
            (of_text("ab", "c", "c"), EQUAL),
            (of_text("ab", "ccccd", "cccce"), EQUAL),  # in this row
            (of_text("abcdefgh", "c", "d"), LONG),
        ],
    )
    def test_a_pair_without_a_lesson_is_left_out(self, tokenizer, line, reason):
        assert pair(line, tokenizer, 5) == reason

    @parametrize(
        "line, message",
        [
            ({"prompt": "a", "chosen": "b"}, r"has \['chosen', 'prompt'\]; give"),
            ({"text": "a"}, r"this one has \['text'\]; give each line all three"),
            ({"chosen": "b", "rejected": "c"}, "into the prompt"),
            (of_text([USER], [USER], []), '"chosen" has no message with the role'),
            (["a"], "this one has list"),
            (of_text("a", "b", None), "three strings.*these are str, str, NoneType"),
            (of_text("a", [], []), "these are str, list, list"),
            (of_text([{"role": "user"}], [], []), "message 0"),
            (of_text("a", "b", "\ud83d"), "half of a character"),
        ],
    )
    def test_other_lines_are_errors_with_their_place(
        self, tmp_path, tokenizer, line, message
    ):
        good = of_text("a", "b", "c")
        path = write(tmp_path / "pairs.jsonl", [good, line])
        with refused(f"line 2: .*{message}"):
            load_pairs([str(path)], tokenizer, 8)

    def test_a_pair_among_texts_is_an_error(self, tmp_path, tokenizer):
        lines = [dict(text="ab"), of_text("a", "b", "c")]
        path = write(tmp_path / "data.jsonl", lines)
        with refused("line 2: .*'rejected'.*; give pairs of answers alone"):
            load_examples([str(path)], tokenizer, 8)

    @parametrize(
        "line, expected",
        [
            (of_text("a", "b", "c"), True),
            ({"prompt": "a", "chosen": "b"}, True),  # and is refused as a pair
            (dict(of_text("a", "b", "c"), messages=[USER]), True),
            (dict(text="a", chosen="b"), False),
            ({"prompt": "a"}, False),
        ],
    )
    def test_the_first_line_decides(self, tmp_path, line, expected):
        assert are_pairs([str(write(tmp_path / "data.jsonl", [line]))]) == expected

    def test_pairs_that_are_left_out_are_told_with_their_lines(
        self, tmp_path, tokenizer
    ):
        lines = [of_text("a", "b", "cdefgh"[i]) for i in range(6)]
        lines[1:1] = [of_text("a", "b", "b"), of_text("a" * 20, "b", "c")]
        path = write(tmp_path / "pairs.jsonl", lines)
        corpus = load_pairs([str(path)], tokenizer, 8)
        assert corpus.train.shape == (5, 2, 3, 9)
        assert corpus.heldout.shape == (1, 2, 3, 9)
        equal, long = corpus.notes
        assert equal == f"1 pair(s) left out because {EQUAL} ({path}, line 2)"
        assert f"{LONG} ({path}, line 3)" in long
        write(path, lines[1:3])
        with refused(f"holds 0 pair.*{EQUAL}.*{LONG}"):
            load_pairs([str(path)], tokenizer, 8)

    @parametrize(
        "load, lines",
        [
            (load_pairs, [of_text("a", "b", "c"), of_text("b", "c", "d")]),
            (load_examples, [dict(text="abc"), dict(text="bcd")]),
        ],
    )
    def test_the_files_of_a_folder_are_named(self, tmp_path, tokenizer, load, lines):
        paths = [
            str(write(tmp_path / f"{i}.jsonl", [line])) for i, line in enumerate(lines)
        ]
        corpus = load([str(tmp_path)], tokenizer, 8)
        assert corpus.train_files == corpus.heldout_files == tuple(paths)

    def test_a_vocabulary_has_all_ids_of_the_tokenizer(self, folder):
        data = replace(config_for(folder).data, vocabulary=3)
        with refused(f"vocabulary=3 is less than the {len(LETTERS)} ids of .*leave it"):
            corpus_of(config_for(folder, data=data))

    def test_messages_need_a_template(self, tokenizer):
        bare = replace(tokenizer, template=None)
        with refused("no chat template; give the prompt"):
            pair(of_chat(["a"], "b", "c"), bare, 8)


@parametrize(
    "name, bytes_per_weight",
    [
        ("tcfp12_single", 1),
        ("tcfp12", 4),
        ("rowwise", 2),
        pytest.param("tensorwise", 1, marks=slow),
        pytest.param("tcfp12_blockwise", 4, marks=slow),
        pytest.param("mxfp8", 2, marks=slow),
    ],
)
def test_a_reference_multiplies_the_weights_of_its_recipe(name, bytes_per_weight):
    how = recipe(name)
    x, w = normal(0, (8, 128)), normal(1, (128, 128))
    stored = quantize_weight(w, how)[0]
    made = reference_of({"a": {"kernel": w}}, {"a": {"kernel": stored}}, how, w.dtype)
    found = made["tcfp"]["a"]["kernel"]
    assert made["params"] == {"a": {}}
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(found)) < (
        1.1 * bytes_per_weight * w.size
    )
    y = matmul(x, None, recipe=how, quantized=found)
    assert same_bits(y, matmul(x, None, recipe=how, quantized=stored))


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


class TestLoss:
    @parametrize("beta, smoothing", [(0.1, 0.0), (0.5, 0.1), (2.0, 0.4)])
    def test_it_is_its_definition_in_float64_and_the_formula_of_trl(
        self, beta, smoothing
    ):
        draw = np.random.default_rng(0)
        policy = draw.normal(-20, 8, (64, 2)).astype(np.float32)
        reference = draw.normal(-20, 8, (64, 2)).astype(np.float32)
        preferences = Preferences(beta, smoothing)
        ratios = policy.astype(np.float64) - reference
        logits = ratios[:, 0] - ratios[:, 1]
        preferred = 1 / (1 + np.exp(-beta * logits))
        trl = -log_sigmoid(beta * logits) * (1 - smoothing) - (
            log_sigmoid(-beta * logits) * smoothing
        )
        found = dpo_losses(jnp.asarray(policy), jnp.asarray(reference), preferences)
        # Four float32 values of at most 60 are subtracted, each rounded by 2**-24.
        bound = beta * 8 * 64 * 2**-24 + 1e-6
        np.testing.assert_allclose(found, trl, atol=bound)
        slope = jax.grad(lambda p: dpo_losses(p, reference, preferences).sum())(policy)
        expected = beta * (preferred - (1 - smoothing))
        np.testing.assert_allclose(slope[:, 0], expected, atol=beta * bound + 1e-6)
        assert np.array_equal(slope[:, 1], -slope[:, 0])

    def test_rewards_have_the_meaning_of_trl(self):
        policy = jnp.array([[-1.0, -2.0], [-3.0, -1.0]])
        reference = jnp.array([[-2.0, -2.0], [-2.0, -2.0]])
        found = numbers_of(policy, reference, Preferences(0.5))
        assert found[:, 1:].tolist() == [[0.5, 0.0, 1.0, 0.5], [-0.5, 0.5, 0.0, -1.0]]

    def test_a_function_of_losses_has_its_gradient_in_bf16(self):
        draw = np.random.default_rng(1)
        x = jnp.asarray(draw.normal(size=(4, 8, 16)), jnp.bfloat16)
        matrix = jnp.asarray(draw.normal(size=(16, 32)) / 4, jnp.bfloat16)
        matrix = matrix.astype(jnp.float32)
        targets = jnp.asarray(draw.integers(0, 32, (4, 8))).at[:, 5:].set(IGNORED)

        def objective(losses):
            sums = losses.sum(-1).reshape(2, 2)
            return jax.nn.softplus(sums[:, 0] - sums[:, 1]).mean(), sums

        def plain(x, matrix):
            losses = cross_entropy(x.astype(jnp.float32) @ matrix, targets)
            return objective(jnp.where(targets == IGNORED, 0.0, losses))

        def fused(x, matrix):
            return head_objective(x, matrix, targets, objective)

        found = []
        for each in (fused, plain):
            both = jax.value_and_grad(each, (0, 1), has_aux=True)
            found.append(jax.jit(both)(x, matrix))
        got, expected = found
        # Logits and gradients are rounded to BF16.
        np.testing.assert_allclose(got[0][0], expected[0][0], rtol=2**-6)
        for one, other in zip(got[1], expected[1], strict=True):
            assert jnp.abs(one - other).max() <= 2**-6 * jnp.abs(other).max()
        assert not got[1][0][:, 5:].any()

    def test_a_function_without_a_slope_has_no_gradient_in_bf16(self):
        x = jnp.ones((2, 4, 8), jnp.bfloat16)
        targets = jnp.zeros((2, 4), int)

        def constant(losses):
            return 0 * losses.sum(), None

        def value(x):
            return head_objective(x, jnp.eye(8), targets, constant)[0]

        assert not jax.jit(jax.grad(value))(x).any()


def explicit_loss(config, params, reference, pairs):
    """The loss of pairs, from the log probabilities of all ids."""
    model = model_of(config)

    def answers(params):
        rows = pairs.reshape(-1, 3, pairs.shape[-1])
        logits = model.apply({"params": params}, rows[:, TOKENS, :-1])
        of_ids = jax.nn.log_softmax(logits)
        of_targets = jnp.take_along_axis(of_ids, rows[:, TOKENS, 1:, None], -1)[..., 0]
        return (of_targets * rows[:, COUNTED, 1:]).sum(-1).reshape(-1, 2)

    ratios = answers(params) - answers(reference)
    logits = 0.1 * (ratios[:, 0] - ratios[:, 1])
    return -jnp.log(jax.nn.sigmoid(logits)).mean()


def test_a_step_has_the_gradient_of_the_definition_and_padding_has_none(folder):
    config = config_for(folder, recipe="bf16", weights=Float())
    state = init(config)
    pairs = jnp.asarray(corpus_of(config).train[:2])
    padded = jnp.concatenate([pairs, jnp.zeros_like(pairs)])
    params = jax.tree.map(lambda leaf: 1.1 * leaf, state.params)
    reference = reference_variables(state)
    assert same_bits(reference["params"], state.params)
    differentiate = jax.jit(jax.value_and_grad(loss_function(config), has_aux=True))
    (loss, told), found = differentiate(params, {}, padded, None, reference)
    define = functools.partial(explicit_loss, config)
    expected, of_definition = jax.jit(jax.value_and_grad(define))(
        params, state.params, pairs
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert told[0] == loss
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(of_definition), strict=True)
    for one, other in leaves:
        np.testing.assert_allclose(one, other, atol=1e-5 * jnp.abs(other).max())


def learned(config, mesh=None):
    """The numbers of all steps, and the last state."""
    text = everywhere(corpus_of(config).train, mesh)
    step = make_train_step(config, config.steps, mesh)
    state, told = step(init(config, mesh), text, batch_key(config))
    return told, state


# A first product of the policy has the operands of the reference, so they agree.
FORMS = {
    "float": dict(recipe="bf16", weights=Float()),
    "stored": {},
    "inside": dict(weights=Stored("8bit", "backward")),
    "both halves": dict(recipe="tcfp12_fast"),
    "BF16 head": dict(include="bf16_head"),
    "masters": dict(recipe="tensorwise", weights=Float()),
    "activations": dict(dtype="bfloat16"),
}


@parametrize(
    "name",
    [
        "float",
        *(pytest.param(name, marks=slow) for name in FORMS if name != "float"),
    ],
)
def test_a_run_learns_a_preference(folder, name):
    config = config_for(folder, **FORMS[name])
    told, state = learned(config)
    assert told[0, 0] == pytest.approx(np.log(2), rel=1e-6)
    assert not told[0, 1:].any()
    loss, rewards = evaluate_pairs(
        config, state, jnp.asarray(corpus_of(config).heldout)
    )
    assert loss < 0.5
    assert rewards["rewards/accuracies"] > 0.9
    assert list(rewards) == list(REWARDS)
    assert rewards["rewards/margins"] == pytest.approx(
        rewards["rewards/chosen"] - rewards["rewards/rejected"], rel=1e-5
    )


def test_a_reference_has_a_byte_per_weight_and_two_of_the_embedding(folder):
    state = jax.eval_shape(lambda: init(config_for(folder)))
    layers = state.reference["tcfp"]["layers"]
    for layer in jax.tree.leaves(layers, is_leaf=is_quantized):
        assert not layer.has_residual
        assert layer.backward.values.dtype == jnp.float8_e4m3fn
        assert not layer.has_both
    assert state.reference["tcfp"]["embedding"]["embedding"].has_residual


@slow
def test_a_mesh_has_the_losses_of_one_device(folder):
    size = replace(SIZE, heads=4, kv_heads=4)
    config = config_for(folder, model=size, steps=4, weights=Stored("bfloat16"))
    mesh = make_mesh(parse_mesh("data=4,fsdp=2"))
    told, _ = learned(config)
    of_mesh, state = learned(config, mesh)
    # Sums have another order, and FP8 rounds a few of them elsewhere.
    np.testing.assert_allclose(of_mesh, told, rtol=1e-3, atol=1e-3)
    pairs = everywhere(corpus_of(config).heldout, mesh)
    assert evaluate_pairs(config, state, pairs, mesh)[0] < np.log(2)


@slow
def test_a_run_goes_on_bit_for_bit_and_tells_its_rewards(folder, tmp_path, capsys):
    command = f"--model llama-tiny --data {folder}/pairs.jsonl --sequence 8 --batch 4"
    command += f" --tokenizer {folder}/tokenizer.json --steps 6 --steps-per-call 2"
    command += " --compare none --checkpoint-every 2 --beta 0.2 --out"
    whole = tmp_path / "whole"
    assert train.main([*command.split(), str(whole)]) == 0
    shown = capsys.readouterr().out
    assert "4 pairs of 2 x 8 tokens" in shown
    assert "accuracy" in shown
    assert "accuracy" in shown.splitlines()[-3]
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for name in ("4", "6"):
        shutil.rmtree(cut / "checkpoints" / name)
    assert train.main([*command.split(), str(cut), "--resume"]) == 0
    lines = (whole / "metrics.jsonl").read_text()
    assert (cut / "metrics.jsonl").read_text() == lines
    last = json.loads(lines.splitlines()[-1])
    assert {*last} == {"step", "loss", *REWARDS}
    summaries = []
    for each in (whole, cut):
        summary = json.loads((each / "summary.json").read_text())["run"]
        del summary["tokens_per_second"]
        summaries.append(summary)
    assert summaries[0] == summaries[1]
    assert summaries[0]["heldout_perplexity"] is None
    assert 0 <= summaries[0]["heldout_rewards/accuracies"] <= 1


@slow
def test_adapters_have_the_frozen_weights_as_reference(folder, tmp_path):
    params = jax.jit(Llama(SIZE).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    model = tmp_path / "model"
    tokenizer = str(folder / "tokenizer.json")
    write_folder(model, params["params"], SIZE, "bf16", None, tokenizer)
    config = preset(
        str(model),
        data=(str(folder / "pairs.jsonl"),),
        lora=4,
        sequence=8,
        batch=16,
        steps=20,
        learning_rate=2e-2,
    )
    told, state = learned(config)
    assert not hasattr(state, "reference")
    assert told[0, 0] == pytest.approx(np.log(2), rel=1e-6)
    assert not told[0, 1:].any()
    assert told[-1, 3] > 0.9


class TestSettings:
    def test_they_come_back(self, folder):
        config = config_for(folder, preferences=Preferences(0.3, 0.1))
        assert settings_of(config)["beta"] == 0.3
        assert config_of(settings_of(config)) == config
        assert settings_of(TrainConfig())["label_smoothing"] is None

    def test_options_may_be_spelled_as_those_of_trl(self):
        given = "--beta 0.2 --label_smoothing 0.1 --learning_rate=1e-6 --out my_run"
        options = parser_of("").parse_args(with_hyphens(given.split()))
        found = (options.label_smoothing, options.learning_rate, str(options.out))
        assert found == (0.1, 1e-6, "my_run")

    def test_pairs_alone_have_them(self, folder):
        given = dict(tokenizer=str(folder / "tokenizer.json"))
        pairs = preset("llama-tiny", data=(str(folder / "pairs.jsonl"),), **given)
        assert pairs.preferences == Preferences(0.1, 0.0)
        assert pairs.tokens_per_step == 2 * pairs.batch * pairs.sequence
        assert preset("llama-tiny").preferences is None
        with refused(r"beta=0\.2 is for pairs"):
            preset("llama-tiny", beta=0.2)

    def test_a_run_is_resumed_with_the_settings_of_its_data(self, folder):
        config = config_for(folder)
        assert resumed(config, {"beta": 0.2}).preferences == Preferences(0.2)
        of_text = replace(config, data=Data(), preferences=None)
        with refused(r"beta=0\.2 is for pairs"):
            resumed(of_text, {"beta": 0.2})
        data = config.data
        given = dict(
            data=data.paths, vocabulary=data.vocabulary, tokenizer=data.tokenizer
        )
        assert resumed(of_text, given).preferences == Preferences()
        assert resumed(of_text, {}) == of_text

    def test_runs_that_cannot_learn_from_pairs_are_refused(self, folder):
        with refused("use a Llama"):
            TrainConfig(preferences=Preferences())
        with refused("leave monitor"):
            config_for(folder, monitor=10)

    @parametrize(
        "settings", [dict(beta=0.0), dict(beta=np.nan), dict(label_smoothing=0.5)]
    )
    def test_values_out_of_range_are_refused(self, settings):
        with refused(f"{next(iter(settings))}="):
            Preferences(**settings)
