"""Time and memory of candidates in turn, kinds of kernels, and peaks of processes.

On a GPU, CUPTI returns the time of a call's kernels. Elsewhere it is the wall clock.
`Timing.timer` names the clock.
"""

import glob
import math
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

import tcfp_jax

# name: (jitted function, arguments)
Candidates = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]
Timer = Literal["CUPTI kernel time", "wall clock"]
Measure = Callable[[Callable[..., Any], tuple[Any, ...], int], list[float] | None]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and extremes over samples, and the clock."""

    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    timer: Timer


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """Settings of a timing: turns of every candidate, and calls in a turn.

    The calls of a turn are queued one after the other.
    """

    rounds: int = 5
    calls: int = 5

    def interleaved(self, candidates: Candidates) -> dict[str, Timing]:
        """Time candidates in turn, so that a chip slows down for all of them alike.

        Each is warmed up first. On a GPU, CUPTI returns the sum of the kernels' times
        for every call. If it does not work, the wall clock around the calls of a round
        gives their mean. All candidates of one call have the same timer.
        """
        if jax.default_backend() == "gpu":
            _warm_up(candidates)
            samples = self._sample(candidates, _kernel_times)
            if samples is not None:
                return _timings(samples, "CUPTI kernel time")
        return self.by_wall_clock(candidates)

    def by_wall_clock(self, candidates: Candidates) -> dict[str, Timing]:
        """Time candidates in turn by the wall clock: on the CPU, or several devices.

        Each is warmed up first. A function that does not return arrays of JAX is done
        when it returns.
        """
        _warm_up(candidates)
        samples = self._sample(candidates, _wall_times)
        assert samples is not None  # the wall clock always works
        return _timings(samples, "wall clock")

    def _sample(
        self, candidates: Candidates, measure: Measure
    ) -> dict[str, list[float]] | None:
        samples: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(self.rounds):
            for name, (function, args) in candidates.items():
                times = measure(function, args, self.calls)
                if times is None:
                    return None
                samples[name] += times
        return samples


def _warm_up(candidates: Candidates) -> None:
    for function, args in candidates.values():
        jax.block_until_ready(function(*args))


def _timings(samples: dict[str, list[float]], timer: Timer) -> dict[str, Timing]:
    found = {}
    for name, values in samples.items():
        median = statistics.median(values)
        found[name] = Timing(median, min(values), max(values), len(values), timer)
    return found


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

    def __init__(self, jitted: Any, compiled: Any, state: Any, *inputs: Array) -> None:
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

    init: Callable[[Array], tuple[Any, ...]]
    step: Callable[..., tuple[Any, Array]]
    gradients: Callable[..., tuple[Array, Any]]
    state_of: Callable[[Any], Any]

    def lower(self) -> Any:
        """Return the step, lowered for one device."""
        given = jax.eval_shape(self.init, jax.random.key(0))
        return jax.jit(self.step, donate_argnums=0).lower(*given)

    def compile(
        self,
        place: Callable[[Any], Any] | None = None,
        done: tuple[Any, float] | None = None,
    ) -> tuple[Threaded, float]:
        """Return (the compiled step with its first state, seconds of compiling).

        The state is made after compiling, which needs memory of its own.

        Args:
          place: Function of the shapes of `init` that returns their shardings; None on
            one device.
          done: The compiled step and its seconds, if there is one already.
        """
        key = jax.random.key(0)
        given = jax.eval_shape(self.init, key)
        shardings = None
        results = None
        if place is not None:
            shardings = place(given)
            results = shardings[0], None
            given = jax.tree.map(
                lambda leaf, at: leaf.update(sharding=at), given, shardings
            )
        jitted = jax.jit(self.step, donate_argnums=0, out_shardings=results)
        compiled, seconds = done or compile_timed(jitted, *given)
        if place is not None:
            made = jax.jit(self.init, out_shardings=shardings)(key)
            return Threaded(jitted, compiled, *made), seconds
        # First the parameters, whose floats then do not meet the optimizer's state.
        params = jax.jit(lambda key: self.init(key)[0][0])(key)
        state = jax.jit(self.state_of, donate_argnums=0)(params)
        inputs = jax.jit(lambda key: self.init(key)[1:])(key)
        return Threaded(jitted, compiled, state, *inputs), seconds


def training_of(
    gradients: Callable[..., tuple[Array, Any]],
    optimizer: Any,
    draw: Callable[[Array], tuple[Any, ...]],
) -> Training:
    """Return the step of an optimizer behind a backward pass.

    `draw` is `key -> (params, *inputs)`.
    """

    def state_of(params: Any) -> Any:
        return params, optimizer.init(params)

    def init(key: Array) -> tuple[Any, ...]:
        params, *inputs = draw(key)
        return state_of(params), *inputs

    def step(state: Any, *inputs: Array) -> tuple[Any, Array]:
        loss, dparams = gradients(*state, *inputs)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(dparams, state[1], state[0])
            return (tcfp_jax.apply_updates(state[0], updates), opt_state), loss

    return Training(init, step, gradients, state_of)


def threaded(
    step: Callable[..., tuple[Any, Any]], state: Any, *inputs: Array
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


def measure_in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)` of a new process with the whole memory, or of this one
    on a device that reports no peaks.
    """
    if not has_peaks():
        return function(*args)
    (found,) = measure_alone(function, [args], "whole")
    return found


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


