"""Time of the fused AdamW step on hi + lo with 8-bit moments, next to optax on float32.

    python -m benchmarks.adamw --json

It is one pass over memory. Also timed: the same arithmetic by XLA, optax with clipping
by the global norm, and a copy of 12 bytes per weight. The step includes the scalars
that it needs and the amax that it returns. "after a look for NaN" reads the gradient
once before and keeps the old state if it finds one. "clipped" sums the gradient's
squares in that pass. States are donated. Before the timing, the kernel's bits are
compared with the definition on the CPU.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks import products, timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result, markdown_table, shown, times
from pallas_kernels import counter, moments, numerics
from pallas_kernels.adamw.api import Moments, Rates, Step, adamw
from pallas_kernels.dispatch import Backend
from pallas_kernels.quantize.api import dual_quantize
from tcfp_jax.weights.stored import bytes_of

LEARNING_RATE, B1, B2, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.9, 0.95, 0.1, 1.0
BASELINE = "optax.adamw, float32"
COPY = "copy of 12 bytes a weight"
State = tuple[Array, Array, Moments]


@dataclass(frozen=True)
class Config(timing.Repetitions):
    """Shapes of the weights that are timed and compared, and gradients' dtypes."""

    shape: tuple[int, int] = (4096, 16384)
    checked: tuple[int, int] = (256, 1024)
    backend: Backend = "triton"
    gradients: tuple[str, ...] = ("float32", "bfloat16")


SMOKE = Config((32, 256), (32, 256), gradients=("bfloat16",), rounds=2, calls=1)


@dataclass(frozen=True)
class Row(timing.Timing):
    """One way of a step.

    Attributes:
      name, gradient: The way, and the dtype of its gradient.
      megabytes: Bytes that must be read and written once.
      terabytes_per_second: Rate of these bytes.
      over_copy: That rate divided by the copy's.
      over_optax: The time divided by that of optax's AdamW on float32.
    """

    shape: str
    name: str
    gradient: str
    megabytes: float
    terabytes_per_second: float
    over_copy: float
    over_optax: float


def configure(options: argparse.Namespace) -> Config:
    """Return the settings; a CPU interprets the kernel only in a smoke run."""
    if options.smoke:
        return SMOKE
    if jax.default_backend() == "gpu":
        return Config(rounds=4)
    return dataclasses.replace(SMOKE, shape=(512, 1024), backend="xla")


# The ways
# --------------------------------------------------------------------------------------


def make_state(shape: tuple[int, int]) -> tuple[State, Array, Array]:
    """Return (a weight and moments as after some steps, its scale, a gradient).

    None of them has zeros.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    rows = (2.0 ** -(jnp.arange(shape[0], dtype=jnp.float32) % 13))[:, None] * 1e-3
    w, g, m, v = (jax.random.normal(key, shape) for key in keys)
    weight = dual_quantize(w * 0.02, backend="xla").rows
    bits = counter.bits_of(shape, *counter.keys(0))
    of_m = moments.encode_m(m * rows, bits)
    of_v = moments.encode_v(jnp.square(v * rows), bits)
    assert weight.lo is not None
    state = weight.values, weight.lo, Moments(*of_m, *of_v)
    return state, weight.scale, g * rows


def rates(
    step: Array, scale: Array, keep: Any = True, gradient_scale: Any = 1.0
) -> Rates:
    """Return the numbers of a step."""
    t = step.astype(jnp.float32)
    b1 = jnp.float32(B1)
    b2 = jnp.float32(B2)
    return Rates(
        b1=b1,
        b2=b2,
        rate=LEARNING_RATE / (1 - b1**t) * numerics.reciprocal_pow2(scale),
        rate_g=jnp.float32(0),
        correction=1 / (1 - b2**t),
        eps=jnp.float32(1e-8),
        eps_root=jnp.float32(0),
        decay=jnp.float32(1 - LEARNING_RATE * WEIGHT_DECAY),
        gradient_scale=jnp.asarray(gradient_scale, jnp.float32),
        scale=scale,
        new_scale=scale,
        keep=jnp.asarray(keep),
    )


def fused(
    state: State,
    g: Array,
    step: Array,
    scale: Array,
    *,
    look: str,
    **options: Any,
) -> Any:
    """Run a step of this library; return (state, its other results)."""
    keep: Any = True
    by: Any = 1.0
    if look == "clipped":
        norm = jnp.sum(jnp.square(g.astype(jnp.float32)))
        keep = jnp.isfinite(norm)
        by = jnp.minimum(1.0, MAX_NORM / jnp.sqrt(norm))
    elif look == "NaN":
        keep = jnp.all(jnp.isfinite(g))
    new: Step = adamw(
        g,
        *state,
        rates(step, scale, keep, by),
        jnp.stack(counter.keys(1, step)),
        **options,
    )
    return (new.hi, new.lo, new.moments), (new.amax, new.columns)


def optimizer(clipped: bool) -> optax.GradientTransformation:
    """Return optax's AdamW."""
    tx = optax.adamw(LEARNING_RATE, B1, B2, weight_decay=WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), tx) if clipped else tx


def exact(state: Any, g: Array, step: Array, scale: Array, *, clipped: bool) -> Any:
    """Run a step of optax."""
    params, inner = state
    updates, inner = optimizer(clipped).update(g, inner, params)
    params = optax.apply_updates(params, updates)
    return (params, inner), params[0, 0]


