"""Bytes of a step that trains adapters next to Llama-3-70B in four bits, from the
program compiled for an H200.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import adapters
from models.nets import llama
from models.training import steps
from tests.compile_for_h200 import compile_for, h200s, needs_plugin, on
from tests.models.test_arena import attention

CARD = 75e9
# Options of the benchmark's row, in `benchmarks.card`.
REMAT = "attended+key+value+gate_fp8"


def config_of(*options):
    config = adapters.configure(
        adapters.BENCHMARK.parse(["--model", "llama-70b", "--remat", REMAT, *options])
    )
    return dataclasses.replace(config, tokens=(1, 4096))


@needs_plugin
@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_70b_in_four_bits_fits_a_card_of_80_gb(monkeypatch):
    monkeypatch.setattr(
        llama, "causal_attention", lambda q, k, v, how, **_: attention(q, k, v)
    )
    mesh = h200s(1)
    run = adapters.run_of(config_of(), adapters.IN_E4M3, 80)
    run = dataclasses.replace(run, dtype="bfloat16")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = steps.state_shapes(run)
        step = steps.make_steps(run, steps.make_optimizer(run), 1)
        text = jax.ShapeDtypeStruct((4097,), jnp.int32)
        given = jax.tree.map(
            lambda leaf: on(mesh, leaf.shape, leaf.dtype),
            (state, text, jax.eval_shape(lambda: steps.batch_key(run))),
        )
        made = compile_for(mesh, step, *given, donate_argnums=0)
    needed = made.temporary_bytes
    for leaf in jax.tree.leaves(state):
        needed += math.prod(leaf.shape) * leaf.dtype.itemsize
    assert needed < CARD
    # Stacks of codes and scales stay where they are.
    written = r"= (?:u8|f8e4m3fn)\[80,\d+,\d+\]\S* (?:copy|fusion|transpose)\("
    assert not re.search(written, made.text)
    # Nothing of all frozen weights is float, and of a layer only what is multiplied.
    assert not re.search(r"(?:bf16|f32)\[80,\d{4,},\d{4,}\]", made.text)
