"""Products of FP8 tensors."""
