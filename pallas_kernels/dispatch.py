"""Which implementation of an op runs.

Every op has one table of implementations, best first, XLA last. Each says of given arguments whether it cannot serve
them (`reject`) and whether it could but is not the first choice (`decline`), both with the reason. `backend=None`
takes the first that neither rejects nor declines; a named backend runs unless it rejects, and then raises
`NotImplementedError` with its reason. An implementation is never replaced behind the caller's back: what was asked
for runs, or the caller reads why not.

On a CPU a named kernel runs in its interpreter: the same program, slowly. `backend=None` never does that.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

Backend = Literal["xla", "triton", "mosaic"]
BACKENDS: tuple[Backend, ...] = ("mosaic", "triton", "xla")


def _no_objection(*args: Any, **options: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    `reject` and `decline` take the op's arguments and return a reason or None; `configure` returns the tile sizes that
    would run, or None where there is nothing to choose. All three look at shapes and dtypes only.
    """

    backend: Backend
    run: Callable[..., Any]
    reject: Callable[..., str | None] = _no_objection
    decline: Callable[..., str | None] = _no_objection
    configure: Callable[..., Any] = _no_objection


@dataclass(frozen=True)
class Verdict:
    """What `explain` found of one implementation: `reason` is None for the one that runs, with its `config`."""

    backend: Backend
    reason: str | None
    config: Any = None


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


def _device() -> Any:
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described
    default = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def choose(
    op: str, table: Sequence[Implementation], backend: Backend | None, *args: Any, **options: Any
) -> Implementation:
    """The implementation that serves these arguments.

    Raises:
      ValueError: `backend` is no backend.
      NotImplementedError: the named backend cannot run this op or these arguments; the message says why.
    """
    verdicts = explain(table, backend, *args, **options)
    for implementation, verdict in zip(table, verdicts, strict=True):
        if verdict.reason is None:
            return implementation
    reasons = [f"{verdict.backend}: {verdict.reason}" for verdict in verdicts if backend in (None, verdict.backend)]
    if not reasons:
        available = ", ".join(repr(implementation.backend) for implementation in table)
        reasons.append(
            f'{op} has no {backend!r} implementation (it has {available}); use backend=None or backend="xla"'
        )
    raise NotImplementedError(f"{op} cannot run with backend={backend!r}: " + "; ".join(reasons))


def explain(
    table: Sequence[Implementation], backend: Backend | None, *args: Any, **options: Any
) -> tuple[Verdict, ...]:
    """Of every implementation, in the table's order, why it does not run; None for the first that does.

    Raises:
      ValueError: `backend` is no backend.
    """
    check_backend(backend)
    verdicts: list[Verdict] = []
    chosen: Backend | None = None
    for implementation in table:
        reason: str | None
        if backend not in (None, implementation.backend):
            reason = f"backend={backend!r} was asked for"
        else:
            reason = implementation.reject(*args, **options)
            if reason is None and backend is None:
                reason = implementation.decline(*args, **options)
            if reason is None and chosen is not None:
                reason = f"{chosen} comes first"
        config = None
        if reason is None:
            chosen, config = implementation.backend, implementation.configure(*args, **options)
        verdicts.append(Verdict(implementation.backend, reason, config))
    return tuple(verdicts)


def dispatch(op: str, table: Sequence[Implementation], backend: Backend | None, *args: Any, **options: Any) -> Any:
    """Choose an implementation and run it.

    A kernel runs inside a jitted function of its own: calls that agree in shapes, dtypes and options are then traced
    and lowered once in a program, however many layers make them. Lowering a Mosaic kernel takes a third of a second.
    """
    chosen = choose(op, table, backend, *args, **options)
    if chosen.backend == "xla":
        return chosen.run(*args, **options)
    return _jitted(chosen.run, tuple(name for name, value in options.items() if not _is_array(value)))(*args, **options)


@functools.cache
def _jitted(run: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(run, static_argnames=static)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)
