"""Values that a block of a Llama keeps for its backward pass, by name."""

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal

import jax

from tcfp_jax.products.annotations import ACTIVATION_NAME

Copies = Literal["exact", "fp8"]

# Values that remat="products" keeps: inputs of the backward pass that only a product
# could make again.
KEPT_NAMES = ("query", "key", "value", "attended", "attention_residual", "gate", "up")
# The order in which values are worth their bytes: a byte of attention saves most.
# Products of one contraction save equally much for each byte, so small results come
# first; of gate and up a byte is kept instead of two. With "block" there are seven
# levels, of which at most four are compiled. "none" is not among them: a scan then
# stacks the float32 values of norms and activations, too (llama-1b on an H100: 261 ms
# instead of 236).
_ORDER: dict[Copies, tuple[str, ...]] = {
    "exact": ("attended", "key+value", "query", "attention_residual", "gate", "up"),
    "fp8": (
        "attended",
        "gate_fp8",
        "up_fp8",
        "key+value+query",
        "attention_residual",
        ACTIVATION_NAME,
    ),
}
CHOICE = "chosen_experts"  # logits and choices of a router
# Flash attention returns sums without a name that its backward pass needs, so it is
# known by its primitive.
FLASH_FORWARD = "dot_product_attention_fwd_wrapper"


def check_remat(remat: str) -> None:
    """Raise `ValueError` if `LlamaConfig.remat` knows no such value."""
    known = {*KEPT_NAMES, *"+".join(_ORDER["fp8"]).split("+")}
    if remat != "none" and kept_names(remat) - known:
        raise ValueError(
            f"remat={remat!r} is unknown; use 'none', 'block', 'products', 'auto', or"
            f" some of {sorted(known)} joined by '+'"
        )


def kept_names(remat: str) -> set[str]:
    """Return the names of the values that a block keeps; "none" keeps all values, with
    and without a name.

    >>> sorted(kept_names("gate_fp8+attended")), kept_names("block")
    (['attended', 'gate_fp8'], set())
    """
    return {"block": set(), "auto": set(), "products": set(KEPT_NAMES)}.get(
        remat, set(remat.split("+"))
    )


def kept_of_head(remat: str) -> Literal["inputs", "logits"]:
    """Return the values that the loss keeps: the logits if every product is kept."""
    return (
        "logits"
        if remat == "none" or kept_names(remat).issuperset(KEPT_NAMES)
        else "inputs"
    )


def remat_levels(copies: Copies) -> list[str]:
    """Return values of `LlamaConfig.remat` for "auto", in the order of the bytes that
    they keep.

    Args:
      copies: "exact" keeps equal values, so that all levels have the same gradients.
        "fp8" keeps gate and up in FP8, and the inputs that products quantized.

    >>> remat_levels("fp8")[:3]
    ['block', 'attended', 'attended+gate_fp8']
    """
    return ["block", *accumulate(_ORDER[copies], "{}+{}".format)]


@functools.cache
def policy(names: frozenset[str]) -> Callable[..., bool]:
    """Return the policy of a remat that keeps values by name, and the result of flash
    attention as "attended".

    It always keeps the logits and choices of routers, which few bytes hold: computed
    again, a tie may end another way.
    """
    named = jax.checkpoint_policies.save_only_these_names(*names, CHOICE)

    def keeps(primitive: Any, *args: Any, **params: Any) -> bool:
        is_flash = primitive.name == FLASH_FORWARD and "attended" in names
        return is_flash or named(primitive, *args, **params)

    return keeps
