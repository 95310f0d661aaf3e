"""Every page of the site with Python on it runs, block by block, in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).parents[1] / "docs"
# Pages of words and tables alone, and those that include a file of the repository.
WITHOUT_CODE = {"architecture", "catalog", "changelog", "decisions", "glossary", "index", "measurements"}
PAGES = {path.stem: re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL) for path in DOCS.glob("*.md")}


def test_pages_without_code_are_known():
    assert {name for name, blocks in PAGES.items() if not blocks} == WITHOUT_CODE
    assert not [path.name for path in (DOCS / "api").glob("*.md") if "```python" in path.read_text()]


@pytest.mark.parametrize("name", sorted(set(PAGES) - WITHOUT_CODE))
def test_python_blocks_run(name):
    namespace: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in PAGES[name]:
            exec(compile(block, f"{name}.md", "exec"), namespace)


def test_flags_of_the_guide_are_known_to_this_jax():
    """XLA ends a process with an unknown flag; of numbers any will do."""
    text = (DOCS / "sharding.md").read_text()
    named = re.findall(r"--(xla_gpu_\w+)=(\w*)", text)
    flags = {f"--{name}={'true' if value == 'true' else '1'}" for name, value in named}
    assert len(flags) >= 7
    environment = {**os.environ, "XLA_FLAGS": " ".join(sorted(flags)), "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", "import jax; jax.devices()"]
    subprocess.run(run, env=environment, check=True, capture_output=True, timeout=120)
    environment["XLA_FLAGS"] += " --xla_gpu_no_such_flag=true"
    assert subprocess.run(run, env=environment, capture_output=True, timeout=120).returncode != 0


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"[\w/]+\.md", (DOCS.parent / "mkdocs.yml").read_text()))
    assert named == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
