"""Runs continue their base, are compared with BF16's run from the same base, stop at their budget, and resume."""

import dataclasses
import itertools
import json
import math
import statistics
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import common, convergence, convergence_tables, fork_runs, fork_training, report, variants
from benchmarks.convergence_tables import Row
from benchmarks.fork_training import Config
from benchmarks.variants import BASELINE, GROUPS, OTHER_BATCHES, RERUN, VARIANTS, Variant
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.training import init
from tcfp_jax.optim import moments as narrow
from tcfp_jax.recipes import NAMES, recipe
from tcfp_jax.weights.training import is_stored

LATE = "tensorwise_last_20_bf16"
NAMES_OF_SMOKE = (BASELINE, RERUN, OTHER_BATCHES, "stored", LATE)
FORK, SCRATCH = "convergence-fork", "convergence"
TINY = Config("1x128", GPTConfig(layers=1, width=128, heads=2, context=8), sequence=8)


@pytest.fixture(scope="module", autouse=True)
def standard_promotion_of_threads():
    """Threads that compile do not see the context in which the tests of benchmarks run."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def command(out, *more, protocol="fork", names=NAMES_OF_SMOKE):
    return ["--protocol", protocol, "--smoke", "--out", str(out), "--variants", ",".join(names), *more]


def content_of(out, name=FORK):
    return json.loads((out / common.device_slug() / f"{name}.json").read_text())


def config_of(smoke):
    """The settings of the smoke run, whose programs are compiled."""
    before = content_of(smoke[0])["config"]
    return dataclasses.replace(convergence._smoke(NAMES_OF_SMOKE, True), text=before["text"], jax=before["jax"])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(folder of results, rows) of forks."""
    out = tmp_path_factory.mktemp("results")
    return out, convergence.main(command(out))


def test_every_fork_is_a_row(smoke):
    out, rows = smoke
    assert [row.name for row in rows] == list(NAMES_OF_SMOKE)
    assert len({row.base for row in rows}) == 1
    assert [round(row.bytes_per_weight, 2) for row in rows] == [12, 12, 12, 4.02, 14]
    losses = [row.heldout_loss for row in rows]
    assert all(math.isfinite(loss) for loss in losses) and len(set(losses)) == len(losses)
    by_name = {row.name: row for row in rows}
    near, far = (abs(by_name[name].heldout_loss - losses[0]) for name in (RERUN, OTHER_BATCHES))
    assert near < 1e-3 < far  # other batches are learned
    assert by_name["stored"].worst_leaf_db > 60 and by_name["stored"].worst_leaf.startswith("block_0/")
    assert by_name[BASELINE].worst_leaf is None
    for name in (BASELINE, LATE):  # evaluated as they end
        assert by_name[name].heldout_loss_bf16 == by_name[name].heldout_loss
    content = content_of(out)
    assert content["benchmark"] == "convergence" and content["header"]["library"] == common.library_digest()
    assert content["rows"] == [dataclasses.asdict(row) for row in rows]
    assert content["config"]["text_read"] > 900_000 and len(content["config"]["text"]) == 12
    page = report.render_section(FORK, out)
    assert "hi + lo alone" in page and "| 4.02 |" in page and "4 steps in BF16" in page
    assert f"`{OTHER_BATCHES}` within " in page and "--protocol fork --json" in page
    assert "late switch" not in page  # there is no run without it
    assert f"every installed package and of Python (1 MB, digest {content['config']['text']})" in page


def test_forks_resume_and_stop_at_their_budget(smoke, capsys, monkeypatch):
    out, rows = smoke
    assert convergence.main(command(out, "--resume")) == rows  # all of it was there already
    changed = {**VARIANTS, RERUN: dataclasses.replace(VARIANTS[RERUN], recipe=recipe("tensorwise"))}
    monkeypatch.setattr(convergence, "VARIANTS", changed)
    kept = convergence.main(command(out, "--resume", "--budget-seconds", "0"))
    assert [row.name for row in kept] == [name for name in NAMES_OF_SMOKE if name != RERUN]  # another one now
    said = capsys.readouterr().out
    assert f"drops 1 rows of variants that are others now: {RERUN}\n" in said
    assert f"1 runs left undone: {RERUN} of seed 0" in said
    path = out / common.device_slug() / f"{FORK}.json"
    with pytest.raises(ValueError, match=r"batch=2 in the file but 32 now, .*size\.context=32 in the file but 8 now"):
        convergence.read_rows(path, TINY)
    assert convergence.read_rows(out / "nothing.json", TINY) == []


