"""Real storage: `pack` keeps an array in the bits of its datatype, and `unpack` gives
the virtual cast back.

`sparse` keeps m of every n values; a packed array can store these alone.

unpack(pack(x, datatype)) == cast(x, datatype)         bit for bit, except for NaN without a code (see `unpack`)
pack(x, datatype).nbytes * 8 == datatype.bits_per_value(x.shape) * x.size      if each part fills whole bytes
"""

import functools
import math
import numbers
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_kernels.explicit import with_automatic_axes
from tcfp_jax.formats import float_bits
from tcfp_jax.formats.casting import check_arguments
from tcfp_jax.formats.catalog import named
from tcfp_jax.formats.codebooks import CodebookSpec
from tcfp_jax.formats.datatypes import DataType
from tcfp_jax.formats.encoding import decode, encode, from_bytes, to_bytes
from tcfp_jax.formats.float_bits import RoundMode
from tcfp_jax.formats.quantization import QuantizedArray, assemble, quantize
from tcfp_jax.formats.rotation import check_axis
from tcfp_jax.formats.rounding import Modes
from tcfp_jax.formats.scales import ScaleMode
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

    values: jax.Array
    scales: jax.Array | None
    zeros: jax.Array | None
    offsets: jax.Array | None
    selectors: jax.Array | None
    outer: jax.Array | None
    mask: jax.Array | None
    residual: "PackedArray | None"
    datatype: DataType = field(metadata=dict(static=True))
    shape: tuple[int, ...] = field(metadata=dict(static=True))
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
    key: jax.Array | None = None,
    saturate: bool = True,
    sparsity: tuple[int, int] | None = None,
) -> PackedArray:
    """Round `x` as `cast` does, and store it in the bits of the datatype.

    Args:
      x, datatype, roundmode, scalemode, key, saturate: as for `formats.cast`.
      sparsity: (n, m) stores the m largest of n values along the last axis, as
        `formats.sparse`, and one bit per value.

    Raises:
      TypeError, ValueError: as `formats.cast`; also for `sparsity` that does not divide
        the last axis, or with a zero point, a codebook, an exponent or a residual; and
        for a NaN if an unscaled number has no code for it. A traced NaN cannot be seen:
        it is stored as 0, or as the codebook value nearest to 0.

    >>> from tcfp_jax import formats
    >>> packed = pack(jnp.linspace(-1.0, 1.0, 64), formats.mxfp4e2)
    >>> packed.nbytes, packed.values.shape, packed.scales.shape
    (34, (32,), (2,))
    """
    datatype = named(datatype)
    array, modes = check_arguments(x, datatype, roundmode, scalemode, key, saturate)
    _check(array, datatype, sparsity)
    packed = functools.partial(_pack, datatype=datatype, modes=modes, sparsity=sparsity)
    # The bytes of the whole array follow each other, so with explicit axes the result
    # is not sharded.
    return with_automatic_axes(packed, lambda _: PartitionSpec(), array, key)


def unpack(packed: PackedArray) -> jax.Array:
    """Return the packed array in its shape and dtype: the bits of `cast` with the
    arguments of `pack`.

    With `sparsity` it is the cast of `formats.sparse(x, n, m)`. The one exception: a
    jitted `pack` stores NaN as 0, or as the codebook value nearest to 0, if an unscaled
    number has no code for it. `cast` keeps such a NaN.

    Raises:
      TypeError: `packed` is not a PackedArray.
      ValueError: a part of it does not fit its datatype and shape, as in a damaged
        file.

    >>> from tcfp_jax import formats
    >>> unpack(pack(jnp.array([1.0, -0.3, 0.07]), formats.datatype("e2m1f", "e8m0"))).tolist()
    [1.0, -0.25, 0.125]
    """
    if not isinstance(packed, PackedArray):
        raise TypeError(
            f"unpack takes what pack returned, not {type(packed).__name__}; use"
            " formats.pack first"
        )
    _check_parts(packed)
    return with_automatic_axes(_unpack, lambda _: PartitionSpec(), packed)


