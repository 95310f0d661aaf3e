"""AdamW on a weight of two FP8 tensors with 8-bit moments, in one pass and in place."""
