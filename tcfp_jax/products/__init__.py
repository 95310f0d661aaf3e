"""What a layer multiplies: the product with its backward pass, einsums as products, and what runs them."""

from tcfp_jax.products.fp4_api import fp4_linear, fp4_matmul, pack_fp4

__all__ = ["fp4_linear", "fp4_matmul", "pack_fp4"]
