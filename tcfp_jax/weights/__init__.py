"""What a stored weight is: its quantized tensors, their layout, and the packed format."""
