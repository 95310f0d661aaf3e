"""Benchmarks run, check what they measure, and never overwrite committed numbers."""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import shlex
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tcfp_jax
from benchmarks import (
    card,
    gemm,
    grouped,
    harness,
    memory,
    products,
    quantizers,
    records,
    report,
    timing,
    tune,
    tune_cases,
)
from benchmarks.harness import benchmark
from benchmarks.products import GemmShape, random_operands
from pallas_kernels import tuning
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.operands import MatmulOptions
from pallas_kernels.tuning import Key
from tcfp_jax.recipes import recipe
from tests.helpers import parametrize, refused, slow, slow_except

DEVICE = jax.devices()[0].device_kind
SMOKES = (
    "gemm",
    "grouped",
    "head",
    "quantizers",
    "memory",
    "dpo",
    "adapters",
    "pi0",
    "folder",
)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The folder of results and a function of a name: the rows of one smoke run of that
    benchmark.
    """
    out = tmp_path_factory.mktemp("results")

    @functools.cache
    def run(name):
        return benchmark(name).run(["--smoke", "--out", str(out)])

    return out, run


@slow_except("gemm")
@parametrize("name", SMOKES)
def test_smoke_rows_are_finite_and_written(smoke, name):
    out, run = smoke
    rows = run(name)
    content = json.loads((out / records.device_slug() / f"{name}.json").read_text())
    assert content["benchmark"] == name
    assert content["header"]["jax"] == jax.__version__
    assert content["header"]["library"] == records.library_digest()
    expected = [dataclasses.asdict(row) for row in rows]
    assert content["rows"] == json.loads(json.dumps(expected)) != []
    for row in content["rows"]:
        assert all(
            math.isfinite(value)
            for value in row.values()
            if isinstance(value, int | float)
        )
    result = records.read_result(name, out)
    titles, rule, *lines = benchmark(name).table(result).split("\n\n")[0].splitlines()
    assert len(lines) > 0
    assert (
        {line.count("|") for line in lines} == {titles.count("|")} == {rule.count("|")}
    )


@parametrize("name", card.RUNS)
def test_every_run_of_a_card_is_a_command(name):
    """The arguments parse, and belong to the benchmark whose table shows the JSON."""
    module, *arguments = shlex.split(card.RUNS[name].arguments)
    assert module == name.partition("-")[0]
    chosen = benchmark(module)
    assert chosen.name == module
    options = chosen.parse([*arguments, "--smoke"])
    assert dataclasses.is_dataclass(chosen.config(options))


def test_a_card_runs_its_share_and_keeps_nothing_of_a_failure(
    tmp_path, monkeypatch, capsys
):
    ran = []

    def run(command, env, **_):
        ran.append(command)
        # Not those of the tests: a baseline is what users have
        assert env["XLA_FLAGS"] == ""
        if "benchmarks.head" in command:
            return subprocess.CompletedProcess(
                command, 1, stdout="", stderr="no memory"
            )
        folder = Path(command[command.index("--out") + 1]) / "a-card"
        folder.mkdir()
        (folder / "any.json").write_text(
            json.dumps({"header": {"library": records.library_digest()}})
        )
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(card, "_device", lambda: ("a-card", 1))
    monkeypatch.setattr(card.subprocess, "run", run)
    monkeypatch.setattr(
        card,
        "RUNS",
        {name: card.RUNS[name] for name in ("head", "adamw", "fsdp", "fp4")},
    )
    assert card.main(["--out", str(tmp_path)]) == 1
    assert [*(path.name for path in sorted(tmp_path.glob("*/*")))] == [
        "adamw.json",
        "fp4.json",
    ]
    assert (
        "no memory" in (printed := capsys.readouterr().out)
        and "head: FAILED" in printed
    )
    ran.clear()
    # one is left, the first share's
    assert card.main(["--out", str(tmp_path), "--share", "2/2"]) == 0
    assert not ran
    assert card.main(["--out", str(tmp_path), "--only", "fp4", "--seconds", "1"]) == 0
    assert not ran
    assert "left for another call" in capsys.readouterr().out


def test_products_on_a_gpu_begin_with_the_cube_of_4096(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = argparse.Namespace(smoke=False, backends=None)
    found = gemm.configure(options)
    assert str(found.shapes[0]) == "4096x4096x4096"
    assert len(found.shapes) == 4


def test_a_wrong_product_is_not_timed(monkeypatch):
    right = products.bf16_product(*random_operands(GemmShape(16, 32, 16)))
    assert products.check_product(right) <= 1
    wrong = dataclasses.replace(
        right, function=lambda *args: right.function(*args).at[3, 5].add(1.0)
    )
    monkeypatch.setattr(
        timing.Repetitions, "interleaved", lambda *_: pytest.fail("timed")
    )
    monkeypatch.setattr(gemm, "_find_products", lambda *_: [right, wrong])
    config = gemm.Config((GemmShape(16, 32, 16),))
    with refused("not timed", ArithmeticError):
        list(gemm.measure(config))
    with refused("MxKxN"):
        GemmShape.parse("8x16")


@slow
def test_quantizers_are_compared_before_they_are_timed(smoke):
    smoke[1]("quantizers")
    content = json.loads(
        (smoke[0] / records.device_slug() / "quantizers.json").read_text()
    )
    assert {row["backend"] for row in content["rows"]} == {"xla", "triton"}
    assert {*quantizers.CASTS} < {row["name"] for row in content["rows"]}
    assert all(row["terabytes_per_second"] > 0 for row in content["rows"])
    with refused("differs from the reference", ArithmeticError):
        quantizers.check("wrong", jnp.ones(3), jnp.ones(3).at[1].set(2))


def test_tuning_writes_what_was_fastest(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PATH", tmp_path / "tuned.json")
    tuning.PATH.write_text('{"another": {}}')
    tuning.load.cache_clear()
    case = tune_cases.product_case(GemmShape(128, 128, 128), products.Form(2, "fast"))
    kept = [
        c for c in case.candidates if c[0] == "xla" or jax.__version_info__ >= (0, 11)
    ][:2]
    entry = tune.time_case(case._replace(candidates=kept))
    for _ in range(2):  # the second takes the place of the first
        tune.write(case.key.op, entry)
    assert tuning.find(DEVICE, case.key, entry.backend) == entry
    assert set(json.loads(tuning.PATH.read_text())) == {"another", DEVICE}
    wrong = (
        "triton",
        jax.jit(lambda *arrays: jnp.zeros((128, 128), jnp.bfloat16)),
        None,
    )
    with refused("differs from xla", ArithmeticError):
        tune.time_case(case._replace(candidates=[kept[0], wrong]))
    tuning.load.cache_clear()


def test_tuning_of_grouped_products_checks_them():
    names = ["matmul", "matmul", "weight_gradient"] * 2
    assert [case.key.op for case in itertools.islice(tune_cases.of_experts(), 6)] == [
        f"grouped_{name}" for name in names
    ]
    shape = grouped.Shape(256, 128, 64, 3)
    options = MatmulOptions(jnp.dtype(jnp.bfloat16), "full")
    for part in grouped.PARTS[:3]:
        case = tune_cases.grouped_case(part, shape, "tcfp12_single_both")
        assert len({way[2] for way in case.candidates}) == len(case.candidates) > 2
        run = {
            "grouped_matmul": reference.DEFINITION.run,
            "grouped_weight_gradient": reference.GRADIENT.run,
        }[case.key.op]
        right = jax.jit(functools.partial(run, options))
        ones = jax.jit(lambda *a, run=run: run(options, *a) + 1)
        ways = [
            ("mosaic", right, case.candidates[0][2]),
            ("mosaic", right, case.candidates[1][2]),
        ]
        assert tune.time_case(case._replace(candidates=ways)).configs["mosaic"][
            "tile_k"
        ] in (64, 128)
        with refused("differs from mosaic", ArithmeticError):
            tune.time_case(case._replace(candidates=[ways[0], ("mosaic", ones, None)]))
        with refused("the product is wrong", ArithmeticError):
            tune.time_case(case._replace(candidates=[("mosaic", ones, None)]))


@slow
def test_the_grid_of_layers_times_what_its_layers_are_made_of(tmp_path, monkeypatch):
    committed = tuning.load()["NVIDIA H200"]
    ops = {
        op: [(e.shape, e.variant) for e in entries] for op, entries in committed.items()
    }
    cases = list(tune_cases.grid())
    assert len({case.key for case in cases}) == len(cases) < 250
    for case in cases:
        ops.setdefault(case.key.op, []).append((case.key.shape, case.key.variant))
    fill = {"backend": "xla", "milliseconds": {"xla": 1.0}, "configs": {}}
    entries = {
        op: [dict(shape=s, variant=v, **fill) for s, v in named]
        for op, named in ops.items()
    }
    monkeypatch.setattr(tuning, "PATH", tmp_path / "tuned.json")
    tuning.PATH.write_text(json.dumps({DEVICE: entries}))
    tuning.load.cache_clear()
    one_scale = ("tensorwise", "tcfp12_single", "tcfp12_fast", "tcfp12", "rowwise")
    sizes = [(s.m, s.k, s.n) for s in tune_cases.GRID]
    asked = [(size, name) for size in sizes for name in ("tensorwise", "rowwise")]
    asked += [(size, "blockwise") for size in sizes if min(size) >= 2048]
    # Shapes of Llama-8B, of llama-124m, and between those of the grid.
    asked += [
        ((8192, 4096, n), name)
        for n in (1024, 4096, 14336)
        for name in (*one_scale, "blockwise")
    ]
    asked += [
        (size, name)
        for size in ((16384, 768, 2048), (8192, 1024, 1024), (4096, 768, 768))
        for name in one_scale
    ]
    for (m, k, n), name in asked:
        assert tcfp_jax.explain((m, k), (k, n), name).speed_over_bf16, (m, k, n, name)
    tuning.load.cache_clear()


def test_the_grid_is_timed_beside_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PATH", tmp_path / "tuned.json")
    tuning.PATH.write_text("{}")
    tuning.load.cache_clear()
    monkeypatch.setattr(tune_cases, "GRID", (GemmShape(64, 32, 48),))
    monkeypatch.setattr(tune_cases, "H200_SHAPES", ())
    assert tune.main(["--cases", "grid", "--only", "dot_general"])
    monkeypatch.setattr(tune_cases, "_ACTIVATIONS", ((64, 32),))
    monkeypatch.setattr(tune_cases, "_LARGE_ACTIVATIONS", ())
    assert len(tune.run(only="row_scale", cases="grid")) == 2
    key = Key("dot_general", "float32", (32, 64, 48))
    assert tuning.find(DEVICE, key, "xla").shape == key.shape
    assert tuning.estimate(DEVICE, key, "xla") > 0
    assert tuning.is_timed(DEVICE)
    tuning.load.cache_clear()


def test_tuning_stops_at_its_budget(monkeypatch, capsys):
    monkeypatch.setattr(tune, "time_case", lambda case: pytest.fail("timed"))
    monkeypatch.setattr(
        tune_cases, "random_operands", lambda *args: pytest.fail("drawn")
    )
    assert tune.main(["--only", "quantize", "--budget-seconds", "-1"]) == []
    assert "stopped before quantize rows bfloat16" in capsys.readouterr().out


def test_timing_states_its_timer_and_spread():
    x = jnp.ones((64, 64))
    candidates = {"dot": (jax.jit(jnp.dot), (x, x))}
    taken = timing.Repetitions(rounds=3, calls=2).interleaved(candidates)["dot"]
    assert 0 < taken.min_ms <= taken.median_ms <= taken.max_ms
    assert taken.timer == (
        "CUPTI kernel time" if jax.default_backend() == "gpu" else "wall clock"
    )


@slow
def test_memory_counts_the_parts(smoke):
    rows = {row.name: row for row in smoke[1]("memory")}
    assert (
        rows["BF16"].bytes_per_weight
        == 12
        == round(rows["BF16"].state_bytes / rows["BF16"].parameters, 2)
    )
    for name, per_weight in {"float32": 20, "bfloat16": 18, "float8_e5m2": 17}.items():
        assert rows[f"tcfp12, error {name}"].bytes_per_weight == pytest.approx(
            per_weight, abs=0.01
        )
    assert rows["tcfp12, stochastic lo, no error buffer"].errors_bytes == 0
    # 16 samples of each kernel are 0.002 bytes a weight of these small ones.
    for name, per_weight in {
        "": 4 + 2 / 128,
        ", both orientations": 5 + 2 / 128,
    }.items():
        assert rows[f"stored, 8-bit moments{name}"].bytes_per_weight == pytest.approx(
            per_weight, abs=3e-3
        )
    assert rows["stored, float32 moments"].bytes_per_weight == pytest.approx(
        10, abs=3e-3
    )
    assert len({row.parameters for row in rows.values()}) == 1


def test_memory_of_a_whole_model_is_counted(tmp_path):
    rows = {
        row.name: row
        for row in benchmark("memory").run(
            ["--model", "llama-tiny", "--out", str(tmp_path)]
        )
    }
    stored = rows[memory.STORED]
    # The table of tokens is stored with the kernels; norms stay float32 with float32
    # moments, 12 bytes a weight.
    assert 4.0 < stored.bytes_per_weight < stored.state_bytes / stored.parameters < 4.05
    assert "nothing was trained" in report.render_section("memory-llama-1b")
    assert list(rows) == ["bf16", "tensorwise", "rowwise", "tcfp12_fast", memory.STORED]


@parametrize(
    "command, message",
    [
        ("gemm --backends none", "error: --backends has ['none'], which are unknown"),
        ("convergence --protocol fork --seeds 0", "0 is not an integer of at least 1"),
        ("convergence --protocol fork --seeds -5", "argument --seeds: -5 is not"),
    ],
)
def test_a_program_says_in_one_line_what_it_cannot(
    command, message, monkeypatch, capsys
):
    monkeypatch.setattr(harness, "take_memory_as_needed", lambda: None)
    name, *arguments = command.split()
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as status:
        benchmark(name).command()
    assert status.value.code == 2
    assert message in capsys.readouterr().err


@parametrize("name", ["fsdp", "llama", "train_step"])
def test_a_smoke_run_tries_few_candidates_unless_named(name):
    chosen = benchmark(name)
    options = vars(chosen.parse(["--smoke"]))
    assert {option: options[option] for option in chosen.smoke} == chosen.smoke
    option = next(iter(chosen.smoke))
    named = chosen.parse(["--smoke", f"--{option}", "mine"])
    assert getattr(named, option) == "mine"


def test_smoke_never_overwrites_committed_numbers():
    with refused("overwrite"):
        benchmark("gemm").run(["--smoke", "--out", str(records.RESULTS)])


def test_a_wrong_grouped_product_is_not_timed():
    shape = grouped.SMOKE["smoke"]
    held = grouped.read(recipe("bf16"), *grouped.draw(shape))
    for part in ("forward", "wgrad"):
        function, pair = grouped.product_of(part, held)
        sizes = grouped.group_sizes(shape, "odd")
        assert (
            0 < grouped.check(part, function, pair, sizes, grouped.BF16_SUM_BOUND) <= 1
        )

        def shifted(*operands, function=function):
            return function(*operands[:2], jnp.roll(operands[2], 1))

        with refused(f"{part}: the error is", ArithmeticError):
            grouped.check(part, shifted, pair, sizes, grouped.BF16_SUM_BOUND)
