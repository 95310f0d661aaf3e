"""Code on pages of the site runs, block by block, and the API reference has every name
that users meet.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest

from tcfp_jax import formats
from tests.helpers import parametrize, slow_except

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages of words and tables, and pages that include a file of the repository.
WITHOUT_CODE = {
    "architecture",
    "catalog",
    "changelog",
    "contributing",
    "security",
    "conduct",
    "decisions",
    "gallery",
    "glossary",
    "index",
    "measurements",
    "notebook_formats",
    "notebook_fp8",
    "pi0",
}
NOTEBOOKS = {
    path.stem: json.loads(path.read_text())["cells"] for path in DOCS.glob("*.ipynb")
}
OF_THE_CHECKOUT = re.compile(
    r"^ *(?:from|import) (?:models|benchmarks|tests)\b", re.MULTILINE
)
NAMES_CHECKOUT = re.compile(
    rf"{OF_THE_CHECKOUT.pattern}|python -m (?:models|benchmarks|examples)|examples/",
    re.MULTILINE,
)
# Blocks of frameworks.md need other frameworks; tests/wild/test_frameworks.py runs
# them.
TEXTS = {
    path.stem: path.read_text()
    for path in DOCS.glob("*.md")
    if path.stem != "frameworks"
}
PAGES = {
    name: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for name, text in TEXTS.items()
}
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
REFERENCE = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
# Entries of the reference: without modules of which it shows the docstring alone, and
# with the names that a module's entry lists in the order of the page.
LISTED = re.findall(
    r"^::: (\S+)\n    options:(?:\n? .*)*?members: \[(.*)\]", REFERENCE, re.MULTILINE
)
ENTRIES = {
    *re.findall(r"^::: (\S+)$(?!\n    options:.*members: false)", REFERENCE, re.M),
    *(f"{module}.{name}" for module, names in LISTED for name in names.split(", ")),
} - {module for module, _ in LISTED}
# Modules whose `__all__` is the public interface.
DOORS = (
    "",
    "conversion",
    "formats",
    "inference",
    "linen",
    "monitor",
    "nnx",
    "optim",
    "products",
    "recipes",
    "remat",
    "sharding",
)


def test_pages_without_code_are_known():
    assert {name for name, blocks in PAGES.items() if not blocks} == WITHOUT_CODE
    assert "```python" not in REFERENCE


# Pages that repeat tests of conversion, optim, layers, monitor, sharding, inference,
# formats and products, three seconds and more each.
SLOW = {
    "convert",
    "experts",
    "export",
    "finetune",
    "formats",
    "fp4",
    "inference",
    "monitor",
    "nnx",
    "sharding",
    "state",
    "stored",
    "tutorial",
}


@slow_except(*sorted(set(PAGES) - WITHOUT_CODE - SLOW))
@parametrize("name", sorted(set(PAGES) - WITHOUT_CODE))
def test_python_blocks_run(name, elsewhere):
    """A page without code is in `WITHOUT_CODE`; blocks assert for themselves."""
    assert PAGES[name]
    namespace: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in PAGES[name]:
            # From here on the user is in the folder of the clone
            if OF_THE_CHECKOUT.search(block):
                elsewhere.undo()
                elsewhere.chdir(ROOT)
            exec(compile(block, f"{name}.md", "exec"), namespace)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another folder without the checkout on the path, where users paste code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "path",
        [path for path in sys.path if path and Path(path).resolve() != ROOT],
    )
    for name in {*sys.modules, "models", "benchmarks", "tests"}:
        if name.partition(".")[0] in ("models", "benchmarks", "tests"):
            monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    return monkeypatch


# index tells how to get the checkout, and captions of measurements name the commands
# that made them.
@parametrize(
    "name",
    sorted(
        n
        for n in {*TEXTS} - {"index", "measurements"}
        if NAMES_CHECKOUT.search(TEXTS[n])
    ),
)
def test_sections_that_need_the_checkout_say_so_before_their_code(name):
    """Blocks that import it, its commands and its examples; an earlier section may
    speak for the whole page.
    """
    head, *sections = re.split(r"^## ", TEXTS[name], flags=re.MULTILINE)
    for section in (head, *sections):
        for found in NAMES_CHECKOUT.finditer(section):
            before = section[: section.find("\n\n", found.start())]
            assert "the checkout" in before.lower() or "[needs the checkout]" in head, (
                name,
                found[0],
            )


def shape_of(text):
    """Return printed text without its numbers, which differ from one version of jax to
    the next.
    """
    return re.sub(r"[-\d.]+", "#", text).split()


# The other one trains two models, which takes ten seconds; the quick cases of pages
# train, too.
@slow_except("number_formats")
@parametrize("name", sorted(NOTEBOOKS))
def test_notebooks_run_and_print_what_they_show(name, elsewhere, capsys):
    matplotlib = pytest.importorskip("matplotlib", reason="the extra train has it")
    matplotlib.use("agg")
    namespace: dict = {}
    with jax.numpy_dtype_promotion("standard"), matplotlib.rc_context():
        for cell in NOTEBOOKS[name]:
            if cell["cell_type"] == "code":
                exec(
                    compile("".join(cell["source"]), f"{name}.ipynb", "exec"), namespace
                )
                shown = "".join(
                    line
                    for output in cell["outputs"]
                    for line in output.get("text", ())
                )
                assert shape_of(capsys.readouterr().out) == shape_of(shown)
        namespace["plt"].close("all")


def test_flags_of_the_guide_are_known_to_this_jax():
    """XLA ends a process with an unknown flag; any number will do as a value."""
    text = (DOCS / "sharding.md").read_text()
    named = re.findall(r"--(xla_gpu_\w+)=(\w*)", text)
    flags = {f"--{name}={'true' if value == 'true' else '1'}" for name, value in named}
    assert len(flags) >= 7
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(sorted(flags)),
        "JAX_PLATFORMS": "cpu",
    }
    run = [sys.executable, "-c", "import jax; jax.devices()"]
    subprocess.run(run, env=environment, check=True, capture_output=True, timeout=120)
    environment["XLA_FLAGS"] += " --xla_gpu_no_such_flag=true"
    assert (
        subprocess.run(
            run, env=environment, capture_output=True, timeout=120
        ).returncode
        != 0
    )


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert named == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_files_that_architecture_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"(?<![\w*<>])[\w/]+\.(?:py|json)\b", text))
    folders = ("tcfp_jax", "pallas_kernels", "models", "benchmarks", "tests")
    files = [
        f"/{path.relative_to(ROOT)}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.*")
    ]
    assert len(named) > 30
    assert [
        name
        for name in sorted(named)
        if not any(file.endswith(f"/{name}") for file in files)
    ] == []


# The API reference
# --------------------------------------------------------------------------------------


def members(module):
    return getattr(module, "__all__", None) or [
        name for name in vars(module) if not name.startswith("_")
    ]


def documented(module, name):
    """An entry shows the name where it is defined or at a door; constants and types of
    fields stand in the text.
    """
    value = getattr(module, name)
    home = getattr(value, "__module__", None)
    inner = getattr(value, "__qualname__", name)
    if (
        not callable(value)
        or home is None
        or not home.startswith(("tcfp_jax", "pallas_kernels"))
    ):
        return f"`{name}`" in REFERENCE
    if {f"{module.__name__}.{name}", f"{home}.{inner}"} & ENTRIES:
        return True
    doors = [importlib.import_module(entry) for entry in ENTRIES if is_module(entry)]
    return any(
        getattr(door, member) is value for door in doors for member in members(door)
    )


def is_module(path):
    return (ROOT / path.replace(".", "/")).is_dir() or (
        ROOT / path.replace(".", "/")
    ).with_suffix(".py").exists()


def used_names(blocks):
    """(module, name) of everything of the two libraries that blocks of code import or
    read from a module.
    """
    trees = [ast.parse(block) for block in blocks]
    found: set[tuple[str, str]] = set()
    modules: dict[str, ModuleType] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tcfp_jax"):
                    modules[(alias.asname or alias.name).split(".")[0]] = (
                        importlib.import_module("tcfp_jax")
                    )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("tcfp_jax", "pallas_kernels")
        ):
            home = importlib.import_module(node.module)
            for alias in node.names:
                if isinstance(value := getattr(home, alias.name), ModuleType):
                    modules[alias.asname or alias.name] = value
                else:
                    found.add((home.__name__, alias.name))
    for node in (node for tree in trees for node in ast.walk(tree)):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and node.id in modules:
            home = modules[node.id]
            while len(path) > 1 and isinstance(getattr(home, path[0]), ModuleType):
                home = getattr(home, path.pop(0))
            if not isinstance(getattr(home, path[0]), ModuleType):
                found.add((home.__name__, path[0]))
    return {
        (home, name)
        for home, name in found
        if not (home == "tcfp_jax.formats" and name in formats.CATALOG)
    }


def test_the_reference_has_every_public_name():
    for door in (
        importlib.import_module(f"tcfp_jax.{name}".rstrip(".")) for name in DOORS
    ):
        assert [name for name in door.__all__ if not documented(door, name)] == [], (
            door.__name__
        )


def test_the_reference_has_every_name_of_the_pages():
    found = used_names(README) | {
        pair for name, blocks in PAGES.items() for pair in used_names(blocks)
    }
    assert {
        ("tcfp_jax", "store"),
        ("tcfp_jax.optim", "adamw"),
        ("tcfp_jax.products", "pack_fp4"),
    } <= found
    assert [
        (home, name)
        for home, name in sorted(found)
        if not documented(importlib.import_module(home), name)
    ] == []
