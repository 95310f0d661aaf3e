"""Time backends and tile sizes on this device, and write the winners to
`pallas_kernels/tuned.json`.

    python -m benchmarks.tune
    python -m benchmarks.tune --only quantize --budget-seconds 500

The shapes are the products and quantizers of Transformer MLPs of three widths, forward
and backward. Each candidate is compared with XLA's result before it is timed. The file
is written after every entry, and entries of other devices stay.

`--cases grid` times the table that `convert_to_tcfp(include="measured")` interpolates:
products and quantizers of layers from small models up, BF16's products, and kernels
with the tile sizes that they run with now.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import grouped
from benchmarks.products import BF16_SUM_BOUND, Form, donating, draw, same_bits
from benchmarks.shapes import H200_SHAPES, MIDDLE, GemmShape, random_operands
from benchmarks.timing import take_memory_as_needed, time_interleaved
from pallas_kernels import tuning
from pallas_kernels.dispatch import BACKENDS, Backend, device_kind
from pallas_kernels.grouped_matmul import mosaic
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.matmul.api import SUM_BOUND, scale_rows
from pallas_kernels.operands import (
    BLOCK_SIZES,
    Accumulation,
    Block,
    Operand,
    Orientation,
    Product,
    Row,
)
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.tuning import Entry

ROUNDS, CALLS = 3, 4
HALVES: tuple[Literal[1, 2], ...] = (1, 2)
INNER: tuple[Literal["m", "n"], ...] = ("m", "n")
Cases = Literal["all", "missing", "grid"]
CASES = (
    "those not yet timed; those that include='measured' interpolates between, small"
    " models' among them"
)
TOGETHER = 16  # cases that are compiled at once
Named = tuple[Backend, Callable[..., Any], Any]  # backend, jitted function, config


class Case(NamedTuple):
    """One variant of an op at one shape, and the ways to run it, XLA's first.

    `agree(arguments, backend, got, expected)` tells if a result is as good as XLA's.
    With "donates" the second argument is an error that is donated, as in a training
    step: its memory becomes the new error's.
    """

    op: str
    shape: tuple[int, ...]
    variant: str
    draw: Callable[[], tuple[Any, ...]]
    candidates: list[Named]
    agree: Callable[..., bool]
    memory: Literal["keeps", "donates"] = "keeps"
    # Of the first way, where XLA is too slow to compare with
    check: Callable[..., Any] | None = None


def run(
    budget_seconds: float = math.inf, only: str = "", cases: Cases = "all"
) -> list[Entry]:
    """Time every case whose "op variant" contains `only`, of all widths or of the grid
    of layers.

    "missing" cases are those of all widths that `tuned.json` lacks. Each entry is
    written as soon as it is measured.
    """
    started, entries = time.perf_counter(), []
    experts = only.startswith("grouped")  # other cases take seconds to list
    rest = () if experts else (_quantizers(), _products())
    every = grid() if cases == "grid" else itertools.chain(_grouped(), *rest)
    wanted = (case for case in every if only in f"{case.op} {case.variant}")
    wanted = (case for case in wanted if cases != "missing" or not _is_timed(case))
    at_once = TOGETHER if cases == "grid" else 4 if experts else 1
    while together := list(itertools.islice(wanted, at_once)):
        spent, case = time.perf_counter() - started, together[0]
        if spent > budget_seconds:
            print(
                f"budget of {budget_seconds:g} s: stopped before {case.op}"
                f" {case.variant} at {case.shape}"
            )
            break
        for case in _compiled(together):
            entry = time_case(case)
            print(
                f"{case.op} {case.variant} {case.shape}: {entry.backend},"
                f" {dict(entry.milliseconds)}",
                flush=True,
            )
            write(case.op, entry)
            entries.append(entry)
    return entries


def _compiled(cases: list[Case]) -> list[Case]:
    """Return the cases; several are compiled at once, and JAX keeps their programs."""
    if len(cases) > 1:
        shapes = [jax.eval_shape(case.draw) for case in cases]
        programs = [
            (named[1], of)
            for case, of in zip(cases, shapes, strict=True)
            for named in case.candidates
        ]
        with ThreadPoolExecutor() as pool:
            list(
                pool.map(
                    lambda program: program[0].lower(*program[1]).compile(), programs
                )
            )
    return cases


def _is_timed(case: Case) -> bool:
    entries = tuning.load().get(device_kind(), {}).get(case.op, ())
    return any(
        (entry.shape, entry.variant) == (case.shape, case.variant) for entry in entries
    )


def time_case(case: Case) -> Entry:
    """Return the entry of a case: compile every candidate, compare it with XLA, and
    time all in turn.
    """
    arguments, candidates, at = (
        case.draw(),
        case.candidates,
        f"{case.shape} ({case.variant})",
    )
    # Most of a kernel's compilation is ptxas, a process of its own
    with ThreadPoolExecutor() as pool:
        compiled = list(
            pool.map(lambda named: named[1].lower(*arguments).compile(), candidates)
        )
    expected = compiled[0](*arguments)
    if case.check is not None:
        case.check(compiled[0], arguments)
    for (backend, _, config), function in list(zip(candidates, compiled, strict=True))[
        1:
    ]:
        if not case.agree(arguments, backend, function(*arguments), expected):
            raise ArithmeticError(
                f"{backend} {config} at {at} differs from {candidates[0][0]}; it is not"
                " timed"
            )
    donates = case.memory == "donates"
    named = {
        str(i): donating(f, *arguments) if donates else (f, arguments)
        for i, (_, f, _) in enumerate(candidates)
    }
    times = time_interleaved(named, rounds=ROUNDS, calls=CALLS)
    milliseconds: dict[str, float] = {}
    configs: dict[str, dict[str, Any]] = {}
    for i, (backend, _, config) in enumerate(candidates):
        taken = times[str(i)].median_ms
        if taken < milliseconds.get(backend, math.inf):
            milliseconds[backend] = round(taken, 5)
            if config is not None:
                configs[backend] = dataclasses.asdict(config)
    if candidates[0][0] != "xla":
        rule, best = times["0"].median_ms, min(milliseconds.values())
        print(
            f"the rule takes {rule:.4f} ms, {best:.4f} is {rule / best - 1:.1%} faster:"
            f" {configs}",
            flush=True,
        )
    winner: Any = min(milliseconds, key=lambda backend: milliseconds[backend])
    return Entry(case.shape, case.variant, winner, milliseconds, configs)


def write(op: str, entry: Entry) -> None:
    """Write one entry into `tuned.json`, instead of an older one of its shape and
    variant.
    """
    content = json.loads(tuning.PATH.read_text(encoding="utf-8"))
    entries = content.setdefault(device_kind(), {}).setdefault(op, [])
    entries[:] = [
        e
        for e in entries
        if (tuple(e["shape"]), e["variant"]) != (entry.shape, entry.variant)
    ]
    entries.append(dataclasses.asdict(entry))
    tuning.PATH.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tuning.load.cache_clear()


# Products
# --------------------------------------------------------------------------------------


def _products() -> Iterator[Case]:
    for shape, form in _forms():
        yield product_case(shape, form)


def _forms() -> Iterator[tuple[GemmShape, Form]]:
    """Yield the products of an MLP of each width: forward, dgrad of the other layer,
    and both wgrads.
    """
    for mlp in H200_SHAPES:
        m, d, d_ff = mlp.m, mlp.k, mlp.n
        layers = (GemmShape(m, d, d_ff), GemmShape(m, d_ff, d))
        gradients = (GemmShape(d, m, d_ff), GemmShape(d_ff, m, d))
        for shape, halves, accumulation in itertools.product(
            layers, HALVES[::-1], get_args(Accumulation)
        ):
            yield shape, Form(halves, accumulation)
        for shape, accumulation in itertools.product(gradients, get_args(Accumulation)):
            yield shape, Form(1, accumulation, out_dtype="float32")
        # Blocks of 64 and 32 are timed at the middle shape alone: which backend wins
        # does not depend on the size.
        for block in _blocks(mlp):
            for shape, halves in itertools.product(layers, HALVES):
                yield shape, Form(halves, scaling=Block(block))
            for shape in gradients:
                yield (
                    shape,
                    Form(1, scaling=Block(block, "vector"), out_dtype="float32"),
                )
    for shape in (MIDDLE, GemmShape(MIDDLE.m, MIDDLE.n, MIDDLE.k)):
        yield shape, Form(1, scaling=Block(32, "vector"))


def _blocks(mlp: GemmShape) -> tuple[Any, ...]:
    return BLOCK_SIZES[::-1] if mlp == MIDDLE else (128,)


def product_case(
    shape: GemmShape,
    form: Form,
    configs: Literal["guessed", "chosen", "none"] = "guessed",
) -> Case:
    """Return XLA's product and the Mosaic kernel, with its best guesses or with the
    tile sizes that it runs with.
    """
    # A true residual: an H200 at its power limit is 11 % faster if the second half is
    # zero.
    pair = lambda: form.quantize(*random_operands(shape), backend="xla")
    candidates: list[Named] = [
        ("xla", jax.jit(functools.partial(form.multiply, backend="xla")), None)
    ]
    for config in (
        _configs(shape, form)
        if configs == "guessed"
        else form.chosen(shape)
        if configs == "chosen"
        else []
    ):
        run = jax.jit(functools.partial(form.multiply, backend="mosaic", config=config))
        candidates.append(("mosaic", run, config))
    return Case(
        form.op, (shape.m, shape.k, shape.n), form.variant, pair, candidates, form.agree
    )


def _configs(shape: GemmShape, form: Form) -> list[Any]:
    guesses = form.candidates(shape)[: 4 if isinstance(form.scaling, Block) else 8]
    return [
        dataclasses.replace(guess, inner=inner) for guess in guesses for inner in INNER
    ]


# Grouped products, most used first: 16,384 tokens of the models, then the shapes of
# `benchmarks.grouped`.
_MODELS = {
    "olmoe w13": grouped.SHAPES["olmoe w13"],
    "olmoe w2": grouped.SHAPES["olmoe w2"],
    "qwen3-30b w13": grouped.Shape(131072, 2048, 1536, 128),
    "qwen3-30b w2": grouped.Shape(131072, 768, 2048, 128),
}


def _grouped() -> Iterator[Case]:
    """Yield the products of experts of the recipes that read FP8 with one scale, then
    those of BF16.
    """
    seen, fp8, bf16 = set(), jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16)
    for dtype, shape in itertools.product(
        (fp8, bf16), dict.fromkeys((*_MODELS.values(), *grouped.SHAPES.values()))
    ):
        for part in grouped.PARTS[:3]:
            options = Product(
                bf16, "full" if dtype == fp8 and part != "forward" else "fast"
            )
            case = _grouped_case(part, shape, dtype, options)
            if (key := (case.op, case.shape, case.variant)) not in seen:
                seen.add(key)
                yield case


def _grouped_case(
    part: Any, shape: grouped.Shape, dtype: Any, options: Product
) -> Case:
    """Return the kernel with its rule's tile sizes and others. XLA multiplies densely,
    so float64 is the check.
    """
    m, k, n, e = dataclasses.astuple(shape)
    sides = {
        "forward": ((m, k), (e, n, k)),
        "dgrad": ((m, n), (e, k, n)),
        "wgrad": ((k, m), (n, m)),
    }[part]
    sizes = grouped.group_sizes(shape, "drawn")

    def operand(seed: int, side: tuple[int, ...]) -> Any:
        values = (8 * jax.random.normal(jax.random.key(seed), side)).astype(dtype)
        return (
            values
            if dtype == jnp.bfloat16
            else Operand(values, jnp.full(side[:-2], 0.125, jnp.float32))
        )

    @jax.jit
    def operands() -> tuple[Any, ...]:
        return operand(0, sides[0]), operand(1, sides[1]), jnp.asarray(sizes)

    drawn = jax.eval_shape(operands)
    multiply: Any = (mosaic.GRADIENT if part == "wgrad" else mosaic.KERNEL).run
    ways: list[Named] = [
        ("mosaic", jax.jit(functools.partial(multiply, options, config=config)), config)
        for config in _grouped_configs(
            mosaic.Problem.of(options, drawn[0], drawn[1], e)
        )
    ]
    key = grouped_reference.key(options, *drawn)
    limit = BF16_SUM_BOUND if dtype == jnp.bfloat16 else max(SUM_BOUND.values())
    check = lambda product, made: grouped.check(part, product, made[:2], sizes, limit)
    return Case(key.op, key.shape, key.variant, operands, ways, _alike, check=check)


def _grouped_configs(problem: mosaic.Problem) -> list[mosaic.Config]:
    """Return the rule's config, the other tiles with the same steps, and the rule's
    tiles in other orders.
    """
    rule, *others = mosaic.candidates(problem)
    tried = [rule, *(other for other in others if other.tile_k == rule.tile_k)]
    tried += [dataclasses.replace(rule, snake=snake) for snake in (4, 16)]
    tried += [
        dataclasses.replace(rule, store_buffers=4, stages=stages)
        for stages in (rule.stages, rule.stages - 1)
    ]
    return [config for config in tried if mosaic.misfit(config, problem) is None][:7]


@jax.jit
def _largest_difference(got: jax.Array, expected: jax.Array) -> jax.Array:
    wide = expected.astype(jnp.float32)
    return jnp.max(jnp.abs(got.astype(jnp.float32) - wide)) / jnp.sqrt(
        jnp.mean(wide**2)
    )


def _alike(arguments: Any, backend: Backend, got: Any, expected: Any) -> bool:
    # of a deviation; a wrong tile gives above 1
    return float(_largest_difference(got, expected)) < 2**-4


# Quantizers
# --------------------------------------------------------------------------------------


def _quantizers() -> Iterator[Case]:
    one: Callable[..., Any] = functools.partial(quantize, dtype=jnp.float8_e4m3fn)
    for mlp in H200_SHAPES:
        for shape, orientation in itertools.product(
            ((mlp.m, mlp.k), (mlp.m, mlp.n)), get_args(Orientation)
        ):
            call = functools.partial(one, orientation=orientation)
            yield _case(
                "quantize", shape, f"{orientation} bfloat16", call, jnp.bfloat16
            )
            call = functools.partial(one, scaling=Row(), orientation=orientation)
            yield _case(
                "row_quantize", shape, f"{orientation} bfloat16", call, jnp.bfloat16
            )
            for block in _blocks(mlp):
                call = functools.partial(
                    one, scaling=Block(block, "vector"), orientation=orientation
                )
                yield _case(
                    "block_quantize",
                    shape,
                    f"{orientation} vector {block} bfloat16",
                    call,
                    jnp.bfloat16,
                )
        for shape in ((mlp.m, mlp.k), (mlp.m, mlp.n)):
            yield _case(
                "dual_quantize",
                shape,
                "rows nearest no error",
                dual_quantize,
                jnp.bfloat16,
            )
        for shape in ((mlp.k, mlp.n), (mlp.n, mlp.k)):
            call = functools.partial(one, scaling=Row(), orientation="both")
            yield _case("row_quantize", shape, "both float32", call, jnp.float32)
            yield from _splits(
                "dual_quantize",
                shape,
                "both",
                functools.partial(dual_quantize, orientation="both"),
            )
            for block in _blocks(mlp):
                squares: Any = dict(scaling=Block(block), orientation="both")
                call = functools.partial(one, **squares)
                yield _case(
                    "block_quantize",
                    shape,
                    f"both square {block} float32",
                    call,
                    jnp.float32,
                )
                split = functools.partial(dual_quantize, **squares)
                yield from _splits("block_dual_quantize", shape, f"both {block}", split)


def _splits(
    op: str, shape: tuple[int, int], form: str, split: Callable[..., Any]
) -> Iterator[Case]:
    yield _case(op, shape, f"{form} nearest no error", split, jnp.float32)
    with_error = lambda w, error, *, backend: split(w, error=error, backend=backend)
    for dtype in (jnp.float32, jnp.bfloat16):
        yield _case(
            op,
            shape,
            f"{form} nearest error {jnp.dtype(dtype)}",
            with_error,
            jnp.float32,
            dtype,
        )


def _case(
    op: str,
    shape: tuple[int, int],
    variant: str,
    call: Callable[..., Any],
    *dtypes: Any,
) -> Case:
    drawn = jax.eval_shape(lambda: draw(shape, dtypes))
    backends = [
        backend
        for backend in BACKENDS[::-1]
        if backend == "xla" or _runs(call, drawn, backend)
    ]
    candidates: list[Named] = [
        (b, jax.jit(functools.partial(call, backend=b)), None) for b in backends
    ]
    agree = lambda arguments, backend, got, expected: same_bits(got, expected)
    memory: Any = "keeps" if len(dtypes) == 1 else "donates"
    return Case(
        op,
        shape,
        variant,
        functools.partial(draw, shape, dtypes),
        candidates,
        agree,
        memory,
    )


def _runs(call: Callable[..., Any], drawn: tuple[Any, ...], backend: Backend) -> bool:
    try:
        jax.eval_shape(functools.partial(call, backend=backend), *drawn)
    except NotImplementedError:
        return False
    return True


# The grid of layers
# --------------------------------------------------------------------------------------

# x[m, k] @ w[k, n] with the tokens of a small and of a large step.
GRID = tuple(
    GemmShape(m, k, n)
    for m, sides in {
        16384: (
            (768, 768),
            (768, 3072),
            (3072, 768),
            (2048, 2048),
            (2048, 8192),
            (8192, 2048),
            (4096, 4096),
        ),
        2048: ((768, 768), (2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096)),
    }.items()
    for k, n in sides
)
_ACTIVATIONS = ((16384, 768), (2048, 768), (16384, 3072), (2048, 4096))
_WEIGHTS = ((768, 768), (768, 3072), (2048, 2048), (2048, 8192))
# Shapes of ops without a case at the widths of MLPs.
_LARGE_ACTIVATIONS, _LARGE_WEIGHT = ((8192, 4096), (8192, 16384)), (4096, 16384)


def grid() -> Iterator[Case]:
    """Yield the parts of layers of the named recipes, and BF16's products, by the
    shapes of `GRID`.
    """
    wide = [
        GemmShape(s.m, *sides)
        for s in H200_SHAPES
        for sides in ((s.k, s.n), (s.n, s.k))
    ]
    for shape in (*GRID, *wide):
        yield _bf16_case(shape, "bfloat16")
        yield _bf16_case(_of_wgrad(shape), "float32")
    for shape in GRID:
        yield product_case(shape, Form(1, "fast"), configs="none")
        yield product_case(
            _of_wgrad(shape), Form(1, "fast", out_dtype="float32"), configs="none"
        )
        yield product_case(shape, Form(1, "full"), configs="chosen")
        yield product_case(
            _of_wgrad(shape), Form(1, "full", out_dtype="float32"), configs="chosen"
        )
        for accumulation in get_args(Accumulation):
            yield product_case(shape, Form(2, accumulation), configs="chosen")
        if min(shape.k, shape.n) >= 2048:
            yield product_case(shape, Form(1, scaling=Block(128)), configs="chosen")
            vectors = Form(1, scaling=Block(128, "vector"), out_dtype="float32")
            yield product_case(_of_wgrad(shape), vectors, configs="chosen")
    yield from _grid_of_quantizers()


def _of_wgrad(shape: GemmShape) -> GemmShape:
    return GemmShape(shape.k, shape.m, shape.n)


def _bf16_case(shape: GemmShape, out_dtype: str) -> Case:
    """Return the product of a layer in JAX: forward `x @ w`, or the weight gradient
    `x.T @ g` in float32.
    """
    axis = 0 if out_dtype == "float32" else 1
    sides = (
        ((shape.k, shape.m) if axis == 0 else (shape.m, shape.k)),
        (shape.k, shape.n),
    )

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(
            a,
            b,
            (((axis,), (0,)), ((), ())),
            preferred_element_type=jnp.dtype(out_dtype),
        )

    operands = lambda: tuple(draw(side, (jnp.bfloat16,))[0] for side in sides)
    return Case(
        "dot_general",
        (shape.m, shape.k, shape.n),
        out_dtype,
        operands,
        _by_xla(multiply),
        _alone,
    )


def _grid_of_quantizers() -> Iterator[Case]:
    one: Callable[..., Any] = functools.partial(quantize, dtype=jnp.float8_e4m3fn)
    rows = functools.partial(one, scaling=Row())
    both: Any = dict(orientation="both")
    for shape in _ACTIVATIONS:
        for orientation in get_args(Orientation):
            call = functools.partial(one, orientation=orientation)
            yield _case(
                "quantize", shape, f"{orientation} bfloat16", call, jnp.bfloat16
            )
        vectors = functools.partial(one, scaling=Block(128, "vector"), **both)
        yield _case(
            "block_quantize", shape, "both vector 128 bfloat16", vectors, jnp.bfloat16
        )
    for shape in (*_ACTIVATIONS, *_LARGE_ACTIVATIONS):
        yield _case(
            "row_quantize",
            shape,
            "both bfloat16",
            functools.partial(rows, **both),
            jnp.bfloat16,
        )
        for dtype in ("bfloat16", "float32"):
            yield _scaling_case(shape, dtype)
    for shape in (*_WEIGHTS, _LARGE_WEIGHT):
        yield _case(
            "quantize",
            shape,
            "both float32",
            functools.partial(one, **both),
            jnp.float32,
        )
        yield _case(
            "row_quantize",
            shape,
            "both float32",
            functools.partial(rows, **both),
            jnp.float32,
        )
        yield _case(
            "dual_quantize", shape, "rows nearest no error", dual_quantize, jnp.float32
        )
    for shape in _WEIGHTS:
        split = functools.partial(dual_quantize, **both)
        with_error = lambda w, error, *, backend, split=split: split(
            w, error=error, backend=backend
        )
        yield _case(
            "dual_quantize",
            shape,
            "both nearest error float32",
            with_error,
            jnp.float32,
            jnp.float32,
        )
        squares = functools.partial(one, scaling=Block(128), **both)
        yield _case(
            "block_quantize", shape, "both square 128 float32", squares, jnp.float32
        )


def _scaling_case(shape: tuple[int, int], dtype: str) -> Case:
    """Return the scaling after a product with a scale per row."""
    scale = functools.partial(scale_rows, out_dtype=jnp.dtype(dtype))
    m, n = shape
    operands = lambda: (
        draw(shape, (jnp.dtype(dtype),))[0],
        *(draw((side,), (jnp.float32,))[0] for side in (m, n)),
    )
    return Case(
        "row_scale", shape, f"{dtype} {dtype}", operands, _by_xla(scale), _alone
    )


def _by_xla(function: Callable[..., Any]) -> list[Named]:
    return [("xla", jax.jit(function), None)]


def _alone(arguments: Any, backend: Backend, got: Any, expected: Any) -> bool:
    raise AssertionError(f"{backend} is compared with XLA, which alone does this")


def main(arguments: list[str] | None = None) -> list[Entry]:
    """Run the command, and return what was timed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--only", default="", help="cases whose op and variant contain this text"
    )
    parser.add_argument(
        "--cases", choices=list(get_args(Cases)), default="all", help=CASES
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=math.inf,
        help="start nothing after this",
    )
    options = parser.parse_args(arguments)
    return run(options.budget_seconds, options.only, options.cases)


if __name__ == "__main__":
    take_memory_as_needed()
    main()
