"""Cases of `benchmarks.tune`: ops at shapes, with the ways to run them.

The shapes are the products and quantizers of Transformer MLPs of three widths, forward
and backward, and of experts. `grid` has those of layers from small models up.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks import grouped
from benchmarks.products import (
    BF16_SUM_BOUND,
    E4M3,
    H200_SHAPES,
    MIDDLE,
    Form,
    GemmShape,
    draw,
    random_operands,
    same_bits,
    split,
)
from benchmarks.variants import BASELINE
from pallas_kernels.dispatch import BACKENDS, Backend, recording
from pallas_kernels.grouped_matmul import mosaic
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.matmul.api import SUM_BOUND, scale_rows
from pallas_kernels.operands import (
    BLOCK_SIZES,
    Accumulation,
    Block,
    MatmulOptions,
    Orientation,
    Row,
    Scaling,
    Tensor,
)
from pallas_kernels.quantize.api import quantize
from pallas_kernels.tuning import Key

HALVES: tuple[Literal[1, 2], ...] = (1, 2)
Shape = tuple[int, int]
Named = tuple[Backend, Callable[..., Any], Any]  # backend, jitted function, config


class Case(NamedTuple):
    """One variant of an op at one shape, and the ways to run it, XLA's first.

    `agree(arguments, backend, got, expected)` tells if a result is as good as XLA's.
    With "donates" the second argument is an error that is donated, as in a training
    step: its memory becomes the new error's. `check` is of the first way, if XLA is too
    slow to compare with.
    """

    key: Key
    draw: Callable[[], tuple[Any, ...]]
    candidates: list[Named]
    agree: Callable[..., bool]
    memory: Literal["keeps", "donates"] = "keeps"
    check: Callable[..., Any] | None = None


# Products
# --------------------------------------------------------------------------------------


def products() -> Iterator[Case]:
    """Yield the products of an MLP of each width: forward, dgrad, and both wgrads."""
    for mlp in H200_SHAPES:
        layers = mlp, _turned(mlp)
        gradients = [_of_wgrad(shape) for shape in layers]
        for shape, halves, accumulation in itertools.product(
            layers, HALVES[::-1], get_args(Accumulation)
        ):
            yield product_case(shape, Form(halves, accumulation))
        for shape, accumulation in itertools.product(gradients, get_args(Accumulation)):
            yield product_case(shape, Form(1, accumulation, out_dtype="float32"))
        for block in _blocks(mlp):
            for shape, halves in itertools.product(layers, HALVES):
                yield product_case(shape, Form(halves, scaling=Block(block)))
            for shape in gradients:
                yield product_case(shape, _of_vectors(block))
    for shape in (MIDDLE, _turned(MIDDLE)):
        yield product_case(shape, Form(1, scaling=Block(32, "vector")))


def _turned(mlp: GemmShape) -> GemmShape:
    return GemmShape(mlp.m, mlp.n, mlp.k)


def _of_wgrad(shape: GemmShape) -> GemmShape:
    return GemmShape(shape.k, shape.m, shape.n)


def _of_vectors(block: Any) -> Form:
    return Form(1, scaling=Block(block, "vector"), out_dtype="float32")


def _blocks(mlp: GemmShape) -> tuple[Any, ...]:
    """Return sizes of blocks.

    Those of 64 and 32 are timed at the middle shape alone: which backend wins does not
    depend on the size.
    """
    return BLOCK_SIZES[::-1] if mlp == MIDDLE else (128,)


def product_case(
    shape: GemmShape, form: Form, configs: Sequence[Any] | None = None
) -> Case:
    """Return XLA's product and the Mosaic kernel with these tile sizes.

    Without tile sizes it is the kernel with its best guesses.
    """
    if configs is None:
        configs = _guesses(shape, form)
    ways: list[tuple[Backend, Any]] = [("xla", None)]
    ways += [("mosaic", config) for config in configs]
    candidates: list[Named] = []
    for backend, config in ways:
        call = partial(form.multiply, backend=backend, config=config)
        candidates.append((backend, jax.jit(call), config))

    def drawing() -> Any:
        # A true residual: an H200 at its power limit is 11 % faster if the second half
        # is zero.
        return form.quantize(*random_operands(shape), backend="xla")

    key = form.key(shape)._replace(shape=dataclasses.astuple(shape))
    return Case(key, drawing, candidates, form.agree)


def _guesses(shape: GemmShape, form: Form) -> list[Any]:
    most = 4 if isinstance(form.scaling, Block) else 8
    guesses: list[Any] = []
    for guess in form.candidates(shape)[:most]:
        guesses += [replace(guess, inner="m"), replace(guess, inner="n")]
    return guesses


# Products of experts
# --------------------------------------------------------------------------------------

# Most used first: 16,384 tokens of the models, then the shapes of `benchmarks.grouped`.
_EXPERTS = (
    grouped.SHAPES["olmoe w13"],
    grouped.SHAPES["olmoe w2"],
    grouped.Shape(131072, 2048, 1536, 128),  # qwen3-30b w13
    grouped.Shape(131072, 768, 2048, 128),  # qwen3-30b w2
)


def of_experts() -> Iterator[Case]:
    """Yield the products of the recipes that read FP8 with one scale, then BF16's."""
    seen = set()
    shapes = dict.fromkeys((*_EXPERTS, *grouped.SHAPES.values()))
    for kind, shape in itertools.product(("tcfp12_single_both", BASELINE), shapes):
        for part in grouped.PARTS[:3]:
            case = grouped_case(part, shape, kind)
            if case.key not in seen:
                seen.add(case.key)
                yield case