def test_rows_of_other_devices_keep_their_device_and_the_caption_names_both(tmp_path):
    row = dict(name="bf16", seed=0, heldout_loss=1.0, train_loss=1.0, heldout_loss_bf16=1.0, library="1")
    header = {"device": "chip", "jax": "1", "commit": "2", "library": "1", "date": "today"}
    path = tmp_path / "chip" / "some.json"
    path.parent.mkdir()
    content = {"header": header, "config": {}, "rows": [row, {**row, "seed": 1, "device": "other"}]}
    path.write_text(json.dumps(content))
    assert [kept["device"] for kept in common.rows_to_resume(path, {})] == ["chip", "other"]
    assert common.read_result("some", tmp_path).origin.startswith("chip and other, jax 1")
    path.write_text(json.dumps({**content, "rows": []}))
    assert common.read_result("some", tmp_path).origin.startswith("chip, jax 1")


def test_a_base_that_is_gone_is_trained_again_with_the_baseline(smoke, tmp_path, monkeypatch):
    out, rows = smoke
    path = tmp_path / common.device_slug() / f"{FORK}.json"
    path.parent.mkdir()
    content = content_of(out)
    content["rows"] = [{**dataclasses.asdict(row), "base": "another"} for row in rows if row.name != LATE]
    path.write_text(json.dumps(content))

    def fail(config, name, *rest):
        if name == LATE:
            raise ArithmeticError("not today")
        return right(config, name, *rest)

    right = convergence.measure_text
    monkeypatch.setattr(convergence, "measure_text", fail)
    with pytest.raises(RuntimeError, match=f"1 runs failed, see above: {LATE} of seed 0"):
        convergence.main(command(tmp_path, "--resume", "--bases", str(out / "bases")))
    written = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["base"] == "another") for row in written] == [
        *((name, True) for name in NAMES_OF_SMOKE[:-1]), (BASELINE, False), (RERUN, False),
    ]  # fmt: skip
    assert [row["heldout_loss"] for row in written[-2:]] == [row.heldout_loss for row in rows[:2]]


def test_a_base_of_another_model_is_refused_before_anything_is_compiled(smoke, tmp_path, monkeypatch):
    out, _ = smoke
    other = dataclasses.replace(config_of(smoke), batch=4)
    monkeypatch.setattr(convergence, "_smoke", lambda *_: other)
    again = command(tmp_path, "--bases", str(out / "bases"))
    options = common._parse(convergence, again)
    options.path = None
    with pytest.raises(ValueError, match=r"another run: .*batch=2 in the folder .*or choose another --bases"):
        convergence.configure(options)


def test_a_run_that_its_budget_stops_is_continued(smoke, tmp_path, monkeypatch):
    out, rows = smoke
    config = dataclasses.replace(config_of(smoke), bases=str(tmp_path))
    corpus, variant = convergence._corpus((), config.text_bytes), VARIANTS[LATE]
    text = jnp.asarray(corpus.train)
    base = fork_runs.train_base(
        dataclasses.replace(config, bases=str(out / "bases")), 0, text, corpus.digest
    )  # fmt: skip

    def run(deadline):
        state, _ = fork_training.start_fork(config, variant)(base.state, jax.random.key(0))
        kept = fork_runs.kept_run(config, LATE, base, corpus.digest)
        return fork_runs.advance(config, variant, 0, state, text, kept, deadline)

    with monkeypatch.context() as patch:  # a clock that ticks when it is read: of 10 steps the last is left
        patch.setattr(fork_runs, "time", types.SimpleNamespace(perf_counter=itertools.count().__next__))
        with pytest.raises(fork_runs.OutOfTimeError, match="stopped after 9 of 10 steps; --resume continues"):
            run(deadline=26)
    (folder,) = tmp_path.iterdir()
    assert LATE in folder.name
    state, losses, milliseconds = run(math.inf)
    assert len(losses) == 10 and convergence_tables.curve(losses) == rows[-1].curve  # as without a stop
    assert math.isnan(milliseconds)  # the first part was another process's
    run_there = fork_runs.Kept(config, fork_training.train_config(config, VARIANTS["stored"]), "", folder.name)
    with pytest.raises(ValueError, match=r"another run: .*weights='float' in the folder .* or choose another --bases"):
        run_there.restore(state)
    monkeypatch.setattr(fork_runs.shutil, "rmtree", lambda *_, **__: None)  # killed before the first file is deleted
    run_there.remove()
    assert not folder.exists()  # so that a run begins there, and is not refused for parts of another one


