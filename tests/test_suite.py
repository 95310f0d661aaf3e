"""The suite itself: what `-m gpu` selects, and that what a machine was expected to show was shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compile_for_h200 as h200
from tests.conftest import asks_for_gpu

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "expression, asked",
    [("gpu", True), ("gpu and not slow", True), ("not slow and gpu", True), ("not gpu", False), ("not (gpu)", False),
     ("", False), ("optimized", False)],
)  # fmt: skip
def test_the_gpu_is_used_where_it_is_asked_for(expression, asked):
    assert asks_for_gpu(expression) is asked


def test_what_only_a_gpu_can_show_is_collected_on_a_machine_with_one_device():
    """`pytest -m gpu` as README has it: every file of the suite is imported, and the tests of `tests/gpu` are found."""
    environment = {
        **os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu",
        "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    files = {line.split("::")[0] for line in found.stdout.splitlines() if "::" in line}
    assert files == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


@pytest.mark.skipif(not h200.expected(), reason="TCFP_EXPECT_H200_COMPILER=1 says that this run compiles for an H200")
def test_programs_are_compiled_for_an_h200_where_that_was_expected():
    assert h200.missing() is None, f"no program was compiled for an H200: {h200.missing()}"
