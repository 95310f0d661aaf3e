"""Runs that are observed, whose recipe changes on the way or by depth, and that start from a checkpoint."""

import dataclasses
import functools
import json
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from models import running
from models.checkpoint import export, read_config
from models.gpt import GPTConfig
from models.llama import LlamaConfig
from models.monitoring import Board, make_monitored_step, read_reports
from models.phases import phase_at, switched
from models.plotting import color_range, matrix_of, plot_reports
from models.running import run
from models.settings import TrainConfig, products_over
from models.train import main
from models.training import (
    TrainState,
    batch_key,
    float_parameters,
    init,
    loss_function,
    lower_evaluation,
    make_train_step,
    product_key,
)
from tcfp_jax.weights.training import is_stored
from tests.helpers import same_bits

MICRO = GPTConfig(layers=1, width=32, heads=2, context=32)
STACK = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=32)
CONFIG = TrainConfig(
    model=MICRO, steps=20, batch=4, sequence=16, steps_per_call=5, heldout_windows=8, corpus_bytes=1_000_000,
    learning_rate=1e-2, recipe="tcfp12_fast", recipe_schedule=((0.5, "bf16"),), monitor=5,
)  # fmt: skip
STORED = dataclasses.replace(CONFIG, recipe="tcfp12_single", weights="stored", moments="8bit")
WITHOUT = dict(recipe_schedule=(), monitor=0)


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


# Moments of 8 bits are most of a step's program, and nothing here reads them.
SHORT = dict(steps=4, steps_per_call=1, final_fraction=0.5, moments="float32")


def test_a_run_that_switches_is_observed_and_its_last_block_has_its_own_recipe(tmp_path):
    two = dict(model=dataclasses.replace(MICRO, layers=2), ends=(0, 1, "bf16"))
    result = run(dataclasses.replace(STORED, monitor=1, **two, **SHORT), out=tmp_path)
    assert list(result.reports) == [1, 2, 3, 4] and result.reports == read_reports(tmp_path / "metrics.jsonl")
    for step, report in result.reports.items():
        assert {path.split("/")[0] for path in report} >= {"block_0", "block_1"}
        for path, weight in report.items():
            low = step <= 2 and not path.startswith("block_1")
            assert 25 < weight["x"]["snr"] < 36 if low else weight["x"]["snr"] > 45
            if path.startswith("block_1"):  # its weights are floats
                continue
            assert 0 <= weight["stale"] <= 1 and weight["g"]["amax"] > 0
            if step > 1:  # the first rate is 0
                assert 0 < weight["moved"] <= 1 and weight["edq"] == pytest.approx(1, abs=0.1)
    plot_reports(tmp_path / "monitor.png", result.reports, title="micro")
    assert (tmp_path / "monitor.png").stat().st_size > 10_000


def test_a_run_that_switches_is_resumed_before_it_does(tmp_path):
    config = dataclasses.replace(CONFIG, monitor=0, recipe="tensorwise", **SHORT)
    out, part = tmp_path / "whole", tmp_path / "part"
    result = run(config, out=out, checkpoint_every=2)
    assert not result.reports and read_config(out) == dataclasses.replace(config, dtype="float32")
    shutil.copytree(out, part)
    shutil.rmtree(part / "checkpoints" / "4")  # of step 2, before the switch, is left
    resumed = run(config, out=part, resume="allowed", checkpoint_every=2)
    assert np.array_equal(resumed.train_loss, result.train_loss) and resumed.heldout_loss == result.heldout_loss
    assert (part / "metrics.jsonl").read_bytes() == (out / "metrics.jsonl").read_bytes()


def test_parts_of_a_run_share_programs_with_runs_of_one_recipe():
    whole = [dataclasses.replace(CONFIG, recipe=name, **WITHOUT) for name in ("tcfp12_fast", "bf16")]
    assert [make_train_step(phase_at(CONFIG, step)) for step in (9, 10)] == [make_train_step(one) for one in whole]


