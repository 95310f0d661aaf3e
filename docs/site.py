"""Hook of mkdocs: pages that show files of the repository.

The line `<!-- include: NAME -->` of a page becomes the file NAME of the repository, and `<!-- include: catalog -->`
a table of every datatype. Links in an included file start at the root; this hook turns them into links of the site.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}
_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
_SUMMARY = re.compile(r"<!-- begin: formats -->\n(.*?)<!-- end: formats -->", re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with its includes, and with links to pages instead of links to files."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # a tab of its own has no siblings to list
    for file, target in PAGES.items():
        markdown = markdown.replace(f"](../{file}", f"]({target}")
    return _INCLUDE.sub(lambda match: _read(match[1]), markdown)


def site_links(text: str) -> str:
    """Return the text of a file at the repository's root with the links of its page on the site.

    >>> site_links("[NNX](docs/nnx.md) and [the code](ARCHITECTURE.md#the-guard)")
    '[NNX](nnx.md) and [the code](architecture.md#the-guard)'
    """
    for file, page in PAGES.items():
        text = text.replace(f"]({file}", f"]({page}")
    return text.replace("](docs/", "](")


def catalog_table() -> str:
    """Return every datatype of `tcfp_jax.formats` as a Markdown table."""
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
