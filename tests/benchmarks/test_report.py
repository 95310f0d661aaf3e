"""Pages agree with the JSON and say how old it is."""

import dataclasses
import doctest
import importlib
import json
import re
import shutil

import pytest

from benchmarks import drawing, gemm, original, records, report, train_step
from tests.helpers import parametrize, refused

HEADER = {
    "device": "Chip",
    "platform": "gpu",
    "jax": "1",
    "python": "3",
    "commit": "abc",
    "date": "2026-01-01",
}
SECTIONS = ("train_step", "train_step-recipes")  # sections of the pages in these tests


def step(part, recipe, speed, shape="32x32x48"):
    timing = {
        "median_ms": 1.0,
        "min_ms": 1.0,
        "max_ms": 1.0,
        "samples": 1,
        "timer": "wall clock",
    }
    more = {"compile_seconds": 1.0, "worst_snr_db": 20.0}
    return train_step.Row(
        **timing, part=part, shape=shape, recipe=recipe, speed_over_bf16=speed, **more
    )


def write(root, name, rows, library="0", device="chip"):
    path = root / "results" / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {**HEADER, "library": library, "device": device}
    rows = [dataclasses.asdict(row) for row in rows]
    path.write_text(
        json.dumps({"benchmark": name, "header": header, "config": {}, "rows": rows})
    )


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with both pages and two results, whose report is written; its
    options.
    """
    monkeypatch.setattr(report, "SECTIONS", SECTIONS)
    picture = drawing.Picture(
        "a plot", ("train_step",), lambda figure, result: figure.add_subplot()
    )
    monkeypatch.setattr(report, "PICTURES", {"train_step": picture})
    monkeypatch.setattr(drawing, "PICTURES", {"train_step": picture})
    pages = {
        page: names if names == ("choose",) else ("overview", *SECTIONS)
        for page, names in report.PAGES.items()
    }
    monkeypatch.setattr(report, "PAGES", pages)
    for page, names in pages.items():
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(
            "\n".join(f"# {n}\n<!-- begin: {n} -->\n<!-- end: {n} -->" for n in names)
        )
    steps = [
        step(part, name, 1.0)
        for part in ("mlp", "optimizer step")
        for name in ("bf16", "tcfp12")
    ]
    write(
        tmp_path,
        "train_step",
        [
            *steps,
            step("mlp", "tcfp12 wgrad fp8", 1.5),
            step("mlp", "tcfp12_fast", 1.25),
        ],
    )
    write(tmp_path, "train_step-recipes", [*steps, step("mlp", "rowwise", 1.75)])
    assert report.main(options(tmp_path)) == 0
    return tmp_path


def options(root, *more):
    return ["--root", str(root), "--results", str(root / "results"), *more]


def test_a_fresh_report_passes_its_check_and_an_edit_does_not(root, capsys):
    assert report.main(options(root, "--check")) == 0
    page = root / "docs" / "measurements.md"
    assert "![a plot](plots/train_step.svg)" in page.read_text()
    page.write_text(page.read_text().replace("**1.00**", "**1.01**", 1))
    (root / "docs" / "plots" / "train_step.svg").unlink()
    (root / report.MEASURED).write_text("{}")
    assert report.main(options(root, "--check")) == 1
    complaints = capsys.readouterr().err
    for complaint in ("section train_step", "train_step.svg", "measured.json"):
        assert complaint in complaints


def test_a_page_has_every_section_and_no_other(root, capsys):
    page = root / "docs" / "measurements.md"
    page.write_text(page.read_text().replace("recipes -->", "speeds -->"))
    with refused("no benchmark fills"):
        report.main(options(root))
    page.write_text("nothing")
    assert report.main(options(root, "--check")) == 1
    assert "no section train_step-recipes" in capsys.readouterr().err


def test_captions_say_how_old_numbers_are_and_no_check_asks(root, capsys):
    page = root / "docs" / "measurements.md"
    assert page.read_text().count(records.AGE) == 2
    # The same numbers, measured with the library of today.
    rows = [step("mlp", "bf16", 1.0), step("mlp", "rowwise", 1.75)]
    write(root, "train_step-recipes", rows, library=records.library_digest())
    assert report.main(options(root)) == 0
    assert page.read_text().count(records.AGE) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "train_step"
    ]
    page.write_text(page.read_text().replace(records.AGE, ""))
    assert report.main(options(root, "--check")) == 0


@parametrize("page", report.PAGES, ids=str)
def test_a_page_names_the_card_of_every_number(page):
    text = (records.ROOT / page).read_text()
    sections = report.SECTION.finditer(text)
    nameless = [
        section[2]
        for section in sections
        if not re.search(r"\b(H100|H200|cpu)\b|No numbers yet", section[0])
    ]
    assert report.SECTION.search(text)
    assert nameless == []


def test_sentences_repeat_numbers_of_the_tables():
    """Milliseconds, gigabytes and ratios that a person wrote stand in a table that a
    JSON fills.
    """
    page = (records.ROOT / "docs" / "measurements.md").read_text()
    tables = "".join([report.overview(), *report.full()])
    there = {*re.findall(r"\d[\d,]*(?:\.\d+)?", tables)}
    bullets = page.split("<!-- end: overview -->")[1].split(
        "`python -m benchmarks.report`"
    )[0]
    (headline,) = re.findall(
        r"^\*\*All of .*", (records.ROOT / "README.md").read_text(), re.MULTILINE
    )
    for text in (bullets, headline):
        found = re.findall(r"\b(\d[\d,]*(?:\.\d+)?)(?: ms| GB\b)|\b(\d\.\d\d)\b", text)
        assert found
        wrong = [number for number in map("".join, found) if number not in there]
        assert not wrong, f"{wrong} of the text stand in no table"


def test_the_digest_is_that_of_the_libraries(tmp_path):
    for name in (*records.LIBRARIES, "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("1")
    before = records.library_digest(tmp_path)
    (tmp_path / "benchmarks" / "a.py").write_text("2")
    (tmp_path / "tcfp_jax" / "measured.json").write_text("{}")
    assert records.library_digest(tmp_path) == before
    (tmp_path / "pallas_kernels" / "tuned.json").write_text("{}")
    tuned = records.library_digest(tmp_path)
    (tmp_path / "tcfp_jax" / "a.py").write_text("2")
    assert len({before, tuned, records.library_digest(tmp_path)}) == 3


def test_the_table_to_choose_by_is_of_whole_models():
    lines = [line.split("|")[1:-1] for line in report.choose().splitlines()[2:7]]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [line[0] for line in cells] == [
        "`bf16`",
        "`tcfp12_single`, stored",
        "`tensorwise`",
        "`rowwise`",
        "`tcfp12_fast`",
    ]
    assert cells[0][1:4] == ["1", "12", "0"]
    whole = records.read_result("large-8-layers").by("recipe")["stored"]
    speedup = f"**{whole['layer_speed_over_bf16']:.2f}**"
    # All of the state, with embeddings and heads.
    assert cells[1][1:3] == [speedup, "4.02"]


def test_every_table_with_numbers_is_printed(capsys):
    assert report.main(["--full"]) == 0
    printed = re.findall(r"^## (\S+)$", capsys.readouterr().out, re.MULTILINE)
    measured = {name for name in report.SECTIONS if records.read_result(name)}
    assert set(printed) == measured
    assert set(report.DECIDING) < measured


def test_the_originals_table_has_the_fastest_product_and_bytes_of_steps(tmp_path):
    clock = {"min_ms": 1.0, "max_ms": 1.0, "samples": 1, "timer": "wall clock"}

    def product(kind, milliseconds, speed, shape=str(gemm.CUBE)):
        more = {"tflops": 1.0, "part_of_peak": None, "bound_used": 0.5}
        return gemm.Row(
            **clock,
            **more,
            median_ms=milliseconds,
            shape=shape,
            kind=kind,
            accumulation="fast",
            backend="xla",
            speed_over_bf16=speed,
        )

    products = [
        product("bf16", 2.0, 1.0),
        product("fp8 dual", 1.0, 2.0),
        product("fp8 dual", 4.0, 0.5),
        product("fp8 single", 0.25, 8.0, shape="1x1x1"),
    ]
    write(tmp_path, "gemm", products)
    steps = [
        dataclasses.replace(
            step("optimizer step", name, 1.5), state_bytes=2 * 10**9, step_bytes=10**10
        )
        for name in ("bf16", train_step.STOCHASTIC)
    ]
    write(tmp_path, "train_step-original", steps)
    lines = original.table(tmp_path / "results").splitlines()[2:5]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells == [
        ["one product, 4096 × 4096 × 4096", "chip"]
        + ["2.000 · **1.00**", "1.000 · **2.00**", "–", "–"],
        ["MLP 32 → 48 → 32, a step", "chip"]
        + ["1.000 · **1.50**", "–", "1.000 · **1.50**", "–"],
        ["MLP 32 → 48 → 32, memory of the step", "chip"]
        + ["2.000 · 10.000", "–", "2.000 · 10.000", "–"],
    ]


def test_the_overview_compares_whole_models_alone():
    lines = [line.split("|")[1:-1] for line in report.overview().splitlines()[2:]]
    assert len(lines) == len(report.WHOLE)
    for cells, name in zip(lines, report.WHOLE, strict=True):
        rows = records.read_result(name).by("recipe")
        same = rows["bf16"].get("layers") == rows["stored"].get("layers")
        assert ("does not fit" in cells[2]) != same
        assert ("**" in cells[4]) == same
        assert cells[3].strip() == f"{rows['stored']['median_ms']:,.0f}"


def test_recipes_at_one_shape_are_lines(root):
    rows = [
        step("mlp", "rowwise", 1.75),
        step("optimizer step", "rowwise", 1.5),
        step("optimizer step", "stored", 2.0),
    ]
    write(root, "train_step-recipes", rows)
    page = report.render_section("train_step-recipes", root / "results")
    assert "| `rowwise` | 1.000 ms · **1.75** | 1.000 ms · **1.50** |" in page
    assert "| `stored` | – | 1.000 ms · **2.00** |" in page


def test_diagnose_gets_the_recipes_of_accelerators(root):
    write(root, "train_step", [step("mlp", "tcfp12", 0.1)], device="cpu")
    path = root / "results" / "cpu" / "train_step.json"
    path.write_text(path.read_text().replace('"platform": "gpu"', '"platform": "cpu"'))
    assert json.loads(report.measured(root / "results")) == {
        "chip": {
            "tcfp12": [{"shape": [32, 32, 48], "speed_over_bf16": 1.0}],
            "tcfp12_fast": [{"shape": [32, 32, 48], "speed_over_bf16": 1.25}],
        }
    }


def test_sections_without_numbers_name_the_command(tmp_path):
    assert "python -m benchmarks.memory --json" in report.render_section(
        "memory", tmp_path
    )
    assert "| – |" in report.choose(tmp_path)


def test_the_pages_agree_with_the_committed_numbers():
    assert report.find_differences() == []


@parametrize(
    "name",
    [
        "records",
        "harness",
        "memory",
        "report",
        "products",
        "quantizers",
        "llama",
        "forks",
        "grouped",
        "timing",
        "convergence",
        "convergence_tables",
        "variants",
    ],
)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(f"benchmarks.{name}")).failed == 0


def test_numbers_of_an_accelerator_are_preferred(root):
    chip = root / "results" / "chip" / "train_step-recipes.json"
    shutil.copytree(chip.parent, root / "results" / "cpu")
    (root / "results" / "cpu" / "train_step-recipes.json").write_text(
        chip.read_text().replace('"chip"', '"cpu"')
    )
    assert (
        records.read_result("train_step-recipes", root / "results").header["device"]
        == "chip"
    )
