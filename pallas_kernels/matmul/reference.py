"""The definition of the FP8 product in plain lax.

It multiplies in float32 on a CPU, and on cuBLASLt's FP8 tensor cores on a GPU. With one
scale per tensor it is `out = sum_k x[.., k] * (w[n, k] + w_lo[n, k]) * scale` with
float32 accumulation. On a GPU three details decide whether XLA calls
`__cublas$lt$matmul$f8` and nothing else (measured on an H200):

* both operands are contracted over their last axes (Hopper's FP8 `wgmma` reads both
  along the contraction), so no transpose kernel is needed;
* the dot algorithm is named, which routes straight to cuBLASLt; autotuning XLA's Triton
  GEMMs takes minutes;
* an optimization barrier on x keeps every dot apart. XLA would join dots that share x,
  such as q, k and v or both halves of a residual product, and concatenate their weights
  at run time. A barrier on the scale keeps it inside: XLA would factor it out and
  multiply in a pass of its own. XLA then computes the small product with W_lo first
  and hands it to the other as cuBLASLt's C operand (beta = 1), both scaled inside.

With any other scaling the operands are dequantized. An FP8 value times a power of two
is exact in bfloat16, so XLA multiplies them on the GPU's BF16 tensor cores, which a
kernel has to beat.
"""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.matmul.devices import on_each_device
from pallas_kernels.operands import (
    Block,
    MatmulOptions,
    Operand,
    Tensor,
    dimensions,
    sizes,
)
from pallas_kernels.specs import (
    Sharding,
    entries,
    has_explicit_axes,
    hidden_shards,
    with_entries,
)
from pallas_kernels.tuning import Key


class _AnyFP8(lax.DotAlgorithm):
    """XLA's algorithm `ANY_F8_ANY_F8_F32[_FAST_ACCUM]`, as every jaxlib serializes it.

    `lax.DotAlgorithmPreset` writes the operands' own types into the program, and jaxlib
    0.12 refuses E4M3FN there when it serializes for a GPU plugin or for `jax.export`
    ("failed to legalize operation 'vhlo.dot_general_v2'"). XLA reads any float8 type
    there as the same algorithm, and writes E5M2 itself; this class does so, too. Its
    fields hold the true types, so `lax.dot_general` converts nothing; only the
    attribute in the program differs.
    """

    def _convert_to_hlo_attr(self, lhs_dtype: Any, rhs_dtype: Any) -> Any:
        canonical = lax.DotAlgorithm(
            jnp.float8_e5m2,
            jnp.float8_e5m2,
            jnp.float32,
            allow_imprecise_accumulation=self.allow_imprecise_accumulation,
        )
        return canonical._convert_to_hlo_attr(lhs_dtype, rhs_dtype)


def matmul(options: MatmulOptions, x: Operand, w: Operand, bias: Array | None) -> Array:
    """Return the product, see `api.matmul`.

    Each device multiplies its own part if a wire is asked for, because XLA has no such
    sums, and if explicit axes have blocks, because JAX does not merge and cut explicit
    axes by itself. Otherwise XLA partitions the definition.
    """
    has_explicit_blocks = w.scaling.in_blocks and has_explicit_axes()
    if options.wire is None and not has_explicit_blocks:
        return product(options, x, w, bias)
    return on_each_device(product, options, x, w, bias)


def product(
    options: MatmulOptions, x: Operand, w: Operand, bias: Array | None
) -> Array:
    """Return the product on the platform for which the program is lowered."""
    multiply = _scaled_once if isinstance(w.scaling, Tensor) else _dequantized
    out = multiply(options, x, w)
    return out if bias is None else out + bias.astype(options.out_dtype)


def key(options: MatmulOptions, x: Operand, w: Operand, bias: Array | None) -> Key:
    """Return the name of a product in `tuned.json`.

    It is "padded" if cuBLASLt must pad sizes to multiples of 16. Times of a product
    that skips zero blocks, "nonzero", are for a residual with half of its blocks zero.
    """
    halves = "single" if w.lo is None else "dual"
    out = jnp.dtype(options.out_dtype)
    shape = sizes(x, w)
    if isinstance(w.scaling, Block):
        if w.lo_scale is not None:
            halves += " nonzero"
        return Key(
            "block_matmul", f"{halves} {w.scaling.tile} {w.scaling.size} {out}", shape
        )
    padded = "" if all(size % 16 == 0 for size in shape) else " padded"
    return Key("matmul", f"{halves} {options.accumulation} {out}{padded}", shape)


