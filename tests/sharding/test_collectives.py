"""Traffic of a training step: Llamas compiled for 8 H200s, each compared with BF16's
program on the same mesh.

A step is loss, gradients, clipping and AdamW; layers are scanned and rematerialized.
Activations are split along the batch where blocks begin and end, as every user of FSDP
writes; all else XLA decides. One program takes a minute to compile, so that CI has one
recipe and the slow tests another; `TCFP_EVERY_COLLECTIVE=1` runs all of `EVERY`.
"""

import collections
import functools
import itertools
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

import tcfp_jax
from benchmarks import llama_steps
from models.nets.llama import Block
from models.nets.shapes import LlamaConfig
from pallas_kernels.matmul.api import matmul
from tcfp_jax.weights.stored import Stored
from tests.collectives import OPERATIONS, Collective, collectives
from tests.compile_for_h200 import compile_for, h200s, needs_plugin, on, on_once
from tests.helpers import parametrize, refused

# All differ from each other and from the tokens of a batch or a part of it, so a shape
# identifies an array.
LAYERS = 4
WIDTH = 1024
KEYS = 512
HIDDEN = 3072
VOCABULARY = 1280
BATCH = 16
POSITIONS = 1024
# Axes of [k, n]. Column-parallel kernels have n on the tensor axis, row-parallel ones
# k, and the other axis is FSDP's.
COLUMNS = {"query": WIDTH, "key": KEYS, "value": KEYS, "gate": HIDDEN, "up": HIDDEN}
ROWS = {"output": WIDTH, "down": HIDDEN}
FSDP = "a"
TENSOR = "b"
REDUCTIONS = ("all-reduce", "reduce-scatter")
MESHES = {"fsdp=8": (8,), "fsdp=4 tensor=2": (4, 2)}
# Share of BF16's bytes of gathered weights. With remat="block" the backward pass reads
# W_lo again, except in "down".
ALL_BUT_DOWN = 1 - WIDTH * HIDDEN / (
    2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * HIDDEN
)
GATHERED = {
    ("tcfp12_fast", "products"): 0.75,
    ("tcfp12_fast", "none"): 0.75,
    ("tcfp12_fast", "block"): (3 + ALL_BUT_DOWN) / 4,
}
# XLA adds the gradients of x by q, k and v before it sends them over the tensor axis,
# for BF16 and for our kernels. Its own FP8 products have a scale each, so it sends
# their gradients separately.
UNADDED = 3
# Sizes of vectors with the amaxes of some weights' layers, or of all.
AMAXES = {LAYERS * weights for weights in range(1, 1 + len({*COLUMNS, *ROWS}))}
# (recipe, remat, mesh): one weight for both orientations where a block is computed
# again, which needs both at once.
CI = [("tcfp12_single", "block", "fsdp=8")]
RECIPES = (
    "tensorwise",
    "tcfp12_single",
    "stored",
    "tcfp12_fast",
    "rowwise",
    "blockwise",
)
REMATS = ("block", "products", "none")
EVERY = [*itertools.product(RECIPES, REMATS, MESHES)]
CASES = EVERY if os.environ.get("TCFP_EVERY_COLLECTIVE") == "1" else CI


def spec_of(path, shape, sizes):
    """Return the axes of a parameter, or of an optimizer's array for it, by the names
    along its path.
    """
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    axes = (None, None)
    if any(name in ROWS for name in names):
        axes = (TENSOR, FSDP)
    if any(name in (*COLUMNS, "embedding", "head") for name in names):
        axes = (FSDP, TENSOR)
    # A stack of vectors, such as the scales of rows, is whole.
    is_matrix = len(shape) > 2 or (len(shape) == 2 and "layers" not in names)
    if not is_matrix or {"sample", "rounding"} & set(names):
        return PartitionSpec()
    if "forward" in names:
        axes = axes[::-1]
    axes = [axis if axis in sizes else None for axis in axes]
    for axis, size in zip(axes, shape[-2:], strict=True):
        if axis and size % sizes[axis]:
            return PartitionSpec()
    return PartitionSpec(*(None for _ in shape[2:]), *axes)


def split_batch(mesh):
    """Activations lie with their tokens where a block, a norm or the embedding begins
    and ends.
    """
    of_tokens = NamedSharding(mesh, PartitionSpec(FSDP))

    def put(x):
        return jax.lax.with_sharding_constraint(x, of_tokens)

    def intercept(method, args, options, context):
        is_call = context.method_name == "__call__"
        if is_call and isinstance(context.module, nn.Embed | nn.RMSNorm):
            return put(method(*args, **options))
        if is_call and isinstance(context.module, Block):
            x, none = method(put(args[0]), *args[1:], **options)
            return put(x), none
        return method(*args, **options)

    return nn.intercept_methods(intercept)


