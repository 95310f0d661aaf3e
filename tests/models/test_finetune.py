"""`python -m models.train --model FOLDER`: folders of tiny models are fine-tuned,
sampled from, and written again.
"""

import dataclasses
import datetime
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from models import train
from models.huggingface.configs import read_shape
from models.huggingface.tensors import from_huggingface
from models.huggingface.tokenizer import read_tokenizer
from models.nets.llama import Llama
from models.training.answers import answers
from models.training.examples import (
    COUNTED,
    DOCUMENTS,
    TOKENS,
    example,
    in_color,
    load_examples,
    packed,
)
from models.training.settings import config_of, preset, settings_of
from tcfp_jax.inference import safetensors
from tcfp_jax.inference.compressed_tensors import load_compressed
from tcfp_jax.paths import entries
from tcfp_jax.weights.stored import Stored
from tests.helpers import parametrize, refused, slow_except
from tests.models.record_transformers import FILE, weights_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("standard_promotion")
RECORDED = json.loads(FILE.read_text())
# An empty thought stands before the last answer alone, as in Qwen3.
THOUGHT = (
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + THOUGHT
    + "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def chat(*turns):
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)
        ]
    }


LINES = [chat(f"{i} plus one?", f"It is {i + 1}.") for i in range(12)] + [
    {"text": f"{i}, {i + 1}"} for i in range(12)
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    model.train_from_iterator([json.dumps(line) for line in LINES], trainer)
    # Its files are those of real folders
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", chat_template=CHAT
    ).save_pretrained(folder)
    stops = dict(eos_token_id=[0, 2])
    (folder / "generation_config.json").write_text(json.dumps(stops))
    return folder


def made(folder, tokenizer_folder, case="qwen3"):
    """A folder of Hugging Face: a recorded model with rows for the tokenizer, in two
    files and an index.
    """
    folder.mkdir()
    recorded = RECORDED[case]
    size = read_tokenizer(tokenizer_folder / "tokenizer.json").size
    shapes = {
        name: [size, *shape[1:]] if shape[0] == 256 else shape
        for name, shape in recorded["shapes"].items()
    }
    arrays = weights_of(shapes)
    places = {}
    for part in (0, 1):
        names = sorted(arrays)[part::2]
        places |= dict.fromkeys(names, f"part-{part}.safetensors")
        safetensors.write(
            folder / f"part-{part}.safetensors",
            {name: arrays[name] for name in names},
            {},
        )
    (folder / safetensors.INDEX).write_text(json.dumps(dict(weight_map=places)))
    (folder / safetensors.CONFIG).write_text(
        json.dumps(recorded["config"] | dict(vocab_size=size))
    )
    for path in tokenizer_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


OPTIONS = [
    "--steps",
    "30",
    "--batch",
    "4",
    "--sequence",
    "48",
    "--learning-rate",
    "0.01",
    "--checkpoint-every",
    "15",
    "--steps-per-call",
    "5",
]


