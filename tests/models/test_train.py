"""The training run: repeatable, resumable after a kill at any moment, and careful with
folders that hold a run.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from models import train
from models.nets.shapes import GPTConfig, LlamaConfig
from models.nets.sizes import LLAMAS, MODELS
from models.train import TrainConfig, preset, run
from models.training import corpora, running
from models.training.batches import check_corpus
from models.training.checkpoint import RunDirectory
from models.training.described import describe, read_config
from models.training.forms import Float, Stored
from models.training.intact import write_json
from models.training.options import parser_of
from models.training.parameters import on_host
from models.training.settings import Data, config_of, settings_of
from models.training.text import Corpus
from tests.helpers import parametrize, refused, same_bits, slow, slow_except

# Optax's Adam raises a float to an integer power
pytestmark = pytest.mark.usefixtures("standard_promotion")
MICRO = GPTConfig(layers=1, width=32, heads=2, context=32)
MICRO_LLAMA = LlamaConfig(
    layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=32, remat="products"
)
CONFIG = TrainConfig(
    model=MICRO,
    steps=60,
    batch=4,
    sequence=32,
    steps_per_call=5,
    heldout_windows=16,
    data=Data(corpus_bytes=1_000_000),
    learning_rate=1e-2,
)
STORED = replace(CONFIG, recipe="tcfp12_single", weights=Stored("8bit"))
# Runs from which tests continue, by name.
CONFIGS = {
    "uninterrupted": CONFIG,
    "stored": STORED,
    "llama": replace(CONFIG, model=MICRO_LLAMA),
    # Moments of 8 bits are most of a step's program, and "stored" has them.
    "stored llama": replace(STORED, model=MICRO_LLAMA, weights=Stored("float32")),
    "update inside": replace(
        STORED,
        # The narrowest whose layers are updated inside the backward pass.
        model=replace(MICRO_LLAMA, width=128, kv_heads=4, hidden=128, remat="block"),
        weights=Stored("8bit", "backward"),
    ),
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Return a function of a name that returns the folder and the result of that run,
    which runs once.
    """
    runs = {}

    def whole(name):
        if name not in runs:
            out = tmp_path_factory.mktemp("runs") / name
            runs[name] = out, run(CONFIGS[name], out=out, checkpoint_every=30)
        return runs[name]

    return whole


def final_state(path, config):
    with RunDirectory(
        path, config, train.corpus_of(config).digest, resume="allowed"
    ) as directory:
        return directory.restore(train.init(config))[0]


@slow_except("stored")
@parametrize("name", CONFIGS)
def test_it_learns(name, whole_run):
    _, result = whole_run(name)
    assert result.train_loss[0] > 4.5
    assert result.heldout_loss < 3.5
    assert result.heldout_perplexity == pytest.approx(np.exp(result.heldout_loss))
    assert result.heldout_loss_bf16 == pytest.approx(result.heldout_loss, rel=0.02)
    assert result.heldout_loss_bf16 != result.heldout_loss


def test_recipes_share_initial_weights_and_batches():
    states = [train.init(replace(CONFIG, recipe=name)) for name in ("bf16", "tcfp12")]
    assert same_bits(states[0].params, states[1].params)
    other = train.init(replace(CONFIG, seed=1))
    assert not same_bits(states[0].params, other.params)


