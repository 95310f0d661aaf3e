"""Folders of strangers, of models and of runs, reach no other file and run no code."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.huggingface.configs import read_shape
from models.huggingface.folders import check_folder, read_folder, write_folder
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
from models.training.compiled import cache_programs
from models.training.parameters import export
from tests.helpers import parametrize, refused

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
    with refused(f"'{name}' lies outside of .*model"):
        check_folder(out, SIZE, None, tokenizer)
    with refused(f"'{name}' lies outside of .*model"):
        write_folder(out, params, SIZE, "bf16", None, tokenizer)
    assert not out.exists()


def test_an_export_of_floats_follows_no_link(tmp_path, params):
    secret = tmp_path / "secret"
    secret.write_text("PRIVATE")
    for name in ("new.npz", "new.npz.partial"):
        (tmp_path / name).symlink_to(secret)
    export(tmp_path / "new.npz", jax.tree.map(jnp.asarray, params))
    assert secret.read_text() == "PRIVATE"
    assert "embedding/embedding" in np.load(tmp_path / "new.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.npz", "secret"]


@parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(source, params, value):
    damaged = jax.tree.map(np.copy, params)
    damaged["layers"]["up"]["kernel"][0, 3, 5] = value
    write_folder(source, damaged, SIZE, "bf16", None, None)
    with refused(r"model has values in 'layers/up/kernel' that are not finite"):
        read_folder(source, params, SIZE)


@parametrize("name", [FILE, SETTINGS, TEMPLATE, GENERATION])
def test_a_tokenizer_reads_no_file_that_a_link_names(source, name):
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    with refused(f"'{name}' lies outside of .*model"):
        read_tokenizer(source / "tokenizer.json")


def test_a_shape_is_not_read_by_a_link(source):
    (source / "config.json").symlink_to("../secret")
    with refused(r"'config.json' lies outside of .*model"):
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
        with refused(r"another model .consolidated\.safe"):
            call()


ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "models").rglob("*.py"), *(ROOT / "tcfp_jax/inference").rglob("*.py")]
# Not the one that looks for installed packages, and reads no folder.
READERS = sorted(path for path in FILES if path.name != "extras.py")
# Modules and functions that run, or load, what somebody else wrote.
MODULES = {
    "cloudpickle",
    "ctypes",
    "dill",
    "imp",
    "importlib",
    "joblib",
    "marshal",
    "pickle",
    "runpy",
    "shelve",
    "torch",
}
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
METHODS = {"deserialize", "deserialize_and_load", "load_module", "exec_module"}


def dangers(path):
    """Yield what a file has that could run the content of another one."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from {name.name.partition(".")[0] for name in names} & MODULES
            case ast.ImportFrom(module=str(module)):
                yield from {module.partition(".")[0]} & MODULES
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield name
            case ast.Attribute(attr=name) if name in METHODS:
                yield name
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle=True"
            case ast.Call(func=ast.Attribute(attr="load"), keywords=words):
                if not any(word.arg == "mmap_mode" for word in words):
                    yield "load"


@parametrize("path", READERS, ids=str)
def test_no_reader_of_folders_can_run_what_it_reads(path):
    assert sorted(dangers(path)) == []


def test_the_walk_over_readers_sees_each_danger(tmp_path):
    path = tmp_path / "danger.py"
    for text in (
        "import pickle",
        "from marshal import loads",
        "import importlib.util",
        "eval(text)",
        "jax.export.deserialize(content)",
        "np.lib.format.read_array(file, allow_pickle=True)",
        "torch.load(path)",
    ):
        path.write_text(text)
        assert len(list(dangers(path))) == 1


# They open files of models and runs by `tcfp_jax.inference.folders` alone; the others
# read the files that a user names.
CAREFUL = [
    path
    for path in READERS
    if path.parent.name in ("huggingface", "inference")
    or path.stem in ("checkpoint", "described", "intact", "metrics", "monitoring")
    or path.stem in ("running", "steps")
]
OPENERS = {
    "from_file",
    "fromfile",
    "load",
    "loadtxt",
    "memmap",
    "open",
    "open_memmap",
    "read_bytes",
    "read_text",
    "save",
    "savez",
    "write_bytes",
    "write_text",
}