@pytest.mark.parametrize("later", ["bf16", "tcfp12"])
@pytest.mark.parametrize("weights", ["float", "stored"])
def test_a_stack_of_layers_goes_on_with_the_other_recipe(weights, later):
    config = dataclasses.replace(
        STORED if weights == "stored" else CONFIG, model=STACK, recipe_schedule=((0.5, later),), monitor=0
    )
    before, after = phase_at(config, 9), phase_at(config, 10)
    state = jax.eval_shape(lambda: init(before))
    state = jax.eval_shape(functools.partial(switched, before, after), state)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(lambda: init(after))) or weights == "stored"
    text = jax.ShapeDtypeStruct((1000,), jnp.uint8)
    again, _ = jax.eval_shape(make_train_step(after, 1), state, text, batch_key(config))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), again) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )


@pytest.mark.parametrize("weights", ["float", "stored"])
def test_first_and_last_blocks_have_their_own_recipe(weights):
    config = dataclasses.replace(
        STORED if weights == "stored" else CONFIG, model=dataclasses.replace(MICRO, layers=3), ends=(1, 1, "bf16"),
        recipe_schedule=(), steps_per_call=1,
    )  # fmt: skip
    state: TrainState = jax.eval_shape(lambda: init(config))
    kinds = [is_stored(state.params[f"block_{layer}"]["qkv"]["kernel"]) for layer in range(3)]
    assert kinds == [False, weights == "stored", False]
    if weights == "float":
        assert list(tcfp_jax.layer_state(state.opt_state)) == ["block_1"]
        return
    text = jax.ShapeDtypeStruct((1000,), jnp.uint8)
    after, *_ = jax.eval_shape(make_monitored_step(config, 2), state, text, batch_key(config))
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_colors_do_not_make_a_picture_of_noise():
    names, values = matrix_of({5: {"up": {"x": {"snr": 31.5}}, "down": {"x": {"snr": None}}, "b": {}}}, ("x", "snr"))
    assert names == ["up", "down"] and values[0, 0] == 31.5 and np.isnan(values[1, 0])  # what is not known has a place
    low, high = color_range(values, (None, None), 10.0)
    assert (low, high) == (26.5, 36.5)
    assert color_range(np.array([5.0, 31.5]), (None, None), 10.0) == (5.0, 31.5)


@pytest.mark.parametrize("weights", ["float", "stored"])
def test_ends_of_a_stack_are_stacks_of_their_own(weights):
    size, plain = dataclasses.replace(STACK, layers=4), STORED if weights == "stored" else CONFIG
    plain = dataclasses.replace(plain, model=size, steps_per_call=1, **WITHOUT)
    config = dataclasses.replace(plain, ends=(1, 2, "bf16"))
    state: TrainState = jax.eval_shape(lambda: init(config))
    names = ("first_layers", "layers", "last_layers")
    scales, kernels = ([state.params[name][part] for name in names] for part in ("mlp_norm", "up"))
    assert [scale["scale"].shape for scale in scales] == [(1, 32), (1, 32), (2, 32)]
    assert [is_stored(kernel["kernel"]) for kernel in kernels] == [False, weights == "stored", False]
    if weights == "float":
        assert list(tcfp_jax.layer_state(state.opt_state)) == ["layers"]
    text = jax.ShapeDtypeStruct((1000,), jnp.uint8)
    after, *_ = jax.eval_shape(make_train_step(config), state, text, batch_key(config))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    whole = jax.eval_shape(lambda: init(plain.in_bf16)).params
    assert jax.eval_shape(float_parameters, state.params) == whole  # as exports and BF16's evaluation have them


def test_ends_draw_where_other_blocks_do_not():
    two = dataclasses.replace(MICRO, layers=2)
    config = dataclasses.replace(CONFIG, model=two, recipe="tensorwise", ends=(1, 0, "nvfp4_training"), **WITHOUT)
    state, key = jax.eval_shape(lambda: init(config)), batch_key(config)
    bits = jax.eval_shape(lambda: product_key(config, TrainState(None, None, jnp.int32(0)), key))
    text = jax.ShapeDtypeStruct((4, 17), jnp.int32)
    quantized = tcfp_jax.layer_state(state.opt_state)
    assert jax.eval_shape(loss_function(config), state.params, quantized, text, bits).shape == ()
    lower_evaluation(config, state, 1000)
    assert product_key(dataclasses.replace(config, ends=(1, 0, "bf16")), state, key) is None


