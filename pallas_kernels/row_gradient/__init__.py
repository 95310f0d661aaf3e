"""The backward pass of a function of rows, such as a norm, in one pass over memory."""
