"""Real storage: `pack` keeps an array in the bits of its datatype.

`unpack` gives the virtual cast back. With `sparsity`, a packed array stores m of every
n values alone.

    unpack(pack(x, datatype)) == cast(x, datatype)
        bit for bit, except for NaN without a code (see `unpack`)
    pack(x, datatype).nbytes * 8 == datatype.bits_per_value(x.shape) * x.size
        if each part fills whole bytes

Left out: products, gradients and meshes. The bytes of an array follow each other
without axes, so a packed array is not sharded. Use `tcfp_jax.quantize_tcfp12` for
weights on a mesh, `quantize_nvfp4` for arrays that products read, and `cast` to train.
"""

import functools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.derivatives import OF_CODES, not_differentiated
from pallas_kernels.explicit import with_automatic_axes
from tcfp_jax.formats import float_bits
from tcfp_jax.formats.casting import check_arguments
from tcfp_jax.formats.catalog import named
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.encoding import (
    decode,
    encode,
    from_bytes,
    signed_integers,
    to_bytes,
)
from tcfp_jax.formats.float_bits import RoundMode
from tcfp_jax.formats.numbers import NumberSpec
from tcfp_jax.formats.quantization import QuantizedArray, assemble, quantize
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode, Shape
from tcfp_jax.formats.sparsity import compress, expand, kept_by
from tcfp_jax.paths import serialize_with_flax

