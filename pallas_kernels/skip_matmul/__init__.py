"""Products of residual weights without the blocks of the residual that are zero."""
