"""Quantizers: a tensor as one or two FP8 tensors with their scales."""
