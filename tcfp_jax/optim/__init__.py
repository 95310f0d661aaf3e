"""What outlives a step: quantized weights, what rounding left, and moments in few bytes, as optax state."""

from tcfp_jax.optim.feedback import ErrorFeedbackState, error_feedback, layer_state
from tcfp_jax.optim.moments import LowPrecisionState, low_precision_moments

__all__ = ["ErrorFeedbackState", "LowPrecisionState", "error_feedback", "layer_state", "low_precision_moments"]
