"""Time and memory of candidates in turn, and the peaks of single processes.

On a GPU, CUPTI returns the time of a call's kernels. Elsewhere it is the wall clock.
`Timing.timer` names the clock.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

# name: (jitted function, arguments)
Candidates = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
Measure = Callable[[Callable[..., Any], tuple[Any, ...], int], list[float] | None]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and extremes over samples, and the clock."""

    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Literal["CUPTI kernel time", "wall clock"]


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """Settings of a timing: turns of every candidate, and calls in a turn.

    The calls of a turn are queued one after the other.
    """

    rounds: int = 5
    calls: int = 5

    def interleaved(self, candidates: Candidates) -> dict[str, Timing]:
        """Return `time_interleaved` with these repetitions."""
        return time_interleaved(candidates, self.rounds, self.calls)

    def by_wall_clock(self, candidates: Candidates) -> dict[str, Timing]:
        """Return `time_by_wall_clock` with these repetitions."""
        return time_by_wall_clock(candidates, self.rounds, self.calls)


def time_interleaved(
    candidates: Candidates, rounds: int, calls: int
) -> dict[str, Timing]:
    """Time candidates in turn, so that a chip slows down for all of them alike.

    Each is warmed up first. On a GPU, CUPTI returns the sum of the kernels' times for
    every call. If it does not work, the wall clock around the calls of a round gives
    their mean. All candidates of one call have the same timer.
    """
    if jax.default_backend() == "gpu":
        _warm_up(candidates)
        samples = _sample(candidates, _kernel_times, rounds, calls)
        if samples is not None:
            return _timings(samples, "CUPTI kernel time")
    return time_by_wall_clock(candidates, rounds, calls)


def time_by_wall_clock(
    candidates: Candidates, rounds: int, calls: int
) -> dict[str, Timing]:
    """Time candidates in turn by the wall clock: on the CPU, or on several devices.

    Each is warmed up first. A function that does not return arrays of JAX is done when
    it returns.
    """
    _warm_up(candidates)
    samples = _sample(candidates, _wall_times, rounds, calls)
    assert samples is not None  # the wall clock always works
    return _timings(samples, "wall clock")


def _warm_up(candidates: Candidates) -> None:
    for function, args in candidates.values():
        jax.block_until_ready(function(*args))


def _timings(
    samples: dict[str, list[float]],
    timer: Literal["CUPTI kernel time", "wall clock"],
) -> dict[str, Timing]:
    found = {}
    for name, values in samples.items():
        median = statistics.median(values)
        found[name] = Timing(median, min(values), max(values), len(values), timer)
    return found


def _sample(
    candidates: Candidates, measure: Measure, rounds: int, calls: int
) -> dict[str, list[float]] | None:
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, (function, args) in candidates.items():
            times = measure(function, args, calls)
            if times is None:
                return None
            samples[name] += times
    return samples


def _kernel_times(
    function: Callable[..., Any], args: tuple[Any, ...], calls: int
) -> list[float] | None:
    """Return the kernel milliseconds of each call; None without CUPTI."""
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError:
        return None
    measure = profiler.measure(function, aggregate=True, iterations=max(2, calls))
    try:
        _, times = measure(*args)
    except RuntimeError as error:
        print(f"CUPTI gives no times ({error}); using the wall clock", flush=True)
        return None
    return None if times is None else [float(t) for t in times]


def _wall_times(
    function: Callable[..., Any], args: tuple[Any, ...], calls: int
) -> list[float]:
    started = time.perf_counter()
    # Calls are queued in order, so the last result is ready when all are ready.
    for _ in range(calls):
        out = function(*args)
    jax.block_until_ready(out)
    return [(time.perf_counter() - started) * 1e3 / calls]


class Threaded:
    """A step `(state, *inputs) -> (state, result)` with the state that it donates.

    A call is the next step.

    `trace` and `lower` make it a `jax.stages.Wrapped`. CUPTI's profiler would jit
    anything else, and lose the state.
    """

    def __init__(
        self, jitted: Any, compiled: Any, state: Any, *inputs: jax.Array
    ) -> None:
        self.compiled = compiled
        self.state = state
        self.inputs = inputs
        self.trace = jitted.trace
        self.lower = jitted.lower

    def __call__(self) -> Any:
        """Run a step and return its result."""
        self.state, result = self.compiled(self.state, *self.inputs)
        return result


