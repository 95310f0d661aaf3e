"""Endings go on from one state of their base, and are compared in pairs."""

import dataclasses
import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import finish, finish_tables, forks, records, texts
from benchmarks.endings import ENDINGS, FP4, as_begun
from benchmarks.finish_tables import Row, differences
from benchmarks.harness import benchmark
from benchmarks.variants import BASELINE, RECOMMENDED, VARIANTS
from models.training.text import Corpus
from tests.helpers import refused, same_bits, slow

NAMES = ("bf16", "stored", "stored_bf16")


def row(name, seed, loss, *, base="", milliseconds=2.0):
    base = base or f"base-{seed}"
    losses = (loss, loss, loss - 0.25)
    return Row(name, seed, base, *losses, milliseconds, 1.0, "1", "chip")


def test_endings_name_the_products_of_their_base():
    assert [as_begun(base) for base in (BASELINE, RECOMMENDED, FP4)] == [
        "bf16",
        "stored",
        "nvfp4",
    ]
    for ending in ENDINGS.values():
        assert ending.base in VARIANTS
        variant = ending.variant
        assert variant.recipe == VARIANTS[ending.stored_as or ending.base].recipe
    forward = ENDINGS["stored_bf16_forward"].variant.products
    assert (forward.forward, forward.dgrad) == ("bf16", "full")
    assert ENDINGS["nvfp4_bf16_forward"].variant.products.fp4.forward_operands == "bf16"
    assert ENDINGS["stored_bf16_head"].variant.include == "bf16_head"
    with refused("no ending goes on as 'tensorwise'"):
        as_begun("tensorwise")


def test_pairs_have_their_first_steps_in_common():
    rows = [
        *(row("bf16", seed, 1.0 + seed) for seed in range(3)),
        *(row("stored", seed, 1.1 + seed) for seed in range(3)),
        *(row("stored_bf16", seed, 1.05 + seed, milliseconds=3.0) for seed in range(3)),
        row("stored_bf16", 3, 9.0, milliseconds=3.0),
    ]
    name = "stored_bf16"
    assert differences(rows, name, "bf16") == pytest.approx([0.05] * 3)
    assert differences(rows, name, "stored") == pytest.approx([-0.05] * 3)
    in_bf16 = differences(rows, name, "bf16", "heldout_loss_bf16")
    assert in_bf16 == pytest.approx([-0.2] * 3)
    # Runs of other first steps, or of another library, have no pair here.
    other = [
        *rows,
        row("stored", 0, 5.0, base="again"),
        replace(row("stored", 1, 5.0), library="2"),
    ]
    assert differences(other, name, "stored") == pytest.approx([-0.05] * 3)
    # A seed that was trained again counts once.
    other.append(row(name, 0, 5.05, base="again"))
    assert differences(other, name, "stored") == pytest.approx([0.0, -0.05, -0.05])
    config = finish.SMOKE.settings
    dicts = [dataclasses.asdict(one) for one in rows]
    page = finish_tables.table(records.Result("finish", {}, config, dicts, ""))
    assert (
        "| `stored_bf16`: stored weights, BF16 forward and backward | 10 % |"
        " +0.0500 ± 0.0000 | -0.2000 ± 0.0000 | -0.0500 ± 0.0000 | 3 | 1.50 |" in page
    )
    assert "4 steps in BF16 at a constant rate, then 20 with the products" in page


def test_ids_of_a_long_text_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LONG", 4)
    train = np.frombuffer(b"import jax\0", np.uint8)
    text = Corpus(train, train[:7], ("a.py",), ("b.py",))
    made = texts.in_ids(text, tmp_path)
    monkeypatch.setattr(texts, "tokenized", None)
    kept = texts.in_ids(text, tmp_path)
    assert kept.digest == made.digest
    assert kept.bytes_per_token == made.bytes_per_token
    # Another text has other ids.
    with pytest.raises(TypeError, match="not callable"):
        texts.in_ids(replace(text, heldout=train), tmp_path)


