"""What outlives a step: weights stored as FP8 with what rounding left, or as the parameters themselves."""

from tcfp_jax.optim.feedback import ErrorFeedbackState, error_feedback, layer_state
from tcfp_jax.optim.gradients import grad, value_and_grad
from tcfp_jax.optim.stored import apply_updates, dequantize, on_stored, store

__all__ = [
    "ErrorFeedbackState", "apply_updates", "dequantize", "error_feedback", "grad", "layer_state", "on_stored", "store",
    "value_and_grad",
]  # fmt: skip
