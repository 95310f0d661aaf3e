"""The training step of stored parameters, compiled for an H200: its only floats of a
weight's size are gradients.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import tcfp_jax
from tcfp_jax.conversion import find_weights
from tests.compile_for_h200 import compile_for, h200s, needs_plugin, on
from tests.helpers import parametrize, slow_except, step_of

pytestmark = [pytest.mark.optimized, needs_plugin]

TOKENS = 4096
K = 1024
N = 2048
KEY = jax.random.key(0)
TX = tcfp_jax.optim.adamw(1e-4, moments="8bit", key=KEY)


class Deep(nn.Module):
    """Layers of one shape, whose initial values XLA would make in one kernel."""

    layers: int = 6

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dense(256)(x)
        return x


def test_no_two_kernels_are_float_while_a_model_is_made():
    def init(key):
        key = jax.random.wrap_key_data(key)

        def floats():
            return Deep().init(key, jnp.zeros((1, 256)))["params"]

        return tcfp_jax.store(floats, "tcfp12_single", key=key)

    mesh = h200s(1)
    compiled = compile_for(mesh, init, on(mesh, (2,), jnp.uint32))
    assert 4 * 256 * 256 <= compiled.temporary_bytes < 1.5 * 4 * 256 * 256


def entry_of_step(tx, init, loss, batch):
    """The entry computation of a compiled training step on one H200."""
    mesh = h200s(1)

    def step(params, state, batch):
        value, gradients = tcfp_jax.value_and_grad(loss)(params, batch)
        return *step_of(tx)(gradients, params, state), value

    def place(leaf):
        return on(mesh, leaf.shape, leaf.dtype)

    shapes = jax.tree.map(place, (*jax.eval_shape(init), batch))
    compiled = compile_for(mesh, step, *shapes, donate_argnums=(0, 1))
    return compiled.text[compiled.text.index("ENTRY") :]


@slow_except("both-bfloat16")
@parametrize(("copies", "gradient"), [("one", "float32"), ("both", "bfloat16")])
def test_a_step_holds_nothing_of_a_weights_size_but_its_gradient(copies, gradient):
    recipe = tcfp_jax.recipe("tcfp12_single", copies=copies)
    matmul = functools.partial(tcfp_jax.matmul, recipe=recipe)
    floats = {"up": {"kernel": jnp.ones((K, N))}, "down": {"kernel": jnp.ones((N, K))}}

    def init():
        params = tcfp_jax.store(floats, recipe, key=KEY, gradient_dtype=gradient)
        return params, TX.init(params)

    def loss(params, x):
        h = jax.nn.relu(matmul(x, params["up"]["kernel"]))
        error = matmul(h, params["down"]["kernel"]) - x
        return jnp.mean(error.astype(jnp.float32) ** 2)

    batch = jax.ShapeDtypeStruct((TOKENS, K), jnp.bfloat16)
    made = []
    for line in entry_of_step(TX, init, loss, batch).splitlines():
        _, is_made, operation = line.partition(" = ")
        if is_made and " parameter(" not in line and "bitcast(" not in line:
            made.append(operation)
    sizes = rf"\[(?:{K},{N}|{N},{K}|{K * N}|{K * N // 128},128)\]"
    floats_of_its_size = re.compile(
        rf"\(?.*?(?:f32|bf16|u32|s32){sizes}.* (?:fusion|custom-call|copy)\("
    )
    wide = [line for line in made if floats_of_its_size.match(line)]
    assert len(wide) == 2, wide  # both gradients, and that is all
    dtype = "f32" if gradient == "float32" else "bf16"
    assert all(re.match(rf"{dtype}{sizes}", line) for line in wide)
    kernels = [
        line for line in made if "__gpu$xla.gpu.triton" in line or "adamw" in line
    ]
    assert len(kernels) >= 2
    # In place: nothing of the state is copied.
    copied = re.compile(rf"(?:f8e4m3fn|u8){sizes}\S* copy\(")
    assert not [line for line in made if copied.match(line)]


def test_a_step_of_a_tied_table_holds_its_gradient_alone():
    rows = 8192
    width = 512
    floats = {"embed": jnp.ones((rows, width))}
    ids = jnp.zeros(2048, jnp.int32)

    def plain(params, ids):
        table = params["embed"].astype(jnp.bfloat16)
        return jnp.take(table, ids, axis=0) @ table.T

    include = ("linear", "small", "head", "embed")
    low = tcfp_jax.transform(plain, "tcfp12_single", include=include)

    def init():
        weights = find_weights(low, floats, ids)
        params = tcfp_jax.store(floats, weights, key=KEY, gradient_dtype=jnp.bfloat16)
        return params, TX.init(params)

    def loss(params, ids):
        return jnp.mean(low(params, ids).astype(jnp.float32) ** 2)

    entry = entry_of_step(TX, init, loss, ids)
    table = rf"(f32|bf16)\[(?:{rows},{width}|{width},{rows})\]"
    made = [*re.finditer(rf"= {table}\S* (?!parameter|bitcast).*", entry)]
    wide = [match[0] for match in made if match[1] == "f32"]
    # float32 sums of rows
    assert len(wide) == 2, wide
    assert "broadcast" in wide[0]
    assert "scatter-add" in wide[1]
    # The head's gradient, with that of the rows, and both in the table's orientation.
    assert len(made) == 5, made
    gradient = re.compile(r"transpose\(jvp|/wgrad/")
    assert all(gradient.search(match[0]) for match in made), made
