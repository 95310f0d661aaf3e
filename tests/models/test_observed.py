"""Runs that are observed, and runs that start from a checkpoint of floats."""

import importlib.machinery
import json
import sys
import types
import zipfile
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import tcfp_jax
from models.training import running
from models.training.forms import Stored
from models.training.monitoring import Board, read_reports
from models.training.parameters import export
from models.training.plotting import color_range, matrix_of, plot_reports
from models.training.running import run
from models.training.state import float_parameters
from models.training.steps import (
    batch_key,
    init,
    make_monitored_step,
    state_shapes,
)
from tests.helpers import parametrize, refused, same_bits, slow
from tests.models.test_train import CONFIG as MICRO_RUN
from tests.models.test_train import MICRO

pytestmark = pytest.mark.usefixtures("standard_promotion")
CONFIG = replace(
    MICRO_RUN, steps=20, sequence=16, heldout_windows=8, recipe="tcfp12_fast"
)
# Moments of 8 bits are most of a step's program, and nothing here reads them.
STORED = replace(CONFIG, recipe="tcfp12_single", weights=Stored("float32"))


def test_an_observed_step_reports_operands_and_updates():
    config = replace(STORED, monitor=1, steps_per_call=1)
    text = jax.ShapeDtypeStruct((64,), jnp.int32)
    state = state_shapes(config)
    step = make_monitored_step(config, 1)
    *_, report = jax.eval_shape(step, state, text, batch_key(config))
    assert {*report["block_0/qkv/kernel"]} == {"x", "w", "g", "moved", "edq", "stale"}


@slow  # a quicker one has the report of a step
def test_a_run_is_observed(tmp_path):
    config = replace(STORED, monitor=1, steps=2, steps_per_call=1, final_fraction=0.5)
    result = run(config, out=tmp_path)
    assert list(result.reports) == [1, 2]
    assert result.reports == read_reports(tmp_path / "metrics.jsonl")
    for step, report in result.reports.items():
        assert {path.split("/")[0] for path in report} >= {"block_0"}
        for weight in report.values():
            assert 25 < weight["x"]["snr"] < 36
            assert 0 <= weight["stale"] <= 1
            assert weight["g"]["amax"] > 0
            if step > 1:  # the first rate is 0
                assert 0 < weight["moved"] <= 1
                assert weight["edq"] == pytest.approx(1, abs=0.1)
    plot_reports(tmp_path / "monitor.png", result.reports, title="micro")
    assert (tmp_path / "monitor.png").stat().st_size > 10_000


@parametrize(
    "kept, products",
    [
        ("tensorwise", "bf16"),
        pytest.param("nvfp4_training", None, marks=slow),
    ],
)
def test_products_of_floats_are_observed(kept, products):
    config = replace(CONFIG, recipe=kept, monitor=10, steps_per_call=1)
    if products is not None:
        config = replace(config, finish=f"{products}:0.5").ending
    text = jax.ShapeDtypeStruct((64,), jnp.int32)
    step = make_monitored_step(config, 1)
    state = state_shapes(config)
    _, losses, report = jax.eval_shape(step, state, text, batch_key(config))
    assert losses.shape == (1,)
    # They read no quantized weight, so no update of one is measured.
    assert {*report["block_0/qkv/kernel"]} >= {"x", "w", "g"}
    assert "edq" not in report["block_0/qkv/kernel"]


def test_colors_do_not_make_a_picture_of_noise():
    names, values = matrix_of(
        {5: {"up": {"x": {"snr": 31.5}}, "down": {"x": {"snr": None}}, "b": {}}},
        ("x", "snr"),
    )
    # a gap
    assert names == ["up", "down"]
    assert values[0, 0] == 31.5
    assert np.isnan(values[1, 0])
    low, high = color_range(values, (None, None), 10.0)
    assert (low, high) == (26.5, 36.5)
    assert color_range(np.array([5.0, 31.5]), (None, None), 10.0) == (5.0, 31.5)


@parametrize(
    "change, message",
    [
        (
            {"monitor": 25},
            "monitor=25 of steps=20: no step would be observed; lower monitor",
        ),
        ({"monitor": 7}, "not a multiple of steps_per_call=5.*use 5"),
        ({"start": "base.npz", "initial_jitter": 0.1}, "leave one of them out"),
    ],
)
def test_wrong_settings_say_how_to_repair_them(change, message):
    with refused(message):
        replace(CONFIG, **change)


