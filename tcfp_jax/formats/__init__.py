"""Number formats: numbers, scales and datatypes as data, casts, storage, a catalog.

`datatype(number, scale)` describes a format. `cast(x, datatype)` gives x the values
that the format can hold, and `pack(x, datatype)` stores x in the format's bits.
`quantize_nvfp4(x)` stores it in arrays that products read. Every name of the catalog is
an attribute: `formats.mxfp4e2`, `formats.nvfp4`. The package imports nothing of
training, so its casts and the quantizers of `pallas_kernels` check each other in tests.

The modules have plural names (`numbers`, `scales`, `datatypes`) because `number`,
`scale` and `datatype` are functions.

>>> import jax.numpy as jnp
>>> cast(jnp.array([1.0, -0.3, 0.07]), datatype("e2m1f", "e8m0")).tolist()
[1.0, -0.25, 0.125]

Left out: fast products. A cast is a simulation, and a product of casts runs in the
dtype of its arrays. For products on tensor cores use a recipe of `tcfp_jax.recipes`, or
`tcfp_jax.quantize` and `tcfp_jax.matmul`. Scales do not adapt over steps, and no
calibration is here; `tcfp_jax.inference` searches scales and codes of FP4 weights.
"""

from tcfp_jax.formats.casting import cast
from tcfp_jax.formats.catalog import CATALOG
from tcfp_jax.formats.codebooks import CodebookSpec, codebook
from tcfp_jax.formats.datatypes import DataType, datatype
from tcfp_jax.formats.numbers import NumberSpec, number
from tcfp_jax.formats.nvfp4_arrays import Nvfp4, quantize_nvfp4
from tcfp_jax.formats.packing import PackedArray, pack, unpack
from tcfp_jax.formats.rotation import rotate
from tcfp_jax.formats.scale_rules import exact_share
from tcfp_jax.formats.scales import ScaleSpec, scale
from tcfp_jax.formats.sparsity import sparse

__all__ = [
    "CATALOG",
    "CodebookSpec",
    "DataType",
    "NumberSpec",
    "Nvfp4",
    "PackedArray",
    "ScaleSpec",
    "cast",
    "codebook",
    "datatype",
    "exact_share",
    "number",
    "pack",
    "quantize_nvfp4",
    "rotate",
    "scale",
    "sparse",
    "unpack",
]


def __getattr__(name: str) -> DataType:
    if name in CATALOG:
        return CATALOG[name]
    raise AttributeError(
        f"tcfp_jax.formats has no {name!r}; `python -m tcfp_jax.formats` lists the"
        " catalog"
    )


def __dir__() -> list[str]:
    return sorted({*__all__, *CATALOG})
