"""`fp4_matmul`: activations times an FP4 weight whose codes are read as they are.

On Hopper no copy of a weight exists in another format, unless x has many rows.
"""

from functools import partial
from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.checks import check_choice
from pallas_kernels.dispatch import Backend, Implementation, dispatch
from pallas_kernels.explicit import under_own_mesh
from pallas_kernels.fp4_matmul import cudnn, mosaic, reference, unpacked
from pallas_kernels.fp4_matmul.reference import ActivationFormat, Fp4Options
from pallas_kernels.operands import Fp4, Operand, check_real
from pallas_kernels.specs import Sharding

IMPLEMENTATIONS = (
    mosaic.KERNEL,
    cudnn.KERNEL,
    Implementation("xla", unpacked.fp4_matmul, key=reference.key),
)


def fp4_matmul(
    x: Array | Operand,
    w: Operand,
    *,
    contracts: Literal["k", "n"] = "k",
    activation: ActivationFormat = "bfloat16",
    out_dtype: DTypeLike | None = None,
    out_sharding: Sharding = None,
    backend: Backend | None = None,
) -> Array:
    """Return `x @ w.T` with an FP4 weight w `[n, k]`, or `x @ w` from the same codes.

    Use it to serve a model whose weights are packed in 4 bits. It has no gradient:
    `tcfp_jax.products.fp4_matmul` has one with respect to x.

        contracts "k"   out[..., n] = outer * sum_k x[..., k] (code[n, k] scale[n, k])
        contracts "n"   out[..., k] = outer * sum_n x[..., n] (code[n, k] scale[n, k])

    Args:
      x: real floats, `[..., k]` or `[..., n]`; for activation "float4_e2m1fn" an
        operand of codes `[m, k]` with the format of w.
      w: an operand with `Fp4` scaling, as `tcfp_jax.products.pack_fp4` makes it.
      contracts: the axis of w that is summed over: "k" for the forward product, "n" for
        its input gradient.
      activation: the format to which x is rounded: "bfloat16" (W4A16; products are
        exact and their sums float32) or "float8_e4m3fn" (W4A8) with a float32 scale for
        each row, max |x| / 448. If the weight has the rule "fold_exact", W4A8 runs on
        FP8 tensor cores, whose sums keep about 14 bits. "float4_e2m1fn" (W4A4) is the
        format of an x of codes, whose numbers are exact in bfloat16.
      out_dtype: a real float; None is the dtype of x, and float32 for codes.
      out_sharding: sharding of the result under an explicit mesh, as in
        `lax.dot_general`.
      backend: "mosaic" decodes weights in registers on Hopper, for at most 512 rows in
        W4A16, and for any number in W4A8 of a fold-exact weight. "cudnn" multiplies
        codes by codes on Blackwell.

    Returns:
      `[..., n]` or `[..., k]` in `out_dtype`. A scale that is NaN makes the outputs NaN
        that read its block.

    Raises:
      TypeError: x is not real floating point, nor an FP4 operand in W4A4, or w is not
        an FP4 operand.
      ValueError: the contracted sizes differ, scales do not fit, or a word is unknown.
      NotImplementedError: the named backend cannot run.

    >>> from pallas_kernels.fp4 import pack
    >>> codes = pack(jnp.full((3, 32), 2, jnp.uint8))   # ones
    >>> w = Operand(codes, jnp.ones((3, 1), jnp.float8_e8m0fnu), scaling=Fp4("mxfp4"))
    >>> fp4_matmul(jnp.full((2, 32), 0.5), w).tolist()
    [[16.0, 16.0, 16.0], [16.0, 16.0, 16.0]]
    """
    _check_activation(x, activation)
    _check(x, w, contracts)
    if out_dtype is None:
        out_dtype = jnp.float32 if isinstance(x, Operand) else x.dtype
    dtype = jnp.dtype(out_dtype)
    options = Fp4Options(dtype, activation, contracts, out_sharding)
    run = partial(dispatch, "fp4_matmul", IMPLEMENTATIONS, backend, options)
    return under_own_mesh(run)(x, w)


def _check_activation(x: Array | Operand, activation: str) -> None:
    """Raise unless x has the form that its format needs."""
    check_choice("activation", activation, get_args(ActivationFormat))
    if isinstance(x, Operand) != (activation == "float4_e2m1fn"):
        found = x.scaling if isinstance(x, Operand) else "floats"
        raise TypeError(
            f"x has {found}, but activation={activation!r}: float4_e2m1fn is for an"
            " operand with Fp4 scaling, and the others are for floats; use"
            " quantize_fp4(x), or another activation"
        )
    if isinstance(x, Operand):
        _check_codes("x", x)
    else:
        check_real("x", x)


def _check(x: Array | Operand, w: Operand, contracts: str) -> None:
    check_choice("contracts", contracts, ("k", "n"), ': "k" is the forward product')
    _check_codes("w", w)
    n, k = w.shape
    size = k if contracts == "k" else n
    if len(x.shape) < 1 or x.shape[-1] != size:
        raise ValueError(
            f"x{list(x.shape)} must end in {contracts}={size} of w{[n, k]}; transpose"
            " or reshape one"
        )


def _check_codes(name: str, operand: Operand) -> None:
    """Raise unless an operand has FP4 codes of a matrix, and scales that fit."""
    if not isinstance(operand, Operand) or not isinstance(operand.scaling, Fp4):
        found: object = type(operand).__name__
        if isinstance(operand, Operand):
            found = operand.scaling
        raise TypeError(
            f"{name} has the scaling {found}, but fp4_matmul reads FP4 codes; use"
            " pack_fp4, or matmul"
        )
    values = operand.values
    if values.ndim != 2 or values.dtype != jnp.uint8:
        raise ValueError(
            f"{name} has values {values.dtype}{list(values.shape)}, but FP4 codes are"
            " uint8 [n, k / 2]; use jax.vmap over a stack"
        )
    scaling = operand.scaling
    expected = scaling.scale_shape(operand.shape)
    scale = operand.scale
    if scale.shape != expected or scale.dtype != scaling.scale_dtype:
        raise ValueError(
            f"{name}{list(operand.shape)} with {scaling} has scales"
            f" {jnp.dtype(scaling.scale_dtype)}{list(expected)}, but these are"
            f" {scale.dtype}{list(scale.shape)}; use pack_fp4"
        )
    if scaling.has_outer != (operand.outer is not None):
        raise ValueError(
            f"{name} with {scaling} has outer={operand.outer}; NVFP4 has one,"
            " jnp.float32(1) at least, MXFP4 None"
        )
