"""Linen and NNX run one forward pass: equal parameters give equal bits.

Layers of Flax without a twin of ours are converted, and give the bits of `contract`.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx as flax_nnx

from tcfp_jax import linen, nnx, recipe
from tcfp_jax.conversion.convert import convert_to_tcfp
from tcfp_jax.products.einsum import contract
from tests.equations import parse
from tests.helpers import drawn, filled, nnx_model, parametrize, same_bits, slow_except

X = drawn(2, 3, 4, 8, seed=1)
TOKENS = jnp.arange(6).reshape(2, 3)
# By name: a layer of Linen, and the class and the arguments of NNX's.
PAIRS = {
    "dense": (linen.TCFPDense(6), nnx.TCFPLinear, (8, 6), {}),
    "without bias": (
        linen.TCFPDense(6, use_bias=False),
        nnx.TCFPLinear,
        (8, 6),
        {"use_bias": False},
    ),
    "norm": (linen.TCFPLayerNorm(), nnx.TCFPLayerNorm, (8,), {}),
    "embed": (linen.TCFPEmbed(16, 8), nnx.TCFPEmbed, (16, 8), {}),
    "one row": (linen.TCFPEmbed(1, 8), nnx.TCFPEmbed, (1, 8), {}),
}
# Also the equation of the layer's product, and the shape of its bias next to y.
CONVERTED = {
    "two axes": (
        nn.DenseGeneral((3, 2), axis=(-2, -1)),
        flax_nnx.LinearGeneral,
        ((4, 8), (3, 2)),
        {"axis": (-2, -1)},
        "abhk,hkmn->abmn",
        (3, 2),
    ),
    "batch": (
        nn.DenseGeneral((3, 2), axis=-1, batch_dims=0),
        flax_nnx.LinearGeneral,
        (8, (3, 2)),
        {"batch_axis": {0: 2}},
        "abck,akmn->abcmn",
        (2, 1, 1, 3, 2),
    ),
    "einsum": (
        nn.Einsum((4, 8, 5), "abhd,hdn->anb"),
        flax_nnx.Einsum,
        ("abhd,hdn->anb", (4, 8, 5), (5,)),
        {},
        "abhd,hdn->anb",
        (5, 1),
    ),
    "stacked einsum": (
        nn.Einsum((3, 8, 5), "bthk,tkn->hbtn"),
        flax_nnx.Einsum,
        ("bthk,tkn->hbtn", (3, 8, 5), (3, 5)),
        {},
        "bthk,tkn->hbtn",
        (3, 5),
    ),
}


def both_of(by_name, kind, arguments, options, inputs):
    """Return the graph and the state of NNX's layer, and the same parameters."""
    model = nnx_model(lambda rngs: kind(*arguments, **options, rngs=rngs))
    shapes = jax.eval_shape(by_name.init, jax.random.key(0), inputs)["params"]
    graphdef, state = flax_nnx.split(model)
    pure = flax_nnx.to_pure_dict(state)
    assert jax.tree.map(jnp.shape, pure) == jax.tree.map(jnp.shape, shapes)
    params = filled(shapes)
    flax_nnx.replace_by_pure_dict(state, params)
    return graphdef, state, params


@slow_except("without bias", "one row")
@parametrize("name", PAIRS)
def test_equal_parameters_give_equal_bits(name):
    by_name, kind, arguments, options = PAIRS[name]
    # Flax's own two LayerNorms differ in bfloat16
    dtype = None if name == "norm" else jnp.bfloat16
    by_name = by_name.clone(dtype=dtype)
    embeds = isinstance(by_name, linen.TCFPEmbed)
    inputs = TOKENS if embeds else X
    options = options | {"dtype": dtype}
    graphdef, state, params = both_of(by_name, kind, arguments, options, inputs)

    @jax.jit
    def both(params, state):
        layer = flax_nnx.merge(graphdef, state)
        variables = {"params": params}
        of_linen = [by_name.apply(variables, inputs)]
        of_nnx = [layer(inputs)]
        if embeds:
            of_linen.append(by_name.apply(variables, X, method="attend"))
            of_nnx.append(layer.attend(X))
        return of_linen, of_nnx

    assert same_bits(*both(params, state))


@slow_except("batch-tcfp12")
@parametrize("how", ["tcfp12", "blockwise", "bf16"])
@parametrize("name", CONVERTED)
def test_converted_layers_have_the_bits_of_their_product(name, how):
    by_name, kind, arguments, options, equation, bias_shape = CONVERTED[name]
    graphdef, state, params = both_of(by_name, kind, arguments, options, X)
    low = convert_to_tcfp(by_name, how, include=("linear", "small", "head"))
    contraction = parse(equation, X.ndim)

    def by_hand(params):
        y = contract(contraction, X, params["kernel"], recipe=recipe(how))
        return y + params["bias"].reshape(bias_shape)

    def by_linen(params):
        return low.apply({"params": params}, X)

    def by_nnx(params):
        flax_nnx.replace_by_pure_dict(state, params)
        layer = flax_nnx.merge(graphdef, state)
        convert_to_tcfp(layer, how, include=("linear", "small", "head"))
        return layer(X)

    def values_and_gradients(forward, params):
        y, back = jax.vjp(forward, params)
        return y, back(jnp.sin(y))

    @jax.jit
    def all_three(params):
        forwards = (by_hand, by_linen, by_nnx)
        return [values_and_gradients(forward, params) for forward in forwards]

    wanted, *found = all_three(params)
    assert all(same_bits(one, wanted) for one in found)
