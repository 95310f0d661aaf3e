"""Runs continue their base, are compared with BF16's run from the same base, stop at
their budget, and resume.
"""

import dataclasses
import json
import math
import statistics
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import random
from numpy.testing import assert_allclose

from benchmarks import convergence, convergence_tables, forks, records, report, variants
from benchmarks.convergence_tables import Row
from benchmarks.forks import Config
from benchmarks.harness import benchmark
from benchmarks.variants import (
    BASELINE,
    GROUPS,
    OTHER_BATCHES,
    RERUN,
    STUDIES,
    VARIANTS,
)
from models.nets.shapes import GPTConfig, LlamaConfig
from models.training.steps import init
from tcfp_jax import formats
from tcfp_jax.linen import TCFPDense
from tcfp_jax.optim import encoding as narrow
from tcfp_jax.recipes import NAMES
from tcfp_jax.weights.parameter import is_quantized
from tests.helpers import decibels, drawn, parametrize, refused, slow, slow_except

NAMES_OF_SMOKE = (BASELINE, RERUN, OTHER_BATCHES, "stored")
FORK, SCRATCH = "convergence-fork", "convergence"
DEVICE = jax.devices()[0].device_kind
TINY = Config("1x128", GPTConfig(layers=1, width=128, heads=2, context=8), sequence=8)


def command(out, *more, protocol="fork", names=NAMES_OF_SMOKE):
    return [
        "--protocol",
        protocol,
        "--smoke",
        "--out",
        str(out),
        "--variants",
        ",".join(names),
        *more,
    ]


