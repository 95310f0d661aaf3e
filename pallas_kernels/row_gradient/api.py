"""`row_gradient`: the gradients of a function of rows, such as a norm, in one pass over memory."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.row_gradient import reference, triton
from pallas_kernels.row_gradient.reference import Gradients, Options
from pallas_kernels.row_gradient.rows import Function, check_function

IMPLEMENTATIONS = (
    Implementation("triton", triton.row_gradient, triton.reject, triton.decline, triton.configure),
    Implementation("xla", reference.row_gradient, key=reference.key),
)
_DTYPES = ("bfloat16", "float16", "float32")


def row_gradient(
    function: Function,
    x: jax.Array,
    vectors: tuple[jax.Array, ...],
    dy: jax.Array | tuple[jax.Array, ...],
    carried: jax.Array | None = None,
    *,
    backend: Backend | None = None,
) -> Gradients:
    """The gradients of x and of vectors from that of `y = function(x, *vectors)`, and what x receives otherwise.

    `dx = carried + J_xᵀ dy` and `dv = sum over all rows of J_vᵀ dy`, in float32: x, vectors, dy and every number within
    the function are widened, and only the results are rounded, once, to the dtypes of x and of each vector.

    Args:
      function: of x `[r, k]` and vectors `[k]`, returning `[r, k]`, for any r: elementwise operations, and sums, maxima
        and minima along the last axis. It is part of the key of compiled programs, so equal functions must compare
        equal: a function of a module, or a frozen dataclass with `__call__`; not a lambda made anew for every call.
      x: bfloat16, float16 or float32 `[..., k]`.
      vectors: arrays `[k]` of these dtypes, such as a gain and a bias; none, where the function has none.
      dy: the gradient of y, shape of x; or several, of all that read y, which are added in float32.
      carried: the gradient that x receives by another way, such as a residual connection; shape of x.

    Returns:
      `(dx, dvectors)`. A NaN or inf in a row makes that row of dx, and its part of the sums, what the formula makes.

    Raises:
      TypeError: an array has another dtype, or `function` cannot be hashed.
      ValueError: shapes differ, or `function` is not one of rows, or an unknown `backend`.
      NotImplementedError: the named backend cannot run it; the message says why.

    >>> def rms_norm(x, gain):
    ...     return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) * gain
    >>> x, gain = jnp.array([[1.0, -1.0]]), jnp.array([2.0, 2.0])
    >>> dx, (dgain,) = row_gradient(rms_norm, x, (gain,), jnp.array([[1.0, 1.0]]), carried=jnp.ones((1, 2)))
    >>> dx.tolist(), dgain.tolist()
    ([[3.0, 3.0]], [1.0, -1.0])
    """
    vectors, dys = tuple(vectors), dy if isinstance(dy, tuple) else (dy,)
    _check_arrays(x, vectors, dys, carried)
    try:
        hash(function)
    except TypeError as error:
        raise TypeError(
            f"function {function!r} cannot be hashed, and so not be the key of a compiled program; use a function of a "
            "module or a frozen dataclass with __call__"
        ) from error
    check_function(function, x, vectors)
    return dispatch("row_gradient", IMPLEMENTATIONS, backend, Options(function), x, vectors, dys, carried)


def _check_arrays(
    x: jax.Array, vectors: tuple[jax.Array, ...], dys: tuple[jax.Array, ...], carried: jax.Array | None
) -> None:
    if not dys:
        raise ValueError("dy is an empty tuple; give the gradient of y, or several")
    named = {"x": x, **{"dy" if len(dys) == 1 else f"dy[{i}]": dy for i, dy in enumerate(dys)}}
    named |= {f"vectors[{i}]": v for i, v in enumerate(vectors)}
    if carried is not None:
        named["carried"] = carried
    for name, array in named.items():
        if jnp.dtype(array.dtype).name not in _DTYPES:
            raise TypeError(f"{name} has dtype {array.dtype}, not one of {', '.join(_DTYPES)}; cast it")
    if x.ndim == 0:
        raise ValueError("x is a scalar, which has no rows; give an array [..., k]")
    for name, array in named.items():
        expected = x.shape[-1:] if name.startswith("vectors") else x.shape
        if array.shape != expected:
            raise ValueError(f"{name} has shape {list(array.shape)}, but x{list(x.shape)} needs {list(expected)} there")