# Kinds of kernels
# --------------------------------------------------------------------------------------

# A library's kernel has a name that tells its purpose. A kernel of XLA has the name of
# its instruction. The instruction's metadata in the compiled program holds the
# `jax.named_scope`s of the operation, or of the last of several. So a maximum that a
# norm's kernel finds next to its result counts as the norm. Copies and fills by the
# driver are a kind: a scan copies values that it keeps for its backward pass.

Kind = Literal[
    "products",
    "attention",
    "norms and activations",
    "quantization",
    "optimizer",
    "copies",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Operation = tuple[str, str]  # (types of its results, name with scopes)

# First match wins: cuDNN's attention has "gemm" in some of its names, and AdamW's
# kernel rounds, too.
_BY_NAME: tuple[tuple[str, Kind], ...] = (
    (r"^(memcpy|memset)", "copies"),
    (r"cudnn|sdpa|fmha|flash", "attention"),
    (r"adamw", "optimizer"),
    (r"quantize|cast_transpose|cast_fp8|amax_kernel", "quantization"),
    (r"matmul|gemm|nvjet|cutlass|cublas|xmma|splitk", "products"),
)
# Types end before the operation: "f32[8]{0} fusion(...", or "(f32[8]{0}, pred[])
# fusion(...".
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+)(.*)")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_WIDE = re.compile(r"\b(?:bf16|f16|f32)\[([\d,]+)\]")
_TRACED = 3  # calls on the timeline
_SMALL = 2**16  # values: scales, amaxes and statistics of rows have fewer, tensors more


def operations_of(program: str) -> dict[str, Operation]:
    """Return (types of the results, name with scopes) of instructions by kernel.

    >>> text = '  %loop_add.1 = f32[8]{0} fusion(%a), metadata={op_name="f/optimizer"}'
    >>> operations_of(text)
    {'loop_add_1': ('f32[8]{0}', 'f/optimizer')}
    """
    found = {}
    for line in program.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, types, rest = match.groups()
        scopes = _SCOPES.search(rest)
        found[re.sub(r"[.\-]", "_", name)] = types, scopes[1] if scopes else ""
    return found


def kind_of(kernel: str, operations: Mapping[str, Operation]) -> Kind:
    """Return the kind of a kernel.

    XLA's kernel of a quantizer counts as quantization if it writes only FP8 or small
    arrays. If it writes a tensor of floats, too, it counts as the norm or activation of
    that tensor.

    >>> kind_of("nvjet_qqtst_128x256", {}), kind_of("cudnn_sdpa_flash_fprop", {})
    ('products', 'attention')
    >>> kind_of("loop_add_1", {"loop_add_1": ("f32[8]{0}", "jit(f)/optimizer/add")})
    'optimizer'
    """
    types, scopes = operations.get(kernel, ("", ""))
    if not scopes:
        lowered = kernel.lower()
        for pattern, kind in _BY_NAME:
            if re.search(pattern, lowered):
                return kind
        return "norms and activations"
    if "optimizer" in scopes:
        return "optimizer"
    if "quantize" in scopes and not any(
        math.prod(map(int, sizes.split(","))) > _SMALL for sizes in _WIDE.findall(types)
    ):
        return "quantization"
    # XLA's own products have the names of their instructions, perhaps with a transpose
    # at the end.
    is_product = scopes.endswith("dot_general") or kernel.startswith("gemm_fusion")
    return "products" if is_product else "norms and activations"


def milliseconds_by_kind(
    kernels: list[tuple[str, float]], program: str
) -> dict[Kind, float]:
    """Return the sum of every kind over (kernel, milliseconds) of one call."""
    operations = operations_of(program)
    sums = dict.fromkeys(KINDS, 0.0)
    for name, milliseconds in kernels:
        sums[kind_of(name, operations)] += milliseconds
    return sums


def profile(
    function: Callable[..., Any], args: tuple[Any, ...], program: str
) -> dict[Kind, float] | None:
    """Return milliseconds by kind, the mean of three calls, or None on a CPU."""
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_TRACED):
                out = function(*args)
            jax.block_until_ready(out)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        kernels = []
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                # Other lines of a device's plane repeat the kernels of its streams, by
                # instruction and by scope.
                if not plane.name.startswith("/device:GPU"):
                    continue
                if line.name.startswith("Stream"):
                    kernels += [(e.name, e.duration_ns / 1e6) for e in line.events]
    kernels = [(name, milliseconds / _TRACED) for name, milliseconds in kernels]
    return milliseconds_by_kind(kernels, program)
