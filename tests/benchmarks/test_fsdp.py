"""The benchmark of several devices: it checks gradients, splits the state, and compares
with one device.
"""

import argparse
import dataclasses

from benchmarks import fsdp, records
from benchmarks.harness import benchmark
from tests.helpers import parametrize, refused, slow

OPTIONS = {"recipes": None, "alone": None, "parts": None, "devices": None}
OPTIONS |= {"smoke": True, "model": None, "remat": None, "loop": None}
OPTIONS |= {"float_remat": None, "resume": False}


@slow
@parametrize(
    "part, recipe, size",
    [("mlp", "tensorwise", "64"), ("olmoe", "stored", "2 × 32")],
)
def test_a_smoke_run_splits_the_state_over_two_devices(tmp_path, part, recipe, size):
    options = [
        "--smoke",
        "--out",
        str(tmp_path),
        "--parts",
        part,
        "--recipes",
        recipe,
        "--devices",
        "2",
    ]
    rows = benchmark("fsdp").run(options)
    assert [(row.devices, row.recipe) for row in rows] == [
        (n, name) for n in (1, 2) for name in ("bf16", recipe)
    ]
    for alone, both in zip(rows[:2], rows[2:], strict=True):
        # Counters and scales are whole on both.
        assert both.state_bytes < 0.51 * alone.state_bytes
        assert (alone.over_one_gpu, both.tokens) == (1.0, 2 * alone.tokens)
        assert both.timer == "wall clock"
    assert rows[3].worst_snr_db > 10
    text = fsdp.table(records.read_result("fsdp", tmp_path))
    assert f"| 2 | `{recipe}` |" in text
    assert f"{size} tokens per GPU" in text


@slow
def test_a_run_in_slices_compares_kinds_of_updates(tmp_path):
    inside = "stored update=backward"
    shared = ["--smoke", "--out", str(tmp_path), "--parts", "llama", "--devices", "2"]
    first = ["--recipes", "bf16", "--alone", "none"]
    rows = benchmark("fsdp").run([*shared, *first])
    assert [(row.devices, row.recipe, row.over_one_gpu) for row in rows] == [
        (2, "bf16", None)
    ]
    rest = ["--recipes", f"stored,{inside}", "--alone", inside, "--resume"]
    rows = benchmark("fsdp").run([*shared, *rest])
    assert [(row.devices, row.recipe) for row in rows] == [
        (2, "bf16"),
        (1, inside),
        (2, "stored"),
        (2, inside),
    ]
    assert rows[1].speed_over_bf16 is None
    assert [row.over_one_gpu is None for row in rows] == [True, False, True, False]
    assert rows[2].loss == rows[3].loss
    text = fsdp.table(records.read_result("fsdp", tmp_path))
    assert f"| 2 | `{inside}` |" in text


def test_candidates_of_parts_and_devices():
    config = fsdp.configure(argparse.Namespace(**OPTIONS | {"alone": "stored"}))
    several = max(2, *config.devices)
    config = dataclasses.replace(config, devices=(1, several))
    assert fsdp._names("llama", config, 1) == ["stored"]
    assert "stored update=backward" in fsdp._names("llama", config, several)
    assert "stored update=backward" not in fsdp._names("mlp", config, several)
    assert "tensorwise wire=bfloat16" in fsdp._names("mlp", config, several)


def test_more_devices_than_there_are_are_refused():
    options = argparse.Namespace(**OPTIONS | {"devices": 99})
    with refused(r"--devices 99, but this machine has \d+; use 1 to"):
        fsdp.configure(options)