def grouped_case(part: grouped.Part, shape: grouped.Shape, kind: str) -> Case:
    """Return the kernel with its rule's tile sizes and others.

    XLA multiplies densely, so float64 is the check.
    """
    is_bf16 = kind == BASELINE
    accumulation: Accumulation = "fast" if is_bf16 or part == "forward" else "full"
    options = MatmulOptions(jnp.dtype(jnp.bfloat16), accumulation)
    sizes = grouped.group_sizes(shape, "drawn")
    drawing = jax.jit(partial(_drawn_groups, part, shape, kind))
    drawn = jax.eval_shape(drawing)
    multiply: Any = (mosaic.GRADIENT if part == "wgrad" else mosaic.KERNEL).run
    problem = mosaic.Problem.of(options, drawn[0], drawn[1], shape.experts)
    ways: list[Named] = []
    for config in _grouped_configs(problem):
        call = partial(multiply, options, config=config)
        ways.append(("mosaic", jax.jit(call), config))

    def check(product: Any, made: Any) -> None:
        limit = BF16_SUM_BOUND if is_bf16 else max(SUM_BOUND.values())
        grouped.check(part, product, made[:2], sizes, limit)

    key = grouped_reference.key(options, *drawn)
    return Case(key, drawing, ways, _alike, check=check)


def _drawn_groups(
    part: grouped.Part, shape: grouped.Shape, kind: str
) -> tuple[Any, ...]:
    """Return the two operands of a part, and the sizes of its groups."""
    held = grouped.read(grouped.RECIPES[kind], *grouped.draw(shape))
    _, pair = grouped.product_of(part, held)
    return *pair, jnp.asarray(grouped.group_sizes(shape, "drawn"))


def _grouped_configs(problem: mosaic.Problem) -> list[mosaic.Config]:
    """Return the rule's config, other tiles with its steps, and other orders."""
    rule, *others = mosaic.candidates(problem)
    tried = [rule, *(other for other in others if other.tile_k == rule.tile_k)]
    tried += [replace(rule, snake=snake) for snake in (4, 16)]
    for stages in (rule.stages, rule.stages - 1):
        tried.append(replace(rule, store_buffers=4, stages=stages))
    return [config for config in tried if mosaic.misfit(config, problem) is None][:7]


@jax.jit
def _largest_difference(got: Array, expected: Array) -> Array:
    wide = expected.astype(jnp.float32)
    deviation = jnp.sqrt(jnp.mean(wide**2))
    return jnp.max(jnp.abs(got.astype(jnp.float32) - wide)) / deviation


