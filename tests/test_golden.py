"""The library's bits do not change: digests of quantizers, casts, products, gradients
and optimizer steps.

A change that is not meant to alter results must leave `golden.json` as it is. A change
that is meant to says why in `docs/decisions.md` and writes the file anew:
`python -m tests.test_golden`.

Products are compared by bits, although machines add float32 in different orders: their
operands have few bits, so every sum is exact, in any order.
"""

import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tcfp_jax
from tcfp_jax import formats
from tests.helpers import parametrize

FILE = Path(__file__).with_name("golden.json")
RECIPES = (
    "bf16",
    "tcfp12",
    "tcfp12_fast",
    "tcfp12_single",
    "tcfp12_blockwise",
    "tensorwise",
    "rowwise",
    "blockwise",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "nvfp4_training",
)
# Of a recipe, what users choose on top of its name.
VARIANTS = {
    "tcfp12, both halves, full": ("tcfp12", dict(forward="full", wgrad="full")),
    "tcfp12, stochastic": ("tcfp12", dict(remainder="stochastic")),
    "tcfp12, nonzero blocks": ("tcfp12_blockwise", dict(residual_blocks="nonzero")),
    "tensorwise, float32 scales": ("tensorwise", dict(scale="float32")),
    "tensorwise, E4M3 gradients": ("tensorwise", dict(gradient="float8_e4m3fn")),
    "blockwise, 32": ("blockwise", dict(block=32)),
    "nvfp4, fold_exact": ("nvfp4", dict(rule="fold_exact")),
    "nvfp4, four_over_six": ("nvfp4", dict(rule="four_over_six")),
}
CASTS = (
    "fp8",
    "bf8",
    "mxfp8e4",
    "mxfp6e3",
    "mxfp4e2",
    "nvfp4",
    "nf4",
    "tcfp12",
    "int8_F",
    "uint4_ff32",
    "icb44fi4_e32",
)


def digest(tree) -> str:
    """A digest of the bytes, shapes and dtypes of all arrays of a tree; random keys
    count by their data.
    """
    found = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found.update(f"{array.dtype} {array.shape} ".encode() + array.tobytes())
    return found.hexdigest()


