"""Rewrite the tables and plots of README and docs from the JSON of results.

    python -m benchmarks.report
    python -m benchmarks.report --check
    python -m benchmarks.report --full

`--check` exits with 1 if the first would change something. `--full` prints every table,
also those of no page. A page marks its tables by `<!-- begin: NAME -->` and `<!-- end:
NAME -->`. A caption names the card, the commit, the day and the command, and says if
the library has changed since; `--check` ignores that remark, because every edit of the
library would change it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import convergence_tables, memory, original
from benchmarks.card import RUNS
from benchmarks.drawing import FROM_SCRATCH, PICTURES, digest_of, read_source, save
from benchmarks.harness import benchmark
from benchmarks.records import (
    AGE,
    RESULTS,
    ROOT,
    Result,
    markdown_table,
    read_result,
    shown,
)
from benchmarks.variants import BASELINE, RECOMMENDED
from tcfp_jax.recipes import NAMES

SECTION = re.compile(r"(<!-- begin: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
CHOOSE = "choose"
OVERVIEW = "overview"
ORIGINAL = "original"  # the tables of PyTorch TCFP
FORKS = "convergence-fork-bpe-llama-124m"  # losses of README's table
CLIPPING = "convergence-fork-clipping-bpe-llama-124m"
HEAD = "convergence-fork-head-bpe-6x640"
LEARNED = (
    "convergence-flags",
    "convergence-fork-llama-124m",
    FORKS,
    CLIPPING,
    HEAD,
    FROM_SCRATCH,
)
SECTIONS = (*RUNS, *LEARNED)
# Tables that a user decides by; `--full` prints the others, too.
DECIDING = (
    "large",
    "large-8-layers",
    "large-curves",
    "large-curves-llama-1b",
    "large-olmoe",
    "large-1b",
    "large-backward-qwen3-14b-block",
    "large-backward-llama-8b-block",
    "large-backward-llama-8b",
    "folder",
    "llama",
    "peers",
    "llama-124m",
    "fsdp-llama",
    "fsdp-llama-8b",
    "memory-llama-8b",
    FORKS,
    CLIPPING,
    FROM_SCRATCH,
    "finish",
    "train_step",
    "gemm",
    "grouped-large",
    "fp4",
    "fp4-activations",
)
PAGES = {
    Path("README.md"): (CHOOSE,),
    Path("docs/finetune.md"): ("adapters", "dpo"),
    Path("docs/pi0.md"): ("pi0",),
    Path("docs/measurements.md"): (OVERVIEW, ORIGINAL, *DECIDING),
}
PLOTS = Path("docs/plots")
MEASURED = Path("tcfp_jax/conversion/measured.json")
STORED = "tcfp12_single"
# The recipes of README's table, and when to use each.
USE_IT_WHEN = {
    BASELINE: "you need the baseline, or layers are too small for FP8 to pay",
    STORED: "memory or speed matters: [no float weights](docs/stored.md)",
    "tensorwise": "weights stay float32, and one FP8 copy is good enough",
    "rowwise": "single rows or channels are much larger than the others",
    "tcfp12_fast": "weights stay float32, and layers multiply by 16 bits of them",
}
# JSON of whole steps, and its models.
WHOLE = {
    "large": "Llama-3-8B",
    "large-8-layers": "8 layers of Llama-3-8B",
    "large-1b": "Llama-3.2-1B",
    "llama-1b-unrolled": "Llama-3.2-1B, unrolled",
    "large-olmoe": "OLMoE-1B-7B",
    "large-backward-llama-8b": "Llama-3-8B, updated inside the backward pass",
    "large-backward-llama-8b-block": "Llama-3-8B, the same, with blocks recomputed",
    "large-backward-qwen3-14b-block": "Qwen3-14B, the same, with blocks recomputed",
}


# Sections
# --------------------------------------------------------------------------------------


def render_section(name: str, results: Path = RESULTS) -> str:
    """Return the text between the markers of a section.

    Raises:
      ValueError: no benchmark has this name.
    """
    if name == CHOOSE:
        return choose(results)
    if name == OVERVIEW:
        return overview(results)
    if name == ORIGINAL:
        return original.table(results)
    if name not in SECTIONS:
        raise ValueError(
            f"a page has a section {name!r} that no benchmark fills; use {CHOOSE} or"
            f" one of {SECTIONS}"
        )
    result = read_result(name, results)
    data = () if result is None else result.config.get("data") or ()
    command = convergence_tables.command_of(name, data)
    if name in RUNS:
        command = f"python -m benchmarks.{RUNS[name].arguments} --json"
    if result is None:
        return f"*No numbers yet: `{command}` writes them.*\n"
    picture = ""
    if name in PICTURES:
        picture = f"\n![{PICTURES[name].alt}]({PLOTS.name}/{name}.svg)\n"
    table = benchmark(name).table(result)
    return f"{table}\n{picture}\n*`{command}`: {result.origin}.*\n"


def choose(results: Path = RESULTS) -> str:
    """Return README's table: speed, bytes per weight and loss, one line per recipe."""
    timed = read_result("large-8-layers", results)
    counted = read_result("memory-llama-8b", results)
    forked = read_result(FORKS, results)
    speeds = {} if timed is None else _speeds(timed)
    sizes = {} if counted is None else _bytes_per_weight(counted)
    losses = {} if forked is None else convergence_tables.ratios_of(forked)
    losses[STORED] = losses.get(RECOMMENDED, "–")
    titles = [
        "recipe",
        "speedup over BF16",
        "bytes per weight",
        "loss above BF16, nats per token",
        "use it when",
    ]
    lines = [
        [
            f"`{name}`, stored" if name == STORED else f"`{name}`",
            speeds.get(name, "–"),
            sizes.get(name, "–"),
            losses.get(name, "–"),
            when,
        ]
        for name, when in USE_IT_WHEN.items()
    ]
    cards = [found.card for found in (timed, forked) if found is not None]
    text = (
        "Speedup of a whole training step of 8 layers of Llama-3-8B by the wall clock,"
        " and bytes of all that outlives a step of the whole model: weights, copies,"
        " errors and Adam's moments. Losses are of held-out text after forks of BF16"
        " runs of `llama-124m` (mean ± standard error); BF16 itself differs by up to"
        f" 0.0011 when it runs again. {' and '.join(dict.fromkeys(cards)) or 'none'},"
        " [measurements](docs/measurements.md)."
    )
    return f"{markdown_table(titles, lines, last='left')}\n\n{text}\n"


