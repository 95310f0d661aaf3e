"""Weights as two FP8 tensors with a scale for every block."""
