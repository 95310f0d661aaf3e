"""A moment in its format: encoded and decoded, and how the scales of its blocks lie on a mesh.

Codes are those of `pallas_kernels.moments`; here are the arrays of a state, of any number of axes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import counter
from pallas_kernels import moments as codes
from tcfp_jax.weights.parts import Parts, explicit_parts, known_parts, neighbours

Format = Literal["float32", "bfloat16", "float8_e4m3fn", "ue5m3"]


class Blocks(NamedTuple):
    """A moment in eight bits; states keep its two arrays apart, see `kept`.

    Attributes:
      values: of the moment's shape: float8_e4m3fn, or uint8 codes of "ue5m3".
      scale: one for each block of 128 along the last axis (`blocked_shape`): float8_e8m0fnu, or uint8.
    """

    values: jax.Array
    scale: jax.Array


def encode(form: Format, x: Any, keys: tuple[jax.Array, jax.Array] | None) -> Any:
    """A moment in its format, rounded by the bits of these keys."""
    if form == "float32":
        return x
    assert keys is not None, "checked_key asked for it"
    return _encode(form, x, *keys)


def check_moment(name: str, form: Format, x: jax.Array) -> None:
    """Raise where it is known that a mesh cuts a block of a moment of this format.

    Raises:
      ValueError: it does.
    """
    parts = known_parts(name, x) if form in ("float8_e4m3fn", "ue5m3") else None
    if parts is not None:
        block_parts(parts)


def zeros(form: Format, like: jax.Array) -> Any:
    """A moment of zeros, of the shape and sharding of `like`: what `encode` makes of them, without rounding them.

    XLA would do that while it compiles, for seconds a weight.
    """
    if form in ("float32", "bfloat16"):
        return jnp.zeros_like(like, dtype=form)
    return _zeros(form, jnp.zeros_like(like, dtype=jnp.uint8))


@functools.partial(jax.jit, static_argnums=0)
def _zeros(form: Format, values: jax.Array) -> Blocks:
    return _under_mesh(functools.partial(_zeros_in_blocks, form), values, like=Blocks)(values)


def _zeros_in_blocks(form: Format, values: jax.Array) -> Blocks:
    # One code of each block, so that scales are sharded as the values are: v's byte of zeros is 0, m's scale is 1.
    scale = values.reshape(blocked_shape(values.shape))[..., :: codes.BLOCK]
    if form == "ue5m3":
        return Blocks(values, scale)
    as_type = functools.partial(lax.bitcast_convert_type, new_dtype=codes.E4M3)
    return Blocks(as_type(values), lax.bitcast_convert_type(scale + jnp.uint8(127), codes.SCALE_DTYPE))


def decode(form: Format, x: Any) -> Any:
    """A moment in float32."""
    return x if form == "float32" else _decode(x)


def blocked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape whose last axis is cut into blocks: trailing axes are merged until they hold a block's values.

    >>> blocked_shape((512, 12, 64)), blocked_shape((64, 64)), blocked_shape((64, 200))
    ((512, 768), (4096,), (64, 200))
    """
    *leading, last = shape
    while leading and last < codes.BLOCK:
        last *= leading.pop()
    return (*leading, last)


def block_parts(values: Parts) -> Parts:
    """How the scales of an 8-bit moment lie on a mesh, from how its values do.

    Raises:
      ValueError: a block is cut.
    """
    runs = neighbours(values.shape, blocked_shape(values.shape))
    assert runs is not None, "blocked_shape merges neighbours"
    blocked = values.merged(runs)
    sizes = (*[1] * (len(blocked.shape) - 1), codes.BLOCK)
    return blocked.counted(sizes, 'moments of another format (moments="bfloat16") for it')


# One traced and lowered function for all moments of a shape and format: a model has hundreds and a few shapes.
@functools.partial(jax.jit, static_argnums=0)
def _encode(form: Format, x: jax.Array, k0: jax.Array, k1: jax.Array) -> Any:
    hashed = counter.bits_of(x.shape, k0, k1)
    x = x.astype(jnp.float32)
    if form == "bfloat16":
        return _to_bfloat16(x, hashed)
    return _under_mesh(functools.partial(_in_blocks, form), x, like=Blocks)(x, hashed)


def _in_blocks(form: Format, x: jax.Array, hashed: jax.Array) -> Blocks:
    shape = blocked_shape(x.shape)
    if form == "ue5m3":
        # There is no code for a sign: a field whose values have one is no second moment, and must not pass for one.
        x = jnp.where(x < 0, jnp.float32(jnp.nan), x)
    code: Any = codes.encode_v if form == "ue5m3" else codes.encode_m
    values, scale = code(x.reshape(shape), hashed.reshape(shape))
    return Blocks(values.reshape(x.shape), scale)


@jax.jit
def _decode(x: Any) -> jax.Array:
    return _under_mesh(_of_blocks, x.values)(x) if isinstance(x, Blocks) else x.astype(jnp.float32)


def _of_blocks(x: Blocks) -> jax.Array:
    values = x.values.reshape(blocked_shape(x.values.shape))
    code: Any = codes.decode_v if values.dtype == jnp.uint8 else codes.decode_m
    return code(values, x.scale).reshape(x.values.shape)


def _under_mesh(function: Callable[..., Any], x: jax.Array, like: Any = None) -> Callable[..., Any]:
    """`function`, which reshapes to blocks, where the mesh has explicit axes; results lie as x and its blocks do.

    No rule of types follows an axis into blocks and back. XLA does, so the axes are automatic inside.
    """
    parts = explicit_parts("a moment", x)
    if parts is None:
        return function
    whole: Any = parts.sharding
    return jax.sharding.auto_axes(
        function, out_sharding=whole if like is None else like(whole, block_parts(parts).sharding)
    )


def _to_bfloat16(x: jax.Array, hashed: jax.Array) -> jax.Array:
    """Float32 rounded stochastically to bfloat16; what is not finite stays, and nothing finite becomes infinite."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    largest = np.float32(jnp.finfo(jnp.bfloat16).max)
    # Neighbours are 2**16 apart in the bits, on both sides of zero and of each power of two.
    rounded = lax.bitcast_convert_type((bits + (hashed >> 16)) & jnp.uint32(0xFFFF0000), jnp.float32)
    finite = jnp.clip(rounded, -largest, largest)
    # The value is bfloat16's already, so the cast rounds nothing, also where XLA deletes it.
    return jnp.where(jnp.isfinite(x), finite, x).astype(jnp.bfloat16)
