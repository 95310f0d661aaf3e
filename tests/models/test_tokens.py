"""Text as ids: the tokenizer of this project, losses in bits per byte, and settings
that do not fit.
"""

import hashlib

import numpy as np
import pytest

from benchmarks import texts
from models.huggingface.tokenizer import read_tokenizer
from models.tokens import OWN, main, train_tokenizer
from models.training.settings import preset
from models.training.text import Corpus, load_corpus
from models.training.tokenized import tokenized
from tests.helpers import parametrize, refused

DIGEST = "6f98730492458712"


def test_the_file_is_the_one_that_measurements_used():
    assert hashlib.sha256(OWN.read_bytes()).hexdigest().startswith(DIGEST)
    assert read_tokenizer(OWN).size == 32_768


def test_a_corpus_keeps_its_text_and_knows_its_bytes():
    whole = load_corpus(byte_limit=300_000)
    corpus = tokenized(whole, read_tokenizer(OWN))
    assert corpus.train_files == whole.train_files
    assert corpus.digest != whole.digest
    assert (
        read_tokenizer(OWN).decode(corpus.heldout).encode() == whole.heldout.tobytes()
    )
    assert corpus.bytes_per_token == len(whole.heldout) / len(corpus.heldout) > 3


def test_bytes_that_are_no_text_are_replaced():
    part = np.frombuffer(b"caf\xe9\0ok\0", np.uint8)
    corpus = tokenized(Corpus(part, part, ("a",), ("a",)), read_tokenizer(OWN))
    assert read_tokenizer(OWN).decode(corpus.train) == "caf�\0ok\0"
    assert corpus.bytes_per_token * len(corpus.heldout) == len("caf�\0ok\0".encode())


def test_ids_that_are_written_are_the_text_and_know_its_bytes(tmp_path, capsys):
    (tmp_path / "text.py").write_text(
        "".join(f"def f{i}(x):\n    return x + {i} * 'é'\n" for i in range(800))
    )
    encode = ["--encode", str(tmp_path / "text.py"), "--out", str(tmp_path / "ids.npy")]
    main(encode)
    with pytest.raises(SystemExit):
        main([*encode, "--size", "400"])
    assert "--encode trains no tokenizer" in capsys.readouterr().err
    ids, text = (
        texts.corpus_of((str(tmp_path / name),), 2**40, "bpe")
        for name in ("ids.npy", "text.py")
    )
    assert np.array_equal(
        *(np.concatenate([one.train, one.heldout]) for one in (ids, text))
    )
    assert len(ids.heldout)
    assert ids.bytes_per_token == len(
        read_tokenizer(OWN).decode(ids.heldout).encode()
    ) / len(ids.heldout)


def test_equal_texts_train_equal_tokenizers():
    corpus = load_corpus(byte_limit=100_000)
    first, second = (train_tokenizer(corpus, 400) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 400
    # bytes that the corpus does not have
    assert first.decode(first.encode("é☃").ids) == "é☃"


def test_a_run_gets_rows_for_the_tokenizer():
    config = preset("llama-tiny", tokenizer=str(OWN))
    assert config.data.vocabulary == config.size.vocabulary == 32_768


@parametrize(
    ("model", "changes", "message"),
    [
        ("tiny", dict(tokenizer=str(OWN)), "with a model that reads bytes alone"),
        ("llama-tiny", dict(tokenizer="nowhere.json"), r"no tokenizer nowhere\.json"),
        (
            "llama-tiny",
            dict(data=("a.jsonl",)),
            r"a\.jsonl holds documents for a tokenizer",
        ),
        (
            "llama-tiny",
            dict(data=("a.jsonl", "b.txt"), tokenizer=str(OWN)),
            r"a\.jsonl holds documents, and b\.txt does not",
        ),
        (
            "llama-tiny",
            dict(data=("a.npy",), vocabulary=9, tokenizer=str(OWN)),
            "holds token ids already",
        ),
        ("llama-tiny", dict(lora=2), "without weights to adapt"),
    ],
)
def test_settings_that_do_not_fit_are_named(model, changes, message):
    with refused(message, (ValueError, FileNotFoundError)):
        preset(model, **changes)
