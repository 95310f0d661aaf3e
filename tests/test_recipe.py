"""Recipes: names, flags and rules; every choice changes a training step."""

import dataclasses
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import tcfp_jax
from pallas_kernels.operands import Block, Fp4, Row, Tensor
from tcfp_jax import Recipe, TCFPMode, recipe, recipes
from tcfp_jax.conversion import convert_to_tcfp
from tcfp_jax.nnx import TCFPLinear
from tcfp_jax.recipes import Dual, Single, definition
from tests.helpers import parametrize, refused

X = jnp.ones((4, 8))
W = jnp.ones((8, 4))


def test_names():
    modes = {
        name: recipe(name).mode
        for name in ("bf16", "tcfp12", "tcfp12_fast", "tensorwise")
    }
    assert list(modes.values()) == [
        TCFPMode.BF16,
        TCFPMode.TCFP12,
        TCFPMode.TCFP12,
        TCFPMode.FP8,
    ]
    assert recipe("tcfp12") == Recipe()
    assert recipe(Recipe(), wgrad="full").wgrad == "full"
    fast = recipe("tcfp12_fast")
    assert (fast.weight.forward, fast.weight.dgrad, fast.wgrad) == (
        "hi+lo",
        "hi",
        "fast",
    )
    single = recipe("tensorwise")
    assert (single.weight, single.activation, single.gradient) == (
        Single(),
        "float8_e4m3fn",
        "float8_e5m2",
    )
    # hashable, distinct
    assert len({recipe(name) for name in recipes.NAMES}) == len(recipes.NAMES)
    # nothing is built where nothing is overridden
    assert recipe("tcfp12") is recipe("tcfp12")


@parametrize(
    "flags, expected",
    [
        ({}, recipe("tcfp12", wgrad="full")),
        ({"use_tensor_cores": False}, recipe("bf16", storage="packed")),
        ({"delayed_scaling": True}, recipe("tcfp12", wgrad="full", amax="delayed")),
        ({"use_cuda_ext": False}, recipe("tcfp12", wgrad="full", backend="xla")),
        (
            {"use_cuda_ext": False, "use_fused_kernel": True},
            recipe("tcfp12", wgrad="full", backend="triton"),
        ),
        (
            {"error_feedback": False},
            recipe("tcfp12", wgrad="full", remainder="dropped"),
        ),
        ({"hp_grad_weight": True}, recipe("tcfp12")),
        ({"srr": True}, recipe("tcfp12", wgrad="full", remainder="stochastic")),
        (
            {"srr": True, "error_feedback": False},
            recipe("tcfp12", wgrad="full", remainder="stochastic"),
        ),
        ({"abd": True}, recipe("tcfp12", wgrad="full", dgrad_weight="hi")),
        ({"scale_block_size": 64}, recipe("tcfp12_blockwise", block=64)),
    ],
    ids=str,
)
def test_flags_of_the_original(flags, expected):
    assert Recipe.from_flags(**flags) == expected


@parametrize(
    "flags, ignored, expected",
    [
        (
            {"delayed_scaling": True, "scale_block_size": 64},
            "delayed_scaling is ignored with scale_block_size=64",
            recipe("tcfp12_blockwise", block=64),
        ),
        (
            {"delayed_scaling": True, "srr": True},
            "delayed_scaling is ignored with srr=True",
            recipe("tcfp12", wgrad="full", remainder="stochastic"),
        ),
        (
            {"use_tensor_cores": False, "abd": True},
            "abd is ignored with use_tensor_cores=False",
            recipe("bf16", storage="packed"),
        ),
    ],
    ids=str,
)
def test_flags_that_the_original_ignores_are_ignored(flags, ignored, expected):
    with pytest.warns(UserWarning, match=ignored) as warned:
        assert Recipe.from_flags(**flags) == expected
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_flags_that_contradict_raise():
    with refused("srr=True with error_feedback=True"):
        Recipe.from_flags(srr=True, error_feedback=True)
    with refused("delayed"):
        recipe("tcfp12", amax="delayed", block=64)
    for wrong in (48, 32.0, "32", True):
        with refused(f"block={wrong!r} is not supported"):
            Recipe.from_flags(scale_block_size=wrong)
    for wrong in ("false", 1, None, []):
        with refused(r"abd=.* use True or False"):
            Recipe.from_flags(abd=wrong)


