"""The house: imports flow one way, names are fixed, rooms stay small, and every docstring's example runs."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import tcfp_jax

ROOT = Path(__file__).parents[1]
ORDER = [
    "recipe", "blocks", "quantization", "layout", "scaling", "tcfp12", "products", "gemm", "selection", "optim",
    "contraction", "adapters", "linen", "nnx", "registry", "policy", "tracing", "report", "interception", "replacement",
    "census", "conversion", "inference", "diagnosis",
]  # fmt: skip
KERNEL_ORDER = ["numerics", "dispatch", "tuning", "partition", "tiled", "blocks"]
PUBLIC = {
    "Recipe", "recipe", "TCFPMode", "matmul", "quantize", "split", "quantize_tcfp12", "dequantize_tcfp12",
    "fake_quantize", "error_feedback", "layer_state", "explain",
}  # fmt: skip


def files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path):
    """Modules that a file imports at any level."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", files("pallas_kernels"), ids=module_of)
def test_kernels_know_jax_and_numpy_only(path):
    allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imports(path)} <= allowed
    inside = {name for name in imports(path) if name.startswith("pallas_kernels.")}
    if path.parent.name == "pallas_kernels" and path.name != "__init__.py":
        later = KERNEL_ORDER[KERNEL_ORDER.index(path.stem) :]
        assert not [name for name in inside if name.split(".")[1] in later or name.split(".")[1] not in KERNEL_ORDER]
    if path.name == "reference.py":
        assert not [name for name in inside if name.endswith(".api")]


@pytest.mark.parametrize("path", files("tcfp_jax"), ids=module_of)
def test_library_flows_one_way(path):
    names = set(imports(path))
    assert not {name.split(".")[0] for name in names} & {"models", "benchmarks", "tests"}
    if path.name != "__init__.py":
        assert path.stem in ORDER, f"{path.name} has no place in the order; add it to ORDER"
        later = ORDER[ORDER.index(path.stem) :]
        assert not [name for name in names if any(name.startswith(f"tcfp_jax.{module}") for module in later)]


def test_models_do_not_know_benchmarks():
    for path in files("models"):
        assert not [name for name in imports(path) if name.split(".")[0] in ("benchmarks", "tests")]


def test_public_names():
    assert set(tcfp_jax.__all__) == PUBLIC
    for name in PUBLIC:
        assert callable(getattr(tcfp_jax, name)), f"a module shadows {name}"


@pytest.mark.parametrize(
    "first", ["tcfp_jax", "tcfp_jax.linen", "tcfp_jax.conversion", "tcfp_jax.recipe", "pallas_kernels.matmul.api"]
)
def test_public_names_import_in_either_order(first):
    script = (
        f"import {first}\nimport tcfp_jax, tcfp_jax.linen, pallas_kernels.matmul.api\n"
        "assert all(callable(getattr(tcfp_jax, name)) for name in tcfp_jax.__all__)\ntcfp_jax.linen.TCFPDense"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", files("tcfp_jax", "pallas_kernels", "models", "benchmarks"), ids=module_of)
def test_rooms_are_small(path):
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.args + node.args.kwonlyargs
            limit = 10 if node.name == "from_flags" else 9
            assert node.end_lineno - node.lineno + 1 <= 80, f"{node.name} is long"
            assert len(arguments) <= limit, f"{node.name} takes {len(arguments)} arguments"


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("path", files("tcfp_jax", "pallas_kernels"), ids=module_of)
def test_docstrings_are_there_and_their_examples_run(path):
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), f"{path} says nothing of itself"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
    module = importlib.import_module(module_of(path))
    module = sys.modules[module_of(path)] if not hasattr(module, "__file__") else module
    with jax.numpy_dtype_promotion("standard"):
        assert doctest.testmod(module).failed == 0
