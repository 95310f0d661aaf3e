"""Forks continue their base, are compared with BF16's fork of the same base, and resume."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from benchmarks import common, fork_training, forks, report
from benchmarks.fork_training import BASELINE, RERUN, VARIANTS
from models.gpt import GPTConfig
from models.training import init
from tcfp_jax.optim import moments as narrow

NAMES = (BASELINE, RERUN, "tcfp12_fast", "stored", "stored_eco")


@pytest.fixture(scope="module", autouse=True)
def standard_promotion_of_threads():
    """Threads that compile do not see the context in which the tests of benchmarks run."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def command(out, *more, names=NAMES):
    return ["--smoke", "--out", str(out), "--forks", ",".join(names), *more]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(folder of results, rows) of one smoke run."""
    out = tmp_path_factory.mktemp("results")
    return out, forks.main(command(out))


def test_every_fork_is_a_row(smoke):
    out, rows = smoke
    assert [row.name for row in rows] == list(NAMES)
    assert len({row.base for row in rows}) == 1
    assert [round(row.bytes_per_weight, 2) for row in rows] == [12, 12, 20, 4.02, 10]
    losses = [row.heldout_loss for row in rows]
    assert all(math.isfinite(loss) for loss in losses) and len(set(losses)) == len(losses)
    by_name = {row.name: row for row in rows}
    assert abs(by_name[RERUN].heldout_loss - by_name[BASELINE].heldout_loss) < 1e-3
    assert by_name["stored"].worst_leaf_db > 60 and by_name["stored"].worst_leaf.startswith("block_0/")
    assert by_name[BASELINE].worst_leaf is None
    assert by_name[BASELINE].heldout_loss_bf16 == by_name[BASELINE].heldout_loss
    content = json.loads((out / common.device_slug() / "forks.json").read_text())
    assert content["rows"] == [dataclasses.asdict(row) for row in rows]
    page = report.render_section("forks", out)
    assert "hi + lo alone" in page and "| 4.02 |" in page and "4 steps in BF16" in page


def test_forks_resume_and_stop_at_their_budget(smoke, capsys, monkeypatch):
    out, rows = smoke
    assert forks.main(command(out, "--resume")) == rows  # all of it was there already
    changed = {**VARIANTS, RERUN: dataclasses.replace(VARIANTS[RERUN], recipe=tcfp_jax.recipe("tensorwise"))}
    for module in (forks, fork_training):
        monkeypatch.setattr(module, "VARIANTS", changed)
    kept = forks.main(command(out, "--resume", "--budget-seconds", "0"))
    # The other one is another one now.
    assert [row.name for row in kept] == [BASELINE, "tcfp12_fast", "stored", "stored_eco"]
    assert f"1 forks left undone: {RERUN} of seed 0" in capsys.readouterr().out
    path = out / common.device_slug() / "forks.json"
    with pytest.raises(ValueError, match="drop --resume"):
        forks.read_rows(path, forks.Config(GPTConfig(1, 32, 1, 32)))
    assert forks.read_rows(out / "nothing.json", forks.Config(GPTConfig(1, 32, 1, 32))) == []


def test_a_base_that_is_gone_is_trained_again_with_the_baseline(smoke, tmp_path, monkeypatch):
    out, rows = smoke
    path = tmp_path / common.device_slug() / "forks.json"
    path.parent.mkdir()
    content = json.loads((out / common.device_slug() / "forks.json").read_text())
    content["rows"] = [{**dataclasses.asdict(row), "base": "another"} for row in rows if row.name != NAMES[-1]]
    path.write_text(json.dumps(content))

    def fail(config, name, *rest):
        if name == NAMES[-1]:
            raise ArithmeticError("not today")
        return right(config, name, *rest)

    right = forks.measure_fork
    monkeypatch.setattr(forks, "measure_fork", fail)
    with pytest.raises(RuntimeError, match=f"1 forks failed, see above: {NAMES[-1]} of seed 0"):
        forks.main(command(tmp_path, "--resume"))
    written = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["base"] == "another") for row in written] == [
        *((name, True) for name in NAMES[:-1]), (BASELINE, False),
    ]  # fmt: skip
    assert written[-1]["heldout_loss"] == rows[0].heldout_loss


def test_ratios_are_of_one_base():
    def row(name, seed, base, loss):
        return forks.Row(name, seed, base, loss, loss, loss, 12.0, None, None, 1.0, 1.0, "", "")

    runs = [(BASELINE, 0, "a", 1.0), (BASELINE, 0, "b", 2.0), ("stored", 0, "a", 1.1), ("stored", 1, "b", 1.9)]
    rows = [row(*run) for run in runs]
    summary = next(s for s in forks.summarize([*rows, row("stored", 2, "c", 9.0)]) if s.name == "stored")
    assert summary.bases == 2  # of c there is no baseline
    assert (summary.min_ratio, summary.max_ratio) == pytest.approx((math.exp(-0.1), math.exp(0.1)))
    diverged = forks.summarize([*rows, row(RERUN, 0, "a", math.nan)])
    assert next(s for s in diverged if s.name == RERUN).mean_ratio == math.inf


@pytest.mark.parametrize("name", ["stored", "stored_bfloat16_moments", "stored_float32_moments"])
def test_a_fork_has_the_moments_of_its_base(name):
    config = fork_training.Config(GPTConfig(layers=1, width=128, heads=2, context=8), sequence=8)
    base = jax.eval_shape(lambda: init(fork_training.train_config(config, VARIANTS[BASELINE])))
    rng = np.random.default_rng(0)
    base = jax.tree.map(lambda leaf: jnp.asarray(np.square(rng.standard_normal(leaf.shape)).astype(leaf.dtype)), base)
    state, noise = fork_training.start_fork(config, name)(base, jax.random.key(0))
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)
    (adam,) = filter(is_adam, jax.tree.leaves(base.opt_state, is_leaf=is_adam))
    assert state.opt_state.count == adam.count
    exact = name == "stored_float32_moments"
    names, after = ["block_0", "qkv", "kernel"], state.opt_state
    for ours, scales, theirs, eight in (
        (after.mu, after.mu_scale, adam.mu, "float8_e4m3fn"),
        (after.nu, after.nu_scale, adam.nu, "ue5m3"),
    ):
        kept, right = ours["block_0"]["qkv"]["kernel"], theirs["block_0"]["qkv"]["kernel"]
        form = {"stored": eight, "stored_float32_moments": "float32"}.get(name, "bfloat16")
        value = narrow.decode(form, narrow.found(form, kept, names, scales))
        assert jnp.allclose(value, right, rtol=0 if exact else 0.13, atol=0 if exact else 0.05)
        assert jnp.array_equal(value, right) == exact
        assert jnp.array_equal(ours["embedding"]["embedding"], theirs["embedding"]["embedding"])
    assert len(noise) == 4 and all(float(part) < 1e-6 for part in noise.values())


def test_the_rate_rises_stays_and_falls_to_zero():
    config = fork_training.Config(GPTConfig(1, 32, 1, 32), warmup_steps=10, base_steps=100, fork_steps=100)
    rate = fork_training.schedule_of(config)
    rates = [float(rate(step)) / config.learning_rate for step in (0, 5, 10, 99, 100, 150, 199, 200)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0.01, 0], abs=1e-6)
    with pytest.raises(ValueError, match="base_steps=150 is not a multiple of steps_per_call=100"):
        fork_training.Config(GPTConfig(1, 32, 1, 32), base_steps=150)


def test_options_name_what_is_wrong():
    wrong = {"tcfp13": ["--forks", "tcfp13"], "must contain bf16": ["--forks", "stored"], "needs": ["--resume"]}
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            forks.main(arguments)
