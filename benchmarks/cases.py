"""What the tuner times beside products and quantizers: what stands between two products, and the gradients of norms."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.products import draw
from pallas_kernels.dispatch import Backend
from pallas_kernels.expression import Expression
from pallas_kernels.map_quantize.api import Mapping, map_quantize
from pallas_kernels.map_quantize.reference import key as map_key
from pallas_kernels.operands import BLOCK_SIZES, Block, Row, Tensor
from pallas_kernels.quantize.api import quantize
from pallas_kernels.row_gradient import triton as row_gradient_triton
from pallas_kernels.row_gradient.api import row_gradient
from pallas_kernels.row_gradient.reference import Options as RowGradient

Named = tuple[Backend, Callable[..., Any], Any]  # backend, jitted function, config


class Case(NamedTuple):
    """One variant of an op at one shape, and the ways to run it, XLA's first.

    `agree(arguments, backend, got, expected)` says whether a result is as good as XLA's. With "donates" the second
    argument is an error, timed as a training step has it: its memory becomes the new error's.
    """

    op: str
    shape: tuple[int, ...]
    variant: str
    draw: Callable[[], tuple[Any, ...]]
    candidates: list[Named]
    agree: Callable[..., bool]
    memory: Literal["keeps", "donates"] = "keeps"


# What stands between two products -------------------------------------------------------------------------------------


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _swiglu_gradient(gradient: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
    return jax.vjp(_swiglu, gate, up)[1](gradient)


def maps() -> Iterator[Case]:
    """Activations as they are quantized, against XLA's activation with the best quantizer behind it."""
    programs: tuple[tuple[Callable[..., Any], int], ...] = ((_swiglu, 2), (_swiglu_gradient, 3), (jax.nn.gelu, 1))
    scalings = (Tensor(), Row(), *(Block(size, "vector") for size in BLOCK_SIZES[:0:-1]))
    for shape, scaling, (program, count) in itertools.product(((8192, 4096), (8192, 14336)), scalings, programs):
        yield map_case(program, count, shape, scaling)


def map_case(program: Callable[..., Any], count: int, shape: tuple[int, int], scaling: Any) -> Case:
    """One expression of `count` matrices, quantized in both orientations."""
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * count
    expression = Expression.of(jax.make_jaxpr(program)(*inputs), *shape)
    dtype = jnp.dtype(jnp.float8_e4m3fn)

    def fused(*inputs: jax.Array) -> Any:
        return map_quantize(expression, inputs, dtype, scaling, shape=shape, orientation="both", backend="triton")

    def apart(*inputs: jax.Array) -> Any:
        results = jax.tree.leaves(program(*inputs))
        return tuple(quantize(x, dtype, scaling, orientation="both") for x in results)

    candidates: list[Named] = [("xla", jax.jit(apart), None), ("triton", jax.jit(fused), None)]
    keys = jax.random.split(jax.random.key(0), count)
    arrays = lambda: tuple(jax.random.normal(key, shape).astype(jnp.bfloat16) for key in keys)
    agree = lambda arguments, backend, got, expected: nearly_same(got, expected)
    key = map_key(Mapping(dtype, scaling, "both", expression, shape))
    return Case(key.op, shape, key.variant, arrays, candidates, agree)


def nearly_same(got: Any, expected: Any) -> bool:
    """Whether nine codes of ten are equal: XLA rounds between operations where it likes, and that decides some."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all(float(jnp.mean((a.view(jnp.uint8) != b.view(jnp.uint8)) if a.ndim else a != b)) < 0.1 for a, b in pairs)


# Gradients of rows ----------------------------------------------------------------------------------------------------


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """The function of rows that stands for all: the others move the same bytes."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype) * gain


def row_gradients() -> Iterator[Case]:
    """The gradients of a norm, at the widths of models."""
    for shape in ((8192, 1024), (8192, 4096), (16384, 8192)):
        yield row_gradient_case(shape, jnp.bfloat16)


def row_gradient_case(shape: tuple[int, int], dtype: Any) -> Case:
    """XLA's gradients of an RMSNorm, with what the residual connection carries, and the kernel with its configs."""

    def arguments() -> tuple[Any, ...]:
        x, dy, carried = draw(shape, (dtype,) * 3)
        return x, (jnp.ones(shape[-1:], dtype),), (dy,), carried

    candidates: list[Named] = [("xla", jax.jit(functools.partial(row_gradient, rms_norm, backend="xla")), None)]
    for config in row_gradient_triton.candidates(shape[-1], dtype):
        call = functools.partial(row_gradient_triton.row_gradient, RowGradient(rms_norm), config=config)
        candidates.append(("triton", jax.jit(call), config))
    return Case("row_gradient", shape, jnp.dtype(dtype).name, arguments, candidates, _close)


def _close(arguments: tuple[Any, ...], backend: Backend, got: Any, expected: Any) -> bool:
    """Whether gradients differ by one rounding, and by what float32 sums miss of the largest of their row."""

    def close(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b, rounding = a.astype(jnp.float32), b.astype(jnp.float32), float(jnp.finfo(a.dtype).eps)
        largest = jnp.max(jnp.abs(b), axis=-1, keepdims=True)
        return jnp.all(jnp.abs(a - b) <= rounding * jnp.abs(b) + 2.0**-16 * largest)

    return all(bool(np.asarray(same)) for same in jax.tree.leaves(jax.tree.map(close, got, expected)))
