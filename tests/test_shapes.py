"""Arguments and results have the shapes that annotations state."""

import inspect
import typing

import jax
import jax.numpy as jnp
import jaxtyping

import tcfp_jax
from pallas_kernels.adamw.api import adamw
from pallas_kernels.matmul.api import matmul
from pallas_kernels.quantize.api import dual_quantize, quantize
from tcfp_jax.linen import TCFPDense
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import parametrize

NAMES = {"Float": jaxtyping.Float, "UInt32": jaxtyping.UInt32}
X = jnp.ones((2, 3, 16))
W = jnp.ones((16, 32))
FP8 = jnp.float8_e4m3fn


def shapes_of(function):
    """Return annotations with a shape by name; places of a tuple have a number."""
    found = {}
    for name, kind in typing.get_type_hints(function, localns=NAMES).items():
        parts = typing.get_args(kind) if typing.get_origin(kind) is tuple else (kind,)
        for place, part in enumerate(parts):
            arrays = [
                one for one in (part, *typing.get_args(part)) if hasattr(one, "dim_str")
            ]
            if arrays:
                found[name if part is kind else f"{name} {place}"] = arrays[0]
    return found


def disagreeing(function, *args, **kwargs):
    """Return the names of arrays whose shapes contradict the annotations."""
    result = function(*args, **kwargs)
    values = dict(inspect.signature(function).bind(*args, **kwargs).arguments) | {
        "return": result
    }
    if isinstance(result, tuple):
        values |= {f"return {place}": value for place, value in enumerate(result)}
    with jaxtyping.jaxtyped("context"):
        return [
            name
            for name, kind in shapes_of(function).items()
            if isinstance(values.get(name), jax.Array)
            and not isinstance(values[name], kind)
        ]


def operands():
    return quantize(X, FP8).rows, quantize(W.T, FP8).rows


CALLS = {
    "tcfp_jax.matmul": lambda: disagreeing(tcfp_jax.matmul, X, W, recipe="tensorwise"),
    "quantize_weight": lambda: disagreeing(
        quantize_weight,
        W,
        tcfp_jax.recipe("tcfp12"),
        error=jnp.zeros_like(W),
        key=jax.random.key(0),
    ),
    "quantize": lambda: disagreeing(quantize, X, FP8, amax=jnp.float32(1)),
    "dual_quantize": lambda: disagreeing(
        dual_quantize, W, error=W, bits=W.astype(jnp.uint32), amax=jnp.float32(2)
    ),
    "matmul": lambda: disagreeing(matmul, *operands(), bias=jnp.ones(32)),
    "TCFPDense": lambda: disagreeing(
        TCFPDense.__call__,
        TCFPDense(32).bind({"params": {"kernel": W, "bias": W[0]}}),
        X,
    ),
}


@parametrize("name", CALLS)
def test_shapes_are_those_of_the_signature(name):
    assert CALLS[name]() == []


def test_a_wrong_shape_is_seen():
    def wrong(
        x: "Float[jax.Array, '*rows k']",  # noqa: F821
        w: "Float[jax.Array, 'k n']",  # noqa: F821
    ) -> "Float[jax.Array, '*rows n']":  # noqa: F821
        return x

    assert disagreeing(wrong, X, W) == ["return"]


def test_every_stated_shape_is_one():
    """Annotations are strings, so that jaxtyping is no dependency; each must parse."""
    for function in (
        tcfp_jax.matmul,
        quantize_weight,
        quantize,
        dual_quantize,
        matmul,
        adamw,
        TCFPDense.__call__,
    ):
        assert shapes_of(function), function