@slow_except("stored-between checkpoints")
@parametrize(
    "name, saves",
    [
        ("uninterrupted", "between checkpoints"),
        ("uninterrupted", "inside a checkpoint"),
        ("stored", "between checkpoints"),
        ("llama", "between checkpoints"),
        ("stored llama", "between checkpoints"),
        ("update inside", "between checkpoints"),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path, name, saves, whole_run):
    whole, expected = whole_run(name)
    out = tmp_path / "killed"
    config = CONFIGS[name]
    process = subprocess.Popen(
        [sys.executable, "-c", _program(out, config)], cwd=ROOT, env=_environment()
    )
    try:
        if saves == "between checkpoints":
            _wait_for(lambda: len(_lines(out)) >= 20, process)
        else:
            _wait_for(
                lambda: any(
                    "tmp" in path.name for path in (out / "checkpoints").glob("1*")
                ),
                process,
            )
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert 0 < len(_lines(out)) < CONFIG.steps
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')  # a line that a kill cut short

    resumed = run(config, out=out, resume="allowed", checkpoint_every=20)
    assert np.array_equal(resumed.train_loss, expected.train_loss)
    assert resumed.heldout_loss == expected.heldout_loss
    assert [json.loads(line)["step"] for line in _lines(out)] == list(
        range(1, CONFIG.steps + 1)
    )
    assert (out / "metrics.jsonl").read_bytes() == (
        whole / "metrics.jsonl"
    ).read_bytes()
    assert same_bits(final_state(out, config), final_state(whole, config))


STOCHASTIC = tcfp_jax.recipe("tcfp12", remainder="stochastic")


@slow_except("stored")
@parametrize(
    "change",
    [
        {"recipe": "bf16"},
        {"recipe": "tensorwise"},
        {"recipe": STOCHASTIC},
        {"recipe": tcfp_jax.recipe("rowwise")},
        {"recipe": tcfp_jax.recipe("blockwise", block=32)},
        {
            "recipe": tcfp_jax.recipe("tcfp12_single", copies="both"),
            "weights": Stored("8bit"),
        },
    ],
    ids=["bf16", "tensorwise", "stochastic", "rows", "blocks", "stored"],
)
def test_every_kind_of_state_is_restored(tmp_path, change):
    path = tmp_path / "run"
    config = replace(CONFIG, **change)
    state = train.init(replace(config, seed=5))
    digest = "digest"
    with RunDirectory(path, config, digest, resume="never") as directory:
        directory.append(1, np.ones(5))
        directory.save(state, 5)
    with RunDirectory(path, config, digest, resume="allowed") as directory:
        restored, losses = directory.restore(train.init(config))
    assert losses == [1.0] * 5
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert same_bits(restored, state)
    assert read_config(path) == replace(config, dtype=config.compute_dtype)


@pytest.fixture
def begun(tmp_path):
    """The folder of a run with five steps."""
    digest = train.corpus_of(CONFIG).digest
    with RunDirectory(tmp_path / "run", CONFIG, digest, resume="never") as directory:
        directory.append(1, np.ones(5))
    return tmp_path / "run"


def test_a_folder_with_a_run_is_not_overwritten(begun):
    before = (begun / "metrics.jsonl").read_bytes()
    with refused(r"holds a run .* --resume", FileExistsError):
        run(CONFIG, out=begun)
    assert (begun / "metrics.jsonl").read_bytes() == before


@parametrize(
    "change, message",
    [
        ({"seed": 7}, "seed=0 in the folder but 7 now"),
        ({"recipe": "bf16"}, "recipe='tcfp12' in the folder but 'bf16' now"),
        ({"steps": 80}, "steps=60 in the folder but 80 now"),
        (
            {"model": replace(MICRO, layers=2)},
            (
                r"another run: model\.layers=1 in the folder but 2 now; resume .*"
                r" choose another --out$"
            ),
        ),
        (
            {"model": MICRO_LLAMA},
            (
                "family='gpt' in the folder but 'llama' now.*kv_heads=None in the"
                " folder but 2 now"
            ),
        ),
        (
            {"weights": Stored("float32")},
            (
                r"weights='float' in the folder but 'stored'"
                r" now.*tcfp_jax\.store\(params, recipe"
            ),
        ),
    ],
)
def test_another_run_is_not_resumed(begun, change, message):
    with refused(message):
        run(replace(CONFIG, **change), out=begun, resume="allowed")


def test_stored_weights_are_not_resumed_as_floats(whole_run):
    message = (
        r"weights='stored' in the folder but 'float'"
        r" now.*tcfp_jax\.dequantize\(params\)"
    )
    with refused(message):
        run(CONFIG, out=whole_run("stored")[0], resume="allowed")


@parametrize(
    "name, change",
    [
        ("nvfp4", {"tile": "square"}),
        ("nvfp4", {"activation": "float8_e4m3fn", "rule": "fold_exact"}),
        ("nvfp4_training", {"forward_operands": "bf16"}),
        ("blockwise", {"block": 64}),
    ],
)
def test_a_folder_keeps_a_recipe_that_has_no_name(tmp_path, name, change):
    custom = tcfp_jax.recipe(name, **change)
    config = replace(CONFIG, recipe=custom, dtype="float32")
    write_json(tmp_path / "config.json", describe(config, "digest"))
    assert read_config(tmp_path) == config


@slow_except("stored-block_0/qkv/kernel")
@parametrize(
    "name, kernel",
    [("stored", "block_0/qkv/kernel"), ("stored llama", "layers/gate/kernel")],
)
def test_trained_weights_are_exported_as_floats(tmp_path, name, kernel, whole_run):
    out, result = whole_run(name)
    config = CONFIGS[name]
    # in folders that do not exist yet
    path = tmp_path / "exports" / name / "weights.npz"
    train.export_run(out, path)
    exported = dict(np.load(path))
    params = tcfp_jax.dequantize(final_state(out, config).params)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert same_bits(exported, named)
    assert exported[kernel].dtype == np.float32
    # Served by a program that knows nothing of stored weights.
    floats = train.TrainState(params, (), jnp.int32(0))
    heldout = jnp.asarray(train.corpus_of(config).heldout)
    assert (
        train.evaluate(config.in_bf16, floats, heldout, "bf16")
        == result.heldout_loss_bf16
    )
    if name == "stored":  # a Llama is written as a folder of Hugging Face, too
        with refused(r"choose a name that ends in \.npz"):
            train.export_run(out, tmp_path / "weights.safetensors")
    for unwritable, why in (
        (path / "in_a_file.npz", "lies below"),
        (path.parent / "f.npz", "is a folder"),
    ):
        (path.parent / "f.npz").mkdir(exist_ok=True)
        with refused(why):
            train.export_run(out, unwritable)


def test_parts_of_a_run_without_its_config_are_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with refused("belongs to no run", FileExistsError):
        run(CONFIG, out=tmp_path)


def test_a_damaged_checkpoint_costs_steps_and_no_bit(tmp_path, whole_run, capsys):
    out = tmp_path / "copy"
    whole, result = whole_run("stored")
    shutil.copytree(whole, out)
    (out / "checkpoints/60/default/manifest.ocdbt").unlink()
    resumed = run(STORED, out=out, resume="allowed", checkpoint_every=30)
    assert "checkpoint 60 is damaged" in capsys.readouterr().err
    assert np.array_equal(resumed.train_loss, result.train_loss)
    assert resumed.heldout_loss == result.heldout_loss
    assert same_bits(final_state(out, STORED), final_state(whole, STORED))


def test_a_diverged_run_stops_and_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    """Steps without arithmetic, whose loss is not finite from step 23 on."""

    def make_train_step(config, count, mesh):
        def steps(state, text, key):
            after = int(state.step) + 1 + np.arange(count)
            return state._replace(step=state.step + count), np.where(
                after < 23, 2.0, np.nan
            )

        return steps

    monkeypatch.setattr(running, "make_train_step", make_train_step)
    with refused(
        r"24 to 35 are not finite; .* below 0\.01",
        FloatingPointError,
    ):
        run(CONFIG, out=tmp_path, checkpoint_every=5, bad_steps=12)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "15",
        "20",
    ]
    assert [json.loads(line)["loss"] for line in _lines(tmp_path)] == [2.0] * 22 + [
        None
    ] * 13
    with refused("steps 60 to 60 are not finite; start anew", FloatingPointError):
        run(CONFIG, bad_steps=1000)
    with refused("bad_steps=0 must be at least 1"):
        run(CONFIG, bad_steps=0)