def _alike(arguments: Any, backend: Backend, got: Any, expected: Any) -> bool:
    # of a deviation; a wrong tile gives above 1
    return float(_largest_difference(got, expected)) < 2**-4


# Quantizers
# --------------------------------------------------------------------------------------


def quantizers() -> Iterator[Case]:
    """Yield the quantizers of an MLP of each width."""
    for mlp in H200_SHAPES:
        blocks = _blocks(mlp)
        activations = (mlp.m, mlp.k), (mlp.m, mlp.n)
        for shape, orientation in itertools.product(activations, get_args(Orientation)):
            yield _in_fp8(shape, "bfloat16", Tensor(), orientation)
            yield _in_fp8(shape, "bfloat16", Row(), orientation)
            for block in blocks:
                yield _in_fp8(shape, "bfloat16", Block(block, "vector"), orientation)
        for shape in activations:
            yield _split(shape, ("bfloat16",), Tensor(), "rows")
        for shape in ((mlp.k, mlp.n), (mlp.n, mlp.k)):
            yield _in_fp8(shape, "float32", Row())
            yield from _splits(shape, Tensor())
            for block in blocks:
                yield _in_fp8(shape, "float32", Block(block))
                yield from _splits(shape, Block(block))


def _splits(shape: Shape, scaling: Scaling) -> Iterator[Case]:
    """Yield the split of a weight without an error, and with one in each dtype."""
    yield _split(shape, ("float32",), scaling)
    for dtype in ("float32", "bfloat16"):
        yield _split(shape, ("float32", dtype), scaling)


def _in_fp8(
    shape: Shape, dtype: str, scaling: Scaling, orientation: Orientation = "both"
) -> Case:
    call = partial(quantize, dtype=E4M3, scaling=scaling, orientation=orientation)
    return _quantizer(shape, (dtype,), call)


def _split(
    shape: Shape,
    dtypes: tuple[str, ...],
    scaling: Scaling,
    orientation: Orientation = "both",
) -> Case:
    """Return the split of a weight; a second dtype is that of its error."""
    call = partial(split, scaling=scaling, orientation=orientation)
    return _quantizer(shape, dtypes, call)


def _quantizer(shape: Shape, dtypes: tuple[str, ...], call: Callable[..., Any]) -> Case:
    """Return a quantizer by every backend that runs it."""
    drawing = partial(draw, shape, tuple(map(jnp.dtype, dtypes)))
    drawn = jax.eval_shape(drawing)
    with recording() as calls:
        jax.eval_shape(partial(call, backend="xla"), *drawn)
    (key,) = (one.key for one in calls if one.key is not None)
    candidates: list[Named] = []
    for backend in BACKENDS[::-1]:
        by_backend = partial(call, backend=backend)
        if backend == "xla" or _runs(by_backend, drawn):
            candidates.append((backend, jax.jit(by_backend), None))
    memory: Any = "keeps" if len(dtypes) == 1 else "donates"
    return Case(key, drawing, candidates, _same, memory)


def _same(arguments: Any, backend: Backend, got: Any, expected: Any) -> bool:
    return same_bits(got, expected)


def _runs(call: Callable[..., Any], drawn: tuple[Any, ...]) -> bool:
    try:
        jax.eval_shape(call, *drawn)
    except NotImplementedError:
        return False
    return True


# The grid of layers
# --------------------------------------------------------------------------------------

# x[m, k] @ w[k, n] with the tokens of a small and of a large step.
GRID = (
    GemmShape(16384, 768, 768),
    GemmShape(16384, 768, 3072),
    GemmShape(16384, 3072, 768),
    GemmShape(16384, 2048, 2048),
    GemmShape(16384, 2048, 8192),
    GemmShape(16384, 8192, 2048),
    GemmShape(16384, 4096, 4096),
    GemmShape(2048, 768, 768),
    GemmShape(2048, 2048, 2048),
    GemmShape(2048, 4096, 4096),
    GemmShape(2048, 4096, 14336),
    GemmShape(2048, 14336, 4096),
)
_ACTIVATIONS = ((16384, 768), (2048, 768), (16384, 3072), (2048, 4096))
_WEIGHTS = ((768, 768), (768, 3072), (2048, 2048), (2048, 8192))
# Shapes of ops without a case at the widths of MLPs.
_LARGE_ACTIVATIONS = ((8192, 4096), (8192, 16384))
_LARGE_WEIGHT = (4096, 16384)


