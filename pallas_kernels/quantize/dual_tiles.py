"""`dual_quantize` as one pass over tiles: W (and error, and random bits) is read once.

Inside a kernel a float8 cast and back is kept. XLA deletes such a pair, and with it the
residual (see `numerics`), but XLA never sees the body of a compiled kernel. It does see
the interpreter's on CPUs, where it has no such rule.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import numerics, triton_passes
from pallas_kernels.arithmetic import Portable
from pallas_kernels.dispatch import Implementation
from pallas_kernels.operands import SCALE_DTYPE, Block, Operand, Quantization, Quantized
from pallas_kernels.quantize import reference
from pallas_kernels.specs import has_explicit_axes
from pallas_kernels.tiled import (
    Arrays,
    Axis,
    Body,
    Engine,
    Operands,
    Output,
    Tiling,
    map_tiles,
)


def _reject(options: Quantization, w: Array, *arrays: Array | None) -> str | None:
    """Return the reason why no tile divides w, or None."""
    scaling = options.scaling
    if isinstance(scaling, Block) and not scaling.squares:
        return (
            f"{scaling.tile} blocks of w{list(w.shape)}: only squares of a matrix; use"
            ' backend="xla"'
        )
    if w.ndim != 2:
        return f'w{list(w.shape)} is not a matrix; use backend="xla" or jax.vmap'
    tiling = Tiling.of_blocks(scaling.size) if isinstance(scaling, Block) else Tiling()
    return tiling.misfit("w", *w.shape)


def dual_quantize(
    engine: Engine | None,
    options: Quantization,
    w: Array,
    error: Array | None,
    bits: Array | None,
    amax: Array | None,
) -> Quantized:
    """Return both halves, see `api.dual_quantize`; without an engine the definition."""
    dtype = options.dtype
    scaling = options.scaling
    block = scaling if isinstance(scaling, Block) else None
    if engine is None and (block is None or not has_explicit_axes()):
        return reference.dual_quantize(options, w, error, bits, amax)
    both = options.orientation == "both"
    scalars = []
    if block is None:
        if amax is None:
            amax = numerics.amax(reference.target(w, error))
        scale, inverse = numerics.scale_and_inverse(amax, dtype, "pow2")
        scalars = [inverse, scale]
    body = _Split(dtype, block, error is not None, bits is not None)
    found = map_tiles(
        body,
        [operand for operand in (w, error, bits) if operand is not None],
        body.outputs(both, error),
        name="dual_quantize" if block is None else "block_dual_quantize",
        engine=engine,
        scalars=scalars,
        tiling=_tiling(body),
    )
    left = None if error is None else found.pop()
    lo_scale = None
    if block is not None:
        lo_scale = lax.bitcast_convert_type(found.pop(), SCALE_DTYPE)
        scale = lax.bitcast_convert_type(found.pop(), SCALE_DTYPE)
    if not both:
        hi, lo = found
        return Quantized(Operand(hi, scale, lo, lo_scale, scaling), error=left)
    hi, hi_turned, lo, lo_turned = found
    rows = Operand(hi, scale, lo, lo_scale, scaling)
    if lo_scale is not None:
        lo_scale = lo_scale.T
    columns = Operand(hi_turned, scale.T, lo_turned, lo_scale, scaling)
    return Quantized(rows, columns, left)


TRITON = Implementation(
    "triton",
    partial(dual_quantize, triton_passes.TRITON),
    _reject,
    timed=True,
)


def _tiling(body: "_Split") -> Tiling:
    """Return the tiles; a block is one."""
    if body.block is None:
        # Stochastic rounding computes more a value, and wants more threads (`Tiling`).
        return Tiling(values_per_thread=8 if body.has_bits else 16)
    size = body.block.size
    # Measured on an H200: without an error squares of 128 run at 3.1 TB/s with 128
    # values a thread, and at 2.8 with 32. With an error they run out of registers at
    # 128, 1.9 TB/s, and 64 values give 2.6.
    if size < 128:
        return Tiling.of_blocks(size, 32)
    return Tiling.of_blocks(size, 64 if body.has_error or body.has_bits else 128)


@dataclass(frozen=True)
class _Split(Body):
    """Both halves of w, the codes of a block, and the new error.

    Operands are w, the error and random bits if there are any, and without blocks the
    inverse scale and the scale.
    """

    dtype: DTypeLike
    block: Block | None
    has_error: bool
    has_bits: bool

    @property
    def axes(self) -> tuple[Axis, ...]:
        return () if self.block is None else (None,)

    def outputs(self, both: bool, error: Array | None) -> list[Output]:
        """Return the results of a pass."""
        outputs = [Output(self.dtype, both), Output(self.dtype, both)]
        if self.block is not None:
            if self.block.tile == "square":
                outputs.append(Output(jnp.uint8, form="one"))
                # A product skips blocks whose `lo` is zero (`ZERO_BLOCK` is code 0).
                outputs.append(Output(jnp.uint8, form="one", zero_with=1))
            else:  # which no kernel takes
                outputs += [Output(jnp.uint8, form="rows")] * 2
        if error is not None:
            # The new error is written over the old one, tile by tile.
            outputs.append(Output(error.dtype, replaces=1))
        return outputs

    def measured(self, operands: Operands) -> Array:
        w, error, *_ = self._sort(operands)
        return reference.target(w, error)

    def values(self, do: Portable, operands: Operands, maxima: Arrays) -> Arrays:
        w, error, bits, scalars = self._sort(operands)
        wanted = reference.target(w, error)
        if maxima:
            scale, inverse = numerics.scale_and_inverse(maxima[0], self.dtype, "pow2")
        else:
            inverse, scale = scalars
        if self.block is None and error is None and bits is None:
            scaled = do.scaled(wanted, inverse, self.dtype)
        else:  # more of a value counts than its nearest neighbour
            scaled = numerics.flush_subnormal(wanted) * inverse
        hi = self._cast(scaled)
        rest = numerics.residual(scaled, hi.astype(jnp.float32))
        if bits is None:
            lo = self._cast(rest)
        else:
            rounded = numerics.stochastic_round_to(rest, self.dtype, bits, do.floor)
            lo = rounded.astype(self.dtype)
        results = [hi, lo]
        if self.block is not None:
            results += [numerics.e8m0_code(scale)] * 2
        if error is not None:
            left = numerics.residual(rest, lo.astype(jnp.float32)) * scale
            results.append(left.astype(error.dtype))
        return tuple(results)

    def whole(self, operands: Operands) -> Arrays:
        w, error, bits, scalars = self._sort(operands)
        left: Array | None
        if self.block is None:
            inverse, scale = scalars
            wanted = reference.target(w, error)
            hi, lo, left = reference.split(wanted, inverse, scale, self.dtype, bits)
            results = [hi, lo]
        else:
            options = Quantization(self.dtype, self.block)
            rows, _, left = reference.dual_quantize(options, w, error, bits, None)
            assert rows.lo is not None and rows.lo_scale is not None
            results = [rows.values, rows.lo]
            for scale in (rows.scale, rows.lo_scale):
                results.append(lax.bitcast_convert_type(scale, jnp.uint8))
        if error is not None and left is not None:
            results.append(left.astype(error.dtype))
        return tuple(results)

    def _sort(
        self, operands: Operands
    ) -> tuple[Array, Array | None, Array | None, list[Array]]:
        """Return (w, error, random bits, scalars)."""
        w, *rest = operands
        error = rest.pop(0) if self.has_error else None
        bits = rest.pop(0) if self.has_bits else None
        return w, error, bits, rest

    def _cast(self, x: Array) -> Array:
        if self.block is None:
            return numerics.saturating_cast(x, self.dtype)
        # In a block nothing is to be clipped: its scale covers its largest value, and
        # is NaN if that is not finite.
        return x.astype(self.dtype)
