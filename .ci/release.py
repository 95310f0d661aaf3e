"""What a release takes from the repository's pages. Standard library alone.

    python .ci/release.py notes v0.4.0          print the notes of this tag
    python .ci/release.py links ADDRESS COMMIT  rewrite README.md with absolute links

The package index shows README without its repository, so its links need the address.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes_of(changelog: str, version: str) -> str:
    """Return the entries of a version, without its heading."""
    section = rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)"
    found = re.search(section, changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no entries for {version}; add them")
    return found[1].strip() + "\n"


def version_of(tag: str, pyproject: str) -> str:
    """Return the version of a tag, which is that of the package."""
    version = tomllib.loads(pyproject)["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(
            f"the tag {tag} is not v{version}, the version in pyproject.toml; change"
            " one of them"
        )
    return version


def absolute_links(readme: str, address: str, commit: str) -> str:
    """Return README with links that need no repository around it.

    Pictures lead to files, other links to pages that show a file.
    """
    readme = readme.replace("](../../", f"]({address}/")
    relative = r"\]\((?!https?:|#)([^)]+)\)"
    readme = re.sub(
        rf"(!\[[^\]]*){relative}", rf"\1]({address}/raw/{commit}/\2)", readme
    )
    return re.sub(relative, rf"]({address}/blob/{commit}/\1)", readme)


def main(command: str, *arguments: str) -> None:
    if command == "notes":
        (tag,) = arguments
        version = version_of(tag, (ROOT / "pyproject.toml").read_text())
        print(notes_of((ROOT / "CHANGELOG.md").read_text(), version), end="")
    elif command == "links":
        address, commit = arguments
        readme = ROOT / "README.md"
        readme.write_text(absolute_links(readme.read_text(), address, commit))
    else:
        raise ValueError(f"{command!r} is neither 'notes' nor 'links'")


if __name__ == "__main__":
    main(*sys.argv[1:])