@functools.partial(jax.jit, static_argnames=("datatype", "modes", "sparsity"))
def _pack(
    x: jax.Array,
    key: jax.Array | None,
    *,
    datatype: DataType,
    modes: Modes,
    sparsity: tuple[int, int] | None,
) -> PackedArray:
    kept = None
    if sparsity is not None:
        kept = _largest_mask(x, *sparsity, -1)
        x = jnp.where(kept, x, jnp.zeros_like(x))
    random = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    parts = quantize(float_bits.to_bits(x), datatype, modes, random)
    return _pack_parts(parts, kept, datatype, x.shape, x.dtype, sparsity)


def _pack_parts(
    parts: QuantizedArray,
    kept: jax.Array | None,
    datatype: DataType,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sparsity: tuple[int, int] | None,
) -> PackedArray:
    """Return the parts in bits; the residual is packed as a float32 array of its
    own.
    """
    residual = None
    if datatype.residual is not None:
        assert parts.residual is not None
        residual = _pack_parts(
            parts.residual, None, datatype.residual, shape, np.dtype(np.float32), None
        )
    codes = _codes_of(parts, datatype)
    codes["values"] = datatype.layout(shape).join(codes["values"])
    if kept is not None:
        assert sparsity is not None
        codes["values"] = _compress(codes["values"], kept, *sparsity)
    stored = {
        name: to_bytes(codes[name], bits)
        for name, (bits, _) in datatype.fields(shape).items()
    }
    return PackedArray(
        **dict.fromkeys(_FIELDS) | stored,  # type: ignore[arg-type]
        mask=None if kept is None else to_bytes(kept, 1),
        residual=residual,
        datatype=datatype,
        shape=shape,
        dtype=np.dtype(dtype),
        sparsity=sparsity,
    )


def _codes_of(parts: QuantizedArray, datatype: DataType) -> dict[str, jax.Array]:
    number, scale = datatype.number, datatype.scale
    codes = {
        "values": (
            parts.value
            if isinstance(number, CodebookSpec)
            else encode(parts.value, number)
        )
    }
    if parts.offset is not None:
        codes["offsets"] = parts.offset
    if parts.selector is not None:
        codes["selectors"] = parts.selector
    if scale is None:
        return codes
    if parts.exponent is not None:
        code = parts.exponent + scale.number.bias
        codes["scales"] = (
            code
            if parts.nan is None
            else jnp.where(parts.nan, (1 << scale.number.bits) - 1, code)
        )
    if parts.scale is not None:
        codes["scales"] = encode(parts.scale, scale.number)
    if parts.outer is not None:
        assert scale.outer is not None
        codes["outer"] = encode(parts.outer, scale.outer)
    if parts.zero is not None:
        assert scale.zero is not None
        codes["zeros"] = encode(parts.zero, scale.zero)
        if scale.zero.is_integer:
            # It is a code of the number, so it fits a signed integer once half the
            # codes are subtracted. `encode` reads the lowest signed code as NaN, so the
            # integer is written directly.
            whole = (parts.zero - jnp.float32(1 << (number.bits - 1))).astype(jnp.int32)
            codes["zeros"] = lax.bitcast_convert_type(whole, jnp.uint32) & jnp.uint32(
                (1 << scale.zero.bits) - 1
            )
    return codes


@jax.jit
def _unpack(packed: PackedArray) -> jax.Array:
    return float_bits.from_bits(
        assemble(_unpack_parts(packed), packed.datatype, packed.shape), packed.dtype
    )