def grid() -> Iterator[Case]:
    """Yield the parts of layers of the named recipes, and BF16's products."""
    for shape in (*GRID, *H200_SHAPES, *map(_turned, H200_SHAPES)):
        yield _bf16("bfloat16", shape, (shape.m, shape.k), jnp.matmul)
        gradient = _of_wgrad(shape)  # x.T @ g in float32
        x = gradient.k, gradient.m
        yield _bf16("float32", gradient, x, _transposed_product)
    for shape in GRID:
        gradient = _of_wgrad(shape)
        yield product_case(shape, Form(1, "fast"), ())
        yield product_case(gradient, Form(1, "fast", out_dtype="float32"), ())
        yield _as_chosen(shape, Form(1, "full"))
        yield _as_chosen(gradient, Form(1, "full", out_dtype="float32"))
        for accumulation in get_args(Accumulation):
            yield _as_chosen(shape, Form(2, accumulation))
        if min(shape.k, shape.n) >= 2048:
            yield _as_chosen(shape, Form(1, scaling=Block(128)))
            yield _as_chosen(gradient, _of_vectors(128))
    yield from _grid_of_quantizers()


def _as_chosen(shape: GemmShape, form: Form) -> Case:
    """Return a product with the tile sizes that it runs with."""
    return product_case(shape, form, form.chosen(shape))


def _bf16(
    variant: str, shape: GemmShape, x: Shape, function: Callable[..., Any]
) -> Case:
    """Return the product of JAX of x and `[k, n]`, both BF16."""
    key = Key("dot_general", variant, dataclasses.astuple(shape))
    sides = x, (shape.k, shape.n)
    return _by_xla(key, function, *((side, "bfloat16") for side in sides))


def _transposed_product(x: Array, g: Array) -> Array:
    over_rows = (((0,), (0,)), ((), ()))
    return lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)


def _grid_of_quantizers() -> Iterator[Case]:
    for shape in _ACTIVATIONS:
        for orientation in get_args(Orientation):
            yield _in_fp8(shape, "bfloat16", Tensor(), orientation)
        yield _in_fp8(shape, "bfloat16", Block(128, "vector"))
    for shape in (*_ACTIVATIONS, *_LARGE_ACTIVATIONS):
        yield _in_fp8(shape, "bfloat16", Row())
        for dtype in ("bfloat16", "float32"):
            yield _scaling_case(shape, dtype)
    for shape in (*_WEIGHTS, _LARGE_WEIGHT):
        yield _in_fp8(shape, "float32", Tensor())
        yield _in_fp8(shape, "float32", Row())
        yield _split(shape, ("float32",), Tensor(), "rows")
    for shape in _WEIGHTS:
        yield _split(shape, ("float32", "float32"), Tensor())
        yield _in_fp8(shape, "float32", Block(128))


def _scaling_case(shape: Shape, dtype: str) -> Case:
    """Return the scaling after a product with a scale per row."""
    key = Key("row_scale", f"{dtype} {dtype}", shape)
    scale = partial(scale_rows, out_dtype=jnp.dtype(dtype))
    scales = [((size,), "float32") for size in shape]
    return _by_xla(key, scale, (shape, dtype), *scales)


def _by_xla(
    key: Key, function: Callable[..., Any], *drawn: tuple[tuple[int, ...], str]
) -> Case:
    """Return an op of arrays of these shapes and dtypes that XLA alone computes."""

    def operands() -> tuple[Array, ...]:
        return tuple(draw(shape, (jnp.dtype(dtype),))[0] for shape, dtype in drawn)

    return Case(key, operands, [("xla", jax.jit(function), None)], _same)