def _speeds(timed: Result) -> Mapping[str, str]:
    """Return the speedup over BF16 by recipe."""
    names = {"stored": STORED, STORED: f"{STORED}, float"}
    found = {BASELINE: "1"}
    for row in timed.rows:
        name = names.get(row["recipe"], row["recipe"])
        found.setdefault(name, f"**{row['layer_speed_over_bf16']:.2f}**")
    return found


def _bytes_per_weight(counted: Result) -> Mapping[str, str]:
    sizes = {
        name: f"{row['state_bytes'] / row['parameters']:.3g}"
        for name, row in counted.by("name").items()
    }
    return {**sizes, STORED: sizes.get(memory.STORED, "–")}


def overview(results: Path = RESULTS) -> str:
    """Return the table of whole steps, stored against BF16: a line per model."""
    titles = [
        "whole step, 4 × 4096 tokens",
        "card",
        "BF16, ms",
        "stored, ms",
        "speedup",
        "BF16, GB",
        "stored, GB",
    ]
    found = {model: read_result(name, results) for name, model in WHOLE.items()}
    lines = [
        [model, *_whole_step(result)]
        for model, result in found.items()
        if result is not None
    ]
    return markdown_table(titles, lines) + "\n"


def _whole_step(result: Result) -> list[str]:
    rows = result.by("recipe")
    stored = rows["stored"]
    bf16 = rows[BASELINE]
    times = [f"{bf16['median_ms']:,.0f}", f"{stored['median_ms']:,.0f}"]
    speedup = f"**{bf16['median_ms'] / stored['median_ms']:.2f}**"
    sizes = [shown(row, "{peak_gigabytes:.1f}") for row in (bf16, stored)]
    # A BF16 run of fewer layers is of another model: this one does not fit.
    if bf16.get("layers") != stored.get("layers"):
        times[0] = "does not fit"
        speedup = "–"
        sizes[0] = "–"
    return [result.card, *times, speedup, *sizes]


