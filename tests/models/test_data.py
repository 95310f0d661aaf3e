"""Your own text and token ids: which files are read, held out, and refused."""

import io
import json
import os
import pickle

import numpy as np
import pytest

from models import train
from models.tokens import OWN
from models.training.data import load_data
from models.training.running import checked_corpus, corpus_of
from models.training.settings import Data, preset
from models.training.text import SEPARATOR
from tests.helpers import parametrize, refused

TEXTS = {
    f"chapter_{index}.txt": f"The text of chapter {index}: où, 世界. " * 20
    for index in range(40)
}


@pytest.fixture
def folder(tmp_path):
    """Return a folder of text with a folder in it, and with hidden files and files that
    are not text.
    """
    root = tmp_path / "book"
    for index, (name, text) in enumerate(TEXTS.items()):
        path = root / ("part" if index % 2 else ".") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (root / "zeros.bin").write_bytes(b"text\0text")
    (root / "empty.txt").write_text("")
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("hidden")
    return root


@pytest.fixture
def ids(tmp_path):
    """Return a function that saves an array and returns its path."""

    def save(values, dtype="uint16"):
        path = tmp_path / "ids.npy"
        if values is None:
            path.write_bytes(b"")
        else:
            np.save(path, np.asarray(values, dtype))
        return str(path)

    return save


def test_a_folder_is_read_whole_and_its_last_twentieth_is_held_out(folder):
    corpus = load_data([str(folder)])
    whole = corpus.train.tobytes() + corpus.heldout.tobytes()
    assert sorted(whole.split(SEPARATOR)[:-1]) == sorted(
        text.encode() for text in TEXTS.values()
    )
    assert len(corpus.heldout) == len(whole) // 20
    # one of them may lie in both
    assert len(corpus.train_files) + len(corpus.heldout_files) in (40, 41)
    assert {
        name.rpartition("/")[2] for name in corpus.train_files + corpus.heldout_files
    } == set(TEXTS)
    assert "book/part/chapter_1.txt" in corpus.train_files + corpus.heldout_files
    # Files are ordered by hash, so the held-out part is not the end of the book.
    assert not np.array_equal(sorted(corpus.train_files), corpus.train_files)


def test_the_same_text_has_the_same_digest_wherever_it_lies(folder, tmp_path):
    digest = load_data([str(folder)]).digest
    (tmp_path / "deeper").mkdir()
    moved = folder.rename(tmp_path / "deeper" / "book")
    assert load_data([str(moved)]).digest == digest
    (moved / "chapter_0.txt").write_text("another text")
    assert load_data([str(moved)]).digest != digest


def test_overlapping_paths_and_copies_are_read_once(folder):
    (folder / "copy.txt").write_text(TEXTS["chapter_0.txt"], encoding="utf-8")
    twice = load_data(
        [str(folder), str(folder / "part"), str(folder / "chapter_0.txt")]
    )
    assert len(twice.train) + len(twice.heldout) == sum(
        len(text.encode()) + 1 for text in TEXTS.values()
    )


def test_the_end_of_one_file_is_held_out(tmp_path):
    path = tmp_path / "one.md"
    path.write_text("".join(map(str, range(1000))))
    corpus = load_data([str(path)])
    assert (
        corpus.train.tobytes() + corpus.heldout.tobytes()
    ).decode() == path.read_text() + "\0"
    assert corpus.train_files == corpus.heldout_files == ("one.md",)


def test_a_limit_leaves_a_sample_of_all_files(folder):
    corpus = load_data([str(folder)], byte_limit=5000)
    assert 5000 <= len(corpus.train) + len(corpus.heldout) <= 5000 + 40
    assert len({"/part/" in name for name in corpus.train_files}) == 2


def test_ids_are_mapped_and_keep_their_order(ids):
    values = np.random.default_rng(0).integers(0, 1000, 2000)
    corpus = load_data([ids(values)], vocabulary=1000)
    digest = corpus.digest
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == np.uint16
    assert np.array_equal(np.concatenate([corpus.train, corpus.heldout]), values)
    assert len(corpus.heldout) == 100
    assert corpus.heldout_files == ("ids.npy",)
    assert len(load_data([ids(values)], vocabulary=1000, byte_limit=400).train) == 190
    assert load_data([ids(values[::-1])], vocabulary=1000).digest != digest