def product_scale(x: Operand, w: Operand) -> Array:
    """Return the scale of a product of operands with one scale each.

    The product of two powers of two is exact in bfloat16 and has that dtype: cuBLASLt
    then applies it, whereas a float32 scale costs a pass over a bfloat16 output.
    """
    scale = x.scale * w.scale
    if x.scaling.scale == w.scaling.scale == "pow2":
        return scale.astype(jnp.bfloat16)
    return scale


def _scaled_once(options: MatmulOptions, x: Operand, w: Operand) -> Array:
    """Return the product of operands with one scale each."""
    axes = dimensions(x, w)
    scale = product_scale(x, w)
    # `api` scales rows itself and passes the constant 1. Behind a barrier it would cost
    # a pass over the product.
    is_one = isinstance(scale, np.ndarray | np.generic) and scale == 1
    operands = (x.values, w.values, w.lo, None if is_one else scale)
    in_float32 = partial(_in_float32, options, axes)
    if x.values.size == 0 or w.values.size == 0:
        return in_float32(*operands)
    on_tensor_cores = partial(_on_tensor_cores, options, axes)
    return lax.platform_dependent(*operands, cuda=on_tensor_cores, default=in_float32)


def _in_float32(
    options: MatmulOptions,
    axes: lax.DotDimensionNumbers,
    x: Array,
    w: Array,
    w_lo: Array | None,
    scale: Array | None,
) -> Array:
    wide = w.astype(jnp.float32)
    if w_lo is not None:
        wide = wide + w_lo.astype(jnp.float32)  # exact: 18 bits at most
    out = lax.dot_general(
        x.astype(jnp.float32),
        wide,
        axes,
        precision=lax.Precision.HIGHEST,
        out_sharding=options.out_sharding,
    )
    if scale is not None:
        out = out * scale.astype(jnp.float32)
    return out.astype(options.out_dtype)


def _on_tensor_cores(
    options: MatmulOptions,
    axes: lax.DotDimensionNumbers,
    x: Array,
    w: Array,
    w_lo: Array | None,
    scale: Array | None,
) -> Array:
    out_dtype = options.out_dtype
    # bfloat16 straight from the GEMM: asking for float32 and casting later costs a
    # pass over the output. float16 has too little range for the product before it
    # is scaled.
    product_dtype = jnp.bfloat16 if out_dtype == jnp.bfloat16 else jnp.float32
    # A bfloat16 scale is a power of two, exact in the product's dtype, so cuBLASLt
    # applies it.
    is_power = scale is not None and scale.dtype == jnp.bfloat16
    scale_dtype = product_dtype if is_power else jnp.float32

    def scaled_dot(x: Array, w: Array, scale: Array | None) -> Array:
        out = _fp8_dot(options, x, w, axes, product_dtype, options.out_sharding)
        if scale is not None:
            out = out.astype(scale_dtype) * scale.astype(scale_dtype)
        return out.astype(out_dtype)

    x, scale = lax.optimization_barrier((x, scale))
    out = scaled_dot(x, w, scale)
    if w_lo is not None:
        # Chained to the first barrier, because XLA merges two barriers on the same
        # operands.
        x, scale = lax.optimization_barrier((x, scale))
        out = out + scaled_dot(x, w_lo, scale)
    # XLA would fuse a gelu that follows into the GEMM, and fails to compile
    # ("!has_aux_output") if the product itself is needed as well, as in a
    # rematerialized backward pass.
    return lax.optimization_barrier(out)


def add_product(options: MatmulOptions, x: Operand, w: Operand, total: Array) -> Array:
    """Return `total + x @ w.T` of operands with one scale each, see `api.add_product`.

    The weight has no residual.
    """
    axes = dimensions(x, w)

    def in_float32(x: Array, w: Array, scale: Array, total: Array) -> Array:
        return total + _in_float32(options, axes, x, w, None, scale)

    def on_tensor_cores(x: Array, w: Array, scale: Array, total: Array) -> Array:
        # No barrier behind the product: XLA hands `total` to cuBLASLt as its C operand,
        # which is overwritten.
        x, scale = lax.optimization_barrier((x, scale))
        return _fp8_dot(options, x, w, axes, jnp.float32, None) * scale + total

    scale = (x.scale * w.scale).astype(jnp.float32)
    return lax.platform_dependent(
        x.values, w.values, scale, total, cuda=on_tensor_cores, default=in_float32
    )