@parametrize(
    "change, message",
    [
        ({"model": "huge"}, "model 'huge' is unknown"),
        ({"recipe": "fp7"}, "recipe 'fp7' is unknown"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"seed": 2**32}, "seed=4294967296 must be an integer of 32 bits"),
        ({"seed": 2**70}, "must be an integer of 32 bits"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"sequence": 33}, "sequence=33 exceeds the context"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be positive"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"final_fraction": 1.5}, "final_fraction=1.5 must be in 0 to 1"),
        ({"dtype": "float16"}, "dtype='float16' is unknown"),
        ({"error_dtype": "float16"}, "error_dtype='float16' is unknown"),
        ({"weights": "packed"}, "weights='packed' is unknown"),
        ({"weights": "stored", "moments": "fp8"}, "moments='fp8' is unknown"),
        ({"moments": "8bit"}, "moments='8bit' with weights='float'"),
        (
            {"weights": "stored", "recipe": "tensorwise"},
            "weights='stored' with recipe 'tensorwise': the recipe has no residual",
        ),
        (
            {"weights": "stored", "error_dtype": "bfloat16"},
            "error_dtype='bfloat16' with weights='stored'",
        ),
    ],
)
def test_config_names_what_is_wrong(change, message):
    with refused(message):
        config_of({**settings_of(CONFIG), **change})


