"""The choice of an op's implementation, its record, and one trace for equal calls.

Every op has a table of implementations, the best first and XLA last. Each can say that
it cannot serve given arguments (`reject`), or that it could but is not the first choice
(`decline`, or `timed`, by measured times), with the reason. `backend=None` takes the
first that neither rejects nor declines. A named backend runs unless it rejects, and
then raises `NotImplementedError` with the reason. There is no silent fallback: the
requested backend runs, or the caller reads why it cannot.

On a CPU a named kernel runs in its interpreter: the same program, slowly. A kernel
without an interpreter, because it is written in PTX, rejects. `backend=None` never
interprets, and asks no kernel on a CPU.

The options of an op travel as one frozen value and its arrays in order, so that `api`,
`reference` and every kernel have the same signature, `(options, *arrays)`.
"""

import contextlib
import contextvars
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Literal, Protocol, TypeVar

import jax
from jax.extend import source_info_util

from pallas_kernels import pallas_triton, tuning
from pallas_kernels.checks import check_choice
from pallas_kernels.tuning import Key

Backend = Literal["xla", "triton", "mosaic", "cudnn"]
BACKENDS: tuple[Backend, ...] = ("mosaic", "triton", "cudnn", "xla")
# Devices that are only described have no capability.
_BLACKWELL = ("B200", "B300")
T = TypeVar("T")


def _no_objection(*args: object) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. All functions but `run` look at shapes and dtypes only.

    Attributes:
      backend: its name.
      run: takes the op's options and arrays, as the functions below do.
      reject: returns the reason why it cannot run, or None.
      decline: returns the reason why it is not the first choice, or None.
      configure: returns the tile sizes that would run, or None if there are none to
        choose.
      key: returns the name of the call in `tuned.json`, or None. XLA's implementation
        has it for the whole table.
      timed: whether it is the first choice only if it was measured to be the fastest.
      replaces: a backend where it comes first untimed, too, if that one cannot run.
    """

    backend: Backend
    run: Callable[..., Any]
    reject: Callable[..., str | None] = _no_objection
    decline: Callable[..., str | None] = _no_objection
    configure: Callable[..., object] = _no_objection
    key: Callable[..., Key | None] = _no_objection
    timed: bool = False
    replaces: Backend | None = None


@dataclass(frozen=True)
class Verdict:
    """The judgement of one implementation.

    Attributes:
      backend: its name.
      reason: the reason why it does not run; None for the one that runs.
      config: tile sizes of the one that runs.
    """

    backend: Backend
    reason: str | None
    config: object = None


@dataclass(frozen=True)
class Call:
    """One call of `dispatch` in a program.

    Attributes:
      step: name of the innermost `jax.named_scope`, which says the purpose of the op.
      op: name of the op.
      operands: dtypes and shapes of its arrays, in words.
      verdicts: one for each implementation in the table's order; empty for an op of XLA
        alone, such as a BF16 product.
      key: name of its times, or None.
    """

    step: str
    op: str
    operands: str
    verdicts: tuple[Verdict, ...] = ()
    key: Key | None = None

    @property
    def chosen(self) -> Verdict | None:
        """The verdict of the implementation that runs, or None."""
        for verdict in self.verdicts:
            if verdict.reason is None:
                return verdict
        return None


_CALLS: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar(
    "pallas_kernels_calls", default=None
)
# Part of the key of every cache of traced functions. A function that was traced before
# would hide its calls from a recording, and one that was traced in a recording has
# references instead of kernels.
_RECORDING_KEY = jax.make_user_context(0)
_RECORDINGS = itertools.count(1)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Record every call of an op that is traced inside.

    A named backend that cannot run is recorded with its reason, and the reference is
    traced instead. Functions that were traced elsewhere are traced anew, and traces
    made here are not reused.
    """
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        with _RECORDING_KEY(next(_RECORDINGS)):
            yield calls
    finally:
        _CALLS.reset(token)


def note(key: Key, *arrays: object) -> None:
    """Record a call of an op without a table, which XLA alone computes."""
    calls = _CALLS.get()
    if calls is not None:
        calls.append(Call(_scope(), key.op, _describe(*arrays), key=key))


