"""Models to train and measure with, and the training command."""
