"""Kernels and their definitions: FP8 numerics, quantization and products, on jax and
numpy alone.
"""