def test_runs_from_scratch_start_from_their_seed(tmp_path):
    more = ("--model", "small", "--tasks", "text,digits")
    rows = convergence.main(command(tmp_path, *more, protocol="scratch", names=(BASELINE,)))
    assert [(row.task, row.name, row.base) for row in rows] == [
        (task, BASELINE, "seed-0") for task in ("text", "digits")
    ]
    assert rows[0].curve[-1] < rows[0].curve[0] and rows[1].accuracy > 0.1
    config = content_of(tmp_path, SCRATCH)["config"]
    assert config["base_steps"] == 0 and config["parameters"] > 200_000
    page = report.render_section(SCRATCH, tmp_path)
    assert "10 steps from scratch" in page and "20 steps of digits" in page and "--protocol scratch --json" in page
    assert not list((tmp_path / "bases").glob("*"))  # nothing was stopped


def row(name, seed, base, loss, *, task="text", milliseconds=None, device=None):
    unknown = dict(accuracy=None, bytes_per_weight=None, worst_leaf=None, worst_leaf_db=None, curve=[], variant="")
    losses = dict.fromkeys(("train_loss", "heldout_loss", "heldout_loss_bf16"), loss)
    of = dict(task=task, name=name, seed=seed, base=base, milliseconds=milliseconds, seconds=1.0, device=device)
    return Row(**of, **losses, **unknown, library=None)


def test_ratios_are_of_one_base():
    runs = [(BASELINE, 0, "a", 1.0), (BASELINE, 0, "b", 2.0), ("stored", 0, "a", 1.1), ("stored", 1, "b", 1.9)]
    rows = [row(*run) for run in (*runs, (BASELINE, 3, "d", 1.0), ("stored", 3, "d", 1.0))]
    summarize = convergence_tables.summarize
    more = [row("stored", 2, "c", 9.0), row("stored", 0, "a", 5.0, task="digits")]
    (summary,) = (s for s in summarize([*rows, *more]) if s.name == "stored")
    assert summary.pairs == 3  # of c, and of digits, there is no baseline
    assert (summary.min_ratio, summary.max_ratio) == pytest.approx((math.exp(-0.1), math.exp(0.1)))
    found = [math.exp(0.1), math.exp(-0.1), 1.0]
    assert summary.standard_error == pytest.approx(statistics.stdev(found) / math.sqrt(3))
    assert math.isnan(convergence_tables.standard_error(found[:2]))  # two may agree by chance
    diverged = summarize([*rows, row(RERUN, 0, "a", math.nan)])
    assert next(s for s in diverged if s.name == RERUN).mean_ratio == math.inf


def test_times_of_two_devices_are_not_compared():
    runs = [("fast", "a", 1.0), ("slow", "b", 2.0), ("slow", "c", 3.0)]
    rows = [row(BASELINE, 0, base, 1.0, milliseconds=ms, device=device) for device, base, ms in runs]
    rows += [row("stored", 0, "a", 1.0, milliseconds=0.5, device="fast")]
    found = {s.name: s.milliseconds for s in convergence_tables.summarize(rows)}
    assert found == {BASELINE: 2.0, "stored": None} and convergence_tables.timed_on(rows) == "slow"


def test_a_baseline_that_ran_twice_is_the_mean_of_both():
    losses = {BASELINE: 1.0, RERUN: 1.002, OTHER_BATCHES: 1.003, "stored": 1.001}
    rows = [row(name, 0, "a", loss) for name, loss in losses.items()]
    found = {s.name: math.log(s.mean_ratio) for s in convergence_tables.summarize(rows)}
    assert found == pytest.approx({BASELINE: 0.0, RERUN: 0.002, OTHER_BATCHES: 0.002, "stored": 0.0})
    diverged = [row(RERUN, 0, "a", math.nan) if each.name == RERUN else each for each in rows]
    assert convergence_tables.ratios(diverged, "text", "stored") == pytest.approx({"a": math.exp(0.001)})