def _fp8_dot(
    options: MatmulOptions,
    x: Array,
    w: Array,
    axes: lax.DotDimensionNumbers,
    dtype: DTypeLike,
    sharding: Sharding,
) -> Array:
    """Return the product of FP8 values by cuBLASLt.

    It has zero rows added up to two on each device, and a zero column next to a single
    one. XLA does not hand a product with a vector to cuBLASLt, and has no other
    implementation of an FP8 algorithm.
    """
    ((of_x, of_w), _) = axes
    (free,) = set(range(w.ndim)) - set(of_w)
    if x.ndim == len(of_x):  # a vector; its product is one as well
        spec = with_entries(sharding, (None, *entries(sharding, w.ndim - len(of_w))))
        axes = ((tuple(axis + 1 for axis in of_x), of_w), ((), ()))
        return _fp8_dot(options, x[None], w, axes, dtype, spec)[0]
    is_fast = options.accumulation == "fast"
    algorithm = _AnyFP8(x.dtype, w.dtype, dtype, allow_imprecise_accumulation=is_fast)
    count = x.shape[0]
    rows = math.prod(x.shape[: x.ndim - len(of_x)])
    fewest = 2 * hidden_shards()
    # `jax.export` may leave the number open
    has_few_rows = not isinstance(rows, int) or rows < fewest
    has_one_column = w.shape[free] == 1
    if has_few_rows:
        x = _padded(x, 0, fewest)
    if has_one_column:
        w = _padded(w, free, 1)
    out = lax.dot_general(
        x,
        w,
        axes,
        precision=algorithm,
        preferred_element_type=dtype,
        out_sharding=sharding,
    )
    if has_few_rows:
        out = out[:count]
    return out[..., :1] if has_one_column else out


def _padded(array: Array, axis: int, more: int) -> Array:
    """Return an array with zeros added to the end of an axis."""
    padding = [(0, 0, 0)] * array.ndim
    padding[axis] = (0, more, 0)
    return lax.pad(array, jnp.zeros((), array.dtype), padding)


def _dequantized(options: MatmulOptions, x: Operand, w: Operand) -> Array:
    """Return the product of operands with many scales."""
    contracted = w.values.ndim - 1

    def flat(half: Array) -> Array:
        """Merge the contracted axes, as blocks run along all of them."""
        if contracted == 1:
            return half
        return half.reshape(*half.shape[: half.ndim - contracted], -1)

    def wide(half: Array, scales: Array) -> Array:
        # The barrier keeps XLA on a GPU from cancelling the cast against the one that
        # made the values, in the same jit.
        return lax.optimization_barrier(half).astype(jnp.float32) * scales

    x_values = flat(x.values)
    w_values = flat(w.values)
    of_x = x.scaling.spread(x.scale, x_values.shape)
    of_w = w.scaling.spread(w.scale, w_values.shape)
    operands = [wide(x_values, of_x), wide(w_values, of_w)]
    if w.lo is not None:
        operands.append(wide(flat(w.lo), of_w))
    axes = (((x_values.ndim - 1,), (1,)), ((), ()))

    def in_float32(x: Array, w: Array, *lo: Array) -> Array:
        whole = w + lo[0] if lo else w
        out = lax.dot_general(x, whole, axes, precision=lax.Precision.HIGHEST)
        return out.astype(options.out_dtype)

    def on_tensor_cores(x: Array, *halves: Array) -> Array:
        narrow = x.astype(jnp.bfloat16)
        products = [
            lax.dot_general(
                narrow,
                half.astype(jnp.bfloat16),
                axes,
                preferred_element_type=jnp.float32,
            )
            for half in halves
        ]
        return sum(products[1:], products[0]).astype(options.out_dtype)

    return lax.platform_dependent(*operands, cuda=on_tensor_cores, default=in_float32)