SCHEDULE = "recipe_schedule"
WRONG = {
    "at 0": (CONFIG, {SCHEDULE: ((0.0, "bf16"),)}, "schedule 0=bf16: .* must rise from above 0; write them in order"),
    "at 1": (CONFIG, {SCHEDULE: ((1.0, "bf16"),)}, "never switches at 1.0: of 20 steps .* that is step 20"),
    "too late": (CONFIG, {SCHEDULE: ((0.95, "bf16"),)}, "never switches at 0.95"),
    "the same": (CONFIG, {SCHEDULE: ((0.5, "tcfp12_fast"),)}, "'tcfp12_fast' before it, too"),
    "nameless": (
        CONFIG,
        {SCHEDULE: ((1.0, tcfp_jax.recipe("tensorwise", gradient="float8_e4m3fn")),)},
        "1=tensorwise with gradient=",
    ),
    "falling": (CONFIG, {SCHEDULE: ((0.5, "bf16"), (0.25, "tensorwise"))}, "must rise"),
    "one half": (STORED, {SCHEDULE: ((0.5, "tensorwise"),)}, "weight='Dual' cannot go .* weight='Single'"),
    "blocks": (STORED, {SCHEDULE: ((0.5, "tcfp12_blockwise"),)}, "scaling=Tensor.* has scaling=Block"),
    "four bits": (STORED, {SCHEDULE: ((0.5, "nvfp4_training"),)}, r"'nvfp4_training', whose products round .* \(fp4\)"),
    "the same products": (
        STORED,
        {SCHEDULE: ((0.5, tcfp_jax.recipe("tcfp12_single", copies="both")),)},
        "the recipe is 'tcfp12_single' before it, too",
    ),
    "no middle": (CONFIG, dict(ends=(1, 1, "bf16")), "ends 1,1=bf16 of 1 blocks leaves none between"),
    "ends of one half": (
        STORED,
        dict(model=STACK, ends=(1, 0, "blockwise")),
        "weight='Dual' cannot have ends .* has weight='Single'",
    ),
    "too rare": (CONFIG, dict(monitor=25), "monitor=25 of steps=20: no step would be observed; lower monitor"),
    "monitor": (CONFIG, dict(monitor=7), "not a multiple of steps_per_call=5.*use 5"),
    "jitter": (CONFIG, dict(start="base.npz", initial_jitter=0.1), "leave one of them out"),
}


