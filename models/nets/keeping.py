"""Policy of the values that a block of a Llama keeps for its backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.scaling import AMAX_NAME

CHOICE = "chosen_experts"  # logits and choices of a router
# Flash attention returns sums without a name that its backward pass needs, so it is
# known by its primitive.
FLASH_FORWARD = "dot_product_attention_fwd_wrapper"


@functools.cache
def policy(names: frozenset[str]) -> Callable[..., bool]:
    """Return the policy of a remat that keeps values by name, and the result of flash
    attention as "attended".

    It always keeps the logits and choices of routers, which few bytes hold: computed
    again, a tie may end another way. It keeps the largest magnitudes of quantized
    tensors, too, unless copies in FP8 change them in the backward pass.
    """
    always = {CHOICE}
    if not any(name.endswith("_fp8") for name in names):
        always.add(AMAX_NAME)
    named = jax.checkpoint_policies.save_only_these_names(*names, *always)

    def keeps(primitive: Any, *args: Any, **params: Any) -> bool:
        is_flash = primitive.name == FLASH_FORWARD and "attended" in names
        return is_flash or named(primitive, *args, **params)

    return keeps
