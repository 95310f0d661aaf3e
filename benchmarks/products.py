"""Products that benchmarks time: shapes, operands, and the check before the timing.

This is the only file of the benchmarks that calls the products of `pallas_kernels`.
Helpers of quantizers are below.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.timing import threaded
from pallas_kernels.dispatch import Backend
from pallas_kernels.hopper.plan import Config, Problem, candidates
from pallas_kernels.matmul import mosaic, reference
from pallas_kernels.matmul.api import SUM_BOUND, matmul
from pallas_kernels.operands import (
    Accumulation,
    Block,
    MatmulOptions,
    Operand,
    Scaling,
    Tensor,
)
from pallas_kernels.quantize.api import dual_quantize, quantize
from pallas_kernels.tuning import Key

E4M3 = jnp.float8_e4m3fn
# Bound of a BF16 product, per unit of |x| @ |w|: its sums are float32. FP8 products
# have `SUM_BOUND`.
BF16_SUM_BOUND = 2.0**-16
CHECKED = 64  # rows and columns of a product
Pair = tuple[Operand, Operand]


# Shapes
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmShape:
    """`x[m, k] @ w[n, k].T`.

    >>> str(GemmShape(8, 16, 32)), GemmShape.parse("8x16x32").n
    ('8x16x32', 32)
    """

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def operations(self) -> int:
        """Number of multiplications and additions of one product."""
        return 2 * self.m * self.k * self.n

    @classmethod
    def parse(cls, text: str) -> "GemmShape":
        """Return the shape in "MxKxN".

        Raises:
          ValueError: `text` is not three positive sizes.
        """
        sizes = text.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
            raise ValueError(
                f"shape {text!r} is not MxKxN with three positive sizes, such as"
                " 8192x4096x16384"
            )
        return cls(*map(int, sizes))


# Even the first, with 16 + 8 MiB in and 64 MiB out, exceeds the 50 MiB L2 of an H200.
H200_SHAPES = (
    GemmShape(8192, 1024, 4096),
    GemmShape(8192, 4096, 16384),
    GemmShape(16384, 8192, 28672),
)
# Shape of all benchmarks that measure one shape.
MIDDLE = H200_SHAPES[1]
CPU_SHAPES = (GemmShape(512, 1024, 1024),)
SMOKE_SHAPES = (GemmShape(64, 128, 96),)


def random_operands(shape: GemmShape, seed: int = 0) -> tuple[Array, Array]:
    """Return Gaussian x `[m, k]`, bfloat16, and W `[n, k]` of deviation 0.02, float32.

    They are never zero: zeros switch few transistors, and a GPU that draws less power
    clocks higher.
    """
    x_key, w_key = jax.random.split(jax.random.key(seed))
    # Drawn in float32, because bfloat16's own generator has 128 values and a mean that
    # is not zero.
    x = jax.random.normal(x_key, (shape.m, shape.k), jnp.float32).astype(jnp.bfloat16)
    w = jax.random.normal(w_key, (shape.n, shape.k), jnp.float32) * 0.02
    return x, w


def dot_bf16(x: Array, w: Array) -> Array:
    """Return BF16 `x[m, k] @ w[n, k].T`, summed in float32: the baseline."""
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
    )


# Products
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """Storage of the operands of a product, and its accumulation.

    Attributes:
      halves: 2 for a residual weight, 1 for a single one.
      accumulation: Accumulation of the sum; products of blocks are always "full".
      scaling: Scaling of the weight; x has the same along its rows.
      out_dtype: Dtype of the result.
    """

    halves: Literal[1, 2]
    accumulation: Accumulation = "full"
    scaling: Scaling = Tensor()
    out_dtype: str = "bfloat16"

    def key(self, shape: GemmShape) -> Key:
        """Return the name of the product in `tuned.json`."""
        return reference.key(self._options, *self._operands(shape), None)

    def _operands(self, shape: GemmShape) -> Pair:
        """Return shapes that stand for operands, without scales."""
        x: Any = jax.ShapeDtypeStruct((shape.m, shape.k), E4M3)
        w: Any = jax.ShapeDtypeStruct((shape.n, shape.k), E4M3)
        scale: Any = None
        lo = w if self.halves == 2 else None
        return Operand(x, scale), Operand(w, scale, lo, scaling=self.scaling)

    @property
    def _options(self) -> MatmulOptions:
        return MatmulOptions(jnp.dtype(self.out_dtype), self.accumulation)

    def bound(self, backend: Backend) -> float:
        """Return the largest error of a sum per unit of |x| @ |w|."""
        return SUM_BOUND[backend, self.accumulation]

    def candidates(self, shape: GemmShape) -> list[Config]:
        """Return the tile sizes of the Mosaic kernel for a shape, best guess first."""
        block = self.scaling if isinstance(self.scaling, Block) else None
        problem = Problem(shape.m, shape.k, shape.n, self.halves, block)
        return candidates(problem, self.accumulation)

    def chosen(self, shape: GemmShape) -> list[Config]:
        """Return the tile sizes with which the Mosaic kernel runs a shape, or none."""
        if not self.candidates(shape):
            return []
        config = mosaic.configure(self._options, *self._operands(shape), None)
        return [] if config is None else [config]

    def quantize(self, x: Array, w: Array, backend: Backend | None = None) -> Pair:
        """Return the operands of x `[m, k]` and W `[n, k]`."""
        return _quantize(x, w, self, backend)

    def multiply(
        self, x: Operand, w: Operand, *, backend: Backend, config: Config | None = None
    ) -> Array:
        """Multiply by a backend, or by the Mosaic kernel with these tile sizes."""
        if config is not None:
            w = dataclasses.replace(w, lo_scale=None)
            return mosaic.KERNEL.run(self._options, x, w, None, config=config)
        return matmul(
            x,
            w,
            out_dtype=jnp.dtype(self.out_dtype),
            accumulation=self.accumulation,
            backend=backend,
        )

    def agree(self, pair: Pair, backend: Backend, got: Array, expected: Array) -> bool:
        """Return whether a result is within its own bound and XLA's of XLA's result."""
        return bool(_agree(self, backend, pair, got, expected))


@partial(jax.jit, static_argnums=(0, 1))
def _agree(
    form: Form, backend: Backend, pair: Pair, got: Array, expected: Array
) -> Array:
    wide = dataclasses.replace(form, accumulation="full", out_dtype="float32")
    magnitude = wide.multiply(*jax.tree.map(_magnitude, pair), backend="xla")
    xla = expected.astype(jnp.float32)
    error = jnp.abs(got.astype(jnp.float32) - xla)
    # Each result is rounded to its dtype once more; XLA's sum of two products is
    # rounded twice.
    rounding = 3 * float(jnp.finfo(got.dtype).eps) / 2
    bound = form.bound(backend) + form.bound("xla")
    return jnp.all(error <= bound * magnitude + rounding * abs(xla))


@partial(jax.jit, static_argnums=(2, 3))
def _quantize(x: Array, w: Array, form: Form, backend: Backend | None) -> Pair:
    along = form.scaling.along_rows
    of_x = quantize(x, E4M3, along, backend=backend).rows
    if form.halves == 2:
        return of_x, dual_quantize(w, form.scaling, backend=backend).rows
    return of_x, quantize(w, E4M3, form.scaling, backend=backend).rows


def _magnitude(value: Array) -> Array:
    """Return |value|, of FP8 by its bits; scales are not negative."""
    if value.dtype not in (E4M3, jnp.float8_e5m2):
        return value
    bits = lax.bitcast_convert_type(value, jnp.uint8) & 0x7F
    return lax.bitcast_convert_type(bits, value.dtype)


@dataclass(frozen=True)
class Candidate:
    """A product that can be checked and timed.

    Attributes:
      kind, accumulation, backend: Its names in rows.
      function, args: A jitted function and its arguments.
      values: Function of the arguments that returns float32 x `[m, k]` and the parts of
        W `[n, k]`.
      gemms: Number of FP8 or BF16 products in it.
      bound: Largest error of its sums, per unit of |x| @ |w|.
    """

    kind: str
    accumulation: Accumulation
    backend: Backend
    function: Callable[..., Array]
    args: tuple[Any, ...]
    values: Callable[..., tuple[Array, ...]]
    gemms: int
    bound: float

    @property
    def name(self) -> str:
        """Name that is unique in a run."""
        return f"{self.kind} {self.accumulation} {self.backend}"


def bf16_product(x: Array, w: Array) -> Candidate:
    """Return the baseline: bfloat16 x and W."""
    multiply = jax.jit(dot_bf16)
    pair = x, w.astype(jnp.bfloat16)
    return Candidate("bf16", "full", "xla", multiply, pair, _widened, 1, BF16_SUM_BOUND)


def _widened(x: Array, w: Array) -> tuple[Array, ...]:
    return x.astype(jnp.float32), w.astype(jnp.float32)


def fp8_product(kind: str, form: Form, pair: Pair, backend: Backend) -> Candidate:
    """Return a product of operands of `form.quantize`."""
    return Candidate(
        kind,
        form.accumulation,
        backend,
        jax.jit(partial(form.multiply, backend=backend)),
        pair,
        _dequantized,
        form.halves,
        form.bound(backend),
    )


def _dequantized(x: Operand, w: Operand) -> tuple[Array, ...]:
    """Return the float32 values of x and of each half of a weight."""
    hi = w.drop_residual().dequantize()
    if w.lo is None:
        return x.dequantize(), hi
    # Not from `lo_scale`, which only marks zero blocks of the residual.
    lo = Operand(w.lo, w.scale, scaling=w.scaling).dequantize()
    return x.dequantize(), hi, lo


def check_product(candidate: Candidate) -> float:
    """Return the largest error over its bound, of some values, against float64.

    Raises:
      ArithmeticError: it is above 1, or not a number.
    """
    out = candidate.function(*candidate.args)
    random = np.random.default_rng(0)
    rows, columns = (
        jnp.asarray(random.choice(size, min(size, CHECKED), replace=False))
        for size in out.shape
    )
    wide_x, *wide_w = candidate.values(*candidate.args)
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


def split(w: Array, error: Array | None = None, **how: Any) -> Any:
    """Return `dual_quantize` of a weight, and perhaps of its error."""
    return dual_quantize(w, error=error, **how)


def donating(
    split: Callable[..., Any], w: Array, error: Array
) -> tuple[Any, tuple[()]]:
    """Return `split(w, error)` as a step that replaces the error, and its arguments."""

    def step(error: Array, w: Array) -> tuple[Array, Any]:
        quantized = split(w, error)
        return quantized.error, quantized._replace(error=None)

    return threaded(step, error, w), ()


def draw(shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> tuple[Array, ...]:
    """Return Gaussian values of deviation 1, then of an error's 0.001.

    Unsigned integers are random bits.
    """
    keys = jax.random.split(jax.random.key(0), len(dtypes))
    deviation = 1.0
    found = []
    for key, dtype in zip(keys, dtypes, strict=True):
        if dtype == jnp.uint32:
            found.append(jax.random.bits(key, shape))
        else:
            found.append((jax.random.normal(key, shape) * deviation).astype(dtype))
        deviation = 1e-3
    return tuple(found)


def same_bits(got: Any, expected: Any) -> bool:
    """Return whether two trees of arrays are equal bit for bit.

    The device compares, which saves the transfer.
    """
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        if not jnp.array_equal(a.view(bits), b.view(bits)):
            return False
    return True


def snr_db(reference: Any, value: Any) -> float:
    """Return the signal-to-noise ratio of a value in dB, in float64.

    `SNR = 10 log10(sum x^2 / sum (x - y)^2)`; inf if the two are equal.

    >>> round(snr_db(np.array([3.0, 4.0]), np.array([3.0, 4.5])), 3)
    20.0
    """
    wide = np.asarray(reference).astype(np.float64).reshape(-1)
    difference = np.asarray(value).astype(np.float64).reshape(-1) - wide
    noise = float(np.vdot(difference, difference))
    signal = float(np.vdot(wide, wide))
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)
