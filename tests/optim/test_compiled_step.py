"""The training step of stored parameters, compiled for an H200: its only floats of a
weight's size are gradients.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

import tcfp_jax
from tcfp_jax.conversion import find_weights
from tests import compile_for_h200 as h200
from tests.compile_for_h200 import compile_for, h200s

REASON = h200.missing()
pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

TOKENS, K, N = 4096, 1024, 2048


class Deep(nn.Module):
    """Layers of one shape, whose initial values XLA would make in one kernel."""

    layers: int = 6

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dense(256)(x)
        return x


def test_no_two_kernels_are_float_while_a_model_is_made():
    mesh = h200s(1)

    def init(key):
        key = jax.random.wrap_key_data(key)
        floats = lambda: Deep().init(key, jnp.zeros((1, 256)))["params"]
        return tcfp_jax.store(floats, "tcfp12_single", key=key)

    key = jax.ShapeDtypeStruct(
        (2,), jnp.uint32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    compiled = compile_for(mesh, init, key)
    assert 4 * 256 * 256 <= compiled.temporary_bytes < 1.5 * 4 * 256 * 256


def entry_of_step(tx, init, loss, batch):
    """The entry computation of a compiled training step on one H200."""
    mesh = h200s(1)

    def step(params, state, batch):
        value, gradients = tcfp_jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return tcfp_jax.apply_updates(params, updates), state, value

    place = lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec())
    )
    shapes = jax.tree.map(place, (*jax.eval_shape(init), batch))
    compiled = compile_for(mesh, step, *shapes, donate_argnums=(0, 1))
    return compiled.text[compiled.text.index("ENTRY") :]


@pytest.mark.slow_except("both-bfloat16")
@pytest.mark.parametrize(
    ("copies", "gradient"), [("one", "float32"), ("both", "bfloat16")]
)
def test_a_step_holds_nothing_of_a_weights_size_but_its_gradient(copies, gradient):
    recipe = tcfp_jax.recipe("tcfp12_single", copies=copies)
    tx = tcfp_jax.optim.adamw(1e-4, moments="8bit", key=jax.random.key(0))

    def init():
        params = {
            "up": {"kernel": jnp.ones((K, N))},
            "down": {"kernel": jnp.ones((N, K))},
        }
        params = tcfp_jax.store(
            params, recipe, key=jax.random.key(0), gradient_dtype=gradient
        )
        return params, tx.init(params)

    def loss(params, x):
        h = jax.nn.relu(tcfp_jax.matmul(x, params["up"]["kernel"], recipe=recipe))
        return jnp.mean(
            (tcfp_jax.matmul(h, params["down"]["kernel"], recipe=recipe) - x).astype(
                jnp.float32
            )
            ** 2
        )

    entry = entry_of_step(
        tx, init, loss, jax.ShapeDtypeStruct((TOKENS, K), jnp.bfloat16)
    )
    sizes = rf"\[(?:{K},{N}|{N},{K}|{K * N}|{K * N // 128},128)\]"
    made = [
        line
        for line in entry.splitlines()
        if " parameter(" not in line and "bitcast(" not in line
    ]
    made = [line.split(" = ", 1)[1] for line in made if " = " in line]
    wide = [
        line
        for line in made
        if re.match(
            rf"\(?.*?(?:f32|bf16|u32|s32){sizes}.* (?:fusion|custom-call|copy)\(", line
        )
    ]
    assert len(wide) == 2, wide  # both gradients, and that is all
    assert all(
        re.match(rf"{'f32' if gradient == 'float32' else 'bf16'}{sizes}", line)
        for line in wide
    )
    assert (
        sum('"__gpu$xla.gpu.triton"' in line or "adamw" in line for line in made) >= 2
    )
    # In place: nothing of the state is copied.
    assert not [
        line for line in made if re.match(rf"(?:f8e4m3fn|u8){sizes}\S* copy\(", line)
    ]


def test_a_step_of_a_tied_table_holds_no_float_table_but_its_gradient():
    rows, width = 8192, 512
    tx = tcfp_jax.optim.adamw(1e-4, moments="8bit", key=jax.random.key(0))

    def plain(params, ids):
        table = params["embed"].astype(jnp.bfloat16)
        return jnp.take(table, ids, axis=0) @ table.T

    low = tcfp_jax.transform(
        plain, "tcfp12_single", include=("linear", "small", "head", "embed")
    )
    floats, ids = {"embed": jnp.ones((rows, width))}, jnp.zeros(2048, jnp.int32)

    def init():
        weights = find_weights(low, floats, ids)
        params = tcfp_jax.store(
            floats, weights, key=jax.random.key(0), gradient_dtype=jnp.bfloat16
        )
        return params, tx.init(params)

    loss = lambda params, ids: jnp.mean(low(params, ids).astype(jnp.float32) ** 2)
    entry = entry_of_step(tx, init, loss, ids)
    floats = rf"(f32|bf16)\[(?:{rows},{width}|{width},{rows})\]"
    made = [
        match for match in re.finditer(rf"= {floats}\S* (?!parameter|bitcast).*", entry)
    ]
    wide = [match[0] for match in made if match[1] == "f32"]
    # float32 sums of rows
    assert len(wide) == 2 and "broadcast" in wide[0] and "scatter-add" in wide[1], wide
    # The head's gradient, with that of the rows, and both in the table's orientation.
    assert len(made) == 5 and all(
        re.search(r"transpose\(jvp|/wgrad/", match[0]) for match in made
    ), made
