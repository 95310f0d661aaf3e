"""Traffic of a training step: Llamas compiled for 8 H200s, each compared with BF16's
program on the same mesh.

A step is loss, gradients, clipping and AdamW; layers are scanned and rematerialized.
Activations are split along the batch where blocks begin and end, as every user of FSDP
writes; all else XLA decides. One program takes a minute to compile, so that CI has one
recipe and the slow tests another; `TCFP_EVERY_COLLECTIVE=1` runs all of `EVERY`.
"""

import collections
import functools
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

import tcfp_jax
from models.nets.llama import Block, Llama
from models.nets.shapes import LlamaConfig
from pallas_kernels.matmul.api import matmul
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.weights.stored import Stored
from tests import compile_for_h200 as h200
from tests.collectives import Collective, collectives
from tests.compile_for_h200 import compile_for, h200s, on, on_once

REASON = h200.missing()
compiles = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# All differ from each other and from the tokens of a batch or a part of it, so a shape
# identifies an array.
LAYERS, WIDTH, KEYS, HIDDEN, VOCABULARY = 4, 1024, 512, 3072, 1280
BATCH, POSITIONS = 16, 1024
# Axes of [k, n]. Column-parallel kernels have n on the tensor axis, row-parallel ones
# k, and the other axis is FSDP's.
COLUMNS = {"query": WIDTH, "key": KEYS, "value": KEYS, "gate": HIDDEN, "up": HIDDEN}
ROWS = {"output": WIDTH, "down": HIDDEN}
FSDP, TENSOR = "a", "b"
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
EVERY = [
    (recipe, remat, mesh)
    for mesh in MESHES
    for remat in ("block", "products", "none")
    for recipe in (
        "tensorwise",
        "tcfp12_single",
        "stored",
        "tcfp12_fast",
        "rowwise",
        "blockwise",
    )
]
CASES = EVERY if os.environ.get("TCFP_EVERY_COLLECTIVE") == "1" else CI


def spec_of(path, shape, sizes):
    """Return the axes of a parameter, or of an optimizer's array for it, by the names
    along its path.
    """
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    axes = next(
        ((FSDP, TENSOR) for name in names if name in (*COLUMNS, "embedding", "head")),
        None,
    )
    axes = (
        (TENSOR, FSDP) if axes is None and any(name in ROWS for name in names) else axes
    )
    if axes is None or len(shape) < 2 or {"sample", "rounding"} & set(names):
        return PartitionSpec()
    axes = [
        axis if axis in sizes else None
        for axis in (axes[::-1] if "forward" in names else axes)
    ]
    if any(
        axis and size % sizes[axis] for axis, size in zip(axes, shape[-2:], strict=True)
    ):
        return PartitionSpec()
    # a stack of vectors, such as the scales of rows
    if len(shape) == 2 and "layers" in names:
        return PartitionSpec()
    return PartitionSpec(*(None for _ in shape[2:]), *axes)


def split_batch(mesh):
    """Activations lie with their tokens where a block, a norm or the embedding begins
    and ends.
    """
    put = lambda x: jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, PartitionSpec(FSDP))
    )

    def intercept(method, args, options, context):
        if context.method_name != "__call__" or not isinstance(
            context.module, Block | nn.Embed | nn.RMSNorm
        ):
            return method(*args, **options)
        if not isinstance(context.module, Block):
            return put(method(*args, **options))
        x, none = method(put(args[0]), *args[1:], **options)
        return put(x), none

    return nn.intercept_methods(intercept)


def training_step(name, remat):
    """(the step, the function that makes its state)."""
    model = Llama(
        LlamaConfig(
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
    )
    converted, weights = model, None
    if name != "bf16":
        copies = (
            {"copies": "one"}
            if remat == "block" and name in ("tensorwise", "tcfp12_fast")
            else {}
        )
        recipe = tcfp_jax.recipe(
            "tcfp12_single" if name == "stored" else name, **copies
        )
        tokens = jax.ShapeDtypeStruct((BATCH, POSITIONS), jnp.int32)
        converted = convert_to_tcfp(model, recipe, tokens, include=("linear", "small"))
        weights = find_weights(converted)
    feedback = [] if weights is None else [tcfp_jax.error_feedback(weights)]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4), *feedback)
    if name == "stored":
        tx = tcfp_jax.optim.adamw(
            1e-4, moments="8bit", max_norm=1.0, key=jax.random.key(0)
        )

    @tcfp_jax.value_and_grad
    def gradients(params, opt_state, tokens):
        state = {} if weights is None else {"tcfp": tcfp_jax.layer_state(opt_state)}
        return converted.apply(
            {"params": params, **state}, tokens[:, :-1], tokens[:, 1:]
        ).mean()

    def step(state, tokens):
        loss, dparams = gradients(*state, tokens)
        updates, opt_state = tx.update(dparams, state[1], state[0])
        return (tcfp_jax.apply_updates(state[0], updates), opt_state), loss

    def init(key):
        params = lambda: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        stored = lambda: tcfp_jax.store(
            params, weights, key=key, gradient_dtype=jnp.bfloat16
        )
        params = stored() if name == "stored" else params()
        return params, tx.init(params)

    return step, init


