"""Models to train and measure with, and the training command."""

from .extras import require

require("train", "jinja2", "orbax", "safetensors", "tokenizers", "tqdm")