def _scope() -> str:
    # The innermost name, without the names of transformations: dgrad of
    # transpose(jvp(dgrad)).
    names = re.findall(r"[^()/]+", str(source_info_util.current().name_stack))
    return names[-1].replace("_", " ") if names else ""


def _describe(*arrays: object) -> str:
    """Return dtypes and shapes of arrays and pytrees of them, in words.

    >>> import jax.numpy as jnp
    >>> _describe(jnp.ones((2, 3)), None, jnp.ones(4))
    'float32[2, 3] x float32[4]'
    """
    words = []
    for leaf in jax.tree.leaves(arrays):
        if getattr(leaf, "shape", ()):
            words.append(f"{leaf.dtype}{list(leaf.shape)}")
    return " x ".join(words)


def check_backend(backend: Backend | None) -> None:
    """Raise a ValueError unless `backend` is None or a known name."""
    if backend is not None:
        check_choice("backend", backend, BACKENDS, " or None")


def device_kind() -> str:
    """Return the kind of device for which programs are traced, such as "NVIDIA H200".

    The mesh in use decides (it may describe a device that this machine lacks), else
    JAX's default device.
    """
    return str(_device().device_kind)


def device_cores(otherwise: int) -> int:
    """Return the number of multiprocessors of that device.

    It is `otherwise` if the device does not say.
    """
    device = _device()
    for name in ("num_cores", "core_count"):
        count = getattr(device, name, None)
        if count:
            return int(count)
    return otherwise


def _compute_capability() -> float:
    """Return the compute capability of that device, such as 9.0 for Hopper.

    It is 0 unless the device is an NVIDIA GPU.
    """
    try:
        return float(getattr(_device(), "compute_capability", 0))
    except ValueError:
        return 0.0


def lacks_fp8(*call: object) -> str | None:
    """Return the reason why that device cannot convert to FP8 in a kernel, or None.

    Give it as `decline` to a kernel that needs no times: XLA is slower at every shape.
    NVIDIA GPUs can from 8.9 on. A device that is only described, for a program that is
    compiled elsewhere, has a name but no capability.
    """
    kind = device_kind()
    if "NVIDIA" in kind and not 0 < _compute_capability() < 8.9:
        return None
    return f"{kind} has no instructions for FP8"


def lacks_block_scales() -> str | None:
    """Return why that device does not multiply blocks with their scales, or None.

    NVIDIA GPUs do from Blackwell on, compute capability 10. A CPU multiplies numbers
    that it scales itself, with jax 0.12 or newer.
    """
    kind = device_kind()
    if kind == "cpu":
        if jax.__version_info__ >= (0, 12):
            return None
        return f"jax {jax.__version__} has no scaled_matmul of a CPU; use jax 0.12"
    if _compute_capability() >= 10 or any(name in kind for name in _BLACKWELL):
        return None
    return (
        f"{kind} has no tensor cores that read the scales of blocks; use"
        ' backend="xla", or a Blackwell GPU'
    )


class _Device(Protocol):
    device_kind: str


def _device() -> _Device:
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described
    default = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def judge(
    table: Sequence[Implementation],
    backend: Backend | None,
    options: Hashable,
    *arrays: object,
) -> tuple[Verdict, ...]:
    """Return for each implementation the reason why it does not run.

    The reason is None for the first one that does.

    Raises:
      ValueError: `backend` is not a backend.
    """
    check_backend(backend)
    verdicts: list[Verdict] = []
    chosen: Backend | None = None
    for implementation in table:
        reason = _objection(table, implementation, backend, options, *arrays)
        if reason is None and chosen is not None:
            reason = f"{chosen} comes first"
        config = None
        if reason is None:
            chosen = implementation.backend
            config = implementation.configure(options, *arrays)
        verdicts.append(Verdict(implementation.backend, reason, config))
    return tuple(verdicts)


