"""Products of block-scaled FP8 tensors."""
