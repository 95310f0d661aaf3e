"""Turn the committed JSON into README's tables and the plots in docs/plots.

    python -m benchmarks.report            # rewrite what lies between the markers, and the plots
    python -m benchmarks.report --check    # change nothing; exit with 1 where they differ from the JSON

A section of README starts with `<!-- begin: NAME -->` and stops at `<!-- end: NAME -->`, NAME one of those in
`benchmarks.tables`. Numbers of an accelerator are preferred to those of a CPU. A section without numbers says which
command writes them.
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import plots
from benchmarks.common import RESULTS, ROOT
from benchmarks.tables import TABLES, command, read_result

SECTION = re.compile(r"(<!-- begin: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
PLOTS = Path("docs/plots")


def render_section(name: str, results: Path = RESULTS) -> str:
    """What lies between the markers of a section.

    Raises:
      ValueError: no benchmark has this name.
    """
    if name not in TABLES:
        raise ValueError(f"README has a section {name!r} that no benchmark fills; use one of {list(TABLES)}")
    result = read_result(name, results)
    if result is None:
        return f"*No numbers yet: `{command(name)}` writes them.*\n"
    picture = f"\n![{name}]({(PLOTS / name).as_posix()}.png)\n" if name in plots.DRAWN else ""
    return f"{TABLES[name](result)}\n{picture}\n{result.caption}\n"


def render(readme: str, results: Path = RESULTS) -> str:
    """README with every section rewritten.

    >>> markers = ["<!-- begin: gemm -->", "<!-- end: gemm -->"]
    >>> render(chr(10).join(markers), Path("/nowhere")).splitlines()[1]
    '*No numbers yet: `python -m benchmarks.gemm --json` writes them.*'
    """
    return SECTION.sub(lambda match: match[1] + render_section(match[2], results) + match[3], readme)


def find_differences(readme: Path, results: Path = RESULTS) -> list[str]:
    """What `report` would change: names of sections and plots.

    Raises:
      FileNotFoundError: there is no README.
      ValueError: README has a section that no benchmark fills.
    """
    text = readme.read_text(encoding="utf-8")
    found = []
    for match in SECTION.finditer(text):
        name = match[2]
        if match[0] != match[1] + render_section(name, results) + match[3]:
            found.append(f"section {name}")
        result = read_result(name, results)
        picture = readme.parent / PLOTS / f"{name}.png"
        if name in plots.DRAWN and result is not None and plots.read_source(picture) != result.digest:
            found.append(f"plot {picture}")
    missing = [name for name in TABLES if f"<!-- begin: {name} -->" not in text]
    return found + [f"no section {name}" for name in missing]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 where something would change")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="(default: the repository's)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the JSON (default: benchmarks/results)"
    )
    options = parser.parse_args(arguments)
    if options.check:
        differences = find_differences(options.readme, options.results)
        for difference in differences:
            print(f"README differs from the JSON: {difference}; run python -m benchmarks.report", file=sys.stderr)
        return 1 if differences else 0
    text = options.readme.read_text(encoding="utf-8")
    options.readme.write_text(render(text, options.results), encoding="utf-8")
    for name in plots.DRAWN:
        result = read_result(name, options.results)
        if result is not None:
            plots.draw(name, result.config, result.rows, options.readme.parent / PLOTS / f"{name}.png", result.digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
