"""Models as other libraries multiply them, to measure next to ours: Flax's own FP8, and
Google's qwix.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import fp8_ops

FLAX, QWIX = "flax Fp8DirectDotGeneralOp", "qwix"
PEERS = (FLAX, QWIX)


def is_installed(name: str) -> bool:
    """Return whether a candidate can run here; print the reason if not."""
    found = name != QWIX or importlib.util.find_spec(QWIX) is not None
    if not found:
        print("qwix is not installed (pip install qwix), so its row is missing")
    return found


def quantized(name: str, make: Callable[..., nn.Module]) -> Any:
    """Return the model of `make(dot_general_cls)` as this peer multiplies; other names
    leave it unchanged.
    """
    model = make(fp8_ops.Fp8DirectDotGeneralOp if name == FLAX else None)
    if name != QWIX:
        return model
    import qwix

    # E4M3 forward and E5M2 gradients, with a fresh scale for each tensor at every use.
    rule = qwix.QtRule(
        op_names=("dot_general",),
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        disable_channelwise_axes=True,
    )
    return qwix.quantize_model(model, qwix.QtProvider([rule]))
