"""Low-precision training for JAX: TCFP-12 weights, FP8 products, Flax layers and optax state."""

from tcfp_jax.conversion.transform import transform
from tcfp_jax.explanation import explain
from tcfp_jax.moved import install as _install
from tcfp_jax.optim.feedback import error_feedback, layer_state
from tcfp_jax.optim.gradients import grad, value_and_grad
from tcfp_jax.optim.stored import apply_updates, dequantize, store
from tcfp_jax.products.layer import matmul
from tcfp_jax.recipes import Recipe, TCFPMode, recipe
from tcfp_jax.weights.packed import dequantize_tcfp12, fake_quantize, quantize_tcfp12
from tcfp_jax.weights.quantization import quantize, split

__all__ = [
    "Recipe",
    "TCFPMode",
    "apply_updates",
    "dequantize",
    "dequantize_tcfp12",
    "error_feedback",
    "explain",
    "fake_quantize",
    "grad",
    "layer_state",
    "matmul",
    "quantize",
    "quantize_tcfp12",
    "recipe",
    "split",
    "store",
    "transform",
    "value_and_grad",
]

_install()