def test_a_late_switch_closes_a_part_of_the_gap():
    ratio = lambda name, value, **more: row(name, 0, "a", math.log(value), **more)
    rows = [
        row(BASELINE, 0, "a", 0.0), ratio("tensorwise", 1.01, milliseconds=10.0),
        ratio(LATE, 1.004, milliseconds=10.5), ratio("stored_last_10_bf16", 1.002),
        row(BASELINE, 1, "b", 0.0), row(RERUN, 1, "b", math.log(0.999)),
    ]  # fmt: skip
    (late,) = convergence_tables.late_switches(rows)
    assert (late.name, late.plain, late.part) == (LATE, "tensorwise", 0.2)
    assert (late.gap, late.left, late.closed, late.longer) == pytest.approx((0.01, 0.004, 0.6, 0.05))
    (noisy,) = convergence_tables.late_switches([*rows, row(RERUN, 1, "b", math.log(1.02))])
    assert math.isnan(noisy.closed)
    text = convergence_tables.table(
        common.Result(FORK, {}, content := dict(TINY.settings), [dataclasses.asdict(r) for r in rows], "")
    )
    assert f"| `{LATE}` | 20% | 0.0100 | 0.0040 | 60% | +5.0% |" in text and "within 0.0010" in text
    assert "rerun, or BF16's run alone where there is none (1 of 2), is what the others are compared with." in text
    faster = ratio("tensorwise", 1.01, milliseconds=5.0)  # of another machine, where there was no late switch
    (same,) = convergence_tables.late_switches([*rows, dataclasses.replace(faster, seed=1, base="b")])
    assert same.longer == pytest.approx(0.05)
    assert f"`{content['model']}`, 32 × 8 bytes a step" in text


def test_the_table_of_variants_is_whole():
    assert set(NAMES) <= set(VARIANTS) and len(set(VARIANTS.values())) == len(VARIANTS)
    assert {name for group in GROUPS.values() for name in group} == set(VARIANTS) - {BASELINE}
    assert not set(GROUPS) & set(VARIANTS)
    deep = dataclasses.replace(TINY, size=GPTConfig(layers=3, width=128, heads=2, context=8))
    for name, variant in VARIANTS.items():
        run = fork_training.train_config(deep, variant)
        assert variant.meaning and bool(run.switches) == (variant.finish is not None) == (
            "_last_" in name and not run.ends
        )
        if variant.finish is not None:
            assert variant.without_finish in VARIANTS.values()
            (first, _), after = run.switches[0], 1 - variant.finish[0]
            assert first == 1000 + 20 * round(300 * after / 20)


@pytest.mark.parametrize("name", ["stored", "stored_float32_moments"])
def test_a_fork_has_the_moments_of_its_base(smoke, name):
    config = config_of(smoke)
    base = jax.eval_shape(lambda: init(fork_training.train_config(config, VARIANTS[BASELINE])))
    rng = np.random.default_rng(0)
    base = jax.tree.map(lambda leaf: jnp.asarray(np.square(rng.standard_normal(leaf.shape)).astype(leaf.dtype)), base)
    state, noise = fork_training.start_fork(config, VARIANTS[name])(base, jax.random.key(0))
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
        form = "float32" if exact else eight
        value = narrow.decode(form, narrow.found(form, kept, names, scales))
        assert jnp.allclose(value, right, rtol=0 if exact else 0.13, atol=0 if exact else 0.05)
        assert jnp.array_equal(value, right) == exact
        assert jnp.array_equal(ours["embedding"]["embedding"], theirs["embedding"]["embedding"])
    assert len(noise) == 4 and all(float(part) < 1e-6 for part in noise.values())


def test_a_llama_forks_with_every_layer():
    stack = LlamaConfig(layers=3, width=32, heads=4, kv_heads=2, hidden=48, context=32)
    config = dataclasses.replace(TINY, size=stack)
    run = fork_training.train_config(config, VARIANTS["stored"])
    base = jax.eval_shape(lambda: init(run.in_bf16))
    state, noise = jax.eval_shape(fork_training.start_fork(config, VARIANTS["stored"]), base, jax.random.key(0))
    assert len(noise) == 7 == sum(map(is_stored, jax.tree.leaves(state.params, is_leaf=is_stored)))
    for name, kept in (("stored_ends_bf16", [False, True, False]), ("tensorwise_ends_bf16", [False, False, False])):
        state, noise = jax.eval_shape(fork_training.start_fork(config, VARIANTS[name]), base, jax.random.key(0))
        assert len(noise) == 7 * sum(kept) and {path.split("/")[0] for path in noise} <= {"layers"}
        kernels = [state.params[stack]["up"]["kernel"] for stack in ("first_layers", "layers", "last_layers")]
        assert list(map(is_stored, kernels)) == kept
        own = jax.eval_shape(lambda name=name: init(fork_training.train_config(config, VARIANTS[name])))
        assert jax.tree.structure(state.opt_state) == jax.tree.structure(own.opt_state)


