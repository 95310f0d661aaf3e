"""Conversion of existing models: convert, see what happened, switch layers off and on,
take it back.

    model = convert_to_tcfp(model, "tcfp12_fast", tokens)                    # Linen: a new model; NNX: in place
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(model)))
    model.apply({"params": params, "tcfp": layer_state(opt_state)}, tokens)  # Linen; NNX: tcfp_jax.nnx.Optimizer

Parameters keep their names, shapes and values: a float checkpoint loads before and
after.
"""

from tcfp_jax.conversion.convert import (
    convert_to_tcfp,
    detach,
    export,
    find_weights,
    restore,
    survey,
    to_bf16,
)
from tcfp_jax.conversion.diagnosis import diagnose
from tcfp_jax.conversion.policy import last_blocks

__all__ = [
    "convert_to_tcfp",
    "detach",
    "diagnose",
    "export",
    "find_weights",
    "last_blocks",
    "restore",
    "survey",
    "to_bf16",
]
