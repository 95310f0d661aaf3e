"""One process, eight virtual CPU devices, strict dtype promotion; the GPU only where `-m gpu` asks for it."""

import os
import sys
from collections.abc import Iterator

# A worker of pytest-xdist has other arguments, and inherits what its parent decided.
if "PYTEST_XDIST_WORKER" not in os.environ and not {"gpu", "-mgpu"} & set(sys.argv):
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")


# Files that take longest. `--dist loadfile` hands out whole files: the long ones first, or one ends alone.
LONGEST = (
    "test_benchmarks", "test_train", "test_house", "test_blocks", "test_tcfp12", "test_kernels", "test_gemm",
    "test_train_step", "test_scaled_recipes", "test_conversion", "test_models", "test_linen", "test_readme", "test_nnx",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    # xdist would hand out files with many tests first, whatever they take.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))


@pytest.fixture(autouse=True)
def _gpu_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; JAX's default backend here is {jax.default_backend()}")


@pytest.fixture
def quick_compiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """LLVM optimizes nothing, for tests that compile much and compute little; XLA's own passes run as ever.

    Tests marked `optimized` compare bits of two programs as users compile them.
    """
    if request.node.get_closest_marker("optimized"):
        yield
        return
    yield from _without_optimizations()


@pytest.fixture(scope="module")
def quick_module() -> Iterator[None]:
    """The same for a whole file, its module's fixtures too."""
    yield from _without_optimizations()


def _without_optimizations() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