def content_of(out, name=FORK):
    return json.loads((out / records.device_slug() / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(folder of results, rows) of forks."""
    out = tmp_path_factory.mktemp("results")
    return out, benchmark("convergence").run(command(out))


def test_every_fork_is_a_row(smoke):
    out, rows = smoke
    assert [row.name for row in rows] == list(NAMES_OF_SMOKE)
    assert len({row.base for row in rows}) == 1
    assert [round(row.bytes_per_weight, 2) for row in rows] == [12, 12, 12, 4.02]
    losses = [row.heldout_loss for row in rows]
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == len(losses)
    by_name = {row.name: row for row in rows}
    near, far = (
        abs(by_name[name].heldout_loss - losses[0]) for name in (RERUN, OTHER_BATCHES)
    )
    assert near < 1e-3 < far  # other batches are learned
    assert rows[0].heldout_loss_bf16 == rows[0].heldout_loss
    content = content_of(out)
    assert content["benchmark"] == "convergence"
    assert content["header"]["library"] == records.library_digest()
    assert content["rows"] == json.loads(
        json.dumps([dataclasses.asdict(row) for row in rows])
    )
    assert content["config"]["text_read"] > 900_000
    assert len(content["config"]["text"]) == 12
    page = convergence_tables.table(records.read_result(FORK, out))
    assert "hi + lo alone" in page
    assert "| 4.02 |" in page
    assert "4 steps in BF16" in page
    assert f"The text has 1 MB (digest {content['config']['text']})." in page


def test_forks_resume_and_stop_at_their_budget(smoke, tmp_path, capsys):
    out, rows = smoke
    # all of it was there already
    assert benchmark("convergence").run(command(out, "--resume")) == rows
    path = tmp_path / records.device_slug() / f"{FORK}.json"
    path.parent.mkdir()
    content = content_of(out)
    path.write_text(json.dumps({**content, "rows": content["rows"][:2]}))
    assert (
        benchmark("convergence").run(
            command(tmp_path, "--resume", "--budget-seconds", "-1")
        )
        == rows[:2]
    )
    assert "2 runs left undone" in capsys.readouterr().out
    with refused(r"batch=2 in the file but 32 now, .*size\.context=32 in .* but 8 now"):
        convergence.rows_there(replace(TINY, resume=str(path)))
    nothing = replace(TINY, resume=str(out / "nothing.json"))
    assert convergence.rows_there(nothing) == []


def test_a_caption_names_the_devices_and_flags_of_a_run(tmp_path):
    row = {
        "name": "bf16",
        "seed": 0,
        "heldout_loss": 1.0,
        "train_loss": 1.0,
        "heldout_loss_bf16": 1.0,
        "library": "1",
    }
    header = {
        "device": "chip",
        "jax": "1",
        "commit": "2",
        "library": "1",
        "date": "today",
    }
    path = tmp_path / "chip" / "some.json"
    path.parent.mkdir()
    content = {
        "header": header,
        "config": {},
        "rows": [row, {**row, "seed": 1, "device": "other"}],
    }
    path.write_text(json.dumps(content))
    assert [kept["device"] for kept in records.rows_to_resume(str(path), {})] == [
        "chip",
        "other",
    ]
    assert records.read_result("some", tmp_path).origin.startswith(
        "chip and other, jax 1"
    )
    content |= {"rows": [], "header": {**header, "xla_flags": "--a=b"}}
    path.write_text(json.dumps(content))
    assert records.read_result("some", tmp_path).origin.startswith(
        "chip, jax 1, `XLA_FLAGS=--a=b`, commit 2"
    )


def test_a_base_that_is_gone_is_trained_again_with_the_baseline(
    smoke, tmp_path, monkeypatch
):
    out, rows = smoke
    path = tmp_path / records.device_slug() / f"{FORK}.json"
    path.parent.mkdir()
    content = content_of(out)
    content["rows"] = [
        {**dataclasses.asdict(row), "base": "another"} for row in rows[:-1]
    ]
    path.write_text(json.dumps(content))

    def fail(config, name, *rest):
        if name == "stored":
            raise ArithmeticError("not today")
        return right(config, name, *rest)

    right = convergence.measure_text
    monkeypatch.setattr(convergence, "measure_text", fail)
    with refused("1 runs failed, see above: stored of seed 0", RuntimeError):
        benchmark("convergence").run(
            command(tmp_path, "--resume", "--bases", str(out / "bases"))
        )
    written = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["base"] == "another") for row in written] == [
        *((name, True) for name in NAMES_OF_SMOKE[:-1]),
        (BASELINE, False),
        (RERUN, False),
    ]
    assert [row["heldout_loss"] for row in written[-2:]] == [
        row.heldout_loss for row in rows[:2]
    ]


def test_a_base_of_another_model_is_refused(smoke):
    out, _ = smoke
    config = replace(
        TINY, base_steps=4, steps_per_call=1, warmup_steps=2, bases=str(out / "bases")
    )
    with refused(r"another run: .*in the folder .*or choose another --bases"):
        forks.train_base(config, 0, jnp.zeros(100, jnp.uint8), "", VARIANTS[BASELINE])


# Quicker ones fork by the command, go on from scratch, and round as fake quantization
@slow
def test_runs_from_scratch_start_from_their_seed(tmp_path):
    names = (BASELINE, "fake_quantization")
    rows = benchmark("convergence").run(
        command(tmp_path, "--model", "small", protocol="scratch", names=names),
    )
    assert [(row.name, row.base) for row in rows] == [
        (name, "seed-0") for name in names
    ]
    assert rows[0].heldout_loss != rows[1].heldout_loss  # it rounds
    config = content_of(tmp_path, SCRATCH)["config"]
    assert config["base_steps"] == 0
    assert config["parameters"] > 200_000
    page = convergence_tables.table(records.read_result(SCRATCH, tmp_path))
    assert "10 steps from scratch" in page
    assert len(rows[0].curve) == 10
    assert convergence_tables.command_of(SCRATCH).endswith("--protocol scratch --json")


@slow_except("stored_bf16_head")
@parametrize("name", [BASELINE, "stored_bf16_head"])
def test_a_run_from_scratch_goes_on_from_its_checkpoint(tmp_path, name):
    stack = LlamaConfig(layers=1, width=32, heads=2, kv_heads=2, hidden=32, context=8)
    config = Config(
        "1x32",
        stack,
        batch=2,
        sequence=8,
        warmup_steps=1,
        steps=8,
        base_steps=0,
        steps_per_call=2,
    )
    config = replace(config, bases=str(tmp_path))
    variant = VARIANTS[name]
    text = jnp.asarray(np.random.default_rng(0).integers(0, 256, 400), jnp.int32)
    run = forks.train_config(config, variant)

    def train(folder=None, deadline=math.inf):
        base = forks.train_base(
            replace(config, bases=None), 0, text, "", VARIANTS[BASELINE]
        )
        state = forks.start_fork(config, variant, base.state, random.key(0))
        return forks.advance(
            config, variant, 0, state, text, config.steps, folder, deadline
        )

    with forks.claimed(config, "run") as mine, forks.claimed(config, "run") as again:
        assert mine
        assert not again
    for done in ("2 of 8", "4 of 8"):
        with (
            forks.folder_of(config, run, "", "run") as folder,
            refused(done, TimeoutError),
        ):
            train(folder, deadline=0.0)
    with forks.folder_of(config, run, "", "run") as folder:
        state, losses, _ = train(folder)
    whole, expected, _ = train()
    assert losses == expected
    assert len(losses) == 8
    assert all(map(jnp.array_equal, jax.tree.leaves(state), jax.tree.leaves(whole)))
    kinds = [
        is_quantized(leaf)
        for leaf in jax.tree.leaves(whole.params, is_leaf=is_quantized)
    ]
    assert any(kinds) == (name != BASELINE)
    assert not is_quantized(whole.params["embedding"]["embedding"])


def test_rows_of_other_processes_stay_in_the_file(tmp_path):
    config = replace(TINY, resume=str(tmp_path / "file.json"))
    mine = row("stored", 0, "seed-0", 1.0)
    theirs = row(BASELINE, 0, "seed-0", 1.1, device=DEVICE)
    header = records.make_header()
    records.write_result(
        tmp_path / "file.json", "convergence", header, config, [theirs]
    )
    assert convergence.joined(config, [mine]) == [theirs, mine]
    assert convergence.joined(replace(config, resume=None), [mine]) == [mine]


def row(name, seed, base, loss, *, milliseconds=None, device=None):
    losses = (loss, loss, loss)
    return Row(name, seed, base, *losses, None, milliseconds, 1.0, None, device)


def test_ratios_are_of_one_base():
    runs = [
        (BASELINE, 0, "a", 1.0),
        (BASELINE, 0, "b", 2.0),
        ("stored", 0, "a", 1.1),
        ("stored", 1, "b", 1.9),
    ]
    rows = [
        row(*run) for run in (*runs, (BASELINE, 3, "d", 1.0), ("stored", 3, "d", 1.0))
    ]
    summarize = convergence_tables.summarize
    more = [row("stored", 2, "c", 9.0)]
    (summary,) = (s for s in summarize([*rows, *more]) if s.name == "stored")
    assert summary.pairs == 3  # base c has no baseline
    assert (summary.min_ratio, summary.max_ratio) == pytest.approx(
        (math.exp(-0.1), math.exp(0.1))
    )
    found = [math.exp(0.1), math.exp(-0.1), 1.0]
    assert summary.standard_error == pytest.approx(
        statistics.stdev(found) / math.sqrt(3)
    )
    # two may agree by chance
    assert math.isnan(convergence_tables.standard_error(found[:2]))
    diverged = summarize([*rows, row(RERUN, 0, "a", math.nan)])
    assert next(s for s in diverged if s.name == RERUN).mean_ratio == math.inf


def test_times_of_two_devices_are_not_compared():
    runs = [("fast", "a", 1.0), ("slow", "b", 2.0), ("slow", "c", 3.0)]
    rows = [
        row(BASELINE, 0, base, 1.0, milliseconds=ms, device=device)
        for device, base, ms in runs
    ]
    rows += [row("stored", 0, "a", 1.0, milliseconds=0.5, device="fast")]
    found = {s.name: s.milliseconds for s in convergence_tables.summarize(rows)}
    assert found == {BASELINE: 2.0, "stored": None}
    assert convergence_tables.timed_on(rows) == "slow"


def test_a_baseline_that_ran_twice_is_the_mean_of_both():
    losses = {BASELINE: 1.0, RERUN: 1.002, OTHER_BATCHES: 1.003, "stored": 1.001}
    rows = [row(name, 0, "a", loss) for name, loss in losses.items()]
    found = {s.name: math.log(s.mean_ratio) for s in convergence_tables.summarize(rows)}
    assert found == pytest.approx(
        {BASELINE: 0.0, RERUN: 0.002, OTHER_BATCHES: 0.002, "stored": 0.0}
    )
    diverged = [
        row(RERUN, 0, "a", math.nan) if each.name == RERUN else each for each in rows
    ]
    assert convergence_tables.ratios(diverged, "stored") == pytest.approx(
        {"a": math.exp(0.001)}
    )
    config = {**TINY.settings, "text_read": 1}
    pages = []
    for more in (
        {},
        {"tokens": "bpe", "base_steps": 0, "bytes_per_token": 3.0, "tokens_read": 768},
    ):
        dicts = [dataclasses.asdict(r) for r in [*diverged, row(BASELINE, 1, "b", 1.0)]]
        pages.append(
            convergence_tables.table(records.Result(FORK, {}, config | more, dicts, ""))
        )
    page, whole = pages
    assert "A step has 32 × 8 tokens." in page
    assert "diverged" in page
    assert "perplexity divided by BF16's" in page
    assert "loss above BF16's, nats per token" in whole


def test_the_table_of_variants_is_whole():
    assert set(NAMES) <= set(VARIANTS)
    assert all(variant.meaning for variant in VARIANTS.values())
    grouped = {name for group in GROUPS.values() for name in group}
    studied = {name for study in STUDIES.values() for name in study.names}
    assert grouped | studied == set(VARIANTS) - {BASELINE}
    assert not {*GROUPS, *STUDIES} & set(VARIANTS)
    assert variants.chosen_of("noise, stored_e5m2") == (
        BASELINE,
        RERUN,
        OTHER_BATCHES,
        "stored_e5m2",
    )


@parametrize("name", ["stored", "stored_float32_moments"])
def test_a_fork_has_the_moments_of_its_base(name):
    base = jax.eval_shape(lambda: init(forks.train_config(TINY, VARIANTS[BASELINE])))
    rng = np.random.default_rng(0)
    base = jax.tree.map(
        lambda leaf: jnp.asarray(
            np.square(rng.standard_normal(leaf.shape)).astype(leaf.dtype)
        ),
        base,
    )
    state = forks.start_fork(TINY, VARIANTS[name], base, random.key(0))

    def is_adam(node):
        return isinstance(node, optax.ScaleByAdamState)

    (adam,) = filter(is_adam, jax.tree.leaves(base.opt_state, is_leaf=is_adam))
    assert state.opt_state.count == adam.count
    exact = name == "stored_float32_moments"
    names = ["block_0", "qkv", "kernel"]
    after = state.opt_state
    for ours, scales, theirs in (
        (after.mu, after.mu_scale, adam.mu),
        (after.nu, after.nu_scale, adam.nu),
    ):
        kept = ours["block_0"]["qkv"]["kernel"]
        right = theirs["block_0"]["qkv"]["kernel"]
        value = narrow.decode(narrow.found(kept, names, scales))
        assert jnp.allclose(
            value, right, rtol=0 if exact else 0.13, atol=0 if exact else 0.05
        )
        assert jnp.array_equal(value, right) == exact
        assert jnp.array_equal(
            ours["embedding"]["embedding"], theirs["embedding"]["embedding"]
        )


def test_a_llama_forks_with_every_layer():
    stack = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=32)
    config = replace(TINY, size=stack)
    base = jax.eval_shape(
        lambda: init(forks.train_config(config, VARIANTS["stored"]).in_bf16)
    )

    def start(base, key):
        return forks.start_fork(config, VARIANTS["stored"], base, key)

    state = jax.eval_shape(start, base, random.key(0))
    # and the table
    assert (
        sum(map(is_quantized, jax.tree.leaves(state.params, is_leaf=is_quantized))) == 8
    )


# Matrices as narrow as these are updated behind the backward pass.
of_narrow_matrices = pytest.mark.filterwarnings("ignore:train_step holds the gradients")


# Stored bases need no other form.
@of_narrow_matrices
@slow_except("stored_late_clip")
@parametrize("name", ["stored_late_clip", "stored_matrix_clip", "stored_exact_head"])
def test_a_study_forks_the_state_of_its_own_base(name):
    stack = LlamaConfig(layers=2, width=32, heads=2, kv_heads=2, hidden=48, context=8)
    config = replace(TINY, size=stack, batch=2, steps_per_call=2, study="clipping")
    if name not in STUDIES["clipping"].names:
        config = replace(config, study="head")
    variant = VARIANTS[name]
    trained = VARIANTS[forks.study_of(config).baseline]
    base = jax.eval_shape(lambda: init(forks.train_config(config, trained)))

    def train(base, key, text):
        state = forks.start_fork(config, variant, base, key)
        return state, forks.steps_of(config, variant)(state, text, key)

    text = jax.ShapeDtypeStruct((100,), jnp.int32)
    start, (after, losses) = jax.eval_shape(train, base, random.key(0), text)
    assert jax.tree.map(jnp.shape, start) == jax.tree.map(jnp.shape, base)
    assert jax.tree.structure(start) == jax.tree.structure(after)
    assert losses.shape == (2,)


@of_narrow_matrices
@slow
def test_a_study_compares_with_its_own_baseline(tmp_path):
    names = STUDIES["clipping"].names
    rows = benchmark("convergence").run(command(tmp_path, names=["clipping"]))
    assert [row.name for row in rows] == list(names)
    assert len({row.base for row in rows}) == 1
    losses = [row.heldout_loss for row in rows]
    assert all(map(math.isfinite, losses))
    assert max(losses) - min(losses) < 0.1
    page = convergence_tables.table(records.read_result(f"{FORK}-clipping", tmp_path))
    assert "perplexity divided by exact clipping's" in page
    assert "4 steps of `stored_bfloat16_gradients`" in page


def test_a_study_is_compared_with_its_own_runs():
    study = STUDIES["head"]
    losses = {study.baseline: 1.0, study.rerun: 1.002, study.others[0]: 1.004}
    rows = [row(name, 0, "a", loss) for name, loss in losses.items()]
    found = convergence_tables.summarize(rows, study)
    assert [math.log(one.mean_ratio) for one in found] == pytest.approx(
        [0.0, 0.002, 0.003]
    )
    config = {**replace(TINY, study="head").settings, "tokens": "bpe"}
    dicts = [dataclasses.asdict(one) for one in rows]
    page = convergence_tables.table(records.Result(FORK, {}, config, dicts, ""))
    assert "loss above the BF16 head's, nats per token" in page
    assert "| +0.0030 |" in page
    assert TINY.settings.keys() == replace(TINY, study="").settings.keys()
    assert "study" not in TINY.settings


def test_the_rate_rises_stays_and_falls_to_zero():
    config = replace(TINY, warmup_steps=10, base_steps=100, steps=100)
    for base, steps, expected in (
        (100, (0, 5, 10, 99, 100, 150, 199, 200), [0, 0.5, 1, 1, 1, 0.5, 0.01, 0]),
        (0, (0, 5, 10, 55, 100), [0, 0.5, 1, 0.5, 0]),
    ):
        rate = forks.schedule_of(replace(config, base_steps=base))
        assert [
            float(rate(step)) / config.learning_rate for step in steps
        ] == pytest.approx(expected, abs=1e-6)
    for message, wrong in {
        "base_steps=150 is not a multiple of steps_per_call=20": {"base_steps": 150},
        "the rate never falls": {"base_steps": 0, "warmup_steps": 100},
        "warmup_steps=120 with base_steps=100: forks fall from the peak": {
            "warmup_steps": 120
        },
        "steps_per_call=0 must be at least 1": {"steps_per_call": 0},
    }.items():
        with refused(message):
            replace(config, **wrong)


def test_options_name_what_is_wrong(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("too short")
    small = ["--smoke", "--data", str(text)]
    wrong = {
        "tcfp13.*unknown": ["fork", "--variants", "tcfp13"],
        "needs --json": ["fork", "--resume"],
        "needs --out": ["fork", "--smoke", "--resume"],
        "which reads bytes": ["fork", *small, "--tokens", "bpe", "--model", "small"],
        "holds ids, but --tokens is bytes": ["fork", "--data", "ids.npy"],
        "layers and width": ["fork", "--model", "gpt13"],
        "not a multiple": ["fork", "--model", "1x100"],
        "which has no TCFPDense; use a GPT": [
            "scratch",
            "--model",
            "llama-tiny",
            "--variants",
            "flags",
        ],
        "a study compares forks": ["scratch", "--variants", "clipping"],
        "the training text has 10 tokens, but one window needs 33": ["fork", *small],
    }
    for message, arguments in wrong.items():
        with refused(message):
            benchmark("convergence").run(["--protocol", *arguments])


def test_committed_files_are_read_and_their_commands_name_them():
    assert records.read_result(report.FORKS) is not None
    for name in report.LEARNED:
        result = records.read_result(name)
        data = ()
        if result is not None:
            assert len(convergence_tables.rows_of(result)) == len(result.rows) > 0
            data = result.config.get("data") or ()
        options = convergence_tables.command_of(name, data).split()[3:]
        asked = dict(zip(options[::2], options[1::2], strict=False))
        given = types.SimpleNamespace(
            protocol=asked["--protocol"],
            model=asked.get("--model"),
            smoke=False,
            variants=asked.get("--variants"),
            tokens=asked.get("--tokens", "bytes"),
        )
        assert convergence_tables.json_name(given) == name


def test_fake_quantization_rounds_weights_and_activations_alone():
    x = drawn(64, 32)
    w = drawn(32, 32, seed=1)
    g = drawn(64, 32, seed=2)
    params = {"params": {"kernel": w, "bias": jnp.ones(32)}}

    def q(v):
        return formats.cast(v, formats.datatype("e4m3fn", "e8m0"), scalemode="ceil")

    def of(recipe):
        layer = TCFPDense(32, recipe=recipe, dtype=jnp.float32)
        with nn.intercept_methods(variants.fake_quantized):
            return jax.vjp(layer.apply, params, x)

    y, back = of(variants.FAKE_RECIPE)
    dparams, dx = back(g)
    assert_allclose(y, q(x) @ q(w) + 1, rtol=1e-5, atol=1e-5)
    # gradients are not rounded
    assert_allclose(dx, g @ q(w).T, rtol=1e-5, atol=1e-5)
    assert_allclose(dparams["params"]["kernel"], q(x).T @ g, rtol=1e-5, atol=1e-4)
    assert 27 < decibels(x @ w, y - 1) < 30
    # layers of others are left alone
    assert decibels(x @ w, of(VARIANTS[BASELINE].recipe)[0] - 1) > 50
