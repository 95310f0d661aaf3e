"""Models of other libraries: a row that cannot be measured says why, parameters keep
their places, and a peer's model computes what the plain one does.
"""

import dataclasses
import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peer_models, peers, records, report, train_step
from benchmarks import transformer_engine as te
from benchmarks.harness import benchmark
from benchmarks.products import GemmShape
from models.nets.sizes import LLAMAS
from tests.helpers import parametrize, refused, slow

SHAPE = GemmShape(32, 32, 48)
ENGINE = "transformer_engine"


@parametrize("name", ["qwix", *te.RECIPES])
def test_a_library_that_is_missing_is_named(name, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not peer_models.is_installed(name)
    library = name.removesuffix("_delayed")
    said = capsys.readouterr().out
    assert f"{library} is not installed (pip install {library}" in said
    assert f"so the row {name!r} is missing" in said


def test_transformer_engine_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib)
    assert not peer_models.is_installed(ENGINE)
    assert f"needs a GPU, and JAX runs on {jax.default_backend()}" in (
        capsys.readouterr().out
    )
    assert peer_models.is_installed(peer_models.FLAX)
    assert peer_models.is_installed("bf16")


def numbered(shapes):
    """Return arrays of these shapes without two equal values."""
    leaves, tree = jax.tree.flatten(shapes)
    numbers = []
    start = 0
    for leaf in leaves:
        numbers.append(np.arange(start, start + leaf.size).reshape(leaf.shape))
        start += leaf.size
    return jax.tree.unflatten(tree, numbers)


def test_joined_blocks_are_separated_again():
    config = dataclasses.replace(LLAMAS["llama-tiny"], layers=2)
    x = jax.ShapeDtypeStruct((1, 4, config.width), jnp.bfloat16)
    key = jax.random.key(0)
    params = numbered(jax.eval_shape(peer_models.Blocks(config).init, key, x)["params"])
    names = te.BlockNames(config)
    joined = names.joined(params)
    width = config.head_size
    kernel = joined["block_1"]["attention"]["kernel"]
    # the split of `te.Block`
    heads = kernel.reshape(config.width, -1, width)
    first_value = heads[:, config.heads + config.kv_heads]
    value = params["block_1"]["value"]["kernel"]
    np.testing.assert_array_equal(first_value, value[:, :width])
    gate_and_up = joined["block_1"]["mlp"]["wi_kernel"]
    assert gate_and_up.shape == (config.width, 2, config.hidden)
    jax.tree.map(np.testing.assert_array_equal, names.separated(joined), params)


def test_a_joined_mlp_is_separated_again():
    params = numbered(
        jax.eval_shape(partial(train_step.draw, SHAPE), jax.random.key(0))[0]
    )
    joined = te.joined_mlp(params)
    assert joined["mlp"]["wi_kernel"].shape == (32, 1, 48)
    jax.tree.map(np.testing.assert_array_equal, te.separated_mlp(joined), params)


@slow
def test_a_peer_computes_the_mlp_and_its_next_scales():
    plain = peers.make("bf16", SHAPE)
    made = peers.make(peer_models.FLAX, SHAPE)
    least = train_step.LEAST_SNR_DB
    assert train_step.check_outputs("x", plain.outputs(), made.outputs(), least) < 40
    state = jax.tree.leaves(made.args[1])
    assert len(state) == 2 * 6  # scales and histories of two products
    assert all(jnp.max(leaf) > 0 for leaf in state)


@slow
def test_a_smoke_run_writes_a_table(tmp_path):
    asked = ["--recipes", f"tensorwise,{ENGINE}"]
    rows = benchmark("peers").run(["--smoke", "--out", str(tmp_path), *asked])
    assert [row.recipe for row in rows] == ["bf16", "tensorwise"]
    assert rows[0].worst_snr_db is None
    assert rows[1].worst_snr_db >= train_step.LEAST_SNR_DB
    assert (tmp_path / records.device_slug() / "peers.json").exists()
    page = report.render_section("peers", tmp_path)
    assert "| `tensorwise` |" in page
    assert "64 × 32 × 64, wall clock" in page


def test_bad_names_are_errors():
    with refused("unknown"):
        benchmark("peers").run(["--smoke", "--recipes", "tensorwize"])