_FIELDS = ("values", "scales", "zeros", "offsets", "selectors", "outer")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedArray:
    """An array in the bits of its datatype, made by `pack`: a pytree of uint8 vectors.

    Attributes:
      values: codes in the order of the array; with `sparsity` only the kept ones.
      scales, zeros: one code per tile, or None.
      offsets, selectors: one code per subtile, or None.
      outer: the code of the tensor's scale, or None.
      mask: one bit per value, 1 if the value was kept, or None.
      residual: the packed remainder of the first rounding, or None.
      datatype, shape, dtype: properties of the array that this stands for.
      sparsity: (n, m) if m of every n values along the last axis were kept, or None.
    """

    values: Array
    scales: Array | None
    zeros: Array | None
    offsets: Array | None
    selectors: Array | None
    outer: Array | None
    mask: Array | None
    residual: "PackedArray | None"
    datatype: DataType = field(metadata=dict(static=True))
    shape: Shape = field(metadata=dict(static=True))
    dtype: np.dtype = field(metadata=dict(static=True))
    sparsity: tuple[int, int] | None = field(metadata=dict(static=True))

    @property
    def nbytes(self) -> int:
        """The number of stored bytes."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self))


serialize_with_flax(PackedArray)


def pack(
    x: ArrayLike,
    datatype: DataType | str,
    *,
    roundmode: RoundMode = "even",
    scalemode: ScaleMode | None = None,
    key: Array | None = None,
    saturate: bool = True,
    sparsity: tuple[int, int] | None = None,
) -> PackedArray:
    """Round `x` as `cast` does, and store it in the bits of the datatype.

    Use this to save memory or disk space, for example for weights in a file.
    Use `cast` for values that a program computes with.

    Args:
      x, datatype, roundmode, scalemode, key, saturate: as for `formats.cast`.
      sparsity: (n, m) stores the m largest of n values along the last axis, as
        `formats.sparse`, and one bit per value.

    Raises:
      TypeError: as `formats.cast`, or a gradient is asked for, which bytes do not have.
      ValueError: as `formats.cast`. Also for `sparsity` that does not divide the last
        axis, or with a zero point, a codebook, an exponent or a residual. Also for a
        NaN if an unscaled number has no code for it. A traced NaN cannot be seen: it is
        stored as 0, or as the codebook value nearest to 0.

    >>> from tcfp_jax import formats
    >>> packed = pack(jnp.linspace(-1.0, 1.0, 64), formats.mxfp4e2)
    >>> packed.nbytes, packed.values.shape, packed.scales.shape
    (34, (32,), (2,))
    """
    datatype = named(datatype)
    array, modes = check_arguments(x, datatype, roundmode, scalemode, key, saturate)
    _check_nan(array, datatype)
    if sparsity is not None:
        _check_sparsity(sparsity, datatype)
    packed = functools.partial(_pack, datatype=datatype, modes=modes, sparsity=sparsity)
    array = not_differentiated(OF_CODES, array)
    # The bytes of the whole array follow each other, so with explicit axes the result
    # is not sharded.
    return with_automatic_axes(packed, lambda _: PartitionSpec(), array, key)


def unpack(packed: PackedArray) -> Array:
    """Return the packed array in its shape and dtype.

    It has the bits of `cast` with the arguments of `pack`. With `sparsity` it is the
    cast of `formats.sparse(x, n, m)`. The one exception: a jitted `pack` stores NaN as
    0, or as the codebook value nearest to 0, if an unscaled number has no code for it.
    `cast` keeps such a NaN.

    Use this on the result of `pack`, also after it was saved and restored.

    Raises:
      TypeError: `packed` is not a PackedArray.
      ValueError: a part of it does not fit its datatype and shape, as in a damaged
        file.

    >>> from tcfp_jax import formats
    >>> packed = pack(jnp.array([1.0, -0.3, 0.07]), formats.datatype("e2m1f", "e8m0"))
    >>> unpack(packed).tolist()
    [1.0, -0.25, 0.125]
    """
    if not isinstance(packed, PackedArray):
        raise TypeError(
            f"unpack takes what pack returned, not {type(packed).__name__}; use"
            " formats.pack first"
        )
    _check_parts(packed)
    return with_automatic_axes(_unpack, lambda _: PartitionSpec(), packed)


def _check_nan(array: Array, datatype: DataType) -> None:
    """Raise a ValueError if the array has a NaN, as far as known, without a code."""
    number = datatype.number
    if datatype.scale is not None or number.has_nan or number.kind == "int":
        return
    if isinstance(array, jax.core.Tracer):
        return
    if bool(jnp.any(jnp.isnan(array.astype(jnp.float32)))):
        raise ValueError(
            f"x holds NaN, for which {datatype.name} has no code; add a scale, or"
            " replace the NaN"
        )


def _check_sparsity(sparsity: object, datatype: DataType) -> None:
    """Raise a ValueError unless arrays of the datatype can store kept values alone."""
    number = datatype.number
    scale = datatype.scale
    if not (isinstance(sparsity, tuple) and len(sparsity) == 2):
        raise ValueError(
            f"sparsity={sparsity!r} is not a pair (n, m), m of every n values; use"
            " (4, 2)"
        )
    if scale is not None and scale.zero is not None:
        raise ValueError(
            f"sparsity={sparsity} drops zeros, which {datatype.name} stores as its zero"
            " point; drop one"
        )
    if number.kind in ("codebook", "exponent") or datatype.residual is not None:
        raise ValueError(
            f"sparsity={sparsity} needs a number whose code 0 is zero, without"
            " residual; use mxfp4e2"
        )


# Parts to bytes
# --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("datatype", "modes", "sparsity"))
def _pack(
    x: Array,
    key: Array | None,
    *,
    datatype: DataType,
    modes: Modes,
    sparsity: tuple[int, int] | None,
) -> PackedArray:
    kept = None
    if sparsity is not None:
        kept = kept_by(x, *sparsity)
        x = jnp.where(kept, x, 0)
    random = None
    if key is not None:
        random = jax.random.bits(key, x.shape, jnp.uint32)
    parts = quantize(float_bits.to_bits(x), datatype, modes, random)
    return _pack_parts(parts, datatype, x.shape, x.dtype, sparsity, kept)


def _pack_parts(
    parts: QuantizedArray,
    datatype: DataType,
    shape: Shape,
    dtype: np.dtype,
    sparsity: tuple[int, int] | None = None,
    kept: Array | None = None,
) -> PackedArray:
    """Return the parts in bits; the residual is packed as a float32 array."""
    residual = None
    if parts.residual is not None and datatype.residual is not None:
        residual = _pack_parts(
            parts.residual, datatype.residual, shape, np.dtype(np.float32)
        )
    codes = _codes_of(parts, datatype)
    codes["values"] = datatype.layout(shape).join(codes["values"])
    mask = None
    if kept is not None and sparsity is not None:
        codes["values"] = compress(codes["values"], kept, *sparsity)
        mask = to_bytes(kept, 1)
    stored: dict[str, Array | None] = dict.fromkeys(_FIELDS)
    for name, (bits, _) in datatype.fields(shape).items():
        stored[name] = to_bytes(codes[name], bits)
    return PackedArray(
        **stored,  # type: ignore[arg-type]
        mask=mask,
        residual=residual,
        datatype=datatype,
        shape=shape,
        dtype=np.dtype(dtype),
        sparsity=sparsity,
    )


def _codes_of(parts: QuantizedArray, datatype: DataType) -> dict[str, Array]:
    """Return the codes of each part that the datatype stores."""
    number = datatype.number
    scale = datatype.scale
    codes = {"values": parts.value}
    if isinstance(number, NumberSpec):
        codes["values"] = encode(parts.value, number)
    if parts.offset is not None:
        codes["offsets"] = parts.offset
    if parts.selector is not None:
        codes["selectors"] = parts.selector
    if scale is None:
        return codes
    if parts.exponent is not None and parts.nan is not None:
        code = parts.exponent + scale.number.bias
        lost = (1 << scale.number.bits) - 1
        codes["scales"] = jnp.where(parts.nan, lost, code)
    if parts.scale is not None:
        codes["scales"] = encode(parts.scale, scale.number)
    if parts.outer is not None and scale.outer is not None:
        codes["outer"] = encode(parts.outer, scale.outer)
    if parts.zero is not None and scale.zero is not None:
        codes["zeros"] = _code_of_zero(parts.zero, scale.zero, number.bits)
    return codes


def _code_of_zero(zero: Array, number: NumberSpec, bits: int) -> Array:
    """Return the code of a zero point of values of `bits` bits.

    An integer zero point is a code of the values, so it fits a signed integer once half
    the codes are subtracted. `encode` reads the lowest signed code as NaN, so the
    integer is written directly.
    """
    if not number.is_integer:
        return encode(zero, number)
    whole = (zero - (1 << (bits - 1))).astype(jnp.int32)
    code = lax.bitcast_convert_type(whole, jnp.uint32)
    return code & jnp.uint32((1 << number.bits) - 1)


# Bytes to parts
# --------------------------------------------------------------------------------------


@jax.jit
def _unpack(packed: PackedArray) -> Array:
    parts = _unpack_parts(packed)
    bits = assemble(parts, packed.datatype, packed.shape)
    return float_bits.from_bits(bits, packed.dtype)


def _unpack_parts(packed: PackedArray) -> QuantizedArray:
    datatype = packed.datatype
    number = datatype.number
    scale = datatype.scale
    codes = _codes_in(packed)
    values = datatype.layout(packed.shape).split(codes.pop("values"))
    if isinstance(number, NumberSpec):
        values = decode(values, number)
    else:
        values = values.astype(jnp.int32)
    parts = QuantizedArray(values)
    if packed.residual is not None:
        parts = parts._replace(residual=_unpack_parts(packed.residual))
    if "offsets" in codes:
        parts = parts._replace(offset=codes["offsets"].astype(jnp.int32))
    if "selectors" in codes:
        parts = parts._replace(selector=codes["selectors"].astype(jnp.int32))
    if scale is None:
        return parts
    code = codes["scales"]
    if scale.number.kind == "exponent":
        exponent = code.astype(jnp.int32) - scale.number.bias
        nan = code == (1 << scale.number.bits) - 1
        parts = parts._replace(exponent=exponent, nan=nan)
    else:
        parts = parts._replace(scale=decode(code, scale.number))
    if scale.outer is not None:
        parts = parts._replace(outer=decode(codes["outer"], scale.outer))
    if scale.zero is not None:
        zero = _zero_of(codes["zeros"], scale.zero, number.bits)
        parts = parts._replace(zero=zero)
    return parts


def _codes_in(packed: PackedArray) -> dict[str, Array]:
    """Return the codes of each part; values have the shape of the array."""
    codes = {}
    for name, (bits, shape) in packed.datatype.fields(packed.shape).items():
        data = getattr(packed, name)
        if name == "values" and packed.mask is not None and packed.sparsity:
            n, m = packed.sparsity
            count = math.prod(shape)
            kept = from_bytes(packed.mask, 1, count).reshape(-1, n) == 1
            thin = from_bytes(data, bits, count // n * m).reshape(-1, m)
            codes[name] = expand(thin, kept).reshape(shape)
        else:
            codes[name] = from_bytes(data, bits, math.prod(shape)).reshape(shape)
    return codes


def _zero_of(code: Array, number: NumberSpec, bits: int) -> Array:
    """Return the zero point that `_code_of_zero` wrote."""
    if not number.is_integer:
        return decode(code, number)
    whole = signed_integers(code, number.bits) + (1 << (bits - 1))
    return whole.astype(jnp.float32)


# Damaged arrays
# --------------------------------------------------------------------------------------


def _check_parts(packed: PackedArray) -> None:
    """Raise a ValueError unless all parts fit datatype, shape and sparsity."""
    datatype = packed.datatype
    if not isinstance(datatype, DataType):
        raise ValueError(
            f"the packed array has a {type(datatype).__name__} as its datatype, not a"
            " DataType"
        )
    lengths = _lengths(packed)
    for name in (*_FIELDS, "mask"):
        _check_part(packed, name, lengths.get(name))
    if packed.sparsity is not None and packed.mask is not None:
        _check_mask(packed.mask, math.prod(packed.shape), *packed.sparsity)
    if not (
        isinstance(packed.dtype, np.dtype)
        and jnp.issubdtype(packed.dtype, jnp.floating)
    ):
        raise ValueError(
            f"the packed array stands for {packed.dtype}, and casts make real floats;"
            " use np.dtype('float32')"
        )
    residual = packed.residual
    if (residual is None) != (datatype.residual is None):
        raise ValueError(
            f"the packed array has a residual, or {datatype.name} has one, but not"
            " both; pack it again"
        )
    if residual is None:
        return
    if (
        not isinstance(residual, PackedArray)
        or residual.datatype != datatype.residual
        or residual.shape != packed.shape
    ):
        raise ValueError(
            "the residual of the packed array has another datatype or shape than"
            " it; pack it again"
        )
    _check_parts(residual)


def _lengths(packed: PackedArray) -> dict[str, int]:
    """Return the bytes of each part that there is."""
    lengths = {}
    for name, (bits, shape) in packed.datatype.fields(packed.shape).items():
        lengths[name] = -(-bits * math.prod(shape) // 8)
    sparsity = packed.sparsity
    if sparsity is None:
        return lengths
    if not (isinstance(sparsity, tuple) and len(sparsity) == 2 and packed.shape):
        raise ValueError(
            f"the packed array has sparsity={sparsity!r}, not a pair (n, m);"
            " pack it again"
        )
    n, m = sparsity
    if not 1 <= m < n or packed.shape[-1] % n:
        raise ValueError(
            f"sparsity={sparsity} does not fit the shape {packed.shape};"
            " pack the array again"
        )
    size = math.prod(packed.shape)
    lengths["mask"] = -(-size // 8)
    lengths["values"] = -(-packed.datatype.number.bits * (size // n * m) // 8)
    return lengths


def _check_part(packed: PackedArray, name: str, length: int | None) -> None:
    """Raise a ValueError unless a part is uint8 of this length; None for no part."""
    part = getattr(packed, name)
    shape = getattr(part, "shape", None)
    dtype = getattr(part, "dtype", None)
    if length is None:
        wanted = "none"
        fits = part is None
    else:
        wanted = f"uint8 of shape {(length,)}"
        fits = shape == (length,) and dtype == jnp.uint8
    if fits:
        return
    found = "nothing"
    if part is not None:
        kind = type(part).__name__ if dtype is None else dtype
        found = f"{kind} of shape {shape}"
    raise ValueError(
        f"{name} of the packed array is {found}, and {packed.datatype.name} of shape"
        f" {packed.shape} has {wanted}; pack the array again"
    )


def _check_mask(mask: Array, size: int, n: int, m: int) -> None:
    """Raise a ValueError unless a mask, as far as known, keeps m of every n values."""
    if isinstance(mask, jax.core.Tracer | jax.ShapeDtypeStruct):
        return
    # By NumPy, because a traced caller would stage operations of JAX.
    bits = np.unpackbits(np.asarray(mask), count=size, bitorder="little")
    kept = np.unique(bits.reshape(-1, n).sum(-1)).tolist()
    if kept not in ([], [m]):
        raise ValueError(
            f"the mask keeps {kept} of {n} values, not {m}; the file is damaged,"
            " pack the array again"
        )
