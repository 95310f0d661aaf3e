"""`fp4_matmul`: activations times a weight of E2M1 codes."""
