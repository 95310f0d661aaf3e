"""Products that leave out what is zero of a residual weight."""
