"""The releases of the library around the day of a measurement."""

import functools
import re
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


@functools.cache
def release_of(day: str) -> str:
    """Return the releases around a day in CHANGELOG; numbers older than the library
    belong to one of them.

    >>> release_of("2026-11-22")
    'between releases 0.2.0 and 0.3.0'
    """
    text = CHANGELOG.read_text(encoding="utf-8")
    releases = sorted(
        (date, number)
        for number, date in re.findall(r"^## \[([\d.]+)\] - ([\d-]+)$", text, re.M)
    )
    if on_it := [number for date, number in releases if date == day]:
        return f"about release {on_it[-1]}"
    before, after = (
        [number for date, number in releases if (date < day) == past]
        for past in (True, False)
    )
    if before and after:
        return f"between releases {before[-1]} and {after[0]}"
    return f"after release {before[-1]}" if before else f"before release {after[0]}"
