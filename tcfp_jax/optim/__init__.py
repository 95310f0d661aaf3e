"""What outlives a step: quantized weights and what rounding left, as optax state."""

from tcfp_jax.optim.feedback import ErrorFeedbackState, error_feedback, layer_state

__all__ = ["ErrorFeedbackState", "error_feedback", "layer_state"]