@parametrize(
    ("values", "dtype", "message"),
    [
        (
            [0, 7, 50_256],
            "uint16",
            r"ids up to 50256, but vocabulary=50000 .* use vocabulary=50257",
        ),
        ([0, 50_000], "int64", "ids up to 50000, but vocabulary=50000"),
        ([3, -1], "int32", "has the id -1; token ids are not negative"),
        (
            [1.0, 2.0],
            "float32",
            r"holds float32 \[2\], but token ids are a row of integers",
        ),
        ([[1, 2], [3, 4]], "int32", r"holds int32 \[2, 2\]"),
        ([True], "bool", "holds bool"),
        ([None], "object", "is not an array of numbers"),
        (None, "bytes", r"is not an array of numbers \(EOF"),
    ],
)
def test_ids_that_are_refused(ids, values, dtype, message):
    with refused(message):
        load_data([ids(values, dtype)], vocabulary=50_000)


@parametrize(
    ("data", "vocabulary", "message"),
    [
        (("ids.npy",), None, "ids.npy holds token ids, but no vocabulary is given"),
        (("ids.npy", "b.txt"), 10, r"is more than ids\.npy"),
        (("book",), 10, "vocabulary=10 is for token ids, and text is bytes"),
        (("ids.npy",), 0, "vocabulary=0 must be at least 1"),
        ("book", None, r"write data=\('book',\)"),
        (["book"], None, r"write data=\('book',\)"),
    ],
)
def test_names_that_do_not_go_together(data, vocabulary, message):
    with refused(message):
        Data(data, vocabulary)


@parametrize(
    "given, message",
    [
        ({"date": "2026-11-28"}, "the data have no documents"),
        ({"data": ("a.jsonl",), "corpus_bytes": 9}, "corpus_bytes=9 with documents"),
    ],
)
def test_settings_of_other_data_are_refused(given, message):
    with refused(message):
        preset("llama-tiny", **given)


def test_paths_that_are_refused(folder, tmp_path):
    with refused(r"nowhere does not exist \(looked from ", FileNotFoundError):
        load_data([str(tmp_path / "nowhere")])
    (tmp_path / "binary").mkdir()
    (folder / "image.png").rename(tmp_path / "binary" / "image.png")
    with refused(
        "binary holds no text: looked recursively at 1 files", FileNotFoundError
    ):
        load_data([str(tmp_path / "binary")])
    with refused(r"image\.png is not text: not UTF-8"):
        load_data([str(folder), str(tmp_path / "binary" / "image.png")])


NPY = io.BytesIO()
np.save(NPY, np.arange(100, dtype=np.uint16))
NPY = NPY.getvalue()


@parametrize(
    "content",
    [
        b"",
        NPY[:40],
        NPY[:-2],
        NPY.replace(b"(100,)", b"(2**9)"),
        NPY.replace(b"(100,)", b"(1e9,)"),
        NPY.replace(b"<u2", b"|O8"),
        b"PK\x03\x04" + bytes(40),
        pickle.dumps([1, 2]),
    ],
    ids=range(8),
)
def test_a_file_that_holds_no_array_of_ids_is_named(tmp_path, content):
    (tmp_path / "ids.npy").write_bytes(content)
    with refused(r"ids\.npy is not an array of numbers"):
        load_data([str(tmp_path / "ids.npy")], vocabulary=100)


def test_devices_and_pipes_are_refused_and_nothing_behind_the_limit_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    for path, vocabulary in (("/dev/zero", None), (str(tmp_path / "pipe.npy"), 10)):
        with refused(f"data {path} is a device or a pipe"):
            load_data([path], vocabulary=vocabulary)
    page = tmp_path / "page.txt"
    # no text at its end, and a limit within a character
    page.write_bytes("é".encode() * 100 + b"\xff\0")
    corpus = load_data([str(page)], byte_limit=101)
    assert (
        corpus.train.tobytes() + corpus.heldout.tobytes()
        == page.read_bytes()[:101] + b"\0"
    )
    os.truncate(page, 3 * 10**9)
    assert len(load_data([str(page)], byte_limit=101).train) == 97
    with refused(r"page\.txt is not text"):
        load_data([str(page)], byte_limit=10**6)


