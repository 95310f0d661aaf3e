"""E2M1 codes, two a byte: the values of `Fp4` weights, NVFP4 and MXFP4.

    x ~ E2M1[code] * scale * outer    NVFP4
    x ~ E2M1[code] * scale            MXFP4 (OCP MX, 2023)

In NVFP4 16 values share an E4M3 scale, and the matrix a float32 `outer`. In MXFP4 32
values share a power of two, E8M0.

Byte j of a row holds code 2j in its low half and code 2j + 1 in its high half, as in
files of compressed-tensors. E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times
an E4M3 scale has at most 6 significant bits, so `code * scale` is a bfloat16 number,
and so is a code times a power of two. Products of these weights lose nothing beyond the
quantization. The format library finds the scales.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import numerics
from pallas_kernels.specs import regrouped

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The value of each code: the sign is the highest of four bits.
E2M1 = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)


def pack(codes: Array) -> Array:
    """Pack codes 0 to 15, `[..., k]`, two a byte: `[..., k / 2]`.

    Raises:
      ValueError: k is odd.

    >>> pack(jnp.array([1, 2, 3, 15], jnp.uint8)).tolist()
    [33, 243]
    """
    if codes.shape[-1] % 2:
        raise ValueError(
            f"k={codes.shape[-1]} codes do not fill whole bytes; pad k with a code 0 to"
            " an even number"
        )
    codes = codes.astype(jnp.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Array) -> Array:
    """Return the codes 0 to 15 of bytes `[..., k / 2]`, uint8 `[..., k]`.

    >>> unpack(pack(jnp.array([1, 2, 3, 15], jnp.uint8))).tolist()
    [1, 2, 3, 15]
    """
    both = jnp.stack([packed & 15, packed >> 4], axis=-1)
    groups = [[size] for size in packed.shape]
    groups[-1].append(2)
    return regrouped(both, groups)


def numbers(codes: Array) -> Array:
    """Return the E2M1 numbers of codes 0 to 15, float32.

    >>> numbers(jnp.array([1, 7, 15], jnp.uint8)).tolist()
    [0.5, 6.0, -6.0]
    """
    code = codes.astype(jnp.int32)
    exponent = (code >> 1) & 3
    half = code & 1
    # 0 and 0.5 are E2M1's subnormals. Bit work, because a table would cost a gather for
    # every value.
    normal = ((exponent + 126) << 23) | (half << 22)
    magnitude = jnp.where(exponent == 0, half * (126 << 23), normal)
    sign = (code >> 3) << 31
    return numerics.from_bits(magnitude | sign)
