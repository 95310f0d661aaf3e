"""Weights that are computed from parameters: rewritten over these if that fits their
stored forms, else quantized at each use, and untouched if their products stay float.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tcfp_jax
from tcfp_jax import error_feedback, layer_state, transform
from tcfp_jax.conversion import find_weights, restore, survey, to_bf16
from tcfp_jax.conversion.transform import _quantized
from tcfp_jax.losses import cross_entropy
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import mesh_of, parametrize, same_bits

ALL = ("linear", "small", "head")
convert = functools.partial(transform, recipe="tensorwise", include=ALL)


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) / 6, jnp.float32)


X = normal(8, 32, seed=1) * 6
W = normal(32, 32)
V = normal(32, 32, seed=2)
A = normal(32, 4, seed=3)
B = normal(4, 32, seed=4)


def dora(p, x):
    merged = p["w"] + p["a"] @ p["b"]
    return x @ (merged * (p["m"] / jnp.linalg.norm(merged, axis=0)))


def scan_of_stack(p, x):
    layers = jnp.stack([p["w"], p["v"]])
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def in_heads(p, x):
    merged = (p["w"] + p["a"] @ p["b"]).reshape(32, 4, 8)
    return jnp.einsum("td,dnh->tnh", x, merged)


def by_keras(p, x):
    """Attention's projections of KerasHub, whose kernels have three axes."""
    query = jnp.einsum("tc,cde->tde", x, p["w"] + 0.5 * jnp.matmul(p["a"], p["b"]))
    output = p["o"] + 0.5 * jnp.matmul(p["c"], p["d"])
    return jnp.einsum("tde,dec->tc", query, output)


# Rewritten over parameters: (function, parameters, equations of the products).
REWRITTEN = {
    "a learned factor": (
        lambda p, x: x @ (p["s"] * p["w"]),
        {"w": W, "s": jnp.float32(0.3)},
        ["ca,ab->cb"],
    ),
    "a product of learned factors": (
        lambda p, x: x @ (p["w"] / (p["s"] * p["t"])),
        {"w": W, "s": jnp.float32(0.3), "t": jnp.ones((1, 1))},
        ["ca,ab->cb"],
    ),
    "merged LoRA read as heads": (
        in_heads,
        {"w": W, "a": A, "b": B},
        ["ca,ab->cb", "da,abc->dbc", "da,abc->dbc"],
    ),
    "LoRA of three axes": (
        by_keras,
        {
            "w": normal(32, 4, 8),
            "a": normal(32, 4, 2),
            "b": normal(2, 8),
            "o": normal(4, 8, 32, seed=6),
            "c": normal(4, 8, 2),
            "d": normal(2, 32),
        },
        ["ca,ab->cb"] + ["cda,ab->cdb"] + ["da,abc->dbc"] * 2 + ["dab,abc->dc"] * 2,
    ),
    "padded and transposed": (
        lambda p, x: x @ jnp.pad(p["w"], ((2, 1), (0, 4))).T,
        {"w": normal(13, 28)},
        ["cb,ab->ca"],
    ),
    "LoRA times x from the left": (
        lambda p, x: jnp.einsum("cde,tc->det", p["w"] + p["a"] @ p["b"], x),
        {"w": normal(32, 4, 8), "a": normal(32, 4, 2), "b": normal(2, 8)},
        ["cda,ab->cdb"] + ["da,abc->bcd"] + ["da,abc->dbc"],
    ),
    "LoRA that x meets from behind": (
        lambda p, x: jnp.einsum("tc,dec->tde", x, p["w"] + p["a"] @ p["b"]),
        {"w": normal(4, 8, 32), "a": normal(4, 8, 2), "b": normal(2, 32)},
        ["cb,ab->ca"] + ["dc,abc->dab"] * 2,
    ),
}

