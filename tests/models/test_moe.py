"""The mixture of experts: results against loops in float64, gradients that are gathers,
sizes, training, errors.
"""

import doctest
import functools
import math
import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

import tcfp_jax
from models.nets import families, moe
from models.nets.meshes import OnMesh, make_mesh
from models.nets.moe import Moe
from models.nets.shapes import MoeConfig
from models.nets.sizes import MOES
from models.train import TrainConfig, run
from models.training.forms import Stored
from models.training.learners import program
from models.training.settings import Data
from models.training.steps import (
    batch_key,
    check_placement,
    init,
    make_train_step,
    state_places,
)
from tcfp_jax.paths import path_names
from tests.helpers import normal, parametrize, refused, same_bits, slow, variables_of
from tests.models.test_llama import numpy_llama, numpy_swiglu

pytestmark = pytest.mark.usefixtures("standard_promotion")
MICRO = MoeConfig(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    hidden=24,
    context=16,
    experts=5,
    chosen=2,
    shared=16,
    qk_norm="heads",
    head_dim=12,
    remat="block",
    attention="products",
)
OTHER = replace(
    MICRO, qk_norm="all", normalized="chosen", shared=0, remat="none", head="untied"
)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 17))
INPUTS = jnp.asarray(TOKENS[:, :-1])
TARGETS = jnp.asarray(TOKENS[:, 1:])


def numpy_experts(config, block, n):
    """Return the MLP of normalized activations `[..., width]`, token by token in
    float64.
    """
    flat = n.reshape(-1, n.shape[-1])
    kernel = lambda name: block[name]["kernel"]
    out = numpy_swiglu(config, block, flat) if config.shared else np.zeros_like(flat)
    for row, x in enumerate(flat):
        p = np.exp(x @ kernel("router"))
        p /= p.sum()
        best = np.argsort(-p)[: config.chosen]
        for e in best:
            gate, up = np.split(x @ kernel("expert_gate_up")[e], 2)
            weight = p[e] / (p[best].sum() if config.normalized == "chosen" else 1)
            out[row] += weight * (
                (gate / (1 + np.exp(-gate)) * up) @ kernel("expert_down")[e]
            )
    return out.reshape(n.shape)


@parametrize("config", [MICRO, OTHER], ids=["heads, shared", "all, chosen"])
def test_forward_pass_is_that_of_numpy(config):
    model = Moe(config, dtype="float32")
    variables = variables_of(model, INPUTS)
    logits = jax.jit(model.apply)(variables, INPUTS)
    expected = numpy_llama(
        config, variables["params"], np.asarray(INPUTS), numpy_experts
    )
    assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * expected.std())


def test_penalties_change_gradients_and_no_loss():
    config = replace(OTHER, layers=1, balance=0.5, z_loss=0.25)
    variables = variables_of(Moe(config, dtype="float32"), INPUTS)

    def losses(config, v):
        return Moe(config, dtype="float32").apply(v, INPUTS, TARGETS).mean()

    plain = replace(config, balance=0.0, z_loss=0.0)
    both = jax.jit(
        lambda v: [
            jax.value_and_grad(lambda v, c=c: losses(c, v))(v) for c in (config, plain)
        ]
    )(variables)
    (loss, found), (base_loss, base) = (
        (loss, gradients["params"]["layers"]) for loss, gradients in both
    )
    assert loss == base_loss
    changed = jax.tree.map(lambda a, b: not same_bits(a, b), found, base)
    assert changed["router"]["kernel"]
    assert not changed["expert_down"]["kernel"]

    def penalty(router):
        logits = x @ router
        p = jax.nn.softmax(logits)
        share = jnp.bincount(jax.lax.top_k(logits, 2)[1].ravel(), length=5)
        return 0.5 * 5 * jnp.sum(share / 64 * p.mean(0)) + 0.25 * jnp.mean(
            jnp.log(jnp.exp(logits).sum(-1)) ** 2
        )

    router = variables["params"]["layers"]["router"]["kernel"][0]
    x = normal(0, (32, 32))

    def ours(router):
        return moe.route(moe.score(x, router), config).penalty

    (value, slope), (expected, exact) = (
        jax.jit(jax.value_and_grad(f))(router) for f in (ours, penalty)
    )
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(slope, exact, atol=1e-6)