@parametrize("call", [convert_to_tcfp, TCFPLinear])
def test_flags_of_a_call_belong_in_its_recipe(call):
    written = r"abd=True: .* write recipe=tcfp_jax.Recipe.from_flags\(abd=True\)"
    with refused(written, TypeError):
        call(nn.Dense(4), TCFPMode.TCFP12, abd=True)
    with refused("unexpected keyword argument 'abc'", TypeError):
        call(nn.Dense(4), TCFPMode.TCFP12, abc=True)


@parametrize(
    "name, overrides, expected",
    [
        ("tcfp12", {"block": 128}, Recipe(scaling=Block(128), forward="full")),
        (
            "tcfp12_fast",
            {"block": 32},
            recipe("tcfp12_blockwise", block=32, dgrad_weight="hi"),
        ),
        (
            "blockwise",
            {"tile": "vector"},
            recipe("blockwise", scaling=Block(128, "vector")),
        ),
        (
            "blockwise",
            {"block": None, "gradient": "float8_e5m2", "forward": "fast"},
            recipe("tensorwise"),
        ),
        ("rowwise", {"scale": "float32"}, recipe("rowwise", scaling=Row("float32"))),
        (
            "tensorwise",
            {"scale": "float32", "remainder": "feedback"},
            recipe(
                "tensorwise",
                scaling=Tensor("float32"),
                weight=Single(remainder="feedback"),
            ),
        ),
        (
            "tcfp12",
            {"weight": Dual(dgrad="hi"), "remainder": "stochastic"},
            Recipe(Dual(dgrad="hi", remainder="stochastic")),
        ),
    ],
    ids=str,
)
def test_short_overrides(name, overrides, expected):
    assert recipe(name, **overrides) == expected


# An entry for each rule, in the order in which `definition.RULES` yields; FP4's are in
# tests/products.
BROKEN = [
    (
        "nvfp4",
        {"scaling": Block(32)},
        "codes of four bits and the scales of FP4 belong together",
    ),
    ("bf16", {"amax": "delayed"}, "amax or scaling asks for it"),
    ("bf16", {"forward": "fast"}, "forward asks for it"),
    (
        "tcfp12_fast",
        {"dgrad": "bf16"},
        'use wgrad="bf16", or "fast" or "full" for all three',
    ),
    (
        "tensorwise",
        {"activation": "float8_e5m2"},
        "wgrad would multiply float8_e5m2 x float8_e5m2",
    ),
    (
        "tensorwise",
        {"weight_dtype": "float8_e5m2"},
        "dgrad would multiply float8_e5m2 x float8_e5m2",
    ),
    ("tcfp12", {"scale": "float32"}, "exact only under a power-of-two scale"),
    ("mxfp8", {"weight": Dual()}, "two quantizations of the weight"),
    ("rowwise", {"remainder": "feedback"}, "two quantizations of the weight"),
    ("rowwise", {"copies": "one"}, "two quantizations of the weight"),
    ("blockwise", {"forward": "fast"}, 'use "full" for "fast"'),
    ("blockwise", {"amax": "delayed"}, "only whole tensors carry an amax"),
    (
        "tcfp12",
        {"remainder": "stochastic", "amax": "delayed"},
        "would bias stochastic rounding",
    ),
    ("tcfp12", {"residual_blocks": "nonzero"}, "only a W_lo in blocks"),
    ("tcfp12", {"sparse_threshold": 1e-6}, "only a W_lo in blocks"),
    (
        "tcfp12_blockwise",
        {"sparse_threshold": 1e-6, "residual_blocks": "all"},
        "only products that skip blocks of zeros drop small ones",
    ),
    ("tcfp12", {"storage": "packed"}, "products round a float weight"),
]


@parametrize("name, overrides, words", BROKEN, ids=str)
def test_contradictions_raise_when_built(name, overrides, words):
    with refused(re.escape(words)):
        recipe(name, **overrides)