def test_text_shorter_than_a_window(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("short " * 100)
    with refused(
        "the held-out text has 30 tokens, but one window needs 129; give more text"
    ):
        train.run(preset("llama-tiny", data=(str(path),)))


def test_a_model_has_rows_for_every_id(ids):
    config = preset("llama-tiny", data=(ids([1, 2]),), vocabulary=1000)
    assert config.size.vocabulary == 1000
    assert (
        preset("llama-124m", data=("ids.npy",), vocabulary=50_257).size.vocabulary
        == 50_304
    )
    assert config.data.corpus_bytes > 2**60
    assert preset("llama-tiny").data.corpus_bytes == 2**24
    with refused("with a model that reads bytes alone"):
        preset("tiny", data=("ids.npy",), vocabulary=1000)


LINES = "".join(
    json.dumps(dict(text=f"The line {i} of a document")) + "\n" for i in range(60)
)
ARRAY = json.dumps([json.loads(line) for line in LINES.splitlines()], indent=1)


def rows_of(tmp_path, path):
    """Return the rows of a run with this project's tokenizer on the data of a path."""
    given = dict(data=(str(tmp_path / path),), tokenizer=str(OWN), sequence=32)
    return corpus_of(preset("llama-tiny", **given))


def test_ids_of_a_text_without_a_held_out_part_are_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some words. " * 9)
    given = dict(data=(str(path),), tokenizer=str(OWN), corpus_bytes=5)
    with refused("corpus_bytes"):
        checked_corpus(preset("llama-tiny", **given))


@parametrize(
    ("name", "text"),
    [
        ("lines.jsonl", LINES),
        ("lines.json", LINES),
        ("lines.JSONL", LINES),
        ("lines.ndjson", LINES),
        ("folder/lines.jsonl", LINES),
        ("folder/more/lines.json", LINES),
        ("array.json", ARRAY),
        ("folder/array.Json", ARRAY),
        ("windows.jsonl", "\ufeff" + LINES.replace("\n", "\r\n") + "\r\n"),
        ("windows.json", "\ufeff\n " + ARRAY),
    ],
)
def test_documents_have_many_names(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    (tmp_path / "plain.jsonl").write_text(LINES)
    found = rows_of(tmp_path, name.partition("/")[0])
    assert found.train.shape[1:] == (3, 33)
    assert found.digest == rows_of(tmp_path, "plain.jsonl").digest


CHATS = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n"


@parametrize(
    ("files", "given", "message"),
    [
        ({"chats.txt": CHATS}, "chats.txt", "holds conversations, whose JSON would"),
        ({"a/chats": "[" + CHATS + "]"}, "a", "holds conversations, whose JSON"),
        (
            {"a/b.txt": "text", "a/c.jsonl": LINES},
            "a",
            r"c\.jsonl holds documents, and",
        ),
        ({"a/b.jsonl": LINES, "a/c.json": "{}"}, "a", r"c\.json does not; give"),
        ({"a.json": "{}"}, "a.json", r'line 1: a line is an object with either "text"'),
        ({"a.json": '{\n"text": "b"}'}, "a.json", r"a\.json, line 1: Expecting .* one"),
        ({"a.json": "[1,\n"}, "a.json", r"a\.json: Expecting value"),
        ({"a.json": "[[1]]"}, "a.json", r"item 1: a line is an object"),
        ({"a.jsonl": "\udcff"}, "a.jsonl", r"line 1: 'utf-8' codec can't decode"),
        ({"a.jsonl": LINES[:20]}, "a.jsonl", r"line 1: Unterminated string"),
        ({}, "a.jsonl", r"a\.jsonl does not exist"),
    ],
)
def test_conversations_are_never_plain_text(tmp_path, files, given, message):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, errors="surrogateescape")
    with refused(message, (ValueError, FileNotFoundError)):
        rows_of(tmp_path, given)


def test_documents_need_a_tokenizer_and_other_json_is_text(tmp_path):
    (tmp_path / "chats.jsonl").write_text(LINES)
    with refused(r"chats\.jsonl holds documents for a token"):
        load_data([str(tmp_path)])
    (tmp_path / "chats.jsonl").rename(tmp_path / "package.json")
    (tmp_path / "package.json").write_text('{"name": "x", "messages": {"en": "y"}}')
    (tmp_path / "code.py").write_text("import json\n")
    assert len(load_data([str(tmp_path)]).train) > 20
