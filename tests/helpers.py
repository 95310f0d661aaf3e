"""Helpers of tests in all folders: parameters, comparisons, and meshes of devices."""

import dataclasses
import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.testing import assert_allclose

import tcfp_jax
from pallas_kernels.hopper import plan
from pallas_kernels.operands import Block, Row, Tensor
from tcfp_jax.weights.stored import Stored

parametrize = pytest.mark.parametrize
slow = pytest.mark.slow
slow_except = pytest.mark.slow_except
OLD_JAX = jax.__version_info__[:2] < plan.SMALLEST_JAX
needs_mosaic = pytest.mark.skipif(OLD_JAX, reason="Mosaic's FP8 products need jax 0.11")


def refused(match, error=ValueError):
    """The context of a call that raises an error with these words."""
    return pytest.raises(error, match=match)


def normal(seed, shape):
    """Return an array of JAX's normal values."""
    return jax.random.normal(jax.random.key(seed), shape)


def filled(tree, seed=0):
    """Arrays instead of shapes: NumPy's normal values, as large as of an initializer.

    Shapes come from `jax.eval_shape`, so that a test compiles what it is about and no
    initializers.
    """
    rng = np.random.default_rng(seed)

    def fill(leaf):
        fan_in = leaf.shape[-2] if len(leaf.shape) > 1 else 1
        drawn = rng.standard_normal(leaf.shape) / np.sqrt(fan_in)
        return jnp.asarray(drawn.astype(leaf.dtype))

    return jax.tree.map(fill, tree)


def shapes_of(tree):
    """Shapes of float32 arrays instead of tuples."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return jax.tree.map(of, tree, is_leaf=lambda node: type(node) is tuple)


def drawn(*shape, seed=0):
    """NumPy's normal float32 values."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), "float32")


def assert_close(found, wanted, rtol=1e-7, atol=0.0):
    """Compare two trees of arrays leaf by leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol, atol)


def all_finite(tree):
    """Whether no leaf of a tree has a NaN or an inf."""
    return all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def step_of(tx):
    """`step(grads, params, state)` of optax, which returns the two that it changes."""

    def step(grads, params, state):
        updates, state = tx.update(grads, state, params)
        return tcfp_jax.apply_updates(params, updates), state

    return step


def restored(tree, folder):
    """What a checkpoint gives back that a tree is written into."""
    import orbax.checkpoint  # which takes a second

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", tree)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "run", jax.eval_shape(lambda: tree))


def refusals(cases):
    """A test that calls raise: `{error: {words of its message: call}}`."""
    rows = []
    for error, calls in cases.items():
        rows.extend((error, words, call) for words, call in calls.items())

    @pytest.mark.parametrize("error, words, call", rows, ids=[row[1] for row in rows])
    def test(error, words, call):
        with pytest.raises(error, match=words):
            call()

    return test


def placed(tree, mesh, *spec):
    """The arrays of a tree on a mesh, all split in the same way."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))


def variables_of(model, *inputs, seed=0):
    """Variables of a Linen model, of its own names and shapes."""
    return filled(jax.eval_shape(model.init, jax.random.key(0), *inputs), seed)


def nnx_model(make, seed=0):
    """`make(rngs)`, an NNX model, with NumPy's values."""
    shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(shapes, nnx.Param, ...)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
    return nnx.merge(graphdef, filled(params, seed), zeros)


class MLP(nnx.Module):
    """Two NNX layers of 16 and 32 features."""

    def __init__(self, rngs, linear=nnx.Linear):
        self.up = linear(16, 32, rngs=rngs)
        self.down = linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def store_at_once(params, weights, **options):
    """`tcfp_jax.store` in one program; by itself it compiles eighty."""
    return jax.jit(lambda params: tcfp_jax.store(params, weights, **options))(params)


def unwatched(state):
    """Stored weights without the samples by which they are compared.

    Those of other parameters are multiplied, too. It shows which of the two a product
    reads, the stored weight or the parameter next to it.
    """
    return jax.tree.map(
        lambda weight: dataclasses.replace(weight, sample=None),
        state,
        is_leaf=lambda node: isinstance(node, Stored),
    )


def same_bits(a, b):
    """Whether two trees of arrays have the same structure, shapes, dtypes and bytes.

    The signs of NaN and of zeros count.
    """

    def stored(leaf):
        array = np.asarray(leaf)
        return array.dtype, array.shape, array.tobytes()

    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return [*map(stored, jax.tree.leaves(a))] == [*map(stored, jax.tree.leaves(b))]


def assert_all_close(got, expected, **bounds):
    """Assert that the arrays of two sequences are close, one by one."""
    for one, other in zip(got, expected, strict=True):
        assert_allclose(one, other, **bounds)


def assert_near(got, expected, atol):
    """Assert that two trees of arrays differ by at most `atol`."""
    jax.tree.map(partial(assert_allclose, rtol=0, atol=atol), got, expected)


def with_pull(function, x, w, **options):
    """`jax.vjp` of a product with options."""
    return jax.vjp(partial(function, **options), x, w)


def value_and_gradients(product, x, w, g=None, **options):
    """Return a product and its gradients for g, or for ones."""
    y, pull = with_pull(product, x, w, **options)
    return y, *pull(jnp.ones_like(y) if g is None else g.astype(y.dtype))


def decibels(exact, rounded):
    """10 log10 of the energy of `exact` over that of the error, in float64."""
    exact, rounded = (np.asarray(x, np.float64) for x in (exact, rounded))
    return 10 * np.log10(np.sum(exact**2) / np.sum((exact - rounded) ** 2))


def float64_of(operand):
    """The values of an `Operand` in float64, by NumPy alone."""
    scale = np.asarray(operand.scale, np.float64)
    *_, rows, columns = operand.shape
    if isinstance(operand.scaling, Row):
        scale = scale[..., None]
    elif isinstance(operand.scaling, Tensor):
        scale = scale[..., None, None]  # one for each matrix of a stack
    elif isinstance(operand.scaling, Block):
        size = operand.scaling.size
        scale = np.repeat(scale, size, axis=-1)[..., :columns]
        if operand.scaling.tile == "square":
            scale = np.repeat(scale, size, axis=-2)[..., :rows, :]
    total = np.asarray(operand.values, np.float64)
    if operand.lo is not None:
        total = total + np.asarray(operand.lo, np.float64)
    return total * scale


def mesh_of(*shape, names=("a", "b"), axis_type=AxisType.Auto):
    """A mesh of this shape; a test is skipped if this process has too few devices.

    For the body of a test or fixture: what runs while files are collected must not need
    devices.
    """
    needed = math.prod(shape)
    if jax.device_count() < needed:
        pytest.skip(f"needs {needed} devices, this process has {jax.device_count()}")
    types = (axis_type,) * len(shape)
    return jax.make_mesh(
        shape, names[: len(shape)], axis_types=types, devices=jax.devices()[:needed]
    )


def putting(mesh):
    """Return a function that puts an array on a mesh, split along these axes."""

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    return put


def on_cpu(function, *arguments):
    """Call a function with its arguments on the CPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return function(*jax.device_put(jax.device_get(arguments), cpu))


def stacked(trees):
    """Return a tree whose leaves are the stacked leaves of trees."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def entry(tree, *place):
    """Return one entry of a tree of stacks."""
    return jax.tree.map(lambda leaf: leaf[place], tree)
