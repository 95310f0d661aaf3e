"""Every guide's Python blocks run, in order."""

import re
from pathlib import Path

import jax
import pytest

GUIDES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_python_blocks_run(path):
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks, f"{path.name} shows nothing"
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, path.name, "exec"), namespace)
