"""The house: imports flow one way, names are fixed, the libraries stay small, and every
docstring's example runs.
"""

import ast
import doctest
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import tcfp_jax
from pallas_kernels.adamw import api as adamw
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp4_matmul import api as fp4
from pallas_kernels.fp4_matmul import mosaic as fp4_mosaic
from pallas_kernels.fp4_matmul import unpacked
from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.matmul import api as products
from pallas_kernels.operands import Block, Row, Tensor
from pallas_kernels.quantize import api as quantizers
from pallas_kernels.quantize import computed
from tcfp_jax import formats, recipes
from tcfp_jax.formats import casting, nvfp4_arrays
from tests import density, walk
from tests.helpers import parametrize, refused, slow_except

ROOT = Path(__file__).parents[1]
# The doors (files and folders) of each package, in the order in which data flows: a
# file imports from its own door and from doors above it.
DOORS = {
    "pallas_kernels": [
        "checks",
        "derivatives",
        "specs",
        "numerics",
        "counter",
        "fp4",
        "scaling",
        "moments",
        "wire",
        "operands",
        "arithmetic",
        "pallas_triton",
        "tuning",
        "dispatch",
        "parts",
        "explicit",
        "partition",
        "tiled",
        "triton_passes",
        "hopper",
        "quantize",
        "adamw",
        "matmul",
        "grouped_matmul",
        "fp4_matmul",
    ],
    "tcfp_jax": [
        "paths",
        "remat",
        "formats",
        "recipes",
        "weights",
        "products",
        "losses",
        "optim",
        "sharding",
        "explanation",
        "layers",
        "conversion",
        "linen",
        "nnx",
        "monitor",
        "inference",
    ],
}
LIBRARIES = tuple(DOORS)
# Size of the two libraries. A number may fall and never rise: lower it here when it has
# fallen. If a change needs more, take something out first. Lines are not limited: a
# limit on lines is paid for with density.
LIMITS = {
    "tokens of the two libraries": 235_700,
    "tokens of models": 61_800,
    "tokens of benchmarks": 59_500,
    "tokens of tests": 376_600,
    "packed places per 1,000 lines of the two libraries": 3,
    "named lambdas of the two libraries": 3,
    "lines of a file": 500,
    "lines of a function without its docstring": 80,
    "arguments of a function": 9,
    "public definitions": 677,
    "named recipes": 12,
    "aliases of `Literal`": 30,
    "the word `Any`": 289,
    "modules that `import tcfp_jax` loads": 70,
}
# Tokens on a line of code. Optax, lineax and qwix have 7.
TOKENS_PER_LINE = {
    "pallas_kernels": 9.0,
    "tcfp_jax": 9.0,
    "models": 9.0,
    "benchmarks": 9.0,
    "tests": 9.95,
}
# Files that a call enters, and calls from one file into another.
CROSSED = {
    "a product of a stored weight": (15, 70),
    "`TCFPDense`": (19, 91),
    "a converted model of two layers": (31, 166),
    "`grad` of a stored converted model": (33, 237),
}
# Signatures that users know from optax and from the original's layers.
LONG_SIGNATURES = {"adamw": 12, "from_flags": 10, "cross_entropy": 10}
PUBLIC = {
    "Recipe",
    "recipe",
    "TCFPMode",
    "matmul",
    "quantize",
    "split",
    "quantize_tcfp12",
    "dequantize_tcfp12",
    "fake_quantize",
    "error_feedback",
    "layer_state",
    "explain",
    "train_step",
    "transform",
    "store",
    "dequantize",
    "lookup",
    "value_and_grad",
    "grad",
    "apply_updates",
}
# Casts are the oracle of quantizers, so they share only modules that decide where a
# kernel runs, or run it, names of leaves, and the random bits, which are an input of
# both.
PLUMBING = {
    "pallas_kernels.checks",
    "pallas_kernels.specs",
    "pallas_kernels.derivatives",
    "pallas_kernels.explicit",
    "pallas_kernels.dispatch",
    "pallas_kernels.partition",
    "pallas_kernels.counter",
    "pallas_kernels.pallas_triton",
    "tcfp_jax.paths",
    "pallas_kernels.hopper.registers",
    "pallas_kernels.tiled",
    "pallas_kernels.triton_passes",
    "pallas_kernels.arithmetic",
    "pallas_kernels.hopper.plan",
    "pallas_kernels.hopper.engine",
}


def files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    )