def test_the_rate_rises_stays_and_falls_to_zero():
    config = dataclasses.replace(TINY, warmup_steps=10, base_steps=100, steps=100)
    for base, steps, expected in (
        (100, (0, 5, 10, 99, 100, 150, 199, 200), [0, 0.5, 1, 1, 1, 0.5, 0.01, 0]),
        (0, (0, 5, 10, 55, 100), [0, 0.5, 1, 0.5, 0]),
    ):
        rate = fork_training.schedule_of(dataclasses.replace(config, base_steps=base))
        assert [float(rate(step)) / config.learning_rate for step in steps] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="base_steps=150 is not a multiple of steps_per_call=20"):
        dataclasses.replace(config, base_steps=150)
    with pytest.raises(ValueError, match="the rate never falls"):
        dataclasses.replace(config, base_steps=0, warmup_steps=100)
    with pytest.raises(ValueError, match="warmup_steps=120 with base_steps=100: forks fall from the peak"):
        dataclasses.replace(config, warmup_steps=120)
    with pytest.raises(ValueError, match="steps_per_call=0 must be at least 1"):
        dataclasses.replace(config, steps_per_call=0)


def test_what_does_not_convert_says_which_field():
    stored = VARIANTS["stored"]
    with pytest.raises(ValueError, match=r"weight='Dual' cannot go to recipe 'rowwise', which has weight='Single'"):
        fork_training.train_config(TINY, dataclasses.replace(stored, finish=(0.2, "rowwise")))
    for part, message in (
        (0.01, "never switches: 0.01 of 300 steps in calls of 20 begins at step 300"),
        (0.99, "at step 0"),
    ):
        with pytest.raises(ValueError, match=message):
            fork_training.train_config(TINY, dataclasses.replace(stored, finish=(part, "bf16")))
    with pytest.raises(ValueError, match=r"never switches at .*: the recipe is"):
        fork_training.train_config(TINY, Variant(recipe("bf16"), finish=(0.2, "bf16")))
    with pytest.raises(ValueError, match="between 0 and 1"):
        Variant(recipe("bf16"), finish=(1.0, "bf16"))


def test_options_name_what_is_wrong(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("too short")
    small, short = ["--smoke", "--data", str(text)], ["--steps", "20"]
    wrong = {
        "tcfp13.*unknown": ["fork", "--variants", "tcfp13"],
        "needs --json": ["fork", "--resume"],
        "needs --out": ["fork", "--smoke", "--resume"],
        f"--variants {LATE}: the finish of `tensorwise`, the.* never": ["fork", f"--variants={LATE}", *short],
        "from scratch none": ["scratch", "--base-steps", "100"],
        "one step or more": ["fork", "--base-steps", "0"],
        "learned from scratch": ["fork", "--smoke", "--tasks", "digits"],
        "layers and width": ["fork", "--model", "gpt13"],
        "no multiple": ["fork", "--model", "1x100"],
        "the training text has 10 tokens, but one window needs 33": ["fork", *small],
    }  # fmt: skip
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            convergence.main(["--protocol", *arguments])


def test_files_of_earlier_versions_are_read():
    texts = {}
    for name in (SCRATCH, FORK):
        result = common.read_result(name)
        assert len(convergence_tables.rows_of(result)) > 0.8 * len(result.rows)
        texts[name] = convergence_tables.table(result)
    assert (
        "`tcfp12`" in texts[SCRATCH] and "1.0015 ± 0.0014" in texts[SCRATCH] and "bytes a weight" not in texts[SCRATCH]
    )
    assert "1.0001 ± 0.0001" in texts[FORK] and "then 300 to zero" in texts[FORK]
    assert {SCRATCH, FORK, "convergence-fork-llama-124m"} < set(report.LEARNED)
    for name in report.LEARNED:
        options = convergence.command_of(name).split()[3:]
        asked = dict(zip(options[::2], options[1::2], strict=False))
        given = types.SimpleNamespace(protocol=asked["--protocol"], model=asked.get("--model"), smoke=False)
        assert convergence.json_name(given) == name


def test_groups_are_chosen_by_name():
    assert variants.chosen_of("noise, stored_e5m2") == (BASELINE, RERUN, OTHER_BATCHES, "stored_e5m2")
    assert set(variants.chosen_of("late")) == {BASELINE, *GROUPS["late"]}
