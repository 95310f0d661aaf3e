"""README's Python blocks run, in order, and CI runs README's own test command."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_python_blocks_run(name, capsys):
    text = (ROOT / name).read_text()
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)
    assert blocks or name != "README.md"


def command(marker):
    found = re.search(rf"<!-- {marker} command -->\n```bash\n(.+)\n```", (ROOT / "README.md").read_text())
    assert found, f"README has no {marker} command"
    return found.group(1)


def test_ci_runs_the_test_command_of_the_readme():
    assert command("test") in (ROOT / ".ci" / "run").read_text().splitlines()
    assert command("run").endswith("-m models.train")


def test_example_is_short():
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert len(first.splitlines()) <= 22
