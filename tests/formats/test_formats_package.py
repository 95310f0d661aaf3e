"""The package imports nothing of training, and no Flax."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tcfp_jax" / "formats").glob("*.py"))
# These modules decide where a kernel runs, not its results, so casts and quantizers stay independent oracles. Random
# bits are an input of both.
PLUMBING = {
    "pallas_kernels.specs", "pallas_kernels.explicit", "pallas_kernels.dispatch", "pallas_kernels.partition",
    "pallas_kernels.counter",
}  # fmt: skip


def imports(path):
    """Yield (module, name or None) for every import of a file, lazy ones too."""
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


def test_any_module_can_be_imported_first_and_without_flax():
    first = (
        "import tcfp_jax.formats.packing, sys; from tcfp_jax import formats; formats.nvfp4, formats.cast\n"
        "assert 'flax' not in sys.modules and 'optax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", first], check=True, cwd=ROOT)
