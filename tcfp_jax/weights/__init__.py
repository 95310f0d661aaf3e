"""Stored weights: quantized tensors, their layout, and the packed format."""
