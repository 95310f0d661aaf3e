"""NVFP4 as matrix products read it: codes two a byte in the order of values, scales of tiles, one of the tensor.

`quantize_nvfp4` is the cast to `nvfp4` and `nvfp4s` (`parts.quantize`), as arrays of the tensor's own shape; what
`pack` stores holds the same bits in one vector. On NVIDIA GPUs it is one pass over x (`nvfp4_kernel`).
"""

import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.counter import bits_of
from pallas_kernels.explicit import with_automatic_axes
from tcfp_jax.formats import float_bits, nvfp4_kernel, nvfp4_tiles, scale_choice
from tcfp_jax.formats.catalog import CATALOG
from tcfp_jax.formats.codes import encode
from tcfp_jax.formats.nvfp4_tiles import SIDE, Options
from tcfp_jax.formats.parts import layout_of, quantize
from tcfp_jax.formats.rotation import rotate
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode

Rule = Literal["amax", "four_over_six", "fold_exact"]
Shape = Literal["vector", "square"]
Key = tuple[jax.Array, jax.Array]
_DATATYPES = {"vector": CATALOG["nvfp4"], "square": CATALOG["nvfp4s"]}
MODES: dict[Rule, ScaleMode] = {"amax": "max", "four_over_six": "four_over_six", "fold_exact": "fold_exact"}


class Nvfp4(NamedTuple):
    """Values in NVFP4: E2M1 code * scale of its tile * outer.

    Attributes:
      codes: uint8 `[..., k / 2]`: byte j has code 2 j in its low half and code 2 j + 1 in its high half.
      scales: float8_e4m3fn `[..., ceil(k / 16)]`; of squares `[..., ceil(n / 16), ceil(k / 16)]`.
      outer: float32 `[]`, the scale of the scales.
    """

    codes: jax.Array
    scales: jax.Array
    outer: jax.Array


def quantize_nvfp4(
    x: ArrayLike,
    *,
    rule: Rule = "amax",
    tile: Shape = "vector",
    amax: ArrayLike | None = None,
    signs: ArrayLike | None = None,
    key: Key | None = None,
    interpret: bool = False,
) -> Nvfp4:
    """`x` in NVFP4, rounded as `cast` to `nvfp4` rounds it: on NVIDIA GPUs in one pass, with the same bits everywhere.

    Args:
      x: `[..., k]`, real floats, k even.
      rule: how tiles find their scales, the `scalemode` of `cast` ("amax" is its "max").
      tile: 16 values along the last axis, or squares of 16 x 16, without a kernel.
      amax: the largest magnitude of the tensor, float32 `[]`; it is found without. What lies above it saturates; one
        that is not finite makes the outer scale NaN, and with it every value.
      signs: `[16]` of 1 and -1: every 16 values along the last axis are first rotated, as `formats.rotate` does, in
        float32; `amax` is that of rotated values. Vectors and a k that 16 divides only.
      key: two words of `pallas_kernels.counter.keys`, for stochastic rounding by the bits of each value's index; its
        scales cover, so that nothing is clipped and the expectation is x.
      interpret: run the kernel in Pallas's interpreter.

    Returns:
      Codes, scales and the outer scale. A tile with NaN has a scale of NaN and codes of zero; inf becomes the largest
      value of its tile.

    Raises:
      TypeError: `x` is not real floating point, or the key is not two words.
      ValueError: an odd k, an axis that is shorter than a tile, an unknown rule or tile, an amax of several numbers, or
        what the arguments say that goes with vectors only.

    >>> made = quantize_nvfp4(jnp.array([[6.0, -3.0] + [0.0] * 14]))
    >>> made.codes[0, 0].item(), made.scales.tolist(), round(float(made.outer), 6)
    (215, [[448.0]], 0.002232)
    """
    array = jnp.asarray(x)
    _check(array, rule, tile, signs, amax, key)
    run = functools.partial(_quantized, rule=rule, tile=tile, interpret=interpret)
    wide = None if amax is None else jnp.asarray(amax, jnp.float32)
    flips = None if signs is None else jnp.asarray(signs, jnp.float32)
    # Tiles are cut, which explicit axes refuse.
    return with_automatic_axes(run, lambda _: PartitionSpec(), array, wide, flips, key)


def exact_share(scales: jax.Array) -> jax.Array:
    """The share of tiles whose products code * scale / 2**e are all E4M3 numbers, for the e of the largest scale.

        2**e brings the largest scale into the binade of 32, so that six times any scale is at most 448

    FP8 tensor cores multiply such tiles without rounding. All of "fold_exact" are such; zeros are, and NaN is not.

    Args:
      scales: float8_e4m3fn of any shape, not empty.

    Returns:
      float32 `[]`, from 0 to 1.

    >>> float(exact_share(jnp.array([384.0, 1.25, 1.125, 0.015625], jnp.float8_e4m3fn)))
    0.5
    """
    values = scales.astype(jnp.float32)
    largest = float_bits.to_bits(jnp.max(jnp.where(values > 0, values, 0)))
    exponent, _ = float_bits.normalize(largest)
    scaled = values * float_bits.power_of_two(5 - exponent)
    grid = scale_choice.grid_of(CATALOG["e4m3fn"].number)  # type: ignore[arg-type]
    exact = jnp.ones(values.shape, bool)
    # The other codes are these times powers of two, and only the smallest products can fall between E4M3's steps.
    for code in (0.5, 1.5):
        exact &= float_bits.round_to_grid(scaled * code, grid, "even", None) == scaled * code
    return jnp.mean(exact.astype(jnp.float32))


