"""Pairs of answers: how they are read, the loss of direct preference optimization, and
runs that learn from them.
"""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from models.huggingface.tokenizer import read_tokenizer
from models.nets.losses import IGNORED, cross_entropy, head_objective
from models.nets.shapes import LlamaConfig
from models.training.data import Data
from models.training.dpo import (
    REWARDS,
    dpo_losses,
    numbers_of,
    reference_variables,
)
from models.training.evaluation import evaluate_pairs
from models.training.examples import COUNTED, DOCUMENTS, TOKENS
from models.training.preferences import (
    EMPTY,
    EQUAL,
    LONG,
    Preferences,
    load_pairs,
    pair,
)
from models.training.running import corpus_of
from models.training.settings import (
    Float,
    Stored,
    TrainConfig,
)
from models.training.steps import (
    batch_key,
    init,
    loss_function,
    make_train_step,
    model_of,
)
from tests.helpers import same_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")
LETTERS = [*" abcdefgh.<>", "<begin>", "<end>"]
BEGIN, END = len(LETTERS) - 2, len(LETTERS) - 1
CHAT = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }}."
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
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

    @pytest.mark.parametrize(
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

    @pytest.mark.parametrize(
        "line, message",
        [
            ({"prompt": "a", "chosen": "b"}, "this one has"),
            ({"chosen": "b", "rejected": "c"}, "into the prompt"),
            (["a"], "this one has list"),
            (of_text("a", "b", 1), "rejected.* is a|three strings"),
            (of_text("a", [], []), '"prompt" is a str'),
            (of_text([{"role": "user"}], [], []), "message 0"),
            (of_text("a", "b", "\ud83d"), "half of a character"),
        ],
    )
    def test_other_lines_are_errors_with_their_place(
        self, tmp_path, tokenizer, line, message
    ):
        good = of_text("a", "b", "c")
        path = write(tmp_path / "pairs.jsonl", [good, line])
        with pytest.raises(ValueError, match=f"line 2: .*{message}"):
            load_pairs([str(path)], tokenizer, 8)

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
        with pytest.raises(ValueError, match=f"holds 0 pair.*{EQUAL}.*{LONG}"):
            load_pairs([str(path)], tokenizer, 8)

    def test_messages_need_a_template(self, tokenizer):
        bare = replace(tokenizer, template=None)
        with pytest.raises(ValueError, match="no chat template; give the prompt"):
            pair(of_chat(["a"], "b", "c"), bare, 8)


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


class TestLoss:
    @pytest.mark.parametrize("beta, smoothing", [(0.1, 0.0), (0.5, 0.1), (2.0, 0.4)])
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
        exchanged = 1 / (1 + np.exp(beta * logits))
        own = -(1 - smoothing) * np.log(preferred) - smoothing * np.log(exchanged)
        trl = -log_sigmoid(beta * logits) * (1 - smoothing) - (
            log_sigmoid(-beta * logits) * smoothing
        )
        np.testing.assert_allclose(trl, own, rtol=1e-9)
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

        both = (
            jax.value_and_grad(each, (0, 1), has_aux=True) for each in (fused, plain)
        )
        (got, expected) = (each(x, matrix) for each in both)
        # Logits and gradients are rounded to BF16.
        np.testing.assert_allclose(got[0][0], expected[0][0], rtol=2**-6)
        for one, other in zip(got[1], expected[1], strict=True):
            assert jnp.abs(one - other).max() <= 2**-6 * jnp.abs(other).max()
        assert not got[1][0][:, 5:].any()

    def test_a_function_without_a_slope_has_no_gradient_in_bf16(self):
        x = jnp.ones((2, 4, 8), jnp.bfloat16)
        flat = jax.grad(
            lambda x: head_objective(
                x,
                jnp.eye(8),
                jnp.zeros((2, 4), int),
                lambda losses: (0 * losses.sum(), None),
            )[0]
        )
        assert not flat(x).any()


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


def first_and_last(config):
    """The reports of the first and the last step, and the state."""
    text = jnp.asarray(corpus_of(config).train)
    state = init(config)
    step = make_train_step(config, config.steps)
    state, told = step(state, text, batch_key(config))
    return told[0], told[-1], state


def test_a_run_learns_a_preference(folder):
    config = config_for(folder)
    first, last, state = first_and_last(config)
    # The reference has the policy's own operands.
    assert first[0] == pytest.approx(np.log(2), rel=1e-6)
    assert first[1:].tolist() == [0, 0, 0, 0]
    assert last[3] > 0.9
    heldout = jnp.asarray(corpus_of(config).heldout)
    loss, rewards = evaluate_pairs(config, state, heldout)
    assert loss < 0.5
    assert rewards["rewards/accuracies"] > 0.9
    assert list(rewards) == list(REWARDS)
    layer = state.reference["tcfp"]["layers"]["up"]["kernel"]
    assert layer.nbytes < 1.1 * layer.backward.values.size
