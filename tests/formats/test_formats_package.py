"""The package is whole: it imports nothing of the training side, and its modules import each other without a circle."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tcfp_jax" / "formats").glob("*.py"))
# They say where a kernel runs, not what it computes, so casts and quantizers stay independent oracles; random bits are
# an input of both.
PLUMBING = {
    "pallas_kernels.specs", "pallas_kernels.explicit", "pallas_kernels.dispatch", "pallas_kernels.partition",
    "pallas_kernels.counter",
}  # fmt: skip


def imports(path):
    """(module, name or None) of every import of a file, lazy ones too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            yield from ((node.module, alias.name) for alias in node.names)


def test_nothing_of_training_is_imported():
    allowed = {"jax", "numpy", "ml_dtypes", "matplotlib", *sys.stdlib_module_names}
    for path in FILES:
        for module, _ in imports(path):
            inside = module == "tcfp_jax.formats" or module.startswith("tcfp_jax.formats.")
            assert inside or module in PLUMBING or module.split(".")[0] in allowed, f"{path.name} imports {module}"


def test_modules_import_each_other_without_a_circle():
    names = {path.stem for path in FILES}
    graph = {path.stem: set() for path in FILES}
    for path in FILES:
        for module, name in imports(path):
            package, _, stem = module.partition("tcfp_jax.formats")
            if package or module.startswith("pallas"):
                continue
            # `from tcfp_jax.formats import x` is of the module x, or of the package itself.
            graph[path.stem].add(stem.lstrip(".") or (name if name in names else "__init__"))
    assert {"parts", "scale_rules"} <= graph["casting"] | graph["cast_kernel"]
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)  # CycleError names the circle


def test_any_module_can_be_imported_first():
    first = "import tcfp_jax.formats.packing, sys; from tcfp_jax import formats; formats.nvfp4, formats.cast"
    subprocess.run([sys.executable, "-c", first], check=True, cwd=ROOT)
