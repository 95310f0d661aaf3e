"""Count where code is packed: tokens a line, and lines that hold more than one idea.

`tests/test_house.py` limits the counts, and ARCHITECTURE.md states them. A line of code
is a line on which a token starts, so prose costs nothing. `python -m tests.density`
prints the counts of each package.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "tcfp_jax", "models", "benchmarks", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Density:
    """Counts of one package.

    Attributes:
      tokens: tokens of code, without comments and docstrings.
      lines: lines on which a token starts or goes on.
      packed: places that hold several ideas at once.
      lambdas: lambdas that an assignment names.
      skips: `fmt: skip`.
    """

    tokens: int = 0
    lines: int = 0
    packed: int = 0
    lambdas: int = 0
    skips: int = 0

    def __add__(self, other: "Density") -> "Density":
        return Density(
            self.tokens + other.tokens,
            self.lines + other.lines,
            self.packed + other.packed,
            self.lambdas + other.lambdas,
            self.skips + other.skips,
        )

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.lines)

    @property
    def packed_per_1000_lines(self) -> float:
        return 1000 * self.packed / max(1, self.lines)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def tokens_of_lines(text: str, prose: set[int]) -> Counter[int]:
    """Return the number of tokens that start on each line of code.

    A string over several lines makes each of them a line of code.
    """
    found: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first = token.start[0]
        if token.type in LAYOUT or first in prose:
            continue
        for line in range(first, token.end[0] + 1):
            found[line] += 0
        found[first] += 1
    return found


def contains(node: ast.AST, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a node of these kinds is inside of this one."""
    return any(isinstance(one, kinds) and one is not node for one in ast.walk(node))


def joins_unrelated_values(node: ast.Assign) -> bool:
    """Return whether an assignment of a tuple to names computes one of its values."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    values = node.value.elts
    if len(values) != len(target.elts):
        return False
    return not all(isinstance(value, ast.Name | ast.Constant) for value in values)


def packed_places(tree: ast.Module) -> Iterator[str]:
    """Yield the kind of each place that holds several ideas at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and joins_unrelated_values(node):
            yield "unrelated values in one assignment"
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            yield "a named lambda"
        if isinstance(node, COMPREHENSIONS):
            if contains(node, COMPREHENSIONS) or len(node.generators) > 1:
                yield "a comprehension in a comprehension"
            if contains(node, ast.IfExp):
                yield "a condition in a comprehension"
        if isinstance(node, ast.IfExp) and contains(node, ast.IfExp):
            yield "a condition in a condition"
        if isinstance(node, ast.NamedExpr):
            yield "an assignment in an expression"


@functools.cache
def density_of(path: Path) -> Density:
    """Return the counts of a file."""
    text = path.read_text()
    tree = ast.parse(text)
    counts = tokens_of_lines(text, docstring_lines(tree))
    places = Counter(packed_places(tree))
    return Density(
        tokens=sum(counts.values()),
        lines=len(counts),
        packed=sum(places.values()),
        lambdas=places["a named lambda"],
        skips=len(re.findall(r"# fmt: " + "skip", text)),
    )


def density(*folders: str) -> Density:
    """Return the counts of all files of these folders."""
    total = Density()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            total += density_of(path)
    return total


if __name__ == "__main__":
    for package in sys.argv[1:] or PACKAGES:
        one = density(package)
        print(
            f"{package}: {one.tokens:,} tokens, {one.tokens_per_line:.1f} per line,"
            f" {one.packed_per_1000_lines:.0f} packed places per 1,000 lines,"
            f" {one.lambdas} named lambdas, {one.skips} skips"
        )
