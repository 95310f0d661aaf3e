"""Where modules of the first edition went: importing one raises, and says its new name. Gone after one release."""

import importlib.abc
import sys
from typing import Any

_FORMATS = (
    "casting", "cast_kernel", "codebook_search", "codes", "float_bits", "packing", "parts", "rotation", "scale_choice",
    "sparsity", "tiles",
)  # fmt: skip
_CONVERSION = ("census", "policy", "report")
_ENGINE = ("interception", "registry", "replacement", "tracing")
MODULES = {
    "tcfp_jax.recipe": "tcfp_jax.recipes",
    "tcfp_jax.adapters": "tcfp_jax.layers (forward passes); no adapters are needed",
    "tcfp_jax.blocks": "tcfp_jax.weights.stored (Stored) and pallas_kernels.operands (Operand)",
    "tcfp_jax.quantization": "tcfp_jax.weights.quantization, and its classes are pallas_kernels.operands.Operand and "
    "tcfp_jax.weights.stored.Stored",
    "tcfp_jax.layout": "tcfp_jax.weights.layout",
    "tcfp_jax.scaling": "tcfp_jax.weights.delayed",
    "tcfp_jax.tcfp12": "tcfp_jax.weights.packed",
    "tcfp_jax.gemm": "tcfp_jax.products.layer",
    "tcfp_jax.contraction": "tcfp_jax.products.contraction",
    "tcfp_jax.selection": "tcfp_jax.explanation",
    "tcfp_jax.diagnosis": "tcfp_jax.conversion, which has diagnose",
    "pallas_kernels.blocks": "pallas_kernels.scaling (Block)",
    "pallas_kernels.block_quantize": "pallas_kernels.quantize (scaling=Block(size, tile))",
    "pallas_kernels.row_quantize": "pallas_kernels.quantize (scaling=Row())",
    "pallas_kernels.block_dual_quantize": "pallas_kernels.dual_quantize (scaling=Block(size, tile))",
    "pallas_kernels.block_matmul": "pallas_kernels.matmul and pallas_kernels.skip_matmul",
    **{f"tcfp_jax.{name}": f"tcfp_jax.formats.{name}" for name in _FORMATS},
    **{f"tcfp_jax.{name}": f"tcfp_jax.conversion.{name}" for name in _CONVERSION},
    **{f"tcfp_jax.{name}": "tcfp_jax.conversion.transform, which needs none" for name in _ENGINE},
}


class _Finder(importlib.abc.MetaPathFinder):
    """Asked after all others, so only for modules that are not there."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname in MODULES:
            message = f"{fullname} is {MODULES[fullname]} since version 0.2.0; the changelog has the table"
            raise ModuleNotFoundError(message, name=fullname)
        return None


def install() -> None:
    """Let imports of modules that moved say where they went.

    >>> install()
    >>> import tcfp_jax.gemm
    Traceback (most recent call last):
    ModuleNotFoundError: tcfp_jax.gemm is tcfp_jax.products.layer since version 0.2.0; the changelog has the table
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
