"""One process, eight virtual CPU devices, strict promotion; a GPU only by `-m gpu`.

Programs are compiled without LLVM's optimizations (XLA's own passes run), because tests
compile much and compute little. Tests marked `optimized` compile as users do: they
compare bits of two programs, read compiled programs, or run thousands of steps. Of
those marked `optimized("slow")` only the slow cases do. All tests marked `gpu` do, too.
"""

import contextlib
import functools
import gc
import os
import re
import tempfile
import types
import zlib
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from jax._src import compilation_cache
from jax._src.interpreters import mlir

QUICK = "jax_disable_most_optimizations"
# Flags that are set already stay. With older emitters of XLA for a CPU all tests take
# 647 s, with the new ones 1,009. XLA stops at an unknown flag, and jax 0.11 no longer
# has this one, so `.ci/run` uses the new emitters there.
FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # A worker has one core, on which compiling in several threads takes a tenth longer.
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if jax.__version_info__ < (0, 11):
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
# JAX reads them when it first looks for devices, which no import does before this file.
for flag, setting in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={setting}"
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Traces make many long-lived objects. A rarer garbage collection takes no more memory,
# and tests take 5 % less time.
gc.set_threshold(50_000, 50, 1000)
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("repeatable")


# Longest files. `--dist loadfile` hands out whole files, so long ones go first, or one
# of them ends alone.
LONGEST = (
    "test_compiled",
    "test_collectives",
    "test_arena",
    "test_train",
    "test_house",
    "test_stored",
    "test_rounding",
    "test_wild",
    "test_adamw",
    "test_golden",
    "test_axes",
    "test_gemm",
    "test_fp4",
    "test_fp4_training",
    "test_docs",
    "test_fp4_compiled",
    "test_quantizers",
    "test_dual_quantizers",
    "test_casting",
    "test_cast_scales",
    "test_calibration",
    "test_choosing",
    "test_transform",
    "test_convergence",
    "test_conversion",
    "test_compiled_step",
    "test_remat",
    "test_scaled_recipes",
    "test_serving",
    "test_state",
    "test_moe",
    "test_losses",
    "test_losses_transformed",
    "test_observed",
    "test_nnx",
    "test_transformations",
    "test_tcfp12",
    "test_freshness",
    "test_monitor",
    "test_moments",
    "test_linen",
    "test_export",
    "test_export_llama",
    "test_llama",
    "test_distributed",
    "test_failures",
    "test_fp4_readings",
    "test_x64",
)


def asks_for_gpu(expression: str) -> bool:
    """Return whether the expression of `pytest -m` selects tests marked `gpu`.

    >>> [asks_for_gpu(e) for e in ("gpu", "gpu and not slow", "not slow and gpu")]
    [True, True, True]
    >>> [asks_for_gpu(e) for e in ("not gpu", "not (gpu)", "")]
    [False, False, False]
    """
    return re.search(r"(?<!not )(?<!not \()\bgpu\b", expression) is not None


def share_programs(config: pytest.Config) -> None:
    """Give all workers and their processes one empty folder of compiled programs.

    It also holds the smallest ones, of single operations: reading one takes 5 ms,
    compiling it 14, writing it half a millisecond, and every file needs many.
    """
    if {"PYTEST_XDIST_WORKER", "JAX_COMPILATION_CACHE_DIR"} & set(os.environ):
        return
    folder = tempfile.TemporaryDirectory(
        prefix="tcfp_jax_programs_", ignore_cleanup_errors=True
    )
    config.add_cleanup(folder.cleanup)
    settings = dict(
        compilation_cache_dir=folder.name, persistent_cache_min_compile_time_secs=0
    )
    for name, value in settings.items():
        os.environ[f"JAX_{name.upper()}"] = str(value)
        jax.config.update(f"jax_{name}", value)


def share_context() -> None:
    """Lower all programs in one MLIR context.

    JAX makes one for each, which takes a fifth of a small one's time.
    """
    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
    # Half the time to write a program.
    compilation_cache.zlib = types.SimpleNamespace(
        compress=lambda b: zlib.compress(b, 1), decompress=zlib.decompress
    )


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist passes the option to its workers.
    on_gpu = asks_for_gpu(config.option.markexpr)
    if not on_gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
        jax.config.update("jax_platforms", "cpu")
        share_programs(config)
        share_context()
    _PROGRAMS["default"] = not on_gpu
    jax.config.update(QUICK, not on_gpu)
    # xdist would hand out files with many tests first, even if they are short.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.fixture(scope="module")
def standard_promotion() -> Iterator[None]:
    """Allow mixed dtypes, as Flax and Optax have, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def no_meshes() -> Iterator[None]:
    """Refuse to make meshes while files are collected.

    Collection must not need the eight devices of a CPU: `pytest -m gpu` imports every
    file on machines with one GPU.
    """

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError(
            "a mesh is made while tests are collected, perhaps with one device; use"
            " helpers.mesh_of"
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "make_mesh", refuse)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with no_meshes():
        return (yield)


def compiled_for_users(item: pytest.Item) -> bool:
    """Return whether a test compiles with all optimizations."""
    marker = item.get_closest_marker("optimized")
    if marker is not None and marker.args == ("slow",):
        marker = item.get_closest_marker("slow")
    return marker is not None or item.get_closest_marker("gpu") is not None


def mark_slow_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `slow` the cases of a parametrized test that `slow_except` does not name.

    Raises:
      UsageError: a test has no case of such a name, so that a renamed case does not
        vanish unseen.
    """
    kept: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("slow_except")
        if marker is None:
            continue
        case = item.callspec.id  # type: ignore[attr-defined]
        kept.setdefault(item.nodeid.partition("[")[0], set(marker.args)).discard(case)
        if case not in marker.args:
            item.add_marker(pytest.mark.slow)
    # If a case was asked for by name, the others are not collected.
    if not any("[" in argument for argument in config.args):
        for test, missing in kept.items():
            if missing:
                raise pytest.UsageError(
                    f"{test} has no case {sorted(missing)}; slow_except names cases by"
                    " their ids"
                )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    mark_slow_cases(config, items)
    # Long files first, and in a file the optimized tests first, so that compilation
    # changes at most twice in each.
    rank = {name: i for i, name in enumerate(LONGEST)}
    place: dict[object, int] = {}
    for item in items:
        place.setdefault(item.path, len(place))

    def order(item: pytest.Item) -> tuple[int, int, bool]:
        length = rank.get(item.path.stem, len(LONGEST))
        return length, place[item.path], not compiled_for_users(item)

    items.sort(key=order)


@pytest.fixture(autouse=True)
def _gpu_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(
            f"needs a GPU; JAX's default backend here is {jax.default_backend()}"
        )


@pytest.fixture(autouse=True)
def _compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    quick = _PROGRAMS["default"] and not compiled_for_users(request.node)
    jax.config.update(QUICK, quick)
    # for the processes that the test starts
    os.environ[QUICK.upper()] = str(int(quick))
    # JAX caches programs regardless of how they were compiled, but those of each
    # context for themselves.
    context = contextlib.nullcontext()
    if quick != _PROGRAMS["default"]:
        context = _OPTIMIZED("optimized")
    with context:
        yield
    jax.config.update(QUICK, _PROGRAMS["default"])


_PROGRAMS = {"default": True}  # if fixtures of modules compile quickly
_OPTIMIZED = jax.make_user_context()