def test_a_field_that_does_nothing_is_named():
    with refused("with recipe 'tensorwise': no error of a weight is kept"):
        preset("tiny", recipe="tensorwise", error_dtype="bfloat16")


def test_checkpoints_fall_on_calls():
    with refused("checkpoint_every=7 is not a multiple of steps_per_call=5; use 5"):
        run(CONFIG, checkpoint_every=7)


def test_a_gpt_does_not_start_from_a_folder(tmp_path):
    with refused("is a folder, which only Llamas start from"):
        on_host(tmp_path, None, MICRO)


def test_too_little_text():
    with refused("one window needs 33"):
        train.evaluate(CONFIG, train.init(CONFIG), jnp.zeros(32, jnp.uint8))
    corpus = Corpus(np.zeros(90, np.uint8), np.zeros(10, np.uint8), (), ())
    for limit, repair in (
        (1000, "give more text, or shorten the sequence"),
        (100, "raise corpus_bytes .now 100., or"),
    ):
        with refused(f"text has 10 tokens, but one window needs 33; {repair}"):
            check_corpus(corpus, replace(CONFIG, data=Data(corpus_bytes=limit)))


def test_jitter_perturbs_the_initial_weights():
    bf16 = replace(CONFIG, recipe="bf16")
    plain = train.init(bf16).params
    moved = train.init(replace(bf16, initial_jitter=1e-6)).params
    kernel = plain["embedding"]["embedding"]
    jittered = moved["embedding"]["embedding"]
    assert 0 < float(jnp.max(jnp.abs(jittered / kernel - 1))) < 1e-5