def test_there_are_few_rules():
    sources = [inspect.getsource(rules) for rules in definition.RULES]
    assert sum(source.count("yield (") for source in sources) <= 14


@parametrize(
    "name, overrides, words",
    [
        ("tcfp12", {"wgrad": "fp8"}, "wgrad='fp8' is unknown"),
        ("tcfp12", {"backend": "cuda"}, "backend='cuda' is unknown"),
        ("tcfp12", {"remainder": "kept"}, "remainder='kept' is unknown"),
        (
            "tensorwise",
            {"remainder": "stochastic"},
            "remainder='stochastic' is unknown",
        ),
        ("blockwise", {"block": 48}, "block=48 is not supported"),
        ("blockwise", {"tile": "row"}, "tile='row' is unknown"),
        ("tensorwise", {"tile": "vector"}, "which has no blocks"),
        ("tensorwise", {"forward_weight": "hi+lo"}, "has no such field"),
        ("bf16", {"remainder": "feedback"}, "weight=None has no such field"),
        ("blockwise", {"scale": "float32"}, "powers of two, E8M0"),
        ("tcfp12", {"weight": "dual"}, "weight='dual' is unknown"),
        ("tcfp12", {"scaling": "row"}, "scaling='row' is unknown"),
        ("fp7", {}, "recipe 'fp7' is unknown"),
        ("tcfp12", {"storage": "nf4"}, "storage='nf4' is unknown"),
        ("tcfp12_blockwise", {"sparse_threshold": -1.0}, "a magnitude of weights"),
        ("tcfp12_blockwise", {"sparse_threshold": "1e-6"}, "a magnitude of weights"),
        ("tcfp12_blockwise", {"sparse_threshold": True}, "a magnitude of weights"),
    ],
    ids=str,
)
def test_unknown_values_raise_with_the_known_ones(name, overrides, words):
    with refused(re.escape(words)):
        recipe(name, **overrides)


def test_an_override_that_no_recipe_has_raises():
    with refused("a recipe has no 'speed'", TypeError):
        recipe("tcfp12", speed="fast")


# What is flipped -> (recipe before, overrides): every choice of a recipe once.
FLIPS = {
    "weight": ("tensorwise", {"weight": Dual(remainder="dropped")}),
    "weight.dtype": ("tcfp12", {"weight_dtype": "float8_e5m2"}),
    "weight.remainder": (
        recipe("tcfp12", remainder="dropped"),
        {"remainder": "stochastic"},
    ),
    "weight.remainder of a single": ("tensorwise", {"remainder": "feedback"}),
    "weight.forward": ("tcfp12", {"forward_weight": "hi"}),
    "weight.dgrad": ("tcfp12", {"dgrad_weight": "hi"}),
    "scaling": ("rowwise", {"scaling": Tensor()}),
    "scaling.scale": ("tensorwise", {"scale": "float32"}),
    "scaling.size": ("blockwise", {"block": 32}),
    "scaling.tile": ("blockwise", {"tile": "vector"}),
    "scaling.tile of FP4": ("nvfp4", {"tile": "square"}),
    "scaling.format": ("nvfp4", {"scaling": Fp4("mxfp4")}),
    "scaling.rule": ("nvfp4", {"rule": "one_level"}),
    "activation": ("tcfp12", {"activation": "float8_e5m2"}),
    "gradient": ("tcfp12", {"gradient": "float8_e5m2"}),
    "forward": ("tcfp12", {"forward": "full"}),
    "forward of FP4": ("nvfp4", {"forward": "full"}),
    "dgrad of FP4": ("nvfp4", {"dgrad": "full"}),
    "wgrad of FP4": ("nvfp4", {"wgrad": "full"}),
    "dgrad": ("tcfp12", {"dgrad": "fast"}),
    "wgrad": ("tcfp12", {"wgrad": "full"}),
    "amax": ("tcfp12", {"amax": "delayed"}),
    "copies": ("tcfp12", {"copies": "one"}),
    # On a CPU both run in interpreters, which a program shows as the loop over tiles.
    "quantize_backend": ("tcfp12", {"quantize_backend": "triton"}),
    "backend": ("tcfp12", {"backend": "triton"}),
    "storage": ("bf16", {"storage": "packed"}),
    "weight.sparse_threshold": (
        recipe("tcfp12_blockwise", residual_blocks="nonzero"),
        {"sparse_threshold": 1e-3},
    ),
}