MODULES = {module_of(path): path for path in files(*LIBRARIES)}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    """Return the modules that a file imports, in functions too; an imported submodule
    of a library counts as itself.
    """
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.extend(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            written = "." * node.level + (node.module or "")
            package = ".".join(path.relative_to(ROOT).parts[:-1])
            module = importlib.util.resolve_name(written, package)
            for name in node.names:
                inner = f"{module}.{name.name}"
                found.append(inner if inner in MODULES else module)
    return found


def door(module):
    package, _, rest = module.partition(".")
    return package, rest.split(".")[0]


def test_data_flows_one_way_through_the_doors():
    for module, path in MODULES.items():
        package, own = door(module)
        if not own:
            continue  # the package itself
        assert own in DOORS[package], (
            f"{module} is behind no door; give {own} its place in DOORS"
        )
        allowed = {*DOORS[package][: DOORS[package].index(own) + 1]}
        for name in imports(path):
            if name.split(".")[0] not in LIBRARIES:
                continue
            other_package, other = door(name)
            assert other or path.name == "__main__.py", (
                f"{module} imports the whole of {name}; import what it needs"
            )
            if other_package == package:
                assert other in allowed, f"{module} imports {name}, which comes later"
            else:
                assert (package, other_package) == (
                    "tcfp_jax",
                    "pallas_kernels",
                ), f"{module} imports {name}"


def test_no_circles():
    graph = {
        module: {name for name in imports(path) if name in MODULES}
        for module, path in MODULES.items()
    }
    done = set()
    stack = []

    def visit(module):
        assert module not in stack, " -> ".join([*stack[stack.index(module) :], module])
        if module not in done:
            stack.append(module)
            for name in sorted(graph[module]):
                visit(name)
            done.add(stack.pop())

    for module in graph:
        visit(module)
    assert done == set(MODULES)


def test_the_page_of_backends_lists_every_table():
    tables = {
        "`quantize`, one scale": quantizers.IMPLEMENTATIONS[Tensor],
        "`quantize`, a scale for each row": quantizers.IMPLEMENTATIONS[Row],
        "`quantize`, blocks": quantizers.IMPLEMENTATIONS[Block],
        "`dual_quantize`, one scale": quantizers.DUAL_IMPLEMENTATIONS[Tensor],
        "`dual_quantize`, blocks": quantizers.DUAL_IMPLEMENTATIONS[Block],
        "`quantize_computed`": computed.IMPLEMENTATIONS,
        "`adamw`": adamw.IMPLEMENTATIONS,
        "`matmul`, one scale or rows": products.IMPLEMENTATIONS[Tensor],
        "`matmul`, blocks": products.IMPLEMENTATIONS[Block],
        "`grouped_matmul`": grouped.IMPLEMENTATIONS,
        "`grouped_weight_gradient`": grouped.GRADIENT_IMPLEMENTATIONS,
        "`fp4_matmul`": fp4.IMPLEMENTATIONS,
        "`unpack_fp4`": unpacked.UNPACK_IMPLEMENTATIONS,
        "`ordered_rows`": fp4_mosaic.ROWS_IMPLEMENTATIONS,
        "`quantize_values` to NVFP4": nvfp4_arrays.IMPLEMENTATIONS,
        "`cast`": casting.IMPLEMENTATIONS,
    }
    page = (ROOT / "docs" / "backends.md").read_text().split("## ")[1]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [
        (name, ", ".join(entry.backend for entry in table))
        for name, table in tables.items()
    ]
    listed = [entry for table in tables.values() for entry in table]
    for module in map(importlib.import_module, MODULES):
        for table in vars(module).values():
            for entry in (*table.values(),) if isinstance(table, dict) else (table,):
                if isinstance(entry, tuple) and any(
                    isinstance(one, Implementation) for one in entry
                ):
                    assert all(one in listed for one in entry), (
                        f"{module.__name__} has a table that the page lacks"
                    )


def test_there_are_few_doors():
    top = {door(module)[1] for module in MODULES if module.startswith("tcfp_jax.")}
    assert top == set(DOORS["tcfp_jax"])
    assert len(top) <= 16
    assert {
        door(module)[1] for module in MODULES if module.startswith("pallas_kernels.")
    } == set(DOORS["pallas_kernels"])


@parametrize(
    ("folder", "allowed"),
    [
        # jaxlib has the MLIR dialects that jax's own inline_mgpu is written in.
        # jaxtyping is for type checkers alone.
        ("pallas_kernels", {"jax", "jaxlib", "numpy", "pallas_kernels", "jaxtyping"}),
        (
            "tcfp_jax",
            {
                "jax",
                "numpy",
                "flax",
                "optax",
                "ml_dtypes",
                "pallas_kernels",
                "tcfp_jax",
                "matplotlib",
                "safetensors",
                "jaxtyping",
            },
        ),
        (
            "tcfp_jax/formats",
            {"jax", "numpy", "ml_dtypes", "pallas_kernels", "tcfp_jax", "matplotlib"},
        ),
        (
            "models",
            {
                "jax",
                "numpy",
                "flax",
                "optax",
                "orbax",
                "etils",
                "tqdm",
                "matplotlib",
                "tensorboardX",
                "jinja2",
                "tokenizers",
                "tcfp_jax",
                "pallas_kernels",
                "models",
            },
        ),
    ],
)
def test_packages_know_only_what_they_may(folder, allowed):
    for path in files(folder):
        known = {name.split(".")[0] for name in imports(path)} - set(
            sys.stdlib_module_names
        )
        assert known <= allowed, f"{module_of(path)} imports {known - allowed}"


def test_casts_and_quantizers_are_each_others_oracle():
    for path in files("tcfp_jax/formats"):
        names = {name for name in imports(path) if name.split(".")[0] in LIBRARIES}
        assert not [
            n
            for n in names
            if not n.startswith("tcfp_jax.formats") and n not in PLUMBING
        ], module_of(path)
    for path in files("pallas_kernels"):
        if path.name == "reference.py":
            assert not [name for name in imports(path) if name.endswith(".api")], (
                "a definition needs no choice"
            )


def test_public_names():
    assert set(tcfp_jax.__all__) == PUBLIC
    for name in PUBLIC:
        assert callable(getattr(tcfp_jax, name)), f"a module shadows {name}"
    for name in set(dir(tcfp_jax)) - PUBLIC - {"__version__"}:
        assert getattr(tcfp_jax, name) is sys.modules[f"tcfp_jax.{name}"]
    with refused("no attribute 'quantise'", AttributeError):
        _ = tcfp_jax.quantise


def test_type_checkers_see_the_names_that_load_lazily():
    """`tcfp_jax/__init__.py` lists each name twice: for `__getattr__`, and for tools
    that do not run it.
    """
    block = next(
        node
        for node in ast.parse(MODULES["tcfp_jax"].read_text()).body
        if isinstance(node, ast.If)
    )
    seen = {name.name: node.module for node in block.body for name in node.names}
    assert set(seen) == set(dir(tcfp_jax)) - {"__version__"}
    for name in PUBLIC:
        assert getattr(importlib.import_module(seen[name]), name) is getattr(
            tcfp_jax, name
        )


def test_importing_the_library_loads_little():
    script = (
        "import sys, tcfp_jax\nprint(sum(name.split('.')[0] in ('tcfp_jax',"
        " 'pallas_kernels') for name in sys.modules))\ntcfp_jax.store,"
        " tcfp_jax.value_and_grad, tcfp_jax.matmul, tcfp_jax.error_feedback,"
        " tcfp_jax.formats.mxfp4e2\nassert 'flax' not in sys.modules\nassert"
        " tcfp_jax.linen.TCFPDense and tcfp_jax.conversion.convert_to_tcfp and"
        " tcfp_jax.optim.adamw"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert int(run.stdout) <= LIMITS["modules that `import tcfp_jax` loads"]
    assert stated("modules that `import tcfp_jax` loads") == [int(run.stdout)]


def test_a_module_is_a_module():
    """No name of a package is both a module and something else, so `import a.b as c`
    yields the module.
    """
    for module in MODULES:
        if not module.endswith("__main__"):
            importlib.import_module(module)
            package, _, name = module.rpartition(".")
            assert (
                not package
                or getattr(sys.modules[package], name) is sys.modules[module]
            ), module


def test_public_names_of_formats():
    for name in set(formats.__all__) - {"CATALOG"}:
        assert callable(getattr(formats, name)), f"a module shadows {name}"
    assert not set(formats.__all__) & set(formats.CATALOG)
    with refused("lists the catalog", AttributeError):
        _ = formats.mxfp5


def test_a_submodule_can_be_imported_first():
    """`__init__` of a package imports its files, and they import from each other: each
    must be able to start.
    """
    script = (
        "import tcfp_jax.formats.casting, pallas_kernels.matmul.api\nfrom"
        " tcfp_jax.formats import cast, mxfp4e2"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_files_and_functions_are_short():
    for path in files("tcfp_jax", "pallas_kernels", "models", "benchmarks"):
        lines = len(path.read_text().splitlines())
        assert lines <= LIMITS["lines of a file"], path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                code = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - code[0].lineno + 1 if code else 0
                assert lines <= LIMITS["lines of a function without its docstring"], (
                    f"{node.name} of {path} is long"
                )
                count = len(node.args.args + node.args.kwonlyargs)
                limit = LONG_SIGNATURES.get(
                    node.name, LIMITS["arguments of a function"]
                )
                assert count <= limit, f"{node.name} of {path} takes {count} arguments"


def is_definition(node):
    overload = any(
        ast.unparse(decorator) == "overload"
        for decorator in getattr(node, "decorator_list", ())
    )
    return (
        isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not overload
    )


def is_literal(node):
    return isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(
        node.value or node
    ).startswith("Literal[")


def sizes():
    """Return the counts of ARCHITECTURE's table of sizes, by their rows."""
    trees = [tree_of(path) for path in MODULES.values()]
    libraries = density.density(*LIBRARIES)
    return {
        "tokens of the two libraries": libraries.tokens,
        "tokens of models": density.density("models").tokens,
        "tokens of benchmarks": density.density("benchmarks").tokens,
        "tokens of tests": density.density("tests").tokens,
        "packed places per 1,000 lines of the two libraries": round(
            libraries.packed_per_1000_lines
        ),
        "named lambdas of the two libraries": libraries.lambdas,
        "public definitions": sum(
            is_definition(node) for tree in trees for node in tree.body
        ),
        "named recipes": len(recipes.NAMES),
        "aliases of `Literal`": sum(
            is_literal(node) for tree in trees for node in tree.body
        ),
        "the word `Any`": sum(
            len(re.findall(r"\bAny\b", path.read_text())) for path in MODULES.values()
        ),
    }


def stated(row):
    """Return the numbers of a row of ARCHITECTURE's tables."""
    found = re.search(
        rf"^\| {re.escape(row)} \|(.*)\|$", (ROOT / "ARCHITECTURE.md").read_text(), re.M
    )
    assert found, f"ARCHITECTURE.md has no row {row!r}"
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", found[1])]


def test_the_libraries_stay_small():
    for name, count in sizes().items():
        assert count <= LIMITS[name], (
            f"{count} {name}; at most {LIMITS[name]}. Take something out, or raise it"
            " in LIMITS of tests/test_house.py and in the table of ARCHITECTURE.md"
        )
        # The page rounds lines and words, which change with every commit.
        assert stated(name) == [pytest.approx(count, rel=0.02)], (
            f"write {count} {name} in ARCHITECTURE.md"
        )


@parametrize("package", TOKENS_PER_LINE)
def test_a_line_holds_one_idea(package):
    found = density.density(package).tokens_per_line
    assert found <= TOKENS_PER_LINE[package], f"{package}: {found:.2f} tokens a line"


@parametrize("name", walk.WALKS)
def test_a_call_crosses_few_files(name):
    found = walk.WALKS[name]()
    counts = [len(found.entered), sum(found.calls.values())]
    assert all(
        count <= limit for count, limit in zip(counts, CROSSED[name], strict=True)
    ), f"{name}: {found}"
    assert stated(name) == counts, f"write {found} of {name} in ARCHITECTURE.md"


def test_docstrings_are_there():
    for path in MODULES.values():
        tree = tree_of(path)
        assert ast.get_docstring(tree) or path.name == "__init__.py", (
            f"{path} has no docstring"
        )
        for node in tree.body:
            assert ast.get_docstring(node) if is_definition(node) else True, (
                f"{node.name} has no docstring"
            )


# Their examples compile most, and tests of the same names have the same calls.
SLOW = {
    f"pallas_kernels.{name}"
    for name in (
        "matmul.api",
        "grouped_matmul.api",
        "fp4_matmul.api",
        "moments",
        "numerics",
    )
}
SLOW |= {
    f"tcfp_jax.{name}"
    for name in (
        "products.fp4_api",
        "weights.tcfp12",
        "monitor.updates",
        "optim.inside",
        "inference.choosing",
    )
}


@slow_except(*sorted(MODULES.keys() - SLOW))
@parametrize("path", MODULES.values(), ids=MODULES)
def test_examples_of_docstrings_run(path):
    if "mosaic_gpu" in path.read_text() and jax.__version_info__[:2] < (0, 11):
        pytest.skip("the module needs Mosaic's FP8 products of jax 0.11")
    module = importlib.import_module(module_of(path))
    with jax.numpy_dtype_promotion("standard"):
        assert doctest.testmod(module).failed == 0
