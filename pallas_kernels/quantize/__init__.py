"""Tensors as FP8 values with a scale for all, for every row, or for every block."""
