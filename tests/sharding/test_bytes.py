"""Bytes of a device in a step of Llama-3-70B that eight GPUs share by FSDP, from
programs compiled for H200s: few of its layers, which say how much one more takes.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from benchmarks import llama_steps
from benchmarks.fsdp_steps import placed
from models.nets import llama
from models.nets.meshes import AXES
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS
from tests.compile_for_h200 import compile_for, h200s, needs_plugin
from tests.helpers import slow
from tests.models.test_arena import attention

DEVICES = 8
SIZE = dataclasses.replace(LLAMAS["llama-70b"], remat="block")
LAYERS = SIZE.layers
# Sequences and positions of a device.
TOKENS = (2, 4096)
CARD = 80e9
# NCCL, the context of CUDA and cuBLAS are not in the program.
OTHERS = 3e9


@dataclass(frozen=True)
class Step:
    """Bytes of a device: the state that goes in and out, and those of the step."""

    state: int
    temporary: int


def compiled(size: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> Step:
    """Compile a step that updates layers inside the backward pass."""
    monkeypatch.setattr(
        llama, "causal_attention", lambda q, k, v, how, **_: attention(q, k, v)
    )
    devices = np.array(h200s(DEVICES).devices).reshape(1, DEVICES, 1)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    sequences, positions = TOKENS
    tokens = DEVICES * sequences, positions
    config = llama_steps.Config(
        size, size, tokens, tokens, {}, include=("linear", "small"), update="backward"
    )
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        jax.numpy_dtype_promotion("standard"),
    ):
        bf16 = llama_steps.make_training(config, "bf16")
        training = llama_steps.make_training(config, "stored")
        key = jax.random.key(0)
        (floats, _), *_ = jax.eval_shape(bf16.init, key)
        given = jax.eval_shape(training.init, key)
        places = placed(mesh, floats, training.state_of, given)
        shapes = jax.tree.map(on_its_place, given, places)
        made = compile_for(
            mesh,
            training.step,
            *shapes,
            donate_argnums=0,
            out_shardings=(places[0], None),
        )
    state = jax.tree.map(bytes_of_a_device, *(tree[0] for tree in (given, places)))
    return Step(sum(jax.tree.leaves(state)), made.temporary_bytes)


def on_its_place(leaf, place: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return a shape with its sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def bytes_of_a_device(leaf, place: NamedSharding) -> int:
    """Return the bytes of the part of an array that a device holds."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 8
    return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@needs_plugin
@pytest.mark.optimized
@slow
def test_70b_fits_eight_cards_of_80_gb(monkeypatch):
    few, more = (
        compiled(dataclasses.replace(SIZE, layers=layers), monkeypatch)
        for layers in (2, 4)
    )
    state = (more.state - few.state) // 2
    kept = (more.temporary - few.temporary) // 2
    # 4 bytes per weight, and of a layer only its input waits for the backward pass; XLA
    # places the rest a little otherwise.
    weights = SIZE.width * SIZE.columns
    inputs = 2 * math.prod(TOKENS) * SIZE.width
    assert weights * 4 < DEVICES * state < weights * 4.1
    assert 0.99 * inputs < kept < 1.1 * inputs
    rest = LAYERS - 4
    needed = more.state + more.temporary + rest * (state + kept)
    assert needed + OTHERS < CARD
