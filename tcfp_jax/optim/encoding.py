"""An optimizer's moment in its format: encode, decode, and the arrays in a state.

    "float8_e4m3fn"   first moments: E4M3, with one E8M0 scale for each 128 values
    "ue5m3"           second moments: 5 bits of exponent, 3 of mantissa, no sign, and
                      one offset for each 128 values
    "bfloat16"        either
    "float32"         either; nothing is rounded

Formats narrower than float32 round stochastically. Rounding to nearest would freeze an
average whose decay is near 1: each step moves it by less than half a spacing. The
random bits of a value are a hash of (key, step, leaf, global index), so a state has the
same bits on every mesh. `pallas_kernels.moments` defines the 8-bit codes; this module
adds arrays with any number of axes, and meshes.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_kernels import counter
from pallas_kernels import moments as codes
from pallas_kernels.specs import Shape, sharding_of
from tcfp_jax.formats.casting import check_key
from tcfp_jax.paths import PyTree, find, named_leaves, put
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.placement import Placement

Format = Literal["float32", "bfloat16", "float8_e4m3fn", "ue5m3"]
Keys: TypeAlias = tuple[Array, Array]  # two words for the counter hash
Scales: TypeAlias = dict[str, PyTree]  # of 8-bit moments, in nested dicts by name

_SMALLEST = 4096  # a leaf with fewer values keeps float32: it has little to save


class Blocks(NamedTuple):
    """A moment in eight bits; a state keeps its two arrays apart, see `kept`.

    Attributes:
      values: the codes, in the moment's shape: float8_e4m3fn, or uint8 for "ue5m3".
      scale: one scale for each block of 128 along the last axis of `_blocked_shape`:
        float8_e8m0fnu, or uint8.
    """

    values: Array
    scale: Array


Moment: TypeAlias = Array | Blocks


def zeros(form: Format, like: Array) -> Moment:
    """Return a moment of zeros with the shape and sharding of `like`.

    The result equals `encode` of zeros. XLA would compute that at compile time, which
    takes seconds for each weight.
    """
    if form in ("float32", "bfloat16"):
        return jnp.zeros_like(like, dtype=form)
    return _zeros(form, jnp.zeros_like(like, dtype=jnp.uint8))


def check_moment(name: str, form: Format, x: Array) -> None:
    """Raise a ValueError if `x` is known to be sharded through blocks of its moment."""
    parts = Placement.known(name, x)
    if parts is not None and form in ("float8_e4m3fn", "ue5m3"):
        block_parts(parts)


def _blocked_axes(shape: Shape) -> list[list[int]]:
    """Return the axes that merge into each axis of blocks.

    Trailing axes merge until they hold a block's values.

    >>> _blocked_axes((512, 12, 64)), _blocked_axes((64, 200))
    ([[0], [1, 2]], [[0], [1]])
    """
    first = len(shape) - 1
    while first > 0 and math.prod(shape[first:]) < codes.BLOCK:
        first -= 1
    return [*([axis] for axis in range(first)), [*range(first, len(shape))]]


def _blocked_shape(shape: Shape) -> Shape:
    """Return the shape whose last axis is cut into blocks.

    >>> _blocked_shape((512, 12, 64)), _blocked_shape((64, 64))
    ((512, 768), (4096,))
    """
    first = len(_blocked_axes(shape)) - 1
    return (*shape[:first], math.prod(shape[first:]))


def block_parts(values: Placement) -> Placement:
    """Return the placement of the scales of an 8-bit moment, given that of its values.

    Raises:
      ValueError: the mesh cuts a block.
    """
    reason = ", whose 8-bit moments have blocks that run on over short rows,"
    blocked = replace(values, name=values.name + reason)
    blocked = replace(blocked.merged(_blocked_axes(values.shape)), name=values.name)
    sizes = (*[1] * (len(blocked.shape) - 1), codes.BLOCK)
    repair = 'moments of another format (moments="bfloat16") for it'
    return blocked.counted(sizes, repair)


# A model has hundreds of moments and a few shapes: jitted functions are traced and
# lowered once for each shape.
@functools.partial(jax.jit, static_argnums=0)
def encode(form: Format, x: Array, keys: Keys | None) -> Moment:
    """Return a float32 moment in its format, rounded by the random bits of `keys`."""
    if form == "float32":
        return x
    assert keys is not None, "checked_key asked for it"
    hashed = counter.bits_of(x.shape, *keys)
    x = x.astype(jnp.float32)
    if form == "bfloat16":
        return _to_bfloat16(x, hashed)
    in_blocks = functools.partial(_in_blocks, form)
    return _under_mesh(in_blocks, x, makes_blocks=True)(x, hashed)


@jax.jit
def decode(x: Moment) -> Array:
    """Return a moment in float32."""
    if not isinstance(x, Blocks):
        return x.astype(jnp.float32)
    return _under_mesh(_of_blocks, x.values, makes_blocks=False)(x)


@functools.partial(jax.jit, static_argnums=0)
def _zeros(form: Format, values: Array) -> Blocks:
    in_blocks = functools.partial(_zeros_in_blocks, form)
    return _under_mesh(in_blocks, values, makes_blocks=True)(values)


def _in_blocks(form: Format, x: Array, hashed: Array) -> Blocks:
    shape = _blocked_shape(x.shape)
    if form == "ue5m3":
        # "ue5m3" has no sign. A negative value shows that the field holds no second
        # moment, so its block becomes NaN.
        x = jnp.where(x < 0, jnp.float32(jnp.nan), x)
    code = codes.encode_v if form == "ue5m3" else codes.encode_m
    values, scale = code(x.reshape(shape), hashed.reshape(shape))
    return Blocks(values.reshape(x.shape), scale)


def _of_blocks(x: Blocks) -> Array:
    values = x.values.reshape(_blocked_shape(x.values.shape))
    code = codes.decode_v if values.dtype == jnp.uint8 else codes.decode_m
    return code(values, x.scale).reshape(x.values.shape)


def _zeros_in_blocks(form: Format, values: Array) -> Blocks:
    # Take one code of each block, so that scales are sharded as the values are. Zeros
    # have base 0 in v, scale 1 in m.
    blocked = values.reshape(_blocked_shape(values.shape))
    scale = blocked[..., :: codes.BLOCK]
    if form == "ue5m3":
        return Blocks(values, scale)
    m = lax.bitcast_convert_type(values, codes.E4M3)
    one = scale + jnp.uint8(127)
    return Blocks(m, lax.bitcast_convert_type(one, codes.SCALE_DTYPE))


def _under_mesh(
    function: Callable[..., Any], x: Array, *, makes_blocks: bool
) -> Callable[..., Any]:
    """Return `function`, which reshapes to blocks, for a mesh with explicit axes.

    Its results are sharded as `x`. JAX's sharding types cannot follow an axis into
    blocks and back. XLA can, so the axes are automatic inside.
    """
    given = sharding_of(x)
    if given is None:
        return function
    parts = Placement.of("a moment", x.shape, given)
    out: PyTree = parts.sharding
    if makes_blocks:
        scale: PyTree = block_parts(parts).sharding
        out = Blocks(out, scale)
    return jax.sharding.auto_axes(function, out_sharding=out)


def _to_bfloat16(x: Array, hashed: Array) -> Array:
    """Round float32 stochastically to bfloat16.

    An inf or NaN stays, and no finite value becomes infinite.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    largest = np.float32(jnp.finfo(jnp.bfloat16).max)
    # Neighbours are 2**16 apart in the bits, on both sides of zero and of each power of
    # two.
    upper = (bits + (hashed >> 16)) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(upper, jnp.float32)
    finite = jnp.clip(rounded, -largest, largest)
    # The value is a bfloat16 number already, so the cast rounds nothing, even if XLA
    # deletes it.
    return jnp.where(jnp.isfinite(x), finite, x).astype(jnp.bfloat16)


