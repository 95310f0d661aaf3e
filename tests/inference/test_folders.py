"""Folders of strangers reach no other file of this machine, and no half of a file stays
after an error.
"""

import json
import os

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tcfp_jax.inference import folders, safetensors
from tcfp_jax.inference.compressed_tensors import load_compressed, save_compressed
from tests.exports import codes, saved
from tests.helpers import parametrize, refused


def link(target):
    return lambda path: path.symlink_to(target)


# Ways by which a file of the folder `model` reaches beyond it.
ESCAPES = {
    "a link to a file": link("../secret"),
    "a link to a missing file": link("../missing"),
    "a link to a device": link("/dev/zero"),
    "a link by a folder": link("outside/secret"),
    "an absolute link": lambda path: path.symlink_to(path.parents[1] / "secret"),
    "a pipe": os.mkfifo,
}


@pytest.fixture
def model(tmp_path):
    """A folder next to a private file."""
    (tmp_path / "secret").write_text("PRIVATE")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "outside").symlink_to(tmp_path)
    return folder


@parametrize("escape", ESCAPES)
def test_a_file_that_reaches_beyond_its_folder_is_not_read(model, escape):
    ESCAPES[escape](model / "file")
    for call in (folders.opened, folders.read_bytes, folders.read_object):
        with refused(r"file.* (lies outside|is not a file)"):
            call(model, "file")
    if escape != "a link by a folder":
        (model / "outside").unlink()
    with refused(r"(file|outside)' lies out|file is a device"):
        folders.check_links(model, ["file", "outside"])


@parametrize("name", ["../secret", "/dev/zero", "outside/secret", ".", "", "a\0b"])
def test_a_name_that_reaches_beyond_its_folder_is_not_read(model, name):
    with refused(r"lies outside|is not a file|is no file"):
        folders.opened(model, name)


def test_links_that_stay_inside_are_read(model):
    (model / "below").mkdir()
    (model / "below/one").write_text("1")
    (model / "two").symlink_to("below/one")
    (model / "outside").unlink()
    (model / "below/circle").symlink_to(".")
    folders.check_links(model, ["two", "below", "missing"])
    (model / "below/three").symlink_to("/dev/null")
    (model / "by").symlink_to("below")
    with refused("below/three' lies outside"):
        folders.check_links(model, ["by"])
    folders.check_links(model, ["two"])
    assert folders.read_bytes(model, "two") == b"1"
    # Hugging Face's cache keeps files in `blobs`.
    snapshot = model / "snapshots/revision"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs/hash").write_text("2")
    (snapshot / "file").symlink_to("../../blobs/hash")
    assert folders.read_bytes(snapshot, "file") == b"2"
    (snapshot / "other").symlink_to("../../below/one")
    with refused("'other' lies outside"):
        folders.opened(snapshot, "other")


@parametrize("escape", ESCAPES)
def test_nothing_is_written_through_a_link(model, escape):
    for name in ("new", "new.partial", "log"):
        ESCAPES[escape](model / name)
    folders.replace_text(model, "new", "text")
    assert (model / "new").read_text() == "text"
    assert not (model / "new").is_symlink()
    with refused(r"log is a link, a device or a pipe"):
        folders.extended(model, "log")
    assert (model.parent / "secret").read_text() == "PRIVATE"
    assert not (model.parent / "missing").exists()


def test_a_file_of_two_names_is_not_extended(model):
    with folders.extended(model, "log") as file:
        file.write(b"one")
    with folders.extended(model, "log") as file:
        file.write(b"two")
    assert (model / "log").read_bytes() == b"onetwo"
    (model / "other").hardlink_to(model.parent / "secret")
    with refused("other is a link"):
        folders.extended(model, "other")


def test_an_error_leaves_the_old_file_and_no_part_of_the_new_one(model):
    (model / "file").write_text("old")

    def fail():
        with folders.replacing(model, "file") as file:
            file.write(b"new")
            raise OSError(28, "No space left on device")

    with refused("No space left", OSError):
        fail()
    assert (model / "file").read_text() == "old"
    assert sorted(path.name for path in model.iterdir()) == ["file", "outside"]


@parametrize(
    "content, match",
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b"[]", "holds a list instead of an object"),
        (b'{"a": "' + b"x" * folders.LARGEST_TEXT + b'"}', "more than 33,554,432"),
    ],
    ids=range(6),
)
def test_a_text_that_is_no_object_is_refused(model, content, match):
    (model / "file").write_bytes(content)
    with refused(rf"model/file .*{match}"):
        folders.read_object(model, "file")


# Changes of a file between its header and its arrays.
CHANGES = {
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 8),
    "empty": lambda path: os.truncate(path, 0),
    "another": lambda path: path.with_name("b").replace(path),
    "rewritten": lambda path: (
        path.write_bytes(path.read_bytes()[:-1] + b"1"),
        os.utime(path, ns=(0, 0)),
    ),
}


@parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, change):
    arrays = {"a": np.arange(6.0), "b": np.arange(1024, dtype=np.uint8)}
    safetensors.write(tmp_path / "b", arrays, {})
    safetensors.write(tmp_path / safetensors.FILE, arrays, {})
    (tmp_path / safetensors.CONFIG).write_text("{}")
    held = safetensors.read(tmp_path, "float")[1]
    assert_array_equal(held["a"], arrays["a"])
    CHANGES[change](tmp_path / safetensors.FILE)
    with refused(r"safetensors has changed while it was read"):
        held["b"]


def test_shards_of_another_model_are_not_left_next_to_a_new_one(tmp_path):
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(b"another model")
    weights = {"a.weight": codes(32, 64)}
    with refused(r"another model .model-00001-of-00002"):
        save_compressed(tmp_path, weights)
    assert [path.name for path in tmp_path.iterdir()] == [shard.name]
    shard.unlink()
    for _ in range(2):  # its own files are replaced
        save_compressed(tmp_path, weights)
    assert set(load_compressed(tmp_path)[0]) == {"a.weight"}


@parametrize("name", [safetensors.FILE, safetensors.CONFIG, safetensors.INDEX])
def test_a_folder_of_weights_reads_no_link_to_the_outside(tmp_path, name):
    folder = tmp_path / "model"
    saved(folder, codes(32, 64))
    files = {"model.weight": safetensors.FILE}
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": files}))
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with refused(f"{name}' lies outside of .*model"):
        load_compressed(folder)
