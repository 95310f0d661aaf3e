"""One step of AdamW on one parameter, by XLA or in one fused pass over a stored weight.

Both compute `optax.adamw` in float32, with moments in their formats before and after.
Each is one jitted function, traced once for all parameters of a shape.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_kernels import counter, numerics
from pallas_kernels.adamw.api import Moments, Rates, Step, adamw, adamw_entry
from pallas_kernels.adamw.arithmetic import Portable
from pallas_kernels.operands import Operand
from tcfp_jax.optim.encoding import Blocks, Format, Keys, Moment, decode, encode
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.rounding import next_scale, rewrite
from tcfp_jax.weights.stored import Stored


class Scalars(NamedTuple):
    """Numbers of a step, float32 scalars.

    `rest` is 1 - b, `bias` is 1 - b**t, and `next_bias1` is that of the next step.
    """

    b1: Array
    rest1: Array
    b2: Array
    rest2: Array
    bias1: Array
    next_bias1: Array
    bias2: Array
    eps: Array
    eps_root: Array
    learning_rate: Array
    weight_decay: Array
    factor: Array

    @staticmethod
    def of(
        count: Array,
        lr: ArrayLike,
        b1: ArrayLike,
        b2: ArrayLike,
        epsilons: tuple[ArrayLike, ArrayLike],
        weight_decay: ArrayLike,
        factor: Array,
    ) -> "Scalars":
        """Return the numbers of step `count`, which starts at 1.

        `epsilons` are eps and eps_root.
        """
        following = optax.safe_increment(count)
        # As in optax, 1 - b of Python numbers is computed in float64 and then rounded
        # to float32.
        values = (
            b1,
            1 - b1,
            b2,
            1 - b2,
            _bias(b1, count),
            _bias(b1, following),
            _bias(b2, count),
            *epsilons,
            lr,
            weight_decay,
            factor,
        )
        return Scalars(*(jnp.asarray(value, jnp.float32) for value in values))


def _bias(b: ArrayLike, count: Array) -> Array:
    """Return 1 - b**count."""
    power = jnp.power(jnp.asarray(b, jnp.float32), count.astype(jnp.float32))
    return 1 - power


class Stepped(NamedTuple):
    """Result of a step: the float update or the new stored weight, and both moments."""

    update: Array | Parameter
    m: Moment
    v: Moment


class WeightStep(NamedTuple):
    """Static part of a parameter's step.

    It is hashable, so that parameters of one shape share a traced function.

    Attributes:
      forms: the formats of the first and the second moment.
      nesterov: as in optax.
      decays: whether the weights decay.
      is_bounded: the result of `has_bound`.
    """

    forms: tuple[Format, Format]
    nesterov: bool
    decays: bool
    is_bounded: bool


def has_bound(b1: ArrayLike, b2: ArrayLike) -> bool:
    """Return whether both decays are known and Adam's update has a useful bound.

    >>> has_bound(0.9, 0.999), has_bound(0.9, 0.0)
    (True, False)
    """
    if isinstance(b1, jax.core.Tracer) or isinstance(b2, jax.core.Tracer):
        return False
    return bool(_converges(np.asarray(b1), np.asarray(b2)))


def _converges(b1: Array | np.ndarray, b2: Array | np.ndarray) -> Array | np.ndarray:
    """Return whether old gradients count much less in m than in v (`_bound`)."""
    return b1 * b1 <= (1 - 2.0**-10) * b2


@functools.partial(jax.jit, static_argnums=0)
def float_step(
    step: WeightStep,
    w: Array | Parameter,
    g: Array,
    m: Moment,
    v: Moment,
    s: Scalars,
    keys: Keys | None,
    keep: Array,
) -> Stepped:
    """Return the step of a parameter by XLA; `keep` says whether it is taken."""
    # the caller has looked at the codes
    values = w.stored.dequantize() if isinstance(w, Parameter) else w
    change, *new = _wanted(step, values, g, decode(m), decode(v), s)
    moments = []
    for i, (form, before) in enumerate(zip(step.forms, (m, v), strict=True)):
        own_keys = None if keys is None else counter.keys(*keys, i)
        moments.append(_either(keep, encode(form, new[i], own_keys), before))
    change = jnp.where(keep, change, jnp.zeros_like(change))
    if isinstance(w, Parameter):
        return Stepped(_either(keep, rewrite(w, values + change), w), *moments)
    return Stepped(change, *moments)


@functools.partial(jax.jit, static_argnums=0)
def fused_step(
    step: WeightStep,
    w: Parameter,
    g: Array,
    m: Blocks,
    v: Blocks,
    s: Scalars,
    keys: Keys,
    keep: Array,
) -> Stepped:
    """Return the step of a stored weight by the kernel, as `float_step`."""
    return entry_step(step, w, g, m, v, s, keys, keep, None)


def entry_step(
    step: WeightStep,
    w: Parameter,
    g: Array,
    m: Blocks,
    v: Blocks,
    s: Scalars,
    keys: Keys,
    keep: Array,
    entry: Array | None,
) -> Stepped:
    """Return `fused_step`, of an entry of stacks if its number is given.

    With a number, the codes and the moments are references to whole stacks. The step
    writes its entry there, and the result has the same references. All other arrays
    belong to the entry alone.
    """
    state = w.state
    old = w.rows
    copy = w.stored.forward
    scale = _next_scale(old, state.amax, _reach(step, w, g, m, v, s))
    scale = jnp.where(keep, scale, old.scale)
    rates, shared = _rates(step, s, old.scale, scale, keep)
    options: dict[str, Any] = dict(
        momentum="nesterov" if step.nesterov else "classic",
        orientation="rows" if copy is None else "both",
        remainder="stochastic" if state.remainder == "stochastic" else "nearest",
    )
    moments = Moments(m.values, m.scale, v.values, v.scale)
    words = jnp.stack(keys, axis=-1)
    given = (g, old.values, old.residual, moments)
    if entry is None:
        one: Callable[..., Any] = functools.partial(adamw, **options)
        for _ in w.stored.stack:
            one = jax.vmap(one, in_axes=(0, 0, 0, 0, shared, 0))
        done = one(*given, rates, words)
        written = (done.hi, done.lo)
    else:
        of_entry: Callable[..., Any] = functools.partial(adamw_entry, entry, **options)
        rates = jax.tree.map(lambda x: jnp.broadcast_to(x, scale.shape), rates)
        turned, amax = of_entry(*given, rates, words)
        done = Step(old.values, old.residual, turned, moments, amax)
        written = (done.hi[entry], done.lo[entry])
    rows = Operand(done.hi, scale, done.lo)
    columns = None
    if copy is not None:
        lo = None if copy.lo is None else jnp.swapaxes(written[1], -1, -2)
        columns = Operand(done.columns, scale, lo)
    state = dataclasses.replace(
        state,
        amax=jnp.where(keep, done.amax, state.amax),
        rounding=_either(keep, state.next_rounding(), state.rounding),
        sample=state.sampled(Operand(written[0], scale, written[1])),
    )
    new = Parameter(Stored(columns, rows), state)
    first = Blocks(done.moments.m, done.moments.m_scale)
    return Stepped(new, first, Blocks(done.moments.v, done.moments.v_scale))


def _next_scale(old: Operand, amax: Array, reach: Array) -> Array:
    """Return the scale of the new values.

    The pass writes values before it has seen them all, so their scale must cover the
    largest that it can write, which is `reach`.
    """
    scale = next_scale(old.scale, amax)
    reach = jnp.minimum(reach, jnp.finfo(jnp.float32).max / 2)
    largest = numerics.largest(old.dtype)
    cover = numerics.pow2_cover(reach, largest)
    return jnp.where(reach > largest * scale, cover, scale)


def _reach(
    step: WeightStep, w: Parameter, g: Array, m: Blocks, v: Blocks, s: Scalars
) -> Array:
    """Return a bound of |w| after the step, or the largest |w| if there is no bound."""
    bound = functools.partial(_bound, step, s, w.state.amax)
    if step.is_bounded:
        return bound()

    def largest() -> Array:
        values = w.stored.dequantize()
        change, _, _ = _wanted(step, values, g, decode(m), decode(v), s)
        return numerics.amax(values + change, axis=(-2, -1))

    # One more pass over the weight, for decays that hardly anybody uses
    return lax.cond(_converges(s.b1, s.b2), bound, largest)


def _bound(step: WeightStep, s: Scalars, amax: Array) -> Array:
    """Return a bound of |w| after the step, if `_converges`.

    It is `|decay| amax + lr U`, where U bounds Adam's update. With `m = sum_i c_i g_i`
    and `v = (1 - b2) sum_i b2**i g_i**2`, by age i of the gradient, Cauchy and Schwarz
    give `|m| / sqrt(v) <= sqrt(sum_i c_i**2 / ((1 - b2) b2**i))`: 7.3 for 0.9 and 0.999
    after many steps. Moments in 8 bits exceed it by less than the factor of two of
    `W_lo`.
    """
    of_m: ArrayLike = 1 / s.bias1
    of_g: ArrayLike = 0.0
    if step.nesterov:
        of_m = s.b1 / s.next_bias1
        of_g = s.rest1 / s.bias1
    newest = s.rest1 * of_m + of_g
    # Both decays may be 0
    ratio = s.b1 * s.b1 / jnp.maximum(s.b2, jnp.finfo(jnp.float32).tiny)
    older = ratio / (1 - ratio)
    energy = newest * newest + jnp.square(s.rest1 * of_m) * older
    bound = jnp.sqrt(s.bias2 / s.rest2 * energy)
    return jnp.abs(_decay(step, s)) * amax + jnp.abs(s.learning_rate) * bound


def _wanted(
    step: WeightStep, w: Array, g: Array, m: Array, v: Array, s: Scalars
) -> tuple[Array, Array, Array]:
    """Return (update, m, v) in float32: `optax.adamw`, operation by operation.

    `times` keeps XLA from contracting a product with a sum, which it does in some
    programs, so that all meshes agree.
    """
    g = g.astype(jnp.float32)
    times = Portable(g).multiply
    g = times(g, s.factor)
    m = times(s.rest1, g) + times(s.b1, m)
    v = times(s.rest2, times(g, g)) + times(s.b2, v)
    corrected = m / s.bias1
    if step.nesterov:
        corrected = times(s.b1, m / s.next_bias1) + times(s.rest1, g / s.bias1)
    change = corrected / (jnp.sqrt(v / s.bias2 + s.eps_root) + s.eps)
    if step.decays:
        change = change + times(s.weight_decay, w.astype(jnp.float32))
    return times(-s.learning_rate, change), m, v


def _rates(
    step: WeightStep, s: Scalars, scale: Array, new_scale: Array, keep: Array
) -> tuple[Rates, Rates]:
    """Return the kernel's numbers, and their vmap axes.

    The axis is 0 for numbers that each entry of a stack has for itself.
    """
    # Scales are powers of two, so multiplying by the inverse rounds nothing.
    lr = s.learning_rate * numerics.reciprocal_pow2(new_scale)
    rate = lr / s.bias1
    rate_g = jnp.zeros_like(lr)
    if step.nesterov:
        rate = lr * s.b1 / s.next_bias1
        rate_g = lr * s.rest1 / s.bias1
    rates = Rates(
        b1=s.b1,
        b2=s.b2,
        rate=rate,
        rate_g=rate_g,
        correction=1 / s.bias2,
        eps=s.eps,
        eps_root=s.eps_root,
        decay=_decay(step, s),
        gradient_scale=s.factor,
        scale=scale,
        new_scale=new_scale,
        keep=keep,
    )
    axes: dict[str, Any] = dict.fromkeys(Rates._fields)
    axes |= {"rate": 0, "rate_g": 0, "scale": 0, "new_scale": 0}
    return rates, Rates(**axes)


def _decay(step: WeightStep, s: Scalars) -> Array:
    """Return the factor by which decay shrinks a weight."""
    if not step.decays:
        return jnp.ones((), jnp.float32)
    return 1 - s.learning_rate * s.weight_decay


def _either(keep: Array, after: PyTree, before: PyTree) -> PyTree:
    """Return `after` if the step is taken, otherwise `before`, bit for bit."""
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), after, before)