class Training(NamedTuple):
    """A training step before it is compiled.

    Attributes:
      init: `key -> (state, *inputs)`.
      step: `(state, *inputs) -> (state, loss)`.
      gradients: `(*state, *inputs) -> (loss, gradients)` of its parameters.
      state_of: `params -> state`, the first state of these parameters.
    """

    init: Callable[[jax.Array], tuple[Any, ...]]
    step: Callable[..., tuple[Any, jax.Array]]
    gradients: Callable[..., tuple[jax.Array, Any]]
    state_of: Callable[[Any], Any]

    def lower(self, seed: int = 0) -> Any:
        """Return the step, lowered for one device."""
        return jax.jit(self.step, donate_argnums=0).lower(
            *jax.eval_shape(self.init, jax.random.key(seed))
        )

    def compile(
        self,
        seed: int = 0,
        place: Callable[[Any], Any] | None = None,
        done: tuple[Any, float] | None = None,
    ) -> tuple[Threaded, float]:
        """Return (the compiled step with its first state, seconds of compiling).

        The state is made after compiling, which needs memory of its own.

        Args:
          seed: Seed of `init`.
          place: Function of the shapes of `init` that returns their shardings; None on
            one device.
          done: The compiled step and its seconds, if there is one already.
        """
        key = jax.random.key(seed)
        given = jax.eval_shape(self.init, key)
        shardings = None
        results = None
        if place is not None:
            shardings = place(given)
            results = shardings[0], None
            given = jax.tree.map(_sharded, given, shardings)
        jitted = jax.jit(self.step, donate_argnums=0, out_shardings=results)
        compiled, seconds = done or compile_timed(jitted, *given)
        made = jax.jit(self.init, out_shardings=shardings)(key)
        return Threaded(jitted, compiled, *made), seconds


def _sharded(leaf: jax.ShapeDtypeStruct, at: Any) -> jax.ShapeDtypeStruct:
    return leaf.update(sharding=at)


def threaded(
    step: Callable[..., tuple[Any, Any]], state: Any, *inputs: jax.Array
) -> Threaded:
    """Return `step`, jitted and compiled, with a copy of `state` that it may donate."""
    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower(state, *inputs).compile()
    return Threaded(jitted, compiled, jax.tree.map(jnp.copy, state), *inputs)


def compile_timed(jitted: Any, *args: Any) -> tuple[Any, float]:
    """Return (the compiled program, seconds of tracing, lowering and compiling)."""
    started = time.perf_counter()
    return jitted.lower(*args).compile(), time.perf_counter() - started


# Memory
# --------------------------------------------------------------------------------------


def has_peaks() -> bool:
    """Return whether the device reports the allocator's peak; CPUs do not."""
    return jax.local_devices()[0].memory_stats() is not None


def peak_bytes() -> int | None:
    """Return the allocator's peak of this process, with compilation; None without."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measure_alone(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    memory: Literal["as needed", "whole"] = "as needed",
) -> list[Any]:
    """Return `function(*args)` for each `args`, in new processes: a peak never falls.

    Args:
      function: A module's function, which a new process finds by name.
      calls: Arguments that pickle; only one with "whole" memory.
      memory: Part of the device's memory that a process may allocate.
    """
    context = multiprocessing.get_context("spawn")
    take = take_memory_as_needed if memory == "as needed" else take_whole_memory
    pool = ProcessPoolExecutor(
        len(calls), context, initializer=take, max_tasks_per_child=1
    )
    with pool:
        futures = [pool.submit(function, *args) for args in calls]
        return [future.result() for future in futures]


def compile_quickly() -> None:
    """Let XLA optimize little on a CPU, for runs that mostly compile.

    Call it before JAX uses a device.
    """
    # Later ones do not know the flag, which halves the time of compiling
    if jax.__version_info__ < (0, 11):
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
        )
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)


def take_memory_as_needed() -> None:
    """Let JAX allocate on demand, because other processes need the rest.

    Call it before JAX uses a device.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def take_whole_memory() -> None:
    """Let JAX allocate all memory in one piece, which serves larger arrays.

    Call it before JAX uses a device.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.97"
