"""The plan's arithmetic: bytes of small models by hand, links and overlap by hand, and what the page rests on."""

import dataclasses

import pytest

from benchmarks import common, plan
from benchmarks.plan import Computing, Counted, Machine
from models.llama import LlamaConfig

SMALL = LlamaConfig(layers=3, width=32, heads=4, kv_heads=2, hidden=48, context=8, head="untied")
KERNELS = 32 * (2 * 32 + 2 * 16) + 3 * 32 * 48  # query, output, key, value; gate, up, down
DOWN, NORMS, SHARED = 32 * 48, 2 * 32, 2 * 256 * 32 + 32


@pytest.mark.parametrize(
    ("way", "forward", "backward"),
    [
        ("bf16", 2 * KERNELS, 2 * KERNELS),
        ("tensorwise", KERNELS, KERNELS),
        ("tcfp12_fast", 2 * KERNELS, 2 * (KERNELS - DOWN) + DOWN),
        ("stored", KERNELS, KERNELS),
    ],
)
def test_bytes_are_those_of_the_shapes(way, forward, backward):
    counted = plan.count(SMALL, way, 8)
    assert counted.weights == 3 * (KERNELS + NORMS)
    assert (counted.forward, counted.backward) == (3 * (forward + 2 * NORMS), 3 * (backward + 2 * NORMS))
    assert (counted.shared_weights, counted.shared) == (SHARED, 2 * SHARED)
    assert counted.kept == 3 * 8 * 32 * 2
    floats = 12 * (3 * NORMS + SHARED)  # what no recipe stores: float32 with two moments
    if way == "bf16":
        assert counted.state == floats + 12 * 3 * KERNELS + 4  # and the count of steps
    if way == "stored":
        assert 0 < counted.state - floats - 4 * 3 * KERNELS < 0.05 * counted.state  # scales, seeds and counts


def test_a_block_keeps_activations_and_no_weights():
    once, twice = (plan.count(SMALL, "bf16", positions).block for positions in (8, 16))
    assert once >= 8 * 2 * (6 * 32 + 3 * 48)
    assert twice == 2 * once


def test_computing_is_operations_over_rates():
    machine = Machine(memory_speed=1e3)
    rates = {"bf16": 1e6, "tensorwise": 2e6}
    config = plan.Config({"small": SMALL}, (1, 8), (8,), (50.0,), machine, rates, "by hand", ())
    counted = Counted(weights=60, state=1000, forward=0, backward=0, shared=0, shared_weights=40, kept=0, block=0)
    found = plan.computing(config, SMALL, "tensorwise", counted, shards=2)
    layer = 2 * 8 * KERNELS + 2 * 8 * 8 * 32
    assert found.forward == pytest.approx(layer / 2e6)
    assert found.backward == pytest.approx(3 * layer / 2e6)
    assert found.rest == pytest.approx(4 * (2 * 8 * 32 * 256) / 1e6 + (2 * 1000 + 2 * 100) / 2 / 1e3)
    assert found.step(3) == pytest.approx(3 * 4 * found.forward + found.rest)


@pytest.mark.parametrize(
    ("computed", "exposed"),
    [
        (Computing(10.0, 10.0, 100.0), 1 + 3 + 0.5),  # the first gather, the last scatter and sum
        (Computing(0.25, 10.0, 100.0), 2 * 0.75 + 4.5),  # the forward pass waits in both layers
        (Computing(10.0, 1.0, 100.0), 2 * (2 + 3 - 1) + 4.5),  # the backward pass does
        (Computing(0.0, 0.0, 0.0), 2 * (1 + 2 + 3 + 0.5) + 3 * 4),  # never more than all there is
    ],
)
def test_what_computing_does_not_hide_is_exposed(computed, exposed):
    model = dataclasses.replace(SMALL, layers=2)
    counted = Counted(weights=3, state=0, forward=2, backward=4, shared=4, shared_weights=2, kept=0, block=0)
    every, found = plan.wire_seconds(model, counted, computed, lambda size: size, lambda size: 0.5 if size == 3 else 0)
    assert every == 2 * (1 + 2 + 3 + 0.5) + 3 * 4
    assert found == pytest.approx(exposed)


def test_memory_by_hand():
    config = plan.Config({}, (2, 8), (8,), (50.0,), Machine(), {}, "by hand", ())
    counted = Counted(weights=30, state=400, forward=60, backward=60, shared=8, shared_weights=10, kept=5, block=7)
    logits = 6 * 2048 * 256
    assert plan.memory_bytes(config, SMALL, counted, shards=4) == (400 + 80) / 4 + 180 / 3 + 8 + 2 * 12 + logits


def test_rows_choose_what_fits_and_compare_with_bf16(tmp_path):
    rows = plan.main(["--smoke", "--out", str(tmp_path)])
    assert {row.layout for row in rows} <= {"all", "host"}
    assert {row.gpus for row in rows} == {8, 16} and all(row.fits for row in rows)
    for row in rows:
        assert row.step_ms == pytest.approx(row.compute_ms + row.exposed_ms)
        assert 0 < row.exposed_ms <= row.wire_ms
        assert (row.speed_over_bf16 == 1) == (row.way == "bf16")
    text = plan.table(common.read_result("plan", tmp_path))
    assert text.count("\n| ") == 1 + len(rows)
    config = plan.configure(plan_options())
    tight = dataclasses.replace(config, machine=Machine(memory=1.0))
    assert not any(row.fits or row.speed_over_bf16 for row in plan.measure(tight))


def plan_options():
    return common._parse(plan, ["--smoke"])


def test_the_page_rests_on_the_measurements_that_are_committed():
    page, blocks = common.read_result("plan"), common.read_result("llama")
    assert page.config["rates"] == plan.rates_of(blocks)
    for _, computed, measured in page.config["checks"]:
        assert computed == pytest.approx(measured, rel=0.1)
    blocks.rows.clear()
    with pytest.raises(ValueError, match=r"no blocks of .*tensorwise.*measure them"):
        plan.rates_of(blocks)