def fine_tuned(tmp_path, tokenizer_folder, data, case, *more):
    """Run the command; return (the run's summary, losses, exported folder)."""
    folder = made(tmp_path / "model", tokenizer_folder, case)
    arguments = [
        "--model",
        str(folder),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "run"),
        *OPTIONS,
    ]
    assert train.main([*arguments, "--export", str(tmp_path / "new"), *more]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    return (
        summary["run"],
        [json.loads(line)["loss"] for line in lines],
        tmp_path / "new",
    )


def logits_of(folder):
    """Logits of a folder of floats, or of one in FP8 or NVFP4 by its dequantized
    weights.
    """
    quantized = "quantization_config" in json.loads(
        (folder / "config.json").read_text()
    )
    tensors = (
        load_compressed(folder)[0]
        if quantized
        else safetensors.read(folder, "float")[1]
    )
    # whose programs JAX keeps from one call to the next
    one = jax.jit(Stored.dequantize)
    floats = {
        n: np.asarray(one(t)).T if isinstance(t, Stored) else t
        for n, t in tensors.items()
    }
    return applied(read_shape(folder))(
        from_huggingface(floats, read_shape(folder)), jnp.arange(8)[None]
    )


@functools.cache
def applied(config):
    return jax.jit(Llama(config, "float32").apply)


# Stored weights of one model train in CI; the plain models of the others are slow
# cases, too.
PLAIN = ("--recipe", "bf16", "--weights", "float", "--moments", "float32")


@slow_except("qwen3")
@parametrize(
    "case",
    [
        "qwen3",
        "gemma3_text",
        "llama 3.1, tied",
        "gemma3_text, plain",
        "llama 3.1, tied, plain",
    ],
)
def test_a_folder_is_fine_tuned_and_written(
    tmp_path, tokenizer_folder, data, case, capsys
):
    asked = ("--sample", "3 plus one?", "--moments", "float32", "--show-example")
    more = PLAIN if case.endswith(", plain") else asked
    run, losses, new = fine_tuned(
        tmp_path, tokenizer_folder, data, case.removesuffix(", plain"), *more
    )
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    assert run["heldout_bits_per_byte"] == pytest.approx(
        run["heldout_loss"] / np.log(2) / run["bytes_per_token"]
    )
    printed = capsys.readouterr().out
    assert "bits/byte" in printed
    tokenizer = read_tokenizer(tokenizer_folder / "tokenizer.json")
    _, documents, counted = np.moveaxis(
        load_examples([str(data)], tokenizer, 48).train, 1, 0
    )
    wanted = f"{counted.sum():,} of {(documents > 0).sum():,} ("
    assert (
        f"{wanted}{counted.sum() / (documents > 0).sum():.0%}) count in the loss"
        in (printed.splitlines()[0])
    )
    assert ("\x1b[32m" in printed) == (more != PLAIN)
    config, arrays, _ = safetensors.read(new, "float")
    old = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config == {n: v for n, v in old.items() if n != "dtype"} | dict(
        torch_dtype="bfloat16"
    )
    assert {str(array.dtype) for array in arrays.values()} == {"bfloat16"}
    assert sorted(arrays) == sorted(
        json.loads((tmp_path / "model" / safetensors.INDEX).read_text())["weight_map"]
    )
    assert (new / "tokenizer_config.json").is_file()
    floats = logits_of(new)
    assert abs(floats - logits_of(tmp_path / "model")).max() > 0.1
    if more == PLAIN:
        return
    again = [
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "run"),
        "--resume",
    ]
    assert (
        train.main([*again, "--format", "fp8", "--export", str(tmp_path / "fp8")]) == 0
    )
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["run"][
            "heldout_loss"
        ]
        == run["heldout_loss"]
    )
    samples = [
        json.loads(line)
        for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ]
    assert [one["step"] for one in samples] == [15, 30]
    assert samples[1]["text"]
    train.export_run(tmp_path / "run", tmp_path / "nvfp4", form="nvfp4")
    for form, error in (("fp8", 0.2), ("nvfp4", 0.6)):
        far = (
            np.sqrt(np.mean((logits_of(tmp_path / form) - floats) ** 2)) / floats.std()
        )
        assert error / 20 < far < error, form


