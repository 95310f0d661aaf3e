"""Models to train and measure with: a GPT, a Llama, an MLP, and the training
command.
"""

from typing import Literal

BYTES = 256  # number of tokens of plain text
ComputeDtype = Literal["float32", "bfloat16"]  # dtypes of activations