@functools.lru_cache(maxsize=4)
@jax.numpy_dtype_promotion("standard")  # Flax's norms promote
def travels(name: str, remat: str, mesh_name: str) -> list[Collective]:
    """The collectives of the optimized program."""
    mesh = h200s(*MESHES[mesh_name])
    step, init = training_step(name, remat)
    sizes = dict(mesh.shape)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shapes = jax.eval_shape(init, jax.random.key(0))
    place = lambda path, leaf: jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=NamedSharding(mesh, spec_of(path, leaf.shape, sizes)),
    )
    state = jax.tree_util.tree_map_with_path(place, shapes)
    tokens = jax.ShapeDtypeStruct(
        (BATCH, POSITIONS + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(FSDP)),
    )
    shardings = (
        jax.tree.map(lambda leaf: leaf.sharding, state),
        NamedSharding(mesh, PartitionSpec()),
    )
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
    gathers = [c for c in found if c.operation == "all-gather"]
    return sum(
        c.times * part.bytes
        for c in gathers
        for part in c.parts
        if is_weight(part, mesh_name)
    )


def others(
    found: list[Collective], mesh_name: str
) -> collections.Counter[tuple[int, ...]]:
    """Shapes of what is gathered or moved that is no weight, and how often."""
    moved: collections.Counter[tuple[int, ...]] = collections.Counter()
    for c in found:
        if c.operation not in ("all-reduce", "reduce-scatter"):
            moved.update(
                {
                    part.shape: c.times
                    for part in c.parts
                    if not is_weight(part, mesh_name)
                }
            )
    return moved


PROGRAM = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
%fused (p: f32[16]) -> f32[16] {
  ROOT %reduced = f32[16]{0} all-reduce(%p), replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%add
}
%body (p: (s32[], f8e4m3fn[2,8])) -> (s32[], f8e4m3fn[2,8]) {
  %start = ((f8e4m3fn[2,8]{1,0}, bf16[1,4]{1,0}), (f8e4m3fn[8,8]{1,0}, bf16[4,4]{1,0})) all-gather-start(%x, %y), \
replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(step)/gather"}
  %done = (f8e4m3fn[8,8]{1,0}, bf16[4,4]{1,0}) all-gather-done(%start)
  %small = f32[16]{0} fusion(%z), kind=kCustom, calls=%fused
}
ENTRY %main (p: f32[16]) -> f32[2] {
  %loop = (s32[], f8e4m3fn[2,8]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %part = f32[2]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
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
    with pytest.raises(ValueError, match="body has collectives"):
        collectives(PROGRAM.replace("known_trip_count", "unknown"))


@compiles
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
def test_a_weight_in_one_orientation_is_gathered_once_for_both_products(backend):
    """As in a block that is computed again: its forward product and its dgrad stand in
    one program.
    """
    mesh = h200s(8)
    recipe = tcfp_jax.recipe("tcfp12_single", backend=backend)
    x, g = (
        on(mesh, (16384, WIDTH), jnp.bfloat16, FSDP),
        on(mesh, (16384, HIDDEN), jnp.bfloat16, FSDP),
    )
    weight = Stored(
        None, on_once(mesh, (WIDTH, HIDDEN), jnp.float8_e4m3fn, FSDP, halves=2)
    )

    def both(x, g, weight):
        y, pull = jax.vjp(lambda x: tcfp_jax.matmul(x, weight, recipe=recipe), x)
        return y, *pull(g)

    compiled = compile_for(mesh, both, x, g, weight)
    gathers = [
        str(part)
        for c in collectives(compiled.text)
        if c.operation == "all-gather"
        for part in c.parts
    ]
    assert gathers in ([f"f8e4m3fn[{WIDTH},{HIDDEN}]"], [f"f8e4m3fn[{HIDDEN},{WIDTH}]"])


@compiles
def test_partial_products_of_one_input_are_added_before_they_are_sent():
    """Tensor parallelism: the gradients of x by q, k and v are summed over the devices
    of the tensor axis at once.
    """
    mesh, m = h200s(4, 2), 16384
    pairs = [
        (
            on_once(mesh, (m, n), jnp.float8_e5m2, FSDP, TENSOR),
            on_once(mesh, (WIDTH, n), jnp.float8_e4m3fn, None, TENSOR),
        )
        for n in (WIDTH, KEYS, KEYS)
    ]
    product = functools.partial(matmul, accumulation="full", backend="mosaic")
    total = lambda *pairs: functools.reduce(jnp.add, (product(g, w) for g, w in pairs))
    found = collectives(compile_for(mesh, total, *pairs).text)
    assert [
        (c.operation, [(part.dtype, part.size) for part in c.parts]) for c in found
    ] == [("all-reduce", [("bf16", m // 4 * WIDTH)])]


@compiles
@pytest.mark.parametrize(("name", "remat", "mesh_name"), CASES)
def test_a_training_step_sends_what_bf16_sends_and_less_of_it(name, remat, mesh_name):
    bf16, ours = travels("bf16", remat, mesh_name), travels(name, remat, mesh_name)
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
    for c in found:
        if c.operation == "reduce-scatter":
            wholes = [
                replace(part, shape=(part.shape[0] * ways, *part.shape[1:]))
                for part in c.parts
            ]
            rows = [
                replace(part, shape=(*part.shape[:-1], part.shape[-1] * ways))
                for part in c.parts
            ]
            for part, *whole in zip(c.parts, wholes, rows, strict=True):
                counted[part.dtype] += c.times * any(
                    is_weight(shape, mesh_name) for shape in whole
                )
    return {dtype: count for dtype, count in counted.items() if count}


def largest_sum(found: list[Collective]) -> int:
    """Bytes of the largest array that an all-reduce leaves whole on every device."""
    return max(
        part.bytes for c in found if c.operation == "all-reduce" for part in c.parts
    )


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
