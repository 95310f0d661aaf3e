"""Linen and NNX run one forward pass: equal parameters give equal bits, and no layer
writes an equation to parse.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from tcfp_jax import layers, linen, nnx
from tcfp_jax.products.einsum import parse
from tests.helpers import filled, nnx_model, same_bits, variables_of

X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 4, 8)), jnp.float32)
TOKENS = jnp.arange(6).reshape(2, 3)
PAIRS = {
    "dense": (linen.TCFPDense(6), lambda **o: nnx.TCFPLinear(8, 6, **o)),
    "without bias": (
        linen.TCFPDense(6, use_bias=False),
        lambda **o: nnx.TCFPLinear(8, 6, use_bias=False, **o),
    ),
    "two axes": (
        linen.TCFPDenseGeneral((3, 2), axis=(-2, -1)),
        lambda **o: nnx.TCFPLinearGeneral((4, 8), (3, 2), axis=(-2, -1), **o),
    ),
    "batch": (
        linen.TCFPDenseGeneral((3, 2), axis=-1, batch_dims=0),
        lambda **o: nnx.TCFPLinearGeneral(8, (3, 2), axis=-1, batch_axis={0: 2}, **o),
    ),
    "einsum": (
        linen.TCFPEinsum((4, 8, 5), "abhd,hdn->anb"),
        lambda **o: nnx.TCFPEinsum("abhd,hdn->anb", (4, 8, 5), (5,), **o),
    ),
    "stacked einsum": (
        linen.TCFPEinsum((3, 8, 5), "bthk,tkn->hbtn"),
        lambda **o: nnx.TCFPEinsum("bthk,tkn->hbtn", (3, 8, 5), (3, 5), **o),
    ),
    "norm": (linen.TCFPLayerNorm(), lambda **o: nnx.TCFPLayerNorm(8, **o)),
    "embed": (linen.TCFPEmbed(16, 8), lambda **o: nnx.TCFPEmbed(16, 8, **o)),
    "one row": (linen.TCFPEmbed(1, 8), lambda **o: nnx.TCFPEmbed(1, 8, **o)),
}


@pytest.mark.slow_except("without bias", "batch", "one row")
@pytest.mark.parametrize("name", PAIRS)
def test_equal_parameters_give_equal_bits(name):
    by_name, make = PAIRS[name]
    # Flax's own two LayerNorms differ in bfloat16
    dtype = None if name == "norm" else jnp.bfloat16
    by_name, model = (
        by_name.clone(dtype=dtype),
        nnx_model(lambda rngs: make(dtype=dtype, rngs=rngs)),
    )
    inputs = TOKENS if isinstance(by_name, linen.TCFPEmbed) else X
    shapes = jax.eval_shape(by_name.init, jax.random.key(0), inputs)["params"]
    graphdef, state = flax_nnx.split(model)
    pure = flax_nnx.to_pure_dict(state)
    assert jax.tree.map(jnp.shape, pure) == jax.tree.map(jnp.shape, shapes)
    params = filled(shapes)
    flax_nnx.replace_by_pure_dict(state, params)

    @jax.jit
    def both(params, state):
        layer = flax_nnx.merge(graphdef, state)
        found = [by_name.apply({"params": params}, inputs), layer(inputs)]
        if isinstance(by_name, linen.TCFPEmbed):
            found += [
                by_name.apply({"params": params}, X, method="attend"),
                layer.attend(X),
            ]
        return found[::2], found[1::2]

    assert same_bits(*both(params, state))


@pytest.mark.parametrize(
    "model, parsed",
    [
        (linen.TCFPDense(4), []),
        (linen.TCFPDenseGeneral((2, 4), axis=(-2, -1)), []),
        (linen.TCFPEinsum((8, 4), "abhk,kn->abhn"), ["abhk,kn->abhn"]),
    ],
    ids=["dense", "dense_general", "einsum"],
)
def test_only_the_equation_of_a_user_is_parsed_and_once(model, parsed, monkeypatch):
    seen = []
    monkeypatch.setattr(
        layers,
        "parse",
        lambda equation, ndim: seen.append(equation) or parse(equation, ndim),
    )
    variables = variables_of(model, X)
    seen.clear()
    jax.eval_shape(model.apply, variables, X)
    assert seen == parsed