def normal(*shape, seed=0) -> jax.Array:
    """Gaussian values of many magnitudes, with zeros and subnormals of FP8 among
    them.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 4, shape))
    return jnp.asarray(np.where(rng.random(shape) < 0.05, 0, values).astype(np.float32))


def short(*shape, bits, seed=0) -> jax.Array:
    """Values of `bits` significant bits within two binades, whose products any machine
    adds exactly.
    """
    rng = np.random.default_rng(seed)
    significands = rng.integers(2 ** (bits - 1), 2**bits, shape) * rng.choice(
        [-1, 1], shape
    )
    return jnp.asarray(
        (significands * np.exp2(rng.integers(-bits - 1, 1 - bits, shape))).astype(
            np.float32
        )
    )


def quantizers():
    """(name, function of nothing) of every quantizer that users call."""
    x = normal(64, 128)
    key = jax.random.key(3)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        yield f"quantize {dtype}", lambda dtype=dtype: tcfp_jax.quantize(x, dtype)
    yield "split", lambda: tcfp_jax.split(x)
    yield "quantize float32 scale", lambda: tcfp_jax.quantize(x, scale="float32")
    for block in (32, 128):
        yield (
            f"quantize vectors of {block}",
            lambda block=block: tcfp_jax.quantize(x, block=block),
        )
        yield (
            f"quantize squares of {block}",
            lambda block=block: tcfp_jax.quantize(x, block=block, tile="square"),
        )
        yield f"split {block}", lambda block=block: tcfp_jax.split(x, block=block)
    for residual in ("linear", "nf4"):
        yield (
            f"tcfp12 {residual}",
            lambda residual=residual: tcfp_jax.quantize_tcfp12(x, residual=residual),
        )
    yield "fake quantize", lambda: tcfp_jax.fake_quantize(x, 32, scale="sigma")
    yield "nvfp4 arrays", lambda: formats.quantize_nvfp4(x)
    for name in CASTS:
        yield f"cast {name}", lambda name=name: formats.cast(x, formats.CATALOG[name])
        yield (
            f"cast {name} stochastic",
            lambda name=name: formats.cast(
                x, formats.CATALOG[name], roundmode="stochastic", key=key
            ),
        )
        yield f"pack {name}", lambda name=name: formats.pack(x, formats.CATALOG[name])


def product(name, **overrides):
    """A product and its three gradients, of values whose sums are exact."""
    recipe = tcfp_jax.recipe(name, **overrides)
    x = short(32, 128, bits=3)
    w = short(128, 64, bits=5, seed=1)
    g = short(32, 64, bits=3, seed=2)
    key = jax.random.key(5)
    if recipe.mode == tcfp_jax.TCFPMode.FP4:
        from tcfp_jax.weights.quantization import quantize_weight

        stored, _ = quantize_weight(w, recipe)
        y, back = jax.vjp(lambda x: tcfp_jax.matmul(x, stored, recipe=recipe), x)
        return stored, y, back(g)
    y, back = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=recipe, key=key), x, w)
    return y, back(g)


def feedback_steps(name, **overrides):
    """Three steps of AdamW with error feedback."""
    recipe = tcfp_jax.recipe(name, **overrides)
    tx = optax.chain(
        optax.sgd(0.125),
        tcfp_jax.error_feedback(
            recipe, key=jax.random.key(7) if recipe.stochastic else None
        ),
    )
    params = {"dense": {"kernel": normal(64, 32), "bias": normal(32)}}
    state = tx.init(params)
    seen = []
    for step in range(3):
        gradients = jax.tree.map(
            lambda p, step=step: normal(*p.shape, seed=20 + step), params
        )
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        seen.append((params, tcfp_jax.layer_state(state)))
    return seen


def stored_steps(moments, name="tcfp12_single", **overrides):
    """Three steps of AdamW on weights that have no float copy."""
    recipe = tcfp_jax.recipe(name, **overrides)
    params = {"dense": {"kernel": normal(64, 32), "bias": normal(32)}}
    params = tcfp_jax.store(params, recipe, key=jax.random.key(8))
    tx = tcfp_jax.optim.adamw(
        1e-2, moments=moments, key=None if moments == "float32" else jax.random.key(9)
    )
    state = tx.init(params)
    seen = []
    for step in range(3):
        x = short(16, 64, bits=3, seed=step)
        g = short(16, 32, bits=3, seed=30 + step)

        def loss(p, x=x, g=g):
            return jnp.sum(
                (tcfp_jax.matmul(x, p["kernel"], recipe=recipe) + p["bias"]) * g
            )

        gradients = tcfp_jax.grad(lambda params, loss=loss: loss(params["dense"]))(
            params
        )
        updates, state = tx.update(gradients, state, params)
        params = tcfp_jax.apply_updates(params, updates)
        seen.append((params, state))
    return seen


def cases():
    """Name to function of nothing, whose arrays have a digest."""
    found = dict(quantizers())
    for name in RECIPES:
        found[f"product {name}"] = functools.partial(product, name)
    for label, (name, overrides) in VARIANTS.items():
        found[f"product {label}"] = functools.partial(product, name, **overrides)
    for name in ("tcfp12", "tcfp12_fast", "tcfp12_blockwise"):
        found[f"feedback {name}"] = functools.partial(feedback_steps, name)
    found["feedback stochastic"] = functools.partial(
        feedback_steps, "tcfp12", remainder="stochastic"
    )
    found["feedback delayed"] = functools.partial(
        feedback_steps, "tcfp12_fast", amax="delayed"
    )
    for moments in ("8bit", "bfloat16", "float32"):
        found[f"stored {moments}"] = functools.partial(stored_steps, moments)
    return found


CASES = cases()


@parametrize("name", CASES)
def test_bits_are_those_of_the_file(name):
    assert digest(CASES[name]()) == json.loads(FILE.read_text())[name]


def test_the_file_has_no_other_case():
    assert set(json.loads(FILE.read_text())) == set(CASES)


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    FILE.write_text(
        json.dumps({name: digest(call()) for name, call in CASES.items()}, indent=1)
        + "\n"
    )
