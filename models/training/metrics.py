"""`metrics.jsonl` of a run: a line for each step, with its loss and maybe rewards or a
report.
"""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

METRICS_FILE = "metrics.jsonl"
LARGEST_METRICS = 1 << 31  # bytes


def line_of(
    step: int,
    loss: float,
    report: Any = None,
    rewards: Mapping[str, float] | None = None,
) -> str:
    """Return the line of a step."""
    entry: dict[str, Any] = {"step": step}
    for name, value in {"loss": loss, **(rewards or {})}.items():
        # JSON has no NaN, so null marks a run that diverged.
        entry[name] = float(value) if math.isfinite(value) else None
    return json.dumps(entry if report is None else {**entry, "monitor": report}) + "\n"


def repaired(text: str, steps: int) -> tuple[str, list[float], int]:
    r"""Return (one line for each step, their losses, number of steps without a sound
    line).

    A step without a sound line gets the loss null, which is NaN in the list.

    >>> repaired('{"step": 1, "loss": 2.5}\n{"step": 2, "lo', 1)
    ('{"step": 1, "loss": 2.5}\n', [2.5], 0)
    """
    sound: dict[int, tuple[str, float]] = {}
    for line in text.splitlines(keepends=True):
        entry = _entry(line)
        if entry is not None:
            loss = math.nan if entry["loss"] is None else float(entry["loss"])
            sound[entry["step"]] = (line, loss)
    wanted = range(1, steps + 1)
    kept = [sound.get(step, (line_of(step, math.nan), math.nan)) for step in wanted]
    lost = sum(step not in sound for step in wanted)
    return "".join(line for line, _ in kept), [loss for _, loss in kept], lost


def _entry(line: str) -> dict[str, Any] | None:
    """Return the entry of a line; None if it is not one."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not line.endswith("\n") or not isinstance(entry, dict):
        return None
    loss = entry.get("loss", "")
    sound = (
        isinstance(entry.get("monitor", {}), dict)
        and isinstance(entry.get("step"), int)
        and type(loss) in (int, float, type(None))  # not a bool
        and (loss is None or abs(loss) <= sys.float_info.max)
    )
    return entry if sound else None
