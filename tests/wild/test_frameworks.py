"""The recipes of docs/frameworks.md run, each if its framework is installed."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

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


@pytest.mark.parametrize("name", PACKAGES)
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
