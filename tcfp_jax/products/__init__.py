"""Products of layers, with their backward passes: matrices, einsums, groups of rows,
and weights of four bits.
"""

from tcfp_jax.products.fp4_api import fp4_linear, fp4_matmul, pack_fp4
from tcfp_jax.products.grouped import grouped_matmul

__all__ = ["fp4_linear", "fp4_matmul", "grouped_matmul", "pack_fp4"]