def render(page: str, results: Path = RESULTS) -> str:
    """Return a page with every section rewritten.

    >>> markers = ["<!-- begin: gemm -->", "<!-- end: gemm -->"]
    >>> render(chr(10).join(markers), Path("/nowhere")).splitlines()[1]
    '*No numbers yet: `python -m benchmarks.gemm --json` writes them.*'
    """

    def rewritten(match: re.Match[str]) -> str:
        return match[1] + render_section(match[2], results) + match[3]

    return SECTION.sub(rewritten, page)


def full(results: Path = RESULTS) -> Iterator[str]:
    """Yield every table that there is JSON for, under the name of its JSON."""
    for name in SECTIONS:
        if read_result(name, results) is not None:
            yield f"## {name}\n\n{render_section(name, results)}"


# The file that `diagnose` reads
# --------------------------------------------------------------------------------------


def measured(results: Path = RESULTS) -> str:
    """Return the JSON of speeds by device and recipe.

    A shape is an MLP's tokens, d and d_ff, in both passes.
    """
    found: dict[str, dict[str, list[dict[str, object]]]] = {}
    for path in sorted(results.glob("*/train_step.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["header"]["platform"] == "cpu":
            continue
        of_device = found.setdefault(content["header"]["device"], {})
        for row in content["rows"]:
            # A variant of a recipe has a name that is not a recipe's.
            is_recipe = row["recipe"] in NAMES and row["recipe"] != BASELINE
            if row["part"] == "mlp" and is_recipe:
                shape = [int(size) for size in row["shape"].split("x")]
                speed = round(row["speed_over_bf16"], 4)
                measured_row = {"shape": shape, "speed_over_bf16": speed}
                of_device.setdefault(row["recipe"], []).append(measured_row)
    return json.dumps(found, indent=1) + "\n"


# The command
# --------------------------------------------------------------------------------------


def find_differences(root: Path = ROOT, results: Path = RESULTS) -> list[str]:
    """Return the names of sections, plots and files that `report` would change.

    Raises:
      FileNotFoundError: a page does not exist.
      ValueError: a page has a section that no benchmark fills.
    """
    found = []
    for page, names in PAGES.items():
        text = (root / page).read_text(encoding="utf-8")
        found += [f"{page}: section {name}" for name in _outdated(text, results)]
        found += [
            f"{page}: no section {name}"
            for name in names
            if f"<!-- begin: {name} -->" not in text
        ]
    for name in PICTURES:
        picture = root / PLOTS / f"{name}.svg"
        digest = digest_of(name, results)
        if digest is not None and read_source(picture) != digest:
            found.append(f"plot {picture}")
    path = root / MEASURED
    if not path.exists() or path.read_text(encoding="utf-8") != measured(results):
        found.append(str(path))
    return found


def _outdated(text: str, results: Path) -> Iterator[str]:
    for match in SECTION.finditer(text):
        new = match[1] + render_section(match[2], results) + match[3]
        if match[0].replace(AGE, "") != new.replace(AGE, ""):
            yield match[2]


def write(root: Path = ROOT, results: Path = RESULTS) -> None:
    """Rewrite the pages, plots and `measured.json` under a root.

    Print which numbers are of another library.
    """
    for page in PAGES:
        text = (root / page).read_text(encoding="utf-8")
        (root / page).write_text(render(text, results), encoding="utf-8")
    for name in PICTURES:
        save(name, root / PLOTS / f"{name}.svg", results)
    (root / MEASURED).parent.mkdir(parents=True, exist_ok=True)
    (root / MEASURED).write_text(measured(results), encoding="utf-8")
    for name in SECTIONS:
        found = read_result(name, results)
        if found is not None and AGE in found.origin:
            print(f"{name}: {found.origin}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__.split("\n\n")[0],
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing, exit with 1 if something would change",
    )
    parser.add_argument("--full", action="store_true", help="print every table")
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        help="folder of the pages (default: the repository)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="folder of JSON (default: benchmarks/results)",
    )
    options = parser.parse_args(arguments)
    if options.full:
        for section in full(options.results):
            print(section)
        return 0
    if not options.check:
        write(options.root, options.results)
        return 0
    differences = find_differences(options.root, options.results)
    for difference in differences:
        print(
            f"differs from the JSON: {difference}; run python -m benchmarks.report",
            file=sys.stderr,
        )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
