"""Models to train and measure with: a GPT on bytes, an MLP, and the training command."""
