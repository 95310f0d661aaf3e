"""The benchmark of several devices: it checks gradients, splits the state, and compares
with one device.
"""

import argparse

from benchmarks import fsdp, records
from benchmarks.harness import benchmark
from tests.helpers import parametrize, refused, slow


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


def test_more_devices_than_there_are_are_refused():
    options = argparse.Namespace(recipes=None, parts=None, devices=99, smoke=True)
    with refused(r"--devices 99, but this machine has \d+; use 1 to"):
        fsdp.configure(options)
