"""The benchmark of training steps: rows of every part and recipe, its JSON, and no time
for a wrong step.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import records, timing, train_step
from benchmarks.harness import benchmark
from benchmarks.products import GemmShape
from tcfp_jax.products import fp8_weights
from tests.helpers import parametrize, refused, slow, slow_except

SHAPE = GemmShape(32, 32, 48)
# One recipe, what differs from it in the optimizer's state, and stored weights; the
# wrong product below is of another.
VARIANTS = {
    n: made
    for n, made in train_step.VARIANTS.items()
    if n in ("bf16", "stored") or "fast" in n
}


@slow
def test_every_part_has_every_recipe_and_json_is_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(train_step, "USUAL", tuple(VARIANTS))
    asked = [
        "--recipes",
        ",".join(train_step.USUAL),
        "--parts",
        ",".join(train_step.PARTS),
    ]
    rows = benchmark("train_step").run(["--smoke", "--out", str(tmp_path), *asked])
    gradients = [name for name in VARIANTS if name not in train_step.KEPT]
    expected = [(part, name) for part in train_step.PARTS[:-1] for name in gradients]
    expected += [(train_step.PARTS[-1], name) for name in VARIANTS]
    assert [(r.part, r.recipe) for r in rows] == expected
    for row in rows:
        assert row.shape == "64x32x64"
        assert 0 < row.min_ms <= row.median_ms <= row.max_ms
        assert row.compile_seconds > 0
        if row.recipe == "bf16":
            assert row.speed_over_bf16 == 1
            assert row.worst_snr_db is None
        else:
            assert row.speed_over_bf16 > 0
            assert row.worst_snr_db >= train_step.LEAST_SNR_DB
    content = json.loads(
        (tmp_path / records.device_slug() / "train_step.json").read_text()
    )
    assert content["benchmark"] == "train_step"
    assert content["rows"] == [dataclasses.asdict(row) for row in rows]
    assert content["config"]["recipes"] == list(VARIANTS)


@slow_except("optimizer step")
@parametrize("part", train_step.PARTS)
def test_a_wrong_product_is_not_timed(part, monkeypatch):
    right = fp8_weights.multiply
    monkeypatch.setattr(
        fp8_weights, "multiply", lambda *args, **options: right(*args, **options) * 1.5
    )
    monkeypatch.setattr(
        timing.Repetitions, "interleaved", lambda *_: pytest.fail("timed")
    )
    config = train_step.Config((SHAPE,), recipes=("bf16", "tcfp12"), parts=(part,))
    with refused(r"tcfp12: \w.* dB .* not timed", ArithmeticError):
        list(train_step.measure(config))


def test_outputs_must_be_finite():
    right = {"dx": jnp.arange(4.0), "dparams": {"kernel": jnp.ones((2, 2))}}
    assert train_step.check_outputs("x", right, right) == float("inf")
    wrong = {**right, "dparams": {"kernel": jnp.full((2, 2), jnp.nan)}}
    with refused("tensorwise: dparams/kernel", ArithmeticError):
        train_step.check_outputs("tensorwise", right, wrong)


def test_an_optimizer_step_continues_from_the_last_one():
    step = train_step.make_optimizer_step(SHAPE, train_step.VARIANTS["tcfp12"]).function
    assert isinstance(step, jax.stages.Wrapped)  # else a profiler would trace it
    before = step.state[0]["dense_0"]["kernel"]
    losses = [float(step()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert before.is_deleted()  # donated


def test_stored_weights_are_all_that_is_kept_of_them():
    shape = GemmShape(16, 128, 256)
    name = "stored both"
    step = train_step.make_optimizer_step(
        shape, train_step.VARIANTS[name], kept=train_step.KEPT[name]
    )
    losses = [float(step.function()) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    leaves = jax.tree.leaves(step.function.state)
    assert sum(leaf.nbytes for leaf in leaves) / (2 * 128 * 256) == pytest.approx(
        5 + 2 / 128, abs=0.01
    )
    assert not any(leaf.dtype == jnp.float32 and leaf.size >= 128 for leaf in leaves)


def test_options(monkeypatch):
    asked = []
    chosen = dataclasses.replace(
        train_step.BENCHMARK, rows=lambda config: asked.append(config) or []
    )
    options = [
        "--parts",
        "mlp, optimizer step",
        "--shapes",
        str(SHAPE),
        "--recipes",
        "tcfp12_fast",
    ]
    assert chosen.run(options) == []
    assert asked == [
        train_step.Config((SHAPE,), ("bf16", "tcfp12_fast"), ("mlp", "optimizer step"))
    ]
    for wrong in (["--recipes", "tcfp13"], ["--parts", "layer"], ["--shapes", "8x16"]):
        with refused(wrong[1]):
            chosen.run(wrong)
    assert set(train_step.USUAL) < set(train_step.VARIANTS)
