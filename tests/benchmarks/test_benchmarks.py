"""Benchmarks run, check what they measure, never overwrite committed numbers, and README says what their JSON says."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    common,
    convergence,
    digits,
    gemm,
    memory,
    plots,
    quality,
    quantizers,
    report,
    scan,
    train_step,
    tune,
)
from benchmarks.shapes import GemmShape, dot_bf16, random_operands
from pallas_kernels import tuning

pytestmark = pytest.mark.usefixtures("quick_module")


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    """Optax's Adam raises a float to an integer power, which strict dtype promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(folder of results, rows by benchmark) of one smoke run of everything; `gemm` runs `quantizers`, too."""
    out = tmp_path_factory.mktemp("results")
    options = ["--smoke", "--out", str(out)]
    rows: dict = {module.NAME: module.main(options) for module in (quality, memory)}
    # The other task has a test of its own.
    rows[convergence.NAME] = convergence.main([*options, "--tasks", "gpt"])
    rows[gemm.NAME] = gemm.main([*options, "--measure", "products,quantizers"])
    rows[gemm.SCALED] = gemm.main([*options, "--measure", "scales"])
    train_step.main([*options, "--parts", "mlp", "--recipes", "tcfp12_fast"])
    return out, rows


@pytest.mark.parametrize("name", ["gemm", gemm.SCALED, "quality", "convergence", "memory"])
def test_smoke_rows_are_finite_and_written(smoke, name):
    out, rows = smoke
    content = json.loads((out / common.device_slug() / f"{name}.json").read_text())
    assert content["benchmark"] == name
    assert content["header"]["jax"] == jax.__version__
    assert len(content["rows"]) == len(rows[name]) > 0
    for row in rows[name]:
        numbers = [value for value in dataclasses.asdict(row).values() if isinstance(value, int | float)]
        assert numbers
        assert all(map(math.isfinite, numbers))


def test_quality_finds_what_theory_says(smoke):
    rows = {(row.question, row.name): row for row in smoke[1]["quality"] if row.distribution == "gaussian"}
    assert rows["format", "hi+lo"].snr_db > 63.9
    assert rows["format", "hi+lo"].bits == pytest.approx(16, abs=0.01)
    assert rows["format", "TCFP-12 linear"].bits == pytest.approx(12.5, abs=0.01)
    assert rows["format", "TCFP-12 linear"].snr_db > 45.5
    assert rows["format", "TCFP-12 NF4"].snr_db > rows["format", "TCFP-12 linear"].snr_db
    assert rows["format", "hi+lo, stochastic lo"].snr_db > 60
    assert rows["output", "E4M3 x hi+lo"].snr_db > rows["output", "E4M3 x E4M3"].snr_db + 2
    (still,) = (row for (question, _), row in rows.items() if question == "still weight")
    (moving,) = (row for (question, _), row in rows.items() if question == "moving weight")
    assert still.ratio <= 0.01
    assert moving.snr_db >= 60


def test_quality_refuses_a_format_that_lost_its_residual():
    with pytest.raises(ArithmeticError, match=r"hi\+lo has 31.5 dB"):
        quality.check([quality.Row("format", "hi+lo", "gaussian", 31.5, 1e-3)])


@pytest.mark.parametrize("distribution", quality.DISTRIBUTIONS)
def test_distributions_are_what_they_are_called(distribution):
    x = np.asarray(quality.draw(distribution, (256, 256), 0), np.float64)
    kurtosis = np.mean(x**4) / np.mean(x**2) ** 2
    assert abs(x.mean()) < 0.1
    low, high = {"gaussian": (2.8, 3.2), "uniform": (1.7, 1.9)}.get(distribution, (8, math.inf))
    assert low < kurtosis < high


def test_gemm_does_not_time_a_wrong_product():
    x, w = random_operands(GemmShape(16, 32, 16))
    half = w.astype(jnp.bfloat16)
    right = gemm._baseline(x, half)
    wrong = dataclasses.replace(right, function=lambda x, w: dot_bf16(x, w).at[3, 5].add(1.0))
    with pytest.raises(ArithmeticError, match="not timed"):
        gemm.check_product(wrong, gemm.Config(shapes=()))
    with pytest.raises(ValueError, match="MxKxN"):
        GemmShape.parse("8x16")


def test_quantizers_are_timed_beside_the_products(smoke):
    content = json.loads((smoke[0] / common.device_slug() / "quantizers.json").read_text())
    assert {row["backend"] for row in content["rows"]} == {"xla", "triton"}
    assert all(row["terabytes_per_second"] > 0 for row in content["rows"])
    with pytest.raises(ArithmeticError, match="differs from the reference"):
        quantizers._check("wrong", jnp.ones(3), jnp.ones(3).at[1].set(2))


