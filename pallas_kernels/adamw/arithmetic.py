"""Elementary operations of the AdamW step: portable ones, and single instructions.

`reference.update` writes the arithmetic of the step once, over these operations.
`Portable` has them for XLA and interpreters, and `Instructions` for compiled kernels.
Both give the same bits, for which they need three properties:

* **No contraction.** A compiler may turn `a * b + c` into one instruction that rounds
  once, as XLA does on a CPU. So every product of `Portable` passes through an integer
  "or" with zeros that the compiler cannot know.
* **Correct rounding** of root and reciprocal, which CPUs have. A division `a / b` is
  `a * (1 / b)`, rounded twice.
* **Subnormals are zero**, as input and as result, as on CPUs under XLA.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels import moments, numerics
from pallas_kernels.arithmetic import Instruct

# From here on the device computes a correctly rounded root in five instructions;
# smaller values need another path. Its root, 2**-50, is the smallest divisor, and any
# practical eps is large in comparison.
SMALLEST_RADICAND = 2.0**-100
_TINY = "0f03800000"  # 2**-120 in PTX
_HUGE = "0f7B800000"  # 2**120 in PTX


class Portable:
    """Operations on float32, each rounded once, for XLA on a CPU and for interpreters.

    Args:
      gradient: the gradient of the step, which the compiler does not know.
    """

    def __init__(self, gradient: Array) -> None:
        # Zero except for a NaN, which stays a NaN after any "or" with its mantissa.
        bits = numerics.bits(gradient) & 0x7FFFFFFF
        self._zeros = (bits > moments.INFINITY).astype(jnp.int32)

    def _guard(self, x: Array) -> Array:
        return numerics.from_bits(numerics.bits(x) | self._zeros)

    def multiply(self, a: Array, b: Array) -> Array:
        """Return a * b, never contracted with an addition."""
        return self._guard(a * b)

    def add_exact_product(self, a: Array, b: Array, c: Array) -> Array:
        """Return a * b + c for an a * b that float32 holds exactly.

        Contraction then changes nothing.
        """
        return a * b + c

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b."""
        return a + b

    def subtract(self, a: Array, b: Array) -> Array:
        """Return a - b."""
        return a - b

    def root(self, x: Array) -> Array:
        """Return the root of x >= 2**-100; NaN for an infinite x."""
        return jnp.where(jnp.isfinite(x), jnp.sqrt(x), jnp.nan)

    def reciprocal(self, x: Array) -> Array:
        """Return 1 / x for x in [2**-50, 2**125].

        It is guarded, or XLA would turn the product with it into a division.
        """
        return self._guard(1.0 / x)

    def e4m3(self, x: Array) -> tuple[Array, Array]:
        """Return (x in E4M3, the same value as float32).

        x is rounded to nearest, ties to even; an infinity saturates as well.
        """
        saturated = jnp.where(jnp.isnan(x), x, jnp.clip(x, -448.0, 448.0))
        value = numerics.round_to(saturated, moments.E4M3)
        return value.astype(moments.E4M3), value

    def stochastic_e4m3(self, x: Array, inverse: Array | None, random: Array) -> Array:
        """Return `moments.stochastic_e4m3` of x, or of x * inverse.

        `inverse` is a power of two or NaN.
        """
        return moments.stochastic_e4m3(x if inverse is None else x * inverse, random)

    def add_v_bits(self, v: Array, bits: Array) -> Array:
        """Return `moments.magnitude_bits` of v >= 0, plus `moments.v_bits`."""
        return moments.magnitude_bits(v) + moments.v_bits(bits)

    def largest(self, x: Array) -> Array:
        """Return the largest |x| of each block that is not NaN."""
        return self.largest_or_nan(jnp.where(jnp.isnan(x), 0.0, x))

    def largest_or_nan(self, v: Array) -> Array:
        """Return the largest |v| of each block, or NaN if it has one."""
        bits = jnp.max(moments.magnitude_bits(v), axis=-1, keepdims=True)
        return numerics.from_bits(bits)


