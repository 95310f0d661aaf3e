"""What pages of the site share with files of the repository; mkdocs runs it as a hook.

A page that says `<!-- include: NAME -->` shows the file NAME of the repository, and `<!-- include: catalog -->` every
datatype of the catalog. Links of an included file are relative to the repository's root and become the site's.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "LOG.md": "log.md",
}
_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
_SUMMARY = re.compile(r"<!-- begin: formats -->\n(.*?)<!-- end: formats -->", re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with what it includes, and with links to pages where GitHub's readers are led to files."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # a page that is a tab of its own has no siblings to list
    for file, target in PAGES.items():
        markdown = markdown.replace(f"](../{file}", f"]({target}")
    return _INCLUDE.sub(lambda match: _read(match[1]), markdown)


def site_links(text: str) -> str:
    """Markdown of a file at the repository's root, with the links that its page on the site needs.

    >>> site_links("[NNX](docs/nnx.md) and [the log](LOG.md#1)")
    '[NNX](nnx.md) and [the log](log.md#1)'
    """
    for file, page in PAGES.items():
        text = text.replace(f"]({file}", f"]({page}")
    return text.replace("](docs/", "](")


def catalog_table() -> str:
    """Every datatype of `tcfp_jax.formats` as a Markdown table."""
    from tcfp_jax.formats import CATALOG

    def content(made: Any) -> str:
        code = f"{made.number.name}_{made.scale.name}" if made.scale else made.number.name
        return code if made.residual is None else f"{code} + {content(made.residual)}"

    lines = ["| name | content | bits per value | smallest | largest | eps |", "|---|---|--:|--:|--:|--:|"]
    for name, made in CATALOG.items():
        number = made.number
        cells = f"{made.bits_per_value():.4g} | {number.min:.5g} | {number.max:.5g} | {number.eps:.3g}"
        lines.append(f"| `{name}` | `{content(made)}` | {cells} |")
    return "\n".join(lines)


def _read(name: str) -> str:
    if name == "catalog":
        return catalog_table()
    if name == "formats-table":
        found = _SUMMARY.search((ROOT / "docs" / "formats.md").read_text(encoding="utf-8"))
        assert found, "docs/formats.md has no table between its markers"
        return found[1]
    return site_links((ROOT / name).read_text(encoding="utf-8"))
