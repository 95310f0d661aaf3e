"""Values that a Llama's blocks keep for their backward pass: bits by level, training
with copies, remat="auto".
"""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from models import train
from models.nets import families
from models.nets.llama import Llama
from models.nets.shapes import (
    KEPT_NAMES,
    GPTConfig,
    LlamaConfig,
    kept_names,
    remat_levels,
)
from models.nets.sizes import LLAMAS
from models.train import TrainConfig, run
from models.training import fitting
from models.training.settings import Data, settings_of
from tcfp_jax.conversion import survey
from tcfp_jax.remat import step_bytes
from tests.helpers import (
    decibels,
    parametrize,
    refused,
    same_bits,
    slow,
    slow_except,
    variables_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
MICRO = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=32)
CONFIG = TrainConfig(
    model=MICRO,
    recipe="tcfp12_single",
    steps=30,
    batch=4,
    sequence=32,
    steps_per_call=10,
    heldout_windows=16,
    data=Data(corpus_bytes=1_000_000),
    learning_rate=1e-2,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)))
COPIES = "attended+gate_fp8+up_fp8"


def values_and_gradients(remat, recipe):
    config = dataclasses.replace(MICRO, remat=remat)
    model = families.learner(config, tcfp_jax.recipe(recipe), "float32").model

    def loss(variables):
        return model.apply(variables, TOKENS[:, :-1], TOKENS[:, 1:]).mean()

    return jax.jit(jax.value_and_grad(loss))(
        variables_of(Llama(config, "float32"), TOKENS)
    )


def needed_by(remat):
    """Return the bytes of the step of a run."""
    config = dataclasses.replace(CONFIG, remat=remat)
    text = jnp.asarray(train.corpus_of(config).train)
    state = jax.eval_shape(lambda: train.init(config))
    lowered = train.make_train_step(config).lower(state, text, train.batch_key(config))
    return step_bytes(lowered.compile())


# layers quantize at each use here
@pytest.mark.filterwarnings("ignore:a converted Linen model is trained without")
@slow_except("attended+key-bf16", "attended+gate_fp8+up_fp8-tcfp12_single")
@parametrize("recipe", ["bf16", "tcfp12_single"])
@parametrize(
    "remat",
    ["attended+key", COPIES, remat_levels("exact")[-1], remat_levels("fp8")[-1]],
)
def test_levels_have_the_same_forward_pass_and_gradients_as_good_as_their_copies(
    remat, recipe
):
    (exact, expected), (loss, found) = (
        values_and_gradients(one, recipe) for one in ("block", remat)
    )
    assert same_bits(loss, exact)
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True))
    if "fp8" in remat:
        assert all(same_bits(a, b) or decibels(a, b) > 22 for a, b in pairs)
        assert not same_bits(expected, found)
    else:
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_levels_grow_by_names_and_have_copies_where_products_read_fp8():
    for copies in ("exact", "fp8"):
        levels = [kept_names(level) for level in remat_levels(copies)]
        assert len(levels) == 7
        assert levels[0] == set()
        assert all(less < more for less, more in itertools.pairwise(levels))
    assert kept_names(remat_levels("exact")[-1]) == set(KEPT_NAMES)
    kinds = {
        name: families.copies_of(tcfp_jax.recipe(name))
        for name in ("bf16", "tcfp12", "tcfp12_single", "rowwise")
    }
    assert kinds == {
        "bf16": "exact",
        "tcfp12": "exact",
        "tcfp12_single": "fp8",
        "rowwise": "fp8",
    }


def test_a_converted_llama_has_all_its_products():
    learner = families.learner(
        dataclasses.replace(MICRO, remat=COPIES),
        tcfp_jax.recipe("tcfp12_single"),
        "float32",
    )
    names = [
        record.weight_path.split("/")[1] for record in survey(learner.model).converted
    ]
    assert names == ["query", "key", "value", "output", "gate", "up", "down"]


def test_auto_finds_its_step_compiled(monkeypatch, capsys, tmp_path):
    """A command with a budget that "none" exceeds trains with the level that it
    prints.
    """
    compiled = []

    def count(name, seconds, **more):
        return (
            compiled.append(more.get("fun_name")) if "backend_compile" in name else None
        )

    jax.monitoring.register_event_duration_secs_listener(count)
    levels = [COPIES, "none"]
    monkeypatch.setattr(
        fitting, "remat_levels", lambda copies: levels if copies == "fp8" else ["block"]
    )
    monkeypatch.setitem(LLAMAS, "micro-llama", MICRO)
    monkeypatch.chdir(tmp_path)
    settings = (
        "steps",
        "batch",
        "sequence",
        "steps_per_call",
        "heldout_windows",
        "corpus_bytes",
        "learning_rate",
    )
    arguments = [
        f"--{name.replace('_', '-')}={settings_of(CONFIG)[name]}" for name in settings
    ]
    arguments += [
        "--model=micro-llama",
        "--recipe=tcfp12_single",
        "--compare=none",
        "--remat=auto",
    ]
    needed = {level: needed_by(level) for level in levels}
    assert needed[COPIES] < needed["none"]
    assert compiled.count("jit(train_step)") == 2
    assert (
        train.main(
            [*arguments, "--out=run", f"--memory={(needed['none'] - 1) / 1e9:.9f}"]
        )
        == 0
    )
    assert (
        f"remat: keeps {COPIES} of every block; the step needs "
        in capsys.readouterr().out
    )
    assert json.loads(Path("run/summary.json").read_text())["run"]["remat"] == COPIES
    # In `needed_by`, which only lowers and compiles them
    assert compiled.count("jit(train_step)") == 2
    assert train.main([*arguments, "--out=small", "--memory=0.000001"]) == 2
    assert (
        f"no level fits: the step that keeps the least, '{COPIES}', needs"
        in capsys.readouterr().err
    )
    assert train.main([*arguments, "--out=none"]) == 2
    assert (
        "does not report its memory; give a budget in bytes (--memory GB)"
        in capsys.readouterr().err
    )


@slow  # a quicker test has the gradients of copies
def test_training_with_copies_learns_as_well():
    copied, exact = (
        run(dataclasses.replace(CONFIG, remat=remat)).train_loss
        for remat in (COPIES, "none")
    )
    assert copied[0] == exact[0]
    assert not np.array_equal(copied, exact)
    np.testing.assert_allclose(copied, exact, rtol=0.03)
    assert np.mean(copied[-10:]) == pytest.approx(np.mean(exact[-10:]), rel=0.005)
    assert exact[-1] < 0.8 * exact[0]


def test_a_run_names_what_is_wrong():
    with refused(
        r"remat='auto' with model 'tiny', which keeps all values; use a Llama"
    ):
        TrainConfig(remat="auto")
    with refused("remat='gates' is unknown"):
        dataclasses.replace(CONFIG, remat="gates")
    assert (
        TrainConfig(
            model=GPTConfig(layers=1, width=32, heads=2, context=128)
        ).size.layers
        == 1
    )