def computation(r):
    """Return a training step's program, state and ops as text."""
    key = jax.random.key(0) if r.stochastic else None
    tx = tcfp_jax.error_feedback(r, key=key)
    params = {"kernel": jax.ShapeDtypeStruct((128, 128), jnp.float32)}

    def step(x, params, state, key):
        stored = tcfp_jax.layer_state(state).get("kernel")
        y, vjp = jax.vjp(
            lambda x, w: tcfp_jax.matmul(x, w, recipe=r, quantized=stored),
            x,
            params["kernel"],
        )
        dx, dw = vjp(y)
        return dx, tx.update({"kernel": dw}, state, params)

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    return str(jax.make_jaxpr(step)(x, params, jax.eval_shape(tx.init, params), key))


def choices():
    """Names of all choices of a recipe: its fields, and those of what is in them."""
    nested = {"weight": Dual, "scaling": (Tensor, Block, Fp4)}
    for field in dataclasses.fields(Recipe):
        yield field.name
        for kind in (
            (nested.get(field.name, ()),)
            if field.name == "weight"
            else nested.get(field.name, ())
        ):
            yield from (
                f"{field.name}.{inner.name}" for inner in dataclasses.fields(kind)
            )


@parametrize("name", FLIPS)
def test_every_choice_changes_the_program_or_the_state(name):
    before, changes = FLIPS[name]
    assert computation(recipe(before)) != computation(recipe(before, **changes))


def test_every_choice_is_flipped():
    # Residual blocks are chosen in one place and by another op:
    # `test_skipping_is_another_op`. What travels between devices shows where there are
    # some: tests/sharding/test_wire.py. FP4 training's: tests/products.
    assert set(choices()) - {"weight.blocks", "wire"} <= set(FLIPS)
    for name, (before, changes) in FLIPS.items():
        after = recipe(before, **changes)
        before = recipe(before)
        changed = [
            f.name
            for f in dataclasses.fields(Recipe)
            if getattr(before, f.name) != getattr(after, f.name)
        ]
        assert changed == [name.split(".")[0].split(" ")[0]]


def test_skipping_is_another_op():
    ops = []
    for blocks in ("all", "nonzero"):
        explained = tcfp_jax.explain(
            (128, 128), (128, 128), recipe("tcfp12_blockwise", residual_blocks=blocks)
        )
        ops.append({call.step: call.op for call in explained.steps})
    assert ops[0]["forward"] == ops[0]["dgrad"] == ops[1]["wgrad"] == "matmul"
    assert ops[1]["forward"] == ops[1]["dgrad"] == "skip_matmul"


def test_more_than_one_random_recipe_in_fifty_is_legal():
    """Most contradictions cannot be written any more."""
    weights = [
        None,
        Single(),
        Single(remainder="feedback"),
        Dual(),
        Dual(remainder="stochastic"),
        Dual(dgrad="hi"),
    ]
    scalings = [Tensor(), Tensor("float32"), Row(), Block(128), Block(32, "vector")]
    products = ("fast", "full", "bf16")
    formats = ("float8_e4m3fn", "float8_e5m2")
    legal = total = 0
    for weight, scaling, gradient, *how, amax in itertools.product(
        weights, scalings, formats, products, products, products, ("fresh", "delayed")
    ):
        total += 1
        try:
            Recipe(weight, scaling, "float8_e4m3fn", gradient, *how, amax=amax)
            legal += 1
        except ValueError:
            continue
    assert legal / total > 0.02, legal / total


@parametrize("name", [None, 3, ["tcfp12"], {"a": 1}, "tcfp13"], ids=str)
def test_a_name_that_is_no_recipe_is_a_value_error(name):
    with refused("is unknown; use one of"):
        recipe(name)
