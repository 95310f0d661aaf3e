"""An installation, editable or not, shows three packages and nothing else."""

import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import tcfp_jax
from tests.helpers import refused

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))


def test_an_installation_shows_the_library_and_nothing_else():
    """Built for real: `pip install -e .` in an empty environment, then
    `find_spec("tests")` from another folder.
    """
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) == {
        path.parent.name for path in ROOT.glob("*/__init__.py")
    } - {
        "models",
        "benchmarks",
        "tests",
    }
    # Without it hatchling puts the whole folder on the path of an environment in which
    # the checkout is installed.
    assert wheel["dev-mode-exact"] is True


def test_an_installation_has_the_trainer_under_a_name_of_its_own():
    """The link is packed as a folder. Its modules would import another package's
    `models` by that name, so they import each other relatively; doctests may name it.
    """
    assert (ROOT / "tcfp_models").readlink() == Path("models")
    forced = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["force-include"]
    assert forced == {"tcfp_models": "tcfp_models"}
    script = PYPROJECT["project"]["scripts"]["tcfp-train"]
    module, _, function = script.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    own_name = re.compile(r"^\s*(?:from|import) models\b", re.MULTILINE)
    paths = sorted((ROOT / "models").rglob("*.py"))
    assert [str(path) for path in paths if own_name.search(path.read_text())] == []


def test_there_is_one_version():
    assert tcfp_jax.__version__ == PYPROJECT["project"]["version"]
    assert f"\nversion: {tcfp_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_without_an_installation_the_version_is_unknown(tmp_path):
    """A checkout on the path has no metadata."""
    (tmp_path / "tcfp_jax").symlink_to(ROOT / "tcfp_jax")
    script = (
        f"import sys; sys.path = [{str(tmp_path)!r}, *sys.path]; import tcfp_jax;"
        " print(tcfp_jax.__version__)"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "0+unknown\n"


def test_every_extra_for_users_is_explained():
    """The table of the site names all but those of single test files."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    named = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE
    )
    explained = {name for cell in named for name in re.findall(r"`(\w+)`", cell)} | {
        "monitor"
    }
    assert explained == {
        name for name in extras if "wild" not in name and "-" not in name
    }


def test_each_package_says_that_it_has_types():
    """Without the file `py.typed` a type checker ignores a package's annotations."""
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [name for name in packages if not (ROOT / name / "py.typed").exists()] == []
    assert "Typing :: Typed" in PYPROJECT["project"]["classifiers"]


def test_classifiers_name_the_pythons_that_install():
    """pip reads `requires-python`; people read the classifiers."""
    named = re.findall(
        r":: 3\.(\d+)$", "\n".join(PYPROJECT["project"]["classifiers"]), re.MULTILINE
    )
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=3.")
    assert named[0] == oldest
    assert [int(minor) for minor in named] == [*range(int(oldest), int(named[-1]) + 1)]


def test_links_of_readme_work_on_a_package_index():
    """Pages open as pages, pictures as files, and no code changes."""
    readme = (ROOT / "README.md").read_text()
    absolute = RELEASE["absolute_links"](readme, "https://host/owner/name", "abc")
    assert re.findall(r"\]\((?!https:)[^)]*\)", absolute) == []
    page = "](https://host/owner/name/blob/abc/docs/convert.md)"
    assert page in absolute
    assert (
        "](https://host/owner/name/raw/abc/docs/plots/large-8-layers.svg)" in absolute
    )
    assert "](https://host/owner/name/actions/workflows/ci.yml)" in absolute
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(absolute) == blocks.findall(readme)


def test_each_version_has_notes():
    """The last one too: it ends with the file."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([\d.]+)\]", changelog, re.MULTILINE)
    assert versions[0] == tcfp_jax.__version__
    notes = [RELEASE["notes_of"](changelog, version) for version in versions]
    assert all("\n## " not in f"\n{text}" for text in notes)
    assert sum(map(len, notes)) > 0.9 * len(changelog)
    with refused("no entries for 9.9.9"):
        RELEASE["notes_of"](changelog, "9.9.9")


def test_a_tag_is_the_version_of_the_package():
    pyproject = (ROOT / "pyproject.toml").read_text()
    version = tcfp_jax.__version__
    assert RELEASE["version_of"](f"v{version}", pyproject) == version
    with refused(f"v9.9.9 is not v{version}"):
        RELEASE["version_of"]("v9.9.9", pyproject)
