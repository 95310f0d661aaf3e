"""Training of a network: settings, data, steps, runs, and their checkpoints."""
