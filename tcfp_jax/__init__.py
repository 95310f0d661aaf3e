"""Low-precision training for JAX: FP8 products, Flax layers and optax state.

Every name and submodule loads when it is first read: `import tcfp_jax` takes no time,
and imports no Flax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from tcfp_jax import (  # isort: skip
        conversion,
        formats,
        inference,
        linen,
        losses,
        monitor,
        nnx,
        optim,
        products,
        recipes,
        remat,
        sharding,
        weights,
    )
    from tcfp_jax.conversion.transform import transform
    from tcfp_jax.explanation import explain
    from tcfp_jax.optim.feedback import error_feedback, layer_state
    from tcfp_jax.optim.gradients import grad, value_and_grad
    from tcfp_jax.optim.inside import train_step
    from tcfp_jax.optim.stored import apply_updates, dequantize, store
    from tcfp_jax.products.matmul import matmul
    from tcfp_jax.recipes import Recipe, TCFPMode, recipe
    from tcfp_jax.weights.lookup import lookup
    from tcfp_jax.weights.quantization import quantize, split
    from tcfp_jax.weights.tcfp12 import (
        dequantize_tcfp12,
        fake_quantize,
        quantize_tcfp12,
    )

__version__: str  # of the installed package, read when it is asked for


__all__ = [
    "Recipe",
    "TCFPMode",
    "apply_updates",
    "dequantize",
    "dequantize_tcfp12",
    "error_feedback",
    "explain",
    "fake_quantize",
    "grad",
    "layer_state",
    "lookup",
    "matmul",
    "quantize",
    "quantize_tcfp12",
    "recipe",
    "split",
    "store",
    "train_step",
    "transform",
    "value_and_grad",
]

_SUBMODULES = {
    "conversion",
    "formats",
    "inference",
    "linen",
    "losses",
    "monitor",
    "nnx",
    "optim",
    "products",
    "recipes",
    "remat",
    "sharding",
    "weights",
}
# The submodule that defines each name; the same as above.
_HOMES = {
    "Recipe": "recipes",
    "TCFPMode": "recipes",
    "apply_updates": "optim.stored",
    "dequantize": "optim.stored",
    "dequantize_tcfp12": "weights.tcfp12",
    "error_feedback": "optim.feedback",
    "explain": "explanation",
    "fake_quantize": "weights.tcfp12",
    "grad": "optim.gradients",
    "layer_state": "optim.feedback",
    "lookup": "weights.lookup",
    "matmul": "products.matmul",
    "quantize": "weights.quantization",
    "quantize_tcfp12": "weights.tcfp12",
    "recipe": "recipes",
    "split": "weights.quantization",
    "store": "optim.stored",
    "train_step": "optim.inside",
    "transform": "conversion.transform",
    "value_and_grad": "optim.gradients",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"tcfp_jax.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"tcfp_jax.{_HOMES[name]}"), name)
        globals()[name] = value  # the next read does not come here
        return value
    if name == "__version__":
        from importlib import metadata  # 20 ms that `import tcfp_jax` need not take

        try:
            return metadata.version("tcfp_jax")
        except metadata.PackageNotFoundError:  # a checkout on the path
            return "0+unknown"
    raise AttributeError(
        f"module 'tcfp_jax' has no attribute {name!r}; dir(tcfp_jax) lists its names"
    )


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, "__version__"})
