"""A stored weight beside another parameter: raises, or makes NaN where a program is
traced; and never a false alarm.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.testing import assert_allclose

import tcfp_jax
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.sampling import SIZE, _places, sample_of
from tests.helpers import mesh_of, parametrize, refused, same_bits, slow_except

W = jnp.float32(np.random.default_rng(0).standard_normal((64, 32)))
X = jnp.float32(np.random.default_rng(1).standard_normal((4, 64)))
TCFP12 = tcfp_jax.recipe("tcfp12")


def made(w, recipe=TCFP12, copies="both"):
    quantize = partial(quantize_weight, recipe=recipe, copies=copies)
    for _ in w.shape[:-2]:
        quantize = jax.vmap(quantize)
    return dataclasses.replace(quantize(w)[0], sample=sample_of(w))


@cache
def stored_w():
    """Made when a test first asks: collecting tests compiles nothing."""
    return made(W)


OTHERS = {
    "doubled": 2 * W,
    "averaged": 0.999 * W + 0.001 * W[::-1],
    "restored": W[::-1],
    "one step of 1e-4": W + 1e-4 * jnp.sign(W[:, ::-1]),
    "NaN": W.at[:].set(jnp.nan),
}


def unchecked(stored):
    return dataclasses.replace(stored, sample=None)


@parametrize("w", OTHERS.values(), ids=OTHERS.keys())
def test_other_parameters_raise_and_are_nan_in_a_program(w):
    with refused(r"made of other parameters.*was .* and is .*on the fly"):
        current(stored_w(), w)
    assert jnp.isnan(jax.jit(current)(stored_w(), w).dequantize()).all()


@slow_except("mxfp8")
@parametrize(
    "name",
    ["tcfp12", "tensorwise", "rowwise", "blockwise", "tcfp12_blockwise", "mxfp8"],
)
def test_the_products_of_every_scaling_are_nan(name):
    recipe = tcfp_jax.recipe(name)
    stored = made(W, recipe)

    def product(stored, w, x):
        checked = current(stored, w)
        return jax.value_and_grad(
            lambda x: tcfp_jax.matmul(x, w, recipe=recipe, quantized=checked).sum()
        )(x)

    run = jax.jit(product)
    y, dx = run(stored, W, X)
    assert jnp.isfinite(y)
    assert jnp.isfinite(dx).all()
    y, dx = run(stored, 2 * W, X)
    assert jnp.isnan(y)
    assert jnp.isnan(dx).all()


def test_the_same_parameter_changes_no_bit():
    for stored in (
        stored_w(),
        made(W, copies="one"),
        made(W, tcfp_jax.recipe("tcfp12_blockwise")),
    ):
        assert same_bits(current(stored, W), unchecked(stored))
        assert same_bits(jax.jit(current)(stored, W), unchecked(stored))
    # without a sample there is nothing to compare
    assert current(unchecked(stored_w()), 2 * W).sample is None


@slow_except("(64, 32)", "(1, 5)")
@parametrize("shape", [(64, 32), (1, 5), (1, 1), (3, 4096)], ids=str)
def test_a_swapped_weight_has_the_sample_of_the_transpose(shape):
    w = jnp.arange(shape[0] * shape[1], dtype=jnp.float32).reshape(shape)
    stored = made(w)
    assert same_bits(stored.swap().sample, sample_of(w.T))
    assert same_bits(stored.swap().swap(), stored)
    current(stored.swap(), w.T)
    assert stored.drop_residual().sample is not None
    assert stored.nbytes == unchecked(stored).nbytes + 4 * SIZE


def test_places_are_spread_and_apart():
    rows, columns = _places(1000, 4000)
    assert len(set(zip(rows.tolist(), columns.tolist()))) == SIZE
    for found, size in ((rows, 1000), (columns, 4000)):
        assert len(set((found * 4 // size).tolist())) == 4  # every quarter


def test_sixteen_bits_may_round_to_the_neighbour_and_not_further():
    w = W.astype(jnp.bfloat16)
    stored = made(w)
    current(stored, jnp.nextafter(w, jnp.bfloat16(jnp.inf)))
    with refused("other parameters"):
        current(stored, (W * 1.05).astype(jnp.bfloat16))
    current(stored_w(), W * (1 + 2.0**-23))
    with refused("other parameters"):
        current(stored_w(), W * (1 + 2.0**-14))


def test_a_stack_is_compared_matrix_by_matrix():
    stack = jnp.stack([W, 2 * W, 3 * W])
    stored = made(stack)
    changed = stack.at[1].set(W)
    expected = [False, True, False]

    def of(checked):
        return jnp.isnan(checked.dequantize()).all((-1, -2)).tolist()

    assert of(jax.jit(current)(stored, changed)) == expected
    assert of(jax.jit(jax.vmap(current))(stored, changed)) == expected
    _, scanned = jax.lax.scan(
        lambda _, pair: (None, current(*pair)), None, (stored, changed)
    )
    assert of(scanned) == expected
    with refused("other parameters"):
        current(stored, changed)
    with refused(r"\[3, 64, 32\], but .*\[64, 32\]"):
        current(stored, W)


@parametrize("around", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_no_gradient_reaches_the_comparison(around):
    def loss(w, stored):
        multiply = around(
            lambda x, w: tcfp_jax.matmul(
                x, w, recipe=TCFP12, quantized=current(stored, w)
            )
        )
        _, ys = jax.lax.scan(lambda c, x: (c, multiply(x, w)), None, X[None])
        return jnp.sum(ys**2)

    def plain(w):
        return jnp.sum(
            tcfp_jax.matmul(X, w, recipe=TCFP12, quantized=unchecked(stored_w())) ** 2
        )

    assert_allclose(
        jax.jit(jax.grad(loss))(W, stored_w()), jax.grad(plain)(W), rtol=1e-5
    )
    tangent = jax.jvp(lambda w: current(stored_w(), w).dequantize(), (W,), (W,))[1]
    assert not np.any(tangent)


SPECS = [(None, None, "a"), (None, ("a", "b"), None), ("b", "a", None)]


@slow_except("('b', 'a', None)-AxisType.Explicit")
@parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@parametrize("spec", SPECS, ids=str)
def test_a_sharded_weight_is_never_gathered(spec, kind):
    mesh = mesh_of(2, 2, axis_type=kind)
    with jax.set_mesh(mesh):

        def put(w):
            return jax.device_put(w, NamedSharding(mesh, PartitionSpec(*spec)))

        w = put(jnp.stack([W, 3 * W]))
        other = put(jnp.stack([W, 2 * W]))
        sample = jax.jit(sample_of)(w)
        assert same_bits(
            np.asarray(sample), np.asarray(sample_of(jnp.stack([W, 3 * W])))
        )
        stored = dataclasses.replace(made(jnp.stack([W, 3 * W])), sample=sample)
        check = jax.jit(lambda stored, w: current(stored, w).backward.scale)
        assert jnp.isfinite(check(stored, w)).all()
        assert jnp.isnan(check(stored, other)).tolist() == [False, True]
        with refused("other parameters"):
            current(stored, other)
        text = (
            check.lower(stored, w).compile().as_text()
            + jax.jit(sample_of).lower(w).compile().as_text()
        )
    assert "all-reduce" in text
    # nowhere is the whole weight
    assert "f32[2,64,32]" not in text
    assert "all-to-all" not in text


@parametrize("check_vma", [True, False])
def test_inside_shard_map_nothing_is_compared(check_vma):
    mesh = mesh_of(2)
    spec = PartitionSpec("a", None)

    def inside(w):
        stored = dataclasses.replace(made(w), sample=None)
        return current(
            dataclasses.replace(stored, sample=sample_of(w) * 2), w
        ).dequantize(), sample_of(w)

    run = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=spec,
        out_specs=(spec, PartitionSpec(None)),
        check_vma=check_vma,
    )
    y, sample = jax.jit(run)(W)
    assert jnp.isfinite(y).all()
    assert jnp.isnan(sample).all()
    current(dataclasses.replace(stored_w(), sample=sample), W)  # not known fits


@parametrize("shape", [(0, 8), (8, 0), (2, 0, 8), (0, 8, 8)])
def test_a_weight_without_values_has_nothing_to_compare(shape):
    params = {"kernel": jnp.zeros(shape)}
    state = tcfp_jax.error_feedback("tcfp12").init(params)
    stored = tcfp_jax.layer_state(state)["kernel"]
    assert stored.shape == shape
    assert stored.sample.shape == (*shape[:-2], SIZE)
    assert current(stored, params["kernel"]).sample is None