def kept(moment: Moment, names: list[str], scales: Scales) -> Array:
    """Return the array that a state keeps, and put scales of blocks into `scales`.

    Two arrays in one place do not work: a holder of boxed parameters such as
    `nnx.Optimizer` takes them apart.
    """
    if not isinstance(moment, Blocks):
        return moment
    put(scales, names or ["parameter"], moment.scale)
    return moment.values


def found(values: Array, names: list[str], scales: Scales) -> Moment:
    """Undo `kept`: return the moment, which has scales if it has eight bits."""
    scale = find(scales, names or ["parameter"])
    return values if scale is None else Blocks(values, scale)


def by_name(entries: Scales, params: PyTree) -> PyTree:
    """Return the nested dicts of a state, or one number if there are no parameters.

    `optax.tree.map_params` compares a state with the state of no parameters. Dicts that
    are empty in one and full in the other would be two structures, but a leaf matches
    any subtree.
    """
    return entries if jax.tree.leaves(params) else jnp.zeros((), jnp.int32)


def narrow_leaves(
    params: PyTree, mask: PyTree | Callable[[PyTree], PyTree] = None
) -> list[bool]:
    """Return for each parameter, float or stored, whether its moments may be narrow.

    Only its path and its global shape decide. `mask` chooses those that may: a tree of
    bools, or a function of `params` that returns one. Float tables may not.

    >>> table = jnp.ones((64, 64))
    >>> narrow_leaves({"embed": table, "kernel": table, "scale": jnp.ones(4096)})
    [False, True, False]
    """
    leaves, _ = named_leaves(params, is_quantized)
    allowed = spread(mask, params)
    narrow = []
    for (names, leaf), may in zip(leaves, allowed, strict=True):
        shape = np.shape(leaf)
        is_large = len(shape) >= 2 and math.prod(shape) >= _SMALLEST
        is_table = "embed" in "/".join(names).lower() and not is_quantized(leaf)
        narrow.append(may and is_large and not is_table)
    return narrow


