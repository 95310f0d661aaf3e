"""Conversion of existing models: convert, see what happened, switch layers, go back.

    # Linen: a new model; NNX: in place
    model = convert_to_tcfp(model, "tcfp12_fast", tokens)
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(model)))
    # Linen; for NNX use tcfp_jax.nnx.Optimizer
    model.apply({"params": params, "tcfp": layer_state(opt_state)}, tokens)

Parameters keep their names, shapes and values: a float checkpoint loads before and
after.
"""

from tcfp_jax.conversion.convert import (
    convert_to_tcfp,
    detach,
    export,
    find_weights,
    survey,
)
from tcfp_jax.conversion.diagnosis import diagnose
from tcfp_jax.conversion.policy import last_blocks
from tcfp_jax.conversion.switch import restore, to_bf16

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
