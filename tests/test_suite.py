"""The suite itself: `-m gpu` works with one device, and a machine runs the tests that
it was expected to run.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests import compile_for_h200 as h200
from tests.conftest import asks_for_gpu, compiled_for_users, mark_slow_cases, no_meshes
from tests.helpers import parametrize, refused, slow, slow_except


@parametrize(
    "expression, asked",
    [
        ("gpu", True),
        ("gpu and not slow", True),
        ("not slow and gpu", True),
        ("not gpu", False),
        ("not (gpu)", False),
        ("not gpu and not slow", False),
        ("slow", False),
        ("", False),
        ("optimized", False),
    ],
)
def test_the_gpu_is_used_where_it_is_asked_for(expression, asked):
    assert asks_for_gpu(expression) is asked


class _Case:
    """A collected case of a test with `slow_except("small")`."""

    def __init__(self, name):
        self.callspec = SimpleNamespace(id=name)
        self.nodeid = f"test_file.py::test_it[{name}]"
        self.marks = [slow_except("small")]
        self.add_marker = self.marks.append

    def get_closest_marker(self, name):
        return next((mark.mark for mark in self.marks if mark.name == name), None)


def test_cases_are_slow_but_for_those_that_are_named():
    cases = [_Case("small"), _Case("large")]
    config = SimpleNamespace(args=["tests"])
    mark_slow_cases(config, cases)
    assert [case.get_closest_marker("slow") is not None for case in cases] == [
        False,
        True,
    ]
    with refused(r"no case \['small'\]", pytest.UsageError):
        mark_slow_cases(config, [_Case("renamed")])
    mark_slow_cases(
        SimpleNamespace(args=["test_file.py::test_it[large]"]), [_Case("large")]
    )


@parametrize(
    "marks, optimized",
    [
        ([], False),
        ([pytest.mark.optimized], True),
        ([pytest.mark.optimized("slow")], False),
        ([pytest.mark.gpu], True),
        ([pytest.mark.optimized("slow"), slow], True),
        ([slow], False),
    ],
)
def test_cases_compile_as_users_do_where_they_are_marked(marks, optimized):
    case = _Case("small")
    case.marks = marks
    assert compiled_for_users(case) is optimized


def test_no_file_needs_devices_to_be_collected():
    with no_meshes(), refused("while tests are collected", RuntimeError):
        jax.make_mesh((2, 4), ("a", "b"))
    assert (
        jax.make_mesh(
            (2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
        ).size
        == 8
    )


@pytest.mark.skipif(
    not h200.expected(),
    reason="TCFP_EXPECT_H200_COMPILER=1 says that this run compiles for an H200",
)
def test_programs_are_compiled_for_an_h200_where_that_was_expected():
    assert h200.missing() is None, (
        f"no program was compiled for an H200: {h200.missing()}"
    )


def test_ci_names_tests_that_exist_and_every_file_that_compiles_for_an_h200():
    root = Path(__file__).parents[1]
    named = re.findall(
        r"\b(tests/[\w/]+\.py)(?:::(\w+))?", (root / ".ci" / "run").read_text()
    )
    assert len(named) > 10
    assert all(
        re.search(rf"(def|class) {name}\b" if name else "", (root / file).read_text())
        for file, name in named
    )
    compiling = {
        path
        for path in (root / "tests").rglob("test_*.py")
        if "compile_for_h200" in path.read_text()
    }
    assert {path.relative_to(root).as_posix() for path in compiling} <= {
        file for file, _ in named
    }
