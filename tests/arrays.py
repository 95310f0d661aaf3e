"""The former name of `tests.helpers`."""

from tests.helpers import filled, nnx_model, variables_of
from tests.helpers import same_bits as same

__all__ = ["filled", "nnx_model", "same", "variables_of"]
