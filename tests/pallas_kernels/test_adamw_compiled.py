"""The AdamW step compiled for an H200 without a GPU: one kernel, in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pallas_triton
from pallas_kernels.adamw.api import Moments, Rates, adamw, adamw_entry
from pallas_kernels.moments import E4M3
from pallas_kernels.operands import SCALE_DTYPE
from tests import compile_for_h200 as h200
from tests.helpers import OLD_JAX, parametrize

pytestmark = [
    pytest.mark.optimized,
    h200.needs_plugin,
]
TARGETS = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}


def described(mesh, shape, *axes):
    """Arguments of `train`."""
    on = partial(h200.on, mesh)
    blocks = (*shape[:-1], shape[-1] // 128)
    weight = on(shape, E4M3, *axes)
    state = Moments(
        weight,
        on(blocks, SCALE_DTYPE, *axes),
        on(shape, jnp.uint8, *axes),
        on(blocks, jnp.uint8, *axes),
    )
    numbers = dict.fromkeys(Rates._fields, on((), jnp.float32))
    rates = Rates(**numbers | {"keep": on((), jnp.bool_)})
    g = on(shape, jnp.float32, *axes)
    return (weight, weight, state), g, rates, on((2,), jnp.uint32)


def train(old, g, given, key, orientation="rows", stacks=0):
    call = partial(adamw, orientation=orientation)
    for _ in range(stacks):
        call = jax.vmap(call, in_axes=(0, 0, 0, 0, None, None))
    new = call(g, *old, given, key)
    return (new.hi, new.lo, new.moments), new.columns, new.amax


@parametrize("orientation", ["rows", "both"])
@parametrize("shape", [(4096, 16384), (4, 1024, 4096)], ids=str)
@parametrize("engine", TARGETS)
def test_a_step_is_one_kernel_in_place(engine, shape, orientation, monkeypatch):
    """Nothing else has a weight's size.

    There is no copy of donated arrays, of a stack neither, and no loop over it.
    """
    if engine == "mosaic":
        if OLD_JAX:
            pytest.skip("Mosaic's FP8 needs jax 0.11")
        monkeypatch.setattr(pallas_triton, "missing", lambda: "Pallas-Triton is gone")
    mesh = h200.h200s(1)
    call = partial(train, orientation=orientation, stacks=len(shape) - 2)
    compiled = h200.compile_for(mesh, call, *described(mesh, shape), donate_argnums=0)
    assert compiled.targets == [TARGETS[engine]]
    assert not compiled.results("copy")
    assert not compiled.results("while")
    entry = compiled.text.split("ENTRY")[1]
    fusions = [line for line in entry.splitlines() if " fusion(" in line]
    assert not any(f"[{np.prod(shape) // 128},128]" in line for line in fusions)
    assert len(fusions) <= 4


@parametrize("experts", [(), (4,)], ids=str)
def test_a_loop_steps_entries_of_stacks_where_they_are(experts):
    if OLD_JAX:
        pytest.skip("Mosaic's FP8 needs jax 0.11")
    mesh = h200.h200s(1)
    layers, k, n = 3, 1024, 2048
    old, g, given, _ = described(mesh, (layers, *experts, k, n))
    given = jax.tree.map(lambda x: h200.on(mesh, experts, x.dtype), given)
    keys = h200.on(mesh, (layers, *experts, 2), jnp.uint32)

    def train(old, g, given, keys):
        places = jax.tree.map(jax.new_ref, old)

        def layer(i, amax):
            _, found = adamw_entry(i, g[i], *places, given, keys[i])
            return jnp.maximum(amax, jnp.max(found))

        amax = jax.lax.fori_loop(0, layers, layer, jnp.float32(0))
        return jax.tree.map(jax.freeze, places), amax

    compiled = h200.compile_for(mesh, train, old, g, given, keys, donate_argnums=0)
    assert compiled.targets == [TARGETS["mosaic"]]
    assert not compiled.results("dynamic-update-slice")
    # The slice of the gradient in float32, which other programs compute in the loop
    assert compiled.temporary_bytes < 1.1 * 4 * k * n * np.prod(experts, dtype=int)


def test_under_a_mesh_each_device_steps_its_part():
    mesh = h200.h200s(2, 2)
    given = described(mesh, (4096, 16384), "a", "b")
    compiled = h200.compile_for(mesh, train, *given, donate_argnums=0)
    assert compiled.targets == [TARGETS["triton"]]
    assert not compiled.results("all-gather")
    assert not compiled.results("copy")
    assert len(compiled.results("all-reduce")) == 1  # the amax


def test_each_device_steps_its_experts_of_every_layer():
    mesh = h200.h200s(2)
    given = described(mesh, (2, 4, 1024, 2048), None, "a")
    call = partial(train, stacks=2)
    compiled = h200.compile_for(mesh, call, *given, donate_argnums=0)
    assert compiled.targets == [TARGETS["triton"]]
    for name in ("copy", "all-reduce", *h200.GATHERS):
        assert not compiled.results(name)