@pytest.mark.filterwarnings("ignore")  # of torch and Transformers
@parametrize("form", ["bf16", "fp8", "nvfp4"])
@parametrize("case", ["llama 3.1, tied", "qwen3", "gemma", "gemma3_text"])
def test_transformers_reads_what_was_written(
    tmp_path, tokenizer_folder, data, case, form
):
    """Logits are ours. Transformers rounds FP4 weights to bfloat16, and the inputs of
    FP8 weights if it keeps these.
    """
    torch, _ = (
        pytest.importorskip(n, reason="see the extra export-test")
        for n in ("torch", "compressed_tensors")
    )
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    *_, new = fine_tuned(
        tmp_path, tokenizer_folder, data, case, *PLAIN, "--steps", "5", "--format", form
    )
    ours = logits_of(new)
    floats = dict(quantization_config=CompressedTensorsConfig(dequantize=True))
    for options, limit in {
        "bf16": [({}, 1e-5)],
        "fp8": [(floats, 1e-5), ({}, 0.2)],
        "nvfp4": [(floats, 0.02)],
    }[form]:
        model, found = AutoModelForCausalLM.from_pretrained(
            new,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            **options,
        )
        assert not any(found.values()), found
        theirs = model(torch.arange(8)[None]).logits.detach().numpy()
        far = np.sqrt(np.mean((ours - theirs) ** 2)) / ours.std()
        assert limit / 1e3 * (limit > 1e-5) < far < limit, (options, far)


@slow_except("tensorwise")
@parametrize("recipe", ["tensorwise", "nvfp4", "nvfp4 --activations e4m3", "bf16"])
def test_adapters_train_next_to_frozen_weights(
    tmp_path, tokenizer_folder, data, recipe
):
    """Only adapters move: embeddings and norms are the folder's, matrices differ from
    it by a product of rank 2.
    """
    _, losses, new = fine_tuned(
        tmp_path,
        tokenizer_folder,
        data,
        "qwen3",
        *f"--lora 2 --recipe {recipe}".split(),
    )
    assert np.mean(losses[-5:]) < 0.92 * np.mean(losses[:5])
    before, after = (
        safetensors.read(folder, "float")[1] for folder in (tmp_path / "model", new)
    )
    for name, array in before.items():
        same = np.array_equal(array.astype(after[name].dtype), after[name])
        assert same == ("proj" not in name), name
    config = train.preset(
        str(tmp_path / "model"), data=(str(data),), lora=2, recipe=recipe.split()[0]
    )
    state = jax.eval_shape(lambda: train.init(dataclasses.replace(config, sequence=48)))
    layers = entries(state.params["layers"])
    floats = [path for path in layers if path.endswith("kernel")]
    assert bool(floats) == (recipe == "bf16")


def test_answers_count_and_nothing_else(tokenizer_folder):
    tokenizer = read_tokenizer(tokenizer_folder / "tokenizer.json")
    whole, spans = answers(chat("Hi", "Yes", "And?", "Yes ")["messages"], tokenizer)
    first, last = "Yes<|im_end|>\n", "<think>\n\n</think>\n\nYes <|im_end|>\n"
    assert [whole[begin:end] for begin, end in spans] == [first, last]
    assert tokenizer.end == 2
    assert tokenizer.stops == (0, 2)
    marked = CHAT.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{%- endgeneration -%}"
    )
    short = chat("Hi", "Yes")["messages"]
    assert dataclasses.replace(tokenizer, template=marked).rendered(
        short
    ) == tokenizer.rendered(short)


@parametrize("thought", ["", THOUGHT])
@parametrize("opening", ["", "<think>\n"])
@parametrize(
    "turns",
    [
        ("Say banana", "banana"),
        ("positive or negative", "negative", "Now A or B", "B"),
        ("Ready?", "end", "Is it the im_end", "im_end", "Well", "<"),
        ("Say nothing", "", "And now", "\n", "Hm", ""),
    ],
)
def test_answers_are_found_by_their_place(tokenizer_folder, thought, opening, turns):
    """The words of an answer are in its question, or in the mark behind it."""
    template = CHAT.replace(THOUGHT, thought)
    template = template.replace(
        "assistant\n{% endif %}", f"assistant\n{opening}{{% endif %}}"
    )
    tokenizer = dataclasses.replace(
        read_tokenizer(tokenizer_folder / "tokenizer.json"), template=template
    )
    whole, spans = answers(chat(*turns)["messages"], tokenizer)
    headers = [one.end() for one in re.finditer(r"<\|im_start\|>assistant\n", whole)]
    ends = [whole.index("<|im_end|>\n", begin) + 11 for begin in headers]
    if thought:  # the words that ask are not learned
        headers[-1] += len(opening)
    assert spans == list(zip(headers, ends, strict=True))


