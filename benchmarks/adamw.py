"""Time of the fused AdamW step on hi + lo with 8-bit moments, next to optax on float32,
in one pass over memory.

    python -m benchmarks.adamw --json

Also timed: the same arithmetic by XLA, optax with clipping by the global norm, and a
copy of 12 bytes a weight. The step includes the scalars that it needs and the amax that
it returns. "after a look for NaN" reads the gradient once before and keeps the old
state if it finds one. "clipped" sums the gradient's squares in that pass. States are
donated. Before the timing, the kernel's bits are compared with the definition on the
CPU.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import products, timing
from benchmarks.harness import Benchmark
from benchmarks.records import Result
from benchmarks.tables import markdown_table, times
from pallas_kernels import counter, moments, numerics
from pallas_kernels.adamw.api import Moments, Rates, Step, adamw
from pallas_kernels.dispatch import Backend
from pallas_kernels.quantize.api import dual_quantize

NAME = "adamw"
E4M3 = moments.E4M3
LEARNING_RATE, B1, B2, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.9, 0.95, 0.1, 1.0
BASELINE, COPY = "optax.adamw, float32", "copy of 12 bytes a weight"
State = tuple[jax.Array, jax.Array, Moments]


@dataclass(frozen=True)
class Config:
    """Shape of the weight that is timed, and of the one that is compared first, and
    dtypes of its gradient.
    """

    shape: tuple[int, int] = (4096, 16384)
    checked: tuple[int, int] = (256, 1024)
    backend: Backend = "triton"
    gradients: tuple[str, ...] = ("float32", "bfloat16")
    rounds: int = 4
    calls: int = 5


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
    """Return the settings of a command line; a CPU interprets the kernel only in a
    smoke run.
    """
    if options.smoke:
        return SMOKE
    if jax.default_backend() == "gpu":
        return Config()
    return dataclasses.replace(SMOKE, shape=(512, 1024), backend="xla")


# The ways
# --------------------------------------------------------------------------------------


def make_state(
    shape: tuple[int, int], seed: int = 0
) -> tuple[State, jax.Array, jax.Array]:
    """Return (a weight and moments as after some steps, its scale, a float32 gradient),
    without zeros.
    """
    keys = jax.random.split(jax.random.key(seed), 4)
    rows = (2.0 ** -(jnp.arange(shape[0], dtype=jnp.float32) % 13))[:, None] * 1e-3
    w, g, m, v = (jax.random.normal(key, shape) for key in keys)
    weight = dual_quantize(w * 0.02, backend="xla").rows
    bits = counter.bits_of(shape, *counter.keys(seed))
    state = Moments(
        *moments.encode_m(m * rows, bits), *moments.encode_v(jnp.square(v * rows), bits)
    )
    assert weight.lo is not None, "it was split"
    return (weight.values, weight.lo, state), weight.scale, g * rows


def rates(
    step: jax.Array, scale: jax.Array, keep: Any = True, gradient_scale: Any = 1.0
) -> Rates:
    """Return the numbers of a step."""
    f = lambda x: jnp.asarray(x, jnp.float32)
    t = step.astype(jnp.float32)
    return Rates(
        b1=f(B1),
        b2=f(B2),
        rate=f(LEARNING_RATE) / (1 - f(B1) ** t) * numerics.reciprocal_pow2(scale),
        rate_g=f(0),
        correction=1 / (1 - f(B2) ** t),
        eps=f(1e-8),
        eps_root=f(0),
        decay=f(1 - LEARNING_RATE * WEIGHT_DECAY),
        gradient_scale=f(gradient_scale),
        scale=scale,
        new_scale=scale,
        keep=jnp.asarray(keep),
    )


def fused(
    state: State,
    g: jax.Array,
    step: jax.Array,
    scale: jax.Array,
    *,
    look: str,
    **options: Any,
) -> Any:
    """Run a step of this library; return (state, its other results)."""
    norm = jnp.sum(jnp.square(g.astype(jnp.float32))) if look == "clipped" else None
    keep: Any = True
    by: Any = 1.0
    if norm is not None:
        keep, by = jnp.isfinite(norm), jnp.minimum(1.0, MAX_NORM / jnp.sqrt(norm))
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


def exact(
    state: Any, g: jax.Array, step: jax.Array, scale: jax.Array, *, clipped: bool
) -> Any:
    """Run a step of optax."""
    params, inner = state
    updates, inner = optimizer(clipped).update(g, inner, params)
    params = optax.apply_updates(params, updates)
    return (params, inner), params[0, 0]


def copy(state: Any, g: jax.Array, step: jax.Array, scale: jax.Array) -> Any:
    """Move as many bytes as a step with a float32 gradient, six each way, and change
    one bit of each word.
    """
    state = state ^ jnp.uint32(1)
    return state, state[0]


# Options of each step by name; "look" is what it checks in the gradient first.
OURS: dict[str, dict[str, Any]] = {
    "fused": dict(look="nothing"),
    "fused, with the transposed copy of hi": dict(look="nothing", orientation="both"),
    "fused, after a look for NaN": dict(look="NaN"),
    "fused, clipped": dict(look="clipped"),
    "the same by XLA": dict(look="nothing", backend="xla"),
}


@dataclass(frozen=True)
class Way:
    """A step `(state, g, step, scale) -> (state, result)`, its first state, and the
    bytes that it must move.
    """

    function: Callable[..., Any]
    state: Any
    gradient: jax.Array
    nbytes: int


def ways(config: Config) -> tuple[dict[tuple[str, str], Way], jax.Array]:
    """Return every way by name and gradient, and the scale of the weight."""
    state, scale, g = jax.jit(make_state, static_argnums=0)(config.shape)
    of_state = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    found: dict[tuple[str, str], Way] = {}
    for gradient in map(g.astype, config.gradients):
        for name, options in OURS.items():
            nbytes = 2 * of_state + gradient.nbytes * (
                1 if options["look"] == "nothing" else 2
            )
            nbytes += g.size if "orientation" in options else 0
            step = functools.partial(fused, **dict(backend=config.backend) | options)
            found[name, str(gradient.dtype)] = Way(step, state, gradient, nbytes)
    params = jax.random.normal(jax.random.key(1), config.shape) * 0.02
    for name, clipped in (
        (BASELINE, False),
        (f"{BASELINE}, clipped by the global norm", True),
    ):
        start = (params, optimizer(clipped).init(params))
        found[name, "float32"] = Way(
            functools.partial(exact, clipped=clipped),
            start,
            g,
            (32 if clipped else 28) * g.size,
        )
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
    step = jnp.int32(10)

    def compiled(way: Way) -> timing.Threaded:
        jitted = jax.jit(way.function, donate_argnums=0)
        program = jitted.lower(way.state, way.gradient, step, scale).compile()
        return timing.Threaded(
            jitted,
            program,
            jax.tree.map(jnp.copy, way.state),
            way.gradient,
            step,
            scale,
        )

    with ThreadPoolExecutor(8) as pool:
        steps = dict(zip(found, pool.map(compiled, found.values()), strict=True))
    candidates: Any = {" / ".join(key): (call, ()) for key, call in steps.items()}
    taken = timing.time_interleaved(
        candidates, rounds=config.rounds, calls=config.calls
    )
    baseline, copied = (
        taken[f"{name} / float32"].median_ms for name in (BASELINE, COPY)
    )
    copy_rate = found[COPY, "float32"].nbytes / copied
    for (name, gradient), way in found.items():
        t = taken[f"{name} / {gradient}"]
        yield Row(
            **dataclasses.asdict(t),
            shape="x".join(map(str, config.shape)),
            name=name,
            gradient=gradient,
            megabytes=way.nbytes / 1e6,
            terabytes_per_second=way.nbytes / (t.median_ms * 1e-3) / 1e12,
            over_copy=way.nbytes / t.median_ms / copy_rate,
            over_optax=t.median_ms / baseline,
        )


def check(config: Config) -> None:
    """Raise `ArithmeticError` unless a step has the bits of the definition on the
    CPU.
    """
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        made = jax.jit(make_state, static_argnums=0)(config.checked)
        state, scale, g = jax.device_get(made)
        numbers = jax.device_get(jax.jit(rates)(jnp.int32(10), scale))
        key = jax.device_get(jnp.stack(counter.keys(1, 10)))
        call = functools.partial(adamw, orientation="both")
        arguments = jax.tree.map(
            lambda x: jax.device_put(x, cpu), (g, *state, numbers, key)
        )
    for dtype in config.gradients:
        with jax.default_device(cpu):
            arguments = (arguments[0].astype(dtype), *arguments[1:])
            expected = jax.device_get(
                jax.jit(functools.partial(call, backend="xla"))(*arguments)
            )
        given = jax.tree.map(jnp.asarray, jax.device_get(arguments))
        got = jax.jit(functools.partial(call, backend=config.backend))(*given)
        if not products.same_bits(jax.device_get(got), expected):
            raise ArithmeticError(
                f"adamw, {dtype}: differs from the definition; it is wrong, so it is"
                " not timed"
            )


def table(result: Result) -> str:
    """Return the page's table, one line per way."""
    rows = result.by("name", "gradient")
    gradients = result.distinct("gradient")

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "-"
        return (
            f"{row['median_ms']:.3f} · {row['over_optax']:.2f} · {row['over_copy']:.0%}"
        )

    lines = [
        [name] + [cell(rows.get((name, gradient))) for gradient in gradients]
        for name in result.distinct("name")
    ]
    titles = [
        times(result.distinct("shape")[0]),
        *(f"{gradient} gradient" for gradient in gradients),
    ]
    return (
        f"{markdown_table(titles, lines)}\n\nA cell holds milliseconds, that time over"
        " the one of optax's AdamW on float32, and the bytes that must move a second"
        " over a copy's."
    )


BENCHMARK = Benchmark(
    NAME,
    __doc__,
    configure,
    measure,
    table,
)

if __name__ == "__main__":
    BENCHMARK.command()
