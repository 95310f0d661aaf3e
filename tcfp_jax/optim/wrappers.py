"""Transformations of optax that cannot hold one that sees stored weights.

Their own errors come with the first update and speak of unequal trees. An `init` can
tell earlier, by the function of optax that calls it.
"""

import sys
import traceback

import jax
import optax

from tcfp_jax.paths import PyTree
from tcfp_jax.weights.parameter import is_quantized

_STEPS = optax.MultiSteps.init.__code__
_FINITE = optax.apply_if_finite(optax.identity(), 1).init.__code__


def check_wrappers(params: PyTree, *, rewrites: bool) -> None:
    """Raise a ValueError if a transformation of optax that takes float updates alone
    makes the state of stored weights.

    Args:
      params: the parameters that `init` got.
      rewrites: whether updates are new weights instead of floats.
    """
    if not any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        return
    callers = {frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())}
    if _STEPS in callers:
        raise ValueError(
            "optax.MultiSteps sums gradients in arrays like the parameters, and stored"
            " weights are not arrays; put it inside: write"
            " tcfp_jax.optim.on_stored(optax.MultiSteps(...))"
        )
    if rewrites and _FINITE in callers:
        raise ValueError(
            "optax.apply_if_finite chooses between float updates, and adamw returns new"
            " weights; leave it out, because adamw skips a step that is not finite"
            " (opt_state.skipped), or write"
            " tcfp_jax.optim.on_stored(optax.apply_if_finite(...))"
        )
