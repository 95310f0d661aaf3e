"""Kernels in Pallas Mosaic for Hopper GPUs.

`plan`, `steps`, `sums` and `kernel` make the FP8 product. `engine` and `passes` run the
passes of `tiled.py` for quantizers and casts. `registers` has matrices in registers,
for passes, AdamW and NVFP4.
"""
