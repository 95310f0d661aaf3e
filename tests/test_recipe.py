"""Recipes: names, flags, contradictions, and that every field changes the computation or the state."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import tcfp_jax
from tcfp_jax import Recipe, TCFPMode, recipe

X, W = jnp.ones((4, 8)), jnp.ones((8, 4))


def test_names():
    modes = {name: recipe(name).mode for name in ("bf16", "tcfp12", "tcfp12_fast", "tensorwise")}
    assert list(modes.values()) == [TCFPMode.BF16, TCFPMode.TCFP12, TCFPMode.TCFP12, TCFPMode.FP8]
    assert recipe("tcfp12") == Recipe() and recipe(Recipe(), wgrad="fp8").wgrad == "fp8"
    fast = recipe("tcfp12_fast")
    assert (fast.forward_weight, fast.dgrad_weight, fast.wgrad) == ("dual", "single", "fp8")
    single = recipe("tensorwise")
    assert (single.activation_dtype, single.gradient_dtype) == ("float8_e4m3fn", "float8_e5m2")
    assert len({recipe(name) for name in modes}) == 4  # hashable, distinct


@pytest.mark.parametrize(
    "flags, fields",
    [
        ({}, dict(wgrad="fp8", error_feedback=True, backend=None)),
        (dict(use_tensor_cores=False), dict(activation_dtype="bfloat16", gradient_dtype="bfloat16", wgrad="bf16")),
        (dict(delayed_scaling=True), dict(delayed_scaling=True)),
        (dict(use_cuda_ext=False), dict(backend="xla")),
        (dict(use_cuda_ext=False, use_fused_kernel=True), dict(backend="triton")),
        (dict(error_feedback=False), dict(error_feedback=False)),
        (dict(hp_grad_weight=True), dict(wgrad="bf16")),
        (dict(srr=True, error_feedback=False), dict(residual="stochastic")),
        (dict(abd=True), dict(dgrad_weight="single")),
        (dict(scale_block_size=64), dict(granularity="block", block=64, residual="nearest", forward_weight="dual")),
    ],
    ids=str,
)
def test_flags_of_the_original(flags, fields):
    built = Recipe.from_flags(**flags)
    assert {name: getattr(built, name) for name in fields} == fields


def test_flags_that_contradict_raise():
    with pytest.raises(ValueError, match="srr"):
        Recipe.from_flags(srr=True)
    with pytest.raises(ValueError, match="block=48 is not supported"):
        Recipe.from_flags(scale_block_size=48)


@pytest.mark.parametrize(
    "name, overrides, words",
    [
        ("tcfp12", dict(residual="stochastic"), "error_feedback=True"),
        ("tcfp12", dict(residual="stochastic", error_feedback=False, delayed_scaling=True), "delayed_scaling"),
        ("tcfp12", dict(residual="none"), "forward_weight='dual'"),
        ("tcfp12", dict(forward_weight="single", dgrad_weight="single"), "no product reads"),
        ("tcfp12", dict(scale="float32"), "power-of-two"),
        ("tcfp12", dict(activation_dtype="bfloat16"), "gradient_dtype='float8_e4m3fn'"),
        ("tcfp12_fast", dict(activation_dtype="bfloat16", gradient_dtype="bfloat16"), 'wgrad="bf16"'),
        ("tensorwise", dict(activation_dtype="float8_e5m2"), "no tensor core"),
        ("tensorwise", dict(weight_dtype="float8_e5m2"), "weight_dtype"),
        ("bf16", dict(error_feedback=True), "nothing to quantize"),
        ("bf16", dict(delayed_scaling=True), "no scale to delay"),
        ("tcfp12", dict(wgrad="fp4"), "wgrad='fp4' is unknown"),
        ("tcfp12", dict(backend="cuda"), "backend='cuda' is unknown"),
        ("tcfp12", dict(error_feedback="yes"), "not a bool"),
        ("blockwise", dict(block=48), "block=48 is not supported"),
        ("blockwise", dict(block=None), "needs block=32, 64 or 128"),
        ("tensorwise", dict(block=32), "block=32 with granularity='tensor'"),
        ("tensorwise", dict(weight_tile="vector"), "has no blocks"),
        ("blockwise", dict(scale="float32"), 'scale="float32" with granularity="block"'),
        ("blockwise", dict(forward_accumulation="fast"), 'make all three "full"'),
        ("blockwise", dict(residual_blocks="nonzero"), "only a W_lo in blocks"),
        ("bf16", dict(granularity="row"), "which has no scale"),
        ("mxfp8", dict(residual="nearest", forward_weight="dual"), "two quantizations of the weight"),
        ("rowwise", dict(error_feedback=True), "leave two errors"),
        ("rowwise", dict(weight_copies="one"), 'weight_copies="one"'),
        ("blockwise", dict(delayed_scaling=True), "only whole tensors carry an amax"),
        ("tensorwise", dict(forward_activation="dual"), "residual_activation"),
        ("tcfp12", dict(forward_activation="dual", forward_weight="single"), "forward_weight='single'"),
        ("fp7", {}, "recipe 'fp7' is unknown"),
    ],
    ids=str,
)
def test_contradictions_raise_when_built(name, overrides, words):
    with pytest.raises(ValueError, match=words):
        recipe(name, **overrides)


# field -> (recipe before, recipe after): one flip each, every other field equal.
FLIPS = {
    "activation_dtype": (recipe("tcfp12"), recipe("tcfp12", activation_dtype="float8_e5m2")),
    "weight_dtype": (recipe("tcfp12"), recipe("tcfp12", weight_dtype="float8_e5m2")),
    "gradient_dtype": (recipe("tcfp12"), recipe("tcfp12", gradient_dtype="float8_e5m2")),
    "residual": (recipe("tcfp12", error_feedback=False), recipe("tcfp12", error_feedback=False, residual="stochastic")),
    "forward_weight": (recipe("tcfp12"), recipe("tcfp12", forward_weight="single")),
    "dgrad_weight": (recipe("tcfp12"), recipe("tcfp12", dgrad_weight="single")),
    "wgrad": (recipe("tcfp12"), recipe("tcfp12", wgrad="fp8")),
    "forward_accumulation": (recipe("tcfp12"), recipe("tcfp12", forward_accumulation="full")),
    "dgrad_accumulation": (recipe("tcfp12"), recipe("tcfp12", dgrad_accumulation="fast")),
    "wgrad_accumulation": (recipe("tcfp12_fast"), recipe("tcfp12_fast", wgrad_accumulation="full")),
    "scale": (recipe("tensorwise"), recipe("tensorwise", scale="float32")),
    "granularity": (recipe("tensorwise"), recipe("tensorwise", granularity="row")),
    "block": (recipe("blockwise"), recipe("blockwise", block=32)),
    "weight_tile": (recipe("blockwise"), recipe("blockwise", weight_tile="vector")),
    "residual_blocks": (
        recipe("tcfp12_blockwise", backend="triton"),
        recipe("tcfp12_blockwise", backend="triton", residual_blocks="nonzero"),
    ),
    "forward_activation": (recipe("tcfp12"), recipe("tcfp12", forward_activation="dual")),
    "error_feedback": (recipe("tcfp12"), recipe("tcfp12", error_feedback=False)),
    "delayed_scaling": (recipe("tcfp12"), recipe("tcfp12", delayed_scaling=True)),
    "backend": (recipe("tcfp12"), recipe("tcfp12", backend="triton")),
    "quantize_backend": (recipe("tcfp12"), recipe("tcfp12", quantize_backend="triton")),
    "weight_copies": (recipe("tcfp12"), recipe("tcfp12", weight_copies="one")),
}


def computation(r):
    """The program of a training step and the state that it carries, as text."""
    key = jax.random.key(0) if r.residual == "stochastic" else None
    tx = tcfp_jax.error_feedback(r, key=key)
    params = {"kernel": W}

    def step(x, params, state, key):
        stored = tcfp_jax.layer_state(state)["kernel"]
        y, vjp = jax.vjp(lambda x, w: tcfp_jax.matmul(x, w, recipe=r, quantized=stored), x, params["kernel"])
        dx, dw = vjp(y)
        return dx, tx.update({"kernel": dw}, state, params)

    try:
        return str(jax.make_jaxpr(step)(X, params, tx.init(params), key))
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Recipe)])
def test_every_field_changes_the_program_or_the_state(name):
    assert name in FLIPS, f"Recipe.{name} has no flip here: add a pair of recipes that differ in it"
    before, after = FLIPS[name]
    assert [f.name for f in dataclasses.fields(Recipe) if getattr(before, f.name) != getattr(after, f.name)] == [name]
    assert computation(before) == computation(before) != computation(after)