# Quantized at each use: (function, parameters, part of the note in the report).
AT_USE = {
    "sum": (
        lambda p, x: x @ (p["w"] + p["v"]),
        {"w": W, "v": V},
        "its weight is computed from parameters by add",
    ),
    "weighted sum": (
        lambda p, x: x @ (0.3 * p["w"] - 0.7 * p["v"]).T,
        {"w": W, "v": V},
        "its weight is computed from parameters by sub",
    ),
    "weight norm": (
        lambda p, x: x @ (p["g"] * p["w"] / jnp.linalg.norm(p["w"], axis=0)),
        {"w": W, "g": jnp.ones(32)},
        "its weight is computed from parameters by div",
    ),
    "scaled columns": (
        lambda p, x: x @ (p["w"] * p["l"][None, :]),
        {"w": W, "l": normal(32) * 6},
        "its weight is computed from parameters by mul",
    ),
    "DoRA": (
        dora,
        {"w": W, "a": A, "b": B, "m": jnp.ones(32)},
        "its weight is computed from parameters by mul",
    ),
    "layers that are stacked": (
        scan_of_stack,
        {"w": W, "v": V},
        "its weight is computed from parameters by stack",
    ),
    "A B as large as W": (
        lambda p, x: x @ (p["w"] + p["v"] @ p["v"]),
        {"w": W, "v": V},
        "its weight is computed from parameters by add",
    ),
    "merged LoRA whose columns are cut": (
        lambda p, x: x @ (p["w"] + p["a"] @ p["b"])[:, :16],
        {"w": W, "a": A, "b": B},
        "its weight is computed from parameters by add",
    ),
    "a function with its own derivative": (
        lambda p, x: x @ jax.nn.relu(p["w"]),
        {"w": W},
        "its weight comes out of a custom_jvp_call",
    ),
    "a branch": (
        lambda p, x: x @ lax.cond(True, lambda: p["w"], lambda: p["v"]),
        {"w": W, "v": V},
        "a lax.cond chooses its weight",
    ),
    "experts": (
        lambda p, x: lax.ragged_dot(x, p["w"] + p["v"], jnp.array([3, 5])),
        {"w": jnp.stack([W, V]), "v": jnp.stack([V, V])},
        "its weight is computed from parameters by add",
    ),
    "one over a weight": (
        lambda p, x: x @ (2.0 / p["w"]),
        {"w": W + 3},
        "its weight is computed from parameters by div",
    ),
    "padded by ones": (
        lambda p, x: x @ jnp.pad(p["w"], ((0, 0), (0, 8)), constant_values=1.0),
        {"w": W},
        "its weight is computed from parameters by pad",
    ),
    "joined with A B": (
        lambda p, x: x @ jnp.concatenate([p["w"], p["a"] @ p["b"]], 1),
        {"w": W, "a": A, "b": B},
        "its weight is computed from parameters by concatenate",
    ),
    "made by a loop": (
        lambda p, x: (
            x @ lax.scan(lambda c, w: (c, 2 * w), 0, p["w"])[1].reshape(32, 32)
        ),
        {"w": W.reshape(4, 8, 32)},
        "its weight comes out of a scan",
    ),
    "stacks in one axis": (
        lambda p, x: lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None),
            x,
            p["w"].swapaxes(0, 1).reshape(4, 32, 32),
        )[0],
        {"w": jnp.stack([jnp.stack([W, V])] * 2)},
        "its weight is an entry of an axis that merges several stacks",
    ),
    "from the left": (
        lambda p, x: (p["w"] + p["v"]) @ x.T,
        {"w": W, "v": V},
        "its weight is computed from parameters by add",
    ),
    "every second row": (
        lambda p, x: x[:, ::2] @ p["w"][::2],
        {"w": W},
        "its weight is computed from parameters by",
    ),
}
LINEAR = REWRITTEN | AT_USE


def length(tree):
    leaves = jax.tree.leaves(tree)
    return float(
        jnp.sqrt(sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves))
    )


