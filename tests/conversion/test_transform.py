"""`transform` finds the products of any program, and lists every product that it leaves
alone.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tcfp_jax
import tcfp_jax.linen
from tcfp_jax import error_feedback, layer_state, transform
from tcfp_jax.conversion import diagnose, export, find_weights, restore, survey, to_bf16
from tcfp_jax.inference import quantize_params
from tcfp_jax.weights.quantization import quantize_weight
from tests.collectives import collectives
from tests.helpers import mesh_of, parametrize, refused, same_bits, slow_except

ALL = ("linear", "small", "head")
RECIPE = "tcfp12_fast"
convert = functools.partial(transform, recipe=RECIPE, include=ALL)


def normal(*shape, seed=0):
    return jnp.asarray(
        np.random.default_rng(seed).standard_normal(shape) / 6, jnp.float32
    )


X = normal(4, 32, seed=1) * 6
W = normal(32, 32)
STACK = normal(32, 3, 32)
TABLE = normal(16, 32)
SIZES = jnp.array([3, 1])  # of the rows of two experts
ROTATIONS = np.cos(np.arange(4 * 32.0).reshape(4, 32)).astype(np.float32)


def scanned(p, x):
    policy = jax.checkpoint_policies.dots_saveable
    block = jax.checkpoint(
        lambda x, w: jnp.tanh(x @ w), policy=policy, prevent_cse=False
    )
    return lax.scan(lambda x, w: (block(x, w), None), x, jnp.moveaxis(p["w"], 1, 0))[0]


def jitted_blocks(p, x):
    block = jax.jit(lambda w, x: jnp.tanh(x @ w))
    return functools.reduce(lambda x, name: block(p[name], x), sorted(p), x)


def carried(p, x):
    # The weight enters the product through the carry, and the input reaches it in the
    # second round only.
    def body(c, _):
        return (
            {"x": c["x"] @ c["w"], "n": (c["n"][0] + 1,), "w": c["w"]},
            c["x"].sum(),
        )

    return lax.scan(body, {"x": x, "n": (p["n"],), "w": p["w"]}, jnp.zeros(3))[0]["x"]


def heads(p, x):
    return jnp.einsum("tnh,nhd->td", jnp.einsum("td,ndh->tnh", x, p["q"]), p["o"])


# Converted programs: (function, parameters, equations of its products).
CONVERTED = {
    "mlp": (
        lambda p, x: jax.nn.relu(x @ p["a"] + p["b"]) @ p["c"],
        {"a": W, "b": W[0], "c": W},
        ["ca,ab->cb"] * 2,
    ),
    "scan and remat over axis 1": (scanned, {"w": STACK}, ["ca,ab->cb"]),
    "scan over one layer": (scanned, {"w": STACK[:, :1]}, ["ca,ab->cb"]),
    "loop with an index": (
        lambda p, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["w"][:, i]), x),
        {"w": STACK},
        ["ca,ab->cb"],
    ),
    "indexed": (
        lambda p, x: jnp.tanh(x @ p["w"][:, 0]) @ p["w"][:, 1],
        {"w": STACK},
        ["ca,ab->cb"] * 2,
    ),
    "heads": (
        heads,
        {"q": normal(4, 32, 8), "o": normal(4, 8, 32)},
        ["db,abc->dac", "dab,abc->dc"],
    ),
    "a matrix read as heads": (
        lambda p, x: jnp.einsum("td,dnh->tnh", x, p["w"].reshape(32, 4, 8)),
        {"w": W},
        ["da,abc->dbc"],
    ),
    "experts": (
        lambda p, x: jnp.einsum("td,edf->tef", x, p["w"]),
        {"w": normal(2, 32, 16)},
        ["db,abc->dac"],
    ),
    "experts with their own rows": (
        lambda p, x: jnp.einsum("etd,edf->etf", jnp.stack([x, 2 * x]), p["w"]),
        {"w": normal(2, 32, 16)},
        ["adb,abc->adc"],
    ),
    "experts with groups of rows": (
        lambda p, x: lax.ragged_dot(x, p["w"], SIZES),
        {"w": normal(2, 32, 16)},
        ["db,abc->dc in groups"],
    ),
    "layers of transposed experts, and one expert": (
        lambda p, x: lax.ragged_dot(
            lax.scan(
                lambda x, w: (
                    jnp.tanh(lax.ragged_dot(x, w.swapaxes(1, 2), SIZES)),
                    None,
                ),
                x,
                p["w"],
            )[0],
            p["v"].reshape(1, 32, 32),
            SIZES[:1],
        ),
        {"w": normal(3, 2, 32, 32), "v": normal(4, 8, 32)},
        ["dc,abc->db in groups", "dab,abc->dc in groups"],
    ),
    "shared and transposed": (
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T,
        {"w": W},
        ["ca,ab->cb", "cb,ab->ca"],
    ),
    "tied head": (
        lambda p, x: (x + p["table"][jnp.arange(4)]) @ p["table"].T,
        {"table": TABLE},
        ["cb,ab->ca"],
    ),
    "bfloat16": (
        lambda p, x: (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(
            jnp.float32
        ),
        {"w": W},
        ["ca,ab->cb"],
    ),
    "branches": (
        lambda p, x: lax.cond(
            x.sum() > 0, lambda x: x @ p["a"], lambda x: x @ p["b"], x
        ),
        {"a": W, "b": 2 * W},
        ["ca,ab->cb"] * 2,
    ),
    "parts": (
        lambda p, x: sum(jnp.split(x @ p["w"], 3, axis=1)) + x @ p["w"][:, :32],
        {"w": normal(32, 96)},
        ["ca,ab->cb"] * 2,
    ),
    "vectors": (
        lambda p, x: jax.vmap(lambda x: p["w"] @ x)(x),
        {"w": W},
        ["cb,ab->ac"],
    ),
    "a table of rotations": (
        lambda p, x: jnp.einsum("td,td->td", x @ p["w"], jnp.asarray(ROTATIONS)),
        {"w": W},
        ["ca,ab->cb"],
    ),
    "carried by a loop": (carried, {"w": W, "n": jnp.float32(0)}, ["ca,ab->cb"]),
    # Weights that are linear in parameters.
    "scaled by 1": (lambda p, x: x @ (1.0 * p["w"]), {"w": W}, ["ca,ab->cb"]),
    "scaled, negated, cast and read as heads": (
        lambda p, x: jnp.einsum(
            "td,dnh->tnh",
            x.astype(jnp.bfloat16),
            (-p["w"] / jnp.sqrt(2.0)).astype(jnp.bfloat16).reshape(32, 4, 8),
        ),
        {"w": W},
        ["da,abc->dbc"],
    ),
    "scaled in scan and remat": (
        lambda p, x: lax.scan(
            jax.checkpoint(lambda x, w: (jnp.tanh(x @ (w * 0.5)), None)), x, p["w"]
        )[0],
        {"w": jnp.stack([W, 2 * W])},
        ["ca,ab->cb"],
    ),
    "merged LoRA": (
        lambda p, x: (
            x @ (p["w"] + 0.5 * p["a"] @ p["b"]) - x @ (p["w"] - p["a"] @ p["b"]).T
        ),
        {"w": W, "a": W[:, :4], "b": W[:4]},
        ["ca,ab->cb"] * 3 + ["cb,ab->ca"] * 3,
    ),
    "joined": (
        lambda p, x: (
            x @ jnp.concatenate([p["a"], 2 * p["b"]], 1)
            + jnp.tile(x, 2) @ jnp.concatenate([p["a"].T, p["b"].T, p["c"]])
        ),
        {"a": W[:, :8], "b": W[:, 8:], "c": W},
        ["ca,ab->cb"] * 3 + ["cb,ab->ca"] * 2,
    ),
    "padded": (
        lambda p, x: (
            x @ jnp.pad(p["w"], ((0, 0), (3, 5))) @ jnp.pad(p["v"], ((4, 4), (0, 0)))
        ),
        {"w": W, "v": W},
        ["ca,ab->cb"] * 2,
    ),
    "jitted blocks": (
        jitted_blocks,
        {str(i): normal(32, 32, seed=i) for i in range(3)},
        ["ca,ab->cb"] * 3,
    ),
}


@jax.custom_vjp
def own_rule(x, w):
    return x @ w


own_rule.defvjp(
    lambda x, w: (own_rule(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, saved[0].T @ g),
)

# Products that are left alone: (function, parameters, part of the reason).
LEFT = {
    "convolution": (
        lambda p, x: lax.conv(x[None, None], p["w"], (1, 1), "SAME"),
        {"w": normal(2, 1, 3, 3)},
        "convolution",
    ),
    "latents times a matrix": (
        lambda p, x: jnp.exp(p["w"] @ p["latents"]).T @ x.T,
        {"w": W, "latents": W},
        "a product of parameters",
    ),
    "masked": (
        lambda p, x: x @ (p["w"] * jnp.asarray(ROTATIONS[:1] > 0, jnp.float32)),
        {"w": W},
        "and constants",
    ),
    "custom rule": (
        lambda p, x: own_rule(x, p["w"]),
        {"w": W},
        "inside custom_vjp_call",
    ),
    "closed over": (lambda p, x: x @ W + p["b"], {"b": W[0]}, "closes over"),
    "gathered by an array": (
        lambda p, x: jnp.einsum("td,tdf->tf", x, p["w"][(x[:, 0] > 0).astype(int)]),
        {"w": normal(2, 32, 16)},
        "gathered",
    ),
    "changed in a loop": (
        lambda p, x: lax.fori_loop(
            0, 3, lambda i, c: (c[0] @ c[1], c[1] * 2.0), (x, p["w"])
        )[0],
        {"w": W},
        "carried",
    ),
    "mixed with an input": (
        lambda p, x: x @ (p["w"] * x.mean()),
        {"w": W},
        "mixed with an input",
    ),
    "jax.grad inside": (
        lambda p, x: jax.grad(lambda w: jnp.sum((x @ w) ** 2))(p["w"]),
        {"w": W},
        "jax.grad",
    ),
    "groups of columns": (
        lambda p, x: lax.ragged_dot_general(
            x,
            p["w"],
            jnp.array([20, 12]),
            lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], []),
        ).sum(0),
        {"w": W},
        "rows in groups",
    ),
    "experts that are copies": (
        lambda p, x: lax.ragged_dot(
            x, jnp.broadcast_to(p["w"], (2, *p["w"].shape)), SIZES
        ),
        {"w": W},
        "copies",
    ),
}


def step_of(fn):
    """The loss of a function with its gradient, compiled."""
    return jax.jit(jax.value_and_grad(lambda params: jnp.sum(fn(params, X) ** 2)))


def close(found, wanted, part):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert float(jnp.linalg.norm((a - b).ravel())) <= part * float(
            jnp.linalg.norm(b.ravel())
        )


@slow_except(
    "scan and remat over axis 1",
    "layers of transposed experts, and one expert",
    "tied head",
    "parts",
    "carried by a loop",
)
@parametrize("name", CONVERTED)
def test_products_convert_in_every_transformation(name):
    fn, params, equations = CONVERTED[name]
    low = convert(fn, strict=True)
    report = survey(low, params, X)
    assert sorted(record.product.equation for record in report.converted) == sorted(
        equations
    )
    assert not report.skipped
    weights = find_weights(low, params, X)
    absent = {
        path: jax.ShapeDtypeStruct(w.shape, w.dtype) if path in weights else w
        for path, w in params.items()
    }

    def loss(f):
        return lambda p, **options: jnp.sum(f(p, X, **options).astype(jnp.float32) ** 2)

    @jax.jit
    def results(params):
        kept = layer_state(error_feedback(weights).init(params)) if weights else {}
        exact = jax.value_and_grad(loss(fn))(params)
        fresh = jax.value_and_grad(loss(low))(params)
        stored = jax.value_and_grad(loss(low))(params, stored=kept)
        batched = jax.vmap(low, (None, 0))(params, jnp.stack([X, X]))[1]
        served = low(absent, X, stored=kept) if name != "parts" else low(params, X)
        return exact, fresh, stored, low(params, X), batched, served

    exact, fresh, stored, y, batched, served = results(params)
    close(fresh, exact, 0.2)
    close(stored, fresh, 2e-2)
    close(batched, y, 2e-2)
    close(served, y, 2e-2)
    assert not same_bits(fresh[0], exact[0])
    assert "f8_e4m3" not in str(jax.make_jaxpr(fn)(params, X))


def test_a_loop_of_unknown_length_multiplies_stored_weights():
    def fn(p, x):
        return lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, x @ p["w"] + c[1]), (0, x)
        )[1]

    low = convert(fn, strict=True)
    kept = layer_state(error_feedback(find_weights(low, {"w": W}, X)).init({"w": W}))
    served = low({"w": jax.ShapeDtypeStruct(W.shape, W.dtype)}, X, stored=kept)
    close(served, fn({"w": W}, X), 0.2)
    assert jnp.allclose(served, low({"w": W}, X, stored=kept), rtol=0, atol=1e-6)


def test_activations_times_constants_are_no_products():
    for fn in (
        lambda p, x: (x + p["w"][0]) @ jnp.ones((32, 32)),
        lambda p, x: (x @ x.T) * p["w"][:4, :4],
        lambda p, x: (x * ROTATIONS) @ x.T + p["w"][:4, :4],
    ):
        report = convert(fn).examine({"w": W}, X).report
        assert not report.converted
        assert not report.skipped


def test_names_with_slashes_are_paths():
    """Haiku's `{"mlp/~/linear_0": {"w": ...}}`: the float kernels must not stay next to
    the stored ones.
    """
    params = {"mlp/~/linear_0": {"w": W, "b": W[0]}}
    low = convert(lambda p, x: x @ p["mlp/~/linear_0"]["w"] + p["mlp/~/linear_0"]["b"])
    weights = find_weights(low, params, X)
    assert set(weights) == {"mlp/~/linear_0/w"}
    assert set(quantize_params(params, weights)["params"]["mlp/~/linear_0"]) == {"b"}
    stored = layer_state(error_feedback(weights).init(params))
    np.testing.assert_allclose(
        low(params, X, stored=stored), low(params, X), rtol=0, atol=1e-5
    )


@parametrize("name", LEFT)
def test_what_is_left_alone_is_listed_with_its_reason(name):
    fn, params, reason = LEFT[name]
    report = survey(convert(fn), params, X)
    assert not report.converted and any(
        reason in record.reason for record in report.skipped
    ), str(report)
    with refused(f"(?s)no product of .* was converted.*{reason}"):
        convert(fn)(params, X)


def test_a_rule_opens_a_custom_derivative():
    fn, params, _ = LEFT["custom rule"]
    low = convert(fn, rules={"w": "inline"}, strict=True)
    plain = convert(lambda p, x: x @ p["w"])

    assert same_bits(step_of(low)(params), step_of(plain)(params))
    with refused("no product matches the rule 'never'"):
        convert(fn, rules={"w": "inline", "never": "inline"}, strict=True)(params, X)


def test_strict_takes_the_constants_of_a_model():
    def rotate(p, x):
        return (x @ p["w"]) @ jnp.asarray(ROTATIONS).T

    low = convert(rotate, strict=True)
    assert np.isfinite(low({"w": W}, X)).all()
    assert "closes over" in str(survey(low, {"w": W}, X))


@parametrize(
    "precision, reason",
    [
        ("highest", "precision='HIGHEST'"),
        (("default", "high"), "precision='HIGH'"),
        (("default", "default"), ""),
    ],
)
def test_a_precision_of_either_operand_is_kept(precision, reason):
    low = convert(lambda p, x: (jnp.dot(x, p["w"], precision=precision), x @ p["v"]))
    report = survey(low, {"w": W, "v": W}, X)
    assert [record.reason.split(",")[0] for record in report.skipped] == (
        [reason] if reason else []
    )


def test_columns_of_an_indexed_layer_are_a_part_of_it():
    def fn(p, x):
        return lax.fori_loop(0, 3, lambda i, y: y + x @ p["w"][i, :, 8:24], x[:, :16])

    params = {"w": jnp.moveaxis(STACK, 1, 0)}
    low = convert(fn, strict=True)
    assert "a part of a parameter" in str(survey(low, params, X))
    close(step_of(low)(params), step_of(fn)(params), 0.2)


def test_some_columns_that_a_gather_takes_are_computed():
    whole_layers = lax.GatherDimensionNumbers((0, 1), (0,), (0,))

    def fn(p, x):
        def add(i, y):
            return y + x @ lax.gather(p["w"], i[None], whole_layers, (1, 32, 16))

        return lax.fori_loop(0, 3, add, x[:, :16])

    params = {"w": jnp.moveaxis(STACK, 1, 0)}
    low = convert(fn, strict=True)
    assert "computed from parameters by gather" in str(survey(low, params, X))
    close(step_of(low)(params), step_of(fn)(params), 0.2)


def test_a_survey_says_why_a_call_raises():
    convolution, params, _ = LEFT["convolution"]
    assert "nothing is converted, and a call raises" in str(
        survey(transform(convolution, RECIPE), params, X)
    )
    part = str(survey(convert(lambda p, x: x @ p["w"][:, :16]), {"w": W}, X))
    assert "a part of a parameter" in part
    assert "a call raises" not in part


def test_strict_names_what_it_cannot_convert_unless_a_rule_does():
    def fn(p, x):
        return lax.conv((x @ p["w"])[None, None], p["k"], (1, 1), "SAME")

    params = {"w": W, "k": normal(2, 1, 3, 3)}
    with refused(
        r"(?s)strict=True: 1 products of parameters .*rules.*a convolution\n    k"
    ):
        convert(fn, strict=True)(params, X)
    convert(fn, strict=True, rules={"^k$": None})(params, X)
    with refused("strict=True: no product matches the rule 'never'"):
        convert(fn, strict=True, rules={"never": None, "k": None})(params, X)


def test_the_two_forms_of_a_shared_weight_are_told_apart():
    fn, params, _ = CONVERTED["shared and transposed"]
    report = survey(convert(fn), params, X)
    assert [record.stored for record in report.converted] == [True, False]
    assert "quantized at each use" in str(report)


@slow_except("tcfp12_fast-2")
@parametrize(
    "recipe, gathered", [("tensorwise", 1), ("tcfp12_fast", 2), ("rowwise", 0)]
)
def test_a_weight_gathered_in_shard_map_travels_in_fp8(recipe, gathered):
    mesh = mesh_of(2, names=("data",))

    def fn(p, x):
        def body(w, v, x):
            return jnp.tanh(x @ lax.all_gather(w, "data", axis=0, tiled=True)) @ v

        rows = PartitionSpec("data", None)
        return jax.shard_map(
            body, mesh=mesh, in_specs=(rows, PartitionSpec(), rows), out_specs=rows
        )(p["w"], p["v"], x)

    params = {"w": normal(32, 64), "v": normal(64, 16, seed=2)}
    low, alone = (
        convert(f, recipe=recipe)
        for f in (fn, lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"])
    )
    assert [r.weight_path for r in survey(low, params, X).converted] == ["w", "v"]

    step = step_of(low).lower(params).compile()
    close(step(params), step_of(alone)(params), 0.02 if recipe == "rowwise" else 1e-5)
    moved = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather\(", step.as_text())
    assert moved.count("u8") == gathered and (gathered == 0 or set(moved) == {"u8"}), (
        moved
    )


@parametrize("recipe, others", [("tensorwise", 2), ("bf16", 1), ("rowwise", 1)])
def test_products_of_one_x_quantize_it_once(recipe, others):
    """Each quantization of its own would have an all-reduce on several devices, which
    XLA would not know to be equal.

    A product in BF16 has none, and neither has one with a scale per row, which leaves
    the devices alone.
    """

    def gated(p, x):
        return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    params = {
        "gate": normal(32, 64),
        "up": normal(32, 64, seed=2),
        "down": normal(64, 32, seed=3),
    }
    mesh = mesh_of(2, names=("data",))
    rules = {"gate": recipe, "up": recipe}
    low = jax.jit(convert(gated, recipe="tensorwise", rules=rules))
    compiled = low.lower(
        params, jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    ).compile()
    amaxes = [
        part
        for c in collectives(compiled.as_text())
        for part in c.parts
        if c.operation == "all-reduce"
    ]
    # of x, and of the input of "down"
    assert [part.size for part in amaxes] == [1] * others


def test_products_of_one_x_have_the_dtype_they_ask_for():
    """Wider than x: then the two quantize it alone."""

    def fn(p, x):
        narrow = x.astype(jnp.bfloat16)
        product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        weights = [w.astype(jnp.bfloat16) for w in p]
        return [product(narrow, w) for w in weights]

    params = [W, normal(32, 32, seed=2)]
    results = jax.jit(convert(fn, recipe="tensorwise"))(params, X)
    for y, exact in zip(results, fn(params, X), strict=True):
        assert y.dtype == jnp.float32
        assert (y != y.astype(jnp.bfloat16).astype(jnp.float32)).any()
        close(y, exact, 0.1)


def columns_then_rows(p, x):
    hidden = jnp.tanh(jnp.einsum("td,dnh->tnh", x, p["w"]))
    return jnp.einsum(
        "tnh,nhd->td", hidden, p["v"], out_sharding=PartitionSpec("a", None)
    )


def test_explicit_axes_and_out_sharding_reach_the_products():
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    shapes = {
        "w": ((32, 4, 8), (None, "b", None)),
        "v": ((4, 8, 32), ("b", None, None)),
    }
    low = convert(columns_then_rows, recipe="tensorwise")
    whole = {
        name: normal(*shape, seed=i)
        for i, (name, (shape, _)) in enumerate(shapes.items())
    }
    with jax.set_mesh(mesh):

        def put(x, *spec):
            return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

        params = {name: put(whole[name], *spec) for name, (_, spec) in shapes.items()}
        x = put(X, "a", None)
        weights = find_weights(low, params, x)

        @jax.jit
        def step(params, x):
            kept = layer_state(error_feedback(weights).init(params))
            return low(params, x, stored=kept), jax.grad(
                lambda p: jnp.sum(low(p, x, stored=kept) ** 2)
            )(params)

        y, gradients = step(params, x)
    assert y.sharding.spec == PartitionSpec("a", None)
    assert gradients["v"].sharding.spec[0] == "b"
    exact = jax.jit(
        lambda p, x: jnp.einsum(
            "tnh,nhd->td", jnp.tanh(jnp.einsum("td,dnh->tnh", x, p["w"])), p["v"]
        )
    )
    close(np.asarray(y), np.asarray(exact(whole, X)), 0.1)


def test_rules_know_paths_shapes_scopes_and_heads():
    def fn(p, x):
        with jax.named_scope("encoder"):
            x = jnp.tanh(x @ p["a"]["w"])
        return jnp.tanh(x @ p["b"]["w"]) @ p["c"]["w"]

    params = {
        "a": {"w": W},
        "b": {"w": normal(32, 32, seed=3)},
        "c": {"w": normal(32, 48)},
    }

    def recipes(**how):
        return {
            r.path: r.recipe
            for r in survey(transform(fn, RECIPE, **how), params, X).converted
        }

    assert set(recipes(include=ALL)) == {"a", "b", "c"}
    # nothing contracts 48 features: a head
    assert set(recipes(include=("linear", "small"))) == {"a", "b"}
    assert set(recipes(include=ALL, rules={"encoder": None})) == {"b", "c"}

    def by_shape(path, product):
        return "tensorwise" if product.n == 48 else None

    assert recipes(include=ALL, rules=by_shape)["c"] == tcfp_jax.recipe("tensorwise")


def test_switching_exporting_and_diagnosing_a_function(capsys):
    fn, params, _ = CONVERTED["mlp"]
    low = convert(fn, recipe="tensorwise")
    off = to_bf16(low, "")
    assert export(low) is fn
    assert same_bits(off(params, X), fn(params, X))
    assert same_bits(restore(off, "")(params, X), low(params, X))
    assert not same_bits(low(params, X), fn(params, X))
    found = diagnose(fn, params, X, recipe="tensorwise")
    assert [line.path for line in found.lines] == [
        "a",
        "c",
    ]
    assert "eligible" in capsys.readouterr().out


def test_nested_transforms_are_not_converted_twice():
    layer = tcfp_jax.linen.TCFPDense(32, recipe="tensorwise")
    inner = convert(lambda p, x: x @ p["w"], recipe="tensorwise")
    params = {"w": W, "layer": {"kernel": W, "bias": W[0]}, "own": W}
    outer = convert(
        lambda p, x: (
            layer.apply({"params": p["layer"]}, inner({"w": p["w"]}, x)) @ p["own"]
        )
    )
    report = survey(outer, params, X)
    found = {record.weight_path: record.reason for record in report.converted}
    assert found["layer/kernel"] == "low-precision by hand"
    assert found["own"] == ""
    assert np.isfinite(outer(params, X)).all()


def test_other_programs_never_see_a_transformed_one():
    block = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def plain(p, x):
        return block(p["w"], x)

    def text():
        return str(jax.make_jaxpr(plain)({"w": W}, X))

    before = text()
    low = convert(plain)
    assert "f8_e4m3" in str(jax.make_jaxpr(low)({"w": W}, X))
    assert text() == before
    assert jnp.array_equal(plain({"w": W}, X), jnp.tanh(X @ W))


def test_equal_jitted_blocks_share_one_trace():
    fn, params, _ = CONVERTED["jitted blocks"]
    low = convert(fn, recipe="tensorwise")
    lines = [
        len(jax.jit(f).lower(params, X).as_text().splitlines())
        for f in (low, convert(fn, recipe="bf16"))
    ]
    more = {str(i): normal(32, 32, seed=i) for i in range(9)}
    longer = len(jax.jit(low).lower(more, X).as_text().splitlines())
    assert longer < lines[0] + 6 * 4  # six more blocks are six more calls


def test_state_of_other_parameters_is_not_multiplied():
    fn, params, _ = CONVERTED["mlp"]
    low = convert(fn, recipe="tensorwise")
    kept = layer_state(error_feedback(find_weights(low, params, X)).init(params))
    assert np.isfinite(low(params, X, stored=kept)).all()
    averaged = jax.tree.map(lambda w: 0.99 * w, params)
    with refused("made of other parameters"):
        low(averaged, X, stored=kept)
    assert np.isnan(jax.jit(low)(averaged, X, stored=kept)).all()
    with refused("the state holds 'z', but the parameters have only a, b, c"):
        low(params, X, stored={**kept, "z": kept["a"]})
    layers = jax.vmap(lambda w: quantize_weight(w, low.policy.recipe)[0])(STACK)
    with refused(r"for each of the stack \[32\]"):
        low(params, X, stored=kept | {"a": layers})
    with refused("'a' is a shape without values"):
        low({**params, "a": jax.ShapeDtypeStruct((32, 32), "float32")}, X)


@parametrize(
    "arguments, options, error, message",
    [
        ((nn.Dense(4), RECIPE), {}, TypeError, "convert_to_tcfp"),
        ((3, RECIPE), {}, TypeError, "fn is a int; pass a function"),
        ((heads, "tcfp13"), {}, ValueError, "tcfp12_fast"),
        ((heads, RECIPE), {"include": "heads"}, ValueError, "heads.*linear"),
        (
            (heads, RECIPE),
            {"params": 4},
            TypeError,
            "params=4, but the function was called with 2",
        ),
    ],
)
def test_bad_input(arguments, options, error, message):
    with refused(message, error):
        transform(*arguments, **options)({}, X)
