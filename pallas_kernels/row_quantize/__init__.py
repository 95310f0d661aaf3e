"""Tensors as FP8 values and a scale for every row."""