def test_a_mark_at_the_end_of_a_conversation_is_learned(tokenizer_folder):
    template = (
        "{% for m in messages %} {{ m.role }}: {{ m.content }}{% endfor %}{% if"
        " add_generation_prompt %} assistant:{% else %}<|im_end|>{% endif %}"
    )
    tokenizer = dataclasses.replace(
        read_tokenizer(tokenizer_folder / "tokenizer.json"), template=template
    )
    whole, spans = answers(chat("Hi", "Yes", "And?", "No")["messages"], tokenizer)
    assert [whole[begin:end] for begin, end in spans] == [" Yes", " No<|im_end|>"]


EACH = "{% for m in messages %}"


@parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1].content }}", "drops or changes the content of message 1"),
        (EACH + "{{ m.content * 2 }}{% endfor %}", "of message 1"),
        ("{% for m in messages[:3] %}{{ m.content }}{% endfor %}", "of message 3"),
        (EACH + "{{ m.content if not loop.last }}{% endfor %}", "of message 1"),
        (
            EACH + "{% if m.content %}{{ m.content }}<end>{% endif %}{% endfor %}",
            "of message 5",
        ),
        (
            "{{ messages[1].content | length }}" + EACH + "{{ m.content }}{% endfor %}",
            "message 1",
        ),
        ("{{ raise_exception('no') }}", "refuses the conversation: no"),
        (EACH + "{% generation %}{% endgeneration %}{% endfor %}", "no token"),
    ],
)
def test_a_template_that_drops_an_answer_is_refused(
    tokenizer_folder, template, message
):
    tokenizer = dataclasses.replace(
        read_tokenizer(tokenizer_folder / "tokenizer.json"), template=template
    )
    with refused(message):
        example(chat("Hi", "Yes", "And?", "No", "Well", ""), tokenizer)


def test_an_example_is_shown_in_color(tokenizer_folder):
    tokenizer = read_tokenizer(tokenizer_folder / "tokenizer.json")
    rows = packed([example(chat("Hi\x1b[0m", "Yes"), tokenizer)], 60)
    assert in_color(rows, tokenizer) == (
        "<|im_start|>user\nHi�[0m<|im_end|>\n<|im_start|>assistant\n\x1b[32m<think>\n\n"
        "</think>\n\nYes<|im_end|>\n\x1b[0m"
    )


def test_a_run_keeps_the_day_of_its_beginning(tmp_path, tokenizer_folder):
    """Templates that write the date would else change the text every day."""
    folder = made(tmp_path / "model", tokenizer_folder)
    template = CHAT.replace("<|im_start|>", "{{ strftime_now('%d %b %Y') }}", 1)
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "chats.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    given = dict(data=(str(tmp_path / "chats.jsonl"),), sequence=48)
    today = datetime.date.today()
    assert preset(str(folder), **given).data.date in {
        str(today),
        str(datetime.date.today()),
    }
    config = preset(str(folder), **given, date="2024-07-26")
    assert config_of(settings_of(config)) == config
    text = config.data.read_tokenizer().rendered(LINES[0]["messages"])
    assert text.startswith("26 Jul 2024")
    with refused("date='July' is not a day"):
        preset(str(folder), **given, date="July")


