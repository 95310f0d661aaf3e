"""The suite itself: `-m gpu` works with one device, and what a machine was expected to show is shown."""

import jax
import pytest

from tests import compile_for_h200 as h200
from tests.conftest import asks_for_gpu, no_meshes


@pytest.mark.parametrize(
    "expression, asked",
    [("gpu", True), ("gpu and not slow", True), ("not slow and gpu", True), ("not gpu", False), ("not (gpu)", False),
     ("", False), ("optimized", False)],
)  # fmt: skip
def test_the_gpu_is_used_where_it_is_asked_for(expression, asked):
    assert asks_for_gpu(expression) is asked


def test_no_file_needs_devices_to_be_collected():
    with no_meshes(), pytest.raises(RuntimeError, match="while tests are collected"):
        jax.make_mesh((2, 4), ("a", "b"))
    assert jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2).size == 8


@pytest.mark.skipif(not h200.expected(), reason="TCFP_EXPECT_H200_COMPILER=1 says that this run compiles for an H200")
def test_programs_are_compiled_for_an_h200_where_that_was_expected():
    assert h200.missing() is None, f"no program was compiled for an H200: {h200.missing()}"
