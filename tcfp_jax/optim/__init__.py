"""Optimizer state: quantized weights, their rounding errors, and small moments."""

from tcfp_jax.optim.adam import AdamWState, adamw
from tcfp_jax.optim.feedback import ErrorFeedbackState, error_feedback, layer_state
from tcfp_jax.optim.gradients import grad, value_and_grad
from tcfp_jax.optim.inside import TrainState, train_step
from tcfp_jax.optim.moments import LowPrecisionState, low_precision_moments
from tcfp_jax.optim.stored import (
    apply_updates,
    dequantize,
    incremental_update,
    on_stored,
    store,
)

__all__ = [
    "AdamWState",
    "ErrorFeedbackState",
    "LowPrecisionState",
    "TrainState",
    "adamw",
    "apply_updates",
    "dequantize",
    "error_feedback",
    "grad",
    "incremental_update",
    "layer_state",
    "low_precision_moments",
    "on_stored",
    "store",
    "train_step",
    "value_and_grad",
]
