"""The folder of a run is never wrong in silence: locks, damage, links, full disks."""

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from models import train
from models.nets.shapes import GPTConfig
from models.training import room, running, samples
from models.training.checkpoint import ENTRIES, RunDirectory
from models.training.described import check_same, describe, read_config, recorded
from models.training.evaluation import Heldout
from models.training.exporting import Export
from models.training.intact import (
    DIGESTS_FILE,
    LOCK_FILE,
    VERSION_FILE,
    check_digests,
    write_json,
    write_sealed,
)
from models.training.processes import end_after
from models.training.progress import Pace, bar_of
from models.training.settings import TrainConfig
from models.training.state import TrainState
from tcfp_jax.paths import leaves
from tests.helpers import parametrize, refused, same_bits

CONFIG = TrainConfig(
    model=GPTConfig(layers=1, width=32, heads=2, context=32),
    sequence=32,
    steps=60,
    recipe="tcfp12",
)
SHAPE = (64, 48)


def state_of(step):
    """A small state of its own for each step."""
    values = np.random.default_rng(step).standard_normal(SHAPE).astype(np.float32)
    return TrainState(
        {"kernel": jnp.asarray(values)},
        (jnp.asarray(values[:2]).astype(jnp.bfloat16),),
        jnp.int32(step),
    )


def opened(path, config=CONFIG):
    return RunDirectory(path, config, "digest", resume="allowed")


