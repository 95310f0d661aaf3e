"""Turn the committed JSON into docs/measurements.md and plan.md, README's table, the plots and `measured.json`.

    python -m benchmarks.report            # rewrite what lies between the markers, the plots and measured.json
    python -m benchmarks.report --check    # change nothing; exit with 1 where they differ from the JSON

A section of a page starts with `<!-- begin: NAME -->` and stops at `<!-- end: NAME -->`; NAME is a benchmark's, or
"choose" for README's table. Numbers of an accelerator are preferred to those of a CPU. A section without numbers says
which command writes them. Captions say where the library has changed since; `--check` does not look at that, because
every edit of the library would change it.
"""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import convergence, convergence_tables, large, memory, original, plan, recipes, train_step
from benchmarks.common import AGE, RESULTS, ROOT, Result, markdown_table, read_result, times
from benchmarks.variants import BASELINE, OTHER_BATCHES, RECOMMENDED, RERUN
from tcfp_jax.recipes import recipe

SECTION = re.compile(r"(<!-- begin: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
CHOOSE = "choose"
# Forks and pairs from scratch, each of a model; the first two are README's, in this order of preference.
FORKS = ("convergence-fork-llama-124m", "convergence-fork")
LEAST_BASES = 3
NOISE = {RERUN: "from perturbed weights", OTHER_BATCHES: "on other batches"}
LEARNED = (
    "convergence", "convergence-llama-124m", "convergence-6x384", "convergence-fork-6x384", "convergence-fork-6x640",
    *FORKS,
)  # fmt: skip
BENCHMARKS = (
    "fidelity", "original", "images", "finetune", "monitoring",
    "train_step", "llama", "large", "fsdp", "recipes", "gemm", "scaled_products", "skip_residual", "quantizers",
    "memory", "quality", *LEARNED, "adamw", "scan", "casts", "fp4", "fp4_sizes", "fp4_quality", "plan",
)  # fmt: skip
# Further runs, whose JSON somebody gave a name of its own behind the benchmark's.
RUNS = (
    "fsdp-llama", "llama-1b", "llama-1b-others", "llama-124m-measured", "llama-124m-fp4", "llama-gpt2-measured",
    "fp4-h100",
)  # fmt: skip
PAGES = {
    Path("README.md"): (CHOOSE,),
    Path("docs/measurements.md"): (*(name for name in BENCHMARKS if name != plan.NAME), *RUNS),
    Path("docs/plan.md"): (plan.NAME,),
}
PLOTS, MEASURED = Path("docs/plots"), Path("tcfp_jax/conversion/measured.json")
PICTURE_SOURCE = "Source"  # the PNG's text field that holds the digest of its JSON
# The recipes of README's table, and when to use each.
USE_IT_WHEN = {
    "bf16": "you need the baseline, or layers are too small for FP8 to pay",
    "tcfp12_single": "memory or speed matters, and weights should keep 16 bits: [no float weights](docs/stored.md)",
    "tensorwise": "speed matters most and one FP8 weight is good enough",
    "rowwise": "single rows or channels are much larger than the others",
    "blockwise": "outliers are local, as in DeepSeek-V3's recipe",
    "tcfp12_fast": "weights should keep 16 bits and steps should be faster than BF16's",
    "tcfp12": "weights should keep 16 bits in both passes and BF16's speed is enough",
    "tcfp12_blockwise": "weights should keep 16 bits and outliers are local",
    "mxfp8": "you train for hardware that multiplies OCP MX",
}


def benchmark(name: str) -> Any:
    """The module of a benchmark, or of a further run."""
    return importlib.import_module(f"benchmarks.{name.partition('-')[0]}")


# Sections -------------------------------------------------------------------------------------------------------------


def render_section(name: str, results: Path = RESULTS) -> str:
    """What lies between the markers of a section.

    Raises:
      ValueError: no benchmark has this name.
    """
    if name == CHOOSE:
        return choose(results)
    if name not in (*BENCHMARKS, *RUNS):
        raise ValueError(f"a page has a section {name!r} that no benchmark fills; use {CHOOSE} or one of {BENCHMARKS}")
    result, module = read_result(name, results), benchmark(name)
    command = f"`{module.command_of(name) if hasattr(module, 'command_of') else f'python -m benchmarks.{name} --json'}`"
    if result is None:
        return f"*No numbers yet: {command} writes them.*\n"
    source = command if name in BENCHMARKS else f"`{name}.json`"
    drawn = name in BENCHMARKS and hasattr(module, "plot")
    picture = f"\n![{name}]({PLOTS.name}/{name}.png)\n" if drawn else ""
    return f"{module.table(result)}\n{picture}\n*{source}: {result.origin}.*\n"


def _said_of_forks(forked: Result) -> str:
    """What ² means, and the noise beside it."""
    rows = convergence_tables.rows_of(forked)
    floors = {words: convergence_tables.noise_floor(rows, name) for name, words in NOISE.items()}
    noise = ", ".join(f"{words} within {floor:.4f}" for words, floor in floors.items() if floor)
    return (
        f" ² Of forks of `{forked.config['model']}`'s run in BF16: mean ± standard error of {LEAST_BASES} bases or "
        f"more, or of as many as brackets say{f'; BF16 itself, {noise} of 1' if noise else ''}. "
        f"`{recipes.STORED}` has no float weights there."
    )


def _of_forks(forked: Result) -> dict[str, str]:
    """Ratios of variants, with the number of bases where they are few."""
    found = {s.name: s.pairs for s in convergence_tables.summarize(convergence_tables.rows_of(forked))}
    few = {name: f" ({pairs})" for name, pairs in found.items() if pairs < LEAST_BASES}
    return {name: f"{ratio}²{few.get(name, '')}" for name, ratio in convergence.ratios_of(forked).items()}


def choose(results: Path = RESULTS) -> str:
    """README's table: a line a recipe, with what it costs, what it keeps, and when to use it."""
    # Every recipe of one run: ratios of several runs would compare the baselines, too.
    # Two bases may agree by chance, and their error would say zero.
    candidates = (read_result(name, results) for name in FORKS)
    forked = next((found for found in candidates if found and len(found.distinct("seed")) >= LEAST_BASES), None)
    names = (recipes.NAME, convergence.NAME, recipes.STORED_RUN)
    timed, trained, stored = (read_result(name, results) for name in names)
    of_forks = _of_forks(forked) if forked else {}
    wanted = {name: RECOMMENDED if name == recipes.STORED else name for name in USE_IT_WHEN}
    if set(wanted.values()) <= of_forks.keys():
        trained = None
    ratios = (convergence.ratios_of(trained) if trained else {}) | of_forks
    speeds = {name: _speed(name, timed) for name in USE_IT_WHEN}
    if speeds[recipes.STORED] == "–" and stored is not None:
        speeds[recipes.STORED] = f"{_speed(recipes.STORED, stored)}³"
    lines = []
    for name, when in USE_IT_WHEN.items():
        perplexity = ratios.get(wanted[name], "–")
        state = f"{memory.bytes_per_weight(recipe(name), stored=name == recipes.STORED):.4g}"
        lines.append([f"`{name}`", speeds[name], state, "1" if name == BASELINE else perplexity, when])
    titles = ["recipe", "speed over BF16", "bytes of state per weight", "held-out perplexity over BF16", "use it when"]
    shape = None if timed is None else timed.rows[0]["shape"]
    text = [
        f"Speed is of an optimizer step of an MLP{'' if shape is None else f' at {times(shape)}'} (tokens × d × d_ff), "
        "forward and backward pass, AdamW and quantization of the weights."
        + (" ¹ Forward and backward pass alone." if any("¹" in speed for speed in speeds.values()) else ""),
        "State is the float32 weight, AdamW's moments, the quantized weight and its error."
        + ("" if trained is None else " Perplexity is of a small GPT (mean over seeds ± standard error).")
        + ("" if forked is None else _said_of_forks(forked))
        + (" ³ Of a run of its own, over its own BF16." if any("³" in speed for speed in speeds.values()) else ""),
        "[Measurements](docs/measurements.md) has all numbers.",
    ]
    whole = read_result(large.NAME, results)
    text += [] if whole is None else [large.sentence(whole)]
    plain = ratios.get("tensorwise")
    text += [] if plain is None or plain.startswith("diverged") else [original.WHY]
    origins = " ".join(
        f"`{result.name}`: {result.origin}." for result in (timed, trained, forked, stored, whole) if result is not None
    )
    return f"{markdown_table(titles, lines, last='left')}\n\n{' '.join(text)}\n\n*{origins}*\n"


def _speed(name: str, timed: Result | None) -> str:
    """Of an optimizer step, else of a forward and backward pass, else a dash."""
    found = {} if timed is None else timed.by("part", "recipe")
    name = recipes.STORED_ROW if name == recipes.STORED else name
    for part, mark in ((train_step.OPTIMIZER, ""), ("mlp", "¹")):
        if (part, name) in found:
            return "1" if name == train_step.BASELINE else f"**{found[part, name]['speed_over_bf16']:.2f}**{mark}"
    return "–"


def render(page: str, results: Path = RESULTS) -> str:
    """A page with every section rewritten.

    >>> markers = ["<!-- begin: gemm -->", "<!-- end: gemm -->"]
    >>> render(chr(10).join(markers), Path("/nowhere")).splitlines()[1]
    '*No numbers yet: `python -m benchmarks.gemm --json` writes them.*'
    """
    return SECTION.sub(lambda match: match[1] + render_section(match[2], results) + match[3], page)


# Plots and the file that `diagnose` reads -----------------------------------------------------------------------------


def draw(result: Result, path: Path) -> None:
    """Write the plot of a benchmark that has one, with the digest of its JSON."""
    # Imported here: it costs a second, which tables need not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    benchmark(result.name).plot(figure, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={PICTURE_SOURCE: result.digest})


def read_source(path: Path) -> str | None:
    """The digest that `draw` stored in a PNG; None where there is no such file or field."""
    if not path.exists():
        return None
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        return image.info.get(PICTURE_SOURCE)


def measured(results: Path = RESULTS) -> str:
    """The JSON of speeds by kind of device and recipe, `[m, k, n]` an MLP's tokens, d and d_ff, both passes."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(results.glob(f"*/{train_step.NAME}.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["header"]["platform"] == "cpu":
            continue
        for row in content["rows"]:
            # Variants of a recipe have names that are not recipes'.
            if row["part"] == "mlp" and row["recipe"] in USE_IT_WHEN and row["recipe"] != train_step.BASELINE:
                shape, speed = [*map(int, row["shape"].split("x"))], round(row["speed_over_bf16"], 4)
                of_device = found.setdefault(content["header"]["device"], {})
                of_device.setdefault(row["recipe"], []).append({"shape": shape, "speed_over_bf16": speed})
    return json.dumps(found, indent=1) + "\n"


# The command ----------------------------------------------------------------------------------------------------------


def find_differences(root: Path = ROOT, results: Path = RESULTS) -> list[str]:
    """What `report` would change under a root: names of sections, plots and files.

    Raises:
      FileNotFoundError: there is no such page.
      ValueError: a page has a section that no benchmark fills.
    """
    found = []
    for page, names in PAGES.items():
        text = (root / page).read_text(encoding="utf-8")
        for match in SECTION.finditer(text):
            if match[0].replace(AGE, "") != (match[1] + render_section(match[2], results) + match[3]).replace(AGE, ""):
                found.append(f"{page}: section {match[2]}")
        found += [f"{page}: no section {name}" for name in names if f"<!-- begin: {name} -->" not in text]
    for result in _drawn(results):
        picture = root / PLOTS / f"{result.name}.png"
        if read_source(picture) != result.digest:
            found.append(f"plot {picture}")
    path = root / MEASURED
    if not path.exists() or path.read_text(encoding="utf-8") != measured(results):
        found.append(str(path))
    return found


def write(root: Path = ROOT, results: Path = RESULTS) -> None:
    """Rewrite the pages, plots and `measured.json` under a root, and say which numbers are of another library."""
    for page in PAGES:
        text = (root / page).read_text(encoding="utf-8")
        (root / page).write_text(render(text, results), encoding="utf-8")
    for result in _drawn(results):
        draw(result, root / PLOTS / f"{result.name}.png")
    (root / MEASURED).parent.mkdir(parents=True, exist_ok=True)
    (root / MEASURED).write_text(measured(results), encoding="utf-8")
    for found in (read_result(name, results) for name in BENCHMARKS):
        if found is not None and AGE in found.origin:
            print(f"{found.name}: {found.origin}")


def _drawn(results: Path) -> list[Result]:
    found = [read_result(name, results) for name in BENCHMARKS if hasattr(benchmark(name), "plot")]
    return [result for result in found if result is not None]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 where something would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the pages (default: the repository)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    if not options.check:
        write(options.root, options.results)
        return 0
    differences = find_differences(options.root, options.results)
    for difference in differences:
        print(f"differs from the JSON: {difference}; run python -m benchmarks.report", file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