def _check_parts(packed: PackedArray) -> None:
    """Raise a ValueError unless every part is uint8 of the length that datatype, shape
    and sparsity give it.
    """
    datatype = packed.datatype
    if not isinstance(datatype, DataType):
        raise ValueError(
            f"the packed array has a {type(datatype).__name__} as its datatype, not a"
            " DataType"
        )
    lengths = {
        name: -(-bits * math.prod(codes) // 8)
        for name, (bits, codes) in datatype.fields(packed.shape).items()
    }
    if packed.sparsity is not None:
        if not (
            isinstance(packed.sparsity, tuple)
            and len(packed.sparsity) == 2
            and packed.shape
        ):
            raise ValueError(
                f"the packed array has sparsity={packed.sparsity!r}, not a pair (n, m);"
                " pack it again"
            )
        n, m = packed.sparsity
        if not 1 <= m < n or packed.shape[-1] % n:
            raise ValueError(
                f"sparsity={packed.sparsity} does not fit the shape {packed.shape};"
                " pack the array again"
            )
        size = math.prod(packed.shape)
        lengths |= {
            "mask": -(-size // 8),
            "values": -(-datatype.number.bits * (size // n * m) // 8),
        }
    for name in (*_FIELDS, "mask"):
        part = getattr(packed, name)
        shape, wanted = (
            getattr(part, "shape", None),
            (lengths[name],) if name in lengths else None,
        )
        if shape != wanted or (
            part is not None and getattr(part, "dtype", None) != jnp.uint8
        ):
            found = (
                "nothing"
                if part is None
                else f"{getattr(part, 'dtype', type(part).__name__)} of shape {shape}"
            )
            raise ValueError(
                f"{name} of the packed array is {found}, and {datatype.name} of shape"
                f" {packed.shape} has"
                f" {'none' if wanted is None else f'uint8 of shape {wanted}'}; pack the"
                " array again"
            )
    if packed.sparsity is not None and not isinstance(
        packed.mask, jax.core.Tracer | jax.ShapeDtypeStruct
    ):
        # By NumPy, because a traced caller would stage operations of JAX.
        bits = np.unpackbits(np.asarray(packed.mask), count=size, bitorder="little")
        kept = np.unique(bits.reshape(-1, n).sum(-1)).tolist()
        if kept not in ([], [m]):
            raise ValueError(
                f"the mask keeps {kept} of {n} values, not {m}; the file is damaged,"
                " pack the array again"
            )
    if not (
        isinstance(packed.dtype, np.dtype)
        and jnp.issubdtype(packed.dtype, jnp.floating)
    ):
        raise ValueError(
            f"the packed array stands for {packed.dtype}, and casts make real floats;"
            " use np.dtype('float32')"
        )
    if (packed.residual is None) != (datatype.residual is None):
        raise ValueError(
            f"the packed array has a residual, or {datatype.name} has one, but not"
            " both; pack it again"
        )
    if packed.residual is not None:
        of = packed.residual if isinstance(packed.residual, PackedArray) else None
        if of is None or of.datatype != datatype.residual or of.shape != packed.shape:
            raise ValueError(
                "the residual of the packed array has another datatype or shape than"
                " it; pack it again"
            )
        _check_parts(packed.residual)


def _unpack_parts(packed: PackedArray) -> QuantizedArray:
    datatype, number, scale = (
        packed.datatype,
        packed.datatype.number,
        packed.datatype.scale,
    )
    codes = {
        name: from_bytes(getattr(packed, name), bits, math.prod(shape)).reshape(shape)
        for name, (bits, shape) in datatype.fields(packed.shape).items()
        if packed.mask is None or name != "values"
    }
    if packed.mask is not None:
        assert packed.sparsity is not None
        codes["values"] = _expand(packed, *packed.sparsity)
    values = datatype.layout(packed.shape).split(codes["values"])
    integers = {
        name: codes[name].astype(jnp.int32) if name in codes else None
        for name in ("offsets", "selectors")
    }
    parts = QuantizedArray(
        (
            values.astype(jnp.int32)
            if isinstance(number, CodebookSpec)
            else decode(values, number)
        ),
        offset=integers["offsets"],
        selector=integers["selectors"],
        residual=None if packed.residual is None else _unpack_parts(packed.residual),
    )
    if scale is None:
        return parts
    if scale.number.kind == "exponent":
        nan = codes["scales"] == (1 << scale.number.bits) - 1
        parts = parts._replace(
            exponent=codes["scales"].astype(jnp.int32) - scale.number.bias, nan=nan
        )
    else:
        parts = parts._replace(scale=decode(codes["scales"], scale.number))
    if scale.outer is not None:
        parts = parts._replace(outer=decode(codes["outer"], scale.outer))
    if scale.zero is None:
        return parts
    if not scale.zero.is_integer:
        return parts._replace(zero=decode(codes["zeros"], scale.zero))
    unused = 32 - scale.zero.bits
    whole = lax.bitcast_convert_type(codes["zeros"] << unused, jnp.int32) >> unused
    return parts._replace(zero=(whole + (1 << (number.bits - 1))).astype(jnp.float32))


# M of N
# --------------------------------------------------------------------------------------


def sparse(x: ArrayLike, n: int, m: int, dim: int = -1) -> jax.Array:
    """Set all but the m largest magnitudes of every n values along `dim` to zero; ties
    keep the lower index.

    Args:
      x: real floats of any shape.
      n: the number of values of a group, a divisor of the axis.
      m: the number of values to keep, 1 to n - 1.
      dim: the axis, negative or not.

    Returns:
      The shape and dtype of `x`; values keep their signs. NaN counts as the largest.
        Only kept values have a gradient.

    Raises:
      TypeError: `x` is not real floating point.
      ValueError: n does not divide the axis, m is not between 1 and n - 1, or the axis
        does not exist.

    Source: TensorCast (AMD), `sparse`, whose result loses the signs.

    >>> sparse(jnp.array([1.0, -3.0, 2.0, -2.0]), 4, 2).tolist()
    [0.0, -3.0, 2.0, 0.0]
    """
    array = jnp.asarray(x)
    return jnp.where(_largest_mask(array, n, m, dim), array, jnp.zeros_like(array))


def _largest_mask(x: jax.Array, n: int, m: int, dim: int) -> jax.Array:
    """Return where `sparse` keeps a value."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x is {x.dtype}; sparsity takes real floats, such as x.astype(float32)"
        )
    check_axis(dim, x.shape)
    counts = all(
        isinstance(one, numbers.Integral) and not isinstance(one, bool)
        for one in (n, m)
    )
    if not (counts and 1 <= m < n):
        raise ValueError(
            f"m={m!r} of n={n!r}: keep at least one and fewer than all; use n=4, m=2"
        )
    if x.shape[dim] % n:
        raise ValueError(
            f"n={n} does not divide axis {dim} of shape {x.shape}; pad it to a multiple"
        )
    rows = jnp.moveaxis(jax.lax.stop_gradient(x), dim, -1)
    # As integers: XLA:CPU compares subnormals as zeros.
    magnitude = (float_bits.to_bits(rows) & 0x7FFFFFFF).reshape(*rows.shape[:-1], -1, n)
    order = jnp.argsort(-magnitude, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    return jnp.moveaxis((rank < m).reshape(rows.shape), -1, dim)


def _compress(codes: jax.Array, kept: jax.Array, n: int, m: int) -> jax.Array:
    """Return the m kept codes of every n, in their order."""
    groups, mask = codes.reshape(-1, n), kept.reshape(-1, n)
    order = jnp.argsort(~mask, axis=-1, stable=True)[:, :m]
    return jnp.take_along_axis(groups, order, axis=-1)


def _expand(packed: PackedArray, n: int, m: int) -> jax.Array:
    """Return the codes of the whole array, with 0 for dropped values."""
    assert packed.mask is not None
    count = math.prod(packed.shape)
    mask = from_bytes(packed.mask, 1, count).reshape(-1, n) == 1
    kept = from_bytes(
        packed.values, packed.datatype.number.bits, count // n * m
    ).reshape(-1, m)
    place = jnp.clip(jnp.cumsum(mask.astype(jnp.int32), axis=-1) - 1, 0, m - 1)
    codes = jnp.where(mask, jnp.take_along_axis(kept, place, axis=-1), jnp.uint32(0))
    return codes.reshape(packed.shape)


def _check(
    array: jax.Array, datatype: DataType, sparsity: tuple[int, int] | None
) -> None:
    number = datatype.number
    if sparsity is not None and not (
        isinstance(sparsity, tuple) and len(sparsity) == 2
    ):
        raise ValueError(
            f"sparsity={sparsity!r} is not a pair (n, m), m of every n values; use"
            " (4, 2)"
        )
    if (
        datatype.scale is None
        and not number.has_nan
        and number.kind != "int"
        and not isinstance(array, jax.core.Tracer)
        and bool(jnp.any(jnp.isnan(array.astype(jnp.float32))))
    ):
        raise ValueError(
            f"x holds NaN, for which {datatype.name} has no code; add a scale, or"
            " replace the NaN"
        )
    if sparsity is None:
        return
    if datatype.scale is not None and datatype.scale.zero is not None:
        raise ValueError(
            f"sparsity={sparsity} drops zeros, which {datatype.name} stores as its zero"
            " point; drop one"
        )
    if (
        isinstance(number, CodebookSpec)
        or number.kind == "exponent"
        or datatype.residual is not None
    ):
        raise ValueError(
            f"sparsity={sparsity} needs a number whose code 0 is zero, without"
            " residual; use mxfp4e2"
        )