@pytest.mark.parametrize("config, change, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_settings_say_how_to_repair_them(config, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


def test_what_does_not_convert_is_named():
    state: TrainState = jax.eval_shape(lambda: init(dataclasses.replace(CONFIG, **WITHOUT)))
    with pytest.raises(ValueError, match="weights='float' before and 'stored' after"):
        switched(CONFIG, STORED, state)
    assert products_over("tcfp12_single", "tcfp12").copies == "one"


def test_a_run_starts_from_floats_and_ends_in_them(tmp_path):
    config = dataclasses.replace(STORED, **WITHOUT)
    floats = init(dataclasses.replace(CONFIG, seed=3, **WITHOUT)).params
    base, written = tmp_path / "base.npz", tmp_path / "written.npz"
    export(base, floats)
    stored = init(dataclasses.replace(config, start=str(base))).params
    kernel = lambda params: np.asarray(tcfp_jax.dequantize(params)["block_0"]["qkv"]["kernel"])
    np.testing.assert_allclose(kernel(stored), kernel(floats), atol=5e-3 * np.abs(kernel(floats)).max())
    assert same_bits(stored["embedding"], floats["embedding"])
    export(written, stored)
    again = init(dataclasses.replace(CONFIG, start=str(written), **WITHOUT)).params
    assert same_bits(again, tcfp_jax.dequantize(stored))

    wider = dataclasses.replace(config, model=dataclasses.replace(MICRO, width=64), start=str(base))
    with pytest.raises(ValueError, match="parameters of another model: 'block_0/attention_norm/bias' has shape"):
        init(wider)
    with pytest.raises(ValueError, match=r"another model: 'block_1/.* no such array"):
        init(dataclasses.replace(config, model=dataclasses.replace(MICRO, layers=2), start=str(base)))
    with pytest.raises(FileNotFoundError, match="no such file"):
        init(dataclasses.replace(config, start=str(tmp_path / "nothing.npz")))
    written.write_text("no arrays")
    with pytest.raises(ValueError, match=r"no \.npz of arrays by name"):
        init(dataclasses.replace(config, start=str(written)))
    with pytest.raises(ValueError, match=r"no \.npz of arrays by name"):
        run(dataclasses.replace(config, start=str(written)), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()  # the right file may start a run there
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "empty.npz").touch()
    (tmp_path / "cut.npz").write_bytes(base.read_bytes()[:-100])
    for name in ("one.npy", "empty.npz", "cut.npz"):
        with pytest.raises(ValueError, match=r"no \.npz of arrays by name"):
            init(dataclasses.replace(config, start=str(tmp_path / name)))


@pytest.mark.parametrize("until", ["first step", "end"])
def test_a_run_that_started_from_a_file_goes_on_without_it(tmp_path, monkeypatch, until):
    base, out = tmp_path / "base.npz", tmp_path / "run"
    export(base, init(dataclasses.replace(CONFIG, seed=3, **WITHOUT)).params)
    config = dataclasses.replace(STORED, start=str(base), steps=10, **WITHOUT)
    whole = run(config)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if until == "first step":
            patch.setattr(running, "make_train_step", killed)
            with pytest.raises(KeyboardInterrupt):
                run(config, out=out)
        else:
            run(config, out=out)
    export(base, init(dataclasses.replace(CONFIG, seed=4, **WITHOUT)).params)  # another of the same name
    base.rename(tmp_path / "moved.npz")
    # No second state is made beside the one that is read.
    monkeypatch.setattr(running, "init", killed)
    resumed = run(config, out=out, resume="allowed")
    assert np.array_equal(resumed.train_loss, whole.train_loss)
    running.export_run(out, base)


def test_the_command_knows_schedules(capsys):
    assert main(["--recipe-schedule", "0.9=bf16", "--recipe", "bf16", "--out", "/nowhere"]) == 2
    assert "never switches at 0.9" in capsys.readouterr().err
    for wrong, form in {
        "--recipe-schedule foo": "foo: write PART=RECIPE, such as 0.9=bf16",
        "--ends 1=bf16": "1=bf16: write FIRST,LAST=RECIPE, such as 0,2=bf16",
    }.items():
        with pytest.raises(SystemExit):
            main(wrong.split())
        assert form in capsys.readouterr().err


class FakeWriter:
    written: list = []  # noqa: RUF012

    def __init__(self, folder, purge_step):
        self.written.append((folder, purge_step))

    def add_scalar(self, name, value, step):
        self.written.append((name, value, step))

    def close(self):
        self.written.append("closed")


def test_tensorboard_gets_losses_and_reports(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=FakeWriter))
    done = tmp_path / "metrics.jsonl"  # of a run that was killed: what its writer held back is written anew
    done.write_text('{"step": 3, "loss": 3.0}\n{"step": 4, "loss": 2.5, "monitor": {"layers/up": {"moved": 0.25}}}\n')
    board = Board(tmp_path, done)
    board.add(5, np.array([2.0, 1.0]), json.loads('{"layers/up": {"x": {"snr": [31.5, null]}, "moved": 0.5}}'))
    board.close()
    assert FakeWriter.written == [
        (str(tmp_path), 1), ("loss", 3.0, 3), ("loss", 2.5, 4), ("layers/up/moved", 0.25, 4), ("loss", 2.0, 5),
        ("loss", 1.0, 6), ("layers/up/x/snr/0", 31.5, 6), ("layers/up/moved", 0.5, 6), "closed",
    ]  # fmt: skip


def test_without_tensorboard_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[monitor\]'"):
        run(CONFIG, out=tmp_path / "run", tensorboard="on")
    with pytest.raises(ValueError, match="without out"):
        run(CONFIG, tensorboard="on")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_too_short_has_no_picture(tmp_path):
    with pytest.raises(ValueError, match="no step was observed"):
        plot_reports(tmp_path / "monitor.png", {}, title="none")
