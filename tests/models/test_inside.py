"""Runs that update layers inside the backward pass."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import train
from models.nets.meshes import everywhere, make_mesh, parse_mesh
from models.nets.shapes import LlamaConfig
from models.training import deciding, flags, running
from models.training.described import read_config
from models.training.fitting import with_update
from models.training.forms import Stored
from models.training.settings import Data, TrainConfig, config_of, preset, settings_of
from models.training.steps import batch_key, init, lowered_step, make_train_step
from tcfp_jax.remat import step_bytes
from tests.helpers import parametrize, refused, same_bits, slow, slow_except

SIZE = LlamaConfig(
    layers=2,
    width=128,
    heads=4,
    kv_heads=4,
    hidden=128,
    context=32,
    remat="block",
    head="untied",
)
# XLA's attention and optax's schedules promote dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")
# Nothing is clipped, so both kinds of steps have the same bits.
RUN = TrainConfig(
    model=SIZE,
    recipe="tcfp12_single",
    weights=Stored("8bit"),
    steps=4,
    batch=2,
    sequence=16,
    clip_norm=1e9,
)
INSIDE = replace(RUN, weights=Stored("8bit", "backward"))
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, 250, 4096), jnp.int32)


@slow_except("1")
@parametrize("count", [1, 2])
def test_a_run_has_the_bits_of_an_ordinary_one(count):
    found = []
    for config in (RUN, INSIDE):
        state = init(config)
        losses = []
        for _ in range(2 // count):
            step = make_train_step(config, count)
            state, some = step(state, TEXT, batch_key(config))
            losses += some.tolist()
        found.append((state, losses))
    assert found[0][1] == found[1][1]
    assert same_bits(found[0][0], found[1][0])


@slow
def test_a_mesh_has_the_losses_of_one_device():
    config = replace(INSIDE, batch=8, model=replace(SIZE, width=256, hidden=256))
    found = []
    for mesh in (None, make_mesh(parse_mesh("data=4,fsdp=2"))):
        step = make_train_step(config, 2, mesh)
        text = everywhere(TEXT, mesh)
        _, losses = step(init(config, mesh), text, batch_key(config))
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_settings_of_a_run_come_back():
    assert settings_of(INSIDE)["update"] == "backward"
    assert config_of(settings_of(INSIDE)) == INSIDE


@parametrize("given", [{"update": "backward"}, {"moments": "8bit"}])
def test_adapters_have_no_settings_of_weights_that_train(given):
    (name,) = given
    with refused(f"{name}=.* with lora=2"):
        config_of({"lora": 2, **given})


def test_auto_has_room_for_the_last_products(monkeypatch):
    def lower(config, mesh, text):
        return copies(behind=5 if config.products is None else 9, backward=3)(config)

    monkeypatch.setattr(deciding, "lowered_step", lower)
    found = []
    for config in (AUTO, replace(AUTO, steps=20, finish="bf16:0.5")):
        chosen = deciding.decided(config, TEXT, None, None, 100, False)
        assert chosen == config.updated(chosen.update)
        found.append(chosen.update)
    assert found == ["behind", "backward"]


@parametrize("given", ["0", "-1", "nan", "inf"])
def test_a_memory_that_is_no_size_is_refused(tmp_path, capsys, given):
    command = ["--update=auto", f"--memory={given}", "--out", str(tmp_path / "run")]
    assert train.main(command) == 2
    assert f"--memory {given} is no size" in capsys.readouterr().err


def test_memory_is_for_choices(tmp_path, capsys):
    assert train.main(["--memory=3", "--out", str(tmp_path / "run")]) == 2
    assert "nothing is chosen by bytes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_float_weights_are_not_updated_inside():
    with refused("update='backward' with weights='float'"):
        config_of({"update": "backward"})
    with refused("update"):
        Stored(update="inside")


def test_each_kind_of_run_goes_on_with_the_others_state():
    found = []
    for configs in ((RUN, RUN, RUN), (RUN, INSIDE, RUN)):
        state = init(RUN)
        for config in configs:
            state, _ = make_train_step(config, 1)(state, TEXT, batch_key(config))
        found.append(state)
    assert same_bits(*found)


def copies(**counts):
    """Steps that need 16 bytes for each copy, instead of those of a run."""
    x = jax.ShapeDtypeStruct((4,), jnp.float32)

    def lower(config):
        count = counts[config.update]
        return jax.jit(lambda x: jnp.tile(x, count)).lower(x)

    return lower


AUTO = RUN.updated("auto")


def test_auto_is_the_ordinary_step_if_it_fits():
    lower = copies(behind=9, backward=3)
    config, line = with_update(AUTO, lower, 160)
    assert config == RUN
    assert line == "update: behind (the step needs 1.6e-07 of 1.6e-07 GB)"
    config, line = with_update(AUTO, lower, 159)
    assert config == INSIDE
    assert line == (
        "update: backward (the step needs 6.4e-08 of 1.59e-07 GB, behind the backward"
        " pass 1.6e-07 GB)"
    )
    with refused(r"no level fits.*'backward', needs 64 bytes"):
        with_update(AUTO, lower, 63)


def test_auto_is_the_ordinary_step_if_memory_is_unknown_or_steps_are_observed():
    config, line = with_update(AUTO, copies(behind=9, backward=3))
    assert config == RUN
    assert re.search(r"behind \(.* does not report its memory.*--memory GB", line)
    observed = replace(AUTO, monitor=10, steps=10)
    config, line = with_update(observed, copies(behind=9, backward=3), 100)
    assert config.update == "behind"
    assert "--monitor" in line


def test_auto_asks_for_the_values_that_keep_least():
    open_ = replace(AUTO, model=replace(SIZE, remat="auto"))
    asked = []

    def lower(config):
        asked.append((config.update, config.size.remat))
        return copies(behind=9, backward=3)(config)

    config, _ = with_update(open_, lower, 100)
    assert asked == [("behind", "block"), ("backward", "block")]
    assert (config.update, config.size.remat) == ("backward", "auto")


@slow  # quicker tests have the choice
def test_a_run_chooses_by_the_bytes_of_its_steps_and_finds_them_compiled(capsys):
    config = replace(
        RUN,
        model=replace(SIZE, layers=8),
        data=Data(corpus_bytes=1_000_000),
        steps_per_call=2,
        steps=2,
        heldout_windows=4,
    )
    text = everywhere(running.corpus_of(config).train, None)
    needed = {}
    for update in ("behind", "backward"):
        lowered = lowered_step(config.updated(update), None, text)
        needed[update] = step_bytes(lowered.compile())
    assert needed["backward"] < needed["behind"]
    compiled = []

    def count(name, seconds, **more):
        if "backend_compile" in name:
            compiled.append(more.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(count)
    for update in needed:
        result = running.run(
            config.updated("auto"), memory=needed[update], progress="bar"
        )
        assert result.update == update
        assert f"update: {update} (the step needs" in capsys.readouterr().out
    assert "jit(train_step)" not in compiled


def test_auto_is_the_default_of_stored_weights_on_devices_that_report_memory(
    monkeypatch,
):
    assert preset().update == "behind"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = [preset(), preset(update="behind"), preset(recipe="tensorwise")]
    assert [config.update for config in found] == ["auto", "behind", "behind"]


def test_steps_of_auto_are_refused_and_so_are_observed_ones_inside():
    with refused("update='auto' is decided before"):
        make_train_step(AUTO, 1)
    with refused("monitor=10 with update='backward'"):
        replace(INSIDE, monitor=10, steps=10)


def stopped_after(calls, monkeypatch):
    """Let runs end by Ctrl-C after some calls of their steps."""
    made = running.make_train_step
    left = [calls]

    def make(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return made(*arguments)

    monkeypatch.setattr(running, "make_train_step", make)


@slow  # a quicker test has the states
def test_a_run_resumes_with_the_other_update(tmp_path, monkeypatch, capsys):
    settings = dict(steps_per_call=1, heldout_windows=4)
    config = replace(RUN, **settings, data=Data(corpus_bytes=1_000_000))
    whole = running.run(config)
    folder = tmp_path / "run"
    for update in ("behind", "backward"):
        with monkeypatch.context() as patch:
            stopped_after(1, patch)
            with pytest.raises(KeyboardInterrupt):
                running.run(
                    config.updated(update),
                    out=folder,
                    resume="allowed",
                    checkpoint_every=1,
                )
        assert read_config(folder).update == update
    assert "had update='behind' and goes on with 'backward'" in capsys.readouterr().err
    # "auto" is the choice of the folder.
    resumed = running.run(config.updated("auto"), out=folder, resume="allowed")
    assert resumed.update == "backward"
    assert np.array_equal(resumed.train_loss, whole.train_loss)
    assert resumed.heldout_loss == whole.heldout_loss


def test_flags_are_left_out_if_the_library_or_the_user_does_not_want_them(monkeypatch):
    assert flags.step_flags() == {}
    assert not flags.is_known("xla_gpu_no_such_flag")
    first, second = flags.OF_LOOPS
    known = [flags.is_known(name) for name in flags.OF_LOOPS]
    assert known == [True, jax.__version_info__ >= (0, 11)]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setenv("XLA_FLAGS", f"--{second}=false")
        flags.step_flags.cache_clear()
        assert flags.step_flags() == {first: True}
        assert flags.described() == (
            f"XLA: steps have --{first}=true; XLA_FLAGS with other values win"
        )
    flags.step_flags.cache_clear()