def test_experts_have_the_gradients_of_weighted_results():
    config, t = OTHER, 6
    keys = random.split(random.key(0), 4)
    x = random.normal(keys[0], (t, config.width))
    routed = moe.route(random.normal(keys[1], (t, config.experts)), config)
    gate_up = random.normal(keys[2], (config.experts, config.width, 2 * config.hidden))
    down = random.normal(keys[3], (config.experts, config.hidden, config.width))

    def plain(x, weights, gate_up, down):
        gate, up = jnp.split(
            jnp.einsum("tw,tcwh->tch", x, gate_up[routed.chosen]), 2, axis=-1
        )
        return jnp.einsum(
            "tch,tchw,tc->tw", jax.nn.silu(gate) * up, down[routed.chosen], weights
        )

    def ours(x, weights, *matrices):
        return moe.mix(x, routed.chosen, weights, *matrices, 0, "silu")

    arrays = x, routed.weights, gate_up, down

    @functools.partial(jax.jit, static_argnums=0)
    def graded(f, *arrays):
        y, pull = jax.vjp(f, *arrays)
        return y, *pull(y)

    for mine, exact in zip(graded(ours, *arrays), graded(plain, *arrays), strict=True):
        assert_allclose(mine, exact, rtol=1e-4, atol=1e-4 * float(exact.std()))


def test_routers_compute_their_logits_once():
    model = Moe(replace(MICRO, layers=1), dtype="float32")
    gradients = jax.jit(
        jax.grad(lambda variables: model.apply(variables, INPUTS, TARGETS).mean())
    )
    compiled = gradients.lower(variables_of(model, INPUTS)).compile()
    assert compiled.as_text().count("operand_precision={highest,highest}") == 1