class TestCommand:
    """`python -m models.train`, called in this process on a model that compiles in
    seconds.
    """

    NAMES = (
        "steps",
        "batch",
        "sequence",
        "steps_per_call",
        "heldout_windows",
        "corpus_bytes",
        "learning_rate",
    )
    ARGUMENTS = (
        "--model=micro",
        "--checkpoint-every=60",
        *(f"--{name.replace('_', '-')}={settings_of(CONFIG)[name]}" for name in NAMES),
    )

    @pytest.fixture(autouse=True)
    def micro(self, monkeypatch, tmp_path):
        monkeypatch.setitem(MODELS, "micro", MICRO)
        monkeypatch.chdir(tmp_path)

    def test_it_prints_both_losses_and_their_ratio(self, capsys):
        assert train.main(self.ARGUMENTS) == 0
        out = Path("runs/micro-tcfp12_single-stored-0")
        printed = capsys.readouterr().out
        summary = json.loads((out / "summary.json").read_text())
        assert (
            f"perplexity ratio tcfp12_single / bf16: {summary['perplexity_ratio']:.4f}"
            in printed
        )
        for part in ("run", "baseline_bf16"):
            assert f"{summary[part]['heldout_loss']:.4f}" in printed
            assert f"{summary[part]['state_bytes'] / 1e6:.1f}\n" in printed
        assert (
            summary["run"]["state_bytes"]
            < 0.9 * summary["baseline_bf16"]["state_bytes"]
        )
        assert (
            summary["run"]["heldout_loss"] != summary["baseline_bf16"]["heldout_loss"]
        )
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert len(_lines(out)) == len(_lines(out / "compare_bf16")) == 60

        # Again: a new folder. Resumed without settings: the same numbers, and the
        # newest run.
        assert train.main([*self.ARGUMENTS, "--compare", "none"]) == 0
        assert not Path("runs/micro-tcfp12_single-stored-1/compare_bf16").exists()
        assert train.main(["--resume", "--out", str(out)]) == 0
        again = json.loads((out / "summary.json").read_text())
        assert again["perplexity_ratio"] == summary["perplexity_ratio"]
        capsys.readouterr()

        # Another run in the folder, with and without --resume.
        assert train.main([*self.ARGUMENTS, "--out", str(out)]) == 2
        assert "holds a run" in capsys.readouterr().err
        assert train.main(["--resume", "--out", str(out), "--seed", "3"]) == 2
        assert "seed=0 in the folder but 3 now" in capsys.readouterr().err

    def test_the_baseline_has_no_baseline_and_needs_no_matplotlib(
        self, monkeypatch, capsys
    ):
        arguments = [*self.ARGUMENTS, "--recipe", "bf16", "--out", "plain"]
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "matplotlib.figure", None)
            assert train.main(arguments) == 0
        printed = capsys.readouterr().out
        assert "ratio" not in printed
        assert "no plot: " in printed
        assert "written: plain/summary.json\n" in printed
        assert (
            json.loads(Path("plain/summary.json").read_text())["run"]["heldout_loss"]
            > 0
        )
        assert train.main([*arguments, "--resume"]) == 0
        assert Path("plain/loss.png").exists()
        assert not Path("plain/compare_bf16").exists()

    def test_stored_weights_have_a_recipe_and_moments_of_their_own(
        self, whole_run, capsys
    ):
        assert (
            train.main(
                [
                    *self.ARGUMENTS,
                    "--weights=stored",
                    "--compare=none",
                    "--export=weights.npz",
                ]
            )
            == 0
        )
        summary = json.loads(
            Path("runs/micro-tcfp12_single-stored-0/summary.json").read_text()
        )
        assert summary["config"]["moments"] == "8bit"
        assert summary["run"]["heldout_loss"] == whole_run("stored")[1].heldout_loss
        printed = capsys.readouterr().out
        exported = np.load("weights.npz")
        assert "exported: weights.npz" in printed
        assert "positions" in exported
        assert (
            f"{sum(array.size for array in exported.values()):,} parameters" in printed
        )
        assert train.main([*self.ARGUMENTS, "--export=weights.txt", "--out=new"]) == 2
        assert not Path("new").exists()

    @slow
    def test_a_llama_reads_a_folder_and_continues_with_no_other_text(
        self, monkeypatch, capsys
    ):
        monkeypatch.setitem(LLAMAS, "micro-llama", MICRO_LLAMA)
        Path("book").mkdir()
        for index in range(50):
            Path(f"book/{index}.txt").write_text(f"Page {index}. " * 40)
        arguments = [
            *self.ARGUMENTS,
            "--model=micro-llama",
            "--compare=none",
            "--out=run",
        ]
        arguments = [
            argument for argument in arguments if "corpus-bytes" not in argument
        ]
        assert train.main([*arguments, "--data", "book"]) == 0
        printed = capsys.readouterr().out
        assert "text: bytes of book: " in printed
        assert "to train in 48 files" in printed
        summary = json.loads(Path("run/summary.json").read_text())
        assert summary["run"]["heldout_loss"] < 1.5
        assert summary["config"]["data"] == ["book"]

        def resume():
            corpora._corpus.cache_clear()  # the cache of this process
            return train.main(["--resume", "--compare=none", "--out=run"])

        assert resume() == 0
        Path("book").rename("novel")
        assert resume() == 2
        assert "data book does not exist" in capsys.readouterr().err
        Path("novel").rename("book")
        Path("book/7.txt").write_text("Another page. " * 40)
        assert resume() == 2
        assert "text='" in capsys.readouterr().err

    def test_nothing_to_resume(self, capsys):
        assert train.main(["--resume"]) == 2
        assert "found no run under runs" in capsys.readouterr().err

    @parametrize(
        "more, message",
        [
            (["--checkpoint-every", "7"], "checkpoint_every=7 is not a multiple"),
            (["--bad-steps", "0"], "bad_steps=0 must be at least 1"),
            (["--out", __file__], "is a file, not a folder"),
            (["--export", f"{__file__}/a.npz"], "lies below"),
        ],
    )
    def test_options_are_refused_before_the_text_is_read(
        self, monkeypatch, capsys, more, message
    ):
        monkeypatch.setattr(train, "_heading", None)
        assert train.main([*self.ARGUMENTS, "--compare", "none", *more]) == 2
        assert message in capsys.readouterr().err

    @parametrize("given", [[], ["--out", "a run"]], ids=["new folder", "named folder"])
    def test_what_an_interruption_prints_continues_the_command(
        self, monkeypatch, capsys, given
    ):
        def interrupted(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(train, "run", interrupted)
        assert train.main([*self.ARGUMENTS, "--compare", "none", *given]) == 130
        command = capsys.readouterr().err.split("begin anew with: ")[1]
        seen = []
        monkeypatch.setattr(
            train, "_report", lambda config, options, out: seen.append((options, out))
        )
        assert train.main(shlex.split(command)[3:]) == 0
        options, out = seen[0]
        assert options.resume
        assert options.compare == "none"
        assert out == Path(*given[1:] or ["runs/micro-tcfp12_single-stored-0"])

    def test_a_run_that_diverges_ends_with_status_1(self, monkeypatch, capsys):
        def diverged(*arguments, **options):
            assert options["bad_steps"] == 7
            raise FloatingPointError("the run has diverged")

        monkeypatch.setattr(train, "run", diverged)
        assert train.main([*self.ARGUMENTS, "--bad-steps=7"]) == 1
        assert capsys.readouterr().err.endswith("\nerror: the run has diverged\n")

    def test_a_folder_that_cannot_be_written(self, capsys):
        Path("file").write_text("no folder")
        assert train.main([*self.ARGUMENTS, "--out", "file/run"]) == 2
        assert re.search(
            "file/run cannot hold a run.*Not a directory.*choose another --out",
            capsys.readouterr().err,
        )

    def test_unknown_recipe(self, capsys):
        assert train.main([*self.ARGUMENTS, "--recipe", "fp7"]) == 2
        assert "recipe 'fp7' is unknown" in capsys.readouterr().err
        assert not Path("runs").exists()

    def test_help_has_the_default_of_every_value(self):
        for action in parser_of("")._actions:
            assert action.nargs == 0 or "default" in action.help, action.option_strings
        steps = next(one for one in parser_of("")._actions if one.dest == "steps").help
        assert steps == "optimizer steps (default: 400 for tiny, 200 for a folder)"

    def test_help_has_groups_examples_and_every_recipe(self, capsys):
        with pytest.raises(SystemExit):
            train.main(["--help"])
        shown = capsys.readouterr().out
        assert set(tcfp_jax.recipes.NAMES) <= set(re.findall(r"\w+", shown))
        options = shown.split("options:")[1].replace("\\\n", "")
        assert re.findall(r"^\S.*:$", options, re.M) == [
            "model and text:",
            "precision:",
            "training:",
            "folder:",
            "speed and memory:",
            "machines:",
            "examples:",
        ]
        commands = [
            c
            for c in re.findall(r"python -m models.train (.*)", options)
            if "FOLDER" not in c
        ]
        examples = [
            train._choose_config(parser_of("").parse_args(shlex.split(c)), Path("new"))
            for c in commands
        ]
        assert [config.weights for config in examples] == [Stored("8bit"), Float()]


@slow_except("stored")
@parametrize("recipe", ["bf16", "tcfp12", "tcfp12_fast", "tensorwise", "stored"])
def test_steps_add_nothing_atomically(recipe):
    """A scatter of floats on a GPU adds in another order each time, and a resumed run
    would not be the same.
    """
    config = STORED if recipe == "stored" else replace(CONFIG, recipe=recipe)
    config = replace(config, dtype="bfloat16")
    state = jax.eval_shape(lambda: train.init(config))
    key = train.batch_key(config)
    step = train.make_train_step(config)
    lowered = step.trace(state, jnp.zeros(100, jnp.uint8), key).lower(
        lowering_platforms=("cuda",)
    )
    assert "scatter" not in lowered.as_text()


def test_presets():
    assert preset(lora=0) == preset()
    assert preset("small").sequence == 256
    assert preset("tiny", seed=3).seed == 3
    assert preset("gpt2").tokens_per_step == 16 * 1024


def _lines(out):
    path = out / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _wait_for(condition, process):
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, (
            f"the run ended with status {process.returncode} before it could be killed"
        )
        assert time.monotonic() < deadline, "the run did not get far enough"
        time.sleep(0.002)


def _program(out, config):
    return textwrap.dedent(f"""
        from pathlib import Path
        from models.nets.shapes import GPTConfig
        from models.nets.shapes import LlamaConfig
        from models.train import TrainConfig, run
        from models.training.forms import Float, Stored
        from models.training.settings import Data
        run({config!r}, out=Path({str(out)!r}), checkpoint_every=10)
    """)


def _environment():
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    }