@parametrize("path", CAREFUL, ids=str)
def test_one_module_opens_the_files_of_folders(path):
    if path.stem == "folders" and path.parent.name == "inference":
        return
    called = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    allowed = {"folders.read_bytes", "self._manager.save", "directory.save"}
    found = {name for name in called if name.rpartition(".")[2] in OPENERS}
    assert found - allowed == set()


# Files that Python, JAX or Transformers would run.
PROGRAMS = (
    "compiled/jit_step-0-cache",
    "jit_step-0-cache",
    "__init__.py",
    "conftest.py",
    "jax.py",
    "numpy.py",
    "model.pkl",
    "modeling_llama.py",
    "pytorch_model.bin",
    "sitecustomize.py",
    "step.so",
    "tokenizer.py",
)
READ_ALL = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from models.huggingface.configs import read_shape
from models.huggingface.folders import read_folder, write_folder
from models.huggingface.tokenizer import read_tokenizer
from models.nets.llama import Llama
from models.training.checkpoint import RunDirectory
from models.training.described import read_config
from models.training.settings import TrainConfig
from models.training.state import TrainState

model, run, out = map(Path, sys.argv[1:])
state = TrainState({"kernel": jnp.ones((8, 8))}, (), jnp.int32(1))
config = TrainConfig(recipe="bf16", dtype="float32")
if not run.exists():
    with RunDirectory(run, config, "digest", resume="never") as directory:
        directory.append(1, np.ones(1))
        directory.save(state, 1)
    sys.exit()
opened = []

def watch(event, arguments):
    if event in ("open", "import", "os.listdir", "os.scandir", "pickle.find_class"):
        opened.append(f"{event} {arguments[0]}")
    if event == "exec":
        opened.append(f"exec {getattr(arguments[0], 'co_filename', '')}")

sys.addaudithook(watch)
assert read_config(run) == config
with RunDirectory(run, config, "digest", resume="allowed") as directory:
    assert directory.restore(state)[1] == [1.0]
shape = read_shape(model)
shapes = jax.eval_shape(Llama(shape).init, jax.random.key(0), jnp.zeros((1, 4), int))
params = read_folder(model, shapes["params"], shape)
tokenizer = read_tokenizer(model / "tokenizer.json")
assert tokenizer.encode("text")
write_folder(out, params, shape, "bf16", model, str(tokenizer.path))
print("\\n".join(opened))
"""


def test_nothing_in_a_folder_is_run_or_imported(source, params, tmp_path):
    run = tmp_path / "run"
    (source / "tokenizer.json").unlink()
    write_folder(source, params, SIZE, "bf16", None, str(OWN))
    command = [sys.executable, "-c", READ_ALL, source, run, tmp_path / "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = dict(env=environment, check=True, capture_output=True, text=True)
    subprocess.run(command, **options)
    for folder in (source, run, run / "checkpoints", run / "checkpoints/1"):
        (folder / "compiled").mkdir()
        for name in PROGRAMS:
            (folder / name).write_text("raise SystemExit('it ran')")
    said = subprocess.run(command, **options).stdout.splitlines()
    touched = {line for line in said if str(tmp_path) in line}
    assert f"open {source}/model.safetensors" in touched
    assert f"open {run}/config.json" in touched
    assert {line for line in touched if line.endswith(PROGRAMS)} == set()
    assert not any(line.startswith(("exec", "import")) for line in touched)
    assert not any(line.startswith("pickle") for line in said)


@pytest.fixture
def settings():
    """The names of JAX's cache, which are as before after the test."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    yield names
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_lie_in_the_users_own_cache(
    tmp_path, monkeypatch, settings, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named, expected in (
        (tmp_path / "caches", tmp_path / "caches/tcfp_jax"),
        ("relative", tmp_path / "home/.cache/tcfp_jax"),
        ("", tmp_path / "home/.cache/tcfp_jax"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(named))
        jax.config.update("jax_compilation_cache_dir", None)
        cache_programs()
        assert jax.config.jax_compilation_cache_dir == str(expected)
        assert expected.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    jax.config.update("jax_compilation_cache_dir", None)
    cache_programs()
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not kept (" in capsys.readouterr().err
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "chosen"))
    cache_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "chosen")
    assert [getattr(jax.config, name) for name in settings[1:]] == [0.0, -1]