def test_tuning_writes_what_was_fastest(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PATH", tmp_path / "tuned.json")
    tuning.PATH.write_text('{"another": {}}')
    tuning.load.cache_clear()
    shape = GemmShape(128, 128, 128)
    case = tune._product(shape, 2, "fast", jnp.bfloat16)
    kept = [c for c in case.candidates if c[0] == "xla" or jax.__version_info__ >= (0, 11)][:2]
    entry = tune.time_case(case._replace(candidates=kept))
    for _ in range(2):  # the second takes the place of the first
        tune.write(case.op, entry)
    assert tuning.find(case.op, case.variant, (128, 256, 128)) == entry
    assert set(json.loads(tuning.PATH.read_text())) == {"another", jax.devices()[0].device_kind}
    wrong = ("triton", jax.jit(lambda x, w, lo, scale: jnp.zeros((128, 128), jnp.bfloat16)), None)
    with pytest.raises(ArithmeticError, match="differs from XLA"):
        tune.time_case(case._replace(candidates=[kept[0], wrong]))
    tuning.load.cache_clear()


def test_timing_states_its_timer_and_spread():
    x = jnp.ones((64, 64))
    timing = common.time_jitted(jax.jit(jnp.dot), x, x, rounds=3, calls=2)
    assert 0 < timing.min_ms <= timing.median_ms <= timing.max_ms
    assert timing.timer == ("CUPTI kernel time" if jax.default_backend() == "gpu" else "wall clock")


def test_memory_counts_the_parts(smoke):
    rows = {row.name: row for row in smoke[1]["memory"] if row.kind == "measured"}
    assert rows["BF16"].bytes_per_weight == 12
    for name, per_weight in {"float32": 20, "bfloat16": 18, "float8_e5m2": 17}.items():
        assert rows[f"tcfp12, error {name}"].bytes_per_weight == pytest.approx(per_weight, abs=0.01)
    assert rows["tcfp12, stochastic lo, no error buffer"].errors_bytes == 0
    arithmetic = [row for row in smoke[1]["memory"] if row.kind == "arithmetic" and row.name == "BF16"]
    assert [row.state_bytes for row in arithmetic] == [12 * 10**9 * billions for billions in memory.BILLIONS]


def test_convergence_pairs_runs_by_seed():
    def row(name, seed, loss):
        return convergence.Row("gpt", name, seed, loss, loss, math.exp(loss), loss, None, 1.0, "", [], {})

    runs = [("bf16", 0, 1.0), ("bf16", 1, 2.0), ("tcfp12", 0, 1.1), ("tcfp12", 1, 1.9), ("tcfp12", 2, 9.0)]
    rows = [row(*run) for run in runs]
    summary = next(s for s in convergence.summarize(rows) if s.name == "tcfp12")
    assert summary.seeds == 2  # seed 2 has no BF16 run to pair with
    assert (summary.min_ratio, summary.max_ratio) == pytest.approx((math.exp(-0.1), math.exp(0.1)))
    diverged = convergence.summarize([*rows, row("tensorwise", 0, math.nan)])
    assert next(s for s in diverged if s.name == "tensorwise").mean_ratio == math.inf


def test_convergence_stops_at_its_budget_and_resumes(smoke, capsys, monkeypatch):
    out, rows = smoke
    wanted = ["--smoke", "--out", str(out), "--resume", "--tasks", "gpt"]
    assert convergence.main(wanted) == rows["convergence"]  # all of it was there already
    changed = {**convergence.VARIANTS, "tcfp12": convergence.VARIANTS["tensorwise"]}
    monkeypatch.setattr(convergence, "VARIANTS", changed)
    kept = convergence.main([*wanted, "--budget-seconds", "0"])
    assert {row.name for row in kept} == {"bf16"}  # rows of a recipe that is another one now are not kept
    assert "1 of 1 runs left undone" in capsys.readouterr().out
    with pytest.raises(ValueError, match="drop --resume"):
        convergence.read_rows(out / common.device_slug() / "convergence.json", convergence.Config())
    with pytest.raises(SystemExit):
        convergence.main(["--recipes", "tcfp13"])


def test_digits_are_learned():
    result = digits.run(digits.DigitsConfig(convergence.VARIANTS["tcfp12"], steps=150))
    assert result.heldout_accuracy > 0.9
    again = digits.run(digits.DigitsConfig(convergence.VARIANTS["tcfp12"], steps=150))
    assert np.array_equal(result.train_loss, again.train_loss)


def test_scan_compares_both_forms(tmp_path):
    rows = scan.main(["--smoke", "--out", str(tmp_path)])
    assert [(row.recipe, row.form) for row in rows] == [(r, f) for r in scan.RECIPES for f in ("unrolled", "scan")]
    assert all(row.worst_snr_db > 100 for row in rows if row.form == "scan")  # float32: the same products
    assert "2 Transformer blocks of width 32" in report.render_section("scan", tmp_path)
    with pytest.raises(ArithmeticError, match="scan has 0"):
        scan.check("tcfp12", jnp.ones(4), jnp.zeros(4))


def test_smoke_never_overwrites_committed_numbers():
    with pytest.raises(ValueError, match="overwrite"):
        gemm.main(["--smoke", "--out", str(common.RESULTS)])


def test_report_rewrites_and_checks(smoke, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(f"# {name}\n<!-- begin: {name} -->\n<!-- end: {name} -->" for name in report.TABLES))
    options = ["--readme", str(readme), "--results", str(smoke[0])]
    assert report.main([*options, "--check"]) == 1
    assert report.main(options) == 0
    assert report.main([*options, "--check"]) == 0
    written = readme.read_text()
    for name in plots.DRAWN:
        assert f"docs/plots/{name}.png" in written
    readme.write_text(written.replace("1.00", "1.01", 1))
    (tmp_path / "docs" / "plots" / "gemm.png").unlink()
    assert report.main([*options, "--check"]) == 1
    complaints = capsys.readouterr().err
    assert "section gemm" in complaints
    assert "plot" in complaints
    readme.write_text("<!-- begin: speed -->\n<!-- end: speed -->")
    with pytest.raises(ValueError, match="no benchmark fills"):
        report.main(options)


def test_sections_without_numbers_name_the_command(tmp_path):
    assert "python -m benchmarks.memory --json" in report.render_section("memory", tmp_path)


def test_readme_agrees_with_the_committed_numbers():
    assert report.find_differences(common.ROOT / "README.md") == []