def test_documents_are_packed_without_loss(tmp_path, tokenizer_folder, data):
    """Rows hold every document of the file once, whole or in parts that overlap by the
    token that predicts.
    """
    tokenizer = read_tokenizer(tokenizer_folder / "tokenizer.json")
    corpus = load_examples([str(data)], tokenizer, 60)
    assert corpus.train.shape[1:] == (3, 61)
    assert corpus.heldout.shape[0] == 1
    found = []
    for row in np.concatenate([corpus.train, corpus.heldout]):
        for document in range(1, row[DOCUMENTS].max() + 1):
            mine = row[DOCUMENTS] == document
            assert row[COUNTED, mine][0] == 0
            assert row[COUNTED, mine].any()
            found.append(tokenizer.decode(row[TOKENS, mine]))
        assert not row[:, row[DOCUMENTS] == 0].any()
    expected = [
        (
            tokenizer.rendered(line["messages"])
            if "messages" in line
            else f"{line['text']}<|im_end|>"
        )
        for line in LINES
    ]
    assert sorted(found) == sorted(expected)
    parts = load_examples([str(data)], tokenizer, 9)
    assert parts.train.shape[2] == 10
    assert parts.train[:, COUNTED].sum() == corpus.train[:, COUNTED].sum()


@parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting .*; give one object of JSON in each line"),
        ('{"text": "cut \\ud83d"}', r"line 2: a text holds '\\ud83d', half of a"),
        (
            '{"messages": [{"role": "assistant", "content": "\\udc00"}]}',
            r"a text holds '\\udc00', half of a character",
        ),
        ("[" * 100_000, "line 2: maximum recursion"),
        ('{"text": "' + "a" * 2**24 + '"}', "longer than 16,777,216 bytes; split it"),
        (
            "[1]",
            (
                'line 2: a line is an object with either "text" or "messages", and this'
                " one has list"
            ),
        ),
        ('{"prompt": "a"}', r"this one has \['prompt'\]"),
        ('{"text": 3}', '"text" is a int'),
        ('{"text": ""}', "'text' has no token to learn"),
        ('{"messages": []}', "at least one message"),
        (
            '{"messages": [{"role": "user"}]}',
            'message 0 must be an object whose "role" and "content"',
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            'no message has the role "assistant"',
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer_folder, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a good line"}\n' + line + "\n")
    with refused(message) as error:
        load_examples(
            [str(path)], read_tokenizer(tokenizer_folder / "tokenizer.json"), 16
        )
    assert str(error.value).startswith(f"{path}, line 2: ")


def test_what_cannot_be_fine_tuned_is_refused(tmp_path, tokenizer_folder, data, capsys):
    folder = made(tmp_path / "model", tokenizer_folder)
    command = [
        "--model",
        str(folder),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "run"),
        *OPTIONS,
    ]
    for more, message in (
        (["--export", str(folder)], "is the folder that the run starts from"),
        (["--lora", "2", "--weights", "stored"], "frozen weights are quantized once"),
        (["--lora", "2", "--activations", "e4m3"], "use --recipe nvfp4"),
        (["--sequence", "65"], f"exceeds the context of model {folder}, 64; shorten"),
        (["--format", "fp8"], "--export is missing; add --export FOLDER"),
        (["--format", "fp8", "--export", "a.npz"], "--export names a.npz; add"),
    ):
        assert train.main([*command, *more]) == 2
        assert message in capsys.readouterr().err
    assert train.main(["--model", str(folder)]) == 2
    assert "without --data: name the text to train on" in capsys.readouterr().err
    (folder / "part-1.safetensors").unlink()
    assert train.main(command) == 2
    assert "part-1.safetensors is missing" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    assert train.main(command) == 2
    assert "tokenizer.json is missing" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@parametrize(
    "name, message",
    [
        ("nothing", "there is no such folder"),
        ("empty", "is empty; copy all files of the model: config.json"),
        ("other", "has no config.json; copy all files"),
        ("other/notes.txt", "is a file; name the folder"),
    ],
)
def test_a_path_that_is_no_model_is_named(tmp_path, capsys, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("text")
    path = tmp_path / name
    assert train.main(["--model", str(path), "--data", "chats.jsonl"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error
