"""The FP8 product on Hopper GPUs in Pallas Mosaic: what a kernel is compiled for, and the kernel."""
