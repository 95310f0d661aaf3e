"""What a layer multiplies: the product with its backward pass, einsums as products, and what runs them."""