def differ(found, wanted):
    """Return the length of the difference of two trees, in lengths of the second."""
    return length(jax.tree.map(jnp.subtract, found, wanted)) / length(wanted)


def loss_of(fn):
    return jax.jit(jax.value_and_grad(lambda p: jnp.mean((fn(p, X) - 0.1) ** 2)))


def products_of(jaxpr):
    """Return the number of products in a program."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name in ("dot_general", "ragged_dot_general")
        for body in jaxprs_in_params(eqn.params):
            count += products_of(body)
    return count


@parametrize("name", REWRITTEN)
def test_products_of_linear_weights_read_stored_parameters(name):
    fn, params, equations = REWRITTEN[name]
    low = convert(fn, strict=True)
    converted = survey(low, params, X).converted
    assert sorted(record.product.equation for record in converted) == sorted(equations)
    matrices = {path for path, leaf in params.items() if leaf.size > 1}
    assert set(find_weights(low, params, X)) == matrices
    assert differ(loss_of(low)(params), loss_of(fn)(params)) < 0.1
    exact = convert(fn, recipe="bf16")
    assert differ(loss_of(exact)(params), loss_of(fn)(params)) < 0.02


@parametrize("name", AT_USE)
def test_computed_weights_are_quantized_at_each_use(name):
    fn, params, note = AT_USE[name]
    low = convert(fn, strict=True)
    report = survey(low, params, X)
    assert f"quantized at each use: {note}" in str(report)
    assert not report.skipped
    assert not find_weights(low, params, X)
    assert not same_bits(low(params, X), fn(params, X))
    assert differ(loss_of(low)(params), loss_of(fn)(params)) < 0.15


@parametrize("name", LINEAR)
def test_products_that_stay_float_run_as_they_were_written(name):
    fn, params, _ = LINEAR[name]
    right = jax.jit(fn)(params, X)

    def with_other(p, x):
        return fn(p, x), x @ p["other"]

    params = params | {"other": V}
    low = convert(with_other)
    off = to_bf16(low, "")
    by_rule = convert(with_other, rules={"^other$": "tensorwise", "": None})
    for quiet in (off, by_rule):
        program = quiet.examine(params, X).program.jaxpr
        written = jax.make_jaxpr(with_other)(params, X)
        assert products_of(program.jaxpr) == products_of(written.jaxpr)
        assert same_bits(jax.jit(quiet)(params, X)[0], right)
    assert find_weights(off, params, X) == find_weights(low, params, X)
    on = jax.jit(restore(off, ""))(params, X)
    assert same_bits(on[0], jax.jit(low)(params, X)[0])
    assert not same_bits(on[0], right)


def test_a_head_with_its_loss_quantizes_a_computed_table():
    def loss(p, x):
        table = p["w"] + p["v"]
        return cross_entropy(jnp.tanh(x @ p["u"]), table, jnp.arange(8))[0]

    params = {"w": W, "v": V, "u": V}
    low = convert(loss, strict=True)
    table = survey(low, params, X).converted[1]
    assert table.product.computed and table.product.primitive == "cross_entropy"
    found, wanted = (jax.jit(jax.value_and_grad(f))(params, X) for f in (low, loss))
    assert differ(found, wanted) < 0.1
    assert not same_bits(found[0], wanted[0])


def test_a_device_quantizes_its_part_of_merged_axes():
    mesh = mesh_of(2, names=("data",))
    parts = PartitionSpec("data", None)
    columns = PartitionSpec(None, "data")

    def fn(p, x):
        def body(w, x):
            return lax.psum(x @ w, "data")

        layer = jax.shard_map(
            body, mesh=mesh, in_specs=(parts, columns), out_specs=PartitionSpec()
        )
        return layer(p["w"].reshape(32, 32), x)

    params = {"w": W.reshape(2, 16, 32)}
    low = convert(fn, strict=True)
    note = "its weight is a device's part that cuts merged axes"
    assert f"quantized at each use: {note}" in str(survey(low, params, X))
    assert differ(loss_of(low)(params), loss_of(fn)(params)) < 0.1


def test_a_merged_weight_with_a_sharding_is_not_split():
    """The product of x and A has another shape than the one that has the sharding."""
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)

    def fn(p, x):
        w = p["w"] + p["a"] @ p["b"]
        return jnp.einsum("tk,kn->tn", x, w, out_sharding=PartitionSpec("a", "b"))

    with jax.set_mesh(mesh):

        def put(array, *spec):
            return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

        params = {"w": put(W, None, "b"), "a": put(A), "b": put(B, None, "b")}
        x = put(X, "a", None)
        low = convert(fn, strict=True)
        assert "quantized at each use" in str(survey(low, params, x))
        found = jax.jit(low)(params, x)
        wanted = jax.jit(fn)(params, x)
    assert found.sharding.spec == PartitionSpec("a", "b")
    assert differ(found, wanted) < 0.05


def merged(p, x):
    return x @ (p["w"] + p["a"] @ p["b"])


LORA = {"w": W, "a": A, "b": B}


@parametrize(
    "rules, converted",
    [
        ({"^[ab]$": None}, ["w"]),
        ({"^a$": None}, ["b", "w"]),
        ({"^w$": None}, []),
        ({"^w$": None, "^a$": None, "^b$": None}, []),
        ({"^b$": "rowwise", "^w$": None}, []),
        ({"": "bf16"}, ["a", "b", "w"]),
    ],
)
def test_a_merged_weight_is_split_if_its_base_converts(rules, converted):
    low = convert(merged, rules=rules)
    report = survey(low, LORA, X)
    assert sorted(record.weight_path for record in report.converted) == converted
    assert not report.unmatched_rules
    strict = convert(lambda p, x: (merged(p, x), x @ p["o"]), rules=rules, strict=True)
    y = jax.jit(strict)(LORA | {"o": V}, X)[0]
    assert same_bits(y, jax.jit(merged)(LORA, X)) == (not converted)


def test_queries_of_latents_with_biases_of_heads_stay_float():
    """They are activations, however they are reshaped and shifted."""

    def attend(p, x):
        queries = jnp.einsum("nd,dhe->nhe", p["latents"], p["w"]) + p["bias"]
        keys = x.reshape(8, 4, 8)
        return jnp.einsum("nhe,the->hnt", queries / 3, keys) @ (x @ p["o"])

    params = {"latents": W, "w": normal(32, 4, 8), "bias": normal(4, 8), "o": V}
    report = survey(convert(attend), params, X)
    assert [record.weight_path for record in report.converted] == ["o"]
    assert "a product of parameters" in report.skipped[0].reason


@parametrize("switched", ["off", "on"])
def test_a_served_model_of_a_merged_weight_needs_no_floats(switched):
    low = convert(merged, recipe="tcfp12_fast")
    weights = find_weights(low, LORA, X)
    stored = layer_state(error_feedback(weights).init(LORA))
    shapes = jax.eval_shape(lambda: LORA)
    asked = to_bf16(low, "") if switched == "off" else low
    assert differ(asked(shapes, X, stored=stored), merged(LORA, X)) < 0.05


def test_packed_tables_round_each_matrix_by_its_own_bits():
    """As the products of a stack do."""
    recipe = tcfp_jax.recipe("tcfp12", remainder="stochastic")
    weight = Weight(recipe, Layout((1,), (2,), (0,)))
    kernels = jnp.stack([W, W])
    one, other = _quantized(kernels, weight).dequantize()
    assert not same_bits(one, other)
    keys = jax.random.split(jax.random.key(0), 2)
    alone = quantize_weight(W, recipe, key=keys[1])[0].dequantize()
    assert same_bits(other, alone)
