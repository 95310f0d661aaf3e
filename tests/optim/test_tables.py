"""Tables whose rows are looked up: stored as W_hi + W_lo, read row by row, trained as
any weight.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp, find_weights
from tcfp_jax.conversion.convert import survey
from tcfp_jax.inference import quantize_params
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.layout import Layout, Weight
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.stored import Stored
from tests.helpers import (
    assert_close,
    drawn,
    mesh_of,
    nnx_model,
    parametrize,
    placed,
    refusals,
    same_bits,
    slow_except,
    variables_of,
)
from tests.optim.zoo import RECIPE, stored_of

ALL = ("linear", "small", "head", "embed")
ROWS = 160  # more values than weights that are compared whole
WIDTH = 16
TABLE = drawn(ROWS, WIDTH)
# The last row from the end, and two that are out of range
IDS = jnp.asarray([[3, 3, 0, 159], [-1, 160, -161, 7]])
INSIDE = jnp.where((IDS >= -ROWS) & (IDS < ROWS), IDS, 1)
X = drawn(2, 4, WIDTH, seed=1)
WEIGHT = Weight(tcfp_jax.recipe(RECIPE), Layout((0,), (1,)))


# Ways to look up, each of a table with its own axes.
# --------------------------------------------------------------------------------------
def take(table, ids, **options):
    return jnp.take(table, ids, axis=0, **options)


def index(table, ids):
    return table[ids]


def zeros_outside(table, ids):
    return table.at[ids].get(mode="fill", fill_value=0)


def cast_first(table, ids):
    return take(table.astype(jnp.bfloat16), ids)


def in_a_branch(table, ids):
    def doubled():
        return table[ids] * 2

    return jax.lax.cond(ids[0, 0] > 0, lambda: take(table, ids), doubled)


def in_a_scan(tables, ids):
    def one(_, table):
        return None, take(table, ids)

    return jax.lax.scan(one, None, tables)[1]


LOOKUPS = {
    "take": (TABLE, take),
    "index": (TABLE, index),
    "clip": (TABLE, functools.partial(take, mode="clip")),
    "zeros": (TABLE, zeros_outside),
    "columns": (TABLE.T, functools.partial(jnp.take, axis=1)),
    "cast first": (TABLE, cast_first),
    "heads": (TABLE.reshape(ROWS, 2, 8), take),
    "cond": (TABLE, in_a_branch),
    "scan": (jnp.stack([TABLE, 30 * TABLE]), in_a_scan),
}


def stored_table(**options):
    return stored_of({"e": TABLE}, {"e": WEIGHT}, **options)


def by_hand(params, ids, **options):
    return tcfp_jax.lookup(params["e"], ids, **options)


def assert_same_numbers(a, b):
    """The same bits, except that a NaN may have another sign."""
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def looked_up(name):
    """The conversion of a lookup, its stored table, and the float function."""
    table, fn = LOOKUPS[name]

    def plain(params, ids):
        return fn(params["e"], ids)

    low = tcfp_jax.transform(plain, RECIPE, include=ALL, strict=True)
    params = {"e": table}
    return low, stored_of(params, find_weights(low, params, IDS)), plain


@slow_except("columns", "cast first")
@parametrize("name", LOOKUPS)
def test_rows_and_gradients_are_those_of_the_dequantized_table(name):
    low, stored, plain = looked_up(name)
    floats = tcfp_jax.dequantize(stored)
    assert_same_numbers(jax.jit(low)(stored, IDS), jax.jit(plain)(floats, IDS))
    rows = plain(floats, INSIDE)
    weigh = jnp.cos(jnp.arange(rows.size).reshape(rows.shape))

    def loss(fn, tree):
        return jnp.sum(fn(tree, INSIDE).astype(jnp.float32) * weigh)

    of_low = tcfp_jax.grad(functools.partial(loss, low))
    of_plain = jax.grad(functools.partial(loss, plain))
    found = jax.jit(of_low)(stored)["e"]
    wanted = jax.jit(of_plain)(floats)["e"]
    assert found.dtype == wanted.dtype
    # A table that is cast first adds its rows in bfloat16 in the float model, and in
    # float32 here.
    atol = 2.0**-7 if name == "cast first" else 0
    np.testing.assert_allclose(found, wanted, atol=atol)


def test_rows_are_looked_up_inside_shard_map():
    low, stored, plain = looked_up("take")
    mesh = mesh_of(2)

    def spread(fn):
        def summed(tree, ids):
            return jax.lax.psum(jnp.sum(jnp.sin(fn(tree, ids))), "a")

        return jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())

    found = jax.jit(tcfp_jax.value_and_grad(spread(low)))(stored, INSIDE)
    exact = jax.jit(jax.value_and_grad(spread(plain)))
    assert_close(found, exact(tcfp_jax.dequantize(stored), INSIDE), 1e-6, 1e-6)


@parametrize("way", ["converted", "by hand"])
def test_gradients_of_a_frequent_row_are_added_in_float32(way):
    fn = looked_up("take")[0] if way == "converted" else by_hand

    def total(tree):
        return jnp.sum(fn(tree, jnp.full(1000, 5)).astype(jnp.bfloat16))

    found = tcfp_jax.grad(total)(stored_table(gradient_dtype=jnp.bfloat16))["e"]
    # a bfloat16 sum stops at 256
    assert same_bits(found, jnp.zeros((ROWS, WIDTH), jnp.bfloat16).at[5].set(1000))


@parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_ids_may_be_of_fewer_bits_than_the_rows_need(dtype):
    table = Stored.of(tcfp_jax.split(jnp.arange(300.0)[:, None]))
    ids = jnp.array([100, 3, 127], dtype)
    assert tcfp_jax.lookup(table, ids)[:, 0].tolist() == [100, 3, 127]


def test_a_lookup_by_hand_is_that_of_the_float_table():
    stored = stored_table()["e"]
    constant = Stored.of(tcfp_jax.split(TABLE))
    for table in (stored, constant):
        rows = jax.jit(tcfp_jax.lookup)(table, IDS)
        assert_same_numbers(rows, take(table.dequantize(), IDS))


@slow_except("by hand", "cast first")
@parametrize("name", ["take", "by hand", "cast first", "scan"])
def test_no_float_table_exists(name):
    low, stored, _ = looked_up("take" if name == "by hand" else name)
    fn = by_hand if name == "by hand" else low
    text = jax.jit(fn).lower(stored, IDS).compile().as_text()
    for shape in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", text):
        assert np.prod([int(size) for size in shape.split(",")]) < TABLE.size


# Models
# --------------------------------------------------------------------------------------
class Tied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(ROWS, WIDTH)
        self.dense = nn.Dense(WIDTH)

    def __call__(self, ids):
        return self.embed.attend(self.dense(self.embed(ids)))


class Embedded(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(ROWS, WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    __call__ = Tied.__call__


def check_against_float(low, plain, stored):
    """Products round x and its gradients to three bits, so gradients are within an
    eighth of their norm.
    """

    def run(fn, tree):
        mean = tcfp_jax.value_and_grad(lambda tree: jnp.mean((fn(tree) - 1) ** 2))
        return jax.jit(mean)(tree)

    found, gradients = run(low, stored)
    wanted, exact = run(plain, tcfp_jax.dequantize(stored))
    np.testing.assert_allclose(found, wanted, rtol=2.0**-4)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, exact)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert_near(a, b)


def assert_near(gradient, exact):
    error = gradient.astype(jnp.float32) - exact
    assert jnp.linalg.norm(error) <= 2.0**-3 * jnp.linalg.norm(exact)


def test_a_table_that_is_head_and_lookup_adds_both_gradients():
    params = variables_of(Tied(), INSIDE)["params"]
    low = convert_to_tcfp(Tied(), RECIPE, INSIDE, include=ALL, strict=True)
    weights = find_weights(low)
    stored = stored_of(params, weights)
    assert is_quantized(stored["embed"]["embedding"])
    check_against_float(
        lambda p: low.apply({"params": p}, INSIDE),
        lambda p: Tied().apply({"params": p}, INSIDE),
        stored,
    )
    served = quantize_params(params, weights)
    assert "embedding" not in served["params"]["embed"]
    table = served["tcfp"]["embed"]["embedding"].dequantize()
    rows = low.apply(served, INSIDE, method=lambda module, ids: module.embed(ids))
    assert same_bits(rows, take(table, INSIDE))


def test_nnx_trains_a_stored_table():
    plain, *_ = nnx.split(nnx_model(Embedded), nnx.Param, ...)
    model = convert_to_tcfp(nnx_model(Embedded), RECIPE, INSIDE, include=ALL)
    low, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(graphdef, params):
        return nnx.merge(graphdef, params, rest)(INSIDE)

    check_against_float(
        functools.partial(apply, low),
        functools.partial(apply, plain),
        stored_of(params, find_weights(model)),
    )


def test_two_products_of_a_stored_table_read_the_same_numbers():
    def heads(params, x):
        first = x @ params["e"].T
        second = jnp.tanh(x) @ params["e"].T
        third = jax.nn.softmax(x @ params["e"].T) @ params["e"]
        return first, second, third

    def summed(fn, params):
        return sum(y.sum() for y in fn(params, X))

    low = tcfp_jax.transform(heads, "tcfp12", include=ALL)
    params = {"e": TABLE}
    report = survey(low, params, X)
    assert [record.stored for record in report.converted] == [True, True, True, False]
    message = "quantized at each use: the stored form of its weight is another one"
    assert message in str(report)
    weights = find_weights(low, params, X)
    wide = stored_of(params, weights)
    stored = stored_of(params, weights, gradient_dtype=jnp.bfloat16)
    # The dtype of the gradient says nothing about the numbers.
    assert same_bits(low(wide, X), low(stored, X))
    gradient = tcfp_jax.grad(functools.partial(summed, low))(stored)["e"]
    exact = jax.grad(functools.partial(summed, heads))(tcfp_jax.dequantize(stored))["e"]
    assert gradient.dtype == jnp.bfloat16
    assert_near(gradient, exact)


def test_rows_come_from_the_copy_next_to_a_float_table():
    low, _, _ = looked_up("take")
    params = {"e": TABLE}
    tx = tcfp_jax.error_feedback(find_weights(low, params, IDS))
    state = tcfp_jax.layer_state(tx.init(params))
    rows = low(params, INSIDE, stored=state)
    assert same_bits(rows, take(state["e"].dequantize(), INSIDE))
    assert not same_bits(rows, TABLE[INSIDE])
    assert same_bits(low(params, INSIDE), TABLE[INSIDE])

    def summed(table):
        copies = jax.lax.stop_gradient(state)
        return low({"e": table}, INSIDE, stored=copies).sum()

    exact = jax.grad(lambda table: table[INSIDE].sum())
    assert same_bits(jax.grad(summed)(TABLE), exact(TABLE))


@parametrize("spec", [P(None, "b"), P("a", None)], ids=["columns", "rows"])
@parametrize("way", ["converted", "by hand"])
def test_a_lookup_under_explicit_axes_says_where_its_rows_lie(spec, way):
    out = P("a", None, "b")

    def look(params, ids):
        return params["e"].at[ids].get(out_sharding=out)

    fn = functools.partial(by_hand, out_sharding=out)
    if way == "converted":
        fn = tcfp_jax.transform(look, RECIPE, include="embed")

    @functools.partial(tcfp_jax.value_and_grad, has_aux=True)
    def summed(params, ids):
        rows = fn(params, ids)
        return rows.sum(), rows

    stored = stored_table()
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    shardings = state_shardings({"e": NamedSharding(mesh, spec)}, stored)
    with jax.set_mesh(mesh):
        params = jax.device_put(stored, shardings)
        (_, rows), gradient = jax.jit(summed)(params, placed(INSIDE, mesh, "a"))
    assert rows.sharding.spec == out
    assert gradient["e"].sharding.spec == spec
    assert_same_numbers(jax.device_get(rows), take(stored["e"].dequantize(), INSIDE))
    count = np.bincount(np.ravel(INSIDE) % ROWS, minlength=ROWS)
    wanted = np.repeat(count[:, None], WIDTH, axis=1)
    np.testing.assert_array_equal(gradient["e"], wanted)


# Refused
# --------------------------------------------------------------------------------------
def head_and_lookup(p, ids):
    return take(p["e"], ids) @ p["e"].T


def of_a_part(p, ids):
    return take(p["e"][:8], ids)


def filled_with_two(p, ids):
    return p["e"].at[ids].get(mode="fill", fill_value=2.0)


def with_a_norm(p, ids):
    return take(p["e"], ids) + p["e"].max()


REFUSED = {
    "head in float": (
        head_and_lookup,
        dict(include=("linear", "small", "embed")),
        "other code reads the table's floats",
    ),
    "blocks": (
        head_and_lookup,
        dict(recipe=tcfp_jax.recipe("blockwise")),
        "stores no table with one scale",
    ),
    "bf16": (
        head_and_lookup,
        dict(rules={"e": "bf16"}),
        "bf16 stores no table with one scale",
    ),
    "a part": (of_a_part, {}, "a part of the table is looked up"),
    "filled": (filled_with_two, {}, "rows out of range are 2.0"),
    "a norm": (with_a_norm, {}, "other code reads the table's"),
}


@parametrize("name", REFUSED)
def test_tables_that_stay_float_say_why(name):
    fn, options, reason = REFUSED[name]
    low = tcfp_jax.transform(fn, **(dict(recipe=RECIPE, include=ALL) | options))
    params = {"e": TABLE}
    skipped = [
        str(record)
        for record in survey(low, params, INSIDE).skipped
        if record.product.primitive == "gather"
    ]
    assert len(skipped) == 1
    assert reason in skipped[0]
    for weight in find_weights(low, params, INSIDE).values():
        assert weight.float_reads == "lookup"


def rounded_rows():
    """Of a layer that rounds rows to another format."""
    layer = tcfp_jax.linen.TCFPEmbed(ROWS, WIDTH, recipe=RECIPE)
    layer.apply({"params": {"embedding": stored_table()["e"]}}, IDS)


def of_a_stack():
    stack = stored_of({"kernel": jnp.stack([TABLE, TABLE])}, RECIPE)
    tcfp_jax.lookup(stack["kernel"], IDS)


test_bad_lookups = refusals(
    {
        TypeError: {
            r"table is a .*Array.*, not a stored weight; use jnp.take": lambda: (
                tcfp_jax.lookup(TABLE, IDS)
            ),
            r"ids have dtype float32; .* ids.astype\(jnp.int32\)": lambda: by_hand(
                stored_table(), IDS.astype(jnp.float32)
            ),
            "reads it as a float array": rounded_rows,
        },
        ValueError: {
            r"the table is \[2, 160, 16\] with Tensor": of_a_stack,
        },
    }
)
