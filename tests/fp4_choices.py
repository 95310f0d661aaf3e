"""A weight with inputs, and losses and definitions of FP4 choices, for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tcfp_jax.inference import (
    gptq,
    search_scales,
)
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests.formats_oracles import QUICK

RNG = np.random.default_rng(0)
N, K = 32, 40  # the last block is short
W = jnp.asarray(RNG.standard_normal((N, K)) * 0.02, jnp.float32)
MIX = RNG.standard_normal((K, K)) * (np.arange(1, K + 1) ** -0.7)[:, None]
X = jnp.asarray(RNG.standard_normal((256, K)) @ MIX, jnp.float32)
H = X.T @ X
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
INCLUDE = ("linear", "small", "head")
# A program for each scaling and shape, where every operation would be one.
quick = functools.partial(jax.jit, compiler_options=QUICK)
nearest = quick(quantize_fp4, static_argnums=1)
compensated = quick(gptq, static_argnames=("scaling", "scales"))
searched = quick(search_scales, static_argnames="scaling")


def as_bytes(operand):
    return [np.asarray(leaf).view(np.uint8) for leaf in (operand.values, operand.scale)]


def loss(operand, hessian, w=W):
    """tr((W - Q) H (W - Q)ᵀ), in float64."""
    error = np.asarray(operand.dequantize(), np.float64) - np.asarray(w, np.float64)
    return np.trace(error @ np.asarray(hessian, np.float64) @ error.T)


def error(operand, w=W):
    return loss(operand, np.eye(w.shape[-1]), w)


def nearest_number(units):
    """E2M1 in float64: ties do not happen in random data."""
    size = np.minimum(np.abs(units), 6)
    return np.sign(units) * E2M1[np.abs(size[..., None] - E2M1).argmin(axis=-1)]


def gptq_by_definition(w, hessian, scale, damping=0.01):
    """Return GPTQ in float64 in the order of Frantar et al., column after column."""
    w = np.array(w, np.float64)
    k = w.shape[1]
    hessian = np.asarray(hessian, np.float64)
    inverse = np.linalg.inv(hessian + damping * np.diag(hessian).mean() * np.eye(k))
    upper = np.linalg.cholesky(inverse).T
    made = np.zeros_like(w)
    for j in range(k):
        if j % 16 == 0:
            factor = scale(w[:, j : j + 16])
        made[:, j] = nearest_number(w[:, j] / factor) * factor
        w[:, j:] -= np.outer((w[:, j] - made[:, j]) / upper[j, j], upper[j, j:])
    return made
