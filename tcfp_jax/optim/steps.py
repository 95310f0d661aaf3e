"""One step of AdamW on one parameter: by XLA, as optax computes it, or in one fused
pass over a stored weight.

Both compute `optax.adamw` in float32, with moments in their formats before and after.
Each is one jitted function, traced once for all parameters of a shape.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from pallas_kernels import counter, numerics
from pallas_kernels.adamw.api import Moments, Rates, adamw
from pallas_kernels.adamw.arithmetic import Portable
from pallas_kernels.operands import Operand
from tcfp_jax.optim.encoding import Blocks, Format, Keys, Moment, decode, encode
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.parameter import Parameter, is_parameter
from tcfp_jax.weights.rounding import next_scale, rewrite
from tcfp_jax.weights.stored import Stored


class Quality(NamedTuple):
    """Effect of the last update of a stored weight; float32 scalars.

    Attributes:
      moved: share of its values that changed.
      edq: effective descent, `<applied, wanted> / |wanted|**2`: 1 if rounding keeps the
        update in the mean, 0 if it loses the update or if the update is zero.
    """

    moved: jax.Array
    edq: jax.Array

    @staticmethod
    def of(before: Stored, after: Stored, wanted: jax.Array) -> "Quality":
        """Return the effect of an update of a stored weight; `wanted` is float32, in
        the matrix's shape.
        """
        applied = after.dequantize() - before.dequantize()
        moved = jnp.mean((applied != 0).astype(jnp.float32))
        energy = jnp.sum(wanted * wanted)
        return Quality(
            moved, jnp.sum(applied * wanted) / jnp.where(energy == 0, 1.0, energy)
        )


class Scalars(NamedTuple):
    """Numbers of a step, float32 scalars; `rest` is 1 - b, `bias` is 1 - b**t,
    `next_bias1` that of the next step.
    """

    b1: jax.Array
    rest1: jax.Array
    b2: jax.Array
    rest2: jax.Array
    bias1: jax.Array
    next_bias1: jax.Array
    bias2: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    learning_rate: jax.Array
    weight_decay: jax.Array
    factor: jax.Array

    @staticmethod
    def of(
        count: jax.Array,
        lr: ArrayLike,
        b1: Any,
        b2: Any,
        epsilons: tuple[ArrayLike, ArrayLike],
        weight_decay: ArrayLike,
        factor: jax.Array,
    ) -> "Scalars":
        """Return the numbers of step `count`, which starts at 1; `epsilons` are eps and
        eps_root.
        """
        bias = lambda b, t: (
            1 - jnp.power(jnp.asarray(b, jnp.float32), t.astype(jnp.float32))
        )
        following = optax.safe_increment(count)
        # As in optax, 1 - b of Python numbers is computed in float64 and then rounded
        # to float32.
        values = (
            b1,
            1 - b1,
            b2,
            1 - b2,
            bias(b1, count),
            bias(b1, following),
            bias(b2, count),
            *epsilons,
            lr,
        )
        return Scalars(
            *(
                jnp.asarray(value, jnp.float32)
                for value in (*values, weight_decay, factor)
            )
        )


class Step(NamedTuple):
    """Static part of a parameter's step; hashable, so that parameters of one shape
    share a traced function.
    """

    forms: tuple[Format, Format]
    nesterov: bool
    decays: bool
    quality: bool
    fused: bool

    def run(
        self,
        w: Any,
        g: jax.Array,
        m: Moment,
        v: Moment,
        s: Scalars,
        keys: Any,
        keep: jax.Array,
    ) -> tuple[Any, Any, Any, Quality | None]:
        """Return (update or new weight, m, v, quality) of a parameter, by the kernel if
        `fused`, otherwise by XLA.

        `keep` says whether the step is taken.
        """
        return (_fused_step if self.fused else _float_step)(
            self, w, g, m, v, s, keys, keep
        )


@functools.partial(jax.jit, static_argnums=0)
def _float_step(
    step: Step,
    w: Any,
    g: jax.Array,
    m: Moment,
    v: Moment,
    s: Scalars,
    keys: Keys | None,
    keep: jax.Array,
) -> tuple[Any, Moment, Moment, Quality | None]:
    # the caller has looked
    values = w.stored.dequantize() if is_parameter(w) else w
    old = [
        decode(form, moment) for form, moment in zip(step.forms, (m, v), strict=True)
    ]
    change, *new = _wanted(step, values, g, old[0], old[1], s)
    moments = []
    for i, (form, before, after) in enumerate(
        zip(step.forms, (m, v), new, strict=True)
    ):
        encoded = encode(form, after, None if keys is None else counter.keys(*keys, i))
        moments.append(_either(keep, encoded, before))
    change = jnp.where(keep, change, jnp.zeros_like(change))
    if not is_parameter(w):
        return change, moments[0], moments[1], None
    written = _either(keep, rewrite(w, values + change), w)
    return (
        written,
        moments[0],
        moments[1],
        Quality.of(w.stored, written.stored, change) if step.quality else None,
    )


@functools.partial(jax.jit, static_argnums=0)
def _fused_step(
    step: Step,
    w: Parameter,
    g: jax.Array,
    m: Blocks,
    v: Blocks,
    s: Scalars,
    keys: Keys,
    keep: jax.Array,
) -> tuple[Parameter, Blocks, Blocks, Quality | None]:
    state, old, copy = w.state, w.rows, w.stored.forward
    scale = next_scale(old.scale, state.amax)
    # The pass writes values before it has seen them all, so their scale must cover the
    # largest that it can write.
    reach = jnp.minimum(_reach(step, s, state.amax), jnp.finfo(jnp.float32).max / 2)
    largest = numerics.largest(old.dtype)
    scale = jnp.where(
        reach > largest * scale, numerics.pow2_cover(reach, largest), scale
    )
    scale = jnp.where(keep, scale, old.scale)
    rates, shared = _rates(step, s, old.scale, scale, keep)
    one: Any = functools.partial(
        adamw,
        momentum="nesterov" if step.nesterov else "classic",
        orientation="rows" if copy is None else "both",
        remainder="stochastic" if state.remainder == "stochastic" else "nearest",
    )
    for _ in w.stored.stack:
        one = jax.vmap(one, in_axes=(0, 0, 0, 0, shared, 0))
    done = one(
        g,
        old.values,
        old.residual,
        Moments(m.values, m.scale, v.values, v.scale),
        rates,
        jnp.stack(keys, axis=-1),
    )
    rows = Operand(done.hi, scale, done.lo)
    columns = None
    if copy is not None:
        columns = Operand(
            done.columns,
            scale,
            None if copy.lo is None else jnp.swapaxes(done.lo, -1, -2),
        )
    state = dataclasses.replace(
        state,
        amax=jnp.where(keep, done.amax, state.amax),
        rounding=_either(keep, state.next_rounding(), state.rounding),
        sample=state.sampled(rows),
    )
    written = Parameter(Stored(columns, rows), state)
    moments = (
        Blocks(done.moments.m, done.moments.m_scale),
        Blocks(done.moments.v, done.moments.v_scale),
    )
    if not step.quality:
        return written, *moments, None
    before = [
        decode(form, moment) for form, moment in zip(step.forms, (m, v), strict=True)
    ]
    values = w.stored.dequantize()
    wanted, *_ = _wanted(step, values, g, before[0], before[1], s)
    return (
        written,
        *moments,
        Quality.of(
            w.stored, written.stored, jnp.where(keep, wanted, jnp.zeros_like(wanted))
        ),
    )


def _reach(step: Step, s: Scalars, amax: jax.Array) -> jax.Array:
    """Return a bound of |w| after the step: `|decay| amax + lr U`, where U bounds
    Adam's update.

    With `m = sum_i c_i g_i` and `v = (1 - b2) sum_i b2**i g_i**2`, by age i of the
    gradient, Cauchy and Schwarz give `|m| / sqrt(v) <= sqrt(sum_i c_i**2 / ((1 - b2)
    b2**i))`: 7.3 for 0.9 and 0.999 after many steps. The sum converges for b1**2 < b2,
    and is cut for other b. Moments in 8 bits exceed it by less than the factor of two
    of `W_lo`.
    """
    of_m, of_g = (
        (s.b1 / s.next_bias1, s.rest1 / s.bias1)
        if step.nesterov
        else (1 / s.bias1, 0.0)
    )
    newest = s.rest1 * of_m + of_g
    ratio = s.b1 * s.b1 / s.b2
    older = ratio / jnp.maximum(1 - ratio, 2.0**-10)
    bound = jnp.sqrt(
        s.bias2 / s.rest2 * (newest * newest + jnp.square(s.rest1 * of_m) * older)
    )
    decay = (
        1 - s.learning_rate * s.weight_decay
        if step.decays
        else jnp.ones((), jnp.float32)
    )
    return jnp.abs(decay) * amax + jnp.abs(s.learning_rate) * bound


def _wanted(
    step: Step, w: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, s: Scalars
) -> tuple[jax.Array, jax.Array, jax.Array]:
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
    step: Step, s: Scalars, scale: jax.Array, new_scale: jax.Array, keep: jax.Array
) -> tuple[Rates, Rates]:
    """Return the kernel's numbers, and their vmap axes: 0 for those that each entry of
    a stack has for itself.
    """
    # Scales are powers of two, so multiplying by the inverse rounds nothing.
    lr = s.learning_rate * numerics.reciprocal_pow2(new_scale)
    rate, rate_g = lr / s.bias1, jnp.zeros_like(lr)
    if step.nesterov:
        rate, rate_g = lr * s.b1 / s.next_bias1, lr * s.rest1 / s.bias1
    decay = (
        1 - s.learning_rate * s.weight_decay
        if step.decays
        else jnp.ones((), jnp.float32)
    )
    rates = Rates(
        b1=s.b1,
        b2=s.b2,
        rate=rate,
        rate_g=rate_g,
        correction=1 / s.bias2,
        eps=s.eps,
        eps_root=s.eps_root,
        decay=decay,
        gradient_scale=s.factor,
        scale=scale,
        new_scale=new_scale,
        keep=keep,
    )
    own = {"rate", "rate_g", "scale", "new_scale"}
    axes: dict[str, Any] = {name: 0 if name in own else None for name in Rates._fields}
    return rates, Rates(**axes)


def _either(keep: jax.Array, after: PyTree, before: PyTree) -> PyTree:
    """Return `after` if the step is taken, otherwise `before`, bit for bit."""
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), after, before)
