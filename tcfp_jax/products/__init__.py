"""Products of layers, with their backward passes: matrices, einsums, and weights of four bits."""

from tcfp_jax.products.fp4_api import fp4_linear, fp4_matmul, pack_fp4

__all__ = ["fp4_linear", "fp4_matmul", "pack_fp4"]
