"""Which implementation of an op runs, and a record of what was asked.

Every op has a table of implementations, best first, XLA last. Each says of given arguments whether it cannot serve
them (`reject`) and whether it could but is not the first choice (`decline`), both with the reason. `backend=None`
takes the first that neither rejects nor declines; a named backend runs unless it rejects, and then raises
`NotImplementedError` with its reason. An implementation is never replaced behind the caller's back: what was asked
for runs, or the caller reads why not.

On a CPU a named kernel runs in its interpreter: the same program, slowly; one that has none, because it is written in
PTX, rejects what it is asked there. `backend=None` never does that, and does not ask kernels there.

The options of an op travel as one frozen value and its arrays in order, so that `api`, `reference` and every kernel
have the same signature, `(options, *arrays)`.
"""

import contextlib
import contextvars
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax.extend import source_info_util

Backend = Literal["xla", "triton", "mosaic"]
BACKENDS: tuple[Backend, ...] = ("mosaic", "triton", "xla")


class Key(NamedTuple):
    """How `tuned.json` names a call: the op, what decides its speed beside the shape, and the shape."""

    op: str
    variant: str
    shape: tuple[int, ...]


def _no_objection(*args: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    `reject` and `decline` take the op's options and arrays and return a reason or None; `configure` returns the tile
    sizes that would run, or None where there is nothing to choose; `key`, which XLA's have for all of their table, how
    a call's times are named, or None where it has none. All four look at shapes and dtypes only.
    """

    backend: Backend
    run: Callable[..., Any]
    reject: Callable[..., str | None] = _no_objection
    decline: Callable[..., str | None] = _no_objection
    configure: Callable[..., Any] = _no_objection
    key: Callable[..., Key | None] = _no_objection


@dataclass(frozen=True)
class Verdict:
    """What was found of one implementation: `reason` is None for the one that runs, with its `config`."""

    backend: Backend
    reason: str | None
    config: Any = None


@dataclass(frozen=True)
class Call:
    """What `dispatch` was asked in one place of a program.

    Attributes:
      step: the innermost `jax.named_scope` around it, which says what the op is for.
      op: the op.
      operands: dtypes and shapes of its arrays, in words.
      verdicts: one for each implementation, in the table's order; empty for what XLA does without an op of this
        project, such as a BF16 product.
      key: how its times are named, or None where it has none.
    """

    step: str
    op: str
    operands: str
    verdicts: tuple[Verdict, ...] = ()
    key: Key | None = None

    @property
    def chosen(self) -> Verdict | None:
        """The verdict of the implementation that runs, or None."""
        return next((verdict for verdict in self.verdicts if verdict.reason is None), None)


_CALLS: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar("pallas_kernels_calls", default=None)
# Part of the key of every cache of traced functions: a function traced before would hide its calls from a recording,
# and one traced in a recording holds references in the place of kernels.
_RECORDING_KEY = jax.make_user_context(0)
_RECORDINGS = itertools.count(1)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Record every call of an op that is traced inside.

    A named backend that cannot run is recorded with its reason, and the reference is traced in its place. What was
    traced elsewhere is traced anew, and what is traced here serves nobody else.
    """
    calls: list[Call] = []
    token = _CALLS.set(calls)
    try:
        with _RECORDING_KEY(next(_RECORDINGS)):
            yield calls
    finally:
        _CALLS.reset(token)


def is_recording() -> bool:
    """Whether calls are recorded here."""
    return _CALLS.get() is not None


def note(key: Key, *arrays: Any) -> None:
    """Record a call of something that has no table, because XLA alone does it."""
    calls = _CALLS.get()
    if calls is not None:
        calls.append(Call(_scope(), key.op, describe(*arrays), key=key))


def _scope() -> str:
    """The innermost `jax.named_scope`, without what transformations make of it: dgrad of transpose(jvp(dgrad))."""
    names = re.findall(r"[^()/]+", str(source_info_util.current().name_stack))
    return names[-1].replace("_", " ") if names else ""


def describe(*arrays: Any) -> str:
    """Dtypes and shapes of arrays and pytrees of them, in words.

    >>> import jax.numpy as jnp
    >>> describe(jnp.ones((2, 3)), None, jnp.ones(4))
    'float32[2, 3] x float32[4]'
    """
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if hasattr(leaf, "shape") and leaf.ndim]
    return " x ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)


