"""An installation, editable or not, shows two packages and nothing else."""

import tomllib
from pathlib import Path

import tcfp_jax

ROOT = Path(__file__).parents[1]


def test_an_installation_shows_the_library_and_nothing_else():
    """Built for real: `pip install -e .` in an empty environment, then `find_spec("tests")` from another folder."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) == {path.parent.name for path in ROOT.glob("*/__init__.py")} - {
        "models", "benchmarks", "tests",
    }  # fmt: skip
    # Without it hatchling puts the whole folder on the path of an environment in which the checkout is installed.
    assert wheel["dev-mode-exact"] is True


def test_the_version_is_that_of_the_package():
    assert tcfp_jax.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
