"""Runs that end with other products go on with the same state."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import train
from models.nets.shapes import GPTConfig, LlamaConfig
from models.training import evaluation, running, samples
from models.training.evaluation import evaluate
from models.training.finish import BF16, BF16_FORWARD, Finish
from models.training.forms import Adapters, Stored
from models.training.learners import layouts, model_of
from models.training.sampling import Continuation
from models.training.settings import Data, TrainConfig, config_of, settings_of
from models.training.steps import (
    batch_key,
    init,
    make_monitored_step,
    make_train_step,
)
from tcfp_jax.recipes import recipe
from tests.helpers import parametrize, refused, same_bits, slow

SIZE = LlamaConfig(layers=2, width=32, heads=2, kv_heads=2, hidden=48, context=8)
RUN = TrainConfig(
    model=SIZE,
    recipe="tcfp12_single",
    weights=Stored("8bit"),
    steps=8,
    batch=2,
    sequence=8,
    steps_per_call=2,
    heldout_windows=4,
    data=Data(corpus_bytes=1_000_000),
)
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, 250, 512), jnp.int32)
# XLA's attention and optax's schedules promote dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def floats(name):
    return replace(RUN, recipe=name, weights=train.preset(recipe="bf16").weights)


@parametrize(
    "run, products",
    [
        (RUN, BF16),
        (floats("nvfp4_training"), "tensorwise"),
        *(
            pytest.param(run, products, marks=slow)
            for run, products in (
                (RUN, BF16_FORWARD),
                (RUN, "tcfp12_fast"),
                (floats("nvfp4_training"), BF16),
                (floats("nvfp4_training"), BF16_FORWARD),
                (floats("tensorwise"), BF16),
                (floats("tcfp12"), "tcfp12_fast"),
            )
        ),
    ],
)
def test_both_steps_have_one_state(run, products):
    ending = replace(run, finish=f"{products}:0.25").ending
    state = jax.eval_shape(lambda: init(run))
    key = batch_key(run)
    after, losses = make_train_step(ending).eval_shape(state, TEXT, key)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)] == kinds
    assert losses.shape == (2,)


@parametrize("name", ["bf16", "nvfp4_training"])
def test_weights_of_floats_have_the_layout_of_the_last_products(name):
    ending = replace(floats(name), finish="tensorwise:0.25").ending
    found = layouts(ending)
    assert found["layers/down/kernel"].recipe == recipe("tensorwise")
    assert found["layers/down/kernel"].layout.stack == (0,)


@slow
def test_a_finish_of_floats_is_observed():
    size = replace(SIZE, layers=1)  # a stack of one, which its layout tells
    run = replace(floats("bf16"), model=size, steps_per_call=1, monitor=1)
    ending = replace(run, finish="tensorwise:0.5").ending
    state = jax.eval_shape(lambda: init(run))
    step = make_monitored_step(ending)
    _, _, report = step.eval_shape(state, TEXT, batch_key(run))
    assert "edq" in report["layers/down/kernel"]


def test_products_of_stored_weights_are_those_of_the_name():
    kept = recipe("tcfp12_single")
    whole = Finish(BF16, 0.1).recipe(kept, is_stored=True)
    assert (whole.forward, whole.dgrad, whole.wgrad) == ("bf16",) * 3
    assert (whole.weight.forward, whole.weight.dgrad) == ("hi+lo", "hi+lo")
    forward = Finish(BF16_FORWARD, 0.1).recipe(kept, is_stored=True)
    assert (forward.forward, forward.dgrad) == ("bf16", kept.dgrad)
    assert (forward.weight.forward, forward.weight.dgrad) == ("hi+lo", "hi")
    fast = Finish("tcfp12_fast", 0.1).recipe(kept, is_stored=True)
    assert (fast.forward, fast.weight.forward, fast.copies) == ("fast", "hi+lo", "one")


@parametrize(
    "finish, message",
    [
        ("bf16:0", "the switch is never reached, or at the first step"),
        ("bf16:1", "use a fraction above 0 and below 1"),
        ("bf16:nan", "is not PRODUCTS:FRACTION"),
        ("bf16", "is not PRODUCTS:FRACTION, such as bf16:0.1"),
        ("bf15:0.1", "'bf15' is unknown; use one of"),
        ("bf16:0.05", "steps_per_call=2, is at step 8, so one part has no steps"),
        ("bf16:0.95", "is at step 0, so one part has no steps"),
        (
            "tensorwise:0.5",
            r"reads weight=Single.* but the optimizer keeps weight=Dual",
        ),
        ("tcfp12_blockwise:0.5", "scaling=Block.* with scaling=Tensor"),
        ("tcfp12_single:0.5", "multiplies so from its first step on"),
    ],
)
def test_a_finish_that_cannot_be_is_refused(finish, message):
    with refused(message):
        replace(RUN, finish=finish)


def test_a_finish_of_floats_needs_their_state():
    with refused("keeps the error of weight=Dual.* the optimizer keeps weight=Fp4"):
        replace(floats("nvfp4_training"), finish="tcfp12_fast:0.5")
    with refused("with scaling=Block.* but the optimizer keeps .* with scaling=Tensor"):
        replace(floats("tcfp12"), finish="tcfp12_blockwise:0.5")
    with refused("the forward product alone is BF16 in FP4 training"):
        replace(floats("tensorwise"), finish=f"{BF16_FORWARD}:0.5")
    with refused("finish=bf16:0.5 of a run with recipe 'bf16': the run multiplies so"):
        replace(floats("bf16"), finish="bf16:0.5")
    with refused("frozen weights are quantized once"):
        replace(RUN, weights=Adapters(4), start="folder", finish="bf16:0.5")


def test_weights_that_are_updated_inside_are_evaluated_without_floats(monkeypatch):
    run = replace(RUN.updated("backward"), heldout_windows=1)
    state = jax.eval_shape(lambda: init(run))
    read = []

    def function(config, mesh):
        def losses(params, *operands):
            read.append((config.products, params))
            return np.ones((1, 2))

        return losses

    monkeypatch.setattr(evaluation, "_evaluate_function", function)
    assert evaluate(run, state, TEXT, "bf16") == 1.0
    assert read == [(Finish(BF16, 0.5).recipe(recipe(run.recipe), True), state.params)]


@slow  # a quicker one has the products
def test_weights_that_are_updated_inside_have_the_loss_of_their_floats():
    size = replace(SIZE, layers=1)
    run = replace(RUN, model=size, heldout_windows=1, dtype="bfloat16")
    state = init(run)
    losses = [
        evaluate(run.updated(update), state, TEXT, "bf16")
        for update in ("behind", "backward")
    ]
    assert losses[0] == losses[1] != evaluate(run, state, TEXT)


def test_settings_and_options_hold_a_finish():
    config = replace(RUN, finish="bf16:0.25")
    assert config_of(settings_of(config)) == config
    assert config.switch == 6
    assert RUN.switch == RUN.steps
    assert RUN.ending is RUN
    assert config.in_bf16.finish is None
    given = train.parser_of("").parse_args(["--finish", "bf16:0.1"])
    assert train.given_settings(given) == {"finish": "bf16:0.1"}


@slow  # a quicker one has the state of both steps
@parametrize("stopped", [1, 3])
def test_a_run_resumes_across_the_switch(tmp_path, monkeypatch, capsys, stopped):
    config = replace(RUN, finish="bf16:0.5")
    whole = running.run(config, progress="bar")
    assert "finish: bf16:0.5, from step 5 on" in capsys.readouterr().out
    plain = running.run(RUN)
    assert np.array_equal(whole.train_loss[:4], plain.train_loss[:4])
    assert not np.array_equal(whole.train_loss[4:], plain.train_loss[4:])
    made = running.make_train_step
    calls = []

    def make(one, count, mesh):
        if len(calls) == stopped:
            raise KeyboardInterrupt
        calls.append(one.products)
        return made(one, count, mesh)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(running, "make_train_step", make)
        with pytest.raises(KeyboardInterrupt):
            running.run(config, out=folder, checkpoint_every=2)
    assert [products is None for products in calls] == [True, True, False][:stopped]
    with refused("finish=.bf16:0.5. in the folder but None now"):
        running.run(RUN, out=folder, resume="allowed")
    models = []

    def continued(model, *_, **settings):
        models.append(model)
        return Continuation("", 1.0)

    monkeypatch.setattr(samples, "continued", continued)
    config = replace(config, sample="def")
    resumed = running.run(config, out=folder, resume="allowed", checkpoint_every=2)
    assert models[0] == model_of(config if stopped == 1 else config.ending)
    assert models[-1] == model_of(config.ending) != model_of(config)
    assert np.array_equal(resumed.train_loss, whole.train_loss)
    assert resumed.heldout_loss == whole.heldout_loss


@slow  # a quicker one has the state of both steps
def test_a_state_goes_on_with_the_bits_of_its_products():
    size = GPTConfig(layers=1, width=128, heads=2, context=8)
    run = replace(RUN, model=size, steps_per_call=1)
    ending = replace(run, finish="bf16:0.5").ending
    key = batch_key(run)
    base = make_train_step(run)
    last = make_train_step(ending)
    text = TEXT
    found = []
    for kind in (last, last, base):
        state, _ = base(init(run), text, key)
        state, _ = kind(state, text, key)
        found.append(state)
    again, same, other = found
    assert same_bits(again, same)
    assert not same_bits(again.params, other.params)
    # Held-out text is read by the last products.
    losses = [evaluate(one, again, text) for one in (ending, run)]
    in_bf16 = evaluate(run, again, text, "bf16")
    assert losses[0] != losses[1]
    assert abs(losses[0] - in_bf16) < abs(losses[1] - in_bf16)
