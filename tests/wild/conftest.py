"""Other people's models add integers to floats and warn; importing their packages may
change Flax's settings.
"""

import os
from collections.abc import Iterator

import flax
import jax
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _as_their_users_run_them() -> Iterator[None]:
    names = [
        name for name in ("flax_always_shard_variable",) if hasattr(flax.config, name)
    ]
    before = {name: getattr(flax.config, name) for name in names}
    with jax.numpy_dtype_promotion("standard"):
        yield
    for name, value in before.items():
        flax.config.update(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/wild/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore"))
