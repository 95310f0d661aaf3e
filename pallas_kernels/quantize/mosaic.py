"""`quantize` and `dual_quantize` with one scale on Hopper: one pass in Pallas Mosaic (`hopper/passes.py`)."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import device_kind
from pallas_kernels.hopper import plan
from pallas_kernels.hopper.pass_text import Pass, quantized, split
from pallas_kernels.operands import Operand, Quantization, Quantized
from pallas_kernels.partition import Letters, partitioned
from pallas_kernels.quantize import reference
from pallas_kernels.specs import device_count, has_explicit_axes


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
    x = matrices[0]
    return Pass("", dtypes, "", (), quantized, lambda *_: ()).misfit(math.prod(x.shape[:-1]), x.shape[-1])


def quantize(options: Quantization, x: jax.Array, amax: jax.Array | None) -> Quantized:
    """Return the quantized tensor, see `api.quantize`."""
    scale, inverse = options.scaling.find(x, options.dtype, amax)

    def by_numbers(x: jax.Array, inverse: jax.Array) -> list[jax.Array]:
        return [numerics.scaled_cast(x.astype(jnp.float32), inverse, options.dtype)]

    both = options.orientation == "both"
    one = Pass("quantize", (str(x.dtype),), jnp.dtype(options.dtype).name, (both,), quantized, by_numbers)
    values, *turned = _run(one, [x], [inverse])
    rows = Operand(values, scale, scaling=options.scaling)
    return Quantized(rows, Operand(turned[0], scale, scaling=options.scaling) if both else None)


def dual_quantize(
    options: Quantization, w: jax.Array, error: jax.Array | None, bits: jax.Array | None, amax: jax.Array | None
) -> Quantized:
    """Return both halves, see `api.dual_quantize`."""
    matrices = [w] if error is None else [w, error]
    if amax is None:
        amax = numerics.amax(reference.target(w, error))
    scale, inverse = numerics.scale_and_inverse(amax, options.dtype, "pow2")

    def by_numbers(*operands: jax.Array) -> Sequence[jax.Array]:
        *matrices, inverse, scale, _ = operands
        target = reference.target(matrices[0], matrices[1] if error is not None else None)
        return reference.split(target, inverse, scale, options.dtype, None)[: 2 + (error is not None)]

    both = options.orientation == "both"
    dtypes, replaced = tuple(str(x.dtype) for x in matrices), None if error is None else 1
    kind = jnp.dtype(options.dtype).name
    one = Pass("dual_quantize", dtypes, kind, (both, both), split, by_numbers, replaced)
    results = _run(one, matrices, [inverse, scale, jnp.float32(1)])
    each = 1 + both  # results of hi, and of lo
    rows, *columns = (
        Operand(hi, scale, lo, scaling=options.scaling)
        for hi, lo in zip(results[:each], results[each : 2 * each], strict=True)
    )
    return Quantized(rows, columns[0] if both else None, None if error is None else results[-1])


def _run(one: Pass, matrices: Sequence[jax.Array], scalars: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a pass over matrices `[*m, k]`, each device over its part."""
    count = len(matrices)

    def local(*operands: jax.Array, summed_over: tuple[str, ...] = ()) -> list[jax.Array]:
        if one.misfit(*operands[0].shape) is not None:
            found = one.by_numbers(*operands[:count], *(scalar[0] for scalar in operands[count:]))
            turned = [*one.turned, *[False] * (len(found) - len(one.turned))]
            return [x for y, turns in zip(found, turned, strict=True) for x in ([y, y.T] if turns else [y])]
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.hopper import passes

        return passes.call(one, operands[:count], jnp.concatenate(operands[count:]))

    results = ["j i" if turns else "i j" for turns in one.results] + ["i j"] * (one.replaced is not None)
    rule = ", ".join(["i j"] * count + ["u"] * len(scalars)) + " -> " + ", ".join(results)
    operands, merged = [*matrices, *(x.reshape(1) for x in scalars)], {"i": matrices[0].shape[:-1]}
    run: Callable[..., list[jax.Array]] = partitioned(local, rule, merged=merged)
    if device_kind() == "cpu" and not has_explicit_axes():
        # The interpreter calls back into Python, which a partitioned function cannot do.
        run = Letters.read(rule, merged).over_arrays(local)
    return run(*operands)
