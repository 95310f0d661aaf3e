"""Hook of mkdocs: pages that show files of the repository, and the version on every
page.

The line `<!-- include: NAME -->` of a page becomes the file NAME of the repository, and
`<!-- include: catalog -->` a table of every datatype. `NAME#PART` is a part of it: a
section by its heading, one of `_PARTS`, or the `pictures` of a notebook. A notebook
becomes its text, its code, and what it printed and drew. Links in an included file
start at the root; this hook turns them into links of the site.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}
_INCLUDE = re.compile(r"^<!-- include: (.+?) -->$", re.MULTILINE)
_PARTS = {  # of README
    "number": r"^\*\*.+?(?=\n\n)",
    "diff": r"^```diff\n.*?^```$",
    "choose": r"(?<=<!-- begin: choose -->\n).*?(?=<!-- end: choose -->)",
}
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.DOTALL)
_COLAB = "https://colab.research.google.com/github"
_SUMMARY = re.compile(r"<!-- begin: formats -->\n(.*?)<!-- end: formats -->", re.DOTALL)


def on_config(config: Any, **_: Any) -> Any:
    """Write the version into the foot of every page."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]["version"]
    config.copyright = f"tcfp_jax {version}"
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its includes, and with links to pages instead of links to
    files.
    """
    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # a tab of its own has no siblings to list
    whole = _INCLUDE.fullmatch(markdown.strip())
    if not config.repo_url:
        page.edit_url = None
    elif whole:  # the text is in the file
        page.edit_url = f"{config.repo_url}/edit/main/{whole[1]}"
    for file, target in PAGES.items():
        markdown = markdown.replace(f"](../{file}", f"]({target}")
    return _INCLUDE.sub(lambda match: _read(match[1], config.repo_url), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Name the columns in tables of words."""
    return _TABLE.sub(lambda match: with_labels(match[0]), html)


def with_labels(table: str) -> str:
    """Return a table whose cells name their columns, if one but the first has words.

    The style shows a row of such a table as a list on a phone, where the columns would
    be one word wide. Tables of numbers, and those of two columns, do not change.

    >>> table = "<table><tr><th>a</th><th>b</th><th>c</th></tr>{}</table>"
    >>> row = f"<tr><td>1</td><td>2</td><td>{30 * 'x'}</td></tr>"
    >>> with_labels(table.format(row)).count("data-label")
    3
    """
    head, *rows = _ROW.findall(table)
    names = _texts(head)
    columns = list(zip(*map(_texts, rows), strict=True))
    lengths = [sum(map(len, cells)) / len(rows) for cells in columns]
    if len(names) < 3 or max(lengths[1:]) < 25:
        return table

    def labelled(row: re.Match[str]) -> str:
        left = iter(names)
        return re.sub("<td", lambda _: f'<td data-label="{next(left)}"', row[0])

    return _ROW.sub(labelled, table).replace("<table>", "<table data-rows>", 1)


def _texts(row: str) -> list[str]:
    """Return the text of each cell of a row, as an attribute may hold it."""
    cells = [re.sub("<.*?>", "", cell) for cell in _CELL.findall(row)]
    return [text.replace('"', "&quot;") for text in cells]


def site_links(text: str) -> str:
    """Return the text of a file at the repository's root with the links of its page on
    the site.

    >>> site_links("[NNX](docs/nnx.md) and [the code](ARCHITECTURE.md#the-guard)")
    '[NNX](nnx.md) and [the code](architecture.md#the-guard)'
    """
    for file, page in PAGES.items():
        text = text.replace(f"]({file}", f"]({page}")
    return text.replace("](docs/", "](")


def part_of(text: str, part: str) -> str:
    """Return a part of a page: one of `_PARTS`, or the section with this heading."""
    pattern = _PARTS.get(part, rf"^## {re.escape(part)}\n.*?(?=^## |\Z)")
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no part {part!r}"
    return found[0]


def _picture(output: dict[str, Any]) -> str:
    """Return the picture that a cell drew as HTML; empty if it drew none."""
    picture = "".join(output.get("data", {}).get("image/png", "")).replace("\n", "")
    source = f'src="data:image/png;base64,{picture}"'
    return f'<img alt="Plot of the code above" {source}>' if picture else ""


def pictures(path: Path) -> str:
    """Return the pictures of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "\n\n".join(filter(None, map(_picture, outputs)))


def notebook(path: Path, address: str | None = None) -> str:
    """Return a notebook as Markdown: text, code, and the outputs that it holds.

    With the address of a repository on GitHub, a button opens it in Colab.
    """
    lines = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        lines.append(
            source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        )
        for output in cell.get("outputs", ()):
            lines.append(_picture(output) or f"```text\n{''.join(output['text'])}```")
    if address:
        lines.insert(1, _in_colab(path.relative_to(ROOT).as_posix(), address))
    return "\n\n".join(
        [*lines, f"*This page is [a notebook]({path.name}) and its outputs on a CPU.*"]
    )


def _in_colab(file: str, address: str) -> str:
    """Return the button of a notebook, and the line that Colab needs before it."""
    repository = address.removeprefix("https://github.com/")
    return (
        f"[Open in Colab]({_COLAB}/{repository}/blob/main/{file}){{ .md-button }}\n\n"
        "In Colab, run this in a first cell:"
        f" `!pip install -q 'tcfp_jax[train] @ git+{address}'`"
    )


def catalog_table() -> str:
    """Return every datatype of `tcfp_jax.formats` as a Markdown table."""
    from tcfp_jax.formats import CATALOG

    def content(made: Any) -> str:
        code = (
            f"{made.number.name}_{made.scale.name}" if made.scale else made.number.name
        )
        return code if made.residual is None else f"{code} + {content(made.residual)}"

    lines = [
        "| name | content | bits per value | smallest | largest | eps |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, made in CATALOG.items():
        number = made.number
        cells = (
            f"{made.bits_per_value():.4g} | {number.min:.5g} | {number.max:.5g} |"
            f" {number.eps:.3g}"
        )
        lines.append(f"| `{name}` | `{content(made)}` | {cells} |")
    return "\n".join(lines)


def _read(name: str, address: str | None) -> str:
    if name == "catalog":
        return catalog_table()
    if name == "formats-table":
        found = _SUMMARY.search(
            (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
        )
        assert found, "docs/formats.md has no table between its markers"
        return found[1]
    if name.endswith(".ipynb"):
        return notebook(ROOT / name, address)
    file, _, part = name.partition("#")
    if part == "pictures":
        return pictures(ROOT / file)
    text = (ROOT / file).read_text(encoding="utf-8")
    return site_links(part_of(text, part) if part else text)