def define(
    x: jax.Array,
    amax: jax.Array | None,
    signs: jax.Array | None,
    key: Key | None,
    *,
    rule: Rule,
    tile: Shape = "vector",
) -> Nvfp4:
    """The definition of `quantize_nvfp4`: the parts of the format library's cast, in their places."""
    if signs is not None:
        x = rotate(x.astype(jnp.float32), SIDE, signs=signs)
    datatype = _DATATYPES[tile]
    modes = Modes("even" if key is None else "stochastic", MODES[rule])
    random = None if key is None else bits_of(x.shape, *key)
    given = None if amax is None else float_bits.to_bits(jnp.where(jnp.isfinite(amax), amax, 0))
    parts = quantize(float_bits.to_bits(x), datatype, modes, random, given)
    layout = layout_of(x.shape, datatype)
    assert datatype.scale is not None and parts.scale is not None and parts.outer is not None
    # Of a tile that is NaN no code says anything, and of one that is zero only signs do.
    kept = jnp.where(jnp.isnan(parts.scale), 0, jnp.where(parts.scale * parts.outer < float_bits.TINY, 8, 15))
    codes = layout.join(encode(parts.value, datatype.number) & kept.astype(jnp.uint32))  # type: ignore[arg-type]
    scales = encode(parts.scale, datatype.scale.number).astype(jnp.uint8)
    split = [size for axis, size in enumerate(layout.split_shape) if axis not in layout.tile_axes]
    pairs = codes.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    outer = parts.outer if amax is None else jnp.where(jnp.isfinite(amax), parts.outer, jnp.nan)
    return Nvfp4(
        (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8),
        lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).reshape(split),
        outer,
    )


@functools.partial(jax.jit, static_argnames=("rule", "tile", "interpret"))
def _quantized(
    x: jax.Array, amax: jax.Array | None, signs: jax.Array | None, key: Key | None, *, rule: Rule, tile: Shape,
    interpret: bool,
) -> Nvfp4:  # fmt: skip
    by_definition = functools.partial(define, rule=rule, tile=tile)
    if tile == "square" or not nvfp4_kernel.serves(x.shape, x.dtype):
        return by_definition(x, amax, signs, key)
    kernel = functools.partial(_in_one_pass, rule=rule, interpret=interpret)
    if interpret:
        return kernel(x, amax, signs, key)
    return lax.platform_dependent(x, amax, signs, key, cuda=kernel, default=by_definition)


def _in_one_pass(
    x: jax.Array, amax: jax.Array | None, signs: jax.Array | None, key: Key | None, *, rule: Rule, interpret: bool
) -> Nvfp4:
    rounding: Literal["even", "stochastic"] = "even" if key is None else "stochastic"
    options = Options(MODES[rule], rounding, "none" if signs is None else "hadamard")
    if amax is None and signs is None:
        bits = float_bits.to_bits(x) & jnp.int32(0x7FFFFFFF)
        found = jnp.max(scale_choice.finite_magnitude(bits))
    elif amax is None:
        unscaled = nvfp4_tiles.words(options, jnp.float32(1), signs, key)
        top = nvfp4_kernel.rotated_amax(x, unscaled, options, interpret=interpret)
        found = float_bits.to_bits(top)
    else:
        found = float_bits.to_bits(jnp.where(jnp.isfinite(amax), amax, 0))
    spec = _DATATYPES["vector"].scale
    assert spec is not None and spec.outer is not None
    outer = scale_choice.choose_outer(found, 6.0, spec.number, spec.outer, options.rule)
    words = nvfp4_tiles.words(options, outer, signs, key)
    codes, scales = nvfp4_kernel.quantize_tiles(x, words, options, interpret=interpret)
    return Nvfp4(codes, scales, outer if amax is None else jnp.where(jnp.isfinite(amax), outer, jnp.nan))


def _check(
    x: jax.Array, rule: str, tile: str, signs: ArrayLike | None, amax: ArrayLike | None, key: Key | None
) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype}, and NVFP4 holds real floats; convert it first, such as x.astype(float32)")
    for name, value, known in (("rule", rule, Rule), ("tile", tile, Shape)):
        if value not in get_args(known):
            raise ValueError(f"{name}={value!r} is unknown; use one of {list(get_args(known))}")
    if x.ndim == 0 or x.shape[-1] % 2 or x.size == 0:
        raise ValueError(
            f"x{list(x.shape)} has no pairs of values along its last axis, two of which share a byte; pad it"
        )
    if signs is not None and (tile != "vector" or x.shape[-1] % SIDE):
        raise ValueError(
            f"signs rotate every 16 values of a vector, not x{list(x.shape)} in tiles {tile!r}; drop signs="
        )
    side = x.shape[-2:] if tile == "square" else x.shape[-1:]
    if len(side) < (2 if tile == "square" else 1) or min(side) < SIDE:
        raise ValueError(f"x{list(x.shape)} is smaller than one tile of {SIDE} ({tile!r}); pad it with zeros")
    if amax is not None and jnp.ndim(amax):
        raise ValueError(f"amax has shape {list(jnp.shape(amax))}, but the tensor has one, []; pass a scalar")
    if key is not None and not (isinstance(key, tuple) and len(key) == 2):
        raise TypeError(
            f"key is a {type(key).__name__}, not two words; make them with pallas_kernels.counter.keys(seed)"
        )