def spread(mask: PyTree | Callable[[PyTree], PyTree], params: PyTree) -> list[bool]:
    """Return one value of a mask for each parameter; None means all of them.

    The mask may be a function of the parameters.
    """
    tree = mask(params) if callable(mask) else mask
    if mask is None:
        tree = True
    every: list[bool] = []

    def add(keep: bool, part: PyTree) -> None:
        count = len(jax.tree.leaves(part, is_leaf=is_quantized))
        every.extend([bool(keep)] * count)

    try:
        jax.tree.map(add, tree, params)
    except ValueError as error:
        raise ValueError(
            "mask must be a tree of bools for the parameters or for whole branches of"
            " them, or a function that returns one, but its structure is another:"
            f" {error}"
        ) from error
    count = len(jax.tree.leaves(params, is_leaf=is_quantized))
    if len(every) != count:
        raise ValueError(
            f"mask has {len(every)} values for {count} parameters, because it was"
            " mapped over the arrays of stored weights; map over"
            " tcfp_jax.dequantize(params), or pass a function of the parameters"
        )
    return every


def checked_key(
    name: str, key: Array | None, rounds: bool, setting: str
) -> Array | None:
    """Return the uint32 words of a random key, or None if nothing is rounded.

    Raises:
      ValueError: the key is missing, or would not be used.
    """
    if key is None and rounds:
        raise ValueError(
            f"{setting} rounds moments stochastically, but there is no key; use"
            f" {name}(..., key=jax.random.key(seed))"
        )
    if key is None:
        return None
    check_key(key)
    if not rounds:
        raise ValueError(
            f"{setting} rounds nothing, but key= is given and would not be used; drop"
            " the key"
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return key.astype(jnp.uint32).reshape(-1)


def stream(key: Array | None, *words: ArrayLike) -> Keys | None:
    """Return the keys of the counter hash for integers such as a step and a leaf.

    None without a key.
    """
    if key is None:
        return None
    seed = [key[i] for i in range(key.shape[0])]
    return counter.keys(*seed, *words)