def training_step(name, remat):
    """(the step, the function that makes its state and tokens)."""
    size = LlamaConfig(
        layers=LAYERS,
        width=WIDTH,
        heads=8,
        kv_heads=4,
        hidden=HIDDEN,
        context=POSITIONS,
        vocabulary=VOCABULARY,
        head="untied",
        attention="products",
        remat=remat,
    )
    if remat == "block" and name in ("tensorwise", "tcfp12_fast"):
        name = tcfp_jax.recipe(name, copies="one")
    tokens = (BATCH, POSITIONS)
    config = llama_steps.Config(
        size, size, tokens, tokens, {}, include=("linear", "small")
    )
    training = llama_steps.make_training(config, name)
    return training.step, training.init


@functools.lru_cache(maxsize=4)
@jax.numpy_dtype_promotion("standard")  # Flax's norms promote
def travels(name: str, remat: str, mesh_name: str) -> list[Collective]:
    """The collectives of the optimized program."""
    mesh = h200s(*MESHES[mesh_name])
    step, init = training_step(name, remat)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shapes, _ = jax.eval_shape(init, jax.random.key(0))

    def place(path, leaf):
        return on(mesh, leaf.shape, leaf.dtype, *spec_of(path, leaf.shape, mesh.shape))

    state = jax.tree_util.tree_map_with_path(place, shapes)
    tokens = on(mesh, (BATCH, POSITIONS + 1), jnp.int32, FSDP)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), everywhere)
    with split_batch(mesh):
        compiled = compile_for(
            mesh, step, state, tokens, donate_argnums=0, out_shardings=shardings
        )
    return collectives(compiled.text)


