"""Kernels in Pallas Mosaic for Hopper GPUs.

`plan`, `steps` and `kernel` make the FP8 product. `passes` and `registers` serve quantizers and AdamW:
passes over a matrix, and matrices in registers.
"""
