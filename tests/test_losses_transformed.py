"""`losses.cross_entropy` in transformations, on meshes, in exports, and by kernels."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.losses import Chunks, cross_entropy
from tests.collectives import collectives
from tests.helpers import (
    assert_close,
    mesh_of,
    parametrize,
    placed,
    refused,
    slow_except,
)
from tests.loss_cases import TARGETS, K, W, X, mean_of


@slow_except("tensorwise")
@parametrize("recipe", ["bf16", "tensorwise"])
def test_transformations(recipe):
    def loss(x, w, targets):
        return mean_of(targets, recipe=recipe, chunk=4)(x, w)

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))
    xs = X[:18].reshape(3, 6, K)
    ws = jnp.stack([W, 2 * W, -W])
    ts = TARGETS[:18].reshape(3, 6)
    close = functools.partial(assert_close, rtol=1e-4, atol=1e-6)
    one_by_one = [gradients(xs[i], ws[i], ts[i]) for i in range(3)]
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    close(jax.vmap(gradients)(xs, ws, ts), wanted)
    close(lax.map(lambda batch: gradients(*batch), (xs, ws, ts)), wanted)
    again = jax.jit(jax.value_and_grad(jax.checkpoint(loss), (0, 1)))
    close(again(xs[0], ws[0], ts[0]), one_by_one[0])

    def summed(xs, w):  # the gradient of a scan over batches
        def add(total, batch):
            x, targets = batch
            return total + loss(x, w, targets), None

        return lax.scan(add, 0.0, (xs, ts))[0]

    dxs, dw = jax.jit(jax.grad(summed, (0, 1)))(xs, W)
    alone = [gradients(xs[i], W, ts[i])[1] for i in range(3)]
    close(dxs, jnp.stack([dx for dx, _ in alone]))
    close(dw, sum(dw for _, dw in alone))


@slow_except("both-tensorwise", "named-tensorwise")
@parametrize("name", ["bf16", "tensorwise", "rowwise"])
@parametrize(
    "of_x, of_w, axes",
    [
        (P("a"), P(), ()),
        (P(), P(None, "b"), ()),
        (P("a"), P(None, "b"), ()),
        (P("a"), P("a", "b"), ("a",)),
    ],
    ids=["tokens", "vocabulary", "both", "named"],
)
def test_devices_share_tokens_and_vocabulary(name, of_x, of_w, axes):
    mesh = mesh_of(4, 2)
    x = jnp.tile(X[:16], (2, 1)).reshape(8, 4, K)
    w = W[:, :48]
    targets = jnp.tile(TARGETS[:16] % 48, 2).reshape(8, 4)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def step(x, w, targets):
        return cross_entropy(x, w, targets, recipe=name, chunk=Chunks(16, axes))

    with jax.set_mesh(mesh_of(1)):
        wanted = step(x, w, targets)
    with jax.set_mesh(mesh):
        tokens = placed((x, targets), mesh, *of_x)
        given = tokens[0], placed(w, mesh, *of_w), tokens[1]
        found = step(*given)
        if axes:
            # The loop over chunks sends no kernel and no gradient of it.
            large = [
                part
                for sent in collectives(step.lower(*given).compile().as_text())
                for part in sent.parts
                if sent.times > 1 and part.size * mesh.size >= w.size
            ]
            assert not large
    # Orders of float32 sums differ, and a gradient on the edge between two codes may
    # take the other one.
    part = 1e-6 if name == "bf16" else 2.0**-4 / 32
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=part * float(jnp.abs(b).max()))


def test_inside_shard_map_a_device_has_the_loss_of_its_tokens():
    x = X[:20]
    targets = TARGETS[:20]

    def local(x, w, t):
        return lax.pmean(mean_of(t, chunk=4)(x, w), "a")

    everywhere = jax.shard_map(
        local, mesh=mesh_of(2), in_specs=(P("a"), P(), P("a")), out_specs=P()
    )
    found = jax.jit(jax.value_and_grad(everywhere, (0, 1)))(x, W, targets)
    wanted = jax.jit(jax.value_and_grad(mean_of(targets), (0, 1)))(x, W)
    assert_close(found, wanted, 1e-2, 1e-4)


def test_explicit_axes_are_refused():
    mesh = mesh_of(2, axis_type=AxisType.Explicit)
    x = placed(X[:20], mesh, "a")
    with jax.set_mesh(mesh), refused("explicit axes", NotImplementedError):
        cross_entropy(x, W, TARGETS[:20])


def test_axes_of_tokens_are_those_of_the_mesh():
    with jax.set_mesh(mesh_of(2)), refused(r"axes \['a'\]"):
        cross_entropy(X, W, TARGETS, chunk=Chunks(axes=("a", "data")))
    with refused(r"under jax\.set_mesh"):
        cross_entropy(X, W, TARGETS, chunk=Chunks(axes=("a",)))


def test_the_number_of_tokens_may_stay_open_in_an_export():
    @jax.jit
    @jax.value_and_grad
    def step(x, targets):
        return mean_of(targets, recipe="tensorwise")(x, W)

    (tokens,) = jax.export.symbolic_shape("tokens")
    x = jax.ShapeDtypeStruct((tokens, K), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    found = jax.export.export(step)(x, targets).call(X, TARGETS)
    assert_close(found, step(X, TARGETS), 1e-6)


@slow_except("tensorwise")
@parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_kernel_of_gradients_agrees_with_the_reference(recipe):
    keys = jax.random.split(jax.random.key(5), 3)
    x = jax.random.normal(keys[0], (32, 16), jnp.bfloat16)
    w = jax.random.normal(keys[1], (16, 64))
    targets = jax.random.randint(keys[2], (32,), 0, 64).at[3].set(-100)

    def gradients(backend):
        asked = tcfp_jax.recipe(recipe, quantize_backend=backend)
        options = dict(recipe=asked, ignore=-100, z_loss=1e-3, soft_cap=20.0)
        return jax.jit(jax.grad(mean_of(targets, **options), (0, 1)))(x, w)

    for got, want in zip(gradients("triton"), gradients("xla"), strict=True):
        want = np.float64(want)
        # A few values of FP8 may be neighbours, because exponentials differ in a bit.
        error = np.linalg.norm(np.float64(got) - want)
        assert error <= 2e-3 * np.linalg.norm(want)
