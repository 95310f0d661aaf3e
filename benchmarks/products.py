"""Products that benchmarks time: operands, their values in float32, and the check
before the timing.

This is the only file of the benchmarks that calls the products of `pallas_kernels`.
Helpers of quantizers are below.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.shapes import GemmShape, dot_bf16
from benchmarks.timing import threaded
from pallas_kernels.dispatch import Backend
from pallas_kernels.hopper.plan import Config, Problem, candidates
from pallas_kernels.matmul import mosaic, reference
from pallas_kernels.matmul.api import SUM_BOUND, matmul, skip_matmul
from pallas_kernels.operands import Accumulation, Block, Operand, Scaling, Tensor
from pallas_kernels.operands import Product as Options
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.tuning import Key

E4M3 = jnp.float8_e4m3fn
# Bound of a BF16 product, per unit of |x| @ |w|: its sums are float32. FP8 products
# have `SUM_BOUND`.
BF16_SUM_BOUND = 2.0**-16
Pair = tuple[Operand, Operand]


@dataclass(frozen=True)
class Form:
    """Storage of the operands of a product, and its accumulation.

    Attributes:
      halves: 2 for a residual weight, 1 for a single one.
      accumulation: Accumulation of the sum; products of blocks are always "full".
      scaling: Scaling of the weight; x has the same along its rows.
      out_dtype: Dtype of the result.
      residual_blocks: Blocks of the residual that are multiplied.
    """

    halves: Literal[1, 2]
    accumulation: Accumulation = "full"
    scaling: Scaling = Tensor()
    out_dtype: str = "bfloat16"
    residual_blocks: Literal["all", "nonzero"] = "all"

    @property
    def op(self) -> str:
        """Name of the op in `tuned.json`."""
        return self._key.op

    @property
    def variant(self) -> str:
        """Name of the variant in `tuned.json`."""
        return self._key.variant

    @property
    def _key(self) -> Key:
        return reference.key(self._options, *self._operands(128, 128, 128), None)

    def _operands(self, m: int, k: int, n: int) -> Pair:
        """Return shapes that stand for operands, without scales."""
        x: Any = jax.ShapeDtypeStruct((m, k), E4M3)
        w: Any = jax.ShapeDtypeStruct((n, k), E4M3)
        scale: Any = None
        return Operand(x, scale), Operand(
            w, scale, w if self.halves == 2 else None, scaling=self.scaling
        )

    @property
    def _options(self) -> Options:
        return Options(jnp.dtype(self.out_dtype), self.accumulation)

    def bound(self, backend: Backend) -> float:
        """Return the largest error of a sum per unit of |x| @ |w|."""
        return SUM_BOUND[backend, self.accumulation]

    def candidates(self, shape: GemmShape) -> list[Config]:
        """Return the tile sizes of the Mosaic kernel for a shape, best guess first."""
        block = self.scaling if isinstance(self.scaling, Block) else None
        skips = self.residual_blocks == "nonzero"
        problem = Problem(shape.m, shape.k, shape.n, self.halves, block, skips)
        return candidates(problem, self.accumulation)

    def chosen(self, shape: GemmShape) -> list[Config]:
        """Return the tile sizes with which the Mosaic kernel runs a shape, or none."""
        x, w = self._operands(shape.m, shape.k, shape.n)
        config = (
            mosaic.configure(self._options, x, w, None)
            if self.candidates(shape)
            else None
        )
        return [] if config is None else [config]

    def quantize(
        self, x: jax.Array, w: jax.Array, backend: Backend | None = None
    ) -> Pair:
        """Return the operands of x `[m, k]` and W `[n, k]`."""
        return _quantize(x, w, self, backend)

    def multiply(
        self,
        x: Operand,
        w: Operand,
        *,
        backend: Backend | None,
        config: Config | None = None,
    ) -> jax.Array:
        """Multiply by a backend, or by the Mosaic kernel with these tile sizes."""
        out_dtype, skips = jnp.dtype(self.out_dtype), self.residual_blocks == "nonzero"
        if config is not None:
            w = w if skips else dataclasses.replace(w, lo_scale=None)
            return mosaic.KERNEL.run(self._options, x, w, None, config=config)
        if skips:
            return skip_matmul(x, w, out_dtype=out_dtype, backend=backend)
        return matmul(
            x, w, out_dtype=out_dtype, accumulation=self.accumulation, backend=backend
        )

    def agree(
        self, pair: Pair, backend: Backend, got: jax.Array, expected: jax.Array
    ) -> bool:
        """Return whether a result is within its own bound and XLA's of XLA's result."""
        return bool(np.asarray(_agree(self, backend, pair, got, expected)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _agree(
    form: Form, backend: Backend, pair: Pair, got: jax.Array, expected: jax.Array
) -> jax.Array:
    wide = dataclasses.replace(
        form, accumulation="full", out_dtype="float32", residual_blocks="all"
    )
    magnitude = wide.multiply(*jax.tree.map(_magnitude, pair), backend="xla")
    result, xla = (value.astype(jnp.float32) for value in (got, expected))
    # Each result is rounded to its dtype once more; XLA's sum of two products is
    # rounded twice.
    rounding = 3 * float(jnp.finfo(got.dtype).eps) / 2
    bound = (form.bound(backend) + form.bound("xla")) * magnitude + rounding * abs(xla)
    return jnp.all(jnp.abs(result - xla) <= bound)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _quantize(x: jax.Array, w: jax.Array, form: Form, backend: Backend | None) -> Pair:
    def operand(value: jax.Array, scaling: Scaling, halves: int) -> Operand:
        if halves == 2:
            return dual_quantize(value, scaling, backend=backend).rows
        return quantize(value, E4M3, scaling, backend=backend).rows

    return operand(x, form.scaling.along_rows, 1), operand(w, form.scaling, form.halves)


def _magnitude(value: jax.Array) -> jax.Array:
    """Return |value|, of FP8 by its bits; scales are not negative."""
    if value.dtype not in (E4M3, jnp.float8_e5m2):
        return value
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(value, jnp.uint8) & 0x7F, value.dtype
    )


def halves_of(w: Operand) -> tuple[jax.Array, ...]:
    """Return the float32 values of each half of a weight."""
    hi = w.drop_residual().dequantize()
    # Not from `lo_scale`, which only marks zero blocks of the residual.
    return (
        (hi,)
        if w.lo is None
        else (hi, Operand(w.lo, w.scale, scaling=w.scaling).dequantize())
    )


@dataclass(frozen=True)
class Product:
    """A product that can be checked and timed.

    Attributes:
      kind, accumulation, backend: Its names in rows.
      function, args: A jitted function and its arguments.
      values: Function that returns float32 x `[m, k]` and the parts of W `[n, k]`
        behind the arguments.
      gemms: Number of FP8 or BF16 products in it.
      bound: Largest error of its sums, per unit of |x| @ |w|.
      config: Tile sizes that were chosen by hand.
    """

    kind: str
    accumulation: Accumulation
    backend: Backend
    function: Callable[..., jax.Array]
    args: tuple[Any, ...]
    values: Callable[[], tuple[jax.Array, ...]]
    gemms: int
    bound: float
    config: Config | None = None

    @property
    def name(self) -> str:
        """Name that is unique in a run."""
        return f"{self.kind} {self.accumulation} {self.backend} {self.config or ''}"


def bf16_product(x: jax.Array, w: jax.Array) -> Product:
    """Return the baseline: bfloat16 x and W."""
    half = w.astype(jnp.bfloat16)
    values = lambda: (x.astype(jnp.float32), half.astype(jnp.float32))
    return Product(
        "bf16", "full", "xla", jax.jit(dot_bf16), (x, half), values, 1, BF16_SUM_BOUND
    )


def fp8_product(
    kind: str, form: Form, pair: Pair, backend: Backend, config: Config | None = None
) -> Product:
    """Return a product of operands of `form.quantize`."""
    function = jax.jit(functools.partial(form.multiply, backend=backend, config=config))
    values = lambda: (pair[0].dequantize(), *halves_of(pair[1]))
    bound = form.bound(backend)
    return Product(
        kind,
        form.accumulation,
        backend,
        function,
        pair,
        values,
        form.halves,
        bound,
        config,
    )


def possible(found: list[Product]) -> list[Product]:
    """Return the products if the backend has them; otherwise print the reason and
    return none.
    """
    try:
        for candidate in found:
            jax.eval_shape(candidate.function, *candidate.args)
    except NotImplementedError as reason:
        print(f"{found[0].kind}: {reason}")
        return []
    return found


def check_product(candidate: Product, checked_rows: int = 64, seed: int = 0) -> float:
    """Return the largest error over its bound, on random rows and columns, against
    float64.

    Raises:
      ArithmeticError: it is above 1, or not a number.
    """
    out = candidate.function(*candidate.args)
    random = np.random.default_rng(seed)
    rows, columns = (
        jnp.asarray(random.choice(size, min(size, checked_rows), replace=False))
        for size in out.shape
    )
    wide_x, *wide_w = candidate.values()
    x = np.asarray(wide_x[rows]).astype(np.float64)
    halves = [np.asarray(half[columns]).astype(np.float64) for half in wide_w]
    parts = [x @ half.T for half in halves]
    exact = sum(parts)
    magnitude = np.abs(x) @ np.abs(sum(halves)).T
    # An output is rounded once; XLA's dual product rounds each half and their sum.
    rounding = float(jnp.finfo(out.dtype).eps)
    bound = candidate.bound * magnitude + rounding * sum(np.abs(part) for part in parts)
    got = np.asarray(out[rows[:, None], columns[None, :]]).astype(np.float64)
    with np.errstate(divide="ignore"):
        used = float(np.max(np.abs(got - exact) / bound))
    if not used <= 1:
        raise ArithmeticError(
            f"{candidate.name}: the error is {used} of its bound; the product is wrong,"
            " so it is not timed"
        )
    return used


# Quantizers
# --------------------------------------------------------------------------------------


def donating(
    split: Callable[..., Any], w: jax.Array, error: jax.Array
) -> tuple[Any, tuple[()]]:
    """Return `split(w, error)` as a step that replaces the error in place, and its
    arguments.
    """

    def step(error: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
        quantized = split(w, error)
        return quantized.error, quantized._replace(error=None)

    return threaded(step, error, w), ()


def draw(shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """Return Gaussian values of deviation 1, then of an error's 0.001; unsigned
    integers are random bits.
    """
    keys = jax.random.split(jax.random.key(0), len(dtypes))
    return tuple(
        (
            jax.random.bits(key, shape)
            if dtype == jnp.uint32
            else (jax.random.normal(key, shape) * (1e-3 if i else 1.0)).astype(dtype)
        )
        for i, (key, dtype) in enumerate(zip(keys, dtypes, strict=True))
    )


def same_bits(got: Any, expected: Any) -> bool:
    """Return whether two trees of arrays are equal bit for bit; the device compares,
    which saves the transfer.
    """
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        as_bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        bits_a, bits_b = (jax.lax.bitcast_convert_type(v, as_bits) for v in (a, b))
        if not np.asarray(jnp.array_equal(bits_a, bits_b)):
            return False
    return True


def compare(reference: Any, value: Any) -> tuple[float, float]:
    """Return (signal-to-noise ratio in dB, mean squared error) of a value, computed on
    the host in float64.

    `SNR = 10 log10(sum x^2 / sum (x - y)^2)`; inf if the two are equal.

    >>> snr_db, mean_squared_error = compare(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    >>> round(snr_db, 3), mean_squared_error
    (20.0, 0.125)
    """
    wide = np.asarray(reference).astype(np.float64).reshape(-1)
    difference = np.asarray(value).astype(np.float64).reshape(-1) - wide
    noise = float(np.vdot(difference, difference))
    signal = float(np.vdot(wide, wide))
    snr_db = math.inf if noise == 0 else 10 * math.log10(signal / noise)
    return snr_db, noise / wide.size
