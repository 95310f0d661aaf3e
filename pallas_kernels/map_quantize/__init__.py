"""Results of an elementwise expression as FP8 values with their scales, without writing them in between."""