def test_sorting_tokens_has_gradients_that_are_gathers():
    order = random.permutation(random.key(0), 12)
    place = jnp.argsort(order)
    x, g = (normal(i, shape) for i, shape in ((1, (4, 3)), (2, (12, 3))))
    for ours, plain, given in (
        (moe.dispatch, lambda x: x[order // 3], x),
        (moe.collect, lambda x: x[place], g),
    ):

        def back(f, given=given):
            return jax.vjp(f, given)[1](g)[0]

        def mine(x, ours=ours):
            return ours(x, order, place)

        assert_allclose(back(mine), back(plain), rtol=1e-6)
        assert "scatter" not in str(jax.make_jaxpr(lambda: back(mine))())


@parametrize(
    "name, billions, active",
    [
        ("moe-tiny", 9e-4, 6e-4),
        ("moe-109m", 0.109, 0.034),
        ("olmoe-1b-7b", 6.919, 1.282),
        ("qwen3-30b-a3b", 30.532, 3.353),
    ],
)
def test_sizes(name, billions, active):
    c = MOES[name]
    shapes = jax.eval_shape(
        Moe(c).init, random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32)
    )["params"]
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    idle = c.layers * (c.experts - c.chosen) * 3 * c.width * c.hidden
    assert count / 1e9 == pytest.approx(billions, abs=1e-3)
    assert (count - idle) / 1e9 == pytest.approx(active, abs=1e-3)


@parametrize(
    "change, message",
    [
        ({"chosen": 6}, "chosen=6 of experts=5"),
        ({"experts": 0}, "chosen=2 of experts=0"),
        ({"shared": -1}, "shared=-1 must be zero or positive"),
        ({"balance": -0.1}, "balance=-0.1"),
        ({"normalized": "none"}, "normalized='none' is unknown"),
        ({"heads": 3}, "kv_heads=2 does not divide heads=3"),
    ],
)
def test_a_config_names_what_is_wrong(change, message):
    with refused(message):
        replace(MICRO, **change)


def test_every_product_but_the_router_is_converted_and_stored():
    learner = families.learner(
        MICRO, tcfp_jax.recipe("tcfp12_single"), "float32", None, "stored"
    )
    names = {path.split("/")[-2] for path in learner.weights}
    assert names == {
        "query",
        "key",
        "value",
        "output",
        "expert_gate_up",
        "expert_down",
        "gate",
        "up",
        "down",
        "embedding",
    }
    assert learner.weights["layers/expert_down/kernel"].layout.stack == (0, 1)


RUN = TrainConfig(
    model=replace(MICRO, shared=0, context=32, remat="none"),
    steps=20,
    batch=4,
    steps_per_call=5,
    sequence=32,
    heldout_windows=8,
    data=Data(corpus_bytes=10**6),
    learning_rate=0.01,
    recipe="tcfp12_single",
    # Moments of 8 bits are most of a step's program, and tests/optim has them of
    # experts.
    weights=Stored("float32"),
)


def test_a_step_without_float_weights_keeps_the_form_of_its_state():
    state = jax.eval_shape(lambda: init(RUN))
    text = jax.ShapeDtypeStruct((1000,), jnp.int32)
    after, losses = make_train_step(RUN).eval_shape(state, text, batch_key(RUN))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert losses.shape == (RUN.steps_per_call,)


@slow  # a quicker one has the state of a step
def test_it_learns_and_resumes_without_float_weights(tmp_path):
    whole = run(RUN, out=tmp_path, checkpoint_every=10)
    assert whole.train_loss[-1] < 0.8 * whole.train_loss[0]
    assert whole.heldout_loss == pytest.approx(whole.heldout_loss_bf16, rel=0.02)
    shutil.rmtree(tmp_path / "checkpoints" / str(RUN.steps))
    again = run(RUN, out=tmp_path, resume="allowed", checkpoint_every=10)
    assert same_bits(again.train_loss, whole.train_loss)
    assert again.heldout_loss == whole.heldout_loss


def test_experts_lie_on_the_devices_of_a_mesh_with_their_state():
    mesh = make_mesh({"data": jax.device_count() // 2, "fsdp": 2})
    with refused("fsdp=2 does not divide axis 1 of layers/expert_down/kernel"):
        check_placement(replace(RUN, batch=jax.device_count()), mesh)
    even = replace(RUN, model=replace(RUN.model, experts=6))
    places = state_places(program(even), mesh)
    of_experts = {
        "/".join(path_names(path)): place.spec
        for path, place in jax.tree_util.tree_leaves_with_path(places)
        if "expert_down" in jax.tree_util.keystr(path)
    }
    split = [spec for spec in of_experts.values() if spec[:2] == (None, "fsdp")]
    assert len(split) > 3 and len(split) == len(of_experts), of_experts


def test_devices_multiply_their_own_experts():
    mesh = make_mesh({"data": jax.device_count() // 2, "fsdp": 2})
    keys = random.split(random.key(0), 4)
    shapes = ((64, 16), (6, 16, 48), (6, 24, 16), (64, 6))
    x, gate_up, down, logits = (
        random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)
    )

    def loss(x, gate_up, down):
        routed = moe.route(logits, replace(OTHER, experts=6))
        return jnp.sum(moe.mix_on_mesh(x, routed, gate_up, down, "silu") ** 2)

    graded = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    split = OnMesh(jax.jit(jax.value_and_grad(loss, (0, 1, 2))), mesh)
    for found, wanted in zip(
        *(jax.tree.leaves(f(x, gate_up, down)) for f in (split, graded)), strict=True
    ):
        assert_allclose(
            found, wanted, rtol=1e-4, atol=1e-5 * float(jnp.abs(wanted).max())
        )
    rules = (P(("data", "fsdp")), P("fsdp"), P("fsdp"))
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((x, gate_up, down), rules, strict=True)
    ]
    text = split.lower(*placed).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    # tokens, and no weights
    assert gathered
    assert not [shape for shape in gathered if shape.count(",") == 2]


@slow
def test_it_learns_alike_on_a_mesh():
    even = replace(RUN, batch=8, steps=5, model=replace(RUN.model, experts=4))
    alone, split = (
        run(even, mesh=mesh)
        for mesh in (None, make_mesh({"data": jax.device_count() // 2, "fsdp": 2}))
    )
    assert_allclose(split.train_loss, alone.train_loss, rtol=1e-3)


@slow
def test_it_keeps_what_fits():
    kept = run(replace(RUN, remat="auto", steps=5), memory=10**9).remat
    assert kept is not None
    assert "gate_fp8" in kept


def test_examples_run():
    assert doctest.testmod(moe).failed == 0
