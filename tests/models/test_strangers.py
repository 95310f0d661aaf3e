"""Folders of strangers, of models and of runs, reach no other file and run no code."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.huggingface.configs import read_shape
from models.huggingface.folders import check_folder, write_folder
from models.huggingface.tokenizer import (
    COMPANIONS,
    FILE,
    GENERATION,
    SETTINGS,
    TEMPLATE,
    read_tokenizer,
)
from models.nets.llama import Llama
from models.nets.shapes import LlamaConfig
from models.tokens import OWN
from tests.helpers import parametrize

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZE = LlamaConfig(layers=1, width=32, heads=2, kv_heads=2, hidden=32, context=32)


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(Llama(SIZE).init, jax.random.key(0), jnp.zeros((1, 4), int))
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes["params"])


@pytest.fixture
def source(tmp_path):
    """A folder with a tokenizer, next to a private file."""
    (tmp_path / "secret").write_text('{"PRIVATE": "KEY"}')
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(OWN, folder / "tokenizer.json")
    return folder


@parametrize("name", COMPANIONS)
def test_an_export_publishes_no_file_that_a_link_names(source, params, name):
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    out = source.parent / "out"
    tokenizer = str(source / "tokenizer.json")
    with pytest.raises(ValueError, match=f"'{name}' lies outside of .*model"):
        check_folder(out, SIZE, None, tokenizer)
    with pytest.raises(ValueError, match=f"'{name}' lies outside of .*model"):
        write_folder(out, params, SIZE, "bf16", None, tokenizer)
    assert not out.exists()


@parametrize("name", [FILE, SETTINGS, TEMPLATE, GENERATION])
def test_a_tokenizer_reads_no_file_that_a_link_names(source, name):
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    with pytest.raises(ValueError, match=f"'{name}' lies outside of .*model"):
        read_tokenizer(source / "tokenizer.json")


def test_a_shape_is_not_read_by_a_link(source):
    (source / "config.json").symlink_to("../secret")
    with pytest.raises(ValueError, match=r"'config.json' lies outside of .*model"):
        read_shape(source)


def test_an_export_leaves_no_file_of_another_tokenizer_or_model(source, params):
    out = source.parent / "out"
    out.mkdir()
    for name in COMPANIONS:
        (out / name).write_text("of another model")
    own = source / "other-name.json"
    (source / "tokenizer.json").rename(own)
    (source / "merges.txt").write_text("own")
    write_folder(out, params, SIZE, "bf16", None, str(own))
    assert (out / "tokenizer.json").read_bytes() == OWN.read_bytes()
    assert (out / "merges.txt").read_text() == "own"
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    (out / "consolidated.safetensors").touch()
    for call in (
        lambda: check_folder(out, SIZE, None),
        lambda: write_folder(out, params, SIZE, "bf16", None, None),
    ):
        with pytest.raises(ValueError, match=r"another model .consolidated\.safe"):
            call()
