"""The FP8 product on Hopper GPUs in Pallas Mosaic: its plan, its pipelines, and the
kernel.
"""
