"""The recipes of docs/frameworks.md run, each if its framework is installed."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from tcfp_jax import transform
from tcfp_jax.conversion import find_weights
from tests.helpers import parametrize

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
BLOCKS = dict(
    re.findall(
        r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```",
        PAGE,
        re.DOTALL | re.MULTILINE,
    )
)
PACKAGES = {
    "Equinox": "equinox",
    "Haiku": "haiku",
    "Keras 3": "keras",
    "Haliax and Levanter": "haliax",
    "tunix": "tunix",
    "MaxText": "maxtext",
}


def test_every_recipe_is_tested():
    assert set(BLOCKS) == set(PACKAGES)


@parametrize("name", PACKAGES)
def test_a_recipe_trains(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip(
        PACKAGES[name],
        reason=f"{PACKAGES[name]} is not installed; see the extras wild of pyproject",
    )
    namespace: dict = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(BLOCKS[name], "frameworks.md", "exec"), namespace)
    losses = namespace["losses"]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.5 * losses[0]


def test_merged_lora_of_einsum_layers_stores_all_of_its_weights(monkeypatch):
    """The projections of KerasHub's attention, whose kernels have three axes."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="keras is part of the extra wild")
    layers = keras.layers
    heads = layers.EinsumDense("abc,cde->abde", output_shape=(None, 4, 16))
    joined = layers.EinsumDense("abde,dec->abc", output_shape=(None, 32))
    inputs = keras.Input((8, 32))
    model = keras.Model(inputs, joined(heads(inputs)))
    for layer in (heads, joined):
        layer.enable_lora(4)
    frozen = [variable.value for variable in model.non_trainable_variables]
    trained = [variable.value for variable in model.trainable_variables]
    params = {"frozen": frozen, "trained": trained}

    def call(p, x):
        return model.stateless_call(p["trained"], p["frozen"], x)[0]

    low = transform(call, "tensorwise", include=("linear", "small", "head"))
    x = np.ones((2, 8, 32), "float32")
    weights = [f"{part}/{i}" for part, of in params.items() for i in range(len(of))]
    assert sorted(find_weights(low, params, x)) == sorted(weights)