def restored(path):
    """Return the step from which a folder goes on, after a check of the state, and the
    losses.
    """
    with opened(path) as directory:
        state, losses = directory.restore(state_of(0))
    expected = state_of(int(state.step))
    assert np.array_equal(state.params["kernel"], expected.params["kernel"])
    assert len(losses) == int(state.step)
    return int(state.step), losses


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with checkpoints of steps 3 and 5."""
    path = tmp_path_factory.mktemp("written") / "run"
    with opened(path) as directory:
        directory.append(1, np.arange(1.0, 6.0))
        for step in (3, 5):
            directory.save(state_of(step), step)
    return path


@pytest.fixture
def run(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_every_flipped_byte_of_a_checkpoint_is_seen(run):
    checkpoint = run / "checkpoints/5"
    assert check_digests(checkpoint)
    rng = np.random.default_rng(0)
    files = files_of(checkpoint)
    sizes = np.array([path.stat().st_size for path in files])
    for place in range(40):
        path = files[
            (
                rng.choice(len(files), p=sizes / sizes.sum())
                if place >= len(files)
                else place
            )
        ]
        sound = path.read_bytes()
        damaged = bytearray(sound)
        if damaged:
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
            path.write_bytes(damaged)
            with refused(r"has changed since it was written|is missing|is not JSON"):
                check_digests(checkpoint)
            path.write_bytes(sound)
    assert check_digests(checkpoint)


DAMAGES = {
    "flip": lambda path: path.write_bytes(
        bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    ),
    "truncate": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
    ),
    "empty": lambda path: path.write_bytes(b""),
    "delete": lambda path: path.unlink(),
}


@parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(run, capsys, damage):
    checkpoint = run / "checkpoints/5"
    names = [
        path.relative_to(checkpoint)
        for path in files_of(checkpoint)
        if path.stat().st_size
    ]
    assert len(names) > 5
    for name in names:  # every file is seen; all of a restore only for the largest
        sound = (checkpoint / name).read_bytes()
        DAMAGES[damage](checkpoint / name)
        if name.name == DIGESTS_FILE and damage == "delete":
            assert not check_digests(checkpoint)
        else:
            with refused(r"changed|missing|JSON"):
                check_digests(checkpoint)
        (checkpoint / name).write_bytes(sound)
    DAMAGES[damage](max(files_of(checkpoint), key=lambda path: path.stat().st_size))
    step, losses = restored(run)
    assert step == 3
    assert losses == [1.0, 2.0, 3.0]
    said = capsys.readouterr().err
    assert "checkpoint 5 is damaged" in said
    assert "going on from 3" in said
    assert (run / "damaged/5").is_dir()
    with opened(run) as directory:  # its step is written again
        directory.append(4, np.array([4.0, 5.0]))
        directory.save(state_of(5), 5)
    assert restored(run)[0] == 5


def test_without_a_whole_checkpoint_the_repair_is_named(run):
    for step in (3, 5):
        shutil.rmtree(run / f"checkpoints/{step}/default")
    with refused(
        r"no whole checkpoint: 5 \(.*missing\), 3 \(.*; copy one back, remove that"
    ):
        restored(run)
    # nothing is moved
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["3", "5"]
    shutil.rmtree(run / "checkpoints")
    assert restored(run) == (0, [])


def test_a_checkpoint_without_digests_is_read_and_its_damage_named(run, capsys, caplog):
    for step in (3, 5):
        (run / f"checkpoints/{step}/{DIGESTS_FILE}").unlink()
    assert restored(run)[0] == 5
    assert (
        "checkpoint 5 has no digests.json, so damage to it may go unseen"
        in capsys.readouterr().err
    )
    for path in files_of(run / "checkpoints/5"):
        path.write_bytes(b"")
    caplog.clear()
    assert restored(run)[0] == 3
    assert [record for record in caplog.records if record.name == "absl"] == []
    assert not logging.getLogger("absl").disabled


def test_a_whole_checkpoint_of_another_state_is_no_damage(run):
    other = state_of(0)._replace(
        params={"kernel": jnp.ones((3, 3)), "more": jnp.ones(2)}
    )
    wrote = (
        rf"tcfp_jax {tcfp_jax.__version__}, jax {jax.__version__} wrote it, tcfp_jax "
    )
    for message in (wrote, "unknown versions wrote it"):
        whole = "has not changed, but does not hold .*" + message
        with opened(run) as directory, refused(whole):
            directory.restore(other)
        # A checkpoint of before has digests alone.
        (run / "checkpoints/5" / VERSION_FILE).unlink(missing_ok=True)
        path = run / "checkpoints/5" / DIGESTS_FILE
        digests = json.loads(path.read_text())
        write_json(
            path,
            {name: digest for name, digest in digests.items() if name != VERSION_FILE},
        )


LINES = [json.dumps({"step": step, "loss": float(step)}) for step in range(1, 6)]


@parametrize(
    ("lines", "losses"),
    [
        ([*LINES[:3], *LINES[1:]], [1, 2, 3, 4, 5]),  # two processes wrote them
        ([*LINES, *LINES], [1, 2, 3, 4, 5]),
        (
            [LINES[0], "[]", '"step"', "7", '{"step": "2", "loss": 1}', *LINES[2:]],
            [1, None, 3, 4, 5],
        ),
        (
            [
                LINES[0],
                '{"step": 2}',
                '{"loss": 2}',
                '{"step": 3, "loss": "x"}',
                *LINES[3:],
            ],
            [1, None, None, 4, 5],
        ),
        (
            ["[" * 100_000, *LINES[1:4], '{"step": 5, "loss": 5.0, "monitor": 3}'],
            [None, 2, 3, 4, None],
        ),
        (
            [
                '{"step": 1, "loss": ' + "9" * 400 + "}",
                '{"step": 2, "loss": NaN}',
                '{"step": 3, "loss": true}',
                '{"step": 4, "loss": 1e400}',
                LINES[4],
            ],
            [None, None, None, None, 5],
        ),
        ([], [None] * 5),
    ],
)
def test_metrics_are_repaired_from_the_step_of_the_checkpoint(
    run, capsys, lines, losses
):
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    step, found = restored(run)
    assert step == 5
    assert [None if math.isnan(loss) else loss for loss in found] == losses
    lost = sum(loss is None for loss in losses)
    unchanged = lines[:5] == LINES
    assert (
        unchanged
        or f"is repaired: one line for each of 5 steps, {lost} unknown"
        in capsys.readouterr().err
    )
    entries = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert entries == [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]


def test_a_second_process_is_refused_until_the_first_dies(run):
    """Another process holds the lock; a dead one holds none, although its file is
    there.
    """
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, 2);"
        " print('held', flush=True); sys.stdin.read()"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first = subprocess.Popen(
        [sys.executable, "-c", hold, str(run / LOCK_FILE)], **pipes
    )
    try:
        assert first.stdout.readline() == b"held\n"
        before = (run / "metrics.jsonl").read_bytes()
        with refused(r"process \d+ of .* writes .*run; wait until it ends"):
            opened(run)
        assert (run / "metrics.jsonl").read_bytes() == before
    finally:
        first.kill()
        first.communicate()
    assert restored(run)[0] == 5


def test_two_runs_of_one_process_are_refused_too_and_a_refusal_holds_no_lock(run):
    with (
        opened(run),
        refused(r"writes .*run; wait until it ends"),
    ):
        opened(run)
    with refused("another run"):
        opened(run, dataclasses.replace(CONFIG, seed=1))
    assert restored(run)[0] == 5


@parametrize("name", [LOCK_FILE, "metrics.jsonl"])
def test_a_folder_that_cannot_be_written_is_named(run, name):
    (run / name).unlink()
    (run / name).mkdir()  # root may write files that are read-only
    with refused(r"cannot hold a run, as nothing|cannot be read and written"):
        restored(run)


WHOLE = describe(
    dataclasses.replace(CONFIG, recipe="tcfp12", dtype="float32"), "digest"
)


@parametrize(
    "content",
    [
        "",
        "{",
        "{}",
        "[]",
        "null",
        '{"config": {}}',
        '{"config": []}',
        "[" * 100_000,
        "\udcff",
        json.dumps({**WHOLE, "config": {**WHOLE["config"], "unknown": 1}}),
        json.dumps(
            {
                **WHOLE,
                "config": {
                    **WHOLE["config"],
                    "recipe": {"weight": {"kind": "Tripled"}},
                },
            }
        ),
        json.dumps({**WHOLE, "config": {**WHOLE["config"], "steps": "many"}}),
        json.dumps({**WHOLE, "config": {**WHOLE["config"], "model": {"layers": 1}}}),
    ],
    ids=range(13),
)
def test_a_config_that_describes_no_run_is_named(tmp_path, capsys, content):
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    assert "config.json describes no run" in capsys.readouterr().err


def flips(content, count):
    """Yield a content with one flipped bit, at many places."""
    rng = np.random.default_rng(0)
    for place in rng.choice(8 * len(content), count, replace=False):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << (place % 8)
        yield bytes(damaged)


def test_every_flipped_bit_of_a_config_is_seen(run, capsys):
    path = run / "config.json"
    sound = path.read_bytes()
    config = read_config(run)
    silent = []
    for damaged in flips(sound, 400):
        path.write_bytes(damaged)
        try:
            assert read_config(run) == config  # its digest has another name
            opened(run)
        except ValueError:
            continue
        silent.append(damaged)
    assert silent == []
    path.write_bytes(sound)
    assert restored(run)[0] == 5
    assert capsys.readouterr().err == ""
    # A folder of before has no digest.
    content = {name: of for name, of in json.loads(sound).items() if name != "digest"}
    write_json(path, content)
    assert restored(run)[0] == 5
    assert "config.json has no digest, so damage" in capsys.readouterr().err


def test_every_flipped_bit_of_the_metrics_is_seen(run, capsys):
    path = run / "metrics.jsonl"
    sound = path.read_bytes()
    with opened(run) as directory:
        directory.restore(state_of(0))
        assert capsys.readouterr().err == ""
        for damaged in flips(sound, 400):
            path.write_bytes(damaged)
            directory._repair_metrics(5)
            said = capsys.readouterr().err
            is_repaired = "is repaired" in said and path.read_bytes() == sound
            assert is_repaired or "changed since checkpoint 5 was written" in said


LINKED = [
    LOCK_FILE,
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "loss.png",
    "checkpoints",
    "checkpoints/5/default",
    "checkpoints/5/digests.json",
    "damaged",
    "tensorboard",
    "compare_bf16",
]


@parametrize("target", ["secret", "missing", "/dev/null"])
@parametrize("name", LINKED)
def test_a_link_of_a_run_reaches_no_other_file(run, name, target):
    secret = run.parent / "secret"
    secret.write_text("PRIVATE")
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(run.parent / target)
    with refused(f"'{name}' lies outside of .*run"):
        opened(run)
    assert secret.read_text() == "PRIVATE"
    assert not (run.parent / "missing").exists()


def test_a_pipe_in_a_run_is_refused_instead_of_awaited(run):
    for name in (LOCK_FILE, "config.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
        with refused(f"{name} is a device or a pipe"):
            opened(run)
        (run / name).unlink()


@parametrize("name", ["/dev/zero", "../../../secret", "../3/digests.json"])
def test_digests_name_files_of_their_checkpoint_alone(run, name):
    (run.parent / "secret").write_text("PRIVATE")
    write_json(run / "checkpoints/5" / DIGESTS_FILE, {name: "0" * 32})
    with refused(f"{name} is missing"):
        check_digests(run / "checkpoints/5")


@parametrize("content", [b"[]", b"[" * 100_000])
def test_metadata_that_orbax_cannot_read_are_named(run, content):
    (run / "checkpoints/5/_CHECKPOINT_METADATA").write_bytes(content)
    for _ in range(2):  # the lock is free again
        with refused(r"run/checkpoints cannot be read \("):
            opened(run)


def test_a_step_beyond_the_run_is_no_checkpoint_of_it(run, capsys):
    """One line of metrics for each of so many steps would fill the memory."""
    (run / "checkpoints/5").rename(run / "checkpoints/1000000000000")
    assert restored(run)[0] == 3
    assert "damaged (the run ends at step 60)" in capsys.readouterr().err


def test_a_full_disk_keeps_the_whole_checkpoints(run, monkeypatch):
    full = OSError(28, "No space left on device")
    message = (
        "RESOURCE_EXHAUSTED: Error writing x: Failed to write 5 bytes: No space left on"
        " device [os_error_code='28']\nand more"
    )
    with opened(run) as directory:
        for error in (full, ValueError(message)):

            def fail(*args, error=error, **options):
                raise error

            monkeypatch.setattr(directory._manager, "save", fail)
            with refused(
                r"checkpoints/7 cannot be written \(.*No space left on d", OSError
            ):
                directory.save(state_of(7), 7)
    assert restored(run)[0] == 5


def test_a_disk_for_two_checkpoints_gets_the_third_in_place_of_the_first(
    run, monkeypatch
):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=SHAPE[0])
    )

    def names():
        return [path.name for path in sorted((run / "checkpoints").iterdir())]

    with opened(run) as directory:
        with monkeypatch.context() as patch:
            patch.setattr(directory._manager, "save", lambda *_, **__: 1 / 0)
            with refused("checkpoints/7 cannot be written", OSError):
                directory.save(state_of(7), 7)
        assert names() == ["5"]
        for step in (7, 9):
            assert directory.save(state_of(step), step) > SHAPE[0] * SHAPE[1]
    assert names() == ["7", "9"]


@parametrize(
    "free, there, message",
    [
        (
            300,
            (),
            "300 B free, but the run will write 400 B (2 checkpoints of 200 B in",
        ),
        (400, (), None),
        (199, (50,), "will write 200 B (1 checkpoint of 200 B in"),
        (200, (50,), None),
        (0, (40, 50), None),
        (0, (60,), None),
    ],
)
def test_a_disk_without_room_is_named_before_the_run(
    tmp_path, monkeypatch, free, there, message
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(room, "state_bytes", lambda config: 200)
    for step in there:
        (tmp_path / "run/checkpoints" / str(step)).mkdir(parents=True)
    files = list(room.files_of(CONFIG, tmp_path / "run", 6))
    if message is None:
        room.check_room(files)
    else:
        with refused(re.escape(message)):
            room.check_room(files)
    assert list(room.files_of(CONFIG, tmp_path, 0)) == []


def test_a_refusal_for_the_disk_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**4))
    exported = Export(tmp_path / "new/weights.npz")
    with refused(r"2 checkpoints of .* weights of .*new"):
        running.run(
            CONFIG, out=tmp_path / "run", outputs=running.Outputs(export=exported)
        )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def still(monkeypatch):
    """Steps without arithmetic, after which the weights are the first ones."""

    def make_train_step(config, count, mesh):
        def steps(state, text, key):
            return state._replace(step=state.step + count), np.full(count, 2.0)

        return steps

    monkeypatch.setattr(running, "make_train_step", make_train_step)
    found = Heldout(2.0, math.exp(2.0), 2.0, {})
    monkeypatch.setattr(running, "evaluated", lambda *arguments: found)


def test_a_run_without_checkpoints_exports_its_last_state(tmp_path, still):
    path = tmp_path / "new/weights.npz"
    out = tmp_path / "run"
    outputs = running.Outputs(export=Export(path))
    running.run(CONFIG, out=out, checkpoint_every=0, outputs=outputs)
    assert list((out / "checkpoints").iterdir()) == []
    assert same_bits(dict(np.load(path)), leaves(train.init(CONFIG).params))
    with refused("has no checkpoint with weights to export"):
        train.export_run(out, path)


def test_a_run_of_a_gpu_is_exported_on_a_cpu(tmp_path, still):
    """As docs/finetune.md does with a model whose floats fit no GPU."""
    out = tmp_path / "run"
    running.run(CONFIG, out=out)
    content = recorded(out)
    assert content["device"] == "cpu"
    write_sealed(out / "config.json", {**content, "device": "gpu"})
    path = tmp_path / "weights.npz"
    train.export_run(out, path)
    assert same_bits(dict(np.load(path)), leaves(train.init(CONFIG).params))
    with refused("device='gpu' in the folder but 'cpu' now"):
        running.run(CONFIG, out=out, resume="allowed")


def test_the_pace_leaves_out_compilation_and_pauses(monkeypatch):
    times = iter([0.0, 10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    pace = Pace()
    assert math.isnan(pace.tokens_per_second)
    pace.passed(0)
    pace.passed(100)
    pace.resume()
    pace.passed(50)
    assert pace.tokens_per_second == 150 / (12 - 10 + 21 - 20)


@parametrize("recipe", ["tcfp12", tcfp_jax.recipe("tcfp12", wgrad="full")])
def test_a_bar_writes_lines_where_no_terminal_shows_it(capsys, recipe):
    config = dataclasses.replace(CONFIG, recipe=recipe)
    with bar_of(config, 0, True) as bar:
        bar.update(CONFIG.steps // 2 * CONFIG.tokens_per_step)
    said = capsys.readouterr().err
    assert "\r" not in said
    assert said.splitlines()[-1].startswith("tcfp12:  50%|")


@parametrize("steps", [0, 1])
def test_nothing_is_left_of_a_run_that_made_no_step(tmp_path, steps):
    path = tmp_path / "run"

    def interrupted():
        with opened(path) as directory:
            directory.append(1, np.ones(steps))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.exists() == (steps > 0)


SAMPLES = [dict(step=step, prompt="def", text=str(step)) for step in (3, 5)]


@parametrize(
    "lines, step, kept, is_made",
    [
        (SAMPLES, 5, SAMPLES, False),
        (SAMPLES, 3, SAMPLES[:1], False),
        (SAMPLES[:1], 5, SAMPLES[:1], True),
        ([], 5, [], True),
        ([], 0, [], False),
        ([*SAMPLES, dict(SAMPLES[1], prompt="other")], 3, SAMPLES[:1], False),
    ],
)
def test_the_sample_of_a_checkpoint_is_made_if_a_kill_lost_it(
    tmp_path, monkeypatch, lines, step, kept, is_made
):
    made = []
    monkeypatch.setattr(samples, "sample", lambda *arguments: made.append(arguments[2]))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / samples.SAMPLES_FILE).write_text(text + '{"step": 3, "pro')
    config = dataclasses.replace(CONFIG, sample="def")
    samples.resume_samples(config, None, step, SimpleNamespace(path=tmp_path))
    written = (tmp_path / samples.SAMPLES_FILE).read_text().splitlines()
    assert [json.loads(line) for line in written] == kept
    assert made == [step] * is_made


def test_an_error_of_the_disk_is_a_sentence_with_the_command(
    tmp_path, monkeypatch, capsys
):
    def fail(*args):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(train, "_report", fail)
    assert train.main(["--steps", "20", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "error: [Errno 28] No space left on device: 'metrics.jsonl'; repair" in said
    assert "there is no checkpoint yet; begin anew with: python -m models" in said
    assert "--resume" in said


def test_other_links_of_a_run_are_left_alone(run):
    (run.parent / "secret").write_text("PRIVATE")
    for name in ("config.json.partial", "metrics.jsonl.partial", "data"):
        (run / name).symlink_to(run.parent / "secret")
    assert restored(run)[0] == 5
    assert (run.parent / "secret").read_text() == "PRIVATE"
    assert (run / "data").is_symlink()


def test_all_entries_that_a_run_writes_are_checked():
    written = set(re.findall(r'out / "([\w.]+)"', Path(train.__file__).read_text()))
    assert written == {"loss.png", "monitor.png", "summary.json"}
    written |= {samples.SAMPLES_FILE, running.BOARD, train.BASELINE_FOLDER}
    assert written <= set(ENTRIES)


def test_an_error_of_the_disk_ends_several_processes_with_a_sentence(
    monkeypatch, capsys
):
    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        end_after(OSError(28, "No space left on device"), "continue")
    said = capsys.readouterr().err
    assert "cannot go on ([Errno 28] No space left on device), as" in said
    assert "Traceback" not in said


def test_a_folder_goes_on_without_settings_that_came_later():
    config = TrainConfig(model="tiny", recipe="tcfp12_single", batch=2, sequence=16)
    wanted = describe(config, "digest")
    older = json.loads(json.dumps(wanted))
    for name in ("accumulate", "finish", "beta", "label_smoothing"):
        del older["config"][name]
    del older["recipe"]["storage"], older["recipe"]["weight"]["sparse_threshold"]
    check_same(Path("run"), older, wanted, "folder")
    other = describe(dataclasses.replace(config, accumulate=2), "digest")
    with refused("accumulate=1 in the folder but 2 now"):
        check_same(Path("run"), older, other, "folder")
