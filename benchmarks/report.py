"""Generate README's table, docs/measurements.md, the plots and `measured.json` from the
committed JSON.

    python -m benchmarks.report            # rewrite the text between the markers, the plots and measured.json
    python -m benchmarks.report --check    # change nothing; exit with 1 if a page differs from the JSON

A section of a page lies between `<!-- begin: NAME -->` and `<!-- end: NAME -->`. NAME
is a benchmark's, "choose" for README's table, or "overview" for whole models. A section
without numbers names the command that writes them. Captions say if the library has
changed since; `--check` ignores that remark, because every edit of the library would
change it.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import convergence_tables, memory, train_step
from benchmarks.card import RUNS
from benchmarks.common import AGE, RESULTS, ROOT, Result, markdown_table, read_result
from benchmarks.drawing import PICTURES, WHOLE_RUNS, digest_of, read_source, save
from benchmarks.origins import release_of
from benchmarks.variants import BASELINE, RECOMMENDED, RERUN
from tcfp_jax.recipes import NAMES

SECTION = re.compile(r"(<!-- begin: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
CHOOSE, OVERVIEW = "choose", "overview"
FORKS = "convergence-fork-bpe-llama-124m"  # losses of README's table
FROM_SCRATCH = tuple(f"convergence-bpe-{size}" for size in WHOLE_RUNS)
LEARNED = ("convergence-flags", "convergence-fork-llama-124m", FORKS, *FROM_SCRATCH)
SECTIONS = (*RUNS, *LEARNED, "fp4_quality")
PAGES = {
    Path("README.md"): (CHOOSE,),
    Path("docs/measurements.md"): (OVERVIEW, *SECTIONS),
}
PLOTS, MEASURED = Path("docs/plots"), Path("tcfp_jax/conversion/measured.json")
STORED = "tcfp12_single"
# The recipes of README's table, and when to use each.
USE_IT_WHEN = {
    BASELINE: "you need the baseline, or layers are too small for FP8 to pay",
    STORED: "memory or speed matters: [no float weights](docs/stored.md)",
    "tensorwise": "weights stay float32, and one FP8 copy is good enough",
    "rowwise": "single rows or channels are much larger than the others",
    "tcfp12_fast": (
        "weights stay float32, and layers should multiply by 16 bits of them"
    ),
}


def benchmark(name: str) -> Any:
    """Return the module of a benchmark or of a further run."""
    return importlib.import_module(f"benchmarks.{name.partition('-')[0]}")


# Sections
# --------------------------------------------------------------------------------------


def render_section(name: str, results: Path = RESULTS) -> str:
    """Return the text between the markers of a section.

    Raises:
      ValueError: no benchmark has this name.
    """
    if name in (CHOOSE, OVERVIEW):
        return choose(results) if name == CHOOSE else overview(results)
    if name not in SECTIONS:
        raise ValueError(
            f"a page has a section {name!r} that no benchmark fills; use {CHOOSE} or"
            f" one of {SECTIONS}"
        )
    result, module = read_result(name, results), benchmark(name)
    if name in RUNS:
        command = f"python -m benchmarks.{RUNS[name].arguments} --json"
    else:
        data = () if result is None else result.config.get("data") or ()
        command = (
            module.command_of(name, data)
            if name in LEARNED
            else f"python -m benchmarks.{name} --json"
        )
    if result is None:
        return f"*No numbers yet: `{command}` writes them.*\n"
    picture = (
        f"\n![{PICTURES[name].alt}]({PLOTS.name}/{name}.svg)\n"
        if name in PICTURES
        else ""
    )
    return f"{module.table(result)}\n{picture}\n*`{command}`: {result.origin}.*\n"


def choose(results: Path = RESULTS) -> str:
    """Return README's table: speed of whole models, bytes of their state, and the loss,
    one line per recipe.
    """
    titles, columns = ["recipe"], []
    times: dict[str, None] = {}
    sources = {
        "8 layers of Llama-3-8B": ("large-8-layers",),
        "Llama-3.2-1B": ("large-1b",),
    }
    for model, source in sources.items():
        found = [
            result
            for result in (read_result(name, results) for name in source)
            if result is not None
        ]
        titles.append(
            f"step over BF16, {model}{f', {_card(found[0])}' if found else ''}"
        )
        columns.append(_speeds(found))
        times.update(dict.fromkeys(map(_of, found)))
    for model in ("llama-8b", "llama-1b"):
        counted = read_result(f"memory-{model}", results)
        titles.append(
            f"bytes of state a weight, {model.removeprefix('llama-').upper()} (of"
            " kernels alone)"
        )
        rows = {} if counted is None else counted.by("name")
        sizes = {
            name: (
                f"{row['state_bytes'] / row['parameters']:.3g}"
                f" ({row['bytes_per_weight']:.3g})"
            )
            for name, row in rows.items()
        }
        columns.append({**sizes, STORED: sizes.get(memory.STORED, "–")})
    forked = read_result(FORKS, results)
    losses = {} if forked is None else convergence_tables.ratios_of(forked)
    titles.append("loss over BF16, nats a token")
    # The forks' `tcfp12_single` has float32 weights, so README's line is that of stored
    # ones.
    columns.append({**losses, STORED: losses.get(RECOMMENDED, "–"), BASELINE: "0"})
    lines = [
        [
            f"`{name}`{', stored' if name == STORED else ''}",
            *(column.get(name, "–") for column in columns),
            when,
        ]
        for name, when in USE_IT_WHEN.items()
    ]
    noise = (
        0.0
        if forked is None
        else convergence_tables.noise_floor(convergence_tables.rows_of(forked), RERUN)
    )
    text = [
        (
            "Speed is of whole training steps of 4 × 4096 tokens, by the wall clock:"
            " BF16's time divided by the recipe's. Each step keeps as many values for"
            " its backward pass as fit, and the head takes the recipe; bytes of recipes"
            " with float weights count a float head."
        ),
        (
            "State is everything that outlives a step, of the whole model with its"
            " tables: weights, copies, errors and Adam's moments."
        ),
        (
            "The loss is that of held-out text after forks of BF16 runs of"
            " `llama-124m` on 32,768 ids (mean ± standard error). Stored weights,"
            " tables and head included, have 8-bit moments and BF16 gradients there;"
            f" float weights have a BF16 head. BF16 itself differs by {noise:.4f} when"
            " it runs again."
        ),
        (
            f"Speeds: {' · '.join(times) or 'none'}. Losses:"
            f" {'none' if forked is None else _of(forked)}."
        ),
        "[Measurements](docs/measurements.md) has every source.",
    ]
    return f"{markdown_table([*titles, 'use it when'], lines, last='left')}\n\n{' '.join(text)}\n"


# JSON of the overview, and its models.
WHOLE = {
    "large": "Llama-3-8B",
    "large-8-layers": "8 layers of Llama-3-8B",
    "large-1b": "Llama-3.2-1B",
    "llama-1b-unrolled": "Llama-3.2-1B, unrolled",
    "large-olmoe": "OLMoE-1B-7B",
}


def overview(results: Path = RESULTS) -> str:
    """Return the table of whole steps, stored against BF16: a line per model."""
    lines = []
    for name, model in WHOLE.items():
        found = read_result(name, results)
        if found is None:
            continue
        stored, bf16 = found.by("recipe")["stored"], found.by("recipe")[BASELINE]
        size = lambda row: (
            f"{row['step_bytes'] / 1e9:.1f}" if "step_bytes" in row else "–"
        )
        # A BF16 run of fewer layers is of another model: this one does not fit.
        whole = bf16.get("layers") == stored.get("layers")
        ours, theirs = stored["median_ms"], bf16["median_ms"]
        times = [
            f"{theirs:,.0f}" if whole else "does not fit",
            f"{ours:,.0f}",
            f"**{theirs / ours:.2f}**" if whole else "–",
        ]
        card = (
            f"{_of(found)},"
            f" {'wall clock' if stored['timer'] == 'wall clock' else 'kernels'}"
        )
        lines.append([model, card, *times, size(bf16) if whole else "–", size(stored)])
    titles = [
        "whole step, 4 × 4096 tokens",
        "one",
        "BF16, ms",
        "stored, ms",
        "BF16's time over stored's",
    ]
    return markdown_table([*titles, "BF16, GB", "stored, GB"], lines) + "\n"


def _card(result: Result) -> str:
    """Return the short name of the card of a result.

    >>> _card(Result("", {"device": "NVIDIA H100 80GB HBM3"}, {}, [], ""))
    'H100'
    """
    return result.header["device"].removeprefix("NVIDIA ").split()[0]


def _of(result: Result) -> str:
    """Return the card of a result, and the releases around its day."""
    return f"{_card(result)}, {release_of(result.header['date'])}"


def _speeds(found: list[Result]) -> Mapping[str, str]:
    """Return the speed over BF16 by recipe; the first result that has a recipe counts,
    as each has its own BF16.
    """
    speeds = {BASELINE: "1"}
    for row in (
        row
        for result in found
        if _card(result) == _card(found[0])
        for row in result.rows
    ):
        speed = (
            row["layer_speed_over_bf16"] if "layers" in row else row["speed_over_bf16"]
        )
        name = {"stored": STORED, STORED: f"{STORED}, float"}.get(
            row["recipe"], row["recipe"]
        )
        speeds.setdefault(name, f"**{speed:.2f}**")
    return speeds


def render(page: str, results: Path = RESULTS) -> str:
    """Return a page with every section rewritten.

    >>> markers = ["<!-- begin: gemm -->", "<!-- end: gemm -->"]
    >>> render(chr(10).join(markers), Path("/nowhere")).splitlines()[1]
    '*No numbers yet: `python -m benchmarks.gemm --measure products --json` writes them.*'
    """
    return SECTION.sub(
        lambda match: match[1] + render_section(match[2], results) + match[3], page
    )


# The file that `diagnose` reads
# -----------------------------------------------------------------------------


def measured(results: Path = RESULTS) -> str:
    """Return the JSON of speeds by device and recipe; a shape is an MLP's tokens, d and
    d_ff, in both passes.
    """
    found: dict[str, dict[str, list[dict[str, object]]]] = {}
    for path in sorted(results.glob(f"*/{train_step.NAME}.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["header"]["platform"] == "cpu":
            continue
        for row in content["rows"]:
            # A variant of a recipe has a name that is not a recipe's.
            if (
                row["part"] == "mlp"
                and row["recipe"] in NAMES
                and row["recipe"] != BASELINE
            ):
                shape, speed = (
                    [*map(int, row["shape"].split("x"))],
                    round(row["speed_over_bf16"], 4),
                )
                of_device = found.setdefault(content["header"]["device"], {})
                of_device.setdefault(row["recipe"], []).append(
                    {"shape": shape, "speed_over_bf16": speed}
                )
    return json.dumps(found, indent=1) + "\n"


# The command
# --------------------------------------------------------------------------------------


def find_differences(root: Path = ROOT, results: Path = RESULTS) -> list[str]:
    """Return the names of sections, plots and files under a root that `report` would
    change.

    Raises:
      FileNotFoundError: a page does not exist.
      ValueError: a page has a section that no benchmark fills.
    """
    found = []
    for page, names in PAGES.items():
        text = (root / page).read_text(encoding="utf-8")
        for match in SECTION.finditer(text):
            if match[0].replace(AGE, "") != (
                match[1] + render_section(match[2], results) + match[3]
            ).replace(AGE, ""):
                found.append(f"{page}: section {match[2]}")
        found += [
            f"{page}: no section {name}"
            for name in names
            if f"<!-- begin: {name} -->" not in text
        ]
    for name in PICTURES:
        digest, picture = digest_of(name, results), root / PLOTS / f"{name}.svg"
        if digest is not None and read_source(picture) != digest:
            found.append(f"plot {picture}")
    path = root / MEASURED
    if not path.exists() or path.read_text(encoding="utf-8") != measured(results):
        found.append(str(path))
    return found


def write(root: Path = ROOT, results: Path = RESULTS) -> None:
    """Rewrite the pages, plots and `measured.json` under a root, and print which
    numbers are of another library.
    """
    for page in PAGES:
        text = (root / page).read_text(encoding="utf-8")
        (root / page).write_text(render(text, results), encoding="utf-8")
    for name in PICTURES:
        save(name, root / PLOTS / f"{name}.svg", results)
    (root / MEASURED).parent.mkdir(parents=True, exist_ok=True)
    (root / MEASURED).write_text(measured(results), encoding="utf-8")
    for found in (read_result(name, results) for name in SECTIONS):
        if found is not None and AGE in found.origin:
            print(f"{found.name}: {found.origin}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing, exit with 1 if something would change",
    )
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
