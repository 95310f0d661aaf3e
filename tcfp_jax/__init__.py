"""Low-precision training for JAX: TCFP-12 weights, FP8 products, Flax layers and optax state."""

from tcfp_jax.gemm import matmul
from tcfp_jax.optim import error_feedback, layer_state
from tcfp_jax.quantization import quantize, split
from tcfp_jax.recipe import Recipe, TCFPMode, recipe
from tcfp_jax.selection import explain
from tcfp_jax.tcfp12 import dequantize_tcfp12, fake_quantize, quantize_tcfp12

__all__ = [
    "Recipe",
    "TCFPMode",
    "dequantize_tcfp12",
    "error_feedback",
    "explain",
    "fake_quantize",
    "layer_state",
    "matmul",
    "quantize",
    "quantize_tcfp12",
    "recipe",
    "split",
]
