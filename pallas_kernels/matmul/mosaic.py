"""`matmul` with one scale an operand on Hopper: which shapes the kernel takes, with which tiles."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.plan import Config, Plan, blocks, candidates, choose, misfit, reject_here
from pallas_kernels.matmul.parts import on_each_device
from pallas_kernels.matmul.reference import key, product_scale
from pallas_kernels.operands import Operand, Product, sizes
from pallas_kernels.tuning import Key

Shape = tuple[int, int, int]


def reject(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> str | None:
    """Why this kernel cannot multiply these operands here, or None."""
    reason = reject_here(options.out_dtype)
    if reason is not None:
        return reason
    (m, k, n), halves = sizes(x, w), _halves(w)
    if not candidates(m, k, n, halves, options.accumulation):
        smallest = Config(128, 128, stages=2, cluster=1)
        return f'{misfit(smallest, m, k, n, halves)} for backend="mosaic"; use backend="xla" or pad'
    return None


def configure(options: Product, x: Operand, w: Operand, bias: jax.Array | None) -> Config | None:
    """The tile sizes of this product: those that were measured near its shape, else the best guess that fits."""
    return _choose(key(options, x, w, bias), _halves(w), options)


def _halves(w: Operand) -> int:
    return 1 if w.lo is None else 2


def _choose(named: Key, halves: int, options: Product) -> Config | None:
    m, k, n = named.shape
    guesses = candidates(m, k, n, halves, options.accumulation)
    return choose(named, guesses, lambda config: misfit(config, m, k, n, halves))


def matmul(
    options: Product, x: Operand, w: Operand, bias: jax.Array | None, *, config: Config | None = None
) -> jax.Array:
    """The product, see `api.matmul`; `config` overrides the tuned or guessed tile sizes where a part fits it."""
    halves = _halves(w)

    def chosen_for(shape: Shape, options: Product) -> Config | None:
        if config is not None and misfit(config, *shape, halves) is None:
            return config
        return _choose(key(options, x, w, bias)._replace(shape=shape), halves, options)

    def fits(m: int, k: int, n: int) -> bool:
        return chosen_for((m, k, n), options) is not None

    def multiply(options: Product, x: Operand, w: Operand, bias: Any) -> jax.Array:
        chosen = chosen_for(sizes(x, w), options)
        assert chosen is not None, "fits() came first"
        # Imported where it is used: a second that a program without this kernel need not pay, and needs jax 0.11.
        from pallas_kernels.hopper import kernel

        plan = Plan(chosen, halves, options.accumulation == "full", bias is not None, blocks(chosen))
        scale = product_scale(x, w).astype(jnp.float32).reshape(1)
        rest = [array for array in (w.lo, scale, bias) if array is not None]
        return kernel.call(plan, options.out_dtype, x.values, w.values, *rest)

    return on_each_device(multiply, fits, options, x, w, bias, interpreter="calls back")
