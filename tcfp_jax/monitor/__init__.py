"""Readings of a training step: how operands were rounded, and whether updates arrived.
It costs nothing when off.
"""

from tcfp_jax.monitor.observation import Readings, value_and_grad
from tcfp_jax.monitor.readings import OPERANDS, Reading
from tcfp_jax.monitor.updates import (
    Quality,
    float_updates,
    stale_moments,
    update_quality,
)

__all__ = [
    "OPERANDS",
    "Quality",
    "Reading",
    "Readings",
    "float_updates",
    "stale_moments",
    "update_quality",
    "value_and_grad",
]
