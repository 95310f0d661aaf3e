"""README's Python blocks run, in order, it stays short, and CI runs its own test
command.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

import tcfp_jax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_and_print(capsys):
    namespace: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in BLOCKS:
            exec(compile(block, "README.md", "exec"), namespace)
            assert capsys.readouterr().out
    leaves = jax.tree.leaves(tcfp_jax.dequantize(namespace["params"]))
    assert len(leaves) == 4
    assert all(jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0 for leaf in leaves)


def command(marker):
    found = re.search(rf"<!-- {marker} command -->\n```bash\n(.+)\n```", README)
    assert found, f"README has no {marker} command"
    return found.group(1)


def test_ci_runs_the_test_command_of_the_readme():
    assert command("test") in (ROOT / ".ci" / "run").read_text().splitlines()
    assert command("run").endswith("-m models.train")


def test_the_page_and_its_example_are_short():
    assert len(README.splitlines()) <= 120
    assert len(BLOCKS[0].splitlines()) <= 22
    # The first screen: one sentence, one number, the line that installs, and the lines
    # of a program that change.
    assert len(README[: README.index("```bash")].splitlines()) <= 8
    assert len(README[: README.index("<!-- begin: choose -->")].splitlines()) <= 30


def test_links_lead_somewhere():
    """Those to actions lead to pages of the host that shows README."""
    targets = re.findall(r"\]\((?!https?:|\.\./\.\./actions)([^)#]+)", README)
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]