def check_backend(backend: Backend | None) -> None:
    """Raise a ValueError unless `backend` is None or one of the known names."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use None or one of {', '.join(map(repr, BACKENDS))}")


def device_kind() -> str:
    """The kind of device that programs are traced for, such as "NVIDIA H200" or "cpu".

    That of the mesh in use (which may describe a device that this machine lacks), else of JAX's default device.
    """
    return _device().device_kind


def device_cores(otherwise: int) -> int:
    """The multiprocessors of that device, or `otherwise` where it does not say."""
    device = _device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or otherwise


def compute_capability() -> float:
    """That of the device in use, such as 9.0 for Hopper; 0 for a device that is not an NVIDIA GPU."""
    try:
        return float(_device().compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def _device() -> Any:
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described
    default = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def judge(table: Sequence[Implementation], backend: Backend | None, options: Any, *arrays: Any) -> tuple[Verdict, ...]:
    """Of every implementation, in the table's order, why it does not run; None for the first that does.

    Raises:
      ValueError: `backend` is not a backend.
    """
    check_backend(backend)
    verdicts: list[Verdict] = []
    chosen: Backend | None = None
    interprets = backend is None and device_kind() == "cpu"
    for implementation in table:
        kernel, reason, config = implementation.backend != "xla", None, None
        if backend not in (None, implementation.backend):
            reason = f"backend={backend!r} was asked for"
        elif kernel and interprets:
            reason = "a CPU runs a kernel only where it is named, in its interpreter if it has one"
        else:
            reason = implementation.reject(options, *arrays)
            if reason is None and backend is None:
                reason = implementation.decline(options, *arrays)
        if reason is None and chosen is not None:
            reason = f"{chosen} comes first"
        if reason is None:
            chosen, config = implementation.backend, implementation.configure(options, *arrays)
        verdicts.append(Verdict(implementation.backend, reason, config))
    return tuple(verdicts)


def dispatch(op: str, table: Sequence[Implementation], backend: Backend | None, options: Any, *arrays: Any) -> Any:
    """Choose an implementation and run it.

    A kernel runs inside a jitted function of its own: calls that agree in shapes, dtypes and options are then traced
    and lowered once in a program, however many layers make them. Lowering a Mosaic kernel takes a third of a second.

    Raises:
      ValueError: `backend` is not a backend.
      NotImplementedError: the named backend cannot run this op or these arguments; the message says why.
    """
    verdicts = judge(table, backend, options, *arrays)
    chosen = next((i for i, verdict in zip(table, verdicts, strict=True) if verdict.reason is None), None)
    calls = _CALLS.get()
    if calls is not None:
        calls.append(Call(_scope(), op, describe(*arrays), verdicts, table[-1].key(options, *arrays)))
        chosen = chosen or table[-1]
    if chosen is None:
        raise NotImplementedError(f"{op} cannot run with backend={backend!r}: {_reasons(op, table, backend, verdicts)}")
    if chosen.backend == "xla":
        return chosen.run(options, *arrays)
    return _jitted(chosen.run)(options, *arrays)


def _reasons(op: str, table: Sequence[Implementation], backend: Backend | None, verdicts: Sequence[Verdict]) -> str:
    reasons = [f"{verdict.backend}: {verdict.reason}" for verdict in verdicts if backend in (None, verdict.backend)]
    if reasons:
        return "; ".join(reasons)
    available = ", ".join(repr(implementation.backend) for implementation in table)
    return f'{op} has no {backend!r} implementation (it has {available}); use backend=None or backend="xla"'


@functools.cache
def _jitted(run: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(run, static_argnums=0)
