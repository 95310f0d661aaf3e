"""Tensors as two FP8 tensors that share their scales."""