def is_weight(part, mesh_name: str) -> bool:
    """Whether an array of a collective has the shape of a kernel that FSDP has brought
    together, or of its blocks.
    """
    ways = (*MESHES[mesh_name], 1)[1]
    whole = {(WIDTH, n // ways) for n in COLUMNS.values()} | {
        (k // ways, WIDTH) for k in ROWS.values()
    }
    whole |= {(k // 128, n // 128) for k, n in whole}
    shape = tuple(size for size in part.shape if size != 1)
    return shape in whole or shape[::-1] in whole


def gathered_weights(found: list[Collective], mesh_name: str) -> int:
    """Bytes a step of the layers' kernels that devices bring together."""
    total = 0
    for part, c in parts_of(found, "all-gather"):
        if is_weight(part, mesh_name):
            total += c.times * part.bytes
    return total


def parts_of(found: list[Collective], *operations: str):
    """Each part of these collectives, with its collective."""
    for c in found:
        if c.operation in operations:
            for part in c.parts:
                yield part, c


def others(
    found: list[Collective], mesh_name: str
) -> collections.Counter[tuple[int, ...]]:
    """Shapes of what is gathered or moved that is no weight, and how often."""
    moved: collections.Counter[tuple[int, ...]] = collections.Counter()
    for part, c in parts_of(found, *(set(OPERATIONS) - {*REDUCTIONS})):
        if not is_weight(part, mesh_name):
            moved[part.shape] += c.times
    return moved


PROGRAM = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
%fused (p: f32[16]) -> f32[16] {
  ROOT %reduced = f32[16]{0} all-reduce(%p), \
replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%add
}
%body (p: (s32[], f8e4m3fn[2,8])) -> (s32[], f8e4m3fn[2,8]) {
  %start = ((f8e4m3fn[2,8]{1,0}, bf16[1,4]{1,0}), (f8e4m3fn[8,8]{1,0}, \
bf16[4,4]{1,0})) all-gather-start(%x, %y), \
replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(step)/gather"}
  %done = (f8e4m3fn[8,8]{1,0}, bf16[4,4]{1,0}) all-gather-done(%start)
  %small = f32[16]{0} fusion(%z), kind=kCustom, calls=%fused
}
ENTRY %main (p: f32[16]) -> f32[2] {
  %loop = (s32[], f8e4m3fn[2,8]) while(%t), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  ROOT %part = f32[2]{0} reduce-scatter(%p), \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
}
%c (t: s32[]) -> pred[] {
  ROOT %less = pred[] compare(%t, %t), direction=LT
}
"""


def test_collectives_are_read_with_their_loops():
    found = collectives(PROGRAM.replace("\\\n", ""))
    assert [str(c) for c in found] == [
        "all-reduce f32[16] x6 of 2: ",
        "all-gather f8e4m3fn[8,8], bf16[4,4] x6 of 4: jit(step)/gather",
        "reduce-scatter f32[2] x1 of 4: ",
    ]
    assert [c.bytes for c in found] == [6 * 64, 6 * (64 + 32), 8]
    with refused("body has collectives"):
        collectives(PROGRAM.replace("known_trip_count", "unknown"))


@needs_plugin
@parametrize("backend", ["mosaic", "xla"])
def test_one_orientation_is_gathered_once_for_both_products(backend):
    """As in a block that is computed again: its forward product and its dgrad stand in
    one program.
    """
    mesh = h200s(8)
    recipe = tcfp_jax.recipe("tcfp12_single", backend=backend)
    x = on(mesh, (16384, WIDTH), jnp.bfloat16, FSDP)
    g = on(mesh, (16384, HIDDEN), jnp.bfloat16, FSDP)
    values = on_once(mesh, (WIDTH, HIDDEN), jnp.float8_e4m3fn, FSDP, halves=2)
    weight = Stored(None, values)

    def both(x, g, weight):
        y, pull = jax.vjp(lambda x: tcfp_jax.matmul(x, weight, recipe=recipe), x)
        return y, *pull(g)

    compiled = compile_for(mesh, both, x, g, weight)
    found = collectives(compiled.text)
    gathers = [str(part) for part, _ in parts_of(found, "all-gather")]
    assert gathers in ([f"f8e4m3fn[{WIDTH},{HIDDEN}]"], [f"f8e4m3fn[{HIDDEN},{WIDTH}]"])


@needs_plugin
def test_partial_products_are_added_before_they_are_sent():
    """Tensor parallelism: the gradients of x by q, k and v are summed over the devices
    of the tensor axis at once.
    """
    mesh = h200s(4, 2)
    m = 16384
    pairs = []
    for n in (WIDTH, KEYS, KEYS):
        g = on_once(mesh, (m, n), jnp.float8_e5m2, FSDP, TENSOR)
        w = on_once(mesh, (WIDTH, n), jnp.float8_e4m3fn, None, TENSOR)
        pairs.append((g, w))

    def total(*pairs):
        product = functools.partial(matmul, accumulation="full", backend="mosaic")
        return functools.reduce(jnp.add, itertools.starmap(product, pairs))

    (found,) = collectives(compile_for(mesh, total, *pairs).text)
    assert found.operation == "all-reduce"
    (part,) = found.parts
    assert (part.dtype, part.size) == ("bf16", m // 4 * WIDTH)


@needs_plugin
@parametrize("name, remat, mesh_name", CASES)
def test_a_training_step_sends_what_bf16_sends_and_less_of_it(name, remat, mesh_name):
    bf16 = travels("bf16", remat, mesh_name)
    ours = travels(name, remat, mesh_name)
    # Weights: every device has gathered each of them twice, forward and backward.
    twice = 2 * 2 * LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * HIDDEN)
    assert gathered_weights(bf16, mesh_name) == twice // (*MESHES[mesh_name], 1)[1]
    ratio = gathered_weights(ours, mesh_name) / gathered_weights(bf16, mesh_name)
    assert 0 < ratio <= GATHERED.get((name, remat), 0.5) + 0.001
    # Neither activations nor gradients are gathered where BF16 does not do so.
    assert not others(ours, mesh_name) - others(bf16, mesh_name)
    # Gradients of weights are summed and handed out in one, in float32, and activations
    # as BF16 sums them.
    assert scattered(ours, mesh_name) == {"f32": LAYERS * len({*COLUMNS, *ROWS})}
    assert largest_sum(ours) <= UNADDED * largest_sum(bf16)
    # All amaxes of weights travel in one vector, once a step; rows and blocks have
    # theirs where they are.
    amaxes = [c for c in once(ours) if len(c.parts) == 1 and c.parts[0].size in AMAXES]
    assert len(amaxes) == (0 if name in ("rowwise", "blockwise") else 1)


def scattered(found: list[Collective], mesh_name: str) -> dict[str, int]:
    """How many gradients of kernels a step reduces and scatters, by dtype."""
    ways = MESHES[mesh_name][0]
    counted: collections.Counter[str] = collections.Counter()
    for part, c in parts_of(found, "reduce-scatter"):
        for axis in (0, -1):
            sizes = list(part.shape)
            sizes[axis] *= ways
            if is_weight(replace(part, shape=tuple(sizes)), mesh_name):
                counted[part.dtype] += c.times
    return dict(counted)


def largest_sum(found: list[Collective]) -> int:
    """Bytes of the largest array that an all-reduce leaves whole on every device."""
    return max(part.bytes for part, _ in parts_of(found, "all-reduce"))


def once(found: list[Collective]) -> list[Collective]:
    """All-reduces of 32-bit values outside of loops: those of activations' amaxes are
    bfloat16.
    """
    return [
        c
        for c in found
        if c.operation == "all-reduce"
        and c.times == 1
        and c.parts[0].dtype in ("f32", "s32")
    ]