def copy(state: Any, g: Array, step: Array, scale: Array) -> Any:
    """Move as many bytes as a step with a float32 gradient: six each way.

    One bit of each word changes.
    """
    state = state ^ jnp.uint32(1)
    return state, state[0]


# Options of each step by name; "look" is what it checks in the gradient first.
OURS: dict[str, dict[str, Any]] = {
    "fused": {"look": "nothing"},
    "fused, with the transposed copy of hi": {"look": "nothing", "orientation": "both"},
    "fused, after a look for NaN": {"look": "NaN"},
    "fused, clipped": {"look": "clipped"},
    "the same by XLA": {"look": "nothing", "backend": "xla"},
}


@dataclass(frozen=True)
class Way:
    """A step `(state, g, step, scale) -> (state, result)`.

    Attributes:
      function: The step.
      state, gradient: Its first state, and its gradient.
      nbytes: Bytes that it must move.
    """

    function: Callable[..., Any]
    state: Any
    gradient: Array
    nbytes: int


def ways(config: Config) -> tuple[dict[tuple[str, str], Way], Array]:
    """Return every way by name and gradient, and the scale of the weight."""
    state, scale, g = jax.jit(make_state, static_argnums=0)(config.shape)
    of_state = 2 * bytes_of(state)
    found: dict[tuple[str, str], Way] = {}
    for dtype in config.gradients:
        gradient = g.astype(dtype)
        for name, options in OURS.items():
            readings = 1 if options["look"] == "nothing" else 2
            transposed = g.size if "orientation" in options else 0
            nbytes = of_state + readings * gradient.nbytes + transposed
            step = partial(fused, **{"backend": config.backend, **options})
            found[name, dtype] = Way(step, state, gradient, nbytes)
    params = jax.random.normal(jax.random.key(1), config.shape) * 0.02
    for name, clipped, nbytes in (
        (BASELINE, False, 28),
        (f"{BASELINE}, clipped by the global norm", True, 32),
    ):
        start = (params, optimizer(clipped).init(params))
        step = partial(exact, clipped=clipped)
        found[name, "float32"] = Way(step, start, g, nbytes * g.size)
    words = jax.random.bits(jax.random.key(2), (6 * g.size // 4,))
    found[COPY, "float32"] = Way(copy, words, g, 2 * words.nbytes)
    return found, scale


# The run
# --------------------------------------------------------------------------------------


def measure(config: Config) -> Iterator[Row]:
    """Compare the kernel with its definition, then time every way in turn.

    Raises:
      ArithmeticError: the kernel has other bits than the definition, so nothing is
        timed.
    """
    check(config)
    found, scale = ways(config)
    compile_way = partial(_compiled, scale)
    with ThreadPoolExecutor(8) as pool:
        steps = dict(zip(found, pool.map(compile_way, found.values()), strict=True))
    candidates: Any = {key: (call, ()) for key, call in steps.items()}
    taken: Any = config.interleaved(candidates)
    baseline = taken[BASELINE, "float32"].median_ms
    copy_rate = found[COPY, "float32"].nbytes / taken[COPY, "float32"].median_ms
    for (name, gradient), way in found.items():
        milliseconds = taken[name, gradient].median_ms
        yield Row(
            **vars(taken[name, gradient]),
            shape="x".join(map(str, config.shape)),
            name=name,
            gradient=gradient,
            megabytes=way.nbytes / 1e6,
            terabytes_per_second=way.nbytes / milliseconds / 1e9,
            over_copy=way.nbytes / milliseconds / copy_rate,
            over_optax=milliseconds / baseline,
        )


def _compiled(scale: Array, way: Way) -> timing.Threaded:
    return timing.threaded(way.function, way.state, way.gradient, jnp.int32(10), scale)


def check(config: Config) -> None:
    """Compare a step with the definition on the CPU.

    Raises:
      ArithmeticError: it has other bits.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        state, scale, g = jax.jit(make_state, static_argnums=0)(config.checked)
        numbers = jax.jit(rates)(jnp.int32(10), scale)
        key = jnp.stack(counter.keys(1, 10))
    call = partial(adamw, orientation="both")
    for dtype in config.gradients:
        # On the host, from where each call takes them to its own device
        given = jax.device_get((g.astype(dtype), *state, numbers, key))
        with jax.default_device(jax.devices("cpu")[0]):
            expected = jax.jit(partial(call, backend="xla"))(*given)
        got = jax.jit(partial(call, backend=config.backend))(*given)
        if not products.same_bits(*jax.device_get((got, expected))):
            raise ArithmeticError(
                f"adamw, {dtype}: differs from the definition; it is wrong, so it is"
                " not timed"
            )


def table(result: Result) -> str:
    """Return the page's table, one line per way."""
    rows = result.by("name", "gradient")
    gradients = result.distinct("gradient")
    cell = "{median_ms:.3f} · {over_optax:.2f} · {over_copy:.0%}"
    lines = []
    for name in result.distinct("name"):
        found = [shown(rows.get((name, gradient)), cell) for gradient in gradients]
        lines.append([name, *found])
    titles = [times(result.distinct("shape")[0])]
    titles += [f"{gradient} gradient" for gradient in gradients]
    return (
        f"{markdown_table(titles, lines)}\n\nA cell holds milliseconds, that time"
        " divided by that of optax's AdamW on float32, and the rate of the bytes that"
        " must move divided by a copy's."
    )


BENCHMARK = Benchmark("adamw", __doc__, configure, measure, table)

if __name__ == "__main__":
    BENCHMARK.command()
