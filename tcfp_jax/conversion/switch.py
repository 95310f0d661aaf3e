"""Switch layers of a converted model off and on: `to_bf16` and `restore`."""

import dataclasses
from typing import Any, TypeVar

from flax import nnx as flax_nnx

from tcfp_jax import paths
from tcfp_jax.conversion import linen_models, nnx_models, nnx_modules
from tcfp_jax.conversion.convert import linen_conversion
from tcfp_jax.conversion.policy import Policy, finds, finds_any
from tcfp_jax.conversion.report import Examined
from tcfp_jax.conversion.transform import Transformed

_Model = TypeVar("_Model")


def to_bf16(model: _Model, *patterns: str) -> _Model:
    """Let the layers that a pattern finds run the model's own code until `restore`.

    Use this to find the layer that a recipe harms. The patterns are matched against
    paths, and the layers run in their own dtype. Linen models and functions are
    returned anew, an NNX model changes in place; state and parameters do not change.
    Models written with this library's layers are switched in the same way.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: no pattern, one that is not a regex, or one that finds no product (if
        there were sample inputs).

    >>> import jax
    >>> from flax import linen as nn
    >>> from tcfp_jax.conversion import convert_to_tcfp
    >>> low = convert_to_tcfp(nn.Dense(4), "tcfp12", include=("linear", "small"))
    >>> model = to_bf16(low, "")
    >>> x = jax.numpy.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> bool((model.apply(variables, x) == nn.Dense(4).apply(variables, x)).all())
    True
    """
    return _switch(model, patterns, off=True)


def restore(model: _Model, *patterns: str) -> _Model:
    """Undo `to_bf16` for the patterns that were given to it.

    Use this if switching a layer off did not help.

    Raises:
      TypeError: neither a Flax module nor from `transform`.
      ValueError: no pattern, one that is not a regex, or one that was not switched off.

    >>> from flax import linen as nn
    >>> from tcfp_jax.conversion import convert_to_tcfp
    >>> model = to_bf16(convert_to_tcfp(nn.Dense(4), "tcfp12"), "mlp")
    >>> linen_models.conversion_of(restore(model, "mlp")).policy.off
    ()
    """
    return _switch(model, patterns, off=False)


def _switch(model: Any, patterns: tuple[str, ...], *, off: bool) -> Any:
    if not patterns:
        raise ValueError(
            'name layers by patterns over their paths, such as "block_0/.*"; "" is all'
            " of them"
        )
    for pattern in patterns:
        finds(pattern, "")  # raises for one that is not a regular expression
    if isinstance(model, Transformed):
        chosen = _switched(model.policy, patterns, None, off=off)
        return dataclasses.replace(model, policy=chosen)
    if isinstance(model, flax_nnx.Module):
        _switch_nnx(model, patterns, off=off)
        return model
    base, conversion = linen_conversion(model)
    found = conversion.found
    chosen = _switched(conversion.policy, patterns, found, off=off)
    found = None if found is None else found.by(chosen)
    return linen_models.converted(
        base, dataclasses.replace(conversion, policy=chosen, found=found)
    )


def _switch_nnx(
    model: flax_nnx.Module, patterns: tuple[str, ...], *, off: bool
) -> None:
    chosen = nnx_modules.conversion_of(model)
    products = "flax" if off else "recipe"
    own: dict[str, Any] = {}
    for path, module in nnx_modules.modules_of(model).items():
        if hasattr(module, "products"):
            own[paths.join(path, "kernel")] = module
    by_hand = []
    for pattern in patterns:
        layers = [layer for path, layer in own.items() if finds(pattern, path)]
        if any(layer.products != products for layer in layers):
            by_hand += layers
        elif chosen is None:
            state = "switched off" if off else "on"
            raise ValueError(
                f"{pattern!r} finds no low-precision layer that is not {state} already"
            )
    if chosen is not None:
        sample = nnx_models.sample_of(model)
        found = None
        if sample is not None:
            found = nnx_models.examine(model, chosen, *sample)
        nnx_models.rename(model, _switched(chosen, patterns, found, off=off))
    for layer in by_hand:
        layer.products = products


def _switched(
    chosen: Policy, patterns: tuple[str, ...], found: Examined | None, *, off: bool
) -> Policy:
    """Return the policy with layers switched off or on again.

    Raises:
      ValueError: a pattern finds no converted product, if these are known, or was not
        switched off.
    """
    if not off:
        for pattern in patterns:
            if pattern not in chosen.off:
                raise ValueError(
                    f"{pattern!r} was not switched off; to_bf16 was given"
                    f" {list(chosen.off)}"
                )
        rest = tuple(pattern for pattern in chosen.off if pattern not in patterns)
        return dataclasses.replace(chosen, off=rest)
    if found is not None:
        converted = [record.weight_path for record in found.report.converted]
        for pattern in patterns:
            if not any(finds_any(pattern, path) for path in converted):
                raise ValueError(
                    f"{pattern!r} finds no low-precision product; survey(model) lists"
                    " them"
                )
    both = dict.fromkeys(chosen.off + patterns)
    return dataclasses.replace(chosen, off=tuple(both))
