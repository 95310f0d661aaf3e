"""Products of rows in groups, each with a matrix of its own."""
