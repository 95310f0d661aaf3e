"""`quantize` and `dual_quantize` with one scale on Hopper: one pass in Pallas Mosaic (`hopper/passes.py`)."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper import plan
from pallas_kernels.operands import Operand, Quantization, Quantized
from pallas_kernels.partition import Letters, partitioned
from pallas_kernels.quantize import reference
from pallas_kernels.specs import device_count, has_explicit_axes
from pallas_kernels.tiled import Body, Output


def reject(options: Quantization, x: jax.Array, amax: jax.Array | None) -> str | None:
    """Return the reason why this kernel cannot quantize x, or None."""
    return _reject(x) if x.ndim >= 2 else f'x{list(x.shape)} has no tiles; use backend="xla"'


def reject_dual(
    options: Quantization, w: jax.Array, error: jax.Array | None, bits: jax.Array | None, amax: jax.Array | None
) -> str | None:
    """Return the reason why this kernel cannot split w, or None."""
    if w.ndim != 2:
        return f'w{list(w.shape)} is not a matrix; use backend="xla" or jax.vmap'
    if bits is not None:
        return 'random bits are not read here; use backend="triton" or "xla"'
    if error is not None and device_count() > 1 and device_kind() != "cpu":
        # JAX cannot partition a function with references, by which the error is replaced where it lies.
        return 'an error on several devices; use backend="triton" or "xla"'
    return _reject(w) if error is None else _reject(w, error)


def _reject(*matrices: jax.Array) -> str | None:
    if (reason := plan.reject(jnp.bfloat16)) is not None:
        return reason
    dtypes = tuple(str(x.dtype) for x in matrices)
    if not {*dtypes} <= {"bfloat16", "float32"}:
        return f'{" and ".join(dtypes)} must be bfloat16 or float32; use backend="triton" or "xla"'
    return _misfit(math.prod(matrices[0].shape[:-1]), matrices[0].shape[-1])


def _misfit(m: int, k: int) -> str | None:
    if m and k and m % plan.ROWS == 0 and k % plan.COLUMNS == 0:
        return None
    return f'[{m}, {k}] must be multiples of {plan.ROWS} and {plan.COLUMNS} for backend="mosaic"'


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    scale, inverse = options.scaling.find(x, options.dtype, amax)

    def body(_: object, x: jax.Array, inverse: jax.Array) -> tuple[jax.Array]:
        return (numerics.scaled_cast(x.astype(jnp.float32), inverse, options.dtype),)

    outputs = [Output(options.dtype, options.orientation == "both")]
    values, *turned = _run(body, outputs, "quantize", [x], [inverse])
    rows = Operand(values, scale, scaling=options.scaling)
    return Quantized(rows, Operand(turned[0], scale, scaling=options.scaling) if turned else None)


def dual_quantize(
    options: Quantization, w: jax.Array, error: jax.Array | None, bits: jax.Array | None, amax: jax.Array | None
) -> Quantized:
    """Return both halves, see `api.dual_quantize`."""
    matrices = [w] if error is None else [w, error]
    if amax is None:
        amax = numerics.amax(reference.target(w, error))
    scale, inverse = numerics.scale_and_inverse(amax, options.dtype, "pow2")

    def body(round_to: Callable[..., jax.Array], *operands: jax.Array) -> tuple[jax.Array, ...]:
        *matrices, inverse, scale = operands
        target = reference.target(matrices[0], matrices[1] if error is not None else None)
        return reference.split(target, inverse, scale, options.dtype, None, round_to)[: 2 + (error is not None)]

    both = options.orientation == "both"
    outputs = [Output(options.dtype, both)] * 2 + ([] if error is None else [Output(error.dtype, replaces=1)])
    results = _run(body, outputs, "dual_quantize", matrices, [inverse, scale])
    each = 1 + both  # results of hi, and of lo
    rows, *columns = (
        Operand(hi, scale, lo, scaling=options.scaling)
        for hi, lo in zip(results[:each], results[each : 2 * each], strict=True)
    )
    return Quantized(rows, columns[0] if both else None, None if error is None else results[-1])


def _run(
    body: Body, outputs: Sequence[Output], name: str, matrices: Sequence[jax.Array], scalars: Sequence[jax.Array]
) -> list[jax.Array]:
    """Run a pass over matrices `[*m, k]`, each device over its part."""
    count = len(matrices)

    def local(*operands: jax.Array, summed_over: tuple[str, ...] = ()) -> list[jax.Array]:
        if _misfit(*operands[0].shape) is not None:
            found = body(numerics.round_to, *operands[:count], *(scalar[0] for scalar in operands[count:]))
            cast = [(y.astype(output.dtype), output) for y, output in zip(found, outputs, strict=True)]
            return [x for y, output in cast for x in ([y, y.T] if output.transposed else [y])]
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.hopper import passes

        return passes.call(body, outputs, name, operands[:count], jnp.concatenate(operands[count:]))

    rule = ", ".join(["i j"] * count + ["u"] * len(scalars)) + " -> " + ", ".join(output.rule for output in outputs)
    operands, merged = [*matrices, *(x.reshape(1) for x in scalars)], {"i": matrices[0].shape[:-1]}
    run: Callable[..., list[jax.Array]] = partitioned(local, rule, merged=merged)
    if device_kind() == "cpu" and not has_explicit_axes():
        # The interpreter calls back into Python, which a partitioned function cannot do.
        run = Letters.read(rule, merged).over_arrays(local)
    return run(*operands)