def _objection(
    table: Sequence[Implementation],
    implementation: Implementation,
    backend: Backend | None,
    options: Hashable,
    *arrays: object,
) -> str | None:
    """Return the reason why an implementation would not run in the first place."""
    name = implementation.backend
    if backend not in (None, name):
        return f"backend={backend!r} was asked for"
    device = device_kind()
    if backend is None and name != "xla" and device == "cpu":
        return (
            "a CPU runs a kernel only where it is named, in its interpreter if it has"
            " one"
        )
    reason = _reject(implementation, options, *arrays)
    if reason is None and backend is None:
        reason = implementation.decline(options, *arrays)
    if reason is not None or backend is not None or not implementation.timed:
        return reason
    able = {
        other.backend for other in table if _reject(other, options, *arrays) is None
    }
    key = table[-1].key(options, *arrays)
    is_timed = key is not None and tuning.find(device, key, name) is not None
    replaced = implementation.replaces
    if replaced is not None and replaced not in able and not is_timed:
        return None
    return tuning.decline(device, key, name, able)


def _reject(
    implementation: Implementation,
    options: Hashable,
    *arrays: object,
) -> str | None:
    reason = None
    if implementation.backend == "triton":
        reason = pallas_triton.missing()
    return reason or implementation.reject(options, *arrays)


def dispatch(
    op: str,
    table: Sequence[Implementation],
    backend: Backend | None,
    options: Hashable,
    *arrays: object,
) -> Any:
    """Choose an implementation and run it.

    A kernel runs inside a jitted function of its own. Calls with the same shapes,
    dtypes and options are then traced and lowered once in a program, however many
    layers make them; lowering a Mosaic kernel takes a third of a second.

    Raises:
      ValueError: `backend` is not a backend.
      NotImplementedError: the named backend cannot run this op or these arguments; the
        message says why.
    """
    verdicts = judge(table, backend, options, *arrays)
    chosen: Implementation | None = None
    for implementation, verdict in zip(table, verdicts, strict=True):
        if verdict.reason is None:
            chosen = implementation
    calls = _CALLS.get()
    if calls is not None:
        key = table[-1].key(options, *arrays)
        calls.append(Call(_scope(), op, _describe(*arrays), verdicts, key))
        if chosen is None:
            chosen = table[-1]  # the reference; the record has the reason
    if chosen is None:
        reasons = _reasons(op, table, backend, verdicts)
        raise NotImplementedError(
            f"{op} cannot run with backend={backend!r}: {reasons}"
        )
    if chosen.backend == "xla":
        return chosen.run(options, *arrays)
    return _jitted(chosen.run)(options, *arrays)


def _reasons(
    op: str,
    table: Sequence[Implementation],
    backend: Backend | None,
    verdicts: Sequence[Verdict],
) -> str:
    reasons = [
        f"{verdict.backend}: {verdict.reason}"
        for verdict in verdicts
        if backend in (None, verdict.backend)
    ]
    if reasons:
        return "; ".join(reasons)
    available = ", ".join(repr(implementation.backend) for implementation in table)
    return (
        f"{op} has no {backend!r} implementation (it has {available}); use backend=None"
        ' or backend="xla"'
    )


@cache
def _jitted(run: Callable[..., T]) -> Callable[..., T]:
    return jax.jit(run, static_argnums=0)


def shared(function: Callable[..., T]) -> Callable[..., T]:
    """Return `function(options, *arguments)`, traced once for equal calls.

    Use it for a part of a program that equal layers repeat. Without it a program with
    twelve layers has the arithmetic of its quantizers thirty-six times, and JAX traces,
    differentiates and lowers each copy. XLA inlines the jitted function before it
    optimizes, so the compiled program is the same.

    `options` is hashable. The arguments are pytrees of arrays, compared by shapes,
    dtypes, shardings and varying axes. Nothing is shared while calls are recorded, so
    that every call is seen.

    >>> double = shared(lambda factor, x: factor * x)
    >>> float(double(2, jax.numpy.float32(3)))
    6.0
    """

    @wraps(function)
    def on_device(options: Hashable, around: Hashable, *arguments: object) -> T:
        return function(options, *arguments)

    traced = jax.jit(on_device, static_argnums=(0, 1))

    @wraps(function)
    def call(options: Hashable, *arguments: object) -> T:
        if _CALLS.get() is not None:
            return function(options, *arguments)
        return traced(options, surroundings(), *arguments)

    return call


def surroundings() -> Hashable:
    """Return the device and the times, which a choice depends on and JAX's caches do
    not know.
    """
    kind = device_kind()
    # A CPU runs no kernel that is not named, so times decide nothing there.
    times = None if kind == "cpu" else tuning.load()
    return kind, _compute_capability(), device_cores(0), times