def test_endings_begin_between_two_dispatches():
    assert finish.last_steps(finish.SMOKE, "stored") == 2
    with refused("10 % of them, for bf16, are no multiple of 4; use a multiple of 80"):
        finish.last_steps(replace(finish.SMOKE, steps_per_call=4), "bf16")


@slow
def test_bases_and_endings_go_on_in_later_calls(tmp_path, capsys):
    command = ["--smoke", "--out", str(tmp_path), "--resume"]
    command += ["--endings", ",".join(NAMES)]
    run = benchmark("finish").run
    assert run([*command, "--budget-seconds", "-1"]) == []
    assert "left undone; --resume does them" in capsys.readouterr().out
    rows = run(command)
    assert [one.name for one in rows] == list(NAMES)
    assert all(math.isfinite(one.heldout_loss) for one in rows)
    _, begun, ended = rows
    assert begun.base == ended.base
    assert begun.heldout_loss != ended.heldout_loss
    # Both ends have BF16's products in common, and nearly the same weights.
    assert abs(begun.heldout_loss_bf16 - ended.heldout_loss) < 1e-3
    assert run(command) == rows
    path = tmp_path / records.device_slug() / "finish.json"
    content = json.loads(path.read_text())
    content["rows"] = content["rows"][:2]
    path.write_text(json.dumps(content))
    again = run(command)
    assert [one.heldout_loss for one in again] == [one.heldout_loss for one in rows]
    # Without the folder all first steps are made again, and compared with their own.
    content["rows"] = [{**one, "base": "gone"} for one in content["rows"]]
    path.write_text(json.dumps(content))
    again = run(command)
    assert [(one.name, one.base == "gone") for one in again] == [
        ("bf16", True),
        ("stored", True),
        ("bf16", False),
        ("stored", False),
        ("stored_bf16", False),
    ]


def trained(config, base):
    """A base of seed 0 before it is trained."""
    corpus = finish.corpus_of(config.data, config.text_bytes, config.tokens)
    text = finish.text_of(config)
    begun = forks.train_base(config, 0, text, corpus.digest, VARIANTS[BASELINE])
    return finish.Trained(config, base, begun, corpus)


@slow
def test_a_stopped_base_goes_on(tmp_path):
    config = replace(finish.SMOKE, bases=str(tmp_path))
    names = ["nvfp4", "nvfp4_bf16_forward_20"]
    with refused("1 of 16 steps", TimeoutError):
        trained(config, FP4).train(names, deadline=0.0)
    base = trained(config, FP4)
    base.train(names, math.inf)
    steps = {end: int(state.step) for end, state in base.states.items()}
    assert steps == {16: 20, 18: 22}
    again = trained(replace(config, bases=None), FP4)
    again.train(names, math.inf)
    assert again.begun.name == base.begun.name
    assert same_bits(again.states[18].params, base.states[18].params)


@pytest.fixture
def standard_in_threads():
    """Threads have the dtype promotion of the process, which is strict in tests."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


@slow
def test_steps_are_compiled_before_one_runs(standard_in_threads):
    names = ["bf16", "stored", "stored_bf16", "bf16_stored", "nvfp4_bf16_forward"]
    compiled = []

    def note(name, seconds, **more):
        if "backend_compile" in name:
            compiled.append(str(more.get("fun_name")))

    def steps():
        return [name for name in compiled if "train_step" in name]

    forks.steps_of.cache_clear()  # of other tests
    jax.monitoring.register_event_duration_secs_listener(note)
    finish.compile_steps(finish.SMOKE, names, finish.text_of(finish.SMOKE))
    assert len(steps()) == 5, "BF16's, stored ones, their ends and those of FP4"
    base = trained(finish.SMOKE, RECOMMENDED)
    base.train(["stored"], math.inf)
    assert math.isfinite(base.end("stored_bf16", math.inf).heldout_loss)
    assert len(steps()) == 5