def test_a_run_starts_from_floats_and_ends_in_them(tmp_path):
    floats = init(replace(CONFIG, seed=3)).params
    base = tmp_path / "base.npz"
    written = tmp_path / "written.npz"
    export(base, floats)
    stored = init(replace(STORED, start=str(base))).params

    def kernel(params):
        return np.asarray(tcfp_jax.dequantize(params)["block_0"]["qkv"]["kernel"])

    assert_allclose(
        kernel(stored), kernel(floats), atol=5e-3 * np.abs(kernel(floats)).max()
    )
    assert same_bits(stored["embedding"], floats["embedding"])
    export(written, float_parameters(stored))
    again = init(replace(CONFIG, start=str(written))).params
    assert same_bits(again, tcfp_jax.dequantize(stored))

    for change, message in (
        (
            {"width": 64},
            "parameters of another model: 'block_0/attention_norm/bias' has shape",
        ),
        ({"layers": 2}, r"another model: 'block_1/.* no such array"),
    ):
        with refused(message):
            init(replace(STORED, model=replace(MICRO, **change), start=str(base)))
    with refused("no such file", FileNotFoundError):
        init(replace(STORED, start=str(tmp_path / "nothing.npz")))
    written.write_text("no arrays")
    with refused(r"not an \.npz of arrays by name"):
        run(replace(STORED, start=str(written)), out=tmp_path / "run")
    # The folder stays free for a run with the right file
    assert not (tmp_path / "run").exists()
    # Shapes are compared before arrays are read: this one is of another shape, and its
    # data is not there.
    with (
        zipfile.ZipFile(base) as sound,
        zipfile.ZipFile(tmp_path / "bomb.npz", "w") as bomb,
    ):
        for member in sound.namelist()[1:]:
            bomb.writestr(member, sound.read(member))
        with bomb.open(sound.namelist()[0], "w") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (2**40,)}
            np.lib.format.write_array_header_1_0(file, header)
    with refused(r"another model: .* shape \[1099511627776\] in the file"):
        init(replace(STORED, start=str(tmp_path / "bomb.npz")))
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "empty.npz").touch()
    (tmp_path / "cut.npz").write_bytes(base.read_bytes()[:-100])
    for name in ("written.npz", "one.npy", "empty.npz", "cut.npz"):
        with refused(r"not an \.npz of arrays by name"):
            init(replace(STORED, start=str(tmp_path / name)))


def test_a_run_that_has_a_checkpoint_goes_on_without_its_first_file(
    tmp_path, monkeypatch
):
    base = tmp_path / "base.npz"
    out = tmp_path / "run"
    export(base, init(replace(CONFIG, seed=3)).params)
    config = replace(STORED, start=str(base), steps=10)
    whole = run(config, out=out)
    base.rename(tmp_path / "moved.npz")
    # Restoring makes no second state.
    monkeypatch.setattr(running, "init", interrupted)
    resumed = run(config, out=out, resume="allowed")
    assert np.array_equal(resumed.train_loss, whole.train_loss)
    running.export_run(out, base)


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_a_run_that_ends_before_its_first_step_leaves_no_folder(tmp_path, monkeypatch):
    """Its first state is made again by the same command, so it needs no checkpoint."""
    base = tmp_path / "base.npz"
    out = tmp_path / "folders/run"
    export(base, init(replace(CONFIG, seed=3)).params)
    config = replace(STORED, start=str(base), steps=10)
    monkeypatch.setattr(running, "make_train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, out=out)
    assert not out.exists()
    base.rename(tmp_path / "moved.npz")
    with refused("no such file", FileNotFoundError):
        run(config, out=out, resume="allowed")
    assert not out.exists()


class FakeWriter:
    written: list = []  # noqa: RUF012

    def __init__(self, folder, purge_step):
        self.written.append((folder, purge_step))

    def add_scalar(self, name, value, step):
        self.written.append((name, value, step))

    def close(self):
        self.written.append("closed")


def test_tensorboard_gets_losses_and_reports(monkeypatch, tmp_path):
    fake = types.ModuleType("tensorboardX")
    fake.__spec__ = importlib.machinery.ModuleSpec("tensorboardX", None)
    fake.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    # a killed run lost lines that its writer held back
    done = tmp_path / "metrics.jsonl"
    done.write_text(
        '{"step": 3, "loss": 3.0}\n{"step": 4, "loss": 2.5, "monitor": {"layers/up":'
        ' {"moved": 0.25}}}\n'
    )
    board = Board(tmp_path, done)
    board.add(
        5,
        np.array([2.0, 1.0]),
        json.loads('{"layers/up": {"x": {"snr": [31.5, null]}, "moved": 0.5}}'),
    )
    board.close()
    assert FakeWriter.written == [
        (str(tmp_path), 1),
        ("loss", 3.0, 3),
        ("loss", 2.5, 4),
        ("layers/up/moved", 0.25, 4),
        ("loss", 2.0, 5),
        ("loss", 1.0, 6),
        ("layers/up/x/snr/0", 31.5, 6),
        ("layers/up/moved", 0.5, 6),
        "closed",
    ]


def test_without_tensorboard_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with refused(r"pip install -e '\.\[monitor\]'", ImportError):
        run(CONFIG, out=tmp_path / "run", outputs=running.Outputs("on"))
    with refused("without out"):
        run(CONFIG, outputs=running.Outputs("on"))
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_too_short_has_no_picture(tmp_path):
    with refused("no step was observed"):
        plot_reports(tmp_path / "monitor.png", {}, title="none")
