"""Weights as two FP8 tensors with one scale."""
