"""How an update is rounded into a stored weight: small and large ones, scales, errors,
and random bits.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcfp_jax
from pallas_kernels.scaling import Block, Tensor
from tcfp_jax.optim.stored import apply_updates
from tcfp_jax.weights.rewritten import Rewritten
from tcfp_jax.weights.rounding import rewrite
from tests.helpers import (
    decibels,
    filled,
    mesh_of,
    parametrize,
    placed,
    refused,
    same_bits,
    shapes_of,
    slow_except,
)
from tests.optim.zoo import KERNEL, RECIPE, TWO_LAYERS, kernel_of, stored_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
UNIFORM = jnp.asarray(np.random.default_rng(3).uniform(0.5, 1.0, (64, 64)), jnp.float32)


def stored_kernel(kernel, recipe=RECIPE, **options):
    return stored_of({"kernel": kernel}, recipe, **options)


def changes_of(size, **options):
    """How far 400 equal updates move each weight."""
    params = stored_kernel(UNIFORM, **options)
    change = {"kernel": jnp.full_like(UNIFORM, size)}

    @jax.jit
    def run(params):
        def step(params, _):
            return apply_updates(params, change), None

        return jax.lax.scan(step, params, length=400)[0]

    return np.asarray(kernel_of(run(params)) - kernel_of(params), np.float64)


def test_an_update_of_zeros_keeps_every_bit():
    params = apply_updates(stored_of(), TWO_LAYERS)
    zeros = jax.tree.map(jnp.zeros_like, TWO_LAYERS)
    assert same_bits(apply_updates(params, zeros), params)


def test_rounding_follows_the_mean_of_small_updates():
    """An update of a hundredth of the grid's step, four hundred times: nearest rounding
    would lose all of it.
    """
    size = 2.0**-15
    moved = changes_of(size)
    error = moved.std() / np.sqrt(moved.size)
    assert abs(moved.mean() - 400 * size) < 4 * error
    assert error < 0.05 * 400 * size


@slow_except("4-0.99-1.01", "512-0.0-0.2")
@parametrize(
    ("part", "least", "most"), [(4, 0.99, 1.01), (64, 0.99, 1.01), (512, 0.0, 0.2)]
)
def test_feedback_keeps_what_e3m4_does(part, least, most):
    """Updates are a part of the grid's step: a sixty-fourth arrives whole, much less
    arrives hardly at all.
    """
    size = 2.0**-9 / part  # in E4M3, with a scale of 2**-5
    moved = changes_of(size, remainder="feedback")
    assert least <= moved.mean() / (400 * size) <= most


@parametrize("recipe", [RECIPE, "tcfp12_blockwise"])
@parametrize("binade", [-100, 120])
def test_an_error_is_kept_to_a_128th_of_the_step_of_its_weight(binade, recipe):
    """Weights have every size below their scale, small and large."""
    rng = np.random.default_rng(5)
    shape = (128, 256)
    unit = 2.0**binade
    values = rng.choice([-1.0, 1.0], shape) * 2.0 ** rng.uniform(-14, 0, shape)
    wanted = (values * unit).astype(np.float32)
    first = jnp.zeros(shape).at[0, 0].set(unit)
    old = stored_kernel(first, recipe, remainder="feedback")
    update = {"kernel": jnp.asarray(wanted).at[0, 0].add(-unit)}
    stored = jax.jit(apply_updates)(old, update)["kernel"]
    rows = stored.rows
    scale = np.asarray(rows.scale_of_values(), np.float64)
    lo = np.asarray(rows.lo, np.float64)
    sum_of_both = np.asarray(rows.values, np.float64) + lo
    exponent = np.floor(np.log2(np.where(lo == 0, 1e-9, np.abs(lo))))
    step = 2.0 ** (np.maximum(exponent, -6) - 3)
    left = (np.asarray(wanted, np.float64) / scale - sum_of_both) / step
    assert 0.49 < np.abs(left).max() <= 0.5
    error = np.asarray(stored.state.error, np.float64)
    assert np.abs(left - error / 16).max() <= 1 / 128


def test_errors_of_the_smallest_weights_are_numbers():
    """Their scale times a step of the grid underflows float32."""
    params = stored_kernel(jnp.full((4, 4), 2.0**-124), remainder="feedback")
    params = apply_updates(params, {"kernel": jnp.full((4, 4), 2.0**-126)})
    assert float(kernel_of(params)[0, 0]) == 1.25 * 2.0**-124
    assert jnp.isfinite(params["kernel"].state.error.astype(jnp.float32)).all()


def test_weights_near_the_largest_float_are_stored():
    """Their scale times the largest number of E4M3 overflows float32."""
    kernel = KERNEL / jnp.max(jnp.abs(KERNEL)) * np.float32(3e38)
    assert decibels(kernel, kernel_of(stored_kernel(kernel))) > 58


def test_scales_follow_weights_that_grow_and_shrink():
    @jax.jit
    def become(params, wanted):
        return apply_updates(params, {"kernel": wanted - kernel_of(params)})

    wanted = KERNEL
    params = stored_kernel(KERNEL)
    for rate in (5 ** (1 / 300), 5 ** (-1 / 300)):
        for _ in range(300):
            wanted = wanted * rate
            params = become(params, wanted)
        assert decibels(wanted, kernel_of(params)) > 58
    params = become(params, 3 * wanted)  # at once
    assert decibels(3 * wanted, kernel_of(params)) > 58


def test_zeros_take_their_first_steps():
    step = 1e-3 * KERNEL
    params = apply_updates(stored_kernel(jnp.zeros((16, 32))), {"kernel": step})
    assert decibels(step, kernel_of(params)) > 55


def test_bits_do_not_depend_on_the_mesh():
    params = stored_of()
    change = jax.tree.map(lambda leaf: 0.01 * leaf + 1e-3, TWO_LAYERS)
    update = jax.jit(apply_updates)
    alone = update(params, change)
    for count in (2, 4):
        mesh = mesh_of(count, names=("a",))

        def place(leaf, mesh=mesh):
            return placed(leaf, mesh, "a") if leaf.ndim == 2 else leaf

        split = update(*jax.tree.map(place, (params, change)))
        assert same_bits(split, alone)


@parametrize("bad", [jnp.nan, jnp.inf])
def test_a_weight_that_is_not_finite_stays_visible(bad):
    params = stored_kernel(KERNEL.at[2, 3].set(bad))
    assert np.isnan(kernel_of(params)).all()
    change = {"kernel": jnp.zeros((16, 32)).at[0, 0].set(bad)}
    assert np.isnan(kernel_of(apply_updates(stored_kernel(KERNEL), change))).all()


# Random bits
# --------------------------------------------------------------------------------------
def test_the_count_of_roundings_stays_an_integer_of_a_float():
    last = jnp.asarray([1.0, 2.0, 2.0**24 - 1])
    training = stored_of()["up"]["kernel"].state

    def advanced(rounding):
        return replace(training, rounding=rounding).next_rounding().tolist()

    assert advanced(last) == [1, 2, 0]
    assert advanced(last - 1) == [0, 1, 2.0**24 - 1]


def test_equal_kernels_have_seeds_and_bits_of_their_own():
    params = stored_of({name: {"kernel": KERNEL} for name in ("first", "second")})
    first, second = (leaf["kernel"].state.rounding for leaf in params.values())
    assert not jnp.any(first[:2] == second[:2])
    assert first[2] == second[2] == 0
    lows = [leaf["kernel"].rows.lo.view(jnp.uint8) for leaf in params.values()]
    assert float((lows[0] != lows[1]).mean()) > 0.1


def test_filled_kernels_of_stacks_have_seeds_of_their_own():
    params = stored_of(filled(shapes_of({"kernel": (3, 16, 32)})))
    seeds = np.asarray(params["kernel"].state.rounding)
    assert seeds.shape == (3, 3)
    assert len({tuple(row) for row in seeds}) == 3


# Rewritten weights and copies
# --------------------------------------------------------------------------------------
@parametrize("scaling", [Tensor(), Block(32, "square")], ids=["one scale", "in blocks"])
@parametrize("factor", [1.0, 0.0, 0.5])
def test_factors_of_a_rewritten_weight_are_seen(factor, scaling):
    recipe = tcfp_jax.recipe(RECIPE, scaling=scaling)
    old = stored_of(recipe=recipe)["up"]["kernel"]
    new = stored_kernel(2 * KERNEL, recipe)["kernel"]
    made = Rewritten.of(new)
    made = replace(made, witness=jnp.asarray(made.witness) * factor)
    scaled = jax.jit(lambda made: made.onto(old))(made)
    if factor == 0.5:
        assert np.isnan(scaled.rows.dequantize()).all()
        with refused("put that part before adamw"):
            made.onto(old)
        return
    assert same_bits(scaled, new if factor else old)
    assert same_bits(made.onto(old), scaled)


@parametrize("recipe, has_lo", [(RECIPE, False), ("tcfp12_fast", True)])
def test_a_copy_holds_the_halves_that_its_product_reads(recipe, has_lo):
    """A product that reads `W_hi` alone needs no `W_lo` in the transposed copy: it
    would be a wasted byte.
    """
    recipe = tcfp_jax.recipe(recipe, copies="both")
    kernel = stored_of(recipe=recipe)["up"]["kernel"]
    for weight in (kernel, rewrite(kernel, kernel.dequantize())):
        assert (weight.stored.forward.lo is not None) == has_lo
        assert weight.rows.lo is not None
