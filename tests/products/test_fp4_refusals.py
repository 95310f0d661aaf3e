"""FP4 weights and recipes that do not fit say which rule was broken."""

import re
from functools import partial
from operator import matmul as at

import jax
import jax.numpy as jnp

import tcfp_jax
from pallas_kernels.operands import Fp4
from tcfp_jax import optim, recipe
from tcfp_jax.products import fp4_linear, fp4_matmul, pack_fp4
from tests.fp4_products import BOTH, IN_E4M3, RECIPES, SQUARES, N, W, X
from tests.helpers import parametrize, refused

PACKED = jax.eval_shape(pack_fp4, W)
ODD = jax.eval_shape(pack_fp4, W[:33])
TURNED = jax.eval_shape(lambda w: pack_fp4(w.T).swap(), W)
PARAMS = {"kernel": W}
INTEGERS = W.astype(jnp.int32)
COMPLEX = jnp.ones(N, jnp.complex64)


def by(call, name, **options):
    return partial(call, recipe=recipe(name, **options))


def loss(w):
    return jnp.sum(fp4_matmul(X, w))


def vjp(w):
    return jax.vjp(loss, w)


def store(name):
    return partial(optim.store, recipe=name, key=jax.random.key(0))


def read_as_floats(w):
    return tcfp_jax.dequantize({"kernel": w})


in_training = by(fp4_matmul, "nvfp4_training")
gradient_of_bytes = jax.grad(loss, allow_int=True)
gradient = tcfp_jax.grad(loss)
NO_GRADIENT = r'LoRA.*recipe\("nvfp4"\)'
AS_FLOATS = r"weight\.dequantize\(\)"
LAST_AXIS = r"the last axis of x must equal"
REFUSED = [
    (fp4_matmul, (X[..., :62], PACKED), ValueError, LAST_AXIS),
    (
        fp4_matmul,
        (X[0, :, :34], ODD),
        ValueError,
        rf"x\[3, 34\] @ w\[33, 32\]: {LAST_AXIS}",
    ),
    (by(fp4_matmul, "tensorwise"), (X, W), ValueError, r"stores weight=Single\("),
    (
        by(fp4_matmul, "bf16"),
        (X, W),
        ValueError,
        'recipe "bf16" stores weights as floats',
    ),
    (in_training, (X, W), ValueError, r"tcfp_jax.matmul\(x, w, recipe=..., key=key\)"),
    (by(pack_fp4, "nvfp4_training"), (W,), ValueError, "packs no weight"),
    (store("nvfp4_training"), (PARAMS,), ValueError, "stores nothing"),
    (store("nvfp4"), (PARAMS,), ValueError, "too coarse to be a parameter"),
    (partial(fp4_matmul, recipe=SQUARES), (X, PACKED), ValueError, 'tile="vector"'),
    (
        by(fp4_matmul, "mxfp4"),
        (X, PACKED),
        ValueError,
        r"codes with Fp4\(format='nvfp4'",
    ),
    (
        fp4_matmul,
        (X, INTEGERS),
        TypeError,
        "w has dtype int32, but only real floats are",
    ),
    (pack_fp4, (X,), ValueError, r"is not a matrix \[k, n\]"),
    (
        fp4_matmul,
        (X, TURNED),
        ValueError,
        "packed along n, but products read them along k",
    ),
    (fp4_linear, (X, W, COMPLEX), TypeError, "bias has dtype complex64"),
    (fp4_linear, (X, W, jnp.ones(3)), ValueError, r"bias has shape \[3\]"),
    (by(tcfp_jax.matmul, "tensorwise"), (X, PACKED), ValueError, "packed FP4 codes"),
    (vjp, (PACKED,), TypeError, NO_GRADIENT),
    (gradient_of_bytes, (PACKED,), TypeError, NO_GRADIENT),
    (gradient, (PACKED,), TypeError, NO_GRADIENT),
    (jax.grad(loss), (PACKED,), TypeError, "real-"),  # jax's own: bytes
    (at, (X, PACKED), TypeError, AS_FLOATS),
    (read_as_floats, (PACKED,), TypeError, f"{AS_FLOATS}.*LoRA"),
]


@parametrize("call, given, error, message", REFUSED)
def test_operands_are_refused_with_the_reason(call, given, error, message):
    with refused(message, error):
        jax.eval_shape(call, *given)


def test_recipes():
    assert recipe(BOTH, activation="bfloat16") == RECIPES["nvfp4"]
    assert recipe("nvfp4", forward="bf16") == RECIPES["nvfp4"]
    assert (IN_E4M3.forward, IN_E4M3.activation) == ("full", "float8_e4m3fn")
    assert recipe("nvfp4").mode == tcfp_jax.TCFPMode.FP4
    assert recipe("mxfp4").scaling == Fp4("mxfp4")
    made = recipe("nvfp4", tile="square", rule="four_over_six")
    assert made.scaling == Fp4("nvfp4", "square", "four_over_six")


IN_FP4 = dict(activation="float4_e2m1fn")
IN_E5M2 = dict(activation="float8_e5m2", forward="full")
FORWARD_ALONE = "in the forward product alone"


@parametrize(
    "name, overrides, words",
    [
        ("nvfp4", dict(activation="float8"), "activation='float8' is unknown"),
        ("nvfp4", dict(weight_dtype="float8_e4m3fn"), "belong together"),
        ("tensorwise", dict(weight_dtype="float4_e2m1fn"), "belong together"),
        ("tcfp12", dict(scaling=Fp4()), "belong together"),
        ("nvfp4", dict(dgrad="fast"), 'use "full"'),
        ("nvfp4", IN_E5M2, 'use activation="float8_e4m3fn"'),
        ("mxfp4", IN_FP4, FORWARD_ALONE),
        ("nvfp4", IN_FP4 | dict(wgrad="full"), FORWARD_ALONE),
        ("nvfp4", IN_FP4 | dict(forward="bf16"), FORWARD_ALONE),
        ("tcfp12", IN_FP4, FORWARD_ALONE),
        (
            "nvfp4",
            dict(dgrad="full", gradient="float8_e5m2"),
            'use gradient="float8_e4m3fn"',
        ),
        ("nvfp4", dict(block=32), "blocks of nvfp4 hold 16"),
        ("nvfp4", dict(scale="pow2"), "its scales are its own"),
        ("nvfp4", dict(rule="best"), "rule='best' is not a rule of nvfp4"),
        ("mxfp4", dict(rule="one_level"), "is not a rule of mxfp4"),
        ("tensorwise", dict(rule="amax"), "rules choose the scales of FP4 weights"),
        ("nvfp4", dict(amax="delayed"), 'use amax="fresh"'),
    ],
)
def test_contradictions_say_how_to_repair_them(name, overrides, words):
    with refused(re.escape(words)):
        recipe(name, **overrides)
