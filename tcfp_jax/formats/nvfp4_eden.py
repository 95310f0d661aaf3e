"""MS-EDEN in one pass on NVIDIA GPUs: x is read, turned by the tensor cores, rounded and corrected, and written once.

`nvfp4_values` has the definition. A Pallas-Triton program has 64 groups of 32 to 128 values that are rotated together,
along the last axis; or 64 columns of a group down the first. The rotation is a product with a matrix of 1 and -1, exact
for bfloat16 values but for the order of sums; blocks of 16 find scales and codes as `nvfp4_tiles` has it, and the sums
of a group correct its scales. The largest magnitude of what is rotated comes from a pass of the same kind, which stores
one for every program: two reads and one write of x, where XLA writes and reads it in float32.

Sums have an order of their own, so that a value near a tie may be rounded to the other side than by the definition.
Under a mesh each device has its own part, as in `nvfp4_kernel`.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.counter import random_bits
from pallas_kernels.partition import partitioned, varying
from pallas_kernels.specs import device_count
from tcfp_jax.formats import float_bits, scale_choice
from tcfp_jax.formats.float_bits import INFINITY
from tcfp_jax.formats.numbers import number
from tcfp_jax.formats.nvfp4_kernel import Place, in_whole
from tcfp_jax.formats.nvfp4_tiles import SIDE, VALUE, Device, Options, Portable, Scalars, encoded_by, scale_codes, words
from tcfp_jax.formats.rotation import matrix_of

# The best step of nearest rounding for normal values is smaller than amax / 6, and corrections need room above the
# scales (Panferov et al. 2026, section 4 and their code).
LARGEST = 6.0 / (17 / 16 * 0.93)
TOP = 256.0
# Groups of a program along the last axis, and columns down the first.
_WIDTH = 64
_OPTIONS = Options("max", "even", "none", LARGEST)
_E4M3 = number("e4m3fn")
Output = Literal["amax", "values"]


class _Job(NamedTuple):
    """What a pass finds: the largest magnitude, as int32 bits, or values.

    Attributes:
      output, place: of the pass.
      blocks: the shape of all, `[..., groups, of a group]` along the last axis, `[groups, of a group, columns]` down
        the first.
      interpret: run in Pallas's interpreter.
    """

    output: Output
    place: Place
    blocks: tuple[int, ...]
    interpret: bool

    @property
    def axis(self) -> int:
        """Of a block's values, in an array of blocks; the axis before it is that of a group's blocks."""
        return -1 if self.place == "last" else -2

    @property
    def of_group(self) -> int:
        """How many blocks are rotated together."""
        return self.blocks[self.axis]


def serves(shape: tuple[int, ...], dtype: Any, size: int, place: Place) -> bool:
    """Whether the kernel takes arrays of this shape and dtype, rotated in groups of `size`.

    >>> serves((64, 128), jnp.bfloat16, 128, "last"), serves((128, 60), jnp.bfloat16, 128, "first")
    (True, False)
    """
    if dtype != jnp.bfloat16 or size not in (32, 64, 128) or math.prod(shape) == 0:
        return False
    if place == "first":
        return len(shape) == 2 and shape[0] % size == 0 and shape[1] % _WIDTH == 0
    return shape[-1] % size == 0 and math.prod(shape) % (size * _WIDTH) == 0


def quantize(
    x: jax.Array, key: tuple[jax.Array, jax.Array], signs: jax.Array, place: Place, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(values bfloat16 of the shape of x, the float32 scale of the tensor) of an array that `serves` accepts.

    Args:
      x: bfloat16.
      key: two words of `pallas_kernels.counter.keys`.
      signs: `[size]` of 1 and -1.
      place: the axis of blocks and groups.
      interpret: run in Pallas's interpreter, on CPUs.
    """
    size = signs.shape[0]
    if place == "last":
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
        blocks: tuple[int, ...] = (*groups.shape[:-1], size // SIDE)
    else:
        groups = x.reshape(x.shape[0] // size, size, x.shape[1])
        blocks = (groups.shape[0], size // SIDE, groups.shape[2])

    # Made here: in a function that is partitioned it would be a constant, which JAX 0.10 does not take.
    matrix = matrix_of(signs).astype(jnp.bfloat16)
    matrix = matrix if place == "last" else matrix.T

    def run(output: Output, outer: jax.Array) -> jax.Array:
        return _run(_Job(output, place, blocks, interpret), words(_OPTIONS, outer, None, key), matrix, groups)

    outer = scale_choice.choose_scale(run("amax", jnp.float32(1))[0], LARGEST * TOP, number("float32"))
    return run("values", outer).reshape(x.shape), outer


def _run(job: _Job, scalars: jax.Array, matrix: jax.Array, groups: jax.Array) -> jax.Array:
    axes = "abcdefghijklmnop"[: groups.ndim - 1]
    of_values = f"{' '.join(axes)} t" if job.place == "last" else "a t b"
    sizes = groups.shape[:-1] if job.place == "last" else groups.shape[::2]
    starts = [lax.iota(jnp.uint32, size) for size in sizes] if device_count() > 1 else []
    operands = ", ".join(["u", "t v", of_values, *(axes if starts else "")])
    rule = f"{operands} -> {'r' if job.output == 'amax' else of_values}"
    return partitioned(functools.partial(_local, job), rule, whole=("t", "v"))(scalars, matrix, groups, *starts)[0]


def _local(
    job: _Job,
    scalars: jax.Array,
    matrix: jax.Array,
    groups: jax.Array,
    *places: jax.Array,
    summed_over: tuple[str, ...] = (),
) -> list[jax.Array]:
    """The result for a device's part."""
    along = job.place == "last"
    own = (*groups.shape[:-1], job.of_group) if along else (groups.shape[0], job.of_group, groups.shape[2])
    starts = None
    if places and own != job.blocks:
        first = [place[0] for place in places]
        starts = jnp.stack([*first, jnp.uint32(0)] if along else [first[0], jnp.uint32(0), first[1]])
    fits = (math.prod(own[:-1]) if along else own[-1]) % _WIDTH == 0
    found = (_call if fits else _by_arrays)(job, own, scalars, groups, matrix, starts)
    if job.output == "amax":
        top = jnp.max(found).reshape(1)
        return [lax.pmax(top, summed_over) if summed_over else top]
    return [found.reshape(groups.shape)]


def _by_arrays(
    job: _Job,
    own: tuple[int, ...],
    scalars: jax.Array,
    groups: jax.Array,
    matrix: jax.Array,
    starts: jax.Array | None,
) -> jax.Array:
    """The same without a kernel, for a part that its programs do not divide."""
    index = lax.iota(jnp.uint32, math.prod(own)).reshape(own)
    read = lambda at: scalars[at]
    return _compute(job, Portable(), read, (groups, matrix), lambda: in_whole(index, starts, (own, job.blocks)))


def _compute(job: _Job, do: Portable, read: Any, operands: tuple[jax.Array, jax.Array], indices: Any) -> jax.Array:
    """Values as the groups lie, or the largest magnitude.

    Args:
      operands: groups `[..., size]`, or `[..., size, columns]` down the first axis, and the matrix that turns them.
      read: of the scalars one word.
      indices: a function that gives those of blocks in the whole array.
    """
    # XLA on CPUs has products of bfloat16 for some shapes alone; in float32 these values are exact as well.
    groups, matrix = operands if isinstance(do, Device) else (operand.astype(jnp.float32) for operand in operands)
    pair = (groups, matrix) if job.place == "last" else (matrix, groups)
    size = matrix.shape[0]
    turned = jnp.matmul(*pair, preferred_element_type=jnp.float32) * jnp.float32(1 / math.sqrt(size))
    if job.place == "last":
        blocks = turned.reshape(*turned.shape[:-1], job.of_group, SIDE)
    else:
        blocks = turned.reshape(*turned.shape[:-2], job.of_group, SIDE, turned.shape[-1])
    if job.output == "amax":
        return jnp.max(_finite(blocks).reshape(-1))
    scalars = Scalars.of(_OPTIONS, do, read)
    random = jnp.expand_dims(random_bits(indices(), *scalars.key), job.axis)
    return _corrected(job, do, scalars, blocks, random).reshape(turned.shape).astype(jnp.bfloat16)


def _finite(blocks: jax.Array) -> jax.Array:
    """The int32 bits of magnitudes, 0 of what is not finite."""
    return scale_choice.finite_magnitude(lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32))


def _corrected(job: _Job, do: Portable, scalars: Scalars, x: jax.Array, random: jax.Array) -> jax.Array:
    """Code times corrected scale of each value, float32; `random` has bits for each block."""
    as_bits = lambda value: lax.bitcast_convert_type(value, jnp.int32)
    amax = lax.bitcast_convert_type(jnp.max(_finite(x), axis=job.axis, keepdims=True), jnp.float32)
    lost = jnp.max(as_bits(jnp.abs(x)), axis=job.axis, keepdims=True) >= INFINITY
    (code,) = scale_codes(_OPTIONS, do, scalars, [do.lift(amax, scalars.lift)])
    magnitude = do.lift(x, scalars.lift)
    (codes,), factor, product = encoded_by(_OPTIONS, do, scalars, [magnitude], code, lambda _: random)
    units = jnp.where(product > 0, do.widen(codes << VALUE[0], VALUE[1]), jnp.float32(0))

    def summed(of_values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sum(of_values, axis=job.axis, keepdims=True), axis=job.axis - 1, keepdims=True)

    squares, along = summed(magnitude * magnitude), summed(magnitude * units * product)
    wanted = jnp.minimum(factor * jnp.where(along > 0, squares / jnp.where(along > 0, along, 1), 1), _E4M3.max)
    scale = float_bits.round_to_grid(wanted, scale_choice.grid_of(_E4M3), "stochastic", random)
    values = units * jnp.where(lost, jnp.float32(jnp.nan), scale)
    return lax.bitcast_convert_type(as_bits(values) | as_bits(x) & jnp.int32(-(1 << 31)), jnp.float32)


def _call(
    job: _Job,
    own: tuple[int, ...],
    scalars: jax.Array,
    groups: jax.Array,
    matrix: jax.Array,
    starts: jax.Array | None,
) -> jax.Array:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    along, size = job.place == "last", matrix.shape[0]
    x = groups.reshape(-1, size) if along else groups.reshape(-1, own[-1])
    grid = (len(x) // _WIDTH,) if along else (len(x) // size, own[-1] // _WIDTH)
    block = pl.BlockSpec((_WIDTH, size) if along else (size, _WIDTH), lambda i, j=0: (i, j))
    whole = lambda shape: pl.BlockSpec(shape, lambda *_: (0,) * len(shape))
    given = [] if starts is None else [starts]

    def kernel(words_ref: Any, x_ref: Any, matrix_ref: Any, *refs: Any) -> None:
        def indices() -> jax.Array:
            shape = (_WIDTH, job.of_group) if along else (job.of_group, _WIDTH)
            down, across = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
            down += pl.program_id(0) * shape[0]
            index = down * job.of_group + across if along else down * own[-1] + pl.program_id(1) * _WIDTH + across
            return in_whole(index.astype(jnp.uint32), refs[0] if given else None, (own, job.blocks))

        do = Portable() if job.interpret else Device()
        found = _compute(job, do, lambda at: words_ref[at], (x_ref[...], matrix_ref[...]), indices)
        refs[-1][...] = found.reshape(refs[-1].shape)

    wanted = (grid, jnp.int32) if job.output == "amax" else (x.shape, jnp.bfloat16)
    return pl.pallas_call(
        kernel,
        out_shape=varying(jax.ShapeDtypeStruct(*wanted), scalars, x, matrix, *given),
        grid=grid,
        in_specs=[whole(scalars.shape), block, whole(matrix.shape), *(whole(g.shape) for g in given)],
        out_specs=pl.BlockSpec((1,) * len(grid), lambda *at: at) if job.output == "amax" else block,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=job.interpret,
        name="quantize_eden",
    )(scalars, x, matrix, *given)