class Instructions(Portable):
    """Operations by single instructions of a GPU.

    No compiler contracts or drops them. `.ftz` flushes subnormal inputs and results to
    zero, as a CPU does under XLA.

    Args:
      run: runs PTX on float32 values, elementwise.
    """

    def __init__(self, run: Instruct) -> None:
        self._run = run

    def multiply(self, a: Array, b: Array) -> Array:
        """Return a * b."""
        return self._run("mul.rn.ftz.f32 $0, $1, $2;", a, b)

    def add_exact_product(self, a: Array, b: Array, c: Array) -> Array:
        """Return a * b + c, rounded once."""
        return self._run("fma.rn.ftz.f32 $0, $1, $2, $3;", a, b, c)

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b."""
        return self._run("add.rn.ftz.f32 $0, $1, $2;", a, b)

    def subtract(self, a: Array, b: Array) -> Array:
        """Return a - b."""
        return self._run("sub.rn.ftz.f32 $0, $1, $2;", a, b)

    def root(self, x: Array) -> Array:
        """Return the correctly rounded root of x >= 2**-100.

        It is `sqrt.rn` without its branch for smaller values.
        """
        return self._run(
            "{ .reg .f32 y, s, h, r; rsqrt.approx.ftz.f32 y, $1; mul.rn.ftz.f32 s, $1,"
            " y; mul.rn.ftz.f32 h, y, 0f3F000000; neg.f32 r, s; fma.rn.f32 r, r, s, $1;"
            " fma.rn.f32 $0, r, h, s; }",
            x,
        )

    def reciprocal(self, x: Array) -> Array:
        """Return the correctly rounded 1 / x, as `rcp.rn` without its branches."""
        return self._run(
            "{ .reg .f32 y, e, n; rcp.approx.ftz.f32 y, $1; neg.f32 n, $1; fma.rn.f32"
            " e, n, y, 0f3F800000; fma.rn.f32 $0, y, e, y; }",
            x,
        )

    def e4m3(self, x: Array) -> tuple[Array, Array]:
        """Return (x in E4M3, the same value as float32).

        In a kernel XLA cannot delete the cast and back.
        """
        rounded = x.astype(moments.E4M3)
        return rounded, rounded.astype(jnp.float32)

    def stochastic_e4m3(self, x: Array, inverse: Array | None, random: Array) -> Array:
        """Return `moments.stochastic_e4m3` of x or x * inverse.

        The sum carries into the bits that are kept.
        """
        if inverse is None:
            tiny = self._run(f"mul.rn.f32 $0, $1, {_TINY};", x)
        else:
            factor = self._run(f"mul.rn.f32 $0, $1, {_TINY};", inverse)
            tiny = self._run("mul.rn.f32 $0, $1, $2;", x, factor)
        rounded = numerics.bits(tiny) + random
        kept = rounded & jnp.int32(-(1 << moments.RANDOM_BITS))
        cut = numerics.from_bits(kept)
        wide = self._run(f"mul.rn.f32 $0, $1, {_HUGE};", cut)
        return wide.astype(moments.E4M3)

    def add_v_bits(self, v: Array, bits: Array) -> Array:
        """Return the bits of v >= 0 plus `moments.v_bits`.

        Results of a device have no subnormals, and one NaN.
        """
        return numerics.bits(v) + moments.v_bits(bits)

    def largest(self, x: Array) -> Array:
        """Return the largest |x| of each block; a device's maximum ignores NaN."""
        return jnp.max(jnp.abs(x), axis=-1, keepdims=True)

    def largest_or_nan(self, v: Array) -> Array:
        """Return the largest v of each block, or NaN if it has one."""
        bits = numerics.bits(v)
        top = jnp.max(bits, axis=-1, keepdims=True)
        return numerics.from_bits(top)
