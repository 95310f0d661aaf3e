"""Small operands, and folders that hold one, for tests of other engines' files."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors as peer

from models.nets.shapes import LlamaConfig
from pallas_kernels.operands import Fp4, Operand
from tcfp_jax.inference import safetensors
from tcfp_jax.inference.compressed_tensors import save_compressed
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.stored import Stored
from tests.formats_oracles import QUICK
from tests.helpers import same_bits

E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
CONFIG = LlamaConfig(
    layers=2, width=64, heads=2, kv_heads=1, hidden=96, context=16, head="untied"
)
NAME = "model.layers.0.mlp.down_proj"
TOKENS = np.arange(8)[None] * 31 % 256


def matrix(n=32, k=64, seed=0, amax=None):
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    return jnp.asarray(w if amax is None else w * np.float32(amax / abs(w).max()))


# A program for each scaling, where every operation would be one.
quick = functools.partial(jax.jit, compiler_options=QUICK)
dequantized = quick(lambda operand: operand.dequantize())
quantized = quick(quantize_fp4, static_argnums=1)


def codes(*shape, scaling=Fp4()):
    """An operand of zeros, which nothing computes."""
    scale = np.ones(scaling.scale_shape(shape), scaling.scale_dtype)
    outer = np.float32(0.5) if scaling.has_outer else None
    return Operand(
        np.zeros((*shape[:-1], shape[-1] // 2), np.uint8),
        scale,
        scaling=scaling,
        outer=outer,
    )


def blank(n):
    return Stored(codes(n, 64), None)


def saved(folder, operand, **options):
    save_compressed(folder, {f"{NAME}.weight": operand}, **options)
    return peer.deserialize((folder / "model.safetensors").read_bytes())


def same_file(folder, other):
    """Equal but for the order of the metadata, which the package leaves open."""
    (arrays, metadata), (others, noted) = (
        safetensors._of_file(one, "model.safetensors") for one in (folder, other)
    )
    return (
        same_bits(dict(arrays), dict(others))
        and list(arrays) == list(others)
        and metadata == noted
    )


def change(folder, changed):
    """The file again, with other arrays."""
    arrays, metadata = safetensors._of_file(folder, "model.safetensors")
    arrays = {name: np.array(array) for name, array in arrays.items()}
    changed(arrays)
    safetensors.write(folder / "model.safetensors", arrays, metadata)
