"""Which implementation of an op runs.

Every op has one table of implementations, best first, XLA last. `backend=None` takes the first that accepts the
arguments; a named backend runs or raises `NotImplementedError` with its reason. An implementation is never replaced
behind the caller's back: what was asked for runs, or the caller reads why not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Backend = Literal["xla", "triton", "mosaic"]
BACKENDS: tuple[Backend, ...] = ("mosaic", "triton", "xla")


@dataclass(frozen=True)
class Implementation:
    """One way to run an op: `reject` gives the reason why it cannot serve these arguments, or None."""

    backend: Backend
    run: Callable[..., Any]
    reject: Callable[..., str | None] = lambda *args, **options: None


def check_backend(backend: Backend | None) -> None:
    """Raise a ValueError unless `backend` is None or one of the known names."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use None or one of {', '.join(map(repr, BACKENDS))}")


def choose(
    op: str, table: Sequence[Implementation], backend: Backend | None, *args: Any, **options: Any
) -> Implementation:
    """The implementation that serves these arguments.

    Raises:
      ValueError: `backend` is no backend.
      NotImplementedError: the named backend cannot run this op or these arguments; the message says why.
    """
    check_backend(backend)
    reasons = []
    for implementation in table:
        if backend in (None, implementation.backend):
            reason = implementation.reject(*args, **options)
            if reason is None:
                return implementation
            reasons.append(f"{implementation.backend}: {reason}")
    if not reasons:
        available = ", ".join(repr(implementation.backend) for implementation in table)
        reasons.append(
            f'{op} has no {backend!r} implementation (it has {available}); use backend=None or backend="xla"'
        )
    raise NotImplementedError(f"{op} cannot run with backend={backend!r}: " + "; ".join(reasons))


def dispatch(op: str, table: Sequence[Implementation], backend: Backend | None, *args: Any, **options: Any) -> Any:
    """Choose an implementation and run it."""
    return choose(op, table, backend, *args, **options).run(*args, **options)
